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
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..backend import Access, CopyOp, Op
from ..errors import ConfigError, DriverError
from ..memory import Extent, ExtentPool, Mapping, Placement, pinned, size_classes
from ..units import Address
from .access import protect
from .cost import CostModel
from .layer_group import LayerGroup

if TYPE_CHECKING:
    from .rowed import RowedCache


@dataclass(frozen=True)
class GroupFork:
    """What a fork does in one group.

    Attributes:
        source: The group forked from.
        target: The group forked to; the same, or one of the same geometry.
        source_row: The row forked from.
        target_row: The row forked to, which has nothing mapped.
        aliased: The mappings of the source that are mapped again.
        first_page: Where the target's run begins.
        first_fresh_page: Where the aliased ones end, and fresh extents begin.
        end_page: Where those end.
        num_tokens: What the fork begins with.
    """

    source: LayerGroup
    target: LayerGroup
    source_row: int
    target_row: int
    aliased: Sequence[Mapping]
    first_page: int
    first_fresh_page: int
    end_page: int
    num_tokens: int

    @property
    def classes(self) -> tuple[int, ...]:
        """The fresh extents to acquire."""
        return tuple(size_classes(self.num_fresh_pages, self.target.largest_class))

    @property
    def num_fresh_pages(self) -> int:
        """The pages to acquire."""
        return self.end_page - self.first_fresh_page

    @property
    def needed(self) -> list[Mapping]:
        """The mappings of the source that are mapped again, or copied from."""
        end_page = self.source.geometry.pages_for(self.num_tokens)
        return self.source.table.overlapping(self.source_row, self.first_page, end_page)

    @property
    def copied_bytes(self) -> int:
        """What the copy moves."""
        start_bytes = self.first_fresh_page * self.target.geometry.page_bytes
        return max(0, self.num_tokens * self.target.geometry.token_bytes - start_bytes)


def plan_fork(
    source: LayerGroup,
    target: LayerGroup,
    rows: tuple[int, int],
    num_tokens: int,
    overread_tokens: int,
    cost: CostModel,
    *,
    keeps_past: bool = False,
) -> GroupFork:
    """What forking the first `num_tokens` tokens of a row takes. Changes nothing.

    Args:
        source: The group forked from.
        target: The group forked to.
        rows: The rows forked from and to.
        num_tokens: How many tokens the fork begins with.
        overread_tokens: How many past them must be mapped as well.
        cost: Decides which extents are worth mapping again.
        keeps_past: Whether the fork keeps what has left its windows, where that is still there.
    """
    geometry = target.geometry
    source_row, target_row = rows
    first_needed = source.first_kept_page(source_row, num_tokens, keeps_past=keeps_past)
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
    end_tokens = min(num_tokens + overread_tokens, geometry.row_tokens)
    first_fresh_page = aliased[-1].end_page if aliased else first_needed
    return GroupFork(
        source,
        target,
        source_row,
        target_row,
        aliased,
        first_page,
        first_fresh_page,
        max(geometry.pages_for(end_tokens), first_fresh_page),
        num_tokens,
    )


def plan_forks(
    origin: RowedCache, cache: RowedCache, rows: tuple[int, int], num_tokens: int
) -> list[GroupFork]:
    """`plan_fork` for each group of a row of `origin`, and one of `cache`."""
    return [
        plan_fork(
            theirs,
            mine,
            rows,
            num_tokens,
            cache.overread_tokens,
            cache.cost_model,
            keeps_past=cache.keeps_past,
        )
        for theirs, mine in zip(origin.groups, cache.groups, strict=True)
    ]


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
    forks = plan_forks(origin, cache, rows, num_tokens)
    # Nobody may take away what is about to be mapped again or copied, even if room must be made
    # and the source is a parked row, or one that is moving.
    with pinned(pool, (mapping for each in forks for mapping in each.needed)):
        if pool.protects_shared:
            protect(pool, ((each.source.table, each.source_row, each.aliased) for each in forks))
        fresh = pool.acquire_or_evict([each for fork in forks for each in fork.classes])
        try:
            for group in cache.groups:
                group.table.wait_until_empty(rows[1])
            _map(pool, forks, fresh)
            _fill(cache, forks, fresh, tenant, stream)
        finally:
            pool.disown(fresh)
    for each in forks:
        if each.aliased:
            for group, row in ((each.source, each.source_row), (each.target, each.target_row)):
                pages = group.table.rows[row]
                pages.shared_end_page = max(pages.shared_end_page, each.first_fresh_page)
        each.target.begin_row(each.target_row, each.source.first_written(each.source_row))
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


def _map(pool: ExtentPool, forks: Sequence[GroupFork], fresh: Sequence[Extent]) -> None:
    """Map the aliased and the fresh extents of all groups in one batch, and book them."""
    supply = iter(fresh)
    placements = []
    ops: list[Op] = []
    for each in forks:
        parts = (
            (each.first_page, [mapping.extent for mapping in each.aliased], Access.READ),
            (each.first_fresh_page, [next(supply) for _ in each.classes], Access.READ_WRITE),
        )
        for page, extents, access in parts:
            if extents:
                placement = Placement(each.target_row, page, extents)
                ops += each.target.table.ops_to_map(placement, access)
                placements.append((each.target.table, placement, access))
    pool.backend.execute(ops)
    for table, placement, access in placements:
        table.note_mapped(placement, access)


def _fill(
    cache: RowedCache,
    forks: Sequence[GroupFork],
    fresh: Sequence[Extent],
    tenant: object,
    stream: int,
) -> None:
    """Copy the tails, in the order of the stream. After a failure the row gives all back."""
    pool = cache.pool
    supply = iter(fresh)
    copies = []
    try:
        for each in forks:
            page = each.first_fresh_page
            target = each.target.table.page_address(each.target_row, page)
            source = each.source.table.page_address(each.source_row, page)
            pool.prepare([next(supply) for _ in each.classes], target, tenant, stream)
            if each.copied_bytes:
                copies.append(CopyOp(target, Address(source), each.copied_bytes))
        pool.backend.copy_many(copies, stream)
    except DriverError:
        fence = pool.reclaimer.new_fence()
        for each in forks:
            each.target.table.retire_back(each.target_row, 0, fence)
        raise
