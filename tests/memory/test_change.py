"""Changes replace extents at addresses in use: all of them or none, and after their fence.

Each extent is filled with its own number, so that the contents of a row name its extents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from helpers.pools import PAGE, MakePool

from vmkv import ExtentPool, HostBackend, InternalError, OutOfPagesError
from vmkv.core.backend import Access, Op, UnmapOp
from vmkv.core.memory import Change, Extent, PageMapping, PageTable, RowChange, check_pool
from vmkv.errors import DriverError
from vmkv.testing import FaultInjectingBackend, read_bytes, write_bytes


class Exchange(NamedTuple):
    """In `row` of `table`: `new` for `old`, which starts at `first_page`; read-only ones first."""

    table: PageTable
    row: int
    first_page: int
    old: Sequence[PageMapping]
    new: Sequence[tuple[Extent, Access]]


def exchange(pool: ExtentPool, exchanges: Sequence[Exchange]) -> None:
    """Carry out exchanges as one change, whose fresh extents exist already."""
    rows, fresh = [], []
    for each in exchanges:
        again = [
            PageMapping(0, extent, access) for extent, access in each.new if access is Access.READ
        ]
        own = [extent for extent, access in each.new if access is Access.READ_WRITE]
        classes = [extent.size_class for extent in own]
        fresh += own
        rows.append(
            RowChange(each.table, each.row, each.first_page, classes, again=again, old=each.old)
        )

    def acquire(_: Sequence[int]) -> list[Extent]:
        pool.own(fresh)
        return fresh

    with Change(pool, rows, acquire=acquire) as made:
        made.map(stream=0)


def _map(table: PageTable, row: int, extents: Sequence[Extent], access: Access) -> None:
    if not extents:
        return
    table.map(row, table.rows[row].end_page, extents, access)


def _table(pool: ExtentPool, *rows: Sequence[int], row_pages: int = 16) -> PageTable:
    """Rows of fresh extents of these classes; page p of row r is filled with 16 r + p + 1."""
    table = PageTable(pool, len(rows), row_pages)
    for row, classes in enumerate(rows):
        extents = pool.acquire(classes)
        _map(table, row, extents, Access.READ_WRITE)
        pool.disown(extents)
        for page in range(table.rows[row].end_page):
            value = bytes([16 * row + page + 1])
            write_bytes(pool.backend, table.page_address(row, page), value * PAGE)
    return table


def _reads(table: PageTable, row: int) -> list[int]:
    """The number that each mapped page of a row holds."""
    pages = table.rows[row]
    backend = table.pool.backend
    found = []
    for page in range(pages.first_page, pages.end_page):
        data = read_bytes(backend, table.page_address(row, page), PAGE)
        assert 1 == len(set(data))
        found.append(data[0])
    return found


def _mappings(
    table: PageTable, row: int, start: int = 0, end: int | None = None
) -> list[PageMapping]:
    return list(table.rows[row].mappings)[start:end]


def _read_only(mappings: Sequence[PageMapping]) -> list[tuple[Extent, Access]]:
    return [(mapping.extent, Access.READ) for mapping in mappings]


def test_exchange_puts_other_extents_behind_the_same_addresses(pool: ExtentPool) -> None:
    """The exchanged extents are in the middle of a run; their neighbours stay."""
    table = _table(pool, [0, 1, 0], [0, 0, 1])
    old, new = _mappings(table, 0, 1, 2), _mappings(table, 1, 0, 2)
    exchange(pool, [Exchange(table, 0, 1, old, _read_only(new))])
    check_pool(pool)
    assert ([1, 17, 18, 4], [17, 18, 19, 20]) == (_reads(table, 0), _reads(table, 1))
    accesses = [mapping.access for mapping in table.rows[0].mappings]
    assert [Access.READ_WRITE, Access.READ, Access.READ, Access.READ_WRITE] == accesses
    assert 2 * PAGE == pool.stats().free_bytes, "the replaced extent is free again"


def test_one_access_call_for_each_run_of_equal_access(pool: ExtentPool) -> None:
    """Read-only mappings come first, then the row's own."""
    table = _table(pool, [1, 1], [0, 0])
    fresh = pool.acquire([0, 0])
    new = _read_only(_mappings(table, 1)) + [(each, Access.READ_WRITE) for each in fresh]
    before = pool.backend.calls["mem_set_access"]
    exchange(pool, [Exchange(table, 0, 0, _mappings(table, 0), new)])
    assert 2 == pool.backend.calls["mem_set_access"] - before
    pool.disown(fresh)


def test_exchange_unmaps_after_the_fence(
    host: HostBackend, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Submitted work may still read the old extents, so the fence has passed at each unmap."""
    pool = make_pool(64)
    table = _table(pool, [0, 1], [0, 1])
    old, new = _mappings(table, 0), _mappings(table, 1)
    host.hold_fences()
    passed: list[bool] = []
    run = host.run_until_failure

    def watched(ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        if isinstance(ops[0], UnmapOp):
            passed.append(host.last_passed_fence > last_fence)
        return run(ops)

    last_fence = host.last_passed_fence
    monkeypatch.setattr(host, "run_until_failure", watched)
    exchange(pool, [Exchange(table, 0, 0, old, _read_only(new))])
    host.pass_fences()
    assert passed
    assert all(passed)
    assert [17, 18, 19] == _reads(table, 0)


def test_exchange_of_mappings_of_another_row_is_an_internal_error(pool: ExtentPool) -> None:
    table = _table(pool, [0, 0], [0])
    with pytest.raises(InternalError, match="row 0 does not hold"):
        table.note_mapped(0, [], _mappings(table, 1))


# ---- failing driver calls -----------------------------------------------------------------


def test_change_that_cannot_be_undone_is_an_internal_error(
    host: HostBackend, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that goes on failing leaves the row without memory, so the books are void."""
    faulty = FaultInjectingBackend(host)
    pool = make_pool(64, faulty)
    table = _table(pool, [0, 0], [0])
    run = faulty.run_until_failure
    is_broken = True

    def refuse_maps(ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        if is_broken and not isinstance(ops[0], UnmapOp):
            return 0, DriverError("mem_map", -1, "GONE")
        return run(ops)

    monkeypatch.setattr(faulty, "run_until_failure", refuse_maps)
    old = _mappings(table, 0, 1)
    with pytest.raises(InternalError, match="and so did its undoing"):
        exchange(pool, [Exchange(table, 0, 1, old, _read_only(_mappings(table, 1)))])
    # The books are void from here on, but mapped memory can be given back.
    is_broken = False
    table.note_mapped(0, [], old)
    assert [1] == _reads(table, 0)


# ---- blocks of a change -------------------------------------------------------------------


def test_refused_change_changes_nothing(make_pool: MakePool) -> None:
    """A refused change acquires no extent, and unpins the mappings that it would have read."""
    pool = make_pool(6)
    table = _table(pool, [1, 0], [0])
    read = _mappings(table, 0)
    rows = [RowChange(table, 0, 3, [0]), RowChange(table, 1, 1, [1])]
    with pytest.raises(OutOfPagesError), Change(pool, rows, reads=read):
        raise AssertionError("nothing was acquired")
    check_pool(pool)
    assert ([1, 2, 3], [17]) == (_reads(table, 0), _reads(table, 1))
    assert [0, 0] == [mapping.num_pins for mapping in read]
    assert 2 * PAGE == pool.available_bytes


def test_change_pins_the_mappings_that_it_reads(pool: ExtentPool) -> None:
    """Mappings whose extents are mapped again are pinned too."""
    table = _table(pool, [1, 0], [0], [])
    read, again = _mappings(table, 0), _mappings(table, 1)
    rows = [RowChange(table, 2, 0, [0], again=again, source=(table, 1))]
    with Change(pool, rows, reads=read) as made:
        assert [1, 1, 1] == [mapping.num_pins for mapping in read + again]
        for row in (0, 1):
            with pytest.raises(InternalError, match="is pinned"):
                table.retire_back(row, 0, pool.reclaimer.new_fence())
        made.map(0)
    assert [0, 0, 0] == [mapping.num_pins for mapping in read + again]
    assert [1, 1] == [table.rows[row].shared_end_page for row in (1, 2)]
    check_pool(pool)


@pytest.mark.parametrize("is_mapped", [False, True])
def test_block_that_fails_leaves_rows_as_they_were(pool: ExtentPool, is_mapped: bool) -> None:
    """Mappings that the block has made are removed."""
    table = _table(pool, [1, 0], [0], [])
    rows = [
        RowChange(table, 0, 3, [1]),
        RowChange(table, 2, 2, [0], again=_mappings(table, 1), source=(table, 1)),
    ]
    resident_bytes = pool.stats().resident_bytes
    with contextlib.suppress(KeyError), Change(pool, rows) as made:
        if is_mapped:
            made.map(0)
            made.fill(0)
        raise KeyError
    pool.reclaimer.wait()
    check_pool(pool)
    assert ([1, 2, 3], [17], []) == tuple(_reads(table, row) for row in range(3))
    assert resident_bytes == pool.stats().resident_bytes


def test_kept_bytes_are_copied_to_the_new_extents(pool: ExtentPool) -> None:
    """One change keeps bytes in two rows; the bytes behind them are undefined."""
    table = _table(pool, [0, 1, 0], [1])
    old = [_mappings(table, 0, 1, 2), _mappings(table, 1)]
    rows = [
        RowChange(table, 0, 1, [0, 0], old=old[0], kept_bytes=2 * PAGE),
        RowChange(table, 1, 0, [0], old=old[1], kept_bytes=PAGE),
    ]
    with Change(pool, rows, reads=[*old[0], *old[1]]) as made:
        made.map(0)
    check_pool(pool)
    assert ([1, 2, 3, 4], [17]) == (_reads(table, 0), _reads(table, 1))
    assert [mapping.extent for mapping in old[0]] != _mappings(table, 0, 1, 2)


@pytest.mark.parametrize("num_made", [0, 1, 2, 3])
def test_parts_are_made_one_by_one_and_undone_together(pool: ExtentPool, num_made: int) -> None:
    """A part may follow another one in its row."""
    table = _table(pool, [0], [])
    rows = [RowChange(table, 0, 1, [1]), RowChange(table, 0, 3, [0]), RowChange(table, 1, 4, [0])]
    with contextlib.suppress(KeyError), Change(pool, rows) as made:
        for at, _ in enumerate(made.one_by_one(0)):
            if at == num_made:
                raise KeyError
            assert at + 1 == sum(len(pages.mappings) for pages in table.rows) - 1
        raise KeyError
    pool.reclaimer.wait()
    check_pool(pool)
    assert ([1], []) == (_reads(table, 0), _reads(table, 1))
