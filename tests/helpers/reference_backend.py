"""The reference of attention tests: plain attention in a given dtype, sequence by sequence.

Importing it registers the backend "reference", which serves every layer, slowly.
"""

from __future__ import annotations

import torch

from vmkv.attention import AttentionBackend, AttentionSpec, Call, backend_names, register
from vmkv.core.cache.fp8 import decode


def visible_keys(
    num_queries: int, num_keys: int, window: int | None, device: torch.device | None = None
) -> torch.Tensor:
    """Return which keys each query sees: `[num_queries, num_keys] bool`, aligned bottom right."""
    keys = torch.arange(num_keys, device=device)
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


class ReferenceBackend(AttentionBackend):
    """Attention in `dtype`, with softmax in `dtype` too."""

    name = "reference"

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype

    def why_not(self, spec: AttentionSpec) -> str | None:
        """Serve every layer."""
        return None

    def attend(self, call: Call) -> torch.Tensor:
        """Attend sequence by sequence; a query without keys gets zeros."""
        query, keys, values, scales = call.query, call.keys, call.values, call.scales
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty(*query.shape[:2], values.shape[3])
        for row, start, end, num_tokens, left_pad in call.batch.spans:
            cut = slice(left_pad, num_tokens)
            out[start:end] = self._attend_one(
                call,
                query[start:end],
                decode(keys[row, cut], scales and scales.keys, wide),
                decode(values[row, cut], scales and scales.values, wide),
            )
        return out

    def _attend_one(
        self, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        dtype, groups = self._dtype, query.shape[1] // key.shape[1]
        seen = visible_keys(query.shape[0], key.shape[0], call.window, query.device)
        queries = query.to(dtype).transpose(0, 1)
        keys = key.to(dtype).repeat_interleave(groups, dim=1).transpose(0, 1)
        values = value.to(dtype).repeat_interleave(groups, dim=1).transpose(0, 1)
        scores = queries @ keys.transpose(1, 2) * call.scale
        if call.softcap:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if call.sinks is not None:
            column = call.sinks.to(dtype)[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, column], dim=2)
        weights = torch.softmax(scores, dim=2)[:, :, : key.shape[0]]
        # The softmax over no key is NaN; kernels return zeros.
        weights = weights.masked_fill(~seen.any(dim=1, keepdim=True), 0.0)
        return (weights @ values).transpose(0, 1)


if "reference" not in backend_names():
    register("reference", ReferenceBackend)
