"""What a stranger sends harms the stranger alone, and is refused before it is worked for.

Nothing here looks at a clock: what takes long is held back by the test, while others are served.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from helpers.serving import CHAT, PLAIN, tiny_tokenizer

from vmkv.serve.server import Limits, prompts, schema
from vmkv.serve.server.prompts import Prompts

#: The longest a test waits; reached only where it fails.
PATIENCE_S = 60


def message_of(answer: httpx.Response) -> str:
    """What a refusal says."""
    assert 400 == answer.status_code, answer.text
    return answer.json()["error"]["message"]


class Held:
    """A function that does its work only when it may.

    Attributes:
        calls: What it was called with.
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
    """Prompts that mention a tortoise become tokens only when they may."""
    held = Held(Prompts._encode_prompt, lambda _, prompt: "tortoise" in prompt.text)
    monkeypatch.setattr(Prompts, "_encode_prompt", lambda *arguments: held(*arguments))
    yield held
    held.may_go.set()


# ---- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["top_k", "min_tokens", "max_tokens", "seed", "n", "priority"])
@pytest.mark.parametrize("value", [2**31, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63) - 1, 10**4000])
def test_integers_of_any_size_are_served_or_refused(server, name: str, value: int) -> None:
    """And whoever comes next is served."""
    answer = server.post(PLAIN | {name: value})
    assert answer.status_code in ((200,) if name == "top_k" and 0 < value < 2**63 else (200, 400))
    if answer.status_code == 400:
        assert name in (answer.json()["error"]["param"], "n")
    assert 200 == server.post(PLAIN).status_code


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"stop": ["a"] * 5}, "at most 4 items"),
        ({"stop": [f"{each:06x}" for each in range(50_000)]}, "at most 4 items"),
        ({"stop": "a" * 1001}, "at most 1000 characters"),
        ({"stop_token_ids": [5] * 129}, "at most 128 items"),
    ],
)
def test_what_each_token_would_pay_for_is_limited(
    server, change: dict[str, Any], complaint: str
) -> None:
    """As OpenAI does with stop texts."""
    assert complaint in message_of(server.post(PLAIN | change))


# ---- bodies -------------------------------------------------------------------------------------

#: Bodies of a mebibyte with one sort of thing in them, and what is said of them.
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
def test_an_endless_body_is_not_parsed(server, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Counting what is in it costs next to nothing, and parsing it would stop every stream."""
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
        ("/v1/completions", {f"key{each}": 1 for each in range(10_000)}),
        ("/v1/completions", {"stream_options": {f"key{each}": 1 for each in range(10_000)}}),
        ("/v1/chat/completions", {"messages": [3] * 20_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1] * 20_000}]}),
        ("/tokenize", {"prompt": None, "messages": [1] * 20_000}),
    ],
)
def test_a_wrong_body_is_one_error(
    server, monkeypatch: pytest.MonkeyPatch, path: str, change: dict[str, Any]
) -> None:
    """Not one for each of its elements: they take a thousand times as long to find and to word."""
    found: list[int] = []
    explained = schema._explained

    def count(error: Any) -> Any:
        found.append(error.error_count())
        return explained(error)

    monkeypatch.setattr(schema, "_explained", count)
    body = {**(CHAT if "chat" in path else PLAIN), **change}
    body = body if path != "/tokenize" else change
    assert len(message_of(server.post(body, path))) < 200
    assert [True] == [each <= 8 for each in found], "more than one per form of a value"


@pytest.mark.parametrize("depth", [150, 500, 100_000])
def test_nested_json_is_refused_in_a_line(
    server, caplog: pytest.LogCaptureFixture, depth: int
) -> None:
    """Wherever it stands; what a template can bear is served."""
    nested = "[" * depth + "]" * depth
    with caplog.at_level(logging.DEBUG, "vmkv"):
        for where in (
            '"messages":[{"role":"user","content":"x","deep":%s}]',
            '"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"deep":%s}',
        ):
            body = '{"model":"tiny","max_tokens":1,%s}' % (where % nested)
            answer = server.post(body.encode(), "/v1/chat/completions")
            assert answer.status_code == (200 if depth < 200 else 400)
    assert "Traceback" not in caplog.text
    assert len(caplog.text) < 1000


@pytest.mark.parametrize(
    "template",
    [
        "{% macro again(x) %}{{ again(x) }}{% endmacro %}{{ again(1) }}",
        "{{ messages[0].content.no.such.thing }}",
        "{{ 1 // 0 }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_that_fails_is_the_messages_fault(
    run_server, caplog: pytest.LogCaptureFixture, template: str
) -> None:
    """400, whatever it raises."""
    with run_server(chat_template=template) as server:
        assert "template refuses" in message_of(server.post(CHAT, "/v1/chat/completions"))
    assert "Traceback" not in caplog.text


def test_an_unexpected_error_is_logged_once_and_briefly(
    run_server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However deep it was raised."""

    def fail(*_: Any, depth: int = 900) -> None:
        if not depth:
            raise LookupError("nobody expects this")
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


def test_a_prompt_that_must_be_too_long_is_refused_by_its_characters(
    run_server, held_encoding: Held
) -> None:
    """No tokenizer is asked."""
    with run_server(Limits(max_prompt_tokens=100)) as server:
        text = "the page " * 1000
        assert "more than 100 tokens" in message_of(server.post(PLAIN | {"prompt": text}))
        messages = [{"role": "user", "content": text}]
        chat = CHAT | {"messages": messages}
        refused = server.post(chat, "/v1/chat/completions")
        assert "more than 100 tokens" in message_of(refused)
        assert "more than 100 tokens" in message_of(
            server.post({"messages": messages}, "/tokenize")
        )
    assert [] == held_encoding.calls


@pytest.mark.parametrize("num_tokens", [99, 100, 101, 300])
def test_the_limit_of_a_prompt_is_exact(run_server, num_tokens: int) -> None:
    """As a text and as tokens."""
    with run_server(Limits(max_prompt_tokens=100)) as server:
        text = tiny_tokenizer().decode([5] * num_tokens)
        assert num_tokens == len(tiny_tokenizer()(text)["input_ids"])
        for prompt in (text, [5] * num_tokens):
            answer = server.post(PLAIN | {"prompt": prompt})
            assert answer.status_code == (200 if num_tokens <= 100 else 400)
            if num_tokens > 100:
                error = answer.json()["error"]
                assert "context_length_exceeded" == error["code"]
                assert "this server takes 100" in error["message"]


def test_a_prompt_becomes_tokens_when_its_turn_comes(run_server, held_encoding: Held) -> None:
    """Not while it waits, nor if its client leaves, nor if there is no place to wait in."""
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
    """Nor is a long one worked for whose client left while it waited for another."""
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


# ---- priorities ---------------------------------------------------------------------------------


def test_priorities_are_for_servers_that_allow_them(run_server) -> None:
    """Where nobody may be first, nobody is kept waiting; where some may, by so many levels."""
    with run_server() as server:
        assert 200 == server.post(PLAIN | {"priority": 0}).status_code
        assert "--max-priority" in message_of(server.post(PLAIN | {"priority": -1}))
    with run_server(Limits(max_priority=2)) as server:
        for priority in (-2, 2):
            assert 200 == server.post(PLAIN | {"priority": priority}).status_code
        for priority in (-3, 3, -(2**20), 10**30):
            assert "in [-2, 2]" in message_of(server.post(PLAIN | {"priority": priority}))


# ---- an engine that cannot serve ----------------------------------------------------------------


def test_health_says_when_the_engines_thread_has_ended(run_server) -> None:
    """And whoever asks is told, not kept waiting."""
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
