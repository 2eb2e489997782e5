"""`vmkv top`: a live view of a running server's pages, requests and times."""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import dataclass, field
from typing import TextIO, TypeAlias

from ..errors import ConfigError, one_line
from ..units import format_bytes
from .arguments import Commands, name, seconds

# ---- scrape --------------------------------------------------------------------------------------

Samples: TypeAlias = dict[tuple[str, frozenset[tuple[str, str]]], float]

TIMEOUT_S = 5.0
#: Label of a server of several models.
_MODEL = "model_name"


@dataclass(frozen=True)
class Scrape:
    """A server's metrics, summed over replicas, at `time.monotonic` time `taken_s`."""

    taken_s: float
    samples: Samples = field(default_factory=dict)

    def of_model(self, model: str | None) -> Scrape:
        """Return one model's metrics, without its label; with None, metrics without that label."""
        found = {
            (name, frozenset((key, value) for key, value in labels if key != _MODEL)): each
            for (name, labels), each in self.samples.items()
            if dict(labels).get(_MODEL) == model
        }
        return Scrape(self.taken_s, found)

    @property
    def models(self) -> list[str]:
        """The models of a server of several models."""
        return sorted({text for _, labels in self.samples for key, text in labels if key == _MODEL})

    def value(self, name: str, **labels: str) -> float:
        """Return one value; 0 if it was not reported."""
        return self.samples.get((f"vmkv_{name}", frozenset(labels.items())), 0.0)

    def quantile(self, name: str, share: float) -> float | None:
        """Interpolate a quantile of a histogram as Prometheus does; None without observations."""
        bounds = (
            (float(dict(labels)["le"]), total)
            for (sample, labels), total in self.samples.items()
            if sample == f"vmkv_{name}_bucket"
        )
        buckets = [(0.0, 0.0), *sorted(bounds)]
        rank = share * buckets[-1][1]
        for (low, below), (high, total) in itertools.pairwise(buckets):
            if total >= rank > 0:
                part = (rank - below) / (total - below)
                return low if high == float("inf") else low + (high - low) * part
        return None


def scrape(address: str, *, timeout_s: float = TIMEOUT_S) -> Scrape:
    """Fetch a server's metrics; `ConfigError` without a valid answer, `timeout_s` per read."""
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    url = address if "://" in address else f"http://{address}"
    url = url.removesuffix("/metrics").rstrip("/") + "/metrics"
    try:
        # Without TLS there is nothing to verify, and certificates take 0.1 s to load.
        is_verified = url.startswith("https:")
        answer = httpx.get(url, timeout=timeout_s, verify=is_verified, trust_env=False)
    except httpx.TimeoutException as error:
        raise ConfigError(f"{address} did not answer within {timeout_s:g} s") from error
    except (OSError, httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise ConfigError(
            f"no answer from {address}: {one_line(error)}; is `vmkv serve` running there?"
        ) from error
    if answer.status_code != 200:
        raise ConfigError(f"{address} has no metrics: it answers {answer.status_code}")
    found = Scrape(time.monotonic())
    try:
        for family in text_string_to_metric_families(answer.text):
            for name, labels, value, *_ in family.samples:
                key = (name, frozenset(each for each in labels.items() if each[0] != "replica"))
                # Every replica has pages of the same size.
                before = 0.0 if name == "vmkv_page_bytes" else found.samples.get(key, 0.0)
                if name.startswith("vmkv_"):
                    found.samples[key] = before + value
    except Exception as error:  # the parser does not validate its input
        raise ConfigError(f"the metrics of {address} cannot be read: {one_line(error)}") from error
    if not found.samples:
        raise ConfigError(f"{address} reports nothing of vmkv; is it another kind of server?")
    return found


# ---- top -----------------------------------------------------------------------------------------

#: Cursor home, and clear below: flickers less than clearing the screen first.
_REDRAW = "\x1b[H\x1b[J"
_CLEAR = "\x1b[2J"


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("top", help="live view of a running server's pages")
    parser.set_defaults(run=run)
    add, text = parser.add_argument, "limit of an answer (default: 5)"
    add("url", metavar="URL", type=name, help="e.g. http://localhost:8000")
    add("--interval", type=seconds, default=1.0, metavar="S", help="(default: 1)")
    add("--timeout", type=seconds, default=TIMEOUT_S, metavar="S", help=text)
    add("--once", action="store_true", help="print one view and end")


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Watch until interrupted; raises an error once the server is gone."""
    now, before = scrape(arguments.url, timeout_s=arguments.timeout), None
    if arguments.once:
        out.write(view(arguments.url, now))
        return 0
    out.write(_CLEAR)
    while True:
        out.write(_REDRAW + view(arguments.url, now, before))
        out.flush()
        time.sleep(arguments.interval)
        before, now = now, scrape(arguments.url, timeout_s=arguments.timeout)


def view(url: str, now: Scrape, before: Scrape | None = None) -> str:
    """Render one screen, of each model of several; rates need two scrapes."""
    parts = [f"vmkv top  {url}", ""]
    for model in (*now.models, None):
        part = now.of_model(model)
        if part.samples:
            parts += [f"model {model}", ""] if model is not None else []
            parts += [*_lines(part, None if before is None else before.of_model(model)), ""]
    return "\n".join(parts)


def _lines(now: Scrape, before: Scrape | None) -> list[str]:
    rows: dict[str, list[str]] = {}
    budget_bytes = now.value("memory_bytes", state="budget")
    for (sample, labels), value in now.samples.items():
        name = sample.removeprefix("vmkv_")
        if name == "memory_bytes" and ("state", "free") in labels:
            # For new requests: what the pool keeps free, and what the device would give it.
            value = budget_bytes - now.value("memory_bytes", state="resident")
        metric = name.removesuffix("_total").removesuffix("_count")
        if name.endswith("_count"):
            rows[metric] = [_times(now, metric, value)]
        elif not name.endswith(("_bucket", "_sum", "_created")):
            words = [*(label for _, label in sorted(labels)), _number(name, value)]
            if before is not None and name.endswith("_total"):
                increase = value - before.samples.get((sample, labels), 0.0)
                rate = increase / max(1e-9, now.taken_s - before.taken_s)
                words += [f"({_number(name, rate)}/s)"] if rate else []
            rows.setdefault(metric, []).append(" ".join(words))
    width = max(map(len, rows))
    return [f"{metric:<{width}}  {'   '.join(values)}" for metric, values in rows.items()]


def _number(name: str, value: float) -> str:
    return format_bytes(int(value)) if "_bytes" in name else f"{value:,.1f}".removesuffix(".0")


def _times(now: Scrape, metric: str, count: float) -> str:
    half, most = now.quantile(metric, 0.5), now.quantile(metric, 0.99)
    if half is None or most is None:
        return "none"
    total = _seconds(now.value(f"{metric}_sum"))
    return f"median {_seconds(half)}   p99 {_seconds(most)}   {count:,.0f} together {total}"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
