"""Prometheus counters and histograms of an engine, in their own registry.

    metrics = Metrics()
    engine = Engine(model, observer=metrics)
    metrics.text()                     # the body of a /metrics response

The engine's thread reads the cache's statistics, so a scrape never touches a changing cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from ..core.cache import CacheStats
from ..core.cache.stats import BelowStats
from ..core.memory import Broker
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

#: Kind, name, meaning and options of each metric.
_METRICS: tuple[tuple[Any, str, str, dict[str, Any]], ...] = (
    (Counter, "requests", "Requests that ended", {"labelnames": ["finish_reason"]}),
    (Counter, "prompt_tokens", "Prompt tokens of ended requests", {}),
    (Counter, "prompt_tokens_cached", "Prompt tokens that the prefix index supplied", {}),
    (Counter, "generation_tokens", "Tokens generated", {}),
    (Counter, "steps", "Steps submitted", {}),
    (Counter, "step_tokens", "Tokens computed by steps", {"labelnames": ["phase"]}),
    (Counter, "preemptions", "Requests preempted", {"labelnames": ["kind"]}),
    (Counter, "spec_decode_num_drafts", "Drafts verified: a request's guesses in a step", {}),
    (Counter, "spec_decode_num_draft_tokens", "Guesses verified", {}),
    (Counter, "spec_decode_num_accepted_tokens", "Guesses accepted", {}),
    (Gauge, "requests_running", "Requests that hold memory", {}),
    (Gauge, "requests_waiting", "Requests that wait for admission", {}),
    (Gauge, "sleeping", "1 while the engine sleeps: its weights are in host memory", {}),
    *(
        (Histogram, f"{name}_seconds", what, {"buckets": buckets})
        for name, what, buckets in (
            ("time_to_first_token", "From a request's arrival to its first token", _WAITS_S),
            ("time_per_output_token", "Mean time between tokens, after the first", _TOKENS_S),
            ("request_queue", "From a request's arrival to its first step", _WAITS_S),
            ("request", "From a request's arrival to its end", _WAITS_S),
            ("step", "Host time of a step", _PARTS_S),
            ("mapping", "Host time of a step to map memory", _PARTS_S),
            ("device_wait", "Time of a step spent waiting for tokens", _PARTS_S),
            ("fence_wait", "Time of a step spent waiting for fences, where it had to", _PARTS_S),
        )
    ),
)
_SPECULATION = (
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
)
_MEMORY = ("used", "resident", "parked", "shared", "host", "free", "retired", "budget", "reserved")
_SHARING = (
    "aliased",
    "copied",
    "copied_on_write",
    "swapped_out",
    "swapped_in",
    "offloaded",
    "loaded",
    "written",
)


class Metrics:
    """Observer that counts, with a `registry` other than prometheus-client's global one."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._page_bytes: Callable[[], int] = int
        self._stats: CacheStats | None = None
        self._snapshot_s = float("-inf")
        self._metrics = {
            name: kind(f"vmkv_{name}", what, registry=registry, **options)
            for kind, name, what, options in _METRICS
        }
        for kind in ("swap", "recompute"):
            self._count("preemptions", 0, kind)  # Exports the counter at zero.
        registry.register(self)

    def _count(self, name: str, amount: int = 1, *labels: str) -> None:
        counter = self._metrics[name]
        (counter.labels(*labels) if labels else counter).inc(amount)

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
            self._metrics["requests_waiting"].inc()  # Corrected by the next step.
        elif isinstance(event, FirstToken):
            self._metrics["time_to_first_token_seconds"].observe(event.wait_s)
        elif isinstance(event, Idle):
            self._set(requests_running=0, requests_waiting=0, sleeping=event.is_sleeping)
            self._look(cache)

    def _note_request(self, request: RequestRecord) -> None:
        self._count("requests", 1, request.finish_reason)
        self._count("prompt_tokens", request.num_prompt_tokens)
        self._count("prompt_tokens_cached", request.num_cached_tokens)
        self._count("generation_tokens", request.num_output_tokens)
        seconds = {"request": request.end_s - request.arrival_s}
        if request.start_s is not None:
            seconds["request_queue"] = request.start_s - request.arrival_s
        num_later = request.num_output_tokens - 1
        if request.first_token_s is not None and num_later > 0:
            seconds["time_per_output_token"] = (request.end_s - request.first_token_s) / num_later
        for name, value in seconds.items():
            self._metrics[f"{name}_seconds"].observe(value)

    def _note_step(self, step: StepRecord) -> None:
        self._count("steps")
        self._count("step_tokens", step.num_prefill_tokens, "prefill")
        self._count("step_tokens", step.num_decode_tokens, "decode")
        self._count("preemptions", step.num_swapped, "swap")
        self._count("preemptions", step.num_recomputed, "recompute")
        if step.num_drafts:
            self._count("spec_decode_num_drafts", step.num_drafts)
            self._count("spec_decode_num_draft_tokens", step.num_draft_tokens)
            self._count("spec_decode_num_accepted_tokens", step.num_accepted_tokens)
        parts = {"step": step.total_s, "mapping": step.map_s, "device_wait": step.wait_s}
        parts |= {"fence_wait": step.fence_wait_s} if step.fence_wait_s else {}
        for name, value in parts.items():
            self._metrics[f"{name}_seconds"].observe(value)
        self._set(requests_running=step.num_running, requests_waiting=step.num_waiting)

    def _set(self, **gauges: int) -> None:
        for name, value in gauges.items():
            self._metrics[name].set(value)

    def _look(self, cache: ObservedCache) -> None:
        self._stats = cache.stats()
        self._snapshot_s = time.monotonic()

    # ---- reporting ------------------------------------------------------------------------

    def bind_pages(self, page_bytes: Callable[[], int]) -> None:
        """Set what returns the page size, to report it too; 0 while there is no cache."""
        self._page_bytes = page_bytes

    def collect(self) -> Iterator[Metric]:
        """Yield metrics of the last cache statistics; called by the registry for a scrape."""
        if page_bytes := self._page_bytes():
            yield GaugeMetricFamily("vmkv_page_bytes", "The unit of mapping", page_bytes)
        if self._stats is not None:
            yield from _families(self._stats)

    def families(self) -> Iterable[Metric]:
        """Return every metric with its samples."""
        return self.registry.collect()

    def text(self) -> bytes:
        """Render all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def labelled(families_of: Mapping[str, Iterable[Metric]], label: str) -> list[Metric]:
    """Merge metrics by name; each sample gets a label with the key that it came under."""
    found: dict[str, Metric] = {}
    for key, families in families_of.items():
        for family in families:
            its = (family.name, family.documentation, family.type)
            merged = found.setdefault(family.name, Metric(*its))
            for sample in family.samples:
                merged.samples.append(sample._replace(labels={**sample.labels, label: key}))
    return list(found.values())


class BrokerMetrics:
    """The books of a broker: what members were given, and of it have created, use and want."""

    def __init__(self, broker: Broker):
        self._broker = broker

    def families(self) -> Iterator[Metric]:
        """Yield every metric with its samples."""
        budget_bytes = self._broker.budget_bytes or 0
        yield GaugeMetricFamily("vmkv_pool_budget_bytes", "Memory of all members", budget_bytes)
        family = GaugeMetricFamily(
            "vmkv_pool_bytes", "Memory of a member", labels=["member", "state"]
        )
        for each in self._broker.members():
            told = each.report
            states = {"given": each.given_bytes, "created": told.created_bytes}
            states |= {"live": told.live_bytes, "wanted": told.wanted_bytes}
            for state, value in states.items():
                family.add_metric([each.name, state], value)
        yield family


class ReplicaMetrics:
    """The metrics of all replicas, as of their last reports."""

    def __init__(self) -> None:
        self._families: list[Metric] = []

    def take(self, texts: Mapping[str, bytes]) -> None:
        """Merge the metrics of all replicas, given in Prometheus' text format by replica."""
        parsed = {
            replica: text_string_to_metric_families(text.decode())
            for replica, text in sorted(texts.items())
        }
        self._families = labelled(parsed, "replica")

    def families(self) -> Iterable[Metric]:
        """Return every metric with its samples."""
        return self._families


def _families(stats: CacheStats) -> Iterator[Metric]:
    memory = GaugeMetricFamily("vmkv_memory_bytes", "Memory of the cache", labels=["state"])
    yield _filled(memory, {state: getattr(stats, f"{state}_bytes") for state in _MEMORY})
    yield GaugeMetricFamily("vmkv_sequences", "Live sequences", stats.num_sequences)
    calls = CounterMetricFamily("vmkv_driver_calls", "Calls to the driver", labels=["primitive"])
    yield _filled(calls, stats.driver_calls)
    what = "Sequences that looked for a cached prefix"
    lookups = CounterMetricFamily("vmkv_prefix_lookups", what, labels=["result"])
    yield _filled(lookups, {"hit": stats.num_prefix_hits, "miss": stats.num_prefix_misses})
    what = "Tokens that a cached prefix supplied"
    yield CounterMetricFamily("vmkv_prefix_hit_tokens", what, stats.num_prefix_hit_tokens)
    what = "Sequences that began with another row's tokens"
    yield CounterMetricFamily("vmkv_forks", what, stats.sharing.num_forks)
    what = "Memory by how it was shared or moved"
    sharing = CounterMetricFamily("vmkv_sharing_bytes", what, labels=["how"])
    yield _filled(sharing, {how: getattr(stats.sharing, f"{how}_bytes") for how in _SHARING})
    yield from _of_blocks(stats.below)


_BELOW: tuple[tuple[Any, str, str, str], ...] = (
    (GaugeMetricFamily, "bytes", "Memory or files for blocks of prefixes", "num_bytes"),
    (CounterMetricFamily, "loads", "Prefixes that were brought up for a request", "num_loads"),
    (CounterMetricFamily, "loaded_bytes", "Bytes of these prefixes", "loaded_bytes"),
    (CounterMetricFamily, "load_seconds", "Time that bringing them up took", "load_s"),
    (GaugeMetricFamily, "failed", "1 after an error, when nothing is written", "has_failed"),
)


def _of_blocks(below: Mapping[str, BelowStats]) -> Iterator[Metric]:
    for kind, name, what, attribute in _BELOW:
        values = {where: getattr(its, attribute) for where, its in below.items()}
        yield _filled(kind(f"vmkv_tier_{name}", what, labels=["tier"]), values)


def _filled(family: Any, values: Mapping[str, float]) -> Any:
    for label, value in sorted(values.items()):
        family.add_metric([label], value)
    return family


# ---- vLLM's names --------------------------------------------------------------------------------

#: Our name without `vmkv_`, vLLM's without `vllm:`, and vLLM's name for the label.
_VLLMS_NAMES = (
    ("requests_running", "num_requests_running"),
    ("requests_waiting", "num_requests_waiting"),
    ("prompt_tokens", "prompt_tokens"),
    ("generation_tokens", "generation_tokens"),
    ("preemptions", "num_preemptions"),
    *((name, name) for name in _SPECULATION),
    ("requests", "request_success"),
    ("prompt_tokens", "prefix_cache_queries"),
    ("prompt_tokens_cached", "prefix_cache_hits"),
    ("time_to_first_token_seconds", "time_to_first_token_seconds"),
    # The mean of a request, which vLLM has as a metric of its own.
    ("time_per_output_token_seconds", "inter_token_latency_seconds"),
    ("time_per_output_token_seconds", "request_time_per_output_token_seconds"),
    ("request_queue_seconds", "request_queue_time_seconds"),
    ("request_seconds", "e2e_request_latency_seconds"),
)
_VLLMS_LABELS = {"finish_reason": "finished_reason"}


def in_vllms_names(families: Iterable[Metric], model_names: Iterable[str]) -> Iterator[Metric]:
    """Yield metrics that have been reported, with the label `model_name`, under vLLM's names."""
    known = {family.name: family for family in families}
    for ours, theirs in _VLLMS_NAMES:
        family, name = known.get(f"vmkv_{ours}"), f"vllm:{theirs}"
        if family is not None:
            renamed = Metric(name, family.documentation, family.type)
            renamed.samples = [_renamed(family, name, each) for each in family.samples]
            yield renamed
    memory = known.get("vmkv_memory_bytes")
    if memory is not None:
        yield _usage(memory.samples)
    labels = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    adapters = Metric("vllm:lora_requests_info", "Adapters; none are served", "gauge")
    for name in model_names:
        adapters.add_sample(adapters.name, {**labels, "model_name": name}, 0.0)
    yield adapters


def _renamed(family: Metric, name: str, sample: Sample) -> Sample:
    labels = {_VLLMS_LABELS.get(key, key): value for key, value in sample.labels.items()}
    return sample._replace(name=name + sample.name.removeprefix(family.name), labels=labels)


def _usage(samples: Iterable[Sample]) -> Metric:
    usage = Metric("vllm:kv_cache_usage_perc", "Used share of the memory, 1 for all", "gauge")
    bytes_of: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for sample in samples:
        labels = dict(sample.labels)
        state = labels.pop("state")
        bytes_of.setdefault(tuple(labels.items()), {})[state] = sample.value
    for replica, states in bytes_of.items():
        share = states["used"] / max(1.0, states["budget"])
        usage.add_sample(usage.name, dict(replica), share)
    return usage
