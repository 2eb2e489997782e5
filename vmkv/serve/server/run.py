"""The server's process: its connections, its signals, and a shutdown that drains requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import resource
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...units import KiB
from .service import Service

_BACKLOG = 2048
#: Connections accepted at a time; each delays the running streams by 0.1 ms.
_NUM_ACCEPTED = 16
#: Time for the last error messages to reach their clients.
_LAST_WORDS_S = 5.0
_TICK_S = 0.05
_SWITCH_S = 0.0005
_HEAD_BYTES_MAX = 16 * KiB
#: A body of more pieces than this must have so many bytes per piece on average: each piece costs
#: 10 µs whatever its size.
_NUM_FREE_PIECES = 512
_PIECE_BYTES = 256


class TimedProtocol(H11Protocol):
    """A uvicorn connection with a time limit for each head and a bound on tiny pieces."""

    def __init__(self, *, head_timeout_s: float, **options: Any):
        super().__init__(**options)
        self.conn = _CountingConnection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES_MAX)
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Expect a head."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Parse received data; ignored once the connection is closing."""
        if self.transport.is_closing():
            return  # Data that was read before the connection was closed.
        try:
            super().data_received(data)
        except h11.ProtocolError:  # A malformed body after its answer.
            self.transport.abort()

    def on_response_complete(self) -> None:
        """Expect the connection's next head, unless it has come already."""
        cycle = self.cycle
        super().on_response_complete()
        if self.cycle is cycle:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, which would keep the connection in memory."""
        super().connection_lost(exc)
        if self._head_timer is not None:
            self._head_timer.cancel()

    def _expect_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(self._head_timeout_s, self._close_idle, self.cycle)

    def _close_idle(self, last_cycle: object) -> None:
        if self.cycle is last_cycle:  # Each head begins another one.
            self.transport.abort()


class _CountingConnection(h11.Connection):
    _num_pieces = 0
    _num_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_pieces = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_pieces += 1
            self._num_bytes += len(event.data)
            if self._num_pieces > _NUM_FREE_PIECES + self._num_bytes // _PIECE_BYTES:
                raise h11.RemoteProtocolError("the body comes in pieces that are too small")
        return event


class Server(uvicorn.Server):
    """A uvicorn server for an application of `create_app`; drains on the first signal.

    Requests still running after `drain_timeout_s`, or at a second interrupt (Ctrl+C), end with an
    error that their client can read; a third interrupt ends the process at once. `on_ready` is
    called when the server accepts connections.
    """

    def __init__(
        self,
        app: FastAPI,
        *,
        drain_timeout_s: float,
        log_level: str = "info",
        on_ready: Callable[[], None] | None = None,
    ):
        service: Service = app.state.service
        limits = service.limits
        protocol: Any = functools.partial(TimedProtocol, head_timeout_s=limits.head_timeout_s)
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            log_level=log_level,
            access_log=log_level in ("debug", "trace"),
            limit_concurrency=limits.max_connections + 1,  # The new one counts.
            backlog=_NUM_ACCEPTED,
            # A safeguard: every client has got its error by then.
            timeout_graceful_shutdown=drain_timeout_s + _LAST_WORDS_S,  # type: ignore[arg-type]
            lifespan="on",
        )
        super().__init__(config)
        self._service = service
        self._drain_timeout_s = drain_timeout_s
        self._on_ready = on_ready
        self._is_cut = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, then call `on_ready`."""
        await super().startup(sockets)
        for each in sockets or []:
            each.listen(_BACKLOG)  # A larger backlog than is accepted at a time.
        if self.started and self._on_ready is not None:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: drain, or cut the draining short at a second interrupt."""
        self._service.is_draining = True
        if self.should_exit and sig == signal.SIGINT and not self._is_cut:
            self._is_cut = True
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down as uvicorn does; cancel requests that exceed the drain timeout."""
        self._service.is_draining = True
        cutting = asyncio.ensure_future(self._cut_in_time())
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await cutting

    async def _cut_in_time(self) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._drain_timeout_s
        while not self._is_cut and loop.time() < deadline_s:
            await asyncio.sleep(_TICK_S)
        self._is_cut = True
        await self._service.cut()


def run_server(app: FastAPI, listener: socket.socket, **options: Any) -> None:
    """Serve until a signal, with options of `Server`; main thread only."""
    server = Server(app, **options)
    # As many connections as the system permits.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Shorten the pauses that one thread of this process imposes on another. Exclude the loaded
    # libraries from garbage collection: scanning them stops every stream.
    gc.collect()
    gc.freeze()
    # A thread that parses or tokenises gives up the interpreter after this time.
    sys.setswitchinterval(_SWITCH_S)
    # uvicorn raises the signal again when it is done. Ignore it: a drained server exits with
    # status 0.
    before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[listener])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        listener.close()
