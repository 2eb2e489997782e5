"""Merges the metrics of several replicas to one Prometheus page, with a label for the replica."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ..metrics import labelled

_LABEL = "replica"


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
        self._families = labelled(parsed, _LABEL)

    def families(self) -> Iterable[Metric]:
        """Return every metric with its samples."""
        return self._families
