"""All-reduce in one kernel: each rank writes its part to all others, and adds the parts it got.

An NCCL ring takes at least two messages in sequence; a step of an 8B model has 65 sums. Here every
byte crosses a link once per other rank: as much as in a ring of two ranks, and more than in a
larger one, so larger parts of more ranks stay with NCCL. The residual addition and the norm that
follow most sums are part of the kernel, from registers, which saves a kernel that would read the
sum again; rounding is that of the model's modules. With one rank (`SIZE` 1) only the exchange is
left out.

Each block handles a share of the rows in chunks: it writes a chunk of its rank's part into its
buffer on every other rank and sets a flag; meanwhile it waits for the previous chunk of the others
and adds the parts in rank order, so that all ranks get the same bits. A block has four buffers,
used in turn. The sender of turn n has seen turn n - 2 of all others, who had read turn n - 4 before
they sent it, so that buffer can be overwritten without a second flag.

A kernel that waits for a lost rank stops when a word in host memory says so or after the time
limit, and sets that word: `TensorParallel` raises, and the sum is not used.

Source: the one-shot all-reduce of vLLM's and TensorRT-LLM's kernels, with writes to the other ranks
instead of reads. torch's symmetric memory is not used: it remembers a group's name for the life of
the process, and ranks may be restarted.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from struct import Struct

import torch

from ...attention.nvrtc import FORMATS, NUMBERS, Kernel, compiled, launch
from ...core.backend.peer_memory import PeerMemory
from ...units import KiB, MiB, div_ceil

# ---- kernel --------------------------------------------------------------------------------------

#: Two per multiprocessor: one sends while the other adds.
NUM_BLOCKS = 256
NUM_TURNS = 4
#: Largest chunk of a block. Two ranks add 64 MiB with a norm in 243 us; in 241 with chunks and
#: buffers four times as large, in 307 with half the blocks and chunks twice as large.
CHUNK_BYTES = 16 * KiB
VECTOR_BYTES = 16
#: A cache line per flag.
FLAG_BYTES = 128
_WARP = 32
_MOST_THREADS = 512
#: Vectors of a row that a thread keeps in registers.
_MOST_PER_THREAD = 4
_ROWS_AT_A_TIME = 4

_SOURCE = Path(__file__).with_suffix(".cu").read_text()


def threads_for(row_vectors: int) -> int | None:
    """Return the threads of a block for rows of so many vectors; None if a row is too long."""
    if row_vectors > _MOST_THREADS * _MOST_PER_THREAD:
        return None
    return min(_MOST_THREADS, _WARP * div_ceil(row_vectors, _WARP))


@functools.cache
def kernel_of(
    device_index: int, dtype: torch.dtype, size: int, row_vectors: int | None = None
) -> tuple[Kernel, int, int, int]:
    """Compile the kernel for a type in `FORMATS`; `size` is 1 for parts that are already summed.

    Returns it, a block's threads, its vectors at least (a row, with a norm), and those that it
    sends at a time.

    `row_vectors` is the length of rows with a norm, accepted by `threads_for`; None for sums alone.
    Raises `ConfigError` if NVRTC refuses the kernel, `CudaDriverError` if the driver does.
    """
    threads = _MOST_THREADS if row_vectors is None else threads_for(row_vectors)
    assert threads is not None  # Checked by the caller.
    unit = row_vectors or threads
    per_thread = div_ceil(unit, threads)
    room = CHUNK_BYTES // VECTOR_BYTES
    chunk = room // unit * unit
    constants = {
        "FORMAT": FORMATS[dtype],
        "SIZE": size,
        "BLOCKS": NUM_BLOCKS,
        "TURNS": NUM_TURNS,
        "FLAG": FLAG_BYTES,
        "CHUNK": room,
        "THREADS": threads,
        "NORM": int(row_vectors is not None),
        "PER_THREAD": per_thread,
        # Rows at a time: their loads overlap, and they share the block's synchronisation.
        "ROWS": max(1, min(_ROWS_AT_A_TIME // per_thread, chunk // unit)),
    }
    options = ("--std=c++17", *(f"-D{name}={value}" for name, value in constants.items()))
    kernel = compiled(NUMBERS + _SOURCE, "add_parts", device_index, *options)
    return kernel, threads, unit, chunk


# ---- sums ----------------------------------------------------------------------------------------

#: Most blocks of a kernel of one rank: they need not all run at the same time.
_MOST_BLOCKS_ALONE = 2048
_WORDS = Struct("=9q")
_NORM_WORDS = Struct("=4qd")


def max_bytes(size: int, *, is_with_norm: bool = False) -> int | None:
    """Return the largest part that so many ranks add in one kernel; None for no limit."""
    if size == 2:
        return None
    return 1 * MiB if is_with_norm else 512 * KiB


class OneShotSums:
    """One-shot sums of one rank, on the current device; takes 16 MiB of device memory per rank.

    Created in two steps, because `meet` needs the `handle` of every rank, bytes of equal length.
    Raises `CudaDriverError` if other devices cannot open its memory, `ConfigError` if NVRTC refuses
    the kernel. A kernel waits at most `timeout_s` for another rank's part.
    """

    def __init__(self, rank: int, size: int, timeout_s: float):
        self._size = size
        device = torch.device("cuda", torch.cuda.current_device())
        for dtype in FORMATS:  # Compile before any graph is captured.
            kernel_of(device.index, dtype, size)
        self._turns = torch.zeros(NUM_BLOCKS, dtype=torch.int64, device=device)
        self._rooms = torch.zeros(size, dtype=torch.int64, device=device)
        self._given_up = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._room = PeerMemory(NUM_BLOCKS * (size * FLAG_BYTES + NUM_TURNS * size * CHUNK_BYTES))
        self.handle = self._room.handle
        turns, rooms = self._turns.data_ptr(), self._rooms.data_ptr()
        self._exchange = turns, rank, rooms, self._given_up.data_ptr(), int(1e9 * timeout_s)

    def meet(self, handles: Sequence[bytes]) -> None:
        """Open all ranks' buffers by their handles, in rank order; raises `CudaDriverError`."""
        self._rooms.copy_(torch.tensor(self._room.open(handles)))

    def close(self) -> None:
        """Release the buffer, after all ranks have stopped adding. Idempotent."""
        self._room.close()

    def takes(self, part: torch.Tensor, *, is_with_norm: bool = False) -> bool:
        """Return whether a part is small enough, of a supported type and 16-byte aligned.

        A part that is added with a norm must also have rows that fit a block's buffer.
        """
        most = max_bytes(self._size, is_with_norm=is_with_norm)
        is_small = most is None or part.nbytes <= most
        is_aligned = not (part.nbytes | part.data_ptr()) % VECTOR_BYTES
        has_room = not is_with_norm or part.shape[-1] * part.itemsize <= CHUNK_BYTES
        return part.dtype in FORMATS and is_aligned and is_small and has_room

    def add(self, part: torch.Tensor) -> None:
        """Replace a contiguous part by the sum of all ranks' parts, in the current stream's order.

        Ranks may add on one stream only. Cost: 3 us of host time; on the device the links' latency,
        and the part's transfer to each other rank (bench_parallel).
        """
        if part.nbytes:
            _launch(part, None, b"", self._size, self._exchange)

    def add_norm(
        self, part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Add all ranks' parts and the residual into `part`; return the RMS norm of the sum.

        `part` is contiguous, `has_rows` and is accepted by `takes`. Shapes and types are those of
        `vmkv::norm_of_sum_`. Cost: as `add`, plus reading the residual and writing the norm
        meanwhile.
        """
        return norm_after_sum(part, residual, weight, epsilon, self._size, self._exchange)

    def give_up(self) -> None:
        """End kernels that wait for other ranks; their sums are invalid. Thread-safe."""
        self._given_up.fill_(1)

    def has_given_up(self) -> bool:
        """Return whether a kernel has stopped waiting for another rank. Thread-safe."""
        return bool(int(self._given_up))


def has_rows(part: torch.Tensor) -> bool:
    """Return whether the kernel supports such rows: CUDA, type, alignment and length."""
    row_bytes = part.shape[-1] * part.itemsize
    return (
        part.is_cuda
        and part.dtype in FORMATS
        and not (row_bytes | part.data_ptr()) % VECTOR_BYTES
        and threads_for(row_bytes // VECTOR_BYTES) is not None
    )


def norm_after_sum(
    part: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    size: int = 1,
    exchange: tuple[int, ...] = (0,) * 5,
) -> torch.Tensor:
    """Run `OneShotSums.add_norm` on a `part` that `has_rows`, and by default is already summed."""
    out = torch.empty_like(part)
    if part.nbytes:
        row_vectors = part.shape[-1] * part.itemsize // VECTOR_BYTES
        words = residual.data_ptr(), weight.data_ptr(), out.data_ptr(), row_vectors, epsilon
        _launch(part, row_vectors, _NORM_WORDS.pack(*words), size, exchange)
    return out


def _launch(
    part: torch.Tensor, row_vectors: int | None, rest: bytes, size: int, exchange: tuple[int, ...]
) -> None:
    kernel, threads, unit, chunk = kernel_of(part.device.index, part.dtype, size, row_vectors)
    num_vectors = part.nbytes // VECTOR_BYTES
    most_blocks = NUM_BLOCKS if size > 1 else _MOST_BLOCKS_ALONE
    share = div_ceil(div_ceil(num_vectors, unit), most_blocks) * unit
    num_blocks = div_ceil(num_vectors, share)
    # With one rank a block takes its share at once, since nothing is exchanged.
    at_a_time = chunk if size > 1 else share
    words = _WORDS.pack(part.data_ptr(), num_vectors, share, at_a_time, *exchange)
    launch(kernel, num_blocks, threads, words + rest)
