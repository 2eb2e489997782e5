"""When one rank ends, all ranks end, with one error that names the rank and the reason."""

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
from vmkv.serve.parallel.engine import open_parallel_engine
from vmkv.serve.request import FinishReason
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
            list(handles[0])  # Runs steps until one fails.
        for handle in handles:
            assert handle.output().outputs[0].finish_reason is FinishReason.ERROR
            assert isinstance(handle.output().error, RankError)
        engine.add([1, 2])


def test_a_killed_rank_ends_all_requests() -> None:
    """Each request has the rank's error, a new one is refused, and no process is left."""
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
        # The start needs the longer time limit.
        for group in (dist.group.WORLD, engine._ranks._agreement, engine._ranks._control):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)
        (other,) = multiprocessing.active_children()
        os.kill(other.pid, signal.SIGSTOP)
        list(handle)


def test_a_rank_that_hangs_is_named() -> None:
    """The error names neither the waiting rank nor a source file of gloo."""
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


def test_an_interrupted_step_ends_all_ranks() -> None:
    """At once: other ranks do not wait until the time limit."""
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


def test_the_end_of_a_rank_is_noticed_without_requests() -> None:
    """At once, so that the server can start another engine."""
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
    """Kernels that wait for the lost rank stop."""
    _serve_and_lose_a_rank_on_gpus()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (cases.part_that_fails, "the disk has gone"),
        (cases.part_without_tables, "the sampler's token counts need"),
    ],
)
def test_a_rank_that_fails_to_start_says_why(model: Callable[..., Any], why: str) -> None:
    """Rank 0 raises its error; the tables of penalties are made at the start."""
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


def test_killing_rank_0_leaves_nothing_behind(tmp_path: Path) -> None:
    """No process, no file, and no traceback of the other rank."""
    script, folder = tmp_path / "killed.py", tmp_path / "temporary"
    script.write_text(KILLED_RANK_0)
    folder.mkdir()
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": path}
    child = warm_python.start("-m", "killed", env=environment)
    _, errors = child.communicate(timeout=120)  # Ends when all processes have closed the pipe.
    assert -9 == child.returncode
    assert not list(folder.iterdir())
    assert "Traceback" not in errors
