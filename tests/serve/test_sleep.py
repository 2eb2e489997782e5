"""Memory between phases: `Engine.sleep` gives it to the driver, and later requests take it.

With weights the engine sleeps until the next request, which finds them at the same addresses.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.hybrids import HYBRIDS, hybrid
from helpers.limited_device import UNLIMITED_BYTES, LimitedDevice
from helpers.requests import check_said, prompts, reference
from helpers.runners import COMPILED, EAGER, PADDED
from helpers.tiny_models import tiny_model

from vmkv import BackendUsage, HostBackend
from vmkv.core.cache import device_memory
from vmkv.core.memory.invariants import check_pool
from vmkv.errors import ConfigError, DriverError, OutOfPagesError
from vmkv.serve import engine as engine_module
from vmkv.serve.engine import Engine
from vmkv.serve.params import SamplingParams
from vmkv.testing.faults import FaultInjectingBackend
from vmkv.units import KiB, MiB

MakeEngine = Callable[..., Engine]
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
    engine: Engine, options: dict[str, Any], graphs: bool, is_paused: bool
) -> None:
    """The row of padding, too; tokens afterwards are the same, of every kind of request."""
    at_start = held_bytes(engine)
    assert (at_start > 0) == (options is PADDED)
    wanted = prompts(5, seed=1)
    for _ in range(3):
        check_said(wanted, engine.generate(wanted, GREEDY))
        penalised = engine.generate(wanted[0], PENALISED)[0].outputs
        assert held_bytes(engine) > at_start
        if is_paused:
            with engine.paused():
                engine.sleep(weights=False, graphs=graphs)
                assert 0 == held_bytes(engine)
        else:
            engine.sleep(graphs=graphs)
        assert 0 == held_bytes(engine)
        engine.sleep()
        assert 0 == engine.cache.pool.stats().resident_bytes
        assert not engine.cache.prefixes.recorded
        check_books(engine)
        again = engine.generate(wanted[0], PENALISED)[0].outputs
        assert penalised == again


def test_padding_without_memory_fails_a_step_alone(make_engine: MakeEngine) -> None:
    """Its row is mapped with the first step's growth, and by a later one if that fails."""
    shared = LimitedDevice(HostBackend(4 * KiB))
    engine = make_engine(backend=shared, **PADDED)
    wanted = prompts(1, shortest=20, seed=7)
    padding = held_bytes(engine)
    engine.sleep()
    shared.device_bytes = padding  # None is left for a request.
    assert engine.generate(wanted, GREEDY)[0].error is not None
    shared.device_bytes = UNLIMITED_BYTES
    check_said(wanted, engine.generate(wanted, GREEDY))
    check_books(engine)
    engine.sleep()
    assert 0 == held_bytes(engine)


def test_a_runner_made_after_sleep_has_padding_of_its_own(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(model := copy.deepcopy(tiny_model("llama")), **PADDED)
    wanted = prompts(3, seed=8)
    before = engine._runner
    with engine.paused():
        engine.sleep()
        weight = model.lm_head.weight
        model.lm_head.weight = torch.nn.Parameter(weight.detach().clone(), requires_grad=False)
    assert before is not engine._runner
    check_said(wanted, engine.generate(wanted, GREEDY))
    check_books(engine)
    engine.sleep()
    assert 0 == held_bytes(engine)


def test_torch_gives_its_idle_memory_back_between_phases(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When training ends, before a pool grows; and when an engine sleeps, after its pool."""
    engine = make_engine(**PADDED)
    engine.generate(prompts(1), GREEDY)
    seen: list[tuple[bool, int]] = []

    def empty_cache() -> None:
        seen.append((engine._turns.is_paused, held_bytes(engine)))

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    with engine.paused():
        engine.sleep(graphs=True)
        assert [(True, 0)] == seen
    assert [(True, 0)] * 2 == seen


def test_workspaces_are_given_back(make_engine: MakeEngine) -> None:
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


def open_own(shared: LimitedDevice, **options: Any) -> Engine:
    """Make an engine whose pool is its own."""
    with mock.patch.object(device_memory, "open_backend", return_value=shared):
        sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_tokens": 128}
        model = copy.deepcopy(tiny_model("llama"))
        return Engine(model, budget_bytes=1 * MiB, **sizes, **options)


@RUNNERS
@pytest.mark.parametrize("how", ["sleep", "pause"])
def test_an_engine_takes_what_is_free_afterwards(options: dict[str, Any], how: str) -> None:
    """With less than its budget it serves requests one after the other; then all at once again."""
    shared = LimitedDevice(HostBackend(4 * KiB))
    wanted = prompts(4, shortest=20, seed=3)
    with open_own(shared, **options) as engine:
        pool, at_start = engine.cache.pool, held_bytes(engine)
        for free_bytes, budget_bytes in ((20, 20), (36, 36), (1 << 20, 1024), (24, 24)):
            check_said(wanted, engine.generate(wanted, GREEDY))
            assert held_bytes(engine) > at_start
            with engine.paused() if how == "pause" else contextlib.nullcontext():
                engine.sleep()
                shared.device_bytes = at_start + free_bytes * KiB
            check_said(wanted, engine.generate(wanted, GREEDY))
            assert min(1 * MiB, at_start + budget_bytes * KiB) == pool.budget_bytes
            check_books(engine)
        pool.set_budget(512 * KiB)
        engine.sleep()
        shared.device_bytes = UNLIMITED_BYTES
        check_said(wanted, engine.generate(wanted, GREEDY))
        assert 512 * KiB == pool.budget_bytes, "set by the caller"
    assert BackendUsage() == shared.usage()
    assert not shared.num_refused


def test_the_budget_of_a_shared_pool_is_its_owners(make_engine: MakeEngine) -> None:
    shared = LimitedDevice(HostBackend(4 * KiB))
    engine = make_engine(backend=shared)
    wanted, budget_bytes = prompts(1, seed=3), engine.cache.pool.budget_bytes
    shared.device_bytes = 64 * KiB
    engine.sleep()
    check_said(wanted, engine.generate(wanted, GREEDY))
    assert budget_bytes == engine.cache.pool.budget_bytes


def test_sleep_is_refused_with_requests_or_for_weights(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="enable_sleep_mode=True"):
        engine.sleep(weights=True)
    handle = engine.add(prompts(1)[0], GREEDY)
    engine.step()
    with pytest.raises(ConfigError, match="unfinished"):
        engine.sleep()
    engine.cancel(handle)
    engine.sleep(graphs=True)
    assert not engine.is_sleeping
    engine.wake()
    check_books(engine)


def test_a_sampler_without_memory_says_so_and_tries_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for token counts may be taken when the engine is to go on."""
    engine.sleep()
    zeros, refused = torch.zeros, iter([True])

    def short(*shape: Any, **its: Any) -> torch.Tensor:
        if its.get("dtype") is torch.uint8 and next(refused, False):
            raise torch.OutOfMemoryError("no memory left")
        return zeros(*shape, **its)

    monkeypatch.setattr(torch, "zeros", short)
    wanted = prompts(1, seed=5)
    check_said(wanted, engine.generate(wanted, GREEDY))


# ---- weights -------------------------------------------------------------------------------------

SLEEPY: dict[str, Any] = {"enable_sleep_mode": True, "host_budget_bytes": 1 * MiB}


def addresses(model: torch.nn.Module) -> list[int]:
    return [each.data_ptr() for each in model.parameters()]


def cached(outputs: list[Any]) -> list[int]:
    return [each.num_cached_tokens for each in outputs]


def check_all_books(engine: Engine) -> None:
    check_books(engine)
    assert engine._weights is not None
    assert engine._weights._pool is not None
    check_pool(engine._weights._pool)


@pytest.mark.parametrize("options", [EAGER, PADDED, COMPILED], ids=["eager", "padded", "compiled"])
@pytest.mark.parametrize("prefixes", [False, True], ids=["", "prefixes"])
def test_a_request_finds_weights_at_their_addresses(
    make_engine: MakeEngine, options: dict[str, Any], prefixes: bool
) -> None:
    """And prefixes, with what they share, where they were to be kept."""
    model = copy.deepcopy(tiny_model("llama"))
    expected = {name: each.clone() for name, each in model.state_dict().items()}
    engine = make_engine(model, **SLEEPY, **options)
    at_start, where = held_bytes(engine), addresses(model)
    assert engine._weights is not None
    table = engine._weights._table
    assert all(0 <= each - table.address < table.reserved_bytes for each in where)
    shared, penalised = prompts(1, shortest=40, longest=40, seed=1)[0], []
    wanted = [shared + [each] * 9 for each in (5, 6, 7)]
    for turn in range(3):
        outputs = engine.generate(wanted, GREEDY)
        check_said(wanted, outputs)
        assert (cached(outputs)[0] > 0) == (turn > 0 and prefixes)
        outputs = engine.generate(wanted, GREEDY)
        assert min(cached(outputs)) > 40, "they share all prompts, and more"
        penalised.append(engine.generate(wanted[0], PENALISED)[0].outputs)
        assert held_bytes(engine) > at_start
        engine.sleep(weights=True, prefixes=prefixes)
        assert engine.is_sleeping
        assert 0 == held_bytes(engine)
        assert 0 == table.pool.backend.usage().physical_bytes
        check_all_books(engine)
        engine.sleep(weights=True)  # Does nothing more.
        with pytest.raises(ConfigError, match="sleeps"):
            Engine(model, budget_bytes=1 * MiB)
        if turn == 1:
            engine.wake()
            assert not engine.is_sleeping
            check_all_books(engine)
        assert where == addresses(model)
    check_said(wanted, engine.generate(wanted, GREEDY))
    assert where == addresses(model)
    assert penalised[0] == penalised[1] == penalised[2]
    engine.close()
    assert not {*where} & {*addresses(model)}
    for name, each in model.state_dict().items():
        assert torch.equal(expected[name], each)


@pytest.mark.parametrize("name", HYBRIDS[:1])
def test_states_of_prefixes_sleep_with_their_rows(make_engine: MakeEngine, name: str) -> None:
    """Those of ended rows, and checkpoints within them."""
    engine = make_engine(copy.deepcopy(hybrid(name)), **SLEEPY, **EAGER)
    at_start, (prompt,) = held_bytes(engine), prompts(1, shortest=40, longest=40, seed=1)
    found = []
    for sleeps in (False, True):
        first = engine.generate([prompt], GREEDY)[0].outputs[0].token_ids
        if sleeps:
            engine.sleep(weights=True, prefixes=True)
            assert at_start == held_bytes(engine)
            engine.cache.check()
        later = [[*prompt, *first, 5, 6], [*prompt[:36], 9, 8, 7]]
        outputs = engine.generate(later, GREEDY)
        check_books(engine)
        found.append((cached(outputs), [each.outputs[0].token_ids for each in outputs]))
        engine.weights_changed()  # Forgets prefixes.
    (at_once, said), (slept, said_then) = found
    assert said == said_then
    assert min(at_once) >= 32, "a row's own state and a checkpoint are found"
    assert slept == [each - each % 16 for each in at_once], "whole blocks of 16 tokens sleep"


def test_a_collected_engine_gives_back_what_sleeps() -> None:
    """Also its prefixes in host memory; the model is served by the next engine."""
    model, (prompt,) = copy.deepcopy(tiny_model("llama")), prompts(1)
    options = {"host_budget_bytes": MiB, "budget_bytes": MiB, "max_tokens": 100} | EAGER
    engine = Engine(model, **options)
    engine.generate([prompt], GREEDY)
    engine.sleep(prefixes=True)
    backend = engine.cache.pool.backend
    assert backend.usage().pinned_bytes
    del engine
    with pytest.warns(ResourceWarning, match="Engine was never closed"):
        gc.collect()
    with Engine(model, **options) as engine:
        assert BackendUsage() == backend.usage()
        check_said([prompt], engine.generate([prompt], GREEDY))


@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "asleep"])
@pytest.mark.parametrize("options", [EAGER, PADDED, COMPILED], ids=["eager", "padded", "compiled"])
def test_a_collected_engine_gives_weights_back(options: dict[str, Any], sleeps: bool) -> None:
    """To torch's memory, when the next engine is made, also of another model."""
    model, (prompt,) = copy.deepcopy(tiny_model("llama")), prompts(1)
    sizes = {"budget_bytes": MiB, "max_tokens": 100}
    engine = Engine(model, enable_sleep_mode=True, **sizes, **options)
    engine.generate([prompt], GREEDY)
    if sleeps:
        engine.sleep(weights=True)
    assert engine._weights is not None
    assert engine._weights._pool is not None
    backends = [engine.cache.pool.backend, engine._weights._pool.backend]
    assert sleeps or backends[1].usage().num_handles
    del engine
    with pytest.warns(ResourceWarning, match="Engine was never closed"):
        gc.collect()
    if sleeps:
        with pytest.raises(ConfigError, match="make another engine"):
            model(torch.tensor([prompt]))
    with Engine(tiny_model("mistral"), **sizes, **EAGER):
        assert [BackendUsage()] * 2 == [each.usage() for each in backends]
    said = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    assert reference(prompt) == said[0, len(prompt) :].tolist()
    with Engine(model, **sizes, **options) as engine:
        check_said([prompt], engine.generate([prompt], GREEDY))


def test_prefixes_that_the_host_does_not_hold_are_dropped(
    make_engine: MakeEngine,
) -> None:
    """The last used ones stay; none without host memory."""
    wanted = prompts(4, shortest=60, longest=60, seed=4)
    for host_bytes in (0, 16 * KiB):
        engine = make_engine(enable_sleep_mode=True, host_budget_bytes=host_bytes)
        for prompt in wanted:
            engine.generate(prompt, GREEDY)
        engine.sleep(weights=True, prefixes=True)
        check_all_books(engine)
        found = [cached(engine.generate(each, GREEDY))[0] > 0 for each in reversed(wanted)]
        assert found[0] == (host_bytes > 0)
        assert found == sorted(found, reverse=True)
        assert not all(found)


def test_training_has_the_weights_awake(make_engine: MakeEngine) -> None:
    """Updates survive a sleep, and parameters that training moves are held anew."""
    model = copy.deepcopy(tiny_model("llama"))
    engine = make_engine(model, **SLEEPY, **COMPILED)
    wanted = prompts(3, seed=6)
    engine.generate(wanted, GREEDY)
    for moves in (False, True):
        engine.sleep(weights=True)
        with engine.paused():
            assert not engine.is_sleeping
            with pytest.raises(ConfigError, match="within paused"):
                engine.sleep(weights=True)
            engine.sleep()
            with torch.no_grad():
                for each in model.parameters():
                    each.mul_(1.5)
                    if moves:
                        each.data = each.data.clone()
        engine.sleep(weights=True)
        fresh = copy.deepcopy(tiny_model("llama"))
        with torch.no_grad():
            for each in fresh.parameters():
                each.mul_(1.5 * 1.5 if moves else 1.5)
        with Engine(fresh, budget_bytes=1 * MiB, max_num_seqs=4, max_tokens=128) as other:
            told = [each.outputs[0].token_ids for each in other.generate(wanted, GREEDY)]
        assert told == [each.outputs[0].token_ids for each in engine.generate(wanted, GREEDY)]
        weights = engine._weights
        assert weights is not None
        assert weights.num_bytes == weights._pool.stats().resident_bytes  # type: ignore[union-attr]
        check_all_books(engine)


def test_sleep_mode_needs_a_model_of_its_own(make_engine: MakeEngine) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    first = make_engine(model)
    with pytest.raises(ConfigError, match="served already"):
        make_engine(model, enable_sleep_mode=True)
    check_said(prompts(1), first.generate(prompts(1), GREEDY))


@pytest.mark.parametrize("is_out_of_memory", [False, True], ids=["broken", "full"])
@pytest.mark.parametrize(
    ("part", "wakes"),
    [("weights", False), ("weights", True), ("cache", False)],
    ids=["sleep-weights", "wake-weights", "sleep-cache"],
)
def test_an_engine_serves_after_any_failed_call(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    wakes: bool,
    is_out_of_memory: bool,
) -> None:
    """A failed sleep leaves it awake, a failed wake asleep, and the next request wakes it."""
    made: list[FaultInjectingBackend] = []

    def opened(*_: Any) -> FaultInjectingBackend:
        made.append(FaultInjectingBackend(HostBackend(4 * KiB)))
        return made[-1]

    monkeypatch.setattr(engine_module, "open_backend", opened)
    engine = make_engine(backend=opened(), **SLEEPY)
    backend = made[part == "weights"]
    wanted, short = prompts(2, shortest=20, longest=24, seed=8), replace(GREEDY, max_tokens=1)
    told = [each.outputs for each in engine.generate(wanted, short)]
    num_failed, fail_at, struck = 0, 0, "none yet"
    while struck is not None:
        fail_at += 1
        if wakes:
            engine.sleep(weights=True, prefixes=True)
        backend.arm(fail_at, is_out_of_memory=is_out_of_memory)
        try:
            engine.wake() if wakes else engine.sleep(weights=True, prefixes=True)
        except (DriverError, OutOfPagesError):
            num_failed += 1
            assert engine.is_sleeping == wakes
        else:
            assert engine.is_sleeping != wakes
        struck = backend.failed_call
        backend.arm(0)
        check_all_books(engine)
        assert told == [each.outputs for each in engine.generate(wanted, short)]
        check_all_books(engine)
    assert fail_at > 4
    assert num_failed > 0 or (part, is_out_of_memory) == ("cache", True)


def test_a_request_without_memory_to_wake_is_refused(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may have the memory; the engine sleeps on. A wrong request does not wake it."""
    shared = LimitedDevice(HostBackend(4 * KiB))
    monkeypatch.setattr(engine_module, "open_backend", lambda _: shared)
    engine, wanted = make_engine(enable_sleep_mode=True), prompts(2, seed=2)
    check_said(wanted, engine.generate(wanted, GREEDY))
    engine.sleep(weights=True)
    shared.device_bytes = 16 * KiB
    for _ in range(2):
        with pytest.raises(OutOfPagesError, match="no more memory"):
            engine.add(wanted[0], GREEDY)
        assert engine.is_sleeping
        assert not engine.has_unfinished
    shared.device_bytes = UNLIMITED_BYTES
    with pytest.raises(ConfigError):
        engine.add([-1], GREEDY)
    assert engine.is_sleeping
    check_said(wanted, engine.generate(wanted, GREEDY))


def test_many_models_sleep_and_wake_at_random(make_engine: MakeEngine) -> None:
    """Their answers are those of a model that never slept, whatever else happens in between."""
    draw, names = random.Random(7), ["llama", "qwen3", "mistral", "gemma2"]
    runners = [EAGER, PADDED, EAGER, PADDED]
    pairs = [
        (make_engine(name, **SLEEPY, **how), make_engine(name, **how))
        for name, how in zip(names, runners, strict=True)
    ]
    num_sleeps = num_cached = 0
    for turn in range(80):
        engine, awake = pairs[draw.randrange(len(pairs))]
        if draw.random() < 0.5:
            engine.sleep(weights=True, prefixes=draw.random() < 0.5, graphs=draw.random() < 0.2)
            num_sleeps += 1
        elif draw.random() < 0.2:
            engine.wake()
        else:
            wanted = prompts(draw.randint(1, 5), longest=50, seed=turn % 7)
            params = SamplingParams(temperature=0.9, seed=turn, max_tokens=draw.randint(1, 9))
            outputs = engine.generate(wanted, params)
            told = [each.outputs[0].token_ids for each in outputs]
            assert told == [each.outputs[0].token_ids for each in awake.generate(wanted, params)]
            num_cached += sum(cached(outputs))
        check_all_books(engine)
    assert num_sleeps > 30
    assert num_cached > 100
