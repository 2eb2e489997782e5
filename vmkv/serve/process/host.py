"""The engine's side: commands come between its steps, and what is new goes after each.

Nothing here waits for the other side to read. While it does not, what is new adds up, and goes in
one piece when it does: a few numbers and the text of each request, however long that takes.
"""

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
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from ...cache import CacheStats
from ...errors import VMKVError
from ..engine_loop import EngineLoop
from ..handle import RequestHandle
from ..observer import EngineObserver, ObservedCache, RequestRecord, StepRecord
from ..request import Request
from .messages import (
    Accepted,
    Add,
    Failed,
    Leave,
    News,
    Ready,
    Stop,
    Unpacker,
    Update,
    packed,
    portable,
)

if TYPE_CHECKING:
    from ..engine import Engine

_LOG = logging.getLogger(__name__)
_READ_BYTES = 1 << 20
#: Looking at the cache costs some 100 µs with many rows.
_STATS_INTERVAL_S = 0.5
#: Time to end in good order for a process that nobody asks any more.
_END_S = 5.0

MakeEngine = Callable[[EngineObserver], "AbstractContextManager[Engine]"]


class Relay:
    """An engine's observer that keeps what it is told for the other side."""

    def __init__(self) -> None:
        self._events: list[tuple[str, tuple[Any, ...]]] = []
        self._stats: CacheStats | None = None
        self._looked_s = float("-inf")

    def take(self) -> tuple[Sequence[tuple[str, tuple[Any, ...]]], CacheStats | None]:
        """What it was told since the last time, and the cache, if it was looked at."""
        taken = self._events, self._stats
        self._events, self._stats = [], None
        return taken

    def request_added(self, request_id: int, num_prompt_tokens: int) -> None:
        """See `EngineObserver`."""
        self._events.append(("request_added", (request_id, num_prompt_tokens)))

    def first_token(self, request_id: int, wait_s: float) -> None:
        """Likewise."""
        self._events.append(("first_token", (request_id, wait_s)))

    def request_finished(self, request: RequestRecord) -> None:
        """Likewise."""
        self._events.append(("request_finished", (request,)))

    def step_finished(self, step: StepRecord, cache: ObservedCache) -> None:
        """Likewise; looks at the cache twice a second."""
        self._events.append(("step_finished", (step,)))
        if time.monotonic() - self._looked_s >= _STATS_INTERVAL_S:
            self._look(cache)

    def idle(self, cache: ObservedCache) -> None:
        """Likewise."""
        self._events.append(("idle", ()))
        self._look(cache)

    def _look(self, cache: ObservedCache) -> None:
        self._stats = cache.stats()
        self._looked_s = time.monotonic()


class _Link:
    """A socket that is read and written without waiting."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self._socket = connection
        self._unpacker = Unpacker()
        self._unsent = memoryview(b"")
        self.is_broken = False  # Nobody is on the other side.

    @property
    def is_clear(self) -> bool:
        """Whether all that was to be sent is on its way."""
        return not self._unsent

    def send(self, message: Any) -> None:
        """Begin to send a message; the last one is on its way."""
        if self.is_broken:
            return
        self._unsent = memoryview(packed(message))
        self.flush()

    def flush(self) -> None:
        """Send what can be sent now."""
        while self._unsent and not self.is_broken:
            try:
                count = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self._broke()
            else:
                self._unsent = self._unsent[count:]

    def receive(self) -> list[Any]:
        """The messages that have come."""
        found: list[Any] = []
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

    def wait(self, *, to_read: bool = True) -> None:
        """Until something comes, or more of what is unsent can go."""
        poll = select.poll()
        wanted = select.POLLIN if to_read else 0
        poll.register(self._socket, wanted if self.is_clear else wanted | select.POLLOUT)
        poll.poll()

    def _broke(self) -> None:
        self.is_broken = True
        self._unsent = memoryview(b"")


class EngineHost:
    """Runs an engine for the other side of a connection. Implements `Inbox`.

    Args:
        engine: The engine; it is closed at the end.
        connection: Where commands come from, and news go to.
        relay: The engine's observer, or one of them.
    """

    def __init__(self, engine: Engine, connection: socket.socket, relay: Relay):
        self._engine = engine
        self._link = _Link(connection)
        self._relay = relay
        self._commands: deque[Callable[[], None]] = deque()
        self._is_stopping = False
        self._is_cut = False  # What is under way is not waited for.
        self._waiting: set[int] = set()  # Requests that are still to be added.
        self._handles: dict[int, RequestHandle] = {}
        self._keys: dict[RequestHandle, int] = {}
        self._accepted: list[Accepted] = []
        self._updated: dict[RequestHandle, None] = {}
        #: Tokens, characters and log-probabilities of each sample that were sent.
        self._sent: dict[int, tuple[int, int, int]] = {}

    def run(self) -> None:
        """Until the other side says stop, or is gone."""
        EngineLoop(self._engine, self, self._publish).run()
        self._publish(())
        while not self._link.is_clear:
            self._link.wait(to_read=False)
            self._publish(())

    # ---- commands -------------------------------------------------------------------------

    def wait(self) -> bool:
        """See `Inbox`."""
        self._publish(())  # That the engine is idle, for one.
        self._collect()
        while not self._commands and not self._is_stopping:
            self._link.wait()
            self._publish(())
            self._collect()
        return bool(self._commands)

    def take(self) -> Callable[[], None] | None:
        """See `Inbox`."""
        if not self._commands:
            self._collect()
        return self._commands.popleft() if self._commands else None

    def is_wanted(self) -> bool:
        """See `Inbox`."""
        self._collect()
        return bool(self._commands) or self._is_stopping

    def _collect(self) -> None:
        for message in self._link.receive():
            if isinstance(message, Add):
                self._waiting.add(message.key)
                self._commands.append(partial(self._add, message))
            elif isinstance(message, Leave):
                self._waiting.discard(message.key)  # Nothing is done for those not yet added.
                self._commands.append(partial(self._leave, message.key))
            elif isinstance(message, Stop):
                self._stop(drain=message.drain)
        if self._link.is_broken:
            self._stop(drain=False)

    def _stop(self, *, drain: bool) -> None:
        self._is_stopping = True
        if not drain and not self._is_cut:
            self._is_cut = True
            self._commands.append(self._engine.cancel_all)

    def _add(self, asked: Add) -> None:
        if asked.key not in self._waiting:
            return
        self._waiting.discard(asked.key)
        try:
            handle = self._engine.add(asked.prompt, asked.params, asked.priority)
        except Exception as error:  # noqa: BLE001  # the asking side's, which waits for it
            self._accepted.append(Accepted(asked.key, error=_portable(error)))
            return
        self._handles[asked.key], self._keys[handle] = handle, asked.key
        # Who sent token ids has them.
        tokens = handle.requests[0].prompt_token_ids if isinstance(asked.prompt, str) else ()
        self._accepted.append(Accepted(asked.key, tokens))

    def _leave(self, key: int) -> None:
        handle = self._handles.get(key)
        if handle is not None:
            self._forget(handle)
            self._engine.cancel(handle)

    def _forget(self, handle: RequestHandle) -> None:
        del self._handles[self._keys.pop(handle)]
        self._updated.pop(handle, None)
        for request in handle.requests:
            self._sent.pop(request.request_id, None)

    # ---- news -----------------------------------------------------------------------------

    def _publish(self, updated: Iterable[RequestHandle]) -> None:
        """Send what is new, unless the last of it is still on its way."""
        self._updated.update(dict.fromkeys(updated))
        self._link.flush()
        if not self._link.is_clear:
            return
        accepted, self._accepted = self._accepted, []
        updates = self._take_updates()
        events, stats = self._relay.take()
        if accepted or updates or events:
            self._link.send(News(accepted, updates, events, stats, self._engine.num_failed_steps))

    def _take_updates(self) -> list[Update]:
        handles = [handle for handle in self._updated if handle in self._keys]
        self._updated.clear()
        updates = [
            update
            for handle in handles
            for sample, request in enumerate(handle.requests)
            if (update := self._update(self._keys[handle], sample, request)) is not None
        ]
        for handle in handles:
            if handle.is_finished:
                self._forget(handle)
        return updates

    def _update(self, key: int, sample: int, request: Request) -> Update | None:
        tokens, chars, logprobs = self._sent.get(request.request_id, (0, 0, 0))
        new_tokens = request.output_token_ids[tokens:]
        if not new_tokens and request.finish_reason is None:
            return None
        text = request.text[chars:]
        new_logprobs = request.logprobs[logprobs:]
        self._sent[request.request_id] = (
            tokens + len(new_tokens),
            chars + len(text),
            logprobs + len(new_logprobs),
        )
        error = None if request.error is None else _portable(request.error)
        return Update(
            key,
            sample,
            new_tokens,
            chars,
            text,
            new_logprobs,
            request.num_cached_tokens,
            request.finish_reason,
            request.stop_reason,
            error,
        )


def run_engine(make: MakeEngine, connection: socket.socket) -> None:
    """A process's life: make an engine, say that it is there, run it.

    Signals that ask for an end are for the process that started this one, which passes them on; if
    that is gone, so is the connection.
    """
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    relay, is_ready = Relay(), False
    try:
        with make(relay) as engine:
            page_bytes = engine.cache.pool.page_bytes
            ready = Ready(engine.max_tokens, page_bytes, engine.cache.stats())
            connection.sendall(packed(ready))
            is_ready = True
            # The model and the libraries are here to stay: no collection need look at them.
            gc.collect()
            gc.freeze()
            EngineHost(engine, connection, relay).run()
    except BaseException as error:  # noqa: BLE001  # whoever started this is told
        if is_ready or not isinstance(error, VMKVError):
            _LOG.critical("the engine's process ends", exc_info=error)
        connection.setblocking(True)
        with contextlib.suppress(OSError):
            connection.sendall(packed(Failed(portable(error))))


def _end_with(connection: socket.socket) -> None:
    """End this process some time after the one that started it has gone, whatever it is doing."""
    poll = select.poll()
    poll.register(connection, 0)  # Hanging up is told in any case.
    poll.poll()
    time.sleep(_END_S)
    os._exit(1)


def _portable(error: Exception) -> Exception:
    again = portable(error)
    return again if isinstance(again, Exception) else RuntimeError(str(again))
