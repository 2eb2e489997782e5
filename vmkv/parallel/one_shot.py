"""Sums in one kernel: each rank sends its part to all others, and adds what has come.

NCCL goes round a ring, which costs a rank at least two messages after one another; a step of an 8B
model adds 65 times. Here a block of the kernel writes its share of the part into the room that
every other rank has for it, then says so, waits until theirs are there, and adds them in the order
of the ranks, so that all have the same bits. Every byte crosses a link once for each other rank:
that is what a ring's two rounds take for two ranks, and more for more, so larger parts stay NCCL's.

Room is used in turns, two for each block. Who begins turn n + 1 has seen turn n of all others, who
had therefore read turn n - 1: its room may be written again. Nobody waits for anybody to have read.

A kernel that waits for a rank which has gone would wait for ever. It gives up when a word in host
memory says so, or after the ranks' time limit, and says that in the same word: `TensorParallel`
raises, and what was added is read by nobody.

Source: the one-shot all-reduce as in vLLM's and TensorRT-LLM's kernels, with writes to the other
ranks in place of reads. Rooms are not torch's symmetric memory, which remembers a group's name for
as long as the process lives: ranks may be started anew.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from struct import Struct

import torch

from ..attention.nvrtc import FORMATS, NUMBERS, Kernel, compiled, launch
from ..backend.peer_memory import PeerMemory
from ..units import KiB, MiB, div_ceil

#: All of them run at the same time, on every GPU that has such links.
_NUM_BLOCKS = 64
_THREADS = 512
_VECTOR_BYTES = 16
_FLAG_BYTES = 8
_WORDS = Struct("=8q")

_ADD = r"""
typedef long long word;

constexpr int COUNT = 16 / sizeof(number);
union Vector { uint4 whole; number at[COUNT]; };

__device__ uint4 received(const uint4* from) {  // Not from a cache that other devices do not see.
  uint4 value;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(from)
               : "memory");
  return value;
}

__device__ void say(word* flag, word turn) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(flag), "l"(turn) : "memory");
}

__device__ word said(const word* flag) {
  word turn;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(turn) : "l"(flag) : "memory");
  return turn;
}

__device__ word now_ns() {
  word time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

__device__ void wait_for(const word* flag, word turn, volatile int* given_up, word patience_ns) {
  const word start = now_ns();
  for (int tries = 1; said(flag) < turn; ++tries) {
    if (tries % 256) continue;  // The word is in the host's memory: not asked at once.
    if (*given_up) return;
    if (now_ns() - start > patience_ns) *given_up = 1;
  }
}

// A rank's room: flags [block][rank], then vectors [block][turn % 2][rank][room].
extern "C" __global__ void add_parts(uint4* part, word num_vectors, word* turns, word rank,
                                     char* const* rooms, word room, int* given_up,
                                     word patience_ns) {
  const word block = blockIdx.x;
  const word share = (num_vectors + gridDim.x - 1) / gridDim.x;
  const word begin = block * share;
  const word end = begin + share < num_vectors ? begin + share : num_vectors;
  const word turn = turns[block] + 1;
  const word flags_bytes = NUM_BLOCKS * SIZE * sizeof(word);
  const word slot = (block * 2 + turn % 2) * SIZE;

  for (word i = begin + threadIdx.x; i < end; i += blockDim.x) {
    const uint4 mine = part[i];
#pragma unroll
    for (int other = 0; other < SIZE; ++other) {
      if (other == rank) continue;
      reinterpret_cast<uint4*>(rooms[other] + flags_bytes)[(slot + rank) * room + i - begin] = mine;
    }
  }
  __syncthreads();
  if (threadIdx.x < SIZE && threadIdx.x != rank) {
    const word other = threadIdx.x;
    say(reinterpret_cast<word*>(rooms[other]) + block * SIZE + rank, turn);
    wait_for(reinterpret_cast<word*>(rooms[rank]) + block * SIZE + other, turn, given_up,
             patience_ns);
  }
  __syncthreads();
  const uint4* theirs = reinterpret_cast<const uint4*>(rooms[rank] + flags_bytes) + slot * room;
  for (word i = begin + threadIdx.x; i < end; i += blockDim.x) {
    float sums[COUNT];
#pragma unroll
    for (int each = 0; each < SIZE; ++each) {
      Vector parts;
      parts.whole = each == rank ? part[i] : received(theirs + each * room + i - begin);
#pragma unroll
      for (int at = 0; at < COUNT; ++at) {
        const float value = as_float(parts.at[at]);
        sums[at] = each ? sums[at] + value : value;
      }
    }
    Vector out;
#pragma unroll
    for (int at = 0; at < COUNT; ++at) out.at[at] = as_number(sums[at]);
    part[i] = out.whole;
  }
  if (threadIdx.x == 0) turns[block] = turn;
}
"""


def max_bytes(size: int) -> int:
    """The largest part that so many ranks add in one kernel; a ring sends less of larger ones."""
    return 8 * MiB if size == 2 else 512 * KiB


class OneShotSums:
    """One rank's end of sums in one kernel. On the current device.

    Made in two steps, since the second needs all ranks: who fails in the first tells the others.

    Args:
        rank: This one.
        size: How many there are.
        timeout_s: What another rank's part may take.

    Attributes:
        handle: What other ranks open this one's room with; as long for all.

    Raises:
        CudaDriverError: The device has no memory for its room, or none that others can open.
        ConfigError: NVRTC refuses the kernel, or there is no cuda-python.
    """

    def __init__(self, rank: int, size: int, timeout_s: float):
        self._rank, self._size = rank, size
        self._patience_ns = int(1e9 * timeout_s)
        self._device = torch.device("cuda", torch.cuda.current_device())
        for dtype in FORMATS:  # Not while a graph is captured.
            _kernel(self._device.index, dtype, size)
        self._turns = torch.zeros(_NUM_BLOCKS, dtype=torch.int64, device=self._device)
        self._rooms = torch.zeros(size, dtype=torch.int64, device=self._device)
        self._given_up = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        room_bytes = _NUM_BLOCKS * size * _FLAG_BYTES + 2 * size * max_bytes(size)
        self._room = PeerMemory(room_bytes)
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
        return (
            part.dtype in FORMATS
            and part.nbytes <= max_bytes(self._size)
            and not (part.nbytes | part.data_ptr()) % _VECTOR_BYTES
        )

    def add(self, part: torch.Tensor) -> None:
        """Leave the sum of all ranks' contiguous parts in the part's place.

        Ordered on the current stream, on which alone the ranks may add.

        Cost: 3 us of host time; on the device the links' latency, and the part once for each other
        rank (bench_parallel).
        """
        num_vectors = part.nbytes // _VECTOR_BYTES
        num_blocks = min(_NUM_BLOCKS, div_ceil(num_vectors, _THREADS))
        if not num_blocks:
            return
        words = (
            part.data_ptr(),
            num_vectors,
            self._turns.data_ptr(),
            self._rank,
            self._rooms.data_ptr(),
            max_bytes(self._size) // (_NUM_BLOCKS * _VECTOR_BYTES),
            self._given_up.data_ptr(),
            self._patience_ns,
        )
        index = self._device.index
        kernel = _kernel(index, part.dtype, self._size)
        stream = torch._C._cuda_getCurrentRawStream(index)
        launch(kernel, num_blocks, _THREADS, stream, _WORDS.pack(*words))

    def give_up(self) -> None:
        """Have kernels that wait, wait no more; what they add is worth nothing. From any thread."""
        self._given_up.fill_(1)

    def failure(self) -> str | None:
        """Why sums are worth nothing any more: a kernel has given up. From any thread."""
        if not int(self._given_up):
            return None
        return f"another rank's part of a sum has not come within {self._patience_ns / 1e9:g} s"


@functools.cache
def _kernel(device_index: int, dtype: torch.dtype, size: int) -> Kernel:
    options = (f"-DFORMAT={FORMATS[dtype]}", f"-DSIZE={size}", f"-DNUM_BLOCKS={_NUM_BLOCKS}")
    return compiled(NUMBERS + _ADD, "add_parts", device_index, *options)
