"""When the next step is planned: as late as the device allows, and never so late that it waits.

Times are told, not taken. What it gains is `bench_live`'s question.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from vmkv.serve import Engine, FinishReason, SamplingParams
from vmkv.serve.engine_loop import EngineLoop
from vmkv.serve.messages import Add, Cancel, Command, News, Stop
from vmkv.serve.observer import StepRecord
from vmkv.serve.pace import Pace
from vmkv.serve.step_loop import StepLoop

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
HOST_S = 0.002


def known(num_tokens: int, *took_s: float, host_s: float = HOST_S) -> tuple[Pace, float]:
    """A pace that has seen steps of a size, and when the last ended."""
    pace, now_s = Pace(), 100.0
    for each in took_s:
        pace.submitted(host_s, begins=False)
        pace.read(num_tokens, now_s, now_s + each, waited_s=each / 2)
        now_s += each
    return pace, now_s


def test_nothing_is_known_of_a_size_at_first() -> None:
    """But that it takes as long as a smaller one."""
    pace, now_s = known(1000, 0.04)
    assert Pace().spare_s(1000, 0, 0, begins=False) <= 0
    assert pace.spare_s(500, now_s, now_s, begins=False) <= 0
    spare_s = pace.spare_s(1000, now_s, now_s, begins=False)
    assert pace.spare_s(2000, now_s, now_s, begins=False) == spare_s > 0.03


def test_the_shortest_says_how_long_one_takes_and_the_host_needs_its_part() -> None:
    """Of sizes a sixteenth apart; the longer ago it began, the less is left."""
    pace, now_s = known(1024, 0.04, 0.036, 0.05)
    for num_tokens in (1024, 1087):
        spare_s = pace.spare_s(num_tokens, now_s, now_s, begins=False)
        assert 0.03 < spare_s < 0.036 - HOST_S
        later_s = pace.spare_s(num_tokens, now_s, now_s + 0.01, begins=False)
        assert later_s == pytest.approx(spare_s - 0.01)
        # It was submitted while another ran, and began when that had ended; or later.
        assert pace.spare_s(num_tokens, now_s - 1, now_s, begins=False) == pytest.approx(spare_s)
        later_s = pace.spare_s(num_tokens, now_s + 0.01, now_s, begins=False)
        assert later_s == pytest.approx(spare_s + 0.01)
    slow, _ = known(1024, 0.04, 0.036, 0.05, host_s=0.02)
    assert slow.spare_s(1024, now_s, now_s, begins=False) < 0.036 - 0.02


def test_who_waits_to_begin_takes_the_host_longer() -> None:
    """So planning waits less long once somebody has come; others do not pay for it."""
    pace, now_s = known(1024, 0.04)
    alone_s = pace.spare_s(1024, now_s, now_s, begins=False)
    assert pace.spare_s(1024, now_s, now_s, begins=True) == alone_s
    pace.submitted(5 * HOST_S, begins=True)
    assert pace.spare_s(1024, now_s, now_s, begins=False) == alone_s
    assert pace.spare_s(1024, now_s, now_s, begins=True) < alone_s - 4 * HOST_S


def test_only_the_last_few_count() -> None:
    """What a step takes changes with the rows that decode."""
    pace, now_s = known(1024, 0.02, *[0.06] * 10)
    assert pace.spare_s(1024, now_s, now_s, begins=False) > 0.04


def test_short_steps_are_not_waited_for() -> None:
    """The host's part of them is too large."""
    pace, now_s = known(64, 0.003, 0.003, host_s=0)
    assert pace.spare_s(64, now_s, now_s, begins=False) <= 0


def test_a_step_that_had_ended_is_forgotten() -> None:
    """The host came too late, or nobody knows: the next of that size is measured."""
    pace, now_s = known(1024, 0.04)
    assert pace.spare_s(1024, now_s, now_s, begins=False) > 0
    pace.read(1024, now_s, now_s + 0.05, waited_s=0.0)
    assert pace.spare_s(1024, now_s + 0.05, now_s + 0.05, begins=False) <= 0


def test_the_device_never_waits_for_long() -> None:
    """Steps of random times, a third shorter at times: it idles once each time they shorten."""
    draw = random.Random(0)
    pace, now_s, num_idle, held_s = Pace(), 0.0, 0, 0.0
    step_s, end_s = 0.04, 0.04
    submitted_s = 0.0
    for at in range(1, 400):
        if at % 50 == 0:
            step_s = 0.03 if step_s == 0.04 else 0.04
        # All before the running step was read just now; it ends at `end_s`.
        spare_s = max(0.0, pace.spare_s(1024, submitted_s, now_s, begins=False))
        held_s += spare_s
        host_s = draw.uniform(0.5, 1) * HOST_S
        planned_s = now_s + spare_s + host_s
        pace.submitted(host_s, begins=False)
        next_start_s = max(end_s, planned_s)
        num_idle += planned_s > end_s
        now_s = max(end_s, planned_s)
        pace.read(1024, submitted_s, now_s, waited_s=max(0.0, end_s - planned_s))
        submitted_s = planned_s
        end_s = next_start_s + step_s * draw.uniform(1, 1.05)
    assert held_s > 0.7 * now_s
    assert num_idle <= 8


class Script:
    """A link whose commands come when the loop waits for them. Implements `Link`.

    Args:
        first: What has come at the start.
        later: What comes each time the loop waits.
    """

    is_broken = False

    def __init__(self, first: Sequence[Command], later: Sequence[Sequence[Command]]):
        self._commands = list(first)
        self._later = list(later)
        self.num_waits = 0
        self.said: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason | None] = {}

    def receive(self) -> Sequence[Command]:
        commands, self._commands = self._commands, []
        return commands

    def can_send(self) -> bool:
        return True

    def send(self, news: News) -> None:
        for update in news.updates:
            self.said.setdefault(update.key, []).extend(update.token_ids)
            self.ends[update.key] = update.finish_reason

    def wait(self, *, for_commands: bool, to_send: bool, timeout_s: float | None = None) -> None:
        self.num_waits += timeout_s is not None
        self._commands += self._later.pop(0) if self._later else [Stop(drain=True)]

    def wake(self) -> None: ...


class Steps:
    """An observer that keeps how many prompt tokens each step has."""

    def __init__(self) -> None:
        self.num_prompt_tokens: list[int] = []

    def step_finished(self, step: StepRecord, cache: object) -> None:
        self.num_prompt_tokens.append(step.num_prefill_tokens)

    def request_added(self, request_id: int, num_prompt_tokens: int) -> None: ...
    def first_token(self, request_id: int, wait_s: float) -> None: ...
    def request_finished(self, request: object) -> None: ...
    def idle(self, cache: object) -> None: ...


def test_who_comes_while_a_step_runs_is_in_the_next(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the one after it; and says the same. Who left meanwhile is in none."""
    told = [0.02, 0.01]
    monkeypatch.setattr(
        StepLoop, "spare_s", property(lambda loop: told.pop(0) if loop._pending and told else 0.0)
    )
    steps = Steps()
    engine = make_engine(observer=steps)
    first, second, third = ([3 + at] * (9 + at) for at in range(3))
    coming: list[list[Command]] = [
        [Add(1, tuple(second), GREEDY, 0), Add(2, tuple(third), GREEDY, 0)],
        [Cancel(2)],
    ]
    link = Script([Add(0, tuple(first), GREEDY, 0)], coming)
    EngineLoop(engine, link).run()
    assert link.num_waits == 2
    assert steps.num_prompt_tokens[:3] == [9, 10, 0]
    assert link.ends == {0: FinishReason.LENGTH, 1: FinishReason.LENGTH}
    again = make_engine()
    for key, prompt in ((0, first), (1, second)):
        assert list(again.generate(prompt, GREEDY)[0].outputs[0].token_ids) == link.said[key]


def test_who_stops_does_not_wait(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the running step may take."""
    monkeypatch.setattr(StepLoop, "spare_s", property(lambda loop: float(bool(loop._pending))))
    engine = make_engine()
    link = Script([Add(0, (3, 4, 5), GREEDY, 0)], [[Stop(drain=True)]])
    EngineLoop(engine, link).run()
    assert link.num_waits == 1
    assert len(link.said[0]) == GREEDY.max_tokens
