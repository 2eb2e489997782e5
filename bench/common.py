"""What every bench shares: the record of where it ran, paired timing, and the result file."""

from __future__ import annotations

import datetime
import json
import pathlib
import platform
import statistics
import subprocess
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from vmkv.units import format_bytes

#: One flat record of what was measured.
Row = dict[str, Any]
RESULTS = pathlib.Path(__file__).parent / "results"
#: vLLM as it is packed may lack optional kernels; none of these makes it slower.
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def environment() -> dict[str, Any]:
    """Device, driver, versions and commit: what a reader needs to judge or repeat a result."""
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "commit": _commit(),
        "device": "cpu",
    }
    for package in ("vmkv", "torch", "transformers", "cuda-bindings", "flash-attn", "triton"):
        try:
            record[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            record[package] = None
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        record["device"] = properties.name
        record["device_memory_bytes"] = properties.total_memory
        record["cuda"] = torch.version.cuda
        record["driver"] = _driver_version()
    return record


def _commit() -> str | None:
    """The commit measured, marked where the tree differs from it."""
    root = pathlib.Path(__file__).parents[1]
    marker = root / ".commit"  # Written where the tree travels without its git folder.
    if marker.exists():
        return marker.read_text().strip()
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _driver_version() -> str | None:
    try:
        return subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return None


def write_result(
    name: str, record: dict[str, Any], path: pathlib.Path | None = None
) -> pathlib.Path:
    """Write a result as JSON, to `path` or to `bench/results/NAME-DEVICE.json`."""
    device = str(record.get("environment", {}).get("device", "cpu")).lower()
    slug = "".join(letter if letter.isalnum() else "-" for letter in device).strip("-")
    target = path or RESULTS / f"{name}-{slug}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"bench": name, **record}, indent=1) + "\n")
    return target


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of repeated measurements."""
    if len(samples) < 2:
        return {"median": samples[0], "q1": samples[0], "q3": samples[0], "repeats": len(samples)}
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3, "repeats": len(samples)}


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
