"""A draft model changes no token, and its rows are nobody's burden."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from helpers.hybrids import HYBRIDS, model_named
from helpers.serving import tiny_llama, tiny_tokenizer
from helpers.tiny_models import kernel_model, tiny_model

from vmkv import ConfigError, Engine, SamplingParams
from vmkv.serve.draft_model import ModelDrafter, make_drafter
from vmkv.serve.drafts import StepTimes
from vmkv.serve.options import EngineOptions
from vmkv.serve.params import StructuredOutputs
from vmkv.serve.request import RequestState
from vmkv.serve.runner import RunnerOptions
from vmkv.units import KiB

MakeEngine = Callable[..., Engine]
PROMPTS: list[list[int]] = [[17, 33, 5, 61] * 9, [4, 5], [17, 33, 5, 61] * 8 + [7], [9, 8, 7] * 13]


@pytest.fixture
def always() -> Iterator[None]:
    """Drafts, and steps with guesses, take almost no time."""
    with (
        mock.patch.object(StepTimes, "decoding_s", return_value=1.0),
        mock.patch.object(StepTimes, "drafting", return_value=[(0, 1e-3)]),
        mock.patch.object(ModelDrafter, "_added_s", return_value=0.0),
    ):
        yield


def asked(model: Any, count: int = 5) -> dict[str, Any]:
    return {"method": "draft_model", "model": model, "num_speculative_tokens": count}


def drafter_of(engine: Engine) -> ModelDrafter:
    return cast(ModelDrafter, engine.loop._drafter)


def run(engine: Engine, params: Sequence[SamplingParams]) -> tuple[list[Any], int]:
    """Outputs of all samples, and the number of steps; no row of the draft model is left live."""
    handles = [engine.add(*each) for each in zip(PROMPTS, params, strict=False)]
    drafter, num_steps = engine.loop._drafter, 0
    caches = [engine.cache, *(drafter.caches if drafter is not None else ())]
    num_live = [len(each.live) for each in caches[1:]]
    while engine.has_unfinished:
        engine.step()
        num_steps += 1
        for cache in caches:
            cache.check()
        assert num_live == [len(each.live) for each in caches[1:]]
    return [[each.token_ids for each in handle.output().outputs] for handle in handles], num_steps


# ---- tokens --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("runner", ["eager", "graphs"])
def test_the_same_weights_are_guessed_right(make_engine: MakeEngine, runner: str) -> None:
    """Nearly all greedy guesses are accepted, and steps are few."""
    its = RunnerOptions(capture=True, compile_layers=False, show_progress=False)
    options: dict[str, Any] = {"runner": runner, "runner_options": its}
    model = tiny_model("llama")
    params = [SamplingParams(temperature=0, max_tokens=40)] * 3
    expected, plain_steps = run(make_engine(copy.deepcopy(model)), params)
    config = asked(copy.deepcopy(model))
    engine = make_engine(copy.deepcopy(model), speculative_config=config, **options)
    found, num_steps = run(engine, params)
    _, num_guesses, num_accepted = engine.loop._guessed
    assert expected == found
    assert num_accepted > 0.9 * num_guesses > 60
    assert num_steps < plain_steps / 2


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4"])
def test_other_weights_change_no_token(make_engine: MakeEngine, name: str) -> None:
    """Few guesses are right; drawn tokens and samples of one prompt are those of decoding."""
    params = [
        SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[3], repetition_penalty=1.2),
        SamplingParams(temperature=0.7, seed=3, n=3, max_tokens=30),
        SamplingParams(temperature=0, max_tokens=20, logprobs=1),
    ]
    expected, _ = run(make_engine("llama"), params)
    config = asked(copy.deepcopy(tiny_model(name)))
    engine = make_engine("llama", speculative_config=config)
    found, _ = run(engine, params)
    _, num_guesses, num_accepted = engine.loop._guessed
    assert expected == found
    assert num_accepted < 0.5 * num_guesses


@pytest.mark.gpu
@pytest.mark.usefixtures("always")
def test_captured_drafts_change_no_token() -> None:
    """Decode steps of both models are captured. Rounding differs, so each step has a sure token."""
    params = [
        SamplingParams(temperature=0, max_tokens=60, logit_bias={7 + at: 90.0}) for at in range(4)
    ]
    found = []
    for config in (None, asked(kernel_model())):
        with Engine(kernel_model(), max_num_seqs=4, speculative_config=config, seed=0) as engine:
            found.append(run(engine, params))
    assert found[0][0] == found[1][0]


@pytest.mark.usefixtures("always")
def test_guesses_fit_the_grammar(make_engine: MakeEngine) -> None:
    """Guided requests are guessed beside others."""
    outputs = StructuredOutputs(json={"enum": ["a long name", "a longer name"]})
    params = [
        SamplingParams(temperature=0, max_tokens=40, structured_outputs=outputs),
        SamplingParams(temperature=0, max_tokens=40),
    ]
    its: dict[str, Any] = {"tokenizer": tiny_tokenizer(), "max_tokens": 96}
    expected, _ = run(make_engine(tiny_llama(), **its), params)
    engine = make_engine(tiny_llama(), speculative_config=asked(tiny_llama()), **its)
    assert expected == run(engine, params)[0]
    assert engine.loop._guessed[2] > 0


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("always")
def test_rows_give_way_to_requests(make_engine: MakeEngine) -> None:
    """Where memory is short, requests run as they would, and those that lost their row decode."""
    model = tiny_model("llama")
    params = [SamplingParams(temperature=0, max_tokens=60)] * 4
    expected, _ = run(make_engine(copy.deepcopy(model)), params)
    config, num_lost = asked(copy.deepcopy(model)), 0
    for budget_bytes in (96 * KiB, 160 * KiB, 256 * KiB):
        model = copy.deepcopy(model)
        engine = make_engine(model, speculative_config=config, budget_bytes=budget_bytes)
        drafter = drafter_of(engine)
        assert expected == run(engine, params)[0]
        num_lost += sum(each < 0 for each in drafter._held.values())
        engine.close()
    assert num_lost > 0


@pytest.mark.usefixtures("always")
def test_samples_share_their_prompt(make_engine: MakeEngine) -> None:
    """The draft model computes a prompt once."""
    draft = copy.deepcopy(tiny_model("llama"))
    seen: list[int] = []

    def count(_module: Any, _args: Any, kwargs: Any) -> None:
        seen.append(kwargs["input_ids"].shape[1])

    engine = make_engine("llama", speculative_config=asked(draft))
    draft.register_forward_pre_hook(count, with_kwargs=True)
    seen.clear()
    run(engine, [SamplingParams(temperature=0.8, seed=1, n=4, max_tokens=30)])
    assert max(seen) <= 16  # A pass is no larger than the engine's.
    assert sum(each for each in seen if each > 8) < 2.5 * len(PROMPTS[0])


@pytest.mark.usefixtures("always")
def test_memory_goes_back_when_idle(make_engine: MakeEngine) -> None:
    """By the watermark and by a sleep, after which the draft model guesses again."""
    model = tiny_model("llama")
    params = [SamplingParams(temperature=0, max_tokens=20)] * 2
    its: dict[str, Any] = {"speculative_config": asked(copy.deepcopy(model))}
    engine = make_engine(copy.deepcopy(model), watermark_bytes=0, **its)
    expected = run(engine, params)
    assert 0 == engine.cache.pool.stats().created_bytes
    engine = make_engine(copy.deepcopy(model), **its)
    for give_back in (engine.sleep, engine.weights_changed):
        assert expected == run(engine, params)
        assert engine.cache.pool.stats().resident_bytes > 0
        give_back()
        if give_back == engine.sleep:
            assert 0 == engine.cache.pool.stats().created_bytes
    assert engine.loop._guessed[2] > 30


@pytest.mark.usefixtures("always")
def test_a_cancelled_request_leaves_its_row_to_the_next(make_engine: MakeEngine) -> None:
    """Rows of ended requests are parked, and taken again."""
    model = tiny_model("llama")
    config = asked(copy.deepcopy(model))
    engine = make_engine(copy.deepcopy(model), speculative_config=config)
    cache = drafter_of(engine)._cache
    for _ in range(6):
        handle = engine.add(PROMPTS[0], SamplingParams(temperature=0, max_tokens=60))
        while len(handle.output().outputs[0].token_ids) < 20:
            engine.step()
        engine.cancel(handle)
        while engine.has_unfinished:
            engine.step()
        assert not cache.live
        assert 1 == len(cache.rows.parked)


# ---- costs ---------------------------------------------------------------------------------------


def test_guesses_are_made_where_they_pay(make_engine: MakeEngine) -> None:
    """A slow draft model, or an unlikely guess, is not worth it; both are tried again later."""
    model = tiny_model("llama")
    engine = make_engine(copy.deepcopy(model), speculative_config=asked(copy.deepcopy(model), 4))
    drafter = drafter_of(engine)
    engine.add(PROMPTS[1], SamplingParams(temperature=0, max_tokens=100))
    (request,) = engine._scheduler.requests.values()
    while request.state is not RequestState.RUNNING:
        drafter.times = StepTimes()  # Nothing is known: nothing is guessed.
        engine.step()
    times = mock.Mock(decoding_s=mock.Mock(return_value=1.0))
    times.drafting.side_effect = lambda _: [(0, 1.1)]
    drafter.times = times
    found = {}
    for pass_s in (0.0, 0.2, 0.4, 2.0):
        drafter._pass_s = pass_s
        found[pass_s] = drafter.numbers([request]).get(request, 0)
    assert [4, 0] == [found[0.0], found[2.0]]
    assert 0 < found[0.4] <= found[0.2] <= 4
    drafter._pass_s, drafter._token_s = 0.1, 60.0  # A prompt that is dear to compute.
    assert not drafter.numbers([request])
    drafter._token_s = 0.0
    drafter._made[request] = request.num_known, [1]
    for _ in range(20):  # Wrong each time.
        drafter._made[request] = request.num_known - 1, [-1]
        drafter.follow([request])
    assert not drafter.numbers([request])
    drafter._own.clear()
    assert not drafter.numbers([request])
    for _ in range(1100):
        drafter.follow([request])
    assert drafter.numbers([request])
    drafter.times = StepTimes()
    engine.cancel_all()
    while engine.has_unfinished:
        engine.step()


@pytest.mark.usefixtures("always")
def test_a_failing_draft_model_fails_no_request(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests decode plainly, and a warning says why."""
    params = [SamplingParams(temperature=0, max_tokens=20)] * 3
    expected, _ = run(make_engine("llama"), params)
    draft = copy.deepcopy(tiny_model("llama"))
    engine = make_engine("llama", speculative_config=asked(draft))
    with mock.patch.object(
        drafter_of(engine)._runner.stepper, "run", side_effect=RuntimeError("x")
    ):
        assert expected == run(engine, params)[0]
    assert "could not guess" in caplog.text
    assert 0 == engine.loop._guessed[0]


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("always")
def test_a_folder_is_loaded(make_engine: MakeEngine, tmp_path: Path) -> None:
    """The configuration is vLLM's JSON."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    params = [SamplingParams(temperature=0, max_tokens=20)]
    engine = make_engine("llama", speculative_config=json.dumps(asked(str(tmp_path))))
    assert run(engine, params)[0] == run(make_engine("llama"), params)[0]
    assert engine.loop._guessed[2] > 10


def test_models_that_do_not_suit_are_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    """By their vocabulary, their layers and their place; nothing stays behind."""
    model = tiny_model("llama")
    other = copy.deepcopy(model)
    other.resize_token_embeddings(model.config.vocab_size + 8)
    with pytest.raises(ConfigError, match="needs the vocabulary"):
        make_engine("llama", speculative_config=asked(other.eval()))
    with pytest.raises(ConfigError, match="needs a model"):
        EngineOptions(speculative_config={"method": "draft_model"})
    with pytest.raises(ConfigError, match="no other takes one"):
        EngineOptions(speculative_config={"method": "ngram", "model": "folder"})
    with pytest.raises(ConfigError):
        make_engine("llama", speculative_config=asked(str(tmp_path)))
    if "qwen3_next" in HYBRIDS:
        hybrid = copy.deepcopy(model_named("qwen3_next"))
        hybrid.resize_token_embeddings(model.config.vocab_size)
        with pytest.raises(ConfigError, match="keep states"):
            make_engine("llama", speculative_config=asked(hybrid.eval()))
    its = SimpleNamespace(cache=SimpleNamespace(states=None), calls=SimpleNamespace(chunks={}))
    given, ranks = EngineOptions(speculative_config=asked(model)), mock.Mock()
    with pytest.raises(ConfigError, match="on one device"):
        make_drafter(*cast(Any, (ranks, model, its, given, ranks, ranks, ranks)))
