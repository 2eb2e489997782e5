"""Which replica a request goes to, as pure logic: what they hold, how much they have to do.

    order = ranked(candidates, num_prompt_tokens, Routing())

A router knows what replicas hold by what they tell, some seconds late. What it has sent there since
is in an `Assignments`, for as long as that is news. See Note [Replicas tell what they hold].
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

from ...errors import ConfigError

#: What is under way for longer is told by its replica, and no news.
_NEWS_S = 600.0


@dataclass(frozen=True)
class Routing:
    """When a replica that holds much of a request is passed over for another.

    Attributes:
        max_load: Requests that a replica may have; beyond, others come first.
        max_ahead: How many more than the one with the fewest it may have; beyond, others come
            first.
        least_share: What a replica holds of a prompt decides if it is at least so much of it:
            beginnings that all prompts have in common would bring all of them to one replica.
        told_every_s: How often replicas tell what they hold.

    Raises:
        ConfigError: One of them is out of range.
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

    Attributes:
        held_tokens: How much of the prompt's beginning it holds, or will when its turn comes.
        load: Requests that it has.
        new_tokens: What it was sent that it did not hold, over all requests.
    """

    held_tokens: int
    load: int
    new_tokens: int


def ranked(candidates: Sequence[Candidate], num_prompt_tokens: int, routing: Routing) -> list[int]:
    """The candidates' numbers, the one that is to have the request first.

    First those that may take more: of them who holds the longest beginning, and of several that do
    the one with the fewest requests. Where that does not decide, whoever was sent the least that
    was new, so that all of them hold as much. Then those that are passed over, by their requests.
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
    """What a router has sent where, until the replica tells it by itself.

    A request's beginning is expected where it was sent while it is under way, and a little longer;
    after that only what the replica tells counts.

    Args:
        settle_s: How long after a request's end a replica may not have told of it.
        clock: Seconds that only grow.
    """

    def __init__(self, settle_s: float, clock: Callable[[], float] = time.monotonic):
        self._settle_s = settle_s
        self._clock = clock
        # Each in the order in which they cease to be news.
        self._running: dict[str, _Assignment] = {}
        self._ended: dict[str, _Assignment] = {}
        self._expected: dict[str, Counter[bytes]] = {}
        self._loads: Counter[str] = Counter()
        self._new_tokens: dict[str, int] = {}

    def see(self, replicas: Iterable[str]) -> None:
        """These replicas are there, and no others. Who is new need not catch up with the rest."""
        there = set(replicas)
        for replica in self._new_tokens.keys() - there:
            self.forget(replica)
        fewest = min(self._new_tokens.values(), default=0)
        for replica in there:
            self._new_tokens.setdefault(replica, fewest)

    def forget(self, replica: str) -> None:
        """A replica is gone, and what it held with it. Idempotent."""
        for requests in (self._running, self._ended):
            for request in [key for key, each in requests.items() if each.replica == replica]:
                del requests[request]
        for known in (self._expected, self._loads, self._new_tokens):
            known.pop(replica, None)

    def assign(
        self, request: str, replica: str, names: Sequence[bytes], new_tokens: int = 0
    ) -> None:
        """A request is sent to a replica; if it was before, then to this one instead.

        Args:
            request: Its name.
            replica: The replica's.
            names: Of its beginnings.
            new_tokens: What the replica does not hold of it.
        """
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
        """A request has ended, one way or another. Idempotent."""
        found = self._running.pop(request, None)
        if found is not None:
            self._loads[found.replica] -= 1
            self._ended[request] = replace(found, since_s=self._clock())

    def expects(self, replica: str, name: bytes) -> bool:
        """Whether a replica will hold a beginning, or may not have told yet that it does."""
        return name in self._expected.get(replica, ())

    def replica_of(self, request: str) -> str | None:
        """Where a request that is under way was sent; None if nowhere."""
        found = self._running.get(request)
        return None if found is None else found.replica

    def load(self, replica: str) -> int:
        """Requests that are under way there, of those that were sent from here."""
        return self._loads[replica]

    def new_tokens(self, replica: str) -> int:
        """What was sent there from here and was new there, in tokens."""
        return self._new_tokens.get(replica, 0)

    def _purge(self) -> None:
        """Forget what is no news any more. Cost: proportional to that."""
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
