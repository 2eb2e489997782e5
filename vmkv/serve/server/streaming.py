"""Server-sent events, and clients that disconnect or stop reading.

A client that closes its connection cancels its request at once. A client that keeps the connection
open and does not read fills the socket, so that `send` blocks; after a timeout it counts as gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Any, TypeVar

import anyio
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError

T = TypeVar("T")

#: nginx's status for a client that closed its connection; seen in the metrics only.
CLIENT_GONE = 499
_PIECE_BYTES = 1 << 18


class ClientGoneError(Exception):
    """The client disconnected or stopped reading, so no response can be sent."""


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`; cancel it and raise `ClientGoneError` if the client disconnects first."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, leaving):
            each.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(payload: dict[str, Any]) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends events as they come; the response starts with the first event.

    An error before the first event is sent as a response with its own status. `events` is closed
    when the client disconnects.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], send_timeout_s: float):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]  # Unknown: the body ends with the connection.
        self._events = events
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        with contextlib.suppress(ClientGoneError):
            await until_disconnect(receive, self._send_all(scope, receive, send))

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            try:
                first = await anext(events)
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            await _send_body(send, first, self._send_timeout_s)
            async for each in events:
                await _send_body(send, each, self._send_timeout_s)
            await _send_body(send, b"", self._send_timeout_s, more=False)


class WholeBody(Response):
    """Sends JSON in pieces; empties `parts` and lets other tasks run between pieces."""

    media_type = "application/json"

    def __init__(self, parts: deque[bytes | bytearray], send_timeout_s: float):
        super().__init__(headers={"Content-Length": str(sum(map(len, parts)))})
        self._parts = parts
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        piece = bytearray()
        with contextlib.suppress(ClientGoneError):
            while self._parts:
                part = self._parts.popleft()
                for at in range(0, len(part), _PIECE_BYTES):
                    piece += part[at : at + _PIECE_BYTES]
                    if len(piece) >= _PIECE_BYTES:
                        await _send_body(send, bytes(piece), self._send_timeout_s)
                        await asyncio.sleep(0)
                        piece.clear()
            await _send_body(send, bytes(piece), self._send_timeout_s, more=False)


async def _send_body(send: Send, body: bytes, timeout_s: float, *, more: bool = True) -> None:
    message = {"type": "http.response.body", "body": body, "more_body": more}
    try:
        # Not `asyncio.wait_for`: before 3.12 it swallows a cancellation that arrives just as the
        # message was sent, and the request would continue without a client.
        with anyio.fail_after(timeout_s):
            await send(message)
    except (TimeoutError, OSError) as error:
        raise ClientGoneError from error


def error_response(error: ApiError) -> JSONResponse:
    """Build the JSON response of an error."""
    return JSONResponse(error.body, error.status, headers=error.headers)


async def merged(
    streams: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield items of several streams as they come, with the stream's index; close them all."""
    if len(streams) == 1:  # The common case needs no task and no queue.
        async with contextlib.aclosing(streams[0]) as only:
            async for each in only:
                yield 0, each
        return
    items: asyncio.Queue[tuple[int, T | None, Exception | None]] = asyncio.Queue(len(streams))

    async def pump(at: int) -> None:
        failure = None
        try:
            async with contextlib.aclosing(streams[at]) as stream:
                async for item in stream:
                    await items.put((at, item, None))
        except Exception as error:  # noqa: BLE001  # raised again where the items are read
            failure = error
        await items.put((at, None, failure))

    tasks = [asyncio.ensure_future(pump(at)) for at in range(len(streams))]
    try:
        num_live = len(tasks)
        while num_live:
            at, item, failure = await items.get()
            if failure is not None:
                raise failure
            if item is None:
                num_live -= 1
            else:
                yield at, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
