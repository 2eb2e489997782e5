"""Plots of results: what is drawn of each bench. Nothing here reads a file."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import Row, show

from vmkv.units import GiB

_DPI = 110
_COLUMNS_MAX = 3
Rows = Sequence[Row]


@dataclass(frozen=True)
class Panel:
    """One diagram of a bench's rows: bars in clusters, or lines over a size.

    Attributes:
        value: The column that is drawn; rows without it are left out.
        series: The column whose values get a bar or a line each.
        group: Columns that make a cluster of bars; or `x`, for lines.
        title: Of the diagram.
        unit: Of the value.
        x: The column that lines go over.
        only: A column and the value it must have.
        log: Whether the axis is logarithmic; None where small bars would not be seen otherwise.
        limit: A dashed line, called `limit_is`.
    """

    value: str
    series: str
    group: tuple[str, ...]
    title: str
    unit: str = ""
    x: str = ""
    only: tuple[str, Any] | None = None
    log: bool | None = False
    limit: float | None = None
    limit_is: str = "must"


@dataclass(frozen=True)
class Plot:
    """The plot of a bench: panels beside each other.

    Attributes:
        panels: What is drawn.
        width_inches: Of all of it.
        prepare: Makes the rows that are drawn of those that were measured.
        split: A column; the panel is drawn once for each of its values.
        draw: Draws something else than panels.
    """

    panels: tuple[Panel, ...] = ()
    width_inches: float = 12
    prepare: Callable[[Rows], Rows] = field(default=lambda rows: rows)
    split: str = ""
    draw: Callable[[Any, Rows], None] | None = None


# ---- parts of plots ---------------------------------------------------------------------------


def ours_first(rows: Rows, name: str) -> dict[str, str]:
    """The values of a column with a colour each, vmkv's before its rivals'."""
    values = dict.fromkeys(row[name] for row in rows)
    ordered = sorted(values, key=lambda value: "vmkv" not in value.lower())
    return {value: f"C{at}" for at, value in enumerate(ordered)}


def grouped_bars(axes: Any, rows: Rows, group: Sequence[str], bar: str, value: str) -> None:
    """Bars of `value`, one for each `bar`, one cluster for each combination of `group`."""
    clusters = list(dict.fromkeys(tuple(row[name] for name in group) for row in rows))
    colours = ours_first(rows, bar)
    width = 0.8 / max(1, len(colours))
    for at, (name, colour) in enumerate(colours.items()):
        mine = {tuple(row[each] for each in group): row for row in rows if row[bar] == name}
        xs = [x for x, cluster in enumerate(clusters) if cluster in mine]
        picked = [mine[clusters[x]] for x in xs]
        places = [x + (at - (len(colours) - 1) / 2) * width for x in xs]
        tops = [row[value] for row in picked]
        low = [max(0.0, row[value] - row.get(f"{value}_q1", row[value])) for row in picked]
        high = [max(0.0, row.get(f"{value}_q3", row[value]) - row[value]) for row in picked]
        errors = {"yerr": (low, high), "error_kw": {"linewidth": 0.8}}
        axes.bar(places, tops, width, color=colour, label=name, **errors)
        for place, top in zip(places, tops, strict=True):
            if not top:  # A logarithmic axis has no room for a zero, which may be the point.
                at_foot = {"xycoords": ("data", "axes fraction"), "ha": "center"}
                axes.annotate("0", (place, 0.01), color=colour, **at_foot)
    # Lines that are short enough for many clusters beside each other.
    labels = [
        "\n".join(textwrap.fill(show("", each), 14) for each in cluster) for cluster in clusters
    ]
    axes.set_xticks(range(len(clusters)), labels, fontsize=8 if len(clusters) < 9 else 6)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def lines_over(axes: Any, rows: Rows, x: str, line: str, value: str) -> None:
    """Lines of `value` over `x`, one for each `line`."""
    for name, colour in ours_first(rows, line).items():
        mine = sorted((row[x], row[value]) for row in rows if row[line] == name)
        axes.plot(*zip(*mine, strict=True), marker="o", markersize=3, color=colour, label=name)
    ticks = sorted({row[x] for row in rows})
    axes.set(xscale="log", yscale="log", xlabel=x.replace("_", " "))
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.minorticks_off()
    axes.grid(alpha=0.3)


def draw_panel(axes: Any, panel: Panel, rows: Rows) -> None:
    """One diagram."""
    rows = [row for row in rows if row.get(panel.value) is not None]
    if panel.only is not None:
        rows = [row for row in rows if row.get(panel.only[0]) == panel.only[1]]
    if panel.x:
        lines_over(axes, rows, panel.x, panel.series, panel.value)
    else:
        grouped_bars(axes, rows, panel.group, panel.series, panel.value)
        above = [row[panel.value] for row in rows if row[panel.value] > 0]
        is_log = max(above) > 20 * min(above) if panel.log is None else panel.log
        axes.set_yscale("log" if is_log else "linear")
    axes.set_title(panel.title, fontsize=10)
    axes.set_ylabel(panel.unit)
    if panel.limit is not None:
        label = f"{panel.limit_is}: {panel.limit:g}"
        axes.axhline(panel.limit, color="black", linestyle="--", linewidth=1, label=label)


# ---- other plots ------------------------------------------------------------------------------


def draw_attention(canvas: Any, rows: Rows) -> None:
    """A panel for each kernel, of the first shape."""
    shown = [
        {**row, "case": f"{row['batch']} × {row['tokens'][0]:,}-{row['tokens'][1]:,}"}
        for row in rows
        if row["shape"] == rows[0]["shape"] and row["layout"] != "dense"
    ]
    kernels = list(dict.fromkeys(row["kernel"] for row in shown))
    canvas.set_size_inches(13, 1 + 2.6 * len(kernels))
    panels = canvas.subplots(len(kernels), 1, squeeze=False)[:, 0]
    for axes, kernel in zip(panels, kernels, strict=True):
        mine = [row for row in shown if row["kernel"] == kernel]
        title = f"{rows[0]['shape']}, {kernel}: time, relative to a dense tensor"
        group, only = ("phase", "case"), ("kernel", kernel)
        draw_panel(axes, Panel("ratio_to_dense", "layout", group, title, "×", only=only), mine)
        axes.axhline(1, color="black", linestyle="--", linewidth=1)
        axes.set_ylim(0.8, max(1.2, *(1.02 * row["ratio_to_dense"] for row in mine)))


def _serve(rows: Rows) -> Rows:
    """A row for each way to serve a workload; workloads that were compared, where any was."""
    names = {
        "seconds": "vmkv",
        "vllm_seconds": "vLLM",
        "hf_batch_seconds": "transformers, generate_batch",
        "hf_padded_seconds": "transformers, left-padded",
    }
    long = [
        {"workload": row["workload"], "way": way, "value": row[key]}
        for row in sorted(rows, key=lambda row: row["workload"])
        for key, way in names.items()
        if row.get(key) is not None
    ]
    compared = {row["workload"] for row in long if row["way"] != "vmkv"}
    return [row for row in long if row["workload"] in compared] or long


def _with(name: str, made: Callable[[Row], Any]) -> Callable[[Rows], Rows]:
    """Rows with one column more."""
    return lambda rows: [{**row, name: made(row)} for row in rows]


def _with_gib(*names: str) -> Callable[[Rows], Rows]:
    """Rows with sizes in GiB beside those in bytes."""
    return lambda rows: [
        {**row, **{f"{name}_gib": row[f"{name}_bytes"] / GiB for name in names}} for row in rows
    ]


# ---- all plots --------------------------------------------------------------------------------

_GENERATE = ("cache", ("attention", "case"))
_SHARED = ("variant", ("operation",))
_LIVE = ("server", ("load",))
_LIVE_TITLES = {"ttft": "first token", "tpot": "each further token"}
PLOTS: dict[str, Plot] = {
    "mapping": Plot(
        (
            Panel(
                *("driver_us", *_SHARED, "time in the driver, for one prompt", "µs"),
                only=("per", "operation"),
                log=True,
            ),
            Panel(
                *("driver_us", *_SHARED, "and for one decoded token", "µs"),
                only=("per", "token"),
                limit=1,
            ),
        )
    ),
    "waste": Plot(
        (
            Panel(
                *("percent", "allocator", ("shape", "load")),
                *("resident − used, of used, mean over decoding", "%"),
                log=True,
                limit=4,
            ),
        ),
        prepare=_with("percent", lambda row: 100 * row["waste_share"]),
    ),
    "generate": Plot(
        (
            Panel(
                *("memory_ratio", *_GENERATE, "memory over the weights, of the KV"),
                limit=1,
                limit_is="the KV itself",
            ),
            Panel("decode_ms", *_GENERATE, "one decode step, ms"),
            Panel("prefill_s", *_GENERATE, "prefill, s"),
        ),
        prepare=_with("case", lambda row: f"{row['batch']} × {row['prompt_tokens']:,}"),
    ),
    "fragmentation": Plot(
        (Panel("num_sequences", "allocator", ("trace",), "sequences that fit", log=True),),
        split="shape",
    ),
    "block_table": Plot(
        (Panel("step_us", "way", (), "host time a step", "µs", x="num_sequences"),),
        split="past_tokens",
    ),
    "attention": Plot(width_inches=13, draw=draw_attention),
    "ragged": Plot(
        (
            Panel("seconds", "way", ("prompts",), "all prompts", "s"),
            Panel("kv_gib", "way", ("prompts",), "keys and values", "GiB"),
        ),
        width_inches=9,
        prepare=_with_gib("kv"),
    ),
    "serve": Plot(
        (Panel("value", "way", ("workload",), "all requests of a workload", "s"),), prepare=_serve
    ),
    "live": Plot(
        tuple(
            Panel(f"{name}_{share}_ms", *_LIVE, f"{title}, {share}", "ms", log=None)
            for name, title in _LIVE_TITLES.items()
            for share in ("p50", "p99")
        ),
        width_inches=13,
    ),
    "beams": Plot(
        (
            Panel("held_last_gib", "cache", ("case",), "keys and values at the end", "GiB"),
            Panel("peak_gib", "cache", ("case",), "peak over the weights", "GiB"),
            Panel("seconds", "cache", ("case",), "the whole search", "s"),
        ),
        width_inches=10,
        prepare=_with_gib("held_last", "peak"),
    ),
}


def draw(bench: str, rows: Rows, path: Path) -> None:
    """The plot of a bench's rows, as a PNG; the same rows give the same bytes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure as Canvas

    plot = PLOTS[bench]
    canvas = Canvas(figsize=(plot.width_inches, 4.5), layout="constrained")
    if plot.draw is not None:
        plot.draw(canvas, rows)
    else:
        rows = plot.prepare(rows)
        values = list(dict.fromkeys(row[plot.split] for row in rows)) if plot.split else [None]
        drawn = [(panel, value) for value in values for panel in plot.panels]
        columns = min(len(drawn), 2 if len(drawn) == 4 else _COLUMNS_MAX)
        lines = -(-len(drawn) // columns)
        canvas.set_size_inches(plot.width_inches, 4.5 * lines)
        places = canvas.subplots(lines, columns, squeeze=False).flat
        for axes, (panel, value) in zip(places, drawn, strict=False):
            mine = [row for row in rows if value is None or row[plot.split] == value]
            draw_panel(axes, panel, mine)
            if value is not None:
                axes.set_title(f"{panel.title}: {show('', value)}", fontsize=10)
    handles: Row = {}
    for axes in canvas.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    canvas.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, fontsize=8)
    canvas.savefig(path, dpi=_DPI, metadata={"Software": None})
