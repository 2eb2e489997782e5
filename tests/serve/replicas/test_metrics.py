"""The metrics page of a server with replicas has every replica's metrics, labelled by replica."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from helpers.serving import serving, tiny_llama, tiny_tokenizer
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vmkv import AsyncEngine, Engine
from vmkv.cli.top import scrape
from vmkv.serve.metrics import Metrics, ReplicaMetrics
from vmkv.serve.observer import RequestRecord
from vmkv.serve.server import ServerOptions, create_app


def counted(num_requests: int) -> bytes:
    """The metrics page of a replica that has answered `num_requests`."""
    metrics = Metrics()
    metrics.bind_pages(lambda: 4096)
    for at in range(num_requests):
        metrics.on(RequestRecord(at, 0.0, 0.1, 0.2, 0.5, 10, 3, "stop"), None)
    return metrics.text()


def text_of(metrics: ReplicaMetrics) -> bytes:
    """The page of all replicas."""
    return generate_latest(SimpleNamespace(collect=metrics.families))


def samples(page: bytes) -> dict[tuple[str, str | None, str | None], float]:
    """The samples of a page, by name, replica and bucket."""
    return {
        (each.name, each.labels.get("replica"), each.labels.get("le")): each.value
        for family in text_string_to_metric_families(page.decode())
        for each in family.samples
    }


def test_the_page_has_the_metrics_of_every_replica() -> None:
    """Each family has one header."""
    metrics = ReplicaMetrics()
    metrics.take({"a": counted(2), "b": counted(5)})
    found = samples(text_of(metrics))
    assert found["vmkv_prompt_tokens_total", "a", None] == 20
    assert found["vmkv_prompt_tokens_total", "b", None] == 50
    assert found["vmkv_request_seconds_bucket", "b", "0.5"] == 5
    page = text_of(metrics).decode()
    assert page.count("# TYPE vmkv_prompt_tokens_total counter") == 1
    assert page.count("# TYPE vmkv_request_seconds histogram") == 1


def test_a_removed_replica_is_not_on_the_page() -> None:
    metrics = ReplicaMetrics()
    metrics.take({"a": counted(2), "b": counted(5)})
    metrics.take({"b": counted(6)})
    found = samples(text_of(metrics))
    assert {replica for _, replica, _ in found} == {"b"}
    assert found["vmkv_prompt_tokens_total", "b", None] == 60


def test_top_adds_up_the_replicas(make_engine: Callable[..., Engine]) -> None:
    """The page size, which is the same for all replicas, is not added up."""
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
