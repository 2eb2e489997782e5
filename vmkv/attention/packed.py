"""Attention of whole prompts over themselves: the packed new keys, and no row at all.

A prompt's first chunk has no past, so its queries need only the keys and values that were just
computed, which lie packed in one dense tensor. Reading them there, not in their rows, lets the
fastest kernel do it without its over-read: past the last key it fetches what the tensor holds,
and the copy engine returns zeros beyond the tensor's end, so no row needs a resident margin.

On an H200 that is FlashAttention-3, in the packagings that `flash3.py` knows; elsewhere
FlashAttention-2's varlen kernel. Where there is neither, the rows are read like any past.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch

from . import flash2, flash3
from .base import AttentionSpec
from .flash_common import apply_sinks, window_bounds

_Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class PackedAttention:
    """Causal attention of packed sequences over their own keys, for layers of one kind.

    Args:
        spec: The kind of layer.
        name: Of the kernel.
        kernel: What computes it; see `packed_attention`.

    Attributes:
        writes_out: Whether the kernel can write into a tensor it is given.
    """

    def __init__(self, spec: AttentionSpec, name: str, kernel: _Kernel):
        self.spec = spec
        self.name = name
        self.writes_out = "out" in inspect.signature(kernel).parameters
        self._kernel = kernel

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: torch.Tensor,
        max_tokens: int,
        *,
        scale: float,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend; every sequence's queries and keys are the same tokens.

        Args:
            query: `[T, Hq, D]`, sequence after sequence; any strides whose last is 1.
            key: `[T, H, D]`, likewise.
            value: `[T, H, Dv]`, likewise.
            starts: `[B + 1] int32`, where each sequence begins, and T.
            max_tokens: The longest sequence.
            scale: What scores are multiplied by.
            sinks: `[Hq]`, see `AttentionSpec.has_sinks`.
            out: `[T, Hq, Dv]`, where the kernel is to write, if it can (`writes_out`).

        Returns:
            `[T, Hq, Dv]`: `out`, or a new tensor.
        """
        into = {"out": out} if self.writes_out and sinks is None else {}
        attended, logsumexp = self._kernel(
            query,
            key,
            value,
            starts,
            max_tokens,
            scale=scale,
            window=window_bounds(causal=True, window=self.spec.window),
            softcap=self.spec.softcap,
            **into,
        )
        if sinks is None:
            return attended
        return apply_sinks(attended, logsumexp.transpose(0, 1), sinks)


def packed_attention(spec: AttentionSpec) -> PackedAttention | None:
    """The best kernel for layers of this kind on this machine; None where there is none.

    Nor is there one for rows in eight bits: a prompt that saw its own keys before they were rounded
    would say something else than one that goes on from a prefix, or is computed in chunks.

    Cost: the first call may load a kernel library. Call it when a model is set up.
    """
    if spec.is_fp8:
        return None
    for name, backend, load in (
        ("flash3", flash3.Flash3Backend(), _flash3_kernel),
        ("flash2", flash2.Flash2Backend(), _flash2_kernel),
    ):
        if backend.why_not(spec) is None:
            kernel = load()
            if kernel is not None:
                return PackedAttention(spec, name, kernel)
    return None


@functools.cache
def _flash3_kernel() -> _Kernel | None:
    try:
        from flash_attn_interface import flash_attn_varlen_func
    except Exception:  # noqa: BLE001  # a wheel for another torch fails in its own ways
        return _flash3_library_kernel()

    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: torch.Tensor,
        max_tokens: int,
        *,
        scale: float,
        window: tuple[int, int],
        softcap: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, logsumexp, *_ = flash_attn_varlen_func(
            query,
            key,
            value,
            starts,
            starts,
            max_tokens,
            max_tokens,
            softmax_scale=scale,
            causal=True,
            window_size=window,
            softcap=softcap,
            return_attn_probs=True,
        )
        return out, logsumexp

    return kernel


def _flash3_library_kernel() -> _Kernel | None:
    library = flash3.library_kernel()
    if isinstance(library, str):
        return None
    # What a build knows may be passed by name.
    known = {argument.name for argument in flash3._operator()._schema.arguments}
    if not known >= {"out", "cu_seqlens_k", "max_seqlen_k"}:
        return None

    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: torch.Tensor,
        max_tokens: int,
        *,
        scale: float,
        window: tuple[int, int],
        softcap: float,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attended, logsumexp = library(
            query,
            key,
            value,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=max_tokens,
            max_seqlen_k=max_tokens,
            scale=scale,
            causal=True,
            window=window,
            softcap=softcap,
            out=out,
        )
        return attended, logsumexp

    return kernel


def _flash2_kernel() -> _Kernel | None:
    interface = flash2._interface()

    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: torch.Tensor,
        max_tokens: int,
        *,
        scale: float,
        window: tuple[int, int],
        softcap: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, logsumexp, *_ = interface._flash_attn_varlen_forward(
            query,
            key,
            value,
            starts,
            starts,
            max_tokens,
            max_tokens,
            0.0,
            scale,
            causal=True,
            window_size_left=window[0],
            window_size_right=window[1],
            softcap=softcap,
        )
        return out, logsumexp

    return kernel
