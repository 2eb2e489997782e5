"""Bounds the memory of request bodies, and evicts the oldest upload when it is exceeded.

A large body counts from its first piece until its prompts are tokens. The body that has been
arriving for longest is evicted first, so that slow or stalled clients cannot block large requests
of others.
"""

from __future__ import annotations

import anyio
from starlette.requests import Request

from .errors import ApiError, busy, too_large, too_slow
from .limits import Limits
from .streaming import ClientGoneError

#: Bytes of each body that are not counted: little, even over all connections.
_FREE_BYTES = 64 * 1024


class Uploads:
    """The request bodies of a server, counted in `num_bytes`. Belongs to one event loop."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.num_bytes = 0
        self._on_their_way: dict[Upload, None] = {}

    def grow(self, upload: Upload, num_bytes: int) -> None:
        """Count `num_bytes` more for `upload`; evict the oldest uploads beyond the limit."""
        upload.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self._on_their_way.setdefault(upload)
        while self.num_bytes > self.limits.max_held_bytes and self._on_their_way:
            next(iter(self._on_their_way)).give_way()

    def forget(self, upload: Upload) -> None:
        """Remove an upload, complete or not, from the candidates for eviction."""
        self._on_their_way.pop(upload, None)


class Upload:
    """Body of one request; `num_bytes` is its share of the counted memory."""

    def __init__(self, uploads: Uploads):
        self._uploads = uploads
        self.num_bytes = 0
        self._has_given_way = False
        self._scope = anyio.CancelScope()

    async def receive(self, request: Request) -> bytearray:
        """Receive the body; release it and raise if it is refused or the client disconnects."""
        try:
            body = await self._receive(request)
            if self._has_given_way:
                raise self._refusal()
        except BaseException:
            self.release()
            raise
        self._uploads.forget(self)
        return body

    async def _receive(self, request: Request) -> bytearray:
        limits = self._uploads.limits
        # Grows in place: joining the pieces at the end would take 15 ms.
        body = bytearray()
        self._scope.deadline = anyio.current_time() + limits.body_timeout_s
        with self._scope:
            while True:
                message = await request.receive()
                if message["type"] != "http.request":
                    raise ClientGoneError
                body += message.get("body", b"")
                if len(body) > limits.max_body_bytes:
                    raise too_large(limits.max_body_bytes)
                if len(body) > _FREE_BYTES:
                    self._uploads.grow(self, len(body) - _FREE_BYTES - self.num_bytes)
                if self._has_given_way:
                    raise self._refusal()
                if not message.get("more_body", False):
                    return body
        raise self._refusal()

    def _refusal(self) -> ApiError:
        if self._has_given_way:
            return busy("the memory for requests on their way is full")
        return too_slow(self._uploads.limits.body_timeout_s)

    def give_way(self) -> None:
        """Evict this body: stop receiving it and release its memory."""
        self._has_given_way = True
        self._scope.cancel()
        self.release()

    def release(self) -> None:
        """Stop counting the body's memory. Idempotent."""
        self._uploads.forget(self)
        self._uploads.num_bytes -= self.num_bytes
        self.num_bytes = 0
