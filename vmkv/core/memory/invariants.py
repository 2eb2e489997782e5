"""The invariants of memory, as one function that a fuzzer calls after every step.

In bytes or counts, over one pool and everything built on it, while no call is in progress:

    I1  created == free + resident + retired
    I2  references(extent) == mappings(extent) + owners(extent)
    I3  live mappings(extent) > 1  implies  at most one of them is writable, the writer's own
    I4  an extent is free, on the list of its class, exactly where nobody references it
    I5  a page has at most one mapping, retired ones included
    I6  a row's pages are one run without holes
    I7  a retired mapping is still mapped: not reissued, not unmapped, before its fence
    I8  the backend's usage equals these books
    I9  created + slabs <= budget
    I10 what a submitted step writes, checkpoints of states included, is mapped, its row's own and
        writable until its fence, and not retired before (`submitted.py`, where checks are on)

I1, I4 and I9 hold for each memory location separately.

Free extents change hands without a lock. One pop gives an id to one caller; the one call that drops
the last reference, an atomic step, lists the extent again or releases it under the lock. A caller
that adds a reference has one already, or holds the lock while a mapping lives. Only the lock's
holder raises `created` (I9) and releases, after popping. An acquisition that finds the lists short
tries again under the lock, and only there is it refused. (A failing `FreeList.take` returns what it
popped in one step under the GIL; a free-threaded Python may refuse another thread.)
"""

from __future__ import annotations

from collections import Counter

from ...errors import InternalError
from ..backend import Access, MemoryLocation
from .page_table import PageTable
from .pool import ExtentPool


def check_pool(pool: ExtentPool) -> None:
    """Check I1-I10; InternalError names the one that fails. Cost: all mappings and extents."""
    extents = {
        id(extent): extent
        for found in (*map(pool.extents, MemoryLocation), pool.imported_extents())
        for extent in found
    }
    retired = pool.reclaimer.retired_mappings()
    page_bytes = pool.page_bytes
    for location in MemoryLocation:
        _check_location(pool, location)

    mappings: Counter[int] = Counter()
    live: Counter[int] = Counter()
    writable: Counter[int] = Counter()
    occupied: dict[int, str] = {}

    def occupy(address: int, num_bytes: int, who: str) -> None:
        for page in range(address, address + num_bytes, page_bytes):
            if page in occupied:
                raise InternalError(f"I5: page {page:#x} belongs to {occupied[page]} and {who}")
            occupied[page] = who

    for table in pool.page_tables:
        for row, pages in enumerate(table.rows):
            _check_run(table, row)
            for mapping in pages.mappings:
                extent = mapping.extent
                mappings[id(extent)] += 1
                live[id(extent)] += 1
                writable[id(extent)] += mapping.access == Access.READ_WRITE
                where = table.page_address(row, mapping.first_page)
                occupy(where, extent.num_bytes, f"row {row} of {table.address:#x}")
    for retired_mapping in retired:
        mappings[id(retired_mapping.extent)] += 1
        occupy(retired_mapping.address, retired_mapping.extent.num_bytes, "the reclaimer")

    for extent_id, extent in extents.items():
        _equal("I2", f"mappings of {extent}", extent.num_mappings, mappings[extent_id])
        _equal("I2", f"live mappings of {extent}", extent.num_live_mappings, live[extent_id])
        if live[extent_id] > 1 and writable[extent_id] > 1:
            raise InternalError(f"I3: {extent} is shared and writable in {writable[extent_id]}")
    for extent_id in mappings:
        if extent_id not in extents:
            raise InternalError(f"I4: extent {extent_id} is mapped but does not exist")

    usage = pool.backend.usage()
    imported_bytes = sum(extent.num_bytes for extent in pool.imported_extents())
    _equal("I8", "handles", usage.num_handles, len(extents))
    _equal("I8", "physical bytes", usage.physical_bytes, pool.stats().created_bytes)
    _equal("I8", "host bytes", usage.host_bytes, pool.stats(MemoryLocation.HOST).created_bytes)
    _equal("I8", "imported bytes", usage.imported_bytes, imported_bytes)
    _equal("I7", "mappings, retired ones included", usage.num_mappings, mappings.total())
    _equal("I8", "mapped bytes", usage.mapped_bytes, len(occupied) * page_bytes)
    if usage.pinned_bytes > pool.lent_host_bytes:  # Slabs are lent before they are pinned.
        raise InternalError(f"I8: {usage.pinned_bytes} pinned bytes > {pool.lent_host_bytes} lent")
    if pool.submitted is not None:
        pool.submitted.check(pool.page_tables)


def _check_location(pool: ExtentPool, location: MemoryLocation) -> None:
    stats = pool.stats(location)
    extents = pool.extents(location)
    by_state: Counter[str] = Counter()
    num_unneeded: Counter[int] = Counter()
    for extent in extents:
        state = "resident" if extent.num_live_mappings or extent.num_owners else "retired"
        if not extent.num_references and extent.is_recyclable:
            state = "free"
            num_unneeded[extent.size_class] += 1
        by_state[state] += extent.num_bytes
    for size_class in range(pool.largest_class + 1):
        num_free = pool.count_free(size_class, location)
        _equal("I4", f"free extents of class {size_class}", num_free, num_unneeded[size_class])
    created = sum(extent.num_bytes for extent in extents)
    _equal("I1", "created", stats.created_bytes, created)
    _equal("I1", "free", stats.free_bytes, by_state["free"])
    _equal("I1", "resident", stats.resident_bytes, by_state["resident"])
    _equal("I1", "retired", stats.retired_bytes, by_state["retired"])
    lent_bytes = pool.lent_host_bytes if location is MemoryLocation.HOST else 0
    if stats.created_bytes + lent_bytes > stats.budget_bytes:
        held = f"created {stats.created_bytes} + lent {lent_bytes}"
        raise InternalError(f"I9: {held} > budget {stats.budget_bytes}")


def _check_run(table: PageTable, row: int) -> None:
    pages = table.rows[row]
    cursor = pages.first_page
    for mapping in pages.mappings:
        if mapping.first_page != cursor:
            raise InternalError(f"I6: row {row} has a hole at page {cursor}")
        cursor = mapping.end_page
    if cursor > table.row_pages:
        raise InternalError(f"I6: row {row} runs to page {cursor} of {table.row_pages}")


def _equal(name: str, what: str, books: int, truth: int) -> None:
    if books != truth:
        raise InternalError(f"{name}: {what}: the books say {books}, the truth is {truth}")
