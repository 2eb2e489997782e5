"""Attention over rows as an operator that compilers see as one opaque call.

`"vmkv_rows"` is an attention implementation of transformers, as `"vmkv"` is, for models whose
layers are compiled and captured: a layer's place is a tensor beside the layer, not a Python number
in its code, so that one compiled layer serves all of them; and what the step is (rows, lengths)
never passes through the model's code at all.

An operator takes tensors and numbers, so it finds its cache by a number: `attending` keeps the
process-wide table that this needs. It holds nothing alive: Note [State of the process].
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import ClosedError, ConfigError
from .model_guard import attending_through, numbered_layers, register_attention
from .row_attention import RowAttention

IMPLEMENTATION = "vmkv_rows"
"""The name among transformers' attention implementations."""

_PLACE = "_vmkv_place"
_NUMBERS = itertools.count()


_SERVING: weakref.WeakValueDictionary[int, RowAttention] = weakref.WeakValueDictionary()

# torch leaves the library untyped.
_LIBRARY: Any = torch.library.Library("vmkv", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "attend_rows(Tensor query, Tensor key, Tensor value, Tensor place, Tensor? sinks, "
    "float scale, int window, float softcap, Tensor? cos=None, Tensor? sin=None) -> Tensor"
)


def _attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    place: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
) -> torch.Tensor:
    """Append and attend; with angles, queries and keys are turned first (`rotary.py`).

    That rows are written is no business of a compiler: no tensor that it sees aliases them, and
    each layer's call depends on the one before through the activations.
    """
    number, layer = place.tolist()  # On the CPU: no synchronisation.
    serving = _SERVING.get(number)
    if serving is None:
        raise ClosedError("the runner that this model was set up for is closed")
    return serving.attend(
        layer,
        query,
        key,
        value,
        scale=scale,
        window=window or None,
        softcap=softcap,
        sinks=sinks,
        angles=None if cos is None or sin is None else (cos, sin),
    )


def _shape_of_attend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attend_rows", _attend_rows, _key)
torch.library.register_fake("vmkv::attend_rows", _shape_of_attend_rows, lib=_LIBRARY)


def rows_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every attention layer; arguments as `vmkv_attention`."""
    out = torch.ops.vmkv.attend_rows(
        query,
        key,
        value,
        getattr(module, _PLACE),
        s_aux,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window or 0,
        softcap or 0.0,
    )
    return out, None


@contextlib.contextmanager
def attending(model: Any, attention: RowAttention) -> Iterator[None]:
    """While this lasts, the model's layers attend through `attention`.

    Raises:
        ConfigError: Another stepper has the model, or no layer says which one it is.
    """
    check_free(model)
    layers = list(numbered_layers(model))
    if not layers:
        raise ConfigError("no layer of this model says which one it is (layer_idx)")
    register_attention(IMPLEMENTATION, rows_attention, _no_mask)
    number = next(_NUMBERS)
    _SERVING[number] = attention
    try:
        for module, layer in layers:
            setattr(module, _PLACE, torch.tensor([number, layer]))
        with attending_through(model, IMPLEMENTATION):
            yield
    finally:
        _SERVING.pop(number, None)
        for module, _ in layers:
            vars(module).pop(_PLACE, None)


def check_free(model: Any) -> None:
    """Refuse a model whose layers attend through this operator already.

    Raises:
        ConfigError: They do.
    """
    for module, _ in numbered_layers(model):
        place = vars(module).get(_PLACE)
        if place is not None and int(place[0]) in _SERVING:
            raise ConfigError("this model is served by another runner already; close that first")


def _no_mask(**_: Any) -> None:
    """Causality is the kernels' own."""
