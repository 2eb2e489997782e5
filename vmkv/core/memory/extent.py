"""Extents: the unit of physical memory, one driver handle of 2^k pages.

Sizes are mixed because a driver call costs per mapping, not per byte: a prompt is mapped in
a few large extents, a tail grows by small ones. An extent is always mapped whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...units import Address, Handle
from .._native import References
from ..backend import Access, MemoryLocation, Op

# ---- extent --------------------------------------------------------------------------------------


class Extent(References):
    """One physical allocation, counted by those who need it.

    Invariant (I2): `num_references == num_mappings + num_owners`, where a mapping is one place
    in some row and an owner is anybody else who wants the bytes kept. Whoever takes the last one
    away gives the extent back to the pool; nobody else ever releases the handle. The counts are
    one atomic word, which `count_references` changes without a lock, so that is one caller only.

    Attributes:
        id: Its number in the pool's free list, stable while the handle lives.
        size_class: k, for an extent of 2^k pages.
        num_pages: 2^k.
        num_bytes: Its size.
        handle: The driver's name for it.
        location: Where its memory lies.
        is_of_budget: Whether it is device memory of this pool's: neither the host's, nor imported.
        tenant: For whom it was last written; None for nobody in particular.
        contents: What it was last written as: see `PageTable`.
        is_dirty: Whether it may hold anything but zeros.
        is_recyclable: Whether it may be given to somebody else once nobody needs it. What another
            process can see may not: its handle is released instead.
    """

    __slots__ = (
        "contents",
        "handle",
        "id",
        "is_dirty",
        "is_of_budget",
        "is_recyclable",
        "location",
        "num_bytes",
        "num_pages",
        "size_class",
        "tenant",
    )

    def __init__(
        self,
        id: int,
        size_class: int,
        num_bytes: int,
        handle: Handle,
        location: MemoryLocation = MemoryLocation.DEVICE,
    ):
        self.id = id
        self.size_class = size_class
        self.num_pages = 1 << size_class
        self.num_bytes = num_bytes
        self.handle = handle
        self.location = location
        self.is_of_budget = location is MemoryLocation.DEVICE and id >= 0
        self.tenant: object = None
        self.contents: object = None
        self.is_dirty = False
        self.is_recyclable = True

    @property
    def is_shared(self) -> bool:
        """Whether others need what it holds, or may read it unseen, so that nobody may write."""
        return self.is_needed_by_several or not self.is_recyclable

    @property
    def is_freeable(self) -> bool:
        """Of one that is mapped: whether device memory becomes free where that is retired."""
        return self.is_of_budget and not self.is_needed_by_several

    def __repr__(self) -> str:
        return (
            f"Extent(id={self.id}, num_pages={self.num_pages}, mappings={self.num_mappings}, "
            f"live={self.num_live_mappings}, owners={self.num_owners})"
        )


def size_classes(num_pages: int, largest_class: int) -> Iterator[int]:
    """The fewest size classes that together are exactly `num_pages`, largest first.

    37 pages with 32-page extents at most: 32 + 4 + 1, so classes 5, 2, 0.
    """
    largest_pages = 1 << largest_class
    for _ in range(num_pages // largest_pages):
        yield largest_class
    rest = num_pages % largest_pages
    while rest:
        size_class = rest.bit_length() - 1
        yield size_class
        rest -= 1 << size_class


# ---- mapping -------------------------------------------------------------------------------------


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
