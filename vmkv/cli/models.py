"""From what a user calls a model to its configuration, its layers, its size, its weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from ..cache.geometry import LayerShape
from ..errors import ConfigError
from ..hf import compat

_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class LayerKind:
    """Layers that keep the same bytes of a token for the same time.

    Attributes:
        num_layers: How many there are.
        shape: What each keeps of a token.
        window_tokens: For sliding windows, how many tokens a query sees.
    """

    num_layers: int
    shape: LayerShape
    window_tokens: int | None

    @property
    def name(self) -> str:
        """`full`, or `window 4096`."""
        return "full" if self.window_tokens is None else f"window {self.window_tokens}"


@dataclass(frozen=True)
class ModelShape:
    """What capacity depends on.

    Attributes:
        name: The model type.
        kinds: Its layers, full attention first.
        foreign_layers: Layers without a key-value cache (linear attention and the like).
        max_context_tokens: The longest sequence it was made for, where it says.
        weights_bytes: Its parameters, None where the configuration does not tell.
        dtype: The elements' type.
    """

    name: str
    kinds: tuple[LayerKind, ...]
    foreign_layers: int
    max_context_tokens: int | None
    weights_bytes: int | None
    dtype: str


def load_config(model: str) -> Any:
    """The configuration of a model: a folder, a `config.json`, or a name on the Hub.

    Raises:
        ConfigError: There is none, or this transformers does not know its type.
    """
    path = Path(model)
    if not path.exists() and (model.endswith(".json") or model.startswith((".", "/", "~"))):
        raise ConfigError(f"there is no file or folder {model}")
    if path.is_dir() and not (path / "config.json").exists():
        raise ConfigError(
            f"{model} holds no config.json; name the folder that save_pretrained wrote"
        )
    try:
        return transformers.AutoConfig.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(_why_no_config(model, error)) from error


def _why_no_config(model: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if Path(model).exists():
        return f"{model} is no configuration that the installed transformers can read: {reason}"
    return (
        f"no model {model!r}: neither a folder or file here, nor to be had from the Hub ({reason})"
    )


def model_shape(config: Any, *, dtype: str | None = None, with_weights: bool = True) -> ModelShape:
    """What a configuration says about memory.

    Args:
        config: A transformers configuration.
        dtype: The elements' type; by default the configuration's, or bfloat16.
        with_weights: Count parameters too, by building the model without memory (a second).

    Raises:
        ConfigError: The configuration has no layers or heads, or has an encoder, or `dtype` is
            unknown.
    """
    if config.is_encoder_decoder:
        raise ConfigError(
            f"a {config.model_type} model has an encoder, whose keys and values depend on its "
            "input; vmkv plan knows decoders only"
        )
    decoder = compat.text_config(config)
    named = dtype or getattr(decoder, "dtype", None) or getattr(config, "dtype", None)
    dtype_name = str(named or "bfloat16").removeprefix("torch.")
    if dtype_name not in _DTYPES:
        raise ConfigError(f"dtype {dtype_name!r} is none of {', '.join(_DTYPES)}")
    shape = _layer_shape(decoder, getattr(torch, dtype_name).itemsize)
    windows: Counter[int | None] = Counter()
    num_foreign = 0
    for layer in compat.default_layers(config):
        is_ours, window = compat.window_of(layer)
        if is_ours:
            windows[window] += 1
        else:
            num_foreign += 1
    kinds = sorted(windows.items(), key=lambda item: item[0] or 0)
    length = getattr(decoder, "max_position_embeddings", None)
    return ModelShape(
        name=str(config.model_type),
        kinds=tuple(LayerKind(count, shape, window) for window, count in kinds),
        foreign_layers=num_foreign,
        max_context_tokens=length if isinstance(length, int) and length > 0 else None,
        weights_bytes=_weights_bytes(config, dtype_name) if with_weights else None,
        dtype=dtype_name,
    )


def _layer_shape(decoder: Any, itemsize_bytes: int) -> LayerShape:
    """Heads and widths as transformers' own layers cache them."""
    num_heads = getattr(decoder, "num_attention_heads", None)
    if not isinstance(num_heads, int):
        raise ConfigError(
            f"the configuration of {decoder.model_type} names no num_attention_heads; vmkv plan "
            "knows models with one key-value shape for all layers"
        )
    if getattr(decoder, "kv_lora_rank", None) and getattr(decoder, "qk_nope_head_dim", None):
        # Latent attention: transformers caches the keys and values after their expansion.
        k_dim = decoder.qk_nope_head_dim + decoder.qk_rope_head_dim
        return LayerShape(num_heads, k_dim, num_heads, decoder.v_head_dim, itemsize_bytes)
    num_kv_heads = getattr(decoder, "num_key_value_heads", None) or num_heads
    head_dim = getattr(decoder, "head_dim", None) or decoder.hidden_size // num_heads
    return LayerShape(num_kv_heads, head_dim, num_kv_heads, head_dim, itemsize_bytes)


def _weights_bytes(config: Any, dtype_name: str) -> int | None:
    """The parameters' bytes, or None where the model's class does not tell them so."""
    if getattr(config, "quantization_config", None) is not None:
        return None  # Stored in types that the model's class does not know.
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception:  # noqa: BLE001  # any model's constructor; the user is asked instead
        return None
    itemsize = int(getattr(torch, dtype_name).itemsize)
    return itemsize * sum(int(parameter.numel()) for parameter in model.parameters())


def load_model(model: str, *, device: str, dtype: str | None) -> Any:
    """The model with its weights, ready to serve.

    Raises:
        ConfigError: There is no such model, it is no causal language model, or the device is
            missing.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"device {device}: torch sees no CUDA device here; run `vmkv doctor`, or pass "
            "--device cpu"
        )
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype or "auto")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load {model}: {error}") from error
    return loaded.to(device).eval()


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model.

    Raises:
        ConfigError: There is none; a server cannot do without.
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer for {name}: {error}. Pass --tokenizer with a folder that has one"
        ) from error
