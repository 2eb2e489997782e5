"""Attention as written on paper: the oracle of the tests, and what `sdpa` falls back to.

One sequence at a time, scores in full, everything upcast to one floating type. No cleverness:
its worth is that it can be checked by reading.
"""

from __future__ import annotations

import torch

from ..cache.fp8 import decode
from .base import AttentionSpec, Call, CheckedBackend


def visible_keys(
    num_queries: int,
    num_keys: int,
    *,
    causal: bool,
    window: int | None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Which keys each query sees: `[num_queries, num_keys] bool`, aligned at the bottom right.

    The last query is at the last key's position; queries before the first key see nothing.
    """
    keys = torch.arange(num_keys, device=device)
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    seen = keys <= queries if causal else torch.ones_like(keys <= queries)
    if window is not None:
        seen &= keys > queries - window
    return seen


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attention of one sequence, computed in `dtype`.

    Args:
        query: `[Tq, Hq, Dk]`.
        key: `[Tk, H, Dk]`.
        value: `[Tk, H, Dv]`.
        seen: `[Tq, Tk] bool`, from `visible_keys`.
        scale: What scores are multiplied by.
        softcap: See `AttentionSpec.softcap`.
        sinks: `[Hq]` or None.
        dtype: What to compute in.

    Returns:
        `[Tq, Hq, Dv]` in `dtype`; zeros where a query sees nothing.

    Cost: materialises `Hq * Tq * Tk` scores and repeats keys and values to Hq heads.
    """
    groups = query.shape[1] // key.shape[1]
    queries = query.to(dtype).transpose(0, 1)
    keys = key.to(dtype).repeat_interleave(groups, dim=1).transpose(0, 1)
    values = value.to(dtype).repeat_interleave(groups, dim=1).transpose(0, 1)
    scores = queries @ keys.transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.to(dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], dim=2)
    weights = torch.softmax(scores, dim=2)[:, :, : key.shape[0]]
    # A query that sees nothing makes the softmax of nothing, NaN; kernels return zeros.
    weights = weights.masked_fill(~seen.any(dim=1, keepdim=True), 0.0)
    return (weights @ values).transpose(0, 1)


class ReferenceBackend(CheckedBackend):
    """The oracle as a backend; see `AttentionBackend`. Serves anything, slowly.

    It reads lengths on the host, so on CUDA it synchronises once for a batch that was not built
    by `AttentionBatch.build`.

    Args:
        dtype: What to compute in; the tests also use float64, and the inputs' own.
    """

    name = "reference"

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype

    def overread_tokens(
        self, k_dim: int, v_dim: int | None = None, kv_dtype: torch.dtype | None = None
    ) -> int:
        """0: rows are cut to their exact length."""
        return 0

    def why_not(self, spec: AttentionSpec) -> str | None:
        """None, always."""
        return None

    def attend(self, call: Call) -> torch.Tensor:
        """See `CheckedBackend.attend`."""
        query, keys, values, batch, scale, causal, window, softcap, sinks, scales, _ = call
        wide = torch.promote_types(query.dtype, self._dtype)
        out = query.new_empty(*query.shape[:2], values.shape[3])
        for row, start, end, num_tokens, left_pad in batch.spans:
            if start == end:
                continue
            seen = visible_keys(
                end - start,
                num_tokens - left_pad,
                causal=causal,
                window=window,
                device=query.device,
            )
            out[start:end] = attend(
                query[start:end],
                decode(keys[row, left_pad:num_tokens], scales and scales.keys, wide),
                decode(values[row, left_pad:num_tokens], scales and scales.values, wide),
                seen,
                scale=scale,
                softcap=softcap,
                sinks=sinks,
                dtype=self._dtype,
            )
        return out
