"""One page shows what every replica counts, and says whose it is."""

from __future__ import annotations

from collections.abc import Callable

from helpers.serving import serving, tiny_llama, tiny_tokenizer
from prometheus_client.parser import text_string_to_metric_families

from vmkv import AsyncEngine, Engine
from vmkv.cli.top import scrape
from vmkv.serve.metrics import Metrics
from vmkv.serve.observer import RequestRecord
from vmkv.serve.replicas.metrics import ReplicaMetrics
from vmkv.serve.server import ServerOptions, create_app


def counted(num_requests: int) -> bytes:
    """What a replica shows that has answered so many."""
    metrics = Metrics()
    metrics.bind_pages(4096)
    for at in range(num_requests):
        metrics.on(RequestRecord(at, 0.0, 0.1, 0.2, 0.5, 10, 3, "stop"), None)
    return metrics.text()


def samples(page: bytes) -> dict[tuple[str, str | None, str | None], float]:
    """By name, replica and bucket."""
    return {
        (each.name, each.labels.get("replica"), each.labels.get("le")): each.value
        for family in text_string_to_metric_families(page.decode())
        for each in family.samples
    }


def test_every_replica_is_shown() -> None:
    """Counters and histograms; each family once, with its type."""
    metrics = ReplicaMetrics()
    metrics.take({"a": counted(2), "b": counted(5)})
    found = samples(metrics.text())
    assert found["vmkv_prompt_tokens_total", "a", None] == 20
    assert found["vmkv_prompt_tokens_total", "b", None] == 50
    assert found["vmkv_request_seconds_bucket", "b", "0.5"] == 5
    page = metrics.text().decode()
    assert page.count("# TYPE vmkv_prompt_tokens_total counter") == 1
    assert page.count("# TYPE vmkv_request_seconds histogram") == 1


def test_a_replica_that_is_gone_is_shown_no_more() -> None:
    """Prometheus is told what is, and knows what was."""
    metrics = ReplicaMetrics()
    metrics.take({"a": counted(2), "b": counted(5)})
    metrics.take({"b": counted(6)})
    found = samples(metrics.text())
    assert {replica for _, replica, _ in found} == {"b"}
    assert found["vmkv_prompt_tokens_total", "b", None] == 60


def test_those_who_read_the_page_see_all_replicas_together(
    make_engine: Callable[..., Engine],
) -> None:
    """`vmkv top` is of a server, however many engines it has; their pages are of one size."""
    metrics = ReplicaMetrics()
    metrics.take({"a": counted(2), "b": counted(5)})
    engine = AsyncEngine(make_engine(tiny_llama(), tokenizer=tiny_tokenizer()))
    with serving(create_app(engine, tiny_tokenizer(), ServerOptions("tiny", 128), metrics)) as (
        url,
        _,
    ):
        found = scrape(url)
    assert found.value("prompt_tokens_total") == 70
    assert found.value("request_seconds_bucket", le="0.5") == 7
    assert found.value("page_bytes") == 4096
