"""Requests, their outputs, and the handle that `Engine.add` returns."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, shown
from ..hf import compat
from .detokenize import Detokenizer
from .params import SamplingParams

if TYPE_CHECKING:
    from ..core.cache.block_files import Reading
    from ..core.cache.host_blocks import Loading

# ---- request -------------------------------------------------------------------------------------


class RequestState(enum.Enum):
    """State of a request; FINISHED is final."""

    WAITING = "waiting"  # Not begun, or preempted and to be recomputed.
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
    """Log-probabilities at one position, of what `EngineOptions.logprobs_mode` says.

    `top` holds the likeliest tokens, likeliest first.
    """

    token_id: int
    logprob: float
    top: Mapping[int, float]


@dataclass(frozen=True)
class CompletionOutput:
    """Output of one sample of a prompt.

    Attributes:
        index: Index of the sample, below `n`.
        token_ids: Its tokens; a stop token that ended it is the last.
        text: Its text, if there is a tokenizer; whole characters only. While the request runs, text
            that may begin a stop text is held back.
        logprobs: One entry per token, if requested.
        finish_reason: None while it runs.
        stop_reason: The stop token or text that ended it; None for the model's end of sequence.
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
    """Output of a prompt: everything so far, or in a stream the part since the last output.

    Attributes:
        request_id: Its number.
        prompt: The prompt's text, if given as text.
        prompt_token_ids: The prompt.
        outputs: One per sample, in order.
        prompt_logprobs: One entry per prompt token, None for the first, if requested. In a stream
            they come once; the first output with tokens completes them.
        num_cached_tokens: Prompt tokens found in the prefix cache, counted once for all samples.
        error: Exception behind a `finish_reason` of "error".
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: Exception | None = None

    @property
    def text(self) -> str:
        """Text of the first sample; empty without a tokenizer."""
        return self.outputs[0].text

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return all(each.is_finished for each in self.outputs)


def joined(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Concatenate the outputs of a stream, at least one."""
    samples = []
    for parts in zip(*(output.outputs for output in outputs), strict=True):
        text = "".join(each.text for each in parts)
        tokens, logprobs = _chained(parts, "token_ids"), _chained(parts, "logprobs")
        samples.append(replace(parts[-1], text=text, token_ids=tokens, logprobs=logprobs))
    last, prompt_logprobs = outputs[-1], _chained(outputs, "prompt_logprobs")
    ends: dict[str, Any] = {"num_cached_tokens": last.num_cached_tokens, "error": last.error}
    return replace(outputs[0], prompt_logprobs=prompt_logprobs, outputs=samples, **ends)


def _chained(parts: Sequence[Any], name: str) -> Any:
    columns = [getattr(each, name) for each in parts]
    return None if columns[-1] is None else [*chain.from_iterable(each or () for each in columns)]


@dataclass(eq=False)
class Request:
    """A sample of a prompt, as the engine tracks it. Changed by the engine's thread only.

    A client of the engine keeps a `Request` of its own for each sample, with the output that its
    reader has not taken yet. Times are `time.perf_counter`, 0.0 until reached.
    """

    request_id: int  # Ascends in order of arrival.
    prompt_token_ids: Sequence[int]  # Packed; see `packed_prompt`.
    params: SamplingParams  # Resolved.
    priority: int = 0
    max_total_tokens: int = 0
    tenant: str | None = None
    leader: Request | None = None  # First sample of the same prompt; None for the first itself.
    detokenizer: Detokenizer | None = None  # Makes `texts`, if they are wanted.
    matcher: Any = None  # Follows a guided request's grammar through the tokens that were read.
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    arrived_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0
    rank: tuple[float, int] = (0, 0)  # Place in the schedule, smallest first; never changes.
    state: RequestState = RequestState.WAITING
    slot: int = -1
    num_computed: int = 0  # Tokens computed, or to be computed by submitted steps.
    num_unread: int = 0  # Sampled tokens that were not read.
    is_on_device: bool = False  # Whether its slot holds the last token,
    is_set: bool = False  # and whether it holds its parameters.
    sequence: Any = None  # In the cache, if it has one; its length grows before the submission.
    num_submitted: int = 0  # Tokens in the sequence by submitted steps.
    # Step that the sequence was last grown for. None if other work on it was submitted since, such
    # as copies: a request that ends by length is not in the step that runs when its last token is
    # read.
    last_step: int | None = None
    num_sent: int = 0  # Output tokens that were sent to a client,
    num_prompt_sent: int = 0  # and entries of `prompt_logprobs`.
    num_to_load: int = 0  # Tokens of its prefix below the rows, when it was looked up.
    loading: Loading | Reading | None = None  # Of its prefix, begun while the request waits.
    has_read: bool = False  # Whether host memory has got what files hold of it.
    checkpoints: Sequence[int] = ()  # Prompt lengths after which layers' states are kept.

    @property
    def num_known(self) -> int:
        """Tokens that were read."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, including sampled ones not read yet."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_unread

    @property
    def num_left(self) -> int:
        """Tokens to compute before another can be sampled; 0 when all requested ones exist."""
        num_tokens = self.num_tokens
        return 0 if num_tokens >= self.max_total_tokens else num_tokens - self.num_computed

    def tokens(self, start: int, end: int) -> Sequence[int]:
        """Tokens `[start, end)` of prompt and output together."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        head = list(self.prompt_token_ids[start:end]) if start < num_prompt else []
        return head + self.output_token_ids[max(0, start - num_prompt) : max(0, end - num_prompt)]

    def add_text(
        self,
        token_ids: Sequence[int],
        reason: FinishReason | None = None,
        error: Exception | None = None,
    ) -> tuple[int | None, FinishReason | None, Exception | None]:
        """Add the text of new tokens, all that is left if the output ends for `reason`.

        Returns how many tokens come before a stop text's end, or None, and then why the output ends
        and its error: at a stop text, whatever else ends it, or with an error of the tokenizer.
        """
        detokenizer, end = self.detokenizer, None
        if detokenizer is None:
            return None, reason, error
        try:
            end = detokenizer.extend(token_ids, is_last=reason is not None)
        except Exception as failure:  # noqa: BLE001  # a tokenizer's, for this request alone
            self.detokenizer, reason, error = None, FinishReason.ERROR, error or failure
        self.texts.append(detokenizer.take_text())
        if end is not None:
            self.stop_reason, reason, error = detokenizer.stop, FinishReason.STOP, None
        return end, reason, error


# ---- handle --------------------------------------------------------------------------------------


class RequestHandle:
    """A request with all samples of its prompt, as returned by `Engine.add`.

    Iterating runs the engine and yields outputs as they grow, the last one finished.
    """

    def __init__(self, requests: Sequence[Request], prompt: str | None, engine: Any = None):
        self._prompt = prompt
        self._engine = engine
        self.requests = tuple(requests)

    @property
    def request_id(self) -> int:
        """Number of the request in its engine."""
        return self.requests[0].request_id

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return all([each.finish_reason is not None for each in self.requests])

    def output(self) -> RequestOutput:
        """Return everything so far. Callable from any thread."""
        first = self.requests[0]
        errors = [each.error for each in self.requests if each.error is not None]
        is_scored = first.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=first.request_id,
            prompt=self._prompt,
            prompt_token_ids=tuple(first.prompt_token_ids),
            outputs=[_completion(index, each) for index, each in enumerate(self.requests)],
            prompt_logprobs=tuple(first.prompt_logprobs) if is_scored else None,
            num_cached_tokens=first.num_cached_tokens,
            error=errors[0] if errors else None,
        )

    def cancel(self) -> None:
        """End the request. Idempotent. From the engine's thread only."""
        self._engine.cancel(self)

    def __iter__(self) -> Iterator[RequestOutput]:
        seen = 0
        while True:
            is_finished = self.is_finished
            num_tokens = sum(len(each.output_token_ids) for each in self.requests)
            if num_tokens > seen or is_finished:
                seen = num_tokens
                yield self.output()
            if is_finished:
                return
            self._engine.step()

    def __repr__(self) -> str:
        states = ", ".join(str(each.finish_reason or "unfinished") for each in self.requests)
        return f"RequestHandle({self.request_id}: {states})"


def _completion(index: int, request: Request) -> CompletionOutput:
    # The engine's thread only appends, log-probabilities before their tokens, and sets the reason
    # last: values read after a reason are complete.
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


def detokenizer_of(
    tokenizer: Any, prompt_token_ids: Sequence[int], params: SamplingParams
) -> Detokenizer | None:
    """Return a detokenizer, or None if no text can be had or is wanted."""
    has_text = tokenizer is not None and params.detokenize
    return Detokenizer(tokenizer, prompt_token_ids, params) if has_text else None


# ---- prompts -------------------------------------------------------------------------------------


def token_ids_of(prompt: str | Sequence[int] | Any, tokenizer: Any) -> tuple[int, ...]:
    """Return a prompt's token ids, given as a sequence, a one-dimensional tensor, or text.

    `ConfigError` if the prompt is text without a tokenizer, or neither text nor tokens.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ConfigError("a prompt of text needs a tokenizer: pass Engine(tokenizer=…)")
        ids = tokenizer.encode(prompt)
    else:
        ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    try:
        return tuple(ids)
    except TypeError as error:
        raise ConfigError(f"a prompt must be text or token ids, not {prompt!r}") from error


def packed_prompt(prompt: Any, tokenizer: Any, vocab_size: int) -> memoryview[int]:
    """Return a prompt's checked token ids as a view of bytes, whose slices are no copies."""
    tokens = compat.check_tokens(token_ids_of(prompt, tokenizer), vocab_size)
    return memoryview(array("q", tokens).tobytes()).cast("q")


def check_queued(priority: object, tenant: object) -> None:
    """Raise `ConfigError` unless the priority has 64 bits, and the tenant is a string or None."""
    if not isinstance(priority, int) or not -(1 << 63) <= priority < 1 << 63:
        raise ConfigError(f"priority={shown(priority)} must be an integer of 64 bits")
    if not isinstance(tenant, str | None):
        raise ConfigError(f"tenant={shown(tenant)} must be a string, or None")
