"""What an engine tells whoever watches it: a few calls per step, none per token.

The engine's thread makes every call, so an observer must be quick and must not raise; it may
read the cache, which nobody else touches meanwhile. `metrics.py` and `trace.py` observe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..core.cache import CacheStats


@dataclass(slots=True)
class StepRecord:
    """One step, as the host saw it, written down as it goes. Seconds of `time.perf_counter`.

    Attributes:
        start_s: When the step's planning began.
        plan_s: Choosing what runs.
        map_s: Growing sequences: page tables and driver calls.
        submit_s: Launching the model and the sampling.
        ready_s: Making memory ready for the next steps.
        wait_s: Waiting for the tokens of the step before.
        fence_wait_s: The part of `map_s` spent waiting for fences.
        num_prefill_tokens: Prompt tokens the step computes.
        num_decode_tokens: Sequences it decodes.
        num_running: Requests that hold memory after it.
        num_waiting: Requests that wait for admission after it.
        num_swapped: Requests it preempted by copying their memory out.
        num_recomputed: Requests it preempted by dropping their memory.
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
        """The parts together."""
        return self.plan_s + self.map_s + self.submit_s + self.ready_s + self.wait_s


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that has ended: one sample of a prompt.

    Times are `time.perf_counter`; None where it never got so far.

    Attributes:
        request_id: The engine's name for it.
        arrival_s: When it was added.
        start_s: When its first chunk was submitted.
        first_token_s: When its first token was known.
        end_s: When it ended.
        num_prompt_tokens: Tokens of the prompt.
        num_cached_tokens: Those of them that the prefix index supplied.
        num_output_tokens: Tokens generated.
        finish_reason: `stop`, `length`, `cancelled` or `error`.
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


class ObservedCache(Protocol):
    """What an observer may ask of the cache; `KVCache` answers."""

    def stats(self) -> CacheStats:
        """The cache now. Cost: proportional to its rows."""
        ...


class EngineObserver(Protocol):
    """Somebody who watches an engine. Calls come from the engine's thread.

    Whoever inherits from it is told nothing but what it overrides.
    """

    def request_added(self, request_id: int, num_prompt_tokens: int) -> None:
        """A request, one sample of a prompt, was accepted into the queue."""
        return

    def first_token(self, request_id: int, wait_s: float) -> None:
        """A request's first token is known, `wait_s` after it was added."""
        return

    def request_finished(self, request: RequestRecord) -> None:
        """A request ended, one way or another."""
        return

    def step_finished(self, step: StepRecord, cache: ObservedCache) -> None:
        """A step was submitted and the one before it read."""
        return

    def idle(self, cache: ObservedCache) -> None:
        """Nothing is left to do; the engine is about to wait for a request."""
        return


class Observers:
    """Several observers as one, called in order."""

    def __init__(self, observers: Sequence[EngineObserver]):
        self._observers = tuple(observers)

    def request_added(self, request_id: int, num_prompt_tokens: int) -> None:
        """See `EngineObserver`."""
        for each in self._observers:
            each.request_added(request_id, num_prompt_tokens)

    def first_token(self, request_id: int, wait_s: float) -> None:
        """See `EngineObserver`."""
        for each in self._observers:
            each.first_token(request_id, wait_s)

    def request_finished(self, request: RequestRecord) -> None:
        """See `EngineObserver`."""
        for each in self._observers:
            each.request_finished(request)

    def step_finished(self, step: StepRecord, cache: ObservedCache) -> None:
        """See `EngineObserver`."""
        for each in self._observers:
            each.step_finished(step, cache)

    def idle(self, cache: ObservedCache) -> None:
        """See `EngineObserver`."""
        for each in self._observers:
            each.idle(cache)
