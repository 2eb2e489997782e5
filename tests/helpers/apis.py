"""Chats, responses and messages behind one interface, by the clients of their makers.

A conversation goes in as a chat has it, and answers of all APIs come out as a `Reply`.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

Json = dict[str, Any]


@dataclass
class Reply:
    """An answer; `end` is "stop", "length", "calls" or "cut", within a call by a stop text."""

    reasoning: str = ""
    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    end: str = "stop"


@dataclass
class Usage:
    """Tokens of a request."""

    num_prompt: int
    num_cached: int
    num_output: int
    num_reasoning: int


def arguments_of(text: str) -> Any:
    """The value of a call's arguments, or the text if it is no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


class Chats:
    """OpenAI's chat completions."""

    path = "/v1/chat/completions"

    def body(self, messages: list[Json], **options: Any) -> Json:
        """The request of a conversation; `tools` are functions, `choice` is of a tool."""
        body = {"model": "tiny", "messages": messages, "temperature": 0, **options}
        for name in ("tools", "choice"):
            if (found := body.pop(name, None)) is not None:
                body |= getattr(self, name)(found)
        return body

    def tools(self, functions: list[Json]) -> Json:
        return {"tools": [{"type": "function", "function": each} for each in functions]}

    def choice(self, choice: str | Json) -> Json:
        named = choice if isinstance(choice, str) else {"type": "function", "function": choice}
        return {"tool_choice": named}

    def client(self, server: Any) -> Any:
        return server.client().chat.completions

    def send(
        self, server: Any, body: Json, *, is_streamed: bool = False, is_typed: bool = False
    ) -> Any:
        """The answer that the client makes of the whole one, or of a stream.

        If `is_typed`, the client serialises all fields that it knows, and else the necessary ones.
        """
        client = self.client(server)
        names: Any = ("model", "messages", "input", "max_tokens")
        if is_typed:
            names = inspect.signature(client.create).parameters
        named = {name: body[name] for name in names if name in body}
        named["extra_body"] = {name: body[name] for name in body.keys() - named}
        if not is_streamed:
            return client.create(**named)
        with client.stream(**named) as stream:
            events = list(stream)
            return self.final(stream, events)

    def final(self, stream: Any, events: list[Any]) -> Any:
        return stream.get_final_completion()

    def reply(self, answer: Any) -> Reply:
        choice = answer.choices[0]
        calls = [each.function for each in choice.message.tool_calls or ()]
        ends = {"tool_calls": "calls"}
        found = Reply(
            getattr(choice.message, "reasoning_content", ""),
            choice.message.content or "",
            [(each.name, arguments_of(each.arguments)) for each in calls],
            ends.get(choice.finish_reason, choice.finish_reason),
        )
        found.end = "cut" if calls and found.end == "stop" else found.end
        return found

    def usage(self, answer: Any) -> Usage:
        of, output = answer.usage, answer.usage.completion_tokens_details
        cached = of.prompt_tokens_details.cached_tokens
        return Usage(of.prompt_tokens, cached, of.completion_tokens, output.reasoning_tokens)


class Responses(Chats):
    """OpenAI's responses."""

    path = "/v1/responses"

    def body(self, messages: list[Json], **options: Any) -> Json:
        body = super().body([], **options)
        del body["messages"]
        if "max_tokens" in body:
            body["max_output_tokens"] = body.pop("max_tokens")
        if "reasoning_effort" in body:
            body["reasoning"] = {"effort": body.pop("reasoning_effort")}
        items: list[Json] = []
        for each in messages:
            role, content = each["role"], each["content"]
            if role == "tool":
                output = {"type": "function_call_output", "call_id": each["tool_call_id"]}
                items.append({**output, "output": content})
                continue
            if "reasoning" in each:
                thought = {"type": "summary_text", "text": each["reasoning"]}
                items.append({"type": "reasoning", "id": "rs_1", "summary": [thought]})
            if role == "assistant":
                content = [{"type": "output_text", "text": content, "annotations": []}]
            items.append({"type": "message", "role": role, "content": content})
            for call in each.get("tool_calls", ()):
                told = {"type": "function_call", "call_id": call["id"], **call["function"]}
                items.append(told)
        return {**body, "input": items}

    def tools(self, functions: list[Json]) -> Json:
        return {"tools": [{"type": "function", **each} for each in functions]}

    def choice(self, choice: str | Json) -> Json:
        return {"tool_choice": choice if isinstance(choice, str) else {"type": "function"} | choice}

    def client(self, server: Any) -> Any:
        return server.client().responses

    def final(self, stream: Any, events: list[Any]) -> Any:
        return events[-1].response  # The client raises for one that is incomplete.

    def reply(self, answer: Any) -> Reply:
        found = Reply()
        for item in answer.output:
            if item.type == "function_call":
                found.calls.append((item.name, arguments_of(item.arguments)))
            else:
                text = "".join(part.text for part in item.content)
                found.reasoning += text if item.type == "reasoning" else ""
                found.text += text if item.type == "message" else ""
        statuses = {item.status for item in answer.output[:-1]}
        assert statuses <= {"completed"}
        if answer.status == "incomplete":
            assert "max_output_tokens" == answer.incomplete_details.reason
            found.end = "length"
        elif found.calls:
            found.end = "calls" if answer.output[-1].status == "completed" else "cut"
        assert (found.end in ("length", "cut")) == (answer.output[-1].status == "incomplete")
        return found

    def usage(self, answer: Any) -> Usage:
        of, output = answer.usage, answer.usage.output_tokens_details
        assert of.total_tokens == of.input_tokens + of.output_tokens
        cached = of.input_tokens_details.cached_tokens
        return Usage(of.input_tokens, cached, of.output_tokens, output.reasoning_tokens)


class Messages(Chats):
    """Anthropic's messages."""

    path = "/v1/messages"

    def body(self, messages: list[Json], **options: Any) -> Json:
        is_parallel = options.pop("parallel_tool_calls", True)
        body = {"max_tokens": 500, **super().body([], **options)}
        if not is_parallel:
            choice = body.setdefault("tool_choice", {"type": "auto"})
            choice["disable_parallel_tool_use"] = True
        if "reasoning_effort" in body:
            body["output_config"] = {"effort": body.pop("reasoning_effort")}
        if "stop" in body:
            body["stop_sequences"] = body.pop("stop")
        turns: list[Json] = []
        for each in messages:
            role, blocks = each["role"], [{"type": "text", "text": each["content"]}]
            if role == "system":
                body.setdefault("system", []).extend(blocks)
                continue
            if role == "tool":
                result = {"type": "tool_result", "tool_use_id": each["tool_call_id"]}
                role, blocks = "user", [{**result, "content": blocks}]
            if "reasoning" in each:
                thought = {"type": "thinking", "thinking": each["reasoning"], "signature": ""}
                blocks = [thought, {"type": "redacted_thinking", "data": "x"}, *blocks]
            for call in each.get("tool_calls", ()):
                function = call["function"]
                values = {"name": function["name"], "input": json.loads(function["arguments"])}
                blocks.append({"type": "tool_use", "id": call["id"], **values})
            turns.append({"role": role, "content": blocks})
        return {**body, "messages": turns}

    def tools(self, functions: list[Json]) -> Json:
        return {
            "tools": [
                {name.replace("parameters", "input_schema"): each[name] for name in each}
                for each in functions
            ]
        }

    def choice(self, choice: str | Json) -> Json:
        names = {"required": "any"}
        named = {"type": "tool"} | choice if isinstance(choice, dict) else {}
        return {"tool_choice": named or {"type": names.get(str(choice), choice)}}

    def client(self, server: Any) -> Any:
        return claude(server).messages

    def final(self, stream: Any, events: list[Any]) -> Any:
        return stream.get_final_message()

    def reply(self, answer: Any) -> Reply:
        ends = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}
        found = Reply(end=ends.get(answer.stop_reason, "calls"))
        for block in answer.content:
            if block.type == "tool_use":
                found.calls.append((block.name, block.input))
            elif block.type == "thinking":
                found.reasoning += block.thinking
            else:
                found.text += block.text
        return found

    def usage(self, answer: Any) -> Usage:
        of, cached = answer.usage, answer.usage.cache_read_input_tokens
        details = of.model_dump()["output_tokens_details"]
        return Usage(of.input_tokens + cached, cached, of.output_tokens, details["thinking_tokens"])


def claude(server: Any, **options: Any) -> Any:
    """An Anthropic client that does not retry."""
    anthropic = pytest.importorskip("anthropic")
    options = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
    return server.clients.enter_context(anthropic.Anthropic(base_url=server.url, **options))


APIS = {"chat": Chats(), "response": Responses(), "message": Messages()}
