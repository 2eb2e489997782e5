"""After any failure, each request ends with its tokens or an error, and nothing leaks.

The `make_engine` fixture checks at the end that no sequence outlives its request, that the cache's
invariants hold, and that nothing stays mapped, created or reserved.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.requests import check_said, finish_all, prompts, reference
from helpers.tiny_models import VOCABULARY, tiny_model

from vmkv import HostBackend
from vmkv.errors import ConfigError, DriverError
from vmkv.serve.engine import Engine
from vmkv.serve.params import SamplingParams
from vmkv.serve.request import FinishReason
from vmkv.serve.runner import PendingTokens
from vmkv.serve.scheduler import PreemptionCosts
from vmkv.testing.faults import FaultInjectingBackend
from vmkv.units import KiB, MiB

MakeEngine = Callable[..., Engine]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
#: Errors that torch raises when it is out of memory.
ON_CUDA = torch.OutOfMemoryError("CUDA out of memory")
ON_THE_HOST = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7")


def check_serves(engine: Engine) -> None:
    """Check that later requests are served as without the failure."""
    wanted = prompts(3, seed=99)
    check_said(wanted, engine.generate(wanted, GREEDY))


@contextmanager
def failing(model: Any, fails: Callable[[int], BaseException | None]) -> Iterator[None]:
    """Make the model's middle layer raise what `fails(num_tokens)` returns, if any."""

    def hook(module: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        hidden = arguments[0] if arguments else options["hidden_states"]
        error = fails(hidden.shape[1])
        if error is not None:
            raise error

    layer = model.model.layers[1]
    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def at_call(number: int, error: BaseException) -> Callable[[int], BaseException | None]:
    """Fail the `number`-th call."""
    calls = iter(range(1, 10**6))
    return lambda num_tokens: error if next(calls) == number else None


@pytest.mark.parametrize("number", [1, 2, 4, 7])
def test_a_failing_model_ends_requests_in_its_step(make_engine: MakeEngine, number: int) -> None:
    """They keep their earlier tokens; other and later requests are served."""
    model = copy.deepcopy(tiny_model("llama"))
    engine = make_engine(model, max_num_seqs=3)
    wanted = prompts(7)
    handles = [engine.add(prompt, GREEDY) for prompt in wanted]
    with failing(model, at_call(number, ValueError("the model broke"))):
        finish_all(engine)
    reasons = set()
    for prompt, handle in zip(wanted, handles, strict=True):
        output = handle.output()
        reasons.add(output.outputs[0].finish_reason)
        said = list(output.outputs[0].token_ids)
        assert reference(prompt)[: len(said)] == said
        if output.outputs[0].finish_reason is FinishReason.ERROR:
            assert "the model broke" in str(output.error)
        else:
            assert len(said) == 8
    assert {FinishReason.ERROR, FinishReason.LENGTH} == reasons
    check_serves(engine)


@pytest.mark.parametrize(
    ("name", "capacity", "error"),
    [
        ("llama", 1, ON_CUDA),
        ("llama", 3, ON_THE_HOST),
        ("mistral", 3, ON_CUDA),
        ("mistral", 9, ON_THE_HOST),
        ("gemma3", 1, ON_THE_HOST),
        ("gemma3", 9, ON_CUDA),
    ],
)
def test_steps_shrink_when_activations_do_not_fit(
    make_engine: MakeEngine, name: str, capacity: int, error: Exception
) -> None:
    """The step runs again in parts, and tokens do not change."""
    model = copy.deepcopy(tiny_model(name))
    engine = make_engine(model)
    wanted = prompts(4)
    handles = [engine.add(prompt, GREEDY) for prompt in wanted]
    handles.append(engine.add(wanted[0], SamplingParams(seed=1, max_tokens=8)))
    with failing(model, lambda num_tokens: error if num_tokens > capacity else None):
        finish_all(engine)
    check_said(wanted, handles[:-1], name=name)
    [alone] = make_engine(name).generate([wanted[0]], SamplingParams(seed=1, max_tokens=8))
    assert alone.outputs[0].token_ids == handles[-1].output().outputs[0].token_ids


def test_requests_recompute_if_truncation_fails(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver refuses to join the streams that may still copy; requests are recomputed."""
    model = copy.deepcopy(tiny_model("llama"))
    engine = make_engine(model)
    wanted = prompts(4)
    handles = [engine.add(prompt, GREEDY) for prompt in wanted]
    refused: list[int] = []

    def refuse(stream: int) -> None:
        refused.append(stream)
        raise DriverError("join_streams", 1, "REFUSED", "for once")

    too_much = torch.OutOfMemoryError("CUDA out of memory")
    with failing(model, at_call(3, too_much)), monkeypatch.context() as patch:
        patch.setattr(engine.cache.pool.backend, "join_streams", refuse)
        for _ in range(4):
            engine.step()
    assert refused
    finish_all(engine)
    check_said(wanted, handles)


def test_requests_end_when_no_token_fits(make_engine: MakeEngine) -> None:
    """With the error that torch raised."""
    model = copy.deepcopy(tiny_model("llama"))
    engine = make_engine(model)
    handles = [engine.add(prompt, GREEDY) for prompt in prompts(5)]
    with failing(model, lambda _: torch.OutOfMemoryError("no memory at all")):
        finish_all(engine)
    assert all("no memory at all" in str(handle.output().error) for handle in handles)
    check_serves(engine)


WHOLE: list[Any] = []


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("what", ["result", "begin", "swap_in", "swap_out", "grow"])
def test_an_interrupted_step_does_not_change_tokens(
    make_engine: MakeEngine, what: str, number: int
) -> None:
    """Interrupts while waiting for the device, and while making memory ready for the next step."""
    engine = make_engine(
        budget_bytes=8 * 4 * KiB,
        host_budget_bytes=MiB,
        preemption_costs=PreemptionCosts(flops_per_s=1.0),
    )
    wanted = prompts(6, seed=5)
    params = SamplingParams(temperature=0.5, seed=1, max_tokens=60)
    if not WHOLE:  # Tokens of an undisturbed engine.
        WHOLE.extend(each.outputs[0].token_ids for each in make_engine().generate(wanted, params))
    handles = [engine.add(prompt, params) for prompt in wanted]
    calls = iter(range(1, 10**6))

    def interrupted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if next(calls) == number:
                raise KeyboardInterrupt
            return real(*arguments)

        return call

    owner: Any = PendingTokens if what == "result" else engine._view
    patch = mock.patch.object(owner, what, interrupted(getattr(owner, what)))
    with patch, pytest.raises(KeyboardInterrupt):
        finish_all(engine)
    engine.cache.check()
    finish_all(engine)
    for whole, handle in zip(WHOLE, handles, strict=True):
        assert whole == handle.output().outputs[0].token_ids


def test_a_failing_logits_processor_ends_its_request_only(make_engine: MakeEngine) -> None:
    def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 20:
            raise ZeroDivisionError("in the processor")
        return scores

    engine = make_engine()
    wanted = prompts(6, longest=18)
    params = SamplingParams(temperature=0, max_tokens=20, logits_processors=[broken])
    handles = [engine.add(wanted[0], params)]
    handles += [engine.add(prompt, GREEDY) for prompt in wanted[1:]]
    finish_all(engine)
    output = handles[0].output()
    assert FinishReason.ERROR is output.outputs[0].finish_reason
    assert "in the processor" in str(output.error)
    assert 21 == len(wanted[0]) + len(output.outputs[0].token_ids)
    check_said(wanted[1:], handles[1:])


@pytest.mark.parametrize("made", [None, torch.zeros(1, 3)])
def test_a_processor_without_scores_ends_its_request_only(
    engine: Engine, made: torch.Tensor | None
) -> None:
    """For example one that changes scores in place and does not return them."""
    wanted = prompts(2)
    params = SamplingParams(temperature=0, logits_processors=[lambda input_ids, scores: made])
    bad, good = engine.add(wanted[0], params), engine.add(wanted[1], GREEDY)
    finish_all(engine)
    assert "a logits processor failed" in str(bad.output().error)
    assert reference(wanted[1]) == list(good.output().outputs[0].token_ids)
    assert 0 == engine.num_failed_steps


def test_a_slot_error_ends_its_request_only(engine: Engine) -> None:
    """Requests beside it and after it are served."""
    real = engine._runner.set_slot

    def set_slot(slot: int, params: SamplingParams, *tokens: Any) -> None:
        if params.seed == 666:
            raise ConfigError("a parameter that the device cannot hold")
        real(slot, params, *tokens)

    engine._runner.set_slot = set_slot  # type: ignore[method-assign]
    wanted = prompts(4)
    handles = [engine.add(prompt, GREEDY) for prompt in wanted[:2]]
    engine.step()
    bad = engine.add(wanted[2], SamplingParams(seed=666))
    handles.append(engine.add(wanted[3], GREEDY))
    finish_all(engine)
    assert bad.output().outputs[0].finish_reason is FinishReason.ERROR
    assert "parameters failed" in str(bad.output().error)
    check_said([*wanted[:2], wanted[3]], handles)
    assert 0 == engine.num_failed_steps
    check_serves(engine)


class BrokenTokenizer:
    """A tokenizer that cannot decode more than five tokens at once."""

    def decode(self, token_ids: list[int], **options: bool) -> str:
        if len(token_ids) > 5:
            raise LookupError("no such token")
        return "x" * len(token_ids)


def test_a_failing_tokenizer_ends_its_request(make_engine: MakeEngine) -> None:
    engine = make_engine(tokenizer=BrokenTokenizer())
    handle = engine.add([5, 6], GREEDY)
    finish_all(engine)
    assert "no such token" in str(handle.output().error)
    assert 4 == len(handle.output().outputs[0].token_ids)


def test_a_budget_lowered_too_far_ends_the_request(engine: Engine) -> None:
    """It keeps its tokens; its error names the budget, and smaller requests are served."""
    prompt = prompts(1)[0]
    handle = engine.add(prompt, SamplingParams(temperature=0, max_tokens=100))
    while len(handle.requests[0].output_token_ids) < 5:
        engine.step()
    engine.cache.pool.set_budget(6 * 4 * KiB)
    finish_all(engine)
    output = handle.output()
    assert "the budget was lowered" in str(output.error)
    said = list(output.outputs[0].token_ids)
    assert said == reference(prompt, len(said))
    check_serves(engine)


def test_cancelling_is_idempotent_and_keeps_tokens(engine: Engine) -> None:
    """Before the first step, while the request runs, and after its end."""
    prompt = prompts(1)[0]
    handles = [engine.add(prompt, GREEDY) for _ in range(3)]
    handles[0].cancel()
    while len(handles[1].requests[0].output_token_ids) < 3:
        engine.step()
    handles[1].cancel()
    handles[1].cancel()
    finish_all(engine)
    handles[2].cancel()
    outputs = [handle.output().outputs[0] for handle in handles]
    assert [0, 3, 8] == [len(each.token_ids) for each in outputs]
    cancelled = FinishReason.CANCELLED
    assert [cancelled, cancelled, FinishReason.LENGTH] == [each.finish_reason for each in outputs]
    check_serves(engine)


def test_a_failed_close_is_repeated_before_the_next_request(make_engine: MakeEngine) -> None:
    """Also if no request runs, so that no sequence grows."""
    backend = FaultInjectingBackend(HostBackend(4 * KiB))
    engine = make_engine(
        "gemma3", backend=backend, max_num_seqs=1, max_tokens=400, prefix_caching=False
    )
    prompt = prompts(1, longest=100)[0]
    num_tokens = engine.cache.max_tokens - len(prompt)
    engine.cache.pool.set_budget(engine._view.peak_pages(engine.cache.max_tokens) * 4 * KiB)
    first = engine.add(prompt, SamplingParams(temperature=0, max_tokens=num_tokens))
    while len(first.requests[0].output_token_ids) < num_tokens - 1:
        engine.step()
    backend.arm(1)  # This step submits nothing: it only reads the last token.
    engine.step()
    assert "record_fence" == backend.failed_call
    assert 1 == engine.cache.stats().num_sequences
    other, num_tokens = prompt * 4, 40
    handle = engine.add(other, SamplingParams(temperature=0, max_tokens=num_tokens))
    finish_all(engine)
    assert reference(other, num_tokens, "gemma3") == list(handle.output().outputs[0].token_ids)


@pytest.mark.parametrize("num_failures", [1, 3])
def test_a_failed_close_loses_no_tokens(make_engine: MakeEngine, num_failures: int) -> None:
    """Tokens of the same step are read although the step raises."""
    backend = FaultInjectingBackend(HostBackend(4 * KiB))
    engine = make_engine("gemma3", backend=backend, max_tokens=400, prefix_caching=False)
    prompt, num_tokens = prompts(1)[0], 300
    counts = [num_tokens, num_tokens + 20, num_tokens + 20]
    handles = [
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=count)) for count in counts
    ]
    close_ended = engine._view.close_ended
    failures = iter(range(num_failures))

    def fail() -> None:
        """Arm the fault only while `close_ended` runs."""
        if engine._view.ending:
            backend.arm(1 if next(failures, None) is not None else 0)
        close_ended()

    engine._view.close_ended = fail  # type: ignore[method-assign]
    num_raised = 0
    for _ in range(400):
        try:
            engine.step()
        except DriverError:
            num_raised += 1
            assert num_raised == engine.num_failed_steps
    assert num_failures == num_raised + 1
    wanted = reference(prompt, num_tokens + 20, "gemma3")
    for count, handle in zip(counts, handles, strict=True):
        assert wanted[:count] == list(handle.output().outputs[0].token_ids)
        assert FinishReason.LENGTH is handle.output().outputs[0].finish_reason
    assert 0 == engine.num_failed_steps


def test_requests_that_do_not_fit_together_begin_in_turn(make_engine: MakeEngine) -> None:
    """A short request may adopt the row of a long one, whose extents cannot be divided."""
    options = {"max_num_seqs": 2, "max_tokens": 400, "max_num_batched_tokens": 512}
    engine = make_engine(prefix_caching=False, **options)
    tokens = [3 + at % (VOCABULARY - 3) for at in range(400)]

    def prompt_of(num_pages: int) -> list[int]:
        """A prompt that takes `num_pages` with two more tokens."""
        return next(
            tokens[:n] for n in range(398, 0, -1) if engine._view.peak_pages(n + 2) == num_pages
        )

    long, short = prompt_of(24), prompt_of(2)
    engine.cache.pool.set_budget((24 + 2 + 2) * 4 * KiB)  # Two are headroom of the admission.
    run_together = functools.partial(engine.generate, params=replace(GREEDY, max_tokens=2))
    run_together([prompt_of(12), prompt_of(12)])  # Each leaves a row of one extent in each group.
    check_said([long, short], run_together([long, short]), 2)
