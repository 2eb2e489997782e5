"""OpenAI's Responses API, by the openai client and by the bytes it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from helpers.serving import LONG, named_events, scripted_form

from vmkv.serve.request import CompletionOutput, FinishReason
from vmkv.serve.server.errors import ApiError
from vmkv.serve.server.reply import ReplyDelta, ToolCallDelta
from vmkv.serve.server.responses import ResponsesRequest, ResponseWriter
from vmkv.serve.server.schema import validated

openai = pytest.importorskip("openai")
from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402
from pydantic import TypeAdapter  # noqa: E402

PATH = "/v1/responses"
ASK: dict[str, Any] = {"model": "tiny", "input": "What is a page?", "temperature": 0}
CUT: dict[str, Any] = ASK | {"max_output_tokens": 8}
SAYS = [{"role": "user", "content": "What is a page?"}]
ITEMS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "A row"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "content": [{"type": "output_text", "text": "is a range.", "annotations": []}],
    },
    {"type": "message", "role": "user", "content": "And a page?"},
]


def chat_of(server: Any, messages: Sequence[Any], **options: Any) -> dict[str, Any]:
    """The answer of a chat with the same sampling."""
    body = {"messages": messages, "temperature": 0, "ignore_eos": True, **options}
    return server.post(body, "/v1/chat/completions").json()


def text_of(server: Any, messages: Sequence[Any] = SAYS, num_tokens: int = 8) -> str:
    """The text of a chat with the same sampling."""
    return chat_of(server, messages, max_tokens=num_tokens)["choices"][0]["message"]["content"]


def events_of(data: bytes | str) -> list[dict[str, Any]]:
    """Parse events, and check that each is named as its type and is one that the client knows."""
    found = named_events(data)
    for event in found:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    assert list(range(len(found))) == [event["sequence_number"] for event in found]
    return found


# ---- text ----------------------------------------------------------------------------------------


def test_a_response_has_the_text_of_the_chat(server) -> None:
    """`max_output_tokens` cuts it, as its status tells; instructions are the system's message."""
    told = server.client().responses.create(
        **CUT, instructions="Be brief.", store=True, extra_body={"ignore_eos": True}
    )
    system = {"role": "system", "content": "Be brief."}
    assert text_of(server, [system, *SAYS]) == told.output_text != text_of(server)
    assert ("incomplete", "max_output_tokens") == (told.status, told.incomplete_details.reason)
    assert ["incomplete"] == [item.status for item in told.output]
    usage = chat_of(server, [system, *SAYS], max_tokens=8)["usage"]
    assert usage["prompt_tokens"] == told.usage.input_tokens
    assert (8, usage["total_tokens"]) == (told.usage.output_tokens, told.usage.total_tokens)
    assert ("Be brief.", 8, 0) == (told.instructions, told.max_output_tokens, told.temperature)


def test_a_response_that_ends_by_itself_is_complete(server) -> None:
    """Sampling parameters that only vLLM has apply, too."""
    stop = text_of(server)[4:6]
    told = server.client().responses.create(
        **CUT, extra_body={"ignore_eos": True, "stop": [stop], "n": 1}
    )
    assert text_of(server).partition(stop)[0] == told.output_text
    assert ("completed", None) == (told.status, told.incomplete_details)
    Response.model_validate(told.model_dump())


def test_items_are_a_conversation(server) -> None:
    """Roles, kinds of parts and kinds of items become those of chats; reasoning is kept apart."""
    told = server.client().responses.create(
        **CUT | {"input": ITEMS}, extra_body={"ignore_eos": True}
    )
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "A row"},
        {"role": "assistant", "content": "is a range."},
        {"role": "user", "content": "And a page?"},
    ]
    assert text_of(server, messages) == told.output_text
    chat = validated({"input": ITEMS}, ResponsesRequest).chat()
    assert "Hm." == chat.conversation()[2]["reasoning_content"]


def test_instructions_and_a_first_system_message_are_one(server) -> None:
    """Many templates refuse a second one."""
    body = {"instructions": "A", "input": [{"role": "system", "content": "B"}, *SAYS]}
    found = validated(body, ResponsesRequest).chat().conversation()
    assert [("system", "A\nB"), ("user", "What is a page?")] == [
        (each["role"], each["content"]) for each in found
    ]


# ---- streams -------------------------------------------------------------------------------------


def test_events_tell_the_whole_response(server) -> None:
    """In the API's order; what they add up to is the response that is not streamed."""
    answer = server.post(CUT | {"stream": True, "ignore_eos": True}, PATH)
    assert "text/event-stream" in answer.headers["content-type"]
    events = events_of(answer.text)
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ] == [event["type"] for event in events]
    assert len(deltas) > 1
    assert text_of(server) == "".join(deltas) == events[-4]["text"]
    whole = server.post(CUT | {"ignore_eos": True}, PATH).json()
    last = events[-1]["response"]
    assert whole.keys() == last.keys()
    for each in (whole, last):
        each["output"][0].pop("id")
    changing = ("id", "created_at", "usage")  # The prompt is a cached one by now.
    assert [whole[name] for name in whole if name not in changing] == [
        last[name] for name in last if name not in changing
    ]


def test_the_clients_helper_follows_a_stream(server) -> None:
    stop = text_of(server)[4:6]
    more = {"ignore_eos": True, "stop": [stop]}
    with server.client().responses.stream(**CUT, extra_body=more) as stream:
        snapshots = [each.snapshot for each in stream if each.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert text_of(server).partition(stop)[0] == snapshots[-1] == final.output_text
    assert "completed" == final.status


def test_closing_a_stream_cancels_the_request(run_server) -> None:
    body = CUT | {"max_output_tokens": LONG["max_tokens"], "ignore_eos": True, "stream": True}
    with run_server() as server:
        with httpx.stream("POST", server.url + PATH, json=body, timeout=60) as answer:
            assert "event: response.created" == next(answer.iter_lines())
        server.watch.wait(lambda: len(server.watch.finished) == 1, "the end of the request")
        assert "cancelled" == server.watch.finished[0].finish_reason


def test_an_engine_that_fails_is_an_error_and_then_an_event(run_server) -> None:
    """An HTTP error before the first event, and `response.failed` after it."""
    with run_server() as server:
        body = CUT | {"max_output_tokens": 3000, "ignore_eos": True, "stream": True}
        with server.failing(RuntimeError("broken")) as fails:
            early = server.post(body, PATH)
            assert (500, "internal_error") == (early.status_code, early.json()["error"]["code"])
            fails.clear()
            text = server.streamed_text(body, PATH, fails)
        events = events_of(text)
        assert ["response.failed"] == [each["type"] for each in events if "fail" in each["type"]]
        assert "response.failed" == events[-1]["type"]
        told = events[-1]["response"]
        assert ("failed", "server_error") == (told["status"], told["error"]["code"])
        assert "incomplete" == told["output"][0]["status"]


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
BODY: dict[str, Any] = {
    "input": "What is the weather?",
    "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}],
    "tool_choice": {"type": "function", "name": "weather"},
    "parallel_tool_calls": False,
    "metadata": {"half": "\ud800"},
}


def outputs(reason: FinishReason = FinishReason.STOP) -> list[CompletionOutput]:
    """The deltas by number; the last one has ended."""
    last = len(DELTAS) - 1
    return [
        CompletionOutput(0, [5], str(at), finish_reason=reason if at == last else None)
        for at in range(len(DELTAS))
    ]


def test_reasoning_text_and_calls_are_items() -> None:
    """In their order; the events hold what the whole response holds."""
    body = validated(BODY, ResponsesRequest)
    writer, whole = (ResponseWriter(body, "tiny", scripted_form(DELTAS), "1") for _ in range(2))
    told = b""
    for delta in outputs():
        told += writer.events(delta)
        whole.add(delta)
    events = events_of(told + writer.end())
    response = events[-1]["response"]
    Response.model_validate(response)
    assert "response.completed" == events[-1]["type"]
    kinds = [(item["type"], item["status"]) for item in response["output"]]
    names = ["reasoning", "message", "function_call", "function_call", "message"]
    assert [(name, "completed") for name in names] == kinds
    reasoning, text, first, second, _ = response["output"]
    assert [{"type": "reasoning_text", "text": "Let me see."}] == reasoning["content"]
    assert "I ask." == text["content"][0]["text"]
    assert ("call_a", "weather", '{"city": "Oslo"}') == tuple(
        first[name] for name in ("call_id", "name", "arguments")
    )
    assert ("call_b", "time", "{}") == tuple(
        second[name] for name in ("call_id", "name", "arguments")
    )
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert response["output"] == done
    pieces = [each["delta"] for each in events if "arguments.delta" in each["type"]]
    assert ['{"ci', 'ty": "Oslo"}', "{}"] == pieces
    assert ["Let me ", "see."] == [
        event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"
    ]
    assert BODY["metadata"] == response["metadata"]


def test_an_answer_that_is_cut_within_a_call_is_incomplete() -> None:
    """As is the call; what precedes it is not."""
    writer = ResponseWriter(validated(BODY, ResponsesRequest), "tiny", scripted_form(DELTAS), "1")
    told = b"".join(map(writer.events, outputs()[:4]))
    told += writer.events(CompletionOutput(0, [5], "4", finish_reason=FinishReason.LENGTH))
    *_, done, last = events_of(told + writer.end())
    assert ("response.incomplete", "incomplete") == (last["type"], done["item"]["status"])
    statuses = [item["status"] for item in last["response"]["output"]]
    assert ["completed", "completed", "incomplete"] == statuses


def test_a_failure_tells_the_items_so_far() -> None:
    writer = ResponseWriter(validated(BODY, ResponsesRequest), "tiny", scripted_form(DELTAS), "1")
    told = b"".join(map(writer.events, outputs()[:5]))
    last = events_of(told + writer.failure(ApiError(503, "lost")))[-1]["response"]
    assert ["completed", "completed", "incomplete"] == [each["status"] for each in last["output"]]
    assert '{"ci' == last["output"][-1]["arguments"]


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"input": None}, "input", "valid string"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"role": "pope", "content": "x"}]}, "input.0.role", "'user'"),
        ({"input": [{"role": "user"}]}, "input.0", "needs content"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input.0", "item_reference"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0", "needs call_id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0",
            "type 'input_image' is not served, only: input_text",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]},
            "input",
            "chat template refuses",
        ),
        ({"input": "x" * 50_000}, "input", "maximum context length is 4096 tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "lower max_output_tokens"),
        ({"temperature": -1}, "temperature", "temperature=-1"),
        ({"n": 2}, "n", "makes one answer"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "responses are not stored"),
        ({"conversation": "conv_1"}, "conversation", "are not stored"),
        ({"prompt": {"id": "p"}}, None, "prompts are not stored"),
        ({"background": True}, "background", "sent to the request"),
        ({"include": ["message.output_text.logprobs"]}, "include", "log-probabilities"),
        ({"top_logprobs": 3}, "top_logprobs", "log-probabilities"),
        ({"tools": [{"name": "f"}]}, "tools.0.type", "field required"),
        ({"tools": [{"type": "function"}]}, "tools.0", "needs name"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "valid string"),
        ({"tool_choice": {}}, "tool_choice.type", "required"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"text": {"format": "json"}}, "text.format", "text.format: input should be a JSON object"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format.schema",
            "text.format.schema: field required",
        ),
        ({"reasoning": {"effort": 3}}, "reasoning.effort", ""),
    ],
)
def test_bad_requests_name_the_field(server, change: Any, param: str | None, message: str) -> None:
    """In the words of this API, whatever the chat that it is served as calls it."""
    for is_streamed in (False, True):
        answer = server.post(CUT | change | {"stream": is_streamed}, PATH)
        assert 400 == answer.status_code, answer.text
        error = answer.json()["error"]
        assert param == error["param"], error
        assert message in error["message"]


def test_null_and_unknown_fields_are_accepted(server) -> None:
    idle = dict.fromkeys(("instructions", "tools", "tool_choice", "text", "reasoning", "metadata"))
    idle |= {"previous_response_id": None, "conversation": None, "background": False}
    idle |= {"truncation": "auto", "service_tier": "auto", "include": [], "prompt_cache_key": "k"}
    idle |= {"text": {"verbosity": "low"}, "reasoning": {"summary": "auto"}, "of_tomorrow": 1}
    assert 200 == server.post(CUT | idle, PATH).status_code
