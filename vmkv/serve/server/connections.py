"""Limits on connections: their number, and the time without a complete request.

uvicorn keeps a connection without a request for as long as its peer likes, and accepts as many as
there are descriptors. Here each connection has a time limit to send a head, and beyond
`max_connections` the one without a complete request for longest is closed, so that idle connections
do not keep new requests out.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...units import KiB

#: A body of more pieces than this must have so many bytes per piece on average: each piece costs
#: 10 µs whatever its size.
_NUM_FREE_PIECES = 512
_PIECE_BYTES = 256
_HEAD_BYTES = 16 * KiB
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: 0\r\n\r\n"
)
_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connections:
    """The connections of a server. Belongs to one event loop."""

    def __init__(self, max_connections: int, head_timeout_s: float):
        self.max_connections = max_connections
        self.head_timeout_s = head_timeout_s
        self._open: set[LimitedProtocol] = set()
        # Connections without a complete request, oldest first.
        self._without: dict[LimitedProtocol, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: LimitedProtocol) -> None:
        """Add a connection; beyond the limit, close the oldest one without a complete request."""
        self._open.add(connection)
        self._without[connection] = None
        if len(self._open) > self.max_connections:
            oldest = next(iter(self._without))
            # If the new connection is the only one without a request, all others are being served.
            oldest.end(_BUSY if oldest is connection else b"")

    def asked(self, connection: LimitedProtocol) -> None:
        """Note that a connection has sent a complete request."""
        self._without.pop(connection, None)

    def answered(self, connection: LimitedProtocol) -> None:
        """Note that a connection's request was answered."""
        if connection in self._open:
            self._without.setdefault(connection)

    def closed(self, connection: LimitedProtocol) -> None:
        """Remove a connection. Idempotent."""
        self._open.discard(connection)
        self._without.pop(connection, None)


class LimitedProtocol(H11Protocol):
    """A uvicorn connection, of the h11 protocol, within the limits of `Connections`."""

    cycle: Any  # None before the first request; uvicorn's type omits it.

    def __init__(self, *, connections: Connections, **options: Any):
        super().__init__(**options)
        self.conn = _CountingConnection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)
        self._all = connections
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection and start its timer."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._all.opened(self)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        self._all.closed(self)
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received data; ignored once the connection is closing."""
        if self.transport.is_closing():
            return  # Data that was read before the connection was closed.
        try:
            super().data_received(data)
        except h11.ProtocolError:  # A malformed body after its answer.
            self.transport.abort()
        self._look()

    def on_response_complete(self) -> None:
        """Wait for the connection's next request."""
        super().on_response_complete()
        self._look()

    def end(self, last_words: bytes) -> None:
        """Close the connection after `last_words`, or abort it if they are empty."""
        self._all.closed(self)
        self._stop_timer()
        if last_words:
            self.transport.write(last_words)
            self.transport.close()
        else:
            self.transport.abort()

    def _look(self) -> None:
        """Update the connection's state and its timer for the head."""
        is_answered = self.cycle is None or self.cycle.response_complete
        if is_answered:
            self._all.answered(self)
        elif not self.cycle.more_body:
            self._all.asked(self)
        if not is_answered or self.transport.is_closing():
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._all.head_timeout_s, self._time_is_up)

    def _time_is_up(self) -> None:
        # Send a 408 only to a client that has begun to send a head.
        self.end(_SLOW if self.cycle is None and self.conn.trailing_data[0] else b"")

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _CountingConnection(h11.Connection):
    """Refuses heads that are too long, and bodies that come in tiny pieces."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._num_pieces = 0
        self._num_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_pieces = self._num_bytes = 0
            # h11 checks only incomplete heads, and a long one may arrive at once.
            fields = sum(len(name) + len(value) for name, value in event.headers)
            if len(event.target) + fields > _HEAD_BYTES:
                raise h11.RemoteProtocolError("the head is too long", error_status_hint=431)
        elif isinstance(event, h11.Data):
            self._num_pieces += 1
            self._num_bytes += len(event.data)
            if self._num_pieces > _NUM_FREE_PIECES + self._num_bytes // _PIECE_BYTES:
                raise h11.RemoteProtocolError("the body comes in pieces that are too small")
        return event
