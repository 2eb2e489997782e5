"""What coding agents send: instructions anywhere, tools of other kinds, a context that is full."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.scripted import CHAT_TEMPLATE, script, scripted
from helpers.serving import CHAT, tiny_tokenizer

from vmkv.serve.params import SamplingParams
from vmkv.serve.request import CompletionOutput, FinishReason, RequestOutput
from vmkv.serve.server.choices import ChatForm, Tokens
from vmkv.serve.server.messages import MessagesRequest
from vmkv.serve.server.reply import ReplyDelta
from vmkv.serve.server.responses import ResponsesRequest
from vmkv.serve.server.schema import ChatRequest, validated

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "yes"}
RUN: dict[str, Any] = {"name": "run", "parameters": {"type": "object", "properties": {}}}
HEADER = "x-anthropic-billing-header: cc_version=2.1; cch=0001;"
#: Forms of templates: with any role, with some, with a system message at the beginning, without.
_FORM = "{% for m in messages %}CHECK<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
EACH = _FORM.replace("CHECK", "")
DROPPING = _FORM.replace(
    "CHECK", "{% if m.role == 'system' and loop.index > 1 %}{% continue %}{% endif %}"
)
ONE = _FORM.replace(
    "CHECK",
    "{% if m.role == 'developer' or m.role == 'system' and not loop.first %}"
    "{{ raise_exception('at the beginning') }}{% endif %}",
)
NONE = _FORM.replace("CHECK", "{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}")
CHANGING = _FORM.replace("CHECK", "").replace("m.content", "m.content | replace('/think', '')")
KNOWING = _FORM.replace("CHECK", "{# developer #}")


def system(text: str, role: str = "system") -> dict[str, str]:
    return {"role": role, "content": text}


def rendered(server: Any, **body: Any) -> str:
    return tiny_tokenizer().decode(server.ask(body, "/tokenize")["tokens"])


# ---- instructions --------------------------------------------------------------------------------

LATE = [system("A"), system("B"), USER, system("C"), ASSISTANT, system("D", "developer"), USER]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (EACH, LATE, "<system>A<system>B<user>hi<system>C<assistant>yes<system>D<user>hi"),
        (ONE, LATE, "<system>A\n\nB<user>hi\n\nC<assistant>yes<user>D\n\nhi"),
        (DROPPING, LATE, "<system>A\n\nB<user>hi\n\nC<assistant>yes<user>D\n\nhi"),
        (NONE, LATE, "<user>A\n\nB\n\nhi\n\nC<assistant>yes<user>D\n\nhi"),
        (NONE, [USER, ASSISTANT, system("A"), system("B")], "<user>hi<assistant>yes<user>A\n\nB"),
        (CHANGING, [system("A/think"), USER], "<system>A<user>hi"),
        (KNOWING, [system("A", "developer"), USER], "<developer>A<user>hi"),
    ],
)
def test_instructions_reach_every_template(
    run_server, template: str, messages: Any, expected: str
) -> None:
    """In place where the template has them, else within the messages beside them."""
    with run_server(chat_template=template) as server:
        assert f"{expected}<assistant>" == rendered(server, messages=messages)


def test_the_line_that_changes_with_each_request_is_left_out(run_server) -> None:
    """Of the system, as text and as blocks, and wherever it is."""
    blocks = [{"type": "text", "text": text} for text in (HEADER, "Be brief.")]
    late = {"role": "system", "content": f"{HEADER}\nA"}
    with run_server(chat_template=EACH) as server:
        for given in (blocks, f"{HEADER}\nBe brief."):
            body = {"max_tokens": 1, "system": given, "messages": [USER, late]}
            chat = validated(body, MessagesRequest).chat().model_dump(include={"messages"})
            assert "<system>Be brief.<user>hi<system>A<assistant>" == rendered(server, **chat)


def test_effort_none_turns_thinking_off(run_server) -> None:
    template = EACH + "{{ enable_thinking }}{{ thinking }}{{ reasoning_effort }}"
    with run_server(chat_template=template) as server:
        assert rendered(server, messages=[USER], reasoning_effort="none").endswith("FalseFalsenone")
        assert rendered(server, messages=[USER], reasoning_effort="low").endswith("<assistant>low")
        own = {"enable_thinking": True}
        told = rendered(server, messages=[USER], reasoning_effort="none", chat_template_kwargs=own)
        assert told.endswith("TrueFalsenone")


def test_parts_are_texts_of_any_kind(run_server) -> None:
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, "a"]}
    parts = ["x", {"type": "input_text", "text": "y"}, {"type": "output_text", "text": "z"}]
    template = _FORM.replace("CHECK", "({{ m.reasoning_content }})")
    with run_server(chat_template=template) as server:
        told = rendered(server, messages=[{"role": "user", "content": parts}, thought, USER])
        assert "()<user>x\ny\nz(t)<assistant>a()<user>hi<assistant>" == told


# ---- tools ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def speaker() -> Iterator[Any]:
    """A server whose model calls a function of a namespace when it is told to."""
    from .conftest import running

    call = '<think>Yes.</think>\n\n<tool_call>\n{"name": "agents__close", "arguments": {}}'
    call += "\n</tool_call>"
    model, tokenizer = scripted({"calls": call})
    with running(model=model, tokenizer=tokenizer, chat_template=CHAT_TEMPLATE) as it:
        yield it


AGENTS = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "close"}]}


def test_other_tools_are_skipped_and_namespaces_flattened(speaker) -> None:
    """The call of a function has its namespace apart, as the request had it."""
    function = {"type": "function", **RUN}
    others = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch", "format": {}}]
    body = {"input": script("calls"), "tools": [function, AGENTS, *others]}
    chat = validated(body, ResponsesRequest).chat()
    assert ["run", "agents__close"] == [each.function.name for each in chat.tools or ()]
    answer = speaker.ask(body, "/v1/responses")
    (call,) = [each for each in answer["output"] if each["type"] == "function_call"]
    assert ("agents", "close", "{}") == (call["namespace"], call["name"], call["arguments"])
    messages = {"max_tokens": 1, "messages": [USER], "tools": [{"type": "web_search_20250305"}]}
    assert 200 == speaker.post(messages, "/v1/messages").status_code
    bare = {"messages": [USER], "tools": [{"function": RUN}, *others], "max_tokens": 1}
    choice = {"function": {"name": "run"}}
    for more in ({}, {"tool_choice": choice}):
        assert 200 == speaker.post(bare | more, "/v1/chat/completions").status_code
    for wrong in ([{"type": "namespace", "tools": [3]}], [{"type": "namespace", "tools": 3}, 4]):
        assert 400 == speaker.post(body | {"tools": wrong}, "/v1/responses").status_code


def test_calls_of_other_tools_are_a_conversation() -> None:
    """Of a client's tools they are calls and results; of a server's they are left out."""
    history = [
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "Done"},
        {"type": "local_shell_call", "id": "2", "call_id": None, "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "2", "output": "{}"},
        {
            "type": "function_call",
            "namespace": "agents",
            "name": "close",
            "call_id": "3",
            "arguments": "",
        },
        {
            "type": "web_search_call",
            "id": "ws",
            "status": "completed",
            "action": {"type": "search"},
        },
        {"type": "tool_search_call", "call_id": "4", "arguments": {"query": "x"}},
    ]
    chat = validated({"input": history}, ResponsesRequest).chat().conversation()
    calls = [each["function"] for message in chat for each in message.get("tool_calls", ())]
    assert [
        {"name": "apply_patch", "arguments": {"input": "*** Begin"}},
        {"name": "local_shell", "arguments": {"command": ["ls"]}},
        {"name": "agents__close", "arguments": {}},
    ] == calls
    results = [(each["tool_call_id"], each["content"]) for each in chat if each["role"] == "tool"]
    assert [("1", "Done"), ("2", "{}")] == results
    found = [{"type": "tool_reference", "tool_name": "WebFetch"}, {"type": "text", "text": "x"}]
    blocks = [
        {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "1", "content": [{"type": "web"}]},
        {"type": "tool_result", "tool_use_id": "2", "content": found},
    ]
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": blocks}]}
    (result,) = validated(body, MessagesRequest).chat().conversation()
    assert ("tool", "WebFetch\nx") == (result["role"], result["content"])


def test_threads_are_refused_so_that_clients_send_everything(server) -> None:
    anthropic = pytest.importorskip("anthropic")
    body = {"model": "tiny", "max_tokens": 1, "messages": [USER]}
    client = server.clients.enter_context(
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    )
    for kind in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(**body, extra_body={"thread": kind})
        details = refused.value.body["error"]["details"]
        assert "thread_unsupported_request" == details["error_code"]
    assert 200 == server.post(body | {"thread": None}, "/v1/messages").status_code


# ---- answers -------------------------------------------------------------------------------------


def test_tokens_without_a_text_are_counted_where_their_text_comes() -> None:
    """A delta is made only where there is text, and may have several tokens."""

    class Parser:
        def push(self, text: str, *, is_last: bool) -> ReplyDelta:
            return ReplyDelta(reasoning=text) if text.isupper() else ReplyDelta(content=text)

    body = ChatRequest.model_validate(CHAT)
    form = ChatForm(Tokens(tiny_tokenizer()), body, SamplingParams(), lambda _: Parser())
    for text, num_tokens in (("", 2), ("A", 1), ("B", 3), ("x", 1), ("", 1), ("y", 1)):
        end = FinishReason.STOP if text == "y" else None
        sample = CompletionOutput(0, [5] * num_tokens, text, finish_reason=end)
        for delta in form.advance(0, RequestOutput(0, None, [1], [sample])):
            form.choice(delta, is_chunk=True)
    assert 6 == form.usage()["completion_tokens_details"]["reasoning_tokens"]


# ---- schemas -------------------------------------------------------------------------------------

TINY = {"type": "integer", "minimum": 1, "maximum": 3}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "string", "pattern": "^(?!admin)[a-z]{3}$", "maxLength": 3},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"allOf": [{"minimum": -(2**63)}, {"maximum": 2**63 - 1}], "type": "integer"},
        {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
        {"type": "string", "maxLength": 2**64},
        {"type": "object", "properties": {"pattern": {"pattern": r"(a)\1", "type": "string"}}},
        {"type": "object", "patternProperties": {"^(?!x)": {"type": "string"}}},
    ],
)
def test_bounds_that_cannot_be_compiled_have_no_effect_unless_strict(server, part: Any) -> None:
    """Other bounds keep theirs."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}, "a": part}, "required": ["n"]}
    for is_strict in (False, True):
        named = {"name": "x", "schema": schema, "strict": is_strict}
        tool = {"type": "function", "function": RUN | {"parameters": schema, "strict": is_strict}}
        for more in (
            {"response_format": {"type": "json_schema", "json_schema": named}, "max_tokens": 40},
            {"tools": [tool], "tool_choice": "required"},
        ):
            answer = server.post(CHAT | more, "/v1/chat/completions")
            assert answer.status_code == (400 if is_strict else 200), answer.text


# ---- bodies --------------------------------------------------------------------------------------


def test_a_compressed_body_and_an_infinite_number_say_what_they_are(server) -> None:
    refused = server.post(b"\x1f\x8b", "/v1/completions", **{"Content-Encoding": "gzip"})
    assert (400, "Content-Encoding 'gzip' is not supported: send the body as it is") == (
        refused.status_code,
        refused.json()["error"]["message"],
    )
    for number in ("1e999", "9" * 400 + ".0"):
        infinite = json.dumps(CHAT | {"chat_template_kwargs": {"a": [0]}}).replace("[0]", number)
        refused = server.post(infinite.encode(), "/v1/chat/completions")
        assert (400, True) == (refused.status_code, "too large" in refused.text)
    text = {"prompt": "1e999", "max_tokens": 1}
    assert 200 == server.post(text).status_code
