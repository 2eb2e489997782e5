"""Events of an engine, and the protocol of their observers: a few per step, none per token.

The engine's thread makes every call, so an observer must be quick and must not raise; it may read
the cache during a call. `metrics.py` and `trace.py` implement observers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..core.cache import CacheStats

if TYPE_CHECKING:
    from .request import Request


@dataclass(slots=True)
class StepRecord:
    """Measurements of one step on the host, in seconds; `start_s` is a `time.perf_counter`."""

    start_s: float  # Start of planning.
    plan_s: float = 0.0  # Scheduling.
    map_s: float = 0.0  # Growing sequences: page tables and driver calls.
    submit_s: float = 0.0  # Launching the model and the sampling.
    wait_s: float = 0.0  # Waiting for the previous step's tokens.
    fence_wait_s: float = 0.0  # Part of `map_s` spent waiting for fences.
    num_prefill_tokens: int = 0  # Prompt tokens that the step computes.
    num_decode_tokens: int = 0  # Tokens after prompts, guesses among them.
    num_running: int = 0  # Requests after the step,
    num_waiting: int = 0  # and those that wait.
    num_swapped: int = 0  # Requests preempted by swapping.
    num_recomputed: int = 0  # Requests preempted by dropping their memory.
    num_drafts: int = 0  # Of the step that was read: requests with guesses,
    num_draft_tokens: int = 0  # their guesses,
    num_accepted_tokens: int = 0  # and those that were right.

    @property
    def total_s(self) -> float:
        """Sum of the parts."""
        return self.plan_s + self.map_s + self.submit_s + self.wait_s


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A finished request, one sample of a prompt; `time.perf_counter` times, None if not reached.

    `start_s` is when its first chunk was submitted, `num_cached_tokens` the prompt tokens found in
    the prefix cache; `finish_reason` is `stop`, `length`, `cancelled` or `error`.
    """

    request_id: int
    arrival_s: float
    start_s: float | None
    first_token_s: float | None
    end_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: str
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, request: Request) -> RequestRecord:
        """Record a request that ends now."""
        begun_s = (request.arrived_s, request.started_s or None, request.first_token_s or None)
        counts = (len(request.prompt_token_ids), len(request.output_token_ids))
        end_s, reason = time.perf_counter(), str(request.finish_reason)
        return cls(request.request_id, *begun_s, end_s, *counts, reason, request.num_cached_tokens)


@dataclass(frozen=True, slots=True)
class RequestAdded:
    """A request (one sample of a prompt) was queued."""

    request_id: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A request's first token is known, `wait_s` after it was added."""

    request_id: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Idle:
    """No work is left, and the engine is about to wait for requests; or it falls asleep, or wakes.

    `is_sleeping` is whether it sleeps now.
    """

    is_sleeping: bool = False


#: A `RequestRecord` says that a request has ended, for any reason; a `StepRecord` that a step was
#: submitted and the previous one read.
Event = RequestAdded | FirstToken | RequestRecord | StepRecord | Idle


class ObservedCache(Protocol):
    """The part of `KVCache` that observers may use."""

    def stats(self) -> CacheStats:
        """Return the cache's statistics. Cost: proportional to its rows."""


class EngineObserver(Protocol):
    """Receives an engine's events, in the engine's thread."""

    def on(self, event: Event, cache: ObservedCache) -> None:
        """Take an event; the cache may be read during the call."""


class Observers:
    """Several observers as one, called in order."""

    def __init__(self, observers: Sequence[EngineObserver]):
        self._observers = tuple(observers)

    def on(self, event: Event, cache: ObservedCache) -> None:
        """Forward the event."""
        for each in self._observers:
            each.on(event, cache)
