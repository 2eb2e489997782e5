"""What comes of requests: each new token is taken, put into text, and may be the last."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .detokenize import Detokenizer
from .observer import EngineObserver, RequestRecord
from .request import FinishReason, Request, TokenLogprobs


class Outcomes:
    """Turns tokens into what requests have so far.

    Args:
        tokenizer: For text; None for tokens alone.
        end_tokens: The model's end-of-sequence tokens, which are no `stop_reason`.
        updated: Called when something of a request is new, its end included.
        observer: Who is told about first tokens and ends.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_tokens: frozenset[int],
        updated: Callable[[Request], None],
        observer: EngineObserver | None,
    ):
        self.end_tokens = end_tokens
        self._tokenizer = tokenizer
        self._updated = updated
        self._observer = observer
        self._detokenizers: dict[int, Detokenizer] = {}

    def begin(self, request: Request) -> None:
        """A request arrives."""
        if self._tokenizer is not None and request.params.detokenize:
            self._detokenizers[request.request_id] = Detokenizer(
                self._tokenizer, request.prompt_token_ids, request.params
            )

    def forget(self, request: Request) -> None:
        """It was not accepted after all."""
        self._detokenizers.pop(request.request_id, None)

    def accept(
        self, request: Request, token_id: int, logprobs: TokenLogprobs | None
    ) -> FinishReason | None:
        """Take a request's next token; returns why the request ends, if it does."""
        if logprobs is not None:
            request.logprobs.append(logprobs)
        # Last: other threads look for what is said of it.
        request.output_token_ids.append(token_id)
        num_tokens = len(request.output_token_ids)
        if num_tokens == 1:
            request.first_token_s = time.perf_counter()
            if self._observer is not None:
                wait_s = request.first_token_s - request.arrived_s
                self._observer.first_token(request.request_id, wait_s)
        reason = self._stop(request, token_id, num_tokens)
        self._updated(request)
        return reason

    def _stop(self, request: Request, token_id: int, num_tokens: int) -> FinishReason | None:
        params = request.params
        if token_id in params.stop_token_ids and num_tokens >= params.min_tokens:
            # Its text is not the answer's.
            request.stop_reason = None if token_id in self.end_tokens else token_id
            return FinishReason.STOP
        detokenizer = self._detokenizers.get(request.request_id)
        if detokenizer is not None:
            stop = detokenizer.append(token_id)
            request.texts.append(detokenizer.take_text())
            if stop is not None:
                request.stop_reason = stop
                return FinishReason.STOP
        is_last = params.max_tokens is not None and num_tokens >= params.max_tokens
        return FinishReason.LENGTH if is_last else None

    def ended(self, request: Request, reason: FinishReason, error: Exception | None) -> None:
        """A request has ended and holds nothing any more."""
        detokenizer = self._detokenizers.pop(request.request_id, None)
        if detokenizer is not None:
            try:
                detokenizer.finish()
            except Exception as late:  # noqa: BLE001  # the tokenizer's; nobody else's request ends
                reason, error = FinishReason.ERROR, error or late
            request.texts.append(detokenizer.take_text())
        request.error = error
        request.finish_reason = reason  # Last: other threads take it for the end of changes.
        self._updated(request)
        if self._observer is not None:
            self._observer.request_finished(
                RequestRecord(
                    request_id=request.request_id,
                    arrival_s=request.arrived_s,
                    start_s=request.started_s or None,
                    first_token_s=request.first_token_s or None,
                    end_s=time.perf_counter(),
                    num_prompt_tokens=len(request.prompt_token_ids),
                    num_output_tokens=len(request.output_token_ids),
                    finish_reason=str(reason),
                    num_cached_tokens=request.num_cached_tokens,
                )
            )
