"""Anthropic's client: messages whole and streamed, tools, tokens counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers import client_cases as cases

pytestmark = pytest.mark.clients
#: The client has no parameter for temperatures any more.
ASKED: dict[str, Any] = {
    "model": cases.MODEL,
    "max_tokens": cases.MAX_TOKENS,
    "messages": cases.MESSAGES,
    "extra_body": {"temperature": 0},
}
TOOLS = [
    {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
    for each in cases.FUNCTIONS
]
CHOICES = [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "get_time"}]


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def text_of(message: Any) -> str:
    return "".join(each.text for each in message.content if each.type == "text")


def calls_of(message: Any) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a message, each checked."""
    calls = [each for each in message.content if each.type == "tool_use"]
    for each in calls:
        assert each.id
        cases.check_call(each.name, each.input)
    assert ("tool_use" if calls else "end_turn") == message.stop_reason
    return [(each.name, each.input) for each in calls]


def test_message(client: Any) -> None:
    answer = client.messages.create(**ASKED, system="Answer in one sentence.")
    assert cases.ANSWER in text_of(answer)
    assert ("assistant", "message", "end_turn") == (answer.role, answer.type, answer.stop_reason)
    assert answer.usage.input_tokens > 0
    assert 0 < answer.usage.output_tokens <= cases.MAX_TOKENS


def test_message_that_is_cut(client: Any) -> None:
    assert "max_tokens" == client.messages.create(**ASKED | {"max_tokens": 3}).stop_reason


def test_stop_sequences(client: Any) -> None:
    answer = client.messages.create(**ASKED, stop_sequences=["§", cases.ANSWER])
    assert ("stop_sequence", cases.ANSWER) == (answer.stop_reason, answer.stop_sequence)
    assert cases.ANSWER not in text_of(answer)


def test_stream(client: Any) -> None:
    whole = client.messages.create(**ASKED)
    with client.messages.stream(**ASKED) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text_of(whole) == streamed == text_of(final)
    assert (whole.stop_reason, whole.usage.output_tokens) == (
        final.stop_reason,
        final.usage.output_tokens,
    )


def test_texts_as_blocks(client: Any) -> None:
    """With hints for a cache, as agents send them; and a system prompt of blocks."""
    block = {"type": "text", "text": cases.QUESTION, "cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "Answer in one sentence."}]
    asked = ASKED | {"messages": [{"role": "user", "content": [block]}], "system": system}
    assert cases.ANSWER in text_of(client.messages.create(**asked))


def test_fields_without_an_effect_here(client: Any) -> None:
    plain = text_of(client.messages.create(**ASKED))
    fields = {"metadata": {"user_id": "me"}, "thinking": {"type": "disabled"}}
    assert plain == text_of(client.messages.create(**ASKED, **fields, service_tier="auto"))


def test_count_tokens(client: Any) -> None:
    """Equal to what a message reports; tools may add to it."""
    counted = client.messages.count_tokens(model=cases.MODEL, messages=cases.MESSAGES)
    usage = client.messages.create(**ASKED).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    longer = client.messages.count_tokens(
        model=cases.MODEL, messages=cases.MESSAGES, system="Be brief."
    )
    assert longer.input_tokens != counted.input_tokens
    with_tools = client.messages.count_tokens(
        model=cases.MODEL, messages=cases.MESSAGES, tools=TOOLS
    )
    assert with_tools.input_tokens >= counted.input_tokens


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice["type"])
def test_tools(client: Any, choice: dict[str, Any]) -> None:
    """Whole, and streamed with the client's own accumulator."""
    asked = ASKED | {"tools": TOOLS, "tool_choice": choice}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    calls = calls_of(whole)
    assert calls == calls_of(streamed)
    assert text_of(whole) == text_of(streamed)
    assert calls or choice["type"] == "auto"
    assert choice["type"] != "tool" or ["get_time"] == [name for name, _ in calls]


def test_no_tools_wanted(client: Any) -> None:
    answer = client.messages.create(**ASKED, tools=TOOLS, tool_choice={"type": "none"})
    assert [] == calls_of(answer)
    assert text_of(answer)


def test_tool_history(client: Any) -> None:
    arguments = {"city": "Paris", "unit": "celsius"}
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": arguments}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": cases.HISTORY[2]["content"],
    }
    messages = [
        cases.HISTORY[0],
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    assert text_of(client.messages.create(**ASKED | {"messages": messages, "tools": TOOLS}))


def test_parse(client: Any) -> None:
    assert isinstance(
        client.messages.parse(**ASKED, output_format=cases.City).parsed_output, cases.City
    )


def test_errors_are_of_its_form(client: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**ASKED | {"model": "other"})
    assert "not_found_error" == missing.value.body["error"]["type"]
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(**ASKED | {"max_tokens": 10**9})
    assert "max_tokens" in wrong.value.body["error"]["message"]
