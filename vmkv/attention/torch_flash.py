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
from typing import Any, cast

import torch

from ..errors import ConfigError
from .base import AttentionSpec, Call, flat
from .flash_common import FlashBackend, why_not_flash

Varlen = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class TorchFlashBackend(FlashBackend):
    """torch's FlashAttention as an `AttentionBackend`."""

    name = "torch"

    def overread_tokens(
        self, k_dim: int, v_dim: int | None = None, kv_dtype: torch.dtype | None = None
    ) -> int:
        """Return 0: the kernel predicates every key row by the sequence's length."""
        return 0

    def why_not(self, spec: AttentionSpec) -> str | None:
        """Check the limits of FlashAttention-2, no soft cap, and torch's build."""
        limit = why_not_flash(spec, same_head_sizes=True)
        if limit is not None:
            return limit
        if torch.cuda.get_device_capability() < (8, 0):
            return "it needs compute capability 8.0 or newer"
        if spec.softcap:
            return "torch passes no soft cap to its kernel"
        if not torch.backends.cuda.is_flash_attention_available():
            return "this torch was built without FlashAttention"
        return None if _varlen() is not None else f"torch {torch.__version__} has no seqused_k"

    def launch(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the varlen kernel over the flat view."""
        varlen, batch = _varlen(), call.batch
        if call.softcap or varlen is None:
            raise ConfigError(
                "'torch' has no soft cap, and needs a torch whose FlashAttention takes seqused_k"
            )
        if call.window is not None:
            bounds = (call.window - 1, 0)
        elif call.causal and batch.max_query_tokens > 1:
            bounds = (-1, 0)
        else:
            # A single query is the last token and sees every key. Unbounded instead of causal lets
            # the kernel handle a group's query heads together and split the keys.
            bounds = (-1, -1)
        return varlen(
            call.query,
            flat(call.keys),
            flat(call.values),
            batch.query_starts,
            batch.key_starts,
            batch.max_query_tokens,
            batch.max_num_tokens,
            scale=call.scale,
            window_size=bounds,
            seqused_k=batch.visible_tokens,
        )


@functools.cache
def _varlen() -> Varlen | None:
    """Return torch's varlen attention: the public function if it suits, else the operator.

    Its arguments are `(q, k, v, starts_q, starts_k, max_q, max_k, *, scale, window_size,
    seqused_k)`; it returns the output and the log-sum-exp `[Hq, Tq]`. None if neither takes
    `seqused_k`.
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
    names = inspect.signature(varlen_attn).parameters
    if "seqused_k" not in names or "scale" not in names:
        return None
    options: dict[str, Any] = {"return_aux": AuxRequest(lse=True)}
    if "enable_gqa" in names:
        options["enable_gqa"] = True
    return cast(Varlen, functools.partial(varlen_attn, **options))


def _operator_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    max_queries: int,
    max_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    seqused_k: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    is_causal = window_size == (-1, 0)
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        query_starts,
        key_starts,
        max_queries,
        max_keys,
        0.0,
        is_causal,
        return_debug_mask=False,
        scale=scale,
        window_size_left=window_size[0],
        window_size_right=window_size[1],
        seqused_k=seqused_k,
    )
    return out, logsumexp
