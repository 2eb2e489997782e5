"""Keys and values in eight bits: `float8_e4m3fn`, optionally divided by a scale per head.

Four exponent bits cover 2^-9 to 448 and three mantissa bits a relative step of 1/16. Values beyond
448 saturate, because the NaN that a plain conversion makes of them would spread to every token that
attends to it. A scale shifts the range and leaves the precision as it is.

    stored = saturated(x / scale)        x' = stored * scale
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...errors import ConfigError
from .geometry import LayerShape

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest finite number of the format."""

#: Within these limits a scale, its inverse, and their products with stored numbers are normal
#: float32 numbers.
_SCALE_MIN, _SCALE_MAX = 2.0**-64, 2.0**64


@dataclass(frozen=True)
class LayerScales:
    """The scales of one layer, one positive number per key head and value head."""

    keys: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("keys", "values"):
            for head, scale in enumerate(getattr(self, name)):
                is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
                if not is_number or not _SCALE_MIN <= scale <= _SCALE_MAX:
                    raise ConfigError(
                        f"the scale of {name} of head {head} is {scale!r}; scales are positive "
                        f"numbers from {_SCALE_MIN:.0e} to {_SCALE_MAX:.0e}"
                    )


class Scales(NamedTuple):
    """The scales of one layer on its device, and their inverses: `[heads] float32` each.

    Stored numbers are multiplied by the scales, numbers to store by the inverses.
    """

    keys: torch.Tensor
    values: torch.Tensor
    inverse_keys: torch.Tensor
    inverse_values: torch.Tensor

    @classmethod
    def of(cls, scales: LayerScales, device: torch.device) -> Scales:
        """Copy scales to a device, as ordinary (not inference) tensors."""
        with torch.inference_mode(mode=False), torch.no_grad():
            keys, values = torch.tensor(scales.keys), torch.tensor(scales.values)
            # Inverted on the CPU, so that every device multiplies by the same numbers.
            return cls(*(each.to(device) for each in (keys, values, 1 / keys, 1 / values)))

    def of_heads(self, of_keys: slice, of_values: slice) -> Scales:
        """Return the scales of some heads of keys, and of some of values."""
        keys, values, inverse_keys, inverse_values = self
        return Scales(
            keys[of_keys], values[of_values], inverse_keys[of_keys], inverse_values[of_values]
        )


def check_layer_scales(
    scales: Sequence[LayerScales], layers: Sequence[int], shape: LayerShape, dtype: torch.dtype
) -> None:
    """Raise `ConfigError` unless `dtype` is eight bits and each head of each layer has a scale."""
    if dtype != FP8:
        raise ConfigError(f"scales are for {FP8}; what is stored as {dtype} has none")
    if len(scales) != len(layers):
        raise ConfigError(f"{len(scales)} layers have scales, and {len(layers)} are added")
    for layer, each in zip(layers, scales, strict=True):
        got, wanted = (len(each.keys), len(each.values)), (shape.num_k_heads, shape.num_v_heads)
        if got != wanted:
            raise ConfigError(
                f"layer {layer} has {wanted[0]} key and {wanted[1]} value heads, and scales for "
                f"{got[0]} and {got[1]}; calibrate this very model"
            )


def encode(
    numbers: torch.Tensor, inverse: torch.Tensor | None = None, *, heads_at: int = -2
) -> torch.Tensor:
    """Convert floating-point numbers to eight bits, saturated; returns a new tensor.

    `inverse` is `[heads]`, None for 1; `heads_at` is the heads' dimension, counted from the end.
    """
    if inverse is not None:
        numbers = numbers.float() * _along(inverse, heads_at)
    return numbers.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def decode(
    stored: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype, *, heads_at: int = -2
) -> torch.Tensor:
    """Convert stored numbers to `dtype`, times their scale; other types are returned unchanged."""
    if stored.dtype != FP8:
        return stored
    if scale is None:
        return stored.to(dtype)  # Exact in every type of 16 bits or more.
    wide = torch.promote_types(dtype, torch.float32)
    return (stored.to(wide) * _along(scale, heads_at)).to(dtype)


def _along(scale: torch.Tensor, heads_at: int) -> torch.Tensor:
    return scale.view(-1, *[1] * (-heads_at - 1))
