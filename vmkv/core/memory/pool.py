"""The extent pool: all extents of one device, within one budget per memory location.

    created == free + resident + retired        (I1, in bytes; an extent is in one state)
    created <= budget                           (I9)

Free extents are unmapped and listed by size class. Resident extents are mapped or owned. Retired
extents only have mappings that wait for a fence. Operations without a driver call take no lock;
`invariants.py` has the argument.
"""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ...errors import ClosedError, ConfigError, DriverError, OutOfPagesError
from ...units import Address, Handle, MiB, is_power_of_two
from .._native import count_references
from ..backend import Backend, MemoryLocation
from ..forks import free_in_children
from ..interrupts import uninterrupted
from .arbiter import Arbiter
from .page_table import Extent, PageTable
from .pressure import Pressure, Victim
from .reclaim import Reclaimer
from .shelf import PoolStats, Shelf
from .submitted import SubmittedWrites

if TYPE_CHECKING:
    from .member import PoolMember

Result = TypeVar("Result")

# ---- scrub ---------------------------------------------------------------------------------------


class Scrub(enum.Enum):
    """When memory that was used is overwritten before its next use.

    A sequence reads only what it wrote, so the default is never. The other members guard against
    defects and untrusted kernels. Cost: a memset, 0.33 ms per GiB on an H200.
    """

    NEVER = "never"
    #: Zeroed if the next tenant is not the last one.
    CROSS_TENANT = "cross-tenant"
    #: Always zeroed.
    ALWAYS = "always"
    #: Filled with NaN (of any float type), to find reads of memory that was never written.
    POISON = "poison"

    @classmethod
    def named(cls, name: Scrub | str) -> Scrub:
        """Look a member up by its value; ConfigError if there is none."""
        try:
            return cls(name)
        except ValueError:
            names = ", ".join(repr(each.value) for each in cls)
            raise ConfigError(f"scrub={name!r} is unknown; there are {names}") from None

    def byte(self, extent: Extent, tenant: object, contents: object) -> int | None:
        """Return the byte to fill `extent` with before `tenant` writes `contents` there, or None.

        0xFF is NaN in every float type. Memory of another type is always zeroed, since kernels
        fetch past the length and its numbers may be NaN in the new type.
        """
        if self is Scrub.POISON:
            return 0xFF
        if not extent.is_dirty:
            return None
        is_anothers = self is Scrub.CROSS_TENANT and extent.tenant != tenant
        return 0 if self is Scrub.ALWAYS or is_anothers or extent.contents != contents else None

    def prepare(
        self,
        backend: Backend,
        extents: Iterable[Extent],
        address: int,
        tenant: object,
        stream: int,
        contents: object,
    ) -> bool:
        """Fill consecutively mapped extents as `byte` says; return whether any was filled."""
        is_filled = False
        for extent in extents:
            if extent.is_dirty or self is Scrub.POISON:
                byte = self.byte(extent, tenant, contents)
                if byte is not None:
                    backend.fill(Address(address), extent.num_bytes, byte, stream)
                    is_filled = True
            extent.is_dirty, extent.tenant, extent.contents = True, tenant, contents
            address += extent.num_bytes
        return is_filled


# ---- pool ----------------------------------------------------------------------------------------

#: 64 MiB: a larger extent saves little (0.6 µs per 2 MiB already) and trims badly.
_LARGEST_EXTENT_BYTES = 64 * MiB
_NUM_CLASSES_MAX = 6  # 1 … 32 pages

_DEVICE, _HOST = MemoryLocation.DEVICE, MemoryLocation.HOST


class ExtentPool:
    """Physical memory of one device, handed out in extents. Thread-safe.

    Args:
        backend: The device. The pool owns it: nothing else may create memory on it.
        budget_bytes: Upper bound on the device memory that the pool creates, at least one page.
        host_budget_bytes: Upper bound on the host memory that it creates for swapping; 0 for none.
        page_bytes: Page size, a power-of-two multiple of the granularity; by default the
            granularity.
        close_when_unused: Close the pool, and with it the backend, when its last user detaches.
        on_pressure: Called once when the device is out of memory, before the second attempt, so
            that other allocators can free memory (e.g. `torch.cuda.empty_cache`).
        scrub: When recycled memory is overwritten before its next use; see `Scrub`.
        is_shareable: Create memory that can be exported to other processes.
        checks: Check the writes of every submitted step (I10); by default if the environment has
            `VMKV_CHECKS=1`.

    Attributes:
        lock: Guards all but free lists and reference counts; also which rows of caches are parked.
        pressure, host_pressure: The eviction sources of device and host memory.
        arbiter: Preemption between engines over this pool.
        reclaimer: Unmaps retired mappings, and closes objects that were dropped without `close`.
        submitted: The writes of submitted steps, if checks are on; else None.
        member: Its membership in a broker, which decides on the budget; None without one.

    Raises:
        ConfigError: A size is impossible.
    """

    def __init__(
        self,
        backend: Backend,
        budget_bytes: int,
        *,
        host_budget_bytes: int = 0,
        page_bytes: int | None = None,
        close_when_unused: bool = False,
        on_pressure: Callable[[], None] | None = None,
        scrub: Scrub | str = Scrub.NEVER,
        is_shareable: bool = False,
        checks: bool | None = None,
    ):
        page_bytes = backend.granularity_bytes if page_bytes is None else page_bytes
        if page_bytes % backend.granularity_bytes or not is_power_of_two(page_bytes):
            raise ConfigError(
                f"page_bytes={page_bytes} must be a power of two and a multiple of the "
                f"granularity of {backend.name}, {backend.granularity_bytes}"
            )
        self.backend = backend
        self.page_bytes = page_bytes
        self.largest_class = min(
            _NUM_CLASSES_MAX - 1, max(0, (_LARGEST_EXTENT_BYTES // page_bytes).bit_length() - 1)
        )
        self._check_budget(budget_bytes)
        if host_budget_bytes:
            self._check_budget(host_budget_bytes, "host_budget_bytes")
        self.lock = free_in_children(threading.RLock())
        self.scrub = Scrub.named(scrub)
        self.is_shareable = is_shareable
        make_shelf = partial(
            Shelf, backend, page_bytes, self.largest_class, retired_bytes=self._retired_bytes
        )
        self._device = make_shelf(
            _DEVICE, budget_bytes, is_shareable=is_shareable, on_pressure=on_pressure
        )
        self._host = make_shelf(_HOST, host_budget_bytes)
        # Extents that may not be recycled and wait for their release, and imported ones.
        self._leaving: list[Extent] = []
        self._imported: list[Extent] = []
        self.page_tables: list[PageTable] = []
        self.pressure = Pressure()
        self.host_pressure = Pressure()
        self.arbiter = Arbiter(self.lock)
        self.reclaimer = Reclaimer(backend, self.lock, self._recycle, self.pressure.tick)
        checks = os.environ.get("VMKV_CHECKS") == "1" if checks is None else checks
        self.submitted = SubmittedWrites(self.reclaimer, self.lock) if checks else None
        self.member: PoolMember | None = None
        self._close_when_unused = close_when_unused
        self._num_users = 0
        self._is_closed = False
        self._process_id = os.getpid()

    @uninterrupted
    def attach(self) -> None:
        """Count one more user; each user calls `detach` once."""
        with self.lock:
            self._check_open()
            self._num_users += 1

    @uninterrupted
    def detach(self) -> None:
        """Count one user less; the last one closes the pool if `close_when_unused` is set."""
        with self.lock:
            self._num_users -= 1
            if self._close_when_unused and not self._num_users:
                try:
                    self.close()
                except BaseException:
                    self._num_users += 1  # A second `detach` resumes here.
                    raise

    # ---- acquiring ------------------------------------------------------------------------

    @uninterrupted
    def acquire(
        self, size_classes: Sequence[int], location: MemoryLocation = _DEVICE
    ) -> list[Extent]:
        """Take one extent of each size class, with one owner; all of them or none.

        Free extents of other classes are released if the budget or the device leaves no room.

        Raises:
            OutOfPagesError: Budget or device cannot supply all.
            DriverError: The driver failed otherwise. Nothing changed.

        Cost: a list operation per reused extent; a lock and a `mem_create` (10-16 µs) per new one.
        """
        self.check_process()
        shelf = self._device if location is _DEVICE else self._host
        granted = shelf.pop(size_classes)  # A closed pool has nothing to pop.
        if granted is None:
            with self.lock:
                self._check_open()
                granted = shelf.take(size_classes)
        count_references(granted, 0, 0, 1)
        return granted

    @uninterrupted
    def acquire_or_evict(
        self, size_classes: Sequence[int], location: MemoryLocation = _DEVICE
    ) -> list[Extent]:
        """`acquire`; if memory is short, wait for retired extents and then evict.

        On the device parked rows are evicted, on the host blocks of prefixes. After an
        OutOfPagesError an immediate retry fails too; both may have lost memory.
        """
        self.check_process()
        if location is _DEVICE:
            missing_bytes = sum([self.page_bytes << each for each in size_classes])
            missing_bytes -= self.available_bytes
            if missing_bytes > 0:
                self.make_room(missing_bytes)
        while True:
            try:
                return self.acquire(size_classes, location)
            except OutOfPagesError as error:
                missing_bytes = error.needed_bytes - error.free_bytes
                # A shared device may have less than it reported.
                missing_bytes = missing_bytes if missing_bytes > 0 else error.needed_bytes
                if location is _DEVICE:
                    has_made_room = self.make_room(missing_bytes)
                else:
                    waited = bool(self.reclaimer.wait())
                    has_made_room = waited or self._evict_on_host(missing_bytes)
                if not has_made_room:
                    raise

    def _evict_on_host(self, num_bytes: int) -> bool:
        with self.lock:
            return self.host_pressure.evict(num_bytes) > 0

    def lend_host(self, num_bytes: int) -> bool:
        """Lend a part of the host budget until `return_host`; returns whether one was left."""
        with self.lock:
            return self._host.lend(num_bytes)

    def return_host(self, num_bytes: int) -> None:
        """Return a part of the host budget that was lent."""
        with self.lock:
            self._host.lent_bytes -= num_bytes

    @property
    def lent_host_bytes(self) -> int:
        """The part of the host budget that is lent."""
        return self._host.lent_bytes

    def asking_broker(self, map_all: Callable[[], Result]) -> Result:
        """Call a function that maps all or nothing; ask the broker, if any, for what is lacking.

        Must not be called with the lock held, since a broker is waited for.
        """
        while True:
            try:
                return map_all()
            except OutOfPagesError as error:
                lacking_bytes = error.needed_bytes - error.free_bytes
                if self.member is None or lacking_bytes <= 0 or not self.member.grow(lacking_bytes):
                    raise

    @uninterrupted
    def disown(self, extents: Sequence[Extent]) -> None:
        """Drop the ownership of `acquire` or `own`, which may free extents. Cannot fail."""
        unneeded = count_references(extents, 0, 0, -1)
        if unneeded:
            self._recycle(unneeded)

    def own(self, extents: Sequence[Extent]) -> None:
        """Add an owner to referenced `extents`, until `disown`. Takes no lock."""
        count_references(extents, 0, 0, 1)

    @uninterrupted
    def import_extent(self, handle: Handle, num_bytes: int) -> Extent:
        """Import read-only memory of another process, outside the budget, as an owned extent."""
        with self.lock:
            self._check_open()
            size_class = (num_bytes // self.page_bytes).bit_length() - 1
            extent = Extent(-1, size_class, num_bytes, handle, is_recyclable=False)
            count_references([extent], 0, 0, 1)
            self._imported.append(extent)
            return extent

    def _shelf(self, location: MemoryLocation) -> Shelf:
        return self._device if location is _DEVICE else self._host

    def _recycle(self, unneeded: Sequence[Extent]) -> None:
        """Free or release extents that have just lost their last reference. Cannot fail."""
        leaving: list[Extent] = []
        for extent in unneeded:
            if extent.is_recyclable:
                self._shelf(extent.location).put_back([extent])
            else:
                leaving.append(extent)
        if leaving or self._leaving:
            # Extents that the driver refuses stay listed and are tried again.
            with self.lock, suppress(DriverError):
                self._leaving += leaving
                self._release_leaving()

    def _release_leaving(self) -> None:
        while self._leaving:
            extent = self._leaving[-1]
            if extent in self._imported:
                self.backend.mem_release(extent.handle)
                self._imported.remove(extent)
            else:
                self._shelf(extent.location).release_unlisted(extent)
            self._leaving.pop()

    @uninterrupted
    def trim(self, num_bytes: int | None = None, location: MemoryLocation = _DEVICE) -> int:
        """Release free memory, at least `num_bytes` or all; returns the bytes released."""
        with self.lock:
            self._check_open()
            self.reclaimer.close_left()
            self.reclaimer.poll()
            self.reclaimer.free_idle_reservations()
            self._release_leaving()
            shelf = self._shelf(location)
            return shelf.release_free(shelf.free_bytes if num_bytes is None else num_bytes)

    @uninterrupted
    def give_back(self, num_bytes: int | None = None) -> int:
        """Release device memory that no live sequence needs: at least `num_bytes`, or all of it.

        Evicts parked rows of every cache, least recently used first, and waits for their fences.
        Returns the bytes released, which may be fewer than asked for.
        """
        stats = self.stats()
        self.make_room((stats.created_bytes if num_bytes is None else num_bytes) - stats.free_bytes)
        return self.trim(num_bytes)

    @uninterrupted
    def make_room(self, num_bytes: int, only: Callable[[], Iterable[Victim]] | None = None) -> bool:
        """Raise `available_bytes` by `num_bytes` or as far as possible; returns whether it rose.

        Waits for retired memory first, then evicts parked rows of all caches, or of source `only`.
        """
        # Unmapped bytes are not what counts: some extents may be mapped elsewhere as well.
        start_bytes = self.available_bytes
        self.reclaimer.close_left()
        while (missing_bytes := start_bytes + num_bytes - self.available_bytes) > 0:
            if not self.reclaimer.wait(until_bytes=1):
                with self.lock:
                    if not self.pressure.evict(missing_bytes, only):
                        break
        return self.available_bytes > start_bytes

    @uninterrupted
    def make_room_ahead(self, num_bytes: int) -> bool:
        """Retire parked rows for `num_bytes`, as `make_room`, but wait for no fence.

        Returns whether so many are available now; others are once fences have passed.
        """
        self.reclaimer.poll()
        with self.lock:
            missing_bytes = num_bytes - self.available_bytes
            if missing_bytes > 0:
                missing_bytes -= self._retired_bytes(_DEVICE)
            if missing_bytes > 0:
                self.pressure.evict(missing_bytes)
                self.reclaimer.poll()  # Rows that were idle for long.
            return self.available_bytes >= num_bytes

    # ---- budget and books -----------------------------------------------------------------

    @uninterrupted
    def set_budget(self, budget_bytes: int, location: MemoryLocation = _DEVICE) -> None:
        """Change the budget, evicting parked rows if needed; free memory above it returns at once.

        A host budget bounds evicted prefixes and swapped sequences. If it is raised after prefixes
        were kept, swapped sequences alone take more: prefixes stay in the addresses reserved then.

        Raises:
            ConfigError: The budget is below what live sequences hold. It stays unchanged.
        """
        self._make_room_above(budget_bytes, location)
        with self.lock:
            self._shelf(location).set_budget(budget_bytes)

    @uninterrupted
    def lower_budget(self, budget_bytes: int) -> None:
        """Lower the budget to this, or as far as live sequences allow.

        Evicts parked rows and waits for fences; free memory above the budget returns at once.
        Raises `DriverError` if the driver refuses; some may be left to another call.
        """
        self._make_room_above(budget_bytes, _DEVICE)
        shelf = self._device
        with self.lock, suppress(ConfigError):  # Other threads may have taken what was free.
            used_bytes = shelf.created_bytes - shelf.free_bytes
            shelf.set_budget(min(shelf.budget_bytes, max(budget_bytes, used_bytes)))

    def _make_room_above(self, budget_bytes: int, location: MemoryLocation) -> None:
        """Evict what is in use above a budget, as far as it can be; refuses an invalid one."""
        if budget_bytes or location is _DEVICE:
            name = "budget_bytes" if location is _DEVICE else "host_budget_bytes"
            self._check_budget(budget_bytes, name)
        shelf = self._shelf(location)
        with self.lock:
            self._check_open()
            used_bytes = shelf.created_bytes + shelf.lent_bytes - shelf.free_bytes
        if used_bytes > budget_bytes:
            make_room = self.make_room if location is _DEVICE else self._evict_on_host
            make_room(used_bytes - budget_bytes)

    @property
    def budget_bytes(self) -> int:
        """Upper bound on the device memory that the pool creates."""
        return self._device.budget_bytes

    @property
    def most_bytes(self) -> int:
        """The most that the budget may become: what it is, unless a broker decides."""
        return self.budget_bytes if self.member is None else self.member.most_bytes

    @property
    def withheld_bytes(self) -> int:
        """Part of the budget that a broker wants back as soon as live rows allow."""
        return 0 if self.member is None else self.member.withheld_bytes

    @property
    def available_bytes(self) -> int:
        """Device memory that `acquire` could supply within the budget, free extents included."""
        with self.lock:  # Without it, extents popped by the lock's holder would be missed.
            return self._device.available_bytes

    @property
    def host_budget_bytes(self) -> int:
        """Upper bound on the host memory that the pool creates."""
        return self._host.budget_bytes

    def stats(self, location: MemoryLocation = _DEVICE) -> PoolStats:
        """Count the memory of one location. Cost: proportional to what waits for fences."""
        with self.lock:
            return self._shelf(location).stats()

    def _retired_bytes(self, location: MemoryLocation) -> int:
        if not self.reclaimer.batches and not self._leaving:
            return 0
        retired = set(self._leaving)
        for _, extent in self.reclaimer.retired_mappings():
            if not extent.num_live_mappings and not extent.num_owners:
                retired.add(extent)
        return sum(
            [
                extent.num_bytes
                for extent in retired
                if extent.location is location and extent not in self._imported
            ]
        )

    def extents(self, location: MemoryLocation = _DEVICE) -> list[Extent]:
        """List every extent created at `location`, free ones included."""
        with self.lock:
            return self._shelf(location).extents()

    def imported_extents(self) -> list[Extent]:
        """List the extents of memory that other processes created."""
        with self.lock:
            return list(self._imported)

    def count_free(self, size_class: int, location: MemoryLocation = _DEVICE) -> int:
        """Number of free extents of `size_class`."""
        return self._shelf(location).count_free(size_class)

    def _check_budget(self, budget_bytes: int, name: str = "budget_bytes") -> None:
        if not isinstance(budget_bytes, int) or budget_bytes < self.page_bytes:
            raise ConfigError(
                f"{name}={budget_bytes!r} is not an integer that holds at least one page of "
                f"{self.page_bytes} bytes; raise it"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this pool is closed")
        self.check_process()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that made the pool."""
        return self._process_id != os.getpid()

    def check_process(self) -> None:
        """Raise `ConfigError` in a forked child, whose memory and locks are also its parent's."""
        if self._process_id != os.getpid():  # `is_forked`, inlined: every operation asks.
            raise ConfigError(
                f"this memory is that of process {self._process_id}, and a forked child cannot use "
                "it: make a cache in the child"
            )

    # ---- end ------------------------------------------------------------------------------

    @uninterrupted
    def close(self) -> None:
        """Wait for all fences, release all memory, and close the backend. Idempotent.

        Raises:
            ConfigError: A cache over this pool is still open. Nothing changed.
        """
        with self.lock:
            if self._is_closed:
                return
            self.reclaimer.close_left()
            if self._num_users or self.page_tables:
                raise ConfigError("this pool is in use; close the caches over it first")
            self.reclaimer.wait()
            self.reclaimer.free_idle_reservations()
            self._release_leaving()
            for shelf in (self._device, self._host):
                shelf.release_free(shelf.free_bytes)
            self._is_closed = True
            self.backend.close()
            if self.member is not None:
                self.member.leave()
