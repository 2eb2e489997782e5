"""Replicas as applications of Ray Serve, to be run as they are or composed with others.

def make(observer):                       # called in every replica
    model = AutoModelForCausalLM.from_pretrained(NAME).to("cuda").eval()
    return Engine(model, tokenizer=AutoTokenizer.from_pretrained(NAME), observer=observer)

replicas = engine_deployment(num_replicas=2, ray_actor_options={"num_gpus": 1}).bind(make)
serve.run(openai_application(replicas, lambda: AutoTokenizer.from_pretrained(NAME), "my-model"))
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve._private import replica as ray_replica
from ray.serve.config import RequestRouterConfig

from ...errors import ConfigError, one_line
from ...units import MiB
from ..engine_client import SILENCE_MAX_S
from ..options import ServerOptions
from ..process.host import MakeEngine
from ..server.app import create_app
from .choice import Routing
from .client import ReplicatedEngine
from .replica import EngineReplica
from .router import PrefixRouter

#: Requests that a replica accepts at once; more wait in Ray.
_ONGOING_MAX = 1024
#: Interval of health checks, after which a replica that has ended is restarted.
_HEALTH_S = 1.0
#: Time for a replica that is being removed to finish its requests.
_DRAIN_S = 60.0
#: Failed health checks in a row after which Ray replaces a replica, and the shortest time limit of
#: one. A process may be busy for seconds, as while it compiles kernels.
_HEALTH_FAILURES = 3
_HEALTH_TIMEOUT_MIN_S = 10.0
_NAME = "vmkv"
#: Ray's minimum; the replicas' small messages never use the object store.
_OBJECT_STORE_BYTES = 100 * MiB
#: Processors for Ray's own processes, in its accounting.
_NUM_CPUS_BESIDE = 2


class _Replica(EngineReplica):
    def __init__(self, make: MakeEngine, silence_max_s: float = SILENCE_MAX_S):
        if os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") == "0":
            # `vmkv serve` has set it: a cluster on loopback, where Ray Serve would have each
            # replica listen to other deployments on all interfaces.
            ray_replica.add_port_to_grpc_server = _listen_on_loopback
        super().__init__(make, serve.get_replica_context().replica_id.unique_id, silence_max_s)


def _listen_on_loopback(server: Any, _: str) -> int:
    port: int = server.add_insecure_port("127.0.0.1:0")
    return port


def engine_deployment(routing: Routing | None = None, **options: Any) -> serve.Deployment:
    """Deploy replicas of an engine, each with its own model, memory and prefix index.

    Bind it to a `MakeEngine`, and optionally to the `silence_max_s` of `EngineReplica`. The handle
    of the application has `stream(prompt, params, priority, tenant=…)`, see `EngineReplica.stream`:
    `handle.options(stream=True).stream.remote([1, 2, 3])`. A request goes to the replica that holds
    the longest prefix of its prompt for its tenant, unless `routing` passes it over. `options` are
    those of `serve.deployment`: `num_replicas`, `autoscaling_config` (by requests per replica) …
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
    return serve.deployment(_Replica, **{**defaults, **options})


@serve.ingress()
class _OpenAI:
    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        handle: Any,
        load_tokenizer: Callable[[], Any],
        options_for: Callable[[int], ServerOptions],
    ):
        self._engine = ReplicatedEngine(handle)
        self._tokenizer = load_tokenizer()
        max_tokens, _ = await self._engine.facts()
        self._options = options_for(max_tokens)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._engine, self._tokenizer, self._options, self._engine.metrics)


def openai_application(
    replicas: serve.Application,
    load_tokenizer: Callable[[], Any],
    options: str | Callable[[int], ServerOptions],
    **ingress_options: Any,
) -> serve.Application:
    """Serve the OpenAI API over a bound `engine_deployment`, behind Ray's HTTP proxy.

    `load_tokenizer` is called in the server's process; `options` makes the server's options from a
    request's token limit, or is the model's name; `ingress_options` are those of
    `serve.deployment`. The limits on connections and on the time for a head do not apply: the proxy
    accepts connections.
    """
    options_for = partial(ServerOptions, options) if isinstance(options, str) else options
    defaults: dict[str, Any] = {"name": "vmkv-openai", "max_ongoing_requests": 2 * _ONGOING_MAX}
    ingress = serve.deployment(_OpenAI, **{**defaults, **ingress_options})
    return ingress.bind(replicas, load_tokenizer, options_for)


# ---- vmkv serve ----------------------------------------------------------------------------------


@contextlib.contextmanager
def running_replicas(
    make: MakeEngine, num_replicas: int, *, on_gpus: bool, silence_max_s: float
) -> Iterator[tuple[ReplicatedEngine, tuple[int, int]]]:
    """Run replicas for the `with` block, on the cluster of `RAY_ADDRESS` or on this machine.

    Yields all replicas as one engine, and their constants. With `on_gpus`, each has a GPU.
    """
    is_ours = "RAY_ADDRESS" not in os.environ
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    if is_ours:
        # One processor per replica in Ray's accounting, however many the machine has: replicas
        # compute on GPUs.
        options |= {
            "num_cpus": num_replicas + _NUM_CPUS_BESIDE,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "include_dashboard": False,
        }
    before = os.umask(0o077)  # Ray's token runs code of its holder.
    try:
        with contextlib.suppress(OSError):
            (Path.home() / ".ray" / "auth_token").chmod(0o600)
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"Ray cannot be started: {one_line(error)}") from error
    finally:
        os.umask(before)
    try:
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        if on_gpus and num_gpus < num_replicas:
            raise ConfigError(
                f"{num_replicas} replicas need a GPU each, and Ray has {num_gpus}; lower "
                "--replicas, or set RAY_ADDRESS to a cluster that has them"
            )
        resources = {"num_cpus": 1, "num_gpus": int(on_gpus)}
        deployment = engine_deployment(
            num_replicas=num_replicas,
            ray_actor_options=resources,
            health_check_timeout_s=max(silence_max_s / _HEALTH_FAILURES, _HEALTH_TIMEOUT_MIN_S),
            graceful_shutdown_timeout_s=0,  # A replica that hangs does not finish its requests.
        )
        handle = _run(deployment.bind(make, silence_max_s))
        yield ReplicatedEngine(handle), handle.facts.remote().result()
    finally:
        if not is_ours:
            serve.delete(_NAME)
        ray.shutdown()  # Ends a local cluster with all replicas.


def _run(replicas: serve.Application) -> Any:
    # Ray's HTTP proxy is off: it does not limit connections or slow clients.
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    try:
        return serve.run(replicas, name=_NAME, route_prefix=None)
    except RuntimeError as error:
        # The last line of Ray's messages that names an error.
        deployments = serve.status().applications[_NAME].deployments.values()
        lines = "\n".join(each.message for each in deployments).splitlines()
        named = [line.partition("Error: ")[2] for line in lines if "Error: " in line]
        reason = one_line(RuntimeError(named[-1])) if named else one_line(error)
        raise ConfigError(f"the replicas could not be started: {reason}") from error
