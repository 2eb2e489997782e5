"""vLLM's routes by which a model sleeps, and wakes; a request wakes it as well."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from helpers.serving import LONG, PLAIN, tiny_llama

from .conftest import Running, running


@pytest.fixture(scope="module")
def sleepy() -> Iterator[Running]:
    with running(model=tiny_llama(), can_sleep=True) as server:
        yield server


def is_sleeping(server: Running) -> bool:
    answer = httpx.get(f"{server.url}/is_sleeping")
    assert answer.status_code == 200
    [(name, value)] = answer.json().items()
    assert name == "is_sleeping"
    return bool(value)


def ask(server: Running, path: str) -> httpx.Response:
    return httpx.post(server.url + path, timeout=60)


def text(server: Running) -> str:
    answer = server.post(PLAIN | {"temperature": 0, "max_tokens": 9})
    assert answer.status_code == 200
    return str(answer.json()["choices"][0]["text"])


def test_a_model_sleeps_and_wakes_as_with_vllm(sleepy: Running) -> None:
    expected = text(sleepy)
    for path in ("/sleep", "/sleep?level=1", "/sleep?level=1&mode=wait", "/sleep?mode=abort"):
        assert not is_sleeping(sleepy)
        answer = ask(sleepy, path)
        assert (200, b"") == (answer.status_code, answer.content)
        assert is_sleeping(sleepy)
        assert 0 == sleepy.engine._weights._pool.stats().created_bytes  # type: ignore[union-attr]
        assert "ok" == httpx.get(f"{sleepy.url}/health").json()["status"]
        if path == "/sleep":
            assert expected == text(sleepy)
            ask(sleepy, "/wake_up")
        else:
            assert 200 == ask(sleepy, "/wake_up?tags=weights").status_code
        assert not is_sleeping(sleepy)
        assert expected == text(sleepy)


def test_other_levels_and_modes_are_refused(sleepy: Running) -> None:
    """In words, with the parameter at fault."""
    for query, param in (("level=2", "level"), ("level=0", "level"), ("mode=keep", "mode")):
        answer = ask(sleepy, f"/sleep?{query}")
        assert 400 == answer.status_code
        assert param == answer.json()["error"]["param"]
    assert not is_sleeping(sleepy)


def test_running_requests_are_finished_or_aborted(sleepy: Running) -> None:
    body = LONG | {"max_tokens": 200}
    for mode, reason in (("wait", "length"), ("abort", "cancelled")):
        num_added = len(sleepy.watch.added)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(sleepy.post, body if mode == "wait" else LONG)
            sleepy.watch.wait(lambda n=num_added: len(sleepy.watch.added) > n, "a request")
            assert 200 == ask(sleepy, f"/sleep?mode={mode}").status_code
            assert is_sleeping(sleepy)
            running.result()
        assert reason == sleepy.watch.finished[-1].finish_reason


def test_without_sleep_mode_there_are_no_routes(server: Running) -> None:
    assert 404 == ask(server, "/sleep").status_code
    assert 404 == httpx.get(f"{server.url}/is_sleeping").status_code


def test_sleep_is_not_for_pages_of_others(sleepy: Running) -> None:
    """A browser sends such a request without asking; the server's own pages may send it."""
    ask(sleepy, "/wake_up")
    for origin, status in ("https://evil.example", 403), ("null", 403), (sleepy.url, 200):
        headers = {"Origin": origin}
        assert status == httpx.post(f"{sleepy.url}/sleep", headers=headers).status_code
        assert (status == 200) == is_sleeping(sleepy)
    page = {"Origin": "https://evil.example"}
    assert 403 == httpx.post(f"{sleepy.url}/wake_up", headers=page).status_code
    assert is_sleeping(sleepy)
    options = {"can_sleep": True, "api_keys": ["a", "b"], "cors_origins": ["https://ours.example"]}
    with running(model=tiny_llama(), **options) as server:
        ours = {"Authorization": "Bearer b", "Origin": "https://ours.example"}
        answer = httpx.post(f"{server.url}/sleep?mode=%61bort", headers=ours)
        assert (403, "mode") == (answer.status_code, answer.json()["error"]["param"])
        assert not server.engine.is_sleeping
        assert 200 == httpx.post(f"{server.url}/sleep", headers=ours, timeout=60).status_code


def test_routes_need_a_key(sleepy: Running) -> None:
    with running(model=tiny_llama(), can_sleep=True, api_keys=["k"]) as server:
        assert 401 == ask(server, "/sleep").status_code
        assert not server.engine.is_sleeping
