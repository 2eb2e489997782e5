"""Requests whose prefixes are in host memory begin when the copies are complete."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.requests import finish_all
from helpers.requests import reference as said_alone

from vmkv import HostBackend
from vmkv.core.cache.forking import find_beginning
from vmkv.serve.engine import Engine
from vmkv.serve.params import SamplingParams
from vmkv.serve.request import RequestHandle, RequestState
from vmkv.serve.scheduler import look_up
from vmkv.testing import FaultInjectingBackend
from vmkv.units import KiB, MiB

MakeEngine = Callable[..., Engine]
LONG = [1 + at * 7 % 90 for at in range(70)]
OTHER = [3 + at * 5 % 80 for at in range(20)]
NUM_CACHED = 64


@pytest.fixture
def host() -> HostBackend:
    return HostBackend(4 * KiB)


@pytest.fixture
def engine(make_engine: MakeEngine, host: HostBackend) -> Engine:
    """An engine that has answered a long prompt, whose tokens are in host memory only."""
    made = make_engine(backend=host, host_budget_bytes=8 * MiB)
    made.generate([LONG], _greedy(1))
    made.cache.trim()
    assert (0, NUM_CACHED) == find_beginning(made.cache, LONG, None)
    return made


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens)


def _prefix_bytes(engine: Engine) -> int:
    return sum(group.bytes_for(NUM_CACHED) for group in engine.cache.groups)


def _begin(engine: Engine, host: HostBackend) -> tuple[RequestHandle, RequestHandle]:
    """A request that runs, and one whose prefix is being copied."""
    running = engine.add(OTHER, _greedy(40))
    engine.step()
    host.hold_fences()
    late = engine.add(LONG, _greedy(5))
    engine.step()
    return running, late


def _check(handle: RequestHandle, prompt: list[int], num_tokens: int) -> None:
    assert said_alone(prompt, num_tokens) == list(handle.requests[0].output_token_ids)


def test_others_run_while_a_prefix_is_copied(engine: Engine, host: HostBackend) -> None:
    """The request waits for the copies and nothing else, and recomputes nothing."""
    running, late = _begin(engine, host)
    for _ in range(5):
        engine.step()
    assert late.requests[0].state is RequestState.WAITING
    assert running.requests[0].output_token_ids
    host.pass_fences()
    finish_all(engine)
    _check(running, OTHER, 40)
    _check(late, LONG, 5)
    assert NUM_CACHED == late.requests[0].num_cached_tokens
    assert _prefix_bytes(engine) == engine.cache.sharing.loaded_bytes


def test_alone_a_request_waits_for_its_copies(engine: Engine, host: HostBackend) -> None:
    host.hold_fences()
    late = engine.add(LONG, _greedy(5))
    finish_all(engine)
    _check(late, LONG, 5)
    assert NUM_CACHED == late.requests[0].num_cached_tokens


def test_others_run_while_memory_for_a_prefix_is_evicted(
    make_engine: MakeEngine, host: HostBackend
) -> None:
    """No step waits for the memory of rows that the running step may still use."""
    engine = make_engine(backend=host, host_budget_bytes=8 * MiB, max_num_seqs=2)
    engine.generate([LONG], _greedy(1))
    needed = engine.cache.pool.page_bytes * engine._view.peak_pages(len(LONG) + 1)
    engine.cache.trim()
    running = engine.add(OTHER, _greedy(60))
    engine.step()
    pool = engine.cache.pool
    pool.set_budget(pool.stats().resident_bytes + needed + 4 * pool.page_bytes)
    parked = engine.cache.open()  # What is left, and used just now.
    parked.append(len(LONG))
    parked.record(range(1, len(LONG) + 1))
    assert pool.available_bytes < needed
    host.hold_fences()
    parked.close()
    late = engine.add(LONG, _greedy(5))
    for _ in range(4):
        engine.step()
        assert late.requests[0].state is RequestState.WAITING
    assert not engine._view.loading
    assert pool.stats().retired_bytes
    assert len(running.requests[0].output_token_ids) >= 3
    host.pass_fences()
    finish_all(engine)
    _check(running, OTHER, 60)
    _check(late, LONG, 5)
    assert NUM_CACHED == late.requests[0].num_cached_tokens


def test_alone_a_request_waits_for_memory_that_is_evicted(
    make_engine: MakeEngine, host: HostBackend
) -> None:
    """It does not plan step after step until the memory is free."""
    engine = make_engine(backend=host, host_budget_bytes=8 * MiB, max_num_seqs=2)
    engine.generate([LONG], _greedy(1))
    pool = engine.cache.pool
    needed = pool.page_bytes * engine._view.peak_pages(len(LONG) + 1)
    engine.cache.trim()
    pool.set_budget(pool.stats().resident_bytes + needed + 4 * pool.page_bytes)
    parked = engine.cache.open()
    parked.append(len(LONG))
    parked.record(range(1, len(LONG) + 1))
    host.hold_fences()
    parked.close()
    late = engine.add(LONG, _greedy(5))
    for _ in range(12):
        engine.step()
    assert late.is_finished
    host.pass_fences()
    _check(late, LONG, 5)
    assert NUM_CACHED == late.requests[0].num_cached_tokens


def test_two_requests_with_one_prefix_load_it_once(engine: Engine, host: HostBackend) -> None:
    late = [engine.add(LONG, _greedy(5)), engine.add([*LONG, 9, 8], _greedy(5))]
    finish_all(engine)
    _check(late[0], LONG, 5)
    _check(late[1], [*LONG, 9, 8], 5)
    assert _prefix_bytes(engine) == engine.cache.sharing.loaded_bytes


def test_a_request_is_cancelled_while_its_prefix_is_copied(
    engine: Engine, host: HostBackend
) -> None:
    running, late = _begin(engine, host)
    engine.cancel(late)
    engine.cache.check()
    host.pass_fences()
    finish_all(engine)
    _check(running, OTHER, 40)
    engine.cache.check()
    assert (NUM_CACHED, 0) == find_beginning(engine.cache, LONG, None), "it was copied nevertheless"


def test_a_prefix_that_leaves_again_is_loaded_as_the_request_begins(
    engine: Engine, host: HostBackend
) -> None:
    running, late = _begin(engine, host)
    host.pass_fences()
    engine.cache.trim()
    finish_all(engine)
    _check(running, OTHER, 40)
    _check(late, LONG, 5)
    assert NUM_CACHED == late.requests[0].num_cached_tokens


@pytest.mark.parametrize("fail_at", range(1, 12))
def test_a_failing_call_while_a_prefix_is_copied(make_engine: MakeEngine, fail_at: int) -> None:
    """The request computes what it does not find; no sequence stays open."""
    backend = FaultInjectingBackend(HostBackend(4 * KiB))
    engine = make_engine(backend=backend, host_budget_bytes=8 * MiB)
    engine.generate([LONG], _greedy(1))
    engine.cache.trim()
    request = engine.add(LONG, _greedy(5)).requests[0]
    look_up(request, engine.loop._view)
    assert engine.loop._view.must_load(request)
    backend.arm(fail_at)
    engine.loop._view.load(request)
    backend.arm(0)
    engine.cache.check()
    finish_all(engine)
    assert said_alone(LONG, 5) == list(request.output_token_ids)


def test_cached_tokens_do_not_delay_a_request(make_engine: MakeEngine) -> None:
    """A prompt known but for its end overtakes a new one of its length that arrived before it."""
    its = {"max_num_mixed_tokens": 8, "max_num_batched_tokens": 32}
    made = make_engine(backend=HostBackend(4 * KiB), host_budget_bytes=8 * MiB, **its)
    made.generate([LONG], _greedy(1))
    new = made.add([2, *LONG[1:]], _greedy(2)).requests[0]
    on_device = made.add(LONG, _greedy(2)).requests[0]
    assert on_device.rank < new.rank
    made.cache.trim()
    below, sample = made.add(LONG, SamplingParams(temperature=0, max_tokens=2, n=2)).requests
    assert below.rank < sample.rank < new.rank
    finish_all(made)
