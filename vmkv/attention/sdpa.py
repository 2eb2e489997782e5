"""SDPA backend over `torch.nn.functional.scaled_dot_product_attention`, and the reference oracle.

SDPA is the default on CPU and the last resort on CUDA. Each sequence is a view cut to the keys that
its queries see, so nothing unmapped is read and nothing is copied. Float8 rows are decoded per
sequence, or read in place by `decode_fp8.py` where each sequence has one query on CUDA. Cases:

  one query           no mask; the query heads of one key/value head are folded into the query
                      dimension, so its keys are read once.
  no past, no window  SDPA's own `is_causal`, aligned at the top left: equivalent if there are as
                      many queries as keys.
  otherwise           a boolean mask aligned at the bottom right, heads folded as above.

SDPA has neither soft caps nor sinks; `_plain` computes those, a bounded number of queries at a
time. One padded SDPA call for the whole batch would need a gather of past tokens.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ..core.cache.fp8 import decode
from . import decode_fp8
from .base import AttentionSpec, Call, CheckedBackend, split

# ---- reference -----------------------------------------------------------------------------------


def visible_keys(
    num_queries: int,
    num_keys: int,
    *,
    causal: bool,
    window: int | None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return which keys each query sees: `[num_queries, num_keys] bool`, aligned bottom right.

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
    """Compute the attention of one sequence in `dtype`; zeros where a query sees nothing.

    Shapes: `query [Tq, Hq, Dk]`, `key [Tk, H, Dk]`, `value [Tk, H, Dv]`, `seen [Tq, Tk] bool`;
    returns `[Tq, Hq, Dv]`. Materialises `Hq * Tq * Tk` scores, and keys and values repeated to Hq
    heads.
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
    # The softmax over no key is NaN; kernels return zeros.
    weights = weights.masked_fill(~seen.any(dim=1, keepdim=True), 0.0)
    return (weights @ values).transpose(0, 1)


class ReferenceBackend(CheckedBackend):
    """The oracle as a backend, computing in `dtype`: slow, for any layer.

    On CUDA it synchronises once for a batch that was not built by `AttentionBatch.build`.
    """

    name = "reference"

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype

    def overread_tokens(
        self, k_dim: int, v_dim: int | None = None, kv_dtype: torch.dtype | None = None
    ) -> int:
        """Return 0: rows are cut to their exact length."""
        return 0

    def why_not(self, spec: AttentionSpec) -> str | None:
        """Return None: every layer is supported."""
        return None

    def attend(self, call: Call) -> torch.Tensor:
        """Attend sequence by sequence in plain math."""
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


# ---- sdpa ----------------------------------------------------------------------------------------

SCORES_AT_ONCE = 2**24
"""Most scores that the plain math materialises at once: 64 MiB in float32."""


class SdpaBackend(CheckedBackend):
    """SDPA as an `AttentionBackend`, with at least one launch per sequence.

    On CUDA it synchronises once for a batch that was not built by `AttentionBatch.build`.
    """

    name = "sdpa"

    def overread_tokens(
        self, k_dim: int, v_dim: int | None = None, kv_dtype: torch.dtype | None = None
    ) -> int:
        """Return 0: rows are cut to their exact length."""
        return 0

    def why_not(self, spec: AttentionSpec) -> str | None:
        """Refuse dtypes that are not floating."""
        return None if spec.dtype.is_floating_point else f"{spec.dtype} is not floating"

    def attend(self, call: Call) -> torch.Tensor:
        """Attend sequence by sequence, over views cut to the visible keys."""
        if call.sinks is None and decode_fp8.serves(call):
            return decode_fp8.decode(call)[0]
        query, keys, values, batch, scale, causal, window, softcap, sinks, scales, _ = call
        needs_plain_math = bool(softcap) or sinks is not None
        out = query.new_empty(*query.shape[:2], values.shape[3])
        for row, start, end, num_tokens, left_pad in batch.spans:
            queries = end - start
            first_key = left_pad
            if window is not None:
                # The first query, at position `num_tokens - queries`, sees `window` keys.
                first_key = max(left_pad, num_tokens - queries - window + 1)
            if causal:
                # Causal queries at padding positions see nothing.
                blind = max(0, left_pad - (num_tokens - queries))
                out[start : start + blind] = 0
                start += blind
            if start >= end:
                continue
            cut = slice(first_key, num_tokens)
            q = query[start:end]
            k = decode(keys[row, cut], scales and scales.keys, query.dtype)
            v = decode(values[row, cut], scales and scales.values, query.dtype)
            if needs_plain_math:
                out[start:end] = _plain(
                    q, k, v, scale=scale, causal=causal, window=window, softcap=softcap, sinks=sinks
                )
            else:
                out[start:end] = _sdpa(q, k, v, scale=scale, causal=causal, window=window)
        return out


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None,
) -> torch.Tensor:
    """Attend from `[Tq, Hq, Dk]` to `[Tk, H, D]` of a sequence; each query sees some key."""
    queries, heads, _ = query.shape
    kv_heads = key.shape[1]
    k, v = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    if causal and window is None and queries == key.shape[0] > 1:
        q = query.transpose(0, 1)[None]
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=heads != kv_heads
        )
        return out[0].transpose(0, 1)
    groups = heads // kv_heads
    # [Tq, H * groups, D] -> [1, H, groups * Tq, D]: as many query as key heads, so that every
    # SDPA kernel can serve it without repeating the keys.
    q = split(query, 1, (kv_heads, groups)).permute(1, 2, 0, 3).flatten(1, 2)[None]
    mask = None
    if causal and queries > 1:
        seen = visible_keys(queries, key.shape[0], causal=True, window=window, device=query.device)
        mask = seen.repeat(groups, 1)
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return split(out[0], 1, (groups, queries)).permute(2, 0, 1, 3).flatten(1, 2)


def _plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend in at least float32, in slices of queries of at most `SCORES_AT_ONCE` scores."""
    queries, heads, _ = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    seen = visible_keys(queries, key.shape[0], causal=causal, window=window, device=query.device)
    step = max(1, SCORES_AT_ONCE // (heads * key.shape[0]))
    parts = [
        attend(
            query[first : first + step],
            key,
            value,
            seen[first : first + step],
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            dtype=dtype,
        ).to(query.dtype)
        for first in range(0, queries, step)
    ]
    return torch.cat(parts)
