"""Sampled tokens on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import InternalError
from ..request import TokenLogprobs
from ..sampler import SampledTokens
from .base import StepResult


class PendingTokens:
    """Sampled tokens on their way to the host. Implements `PendingStep`.

    Args:
        parts: What was sampled, in order.
        num_logprobs: Per token, how many log-probabilities to report; None for none.
        histories: Per token, the list to append it to, or None.
        order: Which of them comes first, second, … in the result.
    """

    def __init__(
        self,
        parts: Sequence[SampledTokens],
        num_logprobs: Sequence[int | None],
        histories: Sequence[list[int] | None],
        order: Sequence[int],
    ):
        self._order = order
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

    @property
    def has_ended(self) -> bool:
        """See `PendingStep`."""
        try:
            return self._ready is None or self._ready.query()
        except RuntimeError:  # What went wrong on the device is for who waits.
            return True

    def wait(self) -> None:
        """See `PendingStep`."""
        if self._ready is not None:
            self._ready.synchronize()

    def result(self) -> StepResult:
        """See `PendingStep`."""
        self.wait()
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
        return StepResult(
            [token_ids[at] for at in self._order], [logprobs[at] for at in self._order]
        )


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
