"""Asking a server over HTTP, with a limit on the time of the whole answer. Standard library only.

A socket's own timeout begins anew with every byte, so that a server which drips them is waited for
as long as it likes.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..errors import ConfigError, one_line
from .tables import shown

#: What an answer that is read whole may have, and a line of one that is streamed.
_BODY_BYTES_MAX = 64 << 20
_LINE_BYTES_MAX = 1 << 20


@dataclass(frozen=True)
class Address:
    """Where a server is.

    Attributes:
        scheme: `http` or `https`.
        host: A name or an address.
        port: None for the scheme's own.
        path: What comes before the paths of its API, mostly nothing.
    """

    scheme: str
    host: str
    port: int | None
    path: str

    @classmethod
    def parse(cls, text: str) -> Address:
        """An address as a user types it; without a scheme it is http.

        Raises:
            ConfigError: It is none.
        """
        problem = ConfigError(f"{shown(text)} is no address of a server; write http://HOST:PORT")
        try:
            parts = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
            host, port = parts.hostname or "", parts.port
            host.encode("idna")
            parts.path.encode("ascii")
        except ValueError as error:  # Brackets, ports, names that DNS has no room for.
            raise problem from error
        is_clean = all(each.isprintable() and not each.isspace() for each in text)
        is_served = parts.scheme in ("http", "https") and parts.username is None
        if not host or port == 0 or not is_served or not is_clean:
            raise problem
        return cls(parts.scheme, host, port, parts.path.rstrip("/"))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}{'' if self.port is None else f':{self.port}'}{self.path}"


class Client:
    """One connection to a server, which is made when it is needed. For one thread, but for `cut`.

    Args:
        address: The server.
        timeout_s: For each whole answer, its connection included.

    Attributes:
        address: The server.
    """

    def __init__(self, address: Address, *, timeout_s: float):
        is_encrypted = address.scheme == "https"
        kind = http.client.HTTPSConnection if is_encrypted else http.client.HTTPConnection
        self._connection = kind(address.host, address.port, timeout=timeout_s)
        self.address = address
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_late = self._is_cut = False

    @contextlib.contextmanager
    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request; the answer is to be read within the `with` block.

        Raises:
            ConfigError: There is no server, it does not speak HTTP, or the time is up; the latter
                also in place of what the block makes of half an answer.
        """
        timer = threading.Timer(self._timeout_s, self._be_late)
        timer.daemon = True
        timer.start()
        try:
            self._connect()
            self._connection.request(method, path, body, dict(headers or {}))
            yield self._connection.getresponse()
            self._check_time()  # A connection that was cut may look like the end of an answer.
        except (OSError, http.client.HTTPException) as error:
            self._check_time(error)
            raise ConfigError(
                f"no answer from {self.address}: {one_line(error)}; is `vmkv serve` running there?"
            ) from error
        except ConfigError as error:
            self._check_time(error)
            raise
        finally:
            timer.cancel()

    def cut(self) -> None:
        """End what is under way, from any thread; nothing is asked after that."""
        with self._lock:
            self._is_cut = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # It has ended by itself.
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _be_late(self) -> None:
        self._is_late = True
        self.cut()

    def _connect(self) -> None:
        if self._connection.sock is None:
            self._connection.connect()
        with self._lock:
            # The answer's own file keeps it open when the connection forgets it.
            self._socket = self._connection.sock
            if self._is_cut:
                raise OSError("the connection was cut")

    def _check_time(self, error: BaseException | None = None) -> None:
        if self._is_late or isinstance(error, TimeoutError):
            raise ConfigError(
                f"{self.address} did not end its answer within {self._timeout_s:g} s"
            ) from error


def read_whole(answer: http.client.HTTPResponse) -> bytes:
    """All of an answer; within `Client.ask`, as for `read_lines`.

    Raises:
        ConfigError: It does not end.
    """
    data = answer.read(_BODY_BYTES_MAX + 1)
    if len(data) > _BODY_BYTES_MAX:
        raise ConfigError(f"the answer has more than {_BODY_BYTES_MAX >> 20} MiB")
    _check_whole(answer)
    return data


def read_lines(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """An answer line by line, as it comes.

    Raises:
        ConfigError: A line does not end.
    """
    while line := answer.readline(_LINE_BYTES_MAX + 1):
        if len(line) > _LINE_BYTES_MAX:
            raise ConfigError(f"a line of the answer has more than {_LINE_BYTES_MAX >> 20} MiB")
        yield line
    _check_whole(answer)


def _check_whole(answer: http.client.HTTPResponse) -> None:
    """Reads of a limited size return less where the connection ends, and say nothing."""
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)
