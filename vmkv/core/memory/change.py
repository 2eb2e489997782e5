"""A change of mappings: several rows exchange their mappings, all or none.

A change acquires its extents, evicting if memory is short; copies kept bytes under staging
addresses; retires and unmaps the old mappings, since a mapped address cannot be mapped over; maps
the new ones in one batch; then updates the books. If a driver call fails, the old mappings are
restored. Mappings that it reads are pinned, so that eviction leaves them. See Note [A change is all
or nothing].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple

from ...errors import DriverError, InternalError
from ...units import Address
from ..backend import Access, CopyOp, MapOp, Op
from .extent import Extent, MappedRows, Mapping
from .page_table import PageTable, Placement
from .pool import ExtentPool
from .reclaim import RetiredMapping

# ---- access --------------------------------------------------------------------------------------


def protect(pool: ExtentPool, shared: Iterable[tuple[MappedRows, int, Sequence[Mapping]]]) -> None:
    """Make mappings (table, row, mappings of it) read-only before they are shared.

    Waits for the device, since a kernel that writes there would fault; no cost if all are
    read-only. After a DriverError some may be read-only already, which is harmless.
    """
    ops: list[Op] = []
    writable: list[Mapping] = []
    for table, row, mappings in shared:
        pages = table.rows[row]
        for mapping in mappings:
            pages.note_shared(mapping)
        its = [mapping for mapping in mappings if mapping.access is Access.READ_WRITE]
        ops += table.ops_to_set_access(row, its, Access.READ)
        writable += its
    if ops:
        pool.reclaimer.new_fence().wait()
        # Booked first: after a failure the books may say read-only too often, which is safe.
        for mapping in writable:
            mapping.access = Access.READ
        pool.backend.execute(ops)


def make_writable(table: PageTable, row: int, mappings: Sequence[Mapping]) -> None:
    """Make unshared mappings writable; after a DriverError the books still say read-only."""
    readonly = [mapping for mapping in mappings if mapping.access is Access.READ]
    table.pool.backend.execute(table.ops_to_set_access(row, readonly, Access.READ_WRITE))
    for mapping in readonly:
        mapping.access = Access.READ_WRITE


# ---- staging -------------------------------------------------------------------------------------


@contextmanager
def staged(pool: ExtentPool, extents: Sequence[Extent]) -> Iterator[PageTable]:
    """Map `extents` in a temporary one-row table, and wait for the block's work at its end."""
    pool.reclaimer.free_idle_reservations()
    table = PageTable(pool, 1, sum(extent.num_pages for extent in extents))
    try:
        placement = Placement(0, 0, extents)
        pool.backend.execute(table.ops_to_map(placement, Access.READ_WRITE))
        table.note_mapped(placement, Access.READ_WRITE)
        yield table
    finally:
        try:
            table.close(lambda: False)
        except BaseException:
            pool.closer.close_later(table.close_behind)
            raise


# ---- change --------------------------------------------------------------------------------------


class RowChange(NamedTuple):
    """New mappings of one row from `first_page` on.

    `old`, or the empty rest of the row, is replaced by the extents of `again`, read-only, followed
    by fresh ones of `classes` for `tenant`. They cover as many pages as `old`, or fewer if `old`
    reaches the end of the row's run. `source` is the table and row of `again`, or None. The first
    `kept_bytes` of `old` are copied to the fresh extents.
    """

    table: PageTable
    row: int
    first_page: int
    classes: Sequence[int] = ()
    tenant: object = None
    again: Sequence[Mapping] = ()
    source: tuple[PageTable, int] | None = None
    old: Sequence[Mapping] = ()
    kept_bytes: int = 0

    @property
    def fresh_page(self) -> int:
        """First page of the fresh extents."""
        if not self.again:
            return self.first_page
        return self.first_page + sum([mapping.extent.num_pages for mapping in self.again])

    @property
    def end_page(self) -> int:
        """Page after the last fresh extent."""
        return self.fresh_page + sum(1 << size_class for size_class in self.classes)

    def address(self, page: int) -> Address:
        """Address of `page` of the row."""
        return self.table.page_address(self.row, page)

    @property
    def addresses(self) -> tuple[Address, Address]:
        """Start and end of the address range that changes."""
        end_page = max([self.end_page, *(each.end_page for each in self.old)])
        return self.address(self.first_page), self.address(end_page)


class _Part(NamedTuple):
    """A row's change and its new mappings."""

    row: RowChange
    new: list[Mapping]

    @property
    def fresh(self) -> list[Extent]:
        """Extents of the new mappings that are not mapped elsewhere."""
        return [mapping.extent for mapping in self.new[len(self.row.again) :]]

    def ops_to_map(self, mappings: Sequence[Mapping]) -> list[Op]:
        """Map `mappings` in the row, then grant access, with one call per run of equal access."""
        table, row = self.row.table, self.row.row
        start, page_bytes = table.page_address(row, 0), table.page_bytes
        ops: list[Op] = []
        readonly: list[Mapping] = []
        writable: list[Mapping] = []
        for each in mappings:
            extent = each.extent
            address = Address(start + each.first_page * page_bytes)
            ops.append(MapOp(address, extent.num_bytes, extent.handle))
            (readonly if each.access is Access.READ else writable).append(each)
        if readonly:
            ops += table.ops_to_set_access(row, readonly, Access.READ)
        if writable:
            ops += table.ops_to_set_access(row, writable, Access.READ_WRITE)
        return ops


def _part(row: RowChange, fresh: Iterator[Extent]) -> _Part:
    new: list[Mapping] = []
    page = row.first_page
    for mapping in row.again:
        extent = mapping.extent
        new.append(Mapping(page, extent, Access.READ))
        page += extent.num_pages
    for _ in row.classes:
        extent = next(fresh)
        new.append(Mapping(page, extent, Access.READ_WRITE))
        page += extent.num_pages
    return _Part(row, new)


class Change:
    """A change in progress, as a context manager; see `change`."""

    def __init__(
        self,
        pool: ExtentPool,
        rows: Sequence[RowChange],
        reads: Iterable[Mapping],
        acquire: Callable[[Sequence[int]], list[Extent]],
    ):
        self._pool = pool
        self._rows = rows
        self._reads = reads
        self._acquire = acquire
        self._pinned: list[Mapping] = []
        self._fresh: list[Extent] = []
        self._parts: list[_Part] = []
        self._is_mapped = False

    def __enter__(self) -> Change:
        rows = self._rows
        read = [*self._reads]
        classes: list[int] = []
        for row in rows:
            read += row.again
            classes += row.classes
        self._pinned = _pin(self._pool, read)
        try:
            # First, so that memory retired there can be acquired.
            self._pool.reclaimer.wait_for(row.addresses for row in rows)
            if classes:
                self._fresh = self._acquire(classes)
            supply = iter(self._fresh)
            self._parts = [_part(row, supply) for row in rows]
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                self._undo()
        finally:
            self._end()

    def _end(self) -> None:
        """Drop the change's references: mapped fresh extents live on, unmapped ones are freed."""
        try:
            if self._fresh:
                self._pool.disown(self._fresh)
        finally:
            _unpin(self._pool, self._pinned)

    def map(self, stream: int) -> None:
        """Change the mappings of every row; after an error no row has changed.

        Waits for a copy of kept bytes, and for all submitted work if old mappings are replaced.
        """
        self._map(self._parts, stream)

    def fill(self, stream: int, copies: Sequence[CopyOp] = ()) -> None:
        """Scrub fresh extents where required, then submit `copies`."""
        self._prepare(self._parts, stream)
        self._pool.backend.copy_many(copies, stream)

    def one_by_one(self, stream: int) -> Iterator[None]:
        """Map and fill one part after the other, so that copies overlap with the next mapping."""
        for part in self._parts:
            self._map([part], stream)
            self._prepare([part], stream)
            yield

    def _undo(self) -> None:
        """Retire new mappings of rows without `old`, behind a fence since fills may be running."""
        if self._is_mapped:
            fence = self._pool.reclaimer.new_fence()
            for row, _ in self._parts:
                if not row.old:
                    row.table.retire_back(row.row, row.first_page, fence)

    def _map(self, parts: Sequence[_Part], stream: int) -> None:
        kept = [part for part in parts if part.row.kept_bytes]
        if kept:
            self._stage(kept, stream)
        if self._pool.protects_shared:
            protect(self._pool, [(*row.source, row.again) for row, _ in parts if row.source])
        old_extents = [mapping.extent for row, _ in parts for mapping in row.old]
        self._pool.own(old_extents)
        try:
            _exchange(self._pool, parts)
        finally:
            self._pool.disown(old_extents)
        self._is_mapped = True
        for row, new in parts:
            if row.again:
                row.table.rows[row.row].note_shared(new[len(row.again) - 1])
                if row.source:
                    table, at = row.source
                    table.rows[at].note_shared(row.again[-1])

    def _prepare(self, parts: Sequence[_Part], stream: int) -> None:
        for part in parts:
            row = part.row
            if row.classes and not row.kept_bytes:
                at = row.address(row.fresh_page)
                self._pool.scrub.prepare(
                    self._pool.backend, part.fresh, at, row.tenant, stream, row.table.contents
                )

    def _stage(self, parts: Sequence[_Part], stream: int) -> None:
        """Copy the kept bytes of the old extents to the start of the fresh ones."""
        # The block waits for the copies; `_fresh` keeps the extents.
        with staged(self._pool, [extent for part in parts for extent in part.fresh]) as staging:
            page, copies = 0, []
            for part in parts:
                row, at = part.row, staging.page_address(0, page)
                self._pool.scrub.prepare(
                    self._pool.backend, part.fresh, at, row.tenant, stream, row.table.contents
                )
                copies.append(CopyOp(at, row.address(row.first_page), row.kept_bytes))
                page += row.end_page - row.fresh_page
            self._pool.backend.copy_many(copies, stream)


def _exchange(pool: ExtentPool, parts: Sequence[_Part]) -> None:
    """Replace the old mappings by the new ones; the caller owns the old extents meanwhile."""
    retired = [row.table.retired(row.row, mapping) for row, _ in parts for mapping in row.old]
    if retired:
        pool.reclaimer.retire(retired, pool.reclaimer.new_fence())
    try:
        if retired:
            pool.reclaimer.wait_for(row.addresses for row, _ in parts if row.old)
        pool.backend.execute([op for part in parts for op in part.ops_to_map(part.new)])
    except BaseException as error:  # Includes KeyboardInterrupt while this waits.
        _restore(pool, parts, retired, error)
        raise
    for row, new in parts:
        row.table.splice(row.row, row.first_page, row.old, new)
        pool.note_mapped([mapping.extent for mapping in new])


def _restore(
    pool: ExtentPool,
    parts: Sequence[_Part],
    retired: Sequence[RetiredMapping],
    error: BaseException,
) -> None:
    """Reinstate the old mappings that are still mapped, and map the others again."""
    pending = iter(retired)
    ops: list[Op] = []
    again: list[Extent] = []
    for part in parts:
        lost = [each for each in part.row.old if not pool.reclaimer.reinstate(next(pending))]
        ops += part.ops_to_map(lost)
        again += [mapping.extent for mapping in lost]
    try:
        pool.backend.execute(ops)
    except DriverError as second:
        raise InternalError(
            f"a change of mappings failed ({error}), and so did its undoing: {second}"
        ) from error
    pool.note_mapped(again)


def change(
    pool: ExtentPool,
    rows: Sequence[RowChange],
    *,
    reads: Iterable[Mapping] = (),
    acquire: Callable[[Sequence[int]], list[Extent]] | None = None,
) -> Change:
    """Prepare a change of `rows`, for a `with` block that makes it.

    If the block fails after mapping, rows without `old` mappings are restored. `rows` may name a
    row again for the pages that follow. `reads` are further mappings that the block reads. After an
    error nothing has changed, but parked rows may have lost memory.
    """
    return Change(pool, rows, reads, acquire or pool.acquire_or_evict)


@contextmanager
def pinned(pool: ExtentPool, mappings: Iterable[Mapping]) -> Iterator[None]:
    """Keep `mappings` from being evicted for the length of a block that reads their addresses."""
    its = _pin(pool, mappings)
    try:
        yield
    finally:
        _unpin(pool, its)


def _pin(pool: ExtentPool, mappings: Iterable[Mapping]) -> list[Mapping]:
    with pool.lock:
        its = list(mappings)
        for mapping in its:
            mapping.num_pins += 1
    return its


def _unpin(pool: ExtentPool, mappings: Iterable[Mapping]) -> None:
    with pool.lock:
        for mapping in mappings:
            mapping.num_pins -= 1
