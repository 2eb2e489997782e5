"""`PrefixRouter` ranks replicas by their reports, the requests that it has sent, and their queues.

With Ray's classes of routers and requests, but no cluster. Not covered: how Ray uses the ranks
(`test_replicas.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from vmkv.core.cache.prefix import PrefixIndex
from vmkv.serve.observer import Idle
from vmkv.serve.replicas.prefixes import HeldPrefixes

pytest.importorskip("ray.serve")
pytestmark = pytest.mark.ray

PROMPT = list(range(10, 110))


def told(*prompts: list[int], tenant: str | None = None) -> dict[str, Any]:
    """The report of a replica that holds these prompts."""
    index, prefixes = PrefixIndex(), HeldPrefixes()
    for row, prompt in enumerate(prompts):
        index.record(row, prompt, tenant)
    lock = contextlib.nullcontext()
    below = SimpleNamespace(held=lambda hashes: ())
    pool = SimpleNamespace(lock=lock)
    prefixes.on(Idle(), SimpleNamespace(prefixes=index, pool=pool, host_blocks=below))
    return prefixes.stats


@dataclass
class Replica:
    """The parts of a replica that a router reads."""

    name: str
    routing_stats: dict[str, Any] = field(default_factory=dict)

    @property
    def replica_id(self) -> Any:
        return SimpleNamespace(unique_id=self.name)


def request(name: str, *arguments: Any, method: str = "stream", **options: Any) -> Any:
    """A call that is waiting for a replica."""
    metadata = SimpleNamespace(internal_request_id=name, call_method=method)
    return SimpleNamespace(args=list(arguments), kwargs=options, metadata=metadata)


@pytest.fixture
def router() -> Any:
    """A router to replicas whose queue lengths are unknown."""
    from vmkv.serve.replicas.router import PrefixRouter

    made = PrefixRouter.__new__(PrefixRouter)
    made._replica_queue_len_cache = SimpleNamespace(get=lambda replica_id: None)
    made.initialize_state(max_ahead=2)
    return made


def chosen(router: Any, replicas: list[Replica], pending: Any) -> str:
    """The first replica in rank; every replica must be ranked once."""
    ranks = asyncio.run(router.choose_replicas(replicas, pending))
    assert sorted(each.name for [each] in ranks) == sorted(each.name for each in replicas)
    return ranks[0][0].name


def test_the_replica_that_reports_the_longest_prefix_is_first(router: Any) -> None:
    """A new report changes the order."""
    replicas = [Replica("a", told(PROMPT[:48])), Replica("b", told(PROMPT[:64])), Replica("c")]
    assert chosen(router, replicas, request("r1", PROMPT)) == "b"
    router.on_request_completed(None, "r1")
    replicas[0].routing_stats = told(PROMPT)
    assert chosen(router, replicas, request("r2", PROMPT)) == "a"


def test_prefixes_of_sent_requests_are_expected(router: Any) -> None:
    """Before a replica has reported them."""
    replicas = [Replica("a"), Replica("b")]
    first = chosen(router, replicas, request("r1", PROMPT))
    other = chosen(router, replicas, request("r2", PROMPT[::-1]))
    assert other != first
    assert chosen(router, replicas, request("r3", [*PROMPT, 7])) == first


def test_prefixes_of_other_tenants_do_not_count(router: Any) -> None:
    """Neither reported prefixes, nor those of requests that were just sent."""
    replicas = [Replica("a"), Replica("b", told(PROMPT, tenant="alice"))]
    assert chosen(router, replicas, request("r1", PROMPT, tenant="bob")) == "a"
    assert chosen(router, replicas, request("r2", PROMPT, tenant="alice")) == "b"
    others = [Replica("c"), Replica("d")]
    for at, (tenant, expected) in enumerate([("alice", "c"), ("bob", "d")] * 2):
        assert chosen(router, others, request(f"s{at}", PROMPT, tenant=tenant)) == expected


def test_the_replica_that_ray_chose_is_expected_to_hold_the_prefix(router: Any) -> None:
    """Ray may choose another one than the first in rank."""
    replicas = [Replica("a"), Replica("b")]
    pending = request("r1", PROMPT)
    first = chosen(router, replicas, pending)
    [second] = {"a", "b"} - {first}
    router.on_request_routed(pending, SimpleNamespace(unique_id=second), None)
    assert chosen(router, replicas, request("r2", [*PROMPT, 7])) == second


def test_known_queue_lengths_count_as_load(router: Any) -> None:
    """They include requests of other routers."""
    replicas = [Replica("a", told(PROMPT)), Replica("b")]
    queues = {"a": 3, "b": 0}
    router._replica_queue_len_cache.get = lambda replica_id: queues[replica_id.unique_id]
    assert chosen(router, replicas, request("r1", PROMPT)) == "b"


@pytest.mark.parametrize(
    "pending",
    [
        request("r", "a text"),
        request("r", ["no token"]),
        request("r", None),
        request("r"),
        request("r", prompt=PROMPT),
        request("r", PROMPT, tenant=7),
        request("r", method="facts"),
        None,
    ],
)
def test_malformed_calls_are_routed(router: Any, pending: Any) -> None:
    """The engine reports their error; one in the router would leave the call waiting for ever."""
    assert chosen(router, [Replica("a"), Replica("b")], pending) in "ab"
