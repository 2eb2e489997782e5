"""A shelf: the extents of one memory location, created within a budget and kept in free lists.

When a class runs out, the shelf releases free extents of other classes and creates new ones, so it
cannot fragment. See Note [The pool cannot fragment] in DESIGN.md.

Any thread may `pop` and `put_back` without a lock; the pool's lock guards the rest. Free memory is
counted from the lists. An extent is booked before its id is listed and popped before it is
released, so a popped id has an extent that belongs to the caller alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ...errors import ConfigError, DriverError, OutOfPagesError
from ...units import format_bytes
from .._native import FreeList
from ..backend import Backend, MemoryLocation
from .page_table import Extent

#: 32 TiB in pages of 2 MiB, whatever the budget becomes. Ids cost 5 bytes each once they are used.
_NUM_IDS = 1 << 24


@dataclass(frozen=True)
class PoolStats:
    """Bytes of one location: `created == free + resident + retired <= budget`."""

    budget_bytes: int
    created_bytes: int
    free_bytes: int
    resident_bytes: int
    retired_bytes: int


@dataclass(eq=False)
class Shelf:
    """Extents of one location, of 2^0 to 2^largest_class pages.

    `on_pressure` is called once when the location is out of memory, before the second attempt.
    `retired_bytes` returns how much of a location waits for fences.
    """

    backend: Backend
    page_bytes: int
    largest_class: int
    location: MemoryLocation
    budget_bytes: int
    retired_bytes: Callable[[MemoryLocation], int]
    is_shareable: bool = False
    on_pressure: Callable[[], None] | None = None
    created_bytes: int = field(default=0, init=False)
    lent_bytes: int = field(default=0, init=False)  # Part of the budget that `HostSlabs` uses.
    _extents: list[Extent | None] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._vacant = self.largest_class + 1  # The class of ids whose handle was released.
        self._free_ids = FreeList(_NUM_IDS, self._vacant + 1)

    # ---- taking and giving back -----------------------------------------------------------

    def pop(self, size_classes: Sequence[int]) -> list[Extent] | None:
        """Pop a free extent of each size class, or return None if one is missing. Takes no lock."""
        ids = self._free_ids.take(size_classes)
        if ids is None:
            return None
        extents = self._extents
        return [extents[extent_id] for extent_id in ids]  # type: ignore[misc] # Free ids have one.

    def put_back(self, extents: Iterable[Extent]) -> None:
        """Free unreferenced `extents`. Cannot fail, takes no lock."""
        push = self._free_ids.push
        for extent in extents:
            push(extent.size_class, extent.id)

    def take(self, size_classes: Sequence[int]) -> list[Extent]:
        """Take one extent of each size class, free or new; all of them or none."""
        ids = [self._free_ids.pop(size_class) for size_class in size_classes]
        taken = [None if each is None else self._extents[each] for each in ids]
        missing = [size_classes[at] for at, each in enumerate(ids) if each is None]
        released = self._claim(self._num_bytes(missing) - self.uncreated_bytes)
        if released is None:
            self.put_back(filter(None, taken))  # First, so that the error's figures are right.
            raise self._out_of_budget(self._num_bytes(size_classes))
        created: list[Extent] = []
        try:
            if released:
                self.release(released)
            for size_class in missing:
                created.append(self._create(size_class))
        except BaseException as error:
            self.put_back(filter(None, taken))
            self.release(created)
            if isinstance(error, DriverError) and error.is_out_of_memory:
                raise self._out_of_device_memory(self._num_bytes(size_classes)) from error
            raise
        fresh = iter(created)
        return [extent or next(fresh) for extent in taken]

    # ---- creating and releasing -----------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """Memory of unreferenced extents, counted from the lists."""
        num_pages = 0
        for size_class in range(self._vacant):
            num_pages += self._free_ids.count(size_class) << size_class
        return num_pages * self.page_bytes

    @property
    def uncreated_bytes(self) -> int:
        """Memory that the budget still allows to create."""
        return self.budget_bytes - self.created_bytes - self.lent_bytes

    @property
    def available_bytes(self) -> int:
        """Memory that `take` could supply within the budget, free extents included."""
        return self.uncreated_bytes + self.free_bytes

    def extents(self) -> list[Extent]:
        """List every extent that exists, free ones included."""
        return [extent for extent in self._extents if extent is not None]

    def count_free(self, size_class: int) -> int:
        """Number of free extents of `size_class`."""
        return self._free_ids.count(size_class)

    def _num_bytes(self, size_classes: Iterable[int]) -> int:
        return sum([self.page_bytes << size_class for size_class in size_classes])

    def _create(self, size_class: int) -> Extent:
        num_bytes = self.page_bytes << size_class
        create = partial(
            self.backend.mem_create, num_bytes, self.location, shareable=self.is_shareable
        )
        try:
            handle = create()
        except DriverError as error:
            if not error.is_out_of_memory:
                raise
            if self.on_pressure is not None:
                self.on_pressure()
            self.release_free(self.free_bytes)
            handle = create()
        extent_id = self._free_ids.pop(self._vacant)
        extent_id = self._free_ids.bump() if extent_id is None else extent_id
        if extent_id is None:
            self.backend.mem_release(handle)
            raise self._out_of_budget(num_bytes)
        extent = Extent(extent_id, size_class, num_bytes, handle, self.location)
        if extent_id == len(self._extents):
            self._extents.append(extent)
        else:
            self._extents[extent_id] = extent
        self.created_bytes += num_bytes
        return extent

    def release(self, extents: Sequence[Extent]) -> None:
        """Release unreferenced, unlisted extents; those that the driver refuses become free."""
        num_released = 0
        try:
            for extent in extents:
                self.release_unlisted(extent)
                num_released += 1
        finally:
            self.put_back(extents[num_released:])

    def release_unlisted(self, extent: Extent) -> None:
        """Release one extent; after a DriverError the caller still holds it."""
        self.backend.mem_release(extent.handle)
        self._extents[extent.id] = None
        self._free_ids.push(self._vacant, extent.id)
        self.created_bytes -= extent.num_bytes

    def release_free(self, num_bytes: int) -> int:
        """Release free extents, largest first, until `num_bytes` are gone; return the bytes."""
        popped = self._pop_bytes(num_bytes)
        self.release(popped)
        return sum([extent.num_bytes for extent in popped])

    def _claim(self, num_bytes: int) -> list[Extent] | None:
        """Pop free extents of at least `num_bytes`, or return None if there are too few."""
        if num_bytes <= 0:
            return []
        if num_bytes > self.free_bytes:
            return None
        popped = self._pop_bytes(num_bytes)
        if sum([extent.num_bytes for extent in popped]) >= num_bytes:
            return popped
        self.put_back(popped)
        return None

    def _pop_bytes(self, num_bytes: int) -> list[Extent]:
        """Pop free extents, largest first, until they hold `num_bytes` or none is left."""
        popped: list[Extent] = []
        for size_class in range(self.largest_class, -1, -1):
            while num_bytes > 0 and (found := self._free_ids.take((size_class,))):
                popped.append(self._extents[found[0]])  # type: ignore[arg-type]
                num_bytes -= popped[-1].num_bytes
        return popped

    def lend(self, num_bytes: int) -> bool:
        """Lend a part of the budget, for which free memory is released; whether there was one."""
        claimed = self._claim(num_bytes - self.uncreated_bytes)
        if claimed is None:
            return False
        self.release(claimed)
        self.lent_bytes += num_bytes
        return True

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget and release free memory above it; ConfigError if more is in use."""
        held_bytes = self.created_bytes + self.lent_bytes
        claimed = self._claim(held_bytes - budget_bytes)
        if claimed is None:
            in_use_bytes = held_bytes - self.free_bytes
            raise ConfigError(
                f"budget_bytes={budget_bytes} is below the {format_bytes(in_use_bytes)} in "
                "use; close or trim sequences first"
            )
        self.release(claimed)
        self.budget_bytes = budget_bytes

    def stats(self) -> PoolStats:
        """Count the memory of this location."""
        free_bytes, retired_bytes = self.free_bytes, self.retired_bytes(self.location)
        return PoolStats(
            budget_bytes=self.budget_bytes,
            created_bytes=self.created_bytes,
            free_bytes=free_bytes,
            resident_bytes=self.created_bytes - free_bytes - retired_bytes,
            retired_bytes=retired_bytes,
        )

    # ---- errors ---------------------------------------------------------------------------

    def _out_of_budget(self, needed_bytes: int) -> OutOfPagesError:
        free_bytes = max(0, self.available_bytes)
        is_host = self.location is MemoryLocation.HOST
        whose, option = ("host memory ", "host_budget_bytes") if is_host else ("", "budget_bytes")
        budget = format_bytes(self.budget_bytes)
        why = f"{format_bytes(free_bytes)} left of a {whose}budget of {budget}"
        return self._shortage(needed_bytes, free_bytes, why, f"raise {option}")

    def _out_of_device_memory(self, needed_bytes: int) -> OutOfPagesError:
        is_device = self.location is MemoryLocation.DEVICE
        backend = self.backend
        left_bytes = backend.free_memory_bytes() if is_device else backend.free_host_memory_bytes()
        where = backend.name if is_device else "the host"
        why = f"{where} has no more memory to give, with {format_bytes(left_bytes)} free there"
        free_bytes = self.free_bytes + left_bytes
        return self._shortage(needed_bytes, free_bytes, why, "free memory elsewhere")

    def _shortage(
        self, needed_bytes: int, free_bytes: int, why: str, remedy: str
    ) -> OutOfPagesError:
        stats = self.stats()
        return OutOfPagesError(
            f"needs {format_bytes(needed_bytes)}, {why} (this pool holds "
            f"{format_bytes(stats.resident_bytes)} resident and "
            f"{format_bytes(stats.retired_bytes)} retired and waiting for fences); close or trim "
            f"sequences, or {remedy}",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
            retired_bytes=stats.retired_bytes,
        )
