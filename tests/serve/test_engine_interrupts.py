"""SIGINT at random bytecodes of a running engine does not change tokens or leak memory.

Deterministic: the moment is a number of calls and bytecodes. By default there are few interrupts;
`VMKV_INTERRUPTS=2000` has many, with other seeds, and takes half an hour.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from helpers.engine_play import EnginePlay, Shape
from helpers.interrupts import interrupted
from helpers.requests import finish_all
from helpers.scheduler_books import check_scheduler
from helpers.tiny_models import VOCABULARY

from vmkv import KVCache
from vmkv.serve.engine import Engine
from vmkv.serve.params import SamplingParams
from vmkv.serve.request import RequestHandle
from vmkv.serve.scheduler import PreemptionCosts
from vmkv.units import KiB, MiB

_NUM_INTERRUPTS = int(os.environ.get("VMKV_INTERRUPTS", "40"))
_NUM_ENGINES = max(4, _NUM_INTERRUPTS // 20)
_SHAPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"budget_bytes": 4 * MiB}),
    # Requests are preempted: some are swapped, some recomputed.
    ("llama", {"budget_bytes": 56 * KiB, "host_budget_bytes": MiB}),
    ("llama", {"budget_bytes": 56 * KiB, "watermark_bytes": 0}),
    ("mistral", {"budget_bytes": 96 * KiB, "host_budget_bytes": MiB, "deterministic": True}),
)
_PARAMS = (
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=0.7, seed=3, max_tokens=20),
    SamplingParams(temperature=0.7, seed=4, max_tokens=8, n=2, presence_penalty=0.5),
)


def _requests(draw: random.Random) -> list[tuple[list[int], SamplingParams]]:
    start = [draw.randrange(3, VOCABULARY) for _ in range(8)]  # Some share a prefix.
    requests = []
    for _ in range(5):
        rest = [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(2, 20))]
        requests.append((draw.choice([start, []]) + rest, draw.choice(_PARAMS)))
    return requests


def _said(handle: RequestHandle) -> list[list[int]]:
    return [list(each.token_ids) for each in handle.output().outputs]


@pytest.mark.parametrize("number", range(_NUM_ENGINES))
def test_an_engine_can_be_interrupted_anywhere(
    number: int, make_engine: Callable[..., Engine]
) -> None:
    """Requests continue, `generate` cancels its own, and tokens equal an undisturbed engine's."""
    draw = random.Random(number)
    name, options = _SHAPES[number % len(_SHAPES)]
    costs = PreemptionCosts(flops_per_s=1.0 if number % 3 else 1e18)
    engine = make_engine(name, preemption_costs=costs, **options)
    requests = _requests(draw)
    prompts, params = zip(*requests, strict=True)
    fresh = make_engine(name, deterministic=options.get("deterministic", False))
    wanted = [
        [list(each.token_ids) for each in output.outputs]
        for output in fresh.generate(list(prompts), list(params))
    ]
    num_interrupts = 0

    def interrupt(function: Callable[[], object], calls_max: int) -> bool:
        nonlocal num_interrupts
        at, calls = draw.randrange(300), draw.randrange(calls_max)
        is_sent, is_interrupted = interrupted(function, at, skipped_calls=calls)
        assert is_sent == is_interrupted
        num_interrupts += is_sent
        engine.cache.check()
        check_scheduler(engine._scheduler)
        return is_interrupted

    while num_interrupts < _NUM_INTERRUPTS / _NUM_ENGINES:
        handles = [engine.add(*request) for request in requests]
        while interrupt(lambda: finish_all(engine), 3000):
            pass
        assert wanted == [_said(handle) for handle in handles]
        interrupt(lambda: engine.generate(list(prompts), list(params)), 5000)
        finish_all(engine)
        assert not engine._handles
    [output] = engine.generate([prompts[0]], params[0])
    assert wanted[0] == [list(each.token_ids) for each in output.outputs]


_ASKED = SamplingParams(temperature=0, max_tokens=2, n=2, ignore_eos=True)


def _retire_some(cache: KVCache) -> None:
    """Retire memory of a sequence behind a fence that has not passed."""
    other = cache.open()
    cache.grow([(other, 40)])
    fence = cache.pool.reclaimer.new_fence()
    for group in cache.groups:
        group.retire_from(other.row, 0, fence)
    other.close()
    assert cache.pool.reclaimer.batches


@pytest.mark.parametrize(
    ("call", "names"),
    [
        ("add", ("add", "_add_sample", "_follow")),
        ("generate", ("_add_to",)),
        ("cancel", ("cancel", "end")),
        ("finish", ("finish", "end")),
        ("cancel_all", ("cancel_all", "end_all", "end")),
        ("close", ("close", "cancel_all")),
        ("fall_idle", ("wait", "_wait_for_oldest", "_reclaim", "_unmap", "close_ended")),
    ],
)
def test_interrupted_calls_leave_the_engine_consistent(call: str, names: tuple[str, ...]) -> None:
    """At each offset of the call: the scheduler has exactly the requests that have a handle."""
    for at in itertools.count():
        play = EnginePlay(Shape(watermark_pages=0, is_late=call == "fall_idle"))
        engine = play.engine
        handle = engine.add([1] * 40, _ASKED)
        engine.step()
        if call == "fall_idle":
            while engine.advance():
                pass
            _retire_some(engine.cache)
        calls: dict[str, Callable[[], object]] = {
            "add": lambda engine=engine: engine.add([3], _ASKED),
            "generate": lambda engine=engine: engine.generate([[3], [4]], _ASKED),
            "cancel": handle.cancel,
            "finish": lambda engine=engine, handle=handle: engine.finish(handle, 0),
            "cancel_all": lambda engine=engine: engine.cancel_all(ValueError()),
            "close": engine.close,
            "fall_idle": engine.fall_idle,
        }
        is_sent, is_interrupted = interrupted(calls[call], at, names=names)
        assert is_sent == is_interrupted
        if call == "close":
            engine.close()
            assert 0 == play.pool.stats().resident_bytes
            play.abandon()
        else:
            assert set(engine._scheduler.requests) == set(engine._handles)
            assert call != "generate" or set(engine._handles) <= {0, 1}
            engine.cache.check()
            check_scheduler(engine._scheduler)
            engine.cancel_all()
            engine.step()
            assert 0 == engine.cache.stats().num_sequences
            play.close()
        if not is_sent:
            break
