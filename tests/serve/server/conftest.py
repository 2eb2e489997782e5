"""Servers around a real engine on the host backend; each must release everything when it ends."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import certifi
import httpx
import pytest
import torch
import transformers
from fastapi import FastAPI
from helpers.holders import holders_of_views
from helpers.serving import LONG, MAX_TOKENS, Watch, serving, tiny_llama, tiny_tokenizer, wire

from vmkv import BackendUsage
from vmkv.serve.async_engine import AsyncEngine
from vmkv.serve.engine import Engine
from vmkv.serve.metrics import Metrics
from vmkv.serve.observer import Observers
from vmkv.serve.server import Limits, ServerOptions, create_app
from vmkv.serve.server.run import Server
from vmkv.serve.server.service import Service
from vmkv.units import MiB

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give clients one CA certificate: loading all of them takes longer than most tests."""
    end = "-----END CERTIFICATE-----\n"
    path = tmp_path_factory.mktemp("authority") / "one.pem"
    path.write_text(Path(certifi.where()).read_text().partition(end)[0] + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield


@dataclass(frozen=True)
class Running:
    """A running server.

    Attributes:
        url: Its address.
        app: The application.
        engine: The engine behind it.
        watch: Records the engine's events.
        model: The model.
        server: The HTTP server.
        clients: Closes every client before the server ends.
    """

    url: str
    app: FastAPI
    engine: Engine
    watch: Watch
    model: Any
    server: Server
    clients: contextlib.ExitStack

    @property
    def service(self) -> Service:
        """The state that the routes share."""
        return self.app.state.service

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def stop(self) -> None:
        """Tell the server to drain and end."""
        self.server.should_exit = True

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on the server's state holds; each check makes one request."""
        with httpx.Client() as client:
            deadline_s = time.monotonic() + 60
            while not condition():
                assert 200 == client.get(f"{self.url}/health").status_code
                assert time.monotonic() < deadline_s, "the condition did not hold within 60 s"

    def post(
        self, body: dict[str, Any] | bytes, path: str = "/v1/completions", **headers: str
    ) -> httpx.Response:
        """Send a request; `body` is converted to JSON unless it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        return httpx.post(self.url + path, content=data, headers=headers, timeout=60)

    def ask(
        self, body: dict[str, Any], path: str = "/v1/completions", **headers: str
    ) -> dict[str, Any]:
        """The JSON of an answer, which must succeed."""
        answer = self.post(body, path, **headers)
        assert 200 == answer.status_code, answer.text
        return answer.json()

    def chunks(self, body: dict[str, Any], path: str = "/v1/completions") -> list[dict[str, Any]]:
        """The JSON of each chunk of a stream, which must succeed."""
        answer = self.post(body | {"stream": True}, path)
        assert 200 == answer.status_code, answer.text
        *events, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert "[DONE]" == done
        return [json.loads(each) for each in events]

    @contextlib.contextmanager
    def streaming(
        self, body: dict[str, Any] = LONG, path: str = "/v1/completions"
    ) -> Iterator[Iterator[str]]:
        """Open a stream, check its first event, and yield its other non-empty lines."""
        body = body | {"stream": True}
        with httpx.stream("POST", self.url + path, json=body, timeout=60) as answer:
            assert 200 == answer.status_code
            lines = (line for line in answer.iter_lines() if line)
            assert "choices" in next(lines)
            yield lines

    @contextlib.contextmanager
    def sent(self, data: bytes | dict[str, Any]) -> Iterator[socket.socket]:
        """Open a connection, send bytes or a request over it, and close it at the end."""
        with socket.create_connection(self.address, timeout=60) as client:
            client.sendall(data if isinstance(data, bytes) else wire(data))
            yield client

    @contextlib.contextmanager
    def failing(self, error: Exception) -> Iterator[threading.Event]:
        """Make the model raise `error` while the yielded event is set; it is set at first."""
        fails = threading.Event()
        fails.set()

        def fail(*_: Any) -> None:
            if fails.is_set():
                raise error

        hook = self.model.lm_head.register_forward_pre_hook(fail)
        try:
            yield fails
        finally:
            hook.remove()

    def streamed_text(self, body: dict[str, Any], path: str, fails: threading.Event) -> str:
        """Return a stream whose engine fails after the first piece; see `failing`."""
        with httpx.stream("POST", self.url + path, json=body, timeout=60) as answer:
            pieces = answer.iter_text()
            text = next(pieces)
            fails.set()
            return text + "".join(pieces)

    def client(self, **options: Any) -> Any:
        """An OpenAI client that does not retry."""
        openai = pytest.importorskip("openai")
        options = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
        return self.clients.enter_context(openai.OpenAI(base_url=f"{self.url}/v1", **options))


@contextlib.contextmanager
def running(
    limits: Limits | None = None,
    *,
    drain_timeout_s: float = 20,
    model: Any = None,
    tokenizer: Any = None,
    **options: Any,
) -> Iterator[Running]:
    """Run a server; afterwards check that it has released everything."""
    watch, metrics = Watch(), Metrics()
    model, tokenizer = model or tiny_llama(), tokenizer or tiny_tokenizer()
    engine = Engine(
        model,
        tokenizer=tokenizer,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        max_tokens=MAX_TOKENS,
        budget_bytes=64 * MiB,
        enable_sleep_mode=options.get("can_sleep", False),
        observer=Observers([metrics, watch]),  # In this order: Watch reports after Metrics.
    )
    metrics.bind_pages(lambda: engine.cache.pool.page_bytes)
    app = create_app(
        AsyncEngine(engine),
        tokenizer,
        ServerOptions("tiny", MAX_TOKENS, limits=limits or Limits(), **options),
        metrics,
    )
    with serving(app, drain_timeout_s) as (url, server):
        with contextlib.ExitStack() as clients:
            yield Running(url, app, engine, watch, model, server, clients)
        watch.wait(lambda: len(watch.finished) == len(watch.added), "the end of every request")
        if not engine.cache.is_closed:
            engine.cache.check()
    service = app.state.service
    assert service.gate.num_inside == service.gate.num_waiting == 0
    # A failed request leaves frames that refer to views until they are collected.
    for _ in range(3):  # Finalisers release objects that the next collection finds.
        gc.collect()
    engine.cache.pool.reclaimer.free_idle_reservations()
    usage = engine.cache.pool.backend.usage()
    assert BackendUsage() == usage, f"the server did not release everything: {holders_of_views()}"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server with the default limits."""
    with running() as it:
        yield it


@pytest.fixture(scope="session")
def run_server() -> Callable[..., contextlib.AbstractContextManager[Running]]:
    """Return a context manager that runs a server with given limits."""
    return running
