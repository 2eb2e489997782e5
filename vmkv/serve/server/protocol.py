"""What the server asks of an engine; an `EngineClient` answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from prometheus_client import Counter

from ..params import SamplingParams
from ..request import RequestOutput


class StreamingEngine(Protocol):
    """An engine that runs on its own and is asked from an event loop."""

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        *,
        tenant: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """What is new of a request, as it comes; closing the iterator cancels the request.

        Raises:
            ConfigError: The request can never be served. Raised by the first iteration.
        """
        ...

    @property
    def failure(self) -> str | None:
        """Why no request can be served; None as long as one can."""
        ...

    async def shutdown(self, drain: bool = True) -> None:
        """Stop: after the requests that are under way, or with `drain=False` cancelling them."""
        ...

    async def __aenter__(self) -> object:
        """Begin to serve this event loop."""
        ...

    async def __aexit__(self, *exception: object) -> None:
        """Stop, after the requests that are under way."""
        ...


class ServerMetrics(Protocol):
    """What is shown at `/metrics`; `Metrics` shows one engine's."""

    @property
    def http_responses(self) -> Counter:
        """Counts responses by route and status."""
        ...

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        ...
