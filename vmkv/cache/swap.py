"""Swapping: a sequence's memory to the host and back, at the same addresses.

    resident --swap_out--> moving --let_go--> swapped --swap_in--> resident
                              '-----cancel----> resident

A sequence is let go when its transfer is finished, or earlier when memory is short: its device
memory is retired behind a fence that covers the copies.

The copies run on a stream of their own, beside the compute stream's work: outwards behind what
that was given so far, inwards before what it is given next. Because addresses stay, views of the
sequence and CUDA graphs captured over it are valid again after `swap_in`. What a sequence shares
stays where it is: it costs nothing as long as others hold it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..backend import Access, Fence, MemoryLocation
from ..errors import ConfigError
from ..memory import (
    Extent,
    ExtentPool,
    Mapping,
    PageTable,
    Placement,
    RecordedFence,
    RowChange,
    change,
    size_classes,
)
from ..units import Address

if TYPE_CHECKING:
    from .layer_group import LayerGroup
    from .rowed import RowedCache
    from .sequence import Sequence as Moving


@dataclass(frozen=True)
class Part:
    """The pages of one group's row that move: a run to the end of what the sequence holds.

    Attributes:
        group: The group.
        row: The row.
        first_page: Where the run starts.
        num_pages: Its length.
        num_bytes: How much of it holds tokens.
    """

    group: LayerGroup
    row: int
    first_page: int
    num_pages: int
    num_bytes: int

    @property
    def address(self) -> Address:
        """Where it lies."""
        return self.group.table.page_address(self.row, self.first_page)

    def mappings(self) -> list[Mapping]:
        """What is mapped there, and behind."""
        table = self.group.table
        return table.overlapping(self.row, self.first_page, table.row_pages)

    def wait_until_gone(self) -> None:
        """Wait until what was retired from these pages is unmapped."""
        end = self.group.table.page_address(self.row, self.first_page + self.num_pages)
        self.group.pool.reclaimer.wait_for_range(self.address, end)


def parts_to_move(
    groups: Sequence[LayerGroup], row: int, num_tokens: int, overread_tokens: int
) -> list[Part]:
    """What swapping a row of `num_tokens` tokens out moves: all behind what it shares."""
    parts = []
    for group in groups:
        end_tokens = min(num_tokens + overread_tokens, group.geometry.row_tokens)
        end_page = group.geometry.pages_for(end_tokens) if num_tokens else 0
        mappings = group.table.overlapping(row, 0, end_page)
        own = next((each for each in mappings if not each.extent.is_shared), None)
        if own is not None:
            start_bytes = own.first_page * group.geometry.page_bytes
            num_bytes = num_tokens * group.geometry.token_bytes - start_bytes
            num_pages = end_page - own.first_page
            parts.append(Part(group, row, own.first_page, num_pages, max(0, num_bytes)))
    return parts


@dataclass(frozen=True)
class Swapped:
    """Where the moved parts of a sequence are now.

    Attributes:
        parts: What moved.
        extents: Host memory that holds it, part after part, each starting on a page.
        staging: Where that is mapped meanwhile, from the first page on, which also keeps it.
            Granting access takes half as long as copying, so it is done once for both ways.
    """

    parts: Sequence[Part]
    extents: Sequence[Extent]
    staging: PageTable

    def retire(self, fence: RecordedFence) -> None:
        """Retire the device memory that the parts had, until `fence` has passed."""
        for part in self.parts:
            part.group.table.retire_back(part.row, part.first_page, fence)

    @property
    def num_bytes(self) -> int:
        """What is copied."""
        return sum(part.num_bytes for part in self.parts)

    def drop(self, pool: ExtentPool) -> None:
        """Let go of the host memory, once the copies given to any stream so far are through.

        Raises:
            DriverError: It is still held.
        """
        self.staging.close_behind(pool.reclaimer.new_fence())


class _Piece(NamedTuple):
    """One host extent, and what of a part it holds.

    Copies go piece by piece, because mapping the next one costs less than copying this one.
    """

    extent: Extent
    staging_page: int
    part: Part
    page: int
    num_bytes: int

    @property
    def address(self) -> Address:
        """Where the piece lies in its row."""
        return self.part.group.table.page_address(self.part.row, self.page)


def _pieces(swapped: Swapped) -> Iterator[_Piece]:
    supply = iter(swapped.extents)
    staging_page = 0
    for part in swapped.parts:
        page = 0
        while page < part.num_pages:
            extent = next(supply)
            start_bytes = page * part.group.geometry.page_bytes
            num_bytes = max(0, min(extent.num_bytes, part.num_bytes - start_bytes))
            yield _Piece(extent, staging_page, part, part.first_page + page, num_bytes)
            page += extent.num_pages
            staging_page += extent.num_pages


class Transfer:
    """A sequence on its way to host memory. Its device memory is held until it is let go.

    Attributes:
        swapped: What moves, and where to.
    """

    def __init__(self, cache: RowedCache, sequence: Moving, swapped: Swapped, fence: Fence):
        self.swapped = swapped
        self._cache = cache
        self._sequence = sequence
        self._fence = fence

    def has_arrived(self) -> bool:
        """Whether the copies are through. Never blocks."""
        return self._fence.has_passed()

    def finish(self) -> None:
        """Wait until the sequence is swapped out and its device memory free. Idempotent.

        Raises:
            DriverError: It may be swapped out, its memory not free yet.
        """
        if self._sequence.transfer is self:
            self._cache.let_go(self._sequence)
        for part in self.swapped.parts:
            part.wait_until_gone()

    def cancel(self) -> None:
        """Leave the sequence where it is; its copy is dropped.

        Raises:
            ConfigError: It has left: `finish` was called, or a cache was out of memory.
            DriverError: Call it again.
        """
        if self._sequence.transfer is not self:
            raise ConfigError(f"{self._sequence} has left; swap_in() brings it back")
        self._cache.cancel_transfer(self._sequence)


def moving_ends(sequence: Moving) -> list[tuple[int, Extent]]:
    """What a moving sequence could give up: it leaves as a whole, or not while part is pinned."""
    transfer = sequence.transfer
    parts = () if transfer is None else transfer.swapped.parts
    mappings = [mapping for part in parts for mapping in part.mappings()]
    is_pinned = any(mapping.num_pins for mapping in mappings)
    return [] if is_pinned else [(0, mapping.extent) for mapping in mappings]


def begin_swap_out(cache: RowedCache, sequence: Moving) -> Transfer:
    """Start copying a sequence's own memory to the host.

    Raises:
        OutOfPagesError: No host memory is left. Nothing changed.
        OutOfAddressSpaceError, DriverError: Nothing changed.

    Cost: a mapping and an asynchronous copy per extent; host memory that the pool has to create
        first costs ten times what it costs to fill (10 ms for 64 MiB).
    """
    pool, backend = cache.pool, cache.pool.backend
    pool.reclaimer.free_idle_reservations()
    row, num_tokens = sequence.row, sequence.num_tokens
    parts = parts_to_move(cache.groups, row, num_tokens, cache.overread_tokens)
    extents = pool.acquire_or_evict(_classes(parts, pool.largest_class), MemoryLocation.HOST)
    try:
        staging = PageTable(pool, 1, max(1, sum(part.num_pages for part in parts)))
        swapped = Swapped(parts, extents, staging)
        try:
            side = cache.side_stream()
            backend.stream_wait(side, cache.current_stream())
            for piece in _pieces(swapped):
                placement = Placement(0, piece.staging_page, [piece.extent])
                backend.execute(staging.ops_to_map(placement, Access.READ_WRITE))
                staging.note_mapped(placement, Access.READ_WRITE)
                if piece.num_bytes:
                    at = staging.page_address(0, piece.staging_page)
                    backend.copy(at, piece.address, piece.num_bytes, side)
            fence = pool.reclaimer.new_fence()
            pool.reclaimer.poll()  # While the copies run, for which nothing need be done.
        except BaseException:
            staging.close(lambda: False)
            raise
    finally:
        pool.disown(extents)  # From here on the staging addresses hold them.
    return Transfer(cache, sequence, swapped, fence)


def swap_in(cache: RowedCache, swapped: Swapped, tenant: object) -> None:
    """Map new device memory where a row's was, and copy its contents back.

    The current stream waits for the copies, the caller does not.

    Raises:
        OutOfPagesError: No device memory is left, even if parked rows give way. Nothing changed.
        OutOfAddressSpaceError, DriverError: Nothing changed.
    """
    pool, backend = cache.pool, cache.pool.backend
    pieces = list(_pieces(swapped))
    parts = [
        RowChange(
            piece.part.group.table, piece.part.row, piece.page, [piece.extent.size_class], tenant
        )
        for piece in pieces
    ]
    side, current = cache.side_stream(), cache.current_stream()
    with change(pool, parts) as made:
        for piece, _ in zip(pieces, made.one_by_one(side), strict=True):
            if piece.num_bytes:
                at = swapped.staging.page_address(0, piece.staging_page)
                backend.copy(piece.address, at, piece.num_bytes, side)
        backend.stream_wait(current, side)
        swapped.drop(pool)


def _classes(parts: Sequence[Part], largest_class: int) -> list[int]:
    """Extents for the parts, none of which is shared between two."""
    return [
        size_class for part in parts for size_class in size_classes(part.num_pages, largest_class)
    ]
