"""Planning of a step waits as long as possible without idling the device.

Times are simulated. `bench_live` measures the gain.
"""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

import pytest

from vmkv.serve.engine import Engine
from vmkv.serve.engine_loop import Add, Cancel, Command, EngineLoop, News, Stop
from vmkv.serve.observer import Event, StepRecord
from vmkv.serve.params import SamplingParams
from vmkv.serve.request import FinishReason
from vmkv.serve.runner import PendingTokens, StepResult
from vmkv.serve.step_loop import Pace, StepLoop, SubmittedStep
from vmkv.step import Piece

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class Work:
    """A step on a simulated device that takes a given time. Like `PendingTokens`."""

    def __init__(self, host: Host, end_s: float):
        self._host, self._end_s = host, end_s

    @property
    def has_ended(self) -> bool:
        return self._host.now_s >= self._end_s

    def wait(self) -> None:
        self._host.wait_until(self._end_s)

    def result(self) -> StepResult:
        raise NotImplementedError  # The tokens are not needed.


class Host:
    """Plans, waits and submits as an engine does, one step ahead.

    Args:
        holds: Whether it waits before it plans.

    Attributes:
        now_s: Its clock.
        idle_s: Time in which the device had no step.
        held_s: Time in which planning waited.
    """

    def __init__(self, *, holds: bool = True):
        self.now_s = self.idle_s = self.held_s = self._end_s = self._late_s = 0.0
        self.pace = Pace(lambda: self.now_s)
        self._holds = holds
        self.running: SubmittedStep | None = None

    @property
    def spare_s(self) -> float:
        """Total time that planning may wait from now on."""
        return self.spare()

    def spare(self, *, begins: bool = False) -> float:
        """Likewise, with requests to admit if `begins`."""
        start_s = self.now_s
        self.hold(begins=begins)
        spare_s, self.now_s = self.now_s - start_s, start_s
        return spare_s

    def hold(self, late_s: float = 0.0, *, begins: bool = False) -> None:
        """Wait before planning; `late_s` longer than allowed."""
        assert self.running is not None
        start_s = self.now_s
        while spare_s := self.pace.spare_s(self.running, begins=begins):
            assert spare_s > 0.001, "shorter than links can time"
            self.now_s += spare_s
        self.now_s += late_s if self.now_s > start_s else 0.0

    def finish(self) -> None:
        """Wait for the running step without planning another one."""
        assert self.running is not None
        self.pace.wait(self.running)
        self.running = None

    def step(
        self,
        num_tokens: int,
        step_s: float,
        *,
        num_requests: int | None = None,
        host_s: float = 0.001,
        ready_s: float = 0.0,
        result_s: float = 0.0,
        late_s: float = 0.0,
        begins: bool = False,
    ) -> None:
        """Plan and submit a step, and wait for the one before.

        Args:
            num_tokens: Tokens of the step.
            step_s: Time of the device.
            num_requests: Requests of the step; by default it is a step with prompts.
            host_s: Time of the plan.
            ready_s: The host's time between submitting and waiting.
            result_s: The host's time after waiting.
            late_s: Delay after each wait.
            begins: Whether requests are admitted.
        """
        start_s, before = self.now_s, self.running
        if before is not None and self._holds:
            self.hold(late_s)
        self.held_s += self.now_s - start_s
        start_s = self.now_s
        self.now_s += host_s
        if before is not None:
            self.idle_s += max(0.0, self.now_s - self._end_s)
        self._end_s = max(self.now_s, self._end_s) + step_s
        ids = range(1 if num_requests is None else num_requests)
        step = SubmittedStep(Work(self, self._end_s), ids, num_tokens, self.now_s)
        self.pace.submitted(step.submitted_s, before, start_s, begins=begins)
        self.now_s += ready_s
        if before is not None:
            self._late_s = late_s
            self.pace.wait(before)
            self.now_s += result_s
        self.running = step

    def wait_until(self, end_s: float) -> None:
        """Wait for the device."""
        if self.now_s < end_s:
            self.now_s = end_s + self._late_s


def played(steps: Iterable[tuple[int, float]], **others: float) -> Host:
    """A host that has run steps of `(tokens, seconds)`."""
    host = Host()
    for num_tokens, step_s in steps:
        host.step(num_tokens, step_s, **others)
    return host


def test_a_size_needs_two_measurements() -> None:
    """An unknown size counts as the next smaller known size of its kind."""
    assert played([(1000, 0.04)]).spare_s == 0
    assert played([(1000, 0.04)] * 2).spare_s == 0
    assert played([(1000, 0.04)] * 3).spare_s > 0.03
    assert played([*[(1000, 0.04)] * 3, (500, 0.04)]).spare_s == 0
    assert played([*[(1000, 0.04)] * 3, (2000, 0.08)]).spare_s > 0.03
    host = played([(1000, 0.04)] * 3)
    host.step(2000, 0.08, num_requests=2000)
    assert host.spare_s == 0


def test_the_wait_follows_the_shortest_recent_step() -> None:
    """Less the time that has passed and the host's time; sizes within a sixteenth are one."""
    steps = [(1024, 0.04), (1024, 0.036), (1087, 0.05), (1024, 0.05)]
    host = played([*steps, (1087, 0.05)])
    spare_s = host.spare_s
    assert 0.032 < spare_s < 0.036 * 0.95
    host.now_s += 0.01
    assert host.spare_s == pytest.approx(spare_s - 0.01)
    host.now_s += 0.03
    assert host.spare_s == 0
    assert played([*steps, (1087, 0.05)], host_s=0.01).spare_s < spare_s - 0.009


def test_only_recent_steps_count() -> None:
    """The time of a step changes with the rows that decode."""
    assert played([*[(1024, 0.02)] * 3, *[(1024, 0.06)] * 6]).spare_s > 0.05


def test_planning_does_not_wait_in_short_steps() -> None:
    """The host's share of them is too large. In a long step, a single wait is at most 2 ms."""
    host = played([(1024, 0.06)] * 4)
    assert host.running is not None
    assert host.pace.spare_s(host.running, begins=False) == 0.002
    assert played([(64, 0.003)] * 4).spare_s == 0


def test_steps_with_admissions_wait_less() -> None:
    """Admission takes the host longer; steps without admissions do not reserve that time."""
    host = played([(1024, 0.04)] * 3)
    alone_s = host.spare()
    assert alone_s == host.spare(begins=True) > 0.03
    host.step(1024, 0.04, host_s=0.003, begins=True)
    host.step(1024, 0.04)
    assert host.spare() == pytest.approx(alone_s)
    assert host.spare(begins=True) < alone_s - 0.0015


def test_a_slow_plan_shortens_the_next_waits() -> None:
    """The effect decays."""
    host = played([(1024, 0.04)] * 3)
    alone_s = host.spare_s
    host.step(1024, 0.04, host_s=0.003)
    host.step(1024, 0.04)
    assert host.spare_s < alone_s - 0.0015
    for _ in range(60):
        host.step(1024, 0.04)
    assert host.spare_s == pytest.approx(alone_s)


def _chunks(num_chunks: int, draw: random.Random) -> list[float]:
    """Times of a long prompt's chunks, which grow with the tokens before them."""
    return [0.035 + 0.007 * at * draw.uniform(0.9, 1.1) for at in range(num_chunks)]


_DRAW = random.Random(0)
#: Steps whose time does not follow from their size, and the share of time that this may cost.
MISLEADING: dict[str, tuple[list[tuple[int, float]], float]] = {
    "long rows, then short ones": ([*[(20, 0.025)] * 5, *[(24, 0.006)] * 3000], 0.001),
    "a host that was stopped": (
        [*[(1024, 0.12)] * 5, *[(1024 + at % 400, 0.035) for at in range(2000)]],
        0.002,
    ),
    "larger ones are faster": ([(1024, 0.033), (1280, 0.030)] * 1000, 0.002),
    "short ones among long ones": ([(1024, 0.03), (1024, 0.03), (1024, 0.01)] * 1000, 0.002),
    "two times by chance": (
        [(2048, 0.035 if _DRAW.random() < 0.3 else 0.06) for _ in range(3000)],
        0.002,
    ),
    "chunks of prompts": ([(2048, each) for _ in range(300) for each in _chunks(8, _DRAW)], 0.002),
    "phases": (
        [(size, 0.025 if at % 2 else 0.006) for at in range(20) for size in range(16, 216)],
        0.005,
    ),
}


@pytest.mark.parametrize("name", MISLEADING)
def test_wrong_estimates_cost_little(name: str) -> None:
    """Compared with planning at once."""
    steps, share_max = MISLEADING[name]
    late, soon = Host(), Host(holds=False)
    for num_tokens, step_s in steps:
        for host in (late, soon):
            host.step(num_tokens, step_s)
    assert late.now_s <= (1 + share_max) * soon.now_s


@pytest.mark.parametrize("step_s", [0.006, 0.01, 0.03])
@pytest.mark.parametrize("late_s", [0.001, 0.003, 0.005])
def test_late_wake_ups_shorten_the_wait(step_s: float, late_s: float) -> None:
    """As when another thread holds the interpreter: the delay counts as the host's time."""
    draw = random.Random(0)
    late, soon = Host(), Host(holds=False)
    for _ in range(3000):
        its_s = draw.uniform(0, 2 * late_s)
        for host in (late, soon):
            host.step(1024, step_s, late_s=its_s)
    assert late.now_s <= 1.01 * soon.now_s
    assert late.held_s > 0.25 * late.now_s or step_s < 0.03


def test_ended_steps_are_not_referenced() -> None:
    """Their tokens are in pinned memory."""
    host = played([(1024, 0.04)] * 8)
    assert host.spare_s > 0
    ended = weakref.ref(host.running)
    host.finish()
    assert ended() is None


def test_an_idle_device_starts_a_step_when_submitted() -> None:
    """And not at the end of the step before."""
    host = played([(1024, 0.04)] * 8)
    host.finish()
    host.now_s += 5.0
    host.step(1024, 0.04)
    assert host.spare_s > 0.03


@pytest.mark.parametrize("step_s", [0.006, 0.01, 0.03])
@pytest.mark.parametrize("result_s", [0.0, 0.0005, 0.002])
@pytest.mark.parametrize("ready_s", [0.0, 0.0005, 0.004])
def test_the_hosts_time_is_not_counted_as_the_devices(
    step_s: float, result_s: float, ready_s: float
) -> None:
    """Otherwise the wait would grow with each step, however long the host works between steps."""
    late, soon = Host(), Host(holds=False)
    for _ in range(400):
        for host in (late, soon):
            host.step(1024, step_s, result_s=result_s, ready_s=ready_s)
    assert late.now_s < 1.02 * soon.now_s
    assert late.held_s + 400 * (result_s + ready_s) > 0.5 * late.now_s


def test_a_step_with_an_unknown_start_is_not_waited_in() -> None:
    """Its start is unknown if the host was late for the end of the step before."""
    host = played([(1024, 0.04)] * 4)
    host.step(1024, 0.04, ready_s=0.07)
    assert host.spare_s == 0
    idle_s = host.idle_s
    for _ in range(20):
        host.step(1024, 0.04)
    assert host.idle_s - idle_s < 0.035
    assert host.spare_s > 0.03


def test_lost_steps_are_not_measured() -> None:
    """They may still run when the next step is submitted."""
    host = played([(1024, 0.4)] * 2)
    host.pace.lost()
    host.running = None
    for at in range(5):
        host.step(512, 0.02)
        assert bool(host.spare_s) == (at == 4)


def test_an_engine_reports_its_steps_to_its_pace(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning may wait in steps of 30 ms, but not after a failure, nor without a running step."""
    clock = Host(holds=False)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now_s)
    engine = make_engine(max_tokens=64)
    submit = engine._runner.submit
    fails = [False]

    class Timed(Work):
        """A step of the engine's own, which takes longer."""

        def __init__(self, inner: PendingTokens, end_s: float):
            super().__init__(clock, end_s)
            self.result = inner.result  # type: ignore[method-assign]

        def wait(self) -> None:
            super().wait()
            if fails[0]:
                raise RuntimeError("the device has failed")

    def timed(pieces: Sequence[Piece]) -> Timed:
        inner, clock.now_s = submit(pieces), clock.now_s + 0.001
        clock._end_s = max(clock._end_s, clock.now_s) + 0.03
        return Timed(inner, clock._end_s)

    engine._runner.submit = timed
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    handle = engine.add([3, 4, 5, 6], params)
    assert engine.loop.spare_s == 0  # Nothing runs.
    spares = []
    for _ in range(12):
        engine.step()
        spares.append(engine.loop.spare_s)
    assert spares[:3] == [0, 0, 0]
    assert 0 < min(spares[4:]) <= max(spares) <= 0.002
    start_s, num_steps = clock.now_s, 0
    while engine.loop.spare_s:
        clock.now_s += engine.loop.spare_s
        num_steps += 1
    assert clock.now_s - start_s > 0.02
    assert num_steps > 10
    clock.now_s = clock._end_s  # It has ended.
    assert engine.loop.spare_s == 0
    fails[0] = True
    engine.step()
    assert handle.requests[0].finish_reason is FinishReason.ERROR
    assert engine.loop.spare_s == 0
    fails[0] = False
    again = engine.add([3, 4, 5, 6], params)
    for _ in range(3):
        engine.step()
        assert engine.loop.spare_s == 0
    engine.cancel_all(RuntimeError("cancelled"))
    assert again.requests[0].finish_reason is FinishReason.ERROR
    assert engine.loop.spare_s == 0


class Script:
    """A link whose commands arrive when the loop waits for them. Implements `Link`.

    Args:
        first: Commands at the start.
        later: Commands of each wait.
    """

    is_broken = False

    def __init__(self, first: Sequence[Command], later: Sequence[Sequence[Command]]):
        self._commands = list(first)
        self._later = list(later)
        self.num_waits = 0
        self.said: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason | None] = {}

    def receive(self, timeout_s: float | None = 0.0) -> Sequence[Command]:
        self.num_waits += bool(timeout_s)
        if timeout_s != 0:
            self._commands += self._later.pop(0) if self._later else [Stop(drain=True)]
        commands, self._commands = self._commands, []
        return commands

    def send(self, news: News) -> None:
        for update in news.updates:
            self.said.setdefault(update.key, []).extend(update.token_ids)
            self.ends[update.key] = update.finish_reason

    def wake(self) -> None: ...


class Steps:
    """An observer that keeps the number of prompt tokens of each step."""

    def __init__(self) -> None:
        self.num_prompt_tokens: list[int] = []

    def on(self, event: Event, cache: object) -> None:
        if isinstance(event, StepRecord):
            self.num_prompt_tokens.append(event.num_prefill_tokens)


def test_a_request_that_arrives_during_a_step_is_in_the_next(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tokens that it has alone; a request that is cancelled meanwhile is in no step."""
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


def test_planning_does_not_wait_after_a_stop(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepLoop, "spare_s", property(lambda loop: float(bool(loop._pending))))
    engine = make_engine()
    link = Script([Add(0, (3, 4, 5), GREEDY, 0)], [[Stop(drain=True)]])
    EngineLoop(engine, link).run()
    assert link.num_waits == 1
    assert len(link.said[0]) == GREEDY.max_tokens
