"""The work of one row in a step, and the packing of a step into one copy to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from ..attention import AttentionBatch
from ..attention.packed import Beginnings
from .row_attention import StepParts

# ---- piece ---------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """The work of one row in a step.

    Attributes:
        slot: Index into `Stepper.last_tokens`; distinct within a step.
        row: Row in the cache, grown to `num_tokens` plus the over-read before the step.
        num_past_tokens: Tokens whose keys and values are in the row.
        num_new_tokens: Tokens of this step.
        token_ids: The new tokens, on the host; None for the one token in the slot.
        samples: Whether the logits of the last token are needed: not for a prompt's early chunks,
            nor for recomputed tokens.
    """

    slot: int
    row: int
    num_past_tokens: int
    num_new_tokens: int
    token_ids: Sequence[int] | None
    samples: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens in the row after the step."""
        return self.num_past_tokens + self.num_new_tokens

    @property
    def decodes(self) -> bool:
        """Whether the piece has one new token."""
        return self.num_new_tokens == 1

    @property
    def kind(self) -> int:
        """0 for decodes, 1 for prompts without past tokens, 2 for continued prompts."""
        if self.num_new_tokens == 1:
            return 0
        return 2 if self.num_past_tokens else 1


def packing_order(pieces: Sequence[Piece]) -> list[int]:
    """Return the indices of pieces by kind: decodes, beginnings, continued prompts."""
    return sorted(range(len(pieces)), key=lambda at: pieces[at].kind)


# ---- packing -------------------------------------------------------------------------------------

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
    new = [piece.num_new_tokens for piece in pieces]
    starts = [0, *accumulate(new)]
    total, count = starts[-1], len(pieces)
    num_decode = sum(piece.decodes for piece in pieces)
    first_later = next((at for at in range(count) if pieces[at].kind == 2), count)
    sampling = [at for at in range(count) if pieces[at].samples]
    sizes = [
        total,
        total,
        count,
        count,
        count,
        count + 1,
        count - num_decode + 1,
        count - first_later + 1,
        count,
        len(sampling),
    ]
    bounds = [0, *accumulate(sizes)]
    host, flat = pinned(bounds[-1], device)
    cut = [slice(*pair) for pair in pairwise(bounds)]
    _fill_tokens(flat[cut[0]], flat[cut[1]], pieces, starts)
    flat[cut[2]] = [piece.row for piece in pieces]
    flat[cut[3]] = [piece.num_tokens for piece in pieces]
    flat[cut[4]] = [piece.num_past_tokens for piece in pieces]
    flat[cut[5]] = starts
    flat[cut[6]] = [each - num_decode for each in starts[num_decode:]]
    flat[cut[7]] = [each - starts[first_later] for each in starts[first_later:]]
    flat[cut[8]] = [piece.slot for piece in pieces]
    flat[cut[9]] = [starts[at + 1] - 1 for at in sampling]
    on_device = host.to(device, non_blocking=True)
    sent = [on_device[each] for each in cut]
    wide = {at: sent[at].long() for at in (0, 1, 8, 9)}
    vectors = _Vectors(sent[2], sent[3], sent[4], pieces, capacities)
    num_first = starts[first_later] - num_decode
    return PackedStep(
        token_ids=wide[0],
        positions=wide[1],
        decode_slots=wide[8][:num_decode],
        ends=wide[9],
        parts=StepParts(
            num_decode_tokens=num_decode,
            num_beginning_tokens=num_first,
            everything=vectors.batches(0, count, sent[5]),
            decode=vectors.batches(0, num_decode, sent[5]) if num_decode else None,
            beginnings=Beginnings(
                sent[6][: first_later - num_decode + 1], max(new[num_decode:first_later])
            )
            if num_first
            else None,
            continued=vectors.batches(first_later, count, sent[7])
            if num_first and first_later < count
            else None,
            prompts=vectors.batches(num_decode, count, sent[6]) if num_decode < count else None,
        ),
    )


def _fill_tokens(
    token_ids: np.ndarray, positions: np.ndarray, pieces: Sequence[Piece], starts: Sequence[int]
) -> None:
    for piece, start in zip(pieces, starts, strict=False):
        end = start + piece.num_new_tokens
        token_ids[start:end] = -1 if piece.token_ids is None else piece.token_ids
        positions[start:end] = np.arange(piece.num_past_tokens, piece.num_tokens)


@dataclass(frozen=True)
class _Vectors:
    """A step's vectors on the device, with its pieces on the host."""

    rows: torch.Tensor
    num_tokens: torch.Tensor
    tokens_before: torch.Tensor
    pieces: Sequence[Piece]
    capacities: set[int]

    def batches(
        self, start: int, end: int, query_starts: torch.Tensor
    ) -> dict[int, AttentionBatch]:
        """Return pieces `[start, end)` as a batch for each row capacity."""
        chosen = self.pieces[start:end]
        longest = max(piece.num_tokens for piece in chosen)
        made = {}
        for capacity in self.capacities:
            batch = made[capacity] = AttentionBatch(
                row_indices=self.rows[start:end],
                num_tokens=self.num_tokens[start:end],
                query_starts=query_starts[: end - start + 1],
                max_query_tokens=max(piece.num_new_tokens for piece in chosen),
                max_num_tokens=min(max(_SHORTEST_VIEW_TOKENS, longest), capacity),
                row_tokens=capacity,
            )
            vars(batch)["tokens_before"] = self.tokens_before[start:end]
        return made
