"""`vmkv plan` against the rows of an engine: bytes of a token, for every family that is served.

The plan comes from a configuration; the rows are laid out by what the proof of a model has seen, as
an engine lays them out.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from helpers.families import UNBUILDABLE, causal_families, tiny_config, tiny_model
from helpers.latents import FAMILIES, latent_model
from helpers.tiny_models import VERSION
from transformers import AutoConfig, AutoModelForCausalLM

from vmkv import ConfigError
from vmkv.cli.capacity import kind_bytes, model_shape
from vmkv.hf.configuration import layer_windows
from vmkv.hf.proof import prove
from vmkv.hf.store import CacheOptions, Store
from vmkv.units import KiB

#: All layers of a kind lie side by side, as on a GPU.
OPTIONS = CacheOptions(max_tokens=64, max_batch_size=2, layers_per_group=1000)
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
#: Families that repeat cached keys for attention, and how often; an engine keeps what is attended.
REPEATED = {"jetmoe": 2}


def engine_bytes(model: Any) -> list[int]:
    """Bytes of a token in each group of rows, and last those of a sequence's states."""
    signatures, calls, _ = prove(model)
    store = Store(model.config, OPTIONS, layer_windows(model.config), past_stated=False)
    with contextlib.closing(store):
        store.bind_all(signatures, calls)
        (cache,) = store.cores
        states = 0 if cache.states is None else cache.states.state_bytes
        return [*sorted(each.token_bytes for each in cache.groups if not each.is_fixed), states]


def planned_bytes(config: Any, dtype: str) -> list[int]:
    shape = model_shape(config, dtype=dtype)
    return [*sorted(kind_bytes(each, 1).token_bytes for each in shape.kinds), shape.state_bytes]


@pytest.mark.slow
@pytest.mark.parametrize("name", [each for each in causal_families() if each not in UNBUILDABLE])
def test_plan_is_what_an_engine_keeps(name: str) -> None:
    """Or the family is not served."""
    try:
        kept = engine_bytes(tiny_model(name))
    except ConfigError:
        return
    *rows, states = planned_bytes(tiny_config(name), "float32")
    assert kept[:-1] == [each * REPEATED.get(name, 1) for each in rows]
    # States begin at multiples of some bytes; a row of them takes whole pages anyway.
    assert states <= kept[-1] < states + 4 * KiB


@pytest.mark.parametrize("name", FAMILIES)
def test_latents(name: str) -> None:
    """Their parts have widths of their own."""
    model = latent_model(name)
    assert engine_bytes(model)[:-1] == planned_bytes(model.config, "float32")[:-1]


@pytest.mark.skipif(VERSION < (5, 17), reason="this release caches expanded keys")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes(name: str) -> None:
    """1,152 bytes a layer, whatever the number of heads."""
    if name not in FAMILIES:
        pytest.skip("this release has no such models")
    config = AutoConfig.for_model(name, **(_SMALL | PUBLISHED[name]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    assert engine_bytes(model) == planned_bytes(config, "bfloat16")
    assert engine_bytes(model) == [config.num_hidden_layers * 1152, 0]


@pytest.mark.skipif("deepseek_v3" not in FAMILIES, reason="this release has no such models")
def test_ranks_keep_all_latents() -> None:
    """Heads are divided among ranks, and latents are not."""
    config = latent_model("deepseek_v3").config
    whole, part = (model_shape(config, dtype="float32", num_ranks=each) for each in (1, 2))
    assert [each.shape for each in whole.kinds] == [each.shape for each in part.kinds]
    assert part.weights_bytes < whole.weights_bytes
