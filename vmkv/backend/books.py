"""What a backend holds: reservations, allocations, and which lies behind which address.

Both backends keep these books. They answer `usage()`, they say which operations the contract
refuses, and they are what the driver's own state is checked against.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from ..units import Handle
from .base import Access, AccessOp, BackendUsage, MapOp, MemoryLocation, Op, UnmapOp


@dataclass
class Allocation:
    """One handle: its size and kind, its mappings, and whether its owner has given it up."""

    num_bytes: int
    location: MemoryLocation = MemoryLocation.DEVICE
    is_shareable: bool = False
    is_exported: bool = False
    is_imported: bool = False
    num_mappings: int = 0
    is_released: bool = False

    @property
    def is_frozen(self) -> bool:
        """Whether another process may be reading, so that nobody may begin to write."""
        return self.is_exported or self.is_imported

    @property
    def is_gone(self) -> bool:
        """Whether nothing keeps the memory alive any more."""
        return self.is_released and not self.num_mappings


class Books:
    """The books of one backend. Not locked: the backend's lock guards them.

    Args:
        granularity_bytes: What sizes and addresses must be multiples of.
    """

    def __init__(self, granularity_bytes: int):
        self._granularity_bytes = granularity_bytes
        self._reservations: dict[int, int] = {}
        self._reservation_starts: list[int] = []
        self._mappings: dict[int, MapOp] = {}  # By address, each as it was made.
        self._mapping_starts: list[int] = []
        self.allocations: dict[Handle, Allocation] = {}
        self.streams: set[int] = set()

    # ---- address ranges -------------------------------------------------------------------

    def reserve(self, address: int, num_bytes: int) -> None:
        """Note a new reservation."""
        self._reservations[address] = num_bytes
        insort(self._reservation_starts, address)

    def why_not_free(self, address: int, num_bytes: int) -> str | None:
        """Why `address_free` is refused, or None."""
        if self._reservations.get(address) != num_bytes:
            return "not one whole reservation"
        return "something is mapped in it" if self._is_occupied(address, num_bytes) else None

    def unreserve(self, address: int) -> None:
        """Forget a reservation."""
        del self._reservations[address]
        del self._reservation_starts[bisect_left(self._reservation_starts, address)]

    # ---- mappings -------------------------------------------------------------------------

    def why_not(self, op: Op, leaving: set[int]) -> str | None:
        """Why `op` is refused, or None.

        Args:
            op: The operation.
            leaving: Starts of mappings that earlier operations of the batch unmap; an unmap
                that is allowed adds to it.
        """
        granularity, num_bytes = self._granularity_bytes, op.num_bytes
        if num_bytes <= 0 or num_bytes % granularity or op.address % granularity:
            return f"not a positive multiple of the granularity, {granularity} bytes"
        if isinstance(op, MapOp):
            return self._why_not_map(op)
        starts = self._whole_mappings(op.address, op.num_bytes)
        if not starts or not leaving.isdisjoint(starts):
            return "not a run of whole mappings"
        if isinstance(op, AccessOp):
            return self._why_not_access(op, starts)
        leaving.update(starts)
        return None

    def _why_not_access(self, op: AccessOp, starts: list[int]) -> str | None:
        is_writable = op.access == Access.READ_WRITE
        if is_writable or op.for_cpu:
            allocations = [self.allocations[self._mappings[start].handle] for start in starts]
            if is_writable and any(each.is_frozen for each in allocations):
                return "memory that is shared with other processes can only be read"
            if op.for_cpu and any(each.location is MemoryLocation.DEVICE for each in allocations):
                return "the CPU cannot reach the device's memory"
        return None

    def fill_pieces(self, address: int, num_bytes: int) -> list[tuple[int, int]] | None:
        """Address and bytes of what may be filled in one go each; None where a hole is in between.

        CUDA fills over any number of mappings in the device's memory at once, but over no two in
        the host's (seen on driver 580).
        """
        pieces: list[tuple[int, int]] = []
        was_device = False
        cursor, end = address, address + num_bytes
        at = max(0, bisect_right(self._mapping_starts, address) - 1)
        for start in islice(self._mapping_starts, at, None):
            mapping = self._mappings[start]
            piece_end = min(end, start + mapping.num_bytes)
            if cursor >= end or start > cursor:
                break
            if piece_end <= cursor:
                continue
            is_device = self.allocations[mapping.handle].location is MemoryLocation.DEVICE
            if is_device and was_device:
                first, _ = pieces.pop()
                pieces.append((first, piece_end - first))
            else:
                pieces.append((cursor, piece_end - cursor))
            was_device = is_device
            cursor = piece_end
        return pieces if cursor >= end else None

    def _why_not_map(self, op: MapOp) -> str | None:
        address, num_bytes, handle = op
        at = bisect_right(self._reservation_starts, address) - 1
        start = self._reservation_starts[at] if at >= 0 else 0
        if at < 0 or address + num_bytes > start + self._reservations[start]:
            return "outside every reservation"
        allocation = self.live(handle)
        if allocation is None:
            return f"handle {handle:#x} is not live"
        if allocation.num_bytes != num_bytes:
            return "not the whole of the handle"
        return "something is mapped there" if self._is_occupied(address, num_bytes) else None

    def _is_occupied(self, address: int, num_bytes: int) -> bool:
        starts = self._mapping_starts
        after = bisect_left(starts, address)
        if after < len(starts) and starts[after] < address + num_bytes:
            return True
        if not after:
            return False
        before = starts[after - 1]
        return before + self._mappings[before].num_bytes > address

    def _whole_mappings(self, address: int, num_bytes: int) -> list[int]:
        """Where the mappings start that together are exactly the range; empty if none do."""
        starts = []
        cursor, end = address, address + num_bytes
        while cursor < end:
            mapping = self._mappings.get(cursor)
            if mapping is None:
                return []
            starts.append(cursor)
            cursor += mapping.num_bytes
        return starts if cursor == end else []

    def note(self, op: Op) -> None:
        """Book a map; the other operations change nothing here (see `note_unmapped`)."""
        if isinstance(op, MapOp):
            self._mappings[op.address] = op
            insort(self._mapping_starts, op.address)
            self.allocations[op.handle].num_mappings += 1

    def unnote(self, op: Op) -> None:
        """Take `note` back for an operation that was not executed."""
        if isinstance(op, MapOp):
            for _ in self.note_unmapped(UnmapOp(op.address, op.num_bytes)):
                pass

    def note_unmapped(self, op: UnmapOp) -> Iterator[tuple[Handle, Allocation]]:
        """Book an unmap; yields each handle that lost a mapping."""
        for start in self._whole_mappings(op.address, op.num_bytes):
            handle = self._mappings.pop(start).handle
            del self._mapping_starts[bisect_left(self._mapping_starts, start)]
            allocation = self.allocations[handle]
            allocation.num_mappings -= 1
            yield handle, allocation

    # ---- physical memory ------------------------------------------------------------------

    def live(self, handle: Handle) -> Allocation | None:
        """The allocation of a handle that was not released."""
        allocation = self.allocations.get(handle)
        return None if allocation is None or allocation.is_released else allocation

    def why_not_export(self, handle: Handle) -> str | None:
        """Why `mem_export` is refused, or None."""
        allocation = self.live(handle)
        if allocation is None:
            return f"handle {handle:#x} is not live"
        return None if allocation.is_shareable else f"handle {handle:#x} is not shareable"

    # ---- the whole ------------------------------------------------------------------------

    def usage(self) -> BackendUsage:
        """Everything, counted."""
        return BackendUsage(
            num_handles=len(self.allocations),
            physical_bytes=self._created_bytes(MemoryLocation.DEVICE),
            host_bytes=self._created_bytes(MemoryLocation.HOST),
            imported_bytes=sum(e.num_bytes for e in self.allocations.values() if e.is_imported),
            num_mappings=len(self._mappings),
            mapped_bytes=sum(each.num_bytes for each in self._mappings.values()),
            num_reservations=len(self._reservations),
            reserved_bytes=sum(self._reservations.values()),
            num_streams=len(self.streams),
        )

    def _created_bytes(self, location: MemoryLocation) -> int:
        return sum(
            each.num_bytes
            for each in self.allocations.values()
            if each.location is location and not each.is_imported
        )
