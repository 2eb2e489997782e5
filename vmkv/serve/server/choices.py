r"""Converts an engine's outputs to the choices of OpenAI's answers, whole or in chunks.

A token of a log-probability may hold part of a character. Its bytes are exact, so that a client can
join them; its text then is `bytes:\xe2\x80`, in OpenAI's notation, because decoding would give �
for all such tokens.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

from transformers.convert_slow_tokenizer import bytes_to_unicode

from ...hf import compat
from ..params import SamplingParams
from ..request import CompletionOutput, FinishReason, RequestOutput, TokenLogprobs
from .errors import ApiError, api_error
from .prompts import TextPrompt
from .reply import NewParser, ReplyDelta, ReplyParser, ToolCallDelta
from .schema import ChatRequest, CompletionRequest, StreamOptions

#: Log-probabilities encoded before other tasks run: a few ms of work.
SLICE_LOGPROBS = 1024
#: Bytes before a token's text that no token has: tokenizers drop or add spaces.
_GAP_BYTES = 4
#: Reported for a token that the model cannot choose, as JSON has no infinity; vLLM's number.
_LEAST_LOGPROB = -9999.0
_NULL_LOGPROBS = b'"logprobs":null'
#: OpenAI's mark of the end of a stream.
_DONE = b"data: [DONE]\n\n"


def encoded(value: Any) -> bytes:
    """Encode a value as compact JSON, as starlette's `JSONResponse` does."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def compact(payload: Mapping[str, Any]) -> bytes:
    """Encode a value as ASCII: what it repeats of a request may hold half a surrogate pair."""
    return json.dumps(payload, allow_nan=False, separators=(",", ":")).encode()


def event(payload: Mapping[str, Any]) -> bytes:
    """Encode a server-sent event; its `type`, if it has one, is its name."""
    name = f"event: {payload['type']}\n".encode() if "type" in payload else b""
    return name + b"data: " + compact(payload) + b"\n\n"


# ---- tokens --------------------------------------------------------------------------------------

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_UNKNOWN = "\ufffd"
#: GPT-2's table from characters to bytes.
_BYTE_LEVEL = {char: byte for byte, char in bytes_to_unicode().items()}


class TokenText(NamedTuple):
    """A token's text, and its bytes where the tokenizer reveals them."""

    text: str
    raw: bytes | None


class Tokens(dict[int, TokenText]):
    """Caches the `TokenText` of each token of a transformers tokenizer."""

    def __init__(self, tokenizer: Any):
        super().__init__()
        self._tokenizer = tokenizer
        self._decode = compat.decoder(tokenizer)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens together, special ones included."""
        return self._decode(list(token_ids), False)

    def __missing__(self, token_id: int) -> TokenText:
        text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        entry = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if entry.startswith("\u2581") and not text.startswith(" "):
            text = f" {text}"  # SentencePiece drops the space at a text's beginning.
        raw: bytes | None = text.encode()
        if _UNKNOWN in text:
            raw = _bytes_of(entry)
            if raw is not None:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        self[token_id] = TokenText(text, raw)
        return self[token_id]


def _bytes_of(token: str) -> bytes | None:
    by_name = _BYTE_TOKEN.fullmatch(token)
    if by_name:
        return bytes.fromhex(by_name.group(1))
    table = _BYTE_LEVEL
    return bytes(map(table.__getitem__, token)) if table.keys() >= set(token) else None


# ---- prompts within an answer -------------------------------------------------------------------


class Places:
    """Finds where each of a text's `num_left` tokens begins, by their bytes."""

    def __init__(self, text: str, num_left: int):
        self.text = text
        self.num_left = num_left
        self._bytes = text.encode()
        self._at_byte = self._at_char = 0

    def next(self, token: bytes) -> int:
        """Return the character at which the next token begins."""
        self.num_left -= 1
        found = self._bytes.find(token, self._at_byte, self._at_byte + len(token) + _GAP_BYTES)
        if found < 0:
            return self._at_char
        begin = self._at_char + num_chars(self._bytes[self._at_byte : found])
        self._at_byte = found + len(token)
        self._at_char = begin + num_chars(self._bytes[found : self._at_byte])
        return begin


def num_chars(part: bytes) -> int:
    """Count the characters that begin in a part of a text in UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in part)


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(logprob, _LEAST_LOGPROB)


def told(entry: TokenLogprobs, count: int | None) -> Iterable[tuple[int, float]]:
    """Return the token and the `count` likeliest, each once, with their log-probabilities."""
    pairs = {entry.token_id: entry.logprob} | dict(list(entry.top.items())[:count])
    return [(token_id, finite(logprob)) for token_id, logprob in pairs.items()]


def prompt_entry(
    entry: TokenLogprobs | None, count: int, text_of: Callable[[int], str]
) -> dict[str, Any] | None:
    """Return a token's entry in vLLM's `prompt_logprobs`: the token, then the `count` likeliest."""
    if entry is None:
        return None
    found, ranks = {}, {token_id: rank for rank, token_id in enumerate(entry.top, 1)}
    for token_id, logprob in told(entry, count):
        rank = ranks.get(token_id)  # None beyond the likeliest.
        text = text_of(token_id)
        found[str(token_id)] = {"logprob": logprob, "rank": rank, "decoded_token": text}
    return found


# ---- formats -------------------------------------------------------------------------------------


class Form:
    """Writes an answer, whole or as events; tracks what was sent of each choice.

    Choices are numbered across prompts. `new_parser` makes the parser of each choice of a chat,
    None if the text is the content.
    """

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        tokens: Tokens,
        body: CompletionRequest | ChatRequest,
        params: SamplingParams,
        new_parser: NewParser | None = None,
        *,
        model_name: str = "",
        answer_id: str = "",
    ):
        self._tokens, self._body, self._params = tokens, body, params
        self._new_parser, self._options = new_parser, body.stream_options or StreamOptions()
        self._head: dict[str, Any] = {
            "id": f"{self.id_prefix}{answer_id}",
            "object": self.chunk_object,
            "created": int(time.time()),
            "model": model_name,
        }
        self._choices: defaultdict[int, WholeChoice] = defaultdict(lambda: WholeChoice(self))
        self._num_samples, self.reports_tokens = params.n, bool(body.return_token_ids)
        self._echoes = isinstance(body, CompletionRequest) and bool(body.echo)
        self._prompt_ids: dict[int, Sequence[int]] = {}
        #: Encoded members of `prompt_logprobs` by prompt, and places in echoed texts by choice.
        self._prompt_logprobs: dict[int, bytearray] = {}
        self._places: dict[int, Places] = {}
        self._num_tokens = 0
        #: Tokens by choice that no delta has told of.
        self._num_new: Counter[int] = Counter()
        #: `time.monotonic` of the first output, and why samples have ended, in their order.
        self.first_s: float | None = None
        self.finish_reasons: list[str] = []
        self._cached_tokens: Counter[int] = Counter()
        #: Choices whose first chunk was made, choices that have ended, and per choice the position
        #: of the next token's text.
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._offsets: Counter[int] = Counter()

    def advance(self, prompt_index: int, output: RequestOutput) -> Iterator[CompletionOutput]:
        """Yield the deltas of a prompt's next output; raises `ApiError` if a sample has failed."""
        self.first_s = time.monotonic() if self.first_s is None else self.first_s
        self._cached_tokens[prompt_index] = output.num_cached_tokens
        self._prompt_ids[prompt_index] = output.prompt_token_ids
        for sample in output.outputs:
            if sample.finish_reason is not None:
                self.finish_reasons.append(sample.finish_reason.value)
            if sample.finish_reason is FinishReason.ERROR:
                raise api_error(output.error or RuntimeError("the engine gave no reason"))
            if sample.finish_reason is FinishReason.CANCELLED:
                message = "request cancelled: its model is put to sleep, or the server ends"
                raise ApiError(503, message, code="cancelled")
            index = prompt_index * self._num_samples + sample.index
            if self._echoes:
                yield from self._echoed(index, output, with_logprobs=sample.logprobs is not None)
            if self._echoes and self._body.max_tokens == 0:  # The one token computed is dropped.
                reason = sample.finish_reason and FinishReason.LENGTH
                sample = CompletionOutput(sample.index, (), finish_reason=reason)
            self._num_tokens += len(sample.token_ids)
            self._num_new[index] += len(sample.token_ids)
            told = sample.token_ids if self.reports_tokens else ()
            has_news = sample.text or sample.logprobs or sample.is_finished or told
            if has_news and index not in self._ended:
                yield from _slices(replace(sample, index=index))
            if sample.is_finished:
                self._ended.add(index)

    def _echoed(
        self, index: int, output: RequestOutput, *, with_logprobs: bool
    ) -> Iterator[CompletionOutput]:
        entries = output.prompt_logprobs if with_logprobs else None
        text = ""
        if index not in self._places:
            given = self._body.prompts[index // self._num_samples]
            if isinstance(given, TextPrompt) and self._body.truncate_prompt_tokens is None:
                text = given.text
            else:
                text = self._tokens.decode(output.prompt_token_ids)
            self._places[index] = Places(text, len(output.prompt_token_ids))
        if text or entries:
            # The first entry is None.
            yield from _slices(CompletionOutput(index, (), text, entries))  # type: ignore[arg-type]

    def encode_prompt(self, prompt_index: int, output: RequestOutput) -> Iterator[None]:
        """Encode new members of a prompt's `prompt_logprobs`, in slices, if they are wanted."""
        count, entries = self._body.prompt_logprobs, output.prompt_logprobs or ()
        if count is None:
            return
        known = self._prompt_logprobs.setdefault(prompt_index, bytearray(b"[]"))
        size = max(1, SLICE_LOGPROBS // (1 + count))
        for at in range(0, len(entries), size):
            part = [
                prompt_entry(each, count, lambda token_id: self._tokens[token_id].text)
                for each in entries[at : at + size]
            ]
            known[-1:] = (b"," if len(known) > 2 else b"") + encoded(part)[1:]
            yield

    def prompt_logprobs(self, prompt_index: int) -> list[bytes | bytearray]:
        """Return the member `prompt_logprobs` as JSON, in parts; none if it is not wanted."""
        known = self._prompt_logprobs.get(prompt_index)
        return [] if known is None else [b',"prompt_logprobs":', known]

    def tail(self, index: int | None = None) -> list[bytes | bytearray]:
        """Return more members of a whole answer, or of one of its choices, as JSON in parts."""
        return []

    def chunk_members(self) -> dict[str, Any]:
        """Return members of the next chunk of an answer, beside its choices."""
        return {}

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's token counts."""
        num_prompt = sum(map(len, self._prompt_ids.values()))
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": num_prompt + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens.total()},
        }

    def choice(self, delta: CompletionOutput, *, is_chunk: bool = False) -> dict[str, Any] | None:
        """Return a choice of a chunk, None if it adds nothing, or of a whole answer."""
        tokens = {"token_ids": list(delta.token_ids)} if self.reports_tokens else {}
        return {
            "index": delta.index,
            **self._text(delta, is_chunk),
            **tokens,
            "logprobs": self.logprobs(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,  # As in vLLM.
        }

    def logprobs(self, delta: CompletionOutput) -> dict[str, Any] | None:
        """Return the log-probabilities of a choice; None if none were requested."""
        return None if delta.logprobs is None else self._logprobs(delta.index, delta.logprobs)

    def _text(self, delta: CompletionOutput, is_chunk: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        raise NotImplementedError

    # ---- writing --------------------------------------------------------------------------

    def add(self, delta: CompletionOutput) -> None:
        """Append a delta to a whole answer."""
        self._choices[delta.index].add(delta)

    async def whole(self) -> deque[bytes | bytearray]:
        """Return the answer as JSON, in parts."""
        head = encoded({**self._head, "object": self.whole_object})
        parts: deque[bytes | bytearray] = deque([head[:-1] + b',"choices":['])
        for index in sorted(self._choices):
            parts.extend(self._choices.pop(index).parts())
            parts.append(b"," if self._choices else b'],"usage":')
            await asyncio.sleep(0)
        parts.append(encoded(self.usage()))
        parts += [*self.tail(), b"}"]
        return parts

    def events(self, delta: CompletionOutput) -> bytes:
        """Return the events that tell a delta; empty if there is nothing to tell yet."""
        members = self.chunk_members()  # The first chunk of a choice has more.
        if self._options.include_usage:  # Every chunk has the field, only the last one a value.
            members["usage"] = self.usage() if self._options.continuous_usage_stats else None
        choice = self.choice(delta, is_chunk=True)
        return b"" if choice is None else event({**self._head, "choices": [choice], **members})

    def end(self) -> bytes:
        """Return the last events: the usage, if it was asked for, and the mark of the end."""
        usage = {**self._head, "choices": [], "usage": self.usage()}
        return (event(usage) if self._options.include_usage else b"") + _DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the last events of an answer that fails after its first event."""
        return event(error.body) + _DONE


def _slices(delta: CompletionOutput) -> Iterator[CompletionOutput]:
    """Divide a delta with many log-probabilities; the first part has the text."""
    most = max((1 + len(each.top) for each in delta.logprobs or () if each), default=1)
    num_entries = max(1, SLICE_LOGPROBS // most)
    while delta.logprobs is not None and len(delta.logprobs) > num_entries:
        yield replace(delta, logprobs=delta.logprobs[:num_entries], finish_reason=None)
        delta = replace(delta, text="", token_ids=(), logprobs=delta.logprobs[num_entries:])
    yield delta


class CompletionForm(Form):
    """Format of `/v1/completions` answers."""

    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def tail(self, index: int | None = None) -> list[bytes | bytearray]:
        """Return `prompt_logprobs`, in each choice."""
        return [] if index is None else self.prompt_logprobs(index // self._num_samples)

    def _text(self, delta: CompletionOutput, is_chunk: bool) -> dict[str, Any]:
        if not self.reports_tokens or delta.index in self._begun:
            return {"text": delta.text}
        self._begun.add(delta.index)
        prompt = self._prompt_ids[delta.index // self._num_samples]
        return {"text": delta.text, "prompt_token_ids": list(prompt)}

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        prompt = self._prompt_ids.get(index // self._num_samples, ())
        tokens = [self._tokens[prompt[0] if each is None else each.token_id] for each in entries]
        places = self._places.get(index)
        is_prompt = places is not None and places.num_left > 0
        if places is not None and is_prompt:
            offsets = [places.next(text.encode() if raw is None else raw) for text, raw in tokens]
            self._offsets[index] = len(places.text)
        else:
            lengths = (len(text) if raw is None else num_chars(raw) for text, raw in tokens)
            *offsets, self._offsets[index] = accumulate(lengths, initial=self._offsets[index])
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [each and finite(each.logprob) for each in entries],
            "top_logprobs": [each and self._top(each) for each in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        pairs = told(entry, self._params.logprobs)
        return {self._tokens[token_id].text: value for token_id, value in pairs}


class ChatForm(Form):
    """Format of `/v1/chat/completions` answers; a choice's first chunk has the role."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, *its: Any, **names: Any):
        super().__init__(*its, **names)
        self._parsers: dict[int, ReplyParser] = {}
        #: Pieces of the last tool call's arguments, of choices with tool calls.
        self._arguments: dict[int, list[str]] = {}
        self._num_reasoning = 0.0

    def reply(self, delta: CompletionOutput) -> ReplyDelta:
        """Return what a delta adds to its choice; call it once for each delta, in order."""
        if self._new_parser is None:
            return ReplyDelta(content=delta.text)
        if delta.index not in self._parsers:
            self._parsers[delta.index] = self._new_parser(self._prompt_ids[0])
        reply = self._parsers[delta.index].push(delta.text, is_last=delta.is_finished)
        num_new, num_thought = self._num_new.pop(delta.index, 0), len(reply.reasoning)
        # An answer that is not streamed is one delta: its characters say how many.
        self._num_reasoning += num_new * num_thought / max(1, num_thought, len(delta.text))
        for call in reply.tool_calls:
            if call.id is not None:
                self._arguments[delta.index] = []
            self._arguments[delta.index].append(call.arguments)
        return reply

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's token counts."""
        details = {"reasoning_tokens": round(self._num_reasoning)}
        return super().usage() | {"completion_tokens_details": details}

    def cuts_call(self, delta: CompletionOutput) -> bool:
        """Whether a stop text or stop token has ended a choice within a call's arguments."""
        try:
            json.loads("".join(self._arguments.get(delta.index, "0")))
        except (ValueError, RecursionError):
            return delta.stop_reason is not None
        return False

    def choice(self, delta: CompletionOutput, *, is_chunk: bool = False) -> dict[str, Any] | None:
        """See `Form.choice`."""
        choice = super().choice(delta, is_chunk=is_chunk)
        if self._new_parser is None or choice is None:
            return choice
        is_calling = delta.finish_reason is FinishReason.STOP and delta.index in self._arguments
        if is_calling and not self.cuts_call(delta):
            choice["finish_reason"] = "tool_calls"
        # While a parser holds text back there is nothing to say.
        news = map(choice.get, ("delta", "logprobs", "token_ids", "finish_reason"))
        return choice if any(news) or not is_chunk else None

    def tail(self, index: int | None = None) -> list[bytes | bytearray]:
        """Return `prompt_logprobs` and `prompt_token_ids`, beside the choices."""
        parts = self.prompt_logprobs(0) if index is None else []
        if index is None and self.reports_tokens:
            parts += [b',"prompt_token_ids":', encoded(list(self._prompt_ids[0]))]
        return parts

    def chunk_members(self) -> dict[str, Any]:
        """Return `prompt_token_ids`, in the first chunk."""
        if not self.reports_tokens or self._begun:
            return {}
        return {"prompt_token_ids": list(self._prompt_ids[0])}

    def _text(self, delta: CompletionOutput, is_chunk: bool) -> dict[str, Any]:
        reply = self.reply(delta)
        more: dict[str, Any] = {}
        if reply.reasoning:
            # The second name is vLLM's newer one.
            more = {"reasoning_content": reply.reasoning, "reasoning": reply.reasoning}
        if reply.tool_calls:
            more["tool_calls"] = [_tool_call(each, is_chunk) for each in reply.tool_calls]
        if not is_chunk:
            content = None if reply.tool_calls and not reply.content else reply.content
            return {"message": {"role": "assistant", "content": content, "refusal": None, **more}}
        is_first = delta.index not in self._begun
        self._begun.add(delta.index)
        first: dict[str, Any] = {"role": "assistant", "content": ""} if is_first else {}
        return {"delta": first | ({"content": reply.content} if reply.content else {}) | more}

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = [
            self._token(each.token_id, each.logprob)
            | {"top_logprobs": [self._token(*item) for item in each.top.items()]}
            for each in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self._tokens[token_id]
        data = None if raw is None else list(raw)
        return {"token": text, "logprob": finite(logprob), "bytes": data}


def _tool_call(delta: ToolCallDelta, is_chunk: bool) -> dict[str, Any]:
    function = {"arguments": delta.arguments}
    head: dict[str, Any] = {"index": delta.index} if is_chunk else {}
    if delta.id is not None:
        head |= {"id": delta.id, "type": "function"}
        function = {"name": str(delta.name), **function}
    return {**head, "function": function}


class WholeChoice:
    """Collects one choice of a whole answer; keeps its log-probabilities as encoded JSON."""

    def __init__(self, form: Form):
        self._form = form
        self._texts: list[str] = []
        self._token_ids: list[int] = []  # If they are reported.
        self._last: CompletionOutput | None = None
        # Encoded members of the choice's `logprobs`; empty if there are none.
        self._logprobs: dict[str, bytearray] = {}

    def add(self, delta: CompletionOutput) -> None:
        """Append a delta."""
        self._texts.append(delta.text)
        if self._form.reports_tokens:
            self._token_ids += delta.token_ids
        self._last = replace(delta, logprobs=None)
        for name, value in (self._form.logprobs(delta) or {}).items():
            known = self._logprobs.get(name)
            if known is None:
                self._logprobs[name] = bytearray(encoded(value))
            elif value:  # Continue a list: replace its closing bracket.
                known[-1:] = (b"," if len(known) > 2 else b"") + encoded(value)[1:]

    def parts(self) -> Iterator[bytes | bytearray]:
        """Yield the choice as JSON, in parts; at least one delta must have been added."""
        assert self._last is not None
        whole = replace(self._last, text="".join(self._texts), token_ids=self._token_ids)
        choice = encoded(self._form.choice(whole))[:-1]
        if self._logprobs:
            # Within a JSON text the quotation marks would be escaped.
            before, choice = choice.split(_NULL_LOGPROBS)
            yield before + b'"logprobs":'
            for number, (name, values) in enumerate(self._logprobs.items()):
                yield (b"," if number else b"{") + encoded(name) + b":"
                yield values
            yield b"}"
        yield choice
        yield from self._form.tail(whole.index)
        yield b"}"
