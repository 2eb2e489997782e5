"""From a request's body to what it asks for, at a cost that is known before it is paid.

What parses JSON holds the interpreter, and with it every stream, for as long as there are values:
a third of a second for 16 MiB of numbers. So values are counted first, in small pieces, and a body
has one error, however much of it is wrong.
"""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from .errors import ApiError, invalid
from .limits import Limits
from .schema import UNKNOWN
from .streaming import until_disconnect
from .uploads import Upload

T = TypeVar("T", bound=BaseModel)

#: Parsed where it arrives, in about a millisecond at worst.
_SMALL_BYTES = 16 * 1024
#: Looked at in one go, in about a millisecond.
_PIECE_BYTES = 256 * 1024
_NO_OBJECT = "the request needs a JSON object as its body, with Content-Type: application/json"
_JSON = re.compile(r"application/(?:[\w.+-]+\+)?json *(?:;.*)?", re.IGNORECASE)
_IN_STRING = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_FORM = re.compile(r"body|str|int|float|bool|list\[.*|[A-Z]\w*")


class Reader:
    """Reads requests.

    Args:
        limits: What is refused.
        max_values: See `Limits.max_values`.
    """

    def __init__(self, limits: Limits, max_values: int):
        self._max_values = max_values
        self._max_keys = limits.max_keys
        # Long bodies one after another: parsing them at once would be no faster.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vmkv-parser")

    async def read(self, request: Request, form: type[T]) -> T:
        """What a request asks for.

        Raises `ApiError`: its body is refused; `ClientGoneError`: the client left.
        """
        if not _JSON.fullmatch(request.headers.get("content-type", "")):
            raise invalid(_NO_OBJECT)
        upload: Upload = request.state.upload
        body = await upload.receive(request)
        if len(body) <= _SMALL_BYTES:
            return self._parsed(body, form)
        loop = asyncio.get_running_loop()
        parsing = loop.run_in_executor(self._thread, self._parsed, body, form)
        return await until_disconnect(request.receive, parsing)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _parsed(self, body: bytes, form: type[T]) -> T:
        if not body:
            raise invalid(_NO_OBJECT)
        check_structure(body, self._max_values, self._max_keys)
        try:
            data = from_json(body)
        except ValueError as error:
            raise invalid(f"the request's body is no valid JSON: {error}") from error
        if not isinstance(data, dict):
            raise invalid(_NO_OBJECT)
        try:
            return form.model_validate(data)
        except ValidationError as error:
            raise _explained(error) from error


def check_structure(body: bytes, max_values: int, max_keys: int) -> None:
    """Count what a body is made of, without parsing it.

    Raises `ApiError`: there are too many values (with lists and objects), or too many keys.

    Cost: about 2 ms per MiB, and where a long text is full of brackets and commas up to 20; it
    holds the interpreter for a few of them at a time.
    """
    if _count(body, b",[{", 0, len(body)) < max_values and body.count(b":") <= max_keys:
        return
    num_values, num_keys, at = 1, 0, 0
    while at < len(body):
        quote = body.find(b'"', at, at + _PIECE_BYTES)
        end = quote if quote >= 0 else min(at + _PIECE_BYTES, len(body))
        num_values += _count(body, b",[{", at, end)
        num_keys += body.count(b":", at, end)
        if num_values > max_values:
            raise invalid(f"the request's body has more than {max_values} values")
        if num_keys > max_keys:
            raise invalid(f"the request's body has more than {max_keys} keys")
        at = end if quote < 0 else _end_of_string(body, quote + 1)


def _end_of_string(body: bytes, at: int) -> int:
    """Where a string ends whose first character is at `at`: behind its closing quote."""
    while at < len(body):
        found = _IN_STRING.match(body, at, at + _PIECE_BYTES)
        end = found.end() if found is not None else at
        if body[end : end + 1] == b'"':
            return end + 1
        # A piece that ends with half an escape, which the next one begins with.
        at = end if end > at else end + 2
    return at


def _count(body: bytes, chars: bytes, start: int, end: int) -> int:
    return sum(body.count(char, start, end) for char in chars)


def _explained(error: ValidationError) -> ApiError:
    """What pydantic found, as one sentence.

    Of several findings the deepest: of the forms that a value may have, it came closest.
    """
    errors = error.errors(include_url=False, include_input=False)
    found: Any = max(errors, key=lambda each: len(each["loc"]))
    # Between the names stand the forms that were tried: `str`, `list[TextPart]`.
    names = [str(part) for part in found["loc"] if not _FORM.fullmatch(str(part))]
    if found["type"] == UNKNOWN:
        names.append(found["ctx"]["name"])
    param = ".".join(names)
    if found["type"] == UNKNOWN:
        return invalid(f"unknown parameter {param!r}", param)
    return invalid(f"{param}: {found['msg'][0].lower()}{found['msg'][1:]}", param)
