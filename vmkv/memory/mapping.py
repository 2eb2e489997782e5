"""Mappings: an extent at a place in a row, the run of them that a row is, and rows in a table.

What `page_table.py` keeps, for those who only look at it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..backend import Access, Op
from ..units import Address
from .extent import Extent


@dataclass(slots=True)
class Mapping:
    """An extent at a place in a row.

    Attributes:
        num_pins: How many changes in progress read it; while there are any, it stays (see
            `change.py`).
    """

    first_page: int
    extent: Extent
    access: Access
    num_pins: int = field(default=0, compare=False)

    @property
    def end_page(self) -> int:
        """The page after its last."""
        return self.first_page + self.extent.num_pages

    @property
    def is_guarded(self) -> bool:
        """Whether its row may not write it: others need it, or it is protected."""
        return self.extent.is_shared or self.access is not Access.READ_WRITE


@dataclass
class RowPages:
    """The run of mapped pages of one row, in order.

    Attributes:
        mappings: The run.
        shared_end_page: No page from here on is shared or read-only: what is written there needs
            no look. A bound, raised where an extent is mapped again and lowered by who looked.
    """

    mappings: deque[Mapping] = field(default_factory=deque)
    shared_end_page: int = 0

    @property
    def first_page(self) -> int:
        """Where the run starts; 0 for an empty one."""
        return self.mappings[0].first_page if self.mappings else 0

    @property
    def end_page(self) -> int:
        """Where the run ends, and grows; 0 for an empty one."""
        return self.mappings[-1].end_page if self.mappings else 0

    @property
    def num_pages(self) -> int:
        """How many pages are mapped."""
        return self.end_page - self.first_page

    def note_shared(self, mapping: Mapping) -> None:
        """`mapping`, of this row, is about to be mapped elsewhere as well, or has been."""
        self.shared_end_page = max(self.shared_end_page, mapping.end_page)


class MappedRows(Protocol):
    """A page table, as those see it whom tables are built upon; see `PageTable`."""

    address: Address
    row_pages: int
    rows: list[RowPages]

    def page_address(self, row: int, page: int) -> Address:
        """Where `page` of `row` starts."""

    def overlapping(self, row: int, first_page: int, end_page: int) -> list[Mapping]:
        """The mappings of `row` that reach into `[first_page, end_page)`, in order."""

    def ops_to_set_access(self, row: int, mappings: Sequence[Mapping], access: Access) -> list[Op]:
        """The operations that give mappings of `row` this access, one for each run of them."""

    def close(self, has_views: Callable[[], bool]) -> None:
        """Retire every row, wait until all is unmapped, and free the reservation."""
