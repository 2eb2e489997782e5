"""Tool calls and reasoning over HTTP, by a model that answers with texts of our choice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
from helpers.scripted import script, scripted
from helpers.serving import tiny_tokenizer

from vmkv.errors import ConfigError
from vmkv.serve.detokenize import Detokenizer
from vmkv.serve.files import read_response_template
from vmkv.serve.guided import Grammars, check_grammar
from vmkv.serve.params import SamplingParams
from vmkv.serve.server import reply_format, tools
from vmkv.serve.server.errors import ApiError
from vmkv.serve.server.prompts import Prompts
from vmkv.serve.server.reply_format import Replies
from vmkv.serve.server.schema import ChatRequest

CHAT_PATH = "/v1/chat/completions"
NAMES = ("weather", "time")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tells the {name}.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/city"}},
                "required": ["city"],
                "$defs": {"city": {"type": "string"}},
            },
        },
    }
    for name in NAMES
]
CALLS = [("weather", {"city": "Paris"}), ("time", {"city": "Oslo"})]
MARKED = "\n".join(
    f"<tool_call>\n{json.dumps({'name': name, 'arguments': values})}\n</tool_call>"
    for name, values in CALLS
)
LISTED = json.dumps(
    [{"name": name, "parameters": values} for name, values in CALLS], separators=(",", ":")
)
NAMED = {"type": "function", "function": {"name": "time"}}
TOKENIZER = tiny_tokenizer()
SCRIPTS = {
    "calls": f"<think>\nBoth cities.\n</think>\n\nI look.\n{MARKED}",
    "thought": "<think>\nHm.\n</think>\n\nNo.",
    "broken": "Well.\n<tool_call>\n{'name': weather}\n</tool_call>",
    "listed": LISTED,
    "arguments": '{"city":"Rome"}',
    "long": '<tool_call>{"name": "weather", "arguments": {"city": "'
    + " ".join(map(str, range(300)))
    + '"}}</tool_call>',
}

needs_parser = pytest.mark.skipif(
    not reply_format._CAN_PARSE, reason="this release of transformers has no ResponseParser"
)


@pytest.fixture(scope="module")
def speaker(run_server: Any) -> Iterator[Any]:
    """A server of the scripted model."""
    if not reply_format._CAN_PARSE:
        pytest.skip("this release of transformers has no ResponseParser")
    model, tokenizer = scripted(SCRIPTS)
    with run_server(model=model, tokenizer=tokenizer) as it:
        yield it


def chat(name: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": script(name)}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "tools": TOOLS, **options}


def ask(server: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = server.post(body, CHAT_PATH)
    assert 200 == answer.status_code, answer.text
    return answer.json()["choices"]


def chunks(server: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a streamed answer."""
    with httpx.stream("POST", server.url + CHAT_PATH, json=body | {"stream": True}) as answer:
        assert 200 == answer.status_code
        *events, done = [line[len("data: ") :] for line in answer.iter_lines() if line]
    assert "[DONE]" == done
    return [choice for event in events for choice in json.loads(event)["choices"]]


def joined(parts: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that a choice's chunks add up to."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for part in parts:
        delta = part["delta"] if part["index"] == index else {}
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert len(message["tool_calls"]) == call["index"]
                message["tool_calls"].append(call)
            else:
                assert {"index", "function"} == call.keys()
                known = message["tool_calls"][call["index"]]["function"]
                known["arguments"] += call["function"]["arguments"]
    return message


def called(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [each["function"] for each in message["tool_calls"]]
    assert all(each["type"] == "function" for each in message["tool_calls"])
    return [(each["name"], json.loads(each["arguments"])) for each in functions]


def refused(server: Any, param: str, **options: Any) -> str:
    answer = server.post(chat("calls", **options), CHAT_PATH)
    assert 400 == answer.status_code, answer.text
    assert param == answer.json()["error"]["param"]
    return answer.json()["error"]["message"]


# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_answer_has_reasoning_content_and_calls_whole_and_streamed(speaker) -> None:
    (whole,) = ask(speaker, chat("calls"))
    message = whole["message"]
    assert "tool_calls" == whole["finish_reason"]
    assert ("Both cities.", "I look.") == (message["reasoning_content"], message["content"])
    assert message["reasoning"] == message["reasoning_content"]
    assert CALLS == called(message)
    parts = chunks(speaker, chat("calls"))
    streamed = joined(parts)
    assert CALLS == called(streamed)
    assert all(message[name] == streamed[name] for name in ("content", "reasoning_content"))
    assert ["tool_calls"] == [part["finish_reason"] for part in parts if part["finish_reason"]]
    # A chunk without anything to say is not sent, and arguments come in pieces.
    assert all(part["delta"] for part in parts[:-1])
    pieces = [call for part in parts for call in part["delta"].get("tool_calls", ())]
    assert len(pieces) > 2 * len(CALLS)


def test_reasoning_is_apart_from_content_without_tools_too(speaker) -> None:
    (choice,) = ask(speaker, chat("thought", tools=None))
    assert ("Hm.", "No.", "stop") == (
        choice["message"]["reasoning_content"],
        choice["message"]["content"],
        choice["finish_reason"],
    )


@pytest.mark.slow
def test_content_is_null_beside_calls_alone(speaker) -> None:
    (choice,) = ask(speaker, chat("long"))
    assert choice["message"]["content"] is None
    assert [("weather", {"city": " ".join(map(str, range(300)))})] == called(choice["message"])


@pytest.mark.slow
def test_openai_client_gets_calls_whole_and_streamed(speaker) -> None:
    client = speaker.client()
    message = client.chat.completions.create(**chat("calls")).choices[0].message
    assert CALLS == [
        (each.function.name, json.loads(each.function.arguments)) for each in message.tool_calls
    ]
    with client.chat.completions.stream(**chat("calls")) as stream:
        final = stream.get_final_completion().choices[0]
    assert "tool_calls" == final.finish_reason
    assert CALLS == [
        (each.function.name, json.loads(each.function.arguments))
        for each in final.message.tool_calls
    ]
    # The client sends its own message back, with null content and the calls.
    body = chat("thought")
    history = [*body["messages"], message.model_dump(exclude={"content"}) | {"content": None}]
    history += [
        {"role": "tool", "tool_call_id": each.id, "content": "warm"} for each in message.tool_calls
    ]
    answer = client.chat.completions.create(**body | {"messages": history})
    assert "No." == answer.choices[0].message.content


@pytest.mark.slow
def test_each_sample_has_its_own_parser_and_logprobs(speaker) -> None:
    body = chat("calls", n=3, logprobs=True, top_logprobs=1)
    choices = ask(speaker, body)
    parts = chunks(speaker, body)
    ids = set()
    for index, choice in enumerate(choices):
        assert CALLS == called(choice["message"]) == called(joined(parts, index))
        ids |= {call["id"] for call in choice["message"]["tool_calls"]}
        entries = [
            entry
            for part in parts
            if part["index"] == index and part["logprobs"]
            for entry in part["logprobs"]["content"]
        ]
        assert choice["logprobs"]["content"] == entries
        # The last is the end of sequence.
        assert SCRIPTS["calls"] == "".join(each["token"] for each in entries[:-1])
    assert 3 * len(CALLS) == len(ids)


def test_broken_json_is_content(speaker) -> None:
    (choice,) = ask(speaker, chat("broken"))
    expected = SCRIPTS["broken"].removesuffix("</tool_call>")
    assert (expected, "stop") == (choice["message"]["content"], choice["finish_reason"])
    assert "tool_calls" not in choice["message"]
    assert expected == joined(chunks(speaker, chat("broken")))["content"]


@pytest.mark.slow
def test_a_call_that_max_tokens_cuts_ends_by_length(speaker) -> None:
    (choice,) = ask(speaker, chat("long", max_tokens=200))
    (call,) = choice["message"]["tool_calls"]
    assert "length" == choice["finish_reason"]
    assert call["function"]["arguments"].startswith('{"city": "0 1 2')


@pytest.mark.slow
def test_a_call_that_a_stop_text_cuts_is_no_finished_call(speaker) -> None:
    """One whose arguments are whole is."""
    for options, reason in (
        ({"stop": "17 18"}, "stop"),
        ({"stop": "</tool_call>"}, "tool_calls"),
        ({"stop": "never"}, "tool_calls"),
    ):
        body = chat("long", **options)
        (choice,) = ask(speaker, body)
        *_, last = chunks(speaker, body)
        assert reason == choice["finish_reason"] == last["finish_reason"]
        assert 1 == len(choice["message"]["tool_calls"])
    body = chat("arguments", tool_choice=NAMED, stop="me")
    assert "stop" == ask(speaker, body)[0]["finish_reason"]


@pytest.mark.slow
def test_the_item_of_a_call_that_a_stop_text_cuts_is_incomplete(speaker) -> None:
    function = {"type": "function", **TOOLS[0]["function"]}
    body = {"input": script("long"), "temperature": 0, "tools": [function]}
    for stop, status in (("17 18", "incomplete"), ("</tool_call>", "completed")):
        told = speaker.post(body | {"stop": [stop]}, "/v1/responses").json()
        assert ("completed", [status]) == (told["status"], [it["status"] for it in told["output"]])
        streamed = speaker.post(body | {"stop": [stop], "stream": True}, "/v1/responses").text
        events = [json.loads(each[6:]) for each in streamed.splitlines() if each[:6] == "data: "]
        done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
        assert [status] == [each["status"] for each in done]
        assert told["output"][0]["arguments"] == done[0]["arguments"]


@pytest.mark.slow
def test_a_client_that_leaves_within_a_call_disturbs_no_other(speaker) -> None:
    with speaker.streaming(chat("long"), CHAT_PATH) as lines:
        while "arguments" not in next(lines):
            pass
        (choice,) = ask(speaker, chat("calls"))
    assert CALLS == called(choice["message"])
    speaker.until(lambda: not speaker.service.gate.num_inside)


# ---- tool_choice ---------------------------------------------------------------------------------


def test_required_calls_are_a_list_in_json(speaker) -> None:
    body = chat("listed", tool_choice="required")
    (choice,) = ask(speaker, body)
    assert (None, "tool_calls") == (choice["message"]["content"], choice["finish_reason"])
    assert CALLS == called(choice["message"]) == called(joined(chunks(speaker, body)))


def test_a_named_function_is_called_with_the_answer(speaker) -> None:
    body = chat("arguments", tool_choice=NAMED)
    (found,) = ask(speaker, body)
    assert [("time", {"city": "Rome"})] == called(found["message"])
    assert [("time", {"city": "Rome"})] == called(joined(chunks(speaker, body)))


def test_parallel_calls_can_be_turned_off(speaker) -> None:
    (choice,) = ask(speaker, chat("calls", parallel_tool_calls=False))
    assert CALLS[:1] == called(choice["message"])


def test_no_tool_is_offered_or_called_with_none(speaker) -> None:
    (choice,) = ask(speaker, chat("calls", tool_choice="none"))
    assert "<tool_call>" in choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    assert rendered(speaker, chat("calls", tools=None)) == rendered(
        speaker, chat("calls", tool_choice="none")
    )


# ---- prompts -------------------------------------------------------------------------------------


def rendered(server: Any, body: dict[str, Any]) -> str:
    """The prompt that a chat becomes."""
    body = {name: value for name, value in body.items() if name != "temperature"}
    answer = server.post(body | {"return_token_strs": True}, "/tokenize")
    assert 200 == answer.status_code, answer.text
    return server.service.prompts._tokenizer.decode(answer.json()["tokens"])


def test_the_template_gets_tools_history_and_effort(speaker) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    other = {"name": "time", "arguments": '{"city": "Oslo"}'}
    body = chat("calls", reasoning_effort="high")
    body["messages"] += [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call, call | {"function": other}],
            "reasoning": "Hm.",
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "warm"}]},
    ]
    text = rendered(speaker, body)
    assert json.dumps(TOOLS) in text
    assert "assistant\n(weather [])(time [('city', 'Oslo')])<|im_end|>" in text
    assert "tool\nwarm<|im_end|>" in text
    assert text.count("high") == 1


def test_arguments_are_text_for_templates_that_join_them(run_server) -> None:
    template = (
        "{% for message in messages %}{% for call in message.tool_calls or () %}"
        "{{ call.function.name + ':' + call.function.arguments }}{% endfor %}{% endfor %}"
    )
    call = {"function": {"name": "time", "arguments": '{"city":  "Oslo"}'}}
    with run_server(chat_template=template) as server:
        messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        body = {"messages": messages, "add_generation_prompt": False}
        assert 'time:{"city":  "Oslo"}' == rendered(server, body)


@needs_parser
@pytest.mark.slow
def test_mistral_common_renders_chats_and_its_calls_are_parsed() -> None:
    mistral_common = pytest.importorskip("mistral_common")
    data = Path(mistral_common.__file__).with_name("data")
    tokenizer = transformers.MistralCommonBackend(data / "tekken_240911.json")
    call = {"id": "abcdefghi", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "warm"},
    ]
    body = ChatRequest.model_validate({"model": "tiny", "messages": messages, "tools": TOOLS})
    prompts = Prompts(tokenizer, 4096)
    try:
        tokens = asyncio.run(prompts.tokens(body))
        with pytest.raises(ApiError, match="maximum context length is 8 tokens"):
            asyncio.run(Prompts(tokenizer, 8).tokens(body))
    finally:
        prompts.close()
    text = tokenizer.decode(tokens)
    assert '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}' in text
    assert '"description": "Tells the time."' in text
    params, new_parser = Replies(tokenizer).plan(body, SamplingParams())
    listed = json.dumps([{"name": name, "arguments": values} for name, values in CALLS])
    encode = tokenizer.tokenizer.instruct_tokenizer.tokenizer.encode
    output = [tokenizer.convert_tokens_to_ids("[TOOL_CALLS]"), *encode(listed, False, False)]
    detokenizer = Detokenizer(tokenizer, tokens, params)
    detokenizer.extend(output, is_last=True)
    reply = new_parser(tokens).push(detokenizer.take_text(), is_last=True)
    assert "" == reply.content
    assert CALLS == [(each.name, json.loads(each.arguments)) for each in reply.tool_calls]


# ---- schemas of forced calls ---------------------------------------------------------------------


def accepts(tools: list[dict[str, Any]], choice: Any, answer: Any) -> bool:
    """Whether a forced answer may be this value; `ConfigError` for a schema that is refused."""
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": choice}
    params, _ = Replies(TOKENIZER).plan(ChatRequest.model_validate(body), SamplingParams())
    form = params.structured_outputs
    check_grammar(form)
    grammars = Grammars(TOKENIZER, len(TOKENIZER), {1}, is_pinned=False)
    matcher = grammars.matcher(form)
    try:
        for token_id in [*TOKENIZER.encode(json.dumps(answer), add_special_tokens=False), 1]:
            if not matcher.state.compute_bitmask()[token_id // 8] >> token_id % 8 & 1:
                return False
            grammars.advance(form, matcher, token_id)
    except ConfigError:
        return False
    return True


def requires(arguments: Any, *schemas: dict[str, Any], strict: bool | None = None) -> bool:
    """Whether both forced forms take arguments of the last of functions with these schemas."""
    tools = [function(f"f{at}", **schema) for at, schema in enumerate(schemas)]
    for each in tools:
        each["function"]["strict"] = strict
    name = tools[-1]["function"]["name"]
    named = {"type": "function", "function": {"name": name}}
    listed = accepts(tools, "required", [{"name": name, "parameters": arguments}])
    assert listed == accepts(tools, named, arguments)
    return listed


def test_forced_arguments_are_an_object_whatever_the_schema_leaves_out() -> None:
    needs = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert requires({"a": 1}, needs)
    assert not requires("a", needs)
    assert not requires({"a": 1, "b": 2}, needs)
    assert requires({}, {"description": "No arguments."})
    assert not requires([], {"description": "No arguments."})
    assert not requires(None, {"type": ["object", "null"]})
    assert not requires([], {"anyOf": [{"required": ["a"]}, {"type": "array"}]})


def test_references_are_within_their_function() -> None:
    closed = {"type": "object", "additionalProperties": False}
    point = {**closed, "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    both = {"properties": {"from": point, "to": {"$ref": "#/properties/from"}}}
    other = {"$defs": {"a": {"type": "null"}}, "properties": {"a": {"$ref": "#/$defs/a"}}}
    assert requires({"from": {"x": 1}, "to": {"x": 2}}, other, both)
    assert not requires({"from": {"x": 1}, "to": {"y": 2}}, other, both)
    tree = {**closed, "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}
    assert requires({"kids": [{"kids": []}]}, other, tree)
    assert not requires({"kids": [{"name": "f"}]}, other, tree)
    same = {"$defs": {"a": {"type": "boolean"}}, "properties": {"a": {"$ref": "#/$defs/a"}}}
    assert requires({"a": True}, other, same)
    assert not requires({"a": None}, other, same)
    identified = {"$id": "https://example.com/f", **same}
    assert requires({"a": True}, other, identified)


def test_each_value_of_a_schema_is_visited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    visits = 0
    visit = tools._moved

    def counted(schema: Any, root: str) -> Any:
        nonlocal visits
        visits += 1
        return visit(schema, root)

    monkeypatch.setattr(tools, "_moved", counted)
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(12):
        schema = {"properties": {"a": schema}, "$defs": {"b": {"$ref": "#"}}}
    assert tools.forced_schema(
        [tools.Tool.model_validate(function("f", **schema))], "required", is_parallel=True
    )
    assert visits < 12 * 10


def test_names_and_values_that_look_like_references_stay() -> None:
    values = {"enum": [{"$ref": "#/a"}]}
    properties = {"$ref": {"type": "string"}, "e": values, "enum": {"$ref": "#/$defs/n"}}
    schema = {"properties": properties, "$defs": {"n": {"type": "integer"}}}
    assert requires({"$ref": "#/x", "e": {"$ref": "#/a"}, "enum": 1}, schema)
    assert not requires({"e": {"$ref": "#/items/a"}}, schema)
    assert not requires({"enum": "x"}, schema)


@pytest.mark.parametrize(
    "schema", [{"type": "array", "uniqueItems": True}, {"type": "string", "format": "binary"}]
)
def test_unknown_keywords_are_refused_in_strict_functions_only(schema) -> None:
    value = [] if schema["type"] == "array" else "x"
    assert requires({"a": value}, {"properties": {"a": schema}})
    assert not requires({"a": 1}, {"properties": {"a": schema}}, strict=False)
    for wrong, strict in ((schema, True), ({"type": "nope"}, None)):
        with pytest.raises(ConfigError, match=r"^structured_outputs: (Un|Inv)"):
            requires({"a": value}, {"properties": {"a": wrong}}, strict=strict)


# ---- refusals ------------------------------------------------------------------------------------


def function(name: str, **schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function", "field required"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
        ({"tools": [function("")]}, "tools.0.function.name", "at least 1 character"),
        ({"tools": [function("f")] * 1025}, "tools", "at most 1024"),
        ({"tools": [function("f", title="x" * (1 << 20))]}, "tools", "at most 1048576"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "none of the tools",
        ),
        ({"tool_choice": "maybe"}, "tool_choice", "none"),
        (
            {
                "tool_choice": "required",
                "tools": [function("f", properties={"a": {"type": "nope"}})],
                "response_format": {"type": "json_object"},
            },
            "tools",
            "Invalid type: nope",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "send tools"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages", "unknown role alien"),
        (
            {"tool_choice": "required", "tools": [function("f", type="array", items={})]},
            "tools",
            "the parameters of 'f' are of type 'array'",
        ),
        (
            {"tool_choice": NAMED, "tools": [function("time", type=["null", "string"])]},
            "tools",
            "a call's arguments are an object",
        ),
    ],
)
def test_wrong_tools_are_refused_by_name(speaker, options, param, message) -> None:
    assert message in refused(speaker, param, **options)


def test_ten_thousand_tools_are_one_clear_error(speaker) -> None:
    answer = speaker.post(chat("calls", tools=[function("f")] * 10_000), CHAT_PATH)
    assert 400 == answer.status_code
    assert len(answer.json()["error"]["message"]) < 300
    (choice,) = ask(speaker, chat("thought"))
    assert "No." == choice["message"]["content"]


def test_an_unknown_format_of_calls_is_refused_unless_calls_are_forced(server) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    answer = server.post(body | {"max_tokens": 2}, CHAT_PATH)
    assert (400, "tools") == (answer.status_code, answer.json()["error"]["param"])
    needed = "--response-template" if reply_format._CAN_PARSE else "transformers 5.17"
    assert needed in answer.json()["error"]["message"]
    for choice in ("none", "required"):
        answer = server.post(body | {"max_tokens": 2, "tool_choice": choice}, CHAT_PATH)
        assert 200 == answer.status_code


@needs_parser
@pytest.mark.slow
def test_an_option_names_the_format(run_server) -> None:
    template = read_response_template("qwen3")
    with run_server(response_template=template) as server:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
        assert 200 == server.post(body | {"max_tokens": 2}, CHAT_PATH).status_code


def test_releases_without_a_parser_name_the_one_that_is_needed(monkeypatch) -> None:
    monkeypatch.setattr(reply_format, "_CAN_PARSE", False)
    replies = Replies(tiny_tokenizer())
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    assert (SamplingParams(), None) == replies.plan(
        ChatRequest.model_validate(body), SamplingParams()
    )
    with pytest.raises(ApiError, match=r"transformers 5\.17"):
        replies.plan(ChatRequest.model_validate(body | {"tools": TOOLS}), SamplingParams())
    with pytest.raises(ConfigError, match=r"transformers 5\.17"):
        reply_format.ReplyFormat(read_response_template("qwen3"))
