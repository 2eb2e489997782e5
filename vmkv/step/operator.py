"""Attention over rows as an operator that compilers treat as one opaque call.

`"vmkv_rows"` is an attention implementation of transformers, as `"vmkv"` is, for models with
compiled or captured layers. Each layer has a tensor of its number and its `RowAttention`'s, instead
of numbers in code, so one compiled layer serves all; the step's rows and lengths never pass through
the model.

Operators take only tensors and numbers, so a process-wide table maps numbers to `RowAttention`s, by
weak reference: Note [State of the process].
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
"""Name in transformers' registry of attention implementations."""

_PLACE = "_vmkv_place"
_NUMBERS = itertools.count()


_SERVING: weakref.WeakValueDictionary[int, RowAttention] = weakref.WeakValueDictionary()

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
    """Append and attend; with `cos` and `sin`, first rotate queries and keys.

    The operator declares no mutation of rows: no tensor that a compiler sees aliases them, and each
    layer's call depends on the previous one through the activations.
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
    """Attention function for transformers; arguments as `vmkv_attention`."""
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
    """Context in which the model's layers attend through `attention`.

    Raises `ConfigError` if another stepper has the model, or no layer has a `layer_idx`.
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
    """Raise `ConfigError` if the model's layers attend through this operator already."""
    for module, _ in numbered_layers(model):
        place = vars(module).get(_PLACE)
        if place is not None and int(place[0]) in _SERVING:
            raise ConfigError("this model is served by another runner already; close that first")


def _no_mask(**_: Any) -> None:
    """Return no mask: kernels apply causality themselves."""
