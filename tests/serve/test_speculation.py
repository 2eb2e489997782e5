"""Guesses change no token; they come from texts, and are verified where that pays."""

from __future__ import annotations

import copy
import json
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from helpers.hybrids import HYBRIDS
from helpers.requests import finish_all
from helpers.serving import tiny_llama, tiny_tokenizer
from helpers.tiny_models import kernel_model, tiny_model

from vmkv import ConfigError, Engine, SamplingParams
from vmkv.serve.drafts import Drafter, StepTimes, _places_in, _Text
from vmkv.serve.metrics import Metrics, in_vllms_names
from vmkv.serve.options import EngineOptions, Speculation
from vmkv.serve.params import StructuredOutputs
from vmkv.serve.request import Request, packed_prompt
from vmkv.serve.runner import LaunchedStep, RunnerOptions
from vmkv.step.piece import StepLogits
from vmkv.units import MiB

MakeEngine = Callable[..., Engine]
SUFFIX = {"method": "suffix", "num_speculative_tokens": 5}
ROUND = [17, 33, 5, 61, 48, 9]


def drafter_of(engine: Engine) -> Drafter:
    drafter = engine.loop._drafter
    assert drafter is not None
    return drafter


@pytest.fixture
def always() -> Iterator[None]:
    """Steps with guesses take almost no time."""
    with (
        mock.patch.object(StepTimes, "decoding_s", return_value=1.0),
        mock.patch.object(StepTimes, "drafting", return_value=[(0, 1e-3)]),
    ):
        yield


def run(engine: Engine, prompts: list[list[int]], params: Any) -> tuple[list[Any], int]:
    """Outputs of all samples, and the number of steps."""
    handles = [engine.add(*each) for each in zip(prompts, params, strict=True)]
    num_steps = 0
    while engine.has_unfinished:
        engine.step()
        num_steps += 1
    engine.cache.check()
    return [[each.token_ids for each in handle.output().outputs] for handle in handles], num_steps


# ---- tokens --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("always")
def test_a_repeating_answer_takes_fewer_steps(make_engine: MakeEngine) -> None:
    """A model that repeats its last tokens is guessed; drawn tokens are those of their seeds."""
    model = copy.deepcopy(tiny_model("llama"))
    params = [
        SamplingParams(temperature=0, max_tokens=60, logit_bias={7: 60.0}),
        SamplingParams(temperature=0.7, seed=3, max_tokens=60, logit_bias={7: 15.0}),
        SamplingParams(temperature=1.0, seed=4, max_tokens=20, repetition_penalty=1.1),
    ]
    prompts = [ROUND * 3, ROUND * 2, [4, 5]]
    expected, plain_steps = run(make_engine(copy.deepcopy(model)), prompts, params)
    found, num_steps = run(make_engine(model, speculative_config=SUFFIX), prompts, params)
    assert expected == found
    assert num_steps < plain_steps


@pytest.mark.usefixtures("always")
def test_siblings_are_guessed_from_each_other(make_engine: MakeEngine) -> None:
    """The second of two equal requests costs fewer steps, but for another tenant."""
    engine = make_engine("llama", speculative_config=json.dumps(SUFFIX))
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=60)
    took = []
    for tenant in ("one", "two", "one"):
        handle = engine.add([5, 6, 7], params, tenant=tenant)
        took.append(0)
        while engine.has_unfinished:
            engine.step()
            took[-1] += 1
        assert 60 == len(handle.output().outputs[0].token_ids)
    assert took[2] < took[0] / 2
    assert took[1] > took[0] / 2


@pytest.mark.usefixtures("always")
def test_forced_text_drafts_itself(make_engine: MakeEngine) -> None:
    """What a grammar leaves no choice of is guessed by the tokenizer's tokens."""
    schema = {
        "type": "object",
        "properties": {"a_rather_long_name": {"type": "boolean"}},
        "required": ["a_rather_long_name"],
        "additionalProperties": False,
    }
    outputs = StructuredOutputs(json=schema)
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=outputs)
    # The model prefers the tokenizer's own tokens.
    tokenizer = tiny_tokenizer()
    wanted = tokenizer.encode('{"a_rather_long_name"', add_special_tokens=False)
    params = SamplingParams(
        **{**vars(params), "logit_bias": dict.fromkeys(wanted, 30.0)}  # type: ignore[arg-type]
    )
    its: dict[str, Any] = {"tokenizer": tokenizer, "max_tokens": 96}
    expected, plain_steps = run(make_engine(tiny_llama(), **its), [[5, 6]], [params])
    engine = make_engine(tiny_llama(), speculative_config={"method": "ngram"}, **its)
    found, num_steps = run(engine, [[5, 6]], [params])
    assert expected == found
    assert num_steps < plain_steps


@pytest.mark.usefixtures("always")
def test_processors_get_no_guesses(make_engine: MakeEngine) -> None:
    """Requests with logits processors decode token by token beside others that do not."""
    seen: list[int] = []

    def favour(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids.shape[1])
        return scores.index_fill(1, torch.tensor([7]), 50.0)

    params = [
        SamplingParams(temperature=0, max_tokens=20, logits_processors=[favour]),
        SamplingParams(temperature=0, max_tokens=40, logit_bias={9: 60.0}),
    ]
    engine = make_engine("llama", speculative_config=SUFFIX)
    found, num_steps = run(engine, [ROUND, ROUND], params)
    assert found == [[(7,) * 20], [(9,) * 40]]
    assert seen == list(range(6, 26))
    assert num_steps < 40


def test_models_with_states_guess_nothing(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Their engines say so, and serve."""
    if "qwen3_next" not in HYBRIDS:
        pytest.skip("this release has no such model")
    caplog.set_level(logging.INFO)
    engine = make_engine("qwen3_next", speculative_config=SUFFIX)
    assert engine.loop._drafter is None
    assert "layers keep states" in caplog.text
    finish_all(engine)


def test_the_drawn_tokens_of_steps_with_guesses_follow_their_distribution(
    make_engine: MakeEngine,
) -> None:
    """Chi-square over 20 seeds, temperatures and filters, with guesses that are often right."""
    engine = make_engine(
        "llama", max_num_seqs=32, max_num_batched_tokens=64, speculative_config=SUFFIX
    )
    runner = engine.loop.runner
    source = np.random.default_rng(0)
    smallest = 1.0
    for seed in range(20):
        size = runner.sampler.vocab_size
        logits = source.normal(0.0, 2.0, size)
        temperature = source.uniform(0.3, 1.5)
        top_p, top_k = [(1.0, 0), (0.8, 0), (1.0, 12), (0.9, 20)][seed % 4]
        params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        chances = _chances(logits, temperature, top_p, top_k)
        counts = np.zeros(size)
        for slot in range(32):
            its = SamplingParams(**{**vars(params), "seed": 1000 * seed + slot})
            runner.set_slot(slot, its, [5], [])
        rows = torch.tensor(logits, dtype=torch.float32).expand(32 * 4, -1)
        while counts.sum() < NUM_DRAWS:
            guesses = source.choice(size, (32, 3), p=chances)
            told = [each for its in guesses.tolist() for each in (*its, -1)]
            slots = [slot for slot in range(32) for _ in range(4)]
            launched = LaunchedStep([StepLogits(rows, slots)], slots, None, told)
            drawn = np.array(runner.sample(launched).result().token_ids).reshape(32, 4)
            right = np.cumprod(drawn[:, :3] == guesses, axis=1).astype(bool)
            np.add.at(counts, drawn[:, 0], 1)
            np.add.at(counts, drawn[:, 1:][right], 1)
        assert not counts[chances == 0].any()
        smallest = min(smallest, _p_value(counts, chances))
    assert smallest > 1e-4


NUM_DRAWS = 10_000


def _chances(logits: Any, temperature: float, top_p: float, top_k: int) -> Any:
    order = np.argsort(-logits, kind="stable")
    scaled = logits[order] / temperature
    if top_k:
        scaled[top_k:] = -np.inf
    chances = np.exp(scaled - scaled.max())
    chances /= chances.sum()
    chances[np.cumsum(chances) - chances >= top_p] = 0.0
    found = np.zeros_like(chances)
    found[order] = chances / chances.sum()
    return found


def _p_value(counts: Any, chances: Any) -> float:
    """Chi-square test; tokens that are expected fewer than five times are one class."""
    expected = chances * counts.sum()
    is_rare = expected < 5
    seen = np.append(counts[~is_rare], counts[is_rare].sum())
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    seen, expected = seen[expected > 0], expected[expected > 0]
    statistic = ((seen - expected) ** 2 / expected).sum()
    half = torch.tensor([(len(seen) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.usefixtures("always")
def test_steps_with_guesses_are_captured_where_prompts_are_not(make_engine: MakeEngine) -> None:
    """Engines of rollouts capture no steps with prompts."""
    its = RunnerOptions(capture=True, max_graph_tokens=0, few_sizes=True, show_progress=False)
    options: dict[str, Any] = {"runner": "graphs", "runner_options": its}
    engine = make_engine("llama", speculative_config=SUFFIX, **options)
    graphs = engine.loop.runner.stepper.mixed_graphs
    assert graphs is not None
    assert all(bucket.draft_tokens for bucket in graphs.captured)
    params = [SamplingParams(temperature=0, max_tokens=60, logit_bias={7: 60.0})] * 3
    with mock.patch.object(graphs, "replay", wraps=graphs.replay) as replay:
        found, num_steps = run(engine, [ROUND, [4, 5], ROUND * 2], params)
    assert replay.call_count > num_steps / 3
    assert found == [[(7,) * 60]] * 3


@pytest.mark.gpu
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_captured_steps_with_guesses_give_the_tokens_of_decoding(temperature: float) -> None:
    """Requests draft beside others that decode; penalties, log-probabilities and seeds."""
    prompts = [ROUND * count for count in (4, 9, 30, 90)]
    params = [
        SamplingParams(temperature=temperature, seed=1, max_tokens=80, logit_bias={7: 90.0}),
        SamplingParams(temperature=temperature, seed=2, max_tokens=40, logprobs=1),
        SamplingParams(temperature=temperature, seed=3, max_tokens=80, logit_bias={9: 40.0}),
        SamplingParams(
            temperature=temperature,
            seed=4,
            max_tokens=80,
            logit_bias={8: 60},
            top_p=0.9,
            presence_penalty=0.1,
        ),
    ]
    found = []
    for config in (None, SUFFIX):
        with Engine(kernel_model(), max_num_seqs=4, speculative_config=config, seed=0) as engine:
            handles = [engine.add(*each) for each in zip(prompts, params, strict=True)]
            num_steps = 0
            while engine.has_unfinished:
                engine.step()
                num_steps += 1
            found.append(([x.output().outputs[0].token_ids for x in handles], num_steps))
    # Rounding differs between steps of other sizes: only biased requests are sure to be equal.
    for at in (0, 2, 3):
        assert found[0][0][at] == found[1][0][at]
    assert found[1][1] < found[0][1]


# ---- texts ---------------------------------------------------------------------------------------


def _text(prompt: list[int]) -> _Text:
    request = Request(0, packed_prompt(prompt, None, 1 << 21), SamplingParams())
    return _Text(request, _places_in(request.prompt_token_ids))


def test_a_text_goes_on_as_its_prompt_did() -> None:
    """After three known tokens the next ones are guessed, up to the prompt's end."""
    text = _text([1, 2, 3, 4, 5, 6, 7, 8, 9])
    guesses = []
    for token_id in (2, 3, 4, 5, 9, 9):
        text.take(token_id, None)
        guesses.append(text.guesses(4))
    assert guesses == [[], [], [5, 6, 7, 8], [6, 7, 8, 9], [], []]


def test_a_repeated_answer_goes_on_repeating() -> None:
    """Guesses reach beyond the text that they repeat."""
    text = _text([50])
    for token_id in (1, 2, 1, 2, 1, 2):
        text.take(token_id, None)
    assert [1, 2, 1, 2, 1, 2, 1] == text.guesses(7)


def test_longer_matches_come_first() -> None:
    """Six tokens that match decide, though three match later in the text."""
    text = _text([1, 2, 3, 4, 5, 6, 70, 0, 4, 5, 6, 80, 9])
    for token_id in (1, 2, 3, 4, 5):
        text.take(token_id, None)
    text.source = None
    text.take(6, None)
    assert 70 == text.guess()


def test_random_texts_are_indexed_alike() -> None:
    """The index of a prompt has the keys that an answer is looked up by."""
    draw = random.Random(0)
    tokens = [draw.randrange(1 << 20) for _ in range(40)]
    text = _text(tokens)
    for at, token_id in enumerate(tokens[:-1]):
        text.take(token_id, None)
        text.in_output.clear()
        assert at < 2 or text.guess() == tokens[at + 1]


def test_what_is_too_much_to_read_at_once_is_read_later(make_engine: MakeEngine) -> None:
    """Meanwhile the request has no guesses."""
    engine = make_engine("llama", speculative_config=SUFFIX)
    drafter = drafter_of(engine)
    drafter.times = _timed(1.2)
    requests = [
        Request(at, packed_prompt([1] * 8192, None, 99), SamplingParams(), max_total_tokens=9999)
        for at in range(2)
    ]
    for request in requests:
        request.output_token_ids += [5, 6, 7] * 20
    read = []
    for _ in range(3):
        drafter.follow(requests)
        read.append([each in drafter.numbers(requests) for each in requests])
    assert read == [[False, False], [True, False], [True, True]]


# ---- costs ---------------------------------------------------------------------------------------


def _timed(drafting_s: float) -> StepTimes:
    """Times where decoding takes a second, and steps with guesses as long as given."""
    times, now_s = StepTimes(), 0.0
    drafting = [(size, True, drafting_s) for size in range(2, 7)]
    for num_tokens, drafts, took_s in [(1, False, 1.0)] * 4 + drafting * 4:
        now_s += took_s
        times.note(now_s, num_tokens, drafts=drafts, counts=True)
    return times


@pytest.mark.parametrize(("drafting_s", "pays"), [(1.5, True), (8.0, False)])
def test_guesses_are_verified_where_they_pay(
    make_engine: MakeEngine, drafting_s: float, *, pays: bool
) -> None:
    """A request that is guessed well drafts unless steps with guesses take too long."""
    engine = make_engine("llama", speculative_config=SUFFIX)
    drafter = drafter_of(engine)
    engine.add(ROUND, SamplingParams(temperature=0, max_tokens=100, logit_bias={7: 60.0}))
    (request,) = engine._scheduler.requests.values()
    for _ in range(60):
        drafter.times = StepTimes()  # Nothing is known: nothing is verified.
        engine.step()
    assert 0 == engine.loop._guessed[1]
    drafter.times = _timed(drafting_s)
    drafter.follow([request])
    assert (5 == drafter.numbers([request]).get(request)) == pays
    assert bool(drafter.numbers([request])) == pays
    drafter.times = StepTimes()
    finish_all(engine)


def test_a_request_that_is_guessed_wrong_stops_drafting(make_engine: MakeEngine) -> None:
    """Guesses that were wrong while none was verified count as well."""
    engine = make_engine("llama", speculative_config=SUFFIX)
    drafter = drafter_of(engine)
    prompt = packed_prompt(range(1, 11), None, 99)
    request = Request(0, prompt, SamplingParams(), max_total_tokens=999)
    drafter.times = _timed(1.2)
    request.output_token_ids += [2, 3, 4]
    drafter.follow([request])
    assert drafter.numbers([request])
    for at in range(40):
        request.output_token_ids += [20 + at, 2, 3, 4]  # Never what came before.
        drafter.follow([request])
    assert drafter._texts[request].guess() >= 0
    assert not drafter.numbers([request])


def test_sizes_that_were_slow_are_tried_again() -> None:
    """A size is forgotten if it was not measured for many steps."""
    times = _timed(8.0)
    assert times.drafting(1.0) == [(0, 1.1), *((size, 8.0) for size in range(2, 7))]
    for number in range(1100):
        times.note(20.0 + number, 1, drafts=False, counts=True)
    assert times.drafting(1.0) == [(0, 1.1)]
    assert 1.0 == times.decoding_s(4)


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"method": "eagle"}, "draft heads are not served"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "from 1 to 32"),
        ({"method": "ngram", "num_speculative_tokens": True}, "from 1 to 32"),
        ({"method": "ngram", "prompt_lookup_max": 4}, "is found out while serving"),
        ("[1]", "must be a JSON object"),
        ("{", "must be a JSON object"),
        ('[["method", "ngram"]]', "must be a JSON object"),
        ("[" * 100_000, "must be a JSON object"),
        ({"method": "draft_model", "model": 7}, "model=7 must be a folder"),
        ({"method": "draft_model", "model": ""}, "model='' must be a folder"),
    ],
)
def test_wrong_configurations_are_refused(config: Any, why: str) -> None:
    """The error says what can be given instead."""
    with pytest.raises(ConfigError, match=why):
        EngineOptions(speculative_config=config)


def test_the_configuration_is_vllms_json() -> None:
    """A text from a command line is read like a mapping."""
    given = EngineOptions(speculative_config='{"method": "ngram", "num_speculative_tokens": 4}')
    assert Speculation("ngram", 4) == given.speculation
    assert EngineOptions().speculation is None
    with pytest.raises(ConfigError, match="leave speculative_config out"):
        EngineOptions(speculative_config={"method": "suffix"}, deterministic=True)


@pytest.mark.usefixtures("always")
def test_metrics_have_vllms_names() -> None:
    """Drafts, their tokens, and the accepted ones are counted."""
    metrics = Metrics()
    model = copy.deepcopy(tiny_model("llama"))
    its: dict[str, Any] = {"max_num_seqs": 2, "budget_bytes": 16 * MiB, "observer": metrics}
    with Engine(model, speculative_config=SUFFIX, **its) as engine:
        params = SamplingParams(temperature=0, max_tokens=50, logit_bias={7: 60.0})
        run(engine, [ROUND], [params])
    values = {
        sample.name: sample.value
        for family in in_vllms_names(metrics.families(), ["m"])
        for sample in family.samples
    }
    drafts, tokens, accepted = (
        values[f"vllm:spec_decode_num_{name}_total"]
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert 0 < drafts < accepted <= tokens
    steps = {
        sample.labels["phase"]: sample.value
        for family in metrics.families()
        for sample in family.samples
        if sample.name == "vmkv_step_tokens_total"
    }
    assert len(ROUND) == steps["prefill"]
