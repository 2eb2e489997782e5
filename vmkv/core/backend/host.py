"""Virtual memory on any Linux machine: memfd for physical memory, mmap for addresses.

The books refuse what CUDA forbids and mmap permits; unexpected behaviour of CUDA is first added to
`check_backend`, then refused here. The two memory locations are two files in the same RAM.

See DESIGN.md, Note [The host backend is stricter than the kernel].
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
from collections.abc import Callable, Iterator

from ...errors import ConfigError, HostDriverError
from ...units import Address, KiB, MiB, format_bytes, is_power_of_two
from .. import _native
from .base import PRIMITIVES, Fence, MemoryLocation
from .booked import Allocation, BookedBackend, NativeCalls, describe

# ---- host files ----------------------------------------------------------------------------------

_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE
# Python 3.10's fcntl lacks some of them. See fcntl(2).
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 0x01 | 0x02 | 0x04 | 0x10  # F_SEAL_SEAL, _SHRINK, _GROW, _FUTURE_WRITE
_HANDLE_FD_SHIFT = 40  # The encoding that vmkv/core/_native/host.c decodes.
_HANDLE_OFFSET_SHIFT = 12

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def file_bytes(fd: int) -> int:
    """Memory that the kernel holds for a file."""
    return os.fstat(fd).st_blocks * 512


class SparseFile:
    """A file whose ranges are allocated and dropped; `name` shows in `/proc/self/maps`."""

    def __init__(self, name: str):
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        self.end_bytes = 0
        self._process_id = os.getpid()

    def allocate(self, num_bytes: int) -> int:
        """Allocate zeroed memory and return its native handle; OSError if the machine is full."""
        offset = self.end_bytes
        os.posix_fallocate(self.fd, offset, num_bytes)
        self.end_bytes = offset + num_bytes
        return self.fd << _HANDLE_FD_SHIFT | offset >> _HANDLE_OFFSET_SHIFT

    def drop(self, native_handle: int, num_bytes: int) -> None:
        """Return a range's memory to the kernel; an OSError, or a forked child, changes nothing."""
        if self._process_id != os.getpid():
            return
        offset = (native_handle & ((1 << _HANDLE_FD_SHIFT) - 1)) << _HANDLE_OFFSET_SHIFT
        if _libc.fallocate(self.fd, _PUNCH_HOLE, offset, num_bytes):
            status = ctypes.get_errno()
            raise OSError(status, os.strerror(status))

    def close(self) -> None:
        """Close the file; mappings stay valid. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def create_shareable(name: str, num_bytes: int) -> int:
    """Create a file of `num_bytes`, allocated and zero, that can be sealed; return its fd."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def export_read_only(fd: int) -> int:
    """Seal the file of `create_shareable`, make `fd` read-only, and return another descriptor."""
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        return os.dup(fd)
    exported = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if fcntl.fcntl(fd, _F_GET_SEALS) != _SEALS:
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
        os.dup2(exported, fd, inheritable=False)
    except OSError:
        os.close(exported)
        raise
    return exported


def import_read_only(fd: int, num_bytes: int) -> int:
    """Duplicate the descriptor of a sealed file of `num_bytes`; OSError if it is anything else."""
    if fd < 0:
        raise OSError(errno.EBADF, "no descriptor")
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        seals = 0  # A pipe or a file on disk has no seals.
    is_readable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
    if seals & _SEALS != _SEALS or not is_readable:
        raise OSError(errno.EINVAL, "the descriptor is no exported memory")
    size = os.fstat(fd).st_size
    if size != num_bytes:
        raise OSError(errno.EINVAL, f"the exported memory has {size} bytes, not {num_bytes}")
    return os.dup(fd)


# ---- host ----------------------------------------------------------------------------------------

_DLPACK_CPU = 1
_LARGE_BYTES = 1 * MiB  # From this size on, free memory is checked first: 15 µs.
_FILE_NAMES = {MemoryLocation.DEVICE: "vmkv", MemoryLocation.HOST: "vmkv-host"}


class HostFence(Fence):
    """A fence that passes at once, unless `HostBackend.hold_fences` is in force."""

    def __init__(self, backend: HostBackend, ordinal: int):
        self._backend = backend
        self._ordinal = ordinal

    def has_passed(self) -> bool:
        """Whether the fence has passed; False only between `hold_fences` and `pass_fences`."""
        return self._ordinal <= self._backend.last_passed_fence

    def wait(self) -> None:
        """Let the simulated device catch up to this fence."""
        self._backend.last_passed_fence = max(self._backend.last_passed_fence, self._ordinal)


class HostBackend(BookedBackend):
    """Real virtual memory in the host's RAM.

    Args:
        granularity_bytes: Page size, a power of two and a multiple of 4 KiB. CUDA has 2 MiB; a
            smaller one wastes less on small models and makes tests faster.
    """

    name = "host"
    _refused_status = errno.EINVAL

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
        self._native_calls = NativeCalls(**_native.host_functions(), location=(0, 0))
        # Shareable and imported memory has files of its own.
        self._files = {place: SparseFile(name) for place, name in _FILE_NAMES.items()}
        self._stream_numbers = itertools.count(1)

    @property
    def dlpack_device(self) -> tuple[int, int]:
        """DLPack's CPU device."""
        return (_DLPACK_CPU, 0)

    # ---- address ranges -------------------------------------------------------------------

    def _reserve(self, num_bytes: int) -> int:
        with self._translated("address_reserve", lambda: format_bytes(num_bytes)):
            return _native.host_reserve(num_bytes, self.granularity_bytes)

    def _unreserve(self, address: Address, num_bytes: int) -> None:
        _native.host_free(address, num_bytes)

    # ---- physical memory ------------------------------------------------------------------

    def _create(self, num_bytes: int, location: MemoryLocation, shareable: bool) -> int:
        """Allocate memory whose pages exist at once, so that using them cannot fail."""
        # Without the check the kernel overcommits until it kills a process.
        if num_bytes >= _LARGE_BYTES and num_bytes > self.free_host_memory_bytes():
            raise self._error("mem_create", errno.ENOMEM, describe(num_bytes, location))
        with self._translated("mem_create", lambda: describe(num_bytes, location)), self._lock:
            if shareable:
                name = f"{_FILE_NAMES[location]}-shared"
                return create_shareable(name, num_bytes) << _HANDLE_FD_SHIFT
            return self._files[location].allocate(num_bytes)

    def _free(self, allocation: Allocation) -> None:
        native_handle = allocation.native_handle
        if allocation.is_shareable or allocation.is_imported:
            os.close(native_handle >> _HANDLE_FD_SHIFT)
            return
        with self._translated("mem_release", lambda: "cannot punch a hole"):
            self._files[allocation.location].drop(native_handle, allocation.num_bytes)

    def _export(self, native_handle: int) -> int:
        fd = native_handle >> _HANDLE_FD_SHIFT
        with self._translated("mem_export", lambda: f"descriptor {fd}"):
            return export_read_only(fd)

    def _import(self, fd: int, num_bytes: int) -> tuple[int, MemoryLocation]:
        """Import exported memory; it counts as `MemoryLocation.DEVICE`."""
        with self._translated("mem_import", lambda: f"descriptor {fd}"):
            own_fd = import_read_only(fd, num_bytes)
        return own_fd << _HANDLE_FD_SHIFT, MemoryLocation.DEVICE

    # ---- order and data -------------------------------------------------------------------

    def note_stream(self, stream: int) -> None:
        """Do nothing: the host works synchronously."""

    def record_fence(self, stream: int | None = None) -> Fence:
        """Record a fence, which passes at once unless `hold_fences` is in force."""
        self.calls["record_fence"] += 1
        self._last_fence += 1
        if not self._holds_fences:
            self.last_passed_fence = self._last_fence
        return HostFence(self, self._last_fence)

    def hold_fences(self) -> None:
        """Simulate a busy device: later fences pass only by `pass_fences` or by waiting."""
        self._holds_fences = True

    def pass_fences(self) -> None:
        """Pass all fences and simulate an idle device again."""
        self._holds_fences = False
        self.last_passed_fence = self._last_fence

    def join_streams(self, stream: int) -> None:
        """Do nothing: the host works synchronously."""

    def _pin(self, address: Address, num_bytes: int) -> None:
        pass

    def _unpin(self, address: Address) -> None:
        pass

    def _new_stream(self) -> int:
        return next(self._stream_numbers)

    def _end_stream(self, stream: int) -> None:
        """Do nothing: the host works synchronously."""

    def stream_wait(self, stream: int, other: int) -> None:
        """Only count the call: the host works synchronously."""
        self.calls["stream_wait"] += 1

    # ---- books ----------------------------------------------------------------------------

    def free_memory_bytes(self) -> int:
        """Return the kernel's estimate of memory available without swapping."""
        return self.free_host_memory_bytes()

    def file_bytes(self, location: MemoryLocation = MemoryLocation.DEVICE) -> int:
        """Memory that the kernel holds for handles of `location`; `usage` must match it."""
        with self._lock:
            own = [
                file_bytes(each.native_handle >> _HANDLE_FD_SHIFT)
                for each in self._books.allocations.values()
                if each.is_shareable and each.location is location
            ]
        return file_bytes(self._files[location].fd) + sum(own)

    def close(self) -> None:
        """Close the files. Idempotent."""
        for file in self._files.values():
            file.close()

    # ---- errors ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _translated(self, call: str, what: Callable[[], str]) -> Iterator[None]:
        """Raise an OSError of the block as a driver's error, whose details begin with `what()`."""
        try:
            yield
        except OSError as error:
            details = f"{what()}, {error.strerror}"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                details += "; raise the limit on descriptors (ulimit -n)"
            raise self._error(call, error.errno or errno.EIO, details) from error

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Context in which maps use mappings of the process that are held back otherwise."""
        _native.host_restoring(1)
        try:
            yield
        finally:
            _native.host_restoring(-1)

    def _error(self, call: str, status: int, details: str) -> HostDriverError:
        if status == errno.ENOMEM and call in PRIMITIVES.values():
            details += "; raise the limit on a process's mappings (sysctl vm.max_map_count)"
        return HostDriverError(
            call,
            status,
            errno.errorcode.get(status, "UNKNOWN"),
            details,
            is_out_of_memory=status in (errno.ENOMEM, errno.ENOSPC),
        )
