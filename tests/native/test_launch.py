"""`launch`, calling a function of cuLaunchKernel's signature.

Not covered: a real GPU; tests/attention/test_append.py launches the real kernel there.
"""

from __future__ import annotations

import ctypes
import struct

import pytest

from vmkv.core import _native

_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_uint64,
    *[ctypes.c_uint] * 7,
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.POINTER(ctypes.c_int64)),
    ctypes.c_void_p,
)


def test_launch_hands_over_grid_block_stream_and_words() -> None:
    """Every number arrives where cuLaunchKernel expects it, and its status is returned."""
    seen = []

    def receive(*arguments: object) -> int:
        *numbers, words, extra = arguments
        seen.append((numbers, [words[i][0] for i in range(3)], extra))
        return 7

    function = _LAUNCH(receive)
    address = ctypes.cast(function, ctypes.c_void_p).value
    status = _native.launch(address, 99, 5, 128, 2**40, struct.pack("=3q", 1, -2, 2**50))
    assert 7 == status
    assert [([99, 5, 1, 1, 128, 1, 1, 0, 2**40], [1, -2, 2**50], None)] == seen


@pytest.mark.parametrize(
    ("grid", "block", "words"),
    [
        (0, 128, b""),
        (2**32, 128, b""),
        (1, 0, b""),
        (1, 1025, b""),
        (1, 1, b"1"),
        (1, 1, b"8" * 264),
    ],
)
def test_launch_refuses_impossible_numbers(grid: int, block: int, words: bytes) -> None:
    """The driver is not called."""
    function = _LAUNCH(lambda *_: 0)
    address = ctypes.cast(function, ctypes.c_void_p).value
    with pytest.raises(ValueError, match=r"at most|needs"):
        _native.launch(address, 1, grid, block, 0, words)
