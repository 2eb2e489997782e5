"""With real weights every way to generate gives exactly the tokens of DynamicCache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import vmkv
import vmkv.hf
from vmkv import VMKVCache
from vmkv.units import MiB

pytestmark = [pytest.mark.real_weights, pytest.mark.slow]


@pytest.fixture(params=["sdpa", "vmkv"])
def attending(request: pytest.FixtureRequest, real: Any) -> Any:
    """The model with sdpa attention or with vmkv's."""
    before = real.model.config._attn_implementation
    real.model.set_attn_implementation(request.param)
    yield real
    real.model.set_attn_implementation(before)


def _cache(real: Any) -> VMKVCache:
    return VMKVCache(config=real.model.config, budget_bytes=256 * MiB, kv_dtype=real.kv_dtype)


def test_the_model_is_a_real_one(real: Any, prompts: list[list[int]]) -> None:
    """It answers correctly and stops."""
    answer = real.expected(prompts[0])
    country, city = {"auto": ("France", "Paris"), "fp8": ("Japan", "Tokyo")}[real.kv_dtype]
    assert f"The capital of {country} is {city}." == real.text(answer)
    assert real.tokenizer.eos_token_id == answer[-1]


def test_one_prompt(real: Any, prompts: list[list[int]]) -> None:
    expected = real.expected(prompts[1])
    with _cache(real) as cache:
        tokens = real.generate(prompts[1], cache, 16)
        cache.check()
    assert expected == tokens[0, len(prompts[1]) :].tolist()


def test_left_padded_batch(attending: Any, prompts: list[list[int]]) -> None:
    """Each prompt gets its tokens alone, then padding."""
    real = attending
    expected = [real.expected(prompt) for prompt in prompts]
    longest = max(map(len, prompts))
    pad = real.tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (longest - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts])
    with _cache(real) as cache:
        output = real.model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=16, do_sample=False
        )
        cache.check()
    for tokens, wanted in zip(output[:, longest:].tolist(), expected, strict=True):
        assert wanted == tokens[: len(wanted)]
        assert {pad} >= set(tokens[len(wanted) :])


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "num_return_sequences": 2},
    ],
    ids=["beams", "sampling"],
)
def test_other_strategies(real: Any, prompts: list[list[int]], options: dict[str, Any]) -> None:
    """Beam search, and sampling with the same seed."""
    outputs = []
    with _cache(real) as ours:
        for cache in (real.reference_cache(), ours):
            transformers.set_seed(3)
            outputs.append(real.generate(prompts[2], cache, 8, **options))
        ours.check()
    assert outputs[0].tolist() == outputs[1].tolist()
    assert 2 == len({tuple(each) for each in outputs[0].tolist()}), "equal sequences prove nothing"


@pytest.fixture(scope="session")
def draft(real: Any) -> Any:
    """The same model with fewer layers, whose guesses are mostly wrong."""
    return real.load(num_hidden_layers=8)


@pytest.mark.parametrize("way", ["prompt-lookup", "draft-model"])
def test_assisted_decoding(real: Any, prompts: list[list[int]], way: str, request: Any) -> None:
    """Wrong guesses are rolled back and do not change the tokens."""
    if way == "prompt-lookup":
        options = {"prompt_lookup_num_tokens": 4}
    else:
        options = {"assistant_model": request.getfixturevalue("draft")}
    expected = real.expected(prompts[2])
    with _cache(real) as cache:
        tokens = real.generate(prompts[2], cache, 16, **options)
        cache.check()
    assert expected == tokens[0, len(prompts[2]) :].tolist()


def test_ragged_batch(real: Any, prompts: list[list[int]]) -> None:
    """Without padding, in chunks; a second time from the cached prefixes."""
    expected = [prompt + real.expected(prompt) for prompt in prompts]
    model = real.model
    options = {"budget_bytes": 256 * MiB, "kv_dtype": real.kv_dtype}
    with vmkv.RaggedCache(model.config, **options) as cache:
        for max_num_batched_tokens in (50, 8192):
            outputs = vmkv.generate(
                model,
                prompts,
                cache=cache,
                max_num_batched_tokens=max_num_batched_tokens,
                max_new_tokens=16,
                do_sample=False,
            )
            assert expected == outputs
        cache.check()
        assert cache.stats().num_prefix_hits >= len(prompts)
