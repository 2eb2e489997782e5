"""A second start finds what the first has measured and compiled."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo.utils
from helpers.tiny_models import tiny_model

from vmkv import Engine, SamplingParams, compile_cache
from vmkv.serve.runner import RunnerOptions
from vmkv.step.warm_up import _kept_sizes

PADDED = RunnerOptions(capture=True, compile_layers=False, show_progress=False)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VMKV_CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


@contextlib.contextmanager
def started(max_num_seqs: int = 2) -> Iterator[tuple[set[int], list[int]]]:
    """An engine with padded steps: the sizes of its mixed steps, and an answer of it."""
    with Engine(
        tiny_model("llama"),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=128,
        budget_bytes=1 << 26,
        runner="graphs",
        runner_options=PADDED,
    ) as engine:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        [answer] = engine.generate([[*range(3, 43)]], params)
        graphs = engine._runner.stepper.mixed_graphs
        yield {bucket.num_tokens for bucket in graphs.keys()}, answer.outputs[0].token_ids  # noqa: SIM118  # no dictionary


def test_slow_sizes_are_kept_and_not_captured_again(folder: Path) -> None:
    """Steps of such a size run as larger ones, with the same tokens."""
    with started() as (sizes, expected):
        assert {32, 64, 96, 128} == sizes
    [file] = folder.glob("slow-sizes-*")
    assert b"[]" == compile_cache.read(file.name)  # Nothing is timed on the host.
    compile_cache.write(file.name, b"[64]")
    with started() as (sizes, tokens):
        assert {32, 96, 128} == sizes
        assert expected == tokens
    assert b"[64]" == compile_cache.read(file.name)


def test_damaged_sizes_are_measured_anew(folder: Path) -> None:
    with started():
        pass
    [file] = folder.glob("slow-sizes-*")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with started() as (sizes, _):
        assert {32, 64, 96, 128} == sizes
    assert whole == file.read_bytes()


def test_sizes_of_another_shape_are_not_used(folder: Path) -> None:
    with started():
        pass
    [file] = folder.glob("slow-sizes-*")
    compile_cache.write(file.name, b"[64]")
    with started(max_num_seqs=3) as (sizes, _):
        assert {32, 64, 96, 128} == sizes
    assert 2 == len([*folder.glob("slow-sizes-*")])


@pytest.mark.parametrize(
    ("found", "is_used"),
    [(("[64]", "[64]"), True), (("[64]", "[32]"), False), (("[64]", None), False)],
)
def test_ranks_use_sizes_that_all_of_them_have(
    monkeypatch: pytest.MonkeyPatch, found: tuple[str | None, str | None], is_used: bool
) -> None:
    """Otherwise all of them measure, so that they capture the same graphs."""
    meeting, told = threading.Barrier(2, timeout=30), [0, 0]
    results: list[frozenset[int] | None] = [frozenset(), frozenset()]
    contents = {str(rank): text for rank, text in enumerate(found)}
    monkeypatch.setattr(compile_cache, "read", lambda name: (contents[name] or "").encode() or None)

    def run(rank: int) -> None:
        def agree(value: int) -> int:
            told[rank] = value
            meeting.wait()
            most = max(told)
            meeting.wait()
            return most

        results[rank] = _kept_sizes(str(rank), agree)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert results == ([frozenset({64})] * 2 if is_used else [None, None])


SCRIPT = """
from vmkv import compile_cache
compile_cache.choose_compiler_folder()
import torch
from torch._dynamo.utils import counters
from vmkv.step.compiled_layers import _compiler

with compile_cache.compiler_folder():
    backend = _compiler("inductor", {})
    torch.compile(torch.nn.functional.silu, dynamic=True, backend=backend)(torch.ones(3, 8))
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_compiled_layers_are_kept(folder: Path) -> None:
    """By torch's compiler, in vmkv's folder; nothing is compiled again."""
    root = Path(__file__).parents[2]
    its = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **its}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)

    def hits_and_misses() -> tuple[int, int]:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert 0 == done.returncode, done.stderr
        hits, misses = map(int, done.stdout.split())
        return hits, misses

    assert (0, 1) == hits_and_misses()
    assert (1, 0) == hits_and_misses()
    [compiled] = [each for each in folder.iterdir() if each.is_dir()]
    assert len([*compiled.rglob("*.py")]) >= 1
    assert (folder / f"{compiled.name}.files").is_file()


def test_a_folder_of_the_users_own_is_left_to_the_compiler(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    with compile_cache.compiler_folder():
        assert str(tmp_path / "own") == os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert not folder.exists()


@pytest.mark.slow
def test_layers_are_traced_once() -> None:
    """The compiler starts again where it has taken a number for a variable and cannot keep it."""
    counters = torch._dynamo.utils.counters["aot_autograd"]
    counters.clear()
    options = RunnerOptions(
        capture=True, compile_layers=True, compile_backend="aot_eager", show_progress=False
    )
    with Engine(
        tiny_model("llama"),
        max_num_seqs=2,
        max_num_batched_tokens=64,
        budget_bytes=1 << 26,
        runner="graphs",
        runner_options=options,
    ):
        assert 0 < counters["total"] == counters["ok"]
