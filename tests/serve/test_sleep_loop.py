"""Engines in loops: they sleep by themselves or when told to, and requests wake them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from helpers.hosted import hosted
from helpers.requests import PATIENCE_S, check_said, last, prompts, reference
from helpers.serving import Watch, tiny_llama, tiny_tokenizer

from vmkv import ClosedError, ConfigError, HostBackend
from vmkv.errors import CapacityError, DriverError, OutOfPagesError
from vmkv.serve import engine as engine_module
from vmkv.serve.async_engine import AsyncEngine
from vmkv.serve.engine import Engine
from vmkv.serve.engine_loop import (
    Add,
    Cancel,
    Command,
    EngineLoop,
    Look,
    News,
    Pause,
    Resume,
    Sleep,
    Stop,
    Wake,
)
from vmkv.serve.guided import Grammars
from vmkv.serve.metrics import Metrics
from vmkv.serve.observer import Observers
from vmkv.serve.params import SamplingParams, StructuredOutputs
from vmkv.testing.faults import FaultInjectingBackend
from vmkv.units import KiB, MiB

MakeEngine = Callable[..., Engine]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
LONG = SamplingParams(temperature=0, max_tokens=60)


# ---- a loop with a clock of its own ----------------------------------------------------------


class Scripted:
    """A link whose commands come at given times of its clock, which waits let pass."""

    is_broken = False

    def __init__(self, script: Sequence[tuple[float, Command]]):
        self.now_s = 0.0
        self.script = deque(script)
        self.news: list[tuple[float, News]] = []
        self.waits: list[float | None] = []

    def clock(self) -> float:
        return self.now_s

    def receive(self, timeout_s: float | None = 0.0) -> Sequence[Command]:
        if timeout_s != 0:
            self.waits.append(timeout_s)
            at_s = self.script[0][0]
            self.now_s = at_s if timeout_s is None else min(at_s, self.now_s + timeout_s)
        found = []
        while self.script and self.script[0][0] <= self.now_s:
            found.append(self.script.popleft()[1])
        return found

    def send(self, news: News) -> None:
        self.news.append((self.now_s, news))

    def wake(self) -> None:
        raise AssertionError("there are no ranks")

    def times_asleep(self) -> list[tuple[float, bool]]:
        """When the news began to say so, or that it is awake."""
        found = [(0.0, False)]
        for at_s, news in self.news:
            if news.is_sleeping != found[-1][1]:
                found.append((at_s, news.is_sleeping))
        return found[1:]


def add(key: int, seed: int = 0) -> Add:
    return Add(key, tuple(prompts(1, seed=seed)[0]), GREEDY, 0)


def told(link: Scripted, key: int) -> list[int]:
    return [
        token
        for _, news in link.news
        for update in news.updates
        if update.key == key
        for token in update.token_ids
    ]


def test_an_engine_sleeps_after_a_time_without_requests(make_engine: MakeEngine) -> None:
    """Not before; each request begins the time anew, other commands do not, and nothing polls."""
    script: list[tuple[float, Command]] = [
        (5.0, add(1)),
        (12.0, add(2)),
        (17.0, Cancel(77)),
        (30.0, Cancel(78)),
        (40.0, add(3)),
        (60.0, Wake(4)),
        (90.0, Stop(drain=True)),
    ]
    link = Scripted(script)
    engine = make_engine(sleep_after_s=10.0)
    EngineLoop(engine, link, clock=link.clock).run()
    expected = [(22.0, True), (40.0, False), (50.0, True), (60.0, False), (70.0, True)]
    assert expected == link.times_asleep()[:5]
    assert [4] == [key for _, news in link.news for key in news.done]
    for key in (1, 2, 3):
        assert reference(prompts(1)[0]) == told(link, key)
    assert len(link.waits) < 16
    assert None in link.waits


def test_a_pause_is_no_idle_time(make_engine: MakeEngine) -> None:
    """Training has had the model meanwhile, and generates next."""

    class Over(threading.Event):
        def is_set(self) -> bool:
            return link.now_s >= 40.0

    link = Scripted([(5.0, Pause(1, Over())), (40.0, Resume(2)), (60.0, Stop(drain=True))])
    engine = make_engine(sleep_after_s=10.0)
    EngineLoop(engine, link, clock=link.clock).run()
    assert [(5.0, 1), (40.0, 2)] == [(at_s, key) for at_s, news in link.news for key in news.done]
    assert [(50.0, True)] == link.times_asleep()[:1]


def test_an_engine_that_cannot_sleep_tries_again_later(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It serves meanwhile, and says why in one line each time."""
    backend = FaultInjectingBackend(HostBackend(4 * KiB))
    monkeypatch.setattr(engine_module, "open_backend", lambda _: backend)
    link = Scripted([(35.0, add(1)), (36.0, Stop(drain=True))])
    engine = make_engine(sleep_after_s=10.0)
    real, tries = engine.sleep, []

    def sleep(**what: bool) -> None:
        tries.append(link.now_s)
        backend.arm(2)
        real(**what)

    monkeypatch.setattr(engine, "sleep", sleep)
    with caplog.at_level(logging.WARNING):
        EngineLoop(engine, link, clock=link.clock).run()
    assert [10.0, 20.0, 30.0] == tries
    assert 3 == caplog.text.count("could not sleep")
    assert reference(prompts(1)[0]) == told(link, 1)


def test_prefixes_are_kept_where_they_are_to_be(make_engine: MakeEngine) -> None:
    for keeps in (False, True):
        link = Scripted([(1.0, add(1)), (20.0, add(2)), (21.0, Stop(drain=True))])
        its: dict[str, Any] = {"host_budget_bytes": 1 * MiB, "sleep_keeps_prefixes": keeps}
        engine = make_engine(sleep_after_s=10.0, **its)
        EngineLoop(engine, link, clock=link.clock).run()
        cached = [
            update.num_cached_tokens
            for _, news in link.news
            for update in news.updates
            if update.key == 2
        ]
        assert (cached[-1] > 0) == keeps
        assert [(11.0, True), (20.0, False)] == link.times_asleep()[:2]


@pytest.mark.parametrize("what", ["weights", "memory"])
def test_a_process_ends_where_the_driver_does_not_wake_it(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Another one takes over. A lack of memory only refuses the request, and passes."""
    backend = FaultInjectingBackend(HostBackend(4 * KiB))
    monkeypatch.setattr(engine_module, "open_backend", lambda _: backend)
    link = Scripted([(0.0, Sleep(1, False)), (2.0, add(2)), (3.0, add(3)), (4.0, Stop(True))])
    engine = make_engine(enable_sleep_mode=True)
    real = engine.wake

    def wake() -> None:
        if engine.is_sleeping and link.now_s == 2.0:
            backend.arm(1, is_out_of_memory=what == "memory")
            if what == "memory":
                monkeypatch.setattr(backend, "_fault", _always(backend._fault))
        try:
            real()
        finally:
            monkeypatch.setattr(backend, "_fault", type(backend)._fault.__get__(backend))
            backend.arm(0)

    monkeypatch.setattr(engine, "wake", wake)
    loop = EngineLoop(engine, link, ends_with_device=True, clock=link.clock)
    if what == "weights":
        with pytest.raises(RuntimeError, match="weights could not come back from the host: "):
            loop.run()
    else:
        loop.run()
        assert reference(prompts(1)[0]) == told(link, 3)
    [(key, error)] = [each for _, news in link.news for each in news.refused]
    assert key == 2
    assert isinstance(error, OutOfPagesError if what == "memory" else DriverError)


def test_requests_that_come_while_it_cannot_wake_are_refused_with_the_first(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would wait as long for memory. A request that can never be served spoils no other."""
    wrong = Add(9, (), GREEDY, 0)
    link = Scripted(
        [
            (0.0, Sleep(1, False)),
            *((2.0, each) for each in (wrong, add(2), add(3), add(4))),
            (3.0, add(5)),
            (4.0, Stop(True)),
        ]
    )
    engine = make_engine(enable_sleep_mode=True)
    real, tries = engine.wake, []

    def wake() -> None:
        tries.append(link.now_s)
        if link.now_s == 2.0:
            raise CapacityError("others hold the memory")
        real()

    monkeypatch.setattr(engine, "wake", wake)
    EngineLoop(engine, link, clock=link.clock).run()
    assert 1 == tries.count(2.0)
    refused = {key: type(error) for _, news in link.news for key, error in news.refused}
    assert refused == {9: ConfigError} | dict.fromkeys((2, 3, 4), CapacityError)
    assert reference(prompts(1)[0]) == told(link, 5)


# ---- requests whose grammar is being compiled ------------------------------------------------


class Compiled(Scripted):
    """A link whose `Look` commands come when a grammar has been compiled, and not before."""

    def __init__(self, script: Sequence[tuple[float, Command]]):
        super().__init__(script)
        self.may_compile, self.is_compiled = threading.Event(), threading.Event()

    def hold_grammars(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compile_ = Grammars._compiled

        def held(grammars: Grammars, form: StructuredOutputs) -> Any:
            assert self.may_compile.wait(PATIENCE_S)
            return compile_(grammars, form)

        monkeypatch.setattr(Grammars, "_compiled", held)

    def receive(self, timeout_s: float | None = 0.0) -> Sequence[Command]:
        found = super().receive(timeout_s)
        if Look() in found:
            self.may_compile.set()
            assert self.is_compiled.wait(PATIENCE_S)
        return found

    def wake(self) -> None:
        self.is_compiled.set()

    def ends(self) -> list[tuple[float, int, str]]:
        """When requests and other commands ended, with their keys and how."""
        found = []
        for at_s, news in self.news:
            found += [(at_s, key, type(error).__name__) for key, error in news.refused]
            found += [(at_s, key, "done") for key in news.done]
            ended = [each for each in news.updates if each.finish_reason is not None]
            found += [(at_s, each.key, str(each.finish_reason)) for each in ended]
        return found


class Over(threading.Event):
    """The end of a turn of training, at once."""

    def is_set(self) -> bool:
        return True


GUIDED = SamplingParams(temperature=0, structured_outputs=StructuredOutputs(regex="[a-z]{4}"))


@pytest.mark.parametrize(
    ("script", "ends"),
    [
        pytest.param(
            [(2.0, Cancel(1)), (3.0, Look()), (4.0, Stop(True))], [], id="cancelled-never-starts"
        ),
        pytest.param([(2.0, Cancel(1)), (3.0, Stop(True))], [], id="cancelled-does-not-hold-drain"),
        pytest.param(
            [(2.0, Stop(True)), (3.0, Look())], [(3.0, 1, "stop")], id="drain-waits-for-it"
        ),
        pytest.param([(2.0, Stop(False))], [(2.0, 1, "cancelled")], id="stop-cancels-it"),
        pytest.param(
            [(2.0, Sleep(2, False)), (3.0, Look()), (9.0, Stop(True))],
            [(3.0, 1, "stop"), (3.0, 2, "done")],
            id="sleep-waits-for-it",
        ),
        pytest.param(
            [(2.0, Sleep(2, True)), (3.0, Look()), (9.0, Stop(True))],
            [(2.0, 2, "done"), (2.0, 1, "cancelled")],
            id="sleep-aborts-it",
        ),
        pytest.param(
            [(2.0, Pause(2, Over())), (3.0, Look()), (4.0, Resume(3)), (9.0, Stop(True))],
            [(3.0, 1, "stop"), (3.0, 2, "done"), (4.0, 3, "done")],
            id="pause-waits-for-it",
        ),
        pytest.param(
            [(2.0, Cancel(77)), (40.0, Look()), (41.0, Stop(True))],
            [(40.0, 1, "stop")],
            id="does-not-fall-asleep",
        ),
    ],
)
def test_a_request_that_waits_for_its_grammar_counts_as_a_request(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    script: list[tuple[float, Command]],
    ends: list[tuple[float, int, str]],
) -> None:
    """Later commands and the end treat it as one that runs; cancelled, it never begins."""
    asked = Add(1, tuple(prompts(1)[0]), GUIDED, 0)
    link = Compiled([(1.0, asked), *script])
    link.hold_grammars(monkeypatch)
    tokenizer = tiny_tokenizer()
    engine = make_engine(tiny_llama(), tokenizer=tokenizer, sleep_after_s=10.0)
    try:
        EngineLoop(engine, link, clock=link.clock).run()
    finally:
        link.may_compile.set()
    assert sorted(ends) == sorted(link.ends())
    end_s = max((at_s for at_s, key, _ in ends if key == 1), default=0.0)
    assert all(at_s >= end_s for at_s, _ in link.times_asleep())
    if not ends:
        assert not told(link, 1)


def test_requests_that_wait_for_their_grammar_are_refused_with_those_that_cannot_wake(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Add(1, tuple(prompts(1)[0]), GUIDED, 0)
    script = [(0.0, Sleep(9, False)), (1.0, asked), (2.0, add(2)), (3.0, Look()), (4.0, Stop(True))]
    link = Compiled(script)
    link.hold_grammars(monkeypatch)
    engine = make_engine(tiny_llama(), tokenizer=tiny_tokenizer(), enable_sleep_mode=True)
    real = engine.wake

    def wake() -> None:
        if link.now_s == 2.0:
            raise CapacityError("others hold the memory")
        real()

    monkeypatch.setattr(engine, "wake", wake)
    EngineLoop(engine, link, clock=link.clock).run()
    both = [(2.0, 1, "CapacityError"), (2.0, 2, "CapacityError")]
    assert [(0.0, 9, "done"), *both] == sorted(link.ends())


def _always(fault: Callable[[str], Any]) -> Callable[[str], Any]:
    """Memory is never there."""

    def failing(call: str) -> Any:
        if call != "mem_create":
            return None
        return DriverError(call, 2, "FULL", "no memory left", is_out_of_memory=True)

    return failing


# ---- clients ---------------------------------------------------------------------------------


@pytest.fixture(params=[AsyncEngine, hosted], ids=["thread", "process"])
def serve(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Run an engine in a thread or process of its own."""
    return request.param


async def test_clients_let_it_sleep_and_wake_it(make_engine: MakeEngine, serve: Any) -> None:
    """By call or by request, any number of times; metrics say so."""
    metrics, watch = Metrics(), Watch()
    engine = make_engine(enable_sleep_mode=True, observer=Observers([metrics, watch]))
    wanted = prompts(3)

    def gauge() -> float:
        return metrics.registry.get_sample_value("vmkv_sleeping")

    it = serve(engine)
    for turn in range(3):
        check_said(wanted, await asyncio.gather(*(last(it.stream(p, GREEDY)) for p in wanted)))
        await it.sleep()
        assert it.is_sleeping
        assert gauge() == 1
        await it.sleep()
        if turn != 1:
            await it.wake()
            assert not it.is_sleeping
            assert gauge() == 0
        await it.wake() if turn == 2 else None
        assert it.failure is None
    check_said(wanted[:1], [await last(it.stream(wanted[0], GREEDY))])
    assert not it.is_sleeping
    await it.shutdown()
    with pytest.raises(ClosedError):
        await it.sleep()


async def test_an_engine_without_sleep_mode_says_so(make_engine: MakeEngine, serve: Any) -> None:
    it = serve(make_engine())
    with pytest.raises(ConfigError, match="enable_sleep_mode=True"):
        await it.sleep()
    await it.wake()
    check_said(prompts(1), [await last(it.stream(prompts(1)[0], GREEDY))])
    await it.shutdown()


@pytest.mark.parametrize("aborts", [False, True], ids=["waits", "aborts"])
async def test_requests_before_and_after_a_sleep(
    make_engine: MakeEngine, serve: Any, monkeypatch: pytest.MonkeyPatch, aborts: bool
) -> None:
    """Those before finish first, or are cancelled; those after wake the engine, in order."""
    watch = Watch()
    engine = make_engine(enable_sleep_mode=True, observer=watch)
    slept: list[tuple[int, int]] = []
    real, posted = engine.sleep, threading.Event()

    def sleep(**what: bool) -> None:
        slept.append((len(watch.added), len(watch.finished)))
        real(**what)

    monkeypatch.setattr(engine, "sleep", sleep)
    step = engine.advance

    def advance() -> bool:
        if len(watch.added) >= 2:
            assert posted.wait(PATIENCE_S)  # The other commands are there.
        return step()

    monkeypatch.setattr(engine, "advance", advance)
    it, wanted = serve(engine), prompts(4)
    before = [asyncio.create_task(last(it.stream(each, LONG))) for each in wanted[:2]]
    await asyncio.to_thread(watch.wait, lambda: len(watch.added) >= 2, "two requests")
    asleep = asyncio.create_task(it.sleep(aborts=aborts))
    await asyncio.sleep(0)
    after = [asyncio.create_task(last(it.stream(each, GREEDY))) for each in wanted[2:]]
    gone = asyncio.create_task(last(it.stream(wanted[0], LONG)))
    for _ in range(5):
        await asyncio.sleep(0)
    gone.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    posted.set()
    await asleep
    ended = await asyncio.gather(*before)
    check_said(wanted[2:], await asyncio.gather(*after))
    if aborts:
        assert {"cancelled"} == {str(each.outputs[0].finish_reason) for each in ended}
    else:
        check_said(wanted[:2], ended, 60)
    assert not it.is_sleeping
    await it.shutdown()
    assert [(2, 2)] == slept
    assert 4 == len(watch.added)


def test_a_sleep_that_aborts_ends_one_that_waits(make_engine: MakeEngine) -> None:
    """Requests before the first are cancelled; the one between both is served, then it sleeps."""
    engine = make_engine(enable_sleep_mode=True)
    its = [Add(0, tuple(prompts(1)[0]), LONG, 0), Sleep(1, aborts=False)]
    its += [add(2, seed=1), Sleep(3, aborts=True)]
    link = Scripted([*((0.0, each) for each in its), (100.0, Stop(drain=True))])
    EngineLoop(engine, link, clock=link.clock).run()
    assert len(told(link, 0)) < 60
    assert reference(prompts(1, seed=1)[0], 8) == told(link, 2)
    assert [1, 3] == [key for _, news in link.news for key in news.done]


@pytest.mark.parametrize("drain", [True, False], ids=["drain", "cut"])
async def test_a_shutdown_does_not_wait_for_a_sleep(
    make_engine: MakeEngine, serve: Any, monkeypatch: pytest.MonkeyPatch, drain: bool
) -> None:
    """Requests that waited for it are served, or cut as the others."""
    watch = Watch()
    engine, posted = make_engine(enable_sleep_mode=True, observer=watch), threading.Event()
    step = engine.advance

    def advance() -> bool:
        assert posted.wait(PATIENCE_S)
        return step()

    monkeypatch.setattr(engine, "advance", advance)
    it, wanted = serve(engine), prompts(2)
    tasks = [asyncio.create_task(last(it.stream(wanted[0], LONG)))]
    await asyncio.to_thread(watch.wait, lambda: bool(watch.added), "a request")
    asleep = asyncio.create_task(it.sleep())
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(last(it.stream(wanted[1], GREEDY))))
    for _ in range(5):
        await asyncio.sleep(0)
    ending = asyncio.create_task(it.shutdown(drain=drain))
    for _ in range(5):
        await asyncio.sleep(0)
    posted.set()
    await ending
    with pytest.raises(ClosedError):
        await asleep
    found = await asyncio.gather(*tasks, return_exceptions=True)
    if drain:
        check_said(wanted[:1], found[:1], 60)
        check_said(wanted[1:], found[1:])
    else:
        assert isinstance(found[1], ClosedError)
    assert not engine.is_sleeping
