"""Parses request bodies, with a bound on the cost of parsing.

JSON parsing holds the interpreter, and blocks every stream, in proportion to the number of values:
a third of a second for 16 MiB of numbers. So values are counted first, in small pieces, and
validation reports one error per body.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from .errors import ApiError, invalid
from .schema import UNKNOWN
from .streaming import until_disconnect
from .uploads import Upload

T = TypeVar("T", bound=BaseModel)

#: Largest body that is parsed in the event loop, in about a millisecond at worst.
_SMALL_BYTES = 16 * 1024
#: Bytes scanned at a time, in about a millisecond.
_PIECE_BYTES = 256 * 1024
_NO_OBJECT = "the request needs a JSON object as its body, with Content-Type: application/json"
_JSON = re.compile(r"application/(?:[\w.+-]+\+)?json *(?:;.*)?", re.IGNORECASE)
_NO_BACKSLASH = re.compile(rb"[^\\]")
#: Values that a list, an object or a key counts as, by its parsing time.
_NESTED_WEIGHT = 8
_NESTED = (b"[", b"{", b":")
_FORM = re.compile(r"body|str|int|float|bool|list\[.*|[A-Z]\w*")


class Reader:
    """Parses and validates request bodies; long ones in a thread, one at a time."""

    def __init__(self, max_values: int):
        self._max_values = max_values
        # A single thread: parsing holds the interpreter, so more would not be faster.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vmkv-parser")

    async def read(self, request: Request, form: type[T]) -> T:
        """Receive a body and validate it as `form`; raises `ApiError` or `ClientGoneError`."""
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
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _parsed(self, body: bytearray, form: type[T]) -> T:
        if not body:
            raise invalid(_NO_OBJECT)
        check_structure(body, self._max_values)
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


def check_structure(body: bytes | bytearray, max_values: int) -> None:
    """Count the values of a body without parsing it; raise `ApiError` beyond `max_values`.

    Cost: up to 4 ms per MiB, 10 for texts full of brackets and commas, 30 for bodies of mostly
    text; the interpreter is held for a few ms at a time.
    """
    # A cheap upper bound: counts as if nothing were inside quotation marks.
    if sum(map(_weight, _pieces(body))) < max_values:
        return
    num_values = 1
    for outside in _outside_texts(body):
        num_values += _weight(outside)
        if num_values > max_values:
            raise invalid(
                f"the request's body has more than {max_values} values, where a list, an object or "
                f"a key counts for {_NESTED_WEIGHT}; send less at once, or raise --max-body-mib"
            )


def _weight(piece: bytes | bytearray) -> int:
    return piece.count(b",") + _NESTED_WEIGHT * sum(map(piece.count, _NESTED))


def _pieces(body: bytes | bytearray) -> Iterator[bytes | bytearray]:
    for at in range(0, len(body), _PIECE_BYTES):
        yield body[at : at + _PIECE_BYTES]


def _outside_texts(body: bytes | bytearray) -> Iterator[bytes]:
    """Yield the parts of a body that are outside quotation marks, piece by piece."""
    at = num_quotes = 0
    while at < len(body):
        # Do not cut between a backslash and the character that it escapes.
        found = _NO_BACKSLASH.search(body, at + _PIECE_BYTES - 1)
        end = len(body) if found is None else found.end()
        piece = body[at:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        yield b"".join(parts[num_quotes % 2 :: 2])
        num_quotes += len(parts) - 1
        at = end


def _explained(error: ValidationError) -> ApiError:
    """Convert pydantic's findings to one error: the deepest, as its alternative came closest."""
    errors = error.errors(include_url=False, include_input=False)
    found: Any = max(errors, key=lambda each: len(each["loc"]))
    # Drop the alternatives that were tried from the path: `str`, `list[TextPart]`.
    names = [str(part) for part in found["loc"] if not _FORM.fullmatch(str(part))]
    if found["type"] == UNKNOWN:
        names.append(found["ctx"]["name"])
    param = ".".join(names)
    if found["type"] == UNKNOWN:
        return invalid(f"unknown parameter {param!r}", param)
    return invalid(f"{param}: {found['msg'][0].lower()}{found['msg'][1:]}", param)
