"""Virtual memory on any Linux machine: memfd for physical memory, mmap for addresses.

This is a real second implementation, not a mock: pages alias, stay at their addresses,
fault when they should, and go back to the kernel when released. It lets all of vmkv run,
and be tested, on a machine with no GPU.

mmap permits much that CUDA forbids, so this file keeps its own books and refuses what the
contract (`base.py`) refuses. A surprise on CUDA is first written into `check_backend`, then
refused here.

Physical memory is one sparse memfd; a handle is a range of it. Offsets are handed out once
and never again, so a stale handle can never reach somebody else's bytes, and there is no
allocator to get wrong. Releasing punches a hole, which returns the memory for real.
One file per handle was rejected: a process has only 1,024 descriptors by default.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

from .. import _native
from ..errors import ConfigError, DriverError, HostDriverError, OutOfAddressSpaceError
from ..units import Address, Handle, KiB, format_bytes, is_power_of_two
from .base import AccessOp, Backend, BackendUsage, Fence, MapOp, Op, UnmapOp, primitive_of

_DLPACK_CPU = 1
_FALLOC_KEEP_SIZE = 0x01
_FALLOC_PUNCH_HOLE = 0x02
_HANDLE_FD_SHIFT = 40  # The encoding that vmkv/_native/host.c decodes.
_HANDLE_OFFSET_SHIFT = 12
_RECORD = Struct("=QQQQ")
_OP_MAP, _OP_SET_ACCESS, _OP_UNMAP = 0, 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@dataclass
class _Allocation:
    num_bytes: int
    num_mappings: int = 0
    is_released: bool = False


@dataclass
class _Mapping:
    num_bytes: int
    handle: Handle


class HostFence(Fence):
    """A fence on a device that works synchronously: passed at once, unless a test holds it."""

    def __init__(self, backend: HostBackend, ordinal: int):
        self._backend = backend
        self._ordinal = ordinal

    def has_passed(self) -> bool:
        """Whether the fence is past; false only between `hold_fences` and `pass_fences`."""
        return self._ordinal <= self._backend.last_passed_fence

    def wait(self) -> None:
        """Let the imagined device catch up to this fence."""
        self._backend.last_passed_fence = max(self._backend.last_passed_fence, self._ordinal)


class HostBackend(Backend):
    """Real virtual memory in the host's RAM.

    Args:
        granularity_bytes: The page vmkv sees, a power of two and a multiple of 4 KiB. CUDA has
            2 MiB; a smaller one makes small models waste less and tests run faster.
    """

    name = "host"

    def __init__(self, granularity_bytes: int = 64 * KiB):
        if not is_power_of_two(granularity_bytes) or granularity_bytes % os.sysconf("SC_PAGESIZE"):
            raise ConfigError(
                f"granularity_bytes={granularity_bytes} must be a power of two and a multiple of "
                f"the system's page of {os.sysconf('SC_PAGESIZE')} bytes, e.g. {64 * KiB}"
            )
        self.granularity_bytes = granularity_bytes
        self.calls = Counter()
        self.last_passed_fence = 0
        self._last_fence = 0
        self._holds_fences = False
        self._lock = threading.Lock()
        self._functions = _native.host_functions()
        self._fd = os.memfd_create("vmkv", os.MFD_CLOEXEC)
        self._file_end_bytes = 0
        self._reservations: dict[int, int] = {}
        self._reservation_starts: list[int] = []
        self._allocations: dict[int, _Allocation] = {}
        self._mappings: dict[int, _Mapping] = {}
        self._mapping_starts: list[int] = []

    @property
    def dlpack_device(self) -> tuple[int, int]:
        """The CPU."""
        return (_DLPACK_CPU, 0)

    # ---- address ranges -------------------------------------------------------------------

    def address_reserve(self, num_bytes: int) -> Address:
        """See `Backend.address_reserve`."""
        self._check_size("address_reserve", num_bytes)
        self.calls["address_reserve"] += 1
        try:
            address = _native.host_reserve(num_bytes, self.granularity_bytes)
        except OSError as error:
            raise OutOfAddressSpaceError(
                f"the system has no {format_bytes(num_bytes)} of free addresses; "
                "close other caches, or ask for fewer max_tokens or rows",
                needed_bytes=num_bytes,
            ) from error
        with self._lock:
            self._reservations[address] = num_bytes
            insort(self._reservation_starts, address)
        return Address(address)

    def address_free(self, address: Address, num_bytes: int) -> None:
        """See `Backend.address_free`."""
        self.calls["address_free"] += 1
        with self._lock:
            if self._reservations.get(address) != num_bytes:
                raise self._refusal("address_free", address, num_bytes, "not one whole reservation")
            first = bisect_left(self._mapping_starts, address)
            if first < len(self._mapping_starts) and self._mapping_starts[first] < address + num_bytes:
                raise self._refusal("address_free", address, num_bytes, "something is mapped in it")
            _native.host_free(address, num_bytes)
            del self._reservations[address]
            self._reservation_starts.remove(address)

    # ---- physical memory ------------------------------------------------------------------

    def mem_create(self, num_bytes: int) -> Handle:
        """See `Backend.mem_create`. The pages are allocated here, so a full machine says so now."""
        self._check_size("mem_create", num_bytes)
        self.calls["mem_create"] += 1
        with self._lock:
            offset = self._file_end_bytes
            if _libc.fallocate(self._fd, 0, offset, num_bytes):
                status = ctypes.get_errno()
                raise _driver_error("mem_create", status, format_bytes(num_bytes))
            self._file_end_bytes = offset + num_bytes
            handle = Handle(self._fd << _HANDLE_FD_SHIFT | offset >> _HANDLE_OFFSET_SHIFT)
            self._allocations[handle] = _Allocation(num_bytes)
        return handle

    def mem_release(self, handle: Handle) -> None:
        """See `Backend.mem_release`."""
        self.calls["mem_release"] += 1
        with self._lock:
            allocation = self._allocations.get(handle)
            if allocation is None or allocation.is_released:
                raise _driver_error("mem_release", errno.EINVAL, f"handle {handle:#x} is not live")
            allocation.is_released = True
            self._free_if_unused(handle, allocation)

    def _free_if_unused(self, handle: Handle, allocation: _Allocation) -> None:
        if not allocation.is_released or allocation.num_mappings:
            return
        offset = (handle & ((1 << _HANDLE_FD_SHIFT) - 1)) << _HANDLE_OFFSET_SHIFT
        mode = _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE
        if _libc.fallocate(self._fd, mode, offset, allocation.num_bytes):
            allocation.is_released = False
            raise _driver_error("mem_release", ctypes.get_errno(), "cannot punch a hole")
        del self._allocations[handle]

    # ---- mappings -------------------------------------------------------------------------

    def _run(self, ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        """Check and book `ops` one by one, then let the native executor run those that are legal."""
        with self._lock:
            plan = bytearray()
            refusal: DriverError | None = None
            leaving: set[int] = set()  # Mappings that earlier ops of this batch unmap.
            for op in ops:
                refusal = self._why_not(op, leaving)
                if refusal is not None:
                    break
                plan += self._book(op)
            num_legal = len(plan) // _RECORD.size
            num_done, status, *_ = _native.execute(
                bytes(plan),
                self._functions["map"],
                self._functions["set_access"],
                self._functions["unmap"],
                0,
                0,
            )
            for op in ops[: num_done + 1]:
                self.calls[primitive_of(op)] += 1
            if status:
                for op in reversed(ops[num_done:num_legal]):
                    self._unbook(op)
                failed = ops[num_done]
                return num_done, _driver_error(primitive_of(failed), status, f"{failed}")
            for op in ops[:num_done]:
                if isinstance(op, UnmapOp):
                    self._finish_unmap(op)
            return num_done, refusal

    def _why_not(self, op: Op, leaving: set[int]) -> DriverError | None:
        """The refusal CUDA would answer with, or None."""
        call, address, num_bytes = primitive_of(op), op.address, op.num_bytes
        if num_bytes <= 0 or num_bytes % self.granularity_bytes or address % self.granularity_bytes:
            return self._refusal(call, address, num_bytes, "not a multiple of the granularity")
        if not isinstance(op, MapOp):
            starts = self._whole_mappings(address, num_bytes)
            if not starts or not leaving.isdisjoint(starts):
                return self._refusal(call, address, num_bytes, "not a run of whole mappings")
            if isinstance(op, UnmapOp):
                leaving.update(starts)
            return None
        at = bisect_right(self._reservation_starts, address) - 1
        start = self._reservation_starts[at] if at >= 0 else 0
        if at < 0 or address + num_bytes > start + self._reservations[start]:
            return self._refusal(call, address, num_bytes, "outside every reservation")
        allocation = self._allocations.get(op.handle)
        if allocation is None or allocation.is_released:
            return self._refusal(call, address, num_bytes, f"handle {op.handle:#x} is not live")
        if allocation.num_bytes != num_bytes:
            return self._refusal(call, address, num_bytes, "not the whole of the handle")
        after = bisect_left(self._mapping_starts, address)
        if after < len(self._mapping_starts) and self._mapping_starts[after] < address + num_bytes:
            return self._refusal(call, address, num_bytes, "something is mapped there")
        before = self._mapping_starts[after - 1] if after else 0
        if after and before + self._mappings[before].num_bytes > address:
            return self._refusal(call, address, num_bytes, "something is mapped there")
        return None

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

    def _book(self, op: Op) -> bytes:
        """Note `op` as if it had succeeded, so that later ones of the batch see it."""
        if isinstance(op, MapOp):
            self._mappings[op.address] = _Mapping(op.num_bytes, op.handle)
            insort(self._mapping_starts, op.address)
            self._allocations[op.handle].num_mappings += 1
            return _RECORD.pack(_OP_MAP, op.address, op.num_bytes, op.handle)
        if isinstance(op, AccessOp):
            return _RECORD.pack(_OP_SET_ACCESS, op.address, op.num_bytes, op.access)
        return _RECORD.pack(_OP_UNMAP, op.address, op.num_bytes, 0)

    def _unbook(self, op: Op) -> None:
        if isinstance(op, MapOp):
            del self._mappings[op.address]
            self._mapping_starts.remove(op.address)
            self._allocations[op.handle].num_mappings -= 1

    def _finish_unmap(self, op: UnmapOp) -> None:
        for start in self._whole_mappings(op.address, op.num_bytes):
            handle = self._mappings.pop(start).handle
            del self._mapping_starts[bisect_left(self._mapping_starts, start)]
            allocation = self._allocations[handle]
            allocation.num_mappings -= 1
            self._free_if_unused(handle, allocation)

    # ---- order and data -------------------------------------------------------------------

    def note_stream(self, stream: int) -> None:
        """Nothing to remember: the host works synchronously."""

    def record_fence(self) -> Fence:
        """A fence that has passed at once, unless `hold_fences` is in force."""
        self.calls["record_fence"] += 1
        self._last_fence += 1
        if not self._holds_fences:
            self.last_passed_fence = self._last_fence
        return HostFence(self, self._last_fence)

    def hold_fences(self) -> None:
        """Play a busy device: fences from now on pass only by `pass_fences` or by waiting."""
        self._holds_fences = True

    def pass_fences(self) -> None:
        """The imagined device catches up with all that was submitted, and stays idle."""
        self._holds_fences = False
        self.last_passed_fence = self._last_fence

    def join_streams(self, stream: int) -> None:
        """Nothing to order: the host works synchronously."""

    def copy(self, destination: Address, source: Address, num_bytes: int, stream: int) -> None:
        """Copy at once."""
        self.calls["copy"] += 1
        ctypes.memmove(destination, source, num_bytes)

    # ---- books ----------------------------------------------------------------------------

    def usage(self) -> BackendUsage:
        """See `Backend.usage`."""
        with self._lock:
            return BackendUsage(
                num_handles=len(self._allocations),
                physical_bytes=sum(each.num_bytes for each in self._allocations.values()),
                num_mappings=len(self._mappings),
                mapped_bytes=sum(each.num_bytes for each in self._mappings.values()),
                num_reservations=len(self._reservations),
                reserved_bytes=sum(self._reservations.values()),
            )

    def free_memory_bytes(self) -> int:
        """The kernel's estimate of memory that is available without swapping."""
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * KiB
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")

    def file_bytes(self) -> int:
        """What the kernel holds for this backend's memory: the truth that `usage` must match."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        """See `Backend.close`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # ---- refusals -------------------------------------------------------------------------

    def _check_size(self, call: str, num_bytes: int) -> None:
        if num_bytes <= 0 or num_bytes % self.granularity_bytes:
            raise self._refusal(call, 0, num_bytes, "not a positive multiple of the granularity")

    def _refusal(self, call: str, address: int, num_bytes: int, why: str) -> HostDriverError:
        return _driver_error(call, errno.EINVAL, f"[{address:#x}, +{format_bytes(num_bytes)}): {why}")


def _driver_error(call: str, status: int, details: str) -> HostDriverError:
    return HostDriverError(
        call,
        status,
        errno.errorcode.get(status, "UNKNOWN"),
        details,
        is_out_of_memory=status in (errno.ENOMEM, errno.ENOSPC),
    )
