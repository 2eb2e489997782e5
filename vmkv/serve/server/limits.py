"""The server's size limits, and the gate that bounds running and waiting requests."""

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

#: More priority levels would make waiting times practically unbounded: Note [Waiting is bounded].
_PRIORITY_MAX = 16
#: Limits that accept a value which is not positive, and that value.
_MAY_BE = {"max_queued": 0, "max_priority": 0, "max_prompt_tokens": None}


@dataclass(frozen=True)
class Limits:
    """Limits beyond which the server refuses a request; the HTTP status is given in parentheses.

    Attributes:
        max_connections: Simultaneous connections. Beyond it, the connection that has been without a
            complete request for longest is closed; if all have one, the new connection gets a 503.
        max_body_bytes: Size of a request's body (413).
        max_held_bytes: Total size of all bodies that are being received or wait for tokenisation,
            not counting the first 64 KiB of each. Beyond it, the body that has been arriving for
            longest is refused (429).
        max_values: JSON values in a body, where a list, an object or a key counts as eight (400);
            at least twice the model's tokens. Parsing blocks other streams for 0.1 µs per value.
        max_prompt_tokens: Tokens of one prompt (400); None for as many as the model takes.
        max_concurrent: Requests in the engine at once; others wait at the gate.
        max_queued: Requests waiting at the gate (429).
        max_samples: Samples of one request, over all its prompts (400).
        max_prompts: Prompts of one request (400).
        max_logprobs: Alternatives per token (400).
        max_answer_logprobs: Log-probabilities of one answer, samples x tokens x (alternatives + 1)
            (400); at least what one sample may have. Each takes some 30 bytes in a completion and
            60 in a chat until the answer is sent.
        max_stops: Stop texts of one request (400).
        max_stop_chars: Characters of a stop text (400).
        max_stop_tokens: Stop tokens of one request (400).
        max_priority: Priority levels above and below zero (400), at most 16; 0 for none.
        head_timeout_s: Time to send the head of a request; the connection is closed afterwards.
        body_timeout_s: Time for a body to arrive (408).
        send_timeout_s: Time a client may leave sent data unread before its request is cancelled.

    Raises:
        ConfigError: A limit is not positive (`max_queued` and `max_priority`: negative), or two
            limits contradict each other.
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
    """Admission gate: `max_concurrent` requests run, in order of arrival, and `max_queued` wait.

    Belongs to one event loop. `num_inside` and `num_waiting` count the requests.
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
        """Stay admitted for the block; `ApiError` if the queue is full or the gate closed."""
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
        """Refuse waiting and new requests; admitted requests continue. Idempotent."""
        self._is_closed = True
        for _ in range(self.num_waiting):
            self._places.release()
