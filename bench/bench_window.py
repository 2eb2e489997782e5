"""How much memory does a sliding-window model hold, however long a sequence becomes?

Question. While a sequence of a sliding-window model is decoded to 100,000 tokens, do its window's
layers stay at the memory of the window once that is full, within one extent for each layer group?

Prediction. A query sees 4,096 tokens, and kernels may fetch 256 before them: Mistral-7B (32 such
layers of 8 heads of 128, 128 KiB a token) needs 272 pages of 2 MiB. Its row grows by a 64th of what
is mapped, extents of 4 pages, and loses as many at its front when all of one are out of sight: from
272 to 280 pages, 9 % over the window (6 of them for the 256 tokens), and never more than one extent
of 8 MiB up or down. 100,000 steps map 1,500 extents and unmap them, at 55 us for both: 1 us a
token. A prompt of 32,768 tokens in one piece is the bad case: all of it is read while it is
written, so 4 GiB are held until the next step, 8 times the window. And where the window is small,
pages are coarse: gpt-oss-20b's needs 3 MiB and gets 10 or 12.

Method. `KVCache` by itself, one sequence, `append(1)` 100,000 times. `resident` is what the
window's groups have mapped; each row gives its least and most over an interval of tokens. Flatness
is most − least over all steps from where the window has passed everything that was mapped while it
filled, which is at twice its length (until then small extents of the beginning leave at the front,
and a few pages less are held), in extents of the largest size that is mapped then. Nothing is
written; the physical memory is real.

Rivals. By arithmetic: the window alone, which transformers' sliding layers hold (and copy at every
step: `torch.cat`, twice the window read and written); blocks of 16 tokens that are freed behind the
window; keeping every token, as a cache does that knows no windows.

Not measured. Attention over the window (bench_attention has Gemma's shape); rollback of what has
left it, which keeps it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from common import write_result
from report import Figure, Row, bench_parser, make_record, print_figures, print_rows
from rivals import BLOCK_TOKENS, blocks_for

from vmkv import HostBackend, KVCache, open_backend
from vmkv.cache import LayerGroup
from vmkv.memory import ExtentPool
from vmkv.units import GiB, KiB, MiB

DTYPE = torch.bfloat16
NUM_TOKENS = 100_000
NUM_INTERVALS = 25
UNDERREAD_TOKENS = 256  # that are kept before a window


@dataclass(frozen=True)
class Shape:
    """A model's cache: `window_layers` of its layers see only `window_tokens`."""

    name: str
    window_layers: int
    full_layers: int
    num_kv_heads: int
    head_dim: int
    window_tokens: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the window's layers."""
        return self.window_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE.itemsize


SHAPES = (
    Shape("Mistral-7B", 32, 0, 8, 128, 4096),
    Shape("Gemma-2-9B", 21, 21, 8, 256, 4096),
    Shape("gpt-oss-20b", 12, 12, 8, 64, 128),
)
PROMPTS = (1, 32_768)
SMOKE_SHAPES = (Shape("smoke", 2, 0, 2, 16, 64), Shape("smoke, mixed", 2, 2, 2, 16, 64))


@dataclass(frozen=True)
class Run:
    """One sequence, decoded to its end.

    Attributes:
        rows: What the window's groups held, interval by interval.
        spread_extents: Most − least from where the window is full, in extents, of all groups.
        num_groups: How many groups the window's layers form.
        most_bytes: The most in that time.
        peak_bytes: The most at any time.
    """

    rows: list[Row]
    spread_extents: float
    num_groups: int
    most_bytes: int
    peak_bytes: int


def run(shape: Shape, prompt_tokens: int, num_tokens: int, *, smoke: bool) -> Run:
    """Append a prompt, then token after token."""
    use_gpu = torch.cuda.is_available() and not smoke
    backend = open_backend("cuda:0") if use_gpu else HostBackend(4 * KiB if smoke else 2 * MiB)
    pool = ExtentPool(backend, 64 * MiB if smoke else 48 * GiB)
    cache = KVCache(
        pool,
        max_tokens=2 * num_tokens,  # What is mapped last before a row's end is cut to fit.
        max_sequences=1,
        layers_per_group=shape.window_layers,
    )
    shaped = {"num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "dtype": DTYPE}
    groups = cache.add_layers(
        range(shape.window_layers), window_tokens=shape.window_tokens, **shaped
    )
    if shape.full_layers:
        last = shape.window_layers + shape.full_layers
        cache.add_layers(range(shape.window_layers, last), **shaped)
    extent_bytes = 0
    full_from = prompt_tokens + 2 * (shape.window_tokens + UNDERREAD_TOKENS)
    held, rows = [], []
    bounds = [num_tokens * at // NUM_INTERVALS for at in range(1, NUM_INTERVALS + 1)]

    sequence = cache.open()
    sequence.append(prompt_tokens)
    held.append(resident_bytes(groups, sequence.row))
    for bound in (each for each in bounds if each > prompt_tokens):
        first, num_mappings = sequence.num_tokens, backend.calls["mem_map"]
        seconds = 0.0
        for _ in range(bound - first):
            start = time.perf_counter()
            sequence.append(1)
            seconds += time.perf_counter() - start
            held.append(resident_bytes(groups, sequence.row))
        if bound > full_from:
            extent_bytes = max(extent_bytes, largest_extent_bytes(groups, sequence.row))
        since = held[first - prompt_tokens :]
        row: Row = {"shape": shape.name, "prompt_tokens": prompt_tokens, "tokens": bound}
        row |= {"least_resident_bytes": min(since), "most_resident_bytes": max(since)}
        row |= rival_bytes(shape, bound)
        row["host_us_per_token"] = 1e6 * seconds / (bound - first)
        row["mappings"] = backend.calls["mem_map"] - num_mappings
        rows.append(row)
    cache.check()
    cache.close()
    pool.close()
    full = held[full_from - prompt_tokens :]
    spread_extents = (max(full) - min(full)) / extent_bytes
    return Run(rows, spread_extents, len(groups), max(full), max(held))


def resident_bytes(groups: Sequence[LayerGroup], row: int) -> int:
    """What the window's groups have mapped."""
    return sum(group.resident_bytes(row) for group in groups)


def largest_extent_bytes(groups: Sequence[LayerGroup], row: int) -> int:
    """The largest extent that is mapped in each group, of all groups together."""
    return sum(
        max(mapping.extent.num_bytes for mapping in group.table.rows[row].mappings)
        for group in groups
    )


def rival_bytes(shape: Shape, num_tokens: int) -> Row:
    """What the rivals hold for as many tokens."""
    kept = min(num_tokens, shape.window_tokens)
    # A window begins anywhere in a block.
    blocks = min(blocks_for(num_tokens), blocks_for(shape.window_tokens) + 1)
    return {
        "window_bytes": kept * shape.token_bytes,
        "block_table_bytes": blocks * BLOCK_TOKENS * shape.token_bytes,
        "all_tokens_bytes": num_tokens * shape.token_bytes,
    }


def promised(shapes: Sequence[Shape], runs: dict[tuple[str, int], Run]) -> list[Figure]:
    """The figure of the issue for each shape, what it holds, and the bad case of the first."""
    start, long_prompt = sorted({prompt_tokens for _, prompt_tokens in runs})
    figures = []
    for shape in shapes:
        decoded = runs[shape.name, start]
        last = decoded.rows[-1]
        name = shape.name.lower().replace("-", "_").replace(", ", "_")
        figures.append(
            Figure(
                f"window_spread_{name}",
                f"most − least resident of the window's layers once it is full, to "
                f"{last['tokens']:,} tokens ({shape.name}, {decoded.num_groups} group)",
                decoded.spread_extents,
                "extents",
                at_most=1,
                rival=f"grows without end: {last['all_tokens_bytes'] / MiB:,.0f} MiB "
                "(keeping all tokens)",
            )
        )
        blocks = last["block_table_bytes"] / last["window_bytes"]
        figures.append(
            Figure(
                f"window_ratio_{name}",
                f"most resident then, of what the window's tokens need ({shape.name})",
                decoded.most_bytes / last["window_bytes"],
                "×",
                rival=f"{blocks:.3f} × (blocks of 16 tokens, freed behind the window)",
            )
        )
    bad = runs[shapes[0].name, long_prompt]
    figures.append(
        Figure(
            "window_prompt_ratio",
            f"most resident with a prompt of {long_prompt:,} tokens in one piece, of what the "
            f"window's tokens need ({shapes[0].name})",
            bad.peak_bytes / bad.rows[-1]["window_bytes"],
            "×",
            rival="1 × (transformers' sliding layers, after the step)",
        )
    )
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    options = bench_parser(__doc__).parse_args(argv)
    shapes, prompts, num_tokens = (
        (SMOKE_SHAPES, (1, 512), 2000) if options.smoke else (SHAPES, PROMPTS, NUM_TOKENS)
    )
    runs = {
        (shape.name, prompt_tokens): run(shape, prompt_tokens, num_tokens, smoke=options.smoke)
        for shape in shapes
        for prompt_tokens in prompts
    }
    rows = [row for each in runs.values() for row in each.rows]
    figures = promised(shapes, runs)
    print_rows(rows)
    print_figures(figures)
    if options.json is not None or not options.smoke:
        constants = {"num_tokens": num_tokens, "underread_tokens": UNDERREAD_TOKENS}
        record = make_record(__doc__, rows, figures, constants)
        print("wrote", write_result("window", record, options.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
