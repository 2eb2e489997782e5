"""An engine over models whose layers keep states: a sequence has rows and states, in one budget."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.hybrids import HYBRIDS, hybrid
from helpers.ragged import alone, random_prompts

from vmkv import ConfigError, OutOfPagesError
from vmkv.core.backend import MemoryLocation
from vmkv.serve import Engine, FinishReason, SamplingParams
from vmkv.serve.scheduler import PreemptionCosts
from vmkv.units import KiB, MiB

if not HYBRIDS:
    pytest.skip("this release has no layers with states in its cache", allow_module_level=True)

MakeEngine = Callable[..., Engine]
NUM_TOKENS = 8
LONG = 70
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
PROMPTS = random_prompts(40, 1, 13, 25, 2, 9)
NAME = HYBRIDS[0]


def _model(name: str) -> Any:
    return copy.deepcopy(hybrid(name))


def _expected(name: str, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    said = alone(hybrid(name), prompt, max_new_tokens=num_tokens, do_sample=False)
    return said[len(prompt) :]


def _said(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in engine.generate(prompts, GREEDY)]


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_requests_get_the_tokens_that_they_get_alone(make_engine: MakeEngine, name: str) -> None:
    """Beside each other, in chunks of 16 tokens, and again over rows with others' states."""
    engine = make_engine(_model(name))
    for _ in range(2):
        assert [_expected(name, each) for each in PROMPTS] == _said(engine, PROMPTS)


def test_what_is_not_done_is_said_once(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """No prefix is found, and no step captured, whatever the options say."""
    with caplog.at_level(logging.INFO, "vmkv"):
        engine = make_engine(_model(NAME), prefix_caching=True, runner="graphs")
        assert [_expected(NAME, PROMPTS[0])] * 2 == _said(engine, [PROMPTS[0]] * 2)
        assert [_expected(NAME, PROMPTS[0])] == _said(engine, [PROMPTS[0]])
    assert 1 == caplog.text.count("prefixes are not cached, and steps are not captured")
    stats = engine.cache.stats()
    assert 0 == stats.num_prefix_hits == stats.num_prefix_misses


def test_a_paused_engine_leaves_the_layers_as_they_were(make_engine: MakeEngine) -> None:
    """And serves as before afterwards."""
    model = _model(NAME)
    engine = make_engine(model)
    with engine.paused():
        assert "forward" not in {name for each in model.modules() for name in vars(each)}
    assert [_expected(NAME, PROMPTS[0])] == _said(engine, PROMPTS[:1])
    engine.sleep()
    assert [_expected(NAME, PROMPTS[2])] == _said(engine, PROMPTS[2:3])


def test_samples_of_one_request(make_engine: MakeEngine) -> None:
    """Each as the sample of that seed alone."""
    engine = make_engine(_model(NAME))
    options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0.9}
    (together,) = engine.generate([PROMPTS[2]], SamplingParams(n=3, seed=5, **options))
    alone = [
        engine.generate([PROMPTS[2]], SamplingParams(seed=5 + at, **options))[0].outputs[0]
        for at in range(3)
    ]
    assert [each.token_ids for each in alone] == [each.token_ids for each in together.outputs]


def _play(engine: Engine) -> list[Any]:
    params, prompts = SamplingParams(temperature=0, max_tokens=LONG), PROMPTS[1:3] + PROMPTS[4:]
    handles = [engine.add(prompt, params) for prompt in prompts]
    while engine.has_unfinished:
        engine.step()
        engine.cache.check()
    for prompt, handle in zip(prompts, handles, strict=True):
        assert _expected(NAME, prompt, LONG) == list(handle.output().outputs[0].token_ids)
    return handles


def _tight_budget(make_engine: MakeEngine) -> int:
    """Bytes for four requests that begin, of which one can grow to its end."""
    view = make_engine(_model(NAME))._view
    return (3 * view.peak_pages(1) + view.peak_pages(13 + LONG)) * 4 * KiB


@pytest.mark.slow
def test_preempted_requests_are_recomputed(make_engine: MakeEngine) -> None:
    engine = make_engine(_model(NAME), budget_bytes=_tight_budget(make_engine))
    assert any(handle.requests[0].num_preemptions for handle in _play(engine))


@pytest.mark.slow
def test_preempted_requests_are_swapped(make_engine: MakeEngine) -> None:
    """States go to host memory with the rows, and come back."""
    engine = make_engine(
        _model(NAME),
        budget_bytes=_tight_budget(make_engine),
        host_budget_bytes=16 * MiB,
        preemption_costs=PreemptionCosts(flops_per_s=1.0),
    )
    assert any(handle.requests[0].num_preemptions for handle in _play(engine))
    assert engine.cache.sharing.swapped_in_bytes
    assert 0 == engine.cache.pool.stats(MemoryLocation.HOST).resident_bytes


def test_cancelled_requests_leave_the_others_alone(make_engine: MakeEngine) -> None:
    engine = make_engine(_model(NAME))
    handles = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()
    engine.cancel(handles[1])
    engine.cancel(handles[4])
    while engine.has_unfinished:
        engine.step()
    assert FinishReason.CANCELLED == handles[4].output().outputs[0].finish_reason
    for at in (0, 2, 3, 5):
        assert _expected(NAME, PROMPTS[at]) == list(handles[at].output().outputs[0].token_ids)


def test_a_step_that_fails_midway_leaves_no_spoilt_state(make_engine: MakeEngine) -> None:
    """Out of memory behind the first layers: the requests go on, with the same tokens."""
    model = _model(NAME)
    engine = make_engine(model)
    num_calls = 0

    def fail(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls in (3, 6, 14):
            raise torch.OutOfMemoryError("CUDA out of memory")

    handles = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    hook = model.lm_head.register_forward_pre_hook(fail)
    while engine.has_unfinished:
        engine.step()
    hook.remove()
    assert num_calls > 14
    for prompt, handle in zip(PROMPTS, handles, strict=True):
        assert _expected(NAME, prompt) == list(handle.output().outputs[0].token_ids)


def test_states_stay_in_the_models_type_beside_keys_in_eight_bits(make_engine: MakeEngine) -> None:
    engine = make_engine(_model(NAME), kv_dtype="fp8")
    assert len(PROMPTS) == len(_said(engine, PROMPTS))
    kept = {each.dtype for its in engine.cache.states.shapes.values() for each in its}
    assert {torch.float32} == kept
    full = next(group for group in engine.cache.groups if not group.is_fixed)
    assert torch.float8_e4m3fn == full.dtype


def test_log_probabilities_of_prompts(make_engine: MakeEngine) -> None:
    """Passes of their own keep the states of all others."""
    engine = make_engine(_model(NAME))
    params = [SamplingParams(temperature=0, max_tokens=NUM_TOKENS, prompt_logprobs=0), GREEDY]
    outputs = engine.generate([PROMPTS[0], PROMPTS[3]], params)
    for prompt, output in zip((PROMPTS[0], PROMPTS[3]), outputs, strict=True):
        assert _expected(NAME, prompt) == list(output.outputs[0].token_ids)


def test_a_budget_below_one_state_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(_model(NAME))
    state_bytes = engine.cache.states.geometry.row_bytes
    with pytest.raises((ConfigError, OutOfPagesError)):
        make_engine(_model(NAME), budget_bytes=state_bytes)


def test_a_model_with_another_module_is_served_after_a_pause(make_engine: MakeEngine) -> None:
    """It is proven again: its layers keep the same states, in another proof's objects."""
    model = _model(NAME)
    engine = make_engine(model)
    assert [_expected(NAME, PROMPTS[0])] == _said(engine, PROMPTS[:1])
    with engine.paused():
        model.lm_head = copy.deepcopy(model.lm_head)
    assert [_expected(NAME, each) for each in PROMPTS] == _said(engine, PROMPTS)
