"""What the two sides say to each other, and the bytes it travels as.

Both are the same program and one has started the other, over a socket that nobody else has: what
comes is trusted.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ...cache import CacheStats
from ..params import SamplingParams
from ..request import FinishReason, TokenLogprobs

_LENGTH = struct.Struct("<Q")


# ---- to the engine ----------------------------------------------------------------------------


class Add(NamedTuple):
    """A request, by a number that the asking side gives it; see `Engine.add`."""

    key: int
    prompt: str | Sequence[int]
    params: SamplingParams
    priority: int


class Leave(NamedTuple):
    """Nobody wants a request any more."""

    key: int


class Stop(NamedTuple):
    """It is over, once what is under way has ended or, without `drain`, is cancelled."""

    drain: bool


Command = Add | Leave | Stop


# ---- from the engine --------------------------------------------------------------------------


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


class Accepted(NamedTuple):
    """A request was taken, or not.

    Attributes:
        key: Which.
        prompt_token_ids: Its prompt.
        error: Why it was not taken.
    """

    key: int
    prompt_token_ids: Sequence[int] = ()
    error: Exception | None = None


class Update(NamedTuple):
    """What is new of one sample of a request.

    Attributes:
        key: Which request.
        sample: Which of its samples.
        token_ids: Its new tokens.
        text_start: Where its new text begins in all of it.
        text: Its new text.
        logprobs: Of its new tokens, where they were asked for.
        num_cached_tokens: See `Request`, as for the rest.
    """

    key: int
    sample: int
    token_ids: Sequence[int]
    text_start: int
    text: str
    logprobs: Sequence[TokenLogprobs]
    num_cached_tokens: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: Exception | None


class News(NamedTuple):
    """All that is new since the last.

    Attributes:
        accepted: What became of requests that were added.
        updates: What is new of those that run.
        events: Calls of an `EngineObserver`, by name, without the cache that some have.
        stats: The cache, where it was looked at.
        num_failed_steps: See `Engine.num_failed_steps`.
    """

    accepted: Sequence[Accepted]
    updates: Sequence[Update]
    events: Sequence[tuple[str, tuple[Any, ...]]]
    stats: CacheStats | None
    num_failed_steps: int


# ---- bytes ------------------------------------------------------------------------------------


def packed(message: Any) -> bytes:
    """A message as it is sent.

    Raises:
        Exception: It holds what cannot be pickled.
    """
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def portable(error: BaseException) -> BaseException:
    """The error, or one that says the same where it cannot be pickled and unpickled."""
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  # whatever it holds
        again = None
    if isinstance(again, BaseException):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


class Unpacker:
    """Messages from bytes that come in pieces."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that `data` completes."""
        self._bytes += data
        start, size = 0, _LENGTH.size
        while len(self._bytes) >= start + size:
            end = start + size + _LENGTH.unpack_from(self._bytes, start)[0]
            if end > len(self._bytes):
                break
            yield pickle.loads(memoryview(self._bytes)[start + size : end])
            start = end
        del self._bytes[:start]
