"""`vmkv top`: a live view of a running server's pages, requests and times."""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from dataclasses import dataclass, field
from typing import TextIO, TypeAlias

from ..errors import ConfigError, one_line
from ..units import format_bytes
from .arguments import Commands, address, seconds

# ---- scrape --------------------------------------------------------------------------------------

Samples: TypeAlias = dict[tuple[str, frozenset[tuple[str, str]]], float]

TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Scrape:
    """A server's metrics, summed over replicas, at `time.monotonic` time `taken_s`."""

    taken_s: float
    samples: Samples = field(default_factory=dict)

    def value(self, name: str, **labels: str) -> float:
        """Return one value; 0 if it was not reported."""
        return self.samples.get((f"vmkv_{name}", frozenset(labels.items())), 0.0)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the values of a family by the value of a label."""
        return {
            dict(labels)[label]: value
            for (sample, labels), value in self.samples.items()
            if sample == f"vmkv_{name}" and label in dict(labels)
        }

    def quantile(self, name: str, share: float) -> float | None:
        """Interpolate a quantile of a histogram as Prometheus does; None without observations."""
        bounds = self.by_label(f"{name}_bucket", "le").items()
        buckets = [(0.0, 0.0), *sorted((float(bound), total) for bound, total in bounds)]
        rank = share * buckets[-1][1]
        for (low, below), (high, total) in itertools.pairwise(buckets):
            if total >= rank > 0:
                part = (rank - below) / (total - below)
                return low if high == float("inf") else low + (high - low) * part
        return None


def scrape(address: str, *, timeout_s: float = TIMEOUT_S) -> Scrape:
    """Fetch a server's metrics; raises `ConfigError` without a valid answer.

    `timeout_s` limits the connection and each pause of the answer.
    """
    try:
        import httpx
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise ConfigError(
            f"reading metrics needs the package {error.name}: pip install 'vmkv[serve]'"
        ) from error

    url = f"{address.removesuffix('/metrics')}/metrics"
    try:
        # Without TLS there is nothing to verify, and certificates take 0.1 s to load.
        is_verified = url.startswith("https:")
        answer = httpx.get(url, timeout=timeout_s, verify=is_verified, trust_env=False)
    except httpx.TimeoutException as error:
        raise ConfigError(f"{address} did not answer within {timeout_s:g} s") from error
    except (OSError, httpx.HTTPError, httpx.InvalidURL) as error:
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

_BAR_CHARS = 40
#: Cursor home, and clear below: flickers less than clearing the screen first.
_REDRAW = "\x1b[H\x1b[J"
_CLEAR = "\x1b[2J"


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "top", help="live view of a running server's pages"
    )
    parser.add_argument("url", metavar="URL", type=address, help="e.g. http://localhost:8000")
    parser.add_argument("--interval", type=seconds, default=1.0, metavar="S", help="(default: 1)")
    parser.add_argument(
        "--timeout", type=seconds, default=TIMEOUT_S, metavar="S", help="of an answer (default: 5)"
    )
    parser.add_argument("--once", action="store_true", help="print one view and end")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Watch until interrupted; raises an error once the server is gone."""
    now = scrape(arguments.url, timeout_s=arguments.timeout)
    if arguments.once:
        out.write(view(arguments.url, now, None))
        return 0
    out.write(_CLEAR)
    pause = threading.Event()  # Never set: an interrupt (Ctrl+C) ends the wait.
    before: Scrape | None = None
    while True:
        out.write(_REDRAW + view(arguments.url, now, before))
        out.flush()
        pause.wait(arguments.interval)
        before, now = now, scrape(arguments.url, timeout_s=arguments.timeout)


def view(url: str, now: Scrape, before: Scrape | None) -> str:
    """Render one screen; rates are between two scrapes."""
    value = now.value
    ended = now.by_label("requests_total", "finish_reason")
    reasons = f" ({_listed(ended, ', ')})" if ended else ""
    steps, mapping_s = value("steps_total"), value("mapping_seconds_sum")
    share = f", {_seconds(mapping_s / steps)} a step" if steps else ""
    if all_s := value("step_seconds_sum"):
        share += f", {mapping_s / all_s:.2%} of steps"
    waits, waited_s = value("fence_wait_seconds_count"), value("fence_wait_seconds_sum")
    return f"""\
vmkv top   {url}

requests   running {value("requests_running"):,.0f}   waiting {value("requests_waiting"):,.0f}\
   ended {sum(ended.values()):,.0f}{reasons}
tokens     prompts {value("prompt_tokens_total"):,.0f}\
 (cached {value("prompt_tokens_cached_total"):,.0f})\
   generated {value("generation_tokens_total"):,.0f}{_rate(now, before)}
first token  {_quantiles(now, "time_to_first_token_seconds")}\
   per token  {_quantiles(now, "time_per_output_token_seconds")}\
   queue  {_quantiles(now, "request_queue_seconds")}

{_memory(now)}

steps      {steps:,.0f}   mapping {_seconds(mapping_s)}{share}\
   fence waits {waits:,.0f} ({_seconds(waited_s)})
preempted  {_listed(now.by_label("preemptions_total", "kind"))}
driver     {_listed(now.by_label("driver_calls_total", "primitive"))}
"""


def _listed(values: dict[str, float], between: str = "   ") -> str:
    return between.join(f"{name} {number:,.0f}" for name, number in sorted(values.items()))


def _rate(now: Scrape, before: Scrape | None) -> str:
    if before is None:
        return ""
    seconds = max(1e-9, now.taken_s - before.taken_s)
    later, earlier = (each.by_label("step_tokens_total", "phase") for each in (now, before))
    decoded = later.get("decode", 0.0) - earlier.get("decode", 0.0)
    computed = sum(later.values()) - sum(earlier.values())
    return f"   {decoded / seconds:,.1f} decoded/s, {computed / seconds:,.1f} computed/s"


def _quantiles(now: Scrape, name: str) -> str:
    half, most = now.quantile(name, 0.5), now.quantile(name, 0.99)
    if half is None or most is None:
        return "-"
    return f"{_seconds(half)} (p99 {_seconds(most)})"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def _memory(now: Scrape) -> str:
    sizes, page_bytes = now.by_label("memory_bytes", "state"), now.value("page_bytes")
    budget_bytes = sizes.get("budget", 0.0)
    if not budget_bytes:
        return "memory     nothing was computed yet, so no page is mapped"
    of_pages = f", pages of {format_bytes(int(page_bytes))}" if page_bytes else ""
    lines = [f"memory     budget {format_bytes(int(budget_bytes))}{of_pages}"]
    for state in ("used", "resident", "parked", "shared", "free", "retired", "host"):
        num_bytes = sizes.get(state, 0.0)
        bar = "#" * round(_BAR_CHARS * min(1.0, num_bytes / budget_bytes))
        pages = f"{num_bytes / page_bytes:>10,.0f} pages" if page_bytes else ""
        lines.append(f"  {state:<9}[{bar:<{_BAR_CHARS}}] {format_bytes(int(num_bytes)):>10}{pages}")
    lookups = now.by_label("prefix_lookups_total", "result")
    lines.append(
        f"  sequences  {now.value('sequences'):,.0f}   prefix hits {lookups.get('hit', 0.0):,.0f} "
        f"of {sum(lookups.values()):,.0f}   forks {now.value('forks_total'):,.0f}"
    )
    return "\n".join(lines)
