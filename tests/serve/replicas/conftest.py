"""Replicas on a local Ray instance, for tests that need it."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from helpers.serving import MAX_TOKENS, serving, tiny_llama, tiny_tokenizer
from prometheus_client.parser import text_string_to_metric_families

from vmkv.serve.engine import Engine
from vmkv.serve.server import ServerOptions, create_app
from vmkv.units import MiB


def tiny_engine(observer: Any) -> Engine:
    """An engine on the host backend, in the calling process."""
    import torch

    torch.set_num_threads(1)
    return Engine(
        tiny_llama(),
        tokenizer=tiny_tokenizer(),
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_tokens=MAX_TOKENS,
        budget_bytes=32 * MiB,
        observer=observer,
        seed=0,
    )


@dataclass(frozen=True)
class Running:
    """Replicas behind a server.

    Attributes:
        url: The server's address.
        handle: Ray's handle to the replicas.
        engine: The replicas as one engine.
    """

    url: str
    handle: Any
    engine: Any

    def reports(self) -> dict[str, Any]:
        """The report of each replica."""
        response = self.handle.broadcast("report")
        found = response.results(timeout_s=60, return_exceptions=True)
        return {each.replica: each for each in found if hasattr(each, "replica")}

    def counted(self, name: str, **labels: str) -> dict[str, float]:
        """A counter of each replica."""
        return {
            replica: sum(
                sample.value
                for family in text_string_to_metric_families(report.metrics.decode())
                for sample in family.samples
                if sample.name == name and labels.items() <= sample.labels.items()
            )
            for replica, report in self.reports().items()
        }

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds; each check makes a round trip to the replicas."""
        deadline_s = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline_s, f"waited 120 s for {what}"

    def complete(self, prompt: list[int], **options: Any) -> httpx.Response:
        """Request a greedy completion."""
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, **options}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)


def free_port() -> int:
    """A free TCP port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="session")
def ray_url() -> Iterator[str]:
    """Start a small Ray on this machine; the address of its HTTP proxy."""
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("OMP_NUM_THREADS", "1")
        ray.init(
            address="local",
            num_cpus=8,  # Only for Ray's accounting: each replica claims one.
            object_store_memory=100 * MiB,
            include_dashboard=False,
            log_to_driver=False,
        )
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


@pytest.fixture(scope="session")
def running(ray_url: str) -> Iterator[Running]:
    """Two replicas of a tiny engine, and the server in front of them."""
    from ray import serve

    from vmkv.serve.replicas.choice import Routing
    from vmkv.serve.replicas.client import ReplicatedEngine
    from vmkv.serve.replicas.deployment import engine_deployment

    deployment = engine_deployment(
        Routing(told_every_s=0.3), num_replicas=2, ray_actor_options={"num_cpus": 1}
    )
    handle = serve.run(deployment.bind(tiny_engine), name="tiny", route_prefix=None)
    engine = ReplicatedEngine(handle)
    app = create_app(engine, tiny_tokenizer(), ServerOptions("tiny", MAX_TOKENS), engine.metrics)
    with serving(app) as (url, _):
        yield Running(url, handle, engine)


@pytest.fixture(scope="session")
def composed(ray_url: str) -> Running:
    """One replica that scales to two under load, behind a server and Ray's proxy."""
    from ray import serve

    from vmkv.serve.replicas.deployment import engine_deployment, openai_application

    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 1,
        "upscale_delay_s": 0.1,
    }
    deployment = engine_deployment(autoscaling_config=scaling, ray_actor_options={"num_cpus": 1})
    application = openai_application(deployment.bind(tiny_engine), tiny_tokenizer, "tiny")
    serve.run(application, name="composed", route_prefix="/")
    handle = serve.get_deployment_handle("vmkv-engine", "composed")
    return Running(ray_url, handle, None)
