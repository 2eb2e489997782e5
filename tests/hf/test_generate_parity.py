"""Generation through VMKVCache gives the tokens of DynamicCache, for every model.

The reference is `DynamicCache(config=...)` of the installed transformers with the same weights,
inputs and seeds. The contents of the caches are compared bit by bit too, since vmkv only moves
bytes. Where a kernel may sum in another order over other strides, logits must satisfy
FlashAttention's rule: an error against float64 of at most twice the reference's.

Not covered: attention kernels of the GPU (`tests/attention`), speed (`bench/`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from helpers import tiny_models
from helpers.tiny_models import (
    DECODERS,
    ENCODER_DECODER,
    MODELS,
    VERSION,
    VOCABULARY,
    assert_same_contents,
    contents,
    dynamic_cache,
    forward,
    generate,
    left_padded_prompt,
    make_cache,
    parts_of,
    prompt,
    tiny_config,
    tiny_model,
    unsupported_because,
)

from vmkv import ConfigError

NewCache = Callable[..., Any]
#: Models for tests of rollback; the tests over MODELS have every family.
ROLLBACK_MODELS = ("llama", "mistral", "gemma2")

#: In 4.57, BLAS uses another path for DeepSeek's expanded values if strides differ. The output of
#: the first attention, and so the keys of later layers, differ in the last bit.
SUMS_IN_ANOTHER_ORDER = ("deepseek_v3",) if VERSION < (5, 0) else ()

STRATEGIES: dict[str, dict[str, Any]] = {
    **tiny_models.STRATEGIES,
    "beam-sampling": {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
    "return-sequences": {"do_sample": True, "num_return_sequences": 3},
}


def _served(name: str, attention: str = "eager") -> Any:
    """Return the model, or skip if the installed transformers cannot run it this way."""
    reason = unsupported_because(name)
    if reason is not None:
        pytest.skip(reason)
    try:
        return tiny_model(name, attention)
    except ValueError as error:
        if attention != "sdpa" or "scaled_dot_product_attention" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__} has no sdpa for {name}")


def _assert_same_bits(name: str, expected: Any, actual: Any) -> None:
    if name in SUMS_IN_ANOTHER_ORDER:
        # The keys of the first layer do not depend on attention.
        for theirs, ours in zip(contents(expected)[0], contents(actual)[0], strict=True):
            assert torch.equal(theirs, ours)
    else:
        assert_same_contents(expected, actual)


@functools.cache
def _noisy_twin(name: str) -> Any:
    """A draft model with some right and some wrong guesses."""
    twin = copy.deepcopy(tiny_model(name))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.ndim >= 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * parameter.std() * 0.1)
    return twin


# ---- every model ------------------------------------------------------------------------------


#: Model, attention and strategy; a cache sees little difference, so few models try all strategies.
CASES = {
    *((name, *way) for name in MODELS for way in (("eager", "beams"), ("sdpa", "greedy"))),
    *itertools.product(("gemma2", "t5"), ("eager",), STRATEGIES),
}


@pytest.mark.parametrize(("name", "attention", "strategy"), sorted(CASES))
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
def test_generate_matches_dynamic_cache(
    name: str, attention: str, strategy: str, is_padded: bool, new_cache: NewCache
) -> None:
    """Equal tokens and equal contents, also with padding on the left."""
    if is_padded and name == "whisper":
        pytest.skip("a spectrogram has no padding")
    model = _served(name, attention)
    inputs = left_padded_prompt() if is_padded else prompt(name, batch_size=2)
    expected_cache, cache = dynamic_cache(model.config), new_cache(model.config)
    expected = generate(model, inputs, expected_cache, **STRATEGIES[strategy])
    actual = generate(model, inputs, cache, **STRATEGIES[strategy])
    assert expected.tolist() == actual.tolist()
    _assert_same_bits(name, expected_cache, cache)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "vmkv"])
def test_logits_under_autocast_match_dynamic_cache(attention: str, new_cache: NewCache) -> None:
    """Rotary embeddings leave keys in float32; both are kept in the type of attention."""
    model, inputs = tiny_model("llama", attention), prompt("llama", batch_size=2)
    logits = []
    for cache in (dynamic_cache(model.config), new_cache(model.config)):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            for num_tokens in (13, 1, 5):
                logits.append(forward(model, inputs["input_ids"][:, :num_tokens], cache))
    assert logits[0].isfinite().all()
    assert {layer.dtype for layer in cache.layers} == {torch.bfloat16}
    for theirs, ours in zip(logits[:3], logits[3:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.01)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "vmkv"])
def test_eight_bits_under_autocast(attention: str, new_cache: NewCache) -> None:
    """Rows in eight bits stay so; what attention computes in is autocast's type."""
    model, inputs = tiny_model("llama", attention), prompt("llama", batch_size=2)
    said = []
    for around in (contextlib.nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16)):
        cache = new_cache(model.config, kv_dtype="fp8")
        with torch.no_grad(), around:
            said.append(forward(model, inputs["input_ids"], cache))
            said.append(forward(model, inputs["input_ids"][:, :1], cache))
        assert cache.layers[0].dtype == (torch.float32, torch.bfloat16)[len(said) // 4]
    for plain, cast in zip(said[:2], said[2:], strict=True):
        assert (cast - plain).abs().mean() < 0.1 * plain.std()


@pytest.mark.parametrize("name", DECODERS)
def test_a_damaged_cache_changes_the_tokens(name: str) -> None:
    """One wrong token in the cache changes the output, so the tests above can fail."""
    if unsupported_because(name):
        pytest.skip("its cache is not DynamicCache on this release")
    model = tiny_model(name)
    tokens = prompt(name, num_tokens=20)["input_ids"]
    cache = dynamic_cache(model.config)
    damaged = dynamic_cache(model.config)
    with torch.no_grad():
        forward(model, tokens[:, :-1], cache)
        forward(model, tokens[:, :-1], damaged)
    for layer in damaged.layers:
        if getattr(layer, "keys", None) is not None:
            layer.keys[:, :, -2] = 0
            layer.values[:, :, -2] = 0
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    said = [generate(model, inputs, each, max_new_tokens=20) for each in (cache, damaged)]
    assert not torch.equal(*said)


@pytest.mark.parametrize("name", [name for name in MODELS if unsupported_because(name)])
def test_models_with_states_that_dynamic_cache_cannot_hold_are_refused(name: str) -> None:
    """The error names the kind of layer and proposes an upgrade."""
    with pytest.raises(ConfigError, match=r"linear_attention.*upgrade"):
        make_cache(tiny_config(name))


def test_encoder_decoder_model_refuses_a_single_cache(new_cache: NewCache) -> None:
    """The error names `for_encoder_decoder`."""
    from vmkv import VMKVCache

    model = tiny_model("t5")
    with (
        VMKVCache(model.config) as cache,
        pytest.raises(ConfigError, match="for_encoder_decoder"),
    ):
        generate(model, prompt("t5"), cache)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_decoder_with_fewer_layers_than_its_encoder(num_beams: int) -> None:
    """As in ByT5; T5's `num_hidden_layers` is the number of encoder layers."""
    from vmkv import VMKVCache

    config = copy.deepcopy(tiny_config("t5"))
    config.num_layers = config.num_hidden_layers = 3
    config.num_decoder_layers = 1
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    inputs = prompt("t5", batch_size=2)
    options = {**inputs, "max_new_tokens": 9, "do_sample": False, "num_beams": num_beams}
    pair = VMKVCache.for_encoder_decoder(config, budget_bytes=64 << 20)
    with pair.self_attention_cache, pair.cross_attention_cache:
        assert 1 == len(pair.self_attention_cache.layers)
        said = model.generate(**options, past_key_values=pair)
        assert model.generate(**options).tolist() == said.tolist()


# ---- rollback: assisted decoding and prompt lookup --------------------------------------------


def _record_crops(cache: Any) -> list[int]:
    crops: list[int] = []
    original = cache.crop

    def crop(argument: int) -> None:
        length = cache.get_seq_length()
        original(argument)
        crops.append(length - cache.get_seq_length())

    cache.crop = crop
    return crops


def _assert_same_rollback(
    model: Any, inputs: dict[str, Any], new_cache: NewCache, **options: Any
) -> None:
    expected_cache, cache = dynamic_cache(model.config), new_cache(model.config)
    crops = _record_crops(cache)
    try:
        expected = generate(model, inputs, expected_cache, **options)
    except ValueError:
        # Releases without past recording cannot roll back a full window.
        assert VERSION < (5, 0)
        with pytest.raises(ValueError, match="window"):
            generate(model, inputs, cache, **options)
        return
    except RuntimeError as error:
        # In 5.17, sliding layers of a draft model return more tokens than their mask covers. The
        # draft model has a DynamicCache, so this is not our failure.
        if VERSION >= (5, 18) or "must match the size" not in str(error):
            raise
        pytest.skip("transformers 5.17 cannot draft several tokens with a sliding-window model")
    assert expected.tolist() == generate(model, inputs, cache, **options).tolist()
    assert any(crops), "nothing was rolled back: the test proves nothing"
    assert_same_contents(expected_cache, cache)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", ROLLBACK_MODELS)
def test_assisted_decoding_matches_dynamic_cache(
    name: str, do_sample: bool, new_cache: NewCache
) -> None:
    """With a draft model whose guesses are partly right."""
    model = tiny_model(name)
    _assert_same_rollback(
        model,
        prompt(name),
        new_cache,
        assistant_model=_noisy_twin(name),
        do_sample=do_sample,
        max_new_tokens=30,
    )


# ---- several calls on one cache ---------------------------------------------------------------


@pytest.mark.parametrize("name", DECODERS)
def test_chunked_prefill_matches_dynamic_cache(name: str, new_cache: NewCache) -> None:
    """A prompt fed in chunks by `prefill_chunk_size` gives the same tokens and contents."""
    model = _served(name)
    inputs = prompt(name, batch_size=2, num_tokens=23)
    expected_cache, cache = dynamic_cache(model.config), new_cache(model.config)
    expected = generate(model, inputs, expected_cache, prefill_chunk_size=5)
    actual = generate(model, inputs, cache, prefill_chunk_size=5)
    assert expected.tolist() == actual.tolist()
    _assert_same_bits(name, expected_cache, cache)


@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_encoder_decoder_pair_can_be_copied_and_reset(name: str, new_cache: NewCache) -> None:
    model = tiny_model(name)
    inputs = prompt(name, batch_size=2)
    expected = generate(model, inputs, dynamic_cache(model.config), max_new_tokens=9).tolist()
    cache = new_cache(model.config)
    assert expected == generate(model, inputs, cache, max_new_tokens=9).tolist()
    twin = copy.deepcopy(cache)
    assert_same_contents(cache, twin)
    for part in parts_of(twin):
        part.close()
    cache.reset()
    assert expected == generate(model, inputs, cache, max_new_tokens=9).tolist()


# ---- logits -----------------------------------------------------------------------------------


def _logits(model: Any, tokens: torch.Tensor, cache: Any, chunks: list[int]) -> torch.Tensor:
    logits, start = [], 0
    with torch.no_grad():
        for size in chunks:
            logits.append(forward(model, tokens[:, start : start + size], cache))
            start += size
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_as_exact_as_dynamic_cache(
    name: str, attention: str, new_cache: NewCache
) -> None:
    """In chunked prefill and decode: equal bits, or at most twice the reference's error."""
    model = _served(name, attention)
    tokens = prompt(name, batch_size=2, num_tokens=40)["input_ids"]
    chunks = [11, 1, 7, *([1] * 21)]
    expected_cache, cache = dynamic_cache(model.config), new_cache(model.config)
    expected = _logits(model, tokens, expected_cache, chunks)
    actual = _logits(model, tokens, cache, chunks)
    if not torch.equal(expected, actual):
        exact_model = copy.deepcopy(model).double()
        exact = _logits(exact_model, tokens, dynamic_cache(model.config), chunks)
        assert (actual - exact).abs().max() <= 2 * (expected - exact).abs().max()
    _assert_same_bits(name, expected_cache, cache)
    if name not in SUMS_IN_ANOTHER_ORDER:
        assert torch.equal(expected, actual)


def test_greedy_tokens_of_tiny_models_vary() -> None:
    """Otherwise wrong tokens might match by chance."""
    model = tiny_model("llama")
    tokens = generate(model, prompt("llama"), dynamic_cache(model.config), max_new_tokens=40)
    assert len(set(tokens[0, 13:].tolist())) > VOCABULARY // 8
