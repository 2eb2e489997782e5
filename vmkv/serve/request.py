"""A request: its prompt, what came of it so far, and how it ended."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .params import SamplingParams

# ---- request -------------------------------------------------------------------------------------


class RequestState(enum.Enum):
    """Where a request is: waiting, swapped and running in any order, and finished for good."""

    WAITING = "waiting"  # Not begun, or preempted and to be computed again.
    SWAPPED = "swapped"  # Preempted; its keys and values are in host memory.
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(str, enum.Enum):
    """Why a request has ended."""

    STOP = "stop"  # A stop token or a stop text.
    LENGTH = "length"  # max_tokens, or the end of its row.
    CANCELLED = "cancelled"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position of the output, before temperature and filters.

    Attributes:
        token_id: The chosen token.
        logprob: Its log-probability.
        top: The likeliest tokens, likeliest first, and their log-probabilities.
    """

    token_id: int
    logprob: float
    top: Mapping[int, float]


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a prompt, so far.

    Attributes:
        index: Which of the `n` samples.
        token_ids: Its tokens; a stop token that ended it is the last.
        text: Its text, where there is a tokenizer; never half a character. While the request
            runs, text that could still turn out to begin a stop text is held back.
        logprobs: One entry per token, where they were asked for.
        finish_reason: None while it runs.
        stop_reason: The stop token or text that ended it; None otherwise, and for the model's
            own end of sequence.
    """

    index: int
    token_ids: Sequence[int]
    text: str = ""
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """What came of a prompt so far: everything, or of a stream what is new; see `joined`.

    Attributes:
        request_id: Its number.
        prompt: The prompt's text, where it was text.
        prompt_token_ids: The prompt.
        outputs: One per sample, in order.
        num_cached_tokens: Prompt tokens whose keys and values were found in the prefix cache. The
            samples share the prompt, which counts once: what they share among them is not cached.
        error: What went wrong, where `finish_reason` is "error".
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    num_cached_tokens: int = 0
    error: Exception | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return all(each.is_finished for each in self.outputs)


def joined(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """What all outputs of a stream come to; at least one."""
    samples = [
        replace(
            samples[-1],
            token_ids=[token for each in samples for token in each.token_ids],
            text="".join(each.text for each in samples),
            logprobs=None
            if samples[-1].logprobs is None
            else [entry for each in samples for entry in each.logprobs or ()],
        )
        for samples in zip(*(output.outputs for output in outputs), strict=True)
    ]
    first, last = outputs[0], outputs[-1]
    return replace(
        last, prompt=first.prompt, prompt_token_ids=first.prompt_token_ids, outputs=samples
    )


@dataclass(eq=False)
class Request:
    """One sample of one prompt, as the engine keeps it. Changed by the engine's thread only.

    Attributes:
        request_id: Unique in its engine; ascends in order of arrival.
        prompt_token_ids: The prompt. Packed by the engine (see `packed_prompt`), so that prefixes
            are looked for and steps are filled without a look at each token.
        params: Resolved: `stop_token_ids` holds the model's own, `seed` and `max_tokens` are set.
        priority: Lower runs first, as in vLLM.
        max_total_tokens: Prompt and output at most.
        output_token_ids: Tokens so far.
        logprobs: One entry per token, or empty.
        texts: Text so far that may be shown, in pieces.
        finish_reason: Why it has ended; None before.
        stop_reason: What it stopped at.
        error: What went wrong.
        tenant: The owner of its keys and values; see `KVCache.open`.
        num_cached_tokens: Prompt tokens found in the prefix cache; 0 for every sample of a prompt
            but the first.
        num_preemptions: How often it gave way to others.
        arrived_s, started_s, first_token_s: When, by `time.perf_counter`; 0.0 before.
        rank: Who goes first: the smallest. Never changes; see `Scheduler`.
        state: Where it is.
        slot: While it runs.
        num_computed: Tokens whose keys and values are computed, or will be by submitted steps.
        num_unread: Tokens of submitted steps that have not been read.
        is_on_device: Whether its last token is in its slot on the device.
    """

    request_id: int
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    max_total_tokens: int = 0
    tenant: str | None = None
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    arrived_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0
    rank: tuple[int, int] = (0, 0)
    state: RequestState = RequestState.WAITING
    slot: int = -1
    num_computed: int = 0
    num_unread: int = 0
    is_on_device: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, those that are still being computed included."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_unread

    @property
    def num_left(self) -> int:
        """Tokens to compute before another can be sampled; 0 when all wanted ones exist."""
        # `num_tokens` at sight: each plan asks every request.
        num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_unread
        return 0 if num_tokens >= self.max_total_tokens else num_tokens - self.num_computed

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    def tokens(self, start: int, end: int) -> Sequence[int]:
        """Tokens `[start, end)` of prompt and output together."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        head = list(self.prompt_token_ids[start:end]) if start < num_prompt else []
        return head + self.output_token_ids[max(0, start - num_prompt) : max(0, end - num_prompt)]


# ---- handle --------------------------------------------------------------------------------------


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
