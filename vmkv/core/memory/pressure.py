"""Eviction: which memory is reclaimed under pressure, and in which order.

A victim is memory that no live sequence needs: a parked row, with the prefix it may hold. All
caches over a pool name their victims, and the least recently used go first, so an idle model gives
memory to a busy one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple
from weakref import WeakMethod

from .page_table import Extent


class Victim(NamedTuple):
    """Memory that can be evicted.

    The figures describe the moment it was named; `evict` looks again, since earlier evictions may
    have changed them.

    Attributes:
        last_used: Time of the last use, larger is later; one clock for all caches of a pool.
        freeable_bytes: Memory freed by retiring all of it: its unshared extents.
        evict: Retires its last extents until that many bytes are retired; returns the bytes, 0 if
            nothing is left. The remaining extents stay usable.
        shared: Extents that it could give up and that other rows map as well.
        give_up: Retires its mappings from the first of these shared extents on.
    """

    last_used: int
    freeable_bytes: int
    evict: Callable[[int], int]
    shared: Sequence[Extent] = ()
    give_up: Callable[[Collection[Extent]], None] = lambda extents: None


_LAST_USED = attrgetter("last_used")


class Pressure:
    """The victims of all caches over one pool. Guarded by the pool's lock, except `tick`.

    Attributes:
        tick: Returns the next point in time, for `Victim.last_used`; unique across threads.
    """

    def __init__(self) -> None:
        # Weak, so that a dropped cache is not asked any more.
        self._sources: list[WeakMethod[Callable[[], Iterable[Victim]]]] = []
        self.tick: Callable[[], int] = itertools.count(1).__next__

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
        evicted_bytes = 0
        while evicted_bytes < num_bytes:
            before_bytes = evicted_bytes
            victims = sorted(self._victims() if only is None else only(), key=_LAST_USED)
            for victim in victims:
                if victim.freeable_bytes and evicted_bytes < num_bytes:
                    evicted_bytes += victim.evict(num_bytes - evicted_bytes)
            # If nothing was evicted, the figures of `victims` are still valid.
            if evicted_bytes == before_bytes and not self._give_up_shared(victims):
                break
        return evicted_bytes

    def freeable_bytes(self, enough_bytes: int) -> int:
        """Count what `evict` could retire, up to `enough_bytes`."""
        own_bytes = 0
        shared: list[Victim] = []
        for victim in self._victims():
            own_bytes += victim.freeable_bytes
            if own_bytes >= enough_bytes:
                return own_bytes
            if victim.shared:
                shared.append(victim)
        return own_bytes + sum(extent.num_bytes for extent in self._idle(shared))

    def give_up(self, extents: Collection[Extent]) -> bool:
        """Have victims give up `extents`, which a live row needs alone; returns whether one did."""
        found = False
        for victim in list(self._victims()):
            if any(extent in extents for extent in victim.shared):
                victim.give_up(extents)
                found = True
        return found

    def _victims(self) -> Iterator[Victim]:
        for source in self._sources:
            victims = source()
            if victims is not None:
                yield from victims()

    def _give_up_shared(self, victims: Sequence[Victim]) -> bool:
        """Have one victim give up extents shared with victims only; return whether one did."""
        sharing = [each for each in victims if each.shared]
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
