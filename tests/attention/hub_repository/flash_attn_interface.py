"""A kernel as a repository of the Hub holds one, in plain torch, so that a CPU runs it.

Its functions take what those of `kernels-community/flash-attn2` (versions 3 and 4) and
`kernels-community/flash-attn3` (version 1) take, under the same names, as far as vmkv passes it.
"""

import torch


def _attend(query, keys, values, scale, causal, softcap):
    """One sequence `[Tq, Hq, D]` over `[Tk, H, D]`; its output and log-sum-exp `[Hq, Tq]`."""
    repeats = query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(repeats, dim=1).float() for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        behind = len(keys) - len(query)
        seen = torch.ones(len(query), len(keys), dtype=torch.bool).tril(behind)
        scores = scores.masked_fill(~seen, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out.to(query.dtype), scores.logsumexp(-1)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    *,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    cu_seqlens_q=None,
    max_seqlen_q=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    num_splits=0,
    return_softmax_lse=False,
):
    """Uniform `[B, T, Hq, D]`, or packed with `cu_seqlens_q`; `k` and `v` are written first."""
    assert window_size[0] == -1
    assert return_softmax_lse
    assert num_splits in (0, 1)
    found = []
    for at, row in enumerate(cache_batch_idx.tolist()):
        num_tokens = int(cache_seqlens[at])
        if k is not None:
            num_new = k.shape[1]
            k_cache[row, num_tokens : num_tokens + num_new] = k[at]
            v_cache[row, num_tokens : num_tokens + num_new] = v[at]
            num_tokens += num_new
        start = 0 if cache_leftpad is None else int(cache_leftpad[at])
        query = q[at] if cu_seqlens_q is None else q[cu_seqlens_q[at] : cu_seqlens_q[at + 1]]
        assert max_seqlen_q is None or len(query) <= max_seqlen_q
        keys, values = k_cache[row, start:num_tokens], v_cache[row, start:num_tokens]
        found.append(_attend(query, keys, values, softmax_scale, causal, softcap))
    outs, logsumexps = zip(*found, strict=True)
    if cu_seqlens_q is None:
        return torch.stack(outs), torch.stack(logsumexps)
    return torch.cat(outs), torch.cat(logsumexps, dim=1)


def _flash_attn_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    seqused_k=None,
):
    """Packed queries over keys that begin at `cu_seqlens_k` and are `seqused_k` many."""
    assert window_size_left == -1
    assert not dropout_p
    found = []
    for at, num_tokens in enumerate(seqused_k.tolist()):
        start = int(cu_seqlens_k[at])
        query = q[cu_seqlens_q[at] : cu_seqlens_q[at + 1]]
        keys, values = (each[start : start + num_tokens] for each in (k, v))
        found.append(_attend(query, keys, values, softmax_scale, causal, softcap))
    outs, logsumexps = zip(*found, strict=True)
    return torch.cat(outs), torch.cat(logsumexps, dim=1), None, None


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    *,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    return_attn_probs=False,
):
    """Packed queries over their own packed keys; FlashAttention-3's."""
    assert window_size == (-1, -1)
    assert return_attn_probs
    found = []
    for start, end in zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], strict=False):
        parts = (each[start:end] for each in (q, k, v))
        found.append(_attend(*parts, softmax_scale, causal, softcap))
    outs, logsumexps = zip(*found, strict=True)
    return torch.cat(outs), torch.cat(logsumexps, dim=1)
