"""A CUDA kernel that draws a token of each row of logits, without sorting the vocabulary.

Tokens are ordered by a key: how far their score is behind the greatest one, then their id. Each
filter is a bound on keys, and the best token by score plus Gumbel noise among the keys below the
bound is drawn. The bound of top-p is not searched: the best token of all is right if the mass
before its key is below top-p; otherwise its key is the next bound, below which the next best token
is searched. With top-p 0.95 one row of twenty takes a second round; each round halves what is left.
The bound of top-k is selected by digits of the key (radix selection); top-p refers to the mass
below it.

A row is cut into parts of equal size, each for a block, which find the greatest score, the mass and
the best token; the block that finishes last goes on with the whole row, from the L2 cache. Parts
depend on the vocabulary alone, floats are added in a fixed order and atomics count integers, so a
row's token depends neither on the batch nor on the order of blocks.

A token's noise is -log(e), where e is at least the uniform number that it is made of. So the token
can only beat the best one so far if that number is at most exp(score - best), and logarithms are
computed for few tokens. None is computed for tokens of so little weight that even all of them
together are outside of top-p or min-p.

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
