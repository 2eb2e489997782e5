"""One change of mappings: what several rows hold is exchanged, all of it or nothing.

Growing, forking, importing, reordering, unsharing, spilling and swapping in are this. Extents are
acquired, all or none, by evicting where memory is short. What is kept of the old is copied under
staging addresses. A mapped address cannot be mapped over, so what is there is retired, waited for
and unmapped; the new is mapped in one batch; the books follow. Until then nothing has changed:
where a driver call fails on the way, the old comes back. What is read meanwhile is pinned, so that
nobody who gives way takes it.
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
    """Make mappings of some rows, which are about to be shared, read-only.

    Args:
        pool: The pool.
        shared: Tables, rows, and mappings of theirs.

    Raises:
        DriverError: Some may be read-only already, which is harmless.

    Cost: waits for the device, since a kernel still writing what it might would fault; and an
        access change for each mapping. Nothing where all are read-only.
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
        # In the books first: after a failure, more is said to be read-only than is, which is safe.
        for mapping in writable:
            mapping.access = Access.READ
        pool.backend.execute(ops)


def make_writable(table: PageTable, row: int, mappings: Sequence[Mapping]) -> None:
    """Let a row write what nobody else has any more.

    Raises:
        DriverError: Some may be writable; the books still say that they are not.
    """
    readonly = [mapping for mapping in mappings if mapping.access is Access.READ]
    table.pool.backend.execute(table.ops_to_set_access(row, readonly, Access.READ_WRITE))
    for mapping in readonly:
        mapping.access = Access.READ_WRITE


# ---- staging -------------------------------------------------------------------------------------


@contextmanager
def staged(pool: ExtentPool, extents: Sequence[Extent]) -> Iterator[PageTable]:
    """A table of one row with `extents` mapped from its start on, for the length of a block.

    At its end it waits for what was submitted in it.

    Raises:
        OutOfAddressSpaceError, DriverError: There is no such table; or at the end, it could not
            be closed yet, and the pool does it later.
    """
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
    """What one row holds from `first_page` on, once it is changed.

    In place of `old`: the extents of `again`, read-only, and fresh ones behind. They cover as many
    pages, or fewer where `old` reaches to the end of the row's run.

    Attributes:
        table: The row's table.
        row: The row.
        first_page: Where it changes.
        classes: The fresh extents, by size class.
        tenant: For whom those are.
        again: Mappings elsewhere whose extents are mapped here as well.
        source: The table and row of those; None where they are of no row.
        old: The run that gives way; none where the row's run ends at `first_page`.
        kept_bytes: How much of what `old` holds the fresh extents begin with.
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
        """Where the fresh extents begin."""
        if not self.again:
            return self.first_page
        return self.first_page + sum([mapping.extent.num_pages for mapping in self.again])

    @property
    def end_page(self) -> int:
        """Where they end."""
        return self.fresh_page + sum(1 << size_class for size_class in self.classes)

    def address(self, page: int) -> Address:
        """Where `page` of the row starts."""
        return self.table.page_address(self.row, page)

    @property
    def addresses(self) -> tuple[Address, Address]:
        """Where the pages concerned start and end."""
        end_page = max([self.end_page, *(each.end_page for each in self.old)])
        return self.address(self.first_page), self.address(end_page)


class _Part(NamedTuple):
    """What changes in a row, and the mappings that it has then."""

    row: RowChange
    new: list[Mapping]

    @property
    def fresh(self) -> list[Extent]:
        """The fresh extents among them."""
        return [mapping.extent for mapping in self.new[len(self.row.again) :]]

    def ops_to_map(self, mappings: Sequence[Mapping]) -> list[Op]:
        """Map some in the row, then grant access, with one call for each run of equal access."""
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
    """A part, with as many of the `fresh` extents as it takes."""
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
    """A change, for a block that makes it; what `change` returns, with its arguments."""

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
            # First: what is retired there can be acquired then.
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
        """From here on the mappings hold the fresh extents; after a failure nobody does."""
        try:
            if self._fresh:
                self._pool.disown(self._fresh)
        finally:
            _unpin(self._pool, self._pinned)

    def map(self, stream: int) -> None:
        """Change every row.

        Raises:
            OutOfAddressSpaceError, DriverError: None has changed.

        Cost: a map for each extent, and an access change for each run of equal access. Where
            something is kept, a copy and a wait for it. Where something old gives way, an unmap
            for each run of it, after a wait until the device is done with all submitted so far.
        """
        self._map(self._parts, stream)

    def fill(self, stream: int, copies: Sequence[CopyOp] = ()) -> None:
        """Overwrite what fresh extents hold of others, where they must be, then copy.

        Raises:
            DriverError: What the rows hold there is undefined.
        """
        self._prepare(self._parts, stream)
        self._pool.backend.copy_many(copies, stream)

    def one_by_one(self, stream: int) -> Iterator[None]:
        """Change and fill part after part: while one is copied to, the next is mapped."""
        for part in self._parts:
            self._map([part], stream)
            self._prepare([part], stream)
            yield

    def _undo(self) -> None:
        """Retire what was mapped where nothing was. Fills may be under way, so with a fence."""
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
        """Have fresh extents begin with what is kept of the old ones."""
        # The block ends when the copies have: the addresses go, and the extents are still ours.
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
    """Put the new mappings in the place of the old ones, whose extents are owned meanwhile."""
    retired = [row.table.retired(row.row, mapping) for row, _ in parts for mapping in row.old]
    if retired:
        pool.reclaimer.retire(retired, pool.reclaimer.new_fence())
    try:
        if retired:
            pool.reclaimer.wait_for(row.addresses for row, _ in parts if row.old)
        pool.backend.execute([op for part in parts for op in part.ops_to_map(part.new)])
    except BaseException as error:  # Also who is interrupted, while this waits for the device.
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
    """Take back what is retired and still there; map again what is gone."""
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
    """Acquire what a change of `rows` takes, for the block that makes it.

    A block that fails after it has mapped them leaves rows in which nothing gave way as they were.

    Args:
        pool: The pool.
        rows: What changes in each row. A row may be named again for what comes behind.
        reads: Mappings that the block reads, beside those that are mapped again.
        acquire: Where fresh extents come from; by default the pool, by evicting if need be.

    Raises:
        OutOfPagesError, DriverError: Nothing has changed; parked rows may have lost memory.
    """
    return Change(pool, rows, reads, acquire or pool.acquire_or_evict)


@contextmanager
def pinned(pool: ExtentPool, mappings: Iterable[Mapping]) -> Iterator[None]:
    """For the length of a block, `mappings` are read: nobody who gives way gives them up.

    Of extents it would not be enough: what is read lies at an address.
    """
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
