"""Converts an engine's outputs to the JSON of OpenAI's answers, whole or in chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..request import CompletionOutput, FinishReason, RequestOutput, TokenLogprobs
from .errors import ApiError, failed
from .tokens import Tokens

#: Log-probabilities encoded before other tasks run: a few ms of work.
SLICE_LOGPROBS = 1024


@dataclass(frozen=True)
class Delta:
    """New tokens of one choice, with at most `SLICE_LOGPROBS` log-probabilities.

    `offset` is the position of the new tokens' text in the choice's text; `finish_reason` is `stop`
    or `length` in the last delta.
    """

    index: int
    is_first: bool
    text: str
    logprobs: Sequence[TokenLogprobs] | None
    offset: int
    finish_reason: str | None

    @property
    def num_logprobs(self) -> int:
        """Number of log-probabilities, chosen tokens included."""
        return sum(1 + len(each.top) for each in self.logprobs or ())


class _Sent:
    def __init__(self) -> None:
        self.num_tokens = 0
        self.offset = 0
        self.has_begun = False
        self.has_ended = False


class Progress:
    """Tracks how much was sent of each choice; choices are numbered across prompts."""

    def __init__(self, num_prompts: int, num_samples: int, tokens: Tokens):
        self._num_samples = num_samples
        self._tokens = tokens
        self._sent = [_Sent() for _ in range(num_prompts * num_samples)]
        self._prompt_tokens = [0] * num_prompts
        self._cached_tokens = [0] * num_prompts

    def advance(self, prompt_index: int, output: RequestOutput) -> Iterator[Delta]:
        """Yield the deltas of a prompt's next output; raises `ApiError` if a sample has failed."""
        self._prompt_tokens[prompt_index] = len(output.prompt_token_ids)
        self._cached_tokens[prompt_index] = output.num_cached_tokens
        for sample in output.outputs:
            check_sample(sample, output.error)
            index = prompt_index * self._num_samples + sample.index
            yield from self._advance_sample(index, sample)

    def _advance_sample(self, index: int, sample: CompletionOutput) -> Iterator[Delta]:
        sent = self._sent[index]
        sent.num_tokens += len(sample.token_ids)
        if sent.has_ended or not (sample.text or sample.logprobs or sample.is_finished):
            return
        finish_reason = str(sample.finish_reason) if sample.finish_reason is not None else None
        entries, text = sample.logprobs, sample.text
        most = max((1 + len(each.top) for each in entries or ()), default=1)
        num_entries = max(1, SLICE_LOGPROBS // most)
        while entries is not None and len(entries) > num_entries:
            yield self._delta(index, text, entries[:num_entries], None)
            entries, text = entries[num_entries:], ""
        yield self._delta(index, text, entries, finish_reason)
        sent.has_ended = sample.is_finished

    def _delta(
        self,
        index: int,
        text: str,
        entries: Sequence[TokenLogprobs] | None,
        finish_reason: str | None,
    ) -> Delta:
        sent = self._sent[index]
        delta = Delta(index, not sent.has_begun, text, entries, sent.offset, finish_reason)
        sent.offset += sum(len(self._tokens[each.token_id].text) for each in entries or ())
        sent.has_begun = True
        return delta

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's token counts."""
        num_prompt, num_output = sum(self._prompt_tokens), sum(s.num_tokens for s in self._sent)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens)},
        }


def check_sample(sample: CompletionOutput, error: Exception | None) -> None:
    """Raise `ApiError` if the sample failed or was cancelled."""
    if sample.finish_reason is FinishReason.ERROR:
        raise failed(error or RuntimeError("the engine gave no reason"))
    if sample.finish_reason is FinishReason.CANCELLED:
        raise ApiError(
            503,
            "the server cancelled this request; it is probably shutting down",
            kind="server_error",
            code="cancelled",
        )


def encoded(value: Any) -> bytes:
    """Encode a value as compact JSON, as starlette's `JSONResponse` does."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class WholeChoice:
    """Collects one choice of a whole answer; keeps its log-probabilities as encoded JSON."""

    def __init__(self, form: Form):
        self._form = form
        self._texts: list[str] = []
        self._last: Delta | None = None
        # Encoded members of the choice's `logprobs`; None before the first.
        self._logprobs: dict[str, bytearray] | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self._texts.append(delta.text)
        self._last = replace(delta, logprobs=None)
        new = self._form.logprobs(delta)
        if new is None:
            return
        if self._logprobs is None:
            self._logprobs = {name: bytearray(encoded(value)) for name, value in new.items()}
            return
        for name, value in new.items():
            if value:  # Continue a list: replace its closing bracket.
                known = self._logprobs[name]
                known[-1:] = (b"," if len(known) > 2 else b"") + encoded(value)[1:]

    def parts(self) -> Iterator[bytes | bytearray]:
        """Yield the choice as JSON, in parts; at least one delta must have been added."""
        assert self._last is not None
        choice = self._form.whole(replace(self._last, text="".join(self._texts)))
        for at, (name, value) in enumerate(choice.items()):
            yield (b"," if at else b"{") + encoded(name) + b":"
            if name == "logprobs" and self._logprobs is not None:
                for number, (member, values) in enumerate(self._logprobs.items()):
                    yield (b"," if number else b"{") + encoded(member) + b":"
                    yield values
                yield b"}"
            else:
                yield encoded(value)
        yield b"}"


class CompletionForm:
    """Format of `/v1/completions` answers."""

    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, tokens: Tokens):
        self._tokens = tokens

    def whole(self, delta: Delta) -> dict[str, Any]:
        """Return a choice of a whole answer."""
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self.logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """Return a choice of a chunk, which has the same fields as a whole answer's."""
        return self.whole(delta)

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        """Return the log-probabilities of a choice; None if none were requested."""
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
    """Format of `/v1/chat/completions` answers."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokens: Tokens):
        self._tokens = tokens

    def whole(self, delta: Delta) -> dict[str, Any]:
        """Return a choice of a whole answer."""
        return {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self.logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """Return a choice of a chunk; the first chunk has the role."""
        content: dict[str, Any] = {"role": "assistant", "content": ""} if delta.is_first else {}
        if delta.text:
            content["content"] = delta.text
        return {
            "index": delta.index,
            "delta": content,
            "logprobs": self.logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        """Return the log-probabilities of a choice; None if none were requested."""
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
