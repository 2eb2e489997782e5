"""Memory for the next steps is made ready while the device runs the current one.

The device runs its work only when the host waits for it, so that a growth that waits is noticed.
`make_ready` has its own tests in tests/cache/test_ready.py.
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
    """At most one growth in five maps, and one in twenty creates or releases extents."""
    play = make_play(CHURN)
    growths = _note_growths(play)
    handles = _churn(play, seed, 240)
    del growths[:_FILLED_AFTER_STEPS]
    mapped = [calls["mem_map"] > 0 for _, calls in growths]
    late = [calls["mem_create"] > 0 or calls["mem_release"] > 0 for _, calls in growths]
    assert 5 * sum(mapped) <= len(growths)
    assert 20 * sum(late) <= len(growths)
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


def test_driver_errors_in_make_ready_end_no_request(
    make_play: Callable[[Shape], EnginePlay],
) -> None:
    """The growth that needs the memory tries again."""
    play = make_play(CHURN)
    view, backend = play.engine._view, play.backend
    make_ready, num_failed = view.make_ready, Counter[str]()
    fail_at = itertools.cycle([1, 2, 3])

    def failing(*wanted: Any, **how: Any) -> bool:
        backend.arm(next(fail_at))
        try:
            return make_ready(*wanted, **how)
        finally:
            num_failed[str(backend.failed_call)] += 1
            backend.arm(0)

    view.make_ready = failing
    handles = _churn(play, 2, 120)
    assert {"mem_create", "mem_map", "mem_unmap"} <= num_failed.keys()
    ended = [handle.output() for handle in handles if handle.is_finished]
    assert len(ended) > 20
    assert {FinishReason.LENGTH} == {output.outputs[0].finish_reason for output in ended}
    assert {None} == {output.error for output in ended}
    assert not play.engine.num_failed_steps
    play.cache.check()


def test_rows_with_room_ask_for_no_pages(make_play: Callable[[Shape], EnginePlay]) -> None:
    """Running rows ask in three steps of eight; only the first waiting request is looked up."""
    play = make_play(Shape(max_num_seqs=2, max_num_batched_tokens=64, budget_pages=400))
    view, asked = play.engine._view, Counter[int]()
    for _ in range(2):
        _ask(play, [1, 2, 3], 70)
    play.engine.step()
    for _ in range(200):
        _ask(play, [4, 5, 6], 4)
    lookups = Counter[int]()
    cached_tokens, make_ready = view.cached_tokens, play.cache.pool.make_ready

    def look_up(request_id: int) -> int:
        lookups[request_id] += 1
        return cached_tokens(request_id)

    def noted(size_classes: Sequence[int], **options: Any) -> bool:
        asked[len(size_classes)] += 1
        return make_ready(size_classes, **options)

    view.cached_tokens, play.cache.pool.make_ready = look_up, noted
    for _ in range(60):
        play.engine.step()
    assert 1 == lookups.total(), "only the first waiting request is looked up, once"
    # A page has eight tokens; the waiting request always has one page ready.
    assert {1, 3} == set(asked)
    assert 0 < asked[3] <= 60 * 3 / 8 + 3


def test_unavailable_pages_are_asked_for_in_one_step_of_eight(
    make_play: Callable[[Shape], EnginePlay],
) -> None:
    """Running rows hold the pages that the waiting request needs, and can still grow."""
    play = make_play(Shape(max_num_seqs=2, max_num_batched_tokens=80, budget_pages=24))
    handles = [_ask(play, [token] * 70, 26) for token in (1, 2)]
    while play.engine._scheduler.num_running < 2:
        play.engine.step()
    waiting = _ask(play, [3] * 60, 4)
    view, tries = play.engine._view, []
    make_ready = view.make_ready

    def noted(wanted: Sequence[tuple[int, int]], num_new: int, **how: Any) -> bool:
        assert wanted, "the running requests are missing"
        tries.append(num_new > 0)
        return make_ready(wanted, num_new, **how)

    view.make_ready = noted
    while not any(handle.is_finished for handle in handles):
        play.engine.step()
    assert len(tries) > 20
    assert 8 <= sum(tries) <= 8 + len(tries) // 8
    while play.engine.has_unfinished:
        play.engine.step()
    play.check()
    assert waiting.output().error is None
    assert [0, 0] == [handle.requests[0].num_preemptions for handle in handles]


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
    has_waited, calls = _begin_after(make_play(_small(13)), 1, 60, [10, 20])
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
