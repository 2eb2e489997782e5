"""What a cache stores keys and values as, layer by layer, as its user asked."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..cache.fp8 import FP8, LayerScales
from ..errors import ConfigError
from .kv_scales import KVScales, model_name

KV_DTYPES = ("auto", "fp8")
"""What `kv_dtype` may be: the model's own type, or eight bits (`float8_e4m3fn`)."""
_SLIDING = "sliding"

SkipLayers = Collection[int | str] | str


@dataclass(frozen=True)
class KVFormat:
    """The types and scales of a cache's layers.

    Attributes:
        is_fp8: Whether layers are stored in eight bits.
        scales: Of all layers; None for 1.
        skipped: Layers that stay in the model's type.
        skips_sliding: Whether those with a sliding window do.
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
        """What the arguments of a cache mean; see `VMKVCache`.

        Raises:
            ConfigError: They mean nothing, or the scales are another model's.
            OSError: The scales cannot be read.
        """
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
        """Raise `ConfigError` unless layers that are named, and scales, are of `layers`."""
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
        """What a layer of a model in `dtype` is stored as."""
        is_skipped = index in self.skipped or (self.skips_sliding and window_tokens is not None)
        return FP8 if self.is_fp8 and not is_skipped else dtype

    def scales_of(self, indices: Iterable[int]) -> list[LayerScales] | None:
        """The scales of layers that are stored in eight bits."""
        if self.scales is None:
            return None
        return [self.scales.layers[index] for index in indices]
