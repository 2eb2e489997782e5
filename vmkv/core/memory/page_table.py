"""Extents, and the page table that says where in the rows of a reservation they are mapped.

An extent is one driver handle of 2^k pages, always mapped whole. Sizes are mixed because a driver
call costs per mapping, not per byte.

    row start                first_page            end_page                    row end
        | (retired, or never)    | extent | extent | ..  |    not mapped yet      |

A row's run of mapped pages grows at its end with tokens, shrinks at its front with a sliding
window, and has no holes (I6). A page has at most one mapping (I5); an extent may be mapped in
several rows (I3).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from ...errors import InternalError
from ...units import Address, Handle
from .._native import References, count_references
from ..backend import Access, AccessOp, Fence, MapOp, MemoryLocation, Op

if TYPE_CHECKING:
    from .pool import ExtentPool

# ---- extent --------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class Extent(References):
    """A physical allocation with reference counts.

    Invariant (I2): `num_references == num_mappings + num_owners`. An owner is any user other than a
    mapping. `count_references` changes the counts atomically without a lock, and the one caller
    that drops the last reference returns the extent to the pool.

    `id` is its number in the free list, stable while the handle lives. `is_of_budget` means device
    memory that this pool created. `tenant` and `contents` record the last write; see `Scrub.byte`.
    An extent that is not `is_recyclable`, exported or imported, is released instead of reused.
    """

    id: int
    size_class: int
    num_bytes: int
    handle: Handle
    location: MemoryLocation = MemoryLocation.DEVICE
    tenant: object = None
    contents: object = None
    is_dirty: bool = False
    is_recyclable: bool = True
    num_pages: int = field(init=False)
    is_of_budget: bool = field(init=False)

    def __post_init__(self) -> None:
        self.num_pages = 1 << self.size_class
        self.is_of_budget = self.location is MemoryLocation.DEVICE and self.id >= 0

    @property
    def is_shared(self) -> bool:
        """Whether it has other users or readers in another process, so that no row may write it."""
        return self.is_needed_by_several or not self.is_recyclable

    @property
    def is_freeable(self) -> bool:
        """Whether retiring its mapping frees device memory of the budget."""
        return self.is_of_budget and not self.is_needed_by_several

    def __repr__(self) -> str:
        return (
            f"Extent(id={self.id}, num_pages={self.num_pages}, mappings={self.num_mappings}, "
            f"live={self.num_live_mappings}, owners={self.num_owners})"
        )


def size_classes(num_pages: int, largest_class: int) -> list[int]:
    """Return the fewest size classes that sum to `num_pages`, largest first: 5, 2, 0 for 37."""
    classes = [largest_class] * (num_pages >> largest_class)
    rest = num_pages & ((1 << largest_class) - 1)
    while rest:
        size_class = rest.bit_length() - 1
        classes.append(size_class)
        rest -= 1 << size_class
    return classes


# ---- mapping -------------------------------------------------------------------------------------


@dataclass(slots=True)
class PageMapping:
    """An extent at a place in a row. A mapping with `num_pins > 0` is in use and stays."""

    first_page: int
    extent: Extent
    access: Access
    num_pins: int = field(default=0, compare=False)

    @property
    def end_page(self) -> int:
        """Page after the last."""
        return self.first_page + self.extent.num_pages

    @property
    def is_guarded(self) -> bool:
        """Whether its row may not write it: it is shared or read-only."""
        return self.extent.is_shared or self.access is not Access.READ_WRITE


class RetiredMapping(NamedTuple):
    """A mapping that waits for its fence."""

    address: Address
    extent: Extent


def placed(
    first_page: int, extents: Iterable[Extent], access: Access = Access.READ_WRITE
) -> list[PageMapping]:
    """Make mappings of `extents`, one after the other from `first_page` on."""
    mappings = []
    for extent in extents:
        mappings.append(PageMapping(first_page, extent, access))
        first_page += extent.num_pages
    return mappings


@dataclass
class RowPages:
    """The run of mapped pages of one row, in order.

    No page from `shared_end_page` on is shared or read-only; the bound may be too high.
    """

    mappings: deque[PageMapping] = field(default_factory=deque)
    shared_end_page: int = 0

    @property
    def first_page(self) -> int:
        """First page of the run; 0 for an empty one."""
        return self.mappings[0].first_page if self.mappings else 0

    @property
    def end_page(self) -> int:
        """Page after the last of the run; 0 for an empty one."""
        if not self.mappings:
            return 0
        last = self.mappings[-1]
        return last.first_page + last.extent.num_pages

    @property
    def num_pages(self) -> int:
        """Number of mapped pages."""
        return self.end_page - self.first_page

    def note_shared(self, mapping: PageMapping) -> None:
        """Raise `shared_end_page` for `mapping`, which is mapped elsewhere as well."""
        self.shared_end_page = max(self.shared_end_page, mapping.end_page)


# ---- page table ----------------------------------------------------------------------------------

_FIRST_PAGE = attrgetter("first_page")


class PageTable:
    """The mappings of one reservation of `num_rows` rows of `row_pages` pages.

    `contents` is the kind of data written there, such as an element type; see `Scrub.byte`. Raises
    OutOfAddressSpaceError if no range of that size is left.
    """

    def __init__(self, pool: ExtentPool, num_rows: int, row_pages: int, contents: object = None):
        self.pool = pool
        self.contents = contents
        self.num_rows = num_rows
        self.row_pages = row_pages
        self.page_bytes = pool.page_bytes
        self.row_bytes = row_pages * pool.page_bytes
        self.reserved_bytes = num_rows * self.row_bytes
        self.address = pool.backend.address_reserve(self.reserved_bytes)
        self.rows = [RowPages() for _ in range(num_rows)]
        pool.page_tables.append(self)

    def page_address(self, row: int, page: int) -> Address:
        """Address of `page` of `row`."""
        return Address(self.address + row * self.row_bytes + page * self.page_bytes)

    def overlapping(self, row: int, first_page: int, end_page: int) -> list[PageMapping]:
        """Mappings of `row` that intersect `[first_page, end_page)`, in order."""
        pages = self.rows[row]
        mappings = pages.mappings
        if not mappings or (first_page <= mappings[0].first_page and pages.end_page <= end_page):
            return list(mappings)
        # The last mapping that starts at or before `first_page`; earlier ones end before it.
        start = max(0, bisect_right(mappings, first_page, key=_FIRST_PAGE) - 1)
        end = bisect_left(mappings, end_page, start, key=_FIRST_PAGE)
        found = list(islice(mappings, start, end))
        return found[1:] if found and found[0].end_page <= first_page else found

    def check_writable(self, row: int) -> None:
        """Raise InternalError if a guarded mapping of `row` ends above its `shared_end_page`."""
        pages = self.rows[row]
        for mapping in pages.mappings:
            if mapping.is_guarded and mapping.end_page > pages.shared_end_page:
                raise InternalError(
                    f"I3: row {row} may not write {mapping}, and its books end what is shared at "
                    f"page {pages.shared_end_page}"
                )

    # ---- mapping --------------------------------------------------------------------------

    def map(
        self,
        row: int,
        first_page: int,
        extents: Iterable[Extent],
        access: Access = Access.READ_WRITE,
    ) -> None:
        """Map `extents` one after the other at the end of `row`."""
        mappings = placed(first_page, extents, access)
        self.pool.backend.execute(self.ops_to_map(row, mappings))
        self.note_mapped(row, mappings)

    def ops_to_map(self, row: int, mappings: Sequence[PageMapping]) -> list[Op]:
        """Return the driver calls that map `mappings` and grant access to each contiguous run."""
        ops: list[Op] = []
        for each in mappings:
            address, extent = self.page_address(row, each.first_page), each.extent
            ops.append(MapOp(address, extent.num_bytes, extent.handle))
        ops += self.ops_to_set_access(row, mappings)
        return ops

    def ops_to_set_access(
        self, row: int, mappings: Iterable[PageMapping], access: Access | None = None
    ) -> list[AccessOp]:
        """Return driver calls, one per contiguous run, for `access` or each mapping's own."""
        ops: list[AccessOp] = []
        end = num_bytes = 0
        for each in mappings:
            address = self.page_address(row, each.first_page)
            its = each.access if access is None else access
            if ops and address == end and its is ops[-1].access:
                address, num_bytes = ops.pop().address, num_bytes + each.extent.num_bytes
            else:
                num_bytes = each.extent.num_bytes
            ops.append(AccessOp(address, num_bytes, its))
            end = address + num_bytes
        return ops

    def note_mapped(
        self, row: int, new: list[PageMapping], old: Sequence[PageMapping] = ()
    ) -> None:
        """Book that `new` mappings were made at the end of `row`, or in place of `old` ones."""
        pages = self.rows[row]
        if old:
            mappings = list(pages.mappings)
            at = bisect_left(mappings, old[0].first_page, key=_FIRST_PAGE)
            if mappings[at : at + len(old)] != list(old):
                raise InternalError(f"row {row} does not hold {old}")
            mappings[at : at + len(old)] = new
            pages.mappings = deque(mappings)
        elif new and pages.mappings and pages.end_page != new[0].first_page:
            raise InternalError(f"row {row} ends at page {pages.end_page}, not where {new[0]} is")
        else:
            pages.mappings += new
        count_references([each.extent for each in new], 1, 1, 0)

    # ---- retiring -------------------------------------------------------------------------

    def retire_front(self, row: int, page: int, fence: Fence) -> None:
        """Retire the mappings of `row` that lie wholly below `page`, until `fence` passes."""
        pages = self.rows[row]
        taken = list(takewhile(lambda each: each.end_page <= page, pages.mappings))
        self._retire(row, taken, fence)
        for _ in taken:
            pages.mappings.popleft()

    def retire_back(self, row: int, page: int, fence: Fence) -> None:
        """Retire the mappings of `row` that lie wholly at or above `page`, until `fence` passes."""
        pages = self.rows[row]
        taken = list(takewhile(lambda each: each.first_page >= page, reversed(pages.mappings)))
        self._retire(row, taken, fence)
        for _ in taken:
            pages.mappings.pop()
        pages.shared_end_page = min(pages.shared_end_page, pages.end_page)

    def _retire(self, row: int, mappings: Sequence[PageMapping], fence: Fence) -> None:
        for mapping in mappings:
            if mapping.num_pins:
                raise InternalError(f"row {row}: {mapping} is pinned, and was to be retired")
        retired = self.retired(row, mappings)
        if self.pool.submitted is not None:
            self.pool.submitted.check_retired(retired)
        if retired:
            self.pool.reclaimer.retire(retired, fence)

    def retired(self, row: int, mappings: Iterable[PageMapping]) -> list[RetiredMapping]:
        """The reclaimer's records of mappings of `row`."""
        address = self.page_address
        return [RetiredMapping(address(row, each.first_page), each.extent) for each in mappings]

    # ---- end ------------------------------------------------------------------------------

    def close(self, has_views: Callable[[], bool]) -> None:
        """Retire every row, wait until all is unmapped, and free the reservation.

        May be repeated after a DriverError. While `has_views()` is true the addresses stay
        reserved.
        """
        reclaimer = self.pool.reclaimer
        if self in self.pool.page_tables:
            self.close_behind(reclaimer.new_fence(), has_views)
        reclaimer.wait()
        reclaimer.free_idle_reservations()

    def close_behind(self, fence: Fence, has_views: Callable[[], bool] = lambda: False) -> None:
        """Retire every row until `fence` has passed, without waiting. Cannot fail."""
        reclaimer = self.pool.reclaimer
        with self.pool.lock:  # Another thread may be evicting its rows.
            if self not in self.pool.page_tables:
                return
            for row in range(self.num_rows):
                self.retire_back(row, 0, fence)
            self.pool.page_tables.remove(self)
            whole = [(self.address, self.page_address(self.num_rows, 0))]

            def is_in_use() -> bool:
                return has_views() or reclaimer.has_retired_in(whole)

            reclaimer.idle_reservations.append((self.address, self.reserved_bytes, is_in_use))
