"""Merges the metrics of several replicas to one Prometheus page, with a label for the replica."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ..metrics import http_responses

_LABEL = "replica"


class ReplicaMetrics:
    """The replicas' metrics, and this process's counter of HTTP responses by route and status."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.http_responses = http_responses(self._registry)
        self._families: list[Metric] = []
        self._registry.register(self)

    def take(self, texts: Mapping[str, bytes]) -> None:
        """Replace the replicas' metrics, given in Prometheus' text format by replica."""
        self._families = list(_labelled(texts))

    def collect(self) -> Iterable[Metric]:
        """Return the metric families for a scrape."""
        return self._families

    def text(self) -> bytes:
        """Render every metric in Prometheus' text format."""
        return generate_latest(self._registry)


def _labelled(texts: Mapping[str, bytes]) -> Iterator[Metric]:
    """Merge the families of all texts; every sample gets its replica as a label."""
    found: dict[str, Metric] = {}
    for replica, text in sorted(texts.items()):
        for family in text_string_to_metric_families(text.decode()):
            if family.name == "vmkv_http_responses":
                continue  # Replicas send no HTTP responses.
            merged = found.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = {**sample.labels, _LABEL: replica}
                merged.samples.append(sample._replace(labels=labels))
    yield from found.values()
