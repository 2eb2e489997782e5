"""One replica: an engine of its own in a process of Ray's, and what the others ask of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from ...errors import ClosedError
from ..async_engine import AsyncEngine
from ..engine import Engine
from ..engine_client import SILENCE_MAX_S
from ..metrics import Metrics
from ..observer import EngineObserver, Observers
from ..params import SamplingParams
from ..request import RequestOutput
from .prefixes import HeldPrefixes

#: Gives an engine that reports to an observer. Nobody leaves that context: a replica ends with its
#: process, and everything that it has goes with that.
MakeEngine = Callable[[EngineObserver], AbstractContextManager[Engine]]


@dataclass(frozen=True)
class ReplicaFacts:
    """What never changes of a replica, and is the same of all.

    Attributes:
        max_tokens: Prompt and output of a request at most.
        budget_bytes: Memory for keys and values.
    """

    max_tokens: int
    budget_bytes: int


@dataclass(frozen=True)
class ReplicaReport:
    """How a replica is.

    Attributes:
        replica: Its name.
        failure: Why it serves nobody; None as long as it may.
        metrics: Everything counted, in Prometheus' text format.
    """

    replica: str
    failure: str | None
    metrics: bytes


class EngineReplica:
    """An engine, served by Ray. Of its methods those with `See Ray` are called by Ray.

    Args:
        make: Called here with the engine's observer; gives the engine.
        name: What this replica is called.
        silence_max_s: See `EngineClient`; Ray ends a replica that is silent, and starts another.
    """

    def __init__(self, make: MakeEngine, name: str, silence_max_s: float = SILENCE_MAX_S):
        self._name = name
        self._metrics, self._prefixes = Metrics(), HeldPrefixes()
        self._made = make(Observers([self._metrics, self._prefixes]))
        engine = self._made.__enter__()
        self._prefixes.bind(engine.cache.prefixes, engine.cache.pool.lock)
        self._metrics.bind_pages(engine.cache.pool.page_bytes)
        self._facts = ReplicaFacts(engine.max_tokens, engine.cache.stats().budget_bytes)
        self._engine = AsyncEngine(engine, silence_max_s=silence_max_s)

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        priority: int = 0,
        *,
        tenant: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """As of `AsyncEngine`, but that the first output alone holds the prompt: each is sent."""
        outputs: Any = self._engine.stream(prompt, params, priority, tenant=tenant)
        async with contextlib.aclosing(outputs):
            yield await anext(outputs)
            async for output in outputs:
                yield replace(output, prompt=None, prompt_token_ids=())

    def facts(self) -> ReplicaFacts:
        """What never changes."""
        return self._facts

    def report(self) -> ReplicaReport:
        """How it is now."""
        return ReplicaReport(self._name, self._engine.failure, self._metrics.text())

    def record_routing_stats(self) -> dict[str, Any]:
        """See Ray."""
        return self._prefixes.stats

    def check_health(self) -> None:
        """See Ray, which starts another replica in place of one that fails here.

        Raises:
            ClosedError: The engine serves nobody.
        """
        if self._engine.failure is not None:
            raise ClosedError(self._engine.failure)
