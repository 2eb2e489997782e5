"""A growth under pressure waits for the device only if the running step may use the memory.

The device runs its work only when the host waits for it, so that a growth that waits is noticed.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
from helpers.engine_play import Asked, EnginePlay, Shape
from helpers.stamp_runner import Mishap, answer

from vmkv import SamplingParams
from vmkv.serve.request import FinishReason, RequestHandle

#: Eight running requests hold some 50 pages; parked rows could fill 70 more, and have a third.
CHURN = Shape(max_num_seqs=8, max_num_batched_tokens=64, budget_pages=76, is_late=True, swaps=False)
_FILLED_AFTER_STEPS = 40


@pytest.fixture
def make_play() -> Iterator[Callable[[Shape], EnginePlay]]:
    """Make engines over stamped rows: a token depends on everything that its request reads."""
    plays: list[EnginePlay] = []

    def make(shape: Shape) -> EnginePlay:
        plays.append(EnginePlay(shape))
        return plays[-1]

    yield make
    for play in reversed(plays):  # In reverse: each restores the constants that it patched.
        play.engine.cancel_all()
        while play.engine.has_unfinished:
            play.engine.step()
        play.abandon()


def _ask(play: EnginePlay, prompt: Sequence[int], max_tokens: int, **how: Any) -> RequestHandle:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **how)
    handle = play.engine.add(prompt, params)
    play.asked.append(Asked(handle, 0, 1 << 60, 0, 0))
    return handle


def _churn(play: EnginePlay, seed: int, num_steps: int) -> list[RequestHandle]:
    """Requests come and go; four are always waiting."""
    draw = random.Random(seed)
    handles = []
    for _ in range(num_steps):
        while len(play.asked) < play.shape.max_num_seqs + 4:
            prompt = [draw.randrange(1, 8) for _ in range(draw.randint(8, 60))]
            handles.append(_ask(play, prompt, draw.randint(4, 36)))
        play.engine.step()
        play.check(is_deep=False)
    return handles


def _note_growths(play: EnginePlay) -> list[tuple[bool, Counter[str]]]:
    """Record for each growth whether it waits for the device, and its driver calls."""
    view, device, growths = play.engine._view, play.device, []
    grow = view.grow

    def noted(wanted: Any) -> None:
        num_done, before = device.num_done, device.calls.copy()
        grow(wanted)
        growths.append((device.num_done > num_done, device.calls - before))

    view.grow = noted
    return growths


@pytest.mark.parametrize("seed", range(3))
def test_growing_under_pressure_does_not_wait(
    make_play: Callable[[Shape], EnginePlay], seed: int
) -> None:
    """Memory of rows that no running step uses is taken at once, and mostly a step before."""
    play = make_play(CHURN)
    growths = _note_growths(play)
    ahead, grow, evict = Counter[bool](), play.engine._view.grow, play.cache.pool.pressure.evict

    def evicting(*args: Any) -> int:
        ahead[not grow_depth] += 1
        return evict(*args)

    grow_depth: list[None] = []

    def growing(wanted: Any) -> None:
        grow_depth.append(None)
        try:
            grow(wanted)
        finally:
            grow_depth.pop()

    with (
        mock.patch.object(play.engine._view, "grow", growing),
        mock.patch.object(play.cache.pool.pressure, "evict", evicting),
    ):
        handles = _churn(play, seed, 240)
    assert ahead[False] < ahead[True]
    del growths[:_FILLED_AFTER_STEPS]
    assert any(calls["mem_unmap"] for _, calls in growths)
    assert not any(has_waited for has_waited, _ in growths)
    ended = [handle.output().outputs[0].finish_reason for handle in handles if handle.is_finished]
    assert len(ended) > 50
    assert {FinishReason.LENGTH} == set(ended)


def test_driver_calls_do_not_depend_on_a_clock(
    make_play: Callable[[Shape], EnginePlay], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of a model must make the same calls, whatever their speed."""

    def calls_of_a_churn() -> list[Counter[str]]:
        play = make_play(CHURN)
        growths = _note_growths(play)
        _churn(play, 1, 100)
        return [*(calls for _, calls in growths), play.device.calls]

    expected = calls_of_a_churn()
    draw = random.Random(0)
    clock = itertools.accumulate(iter(lambda: draw.choice([1e-9, 1e-3, 3600.0]), None))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert expected == calls_of_a_churn()


# ---- memory of ended requests -------------------------------------------------------------


def _begin_after(
    play: EnginePlay, num_leaving: int, num_prompt_tokens: int, coming: Sequence[int], **how: Any
) -> tuple[bool, Counter[str]]:
    """End requests while another one decodes; new ones begin with their memory.

    Args:
        play: The engine.
        num_leaving: Number of requests that end in one step.
        num_prompt_tokens: Prompt tokens of each of them.
        coming: Prompt tokens of each new request.
        how: Parameters of the requests that end.

    Returns:
        Whether the growth of the new requests waited for the device, and its driver calls.
    """
    _ask(play, [1], 60)
    leaving = [_ask(play, [2] * num_prompt_tokens, 6, **how) for _ in range(num_leaving)]
    play.engine.step()
    begun = [_ask(play, [7] * num_tokens, 3) for num_tokens in coming]
    growths, scheduler = _note_growths(play), play.engine._scheduler
    while not all(handle.is_finished for handle in leaving):
        assert 1 + num_leaving == scheduler.num_running
        play.engine.step()
    assert 1 == scheduler.num_running
    growths.clear()
    play.engine.step()
    assert 1 + len(coming) == scheduler.num_running
    while not all(handle.is_finished for handle in begun):
        play.engine.step()
        play.check(is_deep=False)
    return growths[0]


def _small(budget_pages: int) -> Shape:
    return Shape(
        max_num_seqs=4,
        max_num_batched_tokens=160,
        budget_pages=budget_pages,
        is_late=True,
        swaps=False,
        prefix_caching=False,
    )


def test_memory_of_a_request_ended_by_length_is_reused_at_once(
    make_play: Callable[[Shape], EnginePlay],
) -> None:
    """Its end was known, so the running step does not use its memory."""
    has_waited, calls = _begin_after(make_play(_small(16)), 2, 40, [90])
    assert calls["mem_unmap"]
    assert not has_waited


def test_the_surplus_of_an_adopted_row_is_reused_at_once(
    make_play: Callable[[Shape], EnginePlay],
) -> None:
    """Two requests begin after one has ended: one adopts its row, the other gets the surplus."""
    has_waited, calls = _begin_after(make_play(_small(12)), 1, 60, [10, 20])
    assert calls["mem_unmap"]
    assert not has_waited


def test_memory_of_a_request_ended_by_a_stop_token_is_waited_for(
    make_play: Callable[[Shape], EnginePlay],
) -> None:
    """The running step writes the superfluous token of the request."""
    stop = answer([2] * 40, SamplingParams(temperature=0), 1)
    has_waited, calls = _begin_after(make_play(_small(16)), 2, 40, [90], stop_token_ids=stop)
    assert calls["mem_unmap"]
    assert has_waited


def test_memory_of_a_failed_step_is_waited_for(make_play: Callable[[Shape], EnginePlay]) -> None:
    """The device may have started the step, and then writes its tokens."""
    play = make_play(_small(16))
    failing = [_ask(play, [2] * 40, 6) for _ in range(2)]
    play.engine.step()
    begun, growths = _ask(play, [7] * 90, 3), _note_growths(play)
    play.runner.mishap = Mishap(RuntimeError("no step"), has_written=True)
    play.engine.step()
    assert [True, True] == [handle.is_finished for handle in failing]
    growths.clear()
    play.engine.step()
    assert 1 == play.engine._scheduler.num_running
    [(has_waited, calls)] = growths
    assert calls["mem_unmap"]
    assert has_waited
    while not begun.is_finished:
        play.engine.step()
    assert [] == play.device.violations


def test_memory_of_an_interrupted_step_is_waited_for(
    make_play: Callable[[Shape], EnginePlay],
) -> None:
    """The step is on the device although the engine has not recorded it."""
    play = make_play(_small(16))
    for prompt in ([1], [2] * 40, [2] * 40):
        _ask(play, prompt, 30)
    for _ in range(3):
        play.engine.step()
    reclaimer = play.pool.reclaimer
    with (
        mock.patch.object(reclaimer, "note_submitted", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        play.engine.step()
    play.engine.cancel_all()
    begun = _ask(play, [7] * 90, 3)
    while not begun.is_finished:
        play.engine.step()
    assert [] == play.device.violations
