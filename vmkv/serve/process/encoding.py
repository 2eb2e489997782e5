"""Messages between the processes: MessagePack, prefixed by a kind and a length.

Both sides are the same program over a private socket pair, so input is trusted; errors, which are
rare, are pickled.
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
    """First message of an engine: its `max_tokens`, its pool's page size, its empty cache."""

    max_tokens: int
    page_bytes: int
    stats: CacheStats


class Failed(NamedTuple):
    """The engine could not be made, or has ended."""

    error: BaseException


def packed(message: Any) -> bytes:
    """Encode a message; raises `TypeError` for an object such as a function."""
    body = _ENCODER.encode(message)
    return _HEAD.pack(_KINDS.index(type(message)), len(body)) + body


class Unpacker:
    """Decodes messages from a stream of bytes."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that `data` completes."""
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
    except Exception:  # noqa: BLE001  # pickling may fail in any way
        pass
    return pickle.dumps(RuntimeError(f"{type(value).__name__}: {value}"))


def _unpickled(kind: type, data: bytes) -> Any:
    return pickle.loads(data)


_KINDS = (Add, Cancel, Finish, Stop, Ready, Failed, News)
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_pickled)
_DECODERS = [msgspec.msgpack.Decoder(kind, dec_hook=_unpickled) for kind in _KINDS]
