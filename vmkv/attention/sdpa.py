"""SDPA backend over `torch.nn.functional.scaled_dot_product_attention`, and plain attention.

SDPA is the default on CPU and the last resort on CUDA, where `decode.py` serves steps of one query
each over float8 rows and over heads of 512. Each sequence is a view cut to the keys that its
queries see, so nothing unmapped is read and nothing is copied; float8 rows are decoded per
sequence. The key heads are a batch, and the query heads of each are its heads, over keys with a
stride of zero, so that every SDPA kernel can serve them without repeating the keys. (Beyond head
sizes of 256 that is torch's memory-efficient kernel, of which older releases take no `enable_gqa`,
and would compute all scores at once.) Cases:

  one query           no mask; query heads of one key head are queries, so its keys are read once.
  no past, no window  SDPA's own `is_causal`, aligned at the top left: equivalent if there are as
                      many queries as keys.
  otherwise           a boolean mask aligned at the bottom right, of a bounded number of queries.

SDPA has neither soft caps nor sinks; `plain_attention` computes those, a bounded number of queries
at a time. One padded SDPA call for the whole batch would need a gather of past tokens.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from ..core.cache import fp8
from . import decode
from .base import AttentionBackend, AttentionSpec, Call

SCORES_AT_ONCE = 2**24
"""Most scores of plain math, and elements of a mask, at once: 64 MiB in float32."""


class SdpaBackend(AttentionBackend):
    """SDPA as an `AttentionBackend`, a launch per sequence; reads CUDA batches on the host."""

    name = "sdpa"

    def why_not(self, spec: AttentionSpec) -> str | None:
        """Refuse dtypes that are not floating."""
        return None if spec.dtype.is_floating_point else f"{spec.dtype} is not floating"

    def attend(self, call: Call) -> torch.Tensor:
        """Attend sequence by sequence, over views cut to the visible keys."""
        if call.query.is_cuda and call.sinks is None and decode.serves(call):
            return decode.decode(call)[0]
        return self._by_sequence(call)

    def attend_new(self, call: Call) -> torch.Tensor:
        """Attend sequence by sequence to the new keys and values."""
        return self._by_sequence(call)

    def _by_sequence(self, call: Call) -> torch.Tensor:
        is_fp8 = call.keys.dtype == fp8.FP8
        query, window, scales = call.query, call.window, call.scales
        attend = _plain if call.softcap or call.sinks is not None else _sdpa
        out = query.new_empty(*query.shape[:2], call.values.shape[3])
        for row, start, end, num_tokens, left_pad in call.batch.spans:
            past = num_tokens - (end - start)
            # The first query, at position `past`, sees `window` keys.
            first = left_pad if window is None else max(left_pad, past - window + 1)
            # Queries at padding positions see nothing.
            blind = max(0, left_pad - past)
            out[start : start + blind] = 0
            start += blind
            if start < end:
                if call.new is not None:
                    k, v = (each[start:end] for each in call.new)
                else:
                    k, v = call.keys[row, first:num_tokens], call.values[row, first:num_tokens]
                if is_fp8:
                    k = fp8.decode(k, scales and scales.keys, query.dtype)
                    v = fp8.decode(v, scales and scales.values, query.dtype)
                out[start:end] = attend(call, query[start:end], k, v)
        return out


def _sdpa(call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend from `[Tq, Hq, Dk]` to `[Tk, H, D]` of a sequence; each query sees some key."""
    queries, heads, _ = query.shape
    num_keys, kv_heads, _ = key.shape
    groups = heads // kv_heads
    q = query.view(queries, kv_heads, groups, -1).permute(1, 2, 0, 3)  # [H, groups, Tq, Dk]
    k, v = key.transpose(0, 1)[:, None], value.transpose(0, 1)[:, None]
    attend = functools.partial(functional.scaled_dot_product_attention, scale=call.scale)
    if queries == 1:
        out = attend(q.transpose(1, 2), k, v).transpose(1, 2)
    else:
        k, v = k.expand(-1, groups, -1, -1), v.expand(-1, groups, -1, -1)
        if call.window is None and queries == num_keys:
            out = attend(q, k, v, is_causal=True)
        else:
            outputs, num_seen = [], num_keys - queries
            for part in torch.split(q, max(1, SCORES_AT_ONCE // num_keys), 2):
                num_seen += part.shape[2]
                mask = visible_keys(part.shape[2], num_seen, call.window, query.device)
                outputs.append(attend(part, k[:, :, :num_seen], v[:, :, :num_seen], attn_mask=mask))
            out = torch.cat(outputs, 2)
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def _plain(call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend in at least float32, in slices of queries of at most `SCORES_AT_ONCE` scores."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (each.to(dtype).transpose(0, 1) for each in (query, key, value))
    seen = visible_keys(query.shape[0], key.shape[0], call.window, query.device)
    step = max(1, SCORES_AT_ONCE // (query.shape[1] * key.shape[0]))
    parts = [
        plain_attention(part, k, v, mask, scale=call.scale, softcap=call.softcap, sinks=call.sinks)
        for part, mask in zip(torch.split(q, step, 1), torch.split(seen, step), strict=True)
    ]
    return torch.cat(parts, 1).transpose(0, 1).to(query.dtype)


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute attention in explicit steps, the softmax in at least float32.

    Shapes: `query [..., Hq, Tq, Dk]`, `key [..., H, Tk, Dk]`, `value [..., H, Tk, Dv]`; returns
    `[..., Hq, Tq, Dv]`. `mask` is broadcast to `[..., Hq, Tq, Tk]`: true where a query sees a key,
    or added to scores. Materialises all scores, and keys and values repeated to Hq heads.
    """
    groups = query.shape[-3] // key.shape[-3]
    keys, values = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ keys.transpose(-1, -2)).to(wide) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype == torch.bool:
        # The lowest number instead of -inf, with which queries that see nothing would be NaN.
        scores = scores.masked_fill(~mask, torch.finfo(wide).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1)[..., : key.shape[-2]].to(value.dtype)
    return functional.dropout(weights, dropout) @ values


def visible_keys(
    num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Return which keys queries see, aligned at the ends: `[num_queries, num_keys] bool`."""
    keys = torch.arange(num_keys, device=device)
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)
