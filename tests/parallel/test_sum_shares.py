"""Rows that each block of a sum adds. Kernels are not launched, so no GPU is needed."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from vmkv.attention.nvrtc import Kernel
from vmkv.serve.parallel import one_shot
from vmkv.units import MiB

ROWS = (1, 2, 7, 129, 256, 257, 1000, 2048, 2049, 8192, 20000)
HIDDEN_SIZES = (8, 64, 896, 2880, 4096, 5120, 8192, 16384)


class _Launch(NamedTuple):
    """The launch of a kernel; a block takes `chunk` vectors at a time."""

    num_blocks: int
    num_threads: int
    num_vectors: int
    share: int
    chunk: int


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[_Launch]]:
    """Record launches instead of making them."""
    made: list[_Launch] = []

    def launch(_: Kernel, num_blocks: int, num_threads: int, words: bytes) -> None:
        made.append(_Launch(num_blocks, num_threads, *struct.unpack_from("=3q", words, 8)))

    monkeypatch.setattr(one_shot, "compiled", lambda *_: Kernel("add_parts", 0, 0, 0))
    monkeypatch.setattr(one_shot, "launch", launch)
    one_shot.kernel_of.cache_clear()
    yield made
    one_shot.kernel_of.cache_clear()


def _part(rows: int, hidden: int, dtype: torch.dtype) -> Any:
    return SimpleNamespace(
        nbytes=rows * hidden * dtype.itemsize,
        dtype=dtype,
        device=torch.device("cuda", 0),
        data_ptr=lambda: 0,
    )


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_norm", [False, True])
def test_blocks_cover_all_rows_and_chunks_fit_the_buffers(
    launches: list[_Launch], size: int, dtype: torch.dtype, has_norm: bool
) -> None:
    """With a norm, shares and chunks are whole rows; with one rank, a chunk is a block's share."""
    if size == 1 and not has_norm:
        pytest.skip("one rank has nothing to add")
    room = one_shot.CHUNK_BYTES // one_shot.VECTOR_BYTES
    largest = (size > 1 and one_shot.max_bytes(size, is_with_norm=has_norm)) or 512 * MiB
    for hidden in HIDDEN_SIZES:
        row = hidden * dtype.itemsize // one_shot.VECTOR_BYTES
        is_short = one_shot.threads_for(row) is not None and (size == 1 or row <= room)
        for rows in ROWS if is_short else ():
            part = _part(rows, hidden, dtype)
            if part.nbytes > largest:
                continue
            one_shot._launch(part, row if has_norm else None, b"", size, (0,) * 5)
            blocks, threads, vectors, share, chunk = launches[-1]
            what = size, hidden, rows, launches[-1]
            assert vectors == rows * row, what
            assert blocks * share >= vectors > (blocks - 1) * share, what
            assert blocks <= one_shot.NUM_BLOCKS or size == 1, what
            assert threads in range(32, 513, 32), what
            if has_norm:
                assert share % row == chunk % row == 0, what
            # Between chunks, only the wait for other ranks synchronises a block's threads.
            assert (0 < chunk <= room) if size > 1 else chunk >= share, what
    assert launches
