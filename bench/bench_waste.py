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
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from common import write_result
from report import Figure, Row, bench_parser, make_record, on_gpu, print_figures, print_rows
from rivals import block_table_bytes, layer_page_bytes, padded_bytes

from vmkv import HostBackend, KVCache, open_backend
from vmkv.backend import Backend
from vmkv.memory import ExtentPool
from vmkv.units import GiB, KiB, MiB

NUM_SEQUENCES = 256
MEAN_TOKENS = 1024
SIGMA = 0.8
PROMPT_SHARE = (0.1, 0.9)
NUM_CONCURRENT = 64  # with arrivals
SEED = 0
PAGE_BYTES = 2 * MiB
DTYPE = torch.bfloat16
HOST_BYTES_MAX = 2 * GiB  # of a machine without a GPU
GPU_SHARE_MAX = 0.9  # of the memory that is free


@dataclass(frozen=True)
class Shape:
    """A model's cache: `window_layers` of its layers see only `window_tokens`."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    window_layers: int = 0
    window_tokens: int | None = None

    def token_bytes(self, num_layers: int) -> int:
        """Bytes of one token in so many layers."""
        return num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE.itemsize

    def parts(self) -> list[tuple[int, int | None]]:
        """(layers, window) of each kind of layer."""
        full = [(self.num_layers - self.window_layers, None)]
        return full + ([(self.window_layers, self.window_tokens)] if self.window_layers else [])


SHAPES = (
    Shape("Llama-3-8B", 32, 8, 128),
    Shape("Llama-3-70B, TP 8", 80, 1, 128),
    Shape("Qwen2.5-7B", 28, 4, 128),
    Shape("Gemma-2-9B", 42, 8, 256, window_layers=21, window_tokens=4096),
)
SMOKE_SHAPES = (Shape("smoke", 2, 2, 16), Shape("smoke, windows", 4, 1, 16, 2, 24))


@dataclass(frozen=True)
class Request:
    """A sequence to be: how it begins and how it ends."""

    prompt_tokens: int
    final_tokens: int


def draw_requests(num_sequences: int, mean_tokens: int) -> list[Request]:
    """Seeded; a longer list begins with the shorter one."""
    rng = random.Random(SEED)
    requests = []
    for _ in range(num_sequences):
        drawn = rng.lognormvariate(math.log(mean_tokens) - SIGMA**2 / 2, SIGMA)
        final_tokens = max(2, round(drawn))
        prompt_tokens = max(1, round(final_tokens * rng.uniform(*PROMPT_SHARE)))
        requests.append(Request(prompt_tokens, final_tokens))
    return requests


def fitting(requests: Sequence[Request], shape: Shape, num_bytes: int) -> list[Request]:
    """As many of the requests as fit at their final lengths, with some room for quanta."""
    taken: list[Request] = []
    for request in requests:
        num_bytes -= int(1.1 * request.final_tokens * shape.token_bytes(shape.num_layers))
        if num_bytes < 0:
            break
        taken.append(request)
    return taken


def rival_bytes(shape: Shape, page_bytes: int, lengths: Sequence[int], batch: int) -> Row:
    """What the rivals would hold for sequences of these lengths, layer kind by layer kind."""
    held = dict.fromkeys(("block table, 16", "page a layer, K and V apart", "padded batch"), 0)
    for num_layers, window in shape.parts():
        token_bytes = shape.token_bytes(num_layers)
        kept = [length if window is None else min(length, window) for length in lengths]
        held["block table, 16"] += block_table_bytes(kept, token_bytes)
        held["page a layer, K and V apart"] += layer_page_bytes(
            kept, token_bytes, page_bytes, 2 * num_layers
        )
        held["padded batch"] += padded_bytes([max(kept)] * batch, token_bytes)
    return held


def run(
    backend: Backend, shape: Shape, requests: Sequence[Request], page_bytes: int, concurrent: int
) -> list[Row]:
    """Decode `requests`, `concurrent` at a time, to the end; one row per allocator.

    Closes the backend.
    """
    pool = ExtentPool(backend, max(page_bytes, backend.free_memory_bytes()))
    cache = KVCache(
        pool,
        max_tokens=max(request.final_tokens for request in requests),
        max_sequences=concurrent,
        layers_per_group=shape.num_layers,
    )
    first = 0
    for num_layers, window in shape.parts():
        cache.add_layers(
            range(first, first + num_layers),
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=DTYPE,
            window_tokens=window,
        )
        first += num_layers

    waiting = deque(requests)
    live: dict = {}
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
    num_mappings = backend.calls["mem_map"]
    cache.close()
    pool.close()

    load = "all together" if concurrent >= len(requests) else "arrivals"
    rows = []
    for name, shares in wastes.items():
        q1, _, q3 = statistics.quantiles(shares, n=4, method="inclusive")
        row = {
            "shape": shape.name,
            "load": load,
            "allocator": name,
            "waste_share": statistics.fmean(shares),
            "waste_share_q1": q1,
            "waste_share_q3": q3,
            "sequences": len(requests),
            "at_a_time": min(concurrent, len(requests)),
            "mean_tokens": round(statistics.fmean(each.final_tokens for each in requests)),
            "steps": num_steps,
        }
        if name == "vmkv":
            row["mappings"] = num_mappings
            row["host_us_per_token"] = 1e6 * grow_seconds / num_decoded
        rows.append(row)
    return rows


def memory_for_runs(*, on_gpu: bool) -> int:
    """How much the sequences may hold."""
    if not on_gpu:
        return HOST_BYTES_MAX
    torch.cuda.empty_cache()
    return int(GPU_SHARE_MAX * torch.cuda.mem_get_info()[0])


def promised(rows: Sequence[Row]) -> list[Figure]:
    """The figure of the issue, and the unfavourable one."""
    shape = rows[0]["shape"]
    shares = {
        (row["load"], row["allocator"]): row["waste_share"] for row in rows if row["shape"] == shape
    }
    together, arrivals = (f"{shape}, {load}" for load in ("all together", "with arrivals"))
    return [
        Figure(
            "waste_share",
            f"resident − used of live sequences, of used ({together})",
            shares["all together", "vmkv"],
            "%",
            at_most=on_gpu(0.04),
            rival=f"{100 * shares['all together', 'block table, 16']:.2f} % (blocks of 16 tokens)",
        ),
        Figure(
            "steady_waste_share",
            f"the same, where sequences adopt ended ones' rows and nothing is short ({arrivals})",
            shares["arrivals", "vmkv"],
            "%",
            rival=f"{100 * shares['arrivals', 'block table, 16']:.2f} % (blocks of 16 tokens)",
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    options = bench_parser(__doc__).parse_args(argv)
    shapes, num_sequences, mean_tokens, concurrent, page_bytes = (
        (SMOKE_SHAPES, 12, 40, 4, 4 * KiB)
        if options.smoke
        else (SHAPES, NUM_SEQUENCES, MEAN_TOKENS, NUM_CONCURRENT, PAGE_BYTES)
    )
    drawn = draw_requests(num_sequences, mean_tokens)
    rows = []
    use_gpu = torch.cuda.is_available() and not options.smoke
    for shape in shapes:
        requests = fitting(drawn, shape, memory_for_runs(on_gpu=use_gpu))
        for at_a_time in (len(requests), max(1, min(concurrent, len(requests) // 4))):
            backend = open_backend("cuda:0") if use_gpu else HostBackend(page_bytes)
            rows += run(backend, shape, requests, page_bytes, at_a_time)
    figures = promised(rows)
    print_rows(rows)
    print_figures(figures)
    if options.json is not None or not options.smoke:
        constants = {"seed": SEED, "sigma": SIGMA, "prompt_share": PROMPT_SHARE}
        record = make_record(__doc__, rows, figures, constants | {"page_bytes": page_bytes})
        print("wrote", write_result("waste", record, options.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
