"""Plots of the benches of sharing, windows, swapping and beams."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from charts import finish, grouped_bars, ours_first
from common import Row

from vmkv.units import GiB, MiB


def plot_sharing(canvas: Any, rows: Sequence[Row]) -> None:
    left, right = canvas.subplots(1, 2, width_ratios=(1.3, 1))
    colours = ours_first(rows, "variant")
    timed = [row | {"ms": row["done_us"] / 1e3} for row in rows if "done_us" in row]
    timed = [row | {"operation": textwrap.fill(row["operation"], 12)} for row in timed]
    grouped_bars(left, timed, ["operation"], "variant", "ms", colours)
    finish(left, f"time until the device is done, {timed[0]['tokens']:,} tokens", "ms", log=True)
    left.axhline(1.5, color="black", linestyle="--", linewidth=1, label="must, fork and hit: 1.5")
    held = []
    for row in (row for row in rows if "resident_ratio" in row):
        requests, _, how = row["operation"].partition(", prefix ")
        held.append(row | {"case": f"{requests}\nprefix {row['tokens']:,}\n{how}"})
    grouped_bars(right, held, ["case"], "variant", "resident_ratio", colours)
    finish(right, "resident, of prefix once and all tails", "×", log=True, limit=1.05)
    right.set_ylim(0.9, None)


def plot_window(canvas: Any, rows: Sequence[Row]) -> None:
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    panels = canvas.subplots(1, len(shapes), squeeze=False)[0]
    lines = (
        ("vmkv, most in an interval", "most_resident_bytes", "C0", "-"),
        ("vmkv, least", "least_resident_bytes", "C0", ":"),
        ("blocks of 16, freed behind the window", "block_table_bytes", "C1", "--"),
        ("keeping all tokens", "all_tokens_bytes", "C2", "-."),
    )
    for axes, shape in zip(panels, shapes, strict=True):
        mine = [row for row in rows if row["shape"] == shape]
        start = min(row["prompt_tokens"] for row in mine)
        decoded = [row for row in mine if row["prompt_tokens"] == start]
        tokens = [row["tokens"] for row in decoded]
        for label, name, colour, style in lines:
            # The first interval begins with an empty row.
            skipped = 1 if name == "least_resident_bytes" else 0
            sizes = [row[name] / MiB for row in decoded][skipped:]
            axes.plot(tokens[skipped:], sizes, style, color=colour, label=label)
        finish(axes, f"{shape}: the window's layers", "MiB", log=True)
        axes.set_xlabel("tokens of the sequence")
        axes.grid(alpha=0.3)


def plot_swap(canvas: Any, rows: Sequence[Row]) -> None:
    shown = [
        {"way": way, "case": f"{row['sequence']}, {row['way']}", "gb_per_s": row[f"{key}_gb_per_s"]}
        for row in rows
        for way, key in (("vmkv, swapping", "swap"), ("copy_ of a pinned tensor", "copy"))
    ]
    axes = canvas.subplots()
    grouped_bars(axes, shown, ["case"], "way", "gb_per_s", ours_first(shown, "way"))
    finish(axes, "device memory to the host, and back", "GB/s")


def plot_beams(canvas: Any, rows: Sequence[Row]) -> None:
    colours = ours_first(rows, "cache")
    shown = [
        row | {f"{key}_gib": row[f"{key}_bytes"] / GiB for key in ("held_last", "peak")}
        for row in rows
    ]
    for axes, value, title, unit in zip(
        canvas.subplots(1, 3),
        ("held_last_gib", "peak_gib", "seconds"),
        ("keys and values at the end", "peak over the weights", "the whole search"),
        ("GiB", "GiB", "s"),
        strict=True,
    ):
        grouped_bars(axes, shown, ["case"], "cache", value, colours)
        finish(axes, title, unit)


PLOTS: dict[str, tuple[Callable[[Any, Sequence[Row]], None], float]] = {
    "sharing": (plot_sharing, 14),
    "window": (plot_window, 12),
    "swap": (plot_swap, 9),
    "beams": (plot_beams, 10),
}
