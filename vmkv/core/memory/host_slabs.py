"""Slabs: pinned memory of this process, from the host budget of a pool.

The driver creates host memory at 4 GB/s, under a lock that every mapping waits for. So threads
write the pages of a slab ahead of need, without that lock, and pinning the slab then takes a tenth
of the time. A slab is no extent: it keeps its address, and is never mapped.
"""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from ...errors import DriverError
from ...units import Address, MiB
from .pool import ExtentPool

#: Slabs that are made ahead of need, at most so many by `make_ready`, and the threads that do it.
_NUM_AHEAD, _NUM_READY, _NUM_THREADS = 16, 64, 4
_HUGE_PAGE_BYTES = 2 * MiB
_MAP_NORESERVE = 0x4000  # Linux; Python names it since 3.13.
#: Leaves pages out of forked children, as MADV_DONTFORK, but not their range: what a child maps
#: there would be unmapped with this object.
_MADV_WIPEONFORK = 18


class HostSlabs:
    """Up to `num_slabs` slabs of `slab_bytes`, in one range of addresses. Guarded by its user.

    What it holds, slabs made ahead included, is lent by the pool. Raises `OSError` without such a
    range of addresses.
    """

    def __init__(self, pool: ExtentPool, num_slabs: int, slab_bytes: int):
        self.slab_bytes = slab_bytes
        self._pool = pool
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._map = mmap.mmap(-1, num_slabs * slab_bytes + _HUGE_PAGE_BYTES, flags=flags)
        for advice in (mmap.MADV_HUGEPAGE, _MADV_WIPEONFORK):
            with suppress(OSError):  # A kernel without huge pages.
                self._map.madvise(advice)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._start = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self._offset = self._start - start
        self._unmade = [*reversed(range(num_slabs))]
        self._made: dict[int, Future[int]] = {}
        self._used: set[int] = set()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "vmkv-host-memory")

    @property
    def num_bytes(self) -> int:
        """Host memory that it holds."""
        return (len(self._made) + len(self._used)) * self.slab_bytes

    @property
    def has_more(self) -> bool:
        """Whether a slab is ready, or being made ready, to be taken, or none was taken yet."""
        return bool(self._made) or not self._used

    def address(self, slab: int) -> Address:
        """The address of a slab, the same for the host and the device."""
        return Address(self._start + slab * self.slab_bytes)

    def take(self) -> int | None:
        """Take a pinned slab; None if the budget or the driver allows no more."""
        self._make(1)
        if not self._made:
            return None
        slab = next(iter(self._made))
        self._made.pop(slab).result()
        try:
            self._pool.backend.pin(self.address(slab), self.slab_bytes)
        except DriverError:
            self._unmake(slab)
            return None
        self._used.add(slab)
        self._make(_NUM_AHEAD)
        return slab

    def make_ready(self, num_bytes: int) -> None:
        """Let threads make some slabs, unless it holds `num_bytes` or the budget allows no more."""
        self._make(min(_NUM_READY, -(-num_bytes // self.slab_bytes) - len(self._used)))

    def _make(self, num_slabs: int) -> None:
        while self._unmade and len(self._made) < num_slabs:
            if not self._pool.lend_host(self.slab_bytes):
                break
            # The kernel does not count slabs yet that threads are writing now.
            spared_bytes = (max(_NUM_AHEAD, len(self._made)) + 1) * self.slab_bytes
            if self._pool.backend.free_host_memory_bytes() < spared_bytes:
                self._pool.return_host(self.slab_bytes)
                self._unmade.clear()  # Until a slab is given back.
                break
            slab = self._unmade.pop()
            address, size = self.address(slab), self.slab_bytes
            try:
                self._made[slab] = self._threads.submit(ctypes.memset, address, 0, size)
            except RuntimeError:  # The interpreter ends, and starts no thread any more.
                self._unmake(slab)
                break

    def give(self, slab: int) -> None:
        """Give back a slab that was taken and that nothing copies any more."""
        self._pool.backend.unpin(self.address(slab))
        self._used.remove(slab)
        self._unmake(slab)

    def give_unused(self) -> int:
        """Give back a slab that was made ahead; returns its bytes, 0 if there is none."""
        if not self._made:
            return 0
        slab, made = self._made.popitem()
        made.result()
        self._unmake(slab)
        return self.slab_bytes

    def _unmake(self, slab: int) -> None:
        at = self._offset + slab * self.slab_bytes
        self._map.madvise(mmap.MADV_DONTNEED, at, self.slab_bytes)
        self._unmade.append(slab)
        self._pool.return_host(self.slab_bytes)

    def close(self) -> None:
        """Give everything back; nothing copies any more. A forked child has nothing of it."""
        if self._pool.is_forked:
            return
        while self.give_unused():
            pass
        for slab in tuple(self._used):
            self.give(slab)
        self._threads.shutdown()
