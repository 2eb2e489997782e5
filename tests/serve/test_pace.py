"""When the next step is planned: as late as the device allows, and never so late that it waits.

Times are told, not taken. What it gains is `bench_live`'s question.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import pytest

from vmkv.serve import Engine, FinishReason, SamplingParams
from vmkv.serve.engine_loop import EngineLoop
from vmkv.serve.messages import Add, Cancel, Command, News, Stop
from vmkv.serve.observer import StepRecord
from vmkv.serve.pace import Pace, SubmittedStep
from vmkv.serve.runner import StepResult
from vmkv.serve.step_loop import StepLoop

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class Work:
    """A step on a device that is told how long it takes. Implements `PendingStep`."""

    def __init__(self, host: Host, end_s: float):
        self._host, self._end_s = host, end_s

    @property
    def has_ended(self) -> bool:
        return self._host.now_s >= self._end_s

    def wait(self) -> None:
        self._host.now_s = max(self._host.now_s, self._end_s)

    def result(self) -> StepResult:
        raise NotImplementedError  # Nobody here asks for tokens.


class Host:
    """Plans, waits and submits as an engine does, one step ahead.

    Args:
        holds: Whether it plans as late as it may.

    Attributes:
        now_s: Its clock.
        idle_s: How long the device had nothing to do while steps were to be planned.
        held_s: How long planning waited.
    """

    def __init__(self, *, holds: bool = True):
        self.now_s = self.idle_s = self.held_s = self._end_s = 0.0
        self.pace = Pace(lambda: self.now_s)
        self._holds = holds
        self._running: SubmittedStep | None = None

    @property
    def spare_s(self) -> float:
        """How long planning may wait now."""
        assert self._running is not None
        return self.pace.spare_s(self._running, begins=False)

    def step(
        self,
        num_tokens: int,
        step_s: float,
        *,
        num_requests: int | None = None,
        host_s: float = 0.001,
        ready_s: float = 0.0,
        result_s: float = 0.0,
        begins: bool = False,
    ) -> None:
        """Plan and submit a step, and wait for the one before.

        Args:
            num_tokens: Of the step.
            step_s: What the device takes.
            num_requests: Whose they are; by default it has prompts.
            host_s: What the plan takes.
            ready_s: What the host does between submitting and waiting.
            result_s: What it does with tokens after waiting.
            begins: Whether requests begin with it.
        """
        if self._running is not None and self._holds:
            spare_s = self.spare_s
            self.now_s, self.held_s = self.now_s + spare_s, self.held_s + spare_s
        start_s, before = self.now_s, self._running
        self.now_s += host_s
        if before is not None:
            self.idle_s += max(0.0, self.now_s - self._end_s)
        self._end_s = max(self.now_s, self._end_s) + step_s
        ids = range(1 if num_requests is None else num_requests)
        step = SubmittedStep(Work(self, self._end_s), ids, ids, num_tokens, self.now_s)
        self.pace.submitted(step, before, start_s, begins=begins)
        self.now_s += ready_s
        if before is not None:
            self.pace.wait(before)
            self.now_s += result_s
        self._running = step


def played(steps: Iterable[tuple[int, float]], **others: float) -> Host:
    """A host that has done some `(tokens, seconds)`."""
    host = Host()
    for num_tokens, step_s in steps:
        host.step(num_tokens, step_s, **others)
    return host


def test_nothing_is_known_of_a_size_until_it_was_seen_twice() -> None:
    """But that it takes as long as a smaller one of its kind."""
    assert played([(1000, 0.04)]).spare_s == 0
    assert played([(1000, 0.04)] * 2).spare_s == 0
    assert played([(1000, 0.04)] * 3).spare_s > 0.03
    assert played([*[(1000, 0.04)] * 3, (500, 0.04)]).spare_s == 0
    assert played([*[(1000, 0.04)] * 3, (2000, 0.08)]).spare_s > 0.03
    host = played([(1000, 0.04)] * 3)
    host.step(2000, 0.08, num_requests=2000)
    assert host.spare_s == 0


def test_the_shortest_says_how_long_one_takes_and_the_host_needs_its_part() -> None:
    """Of sizes a sixteenth apart; the longer ago it began, the less is left."""
    steps = [(1024, 0.04), (1024, 0.036), (1087, 0.05), (1024, 0.05)]
    host = played([*steps, (1087, 0.05)])
    spare_s = host.spare_s
    assert 0.032 < spare_s < 0.036 * 0.95
    host.now_s += 0.01
    assert host.spare_s == pytest.approx(spare_s - 0.01)
    host.now_s += 0.03
    assert host.spare_s == 0
    assert played([*steps, (1087, 0.05)], host_s=0.01).spare_s < spare_s - 0.009


def test_only_the_last_few_count() -> None:
    """What a step takes changes with the rows that decode."""
    assert played([*[(1024, 0.02)] * 3, *[(1024, 0.06)] * 6]).spare_s > 0.05


def test_short_steps_are_not_waited_for() -> None:
    """The host's part of them is too large; nor is anybody held up for long."""
    assert played([(64, 0.003)] * 4).spare_s == 0
    assert played([(64, 60.0)] * 4).spare_s == 0.1


def test_who_waits_to_begin_takes_the_host_longer() -> None:
    """So planning waits less long once somebody has come; others do not pay for it."""
    host = played([(1024, 0.04)] * 3)
    alone_s = host.spare_s
    host.step(1024, 0.04, host_s=0.002, begins=True)
    assert host.spare_s == pytest.approx(alone_s)
    assert host._running is not None
    assert host.pace.spare_s(host._running, begins=True) < alone_s - 0.001


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # Long rows, and then short ones; a host that was stopped; a larger step that is faster.
        ([(20, 0.025)] * 5, [(24, 0.006)] * 200),
        ([(1024, 0.12)] * 5, [(1280, 0.035)] * 200),
        ([(1024, 0.033)] * 5, [(1280, 0.030)] * 200),
        ([(1024, 0.12)] * 5, [(1024 + at, 0.035) for at in range(400)]),
        ([(at, 0.02 + at / 50_000) for at in range(64, 1280)] * 3, [(2000, 0.02)] * 50),
    ],
)
def test_a_wrong_thought_costs_its_time_once(
    before: list[tuple[int, float]], after: list[tuple[int, float]]
) -> None:
    """Whichever size it came from; then such steps are measured, and waited for again."""
    host = played(before)
    idle_s = host.idle_s
    longest_s = max(step_s for _, step_s in before)
    for num_tokens, step_s in after:
        host.step(num_tokens, step_s)
    assert host.idle_s - idle_s < longest_s
    assert host.spare_s > 0


@pytest.mark.parametrize("step_s", [0.006, 0.01, 0.03])
@pytest.mark.parametrize("result_s", [0.0, 0.0005, 0.002])
@pytest.mark.parametrize("ready_s", [0.0, 0.0005, 0.004])
def test_the_host_never_takes_its_own_time_for_the_device_s(
    step_s: float, result_s: float, ready_s: float
) -> None:
    """However long it takes over tokens, or to make memory ready: what it waits does not grow."""
    late, soon = Host(), Host(holds=False)
    for _ in range(400):
        for host in (late, soon):
            host.step(1024, step_s, result_s=result_s, ready_s=ready_s)
    assert late.now_s < 1.02 * soon.now_s
    assert late.held_s + 400 * (result_s + ready_s) > 0.5 * late.now_s


def test_a_step_that_began_unseen_is_taken_to_have_begun_early() -> None:
    """While the host was away, or after steps that failed: planning does not wait longer for it."""
    for lose in (False, True):
        host = played([(1024, 0.04)] * 4)
        host.step(1024, 0.04, ready_s=0.07)
        if lose:
            host.pace.lost()
        assert host.spare_s == 0
        idle_s = host.idle_s
        for _ in range(20):
            host.step(1024, 0.04)
        assert host.idle_s - idle_s < 0.035
        assert host.spare_s > 0.03


def test_the_device_hardly_ever_waits() -> None:
    """Steps of random kinds, sizes and times, whose times change; and a host that stumbles."""
    draw = random.Random(0)
    late, soon = Host(), Host(holds=False)
    for at in range(4000):
        slow = 1.5 if at // 500 % 2 else 1.0
        num_tokens = draw.choice((36, 37, 38, 39, 300, 800, 1280))
        step_s = slow * (0.005 + 25e-6 * num_tokens) * draw.uniform(1, 1.04)
        host_s = draw.uniform(0.5e-3, 1e-3) + (0.005 if draw.random() < 0.002 else 0)
        num_requests = num_tokens if num_tokens < 40 else 30
        for host in (late, soon):
            host.step(num_tokens, step_s, num_requests=num_requests, host_s=host_s)
    assert late.now_s < 1.004 * soon.now_s
    assert late.held_s > 0.7 * late.now_s


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
        self.is_full = False
        self.said: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason | None] = {}

    def receive(self) -> Sequence[Command]:
        commands, self._commands = self._commands, []
        return commands

    def can_send(self) -> bool:
        return not self.is_full

    def send(self, news: News) -> None:
        self.is_full = True  # Until somebody waits.
        for update in news.updates:
            self.said.setdefault(update.key, []).extend(update.token_ids)
            self.ends[update.key] = update.finish_reason

    def wait(self, *, for_commands: bool, to_send: bool, timeout_s: float | None = None) -> None:
        self.num_waits += timeout_s is not None
        self.is_full = False
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
