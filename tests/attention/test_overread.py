"""The declared over-read is enough: probes at the end of mapped memory do not fault.

Each probe runs in its own process (helpers/overread_probe.py), because a touch of unmapped memory
ends the process. Every probe also runs the fused append, whose last write ends where memory does.

Not covered: the page after the margin of a *short* row in a batch of one, which no backend can
reach because views are cut to the longest sequence; and head sizes other than those here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import warm_python
from helpers.dense_rows import skip_unless_served

from vmkv.attention import AttentionSpec, get

DIMS = [64, 128, 256]


def probe(
    device: str, name: str, dtype: str, dim: int, margin: int, kv_dtype: str | None = None
) -> subprocess.CompletedProcess:
    """Run one probe; its exit status and last line of output are the result."""
    arguments = {"device": device, "name": name, "dtype": dtype, "dim": dim, "margin": margin}
    arguments["kv_dtype"] = kv_dtype or dtype
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return warm_python.run("-m", "helpers.overread_probe", json.dumps(arguments), env=environment)


def assert_clean(result: subprocess.CompletedProcess) -> None:
    """Fail with the faulting launch and the end of its traceback."""
    last = (result.stdout.splitlines() or ["(nothing ran)"])[-1]
    assert result.returncode == 0, f"died in: {last}\n{result.stderr[-2000:]}"


@pytest.mark.slow
def test_cpu_backend_stays_inside_mapped_memory():
    """On the host a touch past the end is a segmentation fault."""
    assert_clean(probe("host", "sdpa", "float32", 64, 0))


@pytest.mark.slow
def test_decoding_fp8_rows_stays_inside_mapped_memory():
    assert_clean(probe("host", "sdpa", "float32", 64, 0, "float8_e4m3fn"))


@pytest.mark.slow
def test_the_probe_faults_past_the_end_of_memory():
    """Without memory for the last token the probe faults, so a clean exit proves something."""
    result = probe("host", "sdpa", "float32", 64, -1)
    assert result.returncode < 0, result.stdout[-200:]


@pytest.mark.gpu
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", ["flash2", "torch", "flash3", "sdpa"])
def test_the_declared_overread_is_enough(name, dim):
    """Every length up to a few tiles, in every kind of launch, with no memory past the margin."""
    spec = AttentionSpec("cuda", torch.bfloat16, 4, 1, dim, dim)
    skip_unless_served(name, spec)
    assert_clean(probe("cuda:0", name, "bfloat16", dim, get(name).overread_tokens(spec)))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", DIMS)
def test_flash3_needs_a_margin(dim):
    """FlashAttention-3 faults without a margin, so its declared over-read is necessary."""
    skip_unless_served("flash3", AttentionSpec("cuda", torch.bfloat16, 4, 1, dim, dim))
    assert probe("cuda:0", "flash3", "bfloat16", dim, 0).returncode != 0


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_the_declared_overread_of_fp8_tiles_is_enough_and_necessary(dim):
    """With half of it flash3 faults."""
    spec = AttentionSpec("cuda", torch.bfloat16, 4, 1, dim, dim, kv_dtype=torch.float8_e4m3fn)
    skip_unless_served("flash3", spec)
    margin = get("flash3").overread_tokens(spec)
    assert_clean(probe("cuda:0", "flash3", "bfloat16", dim, margin, "float8_e4m3fn"))
    less = probe("cuda:0", "flash3", "bfloat16", dim, margin // 2, "float8_e4m3fn")
    assert less.returncode != 0
