"""How much the server takes: sizes, and a gate that lets so many in and so many wait."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields

from ...core.cache.geometry import check_positive
from ...errors import ConfigError
from ...units import MiB
from .errors import busy, draining

#: With more levels of priority waiting would be bounded in name only: Note [Waiting is bounded].
_PRIORITY_MAX = 16
#: Limits of which there may be none, or nothing.
_MAY_BE = {"max_queued": 0, "max_priority": 0, "max_prompt_tokens": None}


@dataclass(frozen=True)
class Limits:
    """What the server refuses beyond.

    Attributes:
        max_connections: Connections at once. Beyond, the one that has been without a complete
            request for longest is closed; where all have one, the new one gets a 503.
        max_body_bytes: Bytes of a request's body (413).
        max_held_bytes: Bytes of all bodies that are being received or wait to become tokens,
            beyond the first 64 KiB of each. Beyond, the one that is on its way for longest is
            refused (429).
        max_values: Values of a body (400), where a list, an object or a key counts for eight;
            twice the model's tokens if that is more. Parsing stops other clients' streams, and
            takes as long as there are values: 0.1 µs each.
        max_prompt_tokens: Tokens of one prompt (400); None for as many as the model takes.
        max_concurrent: Requests in the engine at once; others wait at the gate.
        max_queued: Requests that may wait there (429 beyond).
        max_samples: Samples of one request, over all its prompts (400).
        max_prompts: Prompts of one request (400).
        max_logprobs: Alternatives per token (400).
        max_answer_logprobs: Log-probabilities of one answer: samples x tokens x (alternatives + 1)
            (400); as many as one sample may have if that is more. Kept until the answer is sent,
            some 30 bytes each of a completion and 60 of a chat.
        max_stops: Stop texts of one request (400).
        max_stop_chars: Characters of a stop text (400).
        max_stop_tokens: Stop tokens of one request (400).
        max_priority: Levels by which a client may put its request before or behind others'
            (400), 16 at most; 0 where all are equal.
        head_timeout_s: Time for a connection to send the head of a request; it is closed then.
        body_timeout_s: Time for a body to arrive (408).
        send_timeout_s: How long a client may leave what was sent unread before its request is
            cancelled.

    Raises:
        ConfigError: One of them is not positive (`max_queued`, `max_priority`: not negative), or
            they do not fit together.
    """

    max_connections: int = 4096
    max_body_bytes: int = 16 * MiB
    max_held_bytes: int = 128 * MiB
    max_values: int = 1 << 17
    max_prompt_tokens: int | None = None
    max_concurrent: int = 1024
    max_queued: int = 1024
    max_samples: int = 128
    max_prompts: int = 128
    max_logprobs: int = 20
    max_answer_logprobs: int = 1 << 22
    max_stops: int = 4
    max_stop_chars: int = 1000
    max_stop_tokens: int = 128
    max_priority: int = 0
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    send_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _MAY_BE and value == _MAY_BE[field.name]:
                continue
            if not field.name.endswith("_s"):
                check_positive(field.name, value)
            elif not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ConfigError(f"{field.name}={value!r} must be a positive number of seconds")
        if self.max_held_bytes < self.max_body_bytes:
            raise ConfigError(
                f"max_held_bytes={self.max_held_bytes} are fewer than one body may have, "
                f"max_body_bytes={self.max_body_bytes}"
            )
        if self.max_priority > _PRIORITY_MAX:
            raise ConfigError(f"max_priority={self.max_priority}; at most {_PRIORITY_MAX} can be")


class Gate:
    """Lets `max_concurrent` in, in order of arrival, and `max_queued` wait. For one event loop.

    Attributes:
        num_inside: How many are in.
        num_waiting: How many wait.
    """

    def __init__(self, max_concurrent: int, max_queued: int):
        self.max_concurrent = max_concurrent
        self.max_queued = max_queued
        self.num_inside = 0
        self.num_waiting = 0
        self._places = asyncio.Semaphore(max_concurrent)
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Be inside for the length of a `with`. Whoever is cancelled while waiting leaves.

        Raises `ApiError`: the queue is full (429), or the gate is closed (503).
        """
        if self._is_closed:
            raise draining()
        if self._places.locked() and self.num_waiting >= self.max_queued:
            raise busy(f"{self.max_concurrent} requests run and {self.max_queued} wait")
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
        """Turn away who waits, and whoever comes. Who is inside stays. Idempotent."""
        self._is_closed = True
        for _ in range(self.num_waiting):
            self._places.release()
