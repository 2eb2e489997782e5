"""What ragged generation has said so far: choosing tokens, and when a sequence ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import compat


class TokenState:
    """The tokens so far, padded as transformers' processors and criteria expect them.

    Args:
        input_ids: `[B, T]`, left-padded prompts.
        lengths: Tokens of each prompt.
        processors: Logits processors, or None.
        config: The generation config.
        max_length: End each sequence at this many tokens of its own.

    Attributes:
        ids: `[B, T + new]`; padding follows where a sequence has ended.
        live: Which sequences have not ended.
        last_tokens: `[live]`, their last tokens.
        is_steady: Whether as many live as in the step before; whoever decodes says so.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        lengths: Sequence[int],
        processors: Any,
        config: Any,
        max_length: int | None,
    ):
        self.ids = input_ids
        self.live = list(range(len(lengths)))
        self._live_at: torch.Tensor | None = None  # The same on the device; None while all live.
        self.last_tokens = input_ids[:, -1]
        self.is_steady = False
        self._prompt_width = int(input_ids.shape[1])
        self._pads = [self._prompt_width - length for length in lengths]
        self._ends: list[int | None] = [None] * len(lengths)
        self._processors = processors
        self._max_length = max_length
        self._do_sample = bool(config.do_sample)
        pad = getattr(config, "_pad_token_tensor", None)
        self._pad = 0 if pad is None else int(pad.flatten()[0])

    def length(self, row: int) -> int:
        """Tokens of a live sequence, without padding."""
        return int(self.ids.shape[1]) - self._pads[row]

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token of every sequence: `[B]`; padding for those that have ended.

        Args:
            logits: `[live, vocabulary]`, in the order of `live`.
        """
        scores = self._process(logits.to(dtype=torch.float32, device=self.ids.device))
        if self._do_sample:
            chosen = torch.multinomial(scores.softmax(-1), 1).squeeze(1)
        else:
            chosen = scores.argmax(-1)
        self.last_tokens = tokens = chosen
        if self._live_at is not None:
            tokens = torch.full_like(self.ids[:, 0], self._pad)
            tokens[self._live_at] = chosen
        self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        return tokens

    def _process(self, scores: torch.Tensor) -> torch.Tensor:
        """Logits processors, on the whole padded batch.

        They are made for it: some keep a value per batch entry. One that would take padding for
        tokens that were said is called for the sequences of each length by themselves.
        """
        if not self._processors:
            return scores
        if self._live_at is not None:
            live_scores = scores
            scores = live_scores.new_zeros(len(self._pads), live_scores.shape[1])
            scores[self._live_at] = live_scores
        for processor in self._processors:
            if compat.sees_padding(processor):
                for pad in set(self._pads):
                    rows = [row for row, its_pad in enumerate(self._pads) if its_pad == pad]
                    scores[rows] = processor(self.ids[rows, pad:], scores[rows])
            else:
                scores = processor(self.ids, scores)
        return scores if self._live_at is None else scores[self._live_at]

    def stop(self, criteria: Any) -> list[int]:
        """End the sequences that the criteria end; returns them. Asks the device once."""
        is_done = criteria(self.ids, None).tolist()
        # No sequence is longer than the tensor is wide.
        if self._max_length is not None and self.ids.shape[1] >= self._max_length:
            is_done = [
                done or self.length(row) >= self._max_length for row, done in enumerate(is_done)
            ]
        if not any(is_done):
            return []
        ended = [row for row in self.live if is_done[row]]
        if not ended:  # Those that ended before may go on looking as if they did.
            return []
        for row in ended:
            self._ends[row] = self.ids.shape[1]
        kept = [at for at, row in enumerate(self.live) if not is_done[row]]
        self.last_tokens = self.last_tokens[kept]
        self.live = [self.live[at] for at in kept]
        self._live_at = torch.tensor(self.live, device=self.ids.device)
        self.is_steady = False
        return ended

    def prompts(self) -> list[list[int]]:
        """The prompts without padding. Asks the device once."""
        padded = self.ids[:, : self._prompt_width].tolist()
        return [row[pad:] for row, pad in zip(padded, self._pads, strict=True)]

    def said(self, rows: Sequence[int]) -> list[list[int]]:
        """What these sequences, live or just ended, have said so far. Asks the device once."""
        said: list[list[int]] = self.ids[list(rows), self._prompt_width :].tolist()
        return said

    def as_lists(self) -> list[list[int]]:
        """Each sequence without padding on either side."""
        return [
            row[pad:end]
            for row, pad, end in zip(self.ids.tolist(), self._pads, self._ends, strict=True)
        ]
