"""Eviction: which memory is reclaimed under pressure, and in which order.

A victim is memory that no live sequence needs: a parked row, with the prefix it may hold. All
caches over a pool name their victims, so an idle model gives memory to a busy one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakMethod

from .extent import Extent


class Victim(NamedTuple):
    """Memory that can be evicted.

    The figures describe the moment it was named; `evict` looks again, since earlier evictions may
    have changed them.

    Attributes:
        last_used: Time of the last use, larger is later; one clock for all caches of a pool.
        freeable_bytes: Memory freed by retiring all of it: its unshared extents.
        num_hits: How often a new sequence has started from it.
        num_tokens: Tokens of the prefix that it holds for reuse; 0 for none.
        evict: Retires its last extents until that many bytes are retired; returns the bytes, 0 if
            nothing is left. The remaining extents stay usable.
        shared: Extents that it could give up and that other rows map as well.
        give_up: Retires its mappings from the first of these shared extents on.
    """

    last_used: int
    freeable_bytes: int
    num_hits: int
    num_tokens: int
    evict: Callable[[int], int]
    shared: Sequence[Extent] = ()
    give_up: Callable[[Collection[Extent]], None] = lambda extents: None


class EvictionPolicy(Protocol):
    """The order in which victims are evicted. Implementations have no side effects."""

    def order(self, victims: Sequence[Victim]) -> Iterable[Victim]:
        """Return the victims, first to go first. A victim that is left out is never evicted."""


class LeastRecentlyUsed:
    """The default policy: least recently used first, with or without a prefix."""

    def order(self, victims: Sequence[Victim]) -> Iterable[Victim]:
        """Sort by `last_used`."""
        return sorted(victims, key=lambda victim: victim.last_used)


class Pressure:
    """The victims of all caches over one pool. Guarded by the pool's lock, except `tick`."""

    def __init__(self, policy: EvictionPolicy | None = None):
        self.policy: EvictionPolicy = LeastRecentlyUsed() if policy is None else policy
        # Weak, so that a dropped cache is not asked any more.
        self._sources: list[WeakMethod[Callable[[], Iterable[Victim]]]] = []
        self._clock = itertools.count(1)

    def tick(self) -> int:
        """Next point in time, for `Victim.last_used`; unique across threads."""
        return next(self._clock)

    def add_source(self, victims: Callable[[], Iterable[Victim]]) -> None:
        """Ask this method for victims from now on, while its object lives."""
        self._sources.append(WeakMethod(victims))

    def remove_source(self, victims: Callable[[], Iterable[Victim]]) -> None:
        """Stop asking this method. Idempotent."""
        self._sources = [each for each in self._sources if each() not in (victims, None)]

    def is_of(self, victims: Callable[[], Iterable[Victim]]) -> bool:
        """Whether no other method is a source of victims."""
        return {each() for each in self._sources} <= {victims, None}

    def evict(self, num_bytes: int, only: Callable[[], Iterable[Victim]] | None = None) -> int:
        """Retire victims of all sources, or of `only`, until `num_bytes` have been retired.

        Victims are listed again after each round, since one eviction may make another possible.
        Returns the bytes retired; they are free once their fences have passed.
        """
        sources = [each() for each in self._sources] if only is None else [only]
        evicted_bytes = 0
        while evicted_bytes < num_bytes:
            before_bytes = evicted_bytes
            victims = [each for source in sources if source for each in source()]
            freeable = [each for each in victims if each.freeable_bytes]
            for victim in self.policy.order(freeable):
                if evicted_bytes < num_bytes:
                    evicted_bytes += victim.evict(num_bytes - evicted_bytes)
            # If nothing was evicted, the figures of `victims` are still valid.
            if evicted_bytes == before_bytes and not self._give_up_shared(victims):
                break
        return evicted_bytes

    def freeable_bytes(self, enough_bytes: int) -> int:
        """Count what `evict` could retire, up to `enough_bytes`."""
        own_bytes = 0
        shared: list[Victim] = []
        for victim in (each for source in self._sources for each in (source() or list)()):
            own_bytes += victim.freeable_bytes
            if own_bytes >= enough_bytes:
                return own_bytes
            if victim.shared:
                shared.append(victim)
        return own_bytes + sum(extent.num_bytes for extent in self._idle(shared))

    def give_up(self, extents: Collection[Extent]) -> bool:
        """Have victims give up `extents`, which a live row needs alone; returns whether one did."""
        found = False
        for victim in [each for source in self._sources for each in (source() or list)()]:
            if any(extent in extents for extent in victim.shared):
                victim.give_up(extents)
                found = True
        return found

    def _give_up_shared(self, victims: Sequence[Victim]) -> bool:
        """Have one victim give up extents shared with victims only; return whether one did."""
        sharing = list(self.policy.order([each for each in victims if each.shared]))
        idle = self._idle(sharing)
        for victim in sharing:
            if not idle.isdisjoint(victim.shared):
                victim.give_up(idle)
                return True
        return False

    @staticmethod
    def _idle(sharing: Iterable[Victim]) -> set[Extent]:
        """Extents shared only among these victims."""
        num_mappings = Counter(extent for each in sharing for extent in each.shared)
        return {
            extent
            for extent, count in num_mappings.items()
            if count == extent.num_live_mappings and not extent.num_owners
        }
