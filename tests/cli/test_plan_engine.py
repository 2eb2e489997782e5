"""`vmkv plan` against the rows of an engine: bytes of a token.

The plan comes from a configuration; the rows are laid out by what the proof of a model has seen, as
an engine lays them out. `tests/hf/test_families.py` compares them for each family that is served.
"""

from __future__ import annotations

import pytest
import torch
from helpers.families import causal_families, tiny_config, tiny_model
from helpers.latents import FAMILIES, latent_model
from helpers.planned import engine_bytes, planned_bytes
from helpers.tiny_models import VERSION
from transformers import AutoConfig, AutoModelForCausalLM

from vmkv.cli.capacity import model_shape
from vmkv.units import KV_DTYPES

#: Attention as published, in models that are small otherwise.
_SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
_V2_LITE = {
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_GLM_4_7_FLASH = {
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
}
PUBLISHED = {"deepseek_v2": _V2_LITE, "glm4_moe_lite": _GLM_4_7_FLASH}


@pytest.mark.skipif("jetmoe" not in causal_families(), reason="this release has no JetMoe")
@pytest.mark.parametrize(("kv_dtype", "item_bytes"), [("auto", 4), ("fp8", 1)])
def test_repeated_keys(kv_dtype: str, item_bytes: int) -> None:
    """Experts of JetMoe attend to keys that are repeated for each, and rows hold all of them."""
    config = tiny_config("jetmoe")
    num_heads = config.num_key_value_heads * config.num_experts_per_tok
    row_bytes = 2 * num_heads * config.kv_channels * item_bytes * config.num_hidden_layers
    assert [row_bytes, 0] == engine_bytes(tiny_model("jetmoe"), kv_dtype)
    assert [row_bytes, 0] == planned_bytes(config, "float32", kv_dtype)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_latents(name: str, kv_dtype: str) -> None:
    """Their parts have widths of their own; in eight bits rows hold what is made of them."""
    model = latent_model(name)
    planned = planned_bytes(model.config, "float32", kv_dtype)
    assert engine_bytes(model, kv_dtype)[:-1] == planned[:-1]


@pytest.mark.skipif(VERSION < (5, 17), reason="this release caches expanded keys")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes(name: str) -> None:
    """1,152 bytes a layer, whatever the number of heads; those of all heads in eight bits."""
    if name not in FAMILIES:
        pytest.skip("this release has no such models")
    config = AutoConfig.for_model(name, **(_SMALL | PUBLISHED[name]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    assert engine_bytes(model) == planned_bytes(config, "bfloat16")
    assert engine_bytes(model) == [config.num_hidden_layers * 1152, 0]
    head_bytes = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    row_bytes = config.num_hidden_layers * config.num_attention_heads * head_bytes
    assert engine_bytes(model, "fp8") == planned_bytes(config, "bfloat16", "fp8") == [row_bytes, 0]


@pytest.mark.skipif("deepseek_v3" not in FAMILIES, reason="this release has no such models")
def test_ranks_keep_all_latents() -> None:
    """Heads are divided among ranks, and latents are not."""
    config = latent_model("deepseek_v3").config
    whole, part = (model_shape(config, dtype="float32", num_ranks=each) for each in (1, 2))
    assert [each.shape for each in whole.kinds] == [each.shape for each in part.kinds]
    assert part.weights_bytes < whole.weights_bytes
