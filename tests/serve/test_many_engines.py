"""Engines of different processes' kind, each with a pool of its own, under one broker.

They run in this process, one after the other or by turns; the broker and the pools' threads are
those of `vmkv serve`. Answers must be those of an engine alone, whatever memory does.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers.members import pool_of
from helpers.tiny_models import tiny_model
from helpers.waiting import until

from vmkv import BackendUsage, ConfigError, HostBackend
from vmkv.core.memory import Broker, shares
from vmkv.core.memory.arbiter import PATIENCE_STEPS
from vmkv.serve import engine as engine_module
from vmkv.serve import served_rows, step_loop
from vmkv.serve.engine import Engine
from vmkv.serve.params import SamplingParams
from vmkv.units import KiB

OpenEngine = Callable[..., Engine]
PAGE = 4 * KiB
PAGES = 100
PROMPTS = [[1 + (7 * at + 3 * number) % 90 for at in range(60)] for number in range(12)]
LONG = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """Open a broker whose budget holds some of the prompts' requests at a time."""
    with Broker(tmp_path / "pool.sock", PAGES * PAGE, page_bytes=PAGE) as made:
        yield made


@pytest.fixture
def open_engine(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenEngine]:
    """Make engines that join the broker; their books are checked, and all is given back."""
    made: list[tuple[Engine, HostBackend]] = []
    opened = served_rows.open_member_pool

    def make(**options: Any) -> Engine:
        backend = HostBackend(PAGE)

        def on_small_pages(memory: Any, *args: Any, **figures: Any) -> Any:
            return opened(backend, *args, **figures)

        monkeypatch.setattr(served_rows, "open_member_pool", on_small_pages)
        defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_tokens": 128, "seed": 0}
        its = {**defaults, "pool_socket": broker.socket_path, "floor_bytes": 8 * PAGE, **options}
        engine = Engine(copy.deepcopy(tiny_model("llama")), **its)
        made.append((engine, backend))
        return engine

    yield make
    for engine, backend in made:
        if not engine.cache.is_closed:
            engine.cache.check()
        engine.close()
        assert backend.usage() == BackendUsage()
    until(lambda: not broker.members())


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Return the answers of an engine with memory for all."""
    with Engine(copy.deepcopy(tiny_model("llama")), seed=0, max_tokens=128) as engine:
        return [each.outputs[0].token_ids for each in engine.generate(PROMPTS, LONG)]


def held(engine: Engine) -> int:
    """Return the pages that an engine's pool has created."""
    return engine.cache.pool.stats().created_bytes // PAGE


def test_memory_follows_the_load(open_engine: OpenEngine, alone: list[list[int]]) -> None:
    """Each engine in its turn holds more than a fixed half would be, and answers as if alone."""
    engines = [open_engine(), open_engine()]
    most = [0, 0]
    for _ in range(2):
        for at, engine in enumerate(engines):
            handles = [engine.add(prompt, LONG) for prompt in PROMPTS]
            while engine.has_unfinished:
                engine.step()
                most[at] = max(most[at], held(engine))
                assert sum(map(held, engines)) <= PAGES
            answers = [each.output().outputs[0].token_ids for each in handles]
            assert alone == answers
            engine.step()  # Falls idle.
    assert min(most) > 60


def test_a_member_asks_for_memory_before_it_evicts_ahead(open_engine: OpenEngine) -> None:
    """Its pool has little available most of the time, and the broker has more."""
    engine = open_engine()
    for prompt in PROMPTS:
        engine.add(prompt, LONG)
    pool, was_short = engine.cache.pool, False
    with mock.patch.object(pool, "make_room_ahead", wraps=pool.make_room_ahead) as made:
        while engine.has_unfinished:
            engine.step()
            was_short |= pool.available_bytes < pool.budget_bytes // 32
    assert was_short
    assert not made.called


def test_an_idle_engine_keeps_its_floor(broker: Broker, open_engine: OpenEngine) -> None:
    """Its cached prefixes go back to the driver half a second after its last request."""
    engine = open_engine(floor_bytes=10 * PAGE)
    engine.generate(PROMPTS, LONG)
    engine.step()
    until(lambda: held(engine) <= 10)
    until(lambda: broker.members()[0].given_bytes == 10 * PAGE)
    engine.cache.check()


def test_requests_are_preempted_where_all_have_too_little(
    open_engine: OpenEngine, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both engines are busy: the second takes its share from the first one's live rows."""
    monkeypatch.setattr(shares, "TURN_S", 0.0)  # It does not wait for their requests to end.
    open_engine(floor_bytes=50 * PAGE)  # What is left does not hold the first engine's requests.
    first, second = open_engine(), open_engine(pool_weight=3.0, floor_bytes=PAGE)
    handles = [first.add(prompt, LONG) for prompt in PROMPTS]
    while held(first) < 46:
        assert first.has_unfinished
        first.step()
    others = [second.add(prompt, LONG) for prompt in PROMPTS]
    second.step()
    member = first.cache.pool.member
    assert member is not None
    until(lambda: member.excess_bytes > 0)
    has_more = False
    while first.has_unfinished or second.has_unfinished:
        first.step()
        second.step()
        assert held(first) + held(second) <= PAGES
        has_more |= held(second) > held(first)
    assert has_more
    for its in (handles, others):
        assert alone == [each.output().outputs[0].token_ids for each in its]
    assert any(each.num_preemptions for handle in handles for each in handle.requests)


def test_requests_that_fit_no_fair_share_run_by_turns(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request of each engine takes most of the budget; none waits for ever."""
    monkeypatch.setattr(shares, "TURN_S", 0.3)
    params = SamplingParams(temperature=0, max_tokens=100)
    prompt = [1 + at % 90 for at in range(500)]
    its = {"max_tokens": 1024, "max_num_batched_tokens": 256}
    engines = [open_engine(**its), open_engine(**its)]
    most = engines[0].cache.pool.most_bytes // PAGE
    with Engine(copy.deepcopy(tiny_model("llama")), seed=0, **its) as plain:
        expected = plain.generate(prompt, params)[0].outputs[0].token_ids
        pages = plain._view.peak_pages(600) * plain.cache.pool.page_bytes // PAGE
    assert most / 2 < pages <= most, pages
    handles = [each.add(prompt, params) for each in engines]
    while any(each.has_unfinished for each in engines):
        for each in engines:
            each.step()
        assert sum(map(held, engines)) <= PAGES
    for handle in handles:
        assert expected == handle.output().outputs[0].token_ids


def test_a_request_waits_for_memory_that_another_member_keeps(
    broker: Broker, open_engine: OpenEngine, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as long as it takes: the broker may give it at any time."""
    monkeypatch.setattr(step_loop, "_ORDER_WAIT_S", 0.001)
    engine = open_engine(floor_bytes=2 * PAGE)
    with closing(pool_of(broker.socket_path, "other")) as pool:
        member = pool.member
        until(lambda: held(engine) <= 2)
        extents = []
        while len(extents) < 96:  # A request takes more than the four pages that are left.
            if pool.available_bytes < PAGE:
                assert member.grow((96 - len(extents)) * PAGE)
            extents += pool.acquire([0])
        handle = engine.add(PROMPTS[0], LONG)
        for _ in range(2 * PATIENCE_STEPS):
            engine.step()
        assert not handle.is_finished
        pool.disown(extents)
    while not handle.is_finished:
        engine.step()
    assert alone[0] == handle.output().outputs[0].token_ids


def test_a_request_may_be_as_long_as_the_floors_of_others_leave(
    open_engine: OpenEngine,
) -> None:
    """An engine's first budget is its floor, which says nothing about what it can serve."""
    engine = open_engine(max_tokens=2048, floor_bytes=8 * PAGE)
    alone_tokens = engine.max_tokens
    other = open_engine(floor_bytes=80 * PAGE)
    until(lambda: engine.max_tokens < alone_tokens)
    assert engine.max_tokens < 2048
    with pytest.raises(ConfigError, match="leaves no room for an answer"):
        engine.add([1] * alone_tokens)
    assert other.max_tokens == 128


def test_others_use_the_memory_of_weights_that_sleep(
    broker: Broker, open_engine: OpenEngine, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And give it back, from live rows, when the weights return."""
    monkeypatch.setattr(engine_module, "open_backend", lambda _: HostBackend(PAGE))
    sleeper, other = open_engine(enable_sleep_mode=True), open_engine(max_num_seqs=16)
    assert sleeper._weights is not None
    num_pages = sleeper._weights.num_bytes // PAGE
    assert num_pages > 20
    assert (PAGES + num_pages) * PAGE == broker.budget_bytes
    assert [alone[0]] == [each.outputs[0].token_ids for each in sleeper.generate(PROMPTS[:1], LONG)]
    sleeper.sleep(weights=True)
    until(lambda: sum(each.given_bytes for each in broker.members()) <= 17 * PAGE)

    longer = SamplingParams(temperature=0, max_tokens=68, ignore_eos=True)
    handles = [other.add(prompt, longer) for prompt in PROMPTS]
    for prompt in PROMPTS[:4]:
        other.add(prompt[::-1], longer)
    answers: list[Any] = []
    waker = threading.Thread(target=lambda: answers.extend(sleeper.generate(PROMPTS[:1], LONG)))
    most = 0
    while other.has_unfinished:
        other.step()
        most = max(most, held(other))
        if most > PAGES and not waker.ident:
            waker.start()
    other.step()  # Falls idle.
    waker.join()
    assert most > PAGES
    assert [alone[0]] == [each.outputs[0].token_ids for each in answers]
    for expected, each in zip(alone, handles, strict=True):
        assert expected == each.output().outputs[0].token_ids[: len(expected)]
    other.close()
    sleeper.close()
    until(lambda: broker.budget_bytes == PAGES * PAGE)
