"""AttentionBatch: the vectors that it computes, and the inputs that it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vmkv.attention import AttentionBatch, AttentionSpec, Call
from vmkv.errors import ConfigError

ROW_TOKENS = 32


def build(rows=(4, 0, 2), num_tokens=(10, 32, 1), query_tokens=(3, 32, 1), **options):
    """Build a valid ragged batch; `options` and arguments make it invalid."""
    options = {"row_tokens": ROW_TOKENS, "num_rows": 5} | options
    return AttentionBatch.build(list(rows), list(num_tokens), list(query_tokens), **options)


def test_vectors_are_int32_and_contiguous():
    """The device vectors are contiguous int32; the maxima are host integers."""
    batch = build(left_pad=[2, 0, 0])
    for vector in (batch.row_indices, batch.num_tokens, batch.query_starts, batch.left_pad):
        assert vector.dtype == torch.int32
        assert vector.is_contiguous()
    assert batch.row_indices.tolist() == [4, 0, 2]
    assert batch.num_tokens.tolist() == [10, 32, 1]
    assert batch.query_starts.tolist() == [0, 3, 35, 36]
    assert batch.left_pad.tolist() == [2, 0, 0]
    assert (batch.max_query_tokens, batch.max_num_tokens, batch.batch_size) == (32, 32, 3)


def test_left_pad_of_zeros_is_none():
    """Kernels then keep their faster path."""
    assert build(left_pad=[0, 0, 0]).left_pad is None


def test_derived_vectors():
    """Row starts skip padding, appended tokens go to the row's end."""
    batch = build(left_pad=[2, 0, 0])
    assert batch.tokens_before.tolist() == [7, 0, 0]
    assert batch.key_starts.tolist()[:3] == [4 * ROW_TOKENS + 2, 0, 2 * ROW_TOKENS]
    assert batch.key_starts.shape == (4,)
    assert batch.visible_tokens.tolist() == [8, 32, 1]
    expected = [4 * ROW_TOKENS + p for p in (7, 8, 9)] + list(range(32)) + [2 * ROW_TOKENS]
    assert batch.flat_positions.tolist() == expected


def test_spans_are_the_same_from_host_and_device():
    """`build` knows the spans; otherwise they are read from the vectors."""
    batch = build(left_pad=[2, 0, 0])
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    assert AttentionBatch(**fields).spans == batch.spans
    assert batch.spans[0] == (4, 0, 3, 10, 2)


def test_a_batch_is_uniform_if_all_sequences_have_the_same_number_of_queries():
    decode = build(query_tokens=[1, 1, 1])
    assert decode.is_uniform(3)
    assert not build().is_uniform(36)


@pytest.mark.parametrize(
    "spoilt",
    [
        {"rows": [], "num_tokens": [], "query_tokens": []},
        {"rows": [4, 0]},
        {"query_tokens": [3, 32]},
        {"left_pad": [0]},
        {"rows": [4, 0, 4]},
        {"rows": [4, 0, 5]},
        {"rows": [4, -1, 2]},
        {"num_tokens": [10, 33, 1]},
        {"num_tokens": [10, 0, 1]},
        {"query_tokens": [3, 0, 1]},
        {"query_tokens": [3, -1, 1]},
        {"query_tokens": [11, 32, 1]},
        {"left_pad": [10, 0, 0]},
        {"left_pad": [-1, 0, 0]},
        {"row_tokens": 0},
        {"row_tokens": 2**30, "num_rows": 5},
        {"row_tokens": 2**30, "num_rows": None},
    ],
    ids=str,
)
def test_bad_input_is_refused(spoilt):
    """Each input describes memory that does not exist."""
    with pytest.raises(ConfigError):
        build(**spoilt)


@pytest.mark.parametrize("wrong", [1.0, True, "1", None])
def test_wrong_types_are_type_errors(wrong):
    """A length is an int; bool and float are refused."""
    with pytest.raises(TypeError):
        build(query_tokens=[3, 32, wrong])


@given(st.data())
def test_any_valid_batch_stays_inside_its_rows(data):
    """Every position and every visible key lies in its own row."""
    size = data.draw(st.integers(1, 6))
    rows = data.draw(st.permutations(range(8)))[:size]
    num_tokens = [data.draw(st.integers(1, ROW_TOKENS)) for _ in rows]
    queries = [data.draw(st.integers(1, n)) for n in num_tokens]
    pads = [data.draw(st.integers(0, n - 1)) for n in num_tokens]
    batch = AttentionBatch.build(
        rows, num_tokens, queries, row_tokens=ROW_TOKENS, num_rows=8, left_pad=pads
    )
    positions = batch.flat_positions.tolist()
    for row, start, end, tokens, pad in batch.spans:
        base = row * ROW_TOKENS
        assert positions[start:end] == list(range(base + tokens - (end - start), base + tokens))
        assert batch.key_starts[batch.row_indices.tolist().index(row)] == base + pad
    assert (batch.key_starts[:-1] + batch.visible_tokens).tolist() == [
        row * ROW_TOKENS + n for row, n in zip(rows, num_tokens, strict=True)
    ]


@pytest.mark.parametrize(
    "spoilt",
    [
        {"num_query_heads": 0},
        {"num_query_heads": 6, "num_kv_heads": 4},
        {"k_dim": 0},
        {"window": 0},
        {"softcap": -1.0},
    ],
    ids=str,
)
def test_bad_specs_are_refused(spoilt):
    good = {"num_query_heads": 8, "num_kv_heads": 4, "k_dim": 64, "v_dim": 64}
    with pytest.raises(ConfigError):
        AttentionSpec("cpu", torch.float32, **(good | spoilt))


def call(**spoilt):
    """Make a call that is valid but for `spoilt`."""
    rows = torch.zeros(5, ROW_TOKENS, 2, 8)
    dataclasses.replace(Call(torch.zeros(36, 4, 8), rows, rows, build(), 1.0), **spoilt)


def test_a_good_call_passes():
    call()


@pytest.mark.parametrize(
    "spoilt",
    [
        {"query": torch.zeros(36, 4, 16)},
        {"query": torch.zeros(36, 3, 8)},
        {"query": torch.zeros(4, 36, 4, 8)},
        {"query": torch.zeros(36, 4, 8, dtype=torch.float16)},
        {"query": torch.zeros(97, 4, 8)},
        {"query": torch.zeros(31, 4, 8)},
        {"keys": torch.zeros(5, 16, 2, 8)},
        {"values": torch.zeros(5, ROW_TOKENS, 4, 8)},
        {"keys": torch.zeros(6, ROW_TOKENS, 2, 8)[::2], "values": torch.zeros(3, ROW_TOKENS, 2, 8)},
        {"keys": torch.zeros(5, ROW_TOKENS, 8, 2).transpose(2, 3)},
        {"window": 0},
        {"new": (torch.zeros(36, 2, 4), torch.zeros(36, 2, 8))},
        {"sinks": torch.zeros(2)},
    ],
    ids=lambda spoilt: next(iter(spoilt)),
)
def test_calls_with_wrong_shapes_or_strides_are_refused(spoilt):
    """A kernel would misread them."""
    with pytest.raises(ConfigError):
        call(**spoilt)
