"""`check_pool` finds each invariant that a test breaks by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.pools import PAGE

from vmkv import ExtentPool, HostBackend, InternalError
from vmkv.core import _native
from vmkv.core._native import count_references
from vmkv.core.backend import Access, MemoryLocation
from vmkv.core.memory import PageMapping, PageTable, check_pool
from vmkv.core.memory.page_table import placed
from vmkv.units import Address


@pytest.fixture
def pool() -> Iterator[ExtentPool]:
    """A pool with a table of two rows, and extents that are mapped, free and retired."""
    backend = HostBackend(PAGE)
    pool = ExtentPool(backend, 64 * PAGE)
    table = PageTable(pool, num_rows=2, row_pages=8)
    for row in range(2):
        extents = pool.acquire([1, 0, 0])
        table.map(row, 0, extents)
        pool.disown(extents)
    pool.disown(pool.acquire([0, 2]))
    backend.hold_fences()
    table.retire_back(1, 3, pool.reclaimer.new_fence())
    check_pool(pool)
    yield pool
    # Addresses take their mappings with them, and the file its memory, whatever is broken.
    _native.host_free(table.address, table.reserved_bytes)
    backend.close()


def _mapping(pool: ExtentPool, row: int = 0, at: int = 0) -> PageMapping:
    return pool.page_tables[0].rows[row].mappings[at]


def _is_found(pool: ExtentPool, words: str) -> None:
    with pytest.raises(InternalError, match=words):
        check_pool(pool)


def test_i1_created_is_free_resident_and_retired(pool: ExtentPool) -> None:
    """The books count a page more than exists."""
    pool._shelf(MemoryLocation.DEVICE).created_bytes += PAGE
    _is_found(pool, r"I1.*the books say \d+, the truth is \d+")


def test_i4_unreferenced_extent_is_not_on_its_free_list(pool: ExtentPool) -> None:
    """The extent was popped and then forgotten."""
    assert pool._shelf(MemoryLocation.DEVICE).pop([0])
    _is_found(pool, "I4")


def test_i1_lost_retired_batch(pool: ExtentPool) -> None:
    """The reclaimer forgets an extent's only mapping, so the extent is in no part of the sum."""
    pool.reclaimer.batches.clear()
    _is_found(pool, r"I1|I2")


@pytest.mark.parametrize("changes", [(-1, -1, 0), (1, 0, 0), (0, -1, 0), (1, 1, 0)])
def test_i2_references_are_counted(pool: ExtentPool, changes: tuple[int, int, int]) -> None:
    """With a mapping too many an extent is never free; with one too few it is freed too early."""
    extent = _mapping(pool).extent
    pool.own([extent])  # So that I1 holds.
    count_references([extent], *changes)
    _is_found(pool, "I2")


def test_i3_shared_extent_is_writable(pool: ExtentPool) -> None:
    """Two rows can write to the same memory."""
    table = pool.page_tables[0]
    table.map(0, 4, [_mapping(pool, row=1, at=0).extent], Access.READ)
    check_pool(pool)
    _mapping(pool, row=0, at=3).access = Access.READ_WRITE
    _is_found(pool, "I3")
    _mapping(pool, row=0, at=3).access = Access.READ
    check_pool(pool)


def test_i4_free_extent_is_mapped(pool: ExtentPool) -> None:
    """The extent is on a free list and in a row."""
    pool._shelf(MemoryLocation.DEVICE).put_back([_mapping(pool, at=1).extent])
    _is_found(pool, "I4")


def test_i4_mapped_extent_does_not_exist(pool: ExtentPool) -> None:
    """A row maps an extent whose handle was released."""
    extent = _mapping(pool, at=1).extent
    shelf = pool._shelf(MemoryLocation.DEVICE)
    shelf._extents[extent.id] = None
    shelf.created_bytes -= extent.num_bytes
    _is_found(pool, "I4")


def test_i5_page_is_mapped_twice(pool: ExtentPool) -> None:
    """A live mapping lies at the address of a retired one."""
    extents = pool.acquire([0])
    pool.page_tables[0].note_mapped(1, placed(3, extents))
    _is_found(pool, "I5")


def test_i6_row_has_a_hole(pool: ExtentPool) -> None:
    """A mapping begins a page after the end of the one before."""
    _mapping(pool, at=2).first_page += 1
    _is_found(pool, "I6: row 0 has a hole at page 3")


def test_i6_row_runs_past_its_end(pool: ExtentPool) -> None:
    """The row's last pages are another row's first."""
    pool.page_tables[0].row_pages = 3
    _is_found(pool, "I6: row 0 runs to page 4 of 3")


def test_i7_retired_mapping_is_unmapped_already(pool: ExtentPool) -> None:
    """The mapping was unmapped before its fence."""
    (retired,) = pool.reclaimer.retired_mappings()
    pool.backend.mem_unmap(retired.address, retired.extent.num_bytes)
    _is_found(pool, "I7")


def test_i8_backend_holds_more_than_the_books(pool: ExtentPool) -> None:
    """A handle that the pool does not know is a leak."""
    pool.backend.mem_create(PAGE)
    _is_found(pool, "I8")


def test_i8_backend_maps_more_than_the_books(pool: ExtentPool) -> None:
    """A mapping that no table knows is a leak too."""
    handle = _mapping(pool, at=1).extent.handle
    address = Address(pool.page_tables[0].page_address(0, 6))
    pool.backend.mem_map(address, PAGE, handle)
    _is_found(pool, r"I7|I8")


def test_i9_budget_is_exceeded(pool: ExtentPool) -> None:
    pool._shelf(MemoryLocation.DEVICE).budget_bytes = pool.stats().created_bytes - PAGE
    _is_found(pool, "I9")
