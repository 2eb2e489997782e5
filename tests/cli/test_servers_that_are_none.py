"""`vmkv top` with an address where no vmkv server answers, or where the answer does not end."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest


def http(body: bytes, status: str = "200 OK", *, length: int | None = None) -> bytes:
    """An HTTP response as bytes; `length` may differ from the body's."""
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n".encode() + body


#: A server's response to every request, and a part of the error message.
ANSWERS: dict[str, tuple[bytes, str]] = {
    "says nothing": (b"", "is `vmkv serve` running there?"),
    "is a mail server": (b"220 mail.example.org ESMTP\r\n", "is `vmkv serve` running there?"),
    "ends too early": (http(b"vmkv_x 1\n", length=1000), "is `vmkv serve` running there?"),
    "is elsewhere": (http(b"", "301 Moved\r\nLocation: http://127.0.0.1:1/"), "it answers 301"),
    "finds nothing": (http(b"<html>\nnot\nfound</html>", "404 Not Found"), "it answers 404"),
    "is empty": (http(b""), "reports nothing of vmkv"),
    "is a page": (http(b"<html><body>Hello</body></html>"), "cannot be read"),
    "is another's metrics": (http(b"go_threads 7\n"), "reports nothing of vmkv"),
}


@pytest.fixture
def serve() -> Iterator[Callable[[bytes], str]]:
    """Serve one connection with a response and close it, or leave it open without one."""
    with contextlib.ExitStack() as stack:

        def start(answer: bytes | None) -> str:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def talk() -> None:
                connection, _ = listener.accept()
                connection.recv(65536)
                if answer is None:
                    stack.enter_context(connection)
                    return
                with connection:
                    connection.sendall(answer)

            thread = threading.Thread(target=talk)
            stack.callback(thread.join)
            thread.start()
            return f"127.0.0.1:{listener.getsockname()[1]}"

        yield start


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_wrong_server_gives_a_one_line_error(complaint, serve, kind: str) -> None:
    """Other protocols, other contents, and broken responses."""
    answer, words = ANSWERS[kind]
    assert words in complaint("top", serve(answer), "--once", "--timeout", "20")


def test_a_server_that_does_not_answer_is_a_timeout(complaint, serve) -> None:
    said = complaint("top", serve(None), "--once", "--timeout", "0.1")
    assert "did not answer within 0.1 s" in said
