"""What one row does in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
