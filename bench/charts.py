"""Parts of plots: bars in clusters, lines over a size, colours, titles and bounds."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from common import Row, show


def ours_first(rows: Sequence[Row], name: str) -> dict[str, str]:
    """The values of a column with a colour each, vmkv's before its rivals'."""
    values = dict.fromkeys(row[name] for row in rows)
    ordered = sorted(values, key=lambda value: "vmkv" not in value.lower())
    return {value: f"C{at}" for at, value in enumerate(ordered)}


def grouped_bars(
    axes: Any, rows: Sequence[Row], group: Sequence[str], bar: str, value: str, colours: Row
) -> None:
    """Bars of `value`, one for each `bar`, one cluster for each combination of `group`."""
    rows = [row for row in rows if row.get(value) is not None]
    clusters = list(dict.fromkeys(tuple(row[name] for name in group) for row in rows))
    present = {row[bar] for row in rows}
    colours = {name: colour for name, colour in colours.items() if name in present}
    width = 0.8 / max(1, len(colours))
    for at, (name, colour) in enumerate(colours.items()):
        mine = {tuple(row[each] for each in group): row for row in rows if row[bar] == name}
        xs = [x for x, cluster in enumerate(clusters) if cluster in mine]
        picked = [mine[clusters[x]] for x in xs]
        places = [x + (at - (len(colours) - 1) / 2) * width for x in xs]
        tops = [row[value] for row in picked]
        low = [max(0.0, row[value] - row.get(f"{value}_q1", row[value])) for row in picked]
        high = [max(0.0, row.get(f"{value}_q3", row[value]) - row[value]) for row in picked]
        axes.bar(
            places,
            tops,
            width,
            color=colour,
            label=name,
            yerr=(low, high),
            error_kw={"linewidth": 0.8},
        )
        for place, top in zip(places, tops, strict=True):
            if not top:  # A logarithmic axis has no room for it, and it may be the point.
                axes.annotate(
                    "0",
                    (place, 0.01),
                    xycoords=("data", "axes fraction"),
                    ha="center",
                    color=colour,
                )
    # Lines that are short enough for many clusters beside each other.
    labels = [
        "\n".join(textwrap.fill(show("", each), 14) for each in cluster) for cluster in clusters
    ]
    axes.set_xticks(range(len(clusters)), labels, fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def lines_over(axes: Any, rows: Sequence[Row], x: str, line: str, value: str, colours: Row) -> None:
    """Lines of `value` over `x`, one for each `line`."""
    for name, colour in colours.items():
        mine = sorted((row[x], row[value]) for row in rows if row[line] == name)
        axes.plot(*zip(*mine, strict=True), marker="o", markersize=3, color=colour, label=name)
    ticks = sorted({row[x] for row in rows})
    axes.set(xscale="log", yscale="log", xlabel=x.replace("_", " "))
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.minorticks_off()
    axes.grid(alpha=0.3)


def finish(
    axes: Any,
    title: str,
    unit: str = "",
    *,
    log: bool = False,
    limit: float | None = None,
    limit_is: str = "must",
) -> None:
    """Title, axis and bound of one panel."""
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(unit)
    if log:
        axes.set_yscale("log")
    if limit is not None:
        label = f"{limit_is}: {limit:g}"
        axes.axhline(limit, color="black", linestyle="--", linewidth=1, label=label)
