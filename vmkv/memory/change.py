"""One change of mappings: what several rows hold is exchanged, all of it or nothing.

Growing, forking, importing, reordering, unsharing and spilling are this. Extents are acquired, all
or none, by evicting where memory is short; what must be kept of the old is copied under staging
addresses; the driver maps everything in one batch; the books follow. Until then nothing has
changed, whatever fails. What is read meanwhile is pinned, so that nobody who gives way takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..backend import Access, CopyOp
from ..units import Address
from .access import protect
from .exchange import Exchange, exchange
from .extent import Extent
from .page_table import Mapping, PageTable
from .pool import ExtentPool
from .staging import staged


@dataclass(frozen=True)
class RowChange:
    """What one row holds from `first_page` on, once it is changed.

    In place of `old`: the extents of `again`, read-only, and fresh ones behind.

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
        return self.first_page + sum(mapping.extent.num_pages for mapping in self.again)

    @property
    def end_page(self) -> int:
        """Where they end."""
        return self.fresh_page + sum(1 << size_class for size_class in self.classes)

    def address(self, page: int) -> Address:
        """Where `page` of the row starts."""
        return self.table.page_address(self.row, page)


class Change:
    """A change whose extents have been acquired; made by `change`.

    Args:
        pool: The pool.
        parts: What changes in each row.
        fresh: The extents for all of them, in order.
    """

    def __init__(self, pool: ExtentPool, parts: Sequence[RowChange], fresh: Sequence[Extent]):
        supply = iter(fresh)
        self._pool = pool
        self._parts = [(part, [next(supply) for _ in part.classes]) for part in parts]
        self._is_mapped = False

    def map(self, stream: int) -> None:
        """Change every row.

        Raises:
            OutOfAddressSpaceError, DriverError: None has changed.

        Cost: a map and an access call for each extent and run. Where something is kept, a copy and
            a wait for it; where something old gives way, a wait for the device and an unmap.
        """
        pool = self._pool
        self._stage(stream)
        shared = [(part, *part.source) for part, _ in self._parts if part.source is not None]
        if pool.protects_shared:
            protect(pool, ((table, row, part.again) for part, table, row in shared))
        exchange(pool, [_exchange(part, fresh) for part, fresh in self._parts])
        self._is_mapped = True
        for part, _ in self._parts:
            if part.again:
                _note_shared(part.table, part.row, part.fresh_page)
        for part, table, row in shared:
            if part.again:
                _note_shared(table, row, part.again[-1].end_page)

    def fill(self, stream: int, copies: Sequence[CopyOp] = ()) -> None:
        """Overwrite what fresh extents hold of others, where they must be, then copy.

        Raises:
            DriverError: What the rows hold there is undefined.
        """
        for part, fresh in self._parts:
            if not part.kept_bytes:
                address = part.address(part.fresh_page)
                self._pool.prepare(fresh, address, part.tenant, stream)
        self._pool.backend.copy_many(copies, stream)

    def undo(self) -> None:
        """Retire what was mapped where nothing was. Fills may be under way, so with a fence."""
        if self._is_mapped:
            fence = self._pool.reclaimer.new_fence()
            for part, _ in self._parts:
                if not part.old:
                    part.table.retire_back(part.row, part.first_page, fence)

    def _stage(self, stream: int) -> None:
        """Have fresh extents begin with what is kept of the old ones."""
        parts = [(part, fresh) for part, fresh in self._parts if part.kept_bytes]
        if not parts:
            return
        # The block ends when the copies have: the addresses go, and the extents are still ours.
        with staged(self._pool, [extent for _, fresh in parts for extent in fresh]) as staging:
            page = 0
            copies = []
            for part, fresh in parts:
                at = staging.page_address(0, page)
                self._pool.prepare(fresh, at, part.tenant, stream)
                copies.append(CopyOp(at, part.address(part.first_page), part.kept_bytes))
                page += part.end_page - part.fresh_page
            self._pool.backend.copy_many(copies, stream)


@contextmanager
def change(
    pool: ExtentPool,
    parts: Sequence[RowChange],
    *,
    reads: Iterable[Mapping] = (),
    acquire: Callable[[Sequence[int]], list[Extent]] | None = None,
) -> Iterator[Change]:
    """Acquire what a change of `parts` takes, for the block that makes it.

    A block that fails after it has mapped them leaves rows in which nothing gave way as they were.

    Args:
        pool: The pool.
        parts: What changes in each row, each row of a table once or in parts that follow.
        reads: Mappings that the block reads, beside those that are mapped again.
        acquire: Where fresh extents come from; by default the pool, by evicting if need be.

    Raises:
        OutOfPagesError, DriverError: Nothing has changed; parked rows may have lost memory.
    """
    with pinned(pool, [*reads, *(mapping for part in parts for mapping in part.again)]):
        for part in parts:
            addresses = part.address(part.first_page), part.address(part.end_page)
            pool.reclaimer.wait_for_range(*addresses)
        classes = [size_class for part in parts for size_class in part.classes]
        fresh = (acquire or pool.acquire_or_evict)(classes)
        try:
            made = Change(pool, parts, fresh)
            try:
                yield made
            except BaseException:
                made.undo()
                raise
        finally:
            # From here on the mappings hold the extents; after a failure nobody does.
            pool.disown(fresh)


@contextmanager
def pinned(pool: ExtentPool, mappings: Iterable[Mapping]) -> Iterator[None]:
    """For the length of a block, `mappings` are read: nobody who gives way gives them up.

    Of extents it would not be enough: what is read lies at an address.
    """
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


def _exchange(part: RowChange, fresh: Sequence[Extent]) -> Exchange:
    new = [(mapping.extent, Access.READ) for mapping in part.again]
    new += [(extent, Access.READ_WRITE) for extent in fresh]
    return Exchange(part.table, part.row, part.first_page, part.old, new)


def _note_shared(table: PageTable, row: int, end_page: int) -> None:
    pages = table.rows[row]
    pages.shared_end_page = max(pages.shared_end_page, end_page)
