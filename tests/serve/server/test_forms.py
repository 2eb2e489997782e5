"""Answers have the form that a request asks for, in each of the fields that clients send."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from helpers.serving import CHAT, PLAIN

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "sizes": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"name": "thing", "strict": True, "schema": SCHEMA}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": JSON_SCHEMA}}
GRAMMAR = 'start: /[0-9]{1,2}/ "!"'
LONGER = {"max_tokens": 200, "temperature": 1.0, "seed": 3}


def is_thing(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def test_schemas_on_the_other_routes(server: Any) -> None:
    """Fields that all routes share keep their names on the way to a chat."""
    sampled = {"model": "tiny", "temperature": 1.0, "seed": 3}
    body = sampled | FORMAT | {"input": "hi", "max_output_tokens": 200}
    [message] = server.post(body, "/v1/responses").json()["output"]
    assert is_thing(message["content"][0]["text"])
    body = sampled | {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
    body |= {"structured_outputs": {"json": SCHEMA}}
    [block] = server.post(body, "/v1/messages").json()["content"]
    assert is_thing(block["text"])


def test_one_of_several_schemas(server: Any) -> None:
    """`oneOf` is served as `anyOf`, as vLLM does."""
    schema = {"oneOf": [{"type": "string", "pattern": f"^{each}{{3}}$"} for each in "ab"]}
    answer = server.post(PLAIN | LONGER | {"structured_outputs": {"json": schema}}).json()
    jsonschema.validate(json.loads(answer["choices"][0]["text"]), schema)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "is_right"),
    [
        (FORMAT, is_thing),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, is_thing),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_thing),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "guidance"}, is_thing),
        ({"guided_json": json.dumps(SCHEMA), "response_format": {"type": "text"}}, is_thing),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, lambda text: re.fullmatch("[ab]{3}", text)),
        ({"guided_regex": "[ab]{3}"}, lambda text: re.fullmatch("[ab]{3}", text)),
        ({"structured_outputs": {"choice": ["ja", "ne"]}}, lambda text: text in ("ja", "ne")),
        ({"guided_choice": ["ja", "ne"]}, lambda text: text in ("ja", "ne")),
        ({"structured_outputs": {"grammar": GRAMMAR}}, lambda text: re.fullmatch("..?!", text)),
        ({"guided_grammar": GRAMMAR}, lambda text: re.fullmatch("..?!", text)),
    ],
    ids=lambda value: str(value)[:50].partition(" at 0x")[0],
)
def test_each_field(server: Any, asked: dict[str, Any], is_right: Any) -> None:
    """Of chats by schemas, and of completions by the others."""
    if is_right is is_thing:
        [choice] = server.post(CHAT | LONGER | asked, "/v1/chat/completions").json()["choices"]
        text = choice["message"]["content"]
    else:
        [choice] = server.post(PLAIN | LONGER | asked).json()["choices"]
        text = choice["text"]
    assert "stop" == choice["finish_reason"]
    assert is_right(text), text


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}],
    ids=str,
)
def test_any_object(server: Any, asked: dict[str, Any]) -> None:
    """A random model may go on without end; answers that stop are objects, the others begin one."""
    body = PLAIN | LONGER | asked | {"n": 8, "max_tokens": 120}
    choices = server.post(body).json()["choices"]
    complete = [each["text"] for each in choices if each["finish_reason"] == "stop"]
    assert complete
    assert all(map(is_object, complete))
    assert all(each["text"].startswith("{") for each in choices)


@pytest.mark.slow
def test_streams_and_samples(server: Any) -> None:
    """With the pieces that the OpenAI client gets, in each sample."""
    texts = {0: "", 1: ""}
    stream = server.client().chat.completions.create(
        **CHAT | LONGER | {"n": 2, "stream": True}, **FORMAT
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts[0] != texts[1]
    assert all(map(is_thing, texts.values()))


@pytest.mark.parametrize("strict", [None, False, True])
def test_unknown_keywords_of_a_schema_are_refused_if_it_is_strict(server, strict) -> None:
    unknown = {**SCHEMA, "properties": {**SCHEMA["properties"], "name": {"not": {"const": "x"}}}}
    for schema, is_served in ((unknown, not strict), (SCHEMA | {"type": "nope"}, False)):
        form = {"type": "json_schema", "json_schema": {**JSON_SCHEMA, "schema": schema}}
        form["json_schema"]["strict"] = strict
        answer = server.post(CHAT | {"response_format": form}, "/v1/chat/completions")
        assert (200 if is_served else 400) == answer.status_code
    assert 400 == server.post(CHAT | {"guided_json": unknown}, "/v1/chat/completions").status_code
