"""`/v1/messages`: Anthropic's Messages API for tools of the client and text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Field
from pydantic_core import from_json

from ..request import FinishReason
from . import items
from .choices import event
from .errors import ApiError
from .formats import Lenient, Listed
from .items import Event, Item, TypedItem, text_parts
from .schema import RETENTIONS_S, ChatRequest

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
#: Blocks of tools that a server of Anthropic's has run, and changes to tools: the request has all.
_SKIPPED = (
    *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "mcp_tool_use"),
    *("mcp_tool_result", "tool_search_tool_result", "tool_addition", "tool_removal"),
)
_CHANGES = {"begins": "start", "grows": "delta", "ends": "stop"}
#: Per kind of item: the type of a delta, and its field with the text.
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


# ---- requests ------------------------------------------------------------------------------------


class CacheControl(Lenient):
    """How long the conversation up to here stays cached."""

    ttl: str | None = None


class TextBlock(items.TextPart):
    """A text in the system's prompt or a tool's result, or the name of a tool that was found."""

    needs: ClassVar[Any] = {"text": ("text",), "tool_reference": ("text",)}

    text: str | None = Field(None, validation_alias=AliasChoices("text", "tool_name"))
    cache_control: CacheControl | None = None


class Block(TypedItem):
    """A block of a message's content."""

    needs: ClassVar[Any] = {
        "text": ("text",),
        "tool_use": ("id", "name", "input"),
        "tool_result": ("tool_use_id",),
        "thinking": ("thinking",),
        "redacted_thinking": (),
    }

    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Listed[TextBlock] | None = None
    cache_control: CacheControl | None = None


class Turn(Lenient):
    """A message of one side."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | Listed[Block], items.dropping(_SKIPPED)]


class Tool(items.FunctionTool):
    """A tool that the model may call."""

    needs: ClassVar[Any] = {"custom": ("name",)}

    type: str = "custom"
    parameters: dict[str, Any] = Field(alias="input_schema")
    cache_control: CacheControl | None = None


class ToolChoice(items.FunctionTool):
    """Whether the model may, must or must not call tools, or which one it has to."""

    needs: ClassVar[Any] = {"auto": (), "any": (), "none": (), "tool": ("name",)}

    disable_parallel_tool_use: bool | None = None


class Thinking(TypedItem):
    """Whether the model thinks before it answers, for templates that know it."""

    needs: ClassVar[Any] = dict.fromkeys(("enabled", "disabled", "adaptive", "between_tools"), ())


class CountTokensRequest(items.ItemsRequest):
    """Body of `POST /v1/messages/count_tokens`."""

    messages: Annotated[Listed[Turn], Field(min_length=1)]
    system: str | Listed[TextBlock] | None = None
    tools: Listed[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    stop_sequences: Annotated[Listed[str], Field(max_length=16)] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    cache_control: CacheControl | None = None

    def chat(self) -> ChatRequest:
        """Convert to a chat; raises `ApiError`."""
        config, choice = self.output_config or {}, self.tool_choice
        converted: dict[str, Any] = {"stop": self.stop_sequences}
        if choice is not None:
            converted["tool_choice"] = _CHOICES.get(choice.type) or choice.as_chat()
            if choice.disable_parallel_tool_use:
                converted["parallel_tool_calls"] = False
        form = config.get("format") or self.output_format
        if isinstance(form, dict):
            form = {**form, "json_schema": {"name": "output", "schema": form.get("schema")}}
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
            of_template = {"enable_thinking": thinks, "thinking": thinks}
            converted["chat_template_kwargs"] = of_template | (self.chat_template_kwargs or {})
        messages = self._conversation()
        last = messages[-1] if messages else {"role": None}
        # Text at the end of a request is the beginning of the answer.
        is_begun = last["role"] == "assistant" and "content" in last and "tool_calls" not in last
        return self.as_chat(
            messages,
            tools=[tool.as_chat() for tool in self.tools or ()] or None,
            response_format=form,
            reasoning_effort=config.get("effort"),
            continue_final_message=is_begun or None,
            prompt_cache_retention=self._retention(),
            **converted,
        )

    def _retention(self) -> str | None:
        """The longest ttl of all `cache_control`, which is "5m" where none is given."""
        parts: list[Any] = [self, *(self.tools or ())]
        for blocks in (self.system, *(turn.content for turn in self.messages)):
            parts += () if isinstance(blocks, str | None) else blocks
        controls = [part.cache_control for part in parts if part.cache_control is not None]
        ttls = [each.ttl or "5m" for each in controls]
        return max(ttls, key=lambda ttl: RETENTIONS_S.get(ttl, 0), default=None)

    def _conversation(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": text_parts(self.system)})
        for turn in self.messages:
            blocks = turn.content
            if isinstance(blocks, str):
                messages.append({"role": turn.role, "content": blocks})
                continue
            own: dict[str, Any] = {"role": turn.role}
            thoughts = [block.thinking for block in blocks if block.thinking is not None]
            if thoughts:
                own["reasoning_content"] = "\n".join(thoughts)
            for block in blocks:
                if block.type == "tool_result":
                    result = {"role": "tool", "tool_call_id": block.tool_use_id}
                    messages.append({**result, "content": text_parts(block.content or "")})
                elif block.type == "tool_use":
                    arguments = json.dumps(block.input, ensure_ascii=False)
                    items.add_call(own, block.id, block.name, arguments)
                elif block.type == "text":
                    own.setdefault("content", []).extend(text_parts(block.text or ""))
            if len(own) > 1:
                messages.append(own)
        return messages


class MessagesRequest(CountTokensRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1)]


# ---- answers -------------------------------------------------------------------------------------


class MessageWriter(items.ItemWriter):
    """Writes a message, whole or as events."""

    id_prefix = "msg_"

    def __init__(self, *its: Any, **names: Any):
        super().__init__(*its, **names)
        own = {name: self._head[name] for name in ("id", "model")}
        self._head = {**own, "type": "message", "role": "assistant"}

    def failure(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        return event(error.anthropic_body)

    def _answer(self) -> dict[str, Any]:
        content = [_block(item, item.text) for item in self.items]
        return {**self._head, "content": content, **self._stop(), "usage": self._usage()}

    def _begin(self) -> Iterator[Event]:
        stop = {"stop_reason": None, "stop_sequence": None}
        message: Event = {**self._head, "content": [], **stop, "usage": self._usage()}
        yield {"type": "message_start", "message": message}
        yield {"type": "ping"}

    def _tell(self, what: str, item: Item, piece: str) -> Iterator[Event]:
        told: Event = {"type": f"content_block_{_CHANGES[what]}", "index": item.number}
        if what == "begins":
            told["content_block"] = _block(item, "")
        elif what == "grows":
            kind, name = _DELTAS[item.kind]
            told["delta"] = {"type": kind, name: piece}
        yield told

    def _finish(self) -> Iterator[Event]:
        yield {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def _usage(self) -> dict[str, Any]:
        usage = self.usage()
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        num_thinking = usage["completion_tokens_details"]["reasoning_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": num_thinking},
        }

    def _stop(self) -> dict[str, Any]:
        assert self._last is not None
        reason, sequence = "end_turn", None
        if self._last.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens"
        elif isinstance(self._last.stop_reason, str):
            reason, sequence = "stop_sequence", self._last.stop_reason
        elif any(item.kind == "call" for item in self.items):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}


def _block(item: Item, text: str) -> dict[str, Any]:
    if item.kind == "text":
        return {"type": "text", "text": text}
    if item.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": item.call_id, "name": item.name, "input": _arguments(text)}


def _arguments(text: str) -> dict[str, Any]:
    """Parse a call's arguments as far as they came: max_tokens may have cut them."""
    try:
        found = from_json(text or "{}", allow_partial=True)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}
