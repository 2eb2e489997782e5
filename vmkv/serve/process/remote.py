"""The client of an engine in another process; has the interface of `AsyncEngine`.

async with EngineProcess(make) as engine:  # `make(observer)` is called in the engine's process
    async for output in engine.stream([1, 2, 3], SamplingParams(max_tokens=64)):
        ...

See DESIGN.md, Note [The engine has a process of its own].
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from ...errors import ClosedError, ConfigError, one_line
from ..engine_client import EngineClient
from ..engine_loop import Command, News
from ..observer import EngineObserver, Event, Idle, Observers
from ..start import StartedProcess, end_child, start_process, why_ended
from .host import Failed, MakeEngine, Ready, Unpacker, packed

_LOG = logging.getLogger(__name__)
_READ_BYTES = 1 << 16
#: Time for a process to end after its connection was closed.
_END_S = 10.0
#: Interval of looks at an engine's silence.
_WATCH_S = 1.0
#: Time for a running step to end after all requests were cancelled; then the process is killed.
_CUT_S = 3.0
#: An engine that has ended is restarted at once, and after a delay if it ends again. The delay
#: doubles with each restart up to the maximum, and is reset once an engine has lasted that long.
_RESTART_S = 1.0
_RESTART_MAX_S = 60.0


class EngineProcess(EngineClient, asyncio.Protocol):
    """An engine in a child process, which ends with this process; for one event loop.

    A process that ends unexpectedly is restarted, with increasing delays if it keeps ending. Its
    requests end with an error, and `failure` gives the reason until the next engine is ready.

    Args:
        make: Called in the child process with the engine's observer; returns a context manager that
            gives the engine. It must be picklable.
        tokenizer: For prompts and outputs that are text.
        started: Process that makes the first engine, by default a new one.
        observer: Gets the engine's events, in the event loop.
        is_lazy: Start the process with the first request; the attributes below are there from then
            on. Requests wait for the engine, also after the first request was cancelled. If the
            engine cannot be made, waiting requests fail, and the next request tries again.
        options: See `EngineClient`; a silence is no failure while the engine is made.

    Attributes:
        max_tokens: The engine's.
        page_bytes: Page size of its pool; 0 before a lazy one was made.
        stats: Statistics of its cache, updated.

    Raises:
        Exception: Any error raised by `make`.
    """

    def __init__(
        self,
        make: MakeEngine,
        *,
        tokenizer: Any = None,
        started: StartedProcess | None = None,
        observer: EngineObserver | None = None,
        is_lazy: bool = False,
        **options: Any,
    ):
        super().__init__(tokenizer, **options)
        self._worker = None
        self.page_bytes = 0
        self._make = make
        self._started = started
        self._observer = observer or Observers(())
        self._starting = threading.Lock()
        self._socket: socket.socket | None = None
        self._opening: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._gone = asyncio.Event()
        self._restarting: asyncio.Task[None] | None = None
        self._restart_s = 0.0
        if not is_lazy:
            self._start()

    def _start(self) -> None:
        with self._starting:
            started, self._started = self._started or start_process(self._make), None
            self._worker = started.process
            if self._is_stopping:
                self._worker.kill()
        try:
            self._use(started.connection, _first_message(started.connection))
        except BaseException:
            started.close()
            raise

    def _use(self, connection: socket.socket, ready: Ready) -> None:
        self.max_tokens, self.page_bytes, self.stats = ready
        self._socket, self._empty = connection, self.stats
        self._unpacker, self._started_s = Unpacker(), time.monotonic()

    async def sleep(self, *, aborts: bool = False) -> None:
        """As `EngineClient.sleep`; does nothing for a lazy engine that was not started yet."""
        if self._worker is not None or self._opening is not None:
            await super().sleep(aborts=aborts)

    async def shutdown(self, drain: bool = True) -> None:
        """Stop the engine and do not restart it; with `drain=False`, kill it after a timeout."""
        self._is_stopping = True
        if self._opening is not None:
            with self._starting:
                if self._socket is None and self._worker is not None:
                    self._worker.kill()  # Nothing is served yet.
            await asyncio.wait([self._opening])
        if self._worker is None:
            return
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait([self._restarting])
        if not drain:
            asyncio.get_running_loop().call_later(_CUT_S, self._worker.kill)
        await super().shutdown(drain)

    def close(self) -> None:
        """End the process and cancel its requests, without an event loop. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            end_child(self._worker, _END_S)

    @property
    def failure(self) -> str | None:
        """Why no request can be served; None also before the first request has started it."""
        return None if self._worker is None and self._death is None else super().failure

    async def __aenter__(self) -> EngineProcess:
        if self._worker is not None:
            await super().__aenter__()
        return self

    async def _connect(self) -> None:
        if self._transport is None:
            if self._opening is None:
                self._opening = asyncio.get_running_loop().create_task(self._open())
                # Nobody may await a failure: all waiting requests may have been cancelled.
                self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(self._opening)

    async def _open(self) -> None:
        try:
            if self._worker is None:
                await self._start_late()
            connect = asyncio.get_running_loop().create_unix_connection
            self._transport, _ = await connect(lambda: self, sock=self._socket)
            self._watch(self._transport)
        finally:
            self._opening = None

    def _watch(self, transport: asyncio.Transport) -> None:
        if transport.is_closing():
            return
        if self.silent_s > self._silence_max_s:
            self._lose(f"the engine has said nothing for {self.silent_s:.0f} s, and is killed")
            _LOG.error("%s", self._death)
            self._worker.kill()
        else:
            asyncio.get_running_loop().call_later(_WATCH_S, self._watch, transport)

    def _send(self, command: Command) -> None:
        try:
            data = packed(command)
        except Exception as error:  # A function, a number of more than 64 bits, half a character.
            raise ConfigError(f"the request cannot be sent to a process: {error}") from error
        if self._transport is not None and self._death is None:
            self._transport.write(data)

    async def _wait_for_end(self) -> None:
        await asyncio.to_thread(self._worker.join)
        await self._gone.wait()  # The last messages have been read.

    def data_received(self, data: bytes) -> None:
        """Take the engine's messages."""
        for message in self._unpacker.feed(data):
            self._hear(message)

    def _hear(self, message: News | Failed) -> None:
        if isinstance(message, Failed):
            self._lose(f"the engine has ended: {one_line(message.error)}")
            return
        self._take(message)
        self.stats = message.stats or self.stats
        if message.events:
            self._tell(pickle.loads(message.events))

    def _tell(self, events: Sequence[Event]) -> None:
        cache = SimpleNamespace(stats=lambda: self.stats)
        for event in events:
            self._observer.on(event, cache)

    def connection_lost(self, exc: Exception | None) -> None:
        """Restart the process, unless it was stopped."""
        self._lose("the engine has ended: it was shut down or killed")
        self._gone.set()
        self._tell_idle()
        if not self._is_stopping:
            self._restarting = asyncio.get_running_loop().create_task(self._start_anew())

    async def _start_late(self) -> None:
        try:
            await asyncio.to_thread(self._start)
        except Exception as error:
            self._worker = None
            if not self._is_stopping:
                _LOG.exception("the engine could not be started")
            raise ClosedError(f"the model could not be loaded: {one_line(error)}") from error

    async def _start_anew(self) -> None:
        await asyncio.to_thread(self.close)
        reason = self._death or ""  # The engine's own reason, if it sent one.
        if self._worker.exitcode:
            reason = f"the engine has ended: {why_ended(self._worker)}"
        if time.monotonic() - self._started_s > _RESTART_MAX_S:
            self._restart_s = 0.0
        while True:
            _LOG.error("%s; it is restarted", reason)
            self._death = f"{reason}; it is restarted"
            await asyncio.sleep(self._restart_s)
            self._restart_s = min(max(_RESTART_S, 2 * self._restart_s), _RESTART_MAX_S)
            try:
                await asyncio.to_thread(self._start)
                break
            except asyncio.CancelledError:
                with self._starting:
                    self._is_stopping = True
                    self._worker.kill()
                raise
            except Exception as error:  # noqa: BLE001  # logged; the next attempt may succeed
                reason = f"the engine could not be started: {one_line(error)}"
        self._num_failed_steps = 0
        self._transport = None
        self._gone.clear()
        await self._connect()
        self._death, self._restarting = None, None
        self._tell_idle()

    def _tell_idle(self) -> None:
        self.stats = self._empty
        self._tell([Idle()])


def _first_message(connection: socket.socket) -> Ready:
    unpacker = Unpacker()
    while True:
        data = connection.recv(_READ_BYTES)
        if not data:
            raise ClosedError("the engine's process ended before its engine was ready")
        for message in unpacker.feed(data):
            if isinstance(message, Ready):
                return message
            raise message.error
