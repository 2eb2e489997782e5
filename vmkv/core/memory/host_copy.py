"""Parts of rows whose contents wait in host memory, and return to the same addresses.

    mapped --HostCopy(), leave--> in host memory --coming_back--> mapped
                                      '-----------drop--> empty

Swapped sequences and the weights of a sleeping model move so.

See DESIGN.md, Note [Swapping keeps addresses].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ...units import Address
from ..backend import MemoryLocation
from .change import Change, RowChange
from .page_table import Extent, PageTable
from .pool import ExtentPool


class Part(NamedTuple):
    """An extent's pages of a row, from `page` on; the first `num_bytes` are copied."""

    table: PageTable
    row: int
    page: int
    size_class: int
    num_bytes: int


class HostCopy:
    """A copy of parts of rows in host memory, row by row and each from some page to its end.

    Submits the copies to `stream`, which must be noted. The copy stays mapped for both ways,
    because granting access takes half as long as copying. Copies go extent by extent: mapping the
    next one costs less than copying this one. After `leave` nobody may use the rows until
    `coming_back`.

    Raises:
        OutOfPagesError: The pool's host memory does not hold them. Nothing has changed.
        DriverError: A call failed. Nothing has changed.

    Cost: a mapping and an asynchronous copy per extent; host memory that the pool has to create
        takes ten times as long as filling it (10 ms for 64 MiB).

    Attributes:
        parts: The parts that were copied.
        firsts: The first part of each row, and the address of its copy.
    """

    def __init__(self, pool: ExtentPool, parts: Sequence[Part], stream: int):
        self.parts, self._pool = parts, pool
        pool.reclaimer.close_left()  # Tables that could not be closed before hold host memory.
        classes = [part.size_class for part in parts]
        extents = pool.acquire_or_evict(classes, MemoryLocation.HOST)
        try:
            self._staging = PageTable(pool, 1, max(1, sum(1 << each for each in classes)))
            try:
                page = 0
                for part, extent in zip(parts, extents, strict=True):
                    self._staging.map(0, page, [extent])
                    if part.num_bytes:
                        staged = self._staging.page_address(0, page)
                        source = part.table.page_address(part.row, part.page)
                        pool.backend.copy(staged, source, part.num_bytes, stream)
                    page += extent.num_pages
                pool.reclaimer.poll()  # Work for the CPU while the copies run.
            except BaseException:
                self.drop()
                raise
        finally:
            pool.disown(extents)  # The staging mappings own them from here on.
        firsts: dict[tuple[int, int], tuple[Part, Address]] = {}
        for part, address in zip(parts, self._staged, strict=True):
            firsts.setdefault((id(part.table), part.row), (part, address))
        self.firsts = [*firsts.values()]

    @property
    def _staged(self) -> Sequence[Address]:
        address, mappings = self._staging.page_address, self._staging.rows[0].mappings
        return [address(0, each.first_page) for each in mappings]

    @property
    def extents(self) -> Sequence[Extent]:
        """The host memory of each part."""
        return [each.extent for each in self._staging.rows[0].mappings]

    @property
    def num_bytes(self) -> int:
        """Bytes that are copied each way."""
        return sum(part.num_bytes for part in self.parts)

    def leave(self) -> None:
        """Retire the rows' mappings of these parts, behind a fence that covers the copies.

        After a `DriverError` they stay, and the copy is dropped.
        """
        try:
            fence = self._pool.reclaimer.new_fence()
        except BaseException:
            self.drop()
            raise
        for (table, row, page, *_), _ in self.firsts:
            table.retire_back(row, page, fence)

    @contextmanager
    def coming_back(self, stream: int, user: int, tenant: object = None) -> Iterator[None]:
        """Map new memory at the same addresses and submit the copies back; all or nothing.

        The copies run on `stream`, and work on stream `user` after the block waits for them; the
        caller does not. If the block fails, the contents stay on the host.

        Raises:
            OutOfPagesError: Budget or device cannot supply all. The contents stay on the host.
            DriverError: A call failed; likewise, and it can be tried again.

        Cost: 35 µs and a copy per extent.
        """
        backend = self._pool.backend
        changes = [
            RowChange(table, row, page, [size_class], tenant)
            for table, row, page, size_class, _ in self.parts
        ]
        with Change(self._pool, changes) as made:
            mapped = made.one_by_one(stream)
            for part, staged, _ in zip(self.parts, self._staged, mapped, strict=True):
                if part.num_bytes:
                    target = part.table.page_address(part.row, part.page)
                    backend.copy(target, staged, part.num_bytes, stream)
            yield
            backend.stream_wait(user, stream)
            self.drop()

    def drop(self) -> None:
        """Forget the contents, once the copies submitted so far are complete. Cannot fail."""
        self._pool.reclaimer.close_soon(self._staging.close_behind)
