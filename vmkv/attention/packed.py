"""Attention of whole prompts over their own packed keys, without reading rows.

A prompt's first chunk has no past, so its queries need only the new keys and values, which lie
packed in one dense tensor. There the fastest kernel needs no over-read margin: past the last key it
fetches the tensor's own memory, and beyond the tensor's end the copy engine returns zeros.

On Hopper this is FlashAttention-3 (`flash3.py`), elsewhere FlashAttention-2's varlen kernel, at
half its speed. Without either, prompts read their rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from . import flash2, flash3
from .base import AttentionSpec
from .flash_common import apply_sinks, window_bounds
from .registry import why_not


class Beginnings(NamedTuple):
    """Packed sequences without a past."""

    starts: torch.Tensor  # `[B + 1] int32`: offset of each sequence, then the total.
    max_tokens: int


class _Call(NamedTuple):
    """Arguments of a kernel, as in `PackedAttention.__call__`."""

    qkv: Sequence[torch.Tensor]
    starts: torch.Tensor
    max_tokens: int
    scale: float
    window: tuple[int, int]
    softcap: float
    out: torch.Tensor | None


class _Kernel(NamedTuple):
    """A kernel that returns the output and log-sum-exp `[Hq, T]`; some write into `out`."""

    compute: Callable[[_Call], tuple[torch.Tensor, torch.Tensor]]
    writes_out: bool = False


class PackedAttention:
    """Causal attention of packed sequences over their own keys, for layers of one kind."""

    def __init__(self, spec: AttentionSpec, name: str, kernel: _Kernel):
        self.spec = spec
        self.name = name
        self._kernel = kernel

    def __call__(
        self,
        qkv: Sequence[torch.Tensor],
        sequences: Beginnings,
        scale: float,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to packed queries `[T, Hq, D]`, keys `[T, H, D]` and values `[T, H, Dv]`.

        Returns `[T, Hq, Dv]`: `out`, where the kernel can write into it, or a new tensor. Any
        strides with a last stride of 1.
        """
        window = window_bounds(causal=True, window=self.spec.window)
        into = out if self._kernel.writes_out and sinks is None else None
        call = _Call(qkv, *sequences, scale, window, self.spec.softcap, into)
        attended, logsumexp = self._kernel.compute(call)
        if sinks is None:
            return attended
        return apply_sinks(attended, logsumexp.transpose(0, 1), sinks)


def packed_attention(spec: AttentionSpec) -> PackedAttention | None:
    """Return the best kernel for layers of this kind on this machine; None if there is none.

    None for float8 rows: a prompt that attends to keys before rounding would give other results
    than one continued from a prefix or computed in chunks. The first call may load a kernel
    library.
    """
    if spec.is_fp8:
        return None
    for name, load in _KERNELS:
        if why_not(name, spec) is None:
            kernel = load()
            if kernel is not None:
                return PackedAttention(spec, name, kernel)
    return None


@functools.cache
def _flash3_kernel() -> _Kernel | None:
    package = flash3.package()
    if not isinstance(package, str):
        return _over_varlen(package.flash_attn_varlen_func)
    library = _flash3_library_kernel()
    if library is not None:
        return library
    of_hub = flash3.of_hub()  # Last, because it may use the network.
    return None if isinstance(of_hub, str) else _over_varlen(of_hub.flash_attn_varlen_func)


def _over_varlen(flash_attn_varlen_func: Callable[..., Any]) -> _Kernel:
    """Wrap the package's `flash_attn_varlen_func` as a `_Kernel`."""

    def compute(call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
        out, logsumexp, *_ = flash_attn_varlen_func(
            *call.qkv,
            call.starts,
            call.starts,
            call.max_tokens,
            call.max_tokens,
            softmax_scale=call.scale,
            causal=True,
            window_size=call.window,
            softcap=call.softcap,
            return_attn_probs=True,
        )
        return out, logsumexp

    return _Kernel(compute)


def _flash3_library_kernel() -> _Kernel | None:
    library = flash3.library_kernel()
    if isinstance(library, str):
        return None
    # These arguments must exist in the build.
    known = {argument.name for argument in flash3._operator()._schema.arguments}
    if not known >= {"out", "cu_seqlens_k", "max_seqlen_k"}:
        return None

    def compute(call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
        return library(
            *call.qkv,
            cu_seqlens_q=call.starts,
            cu_seqlens_k=call.starts,
            max_seqlen_q=call.max_tokens,
            max_seqlen_k=call.max_tokens,
            scale=call.scale,
            causal=True,
            window=call.window,
            softcap=call.softcap,
            out=call.out,
        )

    return _Kernel(compute, writes_out=True)


def _flash2_kernel() -> _Kernel | None:
    interface: Any = flash2._interface()

    def compute(call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
        out, logsumexp, *_ = interface._flash_attn_varlen_forward(
            *call.qkv,
            call.starts,
            call.starts,
            call.max_tokens,
            call.max_tokens,
            0.0,
            call.scale,
            causal=True,
            window_size_left=call.window[0],
            window_size_right=call.window[1],
            softcap=call.softcap,
        )
        return out, logsumexp

    return _Kernel(compute)


#: Best first.
_KERNELS: tuple[tuple[str, Callable[[], _Kernel | None]], ...] = (
    ("flash3", _flash3_kernel),
    ("flash2", _flash2_kernel),
)
