"""What a caller holds of a request: its outputs so far, and the right to cancel it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .request import CompletionOutput, Request, RequestOutput


class RequestHandle:
    """A request, with all samples of its prompt. Made by `Engine.add`.

    Args:
        requests: Its samples, in order.
        prompt: The prompt's text, where it was text.
        step: Runs a step of the engine.
        cancel: Ends its samples.

    Attributes:
        requests: As given.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        prompt: str | None,
        *,
        step: Callable[[], None],
        cancel: Callable[[RequestHandle], None],
    ):
        self._prompt = prompt
        self._step = step
        self._cancel = cancel
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
        first = self.requests[0]
        errors = [each.error for each in self.requests if each.error is not None]
        return RequestOutput(
            request_id=first.request_id,
            prompt=self._prompt,
            prompt_token_ids=tuple(first.prompt_token_ids),
            outputs=[_completion(index, each) for index, each in enumerate(self.requests)],
            num_cached_tokens=first.num_cached_tokens,
            error=errors[0] if errors else None,
        )

    def cancel(self) -> None:
        """End the request where it is. Idempotent. From the engine's thread only."""
        self._cancel(self)

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
            self._step()

    def __repr__(self) -> str:
        states = ", ".join(str(each.finish_reason or "unfinished") for each in self.requests)
        return f"RequestHandle({self.request_id}: {states})"


def _completion(index: int, request: Request) -> CompletionOutput:
    # The engine's thread sets the reason last and only ever appends, so what is read after the
    # reason is complete if there is one; and log-probabilities come before their tokens.
    reason = request.finish_reason
    token_ids = tuple(request.output_token_ids)
    wants_logprobs = request.params.logprobs is not None
    return CompletionOutput(
        index=index,
        token_ids=token_ids,
        text="".join(request.texts),
        logprobs=tuple(request.logprobs[: len(token_ids)]) if wants_logprobs else None,
        finish_reason=reason,
        stop_reason=request.stop_reason if reason is not None else None,
    )
