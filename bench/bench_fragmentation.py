"""How many sequences fit in 40 GiB, and how much of it holds tokens?

Question. A server is full: sequences of all ages, as many as 40 GiB hold. How many are they, and
how much is reserved, resident and used, under each way to allocate?

Prediction. vmkv wastes half a page a sequence, 8 tokens of Llama-3-8B, and half a quantum of 1/64
where it is longer than 2,048: within 1 % of a block table of 16 tokens, which wastes 8 tokens too.
With 40 KiB a token (Llama-3-70B on one of 8 GPUs) a page holds 51 tokens: 18 of a chat's 500 more
than the block table, 3 to 4 % fewer sequences. Padding to the longest of a batch leaves a sixth of
that on log-normal lengths, half on uniform ones; a static cache as long as anything allowed leaves
about as little, or less. A kernel that reads past the end (FlashAttention-3: a tile of 176 tokens)
costs vmkv a third of the short sequences.

Verdict. As predicted, except that reading past the end costs chats a quarter of the sequences.

Method. Bytes, no GPU. A trace is a seeded list of (prompt, output) lengths; a sequence is met at a
uniformly drawn moment of its decoding. Sequences are taken from the trace in order for as long as
the budget holds them. Median and quartiles over seeds; the other columns are those of the median
seed. vmkv's rows are those of a real KVCache on the host backend, with pages and tokens 32 times
smaller than a GPU's, in the same proportion.

Rivals. A block table of 16 tokens (rivals.py). DynamicCache: one tensor for the batch, as long as
its longest sequence; with an allocator that wastes nothing, where growing needs one layer's K
twice, and with twice the memory, about what `cat` in place of growth needs in torch's allocator
(bench_generate measures 1.9 to 3.9 times). StaticCache: rows as long as the trace allows.

Not measured. Time; parked rows, which are given up first when memory is short and so do not count;
preemption when running sequences outgrow the budget, which all of them need; prefix sharing.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from harness import Bench, Figure, Row, quartiles
from models import CacheShape, open_cache
from rivals import block_table_bytes, padded_bytes

from vmkv import ExtentPool, HostBackend
from vmkv.attention import AttentionSpec, get
from vmkv.units import GiB, KiB, MiB

SEQUENCES_MAX = 1 << 12


@dataclass(frozen=True)
class Trace:
    """Where lengths come from.

    Attributes:
        name: How results name it.
        max_tokens: Prompt and output together, at most.
        draw: (prompt, output) of the next request.
    """

    name: str
    max_tokens: int
    draw: Callable[[random.Random], tuple[int, int]]

    def snapshot(self, seed: int, num_sequences: int) -> list[Snapshot]:
        """Sequences at random moments of their decoding."""
        rng = random.Random(f"{self.name} {seed}")
        taken = []
        for _ in range(num_sequences):
            prompt, output = self.draw(rng)
            prompt = min(max(1, prompt), self.max_tokens - 1)
            output = min(max(1, output), self.max_tokens - prompt)
            taken.append(Snapshot(prompt, prompt + rng.randint(1, output)))
        return taken


@dataclass(frozen=True)
class Snapshot:
    """A sequence that began with a prompt and holds more by now."""

    prompt_tokens: int
    num_tokens: int


def lognormal(rng: random.Random, mean: float, sigma: float) -> int:
    return round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))


class Rows:
    """A real cache, to measure the bytes of a sequence.

    Args:
        shape: The scaled model.
        max_tokens: Longest sequence.
        overread_tokens: Tokens that a kernel may read past the end.
    """

    def __init__(self, shape: CacheShape, max_tokens: int, overread_tokens: int = 0):
        pool = ExtentPool(HostBackend(64 * KiB), 2 * max_tokens * shape.token_bytes + MiB)
        pool.largest_class = 5  # As with pages of 2 MiB.
        self.cache = open_cache(pool, shape, max_tokens=max_tokens, max_sequences=1)
        self.cache.overread_tokens = overread_tokens
        self._token_bytes = shape.token_bytes
        self._held: dict[Snapshot, int] = {}

    def held_bytes(self, drawn: Snapshot) -> int:
        """Bytes of a row after a prompt in one piece and single tokens, unscaled."""
        if drawn not in self._held:
            sequence = self.cache.open()
            sequence.append(drawn.prompt_tokens)
            while sequence.num_tokens < drawn.num_tokens:
                # Tokens that fit into mapped memory change nothing, so they are appended together.
                resident_bytes = self.cache.stats().resident_bytes
                mapped = resident_bytes // self._token_bytes - self.cache.overread_tokens
                end = min(drawn.num_tokens, max(mapped, sequence.num_tokens + 1))
                sequence.append(end - sequence.num_tokens)
            self._held[drawn] = SCALE * self.cache.stats().resident_bytes
            sequence.close()
            self.cache.trim()
        return self._held[drawn]


SHAPES = (CacheShape("Llama-3-8B", 1, 1, 1024), CacheShape("Llama-3-70B, TP 8", 1, 1, 320))


#: Pages and tokens are 32 times smaller than a GPU's, in the same proportion.
SCALE = 32


TRACES = (
    Trace("chat", 8192, lambda rng: (lognormal(rng, 400, 1.0), lognormal(rng, 300, 0.8))),
    Trace(
        "long documents", 65536, lambda rng: (rng.randint(8192, 60000), lognormal(rng, 400, 0.6))
    ),
    Trace("uniform", 4096, lambda rng: (rng.randint(128, 3072), rng.randint(16, 1024))),
)


#: Layers and head size that the scaled shapes stand for.
REAL = {"Llama-3-8B": (32, 128), "Llama-3-70B, TP 8": (80, 128)}
#: Sequences relative to a block table, at least.
PREDICTED = {"Llama-3-8B": 0.99, "Llama-3-70B, TP 8": 0.96}


# ---- vmkv, measured ---------------------------------------------------------------------------


# ---- allocators -------------------------------------------------------------------------------

Bytes = tuple[int, int]  # reserved, resident


def allocators(shape: CacheShape, trace: Trace) -> dict[str, Callable[[list], Bytes]]:
    """Each allocator's (reserved, resident) bytes for a list of sequences."""
    token_bytes, layers, head_dim = SCALE * shape.token_bytes, *REAL[shape.name]
    reserved_bytes = trace.max_tokens * token_bytes

    def vmkv(overread_tokens: int) -> Callable[[list[Snapshot]], Bytes]:
        rows = Rows(shape, trace.max_tokens, overread_tokens)
        return lambda some: (len(some) * reserved_bytes, sum(map(rows.held_bytes, some)))

    def plain(held: Callable[[list[int], int], float]) -> Callable[[list[Snapshot]], Bytes]:
        def both(sequences: list[Snapshot]) -> Bytes:
            num_bytes = int(held([each.num_tokens for each in sequences], token_bytes))
            return num_bytes, num_bytes

        return both

    spec = AttentionSpec("cuda", torch.bfloat16, 1, 1, head_dim, head_dim)
    one_tensor = 1 + 1 / (2 * layers)
    return {
        "vmkv": vmkv(0),
        "vmkv, FA3's over-read": vmkv(get("flash3").overread_tokens(spec)),
        "block table, 16": plain(block_table_bytes),
        "DynamicCache, padded": plain(lambda *of: one_tensor * padded_bytes(*of)),
        "DynamicCache, padded, twice": plain(lambda *of: 2 * padded_bytes(*of)),
        "StaticCache": plain(lambda lengths, size: len(lengths) * trace.max_tokens * size),
    }


def how_many_fit(
    sequences: Sequence[Snapshot], held_by: Callable[[list], Bytes], budget_bytes: int
) -> int:
    """The number of leading sequences that fit the budget; memory only rises along the list."""

    def fits(count: int) -> bool:
        return held_by(sequences[:count])[1] <= budget_bytes

    high = 1
    while high < len(sequences) and fits(high):
        high *= 2
    low, high = high // 2, min(high, len(sequences))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def run(shape: CacheShape, trace: Trace, budget_bytes: int, num_seeds: int) -> list[Row]:
    """One row for each allocator."""
    token_bytes = SCALE * shape.token_bytes
    drawn = [trace.snapshot(seed, SEQUENCES_MAX) for seed in range(num_seeds)]
    rows = []
    for name, held_by in allocators(shape, trace).items():
        found = []
        for seed, sequences in enumerate(drawn):
            count = how_many_fit(sequences, held_by, budget_bytes)
            found.append((count, seed, sequences[:count]))
        _, _, median = sorted(found, key=lambda each: each[:2])[len(found) // 2]
        used_bytes = sum(each.num_tokens for each in median) * token_bytes
        reserved_bytes, resident_bytes = held_by(median)
        row: Row = {"shape": shape.name, "trace": trace.name, "allocator": name}
        row |= quartiles("num_sequences", [count for count, _, _ in found])
        row["mean_tokens"] = round(used_bytes / token_bytes / len(median)) if median else None
        row |= {"reserved_bytes": reserved_bytes, "resident_bytes": resident_bytes}
        row |= {"used_bytes": used_bytes}
        rows.append(row | {"waste_share": resident_bytes / used_bytes - 1 if median else None})
    return rows


def promised(rows: Sequence[Row]) -> list[Figure]:
    """Sequences relative to a block table and a padded batch, in the worst trace of each shape."""
    count = {(row["shape"], row["trace"], row["allocator"]): row["num_sequences"] for row in rows}
    figures = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        traces = list(dict.fromkeys(row["trace"] for row in rows))
        for rival, slug, bound in (
            ("block table, 16", "blocks", PREDICTED[shape]),
            ("DynamicCache, padded", "padded", None),
        ):
            ratios = {
                trace: count[shape, trace, "vmkv"] / count[shape, trace, rival] for trace in traces
            }
            worst = min(ratios, key=lambda trace: ratios[trace])
            name = f"capacity_{slug}_{shape.lower().replace(', ', '_').replace(' ', '')}"
            what = f"sequences in 40 GiB relative to {rival}, worst trace ({shape}, {worst}: "
            what += f"{count[shape, worst, 'vmkv']:,.0f})"
            said = f"{count[shape, worst, rival]:,.0f} sequences"
            got = ratios[worst]
            figures.append(Figure(name, what, got, "×", at_least=bound, rival=said))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Count, show, write."""
    bench = Bench("fragmentation", __doc__)
    smoke = bench.parse(argv).smoke
    budget_bytes, num_seeds = (8 * GiB, 1) if smoke else (40 * GiB, 15)
    rows = []
    for shape in SHAPES:
        for trace in TRACES:
            rows += run(shape, trace, budget_bytes, num_seeds)
    constants = {"budget_bytes": budget_bytes, "seeds": num_seeds, "scale": SCALE}
    return bench.finish(rows, promised(rows), constants)


if __name__ == "__main__":
    sys.exit(main())
