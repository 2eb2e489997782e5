"""Hostile requests are refused before they cost work, and do not delay other clients.

No clock is read: a test holds a slow function back while other requests are served.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from helpers.serving import CHAT, PLAIN, tiny_tokenizer

from vmkv.serve.params import SamplingParams
from vmkv.serve.server import Limits, prompts, schema
from vmkv.serve.server.prompts import Prompts
from vmkv.serve.server.schema import ChatRequest

#: The longest a test waits; reached only where it fails.
PATIENCE_S = 60


def message_of(answer: httpx.Response) -> str:
    """The message of an answer with status 400."""
    assert 400 == answer.status_code, answer.text
    return answer.json()["error"]["message"]


class Held:
    """Wraps a function; selected calls block until `may_go` is set.

    Attributes:
        calls: The last argument of each call.
    """

    def __init__(self, real: Callable[..., Any], is_held: Callable[..., bool]):
        self.calls: list[Any] = []
        self._real = real
        self._is_held = is_held
        self.has_come = threading.Event()
        self.may_go = threading.Event()

    def __call__(self, *arguments: Any) -> Any:
        self.calls.append(arguments[-1])
        if self._is_held(*arguments):
            self.has_come.set()
            assert self.may_go.wait(PATIENCE_S)
        return self._real(*arguments)


@pytest.fixture
def held_encoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Block the tokenizer on prompts that contain "tortoise"."""
    encode = Prompts._encode_prompt
    held = Held(
        lambda prompts, more, prompt: encode(prompts, prompt, *more),
        lambda _, more, prompt: "tortoise" in prompt.text,
    )
    monkeypatch.setattr(
        Prompts, "_encode_prompt", lambda prompts, prompt, *more: held(prompts, more, prompt)
    )
    yield held
    held.may_go.set()


# ---- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["top_k", "min_tokens", "max_tokens", "seed", "n", "priority"])
@pytest.mark.parametrize("value", [2**31, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63) - 1, 10**4000])
def test_integers_of_any_size_get_200_or_400(server, name: str, value: int) -> None:
    """The next request is served."""
    answer = server.post(PLAIN | {name: value})
    assert answer.status_code in ((200,) if name == "top_k" and 0 < value < 2**63 else (200, 400))
    if answer.status_code == 400:
        assert name in (answer.json()["error"]["param"], "n")
    assert 200 == server.post(PLAIN).status_code


# ---- bodies -------------------------------------------------------------------------------------

#: Bodies of about a mebibyte, each with many values of one kind.
ENDLESS = {
    "numbers": b'{"model":"tiny","prompt":[' + b"0.5," * (1 << 18) + b"0.5]}",
    "token ids": b'{"model":"tiny","prompt":[' + b"5," * (1 << 19) + b"5]}",
    "lists": b'{"model":"tiny","prompt":[' + b"[]," * (1 << 18) + b"[]]}",
    "texts": b'{"model":"tiny","prompt":[' + b'"",' * (1 << 18) + b'""]}',
    "objects": b'{"model":"tiny","messages":[' + b"{}," * (1 << 18) + b"{}]}",
    "brackets": b"[" * (1 << 20),
    "keys": b'{"model":"tiny","metadata":{'
    + b",".join(b'"%d":1' % each for each in range(1 << 16))
    + b"}}",
    "escapes": b'{"model":"tiny","prompt":["' + b'\\"[,' * (1 << 18) + b'"' + b",1" * (1 << 18),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_too_many_values_are_not_parsed(server, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Counting the values is cheap; parsing them would block every stream."""
    monkeypatch.setattr(schema, "from_json", lambda body: pytest.fail("it was parsed"))
    complaint = message_of(server.post(ENDLESS[name]))
    assert "more than 131072 values" in complaint


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("/v1/completions", {"prompt": [0.5] * 20_000}),
        ("/v1/completions", {"prompt": [[[]]] * 3000}),
        ("/v1/completions", {"stop": [1] * 20_000}),
        ("/v1/completions", {"stop_token_ids": ["a"] * 20_000}),
        ("/v1/chat/completions", {"messages": [3] * 20_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1] * 20_000}]}),
        ("/tokenize", {"prompt": None, "messages": [1] * 20_000}),
        ("/detokenize", {"tokens": ["a"] * 20_000}),
        ("/v1/responses", {"input": [1] * 20_000}),
        ("/v1/responses", {"input": [{"role": "user", "content": [1] * 20_000}]}),
        ("/v1/messages", {"max_tokens": 1, "messages": [1] * 20_000}),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": [1] * 20_000}]},
        ),
    ],
)
def test_validation_stops_early(
    server, monkeypatch: pytest.MonkeyPatch, path: str, change: dict[str, Any]
) -> None:
    """Collecting an error per element would take a thousand times as long."""
    found: list[int] = []
    explained = schema._explained

    def count(error: Any) -> Any:
        found.append(error.error_count())
        return explained(error)

    monkeypatch.setattr(schema, "_explained", count)
    known = {"/v1/completions": PLAIN, "/v1/chat/completions": CHAT}
    body = {**known.get(path, {}), **change}
    assert len(message_of(server.post(body, path))) < 200
    assert [True] == [each <= 8 for each in found], "more than one error per form of a value"


#: By name: a route, and a body with a place for a nested value.
NESTED = {
    "a field of a message": (
        "/v1/chat/completions",
        '"messages":[{"role":"user","content":"x","deep":%s}]',
    ),
    "a template's argument": (
        "/v1/chat/completions",
        '"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":%s',
    ),
    "a call's input": (
        "/v1/messages",
        (
            '"messages":[{"content":[{"input":%s,"type":"tool_use","id":"1","name":"f"}],'
            '"role":"assistant"}]'
        ),
    ),
    "the schema of a tool": (
        "/v1/messages",
        (
            '"messages":[{"role":"user","content":"x"}],"tools":[{"name":"f","input_schema":%s}],'
            '"tool_choice":{"type":"none"}'
        ),
    ),
    "what a response repeats": ("/v1/responses", '"input":"x","metadata":%s'),
    "the form of a response": ("/v1/responses", '"input":"x","text":%s'),
}


@pytest.mark.parametrize("depth", [150, 500, 100_000])
@pytest.mark.parametrize("where", NESTED)
def test_nested_json_gets_a_short_error(
    server, caplog: pytest.LogCaptureFixture, where: str, depth: int
) -> None:
    """A depth that templates can handle is served."""
    path, form = NESTED[where]
    body = '{"max_tokens":1,%s}' % (form % ('{"a":' * depth + "1" + "}" * depth))
    body = body.replace("max_tokens", "max_output_tokens") if "responses" in path else body
    with caplog.at_level(logging.DEBUG, "vmkv"):
        answer = server.post(body.encode(), path)
    assert answer.status_code == (200 if depth < 200 else 400), answer.text
    assert len(answer.content) < (5000 if depth < 200 else 500)
    assert "Traceback" not in caplog.text
    assert len(caplog.text) < 1000


@pytest.mark.parametrize(
    "template",
    [
        "{% macro again(x) %}{{ again(x) }}{% endmacro %}{{ again(1) }}",
        "{{ messages[0].content.no.such.thing }}",
        "{{ 1 // 0 }}",
        "{{ raise_exception('no') }}",
        "{{ raise_exception('no tools') if tools }}",
        "{{ tools[0].no.such }}",
        "{{ tools[0] // 0 }}",
    ],
)
def test_a_failing_chat_template_is_400(
    run_server, caplog: pytest.LogCaptureFixture, template: str
) -> None:
    """With the template's words."""
    tools = [{"type": "function", "function": {"name": "t", "parameters": {}}}]
    more = {"tools": tools, "tool_choice": "required"} if "tools" in template else {}
    with run_server(chat_template=template + "x") as server:
        said = message_of(server.post(CHAT | more, "/v1/chat/completions"))
    assert "template refuses these messages: " in said
    assert ("no" in said.partition("messages: ")[2]) or "raise" not in template
    assert "Traceback" not in caplog.text


def test_an_unexpected_error_is_logged_once_and_briefly(
    run_server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log stays short however deep the traceback is."""

    def fail(*_: Any, depth: int = 900) -> None:
        if not depth:
            raise LookupError("an unexpected error")
        fail(depth=depth - 1)

    with run_server() as server:
        monkeypatch.setattr(schema, "check_structure", fail)
        answer = server.post(PLAIN)
        assert (500, "internal_error") == (answer.status_code, answer.json()["error"]["code"])
        monkeypatch.undo()
        assert 200 == server.post(PLAIN).status_code
    assert 1 == caplog.text.count("Traceback")
    assert len(caplog.text) < 5000


# ---- prompts ------------------------------------------------------------------------------------


def test_a_prompt_with_too_many_characters_is_not_tokenised(
    run_server, held_encoding: Held
) -> None:
    with run_server(Limits(max_prompt_tokens=100)) as server:
        text = "the page " * 1000
        assert "at least 750, the answer" in message_of(server.post(PLAIN | {"prompt": text}))
        messages = [{"role": "user", "content": text}]
        chat = CHAT | {"messages": messages}
        refused = server.post(chat, "/v1/chat/completions")
        for each in (refused, server.post({"messages": messages}, "/tokenize")):
            assert "context length is 100 tokens here; the prompt has at least" in message_of(each)
    assert [] == held_encoding.calls


@pytest.mark.parametrize("num_tokens", [99, 100, 101, 300])
def test_max_prompt_tokens_is_exact(run_server, num_tokens: int) -> None:
    """For text and for token ids."""
    with run_server(Limits(max_prompt_tokens=100)) as server:
        text = tiny_tokenizer().decode([5] * num_tokens)
        assert num_tokens == len(tiny_tokenizer()(text)["input_ids"])
        for prompt in (text, [5] * num_tokens):
            answer = server.post(PLAIN | {"prompt": prompt})
            assert answer.status_code == (200 if num_tokens <= 100 else 400)
            if num_tokens > 100:
                error = answer.json()["error"]
                assert "context_length_exceeded" == error["code"]
                assert "maximum context length is 100 tokens" in error["message"]


def test_only_admitted_prompts_are_tokenised(run_server, held_encoding: Held) -> None:
    """A queued prompt whose client leaves is not tokenised, nor one that finds the queue full."""
    with run_server(Limits(max_concurrent=1, max_queued=1)) as server:
        gate = server.service.gate
        with server.streaming():
            with server.sent(PLAIN | {"prompt": "I leave"}):
                server.until(lambda: gate.num_waiting == 1)
                refused = server.post(PLAIN | {"prompt": "no place for me"})
                assert 429 == refused.status_code
                assert "retry-after" in refused.headers
                error = refused.json()["error"]
                assert "rate_limit_exceeded" == error["code"]
                assert "1 requests run and 1 wait" in error["message"]
            server.until(lambda: gate.num_waiting == 0)
        assert 200 == server.post(PLAIN | {"prompt": "at last"}).status_code
    assert ["A row", "at last"] == [prompt.text for prompt in held_encoding.calls]


def test_short_prompts_do_not_wait_for_long_ones(
    run_server, held_encoding: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt that waits for another is not tokenised once its client has left."""
    monkeypatch.setattr(prompts, "_LONG_CHARS", 1000)
    long = "a " * 500
    with run_server() as server:
        monster = PLAIN | {"prompt": "tortoise" + long}
        with server.sent(monster):
            assert held_encoding.has_come.wait(PATIENCE_S)
            with server.sent(monster | {"prompt": "me too" + long}):
                server.until(lambda: server.service.gate.num_inside == 2)
                assert 200 == server.post(PLAIN).status_code
        server.until(lambda: server.service.gate.num_inside == 0)
        held_encoding.may_go.set()
        assert 200 == server.post(monster).status_code
    seen = [prompt.text[:8] for prompt in held_encoding.calls]
    assert ["tortoise", "A row", "tortoise"] == seen


@pytest.mark.parametrize(
    "more",
    [
        {"messages": [{"role": "user", "content": "x", "reasoning": "y" * 5000}]},
        {"messages": [{"role": "user", "content": "x", "name": ["y" * 5000, "\ud800"]}]},
        {"tools": [{"type": "function", "function": {"name": "f", "description": "y" * 5000}}]},
        {"chat_template_kwargs": {"a": {"b": ["y" * 5000]}}},
    ],
    ids=["reasoning", "extra", "tools", "arguments"],
)
def test_texts_beside_the_content_make_a_chat_long(more: dict[str, Any]) -> None:
    """Templates may read them."""
    assert ChatRequest.model_validate(CHAT | more).num_read_chars > 5000
    assert ChatRequest.model_validate(CHAT).num_read_chars < 500


def test_bad_words_are_tokenised_once_for_all_prompts_and_off_the_event_loop(
    run_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    class Word(str):
        __slots__ = ()

        def lstrip(self, *_: Any) -> str:
            threads.append(threading.current_thread().name)
            return str(self)

    class Words(SamplingParams):
        def __post_init__(self) -> None:
            super().__post_init__()
            words = [Word(each) if isinstance(each, str) else each for each in self.bad_words]
            vars(self)["bad_words"] = tuple(words)

    monkeypatch.setattr("vmkv.serve.server.schema.SamplingParams", Words)
    with run_server() as server:
        asked = PLAIN | {"prompt": ["A row", "The page", "A"], "bad_words": ["page", "row"]}
        assert 200 == server.post(asked).status_code
    assert ["vmkv-tokenizer-long_0"] * 4 == threads


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("allowed_token_ids", {"allowed_token_ids": [5] * 9000}),
        ("bad_words", {"bad_words": ["a b"]}),
    ],
)
def test_tokens_allowed_and_banned_are_limited_over_all_samples(
    run_server, monkeypatch: pytest.MonkeyPatch, name: str, more: dict[str, Any]
) -> None:
    monkeypatch.setattr("vmkv.serve.server.service._CHOICE_MAX", 9000 if name[0] == "a" else 5)
    with run_server() as server:
        assert 200 == server.post(PLAIN | more).status_code
        refused = server.post(PLAIN | more | {"prompt": ["A row", "A"]})
        assert "ask for fewer samples" in message_of(refused)
        assert name == refused.json()["error"]["param"]


# ---- priorities ---------------------------------------------------------------------------------


def test_priorities_are_bounded_by_max_priority(run_server) -> None:
    """By default only priority 0 is allowed."""
    with run_server() as server:
        assert 200 == server.post(PLAIN | {"priority": 0}).status_code
        assert "--max-priority" in message_of(server.post(PLAIN | {"priority": -1}))
    with run_server(Limits(max_priority=2)) as server:
        for priority in (-2, 2):
            assert 200 == server.post(PLAIN | {"priority": priority}).status_code
        for priority in (-3, 3, -(2**20), 10**30):
            assert "in [-2, 2]" in message_of(server.post(PLAIN | {"priority": priority}))


# ---- an engine that cannot serve ----------------------------------------------------------------


def test_health_fails_when_the_engines_thread_has_ended(run_server) -> None:
    """Requests get 503, too."""
    with run_server() as server:
        engine = server.engine

        def die(*_: Any) -> None:
            raise SystemExit("something has ended the thread")

        before, engine.advance = engine.advance, die
        try:
            answer = server.post(PLAIN)
            assert (503, "engine_stopped") == (answer.status_code, answer.json()["error"]["code"])
            health = httpx.get(f"{server.url}/health")
            assert (503, "failing") == (health.status_code, health.json()["status"])
            assert "SystemExit" in health.json()["reason"]
            assert 503 == server.post(PLAIN).status_code
        finally:
            engine.advance = before
            engine.close()
