"""The batch on one device: entry b is row b, in every layer group, and all rows grow together."""

from __future__ import annotations

import weakref
from collections.abc import Sequence as Sequence_

import torch

from ..cache import KVCache, Sequence
from ..errors import ConfigError
from .padding import read_left_pad


class DeviceRows:
    """The rows of a transformers batch in one `KVCache`."""

    def __init__(self, core: KVCache):
        self.core = core
        self.sequences: list[Sequence] = []
        # What masks of the current step say; a model has one for each kind of layer.
        self._paddings: dict[int, tuple[weakref.ref[torch.Tensor], bool, torch.Tensor | None]] = {}
        self._padding_tokens = -1

    def ensure(self, batch_size: int, num_tokens: int) -> None:
        """Make the first `batch_size` rows hold `num_tokens` tokens.

        Cost: once a step what `KVCache.grow` costs; a comparison for further layer groups.
        """
        num_rows = len(self.sequences)
        if batch_size <= num_rows and num_tokens <= self.sequences[0].num_tokens:
            return
        try:
            self._open_rows(batch_size)
            self.core.grow([(sequence, num_tokens) for sequence in self.sequences])
        except BaseException:
            self.keep_rows(num_rows)
            raise

    def _open_rows(self, batch_size: int) -> None:
        if batch_size > self.core.max_sequences:
            raise self._too_large(batch_size)
        for row in range(len(self.sequences), batch_size):
            self.sequences.append(self.core.open(row=row))

    def _too_large(self, batch_size: int) -> ConfigError:
        return ConfigError(
            f"a batch of {batch_size} does not fit the {self.core.max_sequences} rows of this "
            "cache; make it with a larger max_batch_size"
        )

    def keep_resident(self, overread_tokens: int) -> None:
        """Have `overread_tokens` past every row's length mapped, now and from now on.

        Raises:
            OutOfPagesError: They are not to be had.
        """
        if overread_tokens > self.core.overread_tokens:
            self.core.keep_resident(overread_tokens)

    def left_pad(self, padding: torch.Tensor, num_tokens: int) -> tuple[bool, torch.Tensor | None]:
        """What a padding mask `[B, num_tokens]` says: whether it is left padding, and how much.

        The second is `[B] int32`, leading tokens to ignore in each row, or None for none.
        Asks the device once per mask, so once per step and not per layer.
        """
        if num_tokens != self._padding_tokens:
            self.forget_paddings()
            self._padding_tokens = num_tokens
        known = self._paddings.get(id(padding))
        if known is None or known[0]() is not padding:
            known = (weakref.ref(padding), *self._read_padding(padding, num_tokens))
            self._paddings[id(padding)] = known
        return known[1], known[2]

    def forget_paddings(self) -> None:
        """The batch is another one: a mask that was read may be the same tensor, rewritten."""
        self._paddings.clear()

    def _read_padding(
        self, padding: torch.Tensor, num_tokens: int
    ) -> tuple[bool, torch.Tensor | None]:
        if padding.shape != (len(self.sequences), num_tokens):
            return (False, None)
        is_left_padding, has_any, left_pad = read_left_pad(padding.bool())
        return (is_left_padding, left_pad.to(self.core.device) if has_any else None)

    def take_over(self, sources: Sequence_[int]) -> None:
        """Make the batch the entries `sources` of what it is now, in that order.

        New entries are forks; entries that stay take over what their source holds, without a copy
        of what the two have in common.

        Raises:
            OutOfPagesError, ConfigError: The batch is as it was.
        """
        before = len(self.sequences)
        if len(sources) > self.core.max_sequences:
            raise self._too_large(len(sources))
        try:
            for row in range(before, len(sources)):
                source = self.sequences[sources[row]]
                self.sequences.append(self.core.fork(source, source.num_tokens, row=row))
            stay = list(range(before))
            stay[: len(sources)] = sources[:before]
            self.core.reorder(self.sequences[:before], stay)
        except BaseException:
            self.keep_rows(before)
            raise
        self.keep_rows(len(sources))

    def fork_from(self, other: DeviceRows) -> None:
        """Begin with the batch of `other`, whose memory is shared with it from now on.

        Raises:
            OutOfPagesError, DriverError: Some rows have begun; end them.
        """
        for row, sequence in enumerate(other.sequences):
            self.sequences.append(self.core.fork(sequence, sequence.num_tokens, row=row))

    def begin_at(self, batch_size: int, num_tokens: int) -> None:
        """Make rows as if `num_tokens` had been seen: for a copy of another cache."""
        for row in range(len(self.sequences), batch_size):
            self.sequences.append(self.core.open(row=row))
        for sequence in self.sequences:
            # First: what no window of theirs sees is not mapped.
            sequence.num_tokens = max(sequence.num_tokens, num_tokens)
        self.core.grow([(sequence, num_tokens) for sequence in self.sequences])

    def keeps(self, num_tokens: int) -> bool:
        """Whether every row can go back to `num_tokens`."""
        return not num_tokens or all(
            num_tokens >= each.num_tokens or self.core.keeps(each.row, num_tokens)
            for each in self.sequences
        )

    def set_length(self, num_tokens: int) -> None:
        """Forget tokens from `num_tokens` on, in every row."""
        for sequence in self.sequences:
            if num_tokens < sequence.num_tokens:
                sequence.truncate(num_tokens)

    def keep_rows(self, batch_size: int) -> None:
        """End the rows from `batch_size` on; their memory is parked."""
        while len(self.sequences) > batch_size:
            self.sequences.pop().close()
