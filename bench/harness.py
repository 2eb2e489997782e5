"""What every bench shares: options, rounds, figures, and the record that a run writes.

A bench states its question, prediction and method in its docstring, measures flat rows, derives a
few figures from them, and ends with `Bench.finish`, which prints both and writes a JSON record to
`bench/results/`. `report.py` makes pages of the records.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from vmkv.units import format_bytes

T = TypeVar("T")
#: One flat record of what was measured.
Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
HAS_GPU = torch.cuda.is_available()
#: Packaged vLLM may lack optional kernels; none of these variables makes it slower.
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
#: vLLM's own kernel of Gated DeltaNet: on Hopper it takes FlashInfer's, installed or not.
VLLM_CONFIG = {} if find_spec("flashinfer") else {"gdn_prefill_backend": "triton"}
_SECTION = re.compile(r"(Question|Prediction|Verdict|Method|Rivals|Not measured)[.:]\s+")
_PACKAGES = ("vmkv", "torch", "transformers", "cuda-bindings", "flash-attn", "triton")

# ---- options and records ----------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """One promised number.

    Attributes:
        name: Its name in code: `cold_mapping_ms`.
        what: Its description for a reader.
        got: The measured value; None if there was nothing to measure.
        unit: `"ms"`, `"×"`, `"%"` (then `got` is a share), …
        at_most: The bound to stay at or below, or None.
        at_least: The bound to reach, or None.
        rival: The rival's result, in words with a number.
    """

    name: str
    what: str
    got: float | None
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    rival: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the bound is kept; None without a bound or a value."""
        if self.got is None:
            return None
        if self.at_most is not None:
            return self.got <= self.at_most
        return None if self.at_least is None else self.got >= self.at_least


def on_gpu(bound: float) -> float | None:
    """A bound that holds on a GPU only; None on a machine without one."""
    return bound if HAS_GPU else None


class Bench:
    """A bench's command line and its record.

    Args:
        name: The record's name; the file is `NAME-DEVICE.json`.
        doc: The bench's docstring, with its question, prediction and method.
        needs_gpu: Whether a run without `--smoke` needs a GPU.
    """

    def __init__(self, name: str, doc: str, *, needs_gpu: bool = False) -> None:
        self.name, self._doc, self._needs_gpu = name, doc, needs_gpu
        self._parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
        self.option = self._parser.add_argument
        self.error = self._parser.error
        self.option("--smoke", action="store_true", help="tiny, on any machine, no findings")
        self.option("--json", type=Path, help="where to write the record")

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parse the options; a run with `--smoke` uses the CPU, `device` says which one it is.

        From then on SIGTERM ends the process like an exit, so that servers of a bench end with it.
        """
        options = self._parser.parse_args(argv)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        if self._needs_gpu and not HAS_GPU and not options.smoke:
            self.error("this bench needs a GPU; --smoke runs a tiny one anywhere")
        options.device = torch.device("cuda" if HAS_GPU and not options.smoke else "cpu")
        self.smoke, self._path = options.smoke, options.json
        if not options.smoke:  # An engine's start may take minutes, and may be cut by a limit.
            logging.basicConfig(format="[%(relativeCreated)6d ms] %(message)s")
            logging.getLogger("vmkv.step.phases").setLevel(logging.INFO)
        return options

    def finish(
        self, rows: Sequence[Row], figures: Iterable[Figure], constants: Row | None = None
    ) -> int:
        """Print rows and figures, and write the record; the process's exit status.

        A small run promises nothing and writes only where `--json` says. The record is written
        again at each call, so a long bench can call this after each part.
        """
        if self.smoke:
            figures = [replace(each, at_most=None, at_least=None) for each in figures]
        figures = list(figures)
        print_rows(rows)
        print_figures(figures)
        if self._path is not None or not self.smoke:
            record = make_record(self._doc, rows, figures, constants)
            print("wrote", write_result(self.name, record, self._path), flush=True)
        return 0

    def rows_before(self, path: Path | None, constants: Row) -> list[Row]:
        """Rows of the record that `--after` names, or none; it is of the same sizes and device."""
        if path is None:
            return []
        before = json.loads(path.read_text())
        if before["constants"] != constants:
            self.error(f"--after: that record is of other sizes, {before['constants']}")
        device = before["environment"]["device"]
        if device != environment()["device"]:
            self.error(f"--after: that record is of another device, {device}")
        return before["rows"]


def make_record(
    doc: str, rows: Sequence[Row], figures: Iterable[Figure], constants: Row | None = None
) -> Row:
    """The content of a result file, for `write_result`.

    Args:
        doc: The bench's docstring, which states question and prediction.
        rows: Flat records. A key with `_q1` and `_q3` beside it is a median.
        figures: The promised numbers.
        constants: What the rows have in common.
    """
    return {
        **sections(doc),
        "environment": environment(),
        "constants": constants or {},
        "figures": [{**asdict(figure), "is_met": figure.is_met} for figure in figures],
        "rows": list(rows),
    }


def write_result(name: str, record: Row, path: Path | None = None) -> Path:
    """Write a record as JSON, to `path` or to `bench/results/NAME-DEVICE.json`."""
    device = str(record["environment"]["device"]).lower()
    slug = "".join(letter if letter.isalnum() else "-" for letter in device).strip("-")
    target = path or RESULTS / f"{name}-{slug}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"bench": name, **record}, indent=1) + "\n")
    return target


def sections(doc: str) -> dict[str, str]:
    """The labelled paragraphs of a bench's docstring: question, prediction, method, …"""
    found: dict[str, str] = {}
    label = ""
    for paragraph in doc.strip().split("\n\n"):
        match = _SECTION.match(paragraph)
        if match:
            label = match[1].lower().replace(" ", "_")
            paragraph = paragraph[match.end() :]
        if label:
            found[label] = f"{found.get(label, '')} {' '.join(paragraph.split())}".strip()
    return found


def environment() -> Row:
    """Device, driver, versions and commit: what a reader needs to judge or repeat a result."""
    record: Row = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "commit": _commit(),
        "device": "cpu",
    }
    for package in _PACKAGES:
        try:
            record[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            record[package] = None
    if HAS_GPU:
        properties = torch.cuda.get_device_properties(0)
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        record["device"] = properties.name
        record["device_memory_bytes"] = properties.total_memory
        record["cuda"] = torch.version.cuda
        record["driver"] = (_said_by(*query) or "").partition("\n")[0] or None
    return record


def _commit() -> str | None:
    """The measured commit, marked `-dirty` where the tree differs from it."""
    marker = ROOT / ".commit"  # Written where the tree travels without its git folder.
    if marker.exists():
        return marker.read_text().strip()
    return _said_by("git", "describe", "--always", "--dirty", "--abbrev=12")


def _said_by(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


# ---- measuring --------------------------------------------------------------------------------


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if HAS_GPU:
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds until the device has done `work`; it is idle before."""
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def in_turns(subjects: Sequence[T], rounds: int, warmup: int = 0) -> Iterator[tuple[T, int]]:
    """Each subject once a round, another one first each time; rounds below 0 are warm-up."""
    for at in range(-warmup, rounds):
        first = at % len(subjects)
        for subject in (*subjects[first:], *subjects[:first]):
            yield subject, at


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of repeated measurements."""
    if len(samples) < 2:
        return {"median": samples[0], "q1": samples[0], "q3": samples[0], "repeats": len(samples)}
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3, "repeats": len(samples)}


def quartiles(name: str, samples: Sequence[float]) -> Row:
    """A median and its quartiles as columns of a row: `name`, `name_q1` and `name_q3`."""
    values = spread(samples)
    return {name: values["median"], f"{name}_q1": values["q1"], f"{name}_q3": values["q3"]}


def paired_ratio(mine: Iterable[float], theirs: Iterable[float]) -> float:
    """The median ratio of measurements that were taken next to each other."""
    return statistics.median(ours / other for ours, other in zip(mine, theirs, strict=True))


# ---- showing numbers --------------------------------------------------------------------------


def show(name: str, value: Any) -> str:
    """A value of a row, by the unit in its name."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, (list, tuple)):
        return "-".join(show(name, each) for each in value)
    if not isinstance(value, (int, float)):
        return str(value)
    if name.endswith("_share"):
        return f"{100 * value:.2f} %"
    if name.endswith("_bytes"):
        return format_bytes(int(value))
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def show_got(figure: Row) -> str:
    """A figure's value with its unit."""
    if figure["unit"] == "%" and figure["got"] is not None:
        return f"{100 * figure['got']:.2f} %"
    return f"{show('', figure['got'])} {figure['unit']}"


def show_bound(figure: Row) -> str:
    """A figure's promise."""
    for sign, name in (("≤", "at_most"), ("≥", "at_least")):
        if figure.get(name) is not None:
            return f"{sign} {show_got({**figure, 'got': figure[name]})}"
    return "–"


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Column names and cells of rows; quartiles go into their median's cell."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    spread_names = [name for name in names if f"{name}_q1" in names and f"{name}_q3" in names]
    hidden = {f"{name}_{end}" for name in spread_names for end in ("q1", "q3")}
    names = [name for name in names if name not in hidden]

    def cell(row: Row, name: str) -> str:
        text = show(name, row.get(name))
        if name in spread_names and row.get(f"{name}_q1") is not None:
            text += f" [{show(name, row[f'{name}_q1'])}, {show(name, row[f'{name}_q3'])}]"
        return text

    return names, [[cell(row, name) for name in names] for row in rows]


def print_rows(rows: Sequence[Row]) -> None:
    """A table for the terminal; a median is followed by its quartiles."""
    names, lines = table(rows)
    widths = [max(map(len, column)) for column in zip(names, *lines, strict=True)]
    for line in (names, *lines):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def print_figures(figures: Iterable[Figure]) -> None:
    """The promised numbers, for the terminal."""
    for figure in figures:
        shown = asdict(figure)
        print(f"{figure.what}: {show_got(shown)}; must: {show_bound(shown)}; {figure.rival}")
