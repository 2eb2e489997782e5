"""Who gives memory back when it is short, and in which order.

A *victim* is memory that no live sequence needs: a parked row, with the prefix it may hold.
Every cache over a pool names its victims, so that two models on one device borrow from each
other: the one that idles gives way. The order is a policy, an object that a user can replace.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakMethod

from .extent import Extent


class Victim(NamedTuple):
    """Memory that could be given back.

    Its facts are those of the moment it was named at; `evict` looks again, since those before it
    may have changed what there is to give.

    Attributes:
        last_used: When it was last used; larger is later. Counts over all caches of a pool.
        freeable_bytes: What retiring all of it would free: extents that nobody shares.
        num_hits: How often a new sequence has started from it.
        num_tokens: Tokens of a prefix that it holds for others to find; 0 for none.
        evict: Retire its last extents until so many bytes have been retired; returns how many,
            0 where nothing is left. What is kept stays usable.
        shared: Extents that it could give up, and that others map as well.
        give_up: Retire its mappings from the first of these extents on, which others still map.
    """

    last_used: int
    freeable_bytes: int
    num_hits: int
    num_tokens: int
    evict: Callable[[int], int]
    shared: Sequence[Extent] = ()
    give_up: Callable[[Collection[Extent]], None] = lambda extents: None


class EvictionPolicy(Protocol):
    """In which order victims go. Pure: it is given the victims and returns them sorted."""

    def order(self, victims: Sequence[Victim]) -> Iterable[Victim]:
        """The victims, the first to go first. Those left out are never taken."""


class LeastRecentlyUsed:
    """The default: what was used longest ago goes first, whether it holds a prefix or not."""

    def order(self, victims: Sequence[Victim]) -> Iterable[Victim]:
        """See `EvictionPolicy`."""
        return sorted(victims, key=lambda victim: victim.last_used)


class Pressure:
    """The victims of all caches over one pool. Guarded by the pool's lock, but for `tick`.

    Args:
        policy: In which order they go.
    """

    def __init__(self, policy: EvictionPolicy | None = None):
        self.policy: EvictionPolicy = LeastRecentlyUsed() if policy is None else policy
        # Weak: a cache that nobody holds any more has nothing to say.
        self._sources: list[WeakMethod[Callable[[], Iterable[Victim]]]] = []
        self._clock = itertools.count(1)

    def tick(self) -> int:
        """The next point in time, for `Victim.last_used`. Threads get different ones."""
        return next(self._clock)

    def add_source(self, victims: Callable[[], Iterable[Victim]]) -> None:
        """Ask this method for victims from now on, as long as its object lives."""
        self._sources.append(WeakMethod(victims))

    def remove_source(self, victims: Callable[[], Iterable[Victim]]) -> None:
        """Ask it no more. Idempotent."""
        self._sources = [each for each in self._sources if each() not in (victims, None)]

    def is_of(self, victims: Callable[[], Iterable[Victim]]) -> bool:
        """Whether this method is the only one asked for victims."""
        return {each() for each in self._sources} <= {victims, None}

    def evict(self, num_bytes: int, only: Callable[[], Iterable[Victim]] | None = None) -> int:
        """Retire victims, of one source `only` or of all, until `num_bytes` have been retired.

        They are looked at anew until nobody has anything to give: what somebody gives up may be
        all that kept another from giving.

        Returns the bytes retired. They are free once their fences have passed.
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
            # With nothing evicted since, the victims are what was said of them.
            if evicted_bytes == before_bytes and not self._give_up_shared(victims):
                break
        return evicted_bytes

    def freeable_bytes(self, enough_bytes: int) -> int:
        """What `evict` could retire, counted until it is enough. Cost: proportional to that."""
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
        """Have victims give up `extents`, which a live row wants for itself.

        Returns whether one did.
        """
        found = False
        for victim in [each for source in self._sources for each in (source() or list)()]:
            if any(extent in extents for extent in victim.shared):
                victim.give_up(extents)
                found = True
        return found

    def _give_up_shared(self, victims: Sequence[Victim]) -> bool:
        """Let one victim give up what it shares with other victims only; the others have it still.

        The last one that holds it can then be evicted by extents. Returns whether there was one.
        """
        sharing = list(self.policy.order([each for each in victims if each.shared]))
        idle = self._idle(sharing)
        for victim in sharing:
            if not idle.isdisjoint(victim.shared):
                victim.give_up(idle)
                return True
        return False

    @staticmethod
    def _idle(sharing: Iterable[Victim]) -> set[Extent]:
        """What victims share with nobody else."""
        num_mappings = Counter(extent for each in sharing for extent in each.shared)
        return {
            extent
            for extent, count in num_mappings.items()
            if count == extent.num_live_mappings and not extent.num_owners
        }
