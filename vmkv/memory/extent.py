"""Extents: the unit of physical memory, one driver handle of 2^k pages.

Sizes are mixed because a driver call costs per mapping, not per byte: a prompt is mapped in
a few large extents, a tail grows by small ones. An extent is always mapped whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from .._native import References
from ..backend import MemoryLocation
from ..units import Handle


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
