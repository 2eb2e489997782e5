"""Chooses the replica of a request by held prefixes and load, without I/O.

    order = ranked(candidates, num_prompt_tokens, Routing())

Replicas report the prefixes that they hold with a delay of seconds; `Assignments` remembers the
requests sent meanwhile. See Note [Replicas tell what they hold].
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

from ...errors import ConfigError

#: A request that runs for longer is covered by its replica's reports.
_NEWS_S = 600.0


@dataclass(frozen=True)
class Routing:
    """Thresholds beyond which a replica is passed over although it holds a long prefix.

    Attributes:
        max_load: Requests per replica; beyond it, other replicas come first.
        max_ahead: Requests more than on the least loaded replica; beyond it, others come first.
        least_share: Smallest share of a prompt that a held prefix must cover to decide; without it,
            a prefix that all prompts have in common would attract all of them to one replica.
        told_every_s: Interval of the replicas' reports.

    Raises:
        ConfigError: A value is out of range.
    """

    max_load: int = 256
    max_ahead: int = 8
    least_share: float = 0.25
    told_every_s: float = 1.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ConfigError(f"{each.name}={value!r} must be a positive number")
        if self.least_share > 1:
            raise ConfigError(f"least_share={self.least_share} is more than all of a prompt")


@dataclass(frozen=True)
class Candidate:
    """A replica, as seen for one request.

    `held_tokens` is the length of the prompt's prefix that it holds or will hold; `load` counts its
    requests; `new_tokens` counts tokens that were sent to it without being cached, over all
    requests.
    """

    held_tokens: int
    load: int
    new_tokens: int


def ranked(candidates: Sequence[Candidate], num_prompt_tokens: int, routing: Routing) -> list[int]:
    """Return the candidates' indices, best first.

    Replicas within the limits come first: by the longest held prefix if it decides, then by the
    fewest requests; otherwise by the fewest new tokens, so that all hold equally much. Replicas
    that are passed over follow, by load.
    """
    least_load = min((each.load for each in candidates), default=0)
    longest = max((each.held_tokens for each in candidates), default=0)
    decides = longest >= routing.least_share * num_prompt_tokens

    def order(at: int) -> tuple[bool, int, int, int]:
        each = candidates[at]
        is_passed_over = each.load >= routing.max_load or each.load > least_load + routing.max_ahead
        if is_passed_over:
            return True, each.load, each.new_tokens, 0
        if decides and each.held_tokens:
            return False, -each.held_tokens, each.load, each.new_tokens
        return False, 0, each.new_tokens, each.load

    return sorted(range(len(candidates)), key=order)


@dataclass(frozen=True)
class _Assignment:
    replica: str
    names: Sequence[bytes]
    new_tokens: int
    since_s: float


class Assignments:
    """Remembers a router's requests until their replicas report the prefixes.

    Expects a request's prefix at its replica while the request runs and `settle_s` longer.
    """

    def __init__(self, settle_s: float, clock: Callable[[], float] = time.monotonic):
        self._settle_s = settle_s
        self._clock = clock
        # Both in the order of their expiry.
        self._running: dict[str, _Assignment] = {}
        self._ended: dict[str, _Assignment] = {}
        self._expected: dict[str, Counter[bytes]] = {}
        self._loads: Counter[str] = Counter()
        self._new_tokens: dict[str, int] = {}

    def see(self, replicas: Iterable[str]) -> None:
        """Set the current replicas; a new one starts with the fewest new tokens of the others."""
        there = set(replicas)
        for replica in self._new_tokens.keys() - there:
            self.forget(replica)
        fewest = min(self._new_tokens.values(), default=0)
        for replica in there:
            self._new_tokens.setdefault(replica, fewest)

    def forget(self, replica: str) -> None:
        """Remove a replica that has ended. Idempotent."""
        for requests in (self._running, self._ended):
            for request in [key for key, each in requests.items() if each.replica == replica]:
                del requests[request]
        for known in (self._expected, self._loads, self._new_tokens):
            known.pop(replica, None)

    def assign(
        self, request: str, replica: str, names: Sequence[bytes], new_tokens: int = 0
    ) -> None:
        """Note that a replica got a request with these prefixes; an earlier one is forgotten."""
        self._purge()
        for requests in (self._running, self._ended):
            if request in requests:
                before = requests[request]
                self._new_tokens[before.replica] -= before.new_tokens
                self._drop(requests, request)
        self._running[request] = _Assignment(replica, names, new_tokens, self._clock())
        self._expected.setdefault(replica, Counter()).update(names)
        self._loads[replica] += 1
        self._new_tokens[replica] = self._new_tokens.get(replica, 0) + new_tokens

    def end(self, request: str) -> None:
        """Note that a request has ended. Idempotent."""
        found = self._running.pop(request, None)
        if found is not None:
            self._loads[found.replica] -= 1
            self._ended[request] = replace(found, since_s=self._clock())

    def expects(self, replica: str, name: bytes) -> bool:
        """Return whether a replica will hold a prefix, or holds it without having reported it."""
        return name in self._expected.get(replica, ())

    def replica_of(self, request: str) -> str | None:
        """Return the replica of a running request; None if unknown."""
        found = self._running.get(request)
        return None if found is None else found.replica

    def load(self, replica: str) -> int:
        """Return the number of running requests that this router sent to a replica."""
        return self._loads[replica]

    def new_tokens(self, replica: str) -> int:
        """Return the number of uncached tokens that this router sent to a replica."""
        return self._new_tokens.get(replica, 0)

    def _purge(self) -> None:
        now_s = self._clock()
        for requests, age_s in ((self._running, _NEWS_S), (self._ended, self._settle_s)):
            while requests and now_s - next(iter(requests.values())).since_s > age_s:
                self._drop(requests, next(iter(requests)))

    def _drop(self, requests: dict[str, _Assignment], request: str) -> None:
        each = requests.pop(request)
        if requests is self._running:
            self._loads[each.replica] -= 1
        expected = self._expected[each.replica]
        for name in each.names:
            expected[name] -= 1
            if not expected[name]:
                del expected[name]
