"""The base of both backends: books that check every operation, counters, and native batches."""

from __future__ import annotations

import abc
import contextlib
import threading
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from struct import Struct
from typing import NamedTuple

from ...errors import DriverError, OutOfAddressSpaceError
from ...units import Address, Handle, KiB, format_bytes
from .. import _native
from ..forks import free_in_children
from ..interrupts import uninterrupted
from .base import (
    PRIMITIVES,
    Access,
    Backend,
    BackendUsage,
    CopyOp,
    MapOp,
    MemoryLocation,
    Op,
    UnmapOp,
)

#: Operation, address, bytes, argument, of executed and of transfer records; see
#: vmkv/core/_native/executor.c.
_RECORD = Struct("=QQQQ")
_MAP, _SET_ACCESS, _UNMAP = 0, 1, 2
_COPY, _FILL = 0, 1

# ---- books ---------------------------------------------------------------------------------------


@dataclass
class Allocation:
    """Memory: its handle at the driver, size, kind, number of mappings, whether it is released."""

    native_handle: int
    num_bytes: int
    location: MemoryLocation = MemoryLocation.DEVICE
    is_shareable: bool = False
    is_exported: bool = False
    is_imported: bool = False
    num_mappings: int = 0
    is_released: bool = False


class Books:
    """Reservations, mappings and handles of one backend. The backend's lock guards them."""

    def __init__(self, granularity_bytes: int):
        self._granularity_bytes = granularity_bytes
        self._reservations: list[tuple[int, int]] = []  # Address and bytes, ascending.
        self._mappings: dict[int, MapOp] = {}  # By address.
        self._mapping_starts: list[int] = []
        self.allocations: dict[Handle, Allocation] = {}
        self.streams: set[int] = set()
        self.pinned: dict[Address, int] = {}

    # ---- address ranges -------------------------------------------------------------------

    def reserve(self, address: int, num_bytes: int) -> None:
        """Book a new reservation."""
        insort(self._reservations, (address, num_bytes))

    def why_not_free(self, address: int, num_bytes: int) -> str | None:
        """Reason to refuse an `address_free`, or None."""
        if (address, num_bytes) not in self._reservations:
            return "not one whole reservation"
        at = bisect_left(self._mapping_starts, address)
        is_empty = (
            at == len(self._mapping_starts) or self._mapping_starts[at] >= address + num_bytes
        )
        return None if is_empty else "something is mapped in it"

    def unreserve(self, address: int) -> None:
        """Remove a reservation."""
        self._reservations = [each for each in self._reservations if each[0] != address]

    # ---- mappings -------------------------------------------------------------------------

    def why_not(self, op: Op, leaving: set[int]) -> str | None:
        """Reason to refuse `op`, or None; a legal unmap adds its mappings' starts to `leaving`."""
        granularity, num_bytes = self._granularity_bytes, op.num_bytes
        if num_bytes <= 0 or num_bytes % granularity or op.address % granularity:
            return f"not a positive multiple of the granularity, {granularity} bytes"
        if isinstance(op, MapOp):
            return self._why_not_map(op)
        starts = self._whole_mappings(op.address, op.num_bytes)
        if not starts or not leaving.isdisjoint(starts):
            return "not a run of whole mappings"
        if isinstance(op, UnmapOp):
            leaving.update(starts)
        elif op.access == Access.READ_WRITE:
            for start in starts:
                its = self.allocations[self._mappings[start].handle]
                if its.is_exported or its.is_imported:
                    return "memory that is shared with other processes can only be read"
        return None

    def _why_not_map(self, op: MapOp) -> str | None:
        address, num_bytes, handle = op
        # Reservations are disjoint, so one that holds the range is the last that starts in it.
        at = bisect_left(self._reservations, (address + 1,)) - 1
        if at < 0 or address + num_bytes > sum(self._reservations[at]):
            return "outside every reservation"
        allocation = self.live(handle)
        if allocation is None:
            return f"handle {handle:#x} is not live"
        if allocation.num_bytes != num_bytes:
            return "not the whole of the handle"
        # Mappings are disjoint, so the last one that starts before the end reaches furthest.
        at = bisect_left(self._mapping_starts, address + num_bytes)
        if at:
            before = self._mapping_starts[at - 1]
            if before + self._mappings[before].num_bytes > address:
                return "something is mapped there"
        return None

    def note_mapped(self, op: MapOp) -> None:
        """Book a map."""
        self._mappings[op.address] = op
        insort(self._mapping_starts, op.address)
        self.allocations[op.handle].num_mappings += 1

    def fill_pieces(self, address: int, num_bytes: int) -> list[tuple[int, int]] | None:
        """Split a range into pieces for one fill each; None if part of it is unmapped."""
        # CUDA fills across mappings in device memory, but not across two in host memory (seen on
        # driver 580).
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

    def _whole_mappings(self, address: int, num_bytes: int) -> list[int]:
        """Starts of the whole mappings that exactly cover the range; empty if there are none."""
        starts = []
        cursor, end = address, address + num_bytes
        while cursor < end:
            mapping = self._mappings.get(cursor)
            if mapping is None:
                return []
            starts.append(cursor)
            cursor += mapping.num_bytes
        return starts if cursor == end else []

    def note_unmapped(self, address: Address, num_bytes: int) -> list[Handle]:
        """Book an unmap; returns released handles without a mapping, which are live until freed."""
        gone: list[Handle] = []
        for start in self._whole_mappings(address, num_bytes):
            handle = self._mappings.pop(start).handle
            del self._mapping_starts[bisect_left(self._mapping_starts, start)]
            allocation = self.allocations[handle]
            allocation.num_mappings -= 1
            if allocation.is_released and not allocation.num_mappings:
                allocation.is_released = False
                gone.append(handle)
        return gone

    # ---- physical memory ------------------------------------------------------------------

    def live(self, handle: Handle) -> Allocation | None:
        """Allocation of a handle that was not released, or None."""
        allocation = self.allocations.get(handle)
        return None if allocation is None or allocation.is_released else allocation

    # ---- the whole ------------------------------------------------------------------------

    def usage(self) -> BackendUsage:
        """Count all resources."""
        held: Counter[MemoryLocation | None] = Counter()
        for each in self.allocations.values():
            held[None if each.is_imported else each.location] += each.num_bytes
        return BackendUsage(
            num_handles=len(self.allocations),
            physical_bytes=held[MemoryLocation.DEVICE],
            host_bytes=held[MemoryLocation.HOST],
            imported_bytes=held[None],
            num_mappings=len(self._mappings),
            mapped_bytes=sum(each.num_bytes for each in self._mappings.values()),
            num_reservations=len(self._reservations),
            reserved_bytes=sum(size for _, size in self._reservations),
            num_streams=len(self.streams),
            pinned_bytes=sum(self.pinned.values()),
        )


# ---- booked --------------------------------------------------------------------------------------


class NativeCalls(NamedTuple):
    """Addresses of the driver's functions, and the type and id of the location that gets access."""

    map: int
    set_access: int
    unmap: int
    copy: int
    fill: int
    location: tuple[int, int]


class BookedBackend(Backend):
    """A backend that checks every operation against its books before the driver sees it."""

    _native_calls: NativeCalls
    _refused_status: int

    def __init__(self, granularity_bytes: int):
        self.granularity_bytes = granularity_bytes
        self.calls = Counter()
        self._books = Books(granularity_bytes)
        self._lock = free_in_children(threading.Lock())
        self._num_handles = 0

    # ---- mappings -------------------------------------------------------------------------

    @uninterrupted
    def run_until_failure(self, ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        """Check and book the operations, then run the legal ones in one native call."""
        with self._lock:
            refusal: DriverError | None = None
            leaving: set[int] = set()
            plan: list[bytes] = []
            books, pack = self._books, _RECORD.pack
            try:
                for op in ops:
                    why = books.why_not(op, leaving)
                    if why is not None:
                        refusal = self._refusal(PRIMITIVES[type(op)], f"{op}: {why}")
                        break
                    if isinstance(op, MapOp):
                        handle = books.allocations[op.handle].native_handle
                        plan.append(pack(_MAP, op.address, op.num_bytes, handle))
                        books.note_mapped(op)
                    elif isinstance(op, UnmapOp):
                        plan.append(pack(_UNMAP, op.address, op.num_bytes, 0))
                    else:
                        plan.append(pack(_SET_ACCESS, op.address, op.num_bytes, op.access))
            except BaseException:
                self._unnote(ops[: len(plan)])
                raise
            num_legal = len(plan)
            calls = self._native_calls
            num_done, status = _native.execute(
                b"".join(plan), calls.map, calls.set_access, calls.unmap, *calls.location
            )
            for op in ops[: num_done + 1]:
                self.calls[PRIMITIVES[type(op)]] += 1
            self._unnote(ops[num_done:num_legal])
            unmapped = [op for op in ops[:num_done] if isinstance(op, UnmapOp)] if leaving else []
            gone = [books.note_unmapped(op.address, op.num_bytes) for op in unmapped]
            for handle in chain.from_iterable(gone):  # Last, because the driver may refuse.
                self._forget(handle)
            if not status:
                return num_done, refusal
            failed = ops[num_done]
            return num_done, self._error(PRIMITIVES[type(failed)], status, f"{failed}")

    def _unnote(self, ops: Sequence[Op]) -> None:
        """Take booked maps that were not executed out of the books."""
        for op in ops:
            if isinstance(op, MapOp):
                self._books.note_unmapped(op.address, op.num_bytes)

    # ---- address ranges -------------------------------------------------------------------

    @uninterrupted
    def address_reserve(self, num_bytes: int) -> Address:
        """Reserve addresses. Cost: about 6 µs on a GPU, whatever the size."""
        self.calls["address_reserve"] += 1
        self._check_size("address_reserve", num_bytes)
        try:
            address = self._reserve(num_bytes)
        except DriverError as error:
            if not error.is_out_of_memory:
                raise
            raise OutOfAddressSpaceError(
                f"{self.name} has no {format_bytes(num_bytes)} of free addresses; "
                "close other caches, or ask for fewer max_tokens or rows",
                needed_bytes=num_bytes,
            ) from error
        with self._lock:
            self._books.reserve(address, num_bytes)
        return Address(address)

    @uninterrupted
    def address_free(self, address: Address, num_bytes: int) -> None:
        """Free one whole reservation."""
        self.calls["address_free"] += 1
        with self._lock:
            refusal = self._books.why_not_free(address, num_bytes)
            if refusal is not None:
                raise self._refusal("address_free", refusal)
            self._unreserve(address, num_bytes)
            self._books.unreserve(address)

    # ---- physical memory ------------------------------------------------------------------

    @uninterrupted
    def mem_create(
        self,
        num_bytes: int,
        location: MemoryLocation = MemoryLocation.DEVICE,
        *,
        shareable: bool = False,
    ) -> Handle:
        """Allocate memory. Cost on an H200: 10-16 µs; in `HOST` 0.1 ms for 2 MiB, 10 for 64."""
        self.calls["mem_create"] += 1
        self._check_size("mem_create", num_bytes)
        native_handle = self._create(num_bytes, location, shareable)
        return self._book(Allocation(native_handle, num_bytes, location, is_shareable=shareable))

    @uninterrupted
    def mem_export(self, handle: Handle) -> int:
        """Export memory as a descriptor, which the caller closes."""
        self.calls["mem_export"] += 1
        with self._lock:
            allocation = self._books.live(handle)
            if allocation is None or not allocation.is_shareable:
                details = f"handle {handle:#x} is not live, or not shareable"
                raise self._refusal("mem_export", details)
            fd = self._export(allocation.native_handle)
            allocation.is_exported = True
        return fd

    @uninterrupted
    def mem_import(self, fd: int, num_bytes: int) -> Handle:
        """Import exported memory. Cost on a GPU: some 100 µs, most of it to find out the size."""
        self.calls["mem_import"] += 1
        self._check_size("mem_import", num_bytes)
        native_handle, location = self._import(fd, num_bytes)
        return self._book(Allocation(native_handle, num_bytes, location, is_imported=True))

    @uninterrupted
    def mem_release(self, handle: Handle) -> None:
        """Release a handle; its memory lives until its last mapping is gone."""
        self.calls["mem_release"] += 1
        with self._lock:
            allocation = self._books.live(handle)
            if allocation is None:
                raise self._refusal("mem_release", f"handle {handle:#x} is not live")
            if not allocation.num_mappings:
                self._forget(handle)
            allocation.is_released = True

    def _forget(self, handle: Handle) -> None:
        """Free the memory of a live handle without a mapping; on failure it stays live. Locked."""
        self._free(self._books.allocations[handle])
        del self._books.allocations[handle]

    def _check_size(self, call: str, num_bytes: int) -> None:
        if num_bytes <= 0 or num_bytes % self.granularity_bytes:
            raise self._refusal(call, f"{num_bytes} bytes are no multiple of the granularity")

    def _book(self, allocation: Allocation) -> Handle:
        """Book memory under a new number: an import may have the driver's number of its export."""
        with self._lock:
            self._num_handles += 1
            handle = Handle(self._num_handles)
            self._books.allocations[handle] = allocation
        return handle

    # ---- data -----------------------------------------------------------------------------

    @uninterrupted
    def pin(self, address: Address, num_bytes: int) -> None:
        """Pin memory of this process."""
        self.calls["pin"] += 1
        self._pin(address, num_bytes)
        with self._lock:
            self._books.pinned[address] = num_bytes

    @uninterrupted
    def unpin(self, address: Address) -> None:
        """Unpin memory; what the driver refuses stays pinned."""
        self.calls["unpin"] += 1
        with self._lock:
            if address not in self._books.pinned:
                raise self._refusal("unpin", f"{address:#x} is not pinned")
            self._unpin(address)
            del self._books.pinned[address]

    def copy(self, destination: Address, source: Address, num_bytes: int, stream: int) -> None:
        """Submit one copy; see `copy_many`."""
        self.copy_many([CopyOp(destination, source, num_bytes)], stream)

    @uninterrupted
    def copy_many(self, ops: Sequence[CopyOp], stream: int) -> None:
        """Submit copies in one native call. Cost: under 2 µs each on a GPU."""
        if not ops:
            return
        plan = bytearray()
        for op in ops:
            if op.num_bytes < 0:
                self.calls["copy"] += 1
                raise self._refusal("copy", f"{op}")
            plan += _RECORD.pack(_COPY, op.destination, op.num_bytes, op.source)
        self._submit("copy", bytes(plan), len(ops), stream)

    @uninterrupted
    def fill(self, address: Address, num_bytes: int, byte: int, stream: int) -> None:
        """Submit one fill per piece of the range that the driver can fill in one call."""
        pieces = None
        if num_bytes >= 0 and 0 <= byte <= 0xFF:
            with self._lock:
                pieces = self._books.fill_pieces(address, num_bytes)
        if pieces is None:
            self.calls["fill"] += 1
            details = f"{num_bytes} bytes at {address:#x} with {byte}: no byte, or not all mapped"
            raise self._refusal("fill", details)
        plan = b"".join([_RECORD.pack(_FILL, start, size, byte) for start, size in pieces])
        self._submit("fill", plan, len(pieces), stream)

    def _submit(self, call: str, plan: bytes, num_records: int, stream: int) -> None:
        calls = self._native_calls
        with self._in_context():
            num_done, status = _native.transfer(plan, calls.copy, calls.fill, stream)
        with self._lock:
            self.calls[call] += min(num_done + 1, num_records)
        if status:
            error = self._error(call, status, "")
            error.num_done = num_done
            raise error

    # ---- streams --------------------------------------------------------------------------

    @uninterrupted
    def new_stream(self, *, is_noted: bool = True) -> int:
        """Create a stream, and note it with `is_noted`."""
        self.calls["new_stream"] += 1
        stream = self._new_stream()
        if is_noted:
            self.note_stream(stream)
        with self._lock:
            self._books.streams.add(stream)
        return stream

    @uninterrupted
    def stream_destroy(self, stream: int) -> None:
        """Wait for the work on a stream of `new_stream`, and destroy it."""
        self.calls["stream_destroy"] += 1
        with self._lock:
            if stream not in self._books.streams:
                raise self._refusal("stream_destroy", f"{stream:#x} is no stream of this backend")
        self._end_stream(stream)
        with self._lock:
            self._books.streams.discard(stream)

    # ---- books ----------------------------------------------------------------------------

    def usage(self) -> BackendUsage:
        """Count all resources."""
        with self._lock:
            return self._books.usage()

    def free_host_memory_bytes(self) -> int:
        """Return the kernel's estimate of memory available without swapping."""
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * KiB
        raise self._refusal("free_host_memory_bytes", "/proc/meminfo does not say")

    # ---- what a driver adds ---------------------------------------------------------------

    def _in_context(self) -> contextlib.AbstractContextManager[None]:
        """Context manager that the driver needs around copies."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def _pin(self, address: Address, num_bytes: int) -> None:
        """Pin memory of this process with the driver."""

    @abc.abstractmethod
    def _unpin(self, address: Address) -> None:
        """Unpin memory with the driver. Locked."""

    @abc.abstractmethod
    def _new_stream(self) -> int:
        """Create a stream."""

    @abc.abstractmethod
    def _end_stream(self, stream: int) -> None:
        """Wait for the work on a stream, and destroy it."""

    @abc.abstractmethod
    def _reserve(self, num_bytes: int) -> int:
        """Reserve an address range with the driver."""

    @abc.abstractmethod
    def _unreserve(self, address: Address, num_bytes: int) -> None:
        """Free an address range with the driver. Locked."""

    @abc.abstractmethod
    def _create(self, num_bytes: int, location: MemoryLocation, shareable: bool) -> int:
        """Allocate memory with the driver; returns its handle there."""

    @abc.abstractmethod
    def _export(self, native_handle: int) -> int:
        """Return a file descriptor of exported memory. Locked."""

    @abc.abstractmethod
    def _import(self, fd: int, num_bytes: int) -> tuple[int, MemoryLocation]:
        """Import memory of exactly this size; returns the driver's handle and the location."""

    @abc.abstractmethod
    def _free(self, allocation: Allocation) -> None:
        """Free memory that is mapped nowhere. Locked."""

    @abc.abstractmethod
    def _error(self, call: str, status: int, details: str) -> DriverError:
        """Make the error for the driver's `status`."""

    def _refusal(self, call: str, details: str) -> DriverError:
        """Make the error for a call that the contract refuses."""
        return self._error(call, self._refused_status, details)


def describe(num_bytes: int, location: MemoryLocation) -> str:
    """Describe an allocation in an error message."""
    return f"{format_bytes(num_bytes)} in {location.value} memory"
