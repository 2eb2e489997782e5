"""Ray's request router with the choice of `choice.py`.

Ray makes one per handle, and runs it in an event loop of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ...errors import ConfigError
from .choice import Assignments, Candidate, Routing, ranked
from .prefixes import names_of, told_names

#: Named prefixes of a prompt, as returned by `names_of`.
Names = Sequence[tuple[int, bytes]]
#: Reports after which a prefix that is not in them is not expected any more.
_TURNS = 3


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types for us
    """Prefers the replica whose prefix index holds the longest prefix of a request.

    Requests are calls of `stream(prompt, …, tenant=…)` with token ids; others go to the replica
    that was sent the fewest new tokens. Prefixes are separate for each tenant.
    """

    def initialize_state(self, **options: Any) -> None:
        """Initialise the router with the attributes of a `Routing`."""
        self._routing = Routing(**options)
        self._assignments = Assignments(settle_s=_TURNS * self._routing.told_every_s)
        self._told: dict[str, tuple[Any, frozenset[bytes]]] = {}

    async def choose_replicas(
        self,
        candidate_replicas: Sequence[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Rank the replicas, each by itself; 1 µs per block of 16 tokens, 5 µs per replica."""
        num_prompt_tokens, names = _prompt_of(pending_request)
        candidates = [
            Candidate(
                held_tokens=self._held_tokens(each, names),
                load=self._load(each),
                new_tokens=self._assignments.new_tokens(_name(each.replica_id)),
            )
            for each in candidate_replicas
        ]
        order = ranked(candidates, num_prompt_tokens, self._routing)
        if pending_request is not None and order:
            # Before Ray confirms it, so that concurrent requests do not all choose the same.
            first = order[0]
            new_tokens = num_prompt_tokens - candidates[first].held_tokens
            self._assign(pending_request, candidate_replicas[first].replica_id, names, new_tokens)
        return [[candidate_replicas[at]] for at in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Note which replica accepted a request."""
        request = pending_request.metadata.internal_request_id
        if self._assignments.replica_of(request) != _name(replica_id):
            num_prompt_tokens, names = _prompt_of(pending_request)
            self._assign(pending_request, replica_id, names, num_prompt_tokens)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a request has ended."""
        self._assignments.end(internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove a replica that has ended."""
        super().on_replica_actor_died(replica_id)
        self._assignments.forget(_name(replica_id))

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        """Set the current replicas."""
        names = [_name(each.replica_id) for each in replicas]
        self._assignments.see(names)
        self._told = {name: self._told[name] for name in names if name in self._told}
        super().update_replicas(replicas)

    def _assign(
        self, request: PendingRequest, replica_id: ReplicaID, names: Names, new_tokens: int
    ) -> None:
        self._assignments.assign(
            request.metadata.internal_request_id,
            _name(replica_id),
            [name for _, name in names],
            new_tokens,
        )

    def _held_tokens(self, replica: RunningReplica, names: Names) -> int:
        who, told = _name(replica.replica_id), self._told_by(replica)
        for num_tokens, name in reversed(names):
            if name in told or self._assignments.expects(who, name):
                return num_tokens
        return 0

    def _told_by(self, replica: RunningReplica) -> frozenset[bytes]:
        who, stats = _name(replica.replica_id), replica.routing_stats
        known = self._told.get(who)
        if known is None or known[0] != stats:
            known = self._told[who] = (stats, told_names(stats))
        return known[1]

    def _load(self, replica: RunningReplica) -> int:
        queued = self.replica_queue_len_cache.get(replica.replica_id)
        return max(queued or 0, self._assignments.load(_name(replica.replica_id)))


def _name(replica_id: ReplicaID) -> str:
    name: str = replica_id.unique_id
    return name


def _prompt_of(pending_request: PendingRequest | None) -> tuple[int, Names]:
    if pending_request is None or pending_request.metadata.call_method != "stream":
        return 0, []
    args, kwargs = pending_request.args, pending_request.kwargs
    prompt = args[0] if args else kwargs.get("prompt", ())
    if isinstance(prompt, str):
        return 0, []  # Only the engine can tokenise it.
    try:
        return len(prompt), names_of(prompt, kwargs.get("tenant"))
    except (AttributeError, ConfigError, TypeError):
        return 0, []  # The engine raises the proper error.
