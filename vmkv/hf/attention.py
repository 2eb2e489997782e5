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

import functools
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from ..attention.sdpa import plain_attention, visible_keys
from ..core.cache.fp8 import FP8
from ..errors import ConfigError
from ..step.model_guard import PACKED, register_attention
from ..step.row_attention import LayerCall, in_autocast, running
from . import compat
from .layers import VirtualLayer, layer_behind, outside_graphs


@outside_graphs
def vmkv_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for one layer of a transformers model; returns `[B, Tq, Hq, Dv]` and None.

    `query` is `[B, Hq, Tq, D]`; `key` and `value` are `[B, H, T, …]`: the cache's tensors, or
    in a packed step the new tokens' alone. `attention_mask` is a result of `vmkv_mask`, None, a
    padding mask `[B, T]` or a mask `[B, 1, Tq, T]`. Of transformers' options `scaling`, `dropout`,
    `sliding_window`, `softcap`, `s_aux` (sinks `[Hq]`), `is_causal`, `position_bias` and `indices`
    (of the keys that each query sees, `[B, Tq, n]`) count.
    """
    scale, attend_packed = options.get("scaling"), running().attend
    if attend_packed is None:
        (query,) = in_autocast(query)  # The cache's tensors may be in eight bits.
    else:
        query, key, value = in_autocast(query, key, value)
    asked = LayerCall(
        query,
        key,
        value,
        query.shape[-1] ** -0.5 if scale is None else scale,
        options.get("sliding_window"),
        options.get("softcap") or 0.0,
        options.get("s_aux"),
        attention_mask,
        options.get("position_bias"),
    )
    if attend_packed is not None:
        return attend_packed(module, asked), None
    causal, dropout = options.get("is_causal"), options.get("dropout") or 0.0
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if options.get("indices") is not None:
        asked = asked._replace(mask=_selected(asked, causal, options["indices"]))
    layer = layer_behind(key)
    if layer is not layer_behind(value):
        layer = None
    if layer is not None and causal and not dropout and asked.bias is None:
        in_place = _in_place(layer, asked)
        if in_place is not None:
            return in_place, None
    if key.dtype == FP8:
        if layer is None:
            raise ConfigError(
                "keys or values in eight bits have been changed on their way to attention, which "
                'then cannot tell their scale; use another attention than "vmkv" with this model, '
                'or leave kv_dtype at "auto"'
            )
        key, value = layer.decoded()
        asked = asked._replace(key=key, value=value)
    return attend_to_tensors(asked, causal=causal, dropout=dropout), None


def _in_place(layer: VirtualLayer, asked: LayerCall) -> torch.Tensor | None:
    """Attend to the layer's rows in place; None where the mask does not allow it."""
    recipe, kept = _recipe_of(asked.mask), layer.window_tokens
    if recipe is not None and recipe.chunk is not None and layer.get_seq_length() > recipe.chunk:
        return None  # Up to that length there is one chunk.
    sees_all = recipe is not None and recipe.window is None and asked.window is None
    if sees_all and kept is not None and asked.query.shape[2] > 1 and asked.key.shape[2] > kept:
        return None  # The mask sees more of these tokens than the layer's configured window.
    # Some models state their window only in the mask.
    windows = (asked.window, None if recipe is None else recipe.window, kept)
    window = min((each for each in windows if each is not None), default=None)
    padding = asked.mask if recipe is None else recipe.padding
    return layer.attend(asked._replace(window=window), padding)


class _Recipe:
    """The arguments of an attention mask, which is built only if a layer needs it."""

    def __init__(self, plain: compat.PlainMask, arguments: dict[str, Any]):
        self.window, self.chunk = plain
        self.padding: torch.Tensor | None = arguments.get("attention_mask")
        self._arguments = arguments

    @functools.cached_property
    def skippable(self) -> torch.Tensor | None:
        """The mask; None if it is causal only, for a pass without a past."""
        return compat.explicit_mask(**self._arguments | {"allow_is_causal_skip": True})

    @functools.cached_property
    def mask(self) -> torch.Tensor:
        """The mask `[B, 1, Tq, T]`, built once for all layers that share it."""
        # A skipped mask (None) would not tell which cached tokens the queries see.
        mask = compat.explicit_mask(**self._arguments | {"allow_is_causal_skip": False})
        assert mask is not None  # Only a mask that may be skipped can be None.
        return mask


def _selected(asked: LayerCall, causal: bool, indices: torch.Tensor) -> torch.Tensor:
    """Return the call's mask, reduced to keys that the model selected: `indices [B, Tq, n]`."""
    mask = _explicit_mask(asked, causal)
    shape = (*indices.shape[:2], asked.key.shape[2])
    chosen = indices.new_zeros(shape, dtype=torch.bool).scatter(-1, indices.long(), value=True)
    if mask is not None and mask.dtype != torch.bool:
        return mask.masked_fill(~chosen[:, None], torch.finfo(mask.dtype).min)
    return chosen[:, None] if mask is None else chosen[:, None] & mask


class _Carrier(torch.Tensor):
    """A mask `[B, 1, Tq, T]` without memory; operations on it make the real one first."""

    _vmkv_recipe: _Recipe

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") == "__get__" or func in _OF_CARRIERS:
                out = func(*args, **kwargs or {})
                if out is args[0] or not isinstance(out, torch.Tensor):
                    return out
            # Eager attention adds it, if an engine gave the model back in the middle of a pass.
            adds = args and "add" in getattr(func, "__name__", "") and args[0].is_floating_point()

            def real(its: _Carrier) -> torch.Tensor:
                mask = its._vmkv_recipe.mask
                if not adds or mask.dtype != torch.bool:
                    return mask
                return torch.where(mask, 0.0, torch.finfo(args[0].dtype).min).to(args[0].dtype)

            args, kwargs = tree_map_only(cls, real, (args, kwargs or {}))
            return func(*args, **kwargs)


#: Methods that look at the carrier itself, or may return it.
_OF_CARRIERS = (torch.Tensor.size, torch.Tensor.dim, torch.Tensor.to)


def _recipe_of(mask: torch.Tensor | None) -> _Recipe | None:
    return getattr(mask, "_vmkv_recipe", None)


_mask_apart = outside_graphs(compat.explicit_mask)


def vmkv_mask(**arguments: Any) -> torch.Tensor | None:
    """Prepare the mask for `vmkv_attention`, once per step: a carrier of its recipe if it is plain.

    transformers builds any other mask. `ConfigError` for models with attention code of their own.
    """
    if torch.compiler.is_compiling():  # Compilers need memory behind each tensor.
        return _mask_apart(**arguments)
    kind: Any = type(arguments.get("config"))
    if not any(compat.takes_attention(kind)):
        raise ConfigError(
            f"{kind.__name__}: transformers serves such models neither with "
            '"sdpa" nor with attention functions of others, because they attend by code of their '
            'own; use attn_implementation="eager"'
        )
    plain = compat.plain_mask(arguments.get("mask_function"))
    if plain is None or isinstance(arguments.get("q_offset"), torch.Tensor):
        # A static cache counts its tokens in a tensor, which changes later: build the mask now.
        return compat.explicit_mask(**arguments)
    padding = arguments.get("attention_mask")
    if isinstance(padding, torch.Tensor) and hasattr(padding, "_vmkv_recipe"):
        return padding  # `generate` has made it already and passes it in again.
    # On the right device, because a copy to another one would be the mask itself.
    like: Any = arguments.get("cache_position")
    if isinstance(like, torch.Tensor):
        num_queries, device = len(like), like.device
    else:
        num_queries, device = arguments["q_length"], arguments["device"]
    shape = (arguments["batch_size"], 1, num_queries, arguments["kv_length"])
    carrier = torch.empty((), dtype=compat.mask_dtype(arguments), device=device).expand(shape)
    carrier = carrier.as_subclass(_Carrier)
    carrier._vmkv_recipe = _Recipe(plain, arguments)
    return carrier


def attend_to_tensors(asked: LayerCall, *, causal: bool, dropout: float = 0.0) -> torch.Tensor:
    """Attend to the call's own keys: SDPA where possible; returns `[B, Tq, Hq, Dv]`."""
    query, key, value, bias = asked.query, asked.key, asked.value, asked.bias
    recipe, is_plain = _recipe_of(asked.mask), bias is None and not asked.softcap
    is_plain = is_plain and causal and asked.sinks is None
    if recipe is not None and is_plain and query.shape[2] == key.shape[2] > 1:
        mask = recipe.skippable  # The faster kernels of SDPA take no mask.
        is_plain = mask is None
    else:
        mask, is_plain = _explicit_mask(asked, causal), False
    if bias is not None:
        if mask is None:
            mask = bias
        elif mask.dtype == torch.bool:
            mask = bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
        else:
            mask = bias + mask
    if not asked.softcap and asked.sinks is None:
        gqa = query.shape[1] > key.shape[1]
        out = functional.scaled_dot_product_attention(
            query, key, value, mask, dropout, is_plain, scale=asked.scale, enable_gqa=gqa
        )
    else:
        out = plain_attention(
            query,
            key,
            value,
            mask,
            scale=asked.scale,
            softcap=asked.softcap,
            sinks=asked.sinks,
            dropout=dropout,
        )
    return out.transpose(1, 2).contiguous()


def _explicit_mask(asked: LayerCall, causal: bool) -> torch.Tensor | None:
    recipe = _recipe_of(asked.mask)
    if recipe is not None:
        return recipe.mask
    if asked.mask is not None and asked.mask.ndim == 4:
        return asked.mask
    num_queries, num_keys = asked.query.shape[2], asked.key.shape[2]
    padding, mask = asked.mask, None
    if causal:
        mask = visible_keys(num_queries, num_keys, asked.window, asked.query.device)[None, None]
    if padding is not None and padding.ndim == 2:
        kept = padding[:, None, None, -num_keys:].bool()
        mask = kept if mask is None else mask & kept
    return mask


def register() -> None:
    """Register `"vmkv"` with transformers, as attention and as mask. Idempotent."""
    register_attention(PACKED, vmkv_attention, vmkv_mask)
