"""The fused append writes every new token to its place and nothing else.

Tests compare the poisoned buffer bit by bit, so a stray write anywhere in it shows.
"""

from __future__ import annotations

import pytest
import torch
from helpers.dense_rows import DenseRows

from vmkv.attention import AttentionBatch, Call, append
from vmkv.attention.append import encoded, why_not_fp8
from vmkv.core.cache.fp8 import FP8, LayerScales, Scales, encode
from vmkv.errors import ConfigError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROW_TOKENS = 48

BATCHES = {
    "decode": ([3, 0, 5], [10, 48, 1], [1, 1, 1]),
    "one": ([2], [7], [1]),
    "uniform chunk": ([3, 0], [10, 48], [4, 4]),
    "mixed": ([3, 0, 5, 1], [10, 48, 1, 30], [3, 48, 1, 1]),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, since NaN compares unequal to itself."""
    return tensor.contiguous().view(torch.uint8).cpu()


def fp8_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of an FP8 tensor, with the sign of NaN removed: conversions set it as they like."""
    found = bits(tensor)
    return torch.where((found & 0x7F) == 0x7F, 0x7F, found)


@pytest.mark.parametrize("device", DEVICES)
def test_append_skips_padding(device):
    """Padding: sequences without queries, and queries before position 0."""
    batch = AttentionBatch(
        row_indices=torch.tensor([3, 1, 1, 0, 1], dtype=torch.int32, device=device),
        num_tokens=torch.tensor([5, 0, 9, 0, 2], dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, 1, 1, 4, 10, 14], dtype=torch.int32, device=device),
        max_query_tokens=6,
        max_num_tokens=9,
        row_tokens=ROW_TOKENS,
    )
    dense = DenseRows(4, ROW_TOKENS, 2, 16, device=device)
    expected = DenseRows(4, ROW_TOKENS, 2, 16, device=device)
    key, value = (torch.randn(14, 2, 16, device=device) for _ in range(2))
    for row, place, new in ((3, slice(4, 5), slice(1)), (1, slice(6, 9), slice(1, 4))):
        expected.keys[row, place], expected.values[row, place] = key[new], value[new]
    expected.keys[1, :2], expected.values[1, :2] = key[12:], value[12:]
    append(Call(key, dense.keys, dense.values, batch, 1.0), (key, value))
    assert torch.equal(bits(expected.buffer), bits(dense.buffer))


@pytest.mark.parametrize("device", DEVICES)
def test_append_takes_strided_input(device):
    """The input may be slices of a fused projection or head-major tensors."""
    heads, dim, total = 2, 16, 5
    fused = torch.randn(total, 3 * heads * dim, device=device)
    key = fused[:, heads * dim : 2 * heads * dim].unflatten(1, (heads, dim))
    value = torch.randn(heads, total, dim, device=device).transpose(0, 1)
    batch = AttentionBatch.build([1, 0], [4, 9], [2, 3], row_tokens=ROW_TOKENS, device=device)
    dense = DenseRows(2, ROW_TOKENS, heads, dim, device=device)
    append(Call(key, dense.keys, dense.values, batch, 1.0), (key, value))
    assert torch.equal(key[:2], dense.keys[1, 2:4])
    assert torch.equal(value[2:], dense.values[0, 6:9])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (torch.zeros(3, 2, 8), torch.zeros(2, 2, 8)),
        (torch.zeros(2, 4, 8), torch.zeros(2, 2, 8)),
        (torch.zeros(2, 2, 8, dtype=torch.float16), torch.zeros(2, 2, 8)),
        (torch.zeros(2, 2, 8), torch.zeros(2, 2, 4)),
    ],
)
def test_append_refuses_mismatched_shapes_and_dtypes(key, value):
    """Before it writes anything."""
    dense = DenseRows(2, ROW_TOKENS, 2, 8)
    batch = AttentionBatch.build([0, 1], [1, 1], [1, 1], row_tokens=ROW_TOKENS)
    before = bits(dense.buffer)
    with pytest.raises(ConfigError):
        append(Call(key, dense.keys, dense.values, batch, 1.0), (key, value))
    assert torch.equal(before, bits(dense.buffer))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", BATCHES)
@pytest.mark.parametrize("stored", ["same", "fp8", "scaled"])
@pytest.mark.parametrize(
    ("heads", "k_dim", "v_dim"), [(8, 128, 128), (1, 64, 64), (3, 40, 24), (3, 40, 23)]
)
def test_append_writes_exactly_the_new_tokens(device, dtype, shape, stored, heads, k_dim, v_dim):
    """In FP8, each number is divided by its head's scale, rounded and clamped, to the bit."""
    is_fp8 = stored != "same"
    if is_fp8 and device == "cuda" and (reason := why_not_fp8(torch.device(device, 0), dtype)):
        pytest.skip(reason)
    if v_dim % 2 and not is_fp8:
        pytest.skip("an odd width is for float8")
    rows, num_tokens, queries = BATCHES[shape]
    batch = AttentionBatch.build(
        rows, num_tokens, queries, row_tokens=ROW_TOKENS, num_rows=6, device=device
    )
    generator = torch.Generator().manual_seed(0)
    total = sum(queries)
    key = (300 * torch.randn(total, heads, k_dim, generator=generator)).to(dtype)
    value = torch.randn(total, heads, v_dim, generator=generator).to(dtype)
    value[0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    scales = None
    if stored == "scaled":
        by_head = torch.linspace(0.3, 7.0, heads).tolist()
        layer_scales = LayerScales(tuple(by_head), tuple(by_head[::-1]))
        scales = Scales.of(layer_scales, torch.device(device))
    kv_dtype = FP8 if is_fp8 else dtype
    dense, expected = (
        DenseRows(6, ROW_TOKENS, heads, k_dim, v_dim, dtype=kv_dtype, device=device)
        for _ in range(2)
    )
    kept_key, kept_value = key, value
    if is_fp8:
        kept_key = encode(key, scales and scales.inverse_keys.cpu())
        kept_value = encode(value, scales and scales.inverse_values.cpu())
    for row, start, end, tokens, _ in batch.spans:
        expected.keys[row, tokens - (end - start) : tokens] = kept_key[start:end].to(device)
        expected.values[row, tokens - (end - start) : tokens] = kept_value[start:end].to(device)
    key, value = key.to(device), value.to(device)
    append(Call(key, dense.keys, dense.values, batch, 1.0, scales=scales), (key, value))
    seen = fp8_bits if is_fp8 else bits
    assert torch.equal(seen(expected.buffer), seen(dense.buffer))
    assert stored != "fp8" or bool((dense.keys.float().abs() == 448).any())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_queries_are_encoded_as_keys_are(dtype):
    """By the same kernel, for any strides, and for all 65,536 numbers of the dtype."""
    if reason := why_not_fp8(torch.device("cuda", 0), dtype):
        pytest.skip(reason)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    for query in (every.view(64, 8, 128), every.view(8, 64, 128).transpose(0, 1)):
        wanted = encode(query).contiguous()
        assert torch.equal(fp8_bits(wanted), fp8_bits(encoded(query.cuda())))
