"""Counting up as one CUDA kernel: what changes on the device between two steps of a decode.

`torch.add_` would do, at twice the host time: 5.3 us against 3.4 in a loop, and 28 against 14 where
other work has had the processor's caches in between, as a model has between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

import torch

from ..units import div_ceil
from .nvrtc import compiled, launch

_THREADS = 256
_WORDS = Struct("=3q")

_SOURCE = r"""
extern "C" __global__ void count(int* counts, const int* steps, long long size) {
  const long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (at < size) counts[at] += steps[at];
}
"""


def counter(counts: torch.Tensor, steps: torch.Tensor) -> Callable[[], None]:
    """A function that adds `steps` to `counts`, on the stream that is current when it is called.

    Args:
        counts: `[n] int32`, contiguous, on a CUDA device; written. Must outlive the function,
            which knows its address only.
        steps: `[n] int32`, likewise; only read.

    Raises:
        ConfigError, CudaDriverError: The kernel cannot be made. Its calls raise the latter where
            the launch is refused.

    Cost: of a call, 3.4 us in a loop.
    """
    index, size = counts.device.index, counts.shape[0]
    kernel = compiled(_SOURCE, "count", index)
    words = _WORDS.pack(counts.data_ptr(), steps.data_ptr(), size)
    num_blocks = div_ceil(size, _THREADS)
    current_stream = torch._C._cuda_getCurrentRawStream

    def count() -> None:
        launch(kernel, num_blocks, _THREADS, current_stream(index), words)

    return count
