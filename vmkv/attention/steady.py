"""A decode batch that stays the same: its lengths count up where kernels read them.

While the same sequences decode together, all that changes from step to step is that each is one
token longer. So nothing is listed, checked or uploaded again:

  lengths, positions   one tensor per device, counted up by one launch (`DecodeCounts`)
  batches              keep their vectors; of the host's numbers only the bound moves on
  memory               a sequence is grown when it reaches the end of what is mapped, and not
                       before; a table says in which step that is (`GrowthAhead`)

A step costs two table look-ups and a launch, whatever the number of sequences and their lengths.

Rejected: growing all sequences when the first one needs it. Of 256 sequences one always does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import torch

from .. import cache
from ..errors import ConfigError
from .batch import AttentionBatch


class DecodeCounts:
    """What counts up with every step, on one device, in one tensor.

    Args:
        num_tokens: Each sequence's tokens, this step's included.
        device: Where it is counted.

    Attributes:
        num_tokens: `[B] int32`, as kernels want lengths.
        positions: `[B] int64`, as models want the position of each sequence's token.
    """

    def __init__(self, num_tokens: Sequence[int], device: torch.device):
        size = len(num_tokens)
        # A position is 64 bits wide and below 2**31: two words, of which the first counts on
        # every machine that torch and CUDA know (they are little-endian).
        words = [word for count in num_tokens for word in (count - 1, 0)]
        packed = torch.tensor([[*words, *num_tokens], [1, 0] * size + [1] * size]).int()
        self._packed, self._steps = packed.to(device, non_blocking=True)
        self.positions: torch.Tensor = self._packed[: 2 * size].view(torch.int64)
        self.num_tokens: torch.Tensor = self._packed[2 * size :]
        self._count: Callable[[], object] = functools.partial(self._packed.add_, self._steps)
        if device.type == "cuda":
            # Imported here: it compiles for a GPU, which other machines have no tools for.
            from .count_cuda import counter

            self._count = counter(self._packed, self._steps)

    def advance(self) -> None:
        """One more token for every sequence. Cost: one launch."""
        self._count()


class DecodeBatch(AttentionBatch):
    """A batch of one query per sequence whose `num_tokens` are counted up by `DecodeCounts`."""

    @classmethod
    def counted_by(
        cls,
        counts: DecodeCounts,
        rows: Sequence[int],
        num_tokens: Sequence[int],
        *,
        row_tokens: int,
        num_rows: int | None = None,
    ) -> DecodeBatch:
        """A batch over `rows`, checked as by `AttentionBatch.build`.

        Args:
            counts: Its device is the batch's.
            rows: Each sequence's row.
            num_tokens: What `counts` says now.
            row_tokens: See `AttentionBatch.build`.
            num_rows: Likewise.

        Raises:
            TypeError, ConfigError: As `AttentionBatch.build`.
        """
        checked = AttentionBatch.build(
            rows,
            num_tokens,
            [1] * len(rows),
            row_tokens=row_tokens,
            num_rows=num_rows,
            device=counts.num_tokens.device,
        )
        return cls(
            row_indices=checked.row_indices,
            num_tokens=counts.num_tokens,
            query_starts=checked.query_starts,
            max_query_tokens=1,
            max_num_tokens=checked.max_num_tokens,
            row_tokens=row_tokens,
        )

    def advance(self) -> None:
        """Follow the counts, which have advanced: move the bound, forget what was derived."""
        own = vars(self)
        own["max_num_tokens"] += 1
        for derived in ("spans", "tokens_before", "slots"):
            own.pop(derived, None)

    @cached_property
    def tokens_before(self) -> torch.Tensor:
        """See `AttentionBatch.tokens_before`; here one operation."""
        return self.num_tokens - 1

    @cached_property
    def slots(self) -> torch.Tensor:
        """See `AttentionBatch.slots`; here three operations, and no synchronisation."""
        return (self.key_starts[:-1] + self.tokens_before).long()


class GrowthAhead:
    """Growth of sequences that all get one token a step: each when it needs it.

    A sequence grows by more than a token at a time, and until that is used up nothing need be
    done for it. Meanwhile its `num_tokens` says how far it is grown, which is ahead of what was
    written: so no one who makes room takes what the next steps rely on. `settle` says the truth
    again; call it before anything else is done with the sequences.

    Args:
        core: Their cache.
        sequences: The sequences, each as long as it is in the first step.

    Cost: one look at every sequence now, and at those that must grow in a step.
    """

    def __init__(self, core: cache.KVCache, sequences: Iterable[cache.Sequence]):
        self._core = core
        self._starts = [(sequence, sequence.num_tokens) for sequence in sequences]
        self._step = 0
        self._due: dict[int, list[tuple[cache.Sequence, int]]] = {}
        self._reserve(self._starts)

    def advance(self) -> None:
        """One more token for every sequence; all of them or none.

        Raises:
            OutOfPagesError, SequenceFullError, ClosedError: No sequence has advanced.
        """
        step = self._step + 1
        due = self._due.get(step)
        if due is None:
            self._core.check_open()
            self._core.note_stream()
        else:
            self._core.grow((sequence, start + step) for sequence, start in due)
            del self._due[step]
            self._reserve(due)
        self._step = step

    def _reserve(self, grown: Iterable[tuple[cache.Sequence, int]]) -> None:
        """Use what is mapped for sequences already; note the step in which they need more."""
        core = self._core
        for sequence, start in grown:
            sequence.num_tokens = max(core.writable_tokens(sequence), sequence.num_tokens)
            self._due.setdefault(sequence.num_tokens - start + 1, []).append((sequence, start))

    def settle(self) -> None:
        """Have every open sequence say how long it is. To go on, start anew."""
        for sequence, start in self._starts:
            if not sequence.is_closed:
                sequence.num_tokens = start + self._step
        self._starts, self._due = [], {}


class SteadyDecode:
    """The decode of some sequences, on every device that has a part of it, step after step.

    Args:
        num_tokens: Each sequence's tokens, the first step's included.
    """

    def __init__(self, num_tokens: Sequence[int]):
        self._num_tokens = list(num_tokens)
        self._counts: dict[torch.device, DecodeCounts] = {}
        self._batches: list[DecodeBatch] = []
        self._growths: list[GrowthAhead] = []
        self._has_advanced = False

    def counts(self, device: torch.device) -> DecodeCounts:
        """The counts on `device`, made on first use.

        Raises:
            ConfigError: As `batch`.
        """
        if device not in self._counts:
            self._check_new()
            self._counts[device] = DecodeCounts(self._num_tokens, device)
        return self._counts[device]

    def batch(
        self,
        rows: Sequence[int],
        *,
        row_tokens: int,
        num_rows: int | None = None,
        device: torch.device,
    ) -> DecodeBatch:
        """The sequences as the kernels of one layer group want them; good for every step.

        Args:
            rows: Each sequence's row.
            row_tokens: See `AttentionBatch.build`.
            num_rows: Likewise.
            device: Likewise.

        Raises:
            ConfigError: As `AttentionBatch.build`; or the decode is under way already.
        """
        self._check_new()
        batch = DecodeBatch.counted_by(
            self.counts(device), rows, self._num_tokens, row_tokens=row_tokens, num_rows=num_rows
        )
        self._batches.append(batch)
        return batch

    def keep_grown(self, core: cache.KVCache, sequences: Iterable[cache.Sequence]) -> None:
        """Grow `sequences`, which hold the first step's token, with every step from now on.

        Raises:
            ConfigError: The decode is under way already.
        """
        self._check_new()
        self._growths.append(GrowthAhead(core, sequences))

    def advance(self) -> None:
        """The next step: every sequence is one token longer, everywhere.

        Raises:
            OutOfPagesError, SequenceFullError, ClosedError: Nothing was counted, though the
                sequences of other devices may have grown.
        """
        for growth in self._growths:
            growth.advance()
        self._has_advanced = True
        for counts in self._counts.values():
            counts.advance()
        for batch in self._batches:
            batch.advance()

    def settle(self) -> None:
        """The decode is over: have every sequence say how long it is. Idempotent."""
        for growth in self._growths:
            growth.settle()
        self._growths.clear()

    def _check_new(self) -> None:
        if self._has_advanced:
            raise ConfigError("this decode is under way; begin another for other devices or rows")
