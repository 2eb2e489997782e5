"""CUDA graphs of decode steps: one new token per sequence, for packed steps and fixed batches.

A bucket is a number of sequences and an upper bound of their lengths. Kernels that split rows over
the device cut them by that bound: with a bound of 128k, a row of 2k would be one split. With enough
sequences to fill the device nothing is split, and one graph serves any length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ..attention import AttentionBatch
from .graphs import GraphSpace, StepGraphs
from .piece import Piece, pinned
from .row_attention import StepParts

# ---- decode graphs -------------------------------------------------------------------------------

#: Lines of a step's input: slots, rows, tokens before, tokens after, and the token from the host
#: (-1 if it is on the device).
_LINES = 5
_SHORTEST_TOKENS = 1024

Bucket = tuple[int, int]
"""Number of sequences, and the bound of their lengths in tokens."""


class DecodeGraphs(StepGraphs[Bucket]):
    """The decode graphs of one stepper.

    Batches of `split_below` or more sequences get no length buckets; `few` gives fewer widths,
    which pad more.
    """

    name = "decode steps"

    def __init__(self, space: GraphSpace, split_below: int, *, few: bool = False):
        self.batch_buckets = batch_buckets(space.max_num_seqs, few=few)
        self.length_buckets = length_buckets(space.max_tokens)
        super().__init__(space, _LINES * self.batch_buckets[-1])
        self._split_below = split_below
        widest = self.batch_buckets[-1]
        self._starts = torch.arange(widest + 1, dtype=torch.int32, device=space.device)

    def key(self, batch_size: int, longest: int) -> Bucket:
        """Return the bucket of `batch_size` sequences of at most `longest` tokens."""
        width = self.batch_buckets[bisect_left(self.batch_buckets, batch_size)]
        if width >= self._split_below:
            return width, self.space.max_tokens
        return width, self.length_buckets[bisect_left(self.length_buckets, longest)]

    def keys(self) -> Sequence[Bucket]:
        """Return all buckets, the largest first."""
        found: list[Bucket] = []
        for width in reversed(self.batch_buckets):
            if width >= self._split_below:
                found.append((width, self.space.max_tokens))
            else:
                found += [(width, bound) for bound in reversed(self.length_buckets)]
        return found

    def fill(self, key: Bucket, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return a step's input for decoding `pieces`, on the host."""
        width, count = key[0], len(pieces)
        host, flat = pinned(_LINES * width, self.space.device)
        lines = flat.reshape(_LINES, width)
        lines[0, :count] = [piece.slot for piece in pieces]
        lines[1, :count] = [piece.row for piece in pieces]
        lines[2, :count] = [piece.num_past_tokens for piece in pieces]
        lines[4, :count] = [
            -1 if piece.token_ids is None else piece.token_ids[0] for piece in pieces
        ]
        lines[0, count:], lines[1, count:] = self.space.scratch
        lines[2, count:] = 0
        lines[4, count:] = 0
        lines[3] = lines[2] + 1
        return host

    def empty(self, key: Bucket) -> torch.Tensor:
        """Return the input of a step of padding, on the host."""
        return self.fill(key, [])

    def needs_warm_up(self, key: Bucket) -> bool:
        """Whether the bucket has one sequence: those layers are compiled and tuned separately."""
        return key[0] == 1

    def step(self, key: Bucket, integers: torch.Tensor) -> None:
        """Run the step: tokens from the host or the slots, to `GraphSpace.take`."""
        width, bound = key
        lines = integers[: _LINES * width].view(_LINES, width)
        space = self.space
        slots = lines[0].long()
        from_host = lines[4].long()
        token_ids = torch.where(from_host < 0, space.last_tokens[slots], from_host)
        parts = decode_parts(
            space.capacities, lines[1], lines[2], lines[3], self._starts[: width + 1], bound
        )
        space.attention.steps = {space.device: parts}
        space.take(space.forward(token_ids, lines[2].long(), None), slots)


def decode_parts(
    capacities: Iterable[int],
    rows: torch.Tensor,
    tokens_before: torch.Tensor,
    num_tokens: torch.Tensor,
    query_starts: torch.Tensor,
    max_num_tokens: int,
    left_pad: torch.Tensor | None = None,
) -> StepParts:
    """Describe a step in which every sequence decodes, for attention.

    Vectors are `int32` on the device, `[B]`; `query_starts [B + 1]` is 0, 1, ….
    """
    batches = {}
    for capacity in capacities:
        batch = batches[capacity] = AttentionBatch(
            row_indices=rows,
            num_tokens=num_tokens,
            query_starts=query_starts,
            max_query_tokens=1,
            max_num_tokens=min(max_num_tokens, capacity),
            row_tokens=capacity,
            left_pad=left_pad,
        )
        vars(batch)["tokens_before"] = tokens_before
    return StepParts(rows.shape[0], 0, everything=batches, decode=batches)


def batch_buckets(max_batch: int, *, few: bool = False) -> list[int]:
    """Return graph widths to `max_batch`: powers of two to 8, then finer; if `few`, only powers."""
    widths, width = [], 1
    while width < max_batch:
        widths.append(width)
        if few or width < 8:
            width *= 2
        else:
            width += 8 if width < 64 else 16 if width < 256 else 32
    return [*widths, max_batch]


def length_buckets(max_tokens: int) -> list[int]:
    """Return bounds of lengths: powers of two and midpoints, up to `max_tokens`."""
    bounds, bound = [], _SHORTEST_TOKENS
    while bound < max_tokens:
        bounds += [bound, bound * 3 // 2]
        bound *= 2
    return [each for each in bounds if each < max_tokens] + [max_tokens]


# ---- batch graphs --------------------------------------------------------------------------------

#: Lines of a step's input: tokens before, and tokens after.
_BATCH_LINES = 2


class BatchBucket(NamedTuple):
    """Key of a batch graph: the bound of the rows' lengths, and whether `left_pad` applies."""

    max_num_tokens: int
    is_padded: bool


class BatchGraphs(StepGraphs[BatchBucket]):
    """The decode graphs of one fixed batch of `space.max_num_seqs` sequences.

    The caller writes `positions` and `left_pad` before a step.
    """

    name = "decode steps of a batch"

    def __init__(self, space: GraphSpace, split_below: int):
        width = space.max_num_seqs
        super().__init__(space, _BATCH_LINES * width)
        self._bounds = length_buckets(space.max_tokens)
        if width >= split_below:
            self._bounds = [space.max_tokens]
        # `[B]`: positions of the new tokens.
        self.positions = torch.zeros(width, dtype=torch.int64, device=space.device)
        # `[B]`: leading tokens of each row that are not attended to.
        self.left_pad = torch.zeros(width, dtype=torch.int32, device=space.device)
        self._starts = torch.arange(width + 1, dtype=torch.int32, device=space.device)

    def key(self, num_tokens: int, *, is_padded: bool) -> BatchBucket:
        """Return the bucket of rows that hold `num_tokens` after the step."""
        return BatchBucket(self._bounds[bisect_left(self._bounds, num_tokens)], is_padded)

    def keys(self) -> Sequence[BatchBucket]:
        """Return all buckets, the largest first."""
        return [
            BatchBucket(bound, is_padded)
            for bound in reversed(self._bounds)
            for is_padded in (False, True)
        ]

    def fill(self, num_tokens: int) -> torch.Tensor:
        """Return the input of a step after which rows hold `num_tokens`, on the host."""
        width = self.space.max_num_seqs
        host, flat = pinned(_BATCH_LINES * width, self.space.device)
        flat[:width], flat[width:] = num_tokens - 1, num_tokens
        return host

    def empty(self, key: BatchBucket) -> torch.Tensor:
        """Return an input for capturing; it is never run."""
        return self.fill(1)

    def step(self, key: BatchBucket, integers: torch.Tensor) -> None:
        """Run the step: logits go to `GraphSpace.logits`, and no token is chosen."""
        space = self.space
        width = space.max_num_seqs
        before, after = integers.view(_BATCH_LINES, width)
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
