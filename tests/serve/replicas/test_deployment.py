"""The options with which `vmkv serve --replicas` deploys replicas, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve")
pytestmark = pytest.mark.ray


@pytest.mark.parametrize(("silence_max_s", "timeout_s"), [(60, 20), (6, 10)])
def test_a_replica_that_hangs_is_replaced_after_the_silence_timeout(
    monkeypatch: pytest.MonkeyPatch, silence_max_s: float, timeout_s: float
) -> None:
    """By three health checks, without waiting for the requests that it does not finish."""
    from vmkv.serve.replicas import deployment

    options: dict[str, Any] = {}

    def noted(**given: Any) -> Any:
        options.update(given)
        return SimpleNamespace(bind=lambda *_: None)

    def nothing(*_: Any, **__: Any) -> Any:
        return {}

    ray = SimpleNamespace(init=nothing, cluster_resources=nothing, shutdown=nothing)
    facts = SimpleNamespace(remote=lambda: SimpleNamespace(result=nothing))
    handle = SimpleNamespace(options=nothing, facts=facts)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(deployment, "ray", ray)
    monkeypatch.setattr(deployment, "engine_deployment", noted)
    monkeypatch.setattr(deployment, "_run", lambda _: handle)
    with deployment.running_replicas(nothing, 2, on_gpus=False, silence_max_s=silence_max_s):
        pass
    assert options["health_check_timeout_s"] == timeout_s
    assert options["graceful_shutdown_timeout_s"] == 0
