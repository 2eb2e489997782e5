"""The engine's process: receives commands, runs the engine, sends its outputs."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ...core.cache import CacheStats
from ...errors import VMKVError
from ..engine_loop import Command, EngineLoop, Event, Look, News
from ..observer import EngineObserver, ObservedCache, RequestRecord, StepRecord
from .encoding import Failed, Ready, Unpacker, packed

if TYPE_CHECKING:
    from ..engine import Engine

_LOG = logging.getLogger(__name__)
_READ_BYTES = 1 << 20
#: Interval of cache statistics, which take some 100 µs with many rows.
_STATS_INTERVAL_S = 0.5
#: Time for an orderly end after the connection was closed.
_END_S = 5.0

#: Termination signals, which the parent process handles; see `run_engine`.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM)

MakeEngine = Callable[[EngineObserver], "AbstractContextManager[Engine]"]


class Relay:
    """Engine observer that collects events for the client."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._stats: CacheStats | None = None
        self._looked_s = float("-inf")

    def take(self) -> tuple[Sequence[Event], CacheStats | None]:
        """Return and clear the collected events and the latest cache statistics, if new."""
        taken = self._events, self._stats
        self._events, self._stats = [], None
        return taken

    def request_added(self, request_id: int, num_prompt_tokens: int) -> None:
        """Record the event."""
        self._events.append(("request_added", (request_id, num_prompt_tokens)))

    def first_token(self, request_id: int, wait_s: float) -> None:
        """Record the event."""
        self._events.append(("first_token", (request_id, wait_s)))

    def request_finished(self, request: RequestRecord) -> None:
        """Record the event."""
        self._events.append(("request_finished", (request,)))

    def step_finished(self, step: StepRecord, cache: ObservedCache) -> None:
        """Record the event; read the cache's statistics at most twice a second."""
        self._events.append(("step_finished", (step,)))
        if time.monotonic() - self._looked_s >= _STATS_INTERVAL_S:
            self._look(cache)

    def idle(self, cache: ObservedCache) -> None:
        """Record the event and read the cache's statistics."""
        self._events.append(("idle", ()))
        self._look(cache)

    def _look(self, cache: ObservedCache) -> None:
        self._stats = cache.stats()
        self._looked_s = time.monotonic()


class SocketLink:
    """A non-blocking socket to the client. Implements `Link`."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self._socket = connection
        self._unpacker = Unpacker()
        self._unsent = memoryview(b"")
        self.is_broken = False  # Whether the client has closed the connection.
        self._is_woken = False
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._waker)

    def can_send(self) -> bool:
        """Send pending bytes; return whether none are left."""
        while self._unsent and not self.is_broken:
            try:
                num_bytes = self._socket.send(self._unsent)
            except BlockingIOError:
                return False
            except OSError:
                self._broke()
            else:
                self._unsent = self._unsent[num_bytes:]
        return True

    def send(self, news: News | Ready) -> None:
        """Send a message, or keep the bytes that the socket does not accept."""
        if not self.is_broken:
            self._unsent = memoryview(packed(news))
            self.can_send()

    def receive(self) -> Sequence[Command]:
        """Return the commands that have arrived."""
        found: list[Command] = []
        if self._is_woken:
            self._is_woken = False
            os.eventfd_read(self._waker)
            found.append(Look())
        while not self.is_broken:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._broke()
            found += self._unpacker.feed(data)
        return found

    def wait(self, *, for_commands: bool, to_send: bool, timeout_s: float | None = None) -> None:
        """Wait for the socket, for `wake` or for the timeout."""
        poll = select.poll()
        wanted = select.POLLIN if for_commands else 0
        poll.register(self._socket, wanted | select.POLLOUT if self._unsent else wanted)
        poll.register(self._waker, wanted)
        # Rounded down to whole milliseconds, so that the timeout is not exceeded.
        poll.poll(None if timeout_s is None else int(1e3 * timeout_s))

    def wake(self) -> None:
        """Interrupt `wait` from another thread."""
        os.eventfd_write(self._waker, 1)
        self._is_woken = True

    def end_with(self, message: Any) -> None:
        """Send a last message, however long the client takes to read it."""
        self._socket.setblocking(True)
        with contextlib.suppress(OSError):
            self._socket.sendall(bytes(self._unsent) + packed(message))

    def _broke(self) -> None:
        self.is_broken = True
        self._unsent = memoryview(b"")


def run_engine(make: MakeEngine, connection: socket.socket) -> None:
    """Entry point of the engine's process: make an engine, report `Ready`, and run it.

    Ignores termination signals, since the parent handles them; its end closes the connection.
    """
    for each in IGNORED_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    link, relay, is_ready = SocketLink(connection), Relay(), False
    try:
        with make(relay) as engine:
            page_bytes = engine.cache.pool.page_bytes
            link.send(Ready(engine.max_tokens, page_bytes, engine.cache.stats()))
            is_ready = True
            # Exclude the model and the libraries from garbage collection.
            gc.collect()
            gc.freeze()
            EngineLoop(engine, link, relay.take, ends_with_device=True).run()
    except BaseException as error:  # noqa: BLE001  # sent to the parent process
        if is_ready or not isinstance(error, VMKVError):
            _LOG.critical("the engine's process ends", exc_info=error)
        link.end_with(Failed(error))


def _end_with(connection: socket.socket) -> None:
    """End this process some time after its parent, whatever it is doing."""
    poll = select.poll()
    poll.register(connection, 0)  # Reports a hang-up without a mask.
    poll.poll()
    time.sleep(_END_S)
    os._exit(1)
