"""What several replicas have counted, as one page for Prometheus: a label says whose it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ..metrics import http_responses

_LABEL = "replica"


class ReplicaMetrics:
    """Counts the answers that are given here, and shows what the replicas count.

    Attributes:
        http_responses: HTTP responses by route and status; of no replica, but of this process.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.http_responses = http_responses(self._registry)
        self._families: list[Metric] = []
        self._registry.register(self)

    def take(self, texts: Mapping[str, bytes]) -> None:
        """What replicas count now, in Prometheus' text format; those left out are gone."""
        self._families = list(_labelled(texts))

    def collect(self) -> Iterable[Metric]:
        """What the registry calls for a scrape."""
        return self._families

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


def _labelled(texts: Mapping[str, bytes]) -> Iterator[Metric]:
    """The families of all texts, each once; every sample says whose it is."""
    found: dict[str, Metric] = {}
    for replica, text in sorted(texts.items()):
        for family in text_string_to_metric_families(text.decode()):
            if family.name == "vmkv_http_responses":
                continue  # Replicas give no such answers.
            merged = found.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = {**sample.labels, _LABEL: replica}
                merged.samples.append(sample._replace(labels=labels))
    yield from found.values()
