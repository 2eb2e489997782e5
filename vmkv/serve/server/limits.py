"""How much the server takes: sizes, and a gate that lets so many in and so many wait."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields

from ...cache.geometry import check_positive
from ...errors import ConfigError
from ...units import MiB
from .errors import busy


@dataclass(frozen=True)
class Limits:
    """What the server refuses beyond.

    Attributes:
        max_body_bytes: Bytes of a request's body (413).
        max_prompt_tokens: Tokens of one prompt (400); None for as many as the model takes.
        max_concurrent: Requests in the engine at once; others wait at the door.
        max_queued: Requests that may wait there (429 beyond).
        max_samples: Samples of one request, over all its prompts (400).
        max_prompts: Prompts of one request (400).
        max_logprobs: Alternatives per token (400).
        body_timeout_s: Time for a body to arrive (408).
        send_timeout_s: How long a client may leave what was sent unread before its request is
            cancelled.

    Raises:
        ConfigError: One of them is not positive (`max_queued`: not negative).
    """

    max_body_bytes: int = 16 * MiB
    max_prompt_tokens: int | None = None
    max_concurrent: int = 1024
    max_queued: int = 1024
    max_samples: int = 128
    max_prompts: int = 128
    max_logprobs: int = 20
    body_timeout_s: float = 30.0
    send_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if (field.name, value) in (("max_queued", 0), ("max_prompt_tokens", None)):
                continue
            if not field.name.endswith("_s"):
                check_positive(field.name, value)
            elif not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ConfigError(f"{field.name}={value!r} must be a positive number of seconds")


class Gate:
    """Lets `max_concurrent` in, in order of arrival, and `max_queued` wait. For one event loop.

    Attributes:
        num_inside: How many are in.
    """

    def __init__(self, max_concurrent: int, max_queued: int):
        self.max_concurrent = max_concurrent
        self.max_queued = max_queued
        self.num_inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def num_waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Be inside for the length of a `with`. Whoever is cancelled while waiting leaves.

        Raises `ApiError`: the queue is full (429).
        """
        await self._enter()
        try:
            yield
        finally:
            self._leave()

    async def _enter(self) -> None:
        if self.num_inside < self.max_concurrent:
            self.num_inside += 1
            return
        if len(self._waiting) >= self.max_queued:
            raise busy(self.max_concurrent, self.max_queued)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._leave()  # The turn came just then: pass it on.
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def _leave(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)  # The place changes hands: num_inside stays.
                return
        self.num_inside -= 1
