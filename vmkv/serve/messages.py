"""What an engine that runs on its own and those who ask it say to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..cache import CacheStats
from .params import SamplingParams
from .request import FinishReason, TokenLogprobs

# ---- to the engine ----------------------------------------------------------------------------


class Add(NamedTuple):
    """A request, by a number that the asking side gives it; see `Engine.add`."""

    key: int
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int
    tenant: str | None


class Cancel(NamedTuple):
    """Nobody wants a request any more."""

    key: int


class Finish(NamedTuple):
    """A sample of a request has ended in a stop text, which the engine does not look for."""

    key: int
    sample: int


class Stop(NamedTuple):
    """It is over, once what is under way has ended or, without `drain`, is cancelled."""

    drain: bool


class Look(NamedTuple):
    """The engine has to see what became of what it runs on. Not sent: its own side says it."""


Command = Add | Cancel | Finish | Stop | Look


# ---- from the engine --------------------------------------------------------------------------


class Refused(NamedTuple):
    """A request was not taken."""

    key: int
    error: Exception


class Update(NamedTuple):
    """What is new of one sample of a request.

    Attributes:
        key: Which request.
        sample: Which of its samples.
        token_ids: Its new tokens.
        logprobs: Of its new tokens, where they were asked for.
        num_cached_tokens: See `Request`, as for the rest.
    """

    key: int
    sample: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    num_cached_tokens: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: Exception | None


#: A call of an `EngineObserver`: its name and arguments, without the cache that some have.
Event = tuple[str, Sequence[Any]]


class News(NamedTuple):
    """All that is new since the last.

    Attributes:
        refused: Requests that were not taken.
        updates: What is new of those that run.
        num_failed_steps: See `Engine.num_failed_steps`.
        events: What observers elsewhere are to hear.
        stats: The cache, where it was looked at for them.
    """

    refused: Sequence[Refused]
    updates: Sequence[Update]
    num_failed_steps: int
    events: Sequence[Event] = ()
    stats: CacheStats | None = None
