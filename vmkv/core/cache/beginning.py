"""A new sequence begins with tokens already in the cache: its row is adopted, or forked from.

A parked row that ends near the known part of the prompt is adopted without a driver call. Otherwise
the new sequence is a fork of a row that holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import islice
from typing import Any

from ...errors import CapacityError
from .forking import fork_row
from .prefix import Where
from .row_space import RowSpace

# ---- adopting ------------------------------------------------------------------------------------

#: How many of the least recently used parked rows are considered; a look at all of them for each
#: new sequence would cost time proportional to their extents.
_LOOKED_AT = 4
#: Memory is short if less than this part of the budget would be left for running sequences to
#: grow by.
_KEPT_DIVISOR = 64


def choose_row(space: RowSpace, num_tokens: int) -> int:
    """Choose, without taking it, the row for about `num_tokens` new tokens. Locked."""
    wanted = space.prefixes.recorded - _giving_way(space, num_tokens)
    return space.rows.choose(num_tokens, space.adoptable_tokens, wanted)


def _giving_way(space: RowSpace, num_tokens: int) -> Set[int]:
    """Parked rows that eviction would take first for a sequence; none if caches share the pool."""
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
    for row in islice(space.rows.parked, _LOOKED_AT):
        num_kept = space.resident_tokens(row)
        # A row much longer than needed would keep memory from others; shared extents would have to
        # be copied before they are written.
        if 0 < num_kept <= 2 * num_tokens and space.adoptable_tokens(row) == num_kept:
            found.add(row)
        missing_bytes -= sum(group.resident_bytes(row) for group in space.groups)
        if missing_bytes <= 0:
            break
    return found


# ---- beginning -----------------------------------------------------------------------------------

#: How many rows that hold a prompt's beginning are compared, latest first, because a row cut at the
#: prompt's end is among these. To compare all would make hits costly.
_HOLDERS_LOOKED_AT = 4


def begin_with_prefix(space: RowSpace, prompt: Any, tenant: str | None) -> tuple[int, int] | None:
    """Take a row with the longest known beginning of `prompt`, without its last token. Locked.

    Returns the row, live now, and its token count; None without a match.
    """
    prefixes = space.prefixes
    for match in prefixes.matches(prompt, tenant, max(0, len(prompt) - 1)):
        num_tokens = match.num_tokens
        parked = _holders(space, match.rows(Where.PARKED), num_tokens)
        # Adopting a row loses its later tokens, so there should be few of them.
        whole = [
            row
            for row in parked
            if prefixes.num_recorded(row) <= 2 * num_tokens
            and _can_extend(space, row, num_tokens)
            and space.can_begin(row, num_tokens)
        ]
        if whole:
            row = min(whole, key=prefixes.num_recorded)
            space.take(row, num_tokens, tenant)
        else:
            holders = parked + _holders(space, match.rows(Where.LIVE), num_tokens)
            if not holders:
                continue
            holder = holders[0]
            if len(holders) > 1:
                holder = max(holders, key=lambda row: _whole_bytes(space, row, num_tokens))
            try:
                row = fork_row(space, space, holder, num_tokens, tenant)
            except CapacityError:
                # No second row, or no memory for the tail: adopt a row as it is. Look again,
                # because the attempt may have evicted parked rows.
                parked = _holders(space, match.rows(Where.PARKED), num_tokens)
                parked = [row for row in parked if space.can_begin(row, num_tokens)]
                if not parked:
                    break
                row = min(parked, key=prefixes.num_recorded)
                space.take(row, num_tokens, tenant)
        prefixes.num_hits += 1
        prefixes.num_hit_tokens += num_tokens
        return row, num_tokens
    prefixes.num_misses += 1
    return None


def _holders(space: RowSpace, rows: Iterator[int], num_tokens: int) -> list[int]:
    """First few of `rows` that hold `num_tokens` tokens; rows that lost some are marked."""
    found: list[int] = []
    lost: list[int] = []
    for row in rows:
        (found if space.keeps(row, num_tokens) else lost).append(row)
        if len(found) == _HOLDERS_LOOKED_AT:
            break
    for row in lost:
        space.prefixes.lose_short(row, max(each.shortest_kept(row) for each in space.groups))
    return found


def _can_extend(space: RowSpace, row: int, num_tokens: int) -> bool:
    """Whether `row` can be written from `num_tokens` on without a copy."""
    return not any(
        mapping.extent.is_shared
        for group in space.groups
        for mapping in group.table.overlapping(
            row,
            group.geometry.whole_pages_below(num_tokens),
            group.geometry.pages_for(num_tokens),
        )
    )


def _whole_bytes(space: RowSpace, row: int, num_tokens: int) -> int:
    """Bytes that a fork of `row` at `num_tokens` can share."""
    whole = (group.whole_mappings(row, 0, num_tokens) for group in space.groups)
    return sum(mapping.extent.num_bytes for mappings in whole for mapping in mappings)
