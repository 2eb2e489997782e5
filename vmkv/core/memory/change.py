"""A change of mappings: several rows exchange their mappings, all or none.

A change acquires its extents, evicting if memory is short; copies kept bytes under staging
addresses; retires and unmaps the old mappings, since a mapped address cannot be mapped over; maps
the new ones in one batch; then updates the books. If a driver call fails, the old mappings are
restored. Mappings that it reads are pinned, so that eviction leaves them. See Note [A change is all
or nothing].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from ...errors import DriverError, InternalError
from ...units import Address
from .._native import count_references
from ..backend import Access, CopyOp, Op
from .page_table import Extent, PageMapping, PageTable, RetiredMapping, placed
from .pool import ExtentPool

# ---- access --------------------------------------------------------------------------------------


def protect(pool: ExtentPool, extents: Iterable[Extent]) -> None:
    """Make all mappings of `extents` read-only before they are shared. Locked.

    Waits for the device, since a kernel that writes there would fault; no cost if all are
    read-only. After a DriverError some may be read-only already, which is harmless.
    """
    shared = set(map(id, extents))
    ops: list[Op] = []
    writable: list[PageMapping] = []
    # Iterate over copies, because other threads may be making tables, or growing rows.
    for table in list(pool.page_tables):
        for row, pages in enumerate(table.rows):
            mappings = [each for each in list(pages.mappings) if id(each.extent) in shared]
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


def make_writable(table: PageTable, row: int, mappings: Sequence[PageMapping]) -> None:
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
        table.map(0, 0, extents)
        yield table
    finally:
        try:
            table.close(lambda: False)
        except BaseException:
            pool.reclaimer.close_soon(table.close_behind)
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
    again: Sequence[PageMapping] = ()
    source: tuple[PageTable, int] | None = None
    old: Sequence[PageMapping] = ()
    kept_bytes: int = 0

    @property
    def addresses(self) -> tuple[Address, Address]:
        """Start and end of the address range that changes."""
        num_pages = sum([mapping.extent.num_pages for mapping in self.again])
        num_pages += sum([1 << size_class for size_class in self.classes])
        ends = [self.first_page + num_pages, *(each.end_page for each in self.old)]
        address = self.table.page_address
        return address(self.row, self.first_page), address(self.row, max(ends))


class _Part(NamedTuple):
    """A row's change, its new mappings, and the new mappings whose extents are not shared."""

    row: RowChange
    new: list[PageMapping]
    fresh: list[PageMapping]

    def prepare(self, at: Address, stream: int) -> None:
        """Scrub the fresh extents, which are mapped at address `at`, where required."""
        table, tenant = self.row.table, self.row.tenant
        pool, extents = table.pool, [mapping.extent for mapping in self.fresh]
        pool.scrub.prepare(pool.backend, extents, at, tenant, stream, table.contents)


@dataclass
class Change:
    """Change the mappings of `rows` in a `with` block, all or none.

    If the block fails after mapping, rows without `old` mappings are restored. `rows` may name a
    row again for the pages that follow. `reads` are further mappings that the block reads. After an
    error nothing has changed, but parked rows may have lost memory.
    """

    pool: ExtentPool
    rows: Sequence[RowChange]
    reads: Iterable[PageMapping] = ()
    acquire: Callable[[Sequence[int]], list[Extent]] | None = None
    _parts: list[_Part] = field(default_factory=list, init=False)
    _is_mapped: bool = field(default=False, init=False)

    def __enter__(self) -> Change:
        pool, read = self.pool, [*self.reads]
        classes: list[int] = []
        for row in self.rows:
            read += row.again
            classes += row.classes
        fresh_extents: list[Extent] = []
        with ExitStack() as undo:
            if read:
                undo.enter_context(pinned(pool, read))
            # First, so that memory retired there can be acquired.
            if pool.reclaimer.batches:
                pool.reclaimer.wait_for([row.addresses for row in self.rows])
            if classes:
                fresh_extents = (self.acquire or pool.acquire_or_evict)(classes)
                # Mapped ones live on after the change, unmapped ones are freed.
                undo.callback(pool.disown, fresh_extents)
            self._ends = undo.pop_all()
        supply = iter(fresh_extents)
        for row in self.rows:
            extents = list(islice(supply, len(row.classes)))
            page, new = row.first_page, []
            if row.again:
                new = placed(page, [mapping.extent for mapping in row.again], Access.READ)
                page = new[-1].end_page
            fresh = placed(page, extents)
            self._parts.append(_Part(row, new + fresh, fresh))
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with self._ends:
            if error is not None and self._is_mapped:
                # Behind a fence, since fills may be running.
                fence = self.pool.reclaimer.new_fence()
                for row in self.rows:
                    if not row.old:
                        row.table.retire_back(row.row, row.first_page, fence)

    def map(self, stream: int) -> None:
        """Change the mappings of every row; after an error no row has changed.

        Waits for a copy of kept bytes, and for all submitted work if old mappings are replaced.
        """
        self._map(self._parts, stream)

    def fill(self, stream: int, copies: Sequence[CopyOp] = ()) -> None:
        """Scrub fresh extents where required, then submit `copies`."""
        self._prepare(self._parts, stream)
        if copies:
            self.pool.backend.copy_many(copies, stream)

    def one_by_one(self, stream: int) -> Iterator[None]:
        """Map and fill one part after the other, so that copies overlap with the next mapping."""
        for part in self._parts:
            self._map([part], stream)
            self._prepare([part], stream)
            yield

    def _map(self, parts: Sequence[_Part], stream: int) -> None:
        kept: list[_Part] = []
        old: list[Extent] = []
        for part in parts:
            if part.row.old:
                old += [mapping.extent for mapping in part.row.old]
            if part.row.kept_bytes:
                kept.append(part)
        if kept:
            self._stage(kept, stream)
        count_references(old, 0, 0, 1)
        try:
            _exchange(self.pool, parts)
        finally:
            if old:
                self.pool.disown(old)
        self._is_mapped = True
        for row, new, _ in parts:
            if row.again:
                row.table.rows[row.row].note_shared(new[len(row.again) - 1])
                if row.source:
                    table, at = row.source
                    table.rows[at].note_shared(row.again[-1])

    @staticmethod
    def _prepare(parts: Sequence[_Part], stream: int) -> None:
        for part in parts:
            if part.fresh and not part.row.kept_bytes:
                table = part.row.table
                part.prepare(table.page_address(part.row.row, part.fresh[0].first_page), stream)

    def _stage(self, parts: Sequence[_Part], stream: int) -> None:
        """Copy the kept bytes of the old extents to the start of the fresh ones."""
        # The block waits for the copies; the change owns the extents.
        extents = [mapping.extent for part in parts for mapping in part.fresh]
        with staged(self.pool, extents) as staging:
            at, copies = staging.address, []
            for part in parts:
                row = part.row
                part.prepare(at, stream)
                source = row.table.page_address(row.row, row.first_page)
                copies.append(CopyOp(at, source, row.kept_bytes))
                at = Address(at + sum([mapping.extent.num_bytes for mapping in part.fresh]))
            self.pool.backend.copy_many(copies, stream)


def _exchange(pool: ExtentPool, parts: Sequence[_Part]) -> None:
    """Replace the old mappings by the new ones; the caller owns the old extents meanwhile."""
    retired: list[RetiredMapping] = []
    ops: list[Op] = []
    for row, new, _ in parts:
        if row.old:
            retired += row.table.retired(row.row, row.old)
        ops += row.table.ops_to_map(row.row, new)
    if retired:
        pool.reclaimer.retire(retired, pool.reclaimer.new_fence())
    try:
        if retired:
            pool.reclaimer.wait_for([row.addresses for row, *_ in parts if row.old])
        pool.backend.execute(ops)
    except BaseException as error:  # Includes KeyboardInterrupt while this waits.
        _restore(pool, parts, retired, error)
        raise
    for row, new, _ in parts:
        row.table.note_mapped(row.row, new, row.old)


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
    for row, *_ in parts:
        lost = [each for each in row.old if not pool.reclaimer.reinstate(next(pending))]
        ops += row.table.ops_to_map(row.row, lost)
        again += [mapping.extent for mapping in lost]
    try:
        with pool.backend.restoring():
            pool.backend.execute(ops)
    except DriverError as second:
        raise InternalError(
            f"a change of mappings failed ({error}), and so did its undoing: {second}"
        ) from error
    count_references(again, 1, 1, 0)


@contextmanager
def pinned(pool: ExtentPool, mappings: Iterable[PageMapping]) -> Iterator[None]:
    """Keep `mappings` from being evicted for the length of a block that reads their addresses."""
    with pool.lock:
        its = list(mappings)
        for mapping in its:
            mapping.num_pins += 1
    try:
        yield
    finally:
        with pool.lock:
            for mapping in its:
                mapping.num_pins -= 1
