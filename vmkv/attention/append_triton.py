"""The fused append as one Triton kernel; see `append.py`, the only caller.

One program writes one token: its H * Dk key elements and its H * Dv value elements, each one
contiguous run in the row. A program first finds its sequence in `query_starts`, by division when
the batch is uniform (every decode step) and else by bisection: log2(B) dependent loads, hidden
behind the other programs of the multiprocessor.

Rejected: a grid over (sequence, token), which needs no search but launches `B * max_query_tokens`
programs, most of them empty, when one long prompt joins many decoding sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .batch import AttentionBatch


# Without this, a batch of one, or of a multiple of 16, would compile another variant.
@triton.jit(do_not_specialize=["batch_size", "query_tokens"])  # type: ignore[untyped-decorator]
def _append_kernel(  # type: ignore[no-untyped-def]  # Triton types its own arguments
    key,
    value,
    keys,
    values,
    row_indices,
    num_tokens,
    query_starts,
    batch_size,
    query_tokens,
    row_tokens,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    keys_token_stride,
    values_token_stride,
    heads: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    k_block: tl.constexpr,
    v_block: tl.constexpr,
    uniform: tl.constexpr,
):
    token = tl.program_id(0)
    if uniform:
        sequence = token // query_tokens
    else:
        # The last sequence that starts at or before `token`. No sequence is empty, so starts
        # are strictly increasing.
        low = 0
        high = batch_size
        while high - low > 1:
            middle = (low + high) // 2
            starts_before = tl.load(query_starts + middle) <= token
            low = tl.where(starts_before, middle, low)
            high = tl.where(starts_before, high, middle)
        sequence = low
    row = tl.load(row_indices + sequence).to(tl.int64)
    # Tokens are counted from the row's end: the last query is the last token.
    to_end = tl.load(query_starts + sequence + 1) - token
    slot = row * row_tokens + (tl.load(num_tokens + sequence) - to_end)
    source = token.to(tl.int64)

    element = tl.arange(0, k_block)
    inside = element < heads * k_dim
    offset = (element // k_dim) * key_head_stride + element % k_dim
    loaded = tl.load(key + source * key_token_stride + offset, mask=inside)
    tl.store(keys + slot * keys_token_stride + element, loaded, mask=inside)

    element = tl.arange(0, v_block)
    inside = element < heads * v_dim
    offset = (element // v_dim) * value_head_stride + element % v_dim
    loaded = tl.load(value + source * value_token_stride + offset, mask=inside)
    tl.store(values + slot * values_token_stride + element, loaded, mask=inside)


def append_kernel_launch(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
) -> None:
    """Launch the kernel on the current stream; arguments as `append`, already checked."""
    total, heads, k_dim = key.shape
    v_dim = value.shape[2]
    key = key if key.stride(2) == 1 else key.contiguous()
    value = value if value.stride(2) == 1 else value.contiguous()
    with torch.cuda.device(key.device):
        _append_kernel[(total,)](
            key,
            value,
            keys,
            values,
            batch.row_indices,
            batch.num_tokens,
            batch.query_starts,
            batch.batch_size,
            batch.max_query_tokens,
            batch.row_tokens,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            keys.stride(1),
            values.stride(1),
            heads=heads,
            k_dim=k_dim,
            v_dim=v_dim,
            k_block=triton.next_power_of_2(heads * k_dim),
            v_block=triton.next_power_of_2(heads * v_dim),
            uniform=batch.is_uniform(total),
        )
