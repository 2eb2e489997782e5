"""The server's process: its socket, its signals, and an end that loses no request."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ...errors import ConfigError, one_line

_BACKLOG = 2048
#: 24 days: the system counts milliseconds in an int32.
_UNREAD_TIMEOUT_S_MAX = 2_147_483


def open_socket(host: str, port: int, *, unread_timeout_s: float) -> socket.socket:
    """A listening address, taken before a model is loaded for nothing.

    Args:
        host: A name or an address.
        port: A port; 0 for any free one.
        unread_timeout_s: How long a peer may leave data unacknowledged before the system drops
            its connection, so that clients that never read hold no sockets either.

    Raises:
        ConfigError: The address is not to be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # No name, or one that DNS has no room for.
        raise ConfigError(f"cannot listen on {host}: {one_line(error)}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. Only Linux has it, as only Linux has our backends.
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
    """The uvicorn server, which says when it is told to stop.

    Args:
        config: uvicorn's.
        on_stop: Called in a signal handler, when the server begins to drain.
        on_ready: Called when it takes connections.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_stop: Callable[[], None],
        on_ready: Callable[[], None] | None = None,
    ):
        super().__init__(config)
        self._on_stop = on_stop
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """What uvicorn does, and the news that it has happened."""
        await super().startup(sockets)
        if self.started and self._on_ready is not None:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; a second interrupt (Ctrl+C) ends at once."""
        self._on_stop()
        super().handle_exit(sig, frame)


def make_server(
    app: FastAPI,
    *,
    drain_timeout_s: float,
    log_level: str = "info",
    on_ready: Callable[[], None] | None = None,
) -> Server:
    """A server for an application of `create_app`, to be run with a socket.

    On SIGTERM it closes its door, finishes what is inside, and ends; what is still running
    after `drain_timeout_s` is cancelled.
    """

    def stop() -> None:
        app.state.drain.is_draining = True

    config = uvicorn.Config(
        app,
        log_level=log_level,
        access_log=log_level in ("debug", "trace"),
        backlog=_BACKLOG,
        timeout_graceful_shutdown=max(1, round(drain_timeout_s)),
        lifespan="on",
    )
    return Server(config, stop, on_ready)


def run_server(
    app: FastAPI,
    listener: socket.socket,
    *,
    drain_timeout_s: float,
    log_level: str = "info",
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Serve until a signal says stop; returns when everything has ended. Main thread only."""
    server = make_server(
        app, drain_timeout_s=drain_timeout_s, log_level=log_level, on_ready=on_ready
    )
    # uvicorn raises the signal again when it is done, for whoever started it. We did, and a
    # drained server has ended well: status 0.
    before = {each: signal.signal(each, _ignore) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[listener])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        listener.close()


def _ignore(sig: int, frame: FrameType | None) -> None:
    """A signal that was acted upon already."""
