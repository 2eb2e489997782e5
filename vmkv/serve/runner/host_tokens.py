"""Requests whose next token needs the host: those with transformers' logits processors.

A processor is called with all tokens of its request, so the host must have read the last one; the
engine does not run ahead of such a request. Others in the same step are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..params import SamplingParams
from .base import SlotError


class HostTokens:
    """The tokens of the slots that have logits processors.

    Args:
        agree: The largest of all ranks' values of a number.
    """

    def __init__(self, agree: Callable[[int], int] = int) -> None:
        self._agree = agree
        self._slots: dict[int, tuple[SamplingParams, list[int]]] = {}

    def set_slot(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
    ) -> None:
        """A request with these tokens begins, or goes on, in `slot`."""
        if params.needs_host_tokens:
            self._slots[slot] = (params, [*prompt_token_ids, *output_token_ids])
        else:
            self._slots.pop(slot, None)

    def concerns(self, slots: Sequence[int]) -> bool:
        """Whether any of `slots` has a processor."""
        return not self._slots.keys().isdisjoint(slots)

    def of(self, slot: int) -> list[int] | None:
        """The slot's tokens, to append to what the host reads; None where nobody asks."""
        return self._slots[slot][1] if slot in self._slots else None

    def process(self, logits: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        """`logits [n, vocabulary]` of `slots`, processed where one has processors.

        Returns:
            The same tensor, or a changed copy of it.

        Raises:
            VMKVError: A processor failed here or on another rank; all ranks raise a `SlotError`.

        Cost: an agreement of the ranks, some 100 µs, where a slot has processors.
        """
        if not self.concerns(slots):
            return logits
        processed = logits.float().clone()
        failed_at, failure = -1, None
        for at, slot in enumerate(slots):
            if slot in self._slots:
                params, token_ids = self._slots[slot]
                input_ids = torch.tensor([token_ids], device=logits.device)
                scores = processed[at : at + 1]
                try:
                    for processor in params.logits_processors:
                        scores = processor(input_ids, scores)
                    processed[at : at + 1] = scores
                except Exception as error:  # noqa: BLE001  # raised once all ranks know of it
                    failed_at, failure = at, error
                    break
        agreed_at = self._agree(failed_at)
        if agreed_at >= 0:
            cause = failure if agreed_at == failed_at else None
            raise SlotError(slots[agreed_at], cause or RuntimeError("on another rank")) from cause
        return processed
