"""Extreme grammars and tools get one clear error each, and do not change a stream beside them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from helpers.serving import CHAT, LONG

pytestmark = pytest.mark.slow
STREAM = LONG | {"max_tokens": 60}
CHATS = "/v1/chat/completions"
LONG_TEXT = "a" * 10_000_000
RECURSIVE = {"type": "object", "properties": {"next": {"$ref": "#"}}}
CIRCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def schema_of(depth: int) -> dict[str, Any]:
    """Arrays of arrays."""
    schema: dict[str, Any] = {"type": "boolean"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "maxItems": 1}
    return schema


def called(*tools: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [*tools], "tool_choice": "required", "max_tokens": 64}


def guided(**form: Any) -> dict[str, Any]:
    return {"structured_outputs": form}


#: Per name: what a chat asks for, and words of the error.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a grammar of 10 MB": (guided(grammar=f'start: "{LONG_TEXT}"'), "structured_outputs"),
    "a schema of 10 MB": ({"guided_json": json.dumps({"const": LONG_TEXT})}, "guided_json"),
    "choices of 10 MB": (
        {"guided_choice": [f"{at:01000}" for at in range(10_000)]},
        "guided_choice",
    ),
    "a schema of itself": ({"guided_json": {"$ref": "#"}}, "guided_json"),
    "schemas of each other": ({"guided_json": CIRCLE}, "guided_json"),
    "a grammar of itself": (guided(grammar="start: start"), "structured_outputs"),
    "a deep schema": ({"guided_json": json.dumps(schema_of(400))}, "guided_json"),
    "10,000 tools": (called(*(tool(f"t{at}") for at in range(10_000))), "values"),
    "1,100 tools": (called(*(tool(f"t{at}") for at in range(1100))), "tools"),
    "a tool of 10 MB": (called(tool("x" * 200, a={"const": LONG_TEXT})), "tools"),
    "a tool without its schema": (called(tool("t", a={"$ref": "#/nowhere"})), "tools"),
}
#: Answers up to max_tokens, since none of the second to the fourth needs to have an end.
SERVED = {
    "300 tools": called(*(tool(f"t{at}") for at in range(300))),
    "a recursive tool": called(tool("t", a=RECURSIVE)),
    "a recursive schema": {"guided_json": RECURSIVE, "max_tokens": 64},
    "one without an end": {"guided_json": RECURSIVE | {"required": ["next"]}, "max_tokens": 64},
    "a nested one": {"guided_json": schema_of(20), "max_tokens": 64},
}


@pytest.fixture(scope="module")
def alone(server: Any) -> dict[str, Any]:
    """The choice of a stream that runs alone, on any server of the model."""
    return server.post(STREAM).json()["choices"][0]


@contextlib.contextmanager
def beside_a_stream(server: Any, alone: dict[str, Any]) -> Iterator[None]:
    """Run the block while a stream is under way; its text must be as without the block."""
    body = STREAM | {"stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        lines = (line for line in answer.iter_lines() if line)
        events = [next(lines)]
        yield
        events += lines
    assert "data: [DONE]" == events.pop()
    choices = [json.loads(each.removeprefix("data: "))["choices"][0] for each in events]
    assert alone["text"] == "".join(each["text"] for each in choices)
    assert alone["finish_reason"] == choices[-1]["finish_reason"]


@pytest.mark.parametrize("name", [*REFUSED, *SERVED])
def test_other_streams_go_on(server: Any, alone: Any, name: str) -> None:
    """Beside an answer, or beside one error in few words."""
    asked, word = REFUSED.get(name) or (SERVED[name], "")
    with beside_a_stream(server, alone):
        answer = server.post(CHAT | asked, CHATS)
    assert (400 if word else 200) == answer.status_code, answer.text
    if word:
        error = answer.json()["error"]
        assert word in error["message"]
        assert len(error["message"]) < 1000
        assert error["type"] == "invalid_request_error"


def test_a_client_may_leave_in_the_middle_of_a_call(
    run_server: Callable[..., Any], alone: Any
) -> None:
    """The request is cancelled, and its slot serves the next one."""
    asked = CHAT | called(tool("say", text={"type": "string", "minLength": 3000}))
    asked |= {"stream": True, "max_tokens": 4000}
    with run_server() as server, beside_a_stream(server, alone):
        with httpx.stream("POST", server.url + CHATS, json=asked, timeout=60) as answer:
            for line in answer.iter_lines():
                if '"arguments":"' in line and '"arguments":""' not in line:
                    break
        server.watch.wait(
            lambda: any(each.finish_reason == "cancelled" for each in server.watch.finished),
            "the cancellation",
        )
        again = server.post(CHAT | {"guided_choice": ["hi"], "max_tokens": 20}, CHATS).json()
        assert "hi" == again["choices"][0]["message"]["content"]
