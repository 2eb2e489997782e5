"""Forks: a second row that begins as another one does, without holding it twice.

    source   | extent | extent | extent | extent with the tail |
                 |        |        |          : copied, as far as it is used
    fork     | extent | extent | extent | fresh ones           |

Whole extents are mapped a second time, read-only; the tail, which both will write, is copied.
Both rows stay contiguous, at addresses of their own, and either may end first. The same is done
for a prefix that a parked row still holds, and between two caches over one pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..backend import CopyOp
from ..errors import ConfigError
from ..memory import Mapping, RowChange, change, size_classes
from .layer_group import LayerGroup
from .row_space import LiveRow, RowSpace


def fork(space: RowSpace, source: LiveRow, num_tokens: int, row: int | None = None) -> int:
    """A row of `space`, or the one named, that begins as `source` does; for `Sequence.fork`."""
    space.check_open()
    source.check_open()
    if not 0 <= num_tokens <= source.num_tokens:
        raise ConfigError(f"{source} cannot be forked at {num_tokens} tokens")
    space.note_stream()
    with space.pool.lock:
        source.cache.check_keeps(source.row, num_tokens, "fork at")
        return fork_row(source.cache, space, source.row, num_tokens, source.tenant, row)


def fork_row(
    origin: RowSpace,
    space: RowSpace,
    source_row: int,
    num_tokens: int,
    tenant: str | None,
    row: int | None = None,
) -> int:
    """Take a row, and have it begin with the first `num_tokens` tokens of another. Locked.

    Args:
        origin: Where the row forked from is.
        space: Where the row forked to is: over the same pool, with the same groups.
        source_row: The row forked from, live or parked.
        num_tokens: How many tokens.
        tenant: For whom.
        row: The row forked to; by default one that is empty, or parked longest unused.

    Returns:
        The row, which is live now.

    Raises:
        ConfigError: The spaces do not lay out tokens alike; or `row` is not free.
        OutOfAddressSpaceError: Every row is live.
        OutOfPagesError, DriverError: No row is taken.

    Cost: a map and access call per extent, a copy of the tail on the current stream; where the
        pool protects what is shared, a wait for the device as well.
    """
    if row is None:
        row = space.rows.choose_unneeded(but=source_row if origin is space else None)
    space.take_emptied(row)
    try:
        if num_tokens:
            space.pool.backend.join_streams(space.current_stream())
            try:
                _fill(origin, space, (source_row, row), num_tokens, tenant)
            finally:
                # Used now, behind what was submitted: also a fork that fails may have read it.
                origin.rows.touch(source_row, space.pool.pressure.tick())
    except BaseException:
        space.leave_emptied(row)
        raise
    if origin is space:
        space.prefixes.begin(row, source_row, num_tokens, tenant)
    else:
        known = origin.prefixes.token_ids(source_row)[:num_tokens]
        space.prefixes.record(row, known, tenant)
    return row


def _fill(
    origin: RowSpace, space: RowSpace, rows: tuple[int, int], num_tokens: int, tenant: object
) -> None:
    _check_alike(origin, space, num_tokens)
    pool, stream = space.pool, space.current_stream()
    plan = _plan(origin, space, rows, num_tokens, tenant)
    # Nobody may take away what is about to be mapped again or copied, even if room must be made
    # and the source is a parked row, or one that is moving.
    with change(pool, plan.changes, reads=plan.reads) as made:
        made.map(stream)
        made.fill(stream, plan.copies)
    for theirs, mine in zip(origin.groups, space.groups, strict=True):
        mine.begin_row(rows[1], theirs.first_written(rows[0]))
    sharing = space.sharing
    sharing.num_forks += 1
    sharing.aliased_bytes += plan.aliased_bytes
    for copy in plan.copies:
        sharing.copied_bytes += copy.num_bytes


def _check_alike(origin: RowSpace, space: RowSpace, num_tokens: int) -> None:
    if origin.pool is not space.pool:
        raise ConfigError("only caches over the same pool can share memory")
    if origin is not space and [each.layout for each in origin.groups] != [
        each.layout for each in space.groups
    ]:
        raise ConfigError("the caches lay their layers out differently, so neither can hold both")
    if num_tokens > space.max_tokens:
        raise ConfigError(
            f"{num_tokens} tokens do not fit: rows of the fork's cache end at "
            f"max_tokens={space.max_tokens}"
        )


# ---- planning -----------------------------------------------------------------------------


class _Plan(NamedTuple):
    """What a fork does.

    Attributes:
        changes: What the fork's row holds then, in each group.
        aliased_bytes: What of that is mapped again.
        reads: The mappings of the source that are copied from.
        copies: The copies of tails, where there are any.
    """

    changes: Sequence[RowChange]
    aliased_bytes: int
    reads: Sequence[Mapping]
    copies: Sequence[CopyOp]


def pages_to_fork(space: RowSpace, row: int, num_tokens: int) -> int:
    """What a fork of `row` at `num_tokens` takes from the pool. Changes nothing."""
    plan = _plan(space, space, (row, -1), num_tokens, None)
    return sum(1 << size_class for each in plan.changes for size_class in each.classes)


def _plan(
    origin: RowSpace, space: RowSpace, rows: tuple[int, int], num_tokens: int, tenant: object
) -> _Plan:
    changes: list[RowChange] = []
    reads: list[Mapping] = []
    copies: list[CopyOp] = []
    aliased_bytes = 0
    source_row, target_row = rows
    for source, target in zip(origin.groups, space.groups, strict=True):
        geometry = target.geometry
        first_needed = source.first_kept_page(source_row, num_tokens, keeps_past=space.keeps_past)
        aliased = _aliased(space, source, source_row, first_needed, num_tokens)
        first_page = aliased[0].first_page if aliased else first_needed
        fresh_page = aliased[-1].end_page if aliased else first_needed
        aliased_bytes += (fresh_page - first_page) * geometry.page_bytes
        end_tokens = min(num_tokens + space.overread_tokens, geometry.row_tokens)
        num_fresh_pages = geometry.pages_for(end_tokens) - fresh_page
        fresh = size_classes(num_fresh_pages, target.largest_class) if num_fresh_pages > 0 else ()
        its_source = source.table, source_row
        changes.append(
            RowChange(
                target.table, target_row, first_page, tuple(fresh), tenant, aliased, its_source
            )
        )
        copied_bytes = num_tokens * geometry.token_bytes - fresh_page * geometry.page_bytes
        if copied_bytes > 0:
            reads += source.table.overlapping(
                source_row, fresh_page, geometry.pages_for(num_tokens)
            )
            start = source.table.page_address(source_row, fresh_page)
            copies.append(CopyOp(changes[-1].address(fresh_page), start, copied_bytes))
    return _Plan(changes, aliased_bytes, reads, copies)


def _aliased(
    space: RowSpace, source: LayerGroup, row: int, first_page: int, num_tokens: int
) -> list[Mapping]:
    """What of `row`, from `first_page` on, a fork at `num_tokens` maps again."""
    end_page = source.geometry.whole_pages_below(num_tokens)
    aliased = source.table.overlapping(row, first_page, end_page)
    if aliased and aliased[-1].end_page > end_page:
        aliased.pop()
    # From the end: what is small there is cheaper to copy, together with the tail.
    while aliased and not space.cost_model.prefers_alias_in_fork(aliased[-1].extent.num_bytes):
        aliased.pop()
    return aliased
