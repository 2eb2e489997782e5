"""`vmkv.generate` of many prompts gives each the tokens of `model.generate` alone.

The reference is `model.generate` of the same eager model, one prompt at a time, on a
`DynamicCache`. All memory comes from one pool of host pages, whose books are checked when each
test ends: all memory must be free, also after errors.

Not covered: GPU kernels (`tests/attention`), speed (`bench/`).
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload
from helpers.ragged import FAMILIES, Collects, alone, random_prompts
from helpers.tiny_models import left_padded_prompt, tiny_config, tiny_model
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

import vmkv
from vmkv import BackendUsage, ConfigError, ExtentPool, HostBackend, OutOfPagesError
from vmkv.hf import generation
from vmkv.units import KiB

NEW_TOKENS = 12


PROMPTS = random_prompts(13, 1, 30, 4, 9)  # Some shorter, some longer than the window of 8.


_alone = functools.partial(alone, max_new_tokens=NEW_TOKENS, do_sample=False)


@functools.cache
def _expected(name: str) -> list[list[int]]:
    return [_alone(tiny_model(name), prompt) for prompt in PROMPTS]


def _generate(model: Any, prompts: Any, pool: ExtentPool, **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    return vmkv.generate(model, prompts, pool=pool, **options)


# ---- equal tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("max_num_batched_tokens", [8192, 7, 1])
@pytest.mark.parametrize("name", FAMILIES)
def test_many_prompts_give_what_each_gives_alone(
    name: str, max_num_batched_tokens: int, pool: ExtentPool
) -> None:
    """Prompts of 1 to 30 tokens, prefilled whole or in chunks."""
    model = tiny_model(name)
    actual = _generate(model, PROMPTS, pool, max_num_batched_tokens=max_num_batched_tokens)
    assert _expected(name) == actual
    assert model.config._attn_implementation == "eager"


def test_prompts_may_be_tensors(pool: ExtentPool) -> None:
    """Prompts as one-dimensional tensors, or as the rows of one tensor."""
    model = tiny_model("llama")
    as_tensors = [torch.tensor(prompt) for prompt in PROMPTS]
    assert _expected("llama") == _generate(model, as_tensors, pool)
    pair = torch.tensor(random_prompts(6, 6, seed=3))
    assert [_alone(model, row) for row in pair.tolist()] == _generate(model, pair, pool)


@pytest.mark.parametrize("form", ["tensor", "lists", "mask"])
def test_a_padded_batch_is_read_as_by_transformers(form: str, pool: ExtentPool) -> None:
    """Padding on the left is hidden, but lengths and processors count it; other is refused."""
    model = tiny_model("llama")
    pad = model.generation_config.pad_token_id
    padded = torch.tensor(random_prompts(11, 11, 11, seed=3)).clamp(min=5)
    padded[1, :4] = padded[2, :9] = pad
    options = {"max_length": 20, "repetition_penalty": 1.3, "max_new_tokens": None}
    expected = [model.generate(row[None], do_sample=False, **options)[0].tolist() for row in padded]
    if form == "mask":
        options["attention_mask"] = (padded != pad).long()
        padded[padded == pad] = 7
        options["repetition_penalty"] = 1.0
        expected = model.generate(padded, do_sample=False, **options).tolist()
    prompts = padded.tolist() if form == "lists" else padded
    assert expected == _generate(model, prompts, pool, **options)
    flipped, options = padded.flip(1), dict(options)
    if form == "mask":
        options["attention_mask"] = options["attention_mask"].flip(1)
    prompts = flipped.tolist() if form == "lists" else flipped
    _assert_refused(model, "padded on the left", lambda: _generate(model, prompts, pool, **options))


def test_a_model_with_vmkv_attention_keeps_it(pool: ExtentPool) -> None:
    model = tiny_model("llama", "vmkv")
    assert _expected("llama") == _generate(model, PROMPTS, pool)
    assert model.config._attn_implementation == "vmkv"


# ---- rows that end early ------------------------------------------------------------------------


class _Watched(generation.RaggedCache):
    """A ragged cache that records its statistics around each end and the slots of each step."""

    made: list[_Watched]

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config, **options)
        self.steps: list[tuple[int, ...]] = []
        self.ends: list[tuple[int, Any, Any]] = []
        type(self).made.append(self)

    def run(self, stepper: Any, pieces: Any) -> Any:
        step = super().run(stepper, pieces)
        self.steps.append(tuple(piece.slot for piece in pieces))
        self.check()
        return step

    def end(self, sequence_id: int) -> None:
        before = self.stats()
        super().end(sequence_id)
        self.ends.append((sequence_id, before, self.stats()))
        self.check()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[_Watched]:
    """Caches that generation makes from now on."""
    _Watched.made = []
    monkeypatch.setattr(generation, "RaggedCache", _Watched)
    return _Watched.made


@functools.cache
def _ends_early(name: str) -> tuple[list[int], list[int]]:
    """End-of-sequence tokens that end prompts at different times, and the new lengths."""
    continuations = [
        tokens[len(prompt) :] for tokens, prompt in zip(_expected(name), PROMPTS, strict=True)
    ]
    ends = [continuations[0][2], continuations[2][6]]

    def stop(tokens: list[int]) -> int:
        return next((at + 1 for at, each in enumerate(tokens) if each in ends), NEW_TOKENS)

    return ends, [stop(tokens) for tokens in continuations]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_a_row_is_free_as_soon_as_its_sequence_ends(
    name: str, pool: ExtentPool, watched: list[_Watched]
) -> None:
    """Finished sequences leave the batch at once and their rows are parked; the others continue."""
    model = tiny_model(name)
    ends, lengths = _ends_early(name)
    assert len(set(lengths)) >= 3, "all ended together: the test proves nothing"
    actual = _generate(model, PROMPTS, pool, eos_token_id=ends)
    assert [_alone(model, prompt, eos_token_id=ends) for prompt in PROMPTS] == actual
    assert lengths == [len(a) - len(prompt) for a, prompt in zip(actual, PROMPTS, strict=True)]

    (cache,) = watched
    # The prefill, then one step for every token of a sequence but its last.
    assert [length - 1 for length in lengths] == [
        sum(row in step for step in cache.steps[1:]) for row in range(len(PROMPTS))
    ]
    assert sorted(row for row, _, _ in cache.ends) == list(range(len(PROMPTS)))
    for _, before, after in cache.ends:
        assert after.num_sequences == before.num_sequences - 1
        assert after.parked_bytes > before.parked_bytes
        assert after.used_bytes < before.used_bytes
        assert after.resident_bytes == before.resident_bytes
    assert cache.ends[-1][2].num_sequences == cache.ends[-1][2].used_bytes == 0


def test_only_real_tokens_are_resident(pool: ExtentPool, watched: list[_Watched]) -> None:
    """Short prompts beside a long one need no pages for padding."""
    model = tiny_model("llama")
    prompts = [*random_prompts(300), *([[5]] * 7)]
    _generate(model, prompts, pool, max_new_tokens=2)
    (cache,) = watched
    most = max(before.resident_bytes for _, before, _ in cache.ends)
    token_bytes = 2 * 2 * 8 * 4 * model.config.num_hidden_layers
    # Slack: a page of 32 tokens per row and layer, and growth by powers of two.
    assert most <= token_bytes * (2 * 300 + 8 * 64)
    assert most < token_bytes * 8 * 300 // 2


# ---- inside model.generate ----------------------------------------------------------------------


# Llama 4 counts padding among the positions that it scales queries by.
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "llama4"])
@pytest.mark.parametrize("is_padded", [True, False])
def test_custom_generate_matches_padded_generate(name: str, is_padded: bool) -> None:
    """The returned tensor is padded as by `model.generate`."""
    model = tiny_model(name)
    inputs = left_padded_prompt()
    if not is_padded:
        del inputs["attention_mask"]
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = model.generate(**inputs, **options)
    actual = model.generate(**inputs, **options, custom_generate=vmkv.ragged_generate)
    assert torch.equal(expected, actual)


def test_custom_generate_pads_where_sequences_end_early() -> None:
    """With the padding token, as transformers does."""
    model, inputs = tiny_model("llama"), left_padded_prompt()
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    plain = model.generate(**inputs, **options)
    options |= {"eos_token_id": [int(plain[0, 15]), int(plain[1, 19])], "pad_token_id": 2}
    expected = model.generate(**inputs, **options)
    assert (expected[:, 13:] == 2).any(), "nothing ended early: the test proves nothing"
    actual = model.generate(**inputs, **options, custom_generate=vmkv.ragged_generate)
    assert torch.equal(expected, actual)


# ---- processors, criteria and configurations ----------------------------------------------------


class _Forbids(LogitsProcessor):
    """Forbids one token, and records the numbers of rows."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.shapes: set[tuple[int, int]] = set()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.shapes.add((input_ids.shape[0], scores.shape[0]))
        scores = scores.clone()
        scores[:, self.token] = -torch.inf
        return scores


def test_a_custom_logits_processor_gets_the_whole_batch(pool: ExtentPool) -> None:
    """With ended rows, because a processor may keep state per row."""
    model = tiny_model("llama")
    ends, _ = _ends_early("llama")
    forbids = _Forbids(_expected("llama")[0][len(PROMPTS[0])])
    options = {"logits_processor": LogitsProcessorList([forbids]), "eos_token_id": ends}
    actual = _generate(model, PROMPTS, pool, **options)
    assert {(len(PROMPTS), len(PROMPTS))} == forbids.shapes
    assert [_alone(model, prompt, **options) for prompt in PROMPTS] == actual
    assert actual[0] != _expected("llama")[0]


def test_keywords_override_a_generation_config(pool: ExtentPool) -> None:
    config = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    options = {"pool": pool, "generation_config": config, "max_new_tokens": 2}
    assert [_expected("llama")[0][:15]] == vmkv.generate(
        tiny_model("llama"), PROMPTS[:1], **options
    )


class _StopsAfter(StoppingCriteria):
    """Ends row `i` after `counts[i]` new tokens."""

    def __init__(self, width: int, counts: list[int]) -> None:
        self.width, self.counts = width, torch.tensor(counts)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] - self.width >= self.counts


def test_stopping_criteria_end_each_row_on_its_own(
    pool: ExtentPool, watched: list[_Watched]
) -> None:
    """At different times, or all at once."""
    model = tiny_model("llama")
    for counts in ([3, 1, 7, 12, 2], [4] * 5):
        criteria = StoppingCriteriaList([_StopsAfter(max(map(len, PROMPTS)), counts)])
        actual = _generate(model, PROMPTS, pool, stopping_criteria=criteria)
        assert actual == [
            tokens[: len(prompt) + count]
            for tokens, prompt, count in zip(_expected("llama"), PROMPTS, counts, strict=True)
        ]
        assert len(watched[-1].steps) == max(counts)


# ---- sampling -----------------------------------------------------------------------------------


def test_sampled_tokens_follow_the_models_distribution(pool: ExtentPool) -> None:
    """Frequencies over 1,000 rows of one prompt are within four deviations of softmax."""
    model, count = tiny_model("llama"), 1000
    torch.manual_seed(0)
    drawn = _generate(
        model,
        PROMPTS[1:2] * count,
        pool,
        do_sample=True,
        top_k=4,
        temperature=0.5,
        max_new_tokens=1,
    )
    with torch.no_grad():
        logits = model(torch.tensor(PROMPTS[1:2]), use_cache=False).logits[0, -1]
    likeliest = (logits / 0.5).topk(4)
    seen = Counter(tokens[-1] for tokens in drawn)
    for token, p in zip(likeliest.indices.tolist(), likeliest.values.softmax(0), strict=True):
        deviation = float((p * (1 - p) * count).sqrt())
        assert abs(seen.pop(token, 0) - float(p) * count) <= 4 * deviation
    assert not seen


# ---- streaming ----------------------------------------------------------------------------------


def test_a_streamer_gets_the_same_calls_as_from_transformers(pool: ExtentPool) -> None:
    """The prompt first, which `skip_prompt` needs."""
    model = tiny_model("llama")
    theirs, ours = Collects(), Collects()
    _alone(model, PROMPTS[0], streamer=theirs)
    _generate(model, PROMPTS[:1], pool, streamer=ours)
    assert (theirs.got, theirs.num_ends) == (ours.got, ours.num_ends)


# ---- refusals -----------------------------------------------------------------------------------


def _assert_refused(model: Any, message: str, call: Callable[[], Any]) -> None:
    before = model.config._attn_implementation
    with pytest.raises(ConfigError, match=message):
        call()
    assert before == model.config._attn_implementation


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompts"),
        ([[5], []], "prompt 1 is empty"),
        ([torch.tensor([], dtype=torch.long)], "prompt 0 is empty"),
        ([[5], [5.0]], "prompt 1"),
        ([torch.tensor([5.0])], "prompt 0"),
        (["text"], "prompt 0"),
        ([[[5, 6]]], "prompt 0"),
        ([[None]], "prompt 0"),
        ([5, 6, 7], "prompt 0"),
        ([torch.tensor(5)], "prompt 0"),
    ],
)
def test_empty_and_malformed_prompts_are_refused(
    prompts: Any, message: str, pool: ExtentPool
) -> None:
    """Each prompt must have at least one token id; one alone is a list, too."""
    model = tiny_model("llama")
    _assert_refused(model, message, lambda: _generate(model, prompts, pool))


def test_offloaded_weights_are_refused() -> None:
    """A VMKVCache serves such a model, also inside `capture_decoding`, which steps aside."""
    model = copy.deepcopy(tiny_model("llama"))
    prompt = torch.tensor(PROMPTS[:1])
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False)
    cpu_offload(model, execution_device=torch.device("cpu"))
    options = {"max_new_tokens": 4, "do_sample": False}
    ragged = {**options, "custom_generate": vmkv.ragged_generate}
    _assert_refused(model, "has offloaded", lambda: vmkv.generate(model, prompt, **options))
    _assert_refused(model, "has offloaded", lambda: model.generate(prompt, **ragged))
    with vmkv.VMKVCache(model.config, backend="host") as cache, vmkv.capture_decoding(model):
        assert torch.equal(expected, model.generate(prompt, past_key_values=cache, **options))


def test_peft_adapters_are_used_or_refused() -> None:
    """Active ones are used; those that differ by prompt, or need other tokens, are refused."""
    peft = pytest.importorskip("peft")

    def adapted(**options: Any) -> Any:
        config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
        return peft.get_peft_model(copy.deepcopy(tiny_model("llama")), config, "first").eval()

    options = {"max_new_tokens": 4, "do_sample": False}
    ragged = {**options, "custom_generate": vmkv.ragged_generate}
    prompt = torch.tensor(PROMPTS[:1])
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    model.eval()
    for name in ("first", "second"):
        model.set_adapter(name)
        expected = model.generate(input_ids=prompt, **options).tolist()
        assert expected == vmkv.generate(model, prompt, **options)
    _assert_refused(
        model,
        "set_adapter",
        lambda: vmkv.generate(model, prompt, adapter_names=["first"], **options),
    )
    tuned = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tuned = peft.get_peft_model(copy.deepcopy(tiny_model("llama")), tuned).eval()
    for each in (adapted(alora_invocation_tokens=[7]), tuned):
        _assert_refused(
            each, "no adapter", lambda each=each: vmkv.generate(each, prompt, **options)
        )
        _assert_refused(
            each, "no adapter", lambda each=each: each.generate(input_ids=prompt, **ragged)
        )


def test_encoder_decoder_models_are_refused(pool: ExtentPool) -> None:
    """The error names `for_encoder_decoder`."""
    model = tiny_model("t5")
    _assert_refused(model, "for_encoder_decoder", lambda: _generate(model, PROMPTS, pool))


@pytest.mark.parametrize("mask", [[1, 1, 1, 0], [1, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]], ids=str)
def test_masks_that_are_not_left_padding_are_refused(mask: list[int]) -> None:
    """Right padding, holes and empty prompts."""
    model = tiny_model("llama")
    inputs = {
        "input_ids": torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], mask]),
    }
    options = {"max_new_tokens": 2, "custom_generate": vmkv.ragged_generate}
    _assert_refused(model, "left padding", lambda: model.generate(**inputs, **options))


def test_embeddings_instead_of_tokens_are_refused() -> None:
    model = tiny_model("llama")
    options = {"max_new_tokens": 2, "custom_generate": vmkv.ragged_generate}
    embeddings = torch.randn(1, 3, model.config.hidden_size)
    _assert_refused(
        model, "inputs_embeds", lambda: model.generate(inputs_embeds=embeddings, **options)
    )


# ---- errors during generation -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "options"),
    [
        (random_prompts(*[200] * 8), {}),
        (random_prompts(*[200] * 8), {"max_num_batched_tokens": 64}),
        (random_prompts(5, 5), {"max_new_tokens": 400}),
    ],
    ids=["prefill", "later chunk", "decode"],
)
def test_all_memory_is_free_after_an_error_for_want_of_memory(
    prompts: list[list[int]], options: dict[str, Any]
) -> None:
    """The model's attention is restored, and fewer prompts still fit."""
    backend = HostBackend(4 * KiB)
    pool = ExtentPool(backend, 30 * 4 * KiB)
    model = tiny_model("llama")
    with pytest.raises(OutOfPagesError):
        _generate(model, prompts, pool, **options)
    assert model.config._attn_implementation == "eager"
    assert pool.stats().resident_bytes == pool.stats().retired_bytes == 0
    assert _expected("llama")[:2] == _generate(model, PROMPTS[:2], pool)
    pool.close()
    assert BackendUsage() == backend.usage()


def test_the_attention_of_each_part_of_a_model_is_restored(pool: ExtentPool) -> None:
    """The text part and the vision part have different implementations."""
    config = transformers.Gemma3Config(
        text_config=tiny_config("gemma3"),
        vision_config=transformers.SiglipVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            image_size=28,
            patch_size=14,
        ),
        mm_tokens_per_image=4,
    )
    parts = {"text_config": "sdpa", "vision_config": "eager"}
    model = transformers.Gemma3ForConditionalGeneration._from_config(
        config, attn_implementation=copy.copy(parts)
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    expected = [_alone(model, prompt) for prompt in PROMPTS]
    assert expected == _generate(model, PROMPTS, pool)
    assert parts == {name: getattr(model.config, name)._attn_implementation for name in parts}


def test_a_vmkv_cache_is_refused() -> None:
    """The error names `RaggedCache`."""
    model, its_error = tiny_model("llama"), r"VMKVCache cannot be .* pass a RaggedCache"
    ids, options = torch.tensor([[1, 2, 3]]), {"custom_generate": vmkv.ragged_generate}
    with vmkv.VMKVCache(model.config, budget_bytes=1 << 20) as cache:
        with pytest.raises(ConfigError, match=its_error):
            vmkv.generate(model, ids.tolist(), max_new_tokens=2, cache=cache)
        with pytest.raises(ConfigError, match=its_error):
            model.generate(ids, max_new_tokens=2, vmkv_cache=cache, **options)
