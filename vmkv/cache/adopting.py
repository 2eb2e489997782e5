"""Which row a sequence takes that begins with nothing: one whose memory can become its own.

Parked rows without a prefix are adopted as they are (see `rows.py`). Where memory is short, so are
those that would have to give way for the sequence anyhow: to unmap their extents, release them,
create others and map these is to pay the driver for what is in its place already.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from itertools import islice

from ..memory import LeastRecentlyUsed
from .row_space import RowSpace

#: Of the parked rows, so many may be taken for that: those unused for longest. To look at all, each
#: time a sequence begins, would cost as much as they hold.
_LOOKED_AT = 4
#: Memory is short where less than this part of the budget would be left, for those who run to grow:
#: what lies ready for them is no newcomer's.
_KEPT_DIVISOR = 64


def choose_row(space: RowSpace, num_tokens: int) -> int:
    """The row for a sequence of about `num_tokens` tokens that begins with nothing. Locked.

    It is not taken yet.

    Raises:
        OutOfAddressSpaceError: Every row is live.

    Cost: a look at each parked row, and at the extents of a few where memory is short.
    """
    wanted = space.prefixes.recorded - _giving_way(space, num_tokens)
    return space.rows.choose(num_tokens, space.adoptable_tokens, wanted)


def _giving_way(space: RowSpace, num_tokens: int) -> Set[int]:
    """The parked rows that eviction would take for a sequence of so many tokens, the first ones.

    None where caches share the pool: whose rows go first then, eviction says.
    """
    pool = space.pool
    end_tokens = num_tokens + space.overread_tokens
    missing_bytes = pool.budget_bytes // _KEPT_DIVISOR - pool.available_bytes
    for group in space.groups:
        geometry = group.geometry
        pages = geometry.pages_for(min(end_tokens, geometry.row_tokens))
        missing_bytes += pages * geometry.page_bytes
    if missing_bytes <= 0 or not pool.pressure.is_of(space.victims):
        return frozenset()
    found: set[int] = set()
    for row in _first_to_go(space):
        num_kept = space.resident_tokens(row)
        # What it does not need itself, others would have to wait for; what others map as well would
        # have to be copied before it is written.
        if 0 < num_kept <= 2 * num_tokens and space.adoptable_tokens(row) == num_kept:
            found.add(row)
        missing_bytes -= sum(group.resident_bytes(row) for group in space.groups)
        if missing_bytes <= 0:
            break
    return found


def _first_to_go(space: RowSpace) -> Iterable[int]:
    """The parked rows unused for longest, in the policy's order."""
    rows, policy = list(islice(space.rows.parked(), _LOOKED_AT)), space.pool.pressure.policy
    if isinstance(policy, LeastRecentlyUsed):
        return rows  # In that order they are, without a look at what they hold.
    victims = [space.victim(row) for row in rows]
    places = {id(victim): row for victim, row in zip(victims, rows, strict=True)}
    return [places[id(victim)] for victim in policy.order(victims)]
