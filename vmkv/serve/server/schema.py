"""Request bodies: OpenAI's parameters, and vLLM's names for parameters that OpenAI lacks.

Declared parameters are served; `_IGNORED` ones do not affect the answer; `_REFUSED` ones would, and
are refused with a reason.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ...errors import shown
from ..params import SamplingParams
from .errors import invalid
from .limits import Limits
from .prompts import ChatPrompt, Prompt, TextPrompt

_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
    | {"prompt_cache_retention", "parallel_tool_calls"}
)
#: Per refused parameter: values that have no effect, and the reason for the refusal.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), "tool calls are not supported"),
    "tool_choice": (("none", "auto"), "tool calls are not supported"),
    "functions": (([],), "function calls are not supported"),
    "function_call": (("none", "auto"), "function calls are not supported"),
    "response_format": (({"type": "text"},), "only plain text is generated"),
    "logit_bias": (({},), "logit biases are not supported"),
    "suffix": (("",), "insertion is not supported"),
    "echo": ((False,), "prompts are not echoed; prepend yours"),
    "best_of": ((1,), "there is no beam search; use n"),
    "use_beam_search": ((False,), "there is no beam search; use n"),
    "prompt_logprobs": ((), "log-probabilities are reported for generated tokens only"),
    "modalities": ((["text"],), "only text is generated"),
    "audio": ((), "only text is generated"),
    "prediction": ((), "predicted outputs are not supported"),
    "reasoning_effort": ((), "set it by chat_template_kwargs if the model's template has it"),
    "verbosity": ((), "it is no parameter of this model"),
    "web_search_options": ((), "there is no search"),
    "guided_json": ((), "guided decoding is not supported"),
    "guided_regex": ((), "guided decoding is not supported"),
    "structured_outputs": ((), "guided decoding is not supported"),
}
#: Parameters passed to `SamplingParams` by name; null means the default.
_OWN_DEFAULTS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
#: pydantic's error type for an unknown parameter; its `name` is in the context.
UNKNOWN = "unknown_parameter"
#: Validation of a list stops at the first wrong element.
_LIST = Field(fail_fast=True)
_Texts = Annotated[list[str], _LIST]
_TokenIds = Annotated[list[int], _LIST]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        # pydantic would report every unknown name.
        if isinstance(data, dict):
            for name in data:
                if name not in cls.model_fields:
                    raise PydanticCustomError(UNKNOWN, "unknown parameter", {"name": name[:100]})
        return data


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # Token counts in every chunk, as in vLLM.
    include_obfuscation: bool | None = None  # Padding against traffic analysis; ignored.


class Sampling(_Strict):
    """Parameters that completions and chats share."""

    model: str
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | _Texts | None = None
    stop_token_ids: _TokenIds | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int = 0
    cache_salt: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _sort_out(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, (harmless, reason) in _REFUSED.items():
            if name in data and data[name] is not None and data[name] not in harmless:
                raise invalid(f"{name} is not supported here: {reason}", name)
        return {
            name: value
            for name, value in data.items()
            if name not in _IGNORED and name not in _REFUSED
        }

    @model_validator(mode="after")
    def _check_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options needs stream=true", "stream_options")
        return self

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether every chunk carries the token counts so far."""
        options = self.stream_options
        return self.wants_usage and options is not None and bool(options.continuous_usage_stats)

    @property
    def num_samples(self) -> int:
        """Samples per prompt."""
        return 1 if self.n is None else self.n

    def sampling_params(
        self, max_tokens: int | None, logprobs: int | None, limits: Limits
    ) -> SamplingParams:
        """Convert to `SamplingParams`; raises `ConfigError` or, beyond the limits, `ApiError`."""
        if logprobs is not None and logprobs > limits.max_logprobs:
            raise invalid(
                f"{logprobs} log-probabilities per token; at most {limits.max_logprobs} are "
                "reported here",
                "top_logprobs" if "top_logprobs" in type(self).model_fields else "logprobs",
            )
        self._check_limits(limits)
        given = {
            name: getattr(self, name) for name in _OWN_DEFAULTS if getattr(self, name) is not None
        }
        return SamplingParams(
            n=self.num_samples,
            seed=self.seed,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            max_tokens=max_tokens,
            logprobs=logprobs,
            **given,
        )

    def _check_limits(self, limits: Limits) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > limits.max_stops:
            raise invalid(f"{len(stops)} stop texts; at most {limits.max_stops} may be", "stop")
        if any(len(stop) > limits.max_stop_chars for stop in stops):
            raise invalid(f"a stop text has at most {limits.max_stop_chars} characters", "stop")
        if len(self.stop_token_ids or ()) > limits.max_stop_tokens:
            raise invalid(
                f"at most {limits.max_stop_tokens} stop tokens may be given", "stop_token_ids"
            )
        if abs(self.priority) > limits.max_priority:
            raise invalid(
                f"priority={shown(self.priority)} must be in "
                f"[{-limits.max_priority}, {limits.max_priority}]"
                if limits.max_priority
                else "requests have no priorities here; the server's --max-priority allows them",
                "priority",
            )


class CompletionRequest(Sampling):
    """Body of `POST /v1/completions`."""

    prompt: str | _Texts | _TokenIds | Annotated[list[_TokenIds], _LIST]
    logprobs: int | None = None
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, one or several, as texts or as tokens."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        return [
            TextPrompt(each, self.add_special_tokens) if isinstance(each, str) else each
            for each in ([prompt] if is_one else prompt)
        ]


class TextPart(BaseModel):
    """A text part of a message's content; other fields, such as cache hints, are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat; additional fields are passed to the template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | Annotated[list[TextPart], _LIST] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message for the template, with the parts of its content joined to one text."""
        message = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            message["content"] = "\n".join(part.text for part in self.content)
        return message


class _Chat(_Strict):
    """Parameters that turn messages into a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_ends(self) -> _Chat:
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "a final message that is continued is followed by no other: send one of "
                "continue_final_message and add_generation_prompt",
                "continue_final_message",
            )
        return self

    def chat(self, messages: list[Message], *, add_special_tokens: bool) -> ChatPrompt:
        begins = self.add_generation_prompt
        return ChatPrompt(
            [message.for_template() for message in messages],
            not self.continue_final_message if begins is None else begins,
            self.continue_final_message,
            add_special_tokens,
            self.chat_template_kwargs,
        )


class ChatRequest(Sampling, _Chat):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    add_special_tokens: bool = False

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
        return self

    @property
    def prompt(self) -> ChatPrompt:
        """The messages as a prompt."""
        return self.chat(self.messages, add_special_tokens=self.add_special_tokens)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token, or None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """Output token limit; `max_completion_tokens` overrides `max_tokens`, as in vLLM."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(_Chat):
    """Body of `POST /tokenize`, as in vLLM: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("either a prompt or messages become tokens", "prompt")
        return self

    @property
    def what(self) -> Prompt:
        """The prompt to tokenise."""
        if self.prompt is not None:
            return TextPrompt(self.prompt, self.add_special_tokens is not False)
        return self.chat(self.messages or [], add_special_tokens=bool(self.add_special_tokens))
