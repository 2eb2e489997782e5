"""Everything imports on a machine without a GPU, a driver, and optional packages.

Tests import in a child process, which has no modules of other tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vmkv import ConfigError
from vmkv.core.backend.cuda import CudaBackend

ROOT = Path(__file__).parents[1] / "vmkv"
# Modules of Ray's and vLLM's processes import them, that of TRL's trainers TRL, and that of kernels
# of experts Triton; no other does.
_NEEDS_MORE = re.compile(r"^(import|from) (ray|trl|triton|vllm)\b", re.MULTILINE)
MODULES = sorted(
    ".".join(("vmkv", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if path.name != "__main__.py" and not _NEEDS_MORE.search(path.read_text())
)
# Imports modules with absent packages set to None.
_SCRIPT = """
import importlib, sys, warnings
warnings.simplefilter("error", ResourceWarning)
for absent in {absent}:
    sys.modules[absent] = None
for name in {names}:
    importlib.import_module(name)
import torch
assert not torch.cuda.is_initialized(), "an import initialised CUDA"
print("imported", len(sys.modules))
"""


def _import_all(names: list[str], absent: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(names=names, absent=absent)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.slow
def test_every_module_imports_without_optional_packages() -> None:
    """flash-attn, cuda-python and Ray are imported at their first use."""
    absent = ["flash_attn", "flash_attn_interface", "cuda", "cuda.bindings", "ray"]
    child = _import_all(MODULES, absent)
    assert 0 == child.returncode, child.stderr


@pytest.mark.slow
def test_import_vmkv_does_not_need_transformers() -> None:
    """Only vmkv.hf needs it."""
    child = _import_all(["vmkv", "vmkv.testing"], ["transformers"])
    assert 0 == child.returncode, child.stderr


def test_cuda_backend_without_driver_is_a_config_error() -> None:
    """The error proposes the host backend."""
    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match='use backend="host"'):
        CudaBackend()


def test_cuda_backend_without_its_package_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error has the command that installs cuda-python."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ConfigError, match="pip install cuda-python"):
        CudaBackend()
