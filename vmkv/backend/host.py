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

from .. import _native
from ..errors import ConfigError, HostDriverError, OutOfAddressSpaceError
from ..units import Address, Handle, KiB, format_bytes, is_power_of_two
from .base import Fence
from .booked import BookedBackend, NativeCalls
from .books import Allocation

_DLPACK_CPU = 1
_FALLOC_KEEP_SIZE = 0x01
_FALLOC_PUNCH_HOLE = 0x02
_HANDLE_FD_SHIFT = 40  # The encoding that vmkv/_native/host.c decodes.
_HANDLE_OFFSET_SHIFT = 12

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


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


class HostBackend(BookedBackend):
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
        super().__init__(granularity_bytes)
        self.last_passed_fence = 0
        self._last_fence = 0
        self._holds_fences = False
        functions = _native.host_functions()
        self._calls = NativeCalls(**functions, location_type=0, location_id=0)
        self._fd = os.memfd_create("vmkv", os.MFD_CLOEXEC)
        self._file_end_bytes = 0

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
            self._books.reserve(address, num_bytes)
        return Address(address)

    def address_free(self, address: Address, num_bytes: int) -> None:
        """See `Backend.address_free`."""
        self.calls["address_free"] += 1
        with self._lock:
            refusal = self._books.why_not_free(address, num_bytes)
            if refusal is not None:
                raise self._refusal("address_free", refusal)
            _native.host_free(address, num_bytes)
            self._books.unreserve(address)

    # ---- physical memory ------------------------------------------------------------------

    def mem_create(self, num_bytes: int) -> Handle:
        """See `Backend.mem_create`. The pages are allocated here, so a full machine says so now."""
        self._check_size("mem_create", num_bytes)
        self.calls["mem_create"] += 1
        with self._lock:
            offset = self._file_end_bytes
            if _libc.fallocate(self._fd, 0, offset, num_bytes):
                status = ctypes.get_errno()
                raise self._error("mem_create", status, format_bytes(num_bytes))
            self._file_end_bytes = offset + num_bytes
            handle = Handle(self._fd << _HANDLE_FD_SHIFT | offset >> _HANDLE_OFFSET_SHIFT)
            self._books.allocations[handle] = Allocation(num_bytes)
        return handle

    def mem_release(self, handle: Handle) -> None:
        """See `Backend.mem_release`."""
        self.calls["mem_release"] += 1
        with self._lock:
            allocation = self._books.allocations.get(handle)
            if allocation is None or allocation.is_released:
                raise self._refusal("mem_release", f"handle {handle:#x} is not live")
            if not allocation.num_mappings:
                self._forget(handle)
            allocation.is_released = True

    def _forget(self, handle: Handle) -> None:
        """Give the memory of `handle`, which nothing needs any more, back to the kernel."""
        offset = (handle & ((1 << _HANDLE_FD_SHIFT) - 1)) << _HANDLE_OFFSET_SHIFT
        mode = _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE
        if _libc.fallocate(self._fd, mode, offset, self._books.allocations[handle].num_bytes):
            raise self._error("mem_release", ctypes.get_errno(), "cannot punch a hole")
        del self._books.allocations[handle]

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

    def _native_calls(self) -> NativeCalls:
        return self._calls

    def _check_size(self, call: str, num_bytes: int) -> None:
        if num_bytes <= 0 or num_bytes % self.granularity_bytes:
            raise self._refusal(call, f"{num_bytes} bytes are no multiple of the granularity")

    def _refusal(self, call: str, details: str) -> HostDriverError:
        return self._error(call, errno.EINVAL, details)

    def _error(self, call: str, status: int, details: str) -> HostDriverError:
        return HostDriverError(
            call,
            status,
            errno.errorcode.get(status, "UNKNOWN"),
            details,
            is_out_of_memory=status in (errno.ENOMEM, errno.ENOSPC),
        )
