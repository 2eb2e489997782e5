"""The norm that a layer begins with, computed where the layer before adds its last residual.

Layers are compiled one by one, so what one ends with and the next begins with are never in one
kernel: a pass over the activations for the sum, and another for the norm. Here a layer computes the
next one's norm as well, and hands it on beside its output (Llama-3-8B's shape on an H200: 32 of a
step's 505 kernels less).

Only norms called `input_layernorm` are, and whether a layer asks its norm for its very input is
seen where it is traced: one that does anything else gets what it asks for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

_NAME = "input_layernorm"


class EarlyNorm(torch.nn.Module):
    """A norm that may have been computed already. Only ever made by `prepare`, over its class."""

    _vmkv_input: torch.Tensor | None
    _vmkv_output: torch.Tensor | None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The norm, as ever."""
        early = self._vmkv_output
        if early is not None and hidden_states is self._vmkv_input:
            return early
        out: torch.Tensor = super().forward(hidden_states)
        return out


class Handed(NamedTuple):
    """What a layer hands on.

    Attributes:
        norm: Whose output it is: another layer may come next than the one that follows.
        hidden: The layer's output.
        version: How often that was written; None for inference tensors, which do not count it,
            so that nobody takes what may be of something else.
        output: What the norm makes of it.
    """

    norm: Any
    hidden: torch.Tensor
    version: int | None
    output: torch.Tensor

    @classmethod
    def on(cls, norm: Any, out: Any, output: torch.Tensor) -> Handed:
        """After a layer that returned `out`."""
        hidden: torch.Tensor = _first(out)
        return cls(norm, hidden, _version(hidden), output)

    def of(self, module: Any, hidden: torch.Tensor) -> torch.Tensor | None:
        """What the norm of `module`, or `module` itself, makes of `hidden`, if it is this."""
        norm = getattr(module, _NAME, module)
        if norm is not self.norm or hidden is not self.hidden or self.version is None:
            return None
        return self.output if hidden._version == self.version else None


def prepare(layers: Sequence[Any], last: Sequence[Any]) -> dict[int, Any]:
    """The norm that follows each layer, by the layer's `id`; norms change their class.

    Args:
        layers: The decoder's, in order.
        last: The norm after them, if there is one.
    """
    following = [*(getattr(layer, _NAME, None) for layer in layers[1:]), *last]
    firsts = [getattr(layer, _NAME, None) for layer in layers]
    norms = [*firsts, *last]
    # One class, so that one compiled layer serves all; and nothing between them moves tensors.
    if not all(_is_plain(norm) for norm in norms):
        return {}
    if len({(type(norm), _device(norm)) for norm in norms}) > 1:
        return {}
    for norm in norms:
        kind: Any = type(norm)
        norm.__class__ = _early(kind)
        # Of their own from the start, so that nothing is compiled again when a layer sets them.
        norm._vmkv_input = norm._vmkv_output = None
    return {id(layer): norm for layer, norm in zip(layers, following, strict=False)}


def undo(layers: Sequence[Any], last: Sequence[Any]) -> None:
    """Give norms their class back. Idempotent."""
    for norm in [*(getattr(layer, _NAME, None) for layer in layers), *last]:
        if isinstance(norm, EarlyNorm):
            norm.__class__ = type(norm).__mro__[2]
            vars(norm).pop("_vmkv_input", None)
            vars(norm).pop("_vmkv_output", None)


def handing_on(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's `forward` that takes its norm's output, and returns the next one's as well.

    Its arguments are the layer, the norm that follows, the output of the layer's own norm, and
    then the layer's; it is to be compiled.
    """

    def run(layer: Any, following: Any, early: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(layer, _NAME)
        own._vmkv_input, own._vmkv_output = hidden, early
        out = forward(layer, hidden, *args, **kwargs)
        own._vmkv_input = own._vmkv_output = None
        # Past its own `forward`, which the last norm has: that takes what is returned here.
        compute = type(following).forward
        return out, compute(following, _first(out))

    return run


def _first(out: Any) -> Any:
    """The activations, of what a layer returns."""
    return out[0] if isinstance(out, tuple) else out


def _version(hidden: torch.Tensor) -> int | None:
    return None if hidden.is_inference() else hidden._version


def _is_plain(norm: Any) -> bool:
    return (
        isinstance(norm, torch.nn.Module)
        and not isinstance(norm, EarlyNorm)
        and not list(norm.children())
        and not norm._forward_hooks
        and not norm._forward_pre_hooks
        and "forward" not in vars(norm)
    )


def _device(norm: torch.nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in norm.parameters()), None)


@functools.cache
def _early(of: type) -> type:
    """A class that computes as `of` does; one for all modules of a class."""
    return type(f"Early{of.__name__}", (EarlyNorm, of), {})
