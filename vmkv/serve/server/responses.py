"""`/v1/responses`: OpenAI's Responses API for functions and text, without stored responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ..request import FinishReason
from . import items
from .choices import event
from .errors import ApiError, invalid
from .formats import Listed
from .items import Event, Item, text_parts
from .schema import ChatRequest

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_LOGPROBS = "message.output_text.logprobs"
#: Parameters that a response repeats, and their defaults.
_REPEATED: dict[str, Any] = {
    **dict.fromkeys(("instructions", "max_output_tokens", "reasoning", "temperature", "top_p")),
    "metadata": {},
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
}
#: Calls of tools that a server of OpenAI's has run: the text after them says what was found.
_SKIPPED = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
    *("mcp_call", "mcp_list_tools", "tool_search_call", "tool_search_output"),
)
#: Per kind of item: its type, the name of its events, and the beginning of its identifier.
_KINDS = {
    "text": ("message", "output_text", "msg"),
    "reasoning": ("reasoning", "reasoning_text", "rs"),
    "call": ("function_call", "function_call_arguments", "fc"),
}


# ---- requests ------------------------------------------------------------------------------------


class TextPart(items.TextPart):
    """A text in a message, a function's output or reasoning."""

    needs: ClassVar[Any] = dict.fromkeys(_TEXTS, ("text",)) | {"refusal": ("refusal",)}


_Parts = Listed[TextPart]


class InputItem(items.TypedItem):
    """A message, a call of a tool, its output, or reasoning."""

    needs: ClassVar[Any] = {
        "message": ("role", "content"),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
        "custom_tool_call": ("call_id", "name", "input"),
        "custom_tool_call_output": ("call_id", "output"),
        "local_shell_call": ("action",),
        "local_shell_call_output": ("output",),
        "reasoning": (),
    }

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | _Parts | None = None
    summary: _Parts | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    output: str | _Parts | None = None

    @property
    def call(self) -> tuple[str | None, str | None, str]:
        """The identifier, name and arguments of a call of a function or another tool."""
        name = self.name or self.type.removesuffix("_call")
        given = self.action if self.input is None else {"input": self.input}
        text = json.dumps(given, ensure_ascii=False) if self.arguments is None else self.arguments
        return self.call_id or self.id, items.full_name(self.namespace, name), text


class ResponsesRequest(items.ItemsRequest):
    """Body of `POST /v1/responses`."""

    input: Annotated[
        str | Annotated[Listed[InputItem], Field(min_length=1)],
        items.dropping(_SKIPPED),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Listed[items.FunctionTool] | None = None
    tool_choice: str | items.FunctionTool | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    include: list[str] | None = None
    prompt: Any = None

    @model_validator(mode="after")
    def _check_served(self) -> ResponsesRequest:
        if _LOGPROBS in (self.include or ()):
            reason = "log-probabilities are reported by /v1/chat/completions"
            raise invalid(f"include: {reason}", "include")
        if self.prompt is not None:
            raise invalid("prompt: prompts are not stored here; send instructions and input")
        return self

    def chat(self) -> ChatRequest:
        """Convert to a chat; raises `ApiError`."""
        choice: Any = self.tool_choice
        form = (self.text or {}).get("format")
        if isinstance(form, dict) and form.get("type") == "json_schema":
            schema = {name: value for name, value in form.items() if name != "type"}
            form = {"type": "json_schema", "json_schema": schema}
        return self.as_chat(
            self._messages(),
            max_tokens=self.max_output_tokens,
            tools=[tool.as_chat() for tool in self.tools or ()] or None,
            tool_choice=choice.as_chat() if isinstance(choice, items.FunctionTool) else choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=form,
            reasoning_effort=(self.reasoning or {}).get("effort"),
        )

    def _messages(self) -> list[dict[str, Any]]:
        """Return messages; reasoning, text and calls of the model between other turns are one."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": text_parts(self.instructions)})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            last: dict[str, Any] = messages[-1] if messages else {"role": None}
            content = text_parts(item.output or item.content or item.summary or "")
            if item.type.endswith("_call_output"):
                answered = {"tool_call_id": item.call_id or item.id}
                messages.append({"role": "tool", **answered, "content": content})
            elif item.type == "message" and item.role != "assistant":
                # Templates know no developer. Many take one system message.
                role = "user" if item.role == "user" else "system"
                if role == last["role"] == "system":
                    last["content"] += content
                else:
                    messages.append({"role": role, "content": content})
            else:
                is_new = item.type == "reasoning" or (item.type == "message" and "content" in last)
                if last["role"] != "assistant" or is_new:
                    last = {"role": "assistant"}
                    messages.append(last)
                if item.type.endswith("_call"):
                    items.add_call(last, *item.call)
                elif item.type == "message":
                    last["content"] = content
                else:
                    last["reasoning_content"] = "\n".join(part["text"] for part in content)
        return messages


# ---- answers -------------------------------------------------------------------------------------


class ResponseWriter(items.ItemWriter):
    """Writes a response, whole or as events; `answer_id` is in the identifiers of its items."""

    id_prefix = "resp_"
    chunk_object = "response"

    def __init__(self, *its: Any, asked: ResponsesRequest, answer_id: str, **names: Any):
        super().__init__(*its, answer_id=answer_id, **names)
        self._answer_id, self._num_events = answer_id, 0
        self._head |= {"created_at": self._head.pop("created"), **_REPEATED}
        self._head |= asked.model_dump(include=set(_REPEATED), exclude_none=True)
        tools = [tool for tool in asked.tools or () if tool.namespace]
        self._names = {items.full_name(tool.namespace, tool.name): tool for tool in tools}

    def failure(self, error: ApiError) -> bytes:
        """Return the event of a failed response."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = self._response("failed") | {"error": {"code": code, "message": str(error)}}
        return event(self._event("response.failed", response=response))

    def _answer(self) -> dict[str, Any]:
        is_complete = self._last is None or self._last.finish_reason is not FinishReason.LENGTH
        return self._response("completed" if is_complete else "incomplete")

    def _begin(self) -> Iterator[Event]:
        response = self._response("in_progress") | {"usage": None}
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def _tell(self, what: str, item: Item, piece: str) -> Iterator[Event]:
        name = _KINDS[item.kind][1]
        at: dict[str, Any] = {"output_index": item.number, "item_id": self._id(item)}
        if item.kind != "call":
            at["content_index"] = 0
        more: dict[str, Any] = {"logprobs": []} if item.kind == "text" else {}
        if what == "grows":
            yield self._event(f"response.{name}.delta", delta=piece, **more, **at)
        elif what == "begins":
            part = self._item(item, "in_progress")
            yield self._event("response.output_item.added", output_index=item.number, item=part)
            if item.kind != "call":
                yield self._event("response.content_part.added", part=_part(item, ""), **at)
        else:
            if item.kind == "call":
                of = {"name": item.name, "arguments": item.text}
                yield self._event(f"response.{name}.done", **of, **at)
            else:
                yield self._event(f"response.{name}.done", text=item.text, **more, **at)
                yield self._event("response.content_part.done", part=_part(item, item.text), **at)
            part = self._item(item, "incomplete" if self._is_cut else "completed")
            yield self._event("response.output_item.done", output_index=item.number, item=part)

    def _finish(self) -> Iterator[Event]:
        response = self._answer()
        yield self._event(f"response.{response['status']}", response=response)

    @property
    def _is_cut(self) -> bool:
        last = self._last
        is_at_limit = last is not None and last.finish_reason is FinishReason.LENGTH
        return is_at_limit or (last is not None and self.cuts_call(last))

    def _event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _response(self, status: str) -> dict[str, Any]:
        output = [self._item(item, "completed") for item in self.items]
        if output and (status != "completed" or self._is_cut):
            output[-1]["status"] = "incomplete"
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        usage = self.usage()
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": why,
            "output": output,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
        }

    def _item(self, item: Item, status: str) -> dict[str, Any]:
        text = "" if status == "in_progress" else item.text
        found = {"id": self._id(item), "type": _KINDS[item.kind][0], "status": status}
        if item.kind == "call":
            tool = self._names.get(item.name)
            name = {"namespace": tool.namespace, "name": tool.name} if tool else {"name": item.name}
            return found | {"call_id": item.call_id, **name, "arguments": text}
        content = [] if status == "in_progress" else [_part(item, text)]
        if item.kind == "reasoning":
            return found | {"summary": [], "content": content}
        return found | {"role": "assistant", "content": content}

    def _id(self, item: Item) -> str:
        return f"{_KINDS[item.kind][2]}_{self._answer_id}_{item.number}"


def _part(item: Item, text: str) -> dict[str, Any]:
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
