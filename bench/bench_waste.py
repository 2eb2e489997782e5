"""How much memory does a decoding batch hold that no token needs?

Question. Over the life of a batch, how large is resident − used of its live sequences, when all
begin together and decode to their ends, and when new ones keep arriving and adopt the rows of
those that ended?

Prediction. A page of 2 MiB holds 16 tokens of Llama-3-8B (128 KiB each), so half a page is wasted
at a sequence's end: 8 of about 1,100 tokens, 0.7 %. Rows of 128 pages (2,048 tokens) and more grow
by 1/64, and waste half of that: 0.8 %. Together about 1.2 %, at most 4 %. Smaller token rows waste
more: 26 of 1,100 tokens, 2.4 %, for Llama-3-70B on one of 8 GPUs (40 KiB). With arrivals the
number is bad: an adopted row keeps what its last sequence mapped, so until the newcomer has grown
as long, it holds more than it needs: some 30 to 60 %. Memory under no pressure is not given back.

Method. 256 sequences of log-normal final length (mean 1,024, sigma 0.8, seeded), a uniformly drawn
tenth to nine tenths of it the prompt. All are opened and appended in one transaction each, then
decode in lockstep; one that has reached its length is closed. `waste_share` is the mean over steps
of (resident − parked − used) / used. "Arrivals": 64 at a time, the next is opened when one ends.
Nothing is written; the physical memory is real. Where the device is too small for a model, fewer
sequences are taken, and the row says how many.

Rivals. On the same lengths at the same steps, by arithmetic: a block table of 16 tokens; pages of
2 MiB that belong to one layer's K or V (vAttention on the stock driver); one padded tensor for the
batch, which also never gets smaller (DynamicCache).

Not measured. What a cat-based cache adds while it copies and fragments (bench_generate); capacity
(bench_fragmentation); eviction under pressure, where parked rows and unneeded tails are given up
first.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness import HAS_GPU, Bench, Figure, Row, on_gpu, quartiles
from models import (
    DTYPE,
    LLAMA_3_8B,
    LLAMA_3_70B_TP8,
    SEED,
    CacheShape,
    close_cache,
    free_device_bytes,
    open_pool,
)
from rivals import block_table_bytes, layer_page_bytes, padded_bytes

from vmkv import KVCache
from vmkv.units import GiB, KiB, MiB

NUM_SEQUENCES = 256
MEAN_TOKENS = 1024
SIGMA = 0.8
PROMPT_SHARE = (0.1, 0.9)
NUM_CONCURRENT = 64  # with arrivals


@dataclass(frozen=True)
class Shape:
    """A model's cache.

    Attributes:
        cache: All of its layers.
        window_layers: Of them, layers that see only `window_tokens`.
        window_tokens: The window.
    """

    cache: CacheShape
    window_layers: int = 0
    window_tokens: int | None = None

    def parts(self) -> list[tuple[CacheShape, int | None]]:
        """Each kind of layer, and its window."""
        full = replace(self.cache, num_layers=self.cache.num_layers - self.window_layers)
        windowed = (replace(self.cache, num_layers=self.window_layers), self.window_tokens)
        return [(full, None), windowed] if self.window_layers else [(full, None)]


SHAPES = (
    Shape(LLAMA_3_8B),
    Shape(LLAMA_3_70B_TP8),
    Shape(CacheShape("Qwen2.5-7B", 28, 4, 128)),
    Shape(CacheShape("Gemma-2-9B", 42, 8, 256), 21, 4096),
)
SMOKE = (
    Shape(CacheShape("smoke", 2, 2, 16)),
    Shape(CacheShape("smoke, windows", 4, 1, 16), 2, 24),
)


@dataclass(frozen=True)
class Request:
    """A sequence: tokens of its prompt, and at its end."""

    prompt_tokens: int
    final_tokens: int


def draw_requests(num_sequences: int, mean_tokens: int) -> list[Request]:
    """Seeded requests; a longer list begins with the shorter one."""
    rng = random.Random(SEED)
    requests = []
    for _ in range(num_sequences):
        drawn = rng.lognormvariate(math.log(mean_tokens) - SIGMA**2 / 2, SIGMA)
        final_tokens = max(2, round(drawn))
        prompt_tokens = max(1, round(final_tokens * rng.uniform(*PROMPT_SHARE)))
        requests.append(Request(prompt_tokens, final_tokens))
    return requests


def that_fit(requests: Sequence[Request], shape: Shape, *, smoke: bool) -> list[Request]:
    """As many of the requests as the memory holds at their final lengths."""
    num_bytes = 2 * GiB if smoke or not HAS_GPU else int(0.9 * free_device_bytes())
    taken: list[Request] = []
    for request in requests:
        num_bytes -= int(1.1 * request.final_tokens * shape.cache.token_bytes)
        if num_bytes < 0:
            break
        taken.append(request)
    return taken


def rival_bytes(shape: Shape, page_bytes: int, lengths: Sequence[int], batch: int) -> Row:
    """What the rivals would hold for sequences of these lengths, layer kind by layer kind."""
    held: Counter[str] = Counter()
    for part, window in shape.parts():
        kept = [length if window is None else min(length, window) for length in lengths]
        held["block table, 16"] += block_table_bytes(kept, part.token_bytes)
        parts = 2 * part.num_layers
        pages_bytes = layer_page_bytes(kept, part.token_bytes, page_bytes, parts)
        held["page a layer, K and V apart"] += pages_bytes
        held["padded batch"] += padded_bytes([max(kept)] * batch, part.token_bytes)
    return dict(held)


def run(
    shape: Shape, requests: Sequence[Request], page_bytes: int, concurrent: int, *, smoke: bool
) -> list[Row]:
    """Decode `requests`, `concurrent` at a time, to the end; one row per allocator."""
    pool = open_pool(None, smoke=smoke, page_bytes=page_bytes)
    cache = KVCache(
        pool,
        max_tokens=max(request.final_tokens for request in requests),
        max_sequences=concurrent,
        layers_per_group=shape.cache.num_layers,
    )
    first = 0
    for part, window in shape.parts():
        layers, heads = range(first, first + part.num_layers), part.num_kv_heads
        options = {"head_dim": part.head_dim, "dtype": DTYPE, "window_tokens": window}
        cache.add_layers(layers, num_kv_heads=heads, **options)
        first += part.num_layers

    waiting, live = deque(requests), {}
    wastes: dict[str, list[float]] = {}
    grow_seconds = 0.0
    num_steps = num_decoded = 0
    while waiting or live:
        while waiting and len(live) < concurrent:
            request = waiting.popleft()
            sequence = cache.open(request.prompt_tokens)
            sequence.append(request.prompt_tokens)
            live[sequence] = request
        start = time.perf_counter()
        cache.grow([(sequence, sequence.num_tokens + 1) for sequence in live])
        grow_seconds += time.perf_counter() - start
        stats = cache.stats()
        lengths = [sequence.num_tokens for sequence in live]
        resident = {"vmkv": stats.resident_bytes - stats.parked_bytes}
        resident |= rival_bytes(shape, page_bytes, lengths, concurrent)
        for name, num_bytes in resident.items():
            wastes.setdefault(name, []).append(num_bytes / stats.used_bytes - 1)
        num_steps += 1
        num_decoded += len(live)
        for sequence in [each for each in live if each.num_tokens >= live[each].final_tokens]:
            sequence.close()
            del live[sequence]
    num_mappings = pool.backend.calls["mem_map"]
    close_cache(cache)

    what = {
        "sequences": len(requests),
        "at_a_time": min(concurrent, len(requests)),
        "mean_tokens": round(statistics.fmean(each.final_tokens for each in requests)),
        "steps": num_steps,
    }
    load = "all together" if concurrent >= len(requests) else "arrivals"
    rows = []
    for name, shares in wastes.items():
        row = {"shape": shape.cache.name, "load": load, "allocator": name}
        row |= {**quartiles("waste_share", shares), "waste_share": statistics.fmean(shares), **what}
        if name == "vmkv":
            row["mappings"] = num_mappings
            row["host_us_per_token"] = 1e6 * grow_seconds / num_decoded
        rows.append(row)
    return rows


def promised(rows: Sequence[Row]) -> list[Figure]:
    """Waste of a batch that begins together, and of one with arrivals."""
    shape = rows[0]["shape"]
    shares = {
        (row["load"], row["allocator"]): row["waste_share"] for row in rows if row["shape"] == shape
    }
    what = f"resident − used of live sequences, of used ({shape}, all together)"
    steady = "the same, where sequences adopt ended ones' rows and nothing is short "
    steady += f"({shape}, with arrivals)"
    rivals = {
        load: f"{100 * shares[load, 'block table, 16']:.2f} % (blocks of 16 tokens)"
        for load in ("all together", "arrivals")
    }
    got, arrivals = shares["all together", "vmkv"], shares["arrivals", "vmkv"]
    bound, rival = on_gpu(0.04), rivals["all together"]
    return [
        Figure("waste_share", what, got, "%", bound, rival=rival),
        Figure("steady_waste_share", steady, arrivals, "%", rival=rivals["arrivals"]),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("waste", __doc__)
    smoke = bench.parse(argv).smoke
    shapes, num_sequences, mean_tokens, concurrent, page_bytes = (
        (SMOKE, 12, 40, 4, 4 * KiB)
        if smoke
        else (SHAPES, NUM_SEQUENCES, MEAN_TOKENS, NUM_CONCURRENT, 2 * MiB)
    )
    drawn = draw_requests(num_sequences, mean_tokens)
    rows = []
    for shape in shapes:
        requests = that_fit(drawn, shape, smoke=smoke)
        for at_a_time in (len(requests), max(1, min(concurrent, len(requests) // 4))):
            rows += run(shape, requests, page_bytes, at_a_time, smoke=smoke)
    constants = {"seed": SEED, "sigma": SIGMA, "prompt_share": PROMPT_SHARE}
    return bench.finish(rows, promised(rows), constants | {"page_bytes": page_bytes})


if __name__ == "__main__":
    sys.exit(main())
