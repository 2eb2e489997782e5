"""Log-probabilities of prompts: forward passes that return the logits of all tokens."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

import torch

from ..step import Piece, Stepper
from ..step.piece import StepLogits, packing_order
from .request import TokenLogprobs
from .sampler import SampledTokens, with_logprobs

#: Tokens of a pass, whose logits take 64 MiB for 128k entries in bfloat16, and rows of logits whose
#: log-probabilities are computed at once, in some 200 MiB.
_PASS_TOKENS, _ROWS = 256, 64
#: By slot: the number of alternatives that are wanted, and the prompt.
Wishes = Mapping[int, tuple[int, Sequence[int]]]


class Span(NamedTuple):
    """Rows of one piece in a pass; the first `num_told` have a next token in the prompt."""

    piece: int
    num_rows: int
    num_told: int
    num_logprobs: int


class Scores(NamedTuple):
    """Log-probabilities of the next tokens of a pass, in order of its spans."""

    tokens: SampledTokens
    spans: Sequence[Span]

    def entries(self) -> Iterator[tuple[int, list[TokenLogprobs]]]:
        """Yield the index of each piece with its entries; call it once they are on the host."""
        rows = zip(self.tokens.token_ids.tolist(), self.tokens.rows(), strict=True)
        for at, num_rows, num_told, most in self.spans:
            told = list(islice(rows, num_rows))[:num_told]
            entries = [
                TokenLogprobs(token_id, value, dict(zip(ids[:most], top[:most], strict=True)))
                for token_id, (value, ids, top) in told
            ]
            yield at, entries


def score(
    stepper: Stepper, pieces: Mapping[int, Piece], wishes: Wishes
) -> tuple[StepLogits, list[Scores]]:
    """Run pieces of prompts by their index; return the logits to sample from, and the scores."""
    for cache in stepper.caches:
        cache.note_stream()
    scores: list[Scores] = []
    ends: dict[int, torch.Tensor] = {}
    for group in _passes(pieces, stepper.chunk_sizes):
        group = [group[at] for at in packing_order([part for _, part in group])]
        follow: list[int] = []
        spans: list[Span] = []
        for at, part in group:
            most, prompt = wishes[part.slot]
            told = prompt[part.num_past_tokens + 1 : part.num_tokens + 1]
            spans.append(Span(at, part.num_new_tokens, len(told), most))
            follow += [*told, *([0] * (part.num_new_tokens - len(told)))]
        keep = torch.arange(len(follow), device=stepper.device)
        logits = stepper.run_eagerly([part for _, part in group], keep=keep)
        most = max(span.num_logprobs for span in spans)
        scores.append(Scores(_told(logits, follow, most), spans))
        for (at, part), end in zip(group, accumulate(each.num_rows for each in spans), strict=True):
            if part.samples:
                ends[at] = logits[end - 1 : end].clone()  # The others are freed.
    return StepLogits(torch.cat([logits[:0], *ends.values()]), list(ends)), scores


def _passes(
    pieces: Mapping[int, Piece], chunk_sizes: Collection[int]
) -> Iterator[list[tuple[int, Piece]]]:
    """Divide pieces into passes of at most `_PASS_TOKENS`; no part of a piece crosses a chunk."""
    group: list[tuple[int, Piece]] = []
    room = _PASS_TOKENS
    for at, piece in pieces.items():
        past, end = piece.num_past_tokens, piece.num_tokens
        while past < end:
            stop = min(past + room, end, *[(past // each + 1) * each for each in chunk_sizes])
            group.append((at, piece.part(past, stop)))
            past, room = stop, room - (stop - past)
            if past < end or not room:
                yield group
                group, room = [], _PASS_TOKENS
    if group:
        yield group


def _told(logits: torch.Tensor, follow: Sequence[int], most: int) -> SampledTokens:
    ids = torch.tensor(follow).to(logits.device, non_blocking=True)
    num_logits = logits.shape[1]  # An embedding may have more rows.
    found = []
    for at in range(0, len(follow), _ROWS):
        some = ids[at : at + _ROWS]
        known = some.clamp(max=num_logits - 1)
        best = with_logprobs(known, logits[at : at + _ROWS], min(most, num_logits))
        assert best.logprobs is not None
        logprobs = best.logprobs.masked_fill(some >= num_logits, -math.inf)
        found.append((some, logprobs, best.top_token_ids, best.top_logprobs))
    return SampledTokens(*map(torch.cat, zip(*found, strict=True)))
