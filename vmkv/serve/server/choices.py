"""From an engine's outputs to the JSON of OpenAI's answers, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..request import CompletionOutput, FinishReason, RequestOutput, TokenLogprobs
from .errors import ApiError, failed
from .tokens import Tokens


@dataclass(frozen=True)
class Delta:
    """What is new in one choice.

    Attributes:
        index: The choice.
        is_first: Whether nothing of it was sent before.
        text: Its new text.
        logprobs: Its new tokens' log-probabilities; None where they were not asked for.
        offset: Where the new tokens' text begins in the choice's.
        finish_reason: `stop` or `length`, when it has ended.
    """

    index: int
    is_first: bool
    text: str
    logprobs: Sequence[TokenLogprobs] | None
    offset: int
    finish_reason: str | None


class _Sent:
    """How much of one choice was sent."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.offset = 0
        self.has_begun = False
        self.has_ended = False


class Progress:
    """How far each choice of an answer is.

    Args:
        num_prompts: Prompts of the request; their samples are numbered through.
        num_samples: Samples per prompt.
        tokens: Tokens' texts, for the offsets of log-probabilities.
    """

    def __init__(self, num_prompts: int, num_samples: int, tokens: Tokens):
        self._num_samples = num_samples
        self._tokens = tokens
        self._sent = [_Sent() for _ in range(num_prompts * num_samples)]
        self._prompt_tokens = [0] * num_prompts
        self._cached_tokens = [0] * num_prompts

    def advance(self, prompt_index: int, output: RequestOutput) -> Iterator[Delta]:
        """What there is to say about `output`, which is new of its prompt.

        Raises `ApiError`: a sample ended in an error.
        """
        self._prompt_tokens[prompt_index] = len(output.prompt_token_ids)
        self._cached_tokens[prompt_index] = output.num_cached_tokens
        for sample in output.outputs:
            check_sample(sample, output.error)
            delta = self._advance_sample(prompt_index * self._num_samples + sample.index, sample)
            if delta is not None:
                yield delta

    def _advance_sample(self, index: int, sample: CompletionOutput) -> Delta | None:
        sent = self._sent[index]
        sent.num_tokens += len(sample.token_ids)
        if sent.has_ended or not (sample.text or sample.logprobs or sample.is_finished):
            return None
        finish_reason = str(sample.finish_reason) if sample.finish_reason is not None else None
        delta = Delta(
            index, not sent.has_begun, sample.text, sample.logprobs, sent.offset, finish_reason
        )
        for each in sample.logprobs or ():
            sent.offset += len(self._tokens[each.token_id].text)
        sent.has_begun, sent.has_ended = True, sample.is_finished
        return delta

    def usage(self) -> dict[str, Any]:
        """OpenAI's token counts."""
        num_prompt, num_output = sum(self._prompt_tokens), sum(s.num_tokens for s in self._sent)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens)},
        }


def check_sample(sample: CompletionOutput, error: Exception | None) -> None:
    """Raise `ApiError` unless the sample runs or has ended well."""
    if sample.finish_reason is FinishReason.ERROR:
        raise failed(error or RuntimeError("the engine gave no reason"))
    if sample.finish_reason is FinishReason.CANCELLED:
        raise ApiError(
            503,
            "the server cancelled this request; it is probably shutting down",
            kind="server_error",
            code="cancelled",
        )


class CompletionForm:
    """The answer of `/v1/completions`."""

    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, tokens: Tokens):
        self._tokens = tokens

    def whole(self, delta: Delta) -> dict[str, Any]:
        """A choice of a whole answer."""
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """A choice of a chunk: looks the same."""
        return self.whole(delta)

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        tokens = [self._tokens[each.token_id].text for each in delta.logprobs]
        offsets, offset = [], delta.offset
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [each.logprob for each in delta.logprobs],
            "top_logprobs": [
                {self._tokens[token].text: logprob for token, logprob in each.top.items()}
                for each in delta.logprobs
            ],
            "text_offset": offsets,
        }


class ChatForm:
    """The answer of `/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokens: Tokens):
        self._tokens = tokens

    def whole(self, delta: Delta) -> dict[str, Any]:
        """A choice of a whole answer."""
        return {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """A choice of a chunk; the first one says who speaks."""
        content: dict[str, Any] = {"role": "assistant", "content": ""} if delta.is_first else {}
        if delta.text:
            content["content"] = delta.text
        return {
            "index": delta.index,
            "delta": content,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        return {
            "content": [
                {
                    **self._token(each.token_id, each.logprob),
                    "top_logprobs": [self._token(*item) for item in each.top.items()],
                }
                for each in delta.logprobs
            ],
            "refusal": None,
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self._tokens[token_id]
        return {
            "token": text,
            "logprob": logprob,
            "bytes": None if raw is None else list(raw),
        }


Form = CompletionForm | ChatForm
