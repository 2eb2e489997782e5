"""Prometheus counters and histograms of an engine, in their own registry.

    metrics = Metrics()
    engine = Engine(model, observer=metrics)
    metrics.text()                     # the body of a /metrics response

The engine's thread reads the cache's statistics at most twice a second and when the engine falls
idle, so a scrape never touches a cache that is changing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..core.cache import CacheStats
from .observer import (
    Event,
    FirstToken,
    Idle,
    ObservedCache,
    RequestAdded,
    RequestRecord,
    StepRecord,
)

#: Content type of `Metrics.text`.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Reading the statistics costs some 100 µs with many rows; scrapes come every few seconds.
_SNAPSHOT_INTERVAL_S = 0.5
_WAITS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOKENS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 1)
_PARTS_S = (1e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 1)


class Metrics:
    """Observer that counts, with a `registry` other than prometheus-client's global one."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._page_bytes: int | None = None
        self._stats: CacheStats | None = None
        self._snapshot_s = float("-inf")
        self._add_request_metrics()
        self._add_step_metrics()
        self.http_responses = http_responses(self.registry)
        self.registry.register(self)

    def _add_request_metrics(self) -> None:
        self._requests = self._counter("requests", "Requests that ended", "finish_reason")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests")
        self._cached_tokens = self._counter(
            "prompt_tokens_cached", "Prompt tokens that the prefix index supplied"
        )
        self._output_tokens = self._counter("generation_tokens", "Tokens generated")
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", _WAITS_S
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds",
            "Mean time between the tokens of a request, after its first",
            _TOKENS_S,
        )
        self._queue_time = self._histogram(
            "request_queue_seconds", "From a request's arrival to its first step", _WAITS_S
        )
        self._request_time = self._histogram(
            "request_seconds", "From a request's arrival to its end", _WAITS_S
        )

    def _add_step_metrics(self) -> None:
        self._running = self._gauge("requests_running", "Requests that hold memory")
        self._waiting = self._gauge("requests_waiting", "Requests that wait for admission")
        self._steps = self._counter("steps", "Steps submitted")
        self._step_tokens = self._counter("step_tokens", "Tokens computed by steps", "phase")
        self._step_time = self._histogram("step_seconds", "Host time of a step", _PARTS_S)
        self._mapping = self._histogram(
            "mapping_seconds", "Host time of a step to map memory", _PARTS_S
        )
        self._device_wait = self._histogram(
            "device_wait_seconds", "Time of a step spent waiting for tokens", _PARTS_S
        )
        self._fence_wait = self._histogram(
            "fence_wait_seconds",
            "Time of a step spent waiting for fences, where it had to",
            _PARTS_S,
        )
        self._preemptions = self._counter("preemptions", "Requests preempted", "kind")
        for kind in ("swap", "recompute"):
            self._preemptions.labels(kind)  # Exports the counter at zero.

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"vmkv_{name}", what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"vmkv_{name}", what, registry=self.registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vmkv_{name}", what, registry=self.registry, buckets=buckets)

    # ---- observing ------------------------------------------------------------------------

    def on(self, event: Event, cache: ObservedCache) -> None:
        """Count an event. Steps cost about 10 µs, and read the statistics twice a second."""
        if isinstance(event, StepRecord):
            self._note_step(event)
            if time.monotonic() - self._snapshot_s >= _SNAPSHOT_INTERVAL_S:
                self._look(cache)
        elif isinstance(event, RequestRecord):
            self._note_request(event)
        elif isinstance(event, RequestAdded):
            self._waiting.inc()  # Corrected by the next step.
        elif isinstance(event, FirstToken):
            self._first_token.observe(event.wait_s)
        elif isinstance(event, Idle):
            self._running.set(0)
            self._waiting.set(0)
            self._look(cache)

    def _note_request(self, request: RequestRecord) -> None:
        self._requests.labels(request.finish_reason).inc()
        self._prompt_tokens.inc(request.num_prompt_tokens)
        self._cached_tokens.inc(request.num_cached_tokens)
        self._output_tokens.inc(request.num_output_tokens)
        self._request_time.observe(request.end_s - request.arrival_s)
        if request.start_s is not None:
            self._queue_time.observe(request.start_s - request.arrival_s)
        num_later = request.num_output_tokens - 1
        if request.first_token_s is not None and num_later > 0:
            self._per_token.observe((request.end_s - request.first_token_s) / num_later)

    def _note_step(self, step: StepRecord) -> None:
        self._steps.inc()
        self._step_tokens.labels("prefill").inc(step.num_prefill_tokens)
        self._step_tokens.labels("decode").inc(step.num_decode_tokens)
        self._step_time.observe(step.total_s)
        self._mapping.observe(step.map_s)
        self._device_wait.observe(step.wait_s)
        if step.fence_wait_s:
            self._fence_wait.observe(step.fence_wait_s)
        self._preemptions.labels("swap").inc(step.num_swapped)
        self._preemptions.labels("recompute").inc(step.num_recomputed)
        self._running.set(step.num_running)
        self._waiting.set(step.num_waiting)

    def _look(self, cache: ObservedCache) -> None:
        self._stats = cache.stats()
        self._snapshot_s = time.monotonic()

    # ---- reporting ------------------------------------------------------------------------

    def bind_pages(self, page_bytes: int) -> None:
        """Set the page size once the cache exists, to report memory in pages too."""
        self._page_bytes = page_bytes

    def collect(self) -> Iterator[Metric]:
        """Yield metrics of the last cache statistics; called by the registry for a scrape."""
        stats, page_bytes = self._stats, self._page_bytes
        if page_bytes is not None:
            yield GaugeMetricFamily("vmkv_page_bytes", "The unit of mapping", value=page_bytes)
        if stats is None:
            return
        states = {
            "used": stats.used_bytes,
            "resident": stats.resident_bytes,
            "parked": stats.parked_bytes,
            "shared": stats.shared_bytes,
            "host": stats.host_bytes,
            "free": stats.free_bytes,
            "retired": stats.retired_bytes,
            "budget": stats.budget_bytes,
            "reserved": stats.reserved_bytes,
        }
        sizes = GaugeMetricFamily("vmkv_memory_bytes", "Memory of the cache", labels=["state"])
        pages = GaugeMetricFamily("vmkv_pages", "The same in pages", labels=["state"])
        for state, num_bytes in states.items():
            sizes.add_metric([state], num_bytes)
            if page_bytes is not None:
                pages.add_metric([state], num_bytes / page_bytes)
        yield sizes
        if page_bytes is not None:
            yield pages
        yield GaugeMetricFamily("vmkv_sequences", "Live sequences", value=stats.num_sequences)
        yield from _totals(stats)

    def text(self) -> bytes:
        """Render all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def http_responses(registry: CollectorRegistry) -> Counter:
    """Create the counter of HTTP responses by route and status."""
    what = "HTTP responses by route and status"
    return Counter("vmkv_http_responses", what, ("route", "status"), registry=registry)


def _totals(stats: CacheStats) -> Iterator[Metric]:
    """Yield the statistics that only grow, as counters."""
    sharing = stats.sharing
    yield _by("vmkv_driver_calls", "Calls to the driver", "primitive", stats.driver_calls)
    yield _by(
        "vmkv_prefix_lookups",
        "Sequences that looked for a cached prefix",
        "result",
        {"hit": stats.num_prefix_hits, "miss": stats.num_prefix_misses},
    )
    yield CounterMetricFamily(
        "vmkv_prefix_hit_tokens",
        "Tokens that a cached prefix supplied",
        value=stats.num_prefix_hit_tokens,
    )
    yield CounterMetricFamily(
        "vmkv_forks", "Sequences that began with another row's tokens", value=sharing.num_forks
    )
    yield _by(
        "vmkv_sharing_bytes",
        "Memory by how it was shared or moved",
        "how",
        {
            "aliased": sharing.aliased_bytes,
            "copied": sharing.copied_bytes,
            "copied_on_write": sharing.copied_on_write_bytes,
            "swapped_out": sharing.swapped_out_bytes,
            "swapped_in": sharing.swapped_in_bytes,
        },
    )


def _by(name: str, what: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, what, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family
