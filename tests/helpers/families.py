"""Every causal language model family of the installed transformers, as tiny configurations.

`causal_families()` are the model types that `AutoModelForCausalLM` knows; `tiny_config` makes one
of each: narrow, a vocabulary of 128, and few layers, but one of every kind that its defaults have.
Nothing is downloaded. A family is shrunk by the names of its fields, which most families share;
`_OVERRIDES` has the exceptions.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 128
WINDOW_TOKENS = 16
_LAYERS = 2
_HEADS = 4
_KV_HEADS = 2
_HEAD_DIM = 8
_HIDDEN = _HEADS * _HEAD_DIM
_INNER = 48
_LENGTH = 256
NUM_EXPERTS = 4


def _each(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


#: Small values by field name, for the fields that a configuration has and that are not None.
_SMALL: dict[str, Any] = {
    **_each("vocab_size decoder_vocab_size audio_vocab_size codebook_size", VOCABULARY),
    **_each("pronunciation_vocab_size shape_vocab_size vocab_size_per_layer_input", VOCABULARY),
    **_each("encoder_hash_byte_group_vocab ngram_vocab_size_base", VOCABULARY),
    **_each("max_position_embeddings n_positions n_ctx max_seq_len max_target_positions", _LENGTH),
    **_each("max_source_positions context_length original_max_position_embeddings", _LENGTH),
    **_each("hidden_size d_model n_embd emb_dim embedding_dim embedding_size dim_model", _HIDDEN),
    **_each("word_embed_proj_dim input_embedding_size output_embedding_size lru_width", _HIDDEN),
    **_each(
        "backbone_hidden_size hidden_size_global pronunciation_embed_dim shape_embed_dim", _HIDDEN
    ),
    **_each("out_hidden_size projector_input_dim projector_output_dim adapter_in_dim", _HIDDEN),
    **_each("adapter_out_dim adapter_input_size output_channels vision_output_dim", _HIDDEN),
    **_each("attention_hidden_size", 2 * _HIDDEN),
    **_each("intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size", _INNER),
    **_each("moe_intermediate_size shared_expert_intermediate_size dim_ff dff d_inner", _INNER),
    **_each("shared_experts_intermediate_size intermediate_size_mlp mlp_dim", _INNER),
    **_each("dense_intermediate_size shared_intermediate_size feed_forward_size", _INNER),
    **_each(
        "expert_ffn_hidden_size moe_shared_expert_intermediate_size router_hidden_size", _INNER
    ),
    **_each("num_attention_heads n_head n_heads num_heads decoder_attention_heads", _HEADS),
    **_each("encoder_attention_heads attention_heads num_decoder_attention_heads", _HEADS),
    **_each("num_encoder_attention_heads swa_num_attention_heads", _HEADS),
    **_each("num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads", _KV_HEADS),
    **_each("head_dim swa_head_dim dim_head d_head d_kv attention_head_size", _HEAD_DIM),
    **_each("attention_head_dim", 2 * _HEAD_DIM),
    **_each("num_experts n_routed_experts num_local_experts moe_num_experts", NUM_EXPERTS),
    **_each("n_group topk_group", 1),
    **_each("num_experts_per_tok moe_k moe_topk moe_top_k", 2),
    **_each("kv_lora_rank q_lora_rank o_lora_rank v_head_dim qk_nope_head_dim", 16),
    **_each("qk_rope_head_dim rotary_dim index_head_dim", _HEAD_DIM),
    **_each("index_n_heads linear_num_key_heads", 2),
    **_each("linear_num_value_heads linear_num_heads index_topk zero_expert_num", 4),
    **_each("linear_key_head_dim linear_value_head_dim linear_head_dim", _HEAD_DIM),
    **_each(
        "sliding_window sliding_window_size local_attention attention_chunk_size", WINDOW_TOKENS
    ),
    **_each("window_size attention_window_size local_attention_window_len", WINDOW_TOKENS),
    **_each("chunk_size mamba_chunk_size rel_extent", WINDOW_TOKENS),
    **_each("mamba_d_state state_size ssm_state_size mamba_dt_rank time_step_rank", _HEAD_DIM),
    **_each("mamba_n_heads mamba_num_heads n_mamba_heads", 8),
    **_each("mamba_d_head mamba_head_dim", 8),
    **_each("mamba_d_ssm", 64),
    **_each("hidden_size_per_layer_input laurel_rank adapter_rank hc_lowrank", 8),
    **_each("image_size", 32),
    **_each("patch_size", 16),
    **_each("pad_token_id cls_token_id sep_token_id", 0),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "is_encoder_decoder": False,
}
#: Fields that get a small value even if they are None, which means a derived value.
_OFTEN_NONE = ("head_dim", "num_key_value_heads", "pad_token_id", "bos_token_id", "eos_token_id")
_LAYER_COUNTS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"),
    *("num_decoder_layers", "num_encoder_layers", "depth", "num_blocks"),
)
_SHARED_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": _HEAD_DIM,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_DOTS3_TEXT: dict[str, Any] = {
    "head_dim": 24,
    "num_key_value_heads": _HEADS,
    "per_layer_config": {},
}
_GEMMA3N_TEXT: dict[str, Any] = {
    **_SHARED_LAYERS,
    "intermediate_size": [_INNER] * 4,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
}
#: Further fields of a family; of a composite one, by its part.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "dbrx": {"attn_config": {"kv_n_heads": _KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": NUM_EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"text_config": _DOTS3_TEXT},
    "dots3_note_text": _DOTS3_TEXT,
    "gemma3n": {"text_config": _GEMMA3N_TEXT},
    "gemma3n_text": _GEMMA3N_TEXT,
    "gemma4": {"text_config": _SHARED_LAYERS},
    "gemma4_text": _SHARED_LAYERS,
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": _HEAD_DIM},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "axial_pos_embds": False,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
    },
    "rwkv": {"attention_hidden_size": _HIDDEN},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "num_key_value_heads": _HEADS,
    },
    "zaya": {"num_experts_per_tok": 1},
}

_NONE_SHARED = {**_SHARED_LAYERS, "num_kv_shared_layers": 0}
#: Further configurations of the survey: a model type, and its further fields.
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4 (no shared layers)": ("gemma4", {"text_config": _NONE_SHARED}),
    "gemma4_text (no shared layers)": ("gemma4_text", _NONE_SHARED),
    "gemma4_text (shared layers, wide global heads)": (
        "gemma4_text",
        {
            **_SHARED_LAYERS,
            "global_head_dim": 512,
            "head_dim": 256,
            "num_kv_shared_layers": 1,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4_text (no shared layers, keys as values, wide global heads)": (
        "gemma4_text",
        {
            **_NONE_SHARED,
            "attention_k_eq_v": True,
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_size_per_layer_input": 0,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4_text (no shared layers, keys as values, experts)": (
        "gemma4_text",
        {
            **_NONE_SHARED,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": NUM_EXPERTS,
            "top_k_experts": 2,
            "moe_intermediate_size": _INNER,
        },
    ),
    "qwen3_vl (text prompts)": ("qwen3_vl", {}),
    "qwen3_vl_moe (text prompts)": ("qwen3_vl_moe", {}),
}
#: Families that `AutoModelForCausalLM` lists but cannot build here from a configuration.
UNBUILDABLE = {
    "gemma3n": "its vision tower needs the package timm",
    "gemma4_assistant": "drafts on the keys and values of another model",
    "gemma4_unified_assistant": "drafts on the keys and values of another model",
    "musicgen": "its language model takes the configuration of its decoder",
    "musicgen_melody": "its language model takes the configuration of its decoder",
}


def causal_families() -> list[str]:
    """The model types that `AutoModelForCausalLM` knows, with `UNBUILDABLE` ones, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def surveyed() -> list[str]:
    """The rows of MODELS.md: every causal family, and some further configurations; sorted."""
    return sorted([*causal_families(), *_VARIANTS])


def tiny_config(name: str) -> PretrainedConfig:
    """A fresh configuration of a row of `surveyed`, small enough to build and run in milliseconds.

    Raises:
        ValueError: The family is one of `UNBUILDABLE`.
    """
    if name in UNBUILDABLE:
        raise ValueError(f"{name}: {UNBUILDABLE[name]}")
    model_type, overrides = _VARIANTS.get(name, (name, _OVERRIDES.get(name, {})))
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**_small_fields(config_class, overrides))


@functools.cache
def tiny_model(model_type: str, *, seed: int = 0) -> PreTrainedModel:
    """The family's model in float32, on the CPU, in eval mode. It is cached: do not change it."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(model_type)).eval()


def _small_fields(
    config_class: type[PretrainedConfig], overrides: dict[str, Any]
) -> dict[str, Any]:
    """Fields of a small configuration; the parts of a composite one as dicts."""
    parts = set(config_class.sub_configs)
    own = {name: value for name, value in overrides.items() if name not in parts}
    default = config_class()
    values = default.to_dict()
    small_values = {default.attribute_map.get(name, name): small for name, small in _SMALL.items()}
    fields = {
        name: small
        for name, small in {**small_values, **_SMALL}.items()
        if values.get(name) is not None or (name in values and name in _OFTEN_NONE)
    }
    if "kv_lora_rank" in values and "num_key_value_heads" in fields:
        fields["num_key_value_heads"] = _HEADS  # Latent attention has no groups of heads.
    num_layers = getattr(default, "num_hidden_layers", None)
    per_layer = {
        name: list(dict.fromkeys(value)) if isinstance(value[0], str) else value[:_LAYERS]
        for name, value in values.items()
        if isinstance(value, list) and value and len(value) == num_layers
    }
    num_layers = max([_LAYERS, *map(len, per_layer.values())])
    fields |= {name: num_layers for name in _LAYER_COUNTS if values.get(name) is not None}
    for name, kinds in per_layer.items():
        fields[name] = [kinds[index % len(kinds)] for index in range(num_layers)]
    for name in parts:
        part = getattr(default, name, None)
        if isinstance(part, PretrainedConfig):
            part_fields = _small_fields(type(part), overrides.get(name, {}))
            if part.model_type:
                part_fields["model_type"] = part.model_type
            fields[name] = part_fields
    return {**fields, **own}
