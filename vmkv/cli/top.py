"""`vmkv top`: a running server's pages, requests and times, live."""

from __future__ import annotations

import argparse
import threading
from typing import TextIO

from ..units import format_bytes
from .arguments import Commands, address, seconds
from .scrape import TIMEOUT_S, Scrape, scrape

_BAR_CHARS = 40
#: Home, and clear what is below: less flicker than clearing the screen first.
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
    """Watch until interrupted; a server that goes away ends it with an error."""
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
    """One screen. Rates are between two scrapes, or since the server began."""
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
    """Tokens computed per second, while something was computed."""
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
    """A bar per state, of the budget."""
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
