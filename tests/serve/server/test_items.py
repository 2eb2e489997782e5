"""Tool calls and reasoning by the Responses and the Messages API, with their own clients.

The model answers with chosen texts, each of which a first message starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.scripted import script, scripted

from vmkv.serve.files import read_response_template
from vmkv.serve.server import reply_format

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
pytestmark = pytest.mark.skipif(
    not reply_format._CAN_PARSE, reason="this release of transformers has no ResponseParser"
)

OSLO, ROME = {"city": "Oslo", "days": 3}, {"city": "Rome"}


def call_of(values: dict[str, Any], end: str = "</tool_call>") -> str:
    """A call of `weather` in the model's format."""
    return f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(values)}}}\n{end}'


SCRIPTS = {
    "calls": f"<think>\nLet me see.\n</think>\n\nI look.\n{call_of(OSLO)}\n{call_of(ROME)}",
    "broken": '<tool_call>\n{"name": "weather", "arguments": {"city": Oslo}}\n</tool_call>',
    "prose": "It is 3 degrees, and it rains.",
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"type": "function", "name": "weather", "description": "Tell.", "parameters": SCHEMA}
TOOL = {"name": "weather", "description": "Tell.", "input_schema": SCHEMA}
#: As a chat has it.
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tell.", "parameters": SCHEMA},
}


@pytest.fixture(scope="module")
def talker(run_server: Any) -> Iterator[Any]:
    """A server of a model that answers with the scripts."""
    model, tokenizer = scripted(SCRIPTS)
    template = read_response_template("qwen3")
    with run_server(model=model, tokenizer=tokenizer, response_template=template) as it:
        yield it


def claude(server: Any) -> Any:
    """An Anthropic client that does not retry."""
    options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 60}
    return server.clients.enter_context(anthropic.Anthropic(base_url=server.url, **options))


# ---- responses -----------------------------------------------------------------------------------


def ask(name: str, **more: Any) -> dict[str, Any]:
    """A request of the Responses API that starts a script."""
    body = {"model": "tiny", "instructions": script(name), "input": "?", "temperature": 0}
    return {**body, "tools": [FUNCTION], **more}


def checked(response: Any) -> None:
    """Check the items of the script of calls."""
    assert "completed" == response.status
    reasoning, text, first, second = response.output
    assert "Let me see." == reasoning.content[0].text
    assert "I look." == text.content[0].text.strip()
    for call, values in ((first, OSLO), (second, ROME)):
        assert ("function_call", "weather") == (call.type, call.name)
        assert values == json.loads(call.arguments)
    assert first.call_id != second.call_id


def test_responses_have_reasoning_and_calls(talker) -> None:
    checked(talker.client().responses.create(**ask("calls")))


def test_streamed_responses_have_reasoning_and_calls(talker) -> None:
    """The client's helper puts the deltas together; arguments come in several pieces."""
    with talker.client().responses.stream(**ask("calls")) as stream:
        events = list(stream)
        checked(stream.get_final_response())
    thoughts = [each.delta for each in events if each.type == "response.reasoning_text.delta"]
    assert "Let me see." == "".join(thoughts)
    pieces = [each for each in events if each.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 2
    done = [each for each in events if each.type == "response.function_call_arguments.done"]
    assert [OSLO, ROME] == [json.loads(each.arguments) for each in done]


def test_a_history_of_calls_is_the_chats(talker) -> None:
    """A response's items, sent back with the functions' outputs, make the prompt of a chat."""
    first = talker.client().responses.create(**ask("calls"))
    items = [item.model_dump(exclude_none=True) for item in first.output]
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
        for item in first.output
        if item.type == "function_call"
    ]
    history = [{"role": "user", "content": "?"}, *items, *outputs]
    told = talker.client().responses.create(**ask("prose", input=history))
    assert SCRIPTS["prose"] == told.output_text
    calls = [
        {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
        for item in first.output[2:]
    ]
    messages = [
        {"role": "system", "content": script("prose")},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": first.output[1].content[0].text, "tool_calls": calls},
        *({"role": "tool", "content": "3", "tool_call_id": each["id"]} for each in calls),
    ]
    body = {"messages": messages, "tools": [CHAT_TOOL]}
    count = talker.post(body, "/tokenize").json()["count"]
    assert count == told.usage.input_tokens


# ---- messages ------------------------------------------------------------------------------------


def say(name: str, **more: Any) -> dict[str, Any]:
    """A request of the Messages API that starts a script."""
    body = {"model": "tiny", "system": script(name), "max_tokens": 500}
    return {**body, "messages": [{"role": "user", "content": "?"}], "tools": [TOOL], **more}


def test_messages_have_thinking_and_uses_of_tools(talker) -> None:
    """Whole and by the helper, the same."""
    client, more = claude(talker), {"extra_body": {"temperature": 0}}
    whole = client.messages.create(**say("calls"), **more)
    with client.messages.stream(**say("calls"), **more) as stream:
        streamed = stream.get_final_message()
    for told in (whole, streamed):
        assert "tool_use" == told.stop_reason
        thinking, text, first, second = told.content
        assert "Let me see." == thinking.thinking
        assert "I look." == text.text.strip()
        assert [("tool_use", "weather", OSLO), ("tool_use", "weather", ROME)] == [
            (each.type, each.name, each.input) for each in (first, second)
        ]


def test_a_history_of_uses_is_the_chats(talker) -> None:
    """Blocks sent back, with results as text or blocks, make the prompt of a chat."""
    client, more = claude(talker), {"extra_body": {"temperature": 0}}
    first = client.messages.create(**say("calls"), **more)
    uses = [block for block in first.content if block.type == "tool_use"]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": uses[0].id, "content": "3"},
        {
            "type": "tool_result",
            "tool_use_id": uses[1].id,
            "content": [{"type": "text", "text": "4"}],
            "is_error": True,
        },
        {"type": "text", "text": "So?"},
    ]
    history = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    request = say("prose", messages=history)
    told = client.messages.create(**request, **more)
    assert (SCRIPTS["prose"], "end_turn") == (told.content[0].text, told.stop_reason)
    calls = [
        {"id": each.id, "function": {"name": each.name, "arguments": json.dumps(each.input)}}
        for each in uses
    ]
    messages = [
        {"role": "system", "content": script("prose")},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": first.content[1].text, "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": uses[0].id},
        {"role": "tool", "content": "4", "tool_call_id": uses[1].id},
        {"role": "user", "content": "So?"},
    ]
    count = talker.post({"messages": messages, "tools": [CHAT_TOOL]}, "/tokenize").json()["count"]
    request.pop("max_tokens")
    assert count == client.messages.count_tokens(**request).input_tokens
    assert count == told.usage.input_tokens + told.usage.cache_read_input_tokens


# ---- both ----------------------------------------------------------------------------------------


def test_broken_arguments_are_no_error(talker) -> None:
    """What the model wrote comes as text where the API has text, and else as an empty object."""
    response = talker.client().responses.create(**ask("broken"))
    assert ["function_call"] == [item.type for item in response.output]
    assert '{"city": Oslo}' == response.output[0].arguments
    message = claude(talker).messages.create(**say("broken"), extra_body={"temperature": 0})
    assert [("tool_use", {})] == [(each.type, each.input) for each in message.content]


def test_one_call_where_clients_want_no_more(talker) -> None:
    response = talker.client().responses.create(**ask("calls", parallel_tool_calls=False))
    assert 1 == [item.type for item in response.output].count("function_call")
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    request = say("calls", tool_choice=choice, extra_body={"temperature": 0})
    message = claude(talker).messages.create(**request)
    assert 1 == [block.type for block in message.content].count("tool_use")


def test_templates_see_no_tools_where_clients_want_no_call(talker) -> None:
    client, body = claude(talker), without(say("prose"))
    none = client.messages.count_tokens(**body, tool_choice={"type": "none"})
    assert none == client.messages.count_tokens(**without(body, "tools"))
    first, second = (
        talker.client().responses.create(**each).usage.input_tokens
        for each in (ask("prose", tool_choice="none"), without(ask("prose"), "tools"))
    )
    assert first == second


def test_effort_and_thinking_reach_the_template(talker) -> None:
    """The template writes the effort; other arguments of it are the client's own."""
    plain = claude(talker).messages.count_tokens(**without(say("prose")))
    effort = {"output_config": {"effort": "high"}}
    found = claude(talker).messages.count_tokens(**without(say("prose")), **effort)
    assert found.input_tokens > plain.input_tokens
    first = talker.client().responses.create(**ask("prose")).usage.input_tokens
    second = talker.client().responses.create(**ask("prose", reasoning={"effort": "high"}))
    assert second.usage.input_tokens == first + found.input_tokens - plain.input_tokens


def without(body: dict[str, Any], name: str = "max_tokens") -> dict[str, Any]:
    """The request without a parameter."""
    return {key: value for key, value in body.items() if key != name}
