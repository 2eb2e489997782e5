"""The interface of an engine that the server serves; implemented by `EngineClient`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from prometheus_client import Counter

from ..params import SamplingParams
from ..request import RequestOutput


class StreamingEngine(Protocol):
    """An engine that runs in the background and streams outputs to an event loop."""

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        *,
        tenant: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's new outputs as they come; closing the iterator cancels the request.

        Raises:
            ConfigError: The request can never be served. Raised by the first iteration.
        """
        ...

    @property
    def failure(self) -> str | None:
        """The reason why no request can be served; None while the engine works."""
        ...

    async def shutdown(self, drain: bool = True) -> None:
        """Stop, after running requests have finished or, with `drain=False`, by cancelling them."""
        ...

    async def __aenter__(self) -> object:
        """Start to serve the current event loop."""
        ...

    async def __aexit__(self, *exception: object) -> None:
        """Stop after running requests have finished."""
        ...


class ServerMetrics(Protocol):
    """Metrics shown at `/metrics`; `Metrics` shows those of one engine."""

    @property
    def http_responses(self) -> Counter:
        """Counter of responses by route and status."""
        ...

    def text(self) -> bytes:
        """Render every metric in Prometheus' text format."""
        ...
