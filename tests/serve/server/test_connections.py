"""Connections that say nothing, or too little at a time, keep nobody out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from helpers.serving import MAX_TOKENS
from uvicorn.server import ServerState

from vmkv import ConfigError
from vmkv.serve.server import Limits, run
from vmkv.serve.server.connections import Connections, LimitedProtocol

PLAIN = {"model": "tiny", "prompt": "A row", "max_tokens": 2}
LONG = PLAIN | {"max_tokens": MAX_TOKENS - 50, "ignore_eos": True, "stream": True}
HALF_A_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
PATIENCE_S = 60


@contextlib.contextmanager
def connected(server, count: int) -> Iterator[list[socket.socket]]:
    """So many connections."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(server.address, timeout=PATIENCE_S))
            for _ in range(count)
        ]


def is_ended(client: socket.socket) -> bool:
    """Whether the server has ended the connection; waits until it has."""
    try:
        while client.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_a_connection_without_a_request_is_closed(run_server) -> None:
    """After a time."""
    with run_server(Limits(head_timeout_s=0.1)) as server, connected(server, 1) as (client,):
        assert b"" == client.makefile("rb").read()


def test_the_time_for_a_head_is_for_heads() -> None:
    """It runs before a request and between two; a body has its own, and so has an answer."""
    may_answer = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def scenario() -> None:
        config = uvicorn.Config(app, log_level="critical")
        config.load()
        connections = Connections(10, head_timeout_s=60)
        connection = LimitedProtocol(
            connections=connections,
            config=config,
            server_state=ServerState(),
            app_state={},
        )

        def runs() -> bool:
            return connection._head_timer is not None

        mine, its = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: connection, sock=its
        )
        try:
            assert runs()
            connection.data_received(HALF_A_HEAD)
            assert runs()
            assert connection._head_timer.when() <= asyncio.get_running_loop().time() + 60
            connection.data_received(b"Y: z\r\nContent-Length: 2\r\n\r\n")
            assert not runs()
            connection.data_received(b"1")
            connection.data_received(b"2")
            assert not runs()
            may_answer.set()
            while not connection.cycle.response_complete:
                await asyncio.sleep(0)
            assert runs()
        finally:
            transport.abort()
            mine.close()
            await asyncio.sleep(0)
        assert not runs()
        assert 0 == len(connections)

    asyncio.run(scenario())


def test_who_sends_a_head_too_slowly_is_told(run_server) -> None:
    """408, where there is somebody to read it."""
    with run_server() as server, connected(server, 1) as (client,):
        client.sendall(HALF_A_HEAD)
        state = server.server.server_state

        def slow() -> list[LimitedProtocol]:
            return [each for each in tuple(state.connections) if each.conn.trailing_data[0]]

        server.until(lambda: len(slow()) == 1)
        connection = slow()[0]
        connection.loop.call_soon_threadsafe(connection._time_is_up)
        assert client.makefile("rb").read().startswith(b"HTTP/1.1 408 ")


def test_silent_connections_make_room(run_server) -> None:
    """Those that have been silent for longest; what is being answered goes on."""
    with (
        run_server(Limits(max_connections=4)) as server,
        httpx.stream(
            "POST", f"{server.url}/v1/completions", json=LONG, timeout=PATIENCE_S
        ) as answer,
    ):
        lines = (line for line in answer.iter_lines() if line)
        assert "choices" in next(lines)
        with connected(server, 12) as clients:
            for at, client in enumerate(clients):
                client.sendall((b"", HALF_A_HEAD, HEAD + b"Content-Length: 9\r\n\r\n{")[at % 3])
            assert 200 == httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code
            assert all(is_ended(client) for client in clients[:9])
        for _ in range(5):
            assert "choices" in next(lines)


def test_where_all_connections_are_served_a_new_one_is_told(run_server) -> None:
    """503, at once, and not when somebody has left."""
    with run_server(Limits(max_connections=1)) as server:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=LONG, timeout=PATIENCE_S
        ) as answer:
            lines = answer.iter_lines()
            assert "choices" in next(lines)
            with connected(server, 1) as (client,):
                said = client.makefile("rb").read()
                assert said.startswith(b"HTTP/1.1 503 ")
                assert b"Retry-After" in said
        assert 200 == httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code


def test_a_body_in_tiny_pieces_is_refused(run_server) -> None:
    """Each piece costs the same, whatever it holds."""
    with run_server() as server, connected(server, 1) as (client,):
        client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 2000)
        assert client.makefile("rb").readline().startswith(b"HTTP/1.1 400 ")
        pieces = iter([b" " * 600] * 200 + [b'{"model": "tiny", "prompt": "a", "max_tokens": 1}'])
        answer = httpx.post(
            f"{server.url}/v1/completions",
            content=pieces,
            headers={"Content-Type": "application/json"},
            timeout=PATIENCE_S,
        )
        assert 200 == answer.status_code


@pytest.mark.parametrize("how", ["one header", "many headers", "target", "no end"])
def test_a_long_head_is_refused(run_server, how: str) -> None:
    """However it is long, and also where all of it comes at once."""
    long = "x" * 17 * 1024
    head = {
        "one header": f"GET /health HTTP/1.1\r\nHost: x\r\nX: {long}\r\n\r\n",
        "many headers": "GET /health HTTP/1.1\r\nHost: x\r\n" + "Xyz: 1234\r\n" * 2500 + "\r\n",
        "target": f"GET /health?{long} HTTP/1.1\r\nHost: x\r\n\r\n",
        "no end": f"GET /health HTTP/1.1\r\nHost: x\r\nX: {long}",
    }[how]
    with run_server() as server, connected(server, 1) as (client,):
        with contextlib.suppress(OSError):
            client.sendall(head.encode())
        assert client.makefile("rb").readline().startswith(b"HTTP/1.1 400 ")
        assert 200 == httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code


def test_what_comes_after_an_answer_is_not_kept_up(run_server) -> None:
    """A body that nobody wants, after its refusal, neither holds the connection nor is logged."""
    with run_server() as server, connected(server, 1) as (client,):
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
        with contextlib.suppress(OSError):
            client.sendall(b"no chunk\r\n")
        assert is_ended(client)


@pytest.mark.parametrize(
    ("soft", "hard", "expected", "is_raised", "warns"),
    [
        (1 << 20, 1 << 20, 4096, False, False),
        (1024, 1 << 20, 4096, True, False),
        (1024, resource.RLIM_INFINITY, 4096, True, False),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 4096, False, False),
        (1024, 1024, None, True, True),
    ],
)
def test_connections_are_as_many_as_there_are_descriptors_for(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    expected: int | None,
    is_raised: bool,
    warns: bool,
) -> None:
    """The system is asked for more first; where it has no more, the log says so."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    with caplog.at_level(logging.WARNING):
        found = run._affordable(4096)
    assert is_raised == bool(asked)
    assert warns == ("ulimit -n" in caplog.text)
    if expected is None:
        assert 500 < found < 1024
    else:
        assert expected == found


def test_too_few_descriptors_for_any_connection_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a server runs that answers nobody."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with pytest.raises(ConfigError, match="raise the limit"):
        run._affordable(4096)
