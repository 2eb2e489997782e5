"""The prompt in `vmkv.generate` is each sequence's own tokens, without padding.

The reference is `model.generate` with one prompt at a time, without padding. Prompts differ in
length, and the padding token is the end-of-sequence token, as in models without a padding token,
so code that takes padding for generated tokens fails.

Not covered: processors and criteria that do not read prompts (`test_ragged_generate.py`).
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from helpers.ragged import alone, random_prompts
from helpers.tiny_models import VOCABULARY, tiny_model
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    NoRepeatNGramLogitsProcessor,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

import vmkv
from vmkv import ConfigError, ExtentPool, RaggedCache
from vmkv.hf import sampling
from vmkv.units import MiB

NEW_TOKENS = 12


PROMPTS = random_prompts(5, 23, 2, 23)


@pytest.fixture
def model() -> Any:
    """A model whose generation config the test may change."""
    model = tiny_model("llama")
    before = model.generation_config
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    yield model
    model.generation_config = before


WHERE = pytest.mark.parametrize("where", ["option", "generation_config", "model"])


def _given(where: str, model: Any, **settings: Any) -> dict[str, Any]:
    """Options of a call that has these settings as options, in a generation config, or nowhere."""
    if where == "option":
        return settings
    if where == "generation_config":
        return {"generation_config": GenerationConfig(do_sample=False, pad_token_id=0, **settings)}
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return {}


def _assert_as_alone(model: Any, **options: Any) -> list[list[int]]:
    expected = [alone(model, prompt, **options) for prompt in PROMPTS]
    assert expected == vmkv.generate(model, PROMPTS, **options)
    return expected


@functools.cache
def _plain() -> list[list[int]]:
    model = tiny_model("llama")
    return [alone(model, prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]


def _ends() -> list[int]:
    """The first generated token of each prompt."""
    return sorted({tokens[len(prompt)] for tokens, prompt in zip(_plain(), PROMPTS, strict=True)})


# ---- lengths ------------------------------------------------------------------------------------


@WHERE
@pytest.mark.parametrize(
    "limits",
    [
        {"max_length": 30},
        {"max_length": 30, "forced_eos_token_id": 9},
        {"max_new_tokens": NEW_TOKENS, "forced_eos_token_id": 9},
        {"max_new_tokens": NEW_TOKENS, "min_length": 10, "eos_token_id": "often"},
        {"max_new_tokens": NEW_TOKENS, "min_new_tokens": 4, "eos_token_id": "often"},
        {},
    ],
    ids=lambda limits: "+".join(limits) or "nothing",
)
def test_lengths_count_each_prompts_own_tokens(
    limits: dict[str, Any], where: str, model: Any
) -> None:
    """Limits may come as options, in a generation config, from the model, or by default."""
    if "eos_token_id" in limits:
        limits = {**limits, "eos_token_id": _ends()}
    said = _assert_as_alone(model, **_given(where, model, **limits))
    if "max_length" in limits:
        assert [30] * 4 == [len(tokens) for tokens in said]
    if "forced_eos_token_id" in limits:
        assert [9] * 4 == [tokens[-1] for tokens in said]
    if "min_length" in limits:
        assert min(map(len, said)) >= 10


def test_a_length_criterion_of_the_callers_counts_own_tokens(model: Any) -> None:
    """It replaces the limit of `max_new_tokens`."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(26)])
    said = _assert_as_alone(model, stopping_criteria=criteria, max_new_tokens=40)
    assert [26] * 4 == [len(tokens) for tokens in said]


@WHERE
def test_a_prompt_that_is_too_long_already_is_refused(where: str, model: Any) -> None:
    """The error is transformers'."""
    with pytest.raises(ConfigError, match=r"23.*max_length.*19"):
        vmkv.generate(model, PROMPTS, **_given(where, model, max_length=19))


# ---- logits processors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"no_repeat_ngram_size": 1},
        {"encoder_no_repeat_ngram_size": 1},
        {"encoder_repetition_penalty": 3.0},
        {"repetition_penalty": 3.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_padding_does_not_count_as_generated_tokens(options: dict[str, Any], model: Any) -> None:
    """Padding is the end-of-sequence token; short prompts still end when they would alone."""
    model.generation_config.pad_token_id = None
    options = {**options, "max_new_tokens": NEW_TOKENS}
    said = [alone(model, prompt, **options) for prompt in PROMPTS]
    new = said[2][2:]
    model.generation_config.eos_token_id = next(
        token for at, token in enumerate(new) if at > 2 and token not in {*PROMPTS[2], *new[:at]}
    )
    ended = _assert_as_alone(model, **options)
    assert len(ended[2]) < len(said[2]), "nothing ended: the test proves nothing"


@pytest.mark.parametrize(
    "options",
    [
        {"sequence_bias": [[[5], 6.0], [[5, 9], 9.0]]},
        {"begin_suppress_tokens": list(range(50))},
        {"exponential_decay_length_penalty": (2, 1.6), "eos_token_id": [7]},
        {"guidance_scale": 2.0},
        {
            "guidance_scale": 2.0,
            "negative_prompt_ids": torch.tensor([[5, 6], [7, 8], [9, 4], [3, 3]]),
        },
        {"guidance_scale": 2.0, "negative_prompt_ids": torch.tensor([[5, 6]])},
        {"watermarking_config": WatermarkingConfig(bias=4.0, context_width=1)},
    ],
    ids=lambda options: "+".join(options),
)
def test_logits_processors_get_each_prompt_alone(options: dict[str, Any], model: Any) -> None:
    """Each setting changes the tokens of some prompt, to its tokens without the other prompts."""
    options = {**options, "max_new_tokens": NEW_TOKENS}
    expected = []
    for row, prompt in enumerate(PROMPTS):
        own = dict(options)
        if len(own.get("negative_prompt_ids", ())) > 1:
            own["negative_prompt_ids"] = own["negative_prompt_ids"][row : row + 1]
        expected.append(alone(model, prompt, **own))
    assert expected != _plain(), "the setting does nothing: the test proves nothing"
    assert expected == vmkv.generate(model, PROMPTS, **options)


def test_a_processor_with_state_per_row_keeps_the_prompts_apart(model: Any) -> None:
    """SynthID remembers contexts by row."""
    config = SynthIDTextWatermarkingConfig(keys=[3, 5, 7, 11], ngram_len=3, context_history_size=8)
    _assert_as_alone(model, watermarking_config=config, max_new_tokens=NEW_TOKENS)


def test_allowed_tokens_are_asked_for_by_prompt(model: Any) -> None:
    """`prefix_allowed_tokens_fn` gets the prompt's index and the prompt's own tokens."""
    asked: set[tuple[int, tuple[int, ...]]] = set()

    def allowed(at: int, said: torch.Tensor) -> list[int]:
        tokens = said.tolist()
        assert tokens[: len(PROMPTS[at])] == PROMPTS[at]
        asked.add((at, tuple(tokens)))
        return [10 + 2 * at, 11 + 2 * at]

    said = vmkv.generate(
        model, PROMPTS, max_new_tokens=3, do_sample=False, prefix_allowed_tokens_fn=allowed
    )
    for at, (tokens, prompt) in enumerate(zip(said, PROMPTS, strict=True)):
        assert set(tokens[len(prompt) :]) <= {10 + 2 * at, 11 + 2 * at}
        assert {(at, tuple(tokens[: len(prompt) + count])) for count in range(3)} <= asked


def test_a_processor_of_transformers_from_the_caller_gets_each_prompt_alone(model: Any) -> None:
    processors = LogitsProcessorList([NoRepeatNGramLogitsProcessor(1)])
    expected = [
        alone(model, prompt, max_new_tokens=NEW_TOKENS, no_repeat_ngram_size=1)
        for prompt in PROMPTS
    ]
    assert expected == vmkv.generate(
        model, PROMPTS, max_new_tokens=NEW_TOKENS, logits_processor=processors
    )


class _CountsRows(LogitsProcessor):
    """Processor with state: biases each row of the batch by the number of its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.shape == (len(PROMPTS), 23 + self.num_calls)
        self.num_calls += 1
        wanted = torch.arange(len(PROMPTS)) + 30 + self.num_calls
        return scores.scatter(1, wanted[:, None], 1e9)


def test_a_custom_processor_is_called_once_with_all_rows(model: Any) -> None:
    """Between processors of transformers, which get each prompt alone."""
    options = {"no_repeat_ngram_size": 1, "begin_suppress_tokens": [5], "do_sample": False}
    said = vmkv.generate(
        model,
        PROMPTS,
        max_new_tokens=3,
        logits_processor=LogitsProcessorList([_CountsRows()]),
        **options,
    )
    new = [tokens[len(prompt) :] for tokens, prompt in zip(said, PROMPTS, strict=True)]
    assert [[31 + at, 32 + at, 33 + at] for at in range(4)] == new


# ---- stop strings -------------------------------------------------------------------------------


@functools.cache
def _tokenizer() -> Any:
    """A tokenizer whose tokens are pairs of letters; the first token, `a`, is padding."""
    letters = "abcdefghij"
    words = {
        "a": 0,
        **{
            f"{first}{second}": 10 * at + to
            for at, first in enumerate(letters)
            for to, second in enumerate(letters)
            if at or to
        },
    }
    inner = Tokenizer(
        models.BPE(words | {letter: 100 + at for at, letter in enumerate("bcdefghij")}, [])
    )
    inner.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="a")


@WHERE
def test_stop_strings_end_each_prompt_where_they_would(where: str, model: Any) -> None:
    """As option, in a generation config, or from the model."""
    token = _plain()[1][25]
    stop = _tokenizer().convert_ids_to_tokens(token)
    options = _given(where, model, stop_strings=[stop], max_new_tokens=NEW_TOKENS)
    said = _assert_as_alone(model, tokenizer=_tokenizer(), **options)
    assert len(said[1]) < len(_plain()[1]), "nothing ended: the test proves nothing"


def test_padding_is_no_part_of_a_stop_string(model: Any) -> None:
    """The padding before the prompts would be the beginning of the stop string."""
    prompts = [[15], [16] * 9]  # "bf", "bg"
    first = alone(model, prompts[0], max_new_tokens=1)[1]
    stop = "abf" + _tokenizer().convert_ids_to_tokens(first)
    options = {"stop_strings": [stop], "tokenizer": _tokenizer(), "max_new_tokens": 4}
    expected = [alone(model, prompt, **options) for prompt in prompts]
    assert [5, 13] == [len(tokens) for tokens in expected]
    assert expected == vmkv.generate(model, prompts, **options)


def test_stop_strings_without_a_tokenizer_are_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="tokenizer="):
        vmkv.generate(model, PROMPTS, stop_strings=["x"], max_new_tokens=2)


# ---- cost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "num_prepared"),
    [
        ({"max_new_tokens": 2}, 1),
        ({"max_new_tokens": 2, "do_sample": True, "top_p": 0.9}, 1),
        ({"max_new_tokens": 2, "no_repeat_ngram_size": 3}, 3),
        ({"max_length": 30}, 3),
    ],
    ids=["nothing", "warpers", "n-grams", "max_length"],
)
def test_processors_that_do_not_depend_on_the_prompt_are_prepared_once(
    options: dict[str, Any], num_prepared: int, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are prepared once for each of the three lengths of prompts."""
    calls = []
    prepare = sampling._prepare
    monkeypatch.setattr(
        sampling,
        "_prepare",
        lambda *arguments, **keywords: calls.append(0) or prepare(*arguments, **keywords),
    )
    vmkv.generate(model, PROMPTS, **options)
    assert num_prepared == len(calls)


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_scores": True}, "tokens only; leave output_scores out"),
        ({"output_logits": True}, "tokens only; leave output_logits out"),
        ({"output_attentions": True}, "tokens only; leave output_attentions out"),
        ({"output_hidden_states": True}, "tokens only; leave output_hidden_states out"),
        ({"return_dict_in_generate": True}, "tokens only; leave return_dict_in_generate out"),
        ({"prompt_lookup_num_tokens": 3}, "VMKVCache"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search"),
        ({"dola_layers": "high"}, "dola_generation"),
        ({"assistant_early_exit": 1}, "assisted_generation"),
        ({"token_healing": True, "tokenizer": "a tokenizer"}, "token_healing"),
        ({"assistant_model": "a model"}, "assistant model"),
        ({"past_key_values": "a cache"}, "past_key_values"),
        ({"attention_mask": torch.ones(4, 23)}, "attention_mask"),
        ({"position_ids": torch.zeros(4, 23)}, "position_ids"),
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "inputs_embeds"),
        ({"labels": torch.zeros(4, 23)}, "token ids alone, not labels"),
        ({"no_such_option": 3}, "no_such_option"),
        ({"temperature": -1.0, "do_sample": True}, "temperature"),
        ({"num_beams": 2}, "num_beams must be 1"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences must be 1"),
        ({"attention_backend": "nonesuch"}, "nonesuch"),
        ({"attention_backend": "flash2"}, "'sdpa' would serve it"),
        ({"pool": True, "budget_bytes": MiB}, "budget"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_num_batched_tokens": -3}, "max_num_batched_tokens"),
        ({"cache": True, "budget_bytes": MiB}, "a cache has its own pool"),
        ({"cache": True, "attention_backend": "sdpa"}, "a cache has its own pool"),
        ({"cache": True, "tenant": 5}, "tenant=5 must be a string"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_options_are_refused(
    options: dict[str, Any], message: str, model: Any, pool: ExtentPool
) -> None:
    """The error names the option; no memory is taken, and the model keeps its attention."""
    its = {"pool": pool, "cache": RaggedCache(model.config, pool=pool)}
    options = options | {name: its[name] for name in its.keys() & options.keys()}
    before = model.config._attn_implementation
    with pytest.raises(ConfigError, match=message):
        vmkv.generate(model, PROMPTS, max_new_tokens=2, **options)
    assert before == model.config._attn_implementation
    its["cache"].close()


@pytest.mark.parametrize("token", [VOCABULARY, 5000, -1, 2**70])
def test_a_token_that_is_not_in_the_vocabulary_is_refused(token: int, model: Any) -> None:
    """Before the model runs: on a GPU it would end the process."""
    message = f"prompt 1 holds {token}, which is no token of a vocabulary of {VOCABULARY}"
    with pytest.raises(ConfigError, match=message):
        vmkv.generate(model, [[5], [6, token]], max_new_tokens=2)
    if token < 2**63:
        ids = torch.tensor([[5, 6], [7, token]])
        with pytest.raises(ConfigError, match=f"{token}, which is no token"):
            model.generate(ids, max_new_tokens=2, custom_generate=vmkv.ragged_generate)


def test_padding_need_not_be_in_the_vocabulary(model: Any) -> None:
    """The model never gets it."""
    ids = torch.tensor([[VOCABULARY, VOCABULARY, 6], [5, 6, 7]])
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    options = {"max_new_tokens": 4, "pad_token_id": VOCABULARY}
    said = model.generate(ids, attention_mask=mask, custom_generate=vmkv.ragged_generate, **options)
    assert alone(model, [6], max_new_tokens=4) == said[0, 2:].tolist()
