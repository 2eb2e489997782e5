"""Check a request before work is done for it: its key, body size, time and admission.

See Note [Refused before it costs anything].
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import anyio
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import shown
from ..options import Limits, ServerOptions
from .errors import ApiError, api_error, draining

if TYPE_CHECKING:
    from .service import Answer, Service

_LOG = logging.getLogger(__name__)
#: Pattern of a client's name for a request: a log and a header show it.
REQUEST_ID = r"^[!-~]{1,256}$"
#: nginx's status for a client that closed its connection; seen in the metrics only.
_CLIENT_GONE = 499
#: The route of a path that is none.
_OTHER = "other"
#: Paths without a key; every other path, existing or not, needs one.
_OPEN = frozenset(
    {"/health", "/ping", "/metrics", "/version", "/docs", "/docs/oauth2-redirect", "/redoc"}
    | {"/openapi.json"}
)


#: Paths that change a model for all clients by a POST without a body, which any page could send.
_FOR_ALL = frozenset({"/sleep", "/wake_up"})


# ---- keys ----------------------------------------------------------------------------------------


class ApiKeys:
    """The keys that a server accepts; each is a tenant unless prefixes are shared."""

    def __init__(self, keys: Sequence[str], *, share_prefixes: bool = False):
        self._share_prefixes = share_prefixes
        # Environment bytes that are not UTF-8 are surrogate escapes.
        self._digests = [_digest(key.encode(errors="surrogateescape")) for key in keys]

    def digest_of(self, authorization: bytes) -> bytes | None:
        """Return the digest of a header's key; None for a wrong key, empty with a single tenant."""
        if not self._digests:
            return b""
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        # Compare with every key in constant time, against timing attacks.
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            return None
        return b"" if self._share_prefixes else given


def tenant_of(key_digest: bytes, cache_salt: str | None) -> str | None:
    """Return the tenant of a key and salt, without revealing the key; None if both are missing."""
    if not key_digest and cache_salt is None:
        return None
    salt = (cache_salt or "").encode(errors="surrogatepass")
    return hashlib.blake2b(salt, key=key_digest, digest_size=16).hexdigest()


def _digest(key: bytes) -> bytes:
    # Digests have equal length, so comparing does not reveal a key's length.
    return hashlib.sha256(key).digest()


# ---- requests ------------------------------------------------------------------------------------


class Guard:
    """ASGI middleware that checks API keys, bounds the time to send, counts and logs responses.

    Sets `request.state.api_key`, the key's digest, and `request_id`. Errors become responses here.
    """

    def __init__(self, app: ASGIApp, *, service: Service, options: ServerOptions):
        self._app = app
        self._service = service
        self._keys = ApiKeys(options.api_keys, share_prefixes=options.share_prefixes)
        # Health probes have no key in any case.
        self._origins = {None, *options.cors_origins}
        self._open = {"/health", "/ping"} if options.protects_everything else _OPEN

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None
        began_s = time.monotonic()
        state = scope.setdefault("state", {})
        given = Headers(scope=scope).get("x-request-id", "")
        state["has_request_id"] = bool(re.match(REQUEST_ID, given))
        state["request_id"] = given if state["has_request_id"] else uuid.uuid4().hex

        async def timed_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                header = (b"x-request-id", state["request_id"].encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            try:
                # Not `asyncio.wait_for`: before 3.12 it swallows a cancellation that arrives just
                # as the message was sent, and the request would continue without a client.
                with anyio.fail_after(self._service.limits.send_timeout_s):
                    await send(message)
            except (TimeoutError, OSError) as error:
                raise ClientDisconnect from error

        try:
            with contextlib.suppress(ClientDisconnect):
                try:
                    self._check(scope)
                    await self._app(scope, receive, timed_send)
                except ClientDisconnect:
                    raise
                except Exception as error:  # noqa: BLE001  # internal ones are logged briefly
                    response = api_error(error).response(scope["path"])
                    if status is None:
                        await response(scope, receive, timed_send)
        finally:
            route = getattr(scope.get("route"), "path", _OTHER)
            self._service.http_responses.labels(route, str(status or _CLIENT_GONE)).inc()
            if route not in _OPEN:
                _log_request(scope, route, status or _CLIENT_GONE, began_s)

    def _check(self, scope: Scope) -> None:
        path, headers = scope["path"], Headers(scope=scope)
        origin = headers.get("origin")
        is_own = origin is not None and origin.partition("://")[2] == headers.get("host")
        if path in _FOR_ALL and not is_own and self._origins.isdisjoint({origin, "*"}):
            raise ApiError(403, f"pages of {origin} may not call {path}, but for --cors-origin")
        if path not in self._open:
            # As bytes: headers are decoded as Latin-1, and keys are UTF-8.
            by_anthropic = f"Bearer {headers.get('x-api-key', '')}"
            given = headers.get("authorization", by_anthropic).encode("latin-1")
            digest = scope["state"]["api_key"] = self._keys.digest_of(given)
            if digest is None:
                raise ApiError(
                    401,
                    "this server needs an API key: send `Authorization: Bearer KEY` with one it "
                    "knows",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        if path not in _OPEN and self._service.is_draining:
            raise draining()


def _log_request(scope: Scope, route: str, status: int, began_s: float) -> None:
    if not _LOG.isEnabledFor(logging.INFO):
        return
    host, port = scope.get("client") or ("-", 0)
    state, now_s = scope["state"], time.monotonic()
    path = shown(scope["path"]) if route == _OTHER else route
    text = f"{host}:{port} {scope['method']} {path} {status}"
    answer: Answer | None = state.get("answer")
    for form in answer.forms[-1:] if answer else ():
        usage = form.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        text += f" prompt={usage['prompt_tokens']} cached={cached}"
        text += f" output={usage['completion_tokens']}"
        if form.first_s is not None:
            text += f" first_token={form.first_s - began_s:.3f}s"
        text += f" finish={','.join(sorted(set(form.finish_reasons))) or '-'}"
    _LOG.info("%s took=%.3fs id=%s", text, now_s - began_s, state["request_id"])


async def receive_body(request: Request, limits: Limits) -> bytearray:
    """Receive a request's body; raises `ApiError`, or `ClientDisconnect`."""
    too_large = ApiError(
        413,
        f"the request's body is larger than the {limits.max_body_bytes} bytes this server takes; "
        "send a shorter prompt, or raise --max-body-mib",
        code="request_too_large",
    )
    if int(request.headers.get("content-length", 0)) > limits.max_body_bytes:
        raise too_large
    # Grows in place: joining the pieces at the end would take 15 ms.
    body = bytearray()
    try:
        with anyio.fail_after(limits.body_timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > limits.max_body_bytes:
                    raise too_large
    except TimeoutError as error:
        message = f"the request's body did not arrive within {limits.body_timeout_s:g} s"
        raise ApiError(408, message, code="request_timeout") from error
    return body


class Gate:
    """Admission control: `max_concurrent` requests run, by arrival, and `max_queued` wait."""

    def __init__(self, max_concurrent: int, max_queued: int):
        self.max_concurrent = max_concurrent
        self.max_queued = max_queued
        self.num_inside = 0
        self.num_waiting = 0
        self._places = asyncio.Semaphore(max_concurrent)
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Stay admitted for the block; `ApiError` if the queue is full or the gate closed."""
        if self._is_closed:
            raise draining()
        if self._places.locked() and self.num_waiting >= self.max_queued:
            raise ApiError(
                429,
                f"the server is busy: {self.max_concurrent} requests run and {self.max_queued} "
                "wait; try again",
                code="rate_limit_exceeded",
            )
        self.num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.num_waiting -= 1
        if self._is_closed:
            raise draining()
        self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1
            self._places.release()

    def close(self) -> None:
        """Refuse waiting and new requests; admitted requests continue. Idempotent."""
        self._is_closed = True
        for _ in range(self.num_waiting):
            self._places.release()
