"""Events of an engine, and the protocol of their observers: a few per step, none per token.

The engine's thread makes every call, so an observer must be quick and must not raise; it may read
the cache during a call. `metrics.py` and `trace.py` implement observers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..core.cache import CacheStats


@dataclass(slots=True)
class StepRecord:
    """Measurements of one step on the host, in seconds; `start_s` is a `time.perf_counter`.

    Attributes:
        start_s: Start of planning.
        plan_s: Scheduling.
        map_s: Growing sequences: page tables and driver calls.
        submit_s: Launching the model and the sampling.
        ready_s: Making memory ready for the next steps.
        wait_s: Waiting for the previous step's tokens.
        fence_wait_s: Part of `map_s` spent waiting for fences.
        num_prefill_tokens: Prompt tokens that the step computes.
        num_decode_tokens: Sequences that the step decodes.
        num_running, num_waiting: Requests after the step.
        num_swapped: Requests preempted by swapping.
        num_recomputed: Requests preempted by dropping their memory.
    """

    start_s: float
    plan_s: float = 0.0
    map_s: float = 0.0
    submit_s: float = 0.0
    ready_s: float = 0.0
    wait_s: float = 0.0
    fence_wait_s: float = 0.0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_recomputed: int = 0

    @property
    def total_s(self) -> float:
        """Sum of the parts."""
        return self.plan_s + self.map_s + self.submit_s + self.ready_s + self.wait_s


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
