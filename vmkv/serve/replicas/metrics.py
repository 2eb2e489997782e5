"""Merges the metrics of several replicas to one Prometheus page, with a label for the replica."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

_LABEL = "replica"


class ReplicaMetrics:
    """The metrics of all replicas, as of their last reports."""

    def __init__(self) -> None:
        self._families: list[Metric] = []

    def take(self, texts: Mapping[str, bytes]) -> None:
        """Merge the metrics of all replicas, given in Prometheus' text format by replica."""
        found: dict[str, Metric] = {}
        for replica, text in sorted(texts.items()):
            for family in text_string_to_metric_families(text.decode()):
                merged = found.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, _LABEL: replica}
                    merged.samples.append(sample._replace(labels=labels))
        self._families = list(found.values())

    def families(self) -> Iterable[Metric]:
        """Return every metric with its samples."""
        return self._families
