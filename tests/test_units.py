"""Units, rounding, and errors that cross a process boundary."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmkv import errors
from vmkv.units import GiB, KiB, MiB, TiB, align_up, div_ceil, format_bytes, is_power_of_two


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 30))
def test_align_up_is_the_least_multiple_not_below(value: int, alignment: int) -> None:
    """`div_ceil` gives the factor of the multiple."""
    aligned = align_up(value, alignment)
    assert 0 == aligned % alignment
    assert value <= aligned < value + alignment
    assert div_ceil(value, alignment) * alignment == aligned


@given(st.integers(-10, 1 << 40))
def test_power_of_two_has_one_bit(value: int) -> None:
    """Zero and negative numbers are no powers of two."""
    assert (value > 0 and bin(value).count("1") == 1) == is_power_of_two(value)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KiB, "1 KiB"),
        (64 * KiB, "64 KiB"),
        (3 * MiB // 2, "1.5 MiB"),
        (141 * GiB, "141 GiB"),
        (64 * TiB, "64 TiB"),
    ],
)
def test_format_bytes_uses_the_largest_unit_not_above(num_bytes: int, text: str) -> None:
    assert text == format_bytes(num_bytes)


_DRIVER_ERROR = errors.HostDriverError("mem_map", 22, "EINVAL", "why", is_out_of_memory=True)
_DRIVER_ERROR.num_done = 3


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("wrong"),
        errors.OutOfPagesError("short", needed_bytes=3, free_bytes=2, retired_bytes=1),
        errors.OutOfAddressSpaceError("narrow", needed_bytes=9),
        errors.SequenceFullError("full", max_tokens=7),
        errors.ClosedError("closed"),
        errors.InternalError("I1"),
        _DRIVER_ERROR,
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_pickle_with_their_attributes(error: errors.VMKVError) -> None:
    """As on the way from a worker process to its parent."""
    copy = pickle.loads(pickle.dumps(error))
    assert (type(error), str(error), vars(error)) == (type(copy), str(copy), vars(copy))


def test_driver_error_names_call_and_status() -> None:
    assert "mem_map failed with EINVAL (22): why" == str(_DRIVER_ERROR)
