"""Loads a model's configuration, layers, size, weights and tokenizer by its name or folder."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from ..core.cache.fp8 import FP8
from ..core.cache.geometry import LayerShape
from ..errors import CapacityError, ConfigError, one_line, shown
from ..hf import compat, probe
from ..hf.configuration import stated_max_tokens
from ..serve.parallel import sharding
from .arguments import DTYPES

#: More layers are a mistake, and would take hours to build.
_LAYERS_MAX = 10_000


@dataclass(frozen=True)
class LayerKind:
    """Layers that keep the same bytes of a token for the same time.

    Attributes:
        num_layers: Number of layers.
        shape: Keys and values of a token in one layer.
        window_tokens: Tokens that a query sees, for sliding windows.
        is_paged: Whether vmkv pages them; other layers stay in transformers' tensors.
        extra_token_bytes: Bytes of a token in one layer besides key and value.
    """

    num_layers: int
    shape: LayerShape
    window_tokens: int | None
    is_paged: bool = True
    extra_token_bytes: int = 0

    @property
    def name(self) -> str:
        """`full` or `window 4096`; with a star if vmkv does not page it."""
        name = "full" if self.window_tokens is None else f"window {self.window_tokens}"
        return name if self.is_paged else f"{name} *"

    @property
    def cached_token_bytes(self) -> int:
        """Bytes of a token in all of these layers in transformers' own cache."""
        shape = self.shape
        return self.num_layers * (shape.k_bytes + shape.v_bytes + self.extra_token_bytes)


@dataclass(frozen=True)
class ModelShape:
    """Properties of a model that determine its capacity.

    Attributes:
        name: The model type.
        kinds: Layers that keep keys and values; paged ones first, then full ones.
        idle_layers: Number of layers that keep none (linear attention, reused keys, no attention).
        state_bytes: State of a sequence in all layers that does not depend on its length.
        max_context_tokens: The configuration's longest sequence, or None.
        weights_bytes: Bytes of the parameters, or None if unknown.
        dtype: Type of keys and values.
    """

    name: str
    kinds: tuple[LayerKind, ...]
    idle_layers: int
    state_bytes: int
    max_context_tokens: int | None
    weights_bytes: int | None
    dtype: str


def be_quiet(*, with_progress: bool) -> None:
    """Silence transformers' logging in this process, and its progress bars if not wanted."""
    transformers.logging.set_verbosity_error()
    if not with_progress:
        transformers.logging.disable_progress_bar()


def load_config(model: str) -> Any:
    """Load the configuration of a folder, file or Hub name; raises `ConfigError` if it cannot."""
    path = Path(model)
    is_path = model.endswith(".json") or model.startswith((".", "/", "~"))
    try:
        # Opening a pipe would block, and transformers takes it for a name on the Hub.
        is_folder, is_there = path.is_dir(), path.is_dir() or path.is_file()
        has_config = is_folder and (path / "config.json").is_file()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{shown(model)} cannot be read: {one_line(error)}") from error
    if is_path and not is_there:
        raise ConfigError(f"there is no file or folder {model}")
    if is_folder and not has_config:
        raise ConfigError(
            f"{model} holds no config.json; name the folder that save_pretrained wrote"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
        num_layers = getattr(compat.text_config(config), "num_hidden_layers", 1)
    except Exception as error:  # a file or the Hub may hold anything
        raise ConfigError(_why_no_config(model, error)) from error
    if not isinstance(num_layers, int) or not 0 < num_layers <= _LAYERS_MAX:
        raise ConfigError(f"{model} names {num_layers} layers; 1 to {_LAYERS_MAX:,} are believed")
    return config


def _why_no_config(model: str, error: Exception) -> str:
    reason = one_line(error)
    if Path(model).exists():
        return f"{model} is no configuration that the installed transformers can read: {reason}"
    return (
        f"no model {model!r}: neither a folder or file here, nor to be had from the Hub ({reason})"
    )


def model_shape(config: Any, *, dtype: str | None = None, kv_dtype: str = "auto") -> ModelShape:
    """Derive a model's memory from its configuration, in seconds and without memory for weights.

    `dtype` is by default the configuration's, or bfloat16; for `kv_dtype` see `VMKVCache`. Raises
    `ConfigError` for an encoder, no key-value cache, an unknown `dtype`, or a model that
    transformers cannot build.
    """
    if config.is_encoder_decoder:
        raise ConfigError(
            f"a {config.model_type} model has an encoder, whose keys and values depend on its "
            "input; vmkv plan knows decoders only"
        )
    decoder = compat.text_config(config)
    named = dtype or getattr(decoder, "dtype", None) or getattr(config, "dtype", None)
    dtype_name = str(named or "bfloat16").removeprefix("torch.")
    if dtype_name not in DTYPES:
        raise ConfigError(f"dtype {dtype_name!r} is none of {', '.join(DTYPES)}")
    model = probe.build_without_weights(config, getattr(torch, dtype_name))
    layers = [_stored(layer, kv_dtype) for layer in probe.kept_layers(model)]
    kinds = Counter(
        (layer.shape, layer.window_tokens, layer.is_paged, layer.extra_token_bytes)
        for layer in layers
        if layer.shape is not None
    )
    ordered = sorted(kinds.items(), key=lambda item: (not item[0][2], item[0][1] or 0))
    return ModelShape(
        name=str(config.model_type),
        kinds=tuple(LayerKind(number, *kind) for kind, number in ordered),
        idle_layers=sum(layer.shape is None for layer in layers),
        state_bytes=sum(layer.fixed_bytes for layer in layers),
        max_context_tokens=stated_max_tokens(decoder),
        weights_bytes=_weights_bytes(model),
        dtype=dtype_name if kv_dtype == "auto" else kv_dtype,
    )


def rank_shape(config: Any, shape: ModelShape, num_ranks: int) -> ModelShape:
    """Divide a model's `shape` among ranks; raises `ConfigError` if it cannot be divided."""
    model = probe.build_without_weights(config, torch.bfloat16)
    plan = sharding.plan_of(model)
    sharding.check_heads(config, plan, num_ranks)
    divisor = sharding.kv_heads_divisor(plan, num_ranks)
    weights_bytes = shape.weights_bytes
    if weights_bytes is not None:
        # Scale, since the weights may have another type than this model.
        share = sharding.bytes_per_rank(model, plan, num_ranks)
        weights_bytes = weights_bytes * share // sum(each.nbytes for each in model.parameters())
    kinds = [
        replace(
            kind,
            shape=replace(
                kind.shape,
                num_k_heads=kind.shape.num_k_heads // divisor,
                num_v_heads=kind.shape.num_v_heads // divisor,
            ),
        )
        for kind in shape.kinds
    ]
    return replace(shape, kinds=tuple(kinds), weights_bytes=weights_bytes)


def _stored(layer: probe.KeptLayer, kv_dtype: str) -> probe.KeptLayer:
    """Apply `kv_dtype` to a layer that vmkv pages."""
    if kv_dtype != "fp8" or not layer.is_paged or layer.shape is None:
        return layer
    return replace(layer, shape=replace(layer.shape, itemsize_bytes=FP8.itemsize))


def _weights_bytes(model: Any) -> int | None:
    """Return the parameters' bytes, or None for quantized ones, whose size is unknown here."""
    if getattr(model.config, "quantization_config", None) is not None:
        return None
    return sum(int(parameter.nbytes) for parameter in model.parameters())


def load_model(model: str, *, device: str, dtype: str | None) -> Any:
    """Load a model with its weights onto a device, in eval mode.

    Raises:
        ConfigError: It is not a causal language model with all its weights, or there is no such
            device.
        CapacityError: Its weights do not fit the device.
    """
    check_device(device)
    try:
        if (Path(model) / "generation_config.json").exists():
            # transformers ignores a broken file, and texts would then never end.
            transformers.GenerationConfig.from_pretrained(model)
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype or "auto", trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # a folder or the Hub may hold anything
        raise ConfigError(f"cannot load {model}: {one_line(error)}") from error
    missing = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if missing:
        # transformers only warns, and initialises them randomly.
        raise ConfigError(
            f"{model} lacks {len(missing)} weights, such as {missing[0]}: is it a whole causal "
            "language model?"
        )
    try:
        return loaded.to(device).eval()
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"the weights of {model} do not fit {device}: {one_line(error)}"
        ) from error


def check_device(device: str) -> None:
    """Check that this machine has a device; raises `ConfigError` otherwise."""
    if not device.startswith("cuda"):
        return
    index = torch.device(device).index or 0
    if not torch.cuda.is_available():
        raise ConfigError("torch sees no CUDA device here; run `vmkv doctor`, or pass --device cpu")
    if index >= torch.cuda.device_count():
        raise ConfigError(f"there is no device cuda:{index}; there are {torch.cuda.device_count()}")


def load_tokenizer(name: str) -> Any:
    """Load a model's tokenizer; raises `ConfigError` if it has none."""
    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # a folder or the Hub may hold anything
        raise ConfigError(
            f"no tokenizer for {name}: {one_line(error)}; pass --tokenizer with a folder that has "
            "one"
        ) from error
