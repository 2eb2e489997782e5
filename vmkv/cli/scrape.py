"""Reading a server's `/metrics`: numbers by name and labels, and quantiles of histograms."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..errors import ConfigError, one_line

Samples: TypeAlias = dict[tuple[str, frozenset[tuple[str, str]]], float]

#: For a whole answer.
TIMEOUT_S = 5.0
_BODY_BYTES_MAX = 64 << 20


@dataclass(frozen=True)
class Scrape:
    """What a server reported at one moment.

    Attributes:
        taken_s: When, by `time.monotonic`.
        samples: Values by name and labels, of all replicas together.
    """

    taken_s: float
    samples: Samples = field(default_factory=dict)

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


def scrape(address: str, *, timeout_s: float = TIMEOUT_S) -> Scrape:
    """Ask a server.

    Args:
        address: The server's URL; `/metrics` is found by itself.
        timeout_s: For the whole answer, its connection included.

    Raises:
        ConfigError: There is none, it is no vmkv server, or the time is up.
    """
    try:
        import httpx  # noqa: F401
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise ConfigError(
            f"reading metrics needs the package {error.name}: pip install 'vmkv[serve]'"
        ) from error

    text = _get(f"{address.removesuffix('/metrics')}/metrics", address, timeout_s)
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
                _add(found.samples, sample)
    if not found.samples:
        raise ConfigError(f"{address} reports nothing of vmkv; is it another kind of server?")
    return found


def _add(samples: Samples, sample: Any) -> None:
    """Take a value. Replicas count together, but for the size of a page, which all have alike."""
    labels = frozenset(each for each in sample.labels.items() if each[0] != "replica")
    key = (sample.name, labels)
    if sample.name == "vmkv_page_bytes":
        samples[key] = sample.value
    else:
        samples[key] = samples.get(key, 0.0) + sample.value


def _get(url: str, address: str, timeout_s: float) -> bytes:
    import httpx

    async def get() -> bytes:
        # Without TLS there is nothing to verify, and certificates take 0.1 s to load.
        async with (
            httpx.AsyncClient(
                verify=url.startswith("https:"), timeout=timeout_s, trust_env=False
            ) as client,
            client.stream("GET", url) as answer,
        ):
            if answer.status_code != 200:
                raise ConfigError(f"{address} has no metrics: it answers {answer.status_code}")
            data = bytearray()
            async for piece in answer.aiter_raw():
                data += piece
                if len(data) > _BODY_BYTES_MAX:
                    raise ConfigError(f"the answer has more than {_BODY_BYTES_MAX >> 20} MiB")
            return bytes(data)

    try:
        # httpx's own limit begins anew with every byte, so that dripping ones are waited for.
        return asyncio.run(asyncio.wait_for(get(), timeout_s))
    except (asyncio.TimeoutError, httpx.TimeoutException) as error:
        raise ConfigError(f"{address} did not end its answer within {timeout_s:g} s") from error
    except (OSError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"no answer from {address}: {one_line(error)}; is `vmkv serve` running there?"
        ) from error


def _is_bound(text: str) -> bool:
    """Whether a bucket's label says up to where it counts."""
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False
