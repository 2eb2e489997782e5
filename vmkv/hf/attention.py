"""The `"vmkv"` attention implementation for transformers.

    model.set_attn_implementation("vmkv")

With a `VMKVCache`, a stock kernel (`vmkv.attention`) reads the rows in place: left-padded batches
are not copied (transformers' flash paths copy the past up to three times per step), and no layer
waits for the device. In a packed step (`vmkv.step`) the step's batch attends. Everything else
(another cache, transformed keys, bidirectional or custom masks) goes to torch's SDPA with an
explicit mask.

The layer is found through an attribute of the keys that `update` returned, because models do not
pass the cache to attention. Transformed keys lose the attribute and must not be read in place.

See DESIGN.md, Note [Masks that are not tensors].
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn import functional

from ..core.cache.fp8 import FP8
from ..errors import ConfigError
from ..step.model_guard import PACKED, attending_through, register_attention
from . import compat
from .layers import VirtualLayer, layer_behind
from .unservable import UnservableError


def vmkv_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    vmkv_batch: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for one layer of a transformers model; returns `[B, Tq, Hq, Dv]` and None.

    `query` is `[B, Hq, Tq, D]`; `key` and `value` are `[B, H, T, …]`: the cache's tensors, or
    in a packed step (`vmkv_batch`) the new tokens' alone. `attention_mask` is a result of
    `vmkv_mask`, None, a padding mask `[B, T]` or a mask `[B, 1, Tq, T]`; `s_aux` are sinks `[Hq]`.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap = softcap or 0.0
    if vmkv_batch is not None:
        out = vmkv_batch.attend(
            module,
            query,
            key,
            value,
            scale=scale,
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
            mask=attention_mask,
            bias=kwargs.get("position_bias"),
        )
        return out, None
    if getattr(attention_mask, "_vmkv_placeholder", False):
        raise UnservableError(
            f"its {type(module).__name__} hands its attention less than the model is called with"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    recipe: _Recipe | None = getattr(attention_mask, "_vmkv_recipe", None)
    bias = kwargs.get("position_bias")
    layer = layer_behind(key)
    if layer is not layer_behind(value):
        layer = None
    if layer is not None and causal and not dropout and bias is None:
        in_place = _in_place(
            layer, query, key, value, attention_mask, recipe, scale, sliding_window, softcap, s_aux
        )
        if in_place is not None:
            return in_place, None
    if key.dtype == FP8:
        key, value = _decoded(layer)
    mask: torch.Tensor | None
    if recipe is not None:
        mask = recipe.build()
    elif attention_mask is None or attention_mask.ndim != 4:
        mask = _explicit_mask(query, key, attention_mask, causal, sliding_window)
    else:
        mask = attention_mask
    return _plain(query, key, value, mask, bias, scale, dropout, softcap, s_aux), None


def _in_place(
    layer: VirtualLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    recipe: _Recipe | None,
    scale: float,
    sliding_window: int | None,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor | None:
    """Attend to the layer's rows in place; None where the mask does not allow it."""
    padding = attention_mask if recipe is None else recipe.padding
    batch = layer.attention_batch(query.shape[2], padding)
    if batch is None:
        return None
    sees_all = recipe is not None and recipe.window is None and sliding_window is None
    kept_tokens = layer.window_tokens
    if sees_all and kept_tokens is not None and query.shape[2] > 1 and key.shape[2] > kept_tokens:
        return None  # The mask sees more of these tokens than the layer's configured window.
    # Some models state their window only in the mask.
    windows = (sliding_window, None if recipe is None else recipe.window, layer.window_tokens)
    window = min((each for each in windows if each is not None), default=None)
    keys, values = layer.rows()
    backend = layer.backend_for(
        query,
        key,
        value,
        window=window,
        softcap=softcap,
        has_sinks=sinks is not None,
        left_pad=batch.left_pad is not None,
        kv_dtype=keys.dtype,
        max_tokens=layer.max_tokens,
    )
    packed = query.transpose(1, 2).reshape(-1, query.shape[1], query.shape[3])
    out = backend.forward(
        packed,
        keys,
        values,
        batch,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        scales=layer.scales,
    )
    return out.view(query.shape[0], query.shape[2], query.shape[1], -1)


def _decoded(layer: VirtualLayer | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode keys and values stored in eight bits for attention that cannot read them."""
    if layer is None:
        raise ConfigError(
            "keys or values in eight bits have been changed on their way to attention, which then "
            'cannot tell their scale; use another attention than "vmkv" with this model, or leave '
            'kv_dtype at "auto"'
        )
    return layer.decoded()


class _Recipe:
    """The arguments of an attention mask, which is built only if a layer needs it."""

    def __init__(self, window: int | None, arguments: dict[str, Any]):
        self.window = window
        self.padding: torch.Tensor | None = arguments.get("attention_mask")
        self._arguments = arguments
        self._mask: torch.Tensor | None = None

    def build(self) -> torch.Tensor:
        """Return the mask `[B, 1, Tq, T]`, built once for all layers that share it."""
        if self._mask is None:
            # A skipped mask (None) would not tell which cached tokens the queries see.
            self._mask = compat.sdpa_mask(**self._arguments | {"allow_is_causal_skip": False})
        assert self._mask is not None  # Only a mask that may be skipped can be None.
        return self._mask


def vmkv_mask(**arguments: Any) -> torch.Tensor | None:
    """Prepare the mask that transformers passes to `vmkv_attention`, once per step.

    A causal or sliding-window mask becomes an empty tensor that carries a `_Recipe`, since the
    padding mask is enough to read rows in place. transformers builds any other mask, as for SDPA.
    """
    plain = compat.plain_mask(arguments.get("mask_function"))
    if plain is None or isinstance(arguments.get("q_offset"), torch.Tensor):
        # A static cache counts its tokens in a tensor, which changes later: build the mask now.
        return compat.sdpa_mask(**arguments)
    padding = arguments.get("attention_mask")
    if isinstance(padding, torch.Tensor) and hasattr(padding, "_vmkv_recipe"):
        return padding  # `generate` has made it already and passes it in again.
    # Two dimensions, like flash attention's masks, so that models pass it on unchanged; on the
    # right device, because a copy to another one would lose the attribute.
    like = arguments.get("cache_position")
    device = like.device if isinstance(like, torch.Tensor) else arguments.get("device")
    shape = (int(arguments["batch_size"]), 0)
    carrier = torch.empty(shape, dtype=torch.bool, device=device)
    carrier._vmkv_recipe = _Recipe(plain.window, arguments)  # type: ignore[attr-defined]
    return carrier


def _explicit_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    padding: torch.Tensor | None,
    causal: bool,
    window: int | None,
) -> torch.Tensor | None:
    """Build a mask `[B or 1, 1, Tq, T]`, true where a query sees a key; None if all see all."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask = None
    if causal:
        at = torch.arange(num_keys, device=query.device)
        last = torch.arange(num_keys - num_queries, num_keys, device=query.device)[:, None]
        mask = at <= last
        if window is not None:
            mask &= at > last - window
        mask = mask[None, None]
    if padding is not None and padding.ndim == 2:
        kept = padding[:, None, None, -num_keys:].bool()
        mask = kept if mask is None else mask & kept
    return mask


def _plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float,
    dropout: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend to the given tensors: SDPA where possible, explicit scores for softcap and sinks."""
    groups = query.shape[1] // key.shape[1]
    if not softcap and sinks is None:
        if bias is not None:
            if mask is not None and mask.dtype == torch.bool:
                bias = bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
            elif mask is not None:
                bias = bias + mask
            mask = bias
        out = functional.scaled_dot_product_attention(
            query, key, value, mask, dropout, scale=scale, enable_gqa=groups > 1
        )
        return out.transpose(1, 2).contiguous()
    key = key.repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(2, 3)).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = functional.dropout(weights.to(value.dtype), dropout)
    return (weights @ value).transpose(1, 2).contiguous()


def register() -> None:
    """Register `"vmkv"` with transformers, as attention and as mask. Idempotent."""
    register_attention(PACKED, vmkv_attention, vmkv_mask)


def attending_in_place(model: Any) -> contextlib.AbstractContextManager[None]:
    """Make the model attend through `"vmkv"` inside a `with` block."""
    register()
    return attending_through(model, PACKED)
