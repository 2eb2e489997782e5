"""Reading a server's `/metrics`: numbers by name and labels, and quantiles of histograms."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from ..errors import ConfigError, one_line
from .client import Address, Client, read_whole

#: For a whole answer.
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Scrape:
    """What a server reported at one moment.

    Attributes:
        taken_s: When, by `time.monotonic`.
        samples: Values by name and labels.
    """

    taken_s: float
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)

    def value(self, name: str, **labels: str) -> float:
        """One value; 0 where it was not reported."""
        return self.samples.get((f"vmkv_{name}", frozenset(labels.items())), 0.0)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The values of a family, by the one label they differ in."""
        return {
            dict(labels)[label]: value
            for (sample, labels), value in self.samples.items()
            if sample == f"vmkv_{name}" and label in dict(labels)
        }

    def quantile(self, name: str, share: float) -> float | None:
        """The value that a share of a histogram's observations is below; None without any.

        Interpolated within its bucket, as Prometheus does.
        """
        buckets = sorted(
            (float(bound), total) for bound, total in self.by_label(f"{name}_bucket", "le").items()
        )
        if not buckets or not buckets[-1][1]:
            return None
        rank = share * buckets[-1][1]
        below_bound = below_total = 0.0
        for bound, total in buckets:
            if total >= rank:
                if bound == float("inf"):
                    return below_bound
                inside = (rank - below_total) / (total - below_total)
                return below_bound + (bound - below_bound) * inside
            below_bound, below_total = bound, total
        return below_bound


def scrape(address: Address, *, timeout_s: float = TIMEOUT_S) -> Scrape:
    """Ask a server.

    Args:
        address: The server; `/metrics` is found by itself.
        timeout_s: For the whole answer.

    Raises:
        ConfigError: There is none, or it is no vmkv server.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise ConfigError(
            "reading metrics needs prometheus-client: pip install 'vmkv[serve]'"
        ) from error

    client = Client(address, timeout_s=timeout_s)
    try:
        with client.ask("GET", address.path.removesuffix("/metrics") + "/metrics") as answer:
            text = read_whole(answer)
    finally:
        client.close()
    if answer.status != 200:
        raise ConfigError(f"{address} has no metrics: it answers {answer.status}")
    try:
        families = [*text_string_to_metric_families(text.decode())]
    except Exception as error:  # whatever a server says, in a parser that trusts it
        raise ConfigError(f"the metrics of {address} cannot be read: {one_line(error)}") from error
    found = Scrape(time.monotonic())
    for family in families:
        for sample in family.samples:
            if sample.name.startswith("vmkv_"):
                if not (0 <= sample.value < math.inf and _is_bound(sample.labels.get("le", "0"))):
                    raise ConfigError(f"{address} reports {one_line(ValueError(sample))}: no count")
                found.samples[sample.name, frozenset(sample.labels.items())] = sample.value
    if not found.samples:
        raise ConfigError(f"{address} reports nothing of vmkv; is it another kind of server?")
    return found


def _is_bound(text: str) -> bool:
    """Whether a bucket's label says up to where it counts."""
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False
