"""Tiny transformers models with random weights, built from configurations: no downloads.

Every builder works on each supported transformers release, or says why it does not. Weights are
redrawn with a gain well above transformers' initialization: models that repeat their last token
with any cache would make every parity test pass (`test_a_damaged_cache_changes_the_tokens` checks
that they do not).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    PretrainedConfig,
    PreTrainedModel,
    cache_utils,
)

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
VOCABULARY = 100
WINDOW = 8  # Tokens that a sliding-window layer sees, fewer than in every prompt below.

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_SLIDING_AND_FULL = ["sliding_attention", "full_attention"]
_PER_LAYER = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
#: By name: the kind of configuration, and what it has beside `_BASE` or instead.
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2Config",
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW,
            "layer_types": _SLIDING_AND_FULL * 2,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW,
            "layer_types": _SLIDING_AND_FULL,
        },
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            **_PER_LAYER,
            "num_hidden_layers": 4,
            "intermediate_size": [48] * 4,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": _SLIDING_AND_FULL * 2,
            "num_kv_shared_layers": 2,  # The last two layers use the keys of the first two.
            "altup_num_inputs": 2,
            "altup_active_idx": 0,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            **_PER_LAYER,
            "num_hidden_layers": 5,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "sliding_window": WINDOW,
            "layer_types": [*_SLIDING_AND_FULL * 2, "full_attention"],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_EXPERTS,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _SLIDING_AND_FULL,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 48,
            "head_dim": 8,
            "num_local_experts": 4,
            "moe_layers": [1],
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 1, 1, 0],
            "attn_temperature_tuning": True,
            "floor_scale": 4,  # Positions count after four tokens.
            "attn_scale": 0.5,
        },
    ),
    "mixtral": ("MixtralConfig", _EXPERTS),
    "phi3": ("Phi3Config", {"original_max_position_embeddings": 512}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 2,  # Dense: 4.57 cannot run its experts in float64.
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,  # Keys and values differ in width.
            **({"num_mtp_layers": 0} if VERSION >= (5, 23) else {}),
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "t5": (
        "T5Config",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "bos_token_id": None,
            "decoder_start_token_id": 0,
            "dropout_rate": 0.0,
            "tie_word_embeddings": False,
        },
    ),
    "whisper": (
        "WhisperConfig",
        {
            "num_mel_bins": 8,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_source_positions": 20,
            "max_target_positions": 64,
            "decoder_start_token_id": 2,
            "begin_suppress_tokens": None,
            "suppress_tokens": None,
            "dropout": 0.0,
        },
    ),
}
ENCODER_DECODER = ("t5", "whisper")
DECODERS = tuple(
    name
    for name, (kind, _) in _CONFIGS.items()
    if name not in ENCODER_DECODER and hasattr(transformers, kind)
)
MODELS = (*DECODERS, *ENCODER_DECODER)
#: Models whose last layers read another layer's keys, where packed steps serve them.
SHARED_KEYS = ("gemma3n", "gemma4") if hasattr(cache_utils, "DummyLayer") else ()
#: Models that packed steps serve in late releases only: with shared keys, and with chunks.
SERVED_LATELY = (*SHARED_KEYS, "llama4") if SHARED_KEYS else ()


def unsupported_because(name: str) -> str | None:
    """Why VMKVCache refuses the model on the installed transformers; None if it serves it."""
    if name == "qwen3_next" and VERSION < (5, 0):
        return "before 5.x Qwen3-Next's linear layers need a cache class of the model's own"
    return None


def tiny_shape(**changes: Any) -> dict[str, Any]:
    """Sizes and tokens of most tiny models, with changes."""
    return {**_BASE, **changes}


def llama_config(**changes: Any) -> PretrainedConfig:
    """The tiny Llama, with changes."""
    return transformers.LlamaConfig(**tiny_shape(**changes))


def tiny_config(name: str) -> PretrainedConfig:
    kind, changes = _CONFIGS[name]
    if name in ENCODER_DECODER:
        tokens = {key: each for key, each in _BASE.items() if "token" in key or "vocab" in key}
        return getattr(transformers, kind)(**{**tokens, **changes})
    return getattr(transformers, kind)(**tiny_shape(**changes))


@functools.cache
def tiny_model(name: str, attention: str = "eager", *, seed: int = 0) -> PreTrainedModel:
    """The model, on the CPU, in float32 and eval mode. It is cached: do not change it."""
    config = tiny_config(name)
    factory = transformers.AutoModelForCausalLM
    if name == "t5":
        factory = transformers.AutoModelForSeq2SeqLM
    elif name == "whisper":
        factory = transformers.AutoModelForSpeechSeq2Seq
    return model_from(config, attention, seed=seed, factory=factory)


def model_from(
    config: PretrainedConfig,
    attention: str = "eager",
    *,
    seed: int = 0,
    factory: Any = transformers.AutoModelForCausalLM,
) -> PreTrainedModel:
    """A model like `tiny_model`, of any configuration."""
    torch.manual_seed(seed)
    model = factory.from_config(config, attn_implementation=attention).eval().float()
    redraw_weights(model, seed)
    # No sequence may end early, since lengths are compared.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def kernel_model(device: str = "cuda", **sizes: int) -> PreTrainedModel:
    """A small Llama in bfloat16 with a head size that kernels support."""
    torch.manual_seed(0)
    defaults = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
    defaults |= {"vocab_size": 256, "max_position_embeddings": 2048}
    config = llama_config(**{**defaults, **sizes})
    made = transformers.AutoModelForCausalLM.from_config(config).eval().to(device, torch.bfloat16)
    made.generation_config.eos_token_id = None
    made.generation_config.pad_token_id = 0
    return made


def redraw_weights(model: PreTrainedModel, seed: int) -> None:
    """Redraw a model's weights so that its output depends on the past; see the module."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for parameter_name, parameter in module.named_parameters(recurse=False):
                if isinstance(module, torch.nn.Embedding):
                    parameter.normal_(0.0, 1.0, generator=generator)
                elif parameter.ndim >= 2:
                    parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5, generator=generator)
                elif parameter_name in ("sinks", "e_score_correction_bias"):
                    parameter.normal_(0.0, 1.0, generator=generator)


def prompt(
    name: str, *, batch_size: int = 1, num_tokens: int = 13, seed: int = 0
) -> dict[str, Any]:
    """Inputs for `generate`: random tokens (or a spectrogram), without padding."""
    generator = torch.Generator().manual_seed(seed)
    if name == "whisper":
        return {"input_features": torch.randn(batch_size, 8, 40, generator=generator)}
    ids = torch.randint(3, VOCABULARY, (batch_size, num_tokens), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def left_padded_prompt(*, seed: int = 0) -> dict[str, Any]:
    """Inputs for `generate`: three sequences of 13, 9 and 4 tokens, padded on the left."""
    inputs = prompt("llama", batch_size=3, seed=seed)
    for row, num_padding in enumerate((0, 4, 9)):
        inputs["input_ids"][row, :num_padding] = 0
        inputs["attention_mask"][row, :num_padding] = 0
    return inputs


STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.5, "top_k": 50},
    "beams": {"num_beams": 3},
}
#: By name: inputs for `generate`.
INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "alone": lambda: prompt("llama"),
    "unpadded": lambda: prompt("llama", batch_size=3),
    "padded": left_padded_prompt,
    "unmasked": lambda: {"input_ids": prompt("llama", batch_size=3)["input_ids"]},
}


def make_cache(config: PretrainedConfig, **options: Any) -> Any:
    """The cache under test for a model with `config`; a pair for encoder-decoder models."""
    from vmkv.hf import VMKVCache

    if config.is_encoder_decoder:
        return VMKVCache.for_encoder_decoder(config, **options)
    return VMKVCache(config, **options)


def dynamic_cache(config: PretrainedConfig) -> Any:
    """The cache of transformers: the reference of every comparison."""
    if config.is_encoder_decoder:
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    return DynamicCache(config=config)


def parts_of(cache: Any) -> list[Any]:
    """The caches of a pair, or the cache itself."""
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def contents(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """Copies of the keys and values of every layer."""
    return [
        None
        if getattr(layer, "keys", None) is None
        else (layer.keys.detach().clone(), layer.values.detach().clone())
        for part in parts_of(cache)
        for layer in part.layers
    ]


def assert_same_contents(expected: Any, actual: Any) -> None:
    """Check that every layer of both caches holds the same bits, in the same shape."""
    expected_contents, actual_contents = contents(expected), contents(actual)
    assert len(expected_contents) == len(actual_contents)
    for index, (theirs, ours) in enumerate(zip(expected_contents, actual_contents, strict=True)):
        if theirs is None or theirs[0].numel() == 0:
            assert ours is None or ours[0].numel() == 0, f"layer {index} should be empty"
            continue
        assert ours is not None, f"layer {index} is empty"
        for kind, their, our in zip(("keys", "values"), theirs, ours, strict=True):
            assert their.shape == our.shape, f"layer {index}: {kind}"
            assert torch.equal(their, our), f"layer {index}: {kind}"


def generate(model: PreTrainedModel, inputs: dict[str, Any], cache: Any, **options: Any) -> Any:
    """`model.generate` with seeded sampling; 12 new tokens by default."""
    torch.manual_seed(1234)
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": True, **options}
    with torch.no_grad():
        return model.generate(**inputs, past_key_values=cache, **options)


def forward(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    cache: Any,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits of one forward pass over `tokens: [B, T]`, which are appended to `cache`."""
    num_past = cache.get_seq_length()
    if attention_mask is None:
        attention_mask = torch.ones(tokens.shape[0], num_past + tokens.shape[1], dtype=torch.long)
    options: dict[str, Any] = {}
    if VERSION < (5, 0):
        options["cache_position"] = torch.arange(num_past, num_past + tokens.shape[1])
    return model(
        input_ids=tokens,
        attention_mask=attention_mask,
        past_key_values=cache,
        use_cache=True,
        **options,
    ).logits


#: Heads and width of the tiny models' keys.
HEADS, WIDTH = 2, 8


def keys_of(batch_size: int, num_tokens: int, seed: int, **options: Any) -> torch.Tensor:
    """Random keys or values, `[batch_size, HEADS, num_tokens, WIDTH]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch_size, HEADS, num_tokens, WIDTH, generator=generator).to(**options)


def append(
    cache: Any, num_tokens: int, *, batch_size: int = 2, seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Update every layer as one forward pass does; return the keys and values of each layer."""
    with torch.no_grad():
        return [
            cache.update(
                keys_of(batch_size, num_tokens, 1000 * seed + 2 * index),
                keys_of(batch_size, num_tokens, 1000 * seed + 2 * index + 1),
                index,
            )
            for index in range(len(cache.layers))
        ]
