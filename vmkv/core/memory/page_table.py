"""The page table: the extents mapped in the rows of one reservation.

    row start                first_page            end_page                    row end
        | (retired, or never)    | extent | extent | ..  |    not mapped yet      |

A row's run of mapped pages grows at its end with tokens, shrinks at its front with a sliding
window, and has no holes (I6). A page has at most one mapping (I5); an extent may be mapped in
several rows (I3).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from operator import attrgetter

from ...errors import InternalError
from ...units import Address
from ..backend import Access, AccessOp, MapOp, Op
from .extent import Extent, Mapping, RowPages
from .pool import ExtentPool
from .reclaim import RecordedFence, RetiredMapping

_FIRST_PAGE = attrgetter("first_page")


@dataclass(frozen=True)
class Placement:
    """Extents to be mapped consecutively from `first_page` of `row`."""

    row: int
    first_page: int
    extents: Sequence[Extent]


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

    def overlapping(self, row: int, first_page: int, end_page: int) -> list[Mapping]:
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

    def is_writable_from(self, row: int, first_page: int) -> bool:
        """Whether `row` may write from `first_page` on; False also if the bound is outdated."""
        return first_page >= self.rows[row].shared_end_page

    def guarded_page(self, row: int, first_page: int) -> int:
        """Start of the first guarded mapping that ends after `first_page`; else the run's end."""
        pages = self.rows[row]
        for mapping in self.overlapping(row, first_page, pages.shared_end_page):
            if mapping.is_guarded:
                return mapping.first_page
        return pages.end_page

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

    def ops_to_map(self, placement: Placement, access: Access) -> list[Op]:
        """Driver operations that map a placement, with one set-access for its run."""
        ops: list[Op] = []
        start = cursor = self.page_address(placement.row, placement.first_page)
        for extent in placement.extents:
            ops.append(MapOp(cursor, extent.num_bytes, extent.handle))
            cursor = Address(cursor + extent.num_bytes)
        ops.append(AccessOp(start, cursor - start, access))
        return ops

    def note_mapped(self, placement: Placement, access: Access) -> None:
        """Book a placement whose operations have been executed."""
        row = self.rows[placement.row]
        page = placement.first_page
        if row.mappings and row.end_page != page:
            raise InternalError(f"row {placement.row} ends at page {row.end_page}, not at {page}")
        for extent in placement.extents:
            row.mappings.append(Mapping(page, extent, access))
            page += extent.num_pages
        self.pool.note_mapped(placement.extents)

    def ops_to_set_access(self, row: int, mappings: Sequence[Mapping], access: Access) -> list[Op]:
        """Driver operations that set the access of mappings of `row`, one per contiguous run."""
        ops: list[Op] = []
        row_address, page_bytes = self.page_address(row, 0), self.page_bytes
        start = end = row_address
        for mapping in mappings:
            address = Address(row_address + mapping.first_page * page_bytes)
            if address != end:
                if end > start:
                    ops.append(AccessOp(start, end - start, access))
                start = address
            end = Address(address + mapping.extent.num_bytes)
        if end > start:
            ops.append(AccessOp(start, end - start, access))
        return ops

    def splice(self, row: int, first_page: int, old: Sequence[Mapping], new: list[Mapping]) -> None:
        """Replace the run `old` at `first_page` by `new`, in the books of `row` only."""
        pages = self.rows[row]
        if not old and (not pages.mappings or pages.end_page == first_page):
            pages.mappings.extend(new)
            return
        mappings = list(pages.mappings)
        at = next(
            (at for at, each in enumerate(mappings) if each.first_page >= first_page), len(mappings)
        )
        if not old or mappings[at : at + len(old)] != list(old):
            raise InternalError(f"row {row} does not hold {old} at page {first_page}")
        mappings[at : at + len(old)] = new
        pages.mappings = deque(mappings)

    # ---- retiring -------------------------------------------------------------------------

    def retire_front(self, row: int, page: int, fence: RecordedFence) -> None:
        """Retire the mappings of `row` that lie wholly below `page`, until `fence` passes."""
        pages = self.rows[row]
        taken = list(takewhile(lambda each: each.end_page <= page, pages.mappings))
        self._retire(row, taken, fence)
        for _ in taken:
            pages.mappings.popleft()

    def retire_back(self, row: int, page: int, fence: RecordedFence) -> None:
        """Retire the mappings of `row` that lie wholly at or above `page`, until `fence` passes."""
        pages = self.rows[row]
        taken = list(takewhile(lambda each: each.first_page >= page, reversed(pages.mappings)))
        self._retire(row, taken, fence)
        for _ in taken:
            pages.mappings.pop()
        pages.shared_end_page = min(pages.shared_end_page, pages.end_page)

    def _retire(self, row: int, mappings: Sequence[Mapping], fence: RecordedFence) -> None:
        if any(mapping.num_pins for mapping in mappings):
            raise InternalError(f"row {row}: a change in progress reads what was to be retired")
        self.pool.reclaimer.retire([self.retired(row, each) for each in mappings], fence)

    def retired(self, row: int, mapping: Mapping) -> RetiredMapping:
        """The reclaimer's record of `mapping`."""
        return RetiredMapping(self.page_address(row, mapping.first_page), mapping.extent)

    # ---- end ------------------------------------------------------------------------------

    def close(self, has_views: Callable[[], bool]) -> None:
        """Retire every row, wait until all is unmapped, and free the reservation.

        May be repeated after a DriverError. While `has_views()` is true the addresses stay
        reserved.
        """
        reclaimer = self.pool.reclaimer
        if self in self.pool.page_tables:
            fence = reclaimer.new_fence()
            with self.pool.lock:  # Another thread may be evicting its rows.
                for row in range(self.num_rows):
                    self.retire_back(row, 0, fence)
            reclaimer.wait()
            self.pool.page_tables.remove(self)
            reclaimer.free_later(self.address, self.reserved_bytes, has_views)
        reclaimer.free_idle_reservations()

    def close_behind(
        self, fence: RecordedFence, has_views: Callable[[], bool] = lambda: False
    ) -> None:
        """Retire every row until `fence` has passed, without waiting. Cannot fail."""
        reclaimer = self.pool.reclaimer
        with self.pool.lock:
            if self not in self.pool.page_tables:
                return
            for row in range(self.num_rows):
                self.retire_back(row, 0, fence)
            self.pool.page_tables.remove(self)
            whole = [(self.address, self.page_address(self.num_rows, 0))]
            reclaimer.free_later(
                self.address,
                self.reserved_bytes,
                lambda: has_views() or reclaimer.has_retired_in(whole),
            )
