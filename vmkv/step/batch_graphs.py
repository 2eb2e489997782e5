"""Decode steps of one batch as graphs: its rows are 0, 1, …, all of one length, and all decode.

What transformers' own loop does with a cache. Nothing of such a step is padding, so that it needs
no row for it; tokens and positions come from the caller's tensors on the device, and the host
sends lengths alone. Rows may begin with tokens that nothing attends to.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .decode_graphs import decode_parts, length_buckets
from .graphs import GraphSpace, StepGraphs
from .packing import pinned

#: Lines of a step's input: tokens before, and tokens after.
_LINES = 2


class Bucket(NamedTuple):
    """What a step is captured for.

    Attributes:
        max_num_tokens: How long the rows are at most; see `decode_graphs.py`.
        is_padded: Whether `BatchGraphs.left_pad` counts.
    """

    max_num_tokens: int
    is_padded: bool


class BatchGraphs(StepGraphs[Bucket]):
    """The graphs of one batch, of as many sequences as `space` has room for.

    Args:
        space: What they share with others.
        split_below: See `DecodeGraphs`.

    Attributes:
        positions: `[B] int64`, of the new tokens; written before a step.
        left_pad: `[B] int32`, how many leading tokens of each row nothing attends to; likewise.
    """

    name = "decode steps of a batch"

    def __init__(self, space: GraphSpace, split_below: int):
        width = space.max_num_seqs
        super().__init__(space, _LINES * width)
        self._bounds = length_buckets(space.max_tokens)
        if width >= split_below:
            self._bounds = [space.max_tokens]
        self.positions = torch.zeros(width, dtype=torch.int64, device=space.device)
        self.left_pad = torch.zeros(width, dtype=torch.int32, device=space.device)
        self._starts = torch.arange(width + 1, dtype=torch.int32, device=space.device)

    def key(self, num_tokens: int, *, is_padded: bool) -> Bucket:
        """The bucket of rows that hold `num_tokens` after the step."""
        return Bucket(self._bounds[bisect_left(self._bounds, num_tokens)], is_padded)

    def keys(self) -> Sequence[Bucket]:
        """See `StepGraphs.keys`."""
        return [
            Bucket(bound, is_padded)
            for bound in reversed(self._bounds)
            for is_padded in (False, True)
        ]

    def fill(self, num_tokens: int) -> torch.Tensor:
        """The input of a step after which rows hold `num_tokens`, on the host."""
        width = self.space.max_num_seqs
        host, flat = pinned(_LINES * width, self.space.device)
        flat[:width], flat[width:] = num_tokens - 1, num_tokens
        return host

    def empty(self, key: Bucket) -> torch.Tensor:
        """See `StepGraphs.empty`; only ever captured, never run."""
        return self.fill(1)

    def step(self, key: Bucket, integers: torch.Tensor) -> None:
        """See `StepGraphs.step`; logits go to `GraphSpace.logits`, and nothing is chosen."""
        space = self.space
        width = space.max_num_seqs
        before, after = integers.view(_LINES, width)
        parts = decode_parts(
            space.capacities,
            self._starts[:width],
            before,
            after,
            self._starts,
            key.max_num_tokens,
            left_pad=self.left_pad if key.is_padded else None,
        )
        space.attention.steps = {space.device: parts}
        space.logits.copy_(space.forward(space.last_tokens[:width], self.positions, None))
