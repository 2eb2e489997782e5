"""Messages as bytes: MessagePack, with a kind and a length before each.

Both sides are the same program and one has started the other, over a socket that nobody else has:
what comes is trusted. So errors, which are rare, travel as Python pickles them.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from ...core.cache import CacheStats
from ..engine_loop import Add, Cancel, Finish, News, Stop

_HEAD = struct.Struct("<BI")


class Ready(NamedTuple):
    """The engine is there.

    Attributes:
        max_tokens: See `Engine`.
        page_bytes: A page of its pool.
        stats: Its cache, empty.
    """

    max_tokens: int
    page_bytes: int
    stats: CacheStats


class Failed(NamedTuple):
    """There is no engine, or none any more."""

    error: BaseException


def packed(message: Any) -> bytes:
    """A message as it is sent.

    Raises:
        TypeError: It holds what cannot travel: a function, for instance.
    """
    body = _ENCODER.encode(message)
    return _HEAD.pack(_KINDS.index(type(message)), len(body)) + body


class Unpacker:
    """Messages from bytes that come in pieces."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that `data` completes."""
        self._bytes += data
        start = 0
        while len(self._bytes) >= start + _HEAD.size:
            kind, num_bytes = _HEAD.unpack_from(self._bytes, start)
            body, end = start + _HEAD.size, start + _HEAD.size + num_bytes
            if end > len(self._bytes):
                break
            with memoryview(self._bytes) as whole, whole[body:end] as part:
                message = _DECODERS[kind].decode(part)
            start = end
            yield message
        del self._bytes[:start]


def _pickled(value: Any) -> bytes:
    if not isinstance(value, BaseException):
        raise TypeError(f"a {type(value).__name__} cannot be sent")
    try:
        data = pickle.dumps(value)
        if isinstance(pickle.loads(data), BaseException):
            return data
    except Exception:  # noqa: BLE001  # whatever it holds
        pass
    return pickle.dumps(RuntimeError(f"{type(value).__name__}: {value}"))


def _unpickled(kind: type, data: bytes) -> Any:
    return pickle.loads(data)


_KINDS = (Add, Cancel, Finish, Stop, Ready, Failed, News)
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_pickled)
_DECODERS = [msgspec.msgpack.Decoder(kind, dec_hook=_unpickled) for kind in _KINDS]
