"""Inputs and outputs of a step: pieces, packed into one copy to the device, and logits.

Where the output head is divided among ranks, logits are gathered on demand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from ..attention import AttentionBatch
from .row_attention import StepParts, batches

# ---- pieces --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Piece:
    """The work of one row in a step: the scheduled chunk of a request.

    Attributes:
        slot: Index into `Stepper.last_tokens`; distinct within a step.
        row: Row in the cache, grown to `num_tokens` plus the over-read before the step. The engine
            sets it when it grows the row.
        num_past_tokens: Tokens whose keys and values are in the row.
        num_new_tokens: Tokens of this step.
        token_ids: The new tokens, on the host; None for the one token in the slot.
        samples: Whether the logits of the last token are needed: not for a prompt's early chunks,
            nor for recomputed tokens.
        checkpoints: Lengths after which the layers' states are kept, ascending, each with the row
            of the cache's `states` for the copy; all above `num_past_tokens`.
        request: The engine's request.
        num_drafted: How many of the last tokens are guesses. If the piece samples, the logits of
            each, and of the token before them, are needed.
    """

    slot: int
    row: int
    num_past_tokens: int
    num_new_tokens: int
    token_ids: Sequence[int] | None
    samples: bool = True
    checkpoints: Sequence[tuple[int, int]] = ()
    request: Any = field(default=None, repr=False, compare=False)
    num_drafted: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens in the row after the step."""
        return self.num_past_tokens + self.num_new_tokens

    @property
    def decodes(self) -> bool:
        """Whether the piece has one new token."""
        return self.num_new_tokens == 1

    def part(self, past: int, stop: int) -> Piece:
        """Return the work from `past` to `stop` tokens in the row."""
        ids, first = self.token_ids, self.num_past_tokens
        return Piece(
            self.slot,
            self.row,
            past,
            stop - past,
            None if ids is None else ids[past - first : stop - first],
            self.samples and stop == self.num_tokens,
            tuple([each for each in self.checkpoints if past < each[0] <= stop]),
            num_drafted=self.num_drafted if stop == self.num_tokens else 0,
        )


def packing_order(pieces: Sequence[Piece]) -> list[int]:
    """Return indices of pieces: decodes, one-token beginnings, beginnings, continued prompts."""
    kinds = [
        (each.num_new_tokens > 1, bool(each.num_past_tokens) == (each.num_new_tokens > 1))
        for each in pieces
    ]
    return sorted(range(len(pieces)), key=kinds.__getitem__)


def cut_at_chunks(
    pieces: Sequence[Piece], chunks: Collection[int]
) -> tuple[list[int], list[Piece]]:
    """Cut pieces where chunks of these numbers of tokens end; parts and their piece's index."""
    found: list[tuple[int, Piece]] = []
    for index, piece in enumerate(pieces):
        past, end = piece.num_past_tokens, piece.num_tokens
        ends = {at for each in chunks for at in range((past // each + 1) * each, end, each)}
        for stop in (*sorted(ends), end):
            found.append((index, piece.part(past, stop)))
            past = stop
    return [index for index, _ in found], [part for _, part in found]


#: FlashAttention-2 refuses to append to views with fewer tokens than query heads per key head.
_SHORTEST_VIEW_TOKENS = 256


def pinned(num_integers: int, device: torch.device) -> tuple[torch.Tensor, np.ndarray]:
    """Allocate host memory for asynchronous copies to `device`, with its numpy view."""
    host = torch.empty(num_integers, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host, host.numpy()


@dataclass(frozen=True)
class PackedStep:
    """A step of any kind, on the device; vectors are `int64`."""

    token_ids: torch.Tensor  # `[T]`; -1 if a token is on the device already.
    positions: torch.Tensor  # `[T]`.
    decode_slots: torch.Tensor  # `[num_decode]`: slots of the tokens on the device.
    ends: torch.Tensor  # `[samples]`: offsets of the tokens to sample from.
    parts: StepParts


def pack(pieces: Sequence[Piece], capacities: set[int], device: torch.device) -> PackedStep:
    """Send a step of pieces in `packing_order` to the device in one copy."""
    columns = [(at.slot, at.row, at.num_past_tokens, at.num_new_tokens) for at in pieces]
    slots, rows, past, new = np.array(columns, np.int32).T
    num_tokens, count = past + new, len(pieces)
    starts = np.zeros(count + 1, np.int32)
    np.cumsum(new, out=starts[1:])
    num_decode = int(np.count_nonzero(new == 1))
    first_later = num_decode + int(np.count_nonzero(past[num_decode:] == 0))
    token_ids = np.full(starts[-1], -1, np.int32)
    for piece, start in zip(pieces, starts.tolist(), strict=False):
        if piece.token_ids is not None:
            token_ids[start : start + piece.num_new_tokens] = piece.token_ids
    arrays = (
        token_ids,
        np.arange(starts[-1], dtype=np.int32) + np.repeat(past - starts[:-1], new),
        slots[:num_decode],
        _sampled(pieces, starts),
        rows,
        num_tokens,
        past,
        starts,
        starts[num_decode:] - num_decode,
        starts[first_later:] - starts[first_later],
    )
    sizes = [len(each) for each in arrays]
    host, flat = pinned(sum(sizes), device)
    np.concatenate(arrays, out=flat)
    sent = torch.split(host.to(device, non_blocking=True), sizes)
    ids, positions, decode_slots, ends = [each.long() for each in sent[:4]]
    on_device = sent[4:7]

    def part(first: int, end: int, query_starts: torch.Tensor) -> dict[int, AttentionBatch]:
        """Return pieces `[first, end)`, if any, as a batch for each row capacity."""
        if first == end:
            return {}
        row_indices, lengths, past_tokens = [each[first:end] for each in on_device]
        longest = max(_SHORTEST_VIEW_TOKENS, int(num_tokens[first:end].max()))
        starts, most = query_starts[: end - first + 1], int(new[first:end].max())
        vectors = row_indices, lengths, starts
        whole = AttentionBatch(*vectors, most, longest, 0, past_tokens=past_tokens)
        return batches(capacities, whole)

    parts = StepParts(
        num_decode,
        int(starts[first_later]) - num_decode,
        everything=part(0, count, sent[7]),
        decode=part(0, num_decode, sent[7]) if num_decode < count else {},
        beginnings=part(num_decode, first_later, sent[8]),
        continued=part(first_later, count, sent[9]),
        prompts=part(num_decode, count, sent[8]),
    )
    return PackedStep(ids, positions, decode_slots, ends, parts)


def _sampled(pieces: Sequence[Piece], starts: Any) -> Any:
    ends = starts[1:][[piece.samples for piece in pieces]] - 1
    numbers = [piece.num_drafted + 1 for piece in pieces if piece.samples]
    if len(ends) == sum(numbers):
        return ends
    # A drafting piece's rows are those of its last tokens, in order.
    back = np.concatenate([np.arange(1 - each, 1, dtype=np.int32) for each in numbers])
    return np.repeat(ends, numbers) + back


# ---- logits --------------------------------------------------------------------------------------

#: Numbers of parts to cut a row into: the first that divides it is used.
_PARTS = (64, 48, 32, 24, 16, 8)


def likeliest(logits: torch.Tensor, parts: int | None = None) -> torch.Tensor:
    """Return the argmax `[n] int64` of each row; in parts on CUDA, to fill the device."""
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
    """An output head divided by columns among ranks, padded; every call is made by all ranks."""

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
    pieces: Sequence[int]  # `[n]`: indices of those pieces; of a drafting one, once per row.
    token_ids: torch.Tensor | None = None  # `[n]`: their argmax, if stored in `last_tokens`.
    head: HeadInParts | None = None  # The divided head; None if `kept` is complete.

    @cached_property
    def logits(self) -> torch.Tensor:
        """`[n, vocabulary]`; gathered at the first access, by all ranks or none."""
        return self.kept if self.head is None else self.head.whole(self.kept)
