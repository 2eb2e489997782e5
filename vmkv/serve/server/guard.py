"""What is refused before anything is parsed: strangers, large bodies, slow ones, late ones.

Plain ASGI around the routes, so that a refused body is never held in memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence

import anyio
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..metrics import Metrics
from .errors import ApiError, draining, too_large, too_slow, wrong_key
from .limits import Limits
from .streaming import CLIENT_GONE, error_response

_PROTECTED = "/v1/"


class BodyRefusedError(HTTPException):
    """A body that is too large or too slow, found while it is read.

    FastAPI reads the body and lets only this kind of exception pass as it is.
    """

    def __init__(self, error: ApiError):
        super().__init__(error.status, str(error))
        self.error = error


class DrainSwitch:
    """Whether the server still takes requests.

    Attributes:
        is_draining: Whether it is about to stop.
    """

    def __init__(self) -> None:
        self.is_draining = False


class Guard:
    """ASGI middleware: API keys, the size and pace of bodies, draining; and counts what passes.

    Args:
        app: The routes.
        limits: What is refused beyond.
        api_keys: Who may ask; empty for everybody.
        drain: Set when the server is about to stop.
        metrics: Where responses are counted.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Limits,
        api_keys: Sequence[str],
        drain: DrainSwitch,
        metrics: Metrics,
    ):
        self._app = app
        self._limits = limits
        self._keys = [_digest(key) for key in api_keys]
        self._drain = drain
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            error = self._refusal(scope)
            if error is None:
                await self._app(scope, self._measured(receive), counted)
            else:
                await error_response(error)(scope, receive, counted)
        except Exception:
            status = 500
            raise
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.http_responses.labels(route, str(status)).inc()

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Why the request is refused by its head alone."""
        headers = Headers(scope=scope)
        if scope["path"].startswith(_PROTECTED):
            if not self._is_known(headers.get("authorization", "")):
                return wrong_key()
            if self._drain.is_draining:
                return draining()
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._limits.max_body_bytes:
            return too_large(self._limits.max_body_bytes)
        return None

    def _is_known(self, authorization: str) -> bool:
        if not self._keys:
            return True
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        # Every key is compared, in constant time: how long it takes tells nothing.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    def _measured(self, receive: Receive) -> Receive:
        """`receive`, until the body is complete, with an eye on its size and the clock."""
        limits = self._limits
        num_bytes, is_complete, deadline_s = 0, False, 0.0

        async def measured() -> Message:
            nonlocal num_bytes, is_complete, deadline_s
            if is_complete:
                return await receive()
            now_s = asyncio.get_running_loop().time()
            deadline_s = deadline_s or now_s + limits.body_timeout_s
            try:
                with anyio.fail_after(max(0.0, deadline_s - now_s)):
                    message = await receive()
            except TimeoutError as error:
                raise BodyRefusedError(too_slow(limits.body_timeout_s)) from error
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                is_complete = not message.get("more_body", False)
                if num_bytes > limits.max_body_bytes:
                    raise BodyRefusedError(too_large(limits.max_body_bytes))
            else:
                is_complete = True
            return message

        return measured


def _digest(key: str) -> bytes:
    # Of equal length whatever the key: comparing tells nothing of that either.
    return hashlib.sha256(key.encode()).digest()
