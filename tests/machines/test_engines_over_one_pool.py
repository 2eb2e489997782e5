"""Several busy engines over one pool: a request that fits the pool alone finishes."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers.engines_play import EnginesPlay
from helpers.tiny_models import tiny_model

from vmkv import Engine, ExtentPool, HostBackend, KVCache, OutOfPagesError, SamplingParams
from vmkv.core.memory.arbiter import PATIENCE_STEPS
from vmkv.serve.request import RequestHandle
from vmkv.units import KiB

PAGE = 4 * KiB
PROMPT = list(range(1, 60))


@contextmanager
def engines(num_engines: int, num_requests: float = 1.2) -> Iterator[list[Engine]]:
    """Engines over a pool that holds `num_requests` requests of `PROMPT` and 20 tokens."""
    made: list[Engine] = []
    pool = ExtentPool(HostBackend(PAGE), 1000 * PAGE)
    model = tiny_model("llama")
    for _ in range(num_engines):
        made.append(
            Engine(
                copy.deepcopy(model),
                pool=pool,
                max_num_seqs=4,
                max_num_batched_tokens=64,
                max_tokens=100,
                prefix_caching=False,
                runner="eager",
            )
        )
    pages = made[0]._view.peak_pages(len(PROMPT) + 20)
    pool.set_budget(pool.stats().resident_bytes + int(num_requests * pages) * PAGE)
    try:
        yield made
    finally:
        for each in made:
            each.close()
        pool.close()


def finish(*engines: Engine) -> None:
    """Step engines in turn until all requests are finished."""
    while any(each.has_unfinished for each in engines):
        for each in engines:
            each.step()


def params(num_tokens: int = 20) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def begun(engine: Engine) -> RequestHandle:
    """A request that has had two steps."""
    handle = engine.add(PROMPT, params())
    engine.step()
    engine.step()
    return handle


def reason(handle: RequestHandle) -> str:
    return str(handle.output().outputs[0].finish_reason)


def test_a_request_waits_for_another_engines_request_to_finish() -> None:
    """The later request of the second engine waits while the first engine makes progress."""
    with engines(2) as (first, second):
        before = begun(first)
        after = second.add(PROMPT, params())
        finish(first, second)
        assert ("length", "length") == (reason(before), reason(after))
        assert 0 == before.requests[0].num_preemptions


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that lacks memory does not wait for another engine's step."""
    monkeypatch.setattr("vmkv.core.memory.arbiter._WAIT_S", 0.0)


def test_a_later_request_of_another_engine_is_preempted() -> None:
    """The earlier request takes its memory at once, in the same thread."""
    with engines(2) as (first, second):
        before = first.add(PROMPT, params())
        after = begun(second)
        first.step()
        assert 1 == after.requests[0].num_preemptions
        finish(first, second)
        assert ("length", "length") == (reason(before), reason(after))
        assert 0 == before.requests[0].num_preemptions
        assert 1 == after.requests[0].num_preemptions


def test_a_swapped_request_gives_up_the_pages_it_shared() -> None:
    """The request that shares them is preempted too, so only the swapped one holds them."""
    playing = EnginesPlay(random.Random(9030), 2)
    while playing.num_steps < 150:
        playing.operate()
    playing.close()
    assert playing.num_finished


def test_requests_of_an_engine_that_is_not_stepped_are_preempted() -> None:
    """After `PATIENCE_STEPS` even an earlier request is preempted, and finishes later."""
    with engines(2) as (first, second):
        before = begun(first)
        assert "length" == str(second.generate(PROMPT, params())[0].outputs[0].finish_reason)
        assert 1 == before.requests[0].num_preemptions
        first.generate([1, 2], params(2))
        finish(first)
        assert "length" == reason(before)


def test_a_request_waits_for_an_engine_that_is_stepped_rarely() -> None:
    """`PATIENCE_STEPS` count from the last step that another engine has submitted."""
    with engines(2) as (first, second):
        before = begun(first)
        after = second.add(PROMPT, params())
        while first.has_unfinished:
            for _ in range(PATIENCE_STEPS // 2):
                second.step()
            first.step()
        finish(second)
        assert ("length", "length") == (reason(before), reason(after))
        assert 0 == before.requests[0].num_preemptions


def test_a_claim_that_is_not_renewed_ends() -> None:
    """An engine that claimed memory and is not stepped delays others for a time only."""
    with engines(2) as (first, second):
        first.add(PROMPT, params())
        after = begun(second)
        first.step()  # Preempts, and does not take the memory.
        second.step()
        assert 1 == after.requests[0].num_preemptions
        assert 0 == second._scheduler.num_running
        for _ in range(PATIENCE_STEPS + 40):
            second.step()
        assert "length" == reason(after)


def test_memory_that_a_users_cache_holds_is_an_error() -> None:
    """The request fails after `PATIENCE_STEPS` steps."""
    with engines(1) as [engine]:
        pool = engine.cache.pool
        cache = KVCache(pool, max_tokens=4096, max_sequences=1)
        cache.add_layers([0], num_kv_heads=1, head_dim=64, dtype=torch.float32)
        sequence = cache.open()
        cache.grow([(sequence, pool.available_bytes // (2 * 64 * 4) // 2)])
        handle = engine.add(PROMPT, params())
        for _ in range(PATIENCE_STEPS):
            engine.step()
        assert not handle.is_finished
        for _ in range(3):
            engine.step()
        error = handle.output().error
        assert isinstance(error, OutOfPagesError)
        assert f"in {PATIENCE_STEPS} steps" in str(error)
        sequence.close()
        cache.close()
        assert "length" == str(engine.generate(PROMPT, params())[0].outputs[0].finish_reason)


def in_threads(*calls: Callable[[], None]) -> None:
    threads = [threading.Thread(target=each) for each in calls]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def test_engines_in_threads_of_their_own() -> None:
    """Each engine preempts at its next step; all requests get the tokens that they get alone."""
    prompts = [PROMPT[: 20 * at + 19] for at in range(3)]
    with engines(2) as several:
        expected = [each.outputs[0].token_ids for each in several[0].generate(prompts, params())]
        found: dict[int, list[object]] = {}

        def run(at: int) -> None:
            outputs = several[at].generate(prompts, params())
            found[at] = [each.outputs[0].token_ids for each in outputs]

        in_threads(*(lambda at=at: run(at) for at in range(2)))
        assert found == dict.fromkeys(range(2), expected)


def test_a_later_request_of_another_thread_is_preempted_at_its_next_step(
    no_wait: None,
) -> None:
    """The other engine asks for the memory, and the request's own thread preempts it."""
    with engines(2) as (first, second):
        before = second.add(PROMPT, params())
        after = first.add(PROMPT, params())
        in_threads(first.step)
        second.step()
        assert 0 == after.requests[0].num_preemptions
        in_threads(first.step)
        assert 1 == after.requests[0].num_preemptions
        finish(second, first)
        assert ("length", "length") == (reason(before), reason(after))
        assert 0 == before.requests[0].num_preemptions


def test_an_engine_of_another_thread_that_is_not_stepped_is_an_error(
    no_wait: None,
) -> None:
    """No other thread may preempt its requests."""
    with engines(2) as (first, second):
        held = first.add(PROMPT, params())

        def hold() -> None:
            first.step()
            first.step()

        in_threads(hold)
        [output] = second.generate(PROMPT, params())
        assert isinstance(output.error, OutOfPagesError)
        finish(first)
        assert "length" == reason(held)
        assert "length" == str(second.generate(PROMPT, params())[0].outputs[0].finish_reason)
