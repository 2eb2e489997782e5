"""Greedy sampling from a divided output head, without gathering its logits.

Gathered logits are half a MiB per sequence. Instead each rank finds its own likeliest token, and
the ranks exchange one value and one token per row. They exchange them by a sum to which every other
rank contributes zeros, so it is exact; sums are one small kernel between GPUs with peer access
(`one_shot.py`), while gathers use NCCL.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from ...step.piece import likeliest
from .collectives import all_reduce
from .localise import GatheredLinear

#: Largest vocabulary whose token ids float32 represents exactly.
_NUM_TOKENS_MAX = 1 << 24


class DividedHead:
    """A rank's part of the output head. Implements `HeadInParts`."""

    def __init__(self, linear: GatheredLinear):
        self._linear = linear
        self.num_columns = linear.weight.shape[0]
        self._start = linear._vmkv_rank * self.num_columns
        # Excludes padding on the last ranks, whose logits are zero.
        self._num_known = min(max(linear.out_features - self._start, 0), self.num_columns)

    @contextlib.contextmanager
    def in_part(self, room: torch.Tensor) -> Iterator[None]:
        """Make the model return this rank's logits, in `room` if they fit."""
        self._linear._vmkv_room = room
        try:
            yield
        finally:
            self._linear._vmkv_room = None

    def likeliest(self, part: torch.Tensor) -> torch.Tensor:
        """Return all ranks' likeliest tokens. Cost: one read of the part, eight launches."""
        linear = self._linear
        best = ranked(part[:, : self._num_known], self._start, linear._vmkv_rank, linear._vmkv_size)
        return first_of_likeliest(all_reduce(best, linear._vmkv_group))

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Gather the logits of all ranks."""
        return self._linear.whole(part)


def head_of(model: Any) -> DividedHead | None:
    """Return the divided head of a model; None if its head is whole."""
    head = model.get_output_embeddings()
    if not isinstance(head, GatheredLinear) or head.out_features > _NUM_TOKENS_MAX:
        return None
    return DividedHead(head)


def ranked(part: torch.Tensor, start: int, rank: int, size: int) -> torch.Tensor:
    """Return `[size, 2, n]` with this rank's best values and tokens in its own row, to be summed.

    `part` is `[n, columns]`, possibly without columns; its first column is token `start`. Other
    ranks' rows are zero. At least float32, which represents every value and token exactly.
    """
    dtype = torch.promote_types(part.dtype, torch.float32)
    places = part.new_zeros((size, 2, part.shape[0]), dtype=dtype)
    values, tokens = places[rank]
    if part.shape[1]:
        best = likeliest(part)[:, None]
        values.copy_(part.gather(1, best)[:, 0])
        torch.add(best[:, 0], start, out=tokens)
    else:
        values.fill_(-math.inf)  # An earlier rank wins a tie.
    return places


def first_of_likeliest(places: torch.Tensor) -> torch.Tensor:
    """Return `[n] int64`, the likeliest token of all ranks' `[size, 2, n]`; the first among equals.

    Ranks are ordered by their tokens, so argmax gives the same token as over whole logits, also for
    signed zeros, infinities and NaN.
    """
    values, tokens = places[:, 0], places[:, 1]
    return tokens.gather(0, values.argmax(0, keepdim=True))[0].long()
