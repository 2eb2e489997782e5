"""Reading a server's `/metrics`: numbers by name and labels, and quantiles of histograms."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field

from ..errors import ConfigError

_TIMEOUT_S = 5.0


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


def scrape(url: str) -> Scrape:
    """Ask a server.

    Raises:
        ConfigError: There is none, or it is no vmkv server.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise ConfigError(
            "reading metrics needs prometheus-client: pip install 'vmkv[serve]'"
        ) from error

    address = url if "://" in url else f"http://{url}"
    address = address.rstrip("/").removesuffix("/metrics") + "/metrics"
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as answer:
            text = answer.read().decode()
        families = [*text_string_to_metric_families(text)]
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"no answer from {address}: {reason}; is `vmkv serve` running there?"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{address} is no metrics page: {error}") from error
    found = Scrape(time.monotonic())
    for family in families:
        for sample in family.samples:
            found.samples[sample.name, frozenset(sample.labels.items())] = sample.value
    if not any(name.startswith("vmkv_") for name, _ in found.samples):
        raise ConfigError(f"{address} reports nothing of vmkv; is it another kind of server?")
    return found
