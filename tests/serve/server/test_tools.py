"""Tools of chats: chunks and samples, prompts, schemas of forced calls, and refusals.

The replies of all APIs are in test_replies.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
NAMED = {"type": "function", "function": {"name": "time"}}
TOKENIZER = tiny_tokenizer()
SCRIPTS = {
    "calls": f"<think>\nBoth cities.\n</think>\n\nI look.\n{MARKED}",
    "thought": "<think>\nHm.\n</think>\n\nNo.",
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


def streamed(server: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a streamed answer."""
    return [choice for chunk in server.chunks(body, CHAT_PATH) for choice in chunk["choices"]]


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


# ---- calls ---------------------------------------------------------------------------------------


def test_a_chunk_has_something_to_say_and_arguments_come_in_pieces(speaker) -> None:
    parts = streamed(speaker, chat("calls"))
    assert ["tool_calls"] == [part["finish_reason"] for part in parts if part["finish_reason"]]
    assert all(part["delta"] for part in parts[:-1])
    assert all(
        part["delta"].get("reasoning") == part["delta"].get("reasoning_content") for part in parts
    )
    pieces = [call for part in parts for call in part["delta"].get("tool_calls", ())]
    assert len(pieces) > 2 * len(CALLS)


@pytest.mark.slow
def test_each_sample_has_its_own_parser_and_logprobs(speaker) -> None:
    body = chat("calls", n=3, logprobs=True, top_logprobs=1)
    choices = speaker.ask(body, CHAT_PATH)["choices"]
    parts = streamed(speaker, body)
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


def test_an_unknown_format_of_calls_is_refused_unless_calls_are_forced(server) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    answer = server.post(body | {"max_tokens": 2}, CHAT_PATH)
    assert (400, "tools") == (answer.status_code, answer.json()["error"]["param"])
    needed = "--response-template" if reply_format._CAN_PARSE else "transformers 5.17"
    assert needed in answer.json()["error"]["message"]
    for choice in ("none", "required"):
        answer = server.post(body | {"max_tokens": 2, "tool_choice": choice}, CHAT_PATH)
        assert 200 == answer.status_code


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
