"""The pool: every extent of one device, within one budget.

    created == free + resident + retired        (I1, in bytes; each extent is exactly one)
    created <= budget                           (I9)

*Free* extents are mapped nowhere and sit in the lock-free list of their size class.
*Resident* ones are mapped or owned by somebody. *Retired* ones have only mappings that wait
for a fence. The budget is reserved before memory is created (never "check, then create"),
and an acquisition gets everything it asked for or nothing. Both hold for each location by
itself: device memory, and the host memory that sequences are swapped to.

What changes hands without a driver call needs no lock: extents that are free are acquired, owned,
disowned and noted as mapped beside whatever else goes on. `invariants.py` says why that is right.
"""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from ...errors import ClosedError, ConfigError, DriverError, OutOfPagesError
from ...interrupts import uninterrupted
from ...units import Address, Handle, MiB, is_power_of_two
from .._native import count_references
from ..backend import Backend, MemoryLocation
from .arbiter import Arbiter
from .extent import Extent, MappedRows
from .pressure import EvictionPolicy, Pressure, Victim
from .reclaim import Closer, Reclaimer
from .shelf import PoolStats, Shelf
from .submitted import SubmittedWrites

# ---- scrub ---------------------------------------------------------------------------------------


class Scrub(enum.Enum):
    """What happens to memory that held something, before it is used again.

    A sequence reads only what it wrote, so by default nothing does. Against defects and curious
    kernels there is more; it costs a memset, 0.33 ms for a GiB on an H200.
    """

    NEVER = "never"
    #: Zeroed where the next user is another tenant than the last.
    CROSS_TENANT = "cross-tenant"
    #: Zeroed always.
    ALWAYS = "always"
    #: Filled with NaN (of any float type), to find readers of what was never written.
    POISON = "poison"

    @classmethod
    def named(cls, name: Scrub | str) -> Scrub:
        """The member of this name.

        Raises:
            ConfigError: There is none.
        """
        try:
            return cls(name)
        except ValueError:
            names = ", ".join(repr(each.value) for each in cls)
            raise ConfigError(f"scrub={name!r} is unknown; there are {names}") from None

    def byte(self, extent: Extent, tenant: object, contents: object) -> int | None:
        """What `extent` is overwritten with before `tenant` writes `contents` there, or None.

        All ones are a NaN in every float type. What was written as something else is always zeroed:
        kernels fetch past a length what must be a number, and numbers of one type are NaN in
        another.
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
        """Overwrite what extents, mapped one after the other from `address`, hold of others.

        Notes that they are `tenant`'s now, and written as `contents`. Returns whether any was
        overwritten.

        Raises:
            DriverError: Some may have been filled, or be under way.
        """
        is_filled = False
        for extent in extents:
            byte = self.byte(extent, tenant, contents)
            if byte is not None:
                backend.fill(Address(address), extent.num_bytes, byte, stream)
                is_filled = True
            extent.is_dirty, extent.tenant, extent.contents = True, tenant, contents
            address += extent.num_bytes
        return is_filled


# ---- leaving -------------------------------------------------------------------------------------


class Leaving:
    """Those of one pool.

    Args:
        backend: The device.
        release: Releases one that was made here.

    Attributes:
        imported: Extents of memory that other processes made.
        extents: What nobody needs any more, and is not released yet.
    """

    def __init__(self, backend: Backend, release: Callable[[Extent], None]):
        self.imported: list[Extent] = []
        self.extents: list[Extent] = []
        self._backend = backend
        self._release = release

    def import_extent(self, size_class: int, num_bytes: int, handle: Handle) -> Extent:
        """An imported extent, with one owner."""
        extent = Extent(-1, size_class, num_bytes, handle)
        extent.is_recyclable = False
        count_references([extent], 0, 0, 1)
        self.imported.append(extent)
        return extent

    def release(self, more: Iterable[Extent] = ()) -> None:
        """Release these and what is left; after a failure they are tried again next time.

        Raises:
            DriverError: Some are left.
        """
        self.extents += more
        while self.extents:
            extent = self.extents[-1]
            if extent in self.imported:
                self._backend.mem_release(extent.handle)
                self.imported.remove(extent)
            else:
                self._release(extent)
            self.extents.pop()


# ---- pool ----------------------------------------------------------------------------------------

#: 64 MiB: a larger extent saves little (0.6 µs per 2 MiB already) and trims badly.
_LARGEST_EXTENT_BYTES = 64 * MiB
_NUM_CLASSES_MAX = 6  # 1 … 32 pages

_DEVICE, _HOST = MemoryLocation.DEVICE, MemoryLocation.HOST


class ExtentPool:
    """Physical memory of one device, handed out in extents. Safe to share between threads.

    Args:
        backend: The device. The pool owns it from now on: nothing else may create on it.
        budget_bytes: What the pool may create on the device at most, a page at least.
        host_budget_bytes: What it may create in host memory at most, for swapping; 0 for none.
        page_bytes: The unit of account, a multiple of the granularity (the default).
        keep_free_bytes: Free memory above this goes back to the device at once; by default the
            pool keeps everything for the next sequence until `trim`.
        close_when_unused: Close the pool, and with it the backend, when its last user detaches.
        on_pressure: Called once when the device is out of memory, before the second attempt:
            the place to let other allocators give memory back (e.g. `torch.cuda.empty_cache`).
        policy: In which order parked rows and prefixes give way; by default least recently used.
        scrub: When recycled memory is overwritten before its next use; see `Scrub`.
        protects_shared: Map memory that several sequences share read-only for all of them. By
            default the sequence that wrote it keeps its right to write, which saves a wait for
            the device at each fork; nothing in vmkv uses that right.
        is_shareable: Create memory that can be exported to other processes.
        checks: Check what every submitted step writes (I10); by default where the environment
            says `VMKV_CHECKS=1`.

    Attributes:
        lock: Guards everything in the pool but the free lists and the extents' references, and
            which rows of its caches are parked.
        pressure: Who gives memory back when it is short.
        arbiter: Has engines preempt requests for each other's.
        reclaimer: Unmaps what is retired.
        closer: Closes what nobody uses any more.
        submitted: What submitted steps write, where checks are on; else None.

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
        keep_free_bytes: int | None = None,
        close_when_unused: bool = False,
        on_pressure: Callable[[], None] | None = None,
        policy: EvictionPolicy | None = None,
        scrub: Scrub | str = Scrub.NEVER,
        protects_shared: bool = False,
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
        self.lock = threading.RLock()
        self.scrub = Scrub.named(scrub)
        self.protects_shared = protects_shared
        self.is_shareable = is_shareable
        self._keep_free_bytes = keep_free_bytes
        self._shelves = [
            Shelf(
                backend,
                location,
                page_bytes,
                self.largest_class,
                budget,
                is_shareable=is_shareable and location is _DEVICE,
                on_pressure=on_pressure if location is _DEVICE else None,
                retired_bytes=self._retired_bytes,
            )
            for location, budget in ((_DEVICE, budget_bytes), (_HOST, host_budget_bytes))
        ]
        self._leaving = Leaving(backend, lambda e: self._shelf(e.location).release_unlisted(e))
        self.page_tables: list[MappedRows] = []
        self.pressure = Pressure(policy)
        self.arbiter = Arbiter(self.lock)
        self.reclaimer = Reclaimer(backend, self.lock, self._recycle, self.pressure.tick)
        self.closer = Closer(self.reclaimer, self.lock)
        if checks is None:
            checks = os.environ.get("VMKV_CHECKS") == "1"
        self.submitted = SubmittedWrites(self.reclaimer) if checks else None
        self._close_when_unused = close_when_unused
        self._num_users = 0
        self._is_closed = False

    @uninterrupted
    def attach(self) -> None:
        """Count one more user, who will `detach`."""
        with self.lock:
            self._check_open()
            self._num_users += 1

    @uninterrupted
    def detach(self) -> None:
        """Count one user less; the last one may close the pool (see `close_when_unused`)."""
        with self.lock:
            self._num_users -= 1
            if self._close_when_unused and not self._num_users:
                try:
                    self.close()
                except BaseException:
                    self._num_users += 1  # Detaching again goes on where this stopped.
                    raise

    # ---- acquiring ------------------------------------------------------------------------

    @uninterrupted
    def acquire(
        self, size_classes: Sequence[int], location: MemoryLocation = _DEVICE
    ) -> list[Extent]:
        """Take one extent of each size class, with one owner; all of them or none.

        Reuses free extents of the class, creates what is missing, and releases free extents of
        other classes where the budget or the device leaves no room.

        Raises:
            OutOfPagesError: Budget or device cannot supply all. Nothing changed, except that
                free memory of other classes may have gone back to the device.
            DriverError: The driver failed otherwise. Nothing changed.

        Cost: a list operation per reused extent, and no lock where all are; a `mem_create`
            (10-16 µs) per new one.
        """
        self._check_open()
        shelf = self._shelf(location)
        granted = shelf.pop(size_classes)
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
        """`acquire`; where memory is short, what is retired is waited for.

        Where device memory still is, parked rows of any cache give way.

        Raises:
            OutOfPagesError: Nothing more can be had: the same call again would say the same.
                Parked rows may have lost memory.
            DriverError: As `acquire`. Likewise.
        """
        while True:
            try:
                return self.acquire(size_classes, location)
            except OutOfPagesError as error:
                missing_bytes = error.needed_bytes - error.free_bytes
                # A device that is shared may have less than it said.
                missing_bytes = missing_bytes if missing_bytes > 0 else error.needed_bytes
                is_device = location is _DEVICE
                if not (self.make_room(missing_bytes) if is_device else self.reclaimer.wait()):
                    raise

    @uninterrupted
    def disown(self, extents: Sequence[Extent]) -> None:
        """Drop the ownership that `acquire` (or `own`) gave; an unneeded extent becomes free.

        Cannot fail. Takes the lock only to release what may not be kept: see `keep_free_bytes`.
        """
        unneeded = count_references(extents, 0, 0, -1)
        if unneeded:
            self._recycle(unneeded)

    def own(self, extents: Sequence[Extent]) -> None:
        """Keep `extents`, which somebody holds, alive until `disown`. Takes no lock."""
        count_references(extents, 0, 0, 1)

    @uninterrupted
    def import_extent(self, handle: Handle, num_bytes: int) -> Extent:
        """An extent of memory that another process made, with one owner.

        It is outside the budget, may only be read, and is released once nobody needs it.
        """
        with self.lock:
            self._check_open()
            size_class = (num_bytes // self.page_bytes).bit_length() - 1
            return self._leaving.import_extent(size_class, num_bytes, handle)

    def note_mapped(self, extents: Sequence[Extent]) -> None:
        """Count one more live mapping of each, which somebody holds. Takes no lock."""
        count_references(extents, 1, 1, 0)

    def _shelf(self, location: MemoryLocation) -> Shelf:
        return self._shelves[0 if location is _DEVICE else 1]

    def _recycle(self, unneeded: Sequence[Extent]) -> None:
        """Extents that lost their last reference just now become free, or leave. Cannot fail."""
        leaving = [extent for extent in unneeded if not extent.is_recyclable]
        for extent in unneeded:
            if extent.is_recyclable:
                self._shelf(extent.location).put_back((extent,))
        keep_bytes, shelf = self._keep_free_bytes, self._shelf(_DEVICE)
        is_above = keep_bytes is not None and shelf.free_bytes > keep_bytes
        if is_above or leaving or self._leaving.extents:
            # What the driver does not take now stays where it is, and is tried again.
            with self.lock, suppress(DriverError):
                self._leaving.release(leaving)
                if keep_bytes is not None:
                    shelf.release_free(shelf.free_bytes - keep_bytes)

    @uninterrupted
    def trim(self, num_bytes: int | None = None, location: MemoryLocation = _DEVICE) -> int:
        """Give free memory back to the device: `num_bytes` at least, or all of it.

        Returns the bytes given back. Cost: about 15 µs per extent of 2 MiB.
        """
        with self.lock:
            self._check_open()
            self.closer.close_left()
            self.reclaimer.poll()
            self.reclaimer.free_idle_reservations()
            self._leaving.release()
            shelf = self._shelf(location)
            return shelf.release_free(shelf.free_bytes if num_bytes is None else num_bytes)

    @uninterrupted
    def give_back(self, num_bytes: int | None = None) -> int:
        """Return device memory that no live sequence needs: `num_bytes` at least, or all of it.

        Parked rows of every cache give way, in the policy's order; waits for their fences.
        Returns the bytes given back, less than asked for where there is no more.
        """
        stats = self.stats()
        self.make_room((stats.created_bytes if num_bytes is None else num_bytes) - stats.free_bytes)
        return self.trim(num_bytes)

    @uninterrupted
    def make_room(self, num_bytes: int, only: Callable[[], Iterable[Victim]] | None = None) -> bool:
        """Have what `acquire` can supply become `num_bytes` more, or as much as can be had.

        What is retired already is waited for; then parked rows, of any cache or those that `only`
        names, give way.

        Returns:
            Whether it became more. It did not: nothing more can be had.
        """
        # Not what is unmapped is counted: some of it may be mapped elsewhere as well.
        start_bytes = self.available_bytes
        self.closer.close_left()
        while (missing_bytes := start_bytes + num_bytes - self.available_bytes) > 0:
            if not self.reclaimer.wait(until_bytes=1):
                with self.lock:
                    if not self.pressure.evict(missing_bytes, only):
                        break
        return self.available_bytes > start_bytes

    @uninterrupted
    def make_ready(self, size_classes: Sequence[int], *, wait: bool = False) -> bool:
        """Have free extents of these classes lie ready: an `acquire` of them then only pops.

        For while the device works. Parked rows give way, in the policy's order, until twice as
        much is free as is asked for; what of that is of these classes is handed over as it is.
        Only for what is missing then, free extents of other classes are released.

        Args:
            size_classes: What will be acquired, by everybody, until this is called again.
            wait: Wait for the fences of what is retired. Without it this never blocks; what waits
                then is ready after a later call.

        Returns whether all lie ready.

        Raises:
            DriverError: Parked rows may have lost memory, nobody else.

        Cost: a look at the lists where they suffice; else as `acquire_or_evict`.
        """
        shelf = self._shelf(_DEVICE)
        wanted_bytes = sum(self.page_bytes << size_class for size_class in size_classes)
        keep_bytes = self._keep_free_bytes  # What is above it goes back to the device at once.
        spare_bytes = 2 * wanted_bytes if keep_bytes is None else min(2 * wanted_bytes, keep_bytes)
        while True:
            self.reclaimer.poll()
            with self.lock:
                self._check_open()
                lacking = shelf.lacking(size_classes)
                if not lacking or wanted_bytes > spare_bytes:
                    return not lacking
                if sum(self.page_bytes << each for each in lacking) > shelf.uncreated_bytes:
                    coming_bytes = shelf.available_bytes + self._retired_bytes(_DEVICE)
                    if self.pressure.evict(spare_bytes - coming_bytes):
                        continue
                retired = self.reclaimer.retired_mappings()
                if all(mapping.extent.size_class not in lacking for mapping in retired):
                    # Under the lock: others are not refused for what is in hands here.
                    try:
                        self.disown(self.acquire(size_classes))
                    except OutOfPagesError:
                        return False
                    return True
            if not wait:
                return False
            self.reclaimer.wait(until_bytes=1)

    # ---- budget and books -----------------------------------------------------------------

    @uninterrupted
    def set_budget(self, budget_bytes: int, location: MemoryLocation = _DEVICE) -> None:
        """Change the budget while running; free memory above it goes back at once.

        Parked rows give way where they must.

        Raises:
            ConfigError: The budget is below what live sequences hold. It stays as it was.
        """
        self._check_budget(budget_bytes)
        with self.lock:
            self._check_open()
            stats = self.stats(location)
            excess_bytes = stats.created_bytes - stats.free_bytes - budget_bytes
        if excess_bytes > 0 and location is _DEVICE:
            self.make_room(excess_bytes)
        with self.lock:
            self._shelf(location).set_budget(budget_bytes)

    @property
    def budget_bytes(self) -> int:
        """What it may create on the device; see `set_budget`."""
        return self._shelf(_DEVICE).budget_bytes

    @property
    def available_bytes(self) -> int:
        """What `acquire` could still supply by the device's budget, free extents included."""
        with self.lock:  # Else it would miss what the lock's holder has in hands.
            return self._shelf(_DEVICE).available_bytes

    def stats(self, location: MemoryLocation = _DEVICE) -> PoolStats:
        """One location now. Cost: proportional to what is retired."""
        with self.lock:
            return self._shelf(location).stats()

    def _retired_bytes(self, location: MemoryLocation) -> int:
        """What nobody needs and is not free yet."""
        retired = {
            mapping.extent
            for mapping in self.reclaimer.retired_mappings()
            if not mapping.extent.num_live_mappings and not mapping.extent.num_owners
        }
        return sum(
            extent.num_bytes
            for extent in retired.union(self._leaving.extents)
            if extent.location is location and extent not in self._leaving.imported
        )

    def extents(self, location: MemoryLocation = _DEVICE) -> list[Extent]:
        """Every extent created there, free ones included, for checks and pictures."""
        with self.lock:
            return self._shelf(location).extents()

    def imported_extents(self) -> list[Extent]:
        """Extents of memory that other processes made."""
        with self.lock:
            return list(self._leaving.imported)

    def count_free(self, size_class: int, location: MemoryLocation = _DEVICE) -> int:
        """How many extents of `size_class` are free."""
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

    # ---- end ------------------------------------------------------------------------------

    @uninterrupted
    def close(self) -> None:
        """Wait for all fences, give everything back to the device, and close the backend.

        Idempotent. Caches over the pool are closed first.

        Raises:
            ConfigError: A cache over this pool is still open. Nothing changed.
        """
        with self.lock:
            if self._is_closed:
                return
            self.closer.close_left()
            if self._num_users or self.page_tables:
                raise ConfigError(
                    f"{max(self._num_users, len(self.page_tables))} users of this pool are still "
                    "open; close the caches over it first"
                )
            self.reclaimer.wait()
            self.reclaimer.free_idle_reservations()
            self._leaving.release()
            for shelf in self._shelves:
                shelf.release_free(shelf.free_bytes)
            self._is_closed = True
            self.backend.close()
