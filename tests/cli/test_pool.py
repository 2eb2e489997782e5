"""`vmkv pool`, and caches of a program that join it."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import tiny_model

from vmkv import ConfigError, ExtentPool, HostBackend, KVCache, OutOfPagesError, VMKVCache
from vmkv.units import MiB


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Path]:
    """Run a broker of 4 MiB as a command; it ends in order on SIGTERM."""
    path = tmp_path / "folder" / "pool.sock"
    command = [sys.executable, "-m", "vmkv.cli", "pool", "--memory", str(4 / 1024)]
    child = subprocess.Popen(
        [*command, "--socket", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == f"vmkv pool shares 4 MiB at {path}\n"
    yield path
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=60)
    assert (0, "") == (child.returncode, out)
    assert "joins: process" in err
    assert "has ended: process" in err
    assert not path.exists()


@pytest.mark.slow
def test_a_notebook_shares_memory_with_other_processes(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`VMKVCache(memory="pool")` asks for more, keeps its live rows, and leaves at its end."""
    monkeypatch.setenv("VMKV_POOL", str(pool))
    model = copy.deepcopy(tiny_model("llama"))
    inputs = torch.arange(3, 63)[None]
    asked = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(inputs, **asked)
    for memory in ("pool", f"pool:{pool}"):
        with VMKVCache(model.config, memory=memory) as cache:
            assert torch.equal(expected, model.generate(inputs, past_key_values=cache, **asked))
            core: KVCache = cache._store.cores[0]
            assert core.pool.member is not None
            assert core.pool.member.most_bytes <= 4 * MiB
            # The other one's rows leave what is left of the budget, and nobody gives them up.
            with VMKVCache(model.config, memory=memory, max_batch_size=2) as other:
                model.generate(inputs[:, :3], past_key_values=other, **asked)
                its: KVCache = other._store.cores[0]
                assert its.pool.member is not None
                its.pool.member._grow_timeout_s = 0.2
                with pytest.raises(OutOfPagesError):
                    its.pool.acquire([0] * (4 * MiB // its.pool.page_bytes))
                assert its.pool.budget_bytes + core.pool.budget_bytes <= 4 * MiB


def test_a_wrong_memory_is_refused() -> None:
    """At once, not with the first update."""
    config = tiny_model("llama").config
    for memory in ("pol", "pool:", "", "cuda:0"):
        with pytest.raises(ConfigError, match='is neither "pool" nor "pool:PATH"'):
            VMKVCache(config, memory=memory)
    refused = pytest.raises(ConfigError, match="leave one out")
    with closing(ExtentPool(HostBackend(), MiB)) as pool, refused:
        VMKVCache(config, memory="pool", pool=pool)
