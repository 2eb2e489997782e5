"""Rows without device memory: their contents wait in host memory, and return to the same addresses.

    mapped --HostCopy()--> in host memory --come_back--> mapped
                                '---------drop--------> empty

All extents that the rows map move at once. The weights of a sleeping model move so.

See DESIGN.md, Note [Weights sleep in host memory].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...units import Address
from ..backend import CopyOp, Fence, MemoryLocation, Op
from ..interrupts import uninterrupted
from .page_table import Extent, PageMapping, PageTable
from .pool import ExtentPool


class _Moved(NamedTuple):
    """A row's run of mappings as it was."""

    table: PageTable
    row: int
    mappings: Sequence[PageMapping]


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
    gives the memory back. No other row maps their extents.

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
                _Moved(table, row, tuple(table.rows[row].mappings))
                for table, row in rows
                if table.rows[row].mappings
            ]
            sources = [
                (each.extent.size_class, address, each.extent.num_bytes)
                for address, each in self._addresses()
            ]
            self._staging = copied_to_host(pool, sources, stream)
            try:
                self._retire(pool.reclaimer.new_fence())
            except BaseException:
                pool.reclaimer.close_soon(self._staging.close_behind)
                raise

    def _addresses(self) -> Iterator[tuple[Address, PageMapping]]:
        for table, row, mappings in self._rows:
            for each in mappings:
                yield table.page_address(row, each.first_page), each

    def _retire(self, fence: Fence) -> None:
        for table, row, _ in self._rows:
            table.retire_back(row, 0, fence)

    @uninterrupted
    def come_back(self, stream: int, user: int) -> None:
        """Map new memory at the rows' addresses and submit the copies back; all or nothing.

        The copies run on `stream`, and later work on stream `user` waits for them.

        Raises:
            OutOfPagesError: Budget or device cannot supply all. The contents stay on the host.
            DriverError: A call failed; likewise, and it can be tried again.

        Cost: 35 µs and a copy per extent; the caller does not wait for the copies.
        """
        pool = self._pool
        with pool.lock:
            pool.reclaimer.close_left()
            pool.reclaimer.wait_for(self._ranges())
            classes = [each.extent.size_class for _, each in self._addresses()]
            fresh = pool.acquire_or_evict(classes)
            try:
                self._map(fresh)
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
            for table, row, mappings in self._rows
        ]

    def _map(self, fresh: Sequence[Extent]) -> None:
        extents, ops = iter(fresh), list[Op]()
        made: list[list[PageMapping]] = []
        for table, row, mappings in self._rows:
            made.append([replace(each, extent=next(extents), num_pins=0) for each in mappings])
            ops += table.ops_to_map(row, made[-1])
        self._pool.backend.execute(ops)
        for (table, row, mappings), its in zip(self._rows, made, strict=True):
            table.note_mapped(row, its)
            for old, new in zip(mappings, its, strict=True):
                of, extent = old.extent, new.extent
                extent.is_dirty, extent.tenant, extent.contents = True, of.tenant, of.contents

    def _copies_back(self) -> list[CopyOp]:
        staged = self._staging.rows[0].mappings
        address = self._staging.page_address
        return [
            CopyOp(target, address(0, each.first_page), each.extent.num_bytes)
            for (target, _), each in zip(self._addresses(), staged, strict=True)
        ]

    def drop(self) -> None:
        """Forget the contents, once the copies submitted so far are complete. Cannot fail."""
        self._pool.reclaimer.close_soon(self._staging.close_behind)
