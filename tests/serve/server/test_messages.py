"""Anthropic's Messages API, by the anthropic client and by the bytes it reads."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from helpers.serving import LONG, named_events, scripted_form, tiny_tokenizer

from vmkv.serve.request import CompletionOutput, FinishReason
from vmkv.serve.server import Limits
from vmkv.serve.server.errors import ApiError
from vmkv.serve.server.messages import MessagesRequest, MessageWriter
from vmkv.serve.server.reply import ReplyDelta, ToolCallDelta
from vmkv.serve.server.schema import validated

anthropic = pytest.importorskip("anthropic")
from anthropic.types import Message, RawMessageStreamEvent  # noqa: E402
from pydantic import TypeAdapter  # noqa: E402

PATH = "/v1/messages"
SAYS = [{"role": "user", "content": "What is a page?"}]
ASK: dict[str, Any] = {"model": "tiny", "messages": SAYS, "max_tokens": 8}
#: Parameters that the client does not have.
MORE: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
BLOCKS: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "A row", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "and a page."},
        ],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "A row is a range."},
        ],
    },
    {"role": "user", "content": "And a page?"},
]
CHAT = [
    {"role": "system", "content": "Be\nbrief."},
    {"role": "user", "content": "A row\nand a page."},
    {"role": "assistant", "content": "A row is a range."},
    {"role": "user", "content": "And a page?"},
]
SYSTEM = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]


def client_of(server: Any, **options: Any) -> Any:
    """An Anthropic client that does not retry."""
    options = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
    return server.clients.enter_context(anthropic.Anthropic(base_url=server.url, **options))


def chat_of(server: Any, messages: Any = SAYS, **options: Any) -> dict[str, Any]:
    """The answer of a chat with the same sampling."""
    body = {"messages": messages, "max_tokens": 8, **MORE, **options}
    answer = server.post(body, "/v1/chat/completions")
    assert 200 == answer.status_code, answer.text
    return answer.json()


def text_of(server: Any, messages: Any = SAYS, **options: Any) -> str:
    """The text of a chat with the same sampling."""
    return chat_of(server, messages, **options)["choices"][0]["message"]["content"]


def events_of(data: bytes | str) -> list[dict[str, Any]]:
    """Parse events, and check that each is named as its type and is one that the client knows."""
    found = named_events(data)
    for event in found:
        if event["type"] not in ("ping", "error"):
            TypeAdapter(RawMessageStreamEvent).validate_python(event)
    return found


# ---- text ----------------------------------------------------------------------------------------


def test_a_message_has_the_text_of_the_chat(server) -> None:
    """Blocks and the system's text are those of the chat; thinking is kept apart."""
    told = client_of(server).messages.create(
        **ASK | {"messages": BLOCKS}, system=SYSTEM, extra_body=MORE
    )
    assert text_of(server, CHAT) == told.content[0].text
    assert ("max_tokens", None) == (told.stop_reason, told.stop_sequence)
    assert ("assistant", "message", "tiny") == (told.role, told.type, told.model)
    usage = chat_of(server, CHAT)["usage"]
    num_prompt = told.usage.input_tokens + told.usage.cache_read_input_tokens
    assert (usage["prompt_tokens"], 8) == (num_prompt, told.usage.output_tokens)
    chat = validated({"max_tokens": 1, "messages": BLOCKS}, MessagesRequest).chat()
    assert "Hm." == chat.conversation()[1]["reasoning_content"]


def test_cached_tokens_are_no_input_tokens(server) -> None:
    """They are counted apart, and the sum is the prompt."""
    body = ASK | {"messages": [{"role": "user", "content": "the same text. " * 30}]}
    first, second = (client_of(server).messages.create(**body).usage for _ in range(2))
    assert 0 == first.cache_read_input_tokens < second.cache_read_input_tokens
    assert first.input_tokens == second.input_tokens + second.cache_read_input_tokens


def test_a_stop_sequence_is_told(server) -> None:
    stop = text_of(server)[4:6]
    told = client_of(server).messages.create(**ASK, stop_sequences=["never", stop], extra_body=MORE)
    assert text_of(server).partition(stop)[0] == told.content[0].text
    assert ("stop_sequence", stop) == (told.stop_reason, told.stop_sequence)


def test_the_models_own_end_is_end_turn(server) -> None:
    """A stop token is none of the client's sequences."""
    first = tiny_tokenizer()(text_of(server))["input_ids"][0]
    told = client_of(server).messages.create(
        **ASK, extra_body={"temperature": 0, "stop_token_ids": [first]}
    )
    assert ("end_turn", None) == (told.stop_reason, told.stop_sequence)


def test_a_last_message_of_the_assistant_is_continued(server) -> None:
    begun = [*SAYS, {"role": "assistant", "content": "A page"}]
    told = client_of(server).messages.create(**ASK | {"messages": begun}, extra_body=MORE)
    assert text_of(server, begun, continue_final_message=True) == told.content[0].text


def test_tokens_are_counted(server) -> None:
    """As a message uses them; `max_tokens` is not needed."""
    client = client_of(server)
    found = client.messages.count_tokens(model="tiny", messages=BLOCKS, system=SYSTEM)
    told = server.post({"messages": CHAT}, "/tokenize").json()
    assert told["count"] == found.input_tokens
    usage = client.messages.create(**ASK | {"messages": BLOCKS}, system=SYSTEM).usage
    assert found.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


# ---- streams -------------------------------------------------------------------------------------


def test_events_tell_the_whole_message(server) -> None:
    """In the API's order."""
    answer = server.post(ASK | MORE | {"stream": True}, PATH)
    assert "text/event-stream" in answer.headers["content-type"]
    events = events_of(answer.text)
    deltas = [each["delta"] for each in events if each["type"] == "content_block_delta"]
    assert [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * len(deltas),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ] == [event["type"] for event in events]
    assert len(deltas) > 1
    assert text_of(server) == "".join(delta["text"] for delta in deltas)
    assert {"stop_reason": "max_tokens", "stop_sequence": None} == events[-2]["delta"]
    assert 8 == events[-2]["usage"]["output_tokens"]


def test_the_clients_helper_follows_a_stream(server) -> None:
    with client_of(server).messages.stream(**ASK, extra_body=MORE) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text_of(server) == text == final.content[0].text
    assert "max_tokens" == final.stop_reason


def test_closing_a_stream_cancels_the_request(run_server) -> None:
    body = ASK | {"max_tokens": LONG["max_tokens"]}
    with run_server() as server:
        with client_of(server).messages.stream(**body, extra_body=MORE) as stream:
            assert "message_start" == next(iter(stream)).type
        server.watch.wait(lambda: len(server.watch.finished) == 1, "the end of the request")
        assert "cancelled" == server.watch.finished[0].finish_reason


def test_an_engine_that_fails_is_an_error_and_then_an_event(run_server) -> None:
    """Both in Anthropic's format: a response before the first event, an event after it."""
    with run_server() as server:
        body = ASK | MORE | {"max_tokens": 3000, "stream": True}
        with server.failing(RuntimeError("broken")) as fails:
            early = server.post(body, PATH)
            assert (500, "error") == (early.status_code, early.json()["type"])
            assert "api_error" == early.json()["error"]["type"]
            fails.clear()
            text = server.streamed_text(body, PATH, fails)
        *_, last = events_of(text)
        assert ("error", "api_error") == (last["type"], last["error"]["type"])


# ---- thinking and tools --------------------------------------------------------------------------

DELTAS = [
    ReplyDelta(reasoning="Let me "),
    ReplyDelta(reasoning="see."),
    ReplyDelta(content="I ask."),
    ReplyDelta(tool_calls=[ToolCallDelta(0, "call_a", "weather", '{"ci')]),
    ReplyDelta(
        tool_calls=[
            ToolCallDelta(0, None, None, 'ty": "Oslo"}'),
            ToolCallDelta(1, "call_b", "time", ""),
        ]
    ),
    ReplyDelta(tool_calls=[ToolCallDelta(1, None, None, "{}")]),
    ReplyDelta(),
]


def new_writer() -> MessageWriter:
    """A writer of the deltas with numbers."""
    return MessageWriter("tiny", scripted_form(DELTAS), "1")


def output(at: int, reason: FinishReason | None = None) -> CompletionOutput:
    """The delta with a number."""
    return CompletionOutput(0, [5], str(at), finish_reason=reason)


def test_thinking_text_and_calls_are_blocks() -> None:
    """The events hold what the whole message holds."""
    writer = new_writer()
    deltas = [output(at) for at in range(len(DELTAS) - 1)]
    deltas.append(output(len(DELTAS) - 1, FinishReason.STOP))
    events = events_of(b"".join(map(writer.events, deltas)) + writer.end())
    assert [(0, "thinking"), (1, "text"), (2, "tool_use"), (3, "tool_use")] == [
        (event["index"], event["content_block"]["type"])
        for event in events
        if event["type"] == "content_block_start"
    ]
    told = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert [
        {"type": "thinking_delta", "thinking": "Let me "},
        {"type": "thinking_delta", "thinking": "see."},
        {"type": "text_delta", "text": "I ask."},
        {"type": "input_json_delta", "partial_json": '{"ci'},
        {"type": "input_json_delta", "partial_json": 'ty": "Oslo"}'},
        {"type": "input_json_delta", "partial_json": "{}"},
    ] == told
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert [0, 1, 2, 3] == stops
    assert "tool_use" == events[-2]["delta"]["stop_reason"]


async def whole_of(deltas: list[CompletionOutput]) -> dict[str, Any]:
    """The message that is not streamed."""
    writer = new_writer()
    for delta in deltas:
        writer.add(delta)
    return json.loads(b"".join(await writer.whole()))


@pytest.mark.parametrize(
    ("reason", "stop"), [(FinishReason.STOP, "tool_use"), (FinishReason.LENGTH, "max_tokens")]
)
def test_a_whole_message_with_calls(reason: FinishReason, stop: str) -> None:
    """Arguments are objects; of ones that were cut, what is complete."""
    deltas = [output(at) for at in range(3)]
    cut = asyncio.run(whole_of([*deltas, output(3, reason)]))
    whole = asyncio.run(whole_of([*deltas, output(3), output(4), output(5, reason)]))
    for each in (cut, whole):
        Message.model_validate(each)
        assert stop == each["stop_reason"]
        assert {"type": "thinking", "thinking": "Let me see.", "signature": ""} == each["content"][
            0
        ]
    call = {"type": "tool_use", "id": "call_a", "name": "weather"}
    assert call | {"input": {}} == cut["content"][2]
    assert [
        call | {"input": {"city": "Oslo"}},
        {"type": "tool_use", "id": "call_b", "name": "time", "input": {}},
    ] == whole["content"][2:]


def test_a_failure_is_an_error_event() -> None:
    told = events_of(new_writer().failure(ApiError(503, "lost")))
    assert [{"type": "error", "error": {"type": "overloaded_error", "message": "lost"}}] == told


# ---- refusals ------------------------------------------------------------------------------------

IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}


def user(*blocks: Any) -> dict[str, Any]:
    """A request's messages with one message of blocks."""
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": None}, "messages: input should be a valid list"),
        ({"messages": []}, "messages: list should have at least 1 item"),
        (user(), "messages: list should have at least 1 item"),
        ({"messages": [{"role": "pope", "content": "x"}]}, "messages.0.role: input should be 'u"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: field required"),
        (user(IMAGE), "messages.0.content.0: type 'image' is not served, only: text, tool_use"),
        (user({"type": "text"}), "messages.0.content.0: an item of type text needs text"),
        (user({"type": "tool_use", "id": "1", "name": "f"}), "type tool_use needs input"),
        (user({"type": "tool_result"}), "type tool_result needs tool_use_id"),
        (
            user({"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}),
            "messages.0.content.0.content.0: type 'image' is not served, only: text",
        ),
        (user({"type": "tool_result", "tool_use_id": "1"}), "chat template refuses"),
        ({"system": [IMAGE]}, "system.0: type 'image' is not served"),
        ({"max_tokens": None}, "max_tokens: input should be a valid integer"),
        ({"max_tokens": 0}, "max_tokens: input should be greater than or equal to 1"),
        (
            {"max_tokens": 5000},
            "input length and `max_tokens` exceed context limit",
        ),
        ({"messages": [{"role": "user", "content": "x" * 50_000}]}, "prompt is too long: "),
        ({"temperature": -1}, "temperature=-1"),
        ({"n": 2}, "n: this route makes one answer"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences: list should have at most 16 items"),
        ({"stop_sequences": [""]}, "stop_sequences=('',) must be non-empty texts"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: field required"),
        (
            {"tools": [{"type": "bash_20250124", "name": "b", "input_schema": {}}]},
            "tools.0: type 'bash_20250124' is not served, only: custom",
        ),
        ({"tool_choice": {"type": "tool"}}, "tool_choice: an item of type tool needs name"),
        ({"tool_choice": {"type": "all"}}, "tool_choice: type 'all' is not served, only: auto"),
        ({"thinking": {"type": "often"}}, "thinking: type 'often' is not served, only: enabled"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": {"format": "json"}}, "output_config.format"),
        ({"output_config": {"effort": 3}}, "output_config.effort"),
    ],
)
def test_bad_requests_name_the_field(server, change: Any, message: str) -> None:
    """In Anthropic's format and words, which have no field for a parameter."""
    for is_streamed in (False, True):
        answer = server.post(ASK | change | {"stream": is_streamed}, PATH)
        assert 400 == answer.status_code, answer.text
        assert ["type", "error"] == list(answer.json())
        assert "invalid_request_error" == answer.json()["error"]["type"]
        assert message in answer.json()["error"]["message"]


def test_null_and_unknown_fields_are_accepted(server) -> None:
    idle = dict.fromkeys(("system", "tools", "tool_choice", "thinking", "stop_sequences"))
    idle |= {"metadata": {"user_id": "me"}, "service_tier": "auto", "container": None}
    idle |= {"output_config": {}, "of_tomorrow": 1}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    assert 200 == server.post(ASK | idle, PATH, **headers).status_code
    assert 200 == server.post(ASK | idle, f"{PATH}?beta=true").status_code


def test_errors_have_the_clients_classes(run_server) -> None:
    """By status and type: keys, models, methods, sizes and a server that stops."""
    with run_server(Limits(max_body_bytes=2000), api_keys=["key"]) as server:
        client = client_of(server, api_key="wrong")
        with pytest.raises(anthropic.AuthenticationError, match="needs an API key"):
            client.messages.create(**ASK)
        client = client_of(server, api_key="key")
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            client.messages.create(**ASK | {"model": "other"})
        with pytest.raises(anthropic.APIStatusError, match="request_too_large"):
            client.messages.create(**ASK | {"system": "x" * 3000})
        keyed = {"x-api-key": "key"}
        wrong = httpx.get(server.url + PATH, headers=keyed)
        assert (405, "error") == (wrong.status_code, wrong.json()["type"])
        server.service.is_draining = True
        answer = server.post(ASK, PATH, **keyed)
        assert (503, "overloaded_error") == (answer.status_code, answer.json()["error"]["type"])


def test_a_key_may_come_in_either_header(run_server) -> None:
    """Anthropic's clients send `x-api-key` or a bearer token, as they were configured."""
    with run_server(api_keys=["key"]) as server:
        for right in ({"x-api-key": "key"}, {"Authorization": "Bearer key"}):
            assert 200 == server.post(ASK, PATH, **right).status_code
            assert 200 == httpx.get(f"{server.url}/v1/models", headers=right).status_code
        for wrong in ({"x-api-key": "other"}, {"x-api-key": ""}, {"x-api-key": "Bearer key"}, {}):
            assert 401 == server.post(ASK, PATH, **wrong).status_code
        both = {"x-api-key": "key", "Authorization": "Bearer other"}
        assert 401 == server.post(ASK, PATH, **both).status_code


@pytest.mark.parametrize("depth", [150, 500, 100_000])
def test_nested_values_are_served_or_a_short_error(server, depth: int) -> None:
    """Of tools, of their input and of what a response repeats."""
    deep = '{"a":' * depth + "1" + "}" * depth
    call = f'{{"type":"tool_use","id":"1","name":"f","input":{deep}}}'
    for path, body in (
        (PATH, f'"messages":[{{"role":"assistant","content":[{call}]}}],"max_tokens":1'),
        ("/v1/responses", f'"input":"x","max_output_tokens":1,"metadata":{deep}'),
        ("/v1/responses", f'"input":"x","max_output_tokens":1,"text":{deep}'),
    ):
        answer = server.post(f"{{{body}}}".encode(), path)
        assert answer.status_code == (200 if depth == 150 else 400), answer.text
        assert len(answer.content) < (5000 if depth == 150 else 500)


def test_half_a_surrogate_pair_is_400(server) -> None:
    """No tokenizer reads it."""
    for body in (user({"type": "text", "text": "\ud800"}), {"system": "\ud800"}):
        answer = server.post(ASK | body, PATH)
        assert (400, "error") == (answer.status_code, answer.json()["type"])
