"""transfer() on real memory and with functions that record calls.

Not covered: the CUDA driver behind the same signatures.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import pytest

from vmkv.core import _native

COPY, FILL = 0, 1
HOST = _native.host_functions()

_COPY = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64
)
_FILL = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_uint64
)


def _plan(*records: tuple[int, int, int, int]) -> bytes:
    return b"".join(struct.pack("=4Q", *record) for record in records)


def _address(function: Callable[..., int]) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value


def test_transfer_copies_and_fills_in_order() -> None:
    """Each record sees the bytes that earlier records have written."""
    memory = ctypes.create_string_buffer(b"abcdefgh", 8)
    start = ctypes.addressof(memory)
    plan = _plan((COPY, start + 4, 2, start), (FILL, start, 2, 0x7A), (COPY, start + 6, 2, start))
    assert (3, 0) == _native.transfer(plan, HOST["copy"], HOST["fill"], 0)
    assert b"zzcdabzz" == memory.raw


def test_transfer_hands_over_every_argument() -> None:
    """Addresses, bytes, the byte and the stream arrive where the driver expects them."""
    seen: list[tuple[object, ...]] = []
    copy = _COPY(lambda *arguments: seen.append(("copy", *arguments)) or 0)
    fill = _FILL(lambda *arguments: seen.append(("fill", *arguments)) or 0)
    plan = _plan((COPY, 2**63, 2**40, 2**62), (FILL, 2**61, 2**41, 255))
    assert (2, 0) == _native.transfer(plan, _address(copy), _address(fill), 2**50)
    assert [("copy", 2**63, 2**62, 2**40, 2**50), ("fill", 2**61, 255, 2**41, 2**50)] == seen


def test_transfer_stops_at_the_first_failure() -> None:
    """The status is returned with the number of earlier records; later ones are not tried."""
    seen: list[int] = []

    def fail_at_two(destination: int, source: int, num_bytes: int, stream: int) -> int:
        seen.append(destination)
        return 700 if destination == 2 else 0

    copy = _COPY(fail_at_two)
    plan = _plan(*((COPY, at, 1, 9) for at in (1, 2, 3)))
    assert (1, 700) == _native.transfer(plan, _address(copy), 0, 0)
    assert [1, 2] == seen


def test_transfer_nothing() -> None:
    """An empty plan succeeds and needs no function."""
    assert (0, 0) == _native.transfer(b"", 0, 0, 0)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (b"1234", "whole number of 32-byte records"),
        (_plan((2, 0, 1, 0)), "record 0 of the plan has the op 2"),
        (_plan((COPY, 1, 1, 1), (FILL, 1, 1, 1)), "record 1 .* no function"),
        (_plan((COPY, 1, 1, 1), (FILL, 1, 1, 256)), "record 1 .* no byte|no function"),
    ],
)
def test_transfer_refuses_a_malformed_plan_whole(plan: bytes, message: str) -> None:
    """No function is called when any record is wrong."""
    copy = _COPY(lambda *_: pytest.fail("called"))
    with pytest.raises(ValueError, match=message):
        _native.transfer(plan, _address(copy), 0, 0)


def test_transfer_refuses_a_fill_above_255() -> None:
    """A fill of 256 would be a fill of 0."""
    with pytest.raises(ValueError, match="fills with 256"):
        _native.transfer(_plan((FILL, 1, 1, 256)), HOST["copy"], HOST["fill"], 0)
