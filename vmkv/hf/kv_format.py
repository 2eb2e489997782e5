"""Stored types and scales of a cache's keys and values, and the calibration of scales."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache

from ..core.cache.disk import whole_file
from ..core.cache.fp8 import FP8_MAX, LayerScales
from ..errors import ConfigError
from ..units import KV_DTYPES
from . import compat

if TYPE_CHECKING:
    from .store import CacheOptions

# ---- kv scales -----------------------------------------------------------------------------------

_FORMAT, _VERSION = "vmkv kv scales", 1
#: Other texts may exceed the measured values. In floating point, headroom costs nothing, while
#: values that do not fit are clipped.
_HEADROOM = 2.0


@dataclass(frozen=True)
class KVScales:
    """The scales of a model's keys and values, for storage in eight bits.

    Attributes:
        model: The model's name: see `model_name`.
        layers: The scales of each layer, in order.
    """

    model: str
    layers: tuple[LayerScales, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file; it takes its name when it is complete.

        Raises:
            OSError: The file cannot be written. An earlier file of this name is kept.
        """
        values = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        with whole_file(Path(path)) as file:
            file.write((json.dumps(values, indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KVScales:
        """Read a file that `save` wrote.

        Raises:
            ConfigError: It has another format, or a scale in it is no positive number.
            OSError: It cannot be read.
        """
        where = os.fspath(path)
        try:
            values = json.loads(Path(path).read_bytes())
            if (values["format"], values["version"]) != (_FORMAT, _VERSION):
                raise ConfigError(f"{where} is of format {values['format']!r}, {values['version']}")
            layers = tuple(
                LayerScales(tuple(each["keys"]), tuple(each["values"])) for each in values["layers"]
            )
            return cls(str(values["model"]), layers)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{where} holds no scales of keys and values; calibrate_kv_scales makes them"
            ) from error


def model_name(config: Any) -> str:
    """Return the last part of the path that a model was loaded from, or else its type."""
    name = str(getattr(config, "_name_or_path", "") or "").rstrip("/")
    return name.rpartition("/")[2] or str(config.model_type)


def calibrate_kv_scales(model: Any, token_ids: Iterable[Sequence[int]]) -> KVScales:
    """Measure scales by which a model's keys and values fit eight bits, with twofold headroom.

    Args:
        model: A transformers causal language model.
        token_ids: Texts to measure, each within the model's length: some thousand tokens of
            typical use.

    Raises:
        ConfigError: There are no texts, the model has layers whose state is not keys and values, or
            its keys or values are not finite.

    Cost: a forward pass over each text.
    """
    layers = compat.default_cache(model.config).layers
    while compat.keeps_nothing(layers[-1]):
        layers.pop()  # Layers that read another layer's keys come last.
    for index, layer in enumerate(layers):
        if not compat.window_of(layer)[0]:
            raise ConfigError(
                f"layer {index} is a {type(layer).__name__}, whose state is not keys and values"
            )
    device = model.get_input_embeddings().weight.device
    largest: dict[int, list[torch.Tensor]] = {}  # Of each head of a layer's keys and values.
    with torch.inference_mode():
        for tokens in token_ids:
            cache = DynamicCache()  # Without a configuration, it keeps tokens behind windows too.
            model(
                input_ids=torch.tensor([list(tokens)], device=device),
                use_cache=True,
                **{compat.cache_argument(model): cache},
            )
            for index, layer in enumerate(cache.layers):
                if layer.is_initialized:
                    both = layer.keys, layer.values
                    new = [each.float().abs().amax(dim=(0, 2, 3)).cpu() for each in both]
                    largest[index] = list(map(torch.maximum, largest.get(index, new), new))
    missing = [index for index in range(len(layers)) if index not in largest]
    if missing:
        raise ConfigError(
            f"layers {missing} were given no keys: pass some texts, of a model whose layers have "
            "keys of their own"
        )
    return KVScales(
        model_name(model.config),
        tuple(
            LayerScales(*(tuple(map(_scale, each.tolist())) for each in largest[index]))
            for index in range(len(layers))
        ),
    )


def _scale(largest: float) -> float:
    if not math.isfinite(largest):
        raise ConfigError(f"a head's keys or values reach {largest}; check the model's weights")
    # A head of zeros gets scale 1. Rounded to float32, as it will be used.
    scale = _HEADROOM * largest / FP8_MAX or 1.0
    return float(torch.tensor(scale, dtype=torch.float32))


# ---- kv format -----------------------------------------------------------------------------------

_SLIDING = "sliding"

SkipLayers = Collection[int | str] | str


def layers_in_fp8(
    config: Any, options: CacheOptions, windows: Mapping[int, int | None]
) -> tuple[frozenset[int], KVScales | None]:
    """Return the layers to store in eight bits and their scales, perhaps from a file."""
    scales, skipped = options.kv_scales, options.skip_layers
    skipped = [skipped] if isinstance(skipped, str) else list(skipped)
    if options.kv_dtype not in KV_DTYPES:
        names = " and ".join(f'"{each}"' for each in KV_DTYPES)
        raise ConfigError(f"kv_dtype={options.kv_dtype!r} is none of {names}")
    if options.kv_dtype == "auto":
        if scales is not None or skipped:
            raise ConfigError('kv_scales and skip_layers are for kv_dtype="fp8"')
        return frozenset(), None
    known = {*windows, _SLIDING}
    unknown = [each for each in skipped if isinstance(each, bool) or each not in known]
    if unknown:
        raise ConfigError(
            f'skip_layers names {unknown}; a layer is its number or "{_SLIDING}", and the cache '
            f"holds layers {sorted(windows)}"
        )
    if scales is not None and not isinstance(scales, KVScales):
        scales = KVScales.load(scales)
    if scales is not None:
        if scales.model != model_name(config):
            raise ConfigError(
                f"the scales are of {scales.model}, and the model is {model_name(config)}: "
                "calibrate this one"
            )
        num_layers = max(windows, default=-1) + 1
        if len(scales.layers) != num_layers:
            raise ConfigError(
                f"the scales are of {len(scales.layers)} layers, and the model has {num_layers}: "
                "calibrate this very model"
            )
    skips_windows = _SLIDING in skipped
    stored = {at for at, window in windows.items() if window is None or not skips_windows}
    return frozenset(stored.difference(skipped, compat.cross_attention_layers(config))), scales
