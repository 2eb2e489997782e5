"""Stored types and scales of a cache's keys and values, and the calibration of scales."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from ..core.cache.disk import whole_file
from ..core.cache.fp8 import FP8, FP8_MAX, LayerScales
from ..errors import ConfigError
from . import compat

# ---- kv scales -----------------------------------------------------------------------------------

_FORMAT, _VERSION = "vmkv kv scales", 1
#: Other texts may exceed the measured values. In floating point, headroom costs nothing, while
#: values that do not fit are clipped.
_HEADROOM = 2.0
#: More than the scales of any model need.
_FILE_BYTES_MAX = 64 << 20


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
        values = {
            "format": _FORMAT,
            "version": _VERSION,
            "model": self.model,
            "layers": [
                {"keys": each.as_values()[0], "values": each.as_values()[1]} for each in self.layers
            ],
        }
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
        with open(where, "rb") as file:
            data = file.read(_FILE_BYTES_MAX)
        try:
            values = json.loads(data)
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
    reach = _Reach(compat.default_layers(model.config))
    device = model.get_input_embeddings().weight.device
    with torch.inference_mode():
        for tokens in token_ids:
            cache = compat.default_cache(model.config)
            reach.watch(cache)
            model(
                input_ids=torch.tensor([list(tokens)], device=device),
                past_key_values=cache,
                use_cache=True,
            )
    return KVScales(model_name(model.config), reach.scales())


class _Reach:
    """The largest absolute keys and values of each head of each layer."""

    def __init__(self, layers: Sequence[Any]):
        self._num_layers = len(layers)
        for index, layer in enumerate(layers):
            if not compat.window_of(layer)[0]:
                raise ConfigError(
                    f"layer {index} is a {type(layer).__name__}, whose state is not keys and values"
                )
        self._largest: dict[int, list[torch.Tensor]] = {}

    def watch(self, cache: DynamicCache) -> None:
        """Record everything that `cache` is given from now on."""
        for index, layer in enumerate(cache.layers):
            layer.update = self._looking(index, layer.update)

    def _looking(self, index: int, update: Any) -> Any:
        def look(keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            new = [each.float().abs().amax(dim=(0, 2, 3)).cpu() for each in (keys, values)]
            known = self._largest.get(index, new)
            self._largest[index] = [torch.maximum(*pair) for pair in zip(known, new, strict=True)]
            return update(keys, values, *args, **kwargs)

        return look

    def scales(self) -> tuple[LayerScales, ...]:
        """Return scales that fit all recorded values."""
        missing = set(range(self._num_layers)) - self._largest.keys()
        if missing:
            raise ConfigError(
                f"layers {sorted(missing)} were given no keys: pass some texts, of a model whose "
                "layers have keys of their own"
            )
        return tuple(
            LayerScales(*(tuple(map(_scale, each.tolist())) for each in self._largest[index]))
            for index in range(self._num_layers)
        )


def _scale(largest: float) -> float:
    if not math.isfinite(largest):
        raise ConfigError(f"a head's keys or values reach {largest}; is the model whole?")
    # A head of zeros gets scale 1. Rounded to float32, as it will be used.
    scale = _HEADROOM * largest / FP8_MAX or 1.0
    return float(torch.tensor(scale, dtype=torch.float32))


# ---- kv format -----------------------------------------------------------------------------------

KV_DTYPES = ("auto", "fp8")
"""Values of `kv_dtype`: the model's own type, or eight bits (`float8_e4m3fn`)."""
_SLIDING = "sliding"

SkipLayers = Collection[int | str] | str


@dataclass(frozen=True)
class KVFormat:
    """The stored types and scales of a cache's layers.

    Without `scales` they are 1. Layers in `skipped`, and with `skips_sliding` those with a sliding
    window, stay in the model's type.
    """

    is_fp8: bool = False
    scales: KVScales | None = None
    skipped: frozenset[int] = frozenset()
    skips_sliding: bool = False

    @classmethod
    def of(
        cls,
        config: Any,
        kv_dtype: str,
        kv_scales: KVScales | str | os.PathLike[str] | None,
        skip_layers: SkipLayers,
    ) -> KVFormat:
        """Make the format that the arguments of `VMKVCache` describe, reading a file of scales."""
        if kv_dtype not in KV_DTYPES:
            names = " and ".join(f'"{each}"' for each in KV_DTYPES)
            raise ConfigError(f"kv_dtype={kv_dtype!r} is none of {names}")
        skipped = {skip_layers} if isinstance(skip_layers, str) else set(skip_layers)
        if kv_dtype == "auto":
            if kv_scales is not None or skipped:
                raise ConfigError('kv_scales and skip_layers are for kv_dtype="fp8"')
            return cls()
        for each in skipped:
            is_index = isinstance(each, int) and not isinstance(each, bool) and each >= 0
            if not is_index and each != _SLIDING:
                raise ConfigError(
                    f'skip_layers names {each!r}; a layer is its number, from 0 on, or "{_SLIDING}"'
                )
        if kv_scales is not None and not isinstance(kv_scales, KVScales):
            kv_scales = KVScales.load(kv_scales)
        if kv_scales is not None and kv_scales.model != model_name(config):
            raise ConfigError(
                f"the scales are of {kv_scales.model}, and the model is {model_name(config)}: "
                "calibrate this one"
            )
        indices = frozenset(each for each in skipped if isinstance(each, int))
        return cls(True, kv_scales, indices, _SLIDING in skipped)

    def check(self, layers: Iterable[int]) -> None:
        """Raise `ConfigError` if skipped layers or scales do not match the indices `layers`."""
        known = set(layers)
        if self.skipped - known:
            raise ConfigError(
                f"skip_layers names {sorted(self.skipped - known)}, and the cache holds layers "
                f"{sorted(known)}"
            )
        num_layers = max(known, default=-1) + 1
        if self.scales is not None and len(self.scales.layers) != num_layers:
            raise ConfigError(
                f"the scales are of {len(self.scales.layers)} layers, and the model has "
                f"{num_layers}: calibrate this very model"
            )

    def stored(self, index: int, window_tokens: int | None, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which a layer of a model in `dtype` is stored."""
        is_skipped = index in self.skipped or (self.skips_sliding and window_tokens is not None)
        return FP8 if self.is_fp8 and not is_skipped else dtype

    def scales_of(self, indices: Iterable[int]) -> list[LayerScales] | None:
        """Return the scales of the layers `indices`; None for 1."""
        if self.scales is None:
            return None
        return [self.scales.layers[index] for index in indices]
