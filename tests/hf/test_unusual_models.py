"""Models whose code reads keys or masks itself: the numbers of eager attention, or a refusal.

The models are those of `helpers.survey`; the reference is eager attention.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from helpers import survey
from helpers.tiny_models import VERSION, redraw_weights
from transformers import masking_utils

from vmkv import ConfigError, VMKVCache
from vmkv.core.cache.fp8 import FP8
from vmkv.hf import attention as hf_attention
from vmkv.units import MiB

# ---- keys that models read ----------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_keys_of_a_batch_are_side_by_side_for_models_that_need_it(kv_dtype: str) -> None:
    """GPT-NeoX-Japanese views them as `[batch * heads, …]`."""
    model = survey.model_or_skip("gpt_neox_japanese")
    with VMKVCache(model.config, budget_bytes=64 * MiB, kv_dtype=kv_dtype) as cache:
        said = _continue(model, cache)
    if kv_dtype == "auto":
        assert torch.equal(_continue(model, None), said)


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "diffllama", "doge", "gpt_neox_japanese", "jetmoe", "mistral"]
)
def test_fp8_keys_that_a_model_changes_are_decoded(family: str) -> None:
    """Or compresses, or computes its mask from: attention then gets what eager attention gets."""
    if VERSION < (5, 0):
        pytest.skip("before 5.x some of these have their own attention classes")
    model = survey.model_or_skip(family)
    said = []
    for attention in ("eager", "vmkv"):
        model.set_attn_implementation(attention)
        with VMKVCache(model.config, budget_bytes=64 * MiB, kv_dtype="fp8") as cache:
            said.append(_continue(model, cache))
    assert torch.equal(*said)


def _continue(model: Any, cache: Any) -> torch.Tensor:
    """Continue a batch of three, one of them padded, by a few tokens."""
    ids = torch.randint(3, 100, (3, 20), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    said: torch.Tensor = model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False
    )
    return said


# ---- cross-attention in the one cache -----------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated:FutureWarning")  # 5.17's own call.
@pytest.mark.parametrize("attention", ["eager", "sdpa", "vmkv"])
def test_cross_attention_beside_self_attention_keeps_the_models_type(attention: str) -> None:
    """Mllama reads the keys of its image from the cache; in eight bits it could not."""
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_global_layers": 1,
        "attention_heads": 4,
        "intermediate_size": 48,
        "vision_output_dim": 64,
        "image_size": 28,
        "patch_size": 14,
        "max_num_tiles": 1,
        "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1]],
    }
    text = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "cross_attention_layers": [1],
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "eos_token_id": None,
        "rope_scaling": {"rope_type": "default"},
    }
    config = transformers.MllamaConfig(vision_config=vision, text_config=text, image_token_index=99)
    torch.manual_seed(0)
    model = transformers.MllamaForConditionalGeneration(config).eval()
    redraw_weights(model, 0)
    for name, parameter in model.named_parameters():
        if parameter.numel() == 1 and "gate" in name:
            torch.nn.init.ones_(parameter)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.set_attn_implementation({"text_config": attention})
    ids = torch.tensor([[99, 5, 6, 7, 8], [99, 9, 10, 11, 12]])
    image = torch.randn(2, 1, 1, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": image,
        "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(2, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(2, 5, 1, 1, dtype=torch.long),
    }
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**inputs, **options)
    of_another = model.generate(**{**inputs, "pixel_values": -image}, **options)
    assert not torch.equal(expected, of_another)
    for kv_dtype, dtypes in (("auto", {torch.float32}), ("fp8", {torch.float32, FP8})):
        with VMKVCache(config, budget_bytes=64 * MiB, kv_dtype=kv_dtype) as cache:
            said = model.generate(**inputs, **options, past_key_values=cache)
            assert dtypes == {layer.keys.dtype for layer in cache.layers}
            assert torch.float32 == cache.layers[1].keys.dtype
        assert torch.equal(expected[:, :7], said[:, :7])  # Rounding changes a later token at most.
        assert kv_dtype == "fp8" or torch.equal(expected, said)


# ---- masks that models read ---------------------------------------------------------------------


@pytest.mark.parametrize("own_cache", [False, True])
@pytest.mark.parametrize(
    "family",
    [
        *("axk2", "deepseek_v32", "deepseek_v4", "doge", "dots3_note_text", "gemma4_text"),
        *("glm_moe_dsa", "hy_v4", "minimax_m3_vl_text", "qwen4_exp_text"),
    ],
)
def test_masks_that_models_slice_are_those_of_eager_attention(family: str, own_cache: bool) -> None:
    """Or join with others, or index by keys that they select."""
    model = survey.model_or_skip(family)
    said = []
    for attention in ("eager", "vmkv"):
        model.set_attn_implementation(attention)
        with VMKVCache(model.config, budget_bytes=64 * MiB) as cache:
            said.append(_continue(model, cache if own_cache else None))
    assert torch.equal(*said)


@pytest.mark.parametrize("family", ["bigbird_pegasus", "git", "inkling2_text"])
def test_models_without_an_attention_interface_are_refused(family: str) -> None:
    """Those that transformers refuses other functions for as well: they would ignore masks."""
    model = survey.model_or_skip(family)
    expected = _continue(model, None) if VERSION < (5, 0) else None
    model.set_attn_implementation("vmkv")
    if expected is not None:  # These have attention and masks of their own there.
        assert torch.equal(expected, _continue(model, None))
        return
    with pytest.raises(ConfigError, match="attend by code of their own"):
        _continue(model, None)


def test_a_mask_carrier_is_the_mask_of_sdpa_once_it_is_read() -> None:
    """Its shape and type need no mask; every operation makes it, and a move to its device none."""
    text = {"batch_size": 2, "cache_position": torch.arange(4, 7), "q_length": 3, "kv_length": 7}
    arguments: dict[str, Any] = {**text, "q_offset": 4, "device": torch.device("cpu")}
    if VERSION >= (5, 0):
        del arguments["cache_position"]
    padding = torch.tensor([[False] * 2 + [True] * 5, [True] * 7])
    recipe = {**arguments, "mask_function": masking_utils.causal_mask_function}
    carrier = hf_attention.vmkv_mask(**recipe, attention_mask=padding)
    assert carrier is not None
    expected = masking_utils.sdpa_mask(**recipe, attention_mask=padding, allow_is_causal_skip=False)
    assert (carrier.shape, carrier.dtype, carrier.ndim) == (expected.shape, expected.dtype, 4)
    assert carrier.to("cpu") is carrier
    assert "mask" not in vars(carrier._vmkv_recipe)  # type: ignore[attr-defined]
    assert torch.equal(carrier[:, :, -1:], expected[:, :, -1:])
    assert torch.equal(torch.cat([carrier, carrier], -1), torch.cat([expected, expected], -1))
    assert torch.equal(carrier & False, expected & False)
    assert type(carrier.clone()) is torch.Tensor
