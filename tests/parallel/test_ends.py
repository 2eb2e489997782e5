"""Ranks end together, with one error that says which of them was the first, and why."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import rank_cases as cases
from helpers import warm_python
from helpers.hosted import hosted
from helpers.tiny_models import VERSION

from vmkv import RankError, SamplingParams
from vmkv.serve import FinishReason
from vmkv.serve.parallel.engine import open_parallel_engine
from vmkv.units import MiB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("warm_children"),
    pytest.mark.skipif(VERSION < (5, 17), reason="transformers has no plans to divide models by"),
]

KILLED = r"rank 1 has ended: it was ended by signal 9"


def _serve_and_lose_a_rank() -> None:
    model = partial(cases.tiny_part, "llama")
    with open_parallel_engine(model, 2, device_type="cpu", **cases.ROOMY) as engine:
        handles = [engine.add([5, 6, 7], SamplingParams(max_tokens=190)) for _ in range(3)]
        for _ in range(5):
            engine.step()
        (other,) = multiprocessing.active_children()
        cases.end_process(other.pid)
        with pytest.raises(RankError, match=KILLED):
            list(handles[0])  # Steps, as long as that lasts.
        for handle in handles:
            assert handle.output().outputs[0].finish_reason is FinishReason.ERROR
            assert isinstance(handle.output().error, RankError)
        engine.add([1, 2])


def test_a_rank_that_is_killed_ends_all_with_one_error() -> None:
    """Everybody who asks hears of it, at once; nothing is left behind."""
    with pytest.raises(RankError, match=KILLED):
        _serve_and_lose_a_rank()
    assert not multiprocessing.active_children()


def _idle_and_lose_a_rank() -> None:
    model = partial(cases.tiny_part, "llama")
    lost = threading.Event()
    with open_parallel_engine(model, 2, device_type="cpu", **cases.ROOMY) as engine:
        engine.when_lost(lost.set)
        handles = [engine.add([5, 6, 7], SamplingParams(n=2, max_tokens=190)) for _ in range(2)]
        for _ in range(5):
            engine.step()
        (other,) = multiprocessing.active_children()
        cases.end_process(other.pid)
        assert lost.wait(60.0)
        with pytest.raises(RankError, match=KILLED):
            engine.step()
        for handle in handles:
            assert handle.is_finished
            assert isinstance(handle.output().error, RankError)
        assert not engine.has_unfinished


def test_a_rank_that_is_killed_between_steps_ends_all_requests() -> None:
    """The next step ends them with the rank's error."""
    _idle_and_lose_a_rank()


def _serve_and_stop_a_rank() -> None:
    model = partial(cases.tiny_part, "llama")
    with open_parallel_engine(model, 2, device_type="cpu", timeout_s=20, **cases.ROOMY) as engine:
        handle = engine.add([5, 6, 7], SamplingParams(max_tokens=190))
        for _ in range(5):
            engine.step()
        for group in (
            dist.group.WORLD,
            engine._ranks._agreement,
            engine._ranks._control,
        ):  # The start had more time.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)
        (other,) = multiprocessing.active_children()
        os.kill(other.pid, signal.SIGSTOP)
        list(handle)


def test_a_rank_that_hangs_is_named() -> None:
    """Not the rank that has waited for it, nor a source file of gloo's."""
    with pytest.raises(RankError) as raised:
        _serve_and_stop_a_rank()
    assert "rank 1 of 2 did not answer within 20 s" == str(raised.value)
    assert not multiprocessing.active_children()


def _interrupt_a_step() -> None:
    model = partial(cases.tiny_part, "llama")
    with open_parallel_engine(model, 2, device_type="cpu", **cases.ROOMY) as engine:
        handle = engine.add([5, 6, 7], SamplingParams(max_tokens=190))
        engine.step()
        with (
            mock.patch.object(engine._view, "grow", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            engine.step()
        assert handle.is_finished
        with pytest.raises(RankError, match="rank 0 of 2 has ended: a step was interrupted"):
            engine.step()


def test_an_interrupt_in_a_step_ends_all() -> None:
    """Other ranks may wait for the step's rest; nobody waits until the time limit."""
    _interrupt_a_step()
    assert not multiprocessing.active_children()


async def _serve_nobody_and_lose_a_rank() -> None:
    model = partial(cases.tiny_part, "llama")
    with open_parallel_engine(model, 2, device_type="cpu", **cases.ROOMY) as engine:
        served = hosted(engine, ends_with_device=True)
        await served._connect()
        (other,) = multiprocessing.active_children()
        cases.end_process(other.pid)
        await served._wait_for_end()
        assert re.search(KILLED, str(served.failure))
        assert "steps" not in str(served.failure)


def test_a_rank_that_ends_while_nobody_asks_is_noticed() -> None:
    """At once, and not by the next client: whoever serves the engine can start another."""
    asyncio.run(_serve_nobody_and_lose_a_rank())
    assert not multiprocessing.active_children()


def _serve_and_lose_a_rank_on_gpus() -> None:
    options = {**cases.ROOMY, "budget_bytes": 256 * MiB}
    with open_parallel_engine(cases.part_on_a_gpu, 2, **options) as engine:
        handle = engine.add([5, 6, 7], SamplingParams(max_tokens=190))
        for _ in range(50):
            engine.step()
        (other,) = multiprocessing.active_children()
        cases.end_process(other.pid)
        with pytest.raises(RankError, match=KILLED):
            list(handle)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has no second GPU")
def test_graphs_that_wait_for_a_lost_rank_end() -> None:
    """What a graph waits for never comes; the kernels that wait are given up."""
    _serve_and_lose_a_rank_on_gpus()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (cases.part_that_fails, "the disk has gone"),
        (cases.part_without_tables, "the sampler's token counts need"),
    ],
)
def test_a_rank_that_cannot_begin_says_why(model: Callable[..., Any], why: str) -> None:
    """In rank 0's error, as if it had failed here; tables of penalties are made at the start."""
    with (
        pytest.raises(RankError, match=f"rank 1 has ended: {why}"),
        open_parallel_engine(model, 2, device_type="cpu", **cases.ROOMY),
    ):
        pass


KILLED_RANK_0 = """
import os, signal
from functools import partial
from helpers import rank_cases as cases
from vmkv.serve.parallel.engine import open_parallel_engine

if __name__ == "__main__":
    model = partial(cases.tiny_part, "llama")
    with open_parallel_engine(model, 2, device_type="cpu", **cases.ROOMY):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_of_ranks_whose_first_was_killed(tmp_path: Path) -> None:
    """No process, no file, and no traceback of those who outlived it."""
    script, folder = tmp_path / "killed.py", tmp_path / "temporary"
    script.write_text(KILLED_RANK_0)
    folder.mkdir()
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": path}
    child = warm_python.start("-m", "killed", env=environment)
    _, errors = child.communicate(timeout=120)  # Until nobody is left who could write.
    assert -9 == child.returncode
    assert not list(folder.iterdir())
    assert "Traceback" not in errors
