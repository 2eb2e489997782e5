"""Metrics of a running server, and how `vmkv top` shows them. Times are not compared."""

from __future__ import annotations

import io

import httpx
import pytest
from helpers.serving import tiny_tokenizer

from vmkv.cli.main import main
from vmkv.cli.top import Scrape, scrape, view

BODY = {"model": "tiny", "prompt": "A row", "max_tokens": 10, "temperature": 0, "ignore_eos": True}


def test_counters_are_exact(run_server) -> None:
    with run_server() as server:
        for _ in range(3):
            assert 200 == server.post(BODY).status_code
        server.post(BODY | {"model": "other"})
        server.watch.wait(lambda: server.watch.is_idle, "an idle engine")
        answer = httpx.get(f"{server.url}/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        found = scrape(server.url)
        num_prompt = len(tiny_tokenizer()("A row")["input_ids"])
        assert 3 == found.value("requests_total", finish_reason="length")
        assert 3 * num_prompt == found.value("prompt_tokens_total")
        assert 30 == found.value("generation_tokens_total")
        assert 3 == found.value("time_to_first_token_seconds_count")
        assert 3 == found.value("time_per_output_token_seconds_count")
        assert 3 == found.value("request_queue_seconds_count")
        assert found.value("mapping_seconds_count") == found.value("steps_total") >= 10
        assert 3 == found.value("http_responses_total", route="/v1/completions", status="200")
        assert 1 == found.value("http_responses_total", route="/v1/completions", status="404")
        assert 0 == found.value("preemptions_total", kind="swap")
        assert found.value("driver_calls_total", primitive="mem_map") >= 1
        budget, resident, parked = (
            found.value("memory_bytes", state=state) for state in ("budget", "resident", "parked")
        )
        assert budget == server.engine.cache.stats().budget_bytes
        assert budget >= resident >= parked >= 0
        assert found.value("page_bytes") == server.engine.cache.pool.page_bytes


def test_top_shows_counters_and_rates(run_server) -> None:
    """`vmkv top --once` prints one view; a second scrape adds rates."""
    with run_server() as server:
        out = io.StringIO()
        assert 0 == main(["top", server.url, "--once"], out)
        assert "requests_running" in out.getvalue()
        assert 200 == server.post(BODY).status_code
        server.watch.wait(lambda: server.watch.is_idle, "an idle engine")
        before = scrape(server.url)
        text = view(server.url, before)
        rows = {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if line}
        assert "length 1" == rows["requests"]
        assert "10" == rows["generation_tokens"]
        assert "budget 64 MiB" in rows["memory_bytes"]
        assert "mem_map" in rows["driver_calls"]
        assert "swap 0 recompute 0" == rows["preemptions"]
        assert "1 together" in rows["time_to_first_token_seconds"]
        later = Scrape(before.taken_s + 2.0, dict(before.samples))
        key = ("vmkv_step_tokens_total", frozenset({("phase", "decode")}))
        later.samples[key] = before.samples[key] + 10
        assert "(5/s)" in view(server.url, later, before)


def test_quantiles_are_interpolated() -> None:
    """As by Prometheus's `histogram_quantile`; the last finite bound is the maximum."""
    found = Scrape(0.0)
    for bound, total in (("1.0", 0), ("2.0", 10), ("4.0", 20), ("+Inf", 22)):
        found.samples["vmkv_x_bucket", frozenset({("le", bound)})] = total
    assert 2.0 == found.quantile("x", 10 / 22)
    assert 3.0 == pytest.approx(found.quantile("x", 15 / 22))
    assert 4.0 == found.quantile("x", 1.0)
    assert found.quantile("y", 0.5) is None


def test_prefix_hits_are_counted(run_server) -> None:
    prompt = [5 + number % 200 for number in range(600)]
    with run_server() as server:
        for tail in (7, 8, 9):
            body = BODY | {"prompt": [*prompt, tail]}
            answer = server.post(body)
            assert 200 == answer.status_code
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= 512
        # Metrics read the cache's counters when the engine falls idle.
        server.watch.wait(lambda: server.watch.is_idle, "an idle engine")
        found = scrape(server.url)
        assert found.value("prompt_tokens_cached_total") >= 2 * 512
        assert found.value("prefix_lookups_total", result="hit") == 2
