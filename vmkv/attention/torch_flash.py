"""torch's own FlashAttention-2 kernels for ragged batches: no package beyond torch.

`torch.nn.attention.varlen.varlen_attn` over the flat view, with each row's start in place of a
cumulative length and its length in `seqused_k`. In releases whose public function lacks
`seqused_k`, the operator `aten::_flash_attention_forward` takes it.

Every fetch is predicated, so `overread_tokens` is 0. torch passes no soft cap through. Left padding
moves a row's start, and sinks are applied from the returned log-sum-exp.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ConfigError
from .base import AttentionSpec, Call, flat
from .flash_common import FlashBackend, why_not_flash

Varlen = Callable[[Call, tuple[int, int]], tuple[torch.Tensor, torch.Tensor]]


class TorchFlashBackend(FlashBackend):
    """torch's FlashAttention as an `AttentionBackend`."""

    name = "torch"

    def why_not(self, spec: AttentionSpec) -> str | None:
        """Check the limits of FlashAttention-2, no soft cap, and torch's build."""
        limit = why_not_flash(spec, same_head_sizes=True)
        if limit is not None:
            return limit
        if spec.softcap:
            return "torch passes no soft cap to its kernel"
        if not torch.backends.cuda.is_flash_attention_available():
            return "this torch was built without FlashAttention"
        return None if _varlen() is not None else f"torch {torch.__version__} has no seqused_k"

    def launch(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the varlen kernel over the flat view."""
        varlen = _varlen()
        if call.softcap or varlen is None:
            raise ConfigError(
                "'torch' has no soft cap, and needs a torch whose FlashAttention takes seqused_k"
            )
        if call.window is not None:
            return varlen(call, (call.window - 1, 0))
        # A single query is the last token and sees every key. Unbounded instead of causal lets the
        # kernel handle a group's query heads together and split the keys.
        return varlen(call, (-1, 0) if call.batch.max_query_tokens > 1 else (-1, -1))


@functools.cache
def _varlen() -> Varlen | None:
    """Return torch's varlen attention: the public function if it suits, else the operator.

    It takes a call and the kernel's window and returns the output and the log-sum-exp `[Hq, Tq]`.
    None if neither takes `seqused_k`.
    """
    public = _public_varlen()
    if public is not None:
        return public
    operator = torch.ops.aten._flash_attention_forward.default
    names = {argument.name for argument in operator._schema.arguments}
    return _operator_varlen if "seqused_k" in names else None


def _public_varlen() -> Varlen | None:
    try:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn
    except ImportError:
        return None
    function: Any = varlen_attn
    names = inspect.signature(varlen_attn).parameters
    if "seqused_k" not in names or "scale" not in names:
        return None
    gqa = {"enable_gqa": True} if "enable_gqa" in names else {}

    def varlen(call: Call, window: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = function(
            *_tensors_and_bounds(call),
            return_aux=AuxRequest(lse=True),
            scale=call.scale,
            window_size=window,
            seqused_k=call.batch.visible_tokens,
            **gqa,
        )
        return found

    return varlen


def _operator_varlen(call: Call, window: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        *_tensors_and_bounds(call),
        0.0,
        window == (-1, 0),
        return_debug_mask=False,
        scale=call.scale,
        window_size_left=window[0],
        window_size_right=window[1],
        seqused_k=call.batch.visible_tokens,
    )
    return out, logsumexp


def _tensors_and_bounds(call: Call) -> tuple[torch.Tensor | int, ...]:
    """Return `(q, k, v, starts_q, starts_k, max_q, max_k)`."""
    batch = call.batch
    return (
        *(call.query, flat(call.keys), flat(call.values), batch.query_starts, batch.key_starts),
        *(batch.max_query_tokens, batch.max_num_tokens),
    )
