"""A replica: an engine in a Ray actor, and its interface for the router and the server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from ...errors import ClosedError
from ..async_engine import AsyncEngine
from ..engine_client import SILENCE_MAX_S
from ..metrics import Metrics
from ..observer import Observers
from ..process.host import MakeEngine
from ..request import RequestOutput
from .prefixes import HeldPrefixes


@dataclass(frozen=True)
class ReplicaReport:
    """Status of a replica: why it serves no request (or None), and its Prometheus metrics."""

    replica: str
    failure: str | None
    metrics: bytes


class EngineReplica:
    """An engine served by Ray; Ray restarts it if it is silent for `silence_max_s`."""

    def __init__(self, make: MakeEngine, name: str, silence_max_s: float = SILENCE_MAX_S):
        self._name = name
        self._metrics, self._prefixes = Metrics(), HeldPrefixes()
        # The context is never left: a replica ends with its process, which frees its resources.
        self._made = make(Observers([self._metrics, self._prefixes]))
        engine = self._made.__enter__()
        self._metrics.bind_pages(lambda: engine.cache.pool.page_bytes)
        self._facts = engine.max_tokens, engine.cache.stats().budget_bytes
        self._engine = AsyncEngine(engine, silence_max_s=silence_max_s)

    async def stream(self, *asked: Any, **options: Any) -> AsyncIterator[RequestOutput]:
        """Stream a request as `AsyncEngine.stream` does; only the first output holds the prompt."""
        outputs = self._engine.stream(*asked, **options)
        async with contextlib.aclosing(outputs):
            yield await anext(outputs)
            async for output in outputs:
                yield replace(output, prompt=None, prompt_token_ids=())

    def facts(self) -> tuple[int, int]:
        """Return what all replicas share: tokens of a request, memory for keys and values."""
        return self._facts

    def report(self) -> ReplicaReport:
        """Return the replica's current status."""
        return ReplicaReport(self._name, self._engine.failure, self._metrics.text())

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the held prefixes; called by Ray."""
        return self._prefixes.stats

    def check_health(self) -> None:
        """Raise `ClosedError` if the engine serves no request; Ray then restarts the replica."""
        if self._engine.failure is not None:
            raise ClosedError(self._engine.failure)
