"""What is refused before a body is read: strangers, large bodies, and who comes too late.

See Note [Refused before it costs anything].

Plain ASGI around the routes. Every request passes here, so here it is counted, and here an error
that nobody expected ends.
"""

from __future__ import annotations

import logging
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, draining, failed, too_large, wrong_key
from .keys import ApiKeys
from .service import Service
from .streaming import CLIENT_GONE, error_response
from .uploads import Upload

_LOG = logging.getLogger(__name__)
#: What anybody may ask; everything else, routes that are not there included, needs a key.
_OPEN = frozenset(
    {"/health", "/metrics", "/version", "/docs", "/docs/oauth2-redirect", "/redoc"}
    | {"/openapi.json"}
)
_ALWAYS_OPEN = frozenset({"/health"})  # Whoever restarts a server has no key.


class Guard:
    """ASGI middleware: API keys, announced sizes, draining; and counts what passes.

    Args:
        app: The routes. They find their `Upload` in `request.state.upload`, and the digest of the
            client's key in `request.state.api_key`.
        service: What they share.
        api_keys: Who may ask.
        protects_everything: Whether all but `/health` needs a key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        service: Service,
        api_keys: ApiKeys,
        protects_everything: bool,
    ):
        self._app = app
        self._service = service
        self._keys = api_keys
        self._open = _ALWAYS_OPEN if protects_everything else _OPEN

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        upload = Upload(self._service.uploads)
        state = scope.setdefault("state", {})
        state["upload"] = upload
        try:
            error = self._refusal(scope, state)
            if error is None:
                await self._app(scope, receive, counted)
            else:
                await error_response(error)(scope, receive, counted)
        except Exception as error:  # noqa: BLE001  # logged once, in a few lines, and answered
            response = error_response(failed(error))
            if status is None:
                await response(scope, receive, counted)
        finally:
            upload.release()
            route = getattr(scope.get("route"), "path", "other")
            counter = self._service.metrics.http_responses
            counter.labels(route, str(status or CLIENT_GONE)).inc()

    def _refusal(self, scope: Scope, state: dict[str, Any]) -> ApiError | None:
        """Why the request is refused by its head alone; notes in `state` whose key it brings."""
        headers = Headers(scope=scope)
        path = scope["path"]
        if path not in self._open:
            # As bytes: what a header says in UTF-8 is something else in Latin-1.
            given = headers.get("authorization", "").encode("latin-1")
            state["api_key"] = self._keys.digest_of(given)
            if state["api_key"] is None:
                return wrong_key()
        if path not in _OPEN and self._service.is_draining:
            return draining()
        length = headers.get("content-length", "0").lstrip("0")
        most = self._service.limits.max_body_bytes
        # By its digits first: Python reads no number of thousands of them.
        if length.isdecimal() and (len(length) > len(str(most)) or int(length) > most):
            return too_large(most)
        return None
