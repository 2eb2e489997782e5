"""Chooses the replica of a request by held prefixes and load, without I/O.

    order = ranked(candidates, num_prompt_tokens, Routing())

`Assignments` remembers what was sent since the last reports of the replicas.

See DESIGN.md, Note [Replicas tell what they hold].
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
        for name, value in vars(self).items():
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ConfigError(f"{name}={value!r} must be a positive number")
        if self.least_share > 1:
            raise ConfigError(f"least_share={self.least_share} is more than all of a prompt")


@dataclass(frozen=True)
class Candidate:
    """A replica: tokens of a prompt that it holds, its requests, and uncached tokens sent to it."""

    held_tokens: int
    load: int
    new_tokens: int


def ranked(candidates: Sequence[Candidate], num_prompt_tokens: int, routing: Routing) -> list[int]:
    """Return the candidates' indices, best first.

    Replicas within the limits come first: by the longest held prefix if it decides, otherwise by
    the fewest new tokens. Replicas that are passed over follow, by load.
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


class _Request(NamedTuple):
    """A request that was sent to a replica; `since_s` is of its sending, or of its end."""

    names: Sequence[bytes]
    new_tokens: int
    since_s: float


class _Sent:
    """Requests that were sent to one replica, in the order of their expiry."""

    def __init__(self, new_tokens: int = 0) -> None:
        self.new_tokens = new_tokens
        self.running: dict[str, _Request] = {}
        self.ended: dict[str, _Request] = {}
        self.expected: Counter[bytes] = Counter()

    def drop(self, requests: dict[str, _Request], request: str) -> _Request:
        found = requests.pop(request)
        for name in found.names:
            self.expected[name] -= 1
            if not self.expected[name]:
                del self.expected[name]
        return found


class Assignments:
    """Remembers requests until their replicas report the prefixes, `settle_s` after they end."""

    def __init__(self, settle_s: float, clock: Callable[[], float] = time.monotonic):
        self._settle_s = settle_s
        self._clock = clock
        self._sent: dict[str, _Sent] = {}

    def see(self, replicas: Iterable[str]) -> None:
        """Set the current replicas; a new one starts with the fewest new tokens of the others."""
        there = set(replicas)
        self._sent = {name: its for name, its in self._sent.items() if name in there}
        fewest = min((its.new_tokens for its in self._sent.values()), default=0)
        for replica in there - self._sent.keys():
            self._sent[replica] = _Sent(fewest)

    def forget(self, replica: str) -> None:
        """Remove a replica that has ended. Idempotent."""
        self._sent.pop(replica, None)

    def assign(
        self, request: str, replica: str, names: Sequence[bytes], new_tokens: int = 0
    ) -> None:
        """Note that a replica got a request with these prefixes; an earlier one is forgotten."""
        now_s = self._clock()
        for its in self._sent.values():
            for requests, age_s in ((its.running, _NEWS_S), (its.ended, self._settle_s)):
                while requests and now_s - next(iter(requests.values())).since_s > age_s:
                    its.drop(requests, next(iter(requests)))
                if request in requests:
                    its.new_tokens -= its.drop(requests, request).new_tokens
        its = self._sent.setdefault(replica, _Sent())
        its.running[request] = _Request(names, new_tokens, now_s)
        its.expected.update(names)
        its.new_tokens += new_tokens

    def end(self, request: str) -> None:
        """Note that a request has ended. Idempotent."""
        for its in self._sent.values():
            if request in its.running:
                its.ended[request] = its.running.pop(request)._replace(since_s=self._clock())

    def expects(self, replica: str, name: bytes) -> bool:
        """Return whether a replica will hold a prefix, or holds it without having reported it."""
        return name in self._of(replica).expected

    def replica_of(self, request: str) -> str | None:
        """Return the replica of a running request; None if unknown."""
        return next((name for name, its in self._sent.items() if request in its.running), None)

    def load(self, replica: str) -> int:
        """Return the number of running requests that this router sent to a replica."""
        return len(self._of(replica).running)

    def new_tokens(self, replica: str) -> int:
        """Return the number of uncached tokens that this router sent to a replica."""
        return self._of(replica).new_tokens

    def _of(self, replica: str) -> _Sent:
        return self._sent.get(replica) or _Sent()
