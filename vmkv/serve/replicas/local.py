"""Starts Ray and runs replicas for `vmkv serve`."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import ray
from ray import serve

from ...errors import ConfigError, one_line
from ...units import MiB
from .client import ReplicatedEngine
from .deployment import engine_deployment
from .metrics import ReplicaMetrics
from .replica import MakeEngine, ReplicaFacts

_NAME = "vmkv"
#: Ray's minimum; the replicas' small messages never use the object store.
_OBJECT_STORE_BYTES = 100 * MiB
#: Processors for Ray's own processes, in its accounting.
_NUM_CPUS_BESIDE = 2


@contextlib.contextmanager
def running_replicas(
    make: MakeEngine, num_replicas: int, *, on_gpus: bool, silence_max_s: float
) -> Iterator[tuple[ReplicatedEngine, ReplicaMetrics, ReplicaFacts]]:
    """Run replicas for the `with` block, on the cluster of `RAY_ADDRESS` or on this machine.

    Yields all replicas as one engine, their metrics and their constants. With `on_gpus`, each
    replica has a GPU of its own. Raises `ConfigError` with the reason if they cannot be started.
    """
    is_ours = "RAY_ADDRESS" not in os.environ
    try:
        _start_ray(num_replicas, is_ours=is_ours)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"Ray cannot be started: {one_line(error)}") from error
    try:
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        if on_gpus and num_gpus < num_replicas:
            raise ConfigError(
                f"{num_replicas} replicas need a GPU each, and Ray has {num_gpus}; lower "
                "--replicas, or set RAY_ADDRESS to a cluster that has them"
            )
        resources = {"num_cpus": 1, "num_gpus": int(on_gpus)}
        deployment = engine_deployment(num_replicas=num_replicas, ray_actor_options=resources)
        handle = _run(deployment.bind(make, silence_max_s))
        metrics = ReplicaMetrics()
        yield ReplicatedEngine(handle, metrics), metrics, handle.facts.remote().result()
    finally:
        if not is_ours:
            serve.delete(_NAME)
        ray.shutdown()  # Ends a local cluster with all replicas.


def _start_ray(num_replicas: int, *, is_ours: bool) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    if is_ours:
        # One processor per replica in Ray's accounting, however many the machine has: replicas
        # compute on GPUs.
        options |= {
            "num_cpus": num_replicas + _NUM_CPUS_BESIDE,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "include_dashboard": False,
        }
    ray.init(**options)


def _run(replicas: serve.Application) -> Any:
    # Ray's HTTP proxy is off: it does not limit connections or slow clients.
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    try:
        return serve.run(replicas, name=_NAME, route_prefix=None)
    except RuntimeError as error:
        raise ConfigError(
            f"the replicas could not be started: {_reason() or one_line(error)}"
        ) from error


def _reason() -> str:
    """Return the last line of Ray's messages that names an error."""
    deployments = serve.status().applications[_NAME].deployments.values()
    lines = "\n".join(each.message for each in deployments).splitlines()
    named = [line.strip() for line in lines if "Error: " in line]
    return one_line(RuntimeError(named[-1].partition("Error: ")[2])) if named else ""
