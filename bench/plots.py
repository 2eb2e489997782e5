"""Plots of results: what of each bench is drawn. Nothing here reads a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from charts import finish, grouped_bars, lines_over, ours_first
from common import Row
from sharing_plots import PLOTS as SHARING_PLOTS

_DPI = 110


def plot_mapping(canvas: Any, rows: Sequence[Row]) -> None:
    left, right = canvas.subplots(1, 2, width_ratios=(3, 1))
    colours = ours_first(rows, "variant")
    for axes, per in ((left, "operation"), (right, "token")):
        mine = [row for row in rows if row["per"] == per]
        grouped_bars(axes, mine, ["operation"], "variant", "driver_us", colours)
    finish(left, "time in the driver, for one prompt", "µs", log=True)
    finish(right, "and for one decoded token", "µs", limit=1)


def plot_waste(canvas: Any, rows: Sequence[Row]) -> None:
    axes = canvas.subplots()
    shown = [{**row, "percent": 100 * row["waste_share"]} for row in rows]
    colours = ours_first(rows, "allocator")
    grouped_bars(axes, shown, ["shape", "load"], "allocator", "percent", colours)
    finish(axes, "resident − used, of used, mean over decoding", "%", log=True, limit=4)


def plot_generate(canvas: Any, rows: Sequence[Row]) -> None:
    colours = ours_first(rows, "cache")
    shown = [{**row, "case": f"{row['batch']} × {row['prompt_tokens']:,}"} for row in rows]
    for axes, value, title in zip(
        canvas.subplots(1, 3),
        ("memory_ratio", "decode_ms", "prefill_s"),
        ("memory over the weights, of the KV", "one decode step, ms", "prefill, s"),
        strict=True,
    ):
        grouped_bars(axes, shown, ["attention", "case"], "cache", value, colours)
        is_memory = value == "memory_ratio"
        finish(axes, title, limit=1 if is_memory else None, limit_is="the KV itself")


def plot_update(canvas: Any, rows: Sequence[Row]) -> None:
    axes = canvas.subplots()
    shown = [{**row, "case": f"{row['batch']} × {row['past_tokens']:,}"} for row in rows]
    grouped_bars(axes, shown, ["device", "case"], "cache", "update_us", ours_first(rows, "cache"))
    finish(axes, "host time of update(), per layer (batch × past tokens)", "µs", log=True)


def plot_fragmentation(canvas: Any, rows: Sequence[Row]) -> None:
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    colours = ours_first(rows, "allocator")
    for axes, shape in zip(canvas.subplots(1, len(shapes), squeeze=False)[0], shapes, strict=True):
        mine = [row for row in rows if row["shape"] == shape]
        grouped_bars(axes, mine, ["trace"], "allocator", "num_sequences", colours)
        finish(axes, f"{shape}: sequences that fit", log=True)


def plot_block_table(canvas: Any, rows: Sequence[Row]) -> None:
    lengths = list(dict.fromkeys(row["past_tokens"] for row in rows))
    colours = ours_first(rows, "way")
    panels = canvas.subplots(1, len(lengths), squeeze=False, sharey=True)[0]
    for axes, length in zip(panels, lengths, strict=True):
        mine = [row for row in rows if row["past_tokens"] == length]
        lines_over(axes, mine, "num_sequences", "way", "step_us", colours)
        finish(axes, f"host time a step, {length:,} tokens each", "µs")


def plot_attention(canvas: Any, rows: Sequence[Row]) -> None:
    shown = [
        {**row, "case": f"{row['batch']} × {row['tokens'][0]:,}-{row['tokens'][1]:,}"}
        for row in rows
        if row["shape"] == rows[0]["shape"] and row["layout"] != "dense"
    ]
    kernels = list(dict.fromkeys(row["kernel"] for row in shown))
    colours = ours_first(shown, "layout")
    canvas.set_size_inches(13, 1 + 2.6 * len(kernels))
    panels = canvas.subplots(len(kernels), 1, squeeze=False)[:, 0]
    for axes, kernel in zip(panels, kernels, strict=True):
        mine = [row for row in shown if row["kernel"] == kernel]
        grouped_bars(axes, mine, ["phase", "case"], "layout", "ratio_to_dense", colours)
        axes.tick_params(axis="x", labelsize=6)
        finish(axes, f"{rows[0]['shape']}, {kernel}: time, relative to a dense tensor", "×")
        axes.axhline(1, color="black", linestyle="--", linewidth=1)
        axes.set_ylim(0.8, max(1.2, *(1.02 * row["ratio_to_dense"] for row in mine)))


def plot_free_list(canvas: Any, rows: Sequence[Row]) -> None:
    axes = canvas.subplots()
    colours = ours_first(rows, "subject")
    lines_over(axes, rows, "num_threads", "subject", "pair_ns_median", colours)
    finish(axes, "one pop and one push", "ns")


def plot_ragged(canvas: Any, rows: Sequence[Row]) -> None:
    colours = ours_first(rows, "way")
    rows = [{**row, "kv_gib": row["kv_bytes"] / 2**30} for row in rows]
    panels = canvas.subplots(1, 2)
    for axes, value, title, unit in zip(
        panels, ("seconds", "kv_gib"), ("all prompts", "keys and values"), ("s", "GiB"), strict=True
    ):
        grouped_bars(axes, rows, ["prompts"], "way", value, colours)
        finish(axes, title, unit)


def plot_serve(canvas: Any, rows: Sequence[Row]) -> None:
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
    shown = [row for row in long if row["workload"] in compared] or long
    axes = canvas.subplots(1, 1)
    grouped_bars(axes, shown, ["workload"], "way", "value", ours_first(shown, "way"))
    finish(axes, "all requests of a workload", "s")


def plot_live(canvas: Any, rows: Sequence[Row]) -> None:
    colours = ours_first(rows, "server")
    canvas.set_size_inches(13, 9)
    panels = {
        "ttft_p50_ms": "first token, p50",
        "ttft_p99_ms": "first token, p99",
        "tpot_p50_ms": "each further token, p50",
        "tpot_p99_ms": "each further token, p99",
    }
    for axes, (value, title) in zip(canvas.subplots(2, 2).flat, panels.items(), strict=True):
        grouped_bars(axes, rows, ["load"], "server", value, colours)
        axes.tick_params(axis="x", labelsize=6)
        for bar in axes.patches:  # Where the axis is logarithmic, lengths say little.
            middle = bar.get_x() + bar.get_width() / 2
            said = {"ha": "center", "va": "bottom", "fontsize": 7}
            axes.text(middle, bar.get_height(), _number(bar.get_height()), **said)
        times = [row[value] for row in rows if row.get(value)]
        # Bars from zero say the most, unless some could not be seen beside others.
        finish(axes, title, "ms", log=max(times) > 20 * min(times))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


PLOTS: dict[str, tuple[Callable[[Any, Sequence[Row]], None], float]] = {
    "mapping": (plot_mapping, 12),
    "waste": (plot_waste, 11),
    "generate": (plot_generate, 12),
    "update": (plot_update, 10),
    "fragmentation": (plot_fragmentation, 12),
    "block_table": (plot_block_table, 12),
    "attention": (plot_attention, 13),
    "free_list": (plot_free_list, 7),
    "ragged": (plot_ragged, 9),
    "serve": (plot_serve, 11),
    "live": (plot_live, 13),
    **SHARING_PLOTS,
}


def draw(bench: str, rows: Sequence[Row], path: Path) -> None:
    """The plot of a bench's rows, as a PNG; the same rows give the same bytes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure as Canvas

    plot, width_inches = PLOTS[bench]
    canvas = Canvas(figsize=(width_inches, 4.5), layout="constrained")
    plot(canvas, rows)
    handles = {}
    for axes in canvas.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    canvas.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, fontsize=8)
    canvas.savefig(path, dpi=_DPI, metadata={"Software": None})
