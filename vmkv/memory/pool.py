"""The pool: every extent of one device, within one budget.

    created == free + resident + retired        (I1, in bytes; each extent is exactly one)
    created <= budget                           (I9)

*Free* extents are mapped nowhere and sit in the lock-free list of their size class.
*Resident* ones are mapped or owned by somebody. *Retired* ones have only mappings that wait
for a fence. The budget is reserved before memory is created (never "check, then create"),
and an acquisition gets everything it asked for or nothing.

Free extents of one class cannot serve another, but releasing a handle and creating smaller
ones costs microseconds and needs no contiguous physical memory: the pool converts when it
must, so it cannot fragment. See Note [The pool cannot fragment] in DESIGN.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .._native import FreeList
from ..backend import Backend
from ..errors import ClosedError, ConfigError, DriverError, OutOfPagesError
from ..units import MiB, format_bytes, is_power_of_two
from .extent import Extent
from .reclaim import Reclaimer

if TYPE_CHECKING:
    from .page_table import PageTable

#: 64 MiB: a larger extent saves little (0.6 µs per 2 MiB already) and trims badly.
_LARGEST_EXTENT_BYTES = 64 * MiB
_NUM_CLASSES_MAX = 6  # 1 … 32 pages


class _ShortError(Exception):
    """Memory is short. Holds what makes the error to raise, once nothing is taken any more."""

    def __init__(self, make_error: Callable[[int], OutOfPagesError]):
        super().__init__()
        self.make_error = make_error


@dataclass(frozen=True)
class PoolStats:
    """A pool at one moment, in bytes: `created == free + resident + retired <= budget`."""

    budget_bytes: int
    created_bytes: int
    free_bytes: int
    resident_bytes: int
    retired_bytes: int


class ExtentPool:
    """Physical memory of one device, handed out in extents. Safe to share between threads.

    Args:
        backend: The device. The pool owns it from now on: nothing else may create on it.
        budget_bytes: What the pool may create at most, a page at least.
        page_bytes: The unit of account, a multiple of the granularity (the default).
        keep_free_bytes: Free memory above this goes back to the device at once; by default the
            pool keeps everything for the next sequence until `trim`.
        close_when_unused: Close the pool, and with it the backend, when its last user detaches.
        on_pressure: Called once when the device is out of memory, before the second attempt:
            the place to let other allocators give memory back (e.g. `torch.cuda.empty_cache`).

    Raises:
        ConfigError: A size is impossible.
    """

    def __init__(
        self,
        backend: Backend,
        budget_bytes: int,
        *,
        page_bytes: int | None = None,
        keep_free_bytes: int | None = None,
        close_when_unused: bool = False,
        on_pressure: Callable[[], None] | None = None,
    ):
        page_bytes = backend.granularity_bytes if page_bytes is None else page_bytes
        if (
            page_bytes <= 0
            or page_bytes % backend.granularity_bytes
            or not is_power_of_two(page_bytes)
        ):
            raise ConfigError(
                f"page_bytes={page_bytes} must be a power of two and a multiple of the "
                f"granularity of {backend.name}, {backend.granularity_bytes}"
            )
        self.backend = backend
        self.page_bytes = page_bytes
        self.largest_class = min(
            _NUM_CLASSES_MAX - 1, max(0, (_LARGEST_EXTENT_BYTES // page_bytes).bit_length() - 1)
        )
        self._lock = threading.RLock()
        self._check_budget(budget_bytes)
        self._budget_bytes = budget_bytes
        self._keep_free_bytes = keep_free_bytes
        self._on_pressure = on_pressure
        # Ids are 32-bit; one for every page that the budget could ever hold is plenty and cheap
        # (12 bytes each), and `set_budget` may not outgrow it.
        self._num_ids = min(1 << 24, max(1024, 4 * budget_bytes // page_bytes))
        self._vacant = self.largest_class + 1  # The class of ids whose handle was released.
        self._free_ids = FreeList(self._num_ids, self._vacant + 1)
        self._extents: list[Extent | None] = []
        self._created_bytes = 0
        self._free_bytes = 0
        self.page_tables: list[PageTable] = []
        self.reclaimer = Reclaimer(backend, self._lock, self._unreference)
        self._close_when_unused = close_when_unused
        self._num_users = 0
        self._is_closed = False

    def attach(self) -> None:
        """Count one more user, who will `detach`."""
        with self._lock:
            self._check_open()
            self._num_users += 1

    def detach(self) -> None:
        """Count one user less; the last one may close the pool (see `close_when_unused`)."""
        with self._lock:
            self._num_users -= 1
            if self._close_when_unused and not self._num_users:
                try:
                    self.close()
                except BaseException:
                    self._num_users += 1  # Detaching again goes on where this stopped.
                    raise

    # ---- acquiring ------------------------------------------------------------------------

    def acquire(self, size_classes: Sequence[int]) -> list[Extent]:
        """Take one extent of each size class, with one owner; all of them or none.

        Reuses free extents of the class, creates what is missing, and releases free extents of
        other classes where the budget or the device leaves no room.

        Raises:
            OutOfPagesError: Budget or device cannot supply all. Nothing changed, except that
                free memory of other classes may have gone back to the device.
            DriverError: The driver failed otherwise. Nothing changed.

        Cost: a list operation per reused extent; a `mem_create` (10-16 µs) per new one.
        """
        needed_bytes = sum(self.page_bytes << size_class for size_class in size_classes)
        with self._lock:
            self._check_open()
            extents = [self._pop(size_class) for size_class in size_classes]
            missing = [
                size_class
                for size_class, extent in zip(size_classes, extents, strict=True)
                if extent is None
            ]
            try:
                created = self._create_all(missing)
            except BaseException as error:
                for extent in extents:
                    if extent is not None:
                        self._push(extent)
                if isinstance(error, _ShortError):
                    # Only here, where nothing is taken any more, is it true what is available.
                    raise error.make_error(needed_bytes) from error.__cause__
                raise
            fresh = iter(created)
            granted = [extent if extent is not None else next(fresh) for extent in extents]
            for extent in granted:
                extent.num_owners = 1
            return granted

    def disown(self, extents: Sequence[Extent]) -> None:
        """Drop the ownership that `acquire` (or `own`) gave; an unneeded extent becomes free."""
        with self._lock:
            for extent in extents:
                extent.num_owners -= 1
            self._unreference(extents)

    def own(self, extents: Sequence[Extent]) -> None:
        """Keep `extents` alive beside their mappings, until `disown`."""
        with self._lock:
            for extent in extents:
                extent.num_owners += 1

    def note_mapped(self, extents: Sequence[Extent]) -> None:
        """Count one more live mapping of each."""
        with self._lock:
            for extent in extents:
                extent.num_mappings += 1
                extent.num_live_mappings += 1

    def _pop(self, size_class: int) -> Extent | None:
        extent_id = self._free_ids.pop(size_class)
        if extent_id is None:
            return None
        extent = self._extents[extent_id]
        assert extent is not None  # A free id always has its extent.
        self._free_bytes -= extent.num_bytes
        return extent

    def _push(self, extent: Extent) -> None:
        self._free_ids.push(extent.size_class, extent.id)
        self._free_bytes += extent.num_bytes

    def _unreference(self, extents: Sequence[Extent]) -> None:
        for extent in dict.fromkeys(extents):
            if not extent.num_references:
                self._push(extent)
        # Last, because it may fail: by now every extent is where it belongs.
        if self._keep_free_bytes is not None and self._free_bytes > self._keep_free_bytes:
            self._release_free(self._free_bytes - self._keep_free_bytes)

    # ---- creating and releasing -----------------------------------------------------------

    def _create_all(self, size_classes: Sequence[int]) -> list[Extent]:
        """Create one extent per class, or nothing."""
        num_bytes = sum(self.page_bytes << size_class for size_class in size_classes)
        excess_bytes = self._created_bytes + num_bytes - self._budget_bytes
        if excess_bytes > self._free_bytes:
            raise _ShortError(self._out_of_budget)
        if excess_bytes > 0:
            self._release_free(excess_bytes)
        created: list[Extent] = []
        try:
            for size_class in size_classes:
                created.append(self._create(size_class))
        except BaseException:
            for extent in reversed(created):
                self._release(extent)
            raise
        return created

    def _create(self, size_class: int) -> Extent:
        num_bytes = self.page_bytes << size_class
        try:
            handle = self.backend.mem_create(num_bytes)
        except DriverError as error:
            if not error.is_out_of_memory:
                raise
            if self._on_pressure is not None:
                self._on_pressure()
            self._release_free(self._free_bytes)
            try:
                handle = self.backend.mem_create(num_bytes)
            except DriverError as second:
                if not second.is_out_of_memory:
                    raise
                raise _ShortError(self._out_of_device_memory) from second
        vacant_id = self._free_ids.pop(self._vacant)
        extent_id = self._free_ids.bump() if vacant_id is None else vacant_id
        if extent_id is None:
            self.backend.mem_release(handle)
            raise _ShortError(self._out_of_budget)
        extent = Extent(extent_id, size_class, num_bytes, handle)
        if extent_id == len(self._extents):
            self._extents.append(extent)
        else:
            self._extents[extent_id] = extent
        self._created_bytes += num_bytes
        return extent

    def _release(self, extent: Extent) -> None:
        """Give an extent that nobody references, and that is on no list, back to the device."""
        try:
            self.backend.mem_release(extent.handle)
        except DriverError:
            self._push(extent)
            raise
        self._extents[extent.id] = None
        self._free_ids.push(self._vacant, extent.id)
        self._created_bytes -= extent.num_bytes

    def _release_free(self, num_bytes: int) -> int:
        """Release free extents, large ones first, until `num_bytes` are gone or none is left."""
        released_bytes = 0
        for size_class in range(self.largest_class, -1, -1):
            while released_bytes < num_bytes:
                extent = self._pop(size_class)
                if extent is None:
                    break
                self._release(extent)
                released_bytes += extent.num_bytes
        return released_bytes

    def trim(self, num_bytes: int | None = None) -> int:
        """Give free memory back to the device: `num_bytes` at least, or all of it.

        Returns the bytes given back. Cost: about 15 µs per extent of 2 MiB.
        """
        with self._lock:
            self._check_open()
            self.reclaimer.poll()
            self.reclaimer.free_idle_reservations()
            return self._release_free(self._free_bytes if num_bytes is None else num_bytes)

    # ---- budget and books -----------------------------------------------------------------

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget while running; free memory above it goes back at once.

        Raises:
            ConfigError: The budget is below what is in use now. Nothing changed.
        """
        with self._lock:
            self._check_open()
            self._check_budget(budget_bytes)
            in_use_bytes = self._created_bytes - self._free_bytes
            if budget_bytes < in_use_bytes:
                raise ConfigError(
                    f"budget_bytes={budget_bytes} is below the {format_bytes(in_use_bytes)} in "
                    "use; close or trim sequences first"
                )
            if self._created_bytes > budget_bytes:
                self._release_free(self._created_bytes - budget_bytes)
            self._budget_bytes = budget_bytes

    @property
    def available_bytes(self) -> int:
        """What `acquire` could still supply by the budget, free extents included."""
        return self._budget_bytes - self._created_bytes + self._free_bytes

    def stats(self) -> PoolStats:
        """The pool now. Cost: proportional to what is retired."""
        with self._lock:
            retired = {
                mapping.extent.id: mapping.extent.num_bytes
                for mapping in self.reclaimer.retired_mappings()
                if not mapping.extent.num_live_mappings and not mapping.extent.num_owners
            }
            retired_bytes = sum(retired.values())
            return PoolStats(
                budget_bytes=self._budget_bytes,
                created_bytes=self._created_bytes,
                free_bytes=self._free_bytes,
                resident_bytes=self._created_bytes - self._free_bytes - retired_bytes,
                retired_bytes=retired_bytes,
            )

    def extents(self) -> list[Extent]:
        """Every extent that exists, free ones included, for checks and pictures."""
        with self._lock:
            return [extent for extent in self._extents if extent is not None]

    def count_free(self, size_class: int) -> int:
        """How many extents of `size_class` are free."""
        return self._free_ids.count(size_class)

    def _out_of_budget(self, needed_bytes: int) -> OutOfPagesError:
        stats = self.stats()
        return OutOfPagesError(
            f"needs {format_bytes(needed_bytes)}, {format_bytes(max(0, self.available_bytes))} "
            f"left of a budget of {format_bytes(self._budget_bytes)} "
            f"({format_bytes(stats.resident_bytes)} resident, "
            f"{format_bytes(stats.retired_bytes)} retired and waiting for fences); "
            "close or trim sequences, or raise budget_bytes",
            needed_bytes=needed_bytes,
            free_bytes=max(0, self.available_bytes),
            retired_bytes=stats.retired_bytes,
        )

    def _out_of_device_memory(self, needed_bytes: int) -> OutOfPagesError:
        stats = self.stats()
        device_bytes = self.backend.free_memory_bytes()
        return OutOfPagesError(
            f"needs {format_bytes(needed_bytes)}, and {self.backend.name} has no more memory to "
            f"give ({format_bytes(device_bytes)} free there; this pool holds "
            f"{format_bytes(stats.created_bytes)}, {format_bytes(stats.resident_bytes)} of it "
            "resident); close or trim sequences, or free memory elsewhere",
            needed_bytes=needed_bytes,
            free_bytes=stats.free_bytes + device_bytes,
            retired_bytes=stats.retired_bytes,
        )

    def _check_budget(self, budget_bytes: int) -> None:
        if not isinstance(budget_bytes, int) or budget_bytes < self.page_bytes:
            raise ConfigError(
                f"budget_bytes={budget_bytes!r} is not an integer that holds at least one page of "
                f"{self.page_bytes} bytes; raise it"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this pool is closed")

    # ---- end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for all fences, give everything back to the device, and close the backend.

        Idempotent. Caches over the pool are closed first.

        Raises:
            ConfigError: A cache over this pool is still open. Nothing changed.
        """
        with self._lock:
            if self._is_closed:
                return
            if self._num_users or self.page_tables:
                raise ConfigError(
                    f"{max(self._num_users, len(self.page_tables))} users of this pool are still "
                    "open; close the caches over it first"
                )
            self.reclaimer.wait()
            self.reclaimer.free_idle_reservations()
            self._release_free(self._free_bytes)
            self._is_closed = True
            self.backend.close()
