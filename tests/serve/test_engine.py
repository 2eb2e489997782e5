"""The engine's tokens equal the model's, alone and in batches, on a real cache."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.reference_backend import ReferenceBackend
from helpers.requests import check_said, finish_all
from helpers.requests import prompts as random_prompts
from helpers.requests import reference as said_alone
from helpers.runners import EAGER, PADDED, graphs
from helpers.serving import save_tiny_model, tiny_llama, tiny_tokenizer
from helpers.tiny_models import SERVED_LATELY, VOCABULARY, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from vmkv import ClosedError, ConfigError, OutOfPagesError
from vmkv.serve.engine import Engine
from vmkv.serve.observer import Event, FirstToken, StepRecord
from vmkv.serve.params import SamplingParams, StructuredOutputs
from vmkv.serve.request import FinishReason, RequestOutput
from vmkv.units import KiB

MakeEngine = Callable[..., Engine]
MODELS = ["llama", "qwen3", "mistral", "gemma3", "gpt_oss", "mixtral", *SERVED_LATELY]
GREEDY = SamplingParams(temperature=0, max_tokens=10)
RUNNERS = pytest.mark.parametrize("runner", [EAGER, graphs()], ids=["eager", "graphs"])


prompts = functools.partial(random_prompts, shortest=1, longest=40)


def reference(name: str, prompt: Sequence[int], num_tokens: int = 10) -> list[int]:
    return said_alone(prompt, num_tokens, name)


def tokens(engine: Engine, requests: Sequence[Sequence[int]], params: object) -> list[list[int]]:
    """The tokens of each request's first sample."""
    return [list(each.outputs[0].token_ids) for each in engine.generate(requests, params)]


@pytest.mark.parametrize("name", MODELS)
@RUNNERS
def test_greedy_tokens_equal_the_models(
    make_engine: MakeEngine, name: str, runner: dict[str, Any]
) -> None:
    """Chunked, mixed and batched requests get the same tokens as alone."""
    wanted = prompts(9)
    engine = make_engine(name, **runner)
    outputs = engine.generate(wanted, GREEDY)
    for prompt, output in zip(wanted, outputs, strict=True):
        assert reference(name, prompt) == list(output.outputs[0].token_ids)
        assert output.outputs[0].finish_reason is FinishReason.LENGTH
        assert tuple(prompt) == output.prompt_token_ids


@pytest.mark.parametrize("options", [{}, graphs()])
def test_the_attention_backend_option_is_used(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    engine = make_engine(attention_backend="reference", **options)
    num_calls, attend = 0, ReferenceBackend.attend

    def counted(self: ReferenceBackend, call: object) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return attend(self, call)

    monkeypatch.setattr(ReferenceBackend, "attend", counted)
    assert tokens(engine, prompts(1), GREEDY) == [reference("llama", prompts(1)[0])]
    assert num_calls


def smallest_budget(make_engine: MakeEngine, name: str, num_tokens: int) -> int:
    """The smallest budget in pages that fits one request of `num_tokens`."""
    low, high = 1, 2048
    while low < high:
        middle = (low + high) // 2
        try:
            fits = make_engine(name, budget_bytes=middle * 4 * KiB).max_tokens >= num_tokens
        except (ConfigError, OutOfPagesError):
            fits = False
        low, high = (low, middle) if fits else (middle + 1, high)
    return low


@pytest.mark.parametrize(
    "options",
    [
        [{}],
        [{"temperature": 0.8, "top_p": 0.9, "top_k": 20}],
        [
            {"bad_words": [[7, 7], [9, 4, 7]], "top_p": 0.9},
            {"allowed_token_ids": [3, 4, 5, 6]},
            {"logit_bias": {5: 4.0, 6: 4.0}},
        ],
    ],
    ids=["plain", "filters", "bad words and biases"],
)
def test_preemption_does_not_change_sampled_tokens(
    make_engine: MakeEngine, options: list[dict[str, Any]]
) -> None:
    """A request's i-th token depends on its seed and i alone."""
    wanted = prompts(6, longest=30, seed=3)
    params = [
        SamplingParams(max_tokens=25, seed=at, **options[at % len(options)])
        for at in range(len(wanted))
    ]
    alone = tokens(make_engine(max_num_seqs=1), wanted, params)
    engine = make_engine(budget_bytes=smallest_budget(make_engine, "llama", 56) * 3 // 2 * 4 * KiB)
    handles = [engine.add(prompt, its) for prompt, its in zip(wanted, params, strict=True)]
    finish_all(engine)
    assert alone == [list(each.output().outputs[0].token_ids) for each in handles]
    assert sum(handle.requests[0].num_preemptions for handle in handles)
    for said, its in zip(alone, params, strict=True):
        assert set(said) <= set(its.allowed_token_ids or said)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "mixtral"])
def test_deterministic_requests_do_not_depend_on_others(make_engine: MakeEngine, name: str) -> None:
    """Equal log-probabilities to the last bit: alone, in a batch, and with preemption."""
    prompt = prompts(1, longest=40, seed=4)[0]
    params = SamplingParams(max_tokens=12, seed=5, logprobs=3, temperature=0.7)

    def run(num_others: int, **options: object) -> object:
        engine = make_engine(name, deterministic=True, **options)
        others = prompts(num_others, seed=6)
        handles = [engine.add(other, SamplingParams(max_tokens=20)) for other in others[1:]]
        handle = engine.add(prompt, params)
        handles += [engine.add(other, SamplingParams(max_tokens=20)) for other in others[:1]]
        finish_all(engine)
        output = handle.output().outputs[0]
        return output.token_ids, output.logprobs

    alone = run(0)
    assert alone == run(3) == run(9)
    small = smallest_budget(make_engine, name, 60) * 3 // 2 * 4 * KiB
    assert alone == run(9, budget_bytes=small)


def test_requests_end_at_stop_tokens(engine: Engine) -> None:
    """The stop token is the last token; before `min_tokens` it is not sampled."""
    prompt = prompts(1)[0]
    said = reference("llama", prompt, 20)
    stop = said[6]
    first = said.index(stop)
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop])
    [output] = engine.generate([prompt], params)
    completion = output.outputs[0]
    assert said[: first + 1] == list(completion.token_ids)
    assert (FinishReason.STOP, stop) == (completion.finish_reason, completion.stop_reason)
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop], min_tokens=9)
    [output] = engine.generate([prompt], params)
    assert len(output.outputs[0].token_ids) >= 9
    assert stop not in output.outputs[0].token_ids[:8]


def test_an_eos_token_outside_the_vocabulary_is_ignored(make_engine: MakeEngine) -> None:
    """Some configurations use -1 for none."""
    model = copy.deepcopy(tiny_model("llama"))
    model.generation_config.eos_token_id = [-1, VOCABULARY]
    prompt = prompts(1, seed=6)[0]
    params = SamplingParams(temperature=0, max_tokens=10, min_tokens=5)
    assert [reference("llama", prompt)] == tokens(make_engine(model), [prompt], params)


def check_logprobs(
    prompt: list[int], output: RequestOutput, process: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Compare with the model's, processed; its log-probabilities of all tokens."""
    completion = output.outputs[0]
    with torch.no_grad():
        logits = tiny_model("llama")(torch.tensor([[*prompt, *completion.token_ids]])).logits[0]
    wanted = process(logits).log_softmax(-1)[len(prompt) - 1 : -1]
    assert completion.logprobs is not None
    for row, token_id, given in zip(wanted, completion.token_ids, completion.logprobs, strict=True):
        assert token_id == given.token_id
        torch.testing.assert_close(torch.tensor(given.logprob), row[token_id])
        assert row.topk(4).indices.tolist() == list(given.top)
    return logits.log_softmax(-1)


@pytest.mark.parametrize(
    "processors", [[], [lambda _, scores: scores.index_fill(1, torch.tensor([7]), 99.0)]]
)
def test_logprobs_equal_the_models(make_engine: MakeEngine, processors: list[object]) -> None:
    """Before temperature and processors are applied."""
    prompt = prompts(1, seed=8)[0]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=4, logits_processors=processors)
    [output] = make_engine().generate([prompt], params)
    assert not processors or (7,) * 6 == output.outputs[0].token_ids
    check_logprobs(prompt, output, lambda logits: logits)


def test_processed_logprobs_include_temperature_and_processors(make_engine: MakeEngine) -> None:
    """Those of the prompt are the model's; another mode is refused."""
    prompt = prompts(1, seed=8)[0]
    processors = [lambda _, scores: scores.index_fill(1, torch.tensor([7]), 5.0)]
    params = SamplingParams(
        temperature=0.7,
        max_tokens=6,
        logprobs=4,
        prompt_logprobs=0,
        logits_processors=processors,
        seed=3,
    )
    [output] = make_engine(logprobs_mode="processed_logprobs").generate([prompt], params)
    raw = check_logprobs(prompt, output, lambda row: processors[0](None, row) / 0.7)
    for row, token_id, known in zip(raw, prompt[1:], output.prompt_logprobs[1:], strict=False):
        torch.testing.assert_close(torch.tensor(known.logprob), row[token_id])
    with pytest.raises(ConfigError, match="logprobs_mode='processed_logits'"):
        make_engine(logprobs_mode="processed_logits")


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_samples_share_their_prompt(make_engine: MakeEngine, prefix_caching: bool) -> None:
    """Each sample equals a request with its seed; the prompt is computed once."""
    prompt = prompts(1, longest=60, seed=11)[0] * 2
    params = SamplingParams(n=3, seed=40, max_tokens=8, temperature=1.0)
    engine = make_engine(prefix_caching=prefix_caching, observer=(seen := Seen()))
    [output] = engine.generate([prompt], params)
    assert [0, 1, 2] == [each.index for each in output.outputs]
    alone = make_engine(prefix_caching=False)
    for at, completion in enumerate(output.outputs):
        its = dataclasses.replace(params, n=1, seed=40 + at)
        assert tokens(alone, [prompt], its) == [list(completion.token_ids)]
    assert len({each.token_ids for each in output.outputs}) > 1
    assert seen.num_prefill_tokens == len(prompt) + 2
    assert engine.cache.stats().sharing.num_forks
    assert 0 == output.num_cached_tokens
    [output] = engine.generate([prompt], params)
    assert prefix_caching == bool(output.num_cached_tokens), "nothing else is shared without"


def test_samples_take_the_memory_of_ended_ones(make_engine: MakeEngine) -> None:
    """Without cached prefixes, twelve samples of which four run at once need little more."""
    engine = make_engine(prefix_caching=False)
    params = SamplingParams(n=4, seed=40, max_tokens=60, ignore_eos=True)
    created: list[int] = []
    for count in (1, 3):
        engine.generate(prompts(3, longest=30, seed=11)[:count], [params] * count)
        created.append(engine.cache.pool.stats().created_bytes)
    assert created[1] <= 1.25 * created[0]


def test_deterministic_samples_compute_their_prompt_each(make_engine: MakeEngine) -> None:
    """A fork's last token would have a pass of its own, and be rounded differently."""
    prompt = prompts(1, longest=60, seed=11)[0] * 2
    engine = make_engine(deterministic=True, observer=(seen := Seen()))
    engine.generate([prompt], SamplingParams(n=3, seed=40, max_tokens=8))
    assert seen.num_prefill_tokens == 3 * len(prompt)
    assert not engine.cache.stats().sharing.num_forks


def test_tenants_share_no_prefix(make_engine: MakeEngine) -> None:
    """Neither a cached one, nor one that another tenant's request is computing."""
    prompt, tenants = list(range(3, 53)), ["a", "b", None]
    params = dataclasses.replace(GREEDY, n=2)
    engine = make_engine(max_num_seqs=8, observer=(seen := Seen()))
    # The second sample of each tenant forks the first, and computes the last token.
    for num_cached_tokens, num_computed in ((0, 50), (48, 2)):
        num_before = seen.num_prefill_tokens
        handles = [engine.add(prompt, params, tenant=each) for each in tenants]
        finish_all(engine)
        outputs = [each.output() for each in handles]
        assert [num_cached_tokens] * 3 == [each.num_cached_tokens for each in outputs]
        assert seen.num_prefill_tokens - num_before == 3 * (num_computed + 1)
        check_said([prompt] * 3, outputs, 10)
    [other] = engine.generate([prompt], GREEDY, tenant="c")
    assert 0 == other.num_cached_tokens
    with pytest.raises(ConfigError, match="tenant=7 must be a string"):
        engine.add(prompt, tenant=7)


class Seen:
    """An observer that counts prompt tokens computed."""

    num_prefill_tokens = 0

    def on(self, event: Event, cache: object) -> None:
        if isinstance(event, FirstToken):
            assert event.wait_s >= 0
        elif isinstance(event, StepRecord):
            self.num_prefill_tokens += event.num_prefill_tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
def test_prefix_hits_of_windowed_models_have_reference_tokens(
    make_engine: MakeEngine, name: str
) -> None:
    """Also if the window has left a part of the cached prefix."""
    common = prompts(1, longest=40, seed=12)[0] * 2
    wanted = [common[: 20 + 7 * at] + tail for at, tail in enumerate(prompts(8, longest=8))]
    engine = make_engine(name)
    for its in (wanted, *([prompt] for prompt in wanted)):
        check_said(its, engine.generate(its, GREEDY), 10, name)


def test_common_prefixes_are_computed_once(make_engine: MakeEngine) -> None:
    """Later requests begin after the cached prefix and have the same tokens as without it."""
    common = prompts(1, longest=64, seed=12)[0]
    common = (common * 64)[:64]
    wanted = [common + tail for tail in prompts(5, longest=8, seed=13)]
    engine = make_engine(observer=(seen := Seen()))
    outputs = [engine.generate([prompt], GREEDY)[0] for prompt in wanted]
    assert [0] + [64] * 4 == [each.num_cached_tokens for each in outputs]
    assert seen.num_prefill_tokens == 64 + sum(len(prompt) - 64 for prompt in wanted)
    check_said(wanted, outputs, 10)
    # The next turn of a conversation, too.
    turn = wanted[0] + list(outputs[0].outputs[0].token_ids) + prompts(1, seed=14)[0]
    [output] = engine.generate([turn], GREEDY)
    assert output.num_cached_tokens >= 64
    assert reference("llama", turn) == list(output.outputs[0].token_ids)


def test_handles_stream_their_outputs(engine: Engine) -> None:
    """Iterating runs the engine; each output extends the one before."""
    wanted = prompts(3, seed=15)
    handles = [engine.add(prompt, GREEDY) for prompt in wanted]
    seen = [output.outputs[0] for output in handles[1]]
    assert list(range(1, 11)) == [len(each.token_ids) for each in seen][:10]
    for before, after in itertools.pairwise(seen):
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
    assert seen[-1].is_finished
    assert not any(each.is_finished for each in seen[:-1])
    for prompt, handle in zip(wanted, handles, strict=True):
        assert reference("llama", prompt) == list(list(handle)[-1].outputs[0].token_ids)


def test_outputs_have_a_logprob_for_each_token(engine: Engine) -> None:
    """Also if another thread reads them while the engine appends a token."""
    handle = engine.add([5, 6], SamplingParams(temperature=0, max_tokens=4, logprobs=1))
    seen = []

    class Watched(list):
        def append(self, value: object) -> None:
            super().append(value)
            seen.append(handle.output().outputs[0])

    request = handle.requests[0]
    request.output_token_ids, request.logprobs = Watched(), Watched()
    finish_all(engine)
    assert 8 == len(seen)
    assert all(len(each.token_ids) == len(each.logprobs or ()) for each in seen)


def word_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {f"w{at}": at for at in range(VOCABULARY)}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@RUNNERS
def test_bad_words_are_not_generated(make_engine: MakeEngine, runner: dict[str, Any]) -> None:
    """Of several tokens, the last one is banned where the others were just generated."""
    engine = make_engine(tokenizer=word_tokenizer(), **runner)
    prompt = prompts(1, seed=16)[0]
    said = reference("llama", prompt)
    # The last token of the prompt and the first of the answer are no bad word.
    words = [f"w{prompt[-1]} w{said[0]}", f"w{said[1]} w{said[2]}"]
    params = dataclasses.replace(GREEDY, bad_words=words)
    other, [answer] = prompts(1, seed=17)[0], tokens(engine, [prompt], params)
    assert said[:2] == answer[:2]
    assert (said[1], said[2]) not in itertools.pairwise(answer)
    one = dataclasses.replace(GREEDY, bad_words=[f"w{said[0]}"])
    [answer, beside] = tokens(engine, [prompt, other], [one, GREEDY])
    assert said[0] not in answer
    assert reference("llama", other) == beside
    given = dataclasses.replace(GREEDY, bad_words=[[said[0]]], n=2)
    [output] = engine.generate([prompt], given)
    assert [answer, answer] == [list(each.token_ids) for each in output.outputs]


@RUNNERS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_without_a_possible_token_ends_with_an_error(
    make_engine: MakeEngine, runner: dict[str, Any], temperature: float
) -> None:
    """And with the tokens that were allowed; the requests beside it go on."""
    engine = make_engine(tokenizer=tiny_tokenizer(), **runner)
    only = {"allowed_token_ids": [7, 9], "temperature": temperature, "seed": 1, "logprobs": 2}
    params = [
        SamplingParams(**only, bad_words=[[a, b] for a in (7, 9) for b in (7, 9)]),
        SamplingParams(**only, logits_processors=[lambda _, scores: scores - torch.inf]),
        SamplingParams(logits_processors=[lambda _, scores: scores - torch.inf], seed=1),
        SamplingParams(**only, structured_outputs=StructuredOutputs(choice=["w3"])),
    ]
    [prompt] = prompts(1, seed=16)
    *failed, beside = engine.generate([prompt] * 5, [*params, GREEDY])
    assert reference("llama", prompt) == list(beside.outputs[0].token_ids)
    for output, num_tokens in zip(failed, (1, 0, 0, 0), strict=True):
        assert FinishReason.ERROR is output.outputs[0].finish_reason
        with pytest.raises(ConfigError, match="no token may come next"):
            raise output.error
        assert num_tokens == len(output.outputs[0].token_ids)
        assert set(output.outputs[0].token_ids) <= {7, 9}


def test_text_prompts_outputs_and_stop_texts(make_engine: MakeEngine) -> None:
    engine = make_engine(tokenizer=word_tokenizer())
    prompt = prompts(1, seed=16)[0]
    said = reference("llama", prompt)
    text = " ".join(f"w{each}" for each in prompt)
    [output] = engine.generate(text, GREEDY)
    assert text == output.prompt
    assert " ".join(f"w{each}" for each in said) == output.outputs[0].text.strip()
    stop = f"w{said[4]} "
    end = said.index(said[4])
    params = SamplingParams(temperature=0, max_tokens=10, stop=stop)
    [output] = engine.generate(text, params)
    assert " ".join(f"w{each}" for each in said[:end]) == output.outputs[0].text.strip()
    assert (FinishReason.STOP, stop) == (
        output.outputs[0].finish_reason,
        output.outputs[0].stop_reason,
    )


def test_prompts_may_be_tensors(engine: Engine) -> None:
    """One dimension is one prompt, two are several prompts."""
    prompt = prompts(1, seed=5)[0]
    wanted = reference("llama", prompt)
    for given in (torch.tensor(prompt), torch.tensor([prompt] * 2), [torch.tensor(prompt)]):
        assert all(wanted == each for each in tokens(engine, given, GREEDY))


def test_max_tokens_follows_the_budget(make_engine: MakeEngine) -> None:
    """The budget may change while an engine serves."""
    engine = make_engine()
    pool, prompt = engine.cache.pool, prompts(1, longest=8, seed=17)[0]
    whole_bytes, longest = pool.stats().budget_bytes, engine.max_tokens
    asked = SamplingParams(temperature=0, max_tokens=None)
    for budget_bytes in (smallest_budget(make_engine, "llama", 50) * 4 * KiB, whole_bytes):
        pool.set_budget(budget_bytes)
        [output] = engine.generate([prompt], asked)
        said = output.outputs[0].token_ids
        assert engine.max_tokens == len(prompt) + len(said)
        assert FinishReason.LENGTH is output.outputs[0].finish_reason
        assert reference("llama", prompt, len(said)) == list(said)
        assert (engine.max_tokens == longest) == (budget_bytes == whole_bytes)


@RUNNERS
def test_the_longest_request_fits_beside_padding(
    make_engine: MakeEngine, runner: dict[str, Any]
) -> None:
    its = PADDED if "runner_options" in runner else runner
    engine = make_engine(budget_bytes=32 * KiB, max_tokens=400, **its)
    prompt = [5] * (engine.max_tokens - 2)
    [output] = engine.generate([prompt], SamplingParams(max_tokens=9, ignore_eos=True))
    [sample] = output.outputs
    assert (2, FinishReason.LENGTH) == (len(sample.token_ids), sample.finish_reason)


def test_invalid_requests_are_refused(make_engine: MakeEngine) -> None:
    """Later requests are served."""
    engine = make_engine(max_tokens=32)
    for prompt, params, message in (
        ([], GREEDY, "empty"),
        ([1, VOCABULARY], GREEDY, "no token of a vocabulary"),
        ([1, -1], GREEDY, "no token of a vocabulary"),
        ([1, 2.5], GREEDY, "no token"),
        (7, GREEDY, "must be text or token ids"),
        ("text", GREEDY, "tokenizer"),
        ([1] * 32, GREEDY, "no room for an answer"),
        ([1], SamplingParams(stop="a"), "tokenizer"),
        ([1], SamplingParams(bad_words=["a"]), "bad_words need a tokenizer"),
        ([1], SamplingParams(stop_token_ids=[VOCABULARY]), "not in a vocabulary"),
        ([1], SamplingParams(logit_bias={VOCABULARY: 1}), "logit_bias .* not in a vocabulary"),
        ([1], SamplingParams(allowed_token_ids=[VOCABULARY]), "allowed_token_ids .* not in a"),
        ([1], SamplingParams(bad_words=[[1, VOCABULARY]]), "bad_words .* not in a vocabulary"),
        ([1] * 30, SamplingParams(min_tokens=9), "min_tokens"),
        ([1], SamplingParams(allowed_token_ids=[7, 9], bad_words=[[7], [9]]), "bad_words"),
        ([1], SamplingParams(bad_words=[[each] for each in range(VOCABULARY)]), "bad_words"),
        ([1], SamplingParams(allowed_token_ids=[7], min_tokens=2, stop_token_ids=[7]), "allowed"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.add(prompt, params)
    for priority in (1 << 63, 0.5, float("nan"), "low", None):
        with pytest.raises(ConfigError, match="must be an integer of 64 bits"):
            engine.add([1], GREEDY, priority)
    with pytest.raises(ConfigError, match="2 sampling parameters for 1"):
        engine.generate([[1]], [GREEDY, GREEDY])
    assert not engine.has_unfinished
    lowest = engine.add([1, 2], GREEDY, (1 << 63) - 1)  # Runs, where no other request is.
    finish_all(engine)
    assert 10 == len(lowest.output().outputs[0].token_ids)


def test_a_request_that_never_fits_is_refused(make_engine: MakeEngine) -> None:
    """The budget is too small for it, not the row."""
    pages = smallest_budget(make_engine, "llama", 50)
    engine = make_engine(budget_bytes=pages * 4 * KiB)
    assert 50 <= engine.max_tokens < 128
    with pytest.raises(ConfigError, match="budget"):
        engine.add([1] * engine.max_tokens, GREEDY)


@pytest.mark.parametrize("name", ["t5", *({"gemma3n", "llama4"} - {*SERVED_LATELY})])
def test_models_that_cannot_be_served_are_refused(make_engine: MakeEngine, name: str) -> None:
    """Nothing is left allocated."""
    with pytest.raises(ConfigError):
        make_engine(name)


def test_invalid_engines_are_refused(make_engine: MakeEngine) -> None:
    """Invalid options, a model in training mode, and a closed engine."""
    with pytest.raises(ConfigError, match="max_num_seqs=9"):
        make_engine(max_num_seqs=9, max_num_batched_tokens=8)
    with pytest.raises(ConfigError, match="runner"):
        make_engine(runner="fast")
    with pytest.raises(ConfigError, match="eval"):
        make_engine(copy.deepcopy(tiny_model("llama")).train())
    engine = make_engine()
    engine.close()
    engine.close()
    with pytest.raises(ClosedError):
        engine.add([1], GREEDY)


def test_a_refused_engine_leaves_the_model_unchanged(make_engine: MakeEngine) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    before = model.config._attn_implementation
    with pytest.raises(ConfigError, match="budget"):
        make_engine(model, budget_bytes=4 * KiB)
    assert before == model.config._attn_implementation


def test_a_folder_is_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    """Text in, text out, as from the model itself; an error names what cannot be loaded."""
    folder, texts, model = save_tiny_model(tmp_path / "model"), ["A row of", "Two"], tiny_llama()
    wanted = []
    for text in texts:
        ids = tiny_tokenizer()(text, return_tensors="pt").input_ids
        said = model.generate(ids, max_new_tokens=10, do_sample=False)[0, ids.shape[1] :]
        wanted.append(tiny_tokenizer().decode(said, skip_special_tokens=True))
    with Engine(folder, budget_bytes=1024 * KiB) as engine:
        assert wanted == [each.text for each in engine.generate(texts, GREEDY)]
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match=rf"no tokenizer for {folder}: .*; pass tokenizer="):
        Engine(str(folder))
