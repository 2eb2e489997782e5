"""Bodies of requests in memory: what all of them may hold together, and who gives way.

A body that is large is counted from its first piece until its prompts are tokens. Whoever has
been sending one for longest gives way first, so that clients who send slowly, or stop half-way,
keep nobody else's large request out.
"""

from __future__ import annotations

import anyio
from starlette.requests import Request

from .errors import ApiError, busy, too_large, too_slow
from .limits import Limits
from .streaming import ClientGoneError

#: What no body is counted for: so much is nothing, times the connections there may be.
_FREE_BYTES = 64 * 1024


class Uploads:
    """All bodies of a server. For one event loop.

    Args:
        limits: See `Limits.max_held_bytes`, `max_body_bytes` and `body_timeout_s`.

    Attributes:
        num_bytes: What is counted now.
    """

    def __init__(self, limits: Limits):
        self.limits = limits
        self.num_bytes = 0
        self._on_their_way: dict[Upload, None] = {}

    def grow(self, upload: Upload, num_bytes: int) -> None:
        """Count `num_bytes` more for `upload`; others give way, or it gives way itself."""
        upload.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self._on_their_way.setdefault(upload)
        while self.num_bytes > self.limits.max_held_bytes and self._on_their_way:
            next(iter(self._on_their_way)).give_way()

    def forget(self, upload: Upload) -> None:
        """It is on its way no more, complete or not."""
        self._on_their_way.pop(upload, None)


class Upload:
    """One request's body.

    Args:
        uploads: All of them.

    Attributes:
        num_bytes: What is counted for it.
    """

    def __init__(self, uploads: Uploads):
        self._uploads = uploads
        self.num_bytes = 0
        self._has_given_way = False
        self._scope = anyio.CancelScope()

    async def receive(self, request: Request) -> bytearray:
        """The body, as it comes.

        Raises `ApiError`: it is too large, too slow, or gave way to others; `ClientGoneError`: the
        client left. Nothing of it is kept.
        """
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
        # Grows in place: pieces that are joined in the end take 15 ms to be joined.
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
        """Stop receiving, for others' sake."""
        self._has_given_way = True
        self._scope.cancel()
        self.release()

    def release(self) -> None:
        """Nothing of the body is in memory any more. Idempotent."""
        self._uploads.forget(self)
        self._uploads.num_bytes -= self.num_bytes
        self.num_bytes = 0
