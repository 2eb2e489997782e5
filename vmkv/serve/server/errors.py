"""Errors of the OpenAI API: an HTTP status and a JSON body that clients understand."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from ...errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    LostError,
    RankError,
    SequenceFullError,
    VMKVError,
)

_LOG = logging.getLogger(__name__)
#: Statuses after which a client may try again, here after a second.
_PASSING = (429, 503)
_LOST_PART = "a process of the engine has ended, and the engine is restarted; try again"
#: Status, code and message of vmkv's errors; the first kind that fits counts.
_KNOWN: tuple[tuple[type[Exception], int, str | None, str], ...] = (
    (SequenceFullError, 400, "context_length_exceeded", "{}"),
    (ConfigError, 400, None, "{}"),
    (CapacityError, 503, "out_of_memory", "out of memory for this request: {}"),
    (ClosedError, 503, "engine_stopped", "the engine takes no requests: {}"),
    (RankError, 503, "engine_stopped", _LOST_PART),
    (LostError, 503, "replica_lost", "{}"),
)
#: Routes that answer in Anthropic's format, and its types of errors by status.
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
#: By path prefix: an API's names for parameters of the chat that its request is served as.
_NAMES = {
    "/v1/responses": {"max_tokens": "max_output_tokens", "messages": "input", "prompt": "input"}
    | {"reasoning_effort": "reasoning.effort", "response_format": "text.format"},
    _ANTHROPIC_PATH: {"reasoning_effort": "output_config.effort", "stop": "stop_sequences"}
    | {"response_format": "output_config.format"},
    "/detokenize": {"prompt": "tokens"},
}
#: Messages are cut here: longer ones repeat the client's input.
_MESSAGE_CHARS_MAX = 1000
#: Innermost frames of an error that the log shows.
_LOGGED_FRAMES = 12


class ApiError(VMKVError):
    """An HTTP error response; `param` names the parameter at fault."""

    #: The message in Anthropic's format, if it is another one.
    anthropic_message: str | None = None

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        if len(message) > _MESSAGE_CHARS_MAX:
            message = message[:_MESSAGE_CHARS_MAX] + " …"
        super().__init__(message)
        error_type = "server_error" if status >= 500 else "invalid_request_error"
        error_type = "rate_limit_error" if status == 429 else error_type
        self.status = status
        self.headers = {"Retry-After": "1"} if status in _PASSING else {}
        self.headers |= headers or {}
        #: The response's JSON.
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": error_type, "param": param, "code": code}
        }

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The error in Anthropic's format."""
        kind = _ANTHROPIC_TYPES.get(self.status)
        kind = kind or ("api_error" if self.status >= 500 else "invalid_request_error")
        told: dict[str, Any] = {"type": kind, "message": self.anthropic_message or str(self)}
        code = self.body["error"]["code"]
        if code:
            told["details"] = {"error_code": code}
        return {"type": "error", "error": told}

    def response(self, path: str = "") -> JSONResponse:
        """Build the HTTP response to a request of a path, in the format and words of its API."""
        names = next((of for begin, of in _NAMES.items() if path.startswith(begin)), {})
        error = self._renamed(names)
        body = error.anthropic_body if path.startswith(_ANTHROPIC_PATH) else error.body
        return JSONResponse(body, error.status, headers=error.headers)

    def _renamed(self, names: Mapping[str, str]) -> ApiError:
        told = self.body["error"]
        first, dot, rest = (told["param"] or "").partition(".")
        if first not in names:
            return self
        message, name = str(self), names[first]
        if name.endswith(".format") and rest.startswith("json_schema."):
            # In these APIs the format holds the schema's fields itself.
            rest = rest.removeprefix("json_schema.")
            message = message.replace("json_schema.", "", 1)
        # Inside a sentence, `prompt` or `stop` may be the English word and not the parameter.
        if "_" in first or message.startswith(first):
            message = re.sub(rf"\b{first}\b", name, message)
        param = f"{name}{dot}{rest}"
        return ApiError(self.status, message, param=param, code=told["code"], headers=self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Error 400: the request has to be changed."""
    return ApiError(400, message, param=param, code=code)


def full_context(num_prompt: int, most: int, num_wanted: int = 1, least: str = "") -> ApiError:
    """Error 400: a prompt and its answer exceed a context of `most` tokens.

    Agents recognise these words. `least` stands before a number of tokens that is a bound.
    """
    error = invalid(
        f"this model's maximum context length is {most} tokens here; the prompt has {least}"
        f"{num_prompt}, the answer {num_wanted} at most: shorten the prompt or lower max_tokens",
        "max_tokens" if num_prompt < most else "prompt",
        "context_length_exceeded",
    )
    error.anthropic_message = f"prompt is too long: {least}{num_prompt} tokens > {most} maximum"
    if num_prompt <= most:
        error.anthropic_message = (
            f"input length and `max_tokens` exceed context limit: {num_prompt} + {num_wanted} > "
            f"{most}, decrease input length or `max_tokens` and try again"
        )
    return error


def draining() -> ApiError:
    """Error 503: the server is shutting down."""
    message = "the server is shutting down and takes no more requests; try another one"
    return ApiError(503, message, code="shutting_down", headers={"Connection": "close"})


def api_error(error: Exception) -> ApiError:
    """Convert an exception raised while a request was served; logs internal errors."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code, message in _KNOWN:
        if isinstance(error, kind):
            param = "prompt" if kind is SequenceFullError else None
            return ApiError(status, message.format(error), param=param, code=code)
    frames = traceback.format_exception(error, limit=-_LOGGED_FRAMES)
    _LOG.error("a request failed:\n%s", "".join(frames).rstrip())
    name = type(error).__name__
    message = f"the engine failed on this request ({name}); the server's log says more"
    return ApiError(500, message, code="internal_error")
