"""`vmkv top`: a live view of a running server's pages, requests and times."""

from __future__ import annotations

import argparse
import threading
import time
from dataclasses import dataclass, field
from typing import Any, TextIO, TypeAlias

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
            for sample in family.samples:
                if sample.name.startswith("vmkv_"):
                    _add(found.samples, sample)
    except Exception as error:  # the parser does not validate its input
        raise ConfigError(f"the metrics of {address} cannot be read: {one_line(error)}") from error
    if not found.samples:
        raise ConfigError(f"{address} reports nothing of vmkv; is it another kind of server?")
    return found


def _add(samples: Samples, sample: Any) -> None:
    """Add a value; sum it over replicas, except the page size, which is the same for all."""
    key = (sample.name, frozenset(each for each in sample.labels.items() if each[0] != "replica"))
    before = 0.0 if sample.name == "vmkv_page_bytes" else samples.get(key, 0.0)
    samples[key] = before + sample.value


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
    reasons = now.by_label("requests_total", "finish_reason")
    ended = ", ".join(f"{name} {count:,.0f}" for name, count in sorted(reasons.items()))
    lines = [
        f"vmkv top   {url}",
        "",
        (
            f"requests   running {now.value('requests_running'):,.0f}"
            f"   waiting {now.value('requests_waiting'):,.0f}"
            f"   ended {sum(reasons.values()):,.0f}{f' ({ended})' if ended else ''}"
        ),
        (
            f"tokens     prompts {now.value('prompt_tokens_total'):,.0f}"
            f" (cached {now.value('prompt_tokens_cached_total'):,.0f})"
            f"   generated {now.value('generation_tokens_total'):,.0f}{_rate(now, before)}"
        ),
        (
            f"first token  {_quantiles(now, 'time_to_first_token_seconds')}"
            f"   per token  {_quantiles(now, 'time_per_output_token_seconds')}"
            f"   queue  {_quantiles(now, 'request_queue_seconds')}"
        ),
        "",
        *_memory(now),
        "",
        *_mapping(now),
    ]
    return "\n".join(lines) + "\n"


def _rate(now: Scrape, before: Scrape | None) -> str:
    if before is None:
        return ""
    later, earlier = (
        sum(each.by_label("step_tokens_total", "phase").values()) for each in (now, before)
    )
    decoded = now.value("step_tokens_total", phase="decode") - before.value(
        "step_tokens_total", phase="decode"
    )
    seconds = max(1e-9, now.taken_s - before.taken_s)
    return f"   {decoded / seconds:,.1f} decoded/s, {(later - earlier) / seconds:,.1f} computed/s"


def _quantiles(now: Scrape, name: str) -> str:
    half, most = now.quantile(name, 0.5), now.quantile(name, 0.99)
    if half is None or most is None:
        return "-"
    return f"{_seconds(half)} (p99 {_seconds(most)})"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def _memory(now: Scrape) -> list[str]:
    sizes = now.by_label("memory_bytes", "state")
    page_bytes = now.value("page_bytes")
    budget_bytes = sizes.get("budget", 0.0)
    if not budget_bytes:
        return ["memory     nothing was computed yet, so no page is mapped"]
    of_pages = f", pages of {format_bytes(int(page_bytes))}" if page_bytes else ""
    lines = [f"memory     budget {format_bytes(int(budget_bytes))}{of_pages}"]
    for state in ("used", "resident", "parked", "shared", "free", "retired", "host"):
        num_bytes = sizes.get(state, 0.0)
        bar = "#" * round(_BAR_CHARS * min(1.0, num_bytes / budget_bytes))
        pages = f"{num_bytes / page_bytes:>10,.0f} pages" if page_bytes else ""
        lines.append(f"  {state:<9}[{bar:<{_BAR_CHARS}}] {format_bytes(int(num_bytes)):>10}{pages}")
    lookups = now.by_label("prefix_lookups_total", "result")
    num_hits, num_lookups = lookups.get("hit", 0.0), sum(lookups.values())
    lines.append(
        f"  sequences  {now.value('sequences'):,.0f}   prefix hits {num_hits:,.0f} of "
        f"{num_lookups:,.0f}   forks {now.value('forks_total'):,.0f}"
    )
    return lines


def _mapping(now: Scrape) -> list[str]:
    steps = now.value("steps_total")
    mapping_s, all_s = now.value("mapping_seconds_sum"), now.value("step_seconds_sum")
    each = (
        f", {_seconds(mapping_s / steps)} a step, {mapping_s / all_s:.2%} of steps"
        if steps and all_s
        else ""
    )
    calls = now.by_label("driver_calls_total", "primitive")
    preempted = now.by_label("preemptions_total", "kind")
    return [
        (
            f"steps      {steps:,.0f}   mapping {_seconds(mapping_s)}{each}"
            f"   fence waits {now.value('fence_wait_seconds_count'):,.0f}"
            f" ({_seconds(now.value('fence_wait_seconds_sum'))})"
        ),
        "preempted  " + "   ".join(f"{kind} {n:,.0f}" for kind, n in sorted(preempted.items())),
        "driver     " + "   ".join(f"{name} {n:,.0f}" for name, n in sorted(calls.items())),
    ]
