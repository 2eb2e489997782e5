"""The protocol between an exporter and an importer on a Unix socket.

    exporter                                   importer
       | <------------------- connects ---------- |
       | checks the user                          | checks the user
       | --- frame: the offer, or a refusal ----> |
       |                                          | compares it with its cache
       | <------- frame: ready, or a refusal ---- |
       | --- one byte, with descriptors --------> |   in batches, each of which
       | <------------------------- one byte ---- |   is imported before the next

A frame is a prefix (magic, version, length) and so many bytes of JSON. Nothing is trusted: lengths
have limits, every wait has a deadline, and unrequested descriptors are closed.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ....errors import ConfigError
from ....interrupts import interruptible

VERSION = 1
#: The offer of a million tokens, with an extent for each 16 of them, is 9 MiB.
OFFER_BYTES_MAX = 64 << 20
ANSWER_BYTES_MAX = 16 << 10
#: Descriptors in flight count against their sender; a message carries 253 at most.
BATCH = 64
_DESCRIPTORS_MAX = 253
_MAGIC = b"vmkv"
_PREFIX = struct.Struct("<4sII")
_CREDENTIALS = struct.Struct("3i")
_READ_BYTES = 1 << 16


class Peer(NamedTuple):
    """The process at the other end of a socket, as the kernel identifies it."""

    pid: int
    uid: int
    gid: int

    def __str__(self) -> str:
        return f"process {self.pid} of user {self.uid}"


class Channel:
    """A connected Unix stream socket, which the channel closes, with one deadline for all messages.

    Every method raises `TimeoutError` after the deadline and `ConnectionError` if the other end is
    gone. `peer` is the other process; for a connecting side the one that called `listen`.
    """

    def __init__(self, connection: socket.socket, timeout_s: float):
        self._connection = connection
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        self.peer = Peer(*_CREDENTIALS.unpack(credentials))

    def check_peer(self, allowed_uids: Collection[int]) -> None:
        """Raise `ConfigError` unless the other end runs as one of these users."""
        if self.peer.uid not in allowed_uids:
            raise ConfigError(
                f"{self.peer} is not allowed; allowed_uids are {sorted(allowed_uids)}"
            )

    # ---- frames ---------------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        """Send a JSON message as a frame."""
        with self._waiting():
            self._connection.sendall(_PREFIX.pack(_MAGIC, VERSION, len(message)) + message)

    def receive(self, num_bytes_max: int) -> dict[str, object]:
        """Return the JSON object in the next frame.

        Raises `ConfigError` for a frame of another protocol or version, one too large, or a
        refusal.
        """
        magic, version, num_bytes = _PREFIX.unpack(self._receive(_PREFIX.size))
        if magic != _MAGIC:
            raise ConfigError(f"{self.peer} does not speak vmkv's protocol: is it another server?")
        if version != VERSION:
            raise ConfigError(
                f"{self.peer} speaks version {version} of the protocol, and this vmkv {VERSION}: "
                "run the same vmkv on both sides"
            )
        if num_bytes > num_bytes_max:
            raise ConfigError(
                f"{self.peer} announces {num_bytes} bytes, more than the {num_bytes_max} allowed"
            )
        try:
            message = json.loads(self._receive(num_bytes))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self.peer} sent what is no JSON: {error}") from error
        if not isinstance(message, dict):
            raise ConfigError(f"{self.peer} sent JSON that is no object")
        if "refused" in message:
            raise ConfigError(f"{self.peer} refused: {str(message['refused'])[:1000]}")
        return message

    def refuse(self, why: str) -> None:
        """Send a refusal, if the other end still listens."""
        try:
            self.send(json.dumps({"refused": why}).encode())
        except OSError:
            pass  # The other end is gone.

    def _receive(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            with self._waiting():
                # The kernel closes descriptors that come with it, since `recv` takes none.
                num_wanted = min(_READ_BYTES, num_bytes - len(data))
                new = interruptible(self._connection.recv, num_wanted)
            if not new:
                raise self._gone()
            data += new
        return bytes(data)

    # ---- descriptors ----------------------------------------------------------------------

    def send_descriptors(self, fds: Sequence[int]) -> None:
        """Send a batch; the caller keeps the descriptors and may close them at once."""
        with self._waiting():
            socket.send_fds(self._connection, [b"+"], fds)

    def await_confirmation(self) -> None:
        """Wait until the other end has imported the batch."""
        self._receive(1)

    def receive_descriptors(self, number: int) -> list[int]:
        """Return the next batch of `number` descriptors, which the caller closes.

        Raises `ConfigError` for another number, `OSError` if this process has too many open files.
        """
        with self._waiting():
            data, fds, flags, _ = socket.recv_fds(
                self._connection, 1, _DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
            )
        error: Exception
        if not data:
            error = self._gone()
        elif flags & socket.MSG_CTRUNC:
            error = OSError(
                errno.EMFILE,
                "this process has too many open files for what it is sent; raise `ulimit -n`",
            )
        elif len(fds) != number:
            error = ConfigError(f"{self.peer} sent {len(fds)} descriptors instead of {number}")
        else:
            return fds
        for fd in fds:
            os.close(fd)
        raise error

    def confirm(self) -> None:
        """Confirm that a batch has been imported."""
        with self._waiting():
            self._connection.sendall(b"+")

    # ---- closing --------------------------------------------------------------------------

    def shut_down(self) -> None:
        """End the conversation from any thread; pending calls on this channel fail at once."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # The other end has closed the connection already.

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Limit one call on the socket to the deadline, and name the peer in its errors."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise self._late()
        self._connection.settimeout(left_s)
        try:
            yield
        except TimeoutError:
            raise self._late() from None
        except ConnectionError as error:
            raise self._gone() from error

    def _late(self) -> TimeoutError:
        return TimeoutError(f"{self.peer} took more than {self._timeout_s:g} s")

    def _gone(self) -> ConnectionError:
        return ConnectionResetError(f"{self.peer} closed the connection midway")
