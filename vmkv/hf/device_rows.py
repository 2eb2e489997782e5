"""The batch on one device: entry b is row b, in every layer group, and all rows grow together."""

from __future__ import annotations

import weakref

import torch

from ..cache import KVCache, Sequence
from ..errors import ConfigError


class DeviceRows:
    """The rows of a transformers batch in one `KVCache`."""

    def __init__(self, core: KVCache):
        self.core = core
        self.sequences: list[Sequence] = []
        self._ready_tokens = 0
        self._padding: tuple[weakref.ref[torch.Tensor], bool, torch.Tensor | None] | None = None

    def ensure(self, batch_size: int, num_tokens: int) -> None:
        """Make the first `batch_size` rows hold `num_tokens` tokens.

        Cost while the last extents have room: one comparison and one store per row.
        """
        if batch_size > len(self.sequences):
            self._open_rows(batch_size)
        if num_tokens > self._ready_tokens:
            self.core.grow([(sequence, num_tokens) for sequence in self.sequences])
            self._ready_tokens = min(map(self.core.resident_tokens, self.sequences))
        for sequence in self.sequences:
            sequence.num_tokens = num_tokens

    def _open_rows(self, batch_size: int) -> None:
        if batch_size > self.core.max_sequences:
            raise ConfigError(
                f"a batch of {batch_size} does not fit the {self.core.max_sequences} rows of this "
                "cache; make it with a larger max_batch_size"
            )
        # A new row starts where the others are, so that a window it never saw is not mapped.
        num_tokens = self.sequences[0].num_tokens if self.sequences else 0
        for row in range(len(self.sequences), batch_size):
            sequence = self.core.open(row=row)
            sequence.num_tokens = num_tokens
            self.sequences.append(sequence)
        self._ready_tokens = 0

    def keep_resident(self, overread_tokens: int) -> None:
        """Have `overread_tokens` past every row's length mapped, now and from now on.

        Raises:
            OutOfPagesError: They are not to be had.
        """
        if overread_tokens > self.core.overread_tokens:
            self.core.overread_tokens = overread_tokens
            self._ready_tokens = 0
            if self.sequences:
                self.ensure(len(self.sequences), self.sequences[0].num_tokens)

    def left_pad(self, padding: torch.Tensor, num_tokens: int) -> tuple[bool, torch.Tensor | None]:
        """What a padding mask `[B, num_tokens]` says: whether it is left padding, and how much.

        The second is `[B] int32`, leading tokens to ignore in each row, or None for none.
        Asks the device once per mask, so once per step and not per layer.
        """
        if self._padding is None or self._padding[0]() is not padding:
            answer: tuple[bool, torch.Tensor | None] = (False, None)
            if padding.shape == (len(self.sequences), num_tokens):
                kept = padding.bool()
                left_pad = num_tokens - kept.sum(1, dtype=torch.int32)
                at = torch.arange(num_tokens, device=padding.device)
                is_left = (kept == (at >= left_pad[:, None])).all() & (left_pad < num_tokens).all()
                is_left_padding, has_any = torch.stack([is_left, left_pad.any()]).tolist()
                answer = (is_left_padding, left_pad if has_any else None)
            self._padding = (weakref.ref(padding), *answer)
        return self._padding[1], self._padding[2]

    def begin_at(self, batch_size: int, num_tokens: int) -> None:
        """Make rows as if `num_tokens` had been seen: for a copy of another cache."""
        for row in range(len(self.sequences), batch_size):
            self.sequences.append(self.core.open(row=row))
        for sequence in self.sequences:
            sequence.num_tokens = max(sequence.num_tokens, num_tokens)
        self._ready_tokens = 0
        self.ensure(batch_size, num_tokens)

    def set_length(self, num_tokens: int) -> None:
        """Forget tokens from `num_tokens` on, in every row."""
        for sequence in self.sequences:
            if num_tokens < sequence.num_tokens:
                self.core.truncate(sequence, num_tokens)

    def keep_rows(self, batch_size: int) -> None:
        """End the rows from `batch_size` on; their memory is parked."""
        while len(self.sequences) > batch_size:
            self.sequences.pop().close()

    def forget_growth(self) -> None:
        """What is resident has changed: ask again before the next step."""
        self._ready_tokens = 0
