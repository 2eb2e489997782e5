"""The packed pass that a thread computes, by which layers find their rows and states."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from .row_attention import LayerCall, RowAttention
    from .state_rules import PackedRules
    from .states import PackedStates, StateProbe


class PackedPass(NamedTuple):
    """Code that computes layers in a packed pass; without it, they compute as they are."""

    attend: Callable[[Any, LayerCall], torch.Tensor] | None = None
    rows: RowAttention | None = None
    states: PackedStates | StateProbe | None = None
    rules: PackedRules | None = None


_RUNNING: ContextVar[PackedPass] = ContextVar("vmkv_pass", default=PackedPass())  # noqa: B039
running = _RUNNING.get
"""Return the pass of this thread; empty between passes."""


@contextlib.contextmanager
def passing(its: PackedPass) -> Iterator[None]:
    """Context in which passes of this thread are `its`."""
    token = _RUNNING.set(its)
    try:
        yield
    finally:
        _RUNNING.reset(token)
