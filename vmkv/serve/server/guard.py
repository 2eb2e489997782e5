"""Middleware that refuses requests before their body is read.

See Note [Refused before it costs anything]. Every request passes here, so responses are counted and
unexpected exceptions are handled here.
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
#: Paths without a key; every other path, existing or not, needs one.
_OPEN = frozenset(
    {"/health", "/metrics", "/version", "/docs", "/docs/oauth2-redirect", "/redoc"}
    | {"/openapi.json"}
)
_ALWAYS_OPEN = frozenset({"/health"})  # Health probes have no key.


class Guard:
    """ASGI middleware for API keys, announced body sizes and draining; counts responses.

    Sets `request.state.upload` to the request's `Upload`, and `request.state.api_key` to the digest
    of the client's key. With `protects_everything`, all paths but `/health` need a key.
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
        """Handle an ASGI request."""
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
        """Return the error that a request's head causes; store its key's digest in `state`."""
        headers = Headers(scope=scope)
        path = scope["path"]
        if path not in self._open:
            # As bytes: headers are decoded as Latin-1, and keys are UTF-8.
            given = headers.get("authorization", "").encode("latin-1")
            state["api_key"] = self._keys.digest_of(given)
            if state["api_key"] is None:
                return wrong_key()
        if path not in _OPEN and self._service.is_draining:
            return draining()
        length = headers.get("content-length", "0").lstrip("0")
        most = self._service.limits.max_body_bytes
        # Compare the number of digits first: Python refuses to convert thousands of them.
        if length.isdecimal() and (len(length) > len(str(most)) or int(length) > most):
            return too_large(most)
        return None
