"""A CUDA kernel that draws a token of each row of logits, without sorting the vocabulary.

See DESIGN.md, Note [Draws need no sorting].
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from pathlib import Path
from struct import Struct

import torch

from ..attention.nvrtc import FORMATS, NUMBERS, Kernel, addresses, compiled, launch
from ..units import div_ceil

MAX_VOCABULARY = 2**22
"""Token ids are selected by two digits of eleven bits."""
_THREADS = 512
_PART_TOKENS = 16384
#: 64-bit words of a part's result.
_PART_WORDS = 3
_WORDS = Struct("=12q")

_SOURCE = Path(__file__).with_suffix(".cu").read_text()


class DrawKernel:
    """Draws for up to `num_rows` rows of `vocab_size` logits; compiled by dtype at first use."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self._num_parts = div_ceil(vocab_size, _PART_TOKENS)
        words = num_rows * (1 + _PART_WORDS * self._num_parts)
        self._scratch = torch.zeros(words, dtype=torch.int64, device=device)

    def draw(
        self, logits: torch.Tensor, slots: torch.Tensor, tables: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """Draw `[n] int64` of `logits [n, vocabulary]`, and count the tokens of `slots [n] int64`.

        `tables` are `Sampler`'s by slot: floats, integers, numbers of tokens and, or None, how
        often each token was drawn; the latter two are counted up. One launch.
        """
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        num_rows, vocab_size = logits.shape
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        words = _WORDS.pack(
            *(logits.data_ptr(), logits.stride(0), vocab_size, slots.data_ptr()),
            *addresses(*tables, self._scratch),
            *(self._num_parts, _PART_TOKENS, out.data_ptr()),
        )
        # Numbers that a thread loads at once: all addresses and the vocabulary are multiples.
        item = logits.element_size()
        sizes = (logits.data_ptr(), logits.stride(0) * item, vocab_size * item, 16)
        bits = functools.reduce(operator.or_, sizes)
        kernel = _kernel(logits.device.index, logits.dtype, (bits & -bits) // item)
        launch(kernel, num_rows * self._num_parts, _THREADS, words)
        return out


@functools.cache
def _kernel(device_index: int, dtype: torch.dtype, count: int) -> Kernel:
    options = (f"-DFORMAT={FORMATS[dtype]}", f"-DCOUNT={count}", f"-DTHREADS={_THREADS}")
    return compiled(NUMBERS + _SOURCE, "draw", device_index, *options)
