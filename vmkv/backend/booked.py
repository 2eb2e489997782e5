"""What both backends share: books, counters, and batches through the native executor."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from .. import _native
from ..errors import DriverError, OutOfAddressSpaceError
from ..interrupts import uninterrupted
from ..units import Address, Handle, KiB, format_bytes
from .base import (
    Backend,
    BackendUsage,
    CopyOp,
    MapOp,
    MemoryLocation,
    Op,
    UnmapOp,
    primitive_of,
)
from .books import Allocation, Books
from .plan import pack, pack_copy, pack_fill

# Handles whose number is ours and not the driver's. Neither driver gives out one with this bit.
_OWN_NUMBER = 1 << 63


class NativeCalls(NamedTuple):
    """Where the executor finds the driver's functions, and the locations they are told."""

    map: int
    set_access: int
    unmap: int
    copy: int
    fill: int
    location_type: int
    location_id: int
    host_location_type: int
    host_location_id: int


class BookedBackend(Backend):
    """A backend that checks every operation against its books before the driver sees it.

    Drivers accept some of what the contract refuses: mmap almost everything, CUDA an unmap whose
    size is no multiple of the granularity (seen on driver 580). The books refuse it for both.

    Whoever inherits from it sets `_native_calls`, once it knows them.
    """

    _native_calls: NativeCalls

    def __init__(self, granularity_bytes: int):
        self.granularity_bytes = granularity_bytes
        self.calls = Counter()
        self._books = Books(granularity_bytes)
        self._lock = threading.Lock()
        # The driver's names for handles that have a number of ours. Drivers give numbers out
        # again, and an import may have that of its export.
        self._native_handles: dict[Handle, int] = {}
        self._num_own_numbers = 0

    # ---- mappings -------------------------------------------------------------------------

    @uninterrupted
    def run_until_failure(self, ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        """See `Backend.run_until_failure`."""
        with self._lock:
            refusal: DriverError | None = None
            leaving: set[int] = set()
            plan: list[bytes] = []
            books, native_handles = self._books, self._native_handles
            try:
                for op in ops:
                    why = books.why_not(op, leaving)
                    if why is not None:
                        refusal = self._refusal(primitive_of(op), f"{op}: {why}")
                        break
                    if isinstance(op, MapOp):
                        plan.append(pack(op, native_handles.get(op.handle, op.handle)))
                        books.note(op)
                    else:
                        plan.append(pack(op))
            except BaseException:
                for op in reversed(ops[: len(plan)]):
                    books.unnote(op)
                raise
            num_legal = len(plan)
            calls = self._native_calls
            num_done, status, *_ = _native.execute(
                b"".join(plan),
                calls.map,
                calls.set_access,
                calls.unmap,
                calls.location_type,
                calls.location_id,
                calls.host_location_type,
                calls.host_location_id,
            )
            for primitive in map(primitive_of, ops[: num_done + 1]):
                self.calls[primitive] += 1
            for op in ops[:num_done] if leaving else ():
                if isinstance(op, UnmapOp):
                    for handle, allocation in books.note_unmapped(op):
                        if allocation.is_gone:
                            self._forget(handle)
            if not status:
                return num_done, refusal
            for op in reversed(ops[num_done:num_legal]):
                books.unnote(op)
            failed = ops[num_done]
            return num_done, self._error(primitive_of(failed), status, f"{failed}")

    # ---- address ranges -------------------------------------------------------------------

    @uninterrupted
    def address_reserve(self, num_bytes: int) -> Address:
        """See `Backend.address_reserve`. Cost: about 6 µs on a GPU, whatever the size."""
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
        """See `Backend.address_free`."""
        self.calls["address_free"] += 1
        with self._lock:
            refusal = self._books.why_not_free(address, num_bytes)
            if refusal is not None:
                raise self._refusal("address_free", refusal)
            self._unreserve(address, num_bytes)
            self._books.unreserve(address)

    # ---- physical memory ------------------------------------------------------------------

    @uninterrupted
    def mem_release(self, handle: Handle) -> None:
        """See `Backend.mem_release`."""
        self.calls["mem_release"] += 1
        with self._lock:
            allocation = self._books.live(handle)
            if allocation is None:
                raise self._refusal("mem_release", f"handle {handle:#x} is not live")
            self._release(handle)
            if not allocation.num_mappings:
                self._forget(handle)
            allocation.is_released = True

    def _check_size(self, call: str, num_bytes: int) -> None:
        if num_bytes <= 0 or num_bytes % self.granularity_bytes:
            raise self._refusal(call, f"{num_bytes} bytes are no multiple of the granularity")

    def _book_under_own_number(self, native_handle: int, allocation: Allocation) -> Handle:
        """A handle whose number was never given out before. Locked."""
        self._num_own_numbers += 1
        handle = Handle(_OWN_NUMBER | self._num_own_numbers)
        self._native_handles[handle] = native_handle
        self._books.allocations[handle] = allocation
        return handle

    def _exportable(self, handle: Handle) -> Allocation:
        """The allocation that may be exported. Locked."""
        why = self._books.why_not_export(handle)
        if why is not None:
            raise self._refusal("mem_export", why)
        return self._books.allocations[handle]

    # ---- data -----------------------------------------------------------------------------

    def copy(self, destination: Address, source: Address, num_bytes: int, stream: int) -> None:
        """See `Backend.copy`."""
        self.copy_many([CopyOp(destination, source, num_bytes)], stream)

    def copy_many(self, ops: Sequence[CopyOp], stream: int) -> None:
        """See `Backend.copy_many`. Cost: under 2 µs for each on a GPU."""
        if not ops:
            return
        legal = 0
        plan = bytearray()
        for op in ops:
            if op.num_bytes < 0:
                break
            plan += pack_copy(op)
            legal += 1
        self._submit("copy", bytes(plan), legal, stream)
        if legal < len(ops):
            self.calls["copy"] += 1
            error = self._refusal("copy", f"{ops[legal]}")
            error.num_done = legal
            raise error

    def fill(self, address: Address, num_bytes: int, byte: int, stream: int) -> None:
        """See `Backend.fill`."""
        pieces = None
        if num_bytes >= 0 and 0 <= byte <= 0xFF:
            with self._lock:
                pieces = self._books.fill_pieces(address, num_bytes)
        if pieces is None:
            self.calls["fill"] += 1
            details = f"{num_bytes} bytes at {address:#x} with {byte}: no byte, or not all mapped"
            raise self._refusal("fill", details)
        plan = b"".join(pack_fill(start, size, byte) for start, size in pieces)
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

    # ---- books ----------------------------------------------------------------------------

    def usage(self) -> BackendUsage:
        """See `Backend.usage`."""
        with self._lock:
            return self._books.usage()

    def free_host_memory_bytes(self) -> int:
        """The kernel's estimate of memory that is available without swapping."""
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * KiB
        raise self._refusal("free_host_memory_bytes", "/proc/meminfo does not say")

    # ---- what a driver adds ---------------------------------------------------------------

    def _in_context(self) -> contextlib.AbstractContextManager[None]:
        """What the driver needs around calls for copies."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def _reserve(self, num_bytes: int) -> int:
        """An address range of the driver's."""

    @abc.abstractmethod
    def _unreserve(self, address: Address, num_bytes: int) -> None:
        """Give one back. Locked."""

    @abc.abstractmethod
    def _release(self, handle: Handle) -> None:
        """Tell the driver that `handle` is released, mapped or not. Locked."""

    @abc.abstractmethod
    def _forget(self, handle: Handle) -> None:
        """`handle` was released and has lost its last mapping: its memory goes. Locked."""

    @abc.abstractmethod
    def _error(self, call: str, status: int, details: str) -> DriverError:
        """The error that the driver's `status` means."""

    @abc.abstractmethod
    def _refusal(self, call: str, details: str) -> DriverError:
        """The error for what the contract refuses and the driver might not."""


def describe(num_bytes: int, location: MemoryLocation) -> str:
    """What was asked for, in the words of an error."""
    return f"{format_bytes(num_bytes)} in {location.value} memory"
