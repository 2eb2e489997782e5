"""Errors of the OpenAI API: an HTTP status and a JSON body that clients understand."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from typing import Any

from ...errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    LostError,
    RankError,
    SequenceFullError,
    VMKVError,
)

_log = logging.getLogger(__name__)
_INVALID = "invalid_request_error"
#: Seconds after which a client may retry.
_RETRY_AFTER = {"Retry-After": "1"}
#: Messages are cut here: longer ones repeat the client's input.
_MESSAGE_CHARS_MAX = 1000
#: Innermost frames of an error that the log shows.
_LOGGED_FRAMES = 12


class ApiError(VMKVError):
    """An HTTP error response: `kind` is OpenAI's `type`, `param` the parameter at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = _INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        if len(message) > _MESSAGE_CHARS_MAX:
            message = message[:_MESSAGE_CHARS_MAX] + " …"
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The response's JSON."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Error 400: the request has to be changed."""
    return ApiError(400, message, param=param, code=code)


def wrong_key() -> ApiError:
    """Error 401: the API key is missing or unknown."""
    return ApiError(
        401,
        "this server needs an API key: send `Authorization: Bearer KEY` with one it knows",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def too_large(max_body_bytes: int) -> ApiError:
    """Error 413: the body exceeds the server's limit."""
    return ApiError(
        413,
        f"the request's body is larger than the {max_body_bytes} bytes this server takes; send a "
        "shorter prompt, or raise --max-body-mib",
        code="request_too_large",
    )


def too_slow(timeout_s: float) -> ApiError:
    """Error 408: the body did not arrive in time."""
    return ApiError(
        408, f"the request's body did not arrive within {timeout_s:g} s", code="request_timeout"
    )


def busy(reason: str) -> ApiError:
    """Error 429: all places are taken and the queue is full."""
    return ApiError(
        429,
        f"the server is busy: {reason}; try again",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers=_RETRY_AFTER,
    )


def draining() -> ApiError:
    """Error 503: the server is shutting down."""
    error = _unavailable(
        "the server is shutting down and takes no more requests; try another one", "shutting_down"
    )
    error.headers["Connection"] = "close"
    return error


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code=code, headers=_RETRY_AFTER)


def refused(error: Exception) -> ApiError:
    """Convert an exception raised when the engine was asked to run a request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, SequenceFullError):
        return invalid(str(error), "prompt", "context_length_exceeded")
    if isinstance(error, ConfigError):
        return invalid(str(error))
    return failed(error)


def failed(error: Exception) -> ApiError:
    """Convert an exception raised after the engine accepted the request; logs internal errors."""
    if isinstance(error, CapacityError):
        return _unavailable(f"out of memory for this request: {error}", "out_of_memory")
    if isinstance(error, ClosedError):
        return _unavailable(f"the engine takes no requests: {error}", "engine_stopped")
    if isinstance(error, RankError):
        reason = "a part of the engine has ended, and all of it is started anew; try again"
        return _unavailable(reason, "engine_stopped")
    if isinstance(error, LostError):
        return _unavailable(str(error), "replica_lost")
    frames = traceback.format_exception(error, limit=-_LOGGED_FRAMES)
    _log.error("a request failed:\n%s", "".join(frames).rstrip())
    return ApiError(
        500,
        f"the engine failed on this request ({type(error).__name__}); the server's log says more",
        kind="server_error",
        code="internal_error",
    )
