"""The tokens of ragged generation: choosing the next ones, and ending sequences.

The batch is left-padded, as processors and criteria expect. transformers' own, if they read
tokens, get each prompt as it was prepared (`prepared.py`), without padding before it. The
caller's own get the whole padded batch, as in `model.generate`: they may keep state of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from . import compat
from .prepared import Prepared


class TokenState:
    """The tokens of all sequences so far.

    `ids` are `[B, T + new]`: left-padded prompts `[B, T]`, generated tokens, and padding where a
    sequence has ended. `live` lists the sequences that have not.
    """

    def __init__(
        self, input_ids: torch.Tensor, lengths: Sequence[int], prepared: Sequence[Prepared]
    ):
        self.ids = input_ids
        self.live = list(range(len(lengths)))
        self._live_at: torch.Tensor | None = None  # `live` on the device; None while all live.
        self._prompt_width = int(input_ids.shape[1])
        self._pads = [self._prompt_width - length for length in lengths]
        self._ends: list[int | None] = [None] * len(lengths)
        self._parts = [_Part(each, self._prompt_width, input_ids.device) for each in prepared]
        self._do_sample = bool(prepared[0].config.do_sample)
        self._pad = compat.pad_token(prepared[0].config)

    def length(self, row: int) -> int:
        """Return the number of tokens of a live sequence, without padding."""
        return int(self.ids.shape[1]) - self._pads[row]

    @property
    def max_tokens(self) -> int | None:
        """The length that the longest sequence may reach, its prompt included; None for any."""
        limits = [part.max_tokens for part in self._parts]
        return None if None in limits else max(each for each in limits if each is not None)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose every sequence's next token, `[B]`; `logits` are `[live, vocabulary]`."""
        scores = self._process(logits.to(self.ids.device, torch.float32, copy=True))
        if self._do_sample:
            chosen = torch.multinomial(scores.softmax(-1), 1).squeeze(1)
        else:
            chosen = scores.argmax(-1)
        tokens = chosen
        if self._live_at is not None:
            tokens = torch.full_like(self.ids[:, 0], self._pad)
            tokens[self._live_at] = chosen
        self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        return tokens

    def _process(self, scores: torch.Tensor) -> torch.Tensor:
        """Apply the logits processors to all sequences, ended ones included."""
        if not self._parts[0].processors:
            return scores
        if self._live_at is not None:
            live_scores = scores
            scores = live_scores.new_zeros(len(self._pads), live_scores.shape[1])
            scores[self._live_at] = live_scores
        for at, processor in enumerate(self._parts[0].processors):
            if not compat.reads_prompt(processor):
                scores = processor(self.ids, scores)
            else:
                scores = self._by_part(_Part.process, at, scores)
        return scores if self._live_at is None else scores[self._live_at]

    def _by_part(
        self,
        call: Callable[[_Part, int, torch.Tensor, torch.Tensor], torch.Tensor],
        at: int,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Return `call(part, at, ids, values)` of each part with its rows, put together: `[B, …]`.

        Parts that have ended as a whole are skipped, and keep their values.
        """
        if len(self._parts) == 1:
            (part,) = self._parts
            return call(part, at, self.ids[:, part.pad :], values)
        values = values.clone()
        for part in self._parts:
            if part.is_live(self._ends):
                ids = self.ids[part.at, part.pad :]
                values[part.at] = call(part, at, ids, values[part.at])
        return values

    def stop(self) -> list[int]:
        """End sequences by the criteria and return them; waits for the device once, or never."""
        is_done = self._is_done()
        if not any(is_done):
            return []
        ended = [row for row in self.live if is_done[row]]
        if not ended:  # Criteria may still report sequences that ended before.
            return []
        for row in ended:
            self._ends[row] = self.ids.shape[1]
        self.live = [row for row in self.live if not is_done[row]]
        self._live_at = torch.tensor(self.live, device=self.ids.device)
        return ended

    def _is_done(self) -> list[bool]:
        """Return for every sequence whether a stopping criterion ends it."""
        is_done: torch.Tensor | None = None
        for at, criterion in enumerate(self._parts[0].criteria):
            if compat.is_length_limit(criterion):
                continue  # Lengths are known here, without the device.
            if is_done is None:
                is_done = torch.zeros(len(self._pads), dtype=torch.bool, device=self.ids.device)
            if not compat.reads_prompt(criterion):
                is_done = is_done | criterion(self.ids, None)
            else:
                is_done = self._by_part(_Part.stop, at, is_done)
        done: list[bool] = [False] * len(self._pads) if is_done is None else is_done.tolist()
        for part in self._parts:
            if part.max_tokens is not None and self.ids.shape[1] - part.pad >= part.max_tokens:
                for row in part.rows:
                    done[row] = True
        return done

    def prompts(self) -> list[list[int]]:
        """Return the prompts without padding; waits for the device once."""
        padded = self.ids[:, : self._prompt_width].tolist()
        return [row[pad:] for row, pad in zip(padded, self._pads, strict=True)]

    def generated(self, rows: Sequence[int]) -> list[list[int]]:
        """Return new tokens of sequences, live or just ended; waits for the device once."""
        tokens: list[list[int]] = self.ids[list(rows), self._prompt_width :].tolist()
        return tokens

    def as_lists(self) -> list[list[int]]:
        """Return each sequence without padding on either side."""
        return [
            row[pad:end]
            for row, pad, end in zip(self.ids.tolist(), self._pads, self._ends, strict=True)
        ]


class _Part:
    """Rows of the batch that share processors and criteria.

    `at` are the rows on the device; `pad` is how many leading tokens are padding for all of them.
    """

    def __init__(self, prepared: Prepared, width: int, device: torch.device):
        self.rows = prepared.rows
        self.at = torch.tensor(prepared.rows, device=device)
        self.pad = width - prepared.num_tokens
        self.processors = prepared.processors
        self.criteria = prepared.criteria
        self.max_tokens = prepared.max_tokens

    def process(self, at: int, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores after the processor with index `at`."""
        processed: torch.Tensor = self.processors[at](ids, scores)
        return processed

    def stop(self, at: int, ids: torch.Tensor, is_done: torch.Tensor) -> torch.Tensor:
        """Return which rows have ended after the criterion with index `at`."""
        stopped: torch.Tensor = is_done | self.criteria[at](ids, None)
        return stopped

    def is_live(self, ends: Sequence[int | None]) -> bool:
        return any(ends[row] is None for row in self.rows)
