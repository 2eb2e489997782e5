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

from harness import Bench, Figure, Row
from models import DTYPE, CacheShape, close_cache, open_pool
from rivals import BLOCK_TOKENS, blocks_for

from vmkv import KVCache
from vmkv.core.cache import LayerGroup
from vmkv.units import GiB, KiB, MiB

UNDERREAD_TOKENS = 256  # that are kept before a window


@dataclass(frozen=True)
class Shape:
    """A model's cache.

    Attributes:
        window: Layers that see only `window_tokens`.
        full_layers: Layers behind them that see all.
        window_tokens: The window.
    """

    window: CacheShape
    full_layers: int
    window_tokens: int

    @property
    def name(self) -> str:
        """The model's name."""
        return self.window.name


SHAPES = (
    Shape(CacheShape("Mistral-7B", 32, 8, 128), 0, 4096),
    Shape(CacheShape("Gemma-2-9B", 21, 8, 256), 21, 4096),
    Shape(CacheShape("gpt-oss-20b", 12, 8, 64), 12, 128),
)
SMOKE = (
    Shape(CacheShape("smoke", 2, 2, 16), 0, 64),
    Shape(CacheShape("smoke, mixed", 2, 2, 16), 2, 64),
)


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
    layers, last = shape.window.num_layers, shape.window.num_layers + shape.full_layers
    page_bytes = 4 * KiB if smoke else 2 * MiB
    pool = open_pool(64 * MiB if smoke else 48 * GiB, smoke=smoke, page_bytes=page_bytes)
    cache = KVCache(
        pool,
        max_tokens=2 * num_tokens,  # Longer, because a row's last extents are cut to fit its end.
        max_sequences=1,
        layers_per_group=layers,
    )
    shaped = {"num_kv_heads": shape.window.num_kv_heads, "head_dim": shape.window.head_dim}
    groups = cache.add_layers(
        range(layers), window_tokens=shape.window_tokens, dtype=DTYPE, **shaped
    )
    if shape.full_layers:
        cache.add_layers(range(layers, last), dtype=DTYPE, **shaped)
    extent_bytes = 0
    full_from = prompt_tokens + 2 * (shape.window_tokens + UNDERREAD_TOKENS)
    calls, rows = pool.backend.calls, []
    bounds = [num_tokens * at // 25 for at in range(1, 26)]

    sequence = cache.open()
    sequence.append(prompt_tokens)
    held = [resident_bytes(groups, sequence.row)]
    for bound in (each for each in bounds if each > prompt_tokens):
        first, num_mappings = sequence.num_tokens, calls["mem_map"]
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
        rows.append(row | {"mappings": calls["mem_map"] - num_mappings})
    close_cache(cache)
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
    kept, token_bytes = min(num_tokens, shape.window_tokens), shape.window.token_bytes
    # A window begins anywhere in a block.
    blocks = min(blocks_for(num_tokens), blocks_for(shape.window_tokens) + 1)
    return {
        "window_bytes": kept * token_bytes,
        "block_table_bytes": blocks * BLOCK_TOKENS * token_bytes,
        "all_tokens_bytes": num_tokens * token_bytes,
    }


def promised(shapes: Sequence[Shape], runs: dict[tuple[str, int], Run]) -> list[Figure]:
    """Flatness and size of each shape's window, and the bad case of the first."""
    start, long_prompt = sorted({prompt_tokens for _, prompt_tokens in runs})
    figures = []
    for shape in shapes:
        decoded = runs[shape.name, start]
        last = decoded.rows[-1]
        name = shape.name.lower().replace("-", "_").replace(", ", "_")
        what = "most − least resident of the window's layers once it is full, to "
        what += f"{last['tokens']:,} tokens ({shape.name}, {decoded.num_groups} group)"
        rival = f"grows without end: {last['all_tokens_bytes'] / MiB:,.0f} MiB (keeping all tokens)"
        got = decoded.spread_extents
        figures.append(Figure(f"window_spread_{name}", what, got, "extents", 1, rival=rival))
        what = f"most resident then, of what the window's tokens need ({shape.name})"
        blocks = last["block_table_bytes"] / last["window_bytes"]
        rival = f"{blocks:.3f} × (blocks of 16 tokens, freed behind the window)"
        got = decoded.most_bytes / last["window_bytes"]
        figures.append(Figure(f"window_ratio_{name}", what, got, "×", rival=rival))
    bad = runs[shapes[0].name, long_prompt]
    what = f"most resident with a prompt of {long_prompt:,} tokens in one piece, of what the "
    what += f"window's tokens need ({shapes[0].name})"
    rival = "1 × (transformers' sliding layers, after the step)"
    got = bad.peak_bytes / bad.rows[-1]["window_bytes"]
    return [*figures, Figure("window_prompt_ratio", what, got, "×", rival=rival)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("window", __doc__)
    smoke = bench.parse(argv).smoke
    shapes, prompts, num_tokens = (
        (SMOKE, (1, 512), 2000) if smoke else (SHAPES, (1, 32_768), 100_000)
    )
    runs = {
        (shape.name, prompt_tokens): run(shape, prompt_tokens, num_tokens, smoke=smoke)
        for shape in shapes
        for prompt_tokens in prompts
    }
    rows = [row for each in runs.values() for row in each.rows]
    constants = {"num_tokens": num_tokens, "underread_tokens": UNDERREAD_TOKENS}
    return bench.finish(rows, promised(shapes, runs), constants)


if __name__ == "__main__":
    sys.exit(main())
