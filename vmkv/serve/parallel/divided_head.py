"""The likeliest token of a head in parts, without its logits being put together.

Gathered logits are half a MiB a sequence, and are copied and read once more to find one number.
Here each rank finds the likeliest of its own, and ranks exchange a value and a token of each row.

They do so by adding: each rank writes into a place of its own and zero into the others', so that
every sum has one summand, and is exact. It is the sum that layers use, which is one small kernel
between GPUs that reach each other (`one_shot.py`), where gathering is NCCL's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from ...step.logits import likeliest
from .collectives import all_reduce
from .localise import GatheredLinear

#: Tokens whose numbers a float32 holds.
_NUM_TOKENS_MAX = 1 << 24


class DividedHead:
    """The head of a model in parts. Implements `HeadInParts`.

    Args:
        linear: This rank's part of it.

    Attributes:
        num_columns: See `HeadInParts`.
    """

    def __init__(self, linear: GatheredLinear):
        self._linear = linear
        self.num_columns = linear.weight.shape[0]
        self._start = linear._vmkv_rank * self.num_columns
        # What fills up the last ranks' would be as likely as any logit of zero.
        self._num_known = min(max(linear.out_features - self._start, 0), self.num_columns)

    @contextlib.contextmanager
    def in_part(self, room: torch.Tensor) -> Iterator[None]:
        """See `HeadInParts.in_part`."""
        self._linear._vmkv_room = room
        try:
            yield
        finally:
            self._linear._vmkv_room = None

    def likeliest(self, part: torch.Tensor) -> torch.Tensor:
        """See `HeadInParts.likeliest`.

        Cost: on two GPUs, one reading of the part and eight launches over some KiB.
        """
        linear = self._linear
        best = ranked(part[:, : self._num_known], self._start, linear._vmkv_rank, linear._vmkv_size)
        return first_of_likeliest(all_reduce(best, linear._vmkv_group))

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """See `HeadInParts.whole`."""
        return self._linear.whole(part)


def head_of(model: Any) -> DividedHead | None:
    """What finds the likeliest token of a model in parts; None where its head is whole."""
    head = model.get_output_embeddings()
    if not isinstance(head, GatheredLinear) or head.out_features > _NUM_TOKENS_MAX:
        return None
    return DividedHead(head)


def ranked(part: torch.Tensor, start: int, rank: int, size: int) -> torch.Tensor:
    """A rank's likeliest tokens in a place of their own, to be added to the other ranks'.

    Args:
        part: `[n, columns]`, the rank's logits; no columns where it has none.
        start: The token of the first column.
        rank: Whose place.
        size: Of how many.

    Returns:
        `[size, 2, n]`, values and tokens; zero in all other places. In float32, which holds every
        value of the smaller types, and every token, as it is.
    """
    dtype = torch.promote_types(part.dtype, torch.float32)
    places = part.new_zeros((size, 2, part.shape[0]), dtype=dtype)
    values, tokens = places[rank]
    if part.shape[1]:
        best = likeliest(part)[:, None]
        values.copy_(part.gather(1, best)[:, 0])
        torch.add(best[:, 0], start, out=tokens)
    else:
        values.fill_(-math.inf)  # What is as unlikely in a rank before comes first.
    return places


def first_of_likeliest(places: torch.Tensor) -> torch.Tensor:
    """`[n] int64`, the likeliest token of all ranks' `[size, 2, n]`; the first among equals.

    Ranks are in the order of their tokens, so that argmax, over them as over a rank's own, takes
    what it would have taken over all: also of zeros of either sign, of infinities and of NaN.
    """
    values, tokens = places[:, 0], places[:, 1]
    return tokens.gather(0, values.argmax(0, keepdim=True))[0].long()
