"""Every backend against float64 attention, by FlashAttention's own rule.

A backend may be at most twice as far from the float64 result as plain attention in the inputs'
dtype is (plus a hair, for cases where the latter happens to be exact). No tolerance is chosen by
hand. Memory past each sequence's margin is NaN (see dense_rows.py), so an over-read is an error
of infinite size; test_overread.py tests that it stays inside mapped memory.

CPU backends always run; `-m gpu` runs every CUDA backend that says it can serve the case.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers.dense_rows import MARGIN_FILL, DenseRows, random_query, skip_unless_served
from helpers.reference_backend import ReferenceBackend

from vmkv.attention import AttentionBatch, AttentionSpec, Call, append, flash3, get, sdpa, why_not

NUM_ROWS = 7
ROW_TOKENS = 600

# Rows are shuffled and not all used; lengths are on both sides of the kernels' tile edges.
BATCHES = {
    "decode": ([5, 0, 3, 6], [1, 127, 129, 400], [1, 1, 1, 1]),
    "prefill": ([2, 6, 0], [1, 64, 257], [1, 64, 257]),
    "chunk": ([1, 4], [300, 64], [33, 33]),
    "ragged chunk": ([6, 2, 1], [300, 130, 17], [33, 2, 17]),
    "mixed": ([3, 0, 6, 2], [257, 1, 400, 96], [1, 1, 150, 96]),
}
CPU = ["sdpa", "reference"]
CUDA = ["flash2", "flash3", "torch", "sdpa"]
DEVICES = [("cpu", name) for name in CPU] + [
    pytest.param("cuda", name, marks=pytest.mark.gpu) for name in CUDA
]


@dataclass(frozen=True)
class Case:
    """Options of one layer; the defaults are like Llama's."""

    heads: int = 8
    kv_heads: int = 2
    dim: int = 64
    v_dim: int | None = None
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    left_pad: bool = False
    is_latent: bool = False

    def spec(self, device: str) -> AttentionSpec:
        """The specification of the case, for `select`."""
        return AttentionSpec(
            device,
            self.dtype,
            self.heads,
            self.kv_heads,
            self.dim,
            self.v_dim or self.dim,
            window=self.window,
            softcap=self.softcap,
            has_sinks=self.sinks,
            left_pad=self.left_pad,
            is_latent=self.is_latent,
        )

    def options(self, generator: torch.Generator, device: str) -> dict[str, Any]:
        """Options of its calls, with random sinks if it has any."""
        sinks = torch.randn(self.heads, generator=generator).to(device) if self.sinks else None
        its = {"scale": self.dim**-0.5, "window": self.window, "softcap": self.softcap}
        return {**its, "sinks": sinks}


def run(case: Case, shape: str, device: str, name: str) -> None:
    """Compare backend `name` with float64, or skip a case that it cannot serve."""
    skip_unless_served(name, case.spec(device))
    rows, num_tokens, queries = BATCHES[shape]
    # Left padding: none, some, all but one token.
    pads = [(0, n // 3, n - 1)[i % 3] for i, n in enumerate(num_tokens)] if case.left_pad else None
    batch = AttentionBatch.build(
        rows,
        num_tokens,
        queries,
        row_tokens=ROW_TOKENS,
        num_rows=NUM_ROWS,
        left_pad=pads,
        device=device,
    )
    backend = get(name)
    generator = torch.Generator().manual_seed(0)
    v_dim = case.v_dim or case.dim
    dense = DenseRows(
        NUM_ROWS, ROW_TOKENS, case.kv_heads, case.dim, v_dim, dtype=case.dtype, device=device
    )
    if case.is_latent:
        dense.values = dense.keys[..., :v_dim]
    dense.fill(batch, backend.overread_tokens(case.spec(device)), generator)
    query = random_query(
        batch, case.heads, case.dim, dtype=case.dtype, device=device, generator=generator
    )
    options = case.options(generator, device)
    before = dense.live(batch)
    out = backend.attend(Call(query, dense.keys, dense.values, batch, **options))

    assert out.shape == (query.shape[0], case.heads, v_dim)
    assert out.dtype == case.dtype
    for (key, value), (key_after, value_after) in zip(before, dense.live(batch), strict=True):
        assert torch.equal(key, key_after)
        assert torch.equal(value, value_after)
    assert_close(out, query, dense, batch, options)

    into = torch.full_like(out, torch.nan)
    again = backend.attend(Call(query, dense.keys, dense.values, batch, **options, out=into))
    assert torch.equal(again, out)
    if name == "flash3" and options["sinks"] is None and flash3._load() is flash3.library_kernel():
        assert again.data_ptr() == into.data_ptr()


def assert_close(out, query, dense, batch, options) -> None:
    """Assert the error rule of the module's docstring."""
    exact = ReferenceBackend(torch.float64).attend(
        Call(query.double(), dense.keys.double(), dense.values.double(), batch, **options)
    )
    plain = ReferenceBackend(query.dtype).attend(
        Call(query, dense.keys, dense.values, batch, **options)
    )
    assert torch.isfinite(out).all()
    error = (out.double() - exact).abs().max().item()
    allowed = 2 * (plain.double() - exact).abs().max().item() + 1e-5
    assert error <= allowed, f"error {error:.3g}, plain attention's rule allows {allowed:.3g}"


EDGES = ("decode", "mixed")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: MHA, MQA, GQA with groups that are no power of two.
HEADS = [(4, 4, 64), (8, 1, 64), (12, 4, 128), (6, 2, 96), (4, 2, 192), (4, 2, 256), (16, 2, 512)]
OPTIONS: list[dict[str, Any]] = [
    *({"window": window} for window in (1, 32, 128, 10_000)),  # The query, and tokens before it.
    {"softcap": 5.0},
    {"sinks": True},
    {"left_pad": True},
    {"softcap": 5.0, "window": 48},
    {"sinks": True, "window": 48},
    {"left_pad": True, "window": 48},
    {"left_pad": True, "sinks": True, "softcap": 5.0},
]
#: Latents of 512 with 64 numbers more for keys, of which heads share one.
_LATENT = {"kv_heads": 1, "dim": 576, "v_dim": 512, "is_latent": True}
LATENTS = [{"heads": heads} | _LATENT for heads in (16, 20)] + [{"left_pad": True} | _LATENT]
CASES = [
    *itertools.product([{"dtype": dtype} for dtype in DTYPES], BATCHES),
    *itertools.product([{"heads": h, "kv_heads": kv, "dim": dim} for h, kv, dim in HEADS], EDGES),
    # Values narrower or wider than keys, as in latent attention.
    *itertools.product([{"dim": 192, "v_dim": 128}, {"dim": 64, "v_dim": 128}], EDGES),
    *itertools.product(OPTIONS, BATCHES),
    *itertools.product(LATENTS, BATCHES),
]


@pytest.mark.parametrize(("options", "shape"), CASES, ids=str)
@pytest.mark.parametrize(("device", "name"), DEVICES)
def test_ragged_batches(device, name, options, shape):
    """Decode, prefill, chunks and mixtures, in shuffled rows of ragged lengths."""
    run(Case(**options), shape, device, name)


PADDED = {
    # Rows, tokens, queries, as in captured steps.
    "decode": ([5, 0, 3, 3], [300, 1, 0, 0], [1, 1, 1, 1]),
    "tiles": ([2, 2, 6, 0, 0, 0], [128, 200, 70, 0, 0, 0], [128, 72, 33, 0, 90, 0]),
    "all padding": ([0, 0, 0], [0, 0, 0], [50, 0, 0]),
}


@pytest.mark.parametrize("shape", PADDED)
@pytest.mark.parametrize(("device", "name"), DEVICES)
@pytest.mark.parametrize(
    "options", [{}, {"window": 48}, {"softcap": 5.0}, {"sinks": True, "dim": 128}], ids=str
)
def test_padding_of_captured_steps_does_not_change_other_outputs(device, name, options, shape):
    """Queries without keys yield zeros; sequences without queries are ignored."""
    case = Case(**options)
    skip_unless_served(name, case.spec(device))
    rows, num_tokens, queries = PADDED[shape]
    starts = [0, *itertools.accumulate(queries)]
    vectors = [torch.tensor(each, dtype=torch.int32) for each in (rows, num_tokens, starts)]
    row_indices, lengths, query_starts = (each.to(device) for each in vectors)
    batch = AttentionBatch(
        row_indices=row_indices,
        num_tokens=lengths,
        query_starts=query_starts,
        max_query_tokens=max(queries),
        max_num_tokens=ROW_TOKENS,
        row_tokens=ROW_TOKENS,
    )
    generator = torch.Generator().manual_seed(0)
    dense = DenseRows(
        NUM_ROWS, ROW_TOKENS, case.kv_heads, case.dim, dtype=case.dtype, device=device
    )
    margin = get(name).overread_tokens(case.spec(device))
    for row, count in dict(zip(rows, num_tokens, strict=True)).items():
        noise = torch.randn(2, count, case.kv_heads, case.dim, generator=generator)
        for view, new in zip((dense.keys, dense.values), noise, strict=True):
            view[row, :count] = new.to(device, case.dtype)
            view[row, count : count + margin] = MARGIN_FILL
    query = random_query(
        batch, case.heads, case.dim, dtype=case.dtype, device=device, generator=generator
    )
    options = case.options(generator, device)
    out = get(name).attend(Call(query, dense.keys, dense.values, batch, **options))
    assert_close(out, query, dense, batch, options)
    for count, (start, end) in zip(num_tokens, itertools.pairwise(starts), strict=True):
        assert count or not out[start:end].any()


@pytest.mark.parametrize(("device", "name"), DEVICES)
def test_sinks_of_any_float_dtype(device, name):
    """Sinks in bfloat16 and in float32 give the same output."""
    if why_not(name, Case(sinks=True).spec(device)) is not None:
        pytest.skip(f"{name} cannot run here")
    batch = AttentionBatch.build([1], [9], [9], row_tokens=ROW_TOKENS, device=device)
    dense = DenseRows(2, ROW_TOKENS, 2, 64, dtype=torch.bfloat16, device=device)
    generator = torch.Generator().manual_seed(0)
    dense.fill(batch, get(name).overread_tokens(Case().spec(device)), generator)
    query = random_query(batch, 8, 64, dtype=torch.bfloat16, device=device, generator=generator)
    sinks = torch.zeros(8, dtype=torch.bfloat16, device=device)
    call = Call(query, dense.keys, dense.values, batch, 0.125, sinks=sinks)
    narrow = get(name).attend(call)
    wide = get(name).attend(replace(call, sinks=sinks.float()))
    assert torch.equal(wide, narrow)


def test_outputs_do_not_depend_on_the_other_sequences_of_a_batch():
    """On the CPU to the bit."""
    generator = torch.Generator().manual_seed(0)
    rows, num_tokens, queries = BATCHES["mixed"]
    dense = DenseRows(NUM_ROWS, ROW_TOKENS, 2, 64)
    together = AttentionBatch.build(rows, num_tokens, queries, row_tokens=ROW_TOKENS)
    dense.fill(together, 0, generator)
    query = random_query(together, 8, 64, dtype=torch.float32, device="cpu", generator=generator)
    out = get("sdpa").attend(Call(query, dense.keys, dense.values, together, 0.125))
    for span in together.spans:
        alone = AttentionBatch.build(
            [span.row], [span.num_tokens], [span.query_end - span.query_start],
            row_tokens=ROW_TOKENS,
        )  # fmt: skip
        part = slice(span.query_start, span.query_end)
        expected = get("sdpa").attend(Call(query[part], dense.keys, dense.values, alone, 0.125))
        assert torch.equal(expected, out[part])


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"left_pad": True}, {"window": 48}, {"sinks": True}])
@pytest.mark.parametrize("shape", ["decode", "chunk"])
def test_flash2_appends_in_its_kernel(shape, options):
    """`attend` with new tensors writes what `append` writes, and attends to it."""
    case = Case(**options)
    skip_unless_served("flash2", case.spec("cuda"))
    rows, num_tokens, queries = BATCHES[shape]
    pads = [n // 3 for n in num_tokens] if case.left_pad else None
    batch = AttentionBatch.build(
        rows, num_tokens, queries, row_tokens=ROW_TOKENS, left_pad=pads, device="cuda"
    )
    generator = torch.Generator().manual_seed(0)
    expected, fused = (
        DenseRows(NUM_ROWS, ROW_TOKENS, 2, 64, dtype=case.dtype, device="cuda") for _ in range(2)
    )
    expected.fill(batch, 0, generator)
    fused.buffer.copy_(expected.buffer)
    total = sum(queries)
    key, value = (
        torch.randn(total, 2, 64, generator=generator).to("cuda", case.dtype) for _ in range(2)
    )
    query = random_query(batch, 8, 64, dtype=case.dtype, device="cuda", generator=generator)
    sinks = torch.randn(8, generator=generator).cuda() if case.sinks else None
    options = {"scale": 0.125, "window": case.window, "sinks": sinks}
    call = Call(query, fused.keys, fused.values, batch, **options, new=(key, value))
    append(replace(call, keys=expected.keys, values=expected.values), (key, value))
    out = get("flash2").attend(call)
    raw = torch.int16
    assert torch.equal(expected.buffer.view(raw), fused.buffer.view(raw))
    assert_close(out, query, expected, batch, options)


@pytest.mark.parametrize("window", [None, 48])
def test_masks_of_later_chunks_are_made_for_some_queries_at_a_time(monkeypatch, window):
    """A chunk of 33 queries after 267 tokens, in masks of 2,000 elements at most."""
    made = []
    plain = sdpa.visible_keys

    def counting(*arguments):
        mask = plain(*arguments)
        made.append(mask.numel())
        return mask

    monkeypatch.setattr(sdpa, "visible_keys", counting)
    monkeypatch.setattr(sdpa, "SCORES_AT_ONCE", 2000)
    run(Case(dtype=torch.float32, window=window), "chunk", "cpu", "sdpa")
    assert len(made) > 4
    assert max(made) <= 2000


def test_a_prompt_attends_to_its_own_keys() -> None:
    """SDPA over new keys is SDPA over rows that hold nothing else."""
    generator = torch.Generator().manual_seed(0)
    counts = [5, 1, 12]
    batch = AttentionBatch.build([0, 1, 2], counts, counts, row_tokens=sum(counts), num_rows=3)
    query, key, value = torch.randn(3, sum(counts), 4, 16, generator=generator)
    call = Call(query, key[None], value[None, :, :, :12].contiguous(), batch, 0.25)
    out = get("sdpa").attend_new(replace(call, new=(key, value[..., :12])))
    for start, count in zip(itertools.accumulate(counts, initial=0), counts, strict=False):
        one = AttentionBatch.build([0], [count], [count], row_tokens=count)
        part = slice(start, start + count)
        views = key[part][None], value[part, :, :12][None].contiguous()
        alone = get("sdpa").attend(Call(query[part], *views, one, 0.25))
        torch.testing.assert_close(out[part], alone)
