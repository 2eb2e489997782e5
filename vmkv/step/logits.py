"""What a step has computed, where the output head may be divided among ranks.

Whoever wants no more than the likeliest token needs no rank's logits but its own, so a captured
step leaves those, and all of them are put together for whoever asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

#: Into how many parts a row is cut, the first of these that divides it.
_PARTS = (64, 48, 32, 24, 16, 8)


def likeliest(logits: torch.Tensor, parts: int | None = None) -> torch.Tensor:
    """`[n] int64`, the argmax of each row of `[n, columns]`; the first among equals.

    On CUDA torch reads a row by one block, however few rows there are (H200, 24 of 128,256: 29 us);
    so rows are cut, and the likeliest of the parts' likeliest is taken.

    Args:
        logits: Floating, of any strides whose last is 1.
        parts: Into how many; by default what suits the device.
    """
    columns = logits.shape[-1]
    if parts is None:
        suitable = (each for each in _PARTS if columns % each == 0)
        parts = next(suitable, 1) if logits.is_cuda else 1
    if parts == 1:
        return logits.argmax(-1)
    # torch leaves it untyped.
    cut: torch.Tensor = logits.unflatten(-1, (parts, -1))  # type: ignore[no-untyped-call]
    values, places = cut.max(-1)
    best = values.argmax(-1, keepdim=True)
    return (places.gather(-1, best) + best * (columns // parts))[..., 0]


class HeadInParts(Protocol):
    """An output head of which this rank has some columns. Every call is made by all ranks.

    Attributes:
        num_columns: How many, as many as every rank; the last ranks' may be filled up.
    """

    num_columns: int

    def in_part(self, room: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """While this lasts, the model's logits are this rank's, and lie in `room` if they fit.

        Args:
            room: `[any, num_columns]`.
        """

    def likeliest(self, part: torch.Tensor) -> torch.Tensor:
        """`[n] int64`, the argmax of all ranks' logits, from this rank's `[n, num_columns]`."""

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """`[…, vocabulary]` of all ranks' `[…, num_columns]`."""


@dataclass(frozen=True)
class StepLogits:
    """What a step has computed; good until the next one.

    Attributes:
        kept: `[n, columns]`, this rank's logits, of the last tokens of the pieces that sample.
        pieces: `[n]`, which pieces those are.
        token_ids: `[n] int64`, their likeliest tokens, if those are in `last_tokens` already.
        head: What `kept` is a part by; None where it is all there is.
    """

    kept: torch.Tensor
    pieces: Sequence[int]
    token_ids: torch.Tensor | None = None
    head: HeadInParts | None = None

    @cached_property
    def logits(self) -> torch.Tensor:
        """`[n, vocabulary]`. Of parts, put together when first asked for: by all ranks or none."""
        return self.kept if self.head is None else self.head.whole(self.kept)
