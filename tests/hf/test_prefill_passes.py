"""Prompts are cut into prefill passes without a gap, in order, and within the bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vmkv.hf.prefill import prefill_passes

LENGTHS = st.lists(st.integers(1, 60), max_size=12)
BOUNDS = st.integers(1, 80)


@given(lengths=LENGTHS, most=BOUNDS)
def test_every_token_is_run_once_and_in_order(lengths: list[int], most: int) -> None:
    """The pieces of all passes, laid end to end, are the prompts' tokens one after another."""
    covered = [
        (piece.sequence_id, at)
        for pieces in prefill_passes(lengths, most)
        for piece in pieces
        for at in range(piece.num_past_tokens, piece.num_tokens)
    ]
    assert covered == [(who, at) for who, length in enumerate(lengths) for at in range(length)]


@given(lengths=LENGTHS, most=BOUNDS)
def test_passes_are_full_but_for_the_last(lengths: list[int], most: int) -> None:
    """No pass exceeds the bound, and only the last one is smaller: no pass is wasted."""
    sizes = [
        sum(piece.num_new_tokens for piece in pieces) for pieces in prefill_passes(lengths, most)
    ]
    assert all(size == most for size in sizes[:-1])
    assert all(0 < size <= most for size in sizes[-1:])


@given(lengths=LENGTHS, most=BOUNDS)
def test_a_pass_holds_each_prompt_at_most_once(lengths: list[int], most: int) -> None:
    """A row cannot be used twice in a batch, and every piece runs at least one token."""
    for pieces in prefill_passes(lengths, most):
        ids = [piece.sequence_id for piece in pieces]
        assert len(set(ids)) == len(ids)
        assert all(piece.num_new_tokens >= 1 for piece in pieces)


def test_no_prompts_need_no_pass() -> None:
    """Nothing to run is no pass, rather than an empty one."""
    assert not list(prefill_passes([], 8))
