"""Request bodies: OpenAI's parameters, and vLLM's names for parameters that OpenAI lacks.

`_REFUSED` parameters would change the answer. Others that are not declared are ignored, as by vLLM:
`_IGNORED` ones in silence, while the server names unknown ones in its log. pydantic checks types
and sizes, `SamplingParams` the ranges.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import PydanticSerializationError, from_json

from ...errors import ConfigError, shown
from ..params import SamplingParams, StructuredOutputs
from .errors import ApiError, invalid
from .formats import Formatted, Lenient, Listed
from .guard import REQUEST_ID
from .prompts import SYSTEMS, Prompt, TextPrompt
from .tools import TOOLS_MAX, Tool, ToolCall, ToolChoice, check_tools, served_tools

#: Parameters of OpenAI and vLLM that do not affect an answer, or not one of this server.
_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier"}
    | {"prediction", "verbosity", "truncation", "max_tool_calls"}
    | {"container", "context_management", "guided_decoding_backend", "guided_whitespace_pattern"}
    | {"spaces_between_special_tokens", "length_penalty", "mm_processor_kwargs", "vllm_xargs"}
    | {"client_metadata"}
)
#: Per refused parameter: values that have no effect, and the reason for the refusal.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "functions": (([],), "send tools, which have replaced them"),
    "function_call": (("none", "auto"), "send tool_choice, which has replaced it"),
    "suffix": (("",), "insertion is not supported"),
    "echo": ((False,), "completions echo their prompt, chats do not"),
    "use_beam_search": ((False,), "there is no beam search; use n"),
    "previous_response_id": ((), "responses are not stored; send the whole conversation as input"),
    "conversation": ((), "conversations are not stored; send the whole one as input"),
    "thread": ((), "messages are not stored; send the whole conversation, without thread"),
    "background": ((False,), "an answer is sent to the request that asks for it"),
    "top_logprobs": ((0,), "log-probabilities are reported by /v1/chat/completions"),
    "modalities": ((["text"],), "only text is generated"),
    "audio": ((), "only text is generated"),
    "web_search_options": ((), "there is no search"),
    "chat_template": ((), "the server's --chat-template replaces the model's"),
    "documents": (([],), "send them by chat_template_kwargs if the model's template has them"),
    "prompt_embeds": ((), "prompts are texts or tokens"),
    "logits_processors": (([],), "a server runs no code of its clients"),
    "return_tokens_as_token_ids": ((False,), "return_token_ids reports tokens"),
    "kv_transfer_params": ((), "keys and values are not transferred"),
}
#: Seconds for which a conversation stays cached before others of its tenant, by OpenAI's names and
#: Anthropic's; with a `prompt_cache_key` alone as long as OpenAI's "in_memory".
RETENTIONS_S = {"5m": 300, "in_memory": 600, "in-memory": 600, "1h": 3600, "24h": 24 * 3600}
#: OpenAI's default of a completion's `max_tokens`.
_COMPLETION_TOKENS = 16
#: Samples of one request, over all its prompts.
SAMPLES_MAX = 128
#: Alternatives per token.
LOGPROBS_MAX = 20
#: A line that a coding agent puts into its system message, and changes with each request: nothing
#: after it would be found in the cache. As in vLLM, the model does not see it.
_BILLING = re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE)
_NAME_END = re.compile(r"\W")
#: Larger integers are no floats.
_EXACT_MAX = 2**53


_TokenIds = Listed[int]
_TokenId = Annotated[int, Field(strict=False)]  # Keys of an object are texts.
_Stop = Annotated[str, Field(max_length=1000)]
_NumLogprobs = Annotated[int, Field(ge=0, le=LOGPROBS_MAX)]
#: Types of JSON by the annotations of `SamplingParams`; null is the default.
_JSON_TYPES: dict[Any, Any] = {
    "int": int,
    "int | None": int,
    "float": float,
    "bool": bool,
    "str | Sequence[str]": _Stop | Annotated[Listed[_Stop], Field(max_length=16)],
    "Sequence[str | Sequence[int]]": Annotated[Listed[_Stop], Field(max_length=128)],
    "Sequence[int]": Annotated[Listed[int], Field(max_length=128)],
    "Sequence[int] | None": _TokenIds,
    "Mapping[int, float]": dict[_TokenId, float],
}
#: Fields of `SamplingParams` that requests have by the same name.
_SAMPLING: dict[str, Any] = {
    each.name: (_JSON_TYPES[each.type] | None, None)
    for each in fields(SamplingParams)
    if each.type in _JSON_TYPES
    and each.name not in ("logprobs", "prompt_logprobs", "detokenize", "retention_s")
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _sort_out(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        declared: dict[str, Any] = {}
        for name, value in data.items():
            if name in cls.model_fields:
                is_whole = type(value) is float and value.is_integer() and abs(value) < _EXACT_MAX
                declared[name] = int(value) if is_whole else value
            elif name in _REFUSED:
                harmless, reason = _REFUSED[name]
                if value is not None and value not in harmless:
                    # At this code Anthropic's clients send the whole conversation.
                    code = "thread_unsupported_request" if name == "thread" else None
                    raise invalid(f"{name} is not supported here: {reason}", name, code)
            elif name not in _IGNORED:
                declared[name] = None
        tools = declared.get("tools")
        if isinstance(tools, list):
            declared["tools"], skipped = served_tools(tools)
            declared |= {f"tools: {kind}": None for kind in skipped}
        return declared


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # Token counts in every chunk, as in vLLM.
    include_obfuscation: bool | None = None  # Padding against traffic analysis; ignored.


_Sampled: Any = create_model("_Sampled", __base__=_Strict, **_SAMPLING)


class GenerationRequest(_Sampled, Formatted):  # type: ignore[misc]  # Made from a table.
    """Parameters that completions and chats share, those of `SamplingParams` among them."""

    model: str | None = None
    request_id: Annotated[str, Field(pattern=REQUEST_ID)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: _NumLogprobs | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    priority: int = 0
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options needs stream=true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise invalid(
                "prompt_logprobs are not available with stream=true; a completion that echoes its "
                "prompt streams them as logprobs",
                "prompt_logprobs",
            )
        if self.truncate_prompt_tokens == 0:
            raise invalid(
                "truncate_prompt_tokens=0 leaves no prompt: keep at least one token, or -1 for as "
                "many as the model takes",
                "truncate_prompt_tokens",
            )
        return self

    def _params(self, defaults: Mapping[str, Any] | None, **own: int | None) -> SamplingParams:
        shared = self.model_dump(include=_SAMPLING.keys() - own, exclude_none=True)
        given = {**(defaults or {}), **shared, **own, "retention_s": self._retention_s()}
        try:
            if self.form is not None:
                given["structured_outputs"] = StructuredOutputs(**self.form[1])
            return SamplingParams(**given)
        except ConfigError as error:
            raise self.explained(error) from error

    def _retention_s(self) -> int:
        default = "in_memory" if self.prompt_cache_key else ""
        return RETENTIONS_S.get(self.prompt_cache_retention or default, 0)

    def explained(self, error: ConfigError) -> ApiError:
        """Convert an error of `SamplingParams` or the engine; it begins with a parameter's name."""
        name = _NAME_END.split(str(error), maxsplit=1)[0]
        field = name
        if name == "structured_outputs":  # A forced call takes the place of another form.
            is_forced = getattr(self, "effective_tool_choice", "none") not in ("none", "auto")
            field = "tools" if is_forced or self.form is None else self.form[0]
        message = str(error).replace(f"{name}:", f"{field}:", 1)
        return invalid(message, field if field in type(self).model_fields else None)


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`."""

    prompt: (
        str
        | Annotated[Listed[str], Field(min_length=1, max_length=SAMPLES_MAX)]
        | Annotated[Listed[int], Field(min_length=1)]
        | Annotated[Listed[_TokenIds], Field(min_length=1, max_length=SAMPLES_MAX)]
    )
    best_of: int | None = None
    echo: bool | None = None
    logprobs: _NumLogprobs | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionRequest:
        if self.best_of not in (None, 1, self.n):
            raise invalid(
                f"best_of={shown(self.best_of)} would choose among more samples than are returned, "
                "which is not supported: leave it out, and choose among n samples",
                "best_of",
            )
        return self

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, one or several, as texts or as tokens."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [
            TextPrompt(each, self.add_special_tokens) if isinstance(each, str) else each
            for each in ([prompt] if is_one else prompt)
        ]

    def sampling_params(self, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """Convert to `SamplingParams`; OpenAI's default of `max_tokens` is 16 here."""
        most = self.max_tokens
        if most is None:
            most = min(_COMPLETION_TOKENS, (defaults or {}).get("max_tokens", _COMPLETION_TOKENS))
        if most == 0 and not self.echo:
            raise invalid(
                "max_tokens=0 leaves nothing to answer; add echo=true for the prompt", "max_tokens"
            )
        wanted = (self.prompt_logprobs, self.logprobs if self.echo else None)
        of_prompt = max((each for each in wanted if each is not None), default=None)
        return self._params(
            defaults, max_tokens=most or 1, logprobs=self.logprobs, prompt_logprobs=of_prompt
        )


class TextPart(Lenient):
    """A text of a message's content, a refusal or a thought; other fields are ignored."""

    type: Literal["text", "refusal", "input_text", "output_text", "thinking"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal", "thinking"))

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, data: Any) -> Any:
        return {"type": "text", "text": data} if isinstance(data, str) else data


class Message(BaseModel):
    """A message of a chat; additional fields are passed to the template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | Listed[TextPart] | None = None
    tool_calls: Listed[ToolCall] | None = None

    def rendered(self, *, as_text: bool = False, knows_developer: bool = False) -> dict[str, Any]:
        """Return the message for a template; reasoning has both known names."""
        whole = self.model_dump(exclude_none=True)
        whole.pop("tool_calls", None)
        whole["content"] = self.text or ""
        if self.role in SYSTEMS:
            whole["role"] = self.role if knows_developer else "system"
            whole["content"] = _BILLING.sub("", whole["content"])
        if self.tool_calls:
            whole["tool_calls"] = [each.rendered(as_text=as_text) for each in self.tool_calls]
        reasoning = whole.get("reasoning_content", whole.get("reasoning", self._joined(True)))
        if reasoning is None:
            return whole
        return {"thinking": reasoning} | whole | {"reasoning_content": reasoning}

    @property
    def text(self) -> str | None:
        """The content, with its parts joined, without thoughts."""
        return self.content if isinstance(self.content, str) else self._joined(False)

    def _joined(self, thoughts: bool) -> str | None:
        parts = self.content if isinstance(self.content, list) else ()
        found = [part.text for part in parts if (part.type == "thinking") is thoughts]
        return "\n".join(found) or None


class ChatBody(_Strict):
    """Messages, and how they become a prompt."""

    messages: Annotated[Listed[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # Of the tokenizer, to the template's text.
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[Listed[Tool], Field(max_length=TOOLS_MAX)] | None = None
    tool_choice: ToolChoice | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatBody:
        if self.tools or self.tool_choice:
            check_tools(self.tools or (), self.tool_choice)
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "continue_final_message and add_generation_prompt exclude each other: send one of "
                "them",
                "continue_final_message",
            )
        return self

    @property
    def begins_answer(self) -> bool:
        """Whether the template adds the beginning of an answer."""
        begins = self.add_generation_prompt
        return not self.continue_final_message if begins is None else begins

    @property
    def num_chars(self) -> int:
        """Characters to tokenise, without the template's."""
        return sum(len(message.text or "") for message in self.messages or ())

    @property
    def num_read_chars(self) -> int:
        """Characters that a template may read: those of calls, tools and further fields, too."""
        try:
            return len(self.model_dump_json(include={"messages", "tools", "chat_template_kwargs"}))
        except PydanticSerializationError:  # Half a surrogate pair is no text.
            return sys.maxsize

    @property
    def effective_tool_choice(self) -> ToolChoice:
        """Whether the model calls tools: by default if there are any."""
        return (self.tool_choice or "auto") if self.tools else "none"

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools for the template; None if the model must not call any."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [each.model_dump(exclude_unset=True) for each in self.tools]

    def conversation(self, **form: bool) -> list[dict[str, Any]]:
        """Return the messages for the template; see `Message.rendered`."""
        return [each.rendered(**form) for each in self.messages or ()]


class ChatRequest(GenerationRequest, ChatBody):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[Listed[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: _NumLogprobs | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:  # vLLM takes 0 as well, its own default.
            raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
        return self

    @property
    def prompts(self) -> list[Prompt]:
        """The messages as one prompt."""
        return [self]

    def sampling_params(self, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """Convert to `SamplingParams`; as in vLLM, `max_completion_tokens` overrides."""
        most = self.max_completion_tokens
        own = {"max_tokens": self.max_tokens if most is None else most}
        own["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        return self._params(defaults, prompt_logprobs=self.prompt_logprobs, **own)


class TokenizeRequest(ChatBody):
    """Body of `POST /tokenize`, as in vLLM: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("send either prompt or messages", "prompt")
        return self

    @property
    def what(self) -> Prompt:
        """The prompt to tokenise."""
        if self.prompt is None:
            return self
        return TextPrompt(self.prompt, self.add_special_tokens is not False)


class DetokenizeRequest(_Strict):
    """Body of `POST /detokenize`, as in vLLM."""

    model: str | None = None
    tokens: _TokenIds


# ---- parsing -------------------------------------------------------------------------------------

T = TypeVar("T", bound=BaseModel)

#: Bytes scanned between two turns of the event loop, in a few milliseconds at worst.
_PIECE_BYTES = 64 * 1024
_NO_OBJECT = "the request needs a JSON object as its body, with Content-Type: application/json"
_JSON = re.compile(r"application/(?:[\w.+-]+\+)?json *(?:;.*)?", re.IGNORECASE)
#: Maps digits to 0, so that numbers that JSON reads as infinite, as `1e999`, are found quickly.
_DIGITS = bytes.maketrans(b"E123456789", b"e000000000")
_HUGE_NUMBERS = (b"0e000", b"0" * 309)
#: Values that a list, an object or a key counts as, by its parsing time.
_NESTED_WEIGHT = 8
_SIZES = ("too_short", "too_long", "string_too_long")
#: Types of pydantic's errors that name a class of vmkv where an object was expected.
_NAMING_CLASSES = ("model_type", "model_attributes_type")
#: Names of alternatives that pydantic has tried, within an error's location.
_ALTERNATIVE = re.compile(
    r"(body|str|int|float|bool|constrained-str|(list|literal|function-\w+)\[.*|[A-Z]\w*)$"
)


async def parse(body: bytearray, content_type: str, form: type[T], max_values: int) -> T:
    """Validate a body as `form`; raises `ApiError` with the first error found.

    Parsing blocks every stream for up to 2 µs a value, so values are counted first.
    """
    if not body or not _JSON.fullmatch(content_type):
        raise invalid(_NO_OBJECT)
    may_be_infinite = await check_structure(body, max_values)
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"the request's body is no valid JSON: {error}") from error
    if may_be_infinite:
        try:
            msgspec.json.decode(body)
        except msgspec.ValidationError as error:
            raise invalid("the request has a number that is too large") from error
    if not isinstance(data, dict):
        raise invalid(_NO_OBJECT)
    await asyncio.sleep(0)
    return validated(data, form)


def validated(data: Mapping[str, Any], form: type[T]) -> T:
    """Validate parsed JSON as `form`; raises `ApiError` with the error that tells most."""
    try:
        return form.model_validate(data)
    except ValidationError as error:
        raise _explained(error) from error


async def check_structure(body: bytes | bytearray, max_values: int) -> bool:
    """Count the values of a body without parsing it; raise `ApiError` beyond `max_values`.

    Return whether it may have a number that is read as infinite. Other tasks run meanwhile.
    """
    at = num_quotes = 0
    num_values = 1
    may_be_infinite, last = False, b""
    while at < len(body):
        piece = body[at : at + _PIECE_BYTES]
        # Do not cut between a backslash and the character that it escapes.
        is_escaping = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        end = at + _PIECE_BYTES + is_escaping
        parts = body[at:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[num_quotes % 2 :: 2])
        num_values += outside.count(b",") + _NESTED_WEIGHT * sum(
            map(outside.count, (b"[", b"{", b":"))
        )
        if num_values > max_values:
            raise invalid(
                f"the request's body has more than {max_values} values, where a list, an object or "
                f"a key counts for {_NESTED_WEIGHT}; send less at once, or raise --max-body-mib"
            )
        numbers = last + outside.translate(_DIGITS, b"+")
        may_be_infinite |= any(each in numbers for each in _HUGE_NUMBERS)
        last = numbers[-len(_HUGE_NUMBERS[1]) :]
        num_quotes += len(parts) - 1
        at = end
        if at < len(body):
            await asyncio.sleep(0)
    return may_be_infinite


def _explained(error: ValidationError) -> ApiError:
    errors = error.errors(include_url=False, include_input=False)
    found: Any = max(errors, key=lambda each: (each["type"] in _SIZES, len(each["loc"])))
    names = [str(part) for part in found["loc"] if not _ALTERNATIVE.match(str(part))]
    param, message = ".".join(names), f"{found['msg'][0].lower()}{found['msg'][1:]}"
    if found["type"] in _NAMING_CLASSES:
        message = "input should be a JSON object"
    return invalid(f"{param}: {message}", param)
