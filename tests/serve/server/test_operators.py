"""What operators read: metrics by both names, the dashboard, `vmkv top`, a line for each request.

Times are not compared.
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.serving import tiny_tokenizer
from prometheus_client.parser import text_string_to_metric_families

from vmkv.cli.main import main
from vmkv.cli.top import Scrape, scrape, view
from vmkv.serve.metrics import Metrics, ReplicaMetrics, in_vllms_names
from vmkv.serve.observer import RequestRecord

BODY = {"model": "tiny", "prompt": "A row", "max_tokens": 10, "temperature": 0, "ignore_eos": True}
DASHBOARD = Path(__file__).parents[3] / "examples" / "grafana.json"
LOG = "vmkv.serve.server.guard"


@pytest.fixture(scope="module")
def asked(run_server) -> Iterator[Any]:
    """An idle server that has answered one request."""
    with run_server() as server:
        assert 200 == server.post(BODY).status_code
        server.watch.wait(lambda: server.watch.is_idle, "an idle engine")
        yield server


def samples(url: str) -> dict[str, tuple[dict[str, str], float]]:
    """The last sample of each name on a server's page."""
    page = httpx.get(f"{url}/metrics").text
    return {
        each.name: (each.labels, each.value)
        for family in text_string_to_metric_families(page)
        for each in family.samples
    }


def test_metrics_have_vllms_names_too(asked) -> None:
    """With the same values, and the model's name."""
    num_prompt, found = len(tiny_tokenizer()("A row")["input_ids"]), samples(asked.url)
    nothing = ("num_requests_running", "num_requests_waiting", "num_preemptions_total")
    once = ("time_to_first_token", "inter_token_latency", "request_time_per_output_token")
    expected = {
        "prompt_tokens_total": num_prompt,
        "prefix_cache_queries_total": num_prompt,
        "generation_tokens_total": 10,
        **dict.fromkeys((*nothing, "prefix_cache_hits_total", "lora_requests_info"), 0),
        **{f"{name}_seconds_count": 1 for name in (*once, "e2e_request_latency")},
        "request_queue_time_seconds_count": 1,
    }
    for name, value in expected.items():
        labels, counted = found[f"vllm:{name}"]
        assert (name, "tiny", value) == (name, labels["model_name"], counted)
    labels, counted = found["vllm:request_success_total"]
    assert ({"finished_reason": "length", "model_name": "tiny"}, 1) == (labels, counted)
    assert 0 <= found["vllm:kv_cache_usage_perc"][1] <= 1


def test_metrics_of_replicas_have_vllms_names_too() -> None:
    """With the label of the replica."""
    pages = {}
    for replica, num_prompt in (("a", 10), ("b", 30)):
        metrics = Metrics()
        metrics.on(RequestRecord(0, 0.0, 0.1, 0.2, 0.5, num_prompt, 3, "stop"), None)
        pages[replica] = metrics.text()
    merged = ReplicaMetrics()
    merged.take(pages)
    found = {
        (each.name, each.labels["replica"]): each.value
        for family in in_vllms_names(merged.families(), ["tiny"])
        for each in family.samples
        if "replica" in each.labels
    }
    assert 10 == found["vllm:prompt_tokens_total", "a"]
    assert 30 == found["vllm:prompt_tokens_total", "b"]


def test_the_dashboard_asks_for_metrics_that_a_server_has(asked) -> None:
    """Also with the labels by which it groups."""
    dashboard = json.loads(DASHBOARD.read_text())
    texts = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    texts += [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    found = samples(asked.url)
    assert len(texts) > 20
    for text in texts:
        names = re.findall(r"(?:vmkv_|vllm:)\w+", text)
        assert names, text
        for name in names:
            assert name in found, text
        for labels in re.findall(r"sum by \(([^)]*)\)", text):
            assert {*labels.split(", ")} <= {*found[names[0]][0]}, text


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_logged_in_one_line(
    run_server, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """Probes of health and scrapes are not; a path that is no route is named."""
    num_prompt = len(tiny_tokenizer()("A row")["input_ids"])
    caplog.set_level(logging.INFO, LOG)
    with run_server() as server, httpx.Client(base_url=server.url) as client:
        headers = {"X-Request-Id": "mine"}
        answer = client.post(
            "/v1/completions", json={**BODY, "stream": stream, "n": 2}, headers=headers
        )
        assert 200 == answer.status_code
        client.post("/v1/completions", json={**BODY, "max_tokens": -1})
        client.get("/nowhere")
        client.get("/health")
        client.get("/metrics")
    # A stream is logged once its connection has been told, perhaps after the next request.
    said = [each.getMessage() for each in caplog.records if each.name == LOG]
    lines = sorted(said, key=lambda line: (" 400 " in line, " 404 " in line))
    assert 3 == len(lines), lines
    form = (
        rf"127\.0\.0\.1:\d+ POST /v1/completions 200 prompt={num_prompt} cached=0 output=20 "
        r"first_token=\d+\.\d{3}s finish=length took=\d+\.\d{3}s id=mine"
    )
    assert re.fullmatch(form, lines[0]), lines[0]
    assert " GET '/nowhere' 404 took=" in lines[1]
    assert " 400 took=" in lines[2]


def test_requests_are_not_logged_unless_the_logger_is_on(
    run_server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, LOG)
    with run_server() as server:
        assert 200 == server.post(BODY).status_code
    assert [] == [each for each in caplog.records if each.name == LOG]


def test_top_counts_memory_that_the_device_would_give_as_free(asked) -> None:
    """An idle pool holds nothing, and its whole budget is free."""
    lines = view("x", scrape(asked.url)).splitlines()
    shown = next(line for line in lines if line.startswith("memory_bytes"))
    assert " free 0 B" not in shown
    free = re.search(r"free ([\d.]+) MiB", shown)
    assert free
    assert 0 < float(free.group(1)) <= 64


# ---- vmkv's names, and `vmkv top` ---------------------------------------------------------------


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
