"""Each invariant, broken by hand, is found: `check_pool` can fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vmkv import ExtentPool, HostBackend, InternalError
from vmkv.core import _native
from vmkv.core._native import count_references
from vmkv.core.backend import Access, MemoryLocation
from vmkv.core.memory import Mapping, PageTable, check_pool
from vmkv.core.memory.page_table import placed
from vmkv.units import Address, KiB

PAGE = 4 * KiB


@pytest.fixture
def pool() -> Iterator[ExtentPool]:
    """A pool with a table of two rows, extents mapped, free and retired; left as it falls."""
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
    # Whatever the test broke: mappings die with their addresses, memory with its file.
    _native.host_free(table.address, table.reserved_bytes)
    backend.close()


def _mapping(pool: ExtentPool, row: int = 0, at: int = 0) -> Mapping:
    return pool.page_tables[0].rows[row].mappings[at]


def _is_found(pool: ExtentPool, words: str) -> None:
    with pytest.raises(InternalError, match=words):
        check_pool(pool)


def test_i1_created_is_free_resident_and_retired(pool: ExtentPool) -> None:
    """A page too many in the books of what exists."""
    pool._shelf(MemoryLocation.DEVICE).created_bytes += PAGE
    _is_found(pool, r"I1.*the books say \d+, the truth is \d+")


def test_i4_extent_that_nobody_needs_is_not_free(pool: ExtentPool) -> None:
    """One that is popped, and then forgotten."""
    assert pool._shelf(MemoryLocation.DEVICE).pop([0])
    _is_found(pool, "I4")


def test_i1_lost_retired_batch(pool: ExtentPool) -> None:
    """An extent whose only mapping the reclaimer forgot belongs nowhere."""
    pool.reclaimer.batches.clear()
    _is_found(pool, r"I1|I2")


@pytest.mark.parametrize("changes", [(-1, -1, 0), (1, 0, 0), (0, -1, 0), (1, 1, 0)])
def test_i2_references_are_counted(pool: ExtentPool, changes: tuple[int, int, int]) -> None:
    """An extent that counts a mapping too many would never be free; one too few, too early."""
    extent = _mapping(pool).extent
    pool.own([extent])  # Keeps I1 out of it.
    count_references([extent], *changes)
    _is_found(pool, "I2")


def test_i3_shared_extent_is_writable(pool: ExtentPool) -> None:
    """Two rows may not both write to one memory."""
    table = pool.page_tables[0]
    table.map(0, 4, [_mapping(pool, row=1, at=0).extent], Access.READ)
    check_pool(pool)
    _mapping(pool, row=0, at=3).access = Access.READ_WRITE
    _is_found(pool, "I3")
    _mapping(pool, row=0, at=3).access = Access.READ
    check_pool(pool)


def test_i4_free_extent_is_mapped(pool: ExtentPool) -> None:
    """An extent on a free list that a row still shows."""
    pool._shelf(MemoryLocation.DEVICE).put_back([_mapping(pool, at=1).extent])
    _is_found(pool, "I4")


def test_i4_mapped_extent_does_not_exist(pool: ExtentPool) -> None:
    """A row shows an extent whose handle was released."""
    extent = _mapping(pool, at=1).extent
    shelf = pool._shelf(MemoryLocation.DEVICE)
    shelf._extents[extent.id] = None
    shelf.created_bytes -= extent.num_bytes
    _is_found(pool, "I4")


def test_i5_page_is_mapped_twice(pool: ExtentPool) -> None:
    """A live mapping at an address where a retired one still is."""
    extents = pool.acquire([0])
    pool.page_tables[0].note_mapped(1, placed(3, extents))
    _is_found(pool, "I5")


def test_i6_row_has_a_hole(pool: ExtentPool) -> None:
    """Mappings of a row follow each other."""
    _mapping(pool, at=2).first_page += 1
    _is_found(pool, "I6: row 0 has a hole at page 3")


def test_i6_row_runs_past_its_end(pool: ExtentPool) -> None:
    """A row's last page is followed by another row's first."""
    pool.page_tables[0].row_pages = 3
    _is_found(pool, "I6: row 0 runs to page 4 of 3")


def test_i7_retired_mapping_is_unmapped_already(pool: ExtentPool) -> None:
    """Somebody unmapped what still waits for its fence."""
    (retired,) = pool.reclaimer.retired_mappings()
    pool.backend.mem_unmap(retired.address, retired.extent.num_bytes)
    _is_found(pool, "I7")


def test_i8_backend_holds_more_than_the_books(pool: ExtentPool) -> None:
    """A handle that the pool does not know is a leak."""
    pool.backend.mem_create(PAGE)
    _is_found(pool, "I8")


def test_i8_backend_maps_more_than_the_books(pool: ExtentPool) -> None:
    """So is a mapping that no table knows."""
    handle = _mapping(pool, at=1).extent.handle
    address = Address(pool.page_tables[0].page_address(0, 6))
    pool.backend.mem_map(address, PAGE, handle)
    _is_found(pool, r"I7|I8")


def test_i9_budget_is_exceeded(pool: ExtentPool) -> None:
    """More exists than may."""
    pool._shelf(MemoryLocation.DEVICE).budget_bytes = pool.stats().created_bytes - PAGE
    _is_found(pool, "I9")
