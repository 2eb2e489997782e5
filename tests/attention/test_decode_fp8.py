"""Our own kernel for decode steps over FP8 rows: one query of each sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.dense_rows import DenseRows
from helpers.reference_backend import ReferenceBackend

from vmkv.attention import AttentionBatch, Call, decode_fp8, get
from vmkv.attention.flash_common import with_sinks
from vmkv.core.cache.fp8 import FP8, LayerScales, Scales, decode, encode

ROW_TOKENS, NUM_ROWS = 1400, 9
LENGTHS = [1, 15, 33, 128, 129, 700, 1400]
TWO_QUERIES = AttentionBatch.build(
    list(range(7)), [9] * 7, [2, 1, 1, 1, 1, 1, 1], row_tokens=ROW_TOKENS
)


def call_of(
    dim: int,
    heads: int,
    group: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    is_scaled: bool = False,
    **options: float,
) -> Call:
    """A decode step of seven sequences; memory behind their ends is NaN."""
    rows = [4, 0, 8, 2, 7, 5, 1]
    batch = AttentionBatch.build(
        rows, LENGTHS, [1] * len(rows), row_tokens=ROW_TOKENS, num_rows=NUM_ROWS, device=device
    )
    dense = DenseRows(NUM_ROWS, ROW_TOKENS, heads, dim, dtype=FP8, device=device)
    scales = None
    if is_scaled:
        each = tuple(0.25 + head for head in range(heads))
        scales = Scales.of(LayerScales(each, each[::-1]), torch.device(device))
    generator = torch.Generator().manual_seed(dim + heads)
    for row, num_tokens in zip(rows, LENGTHS, strict=True):
        for view, inverse in (
            (dense.keys, scales and scales.inverse_keys),
            (dense.values, scales and scales.inverse_values),
        ):
            noise = torch.randn(num_tokens, heads, dim, generator=generator).to(device)
            view[row, :num_tokens] = encode(noise, inverse)
    query = torch.randn(len(rows), heads * group, dim, generator=generator).to(device, dtype)
    return Call(
        query,
        dense.keys,
        dense.values,
        batch,
        dim**-0.5,
        window=options.get("window"),  # type: ignore[arg-type]
        softcap=options.get("softcap", 0.0),
        scales=scales,
    )


def exactly(call: Call) -> torch.Tensor:
    """Attention in float64 over the stored numbers."""
    scales = call.scales
    keys = decode(call.keys, scales and scales.keys, torch.float64)
    values = decode(call.values, scales and scales.values, torch.float64)
    exact = replace(call, query=call.query.double(), keys=keys, values=values, scales=None)
    return ReferenceBackend(torch.float64).attend(exact)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [None, 1, 3, 64])
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 20.0}], ids=str)
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize(("dim", "heads", "group"), [(64, 1, 1), (64, 2, 7), (128, 8, 4)])
def test_decode_is_as_exact_as_its_output_dtype(
    monkeypatch: pytest.MonkeyPatch,
    dim: int,
    heads: int,
    group: int,
    is_scaled: bool,
    options: dict[str, float],
    parts: int | None,
) -> None:
    """Queries are not rounded to FP8, memory behind rows is unused, and launches are repeatable."""
    call = call_of(dim, heads, group, is_scaled=is_scaled, **options)
    if parts is not None:
        monkeypatch.setattr(decode_fp8, "_num_parts", lambda *_: parts)
    assert decode_fp8.serves(call)
    first, _ = decode_fp8.decode(call)
    second, _ = decode_fp8.decode(call)
    expected = exactly(call)
    # Weights are float16, the output bfloat16: half a unit of its last place, and some.
    bound = expected.abs().amax() * 2**-8
    assert (first - expected).abs().max() <= bound
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash3", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_backends_use_this_kernel_for_decode_steps(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    call = call_of(128, 2, 4, dtype=dtype)
    if name == "flash3":
        backend = get(name)
        reason = backend.why_not(call.spec(1400))
        if reason is not None:
            pytest.skip(reason)
    seen: list[Call] = []
    own = decode_fp8.decode
    monkeypatch.setattr(decode_fp8, "decode", lambda call: (seen.append(call), own(call))[1])
    out = get(name).attend(call)
    assert len(seen) == 1
    assert out.dtype == dtype
    assert (out - exactly(call)).abs().max() <= exactly(call).abs().amax() * 2**-8


@pytest.mark.gpu
def test_sequences_without_keys_get_zeros_and_sinks_their_share() -> None:
    """Padding of a captured step has no keys."""
    call = call_of(128, 2, 4)
    call.batch.num_tokens[2] = 0
    out, _ = decode_fp8.decode(call)
    assert (out[2] == 0).all()
    call = call_of(128, 2, 4)
    sinks = torch.linspace(-2, 6, 8, device="cuda")
    out, logsumexp = decode_fp8.decode(call)
    call = replace(call, sinks=sinks)
    expected = exactly(call)
    assert (
        with_sinks(call, out, logsumexp) - expected
    ).abs().max() <= expected.abs().amax() * 2**-7


@pytest.mark.gpu
def test_a_captured_decode_can_be_replayed() -> None:
    """Several times and with other lengths: each launch leaves the kernel's counters at zero."""
    call = call_of(128, 2, 4)
    lengths = call.batch.num_tokens.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        decode_fp8.decode(call)
        graph = torch.cuda.CUDAGraph()
        fresh = replace(call, batch=_again(call.batch))
        with torch.cuda.graph(graph, stream=stream):
            outs = [decode_fp8.decode(fresh)[0] for _ in range(3)]
    for shorter in (0, 1, 0):
        call.batch.num_tokens.copy_((lengths - shorter).clamp(min=1))
        graph.replay()
        torch.cuda.synchronize()
        expected = exactly(replace(call, batch=_built(call.batch)))
        for out in outs:
            assert (out - expected).abs().max() <= expected.abs().amax() * 2**-8


@pytest.mark.parametrize(
    "change",
    [
        {"query": torch.zeros(7, 18, 128, dtype=torch.bfloat16)},
        {"batch": TWO_QUERIES, "query": torch.zeros(8, 8, 128, dtype=torch.bfloat16)},
        {"query": torch.zeros(7, 8, 128)},
    ],
    ids=["nine queries a head", "two queries of one", "float32"],
)
def test_unsupported_calls_are_not_taken(change: dict) -> None:
    """The backend's own kernel serves them."""
    call = call_of(128, 2, 4, device="cpu")
    assert decode_fp8.takes(call)
    assert not decode_fp8.takes(replace(call, **change))
    wide = DenseRows(NUM_ROWS, ROW_TOKENS, 2, 96, dtype=FP8, device="cpu")
    query = torch.zeros(7, 8, 96, dtype=torch.bfloat16)
    assert not decode_fp8.takes(replace(call, query=query, keys=wide.keys, values=wide.values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_the_cpu_sdpa_decodes_the_rows(dtype: torch.dtype) -> None:
    """The dtype and shape are supported, but the kernel needs a GPU."""
    call = call_of(64, 2, 4, dtype=dtype, device="cpu")
    assert decode_fp8.takes(call)
    assert not decode_fp8.serves(call)
    out = get("sdpa").attend(call)
    assert (out - exactly(call)).abs().max() <= exactly(call).abs().amax() * 2**-6


def _again(batch: AttentionBatch) -> AttentionBatch:
    """A batch of the same vectors without derived values."""
    return AttentionBatch(
        batch.row_indices, batch.num_tokens, batch.query_starts, 1, ROW_TOKENS, ROW_TOKENS
    )


def _built(batch: AttentionBatch) -> AttentionBatch:
    """A batch built from the current values of the vectors."""
    rows, lengths = batch.row_indices.tolist(), batch.num_tokens.tolist()
    return AttentionBatch.build(
        rows, lengths, [1] * len(rows), row_tokens=ROW_TOKENS, num_rows=NUM_ROWS, device="cuda"
    )
