"""Rows without device memory: their contents wait in host memory, and return to the same addresses.

    mapped --HostCopy()--> in host memory --come_back--> mapped
                                '---------drop--------> empty

All extents that the rows map move at once; an extent that several of them map is copied once. The
weights of a sleeping model move so, and the parked rows of cached prefixes.

See DESIGN.md, Note [Weights sleep in host memory].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...units import Address
from ..backend import Access, CopyOp, Fence, MemoryLocation, Op
from ..interrupts import uninterrupted
from .page_table import Extent, PageMapping, PageTable
from .pool import ExtentPool


class _Moved(NamedTuple):
    """A row's run of mappings as it was, with the bound of what is shared in it."""

    table: PageTable
    row: int
    mappings: Sequence[PageMapping]
    shared_end_page: int


def copied_to_host(
    pool: ExtentPool, sources: Sequence[tuple[int, Address, int]], stream: int
) -> PageTable:
    """Submit copies of `sources` to host memory; return the table that has them in its one row.

    A source has the size class of the extent to copy to, the address and the bytes. The table's
    mappings own the extents. After any error nothing has changed.
    """
    pool.reclaimer.close_left()  # Tables that could not be closed before hold host memory.
    classes = [size_class for size_class, *_ in sources]
    extents = pool.acquire_or_evict(classes, MemoryLocation.HOST)
    try:
        staging = PageTable(pool, 1, max(1, sum(extent.num_pages for extent in extents)))
        try:
            page = 0
            for (_, source, num_bytes), extent in zip(sources, extents, strict=True):
                staging.map(0, page, [extent])
                if num_bytes:
                    pool.backend.copy(staging.page_address(0, page), source, num_bytes, stream)
                page += extent.num_pages
            pool.reclaimer.poll()  # Work for the CPU while the copies run.
        except BaseException:
            pool.reclaimer.close_soon(staging.close_behind)
            raise
    finally:
        pool.disown(extents)  # The staging mappings own them from here on.
    return staging


class HostCopy:
    """Moves the contents of rows to host memory; their mappings are retired behind a fence.

    The copies run on `stream`, which must be noted, after the work submitted to it. The rows stay
    empty, and nobody may use them, until `come_back` or `drop`; the caller waits for the fence and
    gives the memory back. All mappings of the rows' extents in other rows stay as they are.

    Attributes:
        num_bytes: Memory that the rows had.

    Raises:
        OutOfPagesError: The pool's host memory does not hold them. Nothing has changed.
        DriverError: A call failed. Nothing has changed.

    Cost: a mapping and an asynchronous copy per extent; host memory that the pool has to create
        takes ten times as long as filling it (10 ms for 64 MiB).
    """

    @uninterrupted
    def __init__(self, pool: ExtentPool, rows: Iterable[tuple[PageTable, int]], stream: int):
        self._pool = pool
        with pool.lock:
            self._rows = [
                _Moved(table, row, tuple(pages.mappings), pages.shared_end_page)
                for table, row in rows
                if (pages := table.rows[row]).mappings
            ]
            places: dict[Extent, Address] = {}
            for table, row, mappings, _ in self._rows:
                for each in mappings:
                    places.setdefault(each.extent, table.page_address(row, each.first_page))
            self._places = places  # Of each extent, the address that is copied.
            self.num_bytes = sum(extent.num_bytes for extent in places)
            sources = [(each.size_class, at, each.num_bytes) for each, at in places.items()]
            self._staging = copied_to_host(pool, sources, stream)
            try:
                self._retire(pool.reclaimer.new_fence())
            except BaseException:
                pool.reclaimer.close_soon(self._staging.close_behind)
                raise

    def _retire(self, fence: Fence) -> None:
        for table, row, *_ in self._rows:
            table.retire_back(row, 0, fence)

    @uninterrupted
    def come_back(self, stream: int, user: int) -> None:
        """Map new memory at the rows' addresses and submit the copies back; all or nothing.

        The copies run on `stream`, and later work on stream `user` waits for them. The first
        mapping of each extent is writable again, and the others are read-only.

        Raises:
            OutOfPagesError: Budget or device cannot supply all. The contents stay on the host.
            DriverError: A call failed; likewise, and it can be tried again.

        Cost: 35 µs and a copy per extent; the caller does not wait for the copies.
        """
        pool = self._pool
        with pool.lock:
            pool.reclaimer.close_left()
            pool.reclaimer.wait_for(self._ranges())
            fresh = pool.acquire_or_evict([extent.size_class for extent in self._places])
            try:
                self._map(dict(zip(self._places, fresh, strict=True)))
            finally:
                pool.disown(fresh)
            try:
                pool.backend.copy_many(self._copies_back(), stream)
                pool.backend.stream_wait(user, stream)
            except BaseException:
                pool.reclaimer.close_soon(self._retire)
                raise
            pool.reclaimer.close_soon(self._staging.close_behind)

    def _ranges(self) -> list[tuple[Address, Address]]:
        return [
            (
                table.page_address(row, mappings[0].first_page),
                table.page_address(row, mappings[-1].end_page),
            )
            for table, row, mappings, _ in self._rows
        ]

    def _map(self, new: dict[Extent, Extent]) -> None:
        ops: list[Op] = []
        made: list[list[PageMapping]] = []
        for table, row, mappings, _ in self._rows:
            its: list[PageMapping] = []
            for page, old in ((each.first_page, each.extent) for each in mappings):
                is_first = self._places[old] == table.page_address(row, page)
                access = Access.READ_WRITE if is_first else Access.READ
                its.append(PageMapping(page, new[old], access))
            made.append(its)
            ops += table.ops_to_map(row, its)
        self._pool.backend.execute(ops)
        for (table, row, _, shared_end_page), its in zip(self._rows, made, strict=True):
            table.note_mapped(row, its)
            table.rows[row].shared_end_page = shared_end_page
        for old, extent in new.items():
            extent.is_dirty, extent.tenant, extent.contents = True, old.tenant, old.contents

    def _copies_back(self) -> list[CopyOp]:
        staged = self._staging.rows[0].mappings
        address = self._staging.page_address
        return [
            CopyOp(target, address(0, each.first_page), each.extent.num_bytes)
            for target, each in zip(self._places.values(), staged, strict=True)
        ]

    def drop(self) -> None:
        """Forget the contents, once the copies submitted so far are complete. Cannot fail."""
        self._pool.reclaimer.close_soon(self._staging.close_behind)
