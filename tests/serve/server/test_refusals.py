"""Requests and options that the server refuses, with their status and message."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from helpers.serving import CHAT, PLAIN

from vmkv import ConfigError
from vmkv.serve.server import Limits
from vmkv.serve.start import open_socket


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which must have the shape of OpenAI or Anthropic."""
    body = answer.json()
    if answer.url.path.startswith(MESSAGES):
        assert ["type", "error"] == list(body)
        assert "error" == body["type"]
        assert {"type", "message"} <= body["error"].keys() <= {"type", "message", "details"}
    else:
        assert ["error"] == list(body)
        assert {"message", "type", "param", "code"} == set(body["error"])
    return body["error"]


COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "hi"}
#: By route, a request that is served.
SERVED: dict[str, dict[str, Any]] = {
    COMPLETIONS: PLAIN,
    CHATS: CHAT,
    RESPONSES: {"input": "hi", "max_output_tokens": 2},
    MESSAGES: {"messages": [USER], "max_tokens": 2},
    COUNT: {"messages": [USER]},
    "/tokenize": {},
    "/detokenize": {},
}
LONG = [{"role": "user", "content": "xyz" * 4000}]
#: Words by which agents recognise a full context.
FULL = re.compile(
    r"this model's maximum context length is 4096 tokens|prompt is too long: [^>]*\d tokens > 4096 "
    r"maximum|input length and `max_tokens` exceed context limit: \d+ \+ \d+ > 4096, decrease"
)
IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}


def function(name: str, **schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def forced(name: str, **schema: Any) -> dict[str, Any]:
    """A call of a function that must be."""
    choice = {"type": "function", "function": {"name": name}}
    return {"tool_choice": choice, "tools": [function("time", **schema)]}


def form(kind: str = "json_schema", **more: Any) -> dict[str, Any]:
    return {"type": kind, **more}


def user(*blocks: Any) -> dict[str, Any]:
    """A request's messages with one message of blocks."""
    return {"messages": [{"role": "user", "content": list(blocks)}]}


#: Per route: the change, words of the error, and the parameter that it names if not the first.
REFUSED: dict[str, list[tuple[Any, ...]]] = {
    COMPLETIONS: [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "at least 1 item"),
        ({"prompt": [[]]}, "the prompt is empty"),
        ({"prompt": {"a": 1}}, "valid string"),
        ({"prompt": [10**6]}, "token 1000000 is none of"),
        ({"prompt": [-1]}, "token -1 is none of"),
        ({"prompt": ["a"] * 200}, "at most 128 items"),
        ({"n": 1000}, "at most 128"),
        ({"n": 0}, "n=0"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": "hot"}, "valid number"),
        ({"top_k": -7}, "top_k=-7"),
        ({"max_tokens": 0}, "max_tokens=0 leaves nothing to answer; add echo"),
        ({"max_tokens": "5"}, "valid integer"),
        ({"max_tokens": 5000}, "maximum context length is 4096 tokens here; the prompt has"),
        ({"prompt": [5] * 4096}, "the prompt has 4096, the answer 2 at most"),
        ({"logprobs": 21}, "less than or equal to 20"),
        ({"stop": [""]}, "non-empty"),
        (
            {"stream_options": {"include_usage": True}, "stream": False},
            "needs stream=true",
            "stream_options",
        ),
        ({"max_tokens": -1, "echo": True}, "max_tokens=-1"),
        ({"stream": True, "prompt_logprobs": 0}, "stream=true", "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "less than or equal to 20"),
        ({"prompt_logprobs": -1}, "greater than or equal to 0"),
        ({"truncate_prompt_tokens": 0}, "leaves no prompt"),
        ({"truncate_prompt_tokens": -2}, "greater than or equal to -1"),
        ({"truncate_prompt_tokens": 5000}, "prompts of 4096 tokens"),
        ({"prompt": [10**6], "truncate_prompt_tokens": 1}, "none of"),
        ({"prompt": [5] * 9000, "truncate_prompt_tokens": 4096}, "maximum context length is 4096"),
        ({"suffix": "x"}, "insertion is not supported"),
        ({"best_of": 3}, "choose among n samples"),
        ({"best_of": 3, "n": 2}, "best_of=3"),
        ({"logit_bias": {"5": 101}}, "at most 100"),
        ({"logit_bias": {"five": 1}}, "valid integer", "logit_bias.five.[key]"),
        ({"logit_bias": [5]}, "valid dictionary"),
        ({"allowed_token_ids": []}, "one or more"),
        ({"logit_bias": {"1000000": 1}}, "[1000000] are not in a vocabulary"),
        ({"allowed_token_ids": [10**6]}, "[1000000] are not in a vocabulary"),
        ({"stop_token_ids": [10**6]}, "[1000000] are not in a vocabulary"),
        ({"bad_words": [""]}, "not blank"),
        ({"bad_words": ["a"] * 200}, "at most 128 items"),
        ({"max_tokens": 5.5}, "valid integer"),
        ({"stop": [str(at) for at in range(17)]}, "at most 16"),
        ({"request_id": "a\nb"}, "pattern"),
        ({"request_id": "x" * 300}, "pattern"),
        ({"guided_json": "{"}, "guided_json: EOF while parsing"),
        ({"guided_json": 3}, "valid"),
        ({"guided_regex": "(a"}, "unclosed group"),
        ({"guided_grammar": "start: x"}, "unknown name"),
        ({"guided_grammar": "start: start"}, "no output satisfies"),
        ({"guided_choice": []}, "list of non-empty texts"),
        ({"guided_choice": "ab"}, "valid list"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "has one form"),
        ({"structured_outputs": {}}, "exactly one of"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "not json and regex"),
        ({"structured_outputs": {"json": {"type": "nope"}}}, "outputs: Invalid type: nope"),
        ({"structured_outputs": {"grammar": 3}}, "valid string", "structured_outputs.grammar"),
        ({"guided_regex": "a" * 10_000_000}, "10000000 bytes of grammar"),
        ({"stop": [f"{each:06x}" for each in range(50_000)]}, "at most 16 items"),
        ({"stop": "a" * 1001}, "at most 1000 characters"),
        ({"stop_token_ids": [5] * 129}, "at most 128 items"),
        ({"seed": 1e300}, "valid integer"),
        ({"prompt": [5] * 5000}, "maximum context length is 4096 tokens"),
    ],
    CHATS: [
        ({"messages": []}, "at least 1"),
        ({"messages": "hi"}, "valid list"),
        ({"messages": [{"content": "hi"}]}, "required", "messages.0.role"),
        ({"messages": [{"role": "pope", "content": "x"}]}, "unknown role pope"),
        (user({"type": "image_url", "image_url": {}}), "'text'", "messages.0.content.0.type"),
        ({"top_logprobs": 2}, "needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 50}, "less than or equal to 20", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "greater than or equal to 0", "top_logprobs"),
        ({"max_completion_tokens": 0}, "greater than or equal to 1"),
        ({"echo": True}, "chats do not"),
        ({"stream": True, "prompt_logprobs": 2}, "stream=true", "prompt_logprobs"),
        ({"tools": [{"type": "function"}]}, "required", "tools.0.function"),
        ({"functions": [{"name": "f"}]}, "send tools"),
        ({"response_format": 5}, "should be a JSON object"),
        ({"response_format": form("xml")}, "'json_object'", "response_format.type"),
        ({"response_format": form()}, "needs json_schema"),
        (
            {"response_format": form(json_schema={"name": "x"})},
            "required",
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": form(json_schema={"name": "x", "schema": {"$ref": "#/$defs/x"}})},
            "does not exist",
        ),
        (
            {"guided_json": {}, "response_format": form("json_object")},
            "response_format and guided_json",
        ),
        ({"chat_template_kwargs": {"tokenize": True}}, "may not set"),
        ({"tools": [function("")]}, "at least 1 character", "tools.0.function.name"),
        ({"tools": [function("f")] * 1025}, "at most 1024"),
        ({"tools": [function("f", title="x" * (1 << 20))]}, "at most 1048576"),
        ({"tools": None, "tool_choice": "required"}, "there are no tools", "tool_choice"),
        (forced("f"), "none of the tools"),
        ({"tool_choice": "maybe"}, "none"),
        (
            forced("time", properties={"a": {"type": "nope"}})
            | {"tool_choice": "required", "response_format": form("json_object")},
            "Invalid type: nope",
            "tools",
        ),
        (
            forced("time", type="array", items={}) | {"tool_choice": "required"},
            "the parameters of 'time' are of type 'array'",
            "tools",
        ),
        (forced("time", type=["null", "string"]), "a call's arguments are an object", "tools"),
        ({"messages": LONG}, "maximum context length is 4096 tokens", "prompt"),
    ],
    RESPONSES: [
        ({"input": None}, "valid string"),
        ({"input": []}, "at least 1 item"),
        ({"input": [{"role": "pope", "content": "x"}]}, "'user'", "input.0.role"),
        ({"input": [{"role": "user"}]}, "needs content", "input.0"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "item_reference", "input.0"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "needs call_id", "input.0"),
        (
            {"input": user({"type": "input_image", "image_url": "x"})["messages"]},
            "type 'input_image' is not served, only: input_text",
            "input.0.content.0",
        ),
        ({"input": [form("function_call_output", call_id="1", output="x")]}, "template refuses"),
        ({"input": "x" * 50_000}, "maximum context length is 4096 tokens"),
        ({"max_output_tokens": 0}, "greater than or equal to 1"),
        ({"max_output_tokens": 5000}, "lower max_output_tokens"),
        ({"temperature": -1}, "temperature=-1"),
        ({"n": 2}, "makes one answer"),
        ({"previous_response_id": "resp_1"}, "responses are not stored"),
        ({"conversation": "conv_1"}, "are not stored"),
        ({"prompt": {"id": "p"}}, "prompts are not stored", None),
        ({"background": True}, "sent to the request"),
        ({"include": ["message.output_text.logprobs"]}, "log-probabilities"),
        ({"top_logprobs": 3}, "log-probabilities"),
        ({"tools": [{"name": "f"}]}, "field required", "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "needs name", "tools.0"),
        ({"tool_choice": {"type": "mcp"}}, "valid string"),
        ({"tool_choice": {}}, "required", "tool_choice.type"),
        ({"text": {"format": {"type": "xml"}}}, "json_schema", "text.format.type"),
        ({"text": {"format": "json"}}, "text.format: input should be a JSON object", "text.format"),
        ({"text": {"format": form(name="x")}}, "schema: field required", "text.format.schema"),
        ({"reasoning": {"effort": 3}}, "", "reasoning.effort"),
    ],
    MESSAGES: [
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
            user(form("tool_result", tool_use_id="1", content=[IMAGE])),
            "messages.0.content.0.content.0: type 'image' is not served, only: text",
        ),
        (user({"type": "tool_result", "tool_use_id": "1"}), "chat template refuses"),
        ({"system": [IMAGE]}, "system.0: type 'image' is not served"),
        ({"max_tokens": None}, "max_tokens: input should be a valid integer"),
        ({"max_tokens": 0}, "max_tokens: input should be greater than or equal to 1"),
        ({"max_tokens": 5000}, "input length and `max_tokens` exceed context limit"),
        ({"messages": [{"role": "user", "content": "x" * 50_000}]}, "prompt is too long: "),
        ({"temperature": -1}, "temperature=-1"),
        ({"n": 2}, "n: this route makes one answer"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences: list should have at most 16 items"),
        ({"stop_sequences": [""]}, "stop_sequences=('',) must be non-empty texts"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: field required"),
        ({"tools": [form("bash_2", name="b", input_schema={})]}, "0: type 'bash_2' is not served"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice: an item of type tool needs name"),
        ({"tool_choice": {"type": "all"}}, "tool_choice: type 'all' is not served, only: auto"),
        ({"thinking": {"type": "often"}}, "thinking: type 'often' is not served, only: enabled"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": {"format": "json"}}, "output_config.format"),
        ({"output_config": {"effort": 3}}, "output_config.effort"),
        (user({"type": "text", "text": "\ud800"}), "no valid JSON"),
        ({"system": "\ud800"}, "no valid JSON"),
    ],
    COUNT: [
        ({"messages": LONG}, "prompt is too long"),
    ],
    "/tokenize": [
        ({}, "send either prompt or messages", "prompt"),
        ({"prompt": "a", "messages": LONG}, "send either prompt or messages"),
    ],
    "/detokenize": [
        ({"tokens": [-1]}, "token -1"),
        ({"tokens": [5] * 4097}, "length is 4096"),
        ({"tokens": ["a"]}, "tokens.0:", "tokens.0"),
    ],
}


@pytest.mark.parametrize(
    ("path", "row"),
    [(path, row) for path, rows in REFUSED.items() for row in rows],
    ids=[f"{path}: {row[1]}" for path, rows in REFUSED.items() for row in rows],
)
def test_wrong_requests_are_400(server, path: str, row: tuple[Any, ...]) -> None:
    """In the words of the API, whatever the chat that a request is served as calls the field."""
    change, message = row[:2]
    param = row[2] if len(row) == 3 else next(iter(change))
    for more in ({}, {"stream": True}):
        answer = server.post(SERVED[path] | more | change, path)
        assert 400 == answer.status_code, answer.text
        error = error_of(answer)
        assert "invalid_request_error" == error["type"]
        assert error.get("param", param) == param  # Anthropic's have none.
        assert message in error["message"]
        code = error.get("code", error.get("details", {}).get("error_code"))
        assert (code == "context_length_exceeded") == bool(FULL.search(error["message"]))


NULLS = dict.fromkeys(("tools", "tool_choice"))
#: By route, options that clients send although they do not use them.
IDLE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "echo": False,
        "best_of": 1,
        **dict.fromkeys(("suffix", "seed", "stop", "n", "ignore_eos", "skip_special_tokens")),
        "prediction": {"type": "content", "content": "x"},
        "length_penalty": 1.0,
        "logit_bias": {},
        "min_tokens": None,
    },
    CHATS: {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
    RESPONSES: {
        **NULLS,
        **dict.fromkeys(("instructions", "metadata", "previous_response_id", "conversation")),
        "background": False,
        "truncation": "auto",
        "service_tier": "auto",
        "include": [],
        "text": {"verbosity": "low"},
        "reasoning": {"summary": "auto"},
        "of_tomorrow": 1,
    },
    MESSAGES: {
        **NULLS,
        **dict.fromkeys(("system", "thinking", "stop_sequences", "container", "thread")),
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "output_config": {},
        "of_tomorrow": 1,
    },
}


@pytest.mark.parametrize("path", IDLE)
def test_options_without_an_effect_are_accepted(server, path: str) -> None:
    """Defaults, nulls, unknown fields, and headers and queries of versions."""
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    assert 200 == server.post(SERVED[path] | IDLE[path], path, **headers).status_code
    assert 200 == server.post(SERVED[path] | IDLE[path], f"{path}?beta=true").status_code


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{nope", "no valid JSON"),
        (b"", "JSON object"),
        (b"[1]", "JSON object"),
        (b'"x"', "JSON object"),
        (b"\xff\xfe", ""),
        (b'{"model": "tiny", "prompt": "\\ud800"}', ""),
        (b"[" * 100_000, ""),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "no valid JSON"),
        (b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", ""),
    ],
    ids=["broken", "empty", "list", "text", "no utf-8", "surrogate", "deep", "nan", "huge"],
)
def test_malformed_bodies_are_400(server, body: bytes, message: str) -> None:
    """The server stays healthy."""
    answer = server.post(body)
    assert 400 == answer.status_code, answer.text
    assert message in error_of(answer)["message"]
    assert 200 == httpx.get(f"{server.url}/health").status_code


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999"])
def test_a_response_repeats_no_number_that_json_lacks(server, number: bytes) -> None:
    body = b'{"input": "hi", "max_output_tokens": 1, "metadata": {"a": [' + number + b"]}}"
    answer = server.post(body, "/v1/responses")
    assert 400 == answer.status_code, answer.text
    told = "too large" if number == b"1e999" else "no valid JSON"
    assert told in error_of(answer)["message"]


def test_unknown_models_routes_and_methods(server) -> None:
    """404 for an unknown model or route, 405 for a wrong method."""
    openai = pytest.importorskip("openai")
    url = server.url
    other = httpx.post(f"{url}/v1/completions", json=PLAIN | {"model": "gpt-4"})
    assert (404, "model_not_found") == (other.status_code, error_of(other)["code"])
    assert "'tiny' is" in error_of(other)["message"]
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("gpt-4")
    lost = httpx.get(f"{url}/v1/nothing")
    assert 404 == lost.status_code
    assert "GET /v1/nothing" in error_of(lost)["message"]
    wrong = httpx.get(f"{url}/v1/completions")
    assert 405 == wrong.status_code
    assert "GET /v1/completions" in error_of(wrong)["message"]


def test_a_body_that_is_too_large_is_413(run_server) -> None:
    """With a declared length, and in chunks."""
    limits = Limits(max_body_bytes=2000)
    with run_server(limits) as server:
        url = f"{server.url}/v1/completions"
        large = PLAIN | {"prompt": "x" * 3000}
        announced = httpx.post(url, json=large)
        assert (413, "request_too_large") == (announced.status_code, error_of(announced)["code"])
        pieces = iter([json.dumps(large).encode()[at : at + 500] for at in range(0, 3100, 500)])
        headers = {"Content-Type": "application/json"}
        chunked = httpx.post(url, content=pieces, headers=headers)
        assert (413, "request_too_large") == (chunked.status_code, error_of(chunked)["code"])
        assert 200 == httpx.post(url, json=PLAIN).status_code
        assert 1 == len(server.watch.added), "a refused request reached the engine"


def test_an_unfinished_body_is_408(run_server) -> None:
    slow = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b'Content-Length: 100\r\n\r\n{"model": '
    )
    with run_server(Limits(body_timeout_s=0.1)) as server, server.sent(slow) as client:
        assert b" 408 " in client.makefile("rb").readline()
        assert [] == server.watch.added


def test_api_keys_are_required(run_server) -> None:
    """Health, metrics, version and documentation are open by default."""
    openai = pytest.importorskip("openai")
    with run_server(api_keys=["first", "second"]) as server:
        for key in ("first", "second"):
            assert server.client(api_key=key).completions.create(**PLAIN).choices
        for key in ("Bearer wrong", "Bearer firs", "Bearer firstsecond", "first", "Bearer", ""):
            answer = server.post(PLAIN, Authorization=key)
            assert (401, "invalid_api_key") == (answer.status_code, error_of(answer)["code"])
        with pytest.raises(openai.AuthenticationError, match="needs an API key"):
            server.client(api_key="wrong").models.list()
        assert 401 == httpx.get(f"{server.url}/v1/models").status_code
        basic = {"Authorization": "Basic first"}
        assert 401 == httpx.get(f"{server.url}/v1/models", headers=basic).status_code
        for path in ("health", "ping", "metrics", "version", "docs", "openapi.json"):
            assert 200 == httpx.get(f"{server.url}/{path}").status_code
        routes = ("tokenize", "load", "v1/messages")
        for path in (*routes, "nothing", "v1", "//v1/models", "health/", "HEALTH"):
            assert 401 == httpx.get(f"{server.url}/{path}").status_code


def test_keys_are_compared_as_utf8(run_server) -> None:
    """A header that is not UTF-8 is compared, too, and does not fail."""
    keys = ["schlüssel", "鍵", "\udcff"]
    with run_server(api_keys=keys) as server:
        for key in ("schlüssel".encode(), "鍵".encode(), b"\xff"):
            headers = {b"Authorization": b"Bearer " + key}
            assert 200 == httpx.get(f"{server.url}/v1/models", headers=headers).status_code
        for key in ("schlüssel".encode("latin-1"), b"schl", b"\xfe"):
            headers = {b"Authorization": b"Bearer " + key}
            assert 401 == httpx.get(f"{server.url}/v1/models", headers=headers).status_code


def test_protects_everything_but_health(run_server) -> None:
    with run_server(api_keys=["key"], protects_everything=True) as server:
        for path in ("health", "ping"):
            assert 200 == httpx.get(f"{server.url}/{path}").status_code
        for path in ("metrics", "version", "docs", "redoc", "openapi.json"):
            assert 401 == httpx.get(f"{server.url}/{path}").status_code
            headers = {"Authorization": "Bearer key"}
            assert 200 == httpx.get(f"{server.url}/{path}", headers=headers).status_code


def test_invalid_limits_and_addresses_are_config_errors() -> None:
    for name, value in (("max_concurrent", 0), ("send_timeout_s", 0), ("max_priority", 17)):
        with pytest.raises(ConfigError, match=f"{name}={value}"):
            Limits(**{name: value})
    with pytest.raises(ConfigError, match="cannot listen on no such host"):
        open_socket("no such host", 0, unread_timeout_s=1)
    taken = open_socket("127.0.0.1", 0, unread_timeout_s=1)
    taken.listen()
    port = taken.getsockname()[1]
    try:
        with pytest.raises(ConfigError, match="is another server running"):
            open_socket("127.0.0.1", port, unread_timeout_s=1)
    finally:
        taken.close()
