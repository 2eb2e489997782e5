"""Extents: the unit of physical memory, one driver handle of 2^k pages, always mapped whole.

Sizes are mixed because a driver call costs per mapping, not per byte.
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
    """A physical allocation with reference counts.

    Invariant (I2): `num_references == num_mappings + num_owners`. An owner is any user other than a
    mapping. `count_references` changes the counts atomically without a lock, and the one caller
    that drops the last reference returns the extent to the pool.

    `id` is its number in the free list, stable while the handle lives. `is_of_budget` means device
    memory that this pool created. `tenant` and `contents` record the last write; see `Scrub.byte`.
    An extent that is not `is_recyclable`, exported or imported, is released instead of reused.
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


def size_classes(num_pages: int, largest_class: int) -> Iterator[int]:
    """Yield the fewest size classes that sum to `num_pages`, largest first: 5, 2, 0 for 37."""
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
    """An extent at a place in a row. A mapping with `num_pins > 0` is being read and stays."""

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


@dataclass
class RowPages:
    """The run of mapped pages of one row, in order.

    No page from `shared_end_page` on is shared or read-only; the bound may be too high.
    """

    mappings: deque[Mapping] = field(default_factory=deque)
    shared_end_page: int = 0

    @property
    def first_page(self) -> int:
        """First page of the run; 0 for an empty one."""
        return self.mappings[0].first_page if self.mappings else 0

    @property
    def end_page(self) -> int:
        """Page after the last of the run; 0 for an empty one."""
        return self.mappings[-1].end_page if self.mappings else 0

    @property
    def num_pages(self) -> int:
        """Number of mapped pages."""
        return self.end_page - self.first_page

    def note_shared(self, mapping: Mapping) -> None:
        """Raise `shared_end_page` for `mapping`, which is mapped elsewhere as well."""
        self.shared_end_page = max(self.shared_end_page, mapping.end_page)


class MappedRows(Protocol):
    """Interface of `PageTable` for the modules that it imports."""

    address: Address
    row_pages: int
    rows: list[RowPages]

    def page_address(self, row: int, page: int) -> Address:
        """Address of `page` of `row`."""

    def overlapping(self, row: int, first_page: int, end_page: int) -> list[Mapping]:
        """Mappings of `row` that intersect `[first_page, end_page)`, in order."""

    def ops_to_set_access(self, row: int, mappings: Sequence[Mapping], access: Access) -> list[Op]:
        """Driver operations that set the access of mappings, one per contiguous run."""

    def close(self, has_views: Callable[[], bool]) -> None:
        """Retire every row, wait until all is unmapped, and free the reservation."""
