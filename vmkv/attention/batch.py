"""The batch of one step: which rows, how long they are, where their queries lie.

A ragged batch is four small int32 vectors on the device and three host integers that bound
them, so that no layer has to ask the device for anything. It replaces a block table: 12 bytes a
sequence whatever its length.

Lengths are trusted by kernels, and a wrong one is an illegal memory access, so `build` checks
all of them on the host, where they come from. Constructing an `AttentionBatch` directly skips
that, for batches whose vectors are computed on the device (a captured CUDA graph); that kernels
can index their rows is then the cache's promise (`Geometry`). Such a batch may be padded: a
sequence may have no queries, and more queries than tokens. Those that come before position 0 are
written nowhere and see nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from ..cache.geometry import POSITIONS_MAX
from ..errors import ConfigError


class Span(NamedTuple):
    """One sequence of a batch, in host integers.

    Attributes:
        row: Its row.
        query_start: Where its queries begin in the packed tensor.
        query_end: One past where they end.
        num_tokens: Its keys, this step's included.
        left_pad: How many of them, from the first, are not attended to.
    """

    row: int
    query_start: int
    query_end: int
    num_tokens: int
    left_pad: int


@dataclass(frozen=True)
class AttentionBatch:
    """A ragged batch over the rows of a cache.

    The vectors live on the device of the views. Properties that derive further vectors do so
    once per batch object and keep them for all layers; a batch whose vectors are rewritten in
    place (by a CUDA graph) must therefore be a new object, made where the rewriting is captured.

    Attributes:
        row_indices: `[B] int32`, each sequence's row; distinct.
        num_tokens: `[B] int32`, keys of each sequence, this step's included.
        query_starts: `[B + 1] int32`, where each sequence's queries begin, and the total.
        max_query_tokens: An upper bound of any sequence's queries; the exact maximum unless
            the batch was made on the device.
        max_num_tokens: An upper bound of `num_tokens`; kernels choose their grid by it.
        row_tokens: Capacity of a row, the views' second dimension.
        left_pad: `[B] int32`, how many leading tokens of each row are not attended to, or None.
    """

    row_indices: torch.Tensor
    num_tokens: torch.Tensor
    query_starts: torch.Tensor
    max_query_tokens: int
    max_num_tokens: int
    row_tokens: int
    left_pad: torch.Tensor | None = None

    @classmethod
    def build(
        cls,
        rows: Sequence[int],
        num_tokens: Sequence[int],
        query_tokens: Sequence[int],
        *,
        row_tokens: int,
        num_rows: int | None = None,
        left_pad: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> AttentionBatch:
        """Make a batch from host integers, refusing whatever a kernel could not survive.

        Args:
            rows: Each sequence's row.
            num_tokens: Each sequence's keys, this step's included.
            query_tokens: How many of them, from the last, are queried in this step.
            row_tokens: Capacity of a row.
            num_rows: How many rows the views have; None skips that test.
            left_pad: How many leading tokens of each row to ignore; None means none.
            device: Where the views live.

        Returns:
            A batch whose vectors share one small allocation on `device`.

        Raises:
            TypeError: Something is not an integer.
            ConfigError: The batch is empty, the lists differ in length, a row is used twice or
                does not exist, a length is zero or longer than its row, a sequence has no query
                or more queries than tokens, or is padding only.

        Cost: O(B) on the host, one copy of `4 * B + 1` integers to the device.
        """
        counts = [len(rows), len(num_tokens), len(query_tokens)]
        counts += [len(left_pad)] if left_pad is not None else []
        if not rows:
            raise ConfigError("an empty batch: pass at least one sequence, or skip the step")
        if len(set(counts)) > 1:
            raise ConfigError(f"one entry per sequence is needed in every list, got {counts}")
        pads = left_pad if left_pad is not None else [0] * len(rows)
        _check_rows(rows, row_tokens, num_rows)
        for row, tokens, queries, pad in zip(rows, num_tokens, query_tokens, pads, strict=True):
            _check_sequence(row, tokens, queries, pad, row_tokens)

        starts = [0, *accumulate(query_tokens)]
        size = len(rows)
        packed = torch.tensor([*rows, *num_tokens, *pads, *starts], dtype=torch.int32)
        packed = packed.to(device, non_blocking=True)
        batch = cls(
            row_indices=packed[:size],
            num_tokens=packed[size : 2 * size],
            left_pad=packed[2 * size : 3 * size] if any(pads) else None,
            query_starts=packed[3 * size :],
            max_query_tokens=max(query_tokens),
            max_num_tokens=max(num_tokens),
            row_tokens=row_tokens,
        )
        # What is known here need not be asked of the device later: fill the cached property.
        columns = zip(rows, starts, starts[1:], num_tokens, pads, strict=False)
        vars(batch)["spans"] = tuple(Span(*column) for column in columns)
        return batch

    @property
    def batch_size(self) -> int:
        """B."""
        return self.row_indices.shape[0]

    def is_uniform(self, total_query_tokens: int) -> bool:
        """Whether every sequence has `max_query_tokens` queries.

        Args:
            total_query_tokens: Tq, the packed tensor's first dimension. The sum can only reach
                `B * max_query_tokens` if no sequence has fewer.
        """
        return self.batch_size * self.max_query_tokens == total_query_tokens

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The batch in host integers.

        Cost: free after `build`; otherwise one device synchronisation per batch.
        """
        starts = self.query_starts.tolist()
        pads = self.left_pad.tolist() if self.left_pad is not None else [0] * self.batch_size
        columns = zip(
            self.row_indices.tolist(),
            starts,
            starts[1:],
            self.num_tokens.tolist(),
            pads,
            strict=False,
        )
        return tuple(Span(*column) for column in columns)

    @cached_property
    def plans(self) -> dict[Hashable, torch.Tensor]:
        """What kernels work out once for all layers that ask the same of them, by what they ask."""
        return {}

    @cached_property
    def tokens_before(self) -> torch.Tensor:
        """`[B] int32`: keys of each sequence before this step's are appended."""
        return self.num_tokens - (self.query_starts[1:] - self.query_starts[:-1])

    @cached_property
    def key_starts(self) -> torch.Tensor:
        """`[B + 1] int32`: where each sequence's visible keys begin in the flat view.

        What varlen kernels call `cu_seqlens_k`. Rows need not ascend: beside `visible_tokens`
        kernels read only each sequence's start, and the last entry is there for its shape.
        Left padding is skipped here, so a varlen kernel needs no notion of it.
        """
        starts = torch.zeros_like(self.query_starts)
        torch.mul(self.row_indices, self.row_tokens, out=starts[:-1])
        if self.left_pad is not None:
            starts[:-1] += self.left_pad
        return starts

    @cached_property
    def visible_tokens(self) -> torch.Tensor:
        """`[B] int32`: keys of each sequence, left padding not counted (`seqused_k`)."""
        return self.num_tokens if self.left_pad is None else self.num_tokens - self.left_pad

    @cached_property
    def flat_positions(self) -> torch.Tensor:
        """`[Tq] int64`: each query token's place in the flat view; negative for padding.

        Cost: a handful of small operations per batch; synchronises on a CUDA device, where the
        fused append computes the same inside its kernel.
        """
        lengths = (self.query_starts[1:] - self.query_starts[:-1]).long()
        # Token i of a sequence whose queries start at s is at position `before + (i - s)`.
        shifts = self.tokens_before.long() - self.query_starts[:-1].long()
        shifts = torch.repeat_interleave(shifts, lengths)
        positions = shifts + torch.arange(shifts.shape[0], device=shifts.device)
        rows = torch.repeat_interleave(self.row_indices.long(), lengths)
        return torch.where(positions < 0, -1, rows * self.row_tokens + positions)


def _check_rows(rows: Sequence[int], row_tokens: int, num_rows: int | None) -> None:
    if row_tokens < 1:
        raise ConfigError(f"rows must hold at least one token, not {row_tokens}")
    if len(set(rows)) != len(rows):
        twice = sorted({row for row in rows if list(rows).count(row) > 1})
        raise ConfigError(f"rows {twice} are used more than once in one batch")
    highest = num_rows - 1 if num_rows is not None else (POSITIONS_MAX - 1) // row_tokens - 1
    for row in rows:
        if not 0 <= row <= highest:
            raise ConfigError(f"row {row} is not one of the rows 0 to {highest}")
    if (max(rows) + 1) * row_tokens >= POSITIONS_MAX:
        raise ConfigError(
            f"{max(rows) + 1} rows of {row_tokens} tokens pass the {POSITIONS_MAX} that kernels "
            "can index; use fewer rows or shorter ones"
        )


def _check_sequence(row: int, tokens: int, queries: int, pad: int, row_tokens: int) -> None:
    for value in (row, tokens, queries, pad):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"rows and lengths must be int, got {value!r}")
    if not 1 <= tokens <= row_tokens:
        raise ConfigError(
            f"row {row}: {tokens} tokens do not fit a row of {row_tokens}, 1 at least"
        )
    if not 1 <= queries <= tokens:
        raise ConfigError(f"row {row}: {queries} queries of {tokens} tokens; 1 to {tokens} can be")
    if not 0 <= pad < tokens:
        raise ConfigError(f"row {row}: {pad} of {tokens} tokens are padding; one must be real")
