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
seed. vmkv's rows are simulated with its own geometry and growth functions, and before that the
simulation is held against a real KVCache on the host backend, page for page.

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
from common import spread, write_result
from report import Figure, Row, bench_parser, make_record, print_figures, print_rows
from rivals import block_table_bytes, padded_bytes

from vmkv import HostBackend, KVCache
from vmkv.attention import get
from vmkv.cache import Geometry, LayerShape
from vmkv.cache.growth import growth_quantum_class, pages_to_map
from vmkv.memory import ExtentPool
from vmkv.units import GiB, KiB, MiB

BUDGET_BYTES = 40 * GiB
NUM_SEEDS = 15
PAGE_BYTES = 2 * MiB
LARGEST_CLASS = 5  # What ExtentPool takes with pages of 2 MiB.
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


TRACES = (
    Trace("chat", 8192, lambda rng: (lognormal(rng, 400, 1.0), lognormal(rng, 300, 0.8))),
    Trace(
        "long documents", 65536, lambda rng: (rng.randint(8192, 60000), lognormal(rng, 400, 0.6))
    ),
    Trace("uniform", 4096, lambda rng: (rng.randint(128, 3072), rng.randint(16, 1024))),
)


@dataclass(frozen=True)
class Shape:
    """A model's cache."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def geometry(self, page_bytes: int, max_tokens: int, num_rows: int) -> Geometry:
        """The layout of all layers in one token row."""
        heads, dim = self.num_kv_heads, self.head_dim
        layer = LayerShape(heads, dim, heads, dim, torch.bfloat16.itemsize)
        return Geometry(self.num_layers, layer, page_bytes, max_tokens, num_rows)


SHAPES = (Shape("Llama-3-8B", 32, 8, 128), Shape("Llama-3-70B, TP 8", 80, 1, 128))
#: Sequences relative to a block table, at least.
PREDICTED = {"Llama-3-8B": 0.99, "Llama-3-70B, TP 8": 0.96}


# ---- vmkv, simulated --------------------------------------------------------------------------


def vmkv_pages(
    geometry: Geometry, largest_class: int, sequence: Snapshot, overread_tokens: int = 0
) -> int:
    """Pages that a row holds after its prompt came at once and the rest token by token."""
    end_page = 0
    num_tokens = sequence.prompt_tokens
    while num_tokens <= sequence.num_tokens:
        resident_until = min(num_tokens + overread_tokens, geometry.row_tokens)
        end_page += pages_to_map(
            end_page,
            geometry.pages_for(resident_until),
            geometry.row_pages,
            growth_quantum_class(end_page, largest_class),
        )
        # The next token that does not fit into what is mapped.
        fitting = end_page * geometry.page_bytes // geometry.token_bytes - overread_tokens
        if end_page == geometry.row_pages:
            break
        num_tokens = fitting + 1
    return end_page


def check_simulation() -> int:
    """Hold the simulation against a real cache, page for page; how many states were compared.

    Raises:
        AssertionError: They differ, so the simulation's numbers mean nothing.
    """
    compared = 0
    shape = Shape("small", 2, 1, 20)
    for trace in TRACES:
        for overread_tokens in (0, 48):
            pool = ExtentPool(HostBackend(4 * KiB), 256 * MiB)
            with KVCache(
                pool, max_tokens=3000, max_sequences=8, layers_per_group=shape.num_layers
            ) as cache:
                cache.overread_tokens = overread_tokens
                (group,) = cache.add_layers(
                    range(shape.num_layers), num_kv_heads=1, head_dim=20, dtype=torch.bfloat16
                )
                for drawn in trace.snapshot(seed=1, num_sequences=8):
                    prompt = 1 + drawn.prompt_tokens % 2000
                    sequence = cache.open()
                    sequence.append(prompt)
                    for _ in range(drawn.num_tokens % 900):
                        expected = vmkv_pages(
                            group.geometry,
                            group.largest_class,
                            Snapshot(prompt, sequence.num_tokens),
                            overread_tokens,
                        )
                        assert group.table.rows[sequence.row].num_pages == expected
                        compared += 1
                        sequence.append(1)
            pool.close()
    return compared


# ---- allocators -------------------------------------------------------------------------------

Bytes = tuple[int, int]  # reserved, resident


def allocators(shape: Shape, trace: Trace, page_bytes: int) -> dict[str, Callable[[list], Bytes]]:
    """Each allocator's (reserved, resident) bytes for a list of sequences."""
    row = shape.geometry(page_bytes, trace.max_tokens, 1)
    token_bytes = row.token_bytes
    seen: dict[tuple[Snapshot, int], int] = {}

    def vmkv(sequences: list[Snapshot], overread_tokens: int = 0) -> Bytes:
        for sequence in sequences:
            if (sequence, overread_tokens) not in seen:
                seen[sequence, overread_tokens] = vmkv_pages(
                    row, LARGEST_CLASS, sequence, overread_tokens
                )
        pages = sum(seen[sequence, overread_tokens] for sequence in sequences)
        return len(sequences) * row.row_bytes, pages * page_bytes

    def same(num_bytes: float) -> Bytes:
        return int(num_bytes), int(num_bytes)

    def lengths(sequences: list[Snapshot]) -> list[int]:
        return [sequence.num_tokens for sequence in sequences]

    overread_tokens = get("flash3").overread_tokens(shape.head_dim)
    one_tensor = 1 + 1 / (2 * shape.num_layers)
    return {
        "vmkv": vmkv,
        "vmkv, FA3's over-read": lambda sequences: vmkv(sequences, overread_tokens),
        "block table, 16": lambda sequences: same(
            block_table_bytes(lengths(sequences), token_bytes)
        ),
        "DynamicCache, padded": lambda sequences: same(
            one_tensor * padded_bytes(lengths(sequences), token_bytes)
        ),
        "DynamicCache, padded, twice": lambda sequences: same(
            2 * padded_bytes(lengths(sequences), token_bytes)
        ),
        "StaticCache": lambda sequences: same(len(sequences) * trace.max_tokens * token_bytes),
    }


def how_many_fit(
    sequences: Sequence[Snapshot], held_by: Callable[[list], Bytes], budget_bytes: int
) -> int:
    """The longest beginning of the list that the budget holds; memory only rises along it."""

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


def run(shape: Shape, trace: Trace, budget_bytes: int, num_seeds: int) -> list[Row]:
    """One row for each allocator."""
    token_bytes = shape.geometry(PAGE_BYTES, trace.max_tokens, 1).token_bytes
    drawn = [trace.snapshot(seed, SEQUENCES_MAX) for seed in range(num_seeds)]
    rows = []
    for name, held_by in allocators(shape, trace, PAGE_BYTES).items():
        found = []
        for seed, sequences in enumerate(drawn):
            count = how_many_fit(sequences, held_by, budget_bytes)
            found.append((count, seed, sequences[:count]))
        counts = spread([count for count, _, _ in found])
        _, _, median = sorted(found, key=lambda each: each[:2])[len(found) // 2]
        used_bytes = sum(each.num_tokens for each in median) * token_bytes
        reserved_bytes, resident_bytes = held_by(median)
        rows.append(
            {
                "shape": shape.name,
                "trace": trace.name,
                "allocator": name,
                "num_sequences": counts["median"],
                "num_sequences_q1": counts["q1"],
                "num_sequences_q3": counts["q3"],
                "mean_tokens": round(used_bytes / token_bytes / len(median)) if median else None,
                "reserved_bytes": reserved_bytes,
                "resident_bytes": resident_bytes,
                "used_bytes": used_bytes,
                "waste_share": resident_bytes / used_bytes - 1 if median else None,
            }
        )
    return rows


def promised(rows: Sequence[Row]) -> list[Figure]:
    """Ours against the block table and the padded batch, in the worst trace of each shape."""
    count = {(row["shape"], row["trace"], row["allocator"]): row["num_sequences"] for row in rows}
    figures = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        traces = list(dict.fromkeys(row["trace"] for row in rows))
        for rival, slug, at_least in (
            ("block table, 16", "blocks", PREDICTED[shape]),
            ("DynamicCache, padded", "padded", None),
        ):
            ratios = {
                trace: count[shape, trace, "vmkv"] / count[shape, trace, rival] for trace in traces
            }
            worst = min(ratios, key=lambda trace: ratios[trace])
            figures.append(
                Figure(
                    f"capacity_{slug}_{shape.lower().replace(', ', '_').replace(' ', '')}",
                    f"sequences in 40 GiB relative to {rival}, worst trace ({shape}, {worst}: "
                    f"{count[shape, worst, 'vmkv']:,.0f})",
                    ratios[worst],
                    "×",
                    at_least=at_least,
                    rival=f"{count[shape, worst, rival]:,.0f} sequences",
                )
            )
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Check the simulation, count, show, write."""
    options = bench_parser(__doc__).parse_args(argv)
    compared = check_simulation()
    print(f"the simulation agrees with a real KVCache in {compared:,} states")
    budget_bytes, num_seeds = (8 * GiB, 2) if options.smoke else (BUDGET_BYTES, NUM_SEEDS)
    rows = []
    for shape in SHAPES:
        for trace in TRACES:
            rows += run(shape, trace, budget_bytes, num_seeds)
    figures = promised(rows)
    print_rows(rows)
    print_figures(figures)
    if options.json is not None or not options.smoke:
        constants = {
            "budget_bytes": budget_bytes,
            "seeds": num_seeds,
            "page_bytes": PAGE_BYTES,
            "states_compared": compared,
        }
        record = make_record(__doc__, rows, figures, constants)
        print("wrote", write_result("fragmentation", record, options.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
