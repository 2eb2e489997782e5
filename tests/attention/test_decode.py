"""Our own kernel for decode steps, one query of each sequence: float8 rows, and heads of 512.

Without a GPU the kernel's source runs on the host, with the instructions of the tensor cores in
plain C++.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.dense_rows import DenseRows
from helpers.reference_backend import ReferenceBackend

from vmkv.attention import AttentionBatch, Call, decode, get, nvrtc
from vmkv.attention.flash_common import with_sinks
from vmkv.attention.nvrtc import FORMATS
from vmkv.core.cache import fp8
from vmkv.core.cache.fp8 import FP8, LayerScales, Scales, encode

ROW_TOKENS, NUM_ROWS = 1400, 9
LENGTHS = [1, 15, 33, 128, 129, 700, 1400]
HELPERS = Path(__file__).parents[1] / "helpers"
#: Head size, key heads, query heads of each, type of the rows if not the queries': as Gemma 4's.
SHAPES = [
    (64, 1, 1, FP8),
    (64, 2, 7, FP8),
    (128, 8, 4, FP8),
    (512, 1, 8, None),
    (512, 4, 8, None),
    (512, 2, 4, FP8),
]
OPTIONS: list[dict[str, Any]] = [{}, {"window": 100}, {"softcap": 20.0}, {"is_padded": True}]
TWO_QUERIES = AttentionBatch.build(
    list(range(7)), [9] * 7, [2, 1, 1, 1, 1, 1, 1], row_tokens=ROW_TOKENS
)


def call_of(
    dim: int,
    heads: int,
    group: int,
    kv_dtype: torch.dtype | None = FP8,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    is_scaled: bool = False,
    is_padded: bool = False,
    **options: float,
) -> Call:
    """A decode step of seven sequences; memory behind their ends is NaN."""
    rows = [4, 0, 8, 2, 7, 5, 1]
    pads = [tokens * at // 7 for at, tokens in enumerate(LENGTHS)]
    batch = AttentionBatch.build(
        rows,
        LENGTHS,
        [1] * len(rows),
        row_tokens=ROW_TOKENS,
        num_rows=NUM_ROWS,
        left_pad=pads if is_padded else None,
        device=device,
    )
    kv_dtype = kv_dtype or dtype
    dense = DenseRows(NUM_ROWS, ROW_TOKENS, heads, dim, dtype=kv_dtype, device=device)
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
            view[row, :num_tokens] = encode(noise, inverse) if kv_dtype == FP8 else noise
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
    if call.keys.dtype == FP8:
        keys = fp8.decode(call.keys, scales and scales.keys, torch.float64)
        values = fp8.decode(call.values, scales and scales.values, torch.float64)
    else:
        keys, values = call.keys.double(), call.values.double()
    exact = replace(call, query=call.query.double(), keys=keys, values=values, scales=None)
    return ReferenceBackend(torch.float64).attend(exact)


def check(call: Call, out: torch.Tensor) -> None:
    """Compare with exact attention: within what rounding of weights and outputs explains."""
    expected = exactly(call)
    # Over float8 rows weights are float16, the output is bfloat16: half a unit of its last place,
    # and some. Over bfloat16 rows weights are rounded to bfloat16, too.
    digits = 8 if call.keys.dtype == FP8 or call.query.dtype == torch.float16 else 7
    assert (out - expected).abs().max() <= expected.abs().amax() * 2**-digits


# ---- on the host ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host_kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Compile the kernel's source for the host; arguments are those of `decode._kernel`."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the kernel for the host")
    folder = tmp_path_factory.mktemp("decode")
    source = folder / "decode.cu"
    source.write_text(f'#include "{HELPERS}/instructions_on_host.h"\n{nvrtc.source("decode")}')

    @functools.cache
    def compiled(_: int, dtype: torch.dtype, dim: int, is_fp8: bool) -> Any:
        library = folder / f"{FORMATS[dtype]}_{dim}_{is_fp8}.so"
        options = {"FORMAT": FORMATS[dtype], "D": dim, "EIGHT_BITS": int(is_fp8)}
        options |= {"THREADS": 128, "KERNEL": f'"{source}"', "NAME": "decode"}
        flags = [f"-D{name}={value}" for name, value in options.items()]
        base = ["g++", "-O1", "-std=c++17", "-w", "-shared", "-fPIC"]
        emulator = str(HELPERS / "kernel_on_host.cpp")
        subprocess.run([*base, *flags, emulator, "-o", str(library)], check=True)
        return ctypes.CDLL(str(library)).run

    return compiled


@pytest.fixture
def on_host(host_kernel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """`decode` launches its source on the host, rows in as many parts as the list's element."""
    parts = [1]

    def launch(run: Any, num_blocks: int, num_threads: int, words: bytes) -> None:
        assert num_threads == 128
        run(num_blocks, ctypes.c_char_p(words))

    monkeypatch.setattr(decode, "_kernel", host_kernel)
    monkeypatch.setattr(decode, "launch", launch)
    monkeypatch.setattr(decode, "_num_parts", lambda *_: parts[0])
    return parts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("dim", "heads", "group", "kv_dtype"), SHAPES[1:4:2] + SHAPES[5:])
def test_the_source_computes_attention_on_the_host(
    on_host: list[int],
    monkeypatch: pytest.MonkeyPatch,
    dim: int,
    heads: int,
    group: int,
    kv_dtype: torch.dtype | None,
    dtype: torch.dtype,
) -> None:
    """Every option, whole rows and parts, which leave the counts at zero; nothing unused is NaN."""
    monkeypatch.setitem(globals(), "LENGTHS", [1, 15, 16, 17, 33, 129, 200])
    for options, parts in itertools.product(OPTIONS, (1, 3)):
        on_host[0] = parts
        is_scaled = kv_dtype == FP8 and "window" in options
        its = {"dtype": dtype, "device": "cpu", "is_scaled": is_scaled, **options}
        call = call_of(dim, heads, group, kv_dtype, **its)
        assert decode.takes(call)
        out, logsumexp = decode.decode(call)
        check(call, out)
        assert torch.equal(out, decode.decode(call)[0])
        sinks = torch.linspace(-2, 6, heads * group)
        check(replace(call, sinks=sinks), with_sinks(replace(call, sinks=sinks), out, logsumexp))


def test_sinks_leave_outputs_that_backward_needs() -> None:
    """They are applied in place, but not where a kernel has saved its output."""
    call = replace(call_of(64, 1, 2, None, device="cpu"), sinks=torch.zeros(2))
    query = torch.zeros(call.query.shape, requires_grad=True)
    logsumexp = torch.zeros(2, len(query))
    out = with_sinks(call, query.exp(), logsumexp)  # Which saves what it returns.
    assert (out == 0.5).all()
    out.sum().backward()
    assert (query.grad == 0.5).all()
    out = torch.ones_like(call.query)
    assert with_sinks(call, out, logsumexp) is out


def test_a_row_without_keys_gives_zeros_on_the_host(on_host: list[int]) -> None:
    """Padding of a captured step has no keys; the other rows are as without it."""
    for parts in (1, 2):
        on_host[0] = parts
        call = call_of(512, 1, 8, None, device="cpu")
        call.batch.num_tokens[5:] = torch.tensor([0, 30], dtype=torch.int32)
        out, _ = decode.decode(call)
        assert (out[5] == 0).all()
        assert torch.isfinite(out).all()
        call.batch.num_tokens[5] = 1
        assert torch.equal(out[6], decode.decode(call)[0][6])


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [None, 1, 3, 64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize(("dim", "heads", "group", "kv_dtype"), SHAPES)
def test_decode_is_as_exact_as_its_output_dtype(
    monkeypatch: pytest.MonkeyPatch,
    dim: int,
    heads: int,
    group: int,
    kv_dtype: torch.dtype | None,
    is_scaled: bool,
    options: dict[str, Any],
    parts: int | None,
) -> None:
    """Queries are not rounded to FP8, memory behind rows is unused, and launches are repeatable."""
    if is_scaled and kv_dtype is None:
        pytest.skip("scales are for float8")
    call = call_of(dim, heads, group, kv_dtype, is_scaled=is_scaled, **options)
    if parts is not None:
        monkeypatch.setattr(decode, "_num_parts", lambda *_: parts)
    assert decode.serves(call)
    first, _ = decode.decode(call)
    second, _ = decode.decode(call)
    check(call, first)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dim", "kv_dtype"),
    [("flash3", 128, FP8), ("sdpa", 128, FP8), ("sdpa", 512, FP8), ("sdpa", 512, None)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_backends_use_this_kernel_for_decode_steps(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dim: int,
    kv_dtype: torch.dtype | None,
    dtype: torch.dtype,
) -> None:
    call = call_of(dim, 2, 4, kv_dtype, dtype=dtype)
    if name == "flash3":
        backend = get(name)
        reason = backend.why_not(call.spec(1400))
        if reason is not None:
            pytest.skip(reason)
    seen: list[Call] = []
    own = decode.decode
    monkeypatch.setattr(decode, "decode", lambda call: (seen.append(call), own(call))[1])
    out = get(name).attend(call)
    assert len(seen) == 1
    assert out.dtype == dtype
    check(call, out)


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "kv_dtype"), [(128, FP8), (512, FP8), (512, None)])
def test_sequences_without_keys_get_zeros_and_sinks_their_share(
    dim: int, kv_dtype: torch.dtype | None
) -> None:
    """Padding of a captured step has no keys."""
    call = call_of(dim, 2, 4, kv_dtype)
    call.batch.num_tokens[2] = 0
    out, _ = decode.decode(call)
    assert (out[2] == 0).all()
    call = call_of(dim, 2, 4, kv_dtype)
    sinks = torch.linspace(-2, 6, 8, device="cuda")
    out, logsumexp = decode.decode(call)
    call = replace(call, sinks=sinks)
    expected = exactly(call)
    assert (
        with_sinks(call, out, logsumexp) - expected
    ).abs().max() <= expected.abs().amax() * 2**-7


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "kv_dtype"), [(128, FP8), (512, None)])
def test_a_captured_decode_can_be_replayed(dim: int, kv_dtype: torch.dtype | None) -> None:
    """Several times and with other lengths: each launch leaves the kernel's counters at zero."""
    call = call_of(dim, 2, 4, kv_dtype)
    lengths = call.batch.num_tokens.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        decode.decode(call)
        graph = torch.cuda.CUDAGraph()
        fresh = replace(call, batch=_again(call.batch))
        with torch.cuda.graph(graph, stream=stream):
            outs = [decode.decode(fresh)[0] for _ in range(3)]
    for shorter in (0, 1, 0):
        call.batch.num_tokens.copy_((lengths - shorter).clamp(min=1))
        graph.replay()
        torch.cuda.synchronize()
        for out in outs:
            check(replace(call, batch=_built(call.batch)), out)


@pytest.mark.gpu
def test_random_lengths_of_wide_heads() -> None:
    """As Gemma 4's: 32 sequences of any length over eight query heads of each key head."""
    numbers = torch.Generator().manual_seed(3)
    for heads, is_long in itertools.product((1, 2, 4), (False, True)):
        lengths = torch.randint(1, 3000 if is_long else 40, (32,), generator=numbers).tolist()
        rows = torch.randperm(32, generator=numbers).tolist()
        batch = AttentionBatch.build(rows, lengths, [1] * 32, row_tokens=3000, device="cuda")
        dense = DenseRows(32, 3000, heads, 512, dtype=torch.bfloat16, device="cuda")
        dense.fill(batch, 0, numbers)
        query = torch.randn(32, 8 * heads, 512, generator=numbers).to("cuda", torch.bfloat16)
        call = Call(query, dense.keys, dense.values, batch, 512**-0.5)
        check(call, get("sdpa").attend(call))


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
    assert decode.takes(call)
    assert not decode.takes(replace(call, **change))
    wide = DenseRows(NUM_ROWS, ROW_TOKENS, 2, 96, dtype=FP8, device="cpu")
    query = torch.zeros(7, 8, 96, dtype=torch.bfloat16)
    assert not decode.takes(replace(call, query=query, keys=wide.keys, values=wide.values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_the_cpu_sdpa_decodes_the_rows(dtype: torch.dtype) -> None:
    """The dtype and shape are supported, but the kernel needs a GPU."""
    call = call_of(64, 2, 4, dtype=dtype, device="cpu")
    assert decode.takes(call)
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
