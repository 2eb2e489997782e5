"""The fused kernel that rotates queries and keys and appends the keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.dense_rows import DenseRows

from vmkv.attention import AttentionBatch, Call, append
from vmkv.attention.append import append_rotated, can_rotate
from vmkv.core.cache.fp8 import FP8, LayerScales, Scales
from vmkv.step.graph_passes import turned

ROW_TOKENS = 48
BATCHES = {
    "decode": ([3, 0, 5], [10, 48, 1], [1, 1, 1]),
    "mixed": ([3, 0, 5, 1], [10, 48, 1, 30], [3, 48, 1, 1]),
}


def new_of(
    total: int, dtype: torch.dtype, heads: int, dim: int, device: str = "cuda"
) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values and angles of packed tokens, as slices of one product."""
    generator = torch.Generator().manual_seed(dim)
    joint = torch.randn(total, 6 * heads, dim, generator=generator).to(device, dtype)
    half = torch.rand(total, dim // 2, generator=generator) * 6
    angles = torch.cat((half, half), -1).to(device)
    query, key, value = joint.split((4 * heads, heads, heads), 1)
    return query, key, value, angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", ["same", "fp8", "scaled"])
@pytest.mark.parametrize("shape", BATCHES)
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (2, 128), (3, 96), (8, 256)])
def test_append_rotated_writes_what_rotation_and_append_write(
    dtype: torch.dtype, stored: str, shape: str, heads: int, dim: int
) -> None:
    """Rotation in float32; the rows are equal bit by bit."""
    rows, num_tokens, queries = BATCHES[shape]
    batch = AttentionBatch.build(
        rows, num_tokens, queries, row_tokens=ROW_TOKENS, num_rows=6, device="cuda"
    )
    kv_dtype = dtype if stored == "same" else FP8
    one, other = (
        DenseRows(6, ROW_TOKENS, heads, dim, dtype=kv_dtype, device="cuda") for _ in range(2)
    )
    scales = None
    if stored == "scaled":
        each = tuple(0.5 + head for head in range(heads))
        scales = Scales.of(LayerScales(each, each[::-1]), torch.device("cuda"))
    query, key, value, cos, sin = new_of(sum(queries), dtype, heads, dim)
    expected_query = turned(query.double(), cos.double(), sin.double())
    expected_key = turned(key.float(), cos.float(), sin.float()).to(dtype)

    call = Call(query, one.keys, one.values, batch, 1.0, scales=scales)
    assert can_rotate(call, (key, value), cos, sin)
    out, kept = append_rotated(call, (key, value), cos, sin, keep_keys=True)
    torch.testing.assert_close(out.double(), expected_query, rtol=2**-7, atol=2**-9)
    torch.testing.assert_close(kept, expected_key, rtol=2**-7, atol=2**-9)
    append(replace(call, keys=other.keys, values=other.values), (kept, value))
    assert torch.equal(one.buffer.view(torch.uint8), other.buffer.view(torch.uint8))


@pytest.mark.gpu
def test_append_rotated_writes_no_padding() -> None:
    """Queries before position 0 have no place in a row."""
    dense = DenseRows(3, ROW_TOKENS, 2, 64, dtype=torch.bfloat16, device="cuda")
    before = dense.buffer.clone()
    vectors = [torch.tensor(each, dtype=torch.int32, device="cuda") for each in ([1], [0], [0, 4])]
    batch = AttentionBatch(*vectors, 4, 16, ROW_TOKENS)
    query, key, value, cos, sin = new_of(4, torch.bfloat16, 2, 64)
    call = Call(query, dense.keys, dense.values, batch, 1.0)
    out, kept = append_rotated(call, (key, value), cos, sin, keep_keys=False)
    assert kept is None
    assert out.isfinite().all()
    assert torch.equal(before.view(torch.uint8), dense.buffer.view(torch.uint8))


def test_the_rotating_kernel_does_not_take_cpu_tensors() -> None:
    """`can_rotate` is then false, and rotation is a separate operation."""
    dense = DenseRows(3, ROW_TOKENS, 2, 64, dtype=torch.bfloat16)
    query, key, value, cos, sin = new_of(4, torch.bfloat16, 2, 64, "cpu")
    batch = AttentionBatch.build([1], [4], [4], row_tokens=ROW_TOKENS)
    call = Call(query, dense.keys, dense.values, batch, 1.0)
    assert not can_rotate(call, (key, value), cos, sin)
