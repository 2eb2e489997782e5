"""Selection of attention backends: in order of preference, by name, and errors with alternatives.

The order among CUDA backends needs a device; only its form is tested here.
test_against_reference.py tests what each kernel computes.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from vmkv.attention import (
    AttentionBackend,
    AttentionSpec,
    backend_names,
    get,
    register,
    registry,
    select,
    why_not,
)
from vmkv.errors import ConfigError

CPU = AttentionSpec("cpu", torch.float32, 8, 2, 64, 64)
GPU = AttentionSpec("cuda", torch.bfloat16, 8, 2, 128, 128)


def test_cpu_takes_sdpa():
    assert select(CPU).name == "sdpa"


def test_every_backend_implements_the_protocol():
    """Built-in backends import without their packages and answer the host-side questions."""
    for name in backend_names():
        backend = get(name)
        assert isinstance(backend, AttentionBackend)
        assert backend.name == name
        assert backend.overread_tokens(GPU) >= 0
        assert backend.overread_tokens(replace(GPU, k_dim=64)) >= 0


def test_only_flash3_declares_an_overread():
    margins = {name: get(name).overread_tokens(GPU) for name in backend_names()}
    assert {name for name, margin in margins.items() if margin} == {"flash3"}
    assert margins["flash3"] == 176


def test_order_names_known_backends():
    """The order ends with `sdpa`, which serves everything."""
    assert set(registry.ORDER) <= set(backend_names())
    assert registry.ORDER[-1] == "sdpa"


@pytest.mark.parametrize("name", ["flash2", "flash3", "torch"])
def test_a_cuda_kernel_on_cpu_is_refused_with_an_alternative(name):
    with pytest.raises(ConfigError, match=r"CUDA, not on cpu; 'sdpa' would serve it"):
        select(CPU, name)


def test_an_unknown_name_is_refused_with_the_known_names():
    with pytest.raises(ConfigError, match="flash2"):
        select(CPU, "flash5")


def test_an_integer_dtype_is_refused_with_the_reason_of_each_backend():
    with pytest.raises(ConfigError, match=r"'sdpa': torch\.int8 is not floating"):
        select(AttentionSpec("cpu", torch.int8, 8, 2, 64, 64))


def test_own_backends_can_be_registered_and_named(monkeypatch):
    """A registered backend is made once and cannot replace another."""
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))

    class Mine(AttentionBackend):
        name = "mine"

        def why_not(self, spec):
            return None

        def attend(self, call):
            return get("sdpa").attend(call)

    register("mine", Mine)
    assert select(CPU, "mine") is select(CPU, "mine")
    with pytest.raises(ConfigError, match="exists already"):
        register("sdpa", Mine)


def test_importing_attention_imports_no_kernel_package():
    """Optional packages are imported when their backend is asked whether it can run."""
    code = (
        "import sys, vmkv.attention;"
        "heavy = {'flash_attn', 'flash_attn_interface', 'vllm', 'triton'};"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
def test_cuda_selects_a_flash_kernel():
    """For half precision an installed FlashAttention; for float32 SDPA."""
    spec = AttentionSpec("cuda", torch.bfloat16, 8, 2, 128, 128)
    assert select(spec).name in {"flash3", "flash2", "torch"}
    assert select(AttentionSpec("cuda", torch.float32, 8, 2, 128, 128)).name == "sdpa"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash2", "flash3", "torch"])
def test_float32_on_a_flash_kernel_is_refused(name):
    """The reason names the supported dtypes."""
    reason = why_not(name, AttentionSpec("cuda", torch.float32, 8, 2, 128, 128))
    assert reason is not None
    assert "float16 and bfloat16" in reason
