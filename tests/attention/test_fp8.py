"""FP8 rows: backends that read them, their results, and refusals of the others."""

from __future__ import annotations

import logging
import sys
import types

import pytest
import torch
from helpers.dense_rows import DenseRows, random_query, skip_unless_served
from helpers.reference_backend import ReferenceBackend, visible_keys

from vmkv.attention import (
    AttentionBatch,
    AttentionSpec,
    Call,
    flash3,
    get,
    registry,
    select,
    why_not,
)
from vmkv.core.cache.fp8 import FP8, LayerScales, Scales, decode, encode
from vmkv.errors import ConfigError

HEADS, KV_HEADS, ROW_TOKENS, NUM_ROWS = 8, 2, 600, 7
BATCHES = {
    "decode": ([5, 0, 3, 6], [1, 127, 129, 400], [1, 1, 1, 1]),
    "prefill": ([2, 6, 0], [1, 64, 257], [1, 64, 257]),
    "mixed": ([3, 0, 6, 2], [257, 1, 400, 96], [1, 1, 150, 96]),
}
GPU = AttentionSpec("cuda", torch.bfloat16, 8, 2, 128, 128, kv_dtype=FP8)


def rows(
    shape: str, dim: int, device: str, *, margin: int, is_scaled: bool
) -> tuple[AttentionBatch, DenseRows, Scales | None]:
    """Random FP8 tokens, with large numbers in the margin and NaN behind it."""
    where, num_tokens, queries = BATCHES[shape]
    batch = AttentionBatch.build(
        where, num_tokens, queries, row_tokens=ROW_TOKENS, num_rows=NUM_ROWS, device=device
    )
    dense = DenseRows(NUM_ROWS, ROW_TOKENS, KV_HEADS, dim, dtype=FP8, device=device)
    scales = None
    if is_scaled:
        scales = Scales.of(LayerScales((0.25, 3.0), (2.0, 0.125)), torch.device(device))
    generator = torch.Generator().manual_seed(0)
    for span in batch.spans:
        for view, inverse in (
            (dense.keys, scales and scales.inverse_keys),
            (dense.values, scales and scales.inverse_values),
        ):
            noise = torch.randn(span.num_tokens, KV_HEADS, dim, generator=generator).to(device)
            view[span.row, : span.num_tokens] = encode(noise, inverse)
            view[span.row, span.num_tokens : span.num_tokens + margin] = 448
    return batch, dense, scales


def exactly(
    query: torch.Tensor, dense: DenseRows, batch: AttentionBatch, scales: Scales | None, **call: int
) -> torch.Tensor:
    """Attention in float64 over the stored numbers."""
    keys = decode(dense.keys, scales and scales.keys, torch.float64)
    values = decode(dense.values, scales and scales.values, torch.float64)
    return ReferenceBackend(torch.float64).attend(Call(query.double(), keys, values, batch, **call))


@pytest.mark.parametrize("shape", BATCHES)
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("name", ["sdpa", "reference"])
@pytest.mark.parametrize("options", [{}, {"window": 48}, {"softcap": 5.0}], ids=str)
def test_backends_without_an_fp8_kernel_decode_the_rows(
    name: str, shape: str, is_scaled: bool, options: dict[str, float]
) -> None:
    """The result is that of rows with the same numbers in the query's dtype."""
    batch, dense, scales = rows(shape, 64, "cpu", margin=0, is_scaled=is_scaled)
    generator = torch.Generator().manual_seed(1)
    query = random_query(batch, HEADS, 64, dtype=torch.float32, device="cpu", generator=generator)
    call = {"scale": 0.125, **options}
    out = get(name).attend(Call(query, dense.keys, dense.values, batch, scales=scales, **call))
    assert torch.float32 == out.dtype
    torch.testing.assert_close(exactly(query, dense, batch, scales, **call).float(), out)


def _in_eight_bits(
    query: torch.Tensor, dense: DenseRows, batch: AttentionBatch, scales: Scales | None
) -> torch.Tensor:
    """Attention whose queries and weights are also rounded to FP8; causal, scale 1/8."""
    keys = decode(dense.keys, scales and scales.keys, torch.float64)
    values = decode(dense.values, scales and scales.values, torch.float64)
    out = query.new_empty(query.shape, dtype=torch.float64)
    groups = HEADS // KV_HEADS
    for row, start, end, num_tokens, _ in batch.spans:
        q = encode(query[start:end]).double().transpose(0, 1)
        k, v = (
            each[row, :num_tokens].repeat_interleave(groups, 1).transpose(0, 1)
            for each in (keys, values)
        )
        seen = visible_keys(end - start, num_tokens, None, query.device)
        scores = (q @ k.transpose(1, 2) / 8).masked_fill(~seen, -torch.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        rounded = encode(256 * weights).double() / 256
        out[start:end] = (rounded @ v / weights.sum(-1, keepdim=True)).transpose(0, 1)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("shape", BATCHES)
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_flash3_reads_fp8_rows_in_place(
    shape: str, is_scaled: bool, dim: int, dtype: torch.dtype
) -> None:
    """Its error is explained by the rounding of queries and weights to FP8."""
    spec = AttentionSpec("cuda", dtype, HEADS, KV_HEADS, dim, dim, kv_dtype=FP8)
    skip_unless_served("flash3", spec)
    margin = get("flash3").overread_tokens(spec)
    batch, dense, scales = rows(shape, dim, "cuda", margin=margin, is_scaled=is_scaled)
    generator = torch.Generator().manual_seed(1)
    query = random_query(batch, HEADS, dim, dtype=dtype, device="cuda", generator=generator)
    out = get("flash3").attend(Call(query, dense.keys, dense.values, batch, 0.125, scales=scales))
    assert dtype == out.dtype
    exact = exactly(query, dense, batch, scales, scale=0.125)
    allowed = 3 * (_in_eight_bits(query, dense, batch, scales) - exact).abs().max().item() + 1e-2
    assert (out.double() - exact).abs().max().item() <= allowed


@pytest.mark.gpu
def test_flash3_keeps_its_precision_over_long_rows() -> None:
    """Sums of 128k positive numbers lose precision in narrow accumulators."""
    skip_unless_served("flash3", GPU)
    num_tokens = 131_072
    row_tokens = num_tokens + get("flash3").overread_tokens(GPU)
    keys = torch.zeros(1, row_tokens, 8, 128, device="cuda").to(FP8)
    generator = torch.Generator("cuda").manual_seed(0)
    values = torch.rand(keys.shape, generator=generator, device="cuda").to(FP8)
    # Enough queries that the keys are not split.
    batch = AttentionBatch.build([0], [num_tokens], [640], row_tokens=row_tokens, device="cuda")
    query = torch.zeros(640, 32, 128, dtype=torch.bfloat16, device="cuda")
    out = get("flash3").attend(Call(query, keys, values, batch, 1.0))[-1].float()
    mean = values[0, :num_tokens].float().mean(0).repeat_interleave(4, 0)
    assert ((out - mean).abs() / mean).max().item() <= 2.0**-7


def test_cpu_warns_once_that_it_decodes_fp8_rows(caplog: pytest.LogCaptureFixture) -> None:
    """On the CPU, FP8 saves memory but no time."""
    registry._say_that_it_decodes.cache_clear()
    spec = AttentionSpec("cpu", torch.float32, 8, 2, 64, 64, kv_dtype=FP8)
    with caplog.at_level(logging.WARNING):
        assert "sdpa" == select(spec).name == select(spec).name
        select(AttentionSpec("cpu", torch.float32, 8, 2, 64, 64))
    assert 1 == len(caplog.messages)
    assert "decodes them" in caplog.messages[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash2", "torch"])
def test_kernels_without_fp8_are_not_selected(name: str) -> None:
    """Not even by name."""
    assert "reads no keys and values" in str(why_not(name, GPU))
    with pytest.raises(ConfigError, match="would serve it"):
        select(GPU, name)


def test_rows_have_the_dtype_of_the_queries_or_fp8() -> None:
    plain = AttentionSpec("cpu", torch.float32, 8, 2, 64, 64)
    assert plain == AttentionSpec("cpu", torch.float32, 8, 2, 64, 64, kv_dtype=torch.float32)
    assert "kv_dtype=torch.float8_e4m3fn" in str(GPU)
    with pytest.raises(ConfigError, match="rows are of the same type"):
        AttentionSpec("cpu", torch.float32, 8, 2, 64, 64, kv_dtype=torch.bfloat16)
    batch, dense, _ = rows("decode", 64, "cpu", margin=0, is_scaled=False)
    query = torch.zeros(4, HEADS, 64)
    with pytest.raises(ConfigError, match=r"values .*: must be the same"):
        Call(query, dense.keys, dense.values.float(), batch, 1.0)


@pytest.mark.parametrize("num_heads", [1, 3])
def test_scales_that_do_not_fit_the_rows_are_refused(num_heads: int) -> None:
    """For another number of heads, or for rows that are not FP8."""
    batch, dense, _ = rows("decode", 64, "cpu", margin=0, is_scaled=False)
    query = torch.zeros(4, HEADS, 64)
    scales = Scales.of(LayerScales((1.0,) * num_heads, (1.0,) * num_heads), torch.device("cpu"))
    with pytest.raises(ConfigError, match="scales must be"):
        Call(query, dense.keys, dense.values, batch, 1.0, scales=scales)
    keys, values = dense.keys.float(), dense.values.float()
    with pytest.raises(ConfigError, match="scales are for"):
        Call(query, keys, values, batch, 1.0, scales=scales)


def test_fp8_tiles_have_their_own_sizes() -> None:
    """The over-read depends on head size and dtype; head sizes above 256 have no FP8 tile."""

    def overread(dim: int, kv_dtype: torch.dtype | None = None) -> int:
        spec = AttentionSpec("cuda", torch.bfloat16, 8, 2, dim, dim, kv_dtype=kv_dtype)
        return get("flash3").overread_tokens(spec)

    assert (176, 224) == (overread(128), overread(128, FP8))
    assert (192, 160) == (overread(64), overread(64, FP8))
    with pytest.raises(ConfigError):
        overread(288, FP8)


def test_the_flash3_package_serves_fp8_rows_up_to_8192_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It sums in narrow accumulators; the refusal of longer rows names `max_tokens`."""
    package = types.ModuleType("flash_attn_interface")
    package.flash_attn_with_kvcache = lambda *_, **__: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    monkeypatch.setenv(flash3.LIBRARY_VARIABLE, "/nowhere.so")
    for cached in (flash3.library_kernel, flash3._fp8_package_kernel):
        monkeypatch.setattr(flash3, cached.__name__, cached.__wrapped__)
    assert callable(flash3._load_for_fp8(8192))
    for num_tokens in (8193, None):
        reason = flash3._load_for_fp8(num_tokens)
        assert isinstance(reason, str)
        assert "loses precision beyond 8192 tokens" in reason
        assert "max_tokens" in reason
