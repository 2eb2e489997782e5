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
from typing import TYPE_CHECKING, NamedTuple

from ..backend import CopyOp
from ..errors import ConfigError
from ..memory import Mapping, RowChange, change, size_classes
from .layer_group import LayerGroup

if TYPE_CHECKING:
    from .rowed import RowedCache


class GroupFork(NamedTuple):
    """What a fork does in one group.

    Attributes:
        part: What the fork's row holds then.
        reads: The mappings of the source that are mapped again, or copied from.
        copies: The copy of the tail, if there is one.
    """

    part: RowChange
    reads: Sequence[Mapping]
    copies: Sequence[CopyOp]


def plan_fork(
    cache: RowedCache,
    source: LayerGroup,
    target: LayerGroup,
    rows: tuple[int, int],
    num_tokens: int,
    tenant: object,
) -> GroupFork:
    """What forking the first `num_tokens` tokens of a row takes. Changes nothing.

    Args:
        cache: The cache forked to: says what is worth mapping again, and what is kept.
        source: The group forked from.
        target: The group forked to; the same, or one of the same layout.
        rows: The rows forked from and to; the latter has nothing mapped.
        num_tokens: How many tokens the fork begins with.
        tenant: For whom.
    """
    overread_tokens, cost = cache.overread_tokens, cache.cost_model
    geometry = target.geometry
    source_row, target_row = rows
    first_needed = source.first_kept_page(source_row, num_tokens, keeps_past=cache.keeps_past)
    full_end_page = geometry.whole_pages_below(num_tokens)
    aliased = [
        mapping
        for mapping in source.table.overlapping(source_row, first_needed, full_end_page)
        if mapping.end_page <= full_end_page
    ]
    # From the end: what is small there is cheaper to copy, together with the tail.
    while aliased and not cost.prefers_alias_in_fork(aliased[-1].extent.num_bytes):
        aliased.pop()
    first_page = aliased[0].first_page if aliased else first_needed
    fresh_page = aliased[-1].end_page if aliased else first_needed
    end_tokens = min(num_tokens + overread_tokens, geometry.row_tokens)
    num_fresh_pages = max(0, geometry.pages_for(end_tokens) - fresh_page)
    part = RowChange(
        target.table,
        target_row,
        first_page,
        tuple(size_classes(num_fresh_pages, target.largest_class)),
        tenant,
        again=aliased,
        source=(source.table, source_row),
    )
    copied_bytes = num_tokens * geometry.token_bytes - fresh_page * geometry.page_bytes
    start = source.table.page_address(source_row, fresh_page)
    return GroupFork(
        part,
        source.table.overlapping(source_row, first_page, geometry.pages_for(num_tokens)),
        [CopyOp(part.address(fresh_page), start, copied_bytes)] if copied_bytes > 0 else [],
    )


def plan_forks(
    origin: RowedCache,
    cache: RowedCache,
    rows: tuple[int, int],
    num_tokens: int,
    tenant: object = None,
) -> list[GroupFork]:
    """`plan_fork` for each group of `origin`, and the one of `cache` that answers to it."""
    pairs = zip(origin.groups, cache.groups, strict=True)
    return [plan_fork(cache, *pair, rows, num_tokens, tenant) for pair in pairs]


def fork_row(
    origin: RowedCache,
    cache: RowedCache,
    rows: tuple[int, int],
    num_tokens: int,
    tenant: object,
) -> list[GroupFork]:
    """Have a row without memory begin with the first `num_tokens` tokens of another.

    Args:
        origin: The cache of the row forked from.
        cache: The cache of the row forked to, over the same pool, with the same groups.
        rows: The rows forked from and to.
        num_tokens: At least one.
        tenant: For whom.

    Returns:
        What was done.

    Raises:
        ConfigError: The caches do not lay out tokens alike.
        OutOfPagesError, DriverError: The row has no memory, as before.

    Cost: a map and access call per extent, a copy of the tail on the current stream; where the
        pool protects what is shared, a wait for the device as well.
    """
    _check_alike(origin, cache, num_tokens)
    pool, stream = cache.pool, cache.current_stream()
    forks = plan_forks(origin, cache, rows, num_tokens, tenant)
    # Nobody may take away what is about to be mapped again or copied, even if room must be made
    # and the source is a parked row, or one that is moving.
    reads = [mapping for each in forks for mapping in each.reads]
    with change(pool, [each.part for each in forks], reads=reads) as made:
        made.map(stream)
        made.fill(stream, [copy for each in forks for copy in each.copies])
    for theirs, mine in zip(origin.groups, cache.groups, strict=True):
        mine.begin_row(rows[1], theirs.first_written(rows[0]))
    return forks


def _check_alike(origin: RowedCache, cache: RowedCache, num_tokens: int) -> None:
    if origin.pool is not cache.pool:
        raise ConfigError("only caches over the same pool can share memory")
    if origin is not cache and [each.layout for each in origin.groups] != [
        each.layout for each in cache.groups
    ]:
        raise ConfigError("the caches lay their layers out differently, so neither can hold both")
    if num_tokens > cache.max_tokens:
        raise ConfigError(
            f"{num_tokens} tokens do not fit: rows of the fork's cache end at "
            f"max_tokens={cache.max_tokens}"
        )
