"""Idle, slow and excess connections are closed."""

from __future__ import annotations

import contextlib
import socket

import httpx
import pytest
from helpers.serving import wire

from vmkv.serve.server import Limits

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n"
PATIENCE_S = 60


def read_to_end(client: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(4096):
            found += data
    return found


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-"])
def test_a_connection_without_a_request_is_closed(run_server, sent: bytes) -> None:
    """The time limit holds for a new connection and after an answer."""
    with run_server(Limits(head_timeout_s=0.2)) as server:
        with server.sent(sent) as client:
            assert b"" == read_to_end(client)
        with server.sent(HEALTH + b"\r\n" + sent) as client:
            answer = read_to_end(client)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert 1 == answer.count(b"HTTP/1.1")


def test_the_head_timeout_does_not_bound_answers(run_server) -> None:
    with run_server(Limits(head_timeout_s=0.1)) as server, server.streaming() as lines:
        for line in lines:
            assert "choices" in line
            if server.watch.num_steps > 200:
                break


def test_the_head_timeout_does_not_bound_the_second_of_two_requests_at_once(run_server) -> None:
    """Its head has come before the first one's answer was complete."""
    body = {"model": "tiny", "prompt": "A", "max_tokens": 250, "ignore_eos": True, "stream": True}
    first = wire(body | {"max_tokens": 2})
    last = wire(body).replace(b"Host: x", b"Host: x\r\nConnection: close")
    with run_server(Limits(head_timeout_s=0.1)) as server, server.sent(first + last) as client:
        assert 2 == read_to_end(client).count(b"[DONE]")


def test_a_connection_beyond_the_limit_gets_503(run_server) -> None:
    """At once: it does not wait for another connection to close."""
    with run_server(Limits(max_connections=1)) as server:
        with server.streaming(), server.sent(HEALTH + b"\r\n") as client:
            assert read_to_end(client).startswith(b"HTTP/1.1 503 ")
        assert 200 == httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code


def test_a_body_in_many_tiny_chunks_is_refused(run_server) -> None:
    """Each chunk costs the same whatever its size; the same number of larger chunks is served."""
    tiny_pieces = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 2000
    with run_server() as server, server.sent(tiny_pieces) as client:
        assert client.makefile("rb").readline().startswith(b"HTTP/1.1 400 ")
        pieces = iter([b" " * 600] * 200 + [b'{"model": "tiny", "prompt": "a", "max_tokens": 1}'])
        answer = httpx.post(
            f"{server.url}/v1/completions",
            content=pieces,
            headers={"Content-Type": "application/json"},
            timeout=PATIENCE_S,
        )
        assert 200 == answer.status_code


def test_a_head_longer_than_16_kib_is_refused(run_server) -> None:
    with run_server() as server, server.sent(HEALTH) as client:
        with contextlib.suppress(OSError):
            client.sendall(b"X: " + b"x" * 17 * 1024)
        assert client.makefile("rb").readline().startswith(b"HTTP/1.1 400 ")
        assert 200 == httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code


def test_a_body_after_its_answer_closes_the_connection(run_server) -> None:
    chunked = HEALTH + b"Transfer-Encoding: chunked\r\n\r\n"
    with run_server() as server, server.sent(chunked) as client:
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
        with contextlib.suppress(OSError):
            client.sendall(b"no chunk\r\n")
        read_to_end(client)
