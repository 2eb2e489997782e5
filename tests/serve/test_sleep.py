"""Memory between phases: `Engine.sleep` gives it to the driver, and later requests take it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.requests import check_said, prompts
from helpers.tiny_models import tiny_model

from vmkv import BackendUsage, HostBackend
from vmkv.core.backend.forwarding import ForwardingBackend
from vmkv.core.cache import device_memory
from vmkv.core.memory.invariants import check_pool
from vmkv.errors import ConfigError, DriverError
from vmkv.serve import Engine
from vmkv.serve.params import SamplingParams
from vmkv.serve.runner import RunnerOptions
from vmkv.units import KiB, MiB

EAGER: dict[str, Any] = {"runner": "eager"}
PADDED: dict[str, Any] = {
    "runner": "graphs",
    "runner_options": RunnerOptions(capture=True, show_progress=False),
}
RUNNERS = pytest.mark.parametrize("options", [EAGER, PADDED], ids=["eager", "padded"])
GREEDY = SamplingParams(temperature=0, max_tokens=8)
PENALISED = SamplingParams(
    seed=3, max_tokens=8, repetition_penalty=1.3, logit_bias={5: 1.0}, bad_words=[[7]]
)


def held_bytes(engine: Engine) -> int:
    """Physical memory by the device's accounting."""
    return engine.cache.pool.backend.usage().physical_bytes


def check_books(engine: Engine) -> None:
    engine.cache.check()
    check_pool(engine.cache.pool)


@RUNNERS
@pytest.mark.parametrize("graphs", [False, True], ids=["", "graphs"])
@pytest.mark.parametrize("is_paused", [False, True], ids=["", "paused"])
def test_sleep_gives_memory_to_the_driver(
    make_engine: Callable[..., Engine], options: dict[str, Any], graphs: bool, is_paused: bool
) -> None:
    """All but the row for padding; tokens afterwards are the same, of every kind of request."""
    engine = make_engine(**options)
    at_start = held_bytes(engine)
    wanted = prompts(5, seed=1)
    for _ in range(3):
        check_said(wanted, engine.generate(wanted, GREEDY))
        penalised = engine.generate(wanted[0], PENALISED)[0].outputs
        assert held_bytes(engine) > at_start
        if is_paused:
            with engine.paused():
                engine.sleep(weights=False, graphs=graphs)
                assert at_start == held_bytes(engine)
        else:
            engine.sleep(graphs=graphs)
        assert at_start == held_bytes(engine)
        assert not engine.cache.prefixes.recorded
        check_books(engine)
        again = engine.generate(wanted[0], PENALISED)[0].outputs
        assert penalised == again


def test_workspaces_are_given_back(make_engine: Callable[..., Engine]) -> None:
    """Token counts always, logits with the graphs; each is there again when it is needed."""
    engine = make_engine(**PADDED)
    sampler, space = engine._runner.sampler, engine._runner.stepper._space
    assert space is not None

    def held() -> tuple[int, int]:
        return sampler._marks.nbytes + sampler._token_counts.nbytes, space.logits.nbytes

    before = held()
    assert min(before) > 0
    engine.sleep()
    assert (0, before[1]) == held()
    engine.sleep(graphs=True)
    assert (0, 0) == held()
    graphs = engine._runner.stepper.decode_graphs
    assert graphs is not None
    assert not graphs.captured
    engine.generate(prompts(2, seed=2), GREEDY)
    assert before == held()
    assert 0 < len(graphs.captured) < len(graphs.keys())


class _Shared(ForwardingBackend):
    """A device with memory for `limit_bytes`, once that is set: others have the rest."""

    limit_bytes = 1 << 40
    num_refused = 0

    def forward(self, call: str, *args: Any, **options: Any) -> Any:
        """Make a call on the upstream, unless memory is short."""
        if call == "mem_create" and self.usage().physical_bytes + args[0] > self.limit_bytes:
            self.num_refused += 1
            raise DriverError(call, 2, "OUT_OF_MEMORY", "no memory left", is_out_of_memory=True)
        return super().forward(call, *args, **options)

    def free_memory_bytes(self) -> int:
        """Bytes that are left."""
        return max(0, self.limit_bytes - self.usage().physical_bytes)


def open_own(shared: _Shared, **options: Any) -> Engine:
    """Make an engine whose pool is its own."""
    with mock.patch.object(device_memory, "open_backend", return_value=shared):
        sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_tokens": 128}
        model = copy.deepcopy(tiny_model("llama"))
        return Engine(model, budget_bytes=1 * MiB, **sizes, **options)


@RUNNERS
@pytest.mark.parametrize("how", ["sleep", "pause"])
def test_an_engine_takes_what_is_free_afterwards(options: dict[str, Any], how: str) -> None:
    """With less than its budget it serves requests one after the other; then all at once again."""
    shared = _Shared(HostBackend(4 * KiB))
    wanted = prompts(4, shortest=20, seed=3)
    with open_own(shared, **options) as engine:
        pool, at_start = engine.cache.pool, held_bytes(engine)
        for free_bytes, budget_bytes in ((20, 20), (36, 36), (1 << 20, 1024), (24, 24)):
            check_said(wanted, engine.generate(wanted, GREEDY))
            assert held_bytes(engine) > at_start
            with engine.paused() if how == "pause" else contextlib.nullcontext():
                engine.sleep()
                shared.limit_bytes = at_start + free_bytes * KiB
            check_said(wanted, engine.generate(wanted, GREEDY))
            assert min(1 * MiB, at_start + budget_bytes * KiB) == pool.budget_bytes
            check_books(engine)
        pool.set_budget(512 * KiB)
        engine.sleep()
        shared.limit_bytes = 1 << 40
        check_said(wanted, engine.generate(wanted, GREEDY))
        assert 512 * KiB == pool.budget_bytes, "set by the caller"
    assert BackendUsage() == shared.usage()
    assert not shared.num_refused


def test_the_budget_of_a_shared_pool_is_its_owners(make_engine: Callable[..., Engine]) -> None:
    shared = _Shared(HostBackend(4 * KiB))
    engine = make_engine(backend=shared)
    wanted, budget_bytes = prompts(1, seed=3), engine.cache.pool.budget_bytes
    shared.limit_bytes = 64 * KiB
    engine.sleep()
    check_said(wanted, engine.generate(wanted, GREEDY))
    assert budget_bytes == engine.cache.pool.budget_bytes


def test_sleep_is_refused_with_requests_or_for_weights(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    with pytest.raises(ConfigError, match=r"leave weights out"):
        engine.sleep(weights=True)
    handle = engine.add(prompts(1)[0], GREEDY)
    engine.step()
    with pytest.raises(ConfigError, match="unfinished"):
        engine.sleep()
    engine.cancel(handle)
    engine.sleep(graphs=True)
    check_books(engine)


def test_a_sampler_without_memory_says_so_and_tries_again(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for token counts may be taken when the engine is to go on."""
    engine = make_engine()
    engine.sleep()
    zeros, refused = torch.zeros, iter([True])

    def short(*shape: Any, **its: Any) -> torch.Tensor:
        if its.get("dtype") is torch.uint8 and next(refused, False):
            raise torch.OutOfMemoryError("no memory left")
        return zeros(*shape, **its)

    monkeypatch.setattr(torch, "zeros", short)
    wanted = prompts(1, seed=5)
    check_said(wanted, engine.generate(wanted, GREEDY))
