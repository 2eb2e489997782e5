"""Sums in one kernel: each rank sends its part to all others, and adds what has come.

NCCL goes round a ring, which costs a rank at least two messages after one another; a step of an 8B
model adds 65 times. Here every byte crosses a link once for each other rank: that is what a ring's
two rounds take for two ranks, and more for more, whose larger parts stay NCCL's. What follows
nearly every sum is done in the same kernel: the residual and the next norm (`sum_kernel.py`).

A kernel that waits for a rank which has gone would wait for ever. It gives up when a word in host
memory says so, or after the ranks' time limit, and says that in the same word: `TensorParallel`
raises, and what was added is read by nobody.

Source: the one-shot all-reduce as in vLLM's and TensorRT-LLM's kernels, with writes to the other
ranks in place of reads. Rooms are not torch's symmetric memory, which remembers a group's name for
as long as the process lives: ranks may be started anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

import torch

from ...attention.nvrtc import FORMATS, launch
from ...core.backend.peer_memory import PeerMemory
from ...units import KiB, MiB, div_ceil
from . import sum_kernel
from .sum_kernel import CHUNK_BYTES, FLAG_BYTES, NUM_BLOCKS, NUM_TURNS, VECTOR_BYTES

#: Blocks that send nothing need not run at the same time.
_MOST_BLOCKS_ALONE = 2048
_WORDS = Struct("=9q")
_NORM_WORDS = Struct("=4qd")


def max_bytes(size: int, *, is_with_norm: bool = False) -> int | None:
    """The largest part that so many ranks add in one kernel; a ring sends less of larger ones.

    None for any: between two ranks both send the same, and this is the faster. With a norm it
    saves passes over memory, for which more may be sent.
    """
    if size == 2:
        return None
    return 1 * MiB if is_with_norm else 512 * KiB


class OneShotSums:
    """One rank's end of sums in one kernel. On the current device.

    Made in two steps, since the second needs all ranks: who fails in the first tells the others.

    Args:
        rank: This one.
        size: How many there are.
        timeout_s: What another rank's part may take.

    Attributes:
        handle: What other ranks open this one's room with; as long for all.

    Cost: 16 MiB of the device for each rank, this one included.

    Raises:
        CudaDriverError: The device has no memory for its room, or none that others can open.
        ConfigError: NVRTC refuses the kernel, or there is no cuda-python.
    """

    def __init__(self, rank: int, size: int, timeout_s: float):
        self._rank, self._size = rank, size
        self._patience_ns = int(1e9 * timeout_s)
        self._device = torch.device("cuda", torch.cuda.current_device())
        for dtype in FORMATS:  # Not while a graph is captured.
            sum_kernel.kernel_of(self._device.index, dtype, size)
        self._turns = torch.zeros(NUM_BLOCKS, dtype=torch.int64, device=self._device)
        self._rooms = torch.zeros(size, dtype=torch.int64, device=self._device)
        self._given_up = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        turn_bytes = size * CHUNK_BYTES
        self._room = PeerMemory(NUM_BLOCKS * (size * FLAG_BYTES + NUM_TURNS * turn_bytes))
        self.handle = self._room.handle

    def meet(self, handles: Sequence[bytes]) -> None:
        """Open the rooms of all ranks.

        Args:
            handles: Theirs, in the order of the ranks.

        Raises:
            CudaDriverError: There is no way to one of them.
        """
        self._rooms.copy_(torch.tensor(self._room.open(handles)))

    def close(self) -> None:
        """Give the room back. Once nobody adds any more, here or elsewhere. Idempotent."""
        self._room.close()

    def takes(self, part: torch.Tensor) -> bool:
        """Whether the part is small enough, of a known type, and of whole 16 bytes."""
        is_aligned = not (part.nbytes | part.data_ptr()) % VECTOR_BYTES
        return part.dtype in FORMATS and is_aligned and self._is_small(part, is_with_norm=False)

    def takes_rows(self, part: torch.Tensor) -> bool:
        """Whether it adds the rows of such a part together with a norm, which `has_rows`."""
        row_bytes = part.shape[-1] * part.itemsize
        return row_bytes <= CHUNK_BYTES and self._is_small(part, is_with_norm=True)

    def _is_small(self, part: torch.Tensor, *, is_with_norm: bool) -> bool:
        most = max_bytes(self._size, is_with_norm=is_with_norm)
        return most is None or part.nbytes <= most

    def add(self, part: torch.Tensor) -> None:
        """Leave the sum of all ranks' contiguous parts in the part's place.

        Ordered on the current stream, on which alone the ranks may add.

        Cost: 3 us of host time; on the device the links' latency, and the part once for each other
        rank (bench_parallel).
        """
        if part.nbytes:
            _launch(part, None, b"", self._size, self._exchange())

    def add_norm(
        self, part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Leave the sum of all ranks' parts and the residual in the part's place; its norm.

        Args:
            part: `[…, hidden]`, contiguous, which it `takes_rows` of.
            residual: Likewise, of the same shape and type; the same on all ranks.
            weight: `[hidden]` of that type: what the norm multiplies by.
            epsilon: Added to the mean of the squares.

        Cost: as `add`; and reading the residual and writing the norm, at the same time.
        """
        return _add_norm(part, residual, weight, epsilon, self._size, self._exchange())

    def _exchange(self) -> tuple[int, ...]:
        return (
            self._turns.data_ptr(),
            self._rank,
            self._rooms.data_ptr(),
            self._given_up.data_ptr(),
            self._patience_ns,
        )

    def give_up(self) -> None:
        """Have kernels that wait, wait no more; what they add is worth nothing. From any thread."""
        self._given_up.fill_(1)

    def has_given_up(self) -> bool:
        """Whether a kernel has waited too long for another rank's part. From any thread."""
        return bool(int(self._given_up))


def has_rows(part: torch.Tensor) -> bool:
    """Whether the kernel takes such rows with a norm: on CUDA, of known type, and not too long."""
    row_bytes = part.shape[-1] * part.itemsize
    return (
        part.is_cuda
        and part.dtype in FORMATS
        and not (row_bytes | part.data_ptr()) % VECTOR_BYTES
        and sum_kernel.threads_for(row_bytes // VECTOR_BYTES) is not None
    )


def norm_after_sum(
    part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """`OneShotSums.add_norm` where `part` holds the sum of all ranks; one that `has_rows`."""
    return _add_norm(part, residual, weight, epsilon, 1, (0,) * 5)


def _add_norm(
    part: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    size: int,
    exchange: tuple[int, ...],
) -> torch.Tensor:
    out = torch.empty_like(part)
    if part.nbytes:
        row_vectors = part.shape[-1] * part.itemsize // VECTOR_BYTES
        words = residual.data_ptr(), weight.data_ptr(), out.data_ptr(), row_vectors, epsilon
        _launch(part, row_vectors, _NORM_WORDS.pack(*words), size, exchange)
    return out


def _launch(
    part: torch.Tensor, row_vectors: int | None, rest: bytes, size: int, exchange: tuple[int, ...]
) -> None:
    index = part.device.index
    kernel, threads, unit, chunk = sum_kernel.kernel_of(index, part.dtype, size, row_vectors)
    num_vectors = part.nbytes // VECTOR_BYTES
    most_blocks = NUM_BLOCKS if size > 1 else _MOST_BLOCKS_ALONE
    share = div_ceil(div_ceil(num_vectors, unit), most_blocks) * unit
    num_blocks = div_ceil(num_vectors, share)
    # Of one rank a block takes all at once: nothing travels, and it waits for nobody in between.
    at_a_time = chunk if size > 1 else share
    words = _WORDS.pack(part.data_ptr(), num_vectors, share, at_a_time, *exchange)
    stream = torch._C._cuda_getCurrentRawStream(index)
    launch(kernel, num_blocks, threads, stream, words + rest)
