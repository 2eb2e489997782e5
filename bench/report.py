"""Make pages of results: bench/README.md, a page and a plot for each record, the README's table.

    python bench/report.py            write them
    python bench/report.py --check    fail if a page is out of date

A record is one JSON file in bench/results/, written by a bench: its question and prediction (from
its docstring), where it ran, `rows` (what was measured, as flat records) and `figures` (the few
numbers that were promised, with the bound they must keep). `summary.md` is the prose of
bench/README.md, with the numbers filled in from the records: `{RECORD:FIGURE}` is a figure's
result, `{RECORD:FIGURE:rival}` its rival's. A record that no longer shows what the code does gets
`outdated`, in words: what has changed since. A record whose bench was removed gets `retired`: why.
The pages say both beside the figures.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import RESULTS, ROOT, Row, sections, show_bound, show_got, table
from plots import PLOTS, draw

HERE = Path(__file__).resolve().parent
MARKERS = ("<!-- figures:start -->", "<!-- figures:end -->")
#: What the project's README shows: (record, figure, what it is).
HEADLINES = (
    ("live-nvidia-h200", "live_chat_24_s_ttft_p50_ms", "chat, 24 requests/s: time to first token"),
    ("live-nvidia-h200", "live_chat_24_s_tpot_p50_ms", "the same load: time per further token"),
    ("generate-nvidia-h200", "memory_ratio_32x8192", "`generate`, 32 × 8,192: memory of the KV"),
    ("serve-nvidia-h200", "serve_w1_seconds", "256 mixed prompts, 128 new tokens each"),
)
_LABELS = ("outdated", "retired", "question", "prediction", "verdict", "method", "rivals")
_PLACEHOLDER = re.compile(r"\{([\w-]+):([\w-]+)(:rival)?\}")

# ---- reading results --------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """A result file.

    Attributes:
        stem: The file's name.
        bench: The bench's name.
        record: The content.
    """

    stem: str
    bench: str
    record: Row

    @property
    def rows(self) -> list[Row]:
        """What was measured."""
        return self.record.get("rows") or self.record.get("results") or []

    @property
    def figures(self) -> list[Row]:
        """What was promised."""
        return self.record.get("figures") or []

    @property
    def device(self) -> str:
        """The device's name."""
        return str(self.record.get("environment", {}).get("device", "?"))

    @property
    def place(self) -> str:
        """Device and software, in a few words."""
        env = self.record.get("environment", {})
        parts = [self.device]
        parts += [f"driver {env['driver']}"] if env.get("driver") else []
        parts += [f"{name} {env[name]}" for name in ("torch", "transformers") if env.get(name)]
        return ", ".join([*parts, f"commit {env.get('commit')}", str(env.get("date"))])


def load(folder: Path) -> list[Result]:
    """The results in a folder; the bench's docstring fills in what a file lacks."""
    results = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        bench = str(record.get("bench", path.stem)).removeprefix("bench_")
        source = HERE / f"bench_{bench}.py"
        doc = ast.get_docstring(ast.parse(source.read_text())) if source.exists() else None
        results.append(Result(path.stem, bench, {**sections(doc or ""), **record}))
    return results


# ---- pages ------------------------------------------------------------------------------------


def markdown_table(names: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    cells = [list(names), ["---"] * len(names), *lines]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in cells
    )


def figures_table(results: Sequence[Result], folder: str) -> str:
    """Promised and measured figures; links lead to the records' pages in `folder`."""
    lines = []
    for result in results:
        for figure in result.figures:
            met = {True: "yes", False: "**no**", None: "–"}[figure["is_met"]]
            met += ", of older code" if result.record.get("outdated") else ""
            link = f"[{result.stem}]({folder}/{result.stem}.md)"
            rival = figure["rival"] or "–"
            line = [link, figure["what"], show_bound(figure), show_got(figure), rival, met]
            lines.append(line)
    return markdown_table(["record", "what", "bound", "result", "rival", "met"], lines)


def summary(text: str, results: Sequence[Result], folder: str) -> str:
    """The prose with the numbers of the records, each a link to its record's page."""
    known = {(each.stem, figure["name"]): figure for each in results for figure in each.figures}

    def number(match: re.Match[str]) -> str:
        figure = known.get((match[1], match[2]))
        if figure is None:
            return "(not measured)"
        return figure["rival"] if match[3] else f"[{show_got(figure)}]({folder}/{match[1]}.md)"

    return _PLACEHOLDER.sub(number, text)


def front_page(text: str, results: Sequence[Result], folder: str) -> str:
    """bench/README.md: the summary, all figures, and a list of the records."""
    names = ["record", "question", "device", "commit", "date"]
    lines = []
    for each in results:
        env = each.record.get("environment", {})
        question = str(each.record.get("question", "–"))
        link = f"[{each.stem}]({folder}/{each.stem}.md)"
        lines.append([link, question, each.device, env.get("commit"), env.get("date")])
    parts = [summary(text, results, folder).strip()]
    parts += ["## All figures", figures_table(results, folder)]
    parts += ["## Records", markdown_table(names, lines)]
    return "\n\n".join(parts) + "\n"


def record_page(result: Result, home: str) -> str:
    """The page of one record."""
    parts = [f"# {result.stem}", f"*{result.place}*. Generated; [all benches]({home})."]
    for label in (*_LABELS, "not_measured"):
        if result.record.get(label):
            title = label.replace("_", " ").capitalize()
            parts.append(f"**{title}.** {result.record[label]}")
    if result.figures:
        parts.append(figures_table([result], "."))
    if result.bench in PLOTS and result.rows:
        parts.append(f"![{result.bench}]({result.stem}.png)")
    if result.rows:
        parts.append(_rows_section(result))
    kernels = result.record.get("constants", {}).get("step_kernels")
    if kernels:
        parts += ["**Kernels of a step.**", _kernels_table(kernels)]
    return "\n\n".join(parts) + "\n"


def _kernels_table(kernels: Sequence[Row]) -> str:
    """Those that take a hundredth of their step or more; `bench_serve --profile` measures them."""
    whole_us = {each["step"]: each["us"] for each in kernels if each["kernel"] == "the whole step"}
    lines = [
        [each["step"], each["kernel"], f"{each['us']:,.0f}"]
        for each in kernels
        if each["us"] >= whole_us[each["step"]] / 100
    ]
    return markdown_table(["step", "kernel", "µs"], lines)


def _rows_section(result: Result) -> str:
    names, lines = table(result.rows)
    columns = list(zip(*lines, strict=True))
    same = [len(set(column)) == 1 and len(lines) > 1 for column in columns]
    common = [
        f"{name}: {col[0]}"
        for name, col, is_same in zip(names, columns, same, strict=True)
        if is_same and col[0]
    ]
    kept = [at for at, is_same in enumerate(same) if not is_same]
    shown = markdown_table(
        [names[at] for at in kept], [[line[at] for at in kept] for line in lines]
    )
    common_text = f"In all rows: {'; '.join(common)}.\n\n" if common else ""
    quartiles_text = "Square brackets hold quartiles.\n\n" if " [" in shown else ""
    return f"{common_text}{quartiles_text}{shown}"


def with_headlines(readme: str, results: Sequence[Result], folder: str) -> str | None:
    """The project's README with its table renewed; None where it has no markers."""
    start, end = (readme.find(marker) for marker in MARKERS)
    if start < 0 or end < start:
        return None
    known = {(each.stem, figure["name"]): figure for each in results for figure in each.figures}
    lines = []
    for stem, name, what in HEADLINES:
        figure = known.get((stem, name))
        if figure is not None:
            got = f"[{show_got(figure)}]({folder}/{stem}.md)"
            lines.append([what, got, figure["rival"] or "–"])
    shown = markdown_table(["on one NVIDIA H200, Llama-3-8B's shape", "vmkv", "rival"], lines)
    return f"{readme[: start + len(MARKERS[0])]}\n{shown}\n{readme[end:]}"


# ---- main -------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if the pages are out of date")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON files are")
    parser.add_argument("--readme", type=Path, default=HERE / "README.md")
    parser.add_argument("--root-readme", type=Path, default=ROOT / "README.md")
    options = parser.parse_args(argv)

    results = load(options.results)
    folder = os.path.relpath(options.results, options.readme.parent)
    home = os.path.relpath(options.readme, options.results)
    text = (HERE / "summary.md").read_text()
    pages = {options.readme: front_page(text, results, folder)}
    pages |= {options.results / f"{each.stem}.md": record_page(each, home) for each in results}
    drawn = {options.results / f"{each.stem}.png": each for each in results if _is_drawn(each)}
    root = options.root_readme.read_text() if options.root_readme.exists() else ""
    results_folder = os.path.relpath(options.results, options.root_readme.parent)
    with_table = with_headlines(root, results, results_folder)
    if with_table is None:
        print(f"{options.root_readme} has no {MARKERS[0]} … {MARKERS[1]}: left alone")
    else:
        pages[options.root_readme] = with_table
    left_over = {*options.results.glob("*.md"), *options.results.glob("*.png")} - {*pages, *drawn}

    if options.check:
        stale = [
            path for path, text in pages.items() if not path.exists() or path.read_text() != text
        ]
        stale += [path for path in drawn if not path.exists()]
        for each in (*stale, *left_over):
            print(f"out of date: {each}; run python bench/report.py")
        return 1 if stale or left_over else 0
    for path, each in drawn.items():
        draw(each.bench, each.rows, path)
    for path, text in pages.items():
        path.write_text(text)
    for path in left_over:
        path.unlink()
    print(f"wrote {len(pages)} pages and {len(drawn)} plots")
    return 0


def _is_drawn(result: Result) -> bool:
    return result.bench in PLOTS and bool(result.rows)


if __name__ == "__main__":
    sys.exit(main())
