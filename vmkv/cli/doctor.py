"""`vmkv doctor`: usable devices, attention kernels and packages, and how to get missing ones."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import itertools
import json
import operator
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import vmkv

from ..errors import VMKVError, one_line
from ..releases import newer_than_tested
from ..units import format_bytes
from .arguments import Commands

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
#: Kernels that are installed separately: the distribution, how to install it, and its compute
#: capabilities. PyTorch distributes FlashAttention-3, for two releases of CUDA.
_KERNELS = {
    "flash3": (
        "flash-attn-3",
        "flash-attn-3 --extra-index-url https://download.pytorch.org/whl/{cuda}",
        range(9, 10),
    ),
    "flash2": ("flash-attn", "flash-attn --no-build-isolation", range(8, 100)),
}
#: How to get either kernel from the Hugging Face Hub.
_FROM_HUB = "pip install 'vmkv[hub]'"
#: Default kernel of the engine where it runs; `generate` uses it only if it is named.
_SERVING = "flash3"
_FOR_SERVING = "pip install 'vmkv[serve]'"
#: Packages by distribution: the purpose, and how to install it.
_PACKAGES = {
    "torch": ("tensors", "pip install torch"),
    "transformers": ("models", "pip install transformers"),
    "cuda-bindings": ("the driver's memory calls", "pip install cuda-python"),
    "fastapi": ("vmkv serve", _FOR_SERVING),
    "uvicorn": ("vmkv serve", _FOR_SERVING),
    "prometheus-client": ("metrics, vmkv top", _FOR_SERVING),
    "httpx": ("vmkv top", _FOR_SERVING),
}


@dataclass(frozen=True)
class Finding:
    """Result of one check, in a section of the report, with a remedy if there is one."""

    section: str
    name: str
    is_ok: bool
    details: str
    remedy: str = ""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor", help="what this machine has, what is missing and how to get it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Examine the machine and report; status 1 if no device is usable."""
    findings = [*examine()]
    devices = [each.name for each in findings if each.section == "device" and each.is_ok]
    if arguments.json:
        record = {"environment": environment(), "findings": [asdict(each) for each in findings]}
        out.write(json.dumps(record, indent=2) + "\n")
    else:
        out.write(_report(findings, devices))
    return 0 if devices else 1


def environment() -> dict[str, Any]:
    """Return versions and the system."""
    return {
        "vmkv": vmkv.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "nvidia_driver": _driver_version(),
    }


def examine() -> Iterator[Finding]:
    """Return all findings, section by section; opens devices and closes them again."""
    try:
        importlib.import_module("torch")
    except (ImportError, OSError) as error:
        why, remedy = f"needs torch: {one_line(error)}", "pip install --force-reinstall torch"
        return itertools.chain([Finding("device", "host", False, why, remedy)], _packages())
    return itertools.chain(_devices(), _attention(), _packages())


def _report(findings: list[Finding], devices: list[str]) -> str:
    lines = ["  ".join(f"{name} {value}" for name, value in environment().items() if value)]
    width = max(len(each.name) for each in findings)
    for _, section in itertools.groupby(findings, operator.attrgetter("section")):
        lines.append("")
        for each in section:
            lines.append(f"{each.name:<{width}}  {'ok' if each.is_ok else '-':<2}  {each.details}")
    lines.append("")
    remedies = [f"  {each.name:<{width}}  {each.remedy}" for each in findings if each.remedy]
    if remedies:
        lines += ["what is missing or faster, and how to get it:", *remedies, ""]
    if any(each.section == "attention" for each in findings):
        lines.append(attention_summary(findings))
    where = "vmkv cannot run here: no device is usable."
    if any(name.startswith("cuda") for name in devices):
        where = f"vmkv runs here on {', '.join(devices)}."
    elif devices:
        where = "vmkv runs here on the CPU: right for tests and small models, slow for others."
    return "\n".join([*lines, where, ""])


def attention_summary(findings: list[Finding]) -> str:
    """Describe in one line which kernels are used."""
    from ..attention.registry import ORDER

    found = {each.name: each for each in findings if each.section == "attention"}
    used = next(name for name in ORDER if found[name].is_ok)  # The last one runs everywhere.
    serving = _SERVING if found[_SERVING].is_ok else used
    text = f"Attention uses {used}" + (" (torch's own)" if used in ("torch", "sdpa") else "")
    return f"{text}." if serving == used else f"{text}, and in vmkv serve {serving}."


# ---- devices ----------------------------------------------------------------------------------


def _devices() -> Iterator[Finding]:
    import torch

    note, num_devices = "", torch.cuda.device_count()
    if torch.version.cuda is None and _driver_version():
        note = (
            f"this torch ({torch.__version__}) was built without CUDA: install the CUDA build "
            "from https://pytorch.org/get-started"
        )
    for index in range(max(1, num_devices)):
        name = "an NVIDIA GPU"
        if index < num_devices:
            properties = torch.cuda.get_device_properties(index)
            name = f"{properties.name}, {format_bytes(properties.total_memory)}"
        yield _device(f"cuda:{index}", f"{name}, ", note)
    yield _device("host", "", "")


def _device(name: str, what: str, note: str) -> Finding:
    from ..core.backend import open_backend

    try:
        with contextlib.closing(open_backend(name)) as backend:
            page, free = backend.granularity_bytes, backend.free_memory_bytes()
    except VMKVError as error:
        remedy = f"use it with --device cpu meanwhile; {note}" if note else ""
        return Finding("device", name, False, str(error), remedy)
    details = f"{what}pages of {format_bytes(page)}, {format_bytes(free)} free"
    return Finding("device", name, not note, f"{details}; but {note}" if note else details, note)


def _driver_version() -> str | None:
    try:
        found = re.search(r"Kernel Module.*?(\d+\.\d+[.\d]*)", _DRIVER_FILE.read_text())
    except OSError:
        return None
    return found.group(1) if found else None


# ---- kernels and packages ---------------------------------------------------------------------


def _attention() -> Iterator[Finding]:
    """Check each attention backend with a layer like Llama-3-8B's, on the GPU if there is one."""
    import torch

    from ..attention import AttentionSpec, backend_names, why_not

    is_cuda = torch.cuda.is_available()
    device_type, dtype = ("cuda", torch.bfloat16) if is_cuda else ("cpu", torch.float32)
    spec = AttentionSpec(device_type, dtype, 32, 8, 128, 128)
    for name in backend_names():
        try:
            reason = why_not(name, spec)
        except VMKVError as error:
            reason = str(error)
        details, remedy = reason or f"on {device_type}", ""
        if is_cuda and name in _KERNELS:
            distribution, options, capabilities = _KERNELS[name]
            version = _version(distribution)
            if reason is None:
                details += f", {distribution} {version}" if version else ""
            elif torch.cuda.get_device_capability()[0] in capabilities:
                again = " --force-reinstall --no-deps" if version else ""
                is_cuda_12 = (torch.version.cuda or "").startswith("12")
                options = options.format(cuda="cu126" if is_cuda_12 else "cu130")
                remedy = f"pip install{again} {options}"
                if _version("kernels") is None:
                    remedy += f", or, built for this machine, {_FROM_HUB}"
        yield Finding("attention", name, reason is None, details, remedy)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _packages() -> Iterator[Finding]:
    for name, (purpose, remedy) in _PACKAGES.items():
        version = _version(name)
        details = f"{version or 'not installed'}, for {purpose}"
        newer = newer_than_tested() if version and name == "transformers" else ""
        yield Finding("package", name, version is not None, details, newer if version else remedy)
    is_built = importlib.util.find_spec("vmkv.core._native._core") is not None
    details = "built" if is_built else f"not built for Python {sys.version_info[0]}"
    remedy = "" if is_built else "pip install . in the checkout, with a C compiler"
    yield Finding("package", "vmkv.core._native", is_built, details, remedy)
