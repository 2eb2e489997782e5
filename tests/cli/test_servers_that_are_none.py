"""`top` asks servers that are none, or hostile, or endlessly slow.

Each answer is a canned one, sent by a thread of this process over loopback.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

METRICS = b"vmkv_requests_running 1\n"


def http(body: bytes, status: str = "200 OK", *, length: int | None = None) -> bytes:
    """An answer as bytes, with a length that need not be true."""
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n".encode() + body


def error(message: str) -> bytes:
    """What an OpenAI server says when it refuses."""
    return http(json.dumps({"error": {"message": message}}).encode(), "500 Oh")


#: What a peer says to every request, whatever was asked.
PEERS: dict[str, bytes] = {
    "says nothing": b"",
    "is a mail server": b"220 mail.example.org ESMTP\r\n",
    "is a shell": b"SSH-2.0-OpenSSH_9.6\r\n",
    "speaks TLS": bytes.fromhex("15030300020246"),
    "sends noise": bytes(range(256)) * 20,
    "sends no line end": b"H" * 100_000,
    "has a status of its own": b"HTTP/1.1 abc Oh\r\n\r\n",
    "has heads without end": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 2000,
    "has a head too long": b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000,
    "has a length of its own": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\nx",
    "has a length below zero": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nx",
    "ends too early": http(METRICS, length=1000),
    "has broken chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nx",
    "is elsewhere": http(b"", "301 Moved\r\nLocation: http://127.0.0.1:1/"),
    "finds nothing": http(b"<html>\nnot\nfound</html>", "404 Not Found"),
    "fails in lines": error("one\ntwo\x1b[2J\x07\u2028three"),
    "fails at length": error("x" * 100_000),
    "fails with a number": http(b'{"error": 7}', "500 Oh"),
    "is empty": http(b""),
    "is a page": http(b"<html><body>Hello</body></html>"),
    "is binary": http(b"\xff\xfe\x00"),
    "nests": http(b"[" * 100_000),
    "is null": http(b"null"),
    "counts below zero": http(METRICS.replace(b"1\n", b"-1\n")),
    "counts no number": http(METRICS.replace(b"1\n", b"nan\n")),
    "counts without end": http(METRICS.replace(b"1\n", b"inf\n")),
    "has buckets without bounds": http(b'vmkv_x_bucket{le="up"} 1\n'),
    "has labels without end": http(b'vmkv_x{le="1} 1\n'),
    "is another's metrics": http(b"go_threads 7\n"),
}


class Peer:
    """A server on this machine that takes each connection with a function, until it is closed."""

    def __init__(self, talk: Callable[[socket.socket], None]):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._talk = talk
        self._is_closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            connection, _ = self._listener.accept()
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            self._talk(connection)

    def pause(self, seconds: float) -> bool:
        """Wait, or until the peer is closed; whether it goes on."""
        return not self._is_closed.wait(seconds)

    def close(self) -> None:
        """End every thread."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            socket.create_connection(self._listener.getsockname(), timeout=5).close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        self._listener.close()


@pytest.fixture
def peer() -> Iterator[Callable[[Callable[[socket.socket], None]], Peer]]:
    """Makes peers, and closes them."""
    made: list[Peer] = []

    def make(talk: Callable[[socket.socket], None]) -> Peer:
        made.append(Peer(talk))
        return made[-1]

    yield make
    for each in made:
        each.close()


def heard(connection: socket.socket) -> bytes:
    """The head of a request."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (received := connection.recv(65536)):
            break
        data += received
    return data


@pytest.mark.parametrize("kind", PEERS)
def test_a_server_that_is_none_is_answered_by_one_line(complaint, peer, kind: str) -> None:
    """Other protocols, other answers, broken ones, hostile ones."""

    def talk(connection: socket.socket) -> None:
        heard(connection)
        connection.sendall(PEERS[kind])

    complaint("top", peer(talk).address, "--once", "--timeout", "20")


@pytest.mark.slow
@pytest.mark.parametrize(
    "head",
    [b"", b"HTTP/1.1 200 OK\r\nX-Pad: ", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 100 Continue\r\n"],
    ids=["nothing", "heads", "body", "continue"],
)
@pytest.mark.parametrize("is_silent", [False, True], ids=["dripping", "silent"])
def test_a_server_that_drips_is_not_waited_for(
    complaint, peer, head: bytes, is_silent: bool
) -> None:
    """The limit is on the whole answer: each byte in time does not make it in time."""

    def talk(connection: socket.socket) -> None:
        heard(connection)
        connection.sendall(head)
        while dripping.pause(0.02):
            connection.sendall(b"" if is_silent else b"x")

    dripping = peer(talk)
    start_s = time.monotonic()
    said = complaint("top", dripping.address, "--once", "--timeout", "0.3")
    assert "did not end its answer within 0.3 s" in said
    # Not how fast it is, but that it ends: the peer would go on for ever.
    assert time.monotonic() - start_s < 60
