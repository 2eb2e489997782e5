"""What one row does in a step."""

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
    """What one row does in a step.

    Attributes:
        slot: Where its last token is on the device: `Stepper.last_tokens`. Its own in a step.
        row: Its row in the cache, grown to `num_tokens` and the over-read before the step.
        num_past_tokens: Tokens whose keys and values are in the row.
        num_new_tokens: Tokens of this step.
        token_ids: The new tokens, from the host; None for the one that is in the slot (then
            `num_new_tokens` is 1).
        samples: Whether the logits of the last token are wanted. False for the early chunks of a
            prompt, and for tokens that are only computed again.
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
        """Whether it is one query over its row."""
        return self.num_new_tokens == 1

    @property
    def kind(self) -> int:
        """0 for those that decode, 1 for those without a past, 2 for what continues one."""
        if self.num_new_tokens == 1:
            return 0
        return 2 if self.num_past_tokens else 1


def packing_order(pieces: Sequence[Piece]) -> list[int]:
    """Pieces as they are packed: those that decode, those that begin, those that continue."""
    return sorted(range(len(pieces)), key=lambda at: pieces[at].kind)


# ---- packing -------------------------------------------------------------------------------------

#: FlashAttention-2 appends to no view shorter than the query heads that share a key head.
_SHORTEST_VIEW_TOKENS = 256


def pinned(num_integers: int, device: torch.device) -> tuple[torch.Tensor, np.ndarray]:
    """Host memory that copies to `device` need not wait for, and numpy's view of it."""
    host = torch.empty(num_integers, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host, host.numpy()


@dataclass(frozen=True)
class PackedStep:
    """A step of any kind, on the device.

    Attributes:
        token_ids: `[T] int64`; -1 where a token is on the device already.
        positions: `[T] int64`.
        decode_slots: `[num_decode] int64`, whose tokens those are.
        ends: `[samples] int64`, where the tokens to sample from lie.
        parts: The step as attention sees it.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    decode_slots: torch.Tensor
    ends: torch.Tensor
    parts: StepParts


def pack(pieces: Sequence[Piece], capacities: set[int], device: torch.device) -> PackedStep:
    """Send a step to the device: one copy.

    Args:
        pieces: In the order that `packing_order` gives.
        capacities: Of rows, as `row_capacities` says.
        device: Where to.
    """
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
    """A step's vectors on the device, and what the host knows of them."""

    rows: torch.Tensor
    num_tokens: torch.Tensor
    tokens_before: torch.Tensor
    pieces: Sequence[Piece]
    capacities: set[int]

    def batches(
        self, start: int, end: int, query_starts: torch.Tensor
    ) -> dict[int, AttentionBatch]:
        """Chunks `[start, end)` as a batch, by capacity of a row."""
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
