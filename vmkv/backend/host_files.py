"""Physical memory of the host backend: memfds, anonymous files that live in RAM.

Handles that nobody else shall see are ranges of one sparse file per location. Offsets are handed
out once and never again, so a stale handle can never reach somebody else's bytes, and there is no
allocator to get wrong. Releasing punches a hole, which returns the memory for real. One file per
handle was rejected: a process has only 1,024 descriptors by default.

Memory to be shared is a file of its own, for a descriptor gives its whole file away. What an
exporter promises, seals enforce: nobody writes who could not already, nobody cuts or grows the
file, nobody adds a seal. An importer demands these seals. Without them an exporter could cut the
file, and the importer's next read would end its process.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

_FALLOC_KEEP_SIZE = 0x01
_FALLOC_PUNCH_HOLE = 0x02
# Not all of them are in Python 3.10's fcntl. See fcntl(2).
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 0x01 | 0x02 | 0x04 | 0x10  # F_SEAL_SEAL, _SHRINK, _GROW, _FUTURE_WRITE
_HANDLE_FD_SHIFT = 40  # The encoding that vmkv/_native/host.c decodes.
_HANDLE_OFFSET_SHIFT = 12

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _fallocate(fd: int, mode: int, offset: int, num_bytes: int) -> None:
    if _libc.fallocate(fd, mode, offset, num_bytes):
        status = ctypes.get_errno()
        raise OSError(status, os.strerror(status))


def file_bytes(fd: int) -> int:
    """What the kernel holds in memory for a file."""
    return os.fstat(fd).st_blocks * 512


def whole_file(fd: int) -> int:
    """The native handle of a file from its beginning."""
    return fd << _HANDLE_FD_SHIFT


class SparseFile:
    """One file of many ranges that come and go.

    Args:
        name: What it is called in `/proc/self/maps`.
    """

    def __init__(self, name: str):
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        self.end_bytes = 0

    def allocate(self, num_bytes: int) -> int:
        """The native handle of `num_bytes` that are in memory now, and zero.

        Raises:
            OSError: The machine is full. Nothing has changed.
        """
        offset = self.end_bytes
        _fallocate(self.fd, 0, offset, num_bytes)
        self.end_bytes = offset + num_bytes
        return self.fd << _HANDLE_FD_SHIFT | offset >> _HANDLE_OFFSET_SHIFT

    def drop(self, native_handle: int, num_bytes: int) -> None:
        """Give a range's memory back to the kernel.

        Raises:
            OSError: The kernel refused. Nothing has changed.
        """
        offset = (native_handle & ((1 << _HANDLE_FD_SHIFT) - 1)) << _HANDLE_OFFSET_SHIFT
        _fallocate(self.fd, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, offset, num_bytes)

    def close(self) -> None:
        """Let the file go; mappings keep what they need. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def create_shareable(name: str, num_bytes: int) -> int:
    """The descriptor of a new file of `num_bytes`, all in memory now, and zero.

    Raises:
        OSError: The machine is full, or the process has no descriptor left. Nothing has changed.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _fallocate(fd, 0, 0, num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def export_read_only(fd: int) -> int:
    """Seal the file of `create_shareable`; a further descriptor of it, for reading only.

    With the first export `fd` itself becomes one for reading only, of which later exports are
    duplicates. Nothing is opened by its name again: that asks the file's mode, which whoever holds
    a descriptor and is the same user may change.

    Raises:
        OSError: No descriptor is left, or the kernel (before 5.1) lacks a seal. No seal was added.
    """
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
    """A descriptor of our own for an exported file of `num_bytes`; `fd` stays the caller's.

    Raises:
        OSError: `fd` is closed, or no sealed file of that size that can be read. Nothing has
            changed.
    """
    if fd < 0:
        raise OSError(errno.EBADF, "no descriptor")
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        seals = 0  # A pipe, a file on disk: what knows no seals.
    is_readable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
    if seals & _SEALS != _SEALS or not is_readable:
        raise OSError(errno.EINVAL, "the descriptor is no exported memory")
    size = os.fstat(fd).st_size
    if size != num_bytes:
        raise OSError(errno.EINVAL, f"the exported memory has {size} bytes, not {num_bytes}")
    return os.dup(fd)
