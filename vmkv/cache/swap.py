"""Swapping: a sequence's memory to the host and back, at the same addresses.

    resident --swap_out--> moving --leave--> swapped --swap_in--> resident
                              '----cancel--> resident

A sequence leaves when its transfer is finished, or earlier when memory is short: its device
memory is retired behind a fence that covers the copies.

The copies run on a stream of their own, beside the compute stream's work: outwards behind what
that was given so far, inwards before what it is given next. Because addresses stay, views of the
sequence and CUDA graphs captured over it are valid again after `swap_in`. What a sequence shares
stays where it is: it costs nothing as long as others hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..backend import Access, Fence, MemoryLocation
from ..errors import ConfigError
from ..memory import (
    Extent,
    Mapping,
    PageTable,
    Placement,
    RowChange,
    Victim,
    change,
    size_classes,
)
from ..units import Address
from .layer_group import LayerGroup
from .row_space import LiveRow, RowSpace
from .victims import victim_of


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

    def mappings(self) -> list[Mapping]:
        """What is mapped there, and behind."""
        table = self.group.table
        return table.overlapping(self.row, self.first_page, table.row_pages)

    def wait_until_gone(self) -> None:
        """Wait until what was retired from these pages is unmapped."""
        table = self.group.table
        end = table.page_address(self.row, self.first_page + self.num_pages)
        start = table.page_address(self.row, self.first_page)
        self.group.pool.reclaimer.wait_for_range(start, end)


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

    @property
    def num_bytes(self) -> int:
        """What is copied."""
        return sum(part.num_bytes for part in self.parts)

    def drop(self) -> None:
        """Give the host memory up, once the copies given to any stream so far are through.

        Raises:
            DriverError: It is still held.
        """
        self.staging.close_behind(self.staging.pool.reclaimer.new_fence())


class Transfer:
    """A sequence on its way to host memory. Its device memory is held until it leaves.

    Args:
        sequence: The sequence.
        swapped: What moves, and where to.
        fence: Covers the copies.
        end: Told once how it ended: with what is swapped out, or None if the sequence stays.

    Attributes:
        swapped: What moves, and where to.
    """

    def __init__(
        self,
        sequence: LiveRow,
        swapped: Swapped,
        fence: Fence,
        end: Callable[[Swapped | None], None],
    ):
        self.swapped = swapped
        self._sequence = sequence
        self._space = sequence.cache
        self._fence = fence
        self._tell_end = end
        self._is_moving = True
        self._space.moving[sequence.row] = self._victim

    def has_arrived(self) -> bool:
        """Whether the copies are through. Never blocks."""
        return self._fence.has_passed()

    def finish(self) -> None:
        """Wait until the sequence is swapped out and its device memory free. Idempotent.

        Raises:
            DriverError: It may be swapped out, its memory not free yet.
        """
        self._leave()
        for part in self.swapped.parts:
            part.wait_until_gone()

    def cancel(self) -> None:
        """Leave the sequence where it is; its copy is dropped.

        Raises:
            ConfigError: It has left: `finish` was called, or a cache was out of memory.
            DriverError: Call it again.
        """
        if not self.stay():
            raise ConfigError(f"{self._sequence} has left; swap_in() brings it back")

    def stay(self) -> bool:
        """`cancel`, unless it has ended; returns whether it had not."""
        with self._space.pool.lock:
            if not self._is_moving:
                return False
            self.swapped.drop()
            self._end(None)
            return True

    def _leave(self) -> None:
        """The sequence is swapped out from now on: its device memory is retired."""
        space = self._space
        with space.pool.lock:
            if self._is_moving:
                fence = space.pool.reclaimer.new_fence()
                for part in self.swapped.parts:
                    part.group.table.retire_back(part.row, part.first_page, fence)
                self._end(self.swapped)
                space.prefixes.hide(self._sequence.row)
                space.sharing.swapped_out_bytes += self.swapped.num_bytes

    def _end(self, swapped: Swapped | None) -> None:
        self._is_moving = False
        del self._space.moving[self._sequence.row]
        self._tell_end(swapped)

    def _victim(self) -> Victim:
        """First in line: nobody loses anything by it."""
        return victim_of(self._gives, lambda _: self._leave(), last_used=0)

    def _gives(self) -> list[tuple[int, Extent]]:
        """What it could give up: it leaves as a whole, or not while part is pinned."""
        if not self._is_moving:
            return []
        mappings = [mapping for part in self.swapped.parts for mapping in part.mappings()]
        is_pinned = any(mapping.num_pins for mapping in mappings)
        return [] if is_pinned else [(0, mapping.extent) for mapping in mappings]


def begin_swap_out(sequence: LiveRow, end: Callable[[Swapped | None], None]) -> Transfer:
    """Start copying a sequence's own memory to the host; `end` is told how it ended.

    Raises:
        OutOfPagesError: No host memory is left. Nothing changed.
        OutOfAddressSpaceError, DriverError: Nothing changed.

    Cost: a mapping and an asynchronous copy per extent; host memory that the pool has to create
        first costs ten times what it costs to fill (10 ms for 64 MiB).
    """
    space = sequence.cache
    pool, backend = space.pool, space.pool.backend
    space.note_stream()
    pool.reclaimer.free_idle_reservations()
    parts = _parts_to_move(space, sequence.row, sequence.num_tokens)
    # Extents for the parts, none of which is shared between two.
    classes = [each for part in parts for each in size_classes(part.num_pages, pool.largest_class)]
    extents = pool.acquire_or_evict(classes, MemoryLocation.HOST)
    try:
        staging = PageTable(pool, 1, max(1, sum(part.num_pages for part in parts)))
        swapped = Swapped(parts, extents, staging)
        try:
            side = space.side_stream()
            backend.stream_wait(side, space.current_stream())
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
    with pool.lock:
        return Transfer(sequence, swapped, fence, end)


def swap_in(space: RowSpace, swapped: Swapped, row: int, tenant: object) -> None:
    """Map new device memory where that of `row` was, and copy its contents back.

    The current stream waits for the copies, the caller does not.

    Raises:
        OutOfPagesError: No device memory is left, even if parked rows give way. Nothing changed.
        OutOfAddressSpaceError, DriverError: Nothing changed.
    """
    space.note_stream()
    backend = space.pool.backend
    pieces = list(_pieces(swapped))
    changes = [
        RowChange(piece.part.group.table, row, piece.page, [piece.extent.size_class], tenant)
        for piece in pieces
    ]
    side, current = space.side_stream(), space.current_stream()
    with change(space.pool, changes) as made:
        for piece, _ in zip(pieces, made.one_by_one(side), strict=True):
            if piece.num_bytes:
                at = swapped.staging.page_address(0, piece.staging_page)
                backend.copy(piece.address, at, piece.num_bytes, side)
        backend.stream_wait(current, side)
        swapped.drop()
    space.sharing.swapped_in_bytes += swapped.num_bytes
    with space.pool.lock:
        space.prefixes.take(row)


def drop_swapped(space: RowSpace, swapped: Swapped, row: int) -> None:
    """Give up what `row`, whose sequence ends, has in host memory. Locked."""
    swapped.drop()
    space.prefixes.truncate(row, space.resident_tokens(row))


# ---- what moves ---------------------------------------------------------------------------


def _parts_to_move(space: RowSpace, row: int, num_tokens: int) -> list[Part]:
    """What swapping a row of `num_tokens` tokens out moves: all behind what it shares."""
    parts = []
    for group in space.groups:
        end_tokens = min(num_tokens + space.overread_tokens, group.geometry.row_tokens)
        end_page = group.geometry.pages_for(end_tokens) if num_tokens else 0
        mappings = group.table.overlapping(row, 0, end_page)
        own = next((each for each in mappings if not each.extent.is_shared), None)
        if own is not None:
            start_bytes = own.first_page * group.geometry.page_bytes
            num_bytes = num_tokens * group.geometry.token_bytes - start_bytes
            num_pages = end_page - own.first_page
            parts.append(Part(group, row, own.first_page, num_pages, max(0, num_bytes)))
    return parts


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
