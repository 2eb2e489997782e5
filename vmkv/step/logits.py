"""Logits of a step; where the output head is divided among ranks, they are gathered on demand."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

#: Numbers of parts to cut a row into: the first that divides it is used.
_PARTS = (64, 48, 32, 24, 16, 8)


def likeliest(logits: torch.Tensor, parts: int | None = None) -> torch.Tensor:
    """Return the argmax `[n] int64` of each row of `[n, columns]`; the first among equals.

    On CUDA, torch reads each row by one block, however few rows there are (H200, 24 of 128,256: 29
    us); so rows are cut into `parts`, by default to suit the device.
    """
    columns = logits.shape[-1]
    if parts is None:
        suitable = (each for each in _PARTS if columns % each == 0)
        parts = next(suitable, 1) if logits.is_cuda else 1
    if parts == 1:
        return logits.argmax(-1)
    cut: torch.Tensor = logits.unflatten(-1, (parts, -1))  # type: ignore[no-untyped-call]
    values, places = cut.max(-1)
    best = values.argmax(-1, keepdim=True)
    return (places.gather(-1, best) + best * (columns // parts))[..., 0]


class HeadInParts(Protocol):
    """An output head divided by columns among ranks; every call is made by all ranks.

    `num_columns` is the same on every rank; the last ranks' columns may be padding.
    """

    num_columns: int

    def in_part(self, room: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Context in which the model returns this rank's logits, stored in `room` if they fit."""

    def likeliest(self, part: torch.Tensor) -> torch.Tensor:
        """Return the argmax `[n] int64` over all ranks, given this rank's `[n, num_columns]`."""

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Gather all ranks' `[…, num_columns]` as `[…, vocabulary]`."""


@dataclass(frozen=True)
class StepLogits:
    """The logits of a step; valid until the next one."""

    kept: torch.Tensor  # `[n, columns]`: this rank's logits of each sampling piece's last token.
    pieces: Sequence[int]  # `[n]`: indices of those pieces.
    token_ids: torch.Tensor | None = None  # `[n]`: their argmax, if stored in `last_tokens`.
    head: HeadInParts | None = None  # The divided head; None if `kept` is complete.

    @cached_property
    def logits(self) -> torch.Tensor:
        """`[n, vocabulary]`; gathered at the first access, by all ranks or none."""
        return self.kept if self.head is None else self.head.whole(self.kept)
