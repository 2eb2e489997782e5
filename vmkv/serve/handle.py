"""What a caller holds of a request: its outputs so far, and the right to cancel it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .request import CompletionOutput, Request, RequestOutput

if TYPE_CHECKING:
    from .engine import Engine


class RequestHandle:
    """A request, with all samples of its prompt. Made by `Engine.add`.

    Attributes:
        requests: Its samples, in order.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], prompt: str | None):
        self._engine = engine
        self._prompt = prompt
        self.requests = tuple(requests)

    @property
    def request_id(self) -> int:
        """The number the engine gave it."""
        return self.requests[0].request_id

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return all(each.is_finished for each in self.requests)

    def output(self) -> RequestOutput:
        """Everything so far. May be called from another thread than the engine's."""
        return output_of(self.requests, self._prompt)

    def cancel(self) -> None:
        """End the request where it is. Idempotent. From the engine's thread only."""
        self._engine.cancel(self)

    def __iter__(self) -> Iterator[RequestOutput]:
        """Outputs as they grow, the last one finished; runs the engine as far as needed."""
        seen = -1
        while True:
            is_finished = self.is_finished
            num_tokens = sum(len(each.output_token_ids) for each in self.requests)
            if num_tokens > seen or is_finished:
                seen = num_tokens
                if num_tokens or is_finished:
                    yield self.output()
            if is_finished:
                return
            self._engine.step()

    def __repr__(self) -> str:
        states = ", ".join(str(each.finish_reason or "unfinished") for each in self.requests)
        return f"RequestHandle({self.request_id}: {states})"


def output_of(requests: Sequence[Request], prompt: str | None) -> RequestOutput:
    """Everything so far of the samples of a prompt."""
    first = requests[0]
    outputs = [_completion(index, each) for index, each in enumerate(requests)]
    errors = [each.error for each in requests if each.error is not None]
    return RequestOutput(
        request_id=first.request_id,
        prompt=prompt,
        prompt_token_ids=first.prompt_token_ids,
        outputs=outputs,
        num_cached_tokens=first.num_cached_tokens,
        error=errors[0] if errors else None,
    )


def _completion(index: int, request: Request) -> CompletionOutput:
    # The engine's thread sets the reason last and only ever appends, so what is read after the
    # reason is complete if there is one.
    reason = request.finish_reason
    token_ids = tuple(request.output_token_ids)
    wants_logprobs = request.params.logprobs is not None
    return CompletionOutput(
        index=index,
        token_ids=token_ids,
        text=request.text,
        logprobs=tuple(request.logprobs[: len(token_ids)]) if wants_logprobs else None,
        finish_reason=reason,
        stop_reason=request.stop_reason if reason is not None else None,
    )
