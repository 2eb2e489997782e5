"""Test cases on two ranks: functions that both ranks run at the same time.

A process for each rank takes seconds to start, so one pair runs many cases; see `Pair`.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import vmkv
from helpers import tiny_models
from helpers.hybrids import hybrid
from helpers.latents import latent_model
from helpers.limited_device import UNLIMITED_BYTES, LimitedDevice
from helpers.members import pool_of
from helpers.requests import finish_all
from helpers.runners import COMPILED, EAGER, PADDED, graphs
from helpers.serving import tiny_llama, tiny_tokenizer
from helpers.tiny_models import kernel_model, tiny_model
from vmkv import (
    Backend,
    BackendUsage,
    ConfigError,
    Engine,
    HostBackend,
    OutOfPagesError,
    SamplingParams,
)
from vmkv.core.backend import MemoryLocation
from vmkv.core.memory import Broker, shares
from vmkv.hf import VMKVCache
from vmkv.hf.proof import prove
from vmkv.serve.drafts import StepTimes
from vmkv.serve.memory_view import MemoryView
from vmkv.serve.parallel import Ranks, TensorParallel, localise, lockstep, one_shot
from vmkv.serve.parallel.collectives import all_reduce
from vmkv.serve.parallel.engine import ParallelEngine
from vmkv.serve.parallel.localise import load
from vmkv.serve.params import StructuredOutputs
from vmkv.serve.request import FinishReason, RequestHandle
from vmkv.serve.runner import SlotError
from vmkv.serve.sampler import Sampler
from vmkv.serve.scheduler import PreemptionCosts
from vmkv.step import graph_passes
from vmkv.units import KiB, MiB

Case = Callable[[TensorParallel], None]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = [[5, 9, 13, 7], [8] * 3 + [21, 4] * 17, [40, 3, 77]]
PAGE_BYTES = 4 * KiB
_THINGS = {"type": "array", "items": {"enum": ["a", "b", 7]}, "minItems": 4, "maxItems": 9}
#: Enough memory for all requests, and steps shorter than most prompts of `TRAFFIC`.
ROOMY: dict[str, Any] = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 48,
    "max_tokens": 200,
    "budget_bytes": 8 * MiB,
    "seed": 11,
}
#: Memory for fewer than three prompts of `TRAFFIC` at once.
SMALL: dict[str, Any] = {**ROOMY, "budget_bytes": 10 * PAGE_BYTES}
TRAFFIC = [[5, 9, 13, 7] * 13, [5, 9, 13, 7] * 14, [30, 2] * 24, [5, 9, 13, 7] * 14, [1, 2] * 29]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=30),
    SamplingParams(seed=3, n=2, max_tokens=20),
    SamplingParams(top_k=12, top_p=0.9, max_tokens=24, logprobs=2),  # The engine chooses the seed.
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(seed=9, min_p=0.05, repetition_penalty=1.2, max_tokens=20),
]


class Pair:
    """This process as rank 0, and processes of other ranks that run the same cases."""

    def __init__(self, device_type: str = "cpu", size: int = 2, timeout_s: float = 120.0) -> None:
        self._ranks = Ranks(size, device_type, _run_cases, timeout_s=timeout_s)
        assert self._ranks.group is not None
        self.group = self._ranks.group

    def run(self, case: Case) -> None:
        """Run a case on all ranks; a failure on another rank fails here as well."""
        self.group.share(case)
        try:
            case(self.group)
        except BaseException as error:
            self.group.fail(error)  # The state of the other rank is unknown.
            raise
        self.group.max(0)  # All ranks have finished the case.

    def close(self) -> None:
        if self.group.failure is None:
            self.group.share(None)
            self._ranks.wait(60.0)
        self._ranks.close()


def name_of(case: Any) -> str:
    """The test id of a case."""
    arguments = getattr(case, "args", ())
    return "-".join([getattr(case, "func", case).__name__, *map(str, arguments)])


def _run_cases(group: TensorParallel) -> None:
    torch.set_num_threads(1)
    while True:
        case = group.share(None)
        if case is None:
            return
        case(group)
        group.max(0)


def part_of(name: str, group: TensorParallel) -> Any:
    """This rank's part of a tiny model."""
    model = copy.deepcopy(tiny_model(name))
    localise(model, group)
    return model


def said(outputs: Sequence[Any]) -> list[list[tuple[int, ...]]]:
    """The tokens of all samples of all requests."""
    return [[tuple(each.token_ids) for each in output.outputs] for output in outputs]


@contextlib.contextmanager
def engine_on(
    group: TensorParallel, model: Any, device: Backend | None = None, **options: Any
) -> Iterator[ParallelEngine | None]:
    """Rank 0's engine; None on other ranks, which have followed it to the end."""
    device = device or HostBackend(PAGE_BYTES)
    with (
        mock.patch.object(lockstep, "open_backend", return_value=device),
        ParallelEngine(model, tensor_parallel=group, **options) as engine,
    ):
        if group.rank:
            engine.follow()
            yield None
        else:
            yield engine
            assert not engine.has_unfinished
            engine.cache.check()


def alone(model: Any, prompts: Any, params: Any, **options: Any) -> list[list[tuple[int, ...]]]:
    """Tokens of an engine in one process with enough memory."""
    model = copy.deepcopy(tiny_model(model) if isinstance(model, str) else model)
    with Engine(model, **{**ROOMY, **options}) as engine:
        return said(engine.generate(prompts, params))


def speaks(
    group: TensorParallel,
    model: Any,
    prompts: Any,
    params: Any,
    *its: Any,
    whole: Any = "llama",
    **options: Any,
) -> None:
    """Requests of an engine on these ranks get the tokens of one process with the whole model."""
    expected = None if group.rank else alone(whole, prompts, params)
    with engine_on(group, model, *its, **options) as engine:
        if engine is not None:
            assert expected == said(engine.generate(prompts, params))


# ---- equal tokens --------------------------------------------------------------------------------


def generates(name: str, group: TensorParallel) -> None:
    """A divided model gives the tokens of the whole model in `generate` and `vmkv.generate`."""
    whole, part = tiny_model(name), part_of(name, group)
    assert sum(each.numel() for each in part.parameters()) < 0.75 * sum(
        each.numel() for each in whole.parameters()
    )
    inputs = tiny_models.left_padded_prompt()
    expected = tiny_models.generate(whole, inputs, tiny_models.dynamic_cache(whole.config))
    with contextlib.closing(VMKVCache(part.config)) as cache:
        assert expected.tolist() == tiny_models.generate(part, inputs, cache).tolist()
        heads = {layer.keys.shape[1] for layer in cache.layers}
        # A model with a fused projection of queries, keys and values has all heads on each rank.
        assert heads == {2 if name == "phi3" else 1}
    ours = vmkv.generate(part, PROMPTS, max_new_tokens=12, do_sample=False)
    assert vmkv.generate(whole, PROMPTS, max_new_tokens=12, do_sample=False) == ours


def serves(name: str, runner: str, host_bytes: int, group: TensorParallel) -> None:
    """An engine short of memory gives the tokens of one process, then reuses its prefixes."""
    expected = None if group.rank else alone(name, TRAFFIC, PARAMS, runner=runner)
    model = copy.deepcopy(tiny_model(name))
    options = {**SMALL, "host_budget_bytes": host_bytes, "runner": runner}
    if runner == "graphs":  # The runner has a row for padding.
        options["budget_bytes"] += model.config.num_hidden_layers * PAGE_BYTES
    if host_bytes:
        options["preemption_costs"] = PreemptionCosts(flops_per_s=1.0)
    with engine_on(group, model, **options) as engine:
        if engine is None:
            return
        handles = [engine.add(*each) for each in zip(TRAFFIC, PARAMS, strict=True)]
        finish_all(engine)
        outputs = [handle.output() for handle in handles]
        requests = [request for handle in handles for request in handle.requests]
        assert expected == said(outputs)
        assert any(request.num_preemptions for request in requests)
        swapped = engine.cache.pool.stats(MemoryLocation.HOST)
        assert bool(host_bytes) == bool(swapped.created_bytes)
        params = [SamplingParams(temperature=0, max_tokens=5)] * 2
        again = engine.generate([TRAFFIC[1], TRAFFIC[3]], params)
        assert again[1].num_cached_tokens
        assert again[1].outputs[0].token_ids == outputs[3].outputs[0].token_ids[:5]
        other = engine.generate([TRAFFIC[3]], params[0], tenant="other")
        assert not other[0].num_cached_tokens
        assert said(other) == said(again[1:])


def serves_states(name: str, runner: str, group: TensorParallel) -> None:
    """A model whose layers keep states gives the tokens of one process, in several requests."""
    prompts, params = [*TRAFFIC[2:], [7]], [PARAMS[0], PARAMS[1], GREEDY, GREEDY]
    options = {**ROOMY, "budget_bytes": 32 * MiB, **(PADDED if runner == "graphs" else EAGER)}
    speaks(group, copy.deepcopy(hybrid(name)), prompts, params, whole=hybrid(name), **options)


def serves_latents(runner: str, group: TensorParallel) -> None:
    """Each rank has all latents and a part of the heads."""
    whole = latent_model("deepseek_v3")
    options = {**ROOMY, **(PADDED if runner == "graphs" else EAGER)}
    model = copy.deepcopy(whole)
    speaks(group, model, TRAFFIC, PARAMS, whole=whole, **options)
    assert prove(model).calls.latents


def scores_prompts(name: str, runner: str, group: TensorParallel) -> None:
    """Log-probabilities of prompts are those of one process, beside requests that want none."""
    params = [*PARAMS[:2], replace(PARAMS[2], prompt_logprobs=3), PARAMS[3]]
    params.append(replace(PARAMS[4], n=2, prompt_logprobs=0))
    expected: Any = [None] * len(params)
    if not group.rank:
        with Engine(copy.deepcopy(tiny_model(name)), **ROOMY) as engine:
            expected = engine.generate(TRAFFIC, params)
    options = {**ROOMY, "runner": runner}
    with engine_on(group, copy.deepcopy(tiny_model(name)), **options) as engine:
        if engine is None:
            return
        got = engine.generate(TRAFFIC, params)
        assert said(expected) == said(got)
        for prompt, theirs, ours in zip(TRAFFIC, expected, got, strict=True):
            pairs = zip(theirs.prompt_logprobs or (), ours.prompt_logprobs or (), strict=True)
            told = [(one, other) for one, other in pairs if one and other]
            assert len(told) in (0, len(prompt) - 1)
            for one, other in told:
                assert (one.token_id, list(one.top)) == (other.token_id, list(other.top))
                torch.testing.assert_close(one.logprob, other.logprob, atol=1e-4, rtol=1e-4)
        assert [0, 0, 47, 0, 57] == [len((each.prompt_logprobs or [None])[1:]) for each in got]


def compiles(backend: str, group: TensorParallel) -> None:
    """Layers of a divided model are compiled, and their projections joined, as whole ones are."""
    expected = None if group.rank else alone("llama", PROMPTS, GREEDY)
    options = {**ROOMY, **graphs(compile_layers=True, compile_backend=backend)}
    model = part_of("llama", group)
    taken_in: list[int] = []
    own = graph_passes.take_in_sums
    with (
        mock.patch.object(graph_passes, "take_in_sums", lambda graph: taken_in.append(own(graph))),
        engine_on(group, model, **options) as engine,
    ):
        if engine is not None:
            assert expected == said(engine.generate(PROMPTS, GREEDY))
            # The norm after a layer's sum of attention is fused with it, also for a single token.
            assert {0, 1} == {*taken_in}
            kinds = {type(each).__name__ for each in model.model.layers.modules()}
            assert {"SiblingLinear", "RowwiseLinear"} <= kinds


def loads(folder: str, group: TensorParallel) -> None:
    """A model that transformers has loaded in parts is used, and so is one divided before."""
    model = load(folder, group)
    localise(model, group)
    speaks(group, model, PROMPTS, GREEDY, **ROOMY)


def lacks_a_weight(folder: str, group: TensorParallel) -> None:
    """A model on disk without one of its weights, which transformers would draw."""
    with refused(ConfigError, "lacks 1 weights, such as lm_head.weight"):
        load(folder, group)


def has_uneven_parts(group: TensorParallel) -> None:
    """A vocabulary and a width that are no multiples of the number of ranks; tied embeddings."""
    config = tiny_models.tiny_config("llama")
    config.vocab_size, config.intermediate_size, config.tie_word_embeddings = 101, 47, True
    torch.manual_seed(0)
    model = type(tiny_model("llama"))(config).eval()
    tiny_models.redraw_weights(model, 0)
    ids = torch.arange(101)[None]
    with torch.no_grad():
        expected = model(ids).logits
        localise(model, group)
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    with refused(ConfigError, "a vocabulary of 101"):
        vmkv.generate(model, [[101]])


@contextlib.contextmanager
def refused(kind: type[Exception], text: str) -> Iterator[None]:
    """Like `pytest.raises`, for processes without pytest."""
    try:
        yield
    except kind as error:
        if text in str(error):
            return
        raise
    raise AssertionError(f"no {kind.__name__} was raised")


# ---- failures of one rank ------------------------------------------------------------------------


def runs_out_of_memory(group: TensorParallel) -> None:
    """One device has less memory than agreed: all ranks reduce the budget and give equal tokens."""
    expected = None if group.rank else alone("llama", TRAFFIC, PARAMS)
    capacity_bytes = 6 * PAGE_BYTES
    device = LimitedDevice(HostBackend(PAGE_BYTES))
    device.device_bytes = capacity_bytes if group.rank else 1 * MiB
    with engine_on(group, copy.deepcopy(tiny_model("llama")), device, **SMALL) as engine:
        if engine is not None:
            assert expected == said(engine.generate(TRAFFIC, PARAMS))
            assert engine.cache.pool.stats().created_bytes <= capacity_bytes
    if group.rank:
        assert device.num_refused


class LeastLikely:
    """A logits processor that fails on one rank at some number of tokens; never with rank -1."""

    def __init__(self, failing_rank: int, num_tokens: int):
        self._failing_rank = failing_rank
        self._num_tokens = num_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= self._num_tokens and dist.get_rank() == self._failing_rank:
            raise ZeroDivisionError("on this rank alone")
        return -scores


@contextlib.contextmanager
def slots_without_memory(group: TensorParallel, periods: tuple[int, int]) -> Iterator[list[int]]:
    """Make every `periods[i]`-th count of a slot's tokens on rank i fail for want of memory.

    0 means never. Yields the numbers of the calls that failed on this rank.
    """
    own, calls, period = Sampler._mark, itertools.count(1), periods[group.rank]
    failures: list[int] = []

    def mark(self: Sampler, *arguments: Any) -> None:
        number = next(calls)
        if period and not number % period:
            failures.append(number)
            raise torch.OutOfMemoryError("no memory on this rank alone")
        own(self, *arguments)

    with mock.patch.object(Sampler, "_mark", mark):
        yield failures


class _LateDevice(HostBackend):
    """A device whose fences never pass before a wait."""

    def __init__(self) -> None:
        super().__init__(PAGE_BYTES)
        self.hold_fences()


def is_late(group: TensorParallel) -> None:
    """Ranks whose drivers report fences differently give equal tokens."""
    device = _LateDevice() if group.rank else None
    options = {**SMALL, "host_budget_bytes": 1 * MiB}
    options["preemption_costs"] = PreemptionCosts(flops_per_s=1.0)
    speaks(group, copy.deepcopy(tiny_model("llama")), TRAFFIC, PARAMS, device, **options)


def is_slow(fifo: str, group: TensorParallel) -> None:
    """A rank begins a step long after the other waits for it."""
    expected = None if group.rank else alone("llama", PROMPTS, GREEDY)
    with ParallelEngine(part_of("llama", group), tensor_parallel=group, **ROOMY) as engine:
        submit, waits, releasing = engine._runner.submit, threading.Event(), None
        num_steps = 0

        def held(chunks: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 4:
                if not group.rank:
                    waits.set()
                else:
                    with open(fifo) as other_end:
                        other_end.read()  # Blocks until `release` has opened and closed it.
            return submit(chunks)

        def release() -> None:
            waits.wait()
            with open(fifo, "w"):
                pass

        with mock.patch.object(engine._runner, "submit", held):
            if group.rank:
                engine.follow()
                return
            releasing = threading.Thread(target=release)
            releasing.start()
            assert expected == said(engine.generate(PROMPTS, GREEDY))
            releasing.join()


# ---- calls on rank 0 -----------------------------------------------------------------------------


def obeys(seed: int, num_actions: int, group: TensorParallel) -> None:
    """Random requests, ends, budgets and faults of single ranks; each step compares the books."""
    watermark_bytes = 8 * PAGE_BYTES
    options = {**SMALL, "host_budget_bytes": 64 * KiB, "watermark_bytes": watermark_bytes}
    options["budget_bytes"] = 40 * PAGE_BYTES
    device = LimitedDevice(HostBackend(PAGE_BYTES))
    device.device_bytes = 32 * PAGE_BYTES if group.rank else UNLIMITED_BYTES
    model = copy.deepcopy(tiny_model("gemma2"))
    with slots_without_memory(group, (7, 5)), engine_on(group, model, device, **options) as engine:
        if engine is None:
            assert device.num_refused or num_actions < 1000
            return
        choices = random.Random(seed)
        handles: list[RequestHandle] = []
        for _ in range(num_actions):
            what = choices.random()
            if what < 0.25:
                prompt = [*TRAFFIC[0][: choices.randrange(2, 48)], choices.randrange(3, 99)]
                params = _any_params(choices)
                with contextlib.suppress(ConfigError):  # The budget may be too small by now.
                    handles.append(engine.add(prompt, params, choices.randrange(-1, 2)))
            elif what < 0.3 and handles:
                engine.cancel(choices.choice(handles[-8:]))
            elif what < 0.42 and handles:
                handle = choices.choice(handles[-8:])
                engine.finish(handle, choices.randrange(len(handle.requests)))
            elif what < 0.45:
                with contextlib.suppress(ConfigError):
                    engine.set_budget(choices.randrange(20, 60) * PAGE_BYTES)
            elif what < 0.48:
                with refused(ConfigError, "no room"):
                    engine.add([1] * 200)
            elif what < 0.5:
                while engine.advance():
                    pass
                wanted = iter([False, True])
                engine.fall_idle(lambda wanted=wanted: next(wanted, False))
            else:
                engine.step()
        finish_all(engine)
        engine.fall_idle()
        assert engine.cache.pool.stats().created_bytes <= watermark_bytes
        assert not engine.num_failed_steps
        requests = [request for each in handles for request in each.requests]
        for request in requests:
            if request.finish_reason is FinishReason.ERROR:
                # A step of one token cannot be retried with less.
                error = request.error
                assert isinstance(error, SlotError | torch.OutOfMemoryError), repr(error)
        reasons = {request.finish_reason for request in requests}
        assert {FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.STOP} <= reasons


def _any_params(choices: random.Random) -> SamplingParams:
    """Random samples, penalties, stop tokens, log-probabilities and processors."""
    options: dict[str, Any] = {"n": choices.randrange(1, 5), "max_tokens": choices.randrange(1, 60)}
    if choices.random() < 0.4:
        name = choices.choice(["frequency_penalty", "presence_penalty", "repetition_penalty"])
        options[name] = choices.choice([0.5, 1.5])
    if choices.random() < 0.2:
        options["stop_token_ids"] = tuple(choices.sample(range(90), choices.randrange(1, 6)))
        options["min_tokens"] = choices.randrange(options["max_tokens"])
    if choices.random() < 0.2:
        options["logprobs"] = choices.randrange(4)
    if choices.random() < 0.2:
        options["prompt_logprobs"] = choices.randrange(4)
    if choices.random() < 0.15:
        failing_rank, num_tokens = choices.randrange(-1, 2), choices.randrange(2, 100)
        options["logits_processors"] = (LeastLikely(failing_rank, num_tokens),)
    return SamplingParams(**options)


def ends_samples(what: str, group: TensorParallel) -> None:
    """The first sample of a request is ended before the other; then the request is ended."""
    expected = None if group.rank else alone("llama", PROMPTS[:1], GREEDY)
    with engine_on(group, copy.deepcopy(tiny_model("llama")), **ROOMY) as engine:
        if engine is None:
            return
        handle = engine.add(PROMPTS[2], SamplingParams(n=2, seed=1, max_tokens=150))
        for _ in range(4):
            engine.step()
        engine.finish(handle, 0)
        engine.step()
        other = engine.add(PROMPTS[0], GREEDY)
        engine.step()
        if what == "finish":
            engine.finish(handle, 1)
        else:
            engine.cancel(handle)
        assert handle.is_finished
        finish_all(engine)
        assert expected == said([other.output()])


def lacks_slot_memory(failing_rank: int, group: TensorParallel) -> None:
    """One rank has no memory to set a slot; all ranks retry and give equal tokens."""
    periods = (2, 0) if failing_rank == 0 else (0, 2)
    with slots_without_memory(group, periods) as failures:
        speaks(group, copy.deepcopy(tiny_model("llama")), TRAFFIC, PARAMS, **SMALL)
    assert bool(failures) == (group.rank == failing_rank)


def has_a_processor_that_fails(failing_rank: int, group: TensorParallel) -> None:
    """A logits processor fails on one rank: its request ends on all ranks, others continue."""
    expected = None if group.rank else alone("llama", PROMPTS[:1], GREEDY)
    processor = LeastLikely(failing_rank, len(PROMPTS[2]) + 4)
    params = SamplingParams(temperature=0, max_tokens=30, logits_processors=(processor,))
    with engine_on(group, copy.deepcopy(tiny_model("llama")), **ROOMY) as engine:
        if engine is not None:
            outputs = engine.generate([PROMPTS[0], PROMPTS[2]], [GREEDY, params])
            assert expected == said(outputs[:1])
            assert 4 == len(outputs[1].outputs[0].token_ids)
            assert isinstance(outputs[1].error, SlotError)


def follows_grammars(kind: str, group: TensorParallel) -> None:
    """Each rank has its own matchers; guided requests beside others."""
    others = SamplingParams(temperature=0.8, seed=4, max_tokens=30, ignore_eos=True)
    params = [
        others,
        replace(others, structured_outputs=StructuredOutputs(regex="[a-f ]{12,90}")),
        replace(others, n=2, structured_outputs=StructuredOutputs(json=_THINGS)),
        replace(others, structured_outputs=StructuredOutputs(choice=["ja", "nein"])),
    ]
    prompts = ["A row", "A page", "Nothing", "The next"]
    its = {"tokenizer": tiny_tokenizer(), **ROOMY}
    expected = None if group.rank else alone(tiny_llama(), prompts, params, **its)
    with engine_on(group, tiny_llama(), **its, runner=kind) as engine:
        if engine is not None:
            with refused(ConfigError, "unclosed group"):
                engine.add("A", SamplingParams(structured_outputs=StructuredOutputs(regex="(a")))
            assert expected == said(engine.generate(prompts, params))


def guesses(kind: str, group: TensorParallel) -> None:
    """Ranks verify the same guesses, also where measured times decide."""
    params = [
        SamplingParams(temperature=0, max_tokens=60, logit_bias={7: 60.0}),
        SamplingParams(temperature=0.7, seed=3, n=2, max_tokens=40, logit_bias={7: 15.0}),
        SamplingParams(temperature=0.9, seed=4, max_tokens=40, presence_penalty=0.5, logprobs=1),
        SamplingParams(temperature=0, max_tokens=40),
    ]
    prompts = [[17, 33, 5, 61] * 4, [5, 9] * 6, [4, 5, 6], [17, 33, 5, 61] * 2]
    config = {"method": "suffix", "num_speculative_tokens": 4}
    its = {"whole": "llama", "speculative_config": config, **ROOMY, "runner": kind}
    speaks(group, copy.deepcopy(tiny_model("llama")), prompts, params, **its)
    with (
        mock.patch.object(StepTimes, "decoding_s", return_value=1.0),
        mock.patch.object(StepTimes, "drafting", return_value=[(0, 1e-3)]),
        mock.patch.object(
            MemoryView, "lengthen", autospec=True, side_effect=MemoryView.lengthen
        ) as accepted,
    ):
        speaks(group, copy.deepcopy(tiny_model("llama")), prompts, params, **its)
        assert any(call.args[2] for call in accepted.call_args_list)  # Guesses that were right.


def is_not_asked(group: TensorParallel) -> None:
    """Only rank 0 accepts calls, and it cannot follow."""
    with ParallelEngine(part_of("llama", group), tensor_parallel=group, **ROOMY) as engine:
        if group.rank:
            for ask in (lambda: engine.add([1]), engine.step, lambda: engine.set_budget(1 << 20)):
                with refused(ConfigError, "rank 0"):
                    ask()
            engine.follow()
        else:
            with refused(ConfigError, "this is rank 0"):
                engine.follow()
            with refused(ConfigError, "cannot be sent"):
                engine.add([1, 2], SamplingParams(logits_processors=(lambda ids, scores: scores,)))
            with refused(ConfigError, "enable_sleep_mode"):
                engine.sleep(weights=True)
            for call in (engine.weights_changed, engine.paused().__enter__):
                with refused(ConfigError, "one device"):
                    call()
            assert 1 == len(said(engine.generate([[1, 2]], GREEDY)))


# ---- sleep ---------------------------------------------------------------------------------------


def sleeps(runner: str, group: TensorParallel) -> None:
    """All ranks sleep or none, and requests wake all; tokens are as before."""
    made: list[LimitedDevice] = []

    def opened(_: str) -> LimitedDevice:
        made.append(LimitedDevice(HostBackend(PAGE_BYTES)))
        return made[-1]

    prompts = [[*PROMPTS[1], each] for each in range(3, 8)]
    how = COMPILED if runner == "graphs" else EAGER
    options = {**ROOMY, **how, "enable_sleep_mode": True, "host_budget_bytes": 1 * MiB}
    with (
        mock.patch.object(lockstep, "open_backend", opened),
        ParallelEngine(part_of("llama", group), tensor_parallel=group, **options) as engine,
    ):
        places, its_pool = [each.data_ptr() for each in engine._turns.model.parameters()], made[1]
        if group.rank:
            real, calls = engine.sleep, itertools.count(1)

            def sleep(**what: bool) -> None:
                """On this rank the host has no memory at first, then the device has none."""
                its_pool.host_bytes = 0 if next(calls) == 1 else UNLIMITED_BYTES
                real(**what)
                its_pool.device_bytes = 0

            def wake() -> None:
                try:
                    Engine.wake(engine)
                finally:
                    its_pool.device_bytes = UNLIMITED_BYTES

            engine.sleep, engine.wake = sleep, wake  # type: ignore[method-assign]
            engine.follow()
            assert next(calls) == 5
        else:
            told = said(engine.generate(prompts, GREEDY))
            with refused(OutOfPagesError, "more memory"):
                engine.sleep(weights=True)
            assert not engine.is_sleeping
            for turn in range(3):
                assert told == said(engine.generate(prompts, GREEDY))
                engine.sleep(weights=True, prefixes=turn > 0)
                assert engine.is_sleeping
                assert 0 == its_pool.usage().physical_bytes
                engine.cache.check()
                with refused(OutOfPagesError, "more memory"):
                    engine.wake()
                assert engine.is_sleeping
                outputs = engine.generate(prompts, GREEDY)
                assert told == said(outputs)
                assert (outputs[0].num_cached_tokens > 0) == (turn > 0)
                engine.cache.check()
            assert told == alone("llama", prompts, GREEDY)
            assert places == [each.data_ptr() for each in engine._turns.model.parameters()]
    assert all(each.usage() == BackendUsage() for each in made)


# ---- a broker ------------------------------------------------------------------------------------


@contextlib.contextmanager
def broker_of(group: TensorParallel, num_pages: int) -> Iterator[tuple[Broker | None, str]]:
    """A broker in rank 0's process, and its socket on all ranks."""
    with contextlib.ExitStack() as stack:
        broker = None
        if not group.rank:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            its = Broker(f"{folder}/b", num_pages * PAGE_BYTES, page_bytes=PAGE_BYTES)
            broker = stack.enter_context(its)
        yield broker, group.share(broker and broker.socket_path)


class _Taker:
    """A member in a thread, which takes pages as it is told, and gives them back."""

    def __init__(self, socket_path: str):
        self.pool = pool_of(socket_path, "taker", timeout_s=60.0)
        assert self.pool.member is not None
        self._member = self.pool.member

    def take(self, num_pages: int) -> threading.Thread:
        """Begin to take so many pages, one by one."""

        def run() -> None:
            for _ in range(num_pages):
                if self.pool.available_bytes < PAGE_BYTES:
                    assert self._member.grow(PAGE_BYTES)
                self.pool.acquire([0])

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    @property
    def num_pages(self) -> int:
        """Pages that it has."""
        return len(self.pool.extents())

    def close(self) -> None:
        """Give all back, and leave."""
        self.pool.disown([each for each in self.pool.extents() if each.num_owners])
        self.pool.close()


def shares_memory(host_bytes: int, group: TensorParallel) -> None:
    """Another member takes memory of running requests, on all ranks; they end as alone."""
    num_pages, params = 20, SamplingParams(temperature=0, max_tokens=140)
    expected = None if group.rank else alone("llama", TRAFFIC, params)
    options = {**ROOMY, "budget_bytes": None, "host_budget_bytes": host_bytes}
    at_once = mock.patch.object(shares, "TURN_S", 0.0)  # Requests here end before their turn does.
    with at_once, broker_of(group, num_pages) as (broker, path):
        options["pool_socket"] = path
        with engine_on(group, part_of("llama", group), **options) as engine:
            if engine is None:
                return
            assert broker is not None
            pool, taker = engine.cache.pool, _Taker(path)
            handles = [engine.add(each, params) for each in TRAFFIC]
            while pool.stats().resident_bytes < 14 * PAGE_BYTES:
                assert engine.has_unfinished
                engine.step()
            taking = taker.take(9)
            while taking.is_alive():
                engine.step()
            taking.join()
            assert pool.budget_bytes <= (num_pages - taker.num_pages) * PAGE_BYTES
            assert engine.has_unfinished
            finish_all(engine)
            assert expected == said([handle.output() for handle in handles])
            assert any(each.num_preemptions for handle in handles for each in handle.requests)
            # Idle: what is left goes back, on all ranks, without a request.
            taking = taker.take(num_pages - taker.num_pages - 4)
            while taking.is_alive():
                engine.step()
            taking.join()
            assert pool.stats().created_bytes <= 4 * PAGE_BYTES
            taker.close()
            engine.generate(TRAFFIC[0], GREEDY)
            # Once the broker has ended, all keep what they have.
            broker.close()
            while pool.member is not None and pool.member.may_grow:
                engine.step()
            prompts = [each[:8] for each in TRAFFIC[:2]]
            again = said(engine.generate(prompts, GREEDY))
            assert again == alone("llama", prompts, GREEDY)


def lends_its_weights_memory(group: TensorParallel) -> None:
    """While all ranks sleep, another member has the memory; they wake once it gives it back.

    The broker takes a sleeping member for idle at once, as it does after half a second.
    """
    made: list[HostBackend] = []

    def opened(_: str) -> HostBackend:
        made.append(HostBackend(PAGE_BYTES))
        return made[-1]

    options = {**ROOMY, "budget_bytes": None, "enable_sleep_mode": True}
    with (
        broker_of(group, 40) as (broker, path),
        mock.patch.object(lockstep, "open_backend", opened),
        mock.patch.object(shares, "IDLE_S", 0.0),
    ):
        model, its = part_of("llama", group), {**options, "pool_socket": path}
        with ParallelEngine(model, tensor_parallel=group, **its) as engine:
            if group.rank:
                engine.follow()
            else:
                assert broker is not None
                prompts = [each[:20] for each in TRAFFIC[:3]]
                told = said(engine.generate(prompts, GREEDY))
                assert told == alone("llama", prompts, GREEDY)
                total = broker.budget_bytes
                assert total is not None
                assert total > 40 * PAGE_BYTES
                for _ in range(2):
                    engine.sleep(weights=True)
                    takers = [_Taker(path) for _ in range(2)]
                    taking = [each.take(total // PAGE_BYTES // 2 - 2) for each in takers]
                    while any(each.is_alive() for each in taking):
                        engine.step()
                    assert sum(each.num_pages for each in takers) > 40
                    assert 0 == made[1].usage().physical_bytes
                    for each in takers:
                        each.close()
                    assert told == said(engine.generate(prompts, GREEDY))
                    engine.cache.check()
    assert all(each.usage() == BackendUsage() for each in made)


# ---- sums ----------------------------------------------------------------------------------------


def _part(source: random.Random, dtype: torch.dtype, num_bytes: int, rank: int) -> torch.Tensor:
    """A rank's part: numbers whose sum is exact in every dtype and order."""
    chances = torch.Generator().manual_seed(source.getrandbits(32) * 64 + rank)
    count = num_bytes // dtype.itemsize
    return torch.randint(-16, 17, (count,), generator=chances).to(dtype).cuda()


def adds(group: TensorParallel) -> None:
    """Parts of all sizes in turn, with one rank late at random."""
    source = random.Random(5)
    largest = one_shot.max_bytes(group.size) or 64 * MiB
    for _ in range(300):
        dtype = source.choice((torch.bfloat16, torch.float16, torch.float32))
        most = 2 ** source.randint(0, largest.bit_length() - 5)
        num_bytes = 16 * source.choice((1, 3, 511, 512, 513, source.randint(1, most)))
        state = source.getstate()
        parts = []
        for rank in range(group.size):
            source.setstate(state)
            parts.append(_part(source, dtype, num_bytes, rank))
        late = source.randrange(4 * group.size)
        if late == group.rank:
            torch.cuda._sleep(200_000)
        got = all_reduce(parts[group.rank].clone(), group.name)
        assert torch.equal(got, torch.stack(parts).sum(0).to(dtype)), (dtype, num_bytes)


def adds_in_graphs(group: TensorParallel) -> None:
    """A graph of sums is replayed many times, with other sums in between."""
    parts = [_part(random.Random(each), torch.bfloat16, 64 * KiB, each) for each in range(16)]
    mine = torch.empty_like(parts[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(10):
            all_reduce(mine, group.name)
    for turn in range(30):
        mine.copy_(parts[turn % 8 + group.rank] * 2.0**-12)
        expected = sum(parts[turn % 8 + rank].float() for rank in range(group.size)) * 2.0**-12
        graph.replay()
        assert torch.equal(mine.float(), expected * float(group.size) ** 9), turn
        single = all_reduce(parts[group.rank].clone(), group.name)
        assert torch.equal(single, sum(parts[: group.size]))


def _norm_as_modules(
    whole: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual and its norm, by separate operations."""
    hidden = residual + whole
    wide = hidden.to(torch.float32)
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return hidden, weight * scaled.to(hidden.dtype)


def adds_with_norms(group: TensorParallel) -> None:
    """Rows of all widths and counts, with sums in one kernel and in NCCL's or gloo's."""
    source = random.Random(6)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    widths = (8, 264, 2048, 4096, 8192, 16384) if device == "cuda" else (8, 24)
    counts = (1, 2, 7, 64, 129, 600, 2048) if device == "cuda" else (1, 3)
    for turn in range(120 if device == "cuda" else 12):
        dtype = source.choice((torch.bfloat16, torch.float16, torch.float32))
        shape = 1, source.choice(counts), source.choice(widths)
        chances = torch.Generator().manual_seed(turn)
        # Parts whose sum is exact in every dtype and order; residual and weight are random.
        parts = [torch.randint(-16, 17, shape, generator=chances) for _ in range(group.size)]
        residual, weight = (
            torch.randn(each, generator=chances).to(dtype).to(device) for each in (shape, shape[2:])
        )
        whole = sum(parts).to(dtype).to(device)
        epsilon = source.choice((1e-5, 1e-6, 1.0))
        hidden, expected = _norm_as_modules(whole, residual, weight, epsilon)
        if device == "cuda" and source.randrange(4 * group.size) == group.rank:
            torch.cuda._sleep(200_000)
        part, before = parts[group.rank].to(dtype).to(device), residual.clone()
        got = torch.ops.vmkv.norm_of_sum_(part, residual, weight, epsilon, group.name)
        what = dtype, shape
        assert torch.equal(part, hidden), what
        assert torch.equal(residual, before), what
        # Squares are summed in another order, so rounding may differ twice.
        most = 3 * torch.finfo(dtype).eps if device == "cuda" else 0
        torch.testing.assert_close(got, expected, rtol=most, atol=0, msg=str(what))
        if turn % 3 == 0:  # Sums without norms use the same buffers.
            single = all_reduce(parts[group.rank].to(dtype).to(device), group.name)
            assert torch.equal(single, whole), what


def adds_with_norms_in_graphs(group: TensorParallel) -> None:
    """A graph of a few layers' sums is replayed many times, with other numbers."""
    shape, chances = (32, 4096), torch.Generator().manual_seed(8)
    weight = torch.randn(shape[1], generator=chances).bfloat16().cuda()
    part, residual = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    got = torch.empty_like(part)
    args = weight, 1e-5, group.name
    torch.ops.vmkv.norm_of_sum_(part.fill_(1), residual.fill_(1), *args)  # Loads the kernel.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(6):  # The norm of a sum is the part of the next one.
            got.copy_(torch.ops.vmkv.norm_of_sum_(part, residual, *args))
            residual.copy_(part)
            part.copy_(got)
    for turn in range(30):
        parts = [torch.randint(-16, 17, shape, generator=chances).bfloat16() for _ in range(8)]
        first = torch.randn(shape, generator=chances).bfloat16()
        part.copy_(parts[group.rank])
        residual.copy_(first)
        graph.replay()
        old, whole = first.cuda(), sum(parts[: group.size]).bfloat16().cuda()
        for _ in range(6):
            old, expected = _norm_as_modules(whole, old, weight, 1e-5)
            whole = expected * group.size
        torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05, msg=str(turn))


def is_alone(group: TensorParallel) -> None:
    """Only rank 0 adds its part; the other ranks wait until it has ended."""
    if group.rank:
        group.exchange([], False, 0)  # Waits until rank 0 has ended.
    all_reduce(torch.ones(64, device="cuda"), group.name)
    torch.cuda.synchronize()
    group.check()


# ---- models and failures of processes ------------------------------------------------------------


def tiny_part(name: str, group: TensorParallel) -> Any:
    """A model for `open_parallel_engine`."""
    torch.set_num_threads(1)
    return copy.deepcopy(tiny_model(name))


def part_on_a_gpu(group: TensorParallel) -> Any:
    """A model for `open_parallel_engine` with a head size that kernels support."""
    return kernel_model()


def exact_part_on_a_gpu(group: TensorParallel | None) -> Any:
    """A model in float32, in which the order of sums changes no token; a page has 85 tokens."""
    how = {"hidden_size": 1024, "num_hidden_layers": 6, "num_key_value_heads": 16}
    return kernel_model(num_attention_heads=16, **how).float()


#: Of the weights that a rank of `wide_part_on_a_gpu` holds: 3 layers of 12 x 2,048 x 2,048.
WIDE_BYTES = 3 * 12 * 2048 * 2048 // 2 * 2


def wide_part_on_a_gpu(group: TensorParallel) -> Any:
    """A model whose weights show in a device's free memory."""
    sizes = {"hidden_size": 2048, "intermediate_size": 5461 // 64 * 64}
    return kernel_model(**sizes, num_attention_heads=16, num_key_value_heads=16)


def part_that_fails(group: TensorParallel) -> Any:
    """The other rank cannot make its model."""
    if group.rank:
        raise RuntimeError("the disk has gone")
    return copy.deepcopy(tiny_model("llama"))


def part_without_tables(group: TensorParallel) -> Any:
    """The other rank has no memory for the tables of penalties."""
    if group.rank:
        zeros = torch.zeros

        def without_tables(*shape: Any, **options: Any) -> torch.Tensor:
            if options.get("dtype") is torch.int32:
                raise torch.OutOfMemoryError("no memory on this rank alone")
            return zeros(*shape, **options)

        mock.patch.object(
            torch, "zeros", without_tables
        ).start()  # Stays patched until the process ends.
    return copy.deepcopy(tiny_model("llama"))


def end_process(pid: int) -> None:
    """Kill a process, as the kernel does when memory is short."""
    os.kill(pid, 9)
