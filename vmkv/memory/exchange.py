"""Putting other extents behind addresses that are in use: all of it, or none.

A mapped address cannot be mapped over, so what is there is retired, waited for, unmapped, and the
new mapped in its place. Where a driver call fails on the way, the old comes back: an exchange
never loses what a row held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..backend import Access, MapOp, Op
from ..errors import DriverError, InternalError
from .extent import Extent
from .page_table import Mapping, PageTable
from .pool import ExtentPool
from .reclaim import RetiredMapping


class Exchange(NamedTuple):
    """In `row` of `table`: `new` for the run of mappings `old`, which starts where `new` does.

    `new` covers as many pages as `old`, or fewer where `old` reaches to the end of the row's run,
    or any number where `old` is empty and the row's run ends at `first_page`.
    """

    table: PageTable
    row: int
    first_page: int
    old: Sequence[Mapping]
    new: Sequence[tuple[Extent, Access]]


def exchange(pool: ExtentPool, exchanges: Sequence[Exchange]) -> None:
    """Carry the exchanges out, all or none. The caller owns the new extents meanwhile.

    Raises:
        DriverError: Every row is as it was, at the same addresses.

    Cost: a map for each new extent, and an access change for each run of equal access. Where
        something is old, an unmap for each run of it, after a wait until the device is done with
        everything submitted so far.
    """
    old_extents = [mapping.extent for each in exchanges for mapping in each.old]
    pool.own(old_extents)
    try:
        _exchange(pool, exchanges)
    finally:
        pool.disown(old_extents)


def _exchange(pool: ExtentPool, exchanges: Sequence[Exchange]) -> None:
    retired = [each.table.retired(each.row, mapping) for each in exchanges for mapping in each.old]
    if retired:
        pool.reclaimer.retire(retired, pool.reclaimer.new_fence())
    try:
        for each in exchanges:
            _wait_for_what_is_in_the_way(pool, each)
        new = [_new_mappings(each) for each in exchanges]
        pool.backend.execute(
            [op for each, its in zip(exchanges, new, strict=True) for op in _ops(each, its)]
        )
    except DriverError as error:
        _restore(pool, exchanges, retired, error)
        raise
    for each, its in zip(exchanges, new, strict=True):
        each.table.splice(each.row, each.first_page, each.old, its)
        pool.note_mapped([mapping.extent for mapping in its])


def _wait_for_what_is_in_the_way(pool: ExtentPool, each: Exchange) -> None:
    end_page = each.first_page + sum(extent.num_pages for extent, _ in each.new)
    if each.old:
        end_page = max(end_page, each.old[-1].end_page)
    start = each.table.page_address(each.row, each.first_page)
    end = each.table.page_address(each.row, end_page)
    pool.reclaimer.wait_for_range(start, end)


def _new_mappings(each: Exchange) -> list[Mapping]:
    page = each.first_page
    mappings = []
    for extent, access in each.new:
        mappings.append(Mapping(page, extent, access))
        page = mappings[-1].end_page
    return mappings


def _ops(each: Exchange, mappings: Sequence[Mapping]) -> list[Op]:
    """Map them, then grant access, with one call for each run of equal access."""
    ops: list[Op] = [
        MapOp(
            each.table.page_address(each.row, mapping.first_page),
            mapping.extent.num_bytes,
            mapping.extent.handle,
        )
        for mapping in mappings
    ]
    for access in (Access.READ, Access.READ_WRITE):
        alike = [mapping for mapping in mappings if mapping.access is access]
        ops += each.table.ops_to_set_access(each.row, alike, access)
    return ops


def _restore(
    pool: ExtentPool,
    exchanges: Sequence[Exchange],
    retired: Sequence[RetiredMapping],
    error: DriverError,
) -> None:
    """Take back what is retired and still there; map again what is gone."""
    pending = iter(retired)
    ops: list[Op] = []
    again: list[Extent] = []
    for each in exchanges:
        lost = [mapping for mapping in each.old if not pool.reclaimer.reinstate(next(pending))]
        ops += _ops(each, lost)
        again += [mapping.extent for mapping in lost]
    try:
        pool.backend.execute(ops)
    except DriverError as second:
        raise InternalError(
            f"an exchange failed ({error}), and so did its undoing: {second}"
        ) from error
    pool.note_mapped(again)
