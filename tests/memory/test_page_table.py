"""The page table: placement of extents, one run of mappings per row, and closing."""

from __future__ import annotations

import pytest
from helpers.pools import PAGE, MakePool

from vmkv import ExtentPool, HostBackend, InternalError, OutOfAddressSpaceError
from vmkv.core.backend import Access, AccessOp, MapOp
from vmkv.core.memory import PageTable
from vmkv.core.memory.page_table import placed


def _map(table: PageTable, row: int, *classes: int) -> None:
    """Map fresh extents of these classes at the end of `row`."""
    extents = table.pool.acquire(classes)
    table.map(row, table.rows[row].end_page, extents)
    table.pool.disown(extents)


def test_table_reserves_all_rows_at_once(pool: ExtentPool) -> None:
    """There is one reservation with the rows side by side, and no memory yet."""
    table = PageTable(pool, num_rows=3, row_pages=4)
    usage = pool.backend.usage()
    assert (1, 12 * PAGE, 0) == (usage.num_reservations, usage.reserved_bytes, usage.num_handles)
    assert table.address + 2 * 4 * PAGE + 3 * PAGE == table.page_address(2, 3)


def test_table_larger_than_the_address_space_is_refused(pool: ExtentPool) -> None:
    """No table is left behind."""
    with pytest.raises(OutOfAddressSpaceError) as caught:
        PageTable(pool, num_rows=1 << 20, row_pages=1 << 20)
    assert PAGE << 40 == caught.value.needed_bytes
    assert [] == pool.page_tables


def test_placement_is_one_access_for_its_run(pool: ExtentPool) -> None:
    """Extents of mixed sizes lie one after the other, and one call grants access to all."""
    table = PageTable(pool, num_rows=2, row_pages=8)
    extents = pool.acquire([1, 0, 1])
    ops = table.ops_to_map(1, placed(2, extents, Access.READ))
    start = table.page_address(1, 2)
    assert [
        MapOp(start, 2 * PAGE, extents[0].handle),
        MapOp(start + 2 * PAGE, PAGE, extents[1].handle),
        MapOp(start + 3 * PAGE, 2 * PAGE, extents[2].handle),
        AccessOp(start, 5 * PAGE, Access.READ),
    ] == ops
    pool.disown(extents)


@pytest.mark.parametrize("classes", [(), (0,), (1, 0, 2, 0)])
@pytest.mark.parametrize("num_retired", [0, 1, 2])
def test_overlapping_finds_every_mapping_with_a_page_in_the_range(
    pool: ExtentPool, classes: tuple[int, ...], num_retired: int
) -> None:
    """The mappings come in order, wherever the range and the run begin and end."""
    table = PageTable(pool, num_rows=1, row_pages=12)
    if classes:
        _map(table, 0, *classes)
    gone = list(table.rows[0].mappings)[:num_retired]
    if gone:
        table.retire_front(0, gone[-1].end_page, pool.reclaimer.new_fence())
    for first_page in range(12):
        for end_page in range(first_page + 1, 13):
            wanted = [
                mapping
                for mapping in table.rows[0].mappings
                if set(range(mapping.first_page, mapping.end_page)) & {*range(first_page, end_page)}
            ]
            assert wanted == table.overlapping(0, first_page, end_page)


def test_row_grows_at_its_end_only(pool: ExtentPool) -> None:
    """A placement that would leave a hole is an internal error."""
    table = PageTable(pool, num_rows=1, row_pages=8)
    _map(table, 0, 1)
    extents = pool.acquire([0])
    with pytest.raises(InternalError, match="ends at page 2, not where"):
        table.note_mapped(0, placed(3, extents))
    pool.disown(extents)


def test_close_waits_for_the_device(host: HostBackend, make_pool: MakePool) -> None:
    """The table's own fence is waited for; the device stays busy."""
    pool = make_pool(64)
    table = PageTable(pool, num_rows=1, row_pages=8)
    _map(table, 0, 2)
    host.hold_fences()
    passed = host.last_passed_fence
    table.close(lambda: False)
    assert 0 == host.usage().num_mappings
    assert host.last_passed_fence > passed
    assert host.record_fence().has_passed() is False  # The device is still busy.
    host.pass_fences()
