"""Events and errors of the Responses and the Messages API, by the bytes that their clients read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest
from helpers.apis import claude
from helpers.serving import named_events, scripted_form, tiny_tokenizer

from vmkv.serve.request import CompletionOutput, FinishReason
from vmkv.serve.server import Limits
from vmkv.serve.server.errors import ApiError
from vmkv.serve.server.items import ItemWriter
from vmkv.serve.server.messages import MessageWriter
from vmkv.serve.server.reply import ReplyDelta, ToolCallDelta
from vmkv.serve.server.responses import ResponsesRequest, ResponseWriter
from vmkv.serve.server.schema import validated

anthropic = pytest.importorskip("anthropic")
pytest.importorskip("openai")
from anthropic.types import Message, RawMessageStreamEvent  # noqa: E402
from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402
from pydantic import TypeAdapter  # noqa: E402

Json = dict[str, Any]
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
MORE: Json = {"temperature": 0, "ignore_eos": True}
SAYS = [{"role": "user", "content": "What is a page?"}]
ASK: dict[str, Json] = {
    RESPONSES: {"model": "tiny", "input": SAYS[0]["content"], "max_output_tokens": 8},
    MESSAGES: {"model": "tiny", "messages": SAYS, "max_tokens": 8},
}
EVENTS: dict[str, Any] = {RESPONSES: ResponseStreamEvent, MESSAGES: RawMessageStreamEvent}
both = pytest.mark.parametrize("path", [RESPONSES, MESSAGES])


def events_of(path: str, data: bytes | str) -> list[Json]:
    """Parse events, and check that each is named as its type and is one that the client knows."""
    found = named_events(data)
    for event in found:
        if path == RESPONSES or event["type"] not in ("ping", "error"):
            TypeAdapter(EVENTS[path]).validate_python(event)
    if path == RESPONSES:
        assert list(range(len(found))) == [event["sequence_number"] for event in found]
    return found


def text_of(server: Any) -> str:
    """The text of a chat with the same sampling."""
    body = {"messages": SAYS, "max_tokens": 8, **MORE}
    return server.post(body, "/v1/chat/completions").json()["choices"][0]["message"]["content"]


# ---- texts ---------------------------------------------------------------------------------------


def test_events_tell_the_whole_response(server) -> None:
    """In the API's order; what they add up to is the response that is not streamed."""
    body = ASK[RESPONSES] | MORE | {"instructions": "Be brief.", "store": True}
    answer = server.post(body | {"stream": True}, RESPONSES)
    assert "text/event-stream" in answer.headers["content-type"]
    events = events_of(RESPONSES, answer.text)
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
        *["response.output_text.delta"] * len(deltas),
        *("response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.incomplete"),
    ] == [event["type"] for event in events]
    assert len(deltas) > 1
    assert "".join(deltas) == events[-4]["text"]
    whole = server.post(body, RESPONSES).json()
    last = events[-1]["response"]
    assert whole.keys() == last.keys()
    for each in (whole, last):
        Response.model_validate(each)
        each["output"][0].pop("id")
        for name in ("id", "created_at", "usage"):  # The prompt is a cached one by now.
            each.pop(name)
    assert whole == last
    repeated = ("instructions", "max_output_tokens", "temperature")
    assert ["Be brief.", 8, 0] == [whole[name] for name in repeated]


def test_events_tell_the_whole_message(server) -> None:
    """In the API's order."""
    answer = server.post(ASK[MESSAGES] | MORE | {"stream": True}, MESSAGES)
    assert "text/event-stream" in answer.headers["content-type"]
    events = events_of(MESSAGES, answer.text)
    deltas = [each["delta"] for each in events if each["type"] == "content_block_delta"]
    assert [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * len(deltas),
        *("content_block_stop", "message_delta", "message_stop"),
    ] == [event["type"] for event in events]
    assert len(deltas) > 1
    whole = server.post(ASK[MESSAGES] | MORE, MESSAGES).json()
    assert ("assistant", "message", "tiny") == (whole["role"], whole["type"], whole["model"])
    assert whole["content"][0]["text"] == "".join(delta["text"] for delta in deltas)
    stop = {"stop_reason": "max_tokens", "stop_sequence": None}
    assert stop == events[-2]["delta"] == {name: whole[name] for name in stop}
    assert 8 == events[-2]["usage"]["output_tokens"]


def test_a_message_says_why_it_stops(server) -> None:
    """A stop token is none of the client's sequences."""
    text = text_of(server)
    body = ASK[MESSAGES] | MORE | {"stop_sequences": ["never", text[4:6]]}
    told = server.post(body, MESSAGES).json()
    assert ("stop_sequence", text[4:6]) == (told["stop_reason"], told["stop_sequence"])
    body = ASK[MESSAGES] | MORE | {"stop_token_ids": [tiny_tokenizer()(text)["input_ids"][0]]}
    told = server.post(body, MESSAGES).json()
    assert ("end_turn", None) == (told["stop_reason"], told["stop_sequence"])


def test_cached_tokens_are_no_input_tokens(server) -> None:
    """They are counted apart, and the sum is the prompt."""
    body = ASK[MESSAGES] | {"messages": [{"role": "user", "content": "the same text. " * 30}]}
    first, second = (server.post(body, MESSAGES).json()["usage"] for _ in range(2))
    assert 0 == first["cache_read_input_tokens"] < second["cache_read_input_tokens"]
    assert first["input_tokens"] == second["input_tokens"] + second["cache_read_input_tokens"]


# ---- reasoning and calls -------------------------------------------------------------------------

DELTAS = [
    ReplyDelta(reasoning="Let me "),
    ReplyDelta(reasoning="see."),
    ReplyDelta(),
    ReplyDelta(content="I ask."),
    ReplyDelta(tool_calls=[ToolCallDelta(0, "call_a", "weather", '{"ci')]),
    ReplyDelta(
        tool_calls=[
            ToolCallDelta(0, None, None, 'ty": "Oslo"}'),
            ToolCallDelta(1, "call_b", "time", ""),
        ]
    ),
    ReplyDelta(content=" Bye.", tool_calls=[ToolCallDelta(1, None, None, "{}")]),
]
BODY: Json = {
    "input": "What is the weather?",
    "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}],
    "tool_choice": {"type": "function", "name": "weather"},
    "parallel_tool_calls": False,
    "metadata": {"half": "\ud800"},
}
NAMES = {"model_name": "tiny", "answer_id": "1"}
WRITERS: dict[str, Callable[[], ItemWriter]] = {
    RESPONSES: lambda: scripted_form(
        DELTAS, partial(ResponseWriter, asked=validated(BODY, ResponsesRequest)), **NAMES
    ),
    MESSAGES: lambda: scripted_form(DELTAS, MessageWriter, **NAMES),
}


def outputs(count: int = len(DELTAS), reason: FinishReason | None = None) -> list[CompletionOutput]:
    """The first deltas by number; the last one ends for the reason."""
    ends = [None] * (count - 1) + [reason]
    return [CompletionOutput(0, [5], str(at), finish_reason=end) for at, end in enumerate(ends)]


def written(path: str, told: list[CompletionOutput]) -> tuple[list[Json], Json]:
    """The events of some deltas, and the whole answer."""
    writer, whole = WRITERS[path](), WRITERS[path]()
    for each in told:
        whole.add(each)
    answer = json.loads(b"".join(asyncio.run(whole.whole())))
    return events_of(path, b"".join(map(writer.events, told)) + writer.end()), answer


def test_reasoning_text_and_calls_are_items() -> None:
    """In their order; the events hold what the whole response holds."""
    events, response = written(RESPONSES, outputs(reason=FinishReason.STOP))
    assert ("response.completed", response) == (events[-1]["type"], events[-1]["response"])
    Response.model_validate(response)
    kinds = [(item["type"], item["status"]) for item in response["output"]]
    names = ["reasoning", "message", "function_call", "function_call", "message"]
    assert [(name, "completed") for name in names] == kinds
    reasoning, text, *calls, _ = response["output"]
    assert [{"type": "reasoning_text", "text": "Let me see."}] == reasoning["content"]
    assert "I ask." == text["content"][0]["text"]
    assert [("call_a", "weather", '{"city": "Oslo"}'), ("call_b", "time", "{}")] == [
        (call["call_id"], call["name"], call["arguments"]) for call in calls
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert response["output"] == done
    pieces = [each["delta"] for each in events if each["type"].endswith(".delta")]
    expected = ["Let me ", "see.", "I ask.", '{"ci', 'ty": "Oslo"}', "{}", " Bye."]
    assert expected == pieces
    assert BODY["metadata"] == response["metadata"]


def test_thinking_text_and_calls_are_blocks() -> None:
    """The events hold what the whole message holds."""
    events, message = written(MESSAGES, outputs(reason=FinishReason.STOP))
    Message.model_validate(message)
    kinds = ["thinking", "text", "tool_use", "tool_use", "text"]
    begun = [each for each in events if each["type"] == "content_block_start"]
    assert [*enumerate(kinds)] == [(it["index"], it["content_block"]["type"]) for it in begun]
    assert kinds == [block["type"] for block in message["content"]]
    told = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert [
        {"type": "thinking_delta", "thinking": "Let me "},
        {"type": "thinking_delta", "thinking": "see."},
        {"type": "text_delta", "text": "I ask."},
        {"type": "input_json_delta", "partial_json": '{"ci'},
        {"type": "input_json_delta", "partial_json": 'ty": "Oslo"}'},
        {"type": "input_json_delta", "partial_json": "{}"},
        {"type": "text_delta", "text": " Bye."},
    ] == told
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert [*range(5)] == stops
    assert "tool_use" == events[-2]["delta"]["stop_reason"] == message["stop_reason"]
    thinking, _, first, second, _ = message["content"]
    assert {"type": "thinking", "thinking": "Let me see.", "signature": ""} == thinking
    call = {"type": "tool_use", "id": "call_a", "name": "weather", "input": {"city": "Oslo"}}
    assert [call, {"type": "tool_use", "id": "call_b", "name": "time", "input": {}}] == [
        first,
        second,
    ]


def test_an_answer_that_is_cut_within_a_call_is_incomplete() -> None:
    """As is the call, of which a message holds what is complete; what precedes it is not."""
    *_, done, last = written(RESPONSES, outputs(5, FinishReason.LENGTH))[0]
    assert ("response.incomplete", "incomplete") == (last["type"], done["item"]["status"])
    statuses = [item["status"] for item in last["response"]["output"]]
    assert ["completed", "completed", "incomplete"] == statuses
    _, message = written(MESSAGES, outputs(5, FinishReason.LENGTH))
    assert ("max_tokens", {}) == (message["stop_reason"], message["content"][2]["input"])


def test_a_failure_is_told_with_the_items_so_far() -> None:
    writer = WRITERS[RESPONSES]()
    told = b"".join(map(writer.events, outputs(5))) + writer.failure(ApiError(503, "lost"))
    last = events_of(RESPONSES, told)[-1]["response"]
    assert ["completed", "completed", "incomplete"] == [each["status"] for each in last["output"]]
    assert '{"ci' == last["output"][-1]["arguments"]
    told = events_of(MESSAGES, WRITERS[MESSAGES]().failure(ApiError(503, "lost")))
    assert [{"type": "error", "error": {"type": "overloaded_error", "message": "lost"}}] == told


# ---- conversations -------------------------------------------------------------------------------


def test_parts_of_a_conversation_are_a_chats() -> None:
    """Reasoning is kept apart; many templates refuse a second system message."""
    text = {"type": "output_text", "text": "is a range.", "annotations": []}
    answer = {"type": "message", "role": "assistant", "status": "completed", "content": [text]}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "A row"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {**answer, "id": "msg_1"},
        {"type": "message", "role": "user", "content": "And a page?"},
    ]
    body = {"input": items, "instructions": "A"}
    found = validated(body, ResponsesRequest).chat().conversation()
    assert [
        ("system", "A\nBe brief.", None),
        ("user", "A row", None),
        ("assistant", "is a range.", "Hm."),
        ("user", "And a page?", None),
    ] == [(each["role"], each["content"], each.get("reasoning_content")) for each in found]


# ---- errors --------------------------------------------------------------------------------------


@both
def test_an_engine_that_fails_is_an_error_and_then_an_event(run_server, path: str) -> None:
    """In the API's format: a response before the first event, an event after it."""
    length = next(name for name in ASK[path] if name.startswith("max"))
    body = ASK[path] | MORE | {length: 3000, "stream": True}
    with run_server() as server, server.failing(RuntimeError("broken")) as fails:
        early = server.post(body, path)
        fails.clear()
        *_, last = events_of(path, server.streamed_text(body, path, fails))
    assert 500 == early.status_code
    if path == MESSAGES:
        for told in (early.json(), last):
            assert ("error", "api_error") == (told["type"], told["error"]["type"])
        return
    assert "internal_error" == early.json()["error"]["code"]
    told = last["response"]
    assert ("response.failed", "failed") == (last["type"], told["status"])
    assert ("server_error", "incomplete") == (told["error"]["code"], told["output"][0]["status"])


def test_errors_have_the_clients_classes(run_server) -> None:
    """By status and type: keys, models, methods, sizes and a server that stops."""
    ask = ASK[MESSAGES]
    with run_server(Limits(max_body_bytes=2000), api_keys=["key"]) as server:
        with pytest.raises(anthropic.AuthenticationError, match="needs an API key"):
            claude(server, api_key="wrong").messages.create(**ask)
        client = claude(server, api_key="key")
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            client.messages.create(**ask | {"model": "other"})
        with pytest.raises(anthropic.APIStatusError, match="request_too_large"):
            client.messages.create(**ask | {"system": "x" * 3000})
        keyed = {"x-api-key": "key"}
        wrong = httpx.get(server.url + MESSAGES, headers=keyed)
        assert (405, "error") == (wrong.status_code, wrong.json()["type"])
        # A key may come in either header.
        for right in (keyed, {"Authorization": "Bearer key"}):
            assert 200 == server.post(ask, MESSAGES, **right).status_code
            assert 200 == httpx.get(f"{server.url}/v1/models", headers=right).status_code
        for wrong in ({"x-api-key": "other"}, {"x-api-key": ""}, {"x-api-key": "Bearer key"}, {}):
            assert 401 == server.post(ask, MESSAGES, **wrong).status_code
        two = {"x-api-key": "key", "Authorization": "Bearer other"}
        assert 401 == server.post(ask, MESSAGES, **two).status_code
        server.service.is_draining = True
        answer = server.post(ask, MESSAGES, **keyed)
        assert (503, "overloaded_error") == (answer.status_code, answer.json()["error"]["type"])
