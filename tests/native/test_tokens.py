"""`pack_token_ids`, compared with struct, and with sequences that misbehave."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmkv.core._native import pack_token_ids

INTEGERS = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(INTEGERS), st.sampled_from([list, tuple, iter]))
def test_integers_are_packed_as_struct_does(values: list[int], kind: Any) -> None:
    """The integers come from lists, tuples and iterators."""
    assert struct.pack(f"={len(values)}q", *values) == pack_token_ids(*kind(values))


@pytest.mark.parametrize(
    ("token_ids", "error"),
    [
        ("7", TypeError),
        ([1, "2"], TypeError),
        ([1, 2.0], TypeError),
        ([None], TypeError),
        ([2**63], OverflowError),
        ([-(2**63) - 1], OverflowError),
    ],
)
def test_values_that_are_no_integers_are_refused(token_ids: Any, error: type[Exception]) -> None:
    """Integers may precede them."""
    with pytest.raises(error):
        pack_token_ids(*token_ids)


def test_minus_one_is_no_error() -> None:
    """In C, -1 is also the value returned with an error."""
    assert b"\xff" * 8 == pack_token_ids(-1)


def test_list_may_shrink_while_it_is_packed() -> None:
    """An integer's `__index__` is code that may change the list."""

    class Shrinks:
        def __index__(self) -> int:
            values.clear()
            return 1

    values: list[Any] = [Shrinks(), 2, 3]
    assert struct.pack("=3q", 1, 2, 3) == pack_token_ids(*values)
    assert not values
