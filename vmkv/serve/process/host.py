"""The engine's process: receives commands, runs the engine, sends its outputs.

Messages between the processes are MessagePack, prefixed by a kind and a length. Both sides are the
same program over a private socket pair, so input is trusted; errors, which are rare, are pickled.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ...core.cache import CacheStats
from ...errors import VMKVError
from ..engine_loop import Add, Cancel, Command, EngineLoop, Finish, Look, News, Sleep, Stop, Wake
from ..observer import EngineObserver, Event, Idle, ObservedCache, StepRecord

if TYPE_CHECKING:
    from ..engine import Engine

_LOG = logging.getLogger(__name__)
_READ_BYTES = 1 << 20
#: Interval of cache statistics, which take some 100 µs with many rows.
_STATS_INTERVAL_S = 0.5

#: Makes an engine that reports to an observer.
MakeEngine = Callable[[EngineObserver], "AbstractContextManager[Engine]"]

# ---- messages ------------------------------------------------------------------------------------

_HEAD = struct.Struct("<BI")


class Ready(NamedTuple):
    """First message of an engine: its `max_tokens`, its pool's page size, its empty cache."""

    max_tokens: int
    page_bytes: int
    stats: CacheStats


class Failed(NamedTuple):
    """The engine could not be made, or has ended."""

    error: BaseException


def packed(message: Any) -> bytes:
    """Encode a message; raises `TypeError` for an object such as a function."""
    body = _ENCODER.encode(message)
    return _HEAD.pack(_KINDS.index(type(message)), len(body)) + body


class Unpacker:
    """Decodes messages from a stream of bytes."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that `data` completes."""
        self._bytes += data
        start = 0
        while len(self._bytes) >= start + _HEAD.size:
            kind, num_bytes = _HEAD.unpack_from(self._bytes, start)
            body, end = start + _HEAD.size, start + _HEAD.size + num_bytes
            if end > len(self._bytes):
                break
            with memoryview(self._bytes) as whole, whole[body:end] as part:
                message = _DECODERS[kind].decode(part)
            start = end
            yield message
        del self._bytes[:start]


def _pickled(value: Any) -> bytes:
    if not isinstance(value, BaseException):
        raise TypeError(f"a {type(value).__name__} cannot be sent")
    try:
        data = pickle.dumps(value)
        if isinstance(pickle.loads(data), BaseException):
            return data
    except Exception:  # noqa: BLE001  # pickling may fail in any way
        pass
    return pickle.dumps(RuntimeError(f"{type(value).__name__}: {value}"))


_KINDS = (Add, Cancel, Finish, Stop, Ready, Failed, News, Sleep, Wake)
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_pickled)
_DECODERS = [
    msgspec.msgpack.Decoder(kind, dec_hook=lambda _, data: pickle.loads(data)) for kind in _KINDS
]


# ---- the engine's side ---------------------------------------------------------------------------


class Relay:
    """Engine observer that collects events for the client."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._stats: CacheStats | None = None
        self._looked_s = float("-inf")

    def take(self) -> tuple[bytes, CacheStats | None]:
        """Return and clear the collected events, pickled, and new statistics of the cache."""
        taken = pickle.dumps(self._events) if self._events else b"", self._stats
        self._events, self._stats = [], None
        return taken

    def on(self, event: Event, cache: ObservedCache) -> None:
        """Record the event; read the cache's statistics at most twice a second, and when idle."""
        self._events.append(event)
        now_s = time.monotonic()
        is_due = isinstance(event, StepRecord) and now_s - self._looked_s >= _STATS_INTERVAL_S
        if is_due or isinstance(event, Idle):
            self._stats, self._looked_s = cache.stats(), now_s


class SocketLink:
    """A non-blocking socket to the client, with the events of a relay. Implements `Link`."""

    def __init__(self, connection: socket.socket, relay: Relay):
        connection.setblocking(False)
        self._socket = connection
        self._relay = relay
        self._unpacker = Unpacker()
        self._unsent = bytearray()
        self.is_broken = False  # Whether the client has closed the connection.
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._waker)

    def send(self, news: News) -> None:
        """Send news, with the relay's events."""
        events, stats = self._relay.take()
        self.put(news._replace(events=events, stats=stats))

    def put(self, message: News | Ready) -> None:
        """Send a message; bytes that the socket does not accept are kept."""
        self._unsent += packed(message)
        self._send_more()

    def receive(self, timeout_s: float | None = 0.0) -> Sequence[Command]:
        """Return the commands that have arrived; see `Link`."""
        if timeout_s != 0:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            poll.register(self._waker, select.POLLIN)
            # Rounded down to whole milliseconds, so that the timeout is not exceeded.
            poll.poll(None if timeout_s is None else int(1e3 * timeout_s))
        self._send_more()
        found: list[Command] = []
        with contextlib.suppress(BlockingIOError):  # Nobody has called `wake`.
            os.eventfd_read(self._waker)
            found.append(Look())
        while not self.is_broken:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.is_broken = not data
            found += self._unpacker.feed(data)
        return found

    def wake(self) -> None:
        """Interrupt `receive` from another thread."""
        os.eventfd_write(self._waker, 1)

    def end(self, last: Failed | None = None) -> None:
        """Send what is left and a last message, however long the client takes to read it."""
        self._socket.setblocking(True)
        with contextlib.suppress(OSError):
            self._socket.sendall(self._unsent + (packed(last) if last else b""))

    def _send_more(self) -> None:
        while self._unsent and not self.is_broken:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                break
            except OSError:
                self.is_broken = True


def run_engine(make: MakeEngine, connection: socket.socket) -> None:
    """Make an engine, report `Ready`, and run it; called in the engine's process."""
    relay, failed, is_ready = Relay(), None, False
    link = SocketLink(connection, relay)
    try:
        with make(relay) as engine:
            link.put(Ready(engine.max_tokens, engine.cache.pool.page_bytes, engine.cache.stats()))
            is_ready = True
            # Converting the vocabulary takes a second, which the first guided request is spared.
            threading.Thread(target=engine.grammars.prepare, daemon=True).start()
            # Exclude the model and the libraries from garbage collection.
            gc.collect()
            gc.freeze()
            EngineLoop(engine, link, ends_with_device=True).run()
    except BaseException as error:  # noqa: BLE001  # sent to the parent process
        if is_ready or not isinstance(error, VMKVError):
            _LOG.critical("the engine's process ends", exc_info=error)
        failed = Failed(error)
    link.end(failed)
