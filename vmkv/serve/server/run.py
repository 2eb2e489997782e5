"""The server's process: its socket, its signals, and a shutdown that drains requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from ...errors import ConfigError, one_line
from .connections import Connections, LimitedProtocol
from .service import Service

_LOG = logging.getLogger(__name__)
_BACKLOG = 2048
#: Connections accepted at a time; each delays the running streams by 0.1 ms.
_NUM_ACCEPTED = 16
#: Time for the last error messages to reach their clients.
_LAST_WORDS_S = 5.0
_TICK_S = 0.05
_SWITCH_S = 0.0005
#: Descriptors for files that the engine and libraries may still open, and for connections that
#: were accepted before an evicted one is closed, which takes some turns of the loop.
_SPARE_DESCRIPTORS = 32 + 4 * _NUM_ACCEPTED
#: 24 days: the system counts milliseconds in an int32.
_UNREAD_TIMEOUT_S_MAX = 2_147_483


def open_socket(host: str, port: int, *, unread_timeout_s: float) -> socket.socket:
    """Bind the server's address; called before the model is loaded, so that errors come early.

    Port 0 is any free one. The system drops connections that leave data unacknowledged for
    `unread_timeout_s`, so that clients that never read do not hold sockets. Raises `ConfigError` if
    the address is not available.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # Not a name, or too long for DNS.
        raise ConfigError(f"cannot listen on {host}: {one_line(error)}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by connections. Linux only, as are the backends.
        listener.setsockopt(
            socket.IPPROTO_TCP,
            socket.TCP_USER_TIMEOUT,
            int(min(unread_timeout_s, _UNREAD_TIMEOUT_S_MAX) * 1000),
        )
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; is another server running? "
            "Choose another --port, or 0 for any free one"
        ) from error
    return listener


class Server(uvicorn.Server):
    """A uvicorn server that drains on the first signal.

    Requests still running after `drain_timeout_s`, or at a second interrupt (Ctrl+C), end with an
    error that their client can read; a third interrupt ends the process at once. `on_ready` is
    called when the server accepts connections.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        drain_timeout_s: float,
        on_ready: Callable[[], None] | None = None,
    ):
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


def make_server(
    app: FastAPI,
    *,
    drain_timeout_s: float,
    log_level: str = "info",
    on_ready: Callable[[], None] | None = None,
    max_connections: int | None = None,
) -> Server:
    """Build a server for an application of `create_app`, to be run with a socket."""
    service: Service = app.state.service
    connections = Connections(
        max_connections or service.limits.max_connections, service.limits.head_timeout_s
    )
    protocol: Any = functools.partial(LimitedProtocol, connections=connections)
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_level=log_level,
        access_log=log_level in ("debug", "trace"),
        backlog=_NUM_ACCEPTED,
        # A safeguard: every client has got its error by then.
        timeout_graceful_shutdown=drain_timeout_s + _LAST_WORDS_S,  # type: ignore[arg-type]
        lifespan="on",
    )
    return Server(config, service, drain_timeout_s, on_ready)


def run_server(
    app: FastAPI,
    listener: socket.socket,
    *,
    drain_timeout_s: float,
    log_level: str = "info",
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Serve until a signal; returns when all requests have ended. Main thread only.

    Raises:
        ConfigError: The process has too few file descriptors for one connection.
    """
    server = make_server(
        app,
        drain_timeout_s=drain_timeout_s,
        log_level=log_level,
        on_ready=on_ready,
        max_connections=_affordable(app.state.service.limits.max_connections),
    )
    _share_interpreter_fairly()
    # uvicorn raises the signal again when it is done. Ignore it: a drained server exits with
    # status 0.
    before = {each: signal.signal(each, _ignore) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[listener])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        listener.close()


class _Terminated(BaseException):
    """SIGTERM was received."""


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Turn SIGTERM into an exception while the server starts, so that child processes are ended.

    Without it, an engine's process would keep loading a model for some seconds; and PID 1 of a
    container would ignore the signal.
    """

    def end(sig: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
        raise SystemExit(128 + signal.SIGTERM) from None  # PID 1 of a container.
    finally:
        signal.signal(signal.SIGTERM, before)


def _share_interpreter_fairly() -> None:
    """Shorten the pauses that one thread of this process imposes on another."""
    # Exclude the loaded libraries from garbage collection: scanning them stops every stream.
    gc.collect()
    gc.freeze()
    # A thread that parses or tokenises gives up the interpreter after this time.
    sys.setswitchinterval(_SWITCH_S)


def _affordable(max_connections: int) -> int:
    """Raise the descriptor limit if possible; return how many connections it allows."""
    taken = len(os.listdir("/proc/self/fd")) + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + taken
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            _LOG.warning(
                "%d connections at once, not %d: the system gives this process %d descriptors "
                "(ulimit -n)",
                soft - taken,
                max_connections,
                soft,
            )
        if soft <= taken:
            raise ConfigError(
                f"the system gives this process {soft} descriptors, and {taken} are needed without "
                "any connection; raise the limit (ulimit -n)"
            )
        return min(max_connections, soft - taken)
    return max_connections


def _ignore(sig: int, frame: FrameType | None) -> None:
    """Ignore a signal that was already handled."""
