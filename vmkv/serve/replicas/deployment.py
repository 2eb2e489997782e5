"""Replicas as applications of Ray Serve, to be run as they are or to be composed with others.

def make(observer):                       # called in every replica
    model = AutoModelForCausalLM.from_pretrained(NAME).to("cuda").eval()
    return Engine(model, tokenizer=AutoTokenizer.from_pretrained(NAME), observer=observer)

replicas = engine_deployment(num_replicas=2, ray_actor_options={"num_gpus": 1}).bind(make)
serve.run(openai_application(replicas, lambda: AutoTokenizer.from_pretrained(NAME), "my-model"))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig

from ..engine_client import SILENCE_MAX_S
from ..server.app import ServerOptions, create_app
from .choice import Routing
from .client import ReplicatedEngine
from .metrics import ReplicaMetrics
from .replica import EngineReplica, MakeEngine
from .router import PrefixRouter

#: What a replica takes at once, in its engine and before it; beyond, requests wait for a place.
_ONGOING_MAX = 1024
#: A replica that ended is noticed at most so late, and started anew.
_HEALTH_S = 1.0
#: A replica that is no longer needed may take so long to finish what it has.
_DRAIN_S = 60.0


class _Replica(EngineReplica):
    """With the name that Ray gives it."""

    def __init__(self, make: MakeEngine, silence_max_s: float = SILENCE_MAX_S):
        name = serve.get_replica_context().replica_id.unique_id
        super().__init__(make, name, silence_max_s)


def engine_deployment(routing: Routing | None = None, **options: Any) -> serve.Deployment:
    """Replicas of an engine, each with a model, memory and a prefix index of its own.

    Bound to a `MakeEngine`, and to a `silence_max_s` if that of `EngineReplica` does not suit, it
    is an application whose handle has `stream(prompt, params, priority, tenant=…)` for whoever
    composes it: `handle.options(stream=True).stream.remote([1, 2, 3])`, see `EngineReplica.stream`.
    Requests go to the replica whose prefix index holds the longest beginning of their prompt for
    their tenant, unless it has much more to do than others; see `Routing`.

    Args:
        routing: When a replica is passed over.
        options: Ray's, of `serve.deployment`: `num_replicas`, `autoscaling_config` (which goes by
            the requests a replica has), `ray_actor_options` …
    """
    routing = routing or Routing()
    defaults: dict[str, Any] = {
        "name": "vmkv-engine",
        "max_ongoing_requests": _ONGOING_MAX,
        "health_check_period_s": _HEALTH_S,
        "graceful_shutdown_timeout_s": _DRAIN_S,
        "request_router_config": RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs=dataclasses.asdict(routing),
            request_routing_stats_period_s=routing.told_every_s,
        ),
    }
    deployment: serve.Deployment = serve.deployment(_Replica, **{**defaults, **options})
    return deployment


@serve.ingress()
class _OpenAI:
    """The HTTP server in front of the replicas, behind Ray's proxy."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        handle: Any,
        load_tokenizer: Callable[[], Any],
        options_for: Callable[[int], ServerOptions],
    ):
        self._metrics = ReplicaMetrics()
        self._engine = ReplicatedEngine(handle, self._metrics)
        self._tokenizer = load_tokenizer()
        self._options = options_for((await self._engine.facts()).max_tokens)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._engine, self._tokenizer, self._options, self._metrics)


def openai_application(
    replicas: serve.Application,
    load_tokenizer: Callable[[], Any],
    options: str | Callable[[int], ServerOptions],
    **ingress_options: Any,
) -> serve.Application:
    """The OpenAI API over replicas, as `vmkv serve` has it, behind Ray's HTTP proxy.

    Connections are the proxy's: limits on them, and on the time for a head, are not kept here.

    Args:
        replicas: An `engine_deployment`, bound.
        load_tokenizer: Called where the server runs.
        options: The server's, called with the tokens that a request may have; or the model's name.
        ingress_options: Ray's, of `serve.deployment`.
    """
    options_for = partial(ServerOptions, options) if isinstance(options, str) else options
    defaults: dict[str, Any] = {"name": "vmkv-openai", "max_ongoing_requests": 2 * _ONGOING_MAX}
    ingress = serve.deployment(_OpenAI, **{**defaults, **ingress_options})
    application: serve.Application = ingress.bind(replicas, load_tokenizer, options_for)
    return application
