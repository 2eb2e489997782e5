"""Steps run eagerly through the unmodified model: any device, any model that can be served.

All chunks are packed into one forward pass, as in `vmkv.generate`, and sampled as one batch.
With `deterministic`, each chunk has a pass and a draw of its own, so that what a request computes
has the same shapes whoever runs beside it, and thereby the same roundings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import InternalError
from ...hf.ragged import Piece
from ..params import SamplingParams
from ..request import TokenLogprobs
from ..sampler import SampledTokens, Sampler
from ..served_rows import ServedRows
from .base import Chunk, SlotError, StepResult


class EagerRunner:
    """Implements `Runner`.

    Args:
        rows: The model with its rows.
        max_num_seqs: Slots.
        vocab_size: Columns of the logits.
        deterministic: Run every chunk by itself.
    """

    def __init__(
        self, rows: ServedRows, max_num_seqs: int, vocab_size: int, *, deterministic: bool = False
    ):
        self._rows = rows
        self._device = rows.cache.device
        self._deterministic = deterministic
        self._sampler = Sampler(max_num_seqs, vocab_size, self._device)
        self._params = [SamplingParams()] * max_num_seqs
        #: The token each slot sampled last.
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=self._device)
        # Of slots with logits processors: all tokens, which those want to see.
        self._tokens: dict[int, list[int]] = {}
        self._undo = contextlib.ExitStack()
        self._undo.enter_context(rows.attending())

    def set_slot(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """See `Runner`."""
        self._sampler.set_slot(slot, params, prompt_token_ids, output_token_ids)
        self._params[slot] = params
        self._tokens.pop(slot, None)
        if params.logits_processors:
            self._tokens[slot] = [*prompt_token_ids, *output_token_ids]

    @torch.inference_mode()
    def submit(self, chunks: Sequence[Chunk]) -> PendingTokens:
        """See `Runner`."""
        self._rows.cache.note_stream()
        groups = [[chunk] for chunk in chunks] if self._deterministic else [list(chunks)]
        parts = [self._run(group) for group in groups]
        sampling = [chunk for chunk in chunks if chunk.samples]
        if not sampling:
            return PendingTokens([], [], [])
        sampled = [self._sample(part, logits) for part, logits in zip(groups, parts, strict=True)]
        done = [each for each in sampled if each is not None]
        slots = torch.tensor([chunk.slot for chunk in sampling]).to(self._device)
        tokens = torch.cat([each.token_ids for each in done])
        pending = PendingTokens(
            done,
            [self._params[chunk.slot].logprobs for chunk in sampling],
            [self._tokens.get(chunk.slot) for chunk in sampling],
        )
        self._last_tokens.index_copy_(0, slots, tokens)
        return pending

    def close(self) -> None:
        """See `Runner`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._undo.close()

    def _run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Logits `[chunks that sample, vocabulary]`."""
        host_tokens: list[int] = []
        places, slots = [], []  # Of tokens that are on the device.
        for chunk in chunks:
            if chunk.token_ids is None:
                places.append(len(host_tokens))
                slots.append(chunk.slot)
                host_tokens.append(0)
            else:
                host_tokens += chunk.token_ids
        tokens = torch.tensor(host_tokens).to(self._device, non_blocking=True)
        if places:
            at = torch.tensor([places, slots]).to(self._device, non_blocking=True)
            tokens.index_copy_(0, at[0], self._last_tokens[at[1]])
        pieces = [Piece(chunk.row, chunk.num_past_tokens, chunk.num_new_tokens) for chunk in chunks]
        logits = self._rows.forward(pieces, tokens)
        kept = [at for at, chunk in enumerate(chunks) if chunk.samples]
        if len(kept) < len(chunks):
            logits = logits[kept]
        return logits.to(self._device)

    def _sample(self, chunks: Sequence[Chunk], logits: torch.Tensor) -> SampledTokens | None:
        slot_ids = [chunk.slot for chunk in chunks if chunk.samples]
        if not slot_ids:
            return None
        if any(slot in self._tokens for slot in slot_ids):
            logits = torch.stack(
                [self._process(slot, row) for slot, row in zip(slot_ids, logits, strict=True)]
            )
        slots = torch.tensor(slot_ids).to(self._device, non_blocking=True)
        return self._sampler.sample(logits, slots, slot_ids)

    def _process(self, slot: int, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[vocabulary]` after the slot's own logits processors."""
        tokens = self._tokens.get(slot)
        scores = logits[None].float()
        if tokens is not None:
            input_ids = torch.tensor([tokens], device=self._device)
            try:
                for processor in self._params[slot].logits_processors:
                    scores = processor(input_ids, scores)
            except Exception as error:
                raise SlotError(slot, error) from error
        return scores[0]


class PendingTokens:
    """Sampled tokens on their way to the host. Implements `PendingStep`.

    Args:
        parts: What was sampled, in order.
        num_logprobs: Per token, how many log-probabilities to report; None for none.
        histories: Per token, the list to append it to, or None.
    """

    def __init__(
        self,
        parts: Sequence[SampledTokens],
        num_logprobs: Sequence[int | None],
        histories: Sequence[list[int] | None],
    ):
        self._num_logprobs = num_logprobs
        self._histories = histories
        self._ready: Any = None
        self._parts = [
            SampledTokens(
                self._to_host(part.token_ids),
                *(
                    None if each is None else self._to_host(each)
                    for each in (part.logprobs, part.top_token_ids, part.top_logprobs)
                ),
            )
            for part in parts
        ]
        if parts and parts[0].token_ids.is_cuda:
            # Reading a tensor would wait for what was submitted after it as well.
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    @staticmethod
    def _to_host(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def result(self) -> StepResult:
        """See `PendingStep`."""
        if self._ready is not None:
            self._ready.synchronize()
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for part in self._parts:
            chosen = part.token_ids.tolist()
            wanted = self._num_logprobs[len(token_ids) : len(token_ids) + len(chosen)]
            logprobs += _logprobs(part, chosen, wanted)
            token_ids += chosen
        for history, token_id in zip(self._histories, token_ids, strict=True):
            if history is not None:
                history.append(token_id)
        return StepResult(token_ids, logprobs)


def _logprobs(
    part: SampledTokens, token_ids: Sequence[int], wanted: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    if all(each is None for each in wanted):
        return [None] * len(token_ids)
    if part.logprobs is None or part.top_token_ids is None or part.top_logprobs is None:
        raise InternalError("a slot asked for log-probabilities, and the sampler made none")
    values = part.logprobs.tolist()
    columns = zip(part.top_token_ids.tolist(), part.top_logprobs.tolist(), strict=True)
    found: list[TokenLogprobs | None] = []
    for at, (ids, top) in enumerate(columns):
        count = wanted[at]
        if count is None:
            found.append(None)
        else:
            best = dict(zip(ids[:count], top[:count], strict=True))
            found.append(TokenLogprobs(token_ids[at], values[at], best))
    return found
