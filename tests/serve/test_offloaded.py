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


def _check(handle: RequestHandle, prompt: list[int], num_tokens: int) -> None:
    assert said_alone(prompt, num_tokens) == list(handle.requests[0].output_token_ids)


def test_others_run_while_a_prefix_is_copied(engine: Engine, host: HostBackend) -> None:
    """The request waits for the copies and nothing else, and recomputes nothing."""
    running = engine.add(OTHER, _greedy(40))
    engine.step()
    host.hold_fences()
    late = engine.add(LONG, _greedy(5))
    for _ in range(6):
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


def test_two_requests_with_one_prefix_load_it_once(engine: Engine, host: HostBackend) -> None:
    late = [engine.add(LONG, _greedy(5)), engine.add([*LONG, 9, 8], _greedy(5))]
    finish_all(engine)
    _check(late[0], LONG, 5)
    _check(late[1], [*LONG, 9, 8], 5)
    assert _prefix_bytes(engine) == engine.cache.sharing.loaded_bytes


def test_a_request_is_cancelled_while_its_prefix_is_copied(
    engine: Engine, host: HostBackend
) -> None:
    running = engine.add(OTHER, _greedy(20))
    engine.step()
    host.hold_fences()
    late = engine.add(LONG, _greedy(5))
    engine.step()
    engine.cancel(late)
    engine.cache.check()
    host.pass_fences()
    finish_all(engine)
    _check(running, OTHER, 20)
    engine.cache.check()
    assert (NUM_CACHED, 0) == find_beginning(engine.cache, LONG, None), "it was copied nevertheless"


def test_a_prefix_that_leaves_again_is_loaded_as_the_request_begins(
    engine: Engine, host: HostBackend
) -> None:
    running = engine.add(OTHER, _greedy(40))
    engine.step()
    host.hold_fences()
    late = engine.add(LONG, _greedy(5))
    engine.step()
    host.pass_fences()
    engine.cache.trim()
    finish_all(engine)
    _check(running, OTHER, 40)
    _check(late, LONG, 5)
    assert NUM_CACHED == late.requests[0].num_cached_tokens
