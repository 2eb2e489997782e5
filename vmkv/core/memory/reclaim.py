"""The reclaimer: the only caller of unmap, and only after a fence has passed.

A retired mapping gets no new work, but submitted work may still use it. It is unmapped, and its
extent's reference dropped, once a fence recorded after that work has passed. See Note [Unmap waits
for the fence] in DESIGN.md. A reservation that a tensor still points into stays reserved, with
nothing mapped, so that access through a stale view faults.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter

from ...errors import DriverError
from ...units import Address
from .._native import count_references
from ..backend import Backend, Fence, UnmapOp
from .page_table import Extent, RetiredMapping

#: Each fence costs an event per stream. Work older than these waits for the oldest of them.
_NUM_FENCES_KEPT = 32

_ADDRESS = attrgetter("address")


#: Retires everything until a fence has passed, such as `PageTable.close_behind`. Cannot fail.
CloseBehind = Callable[[Fence], None]


@dataclass
class _Batch:
    fence: Fence
    mappings: list[RetiredMapping]


class Reclaimer:
    """Retired mappings in the order of their fences, and reservations kept alive by tensors.

    Calls `recycle`, under the pool's lock, with extents that lost their last reference.

    Attributes:
        batches: The retired mappings of each fence, oldest first.
        waited_s: Seconds spent waiting for fences so far.
        idle_reservations: Reservations to be freed, each with a check for tensors in it.
    """

    def __init__(
        self,
        backend: Backend,
        lock: threading.RLock,
        recycle: Callable[[Sequence[Extent]], None],
        tick: Callable[[], int],
    ):
        self._backend = backend
        self._lock = lock
        self._recycle = recycle
        self._tick = tick
        # The last fence known to have passed, and those recorded since, oldest first.
        self._recorded: deque[Fence] = deque(maxlen=_NUM_FENCES_KEPT)
        self.batches: deque[_Batch] = deque()
        self.waited_s = 0.0
        self.idle_reservations: list[tuple[Address, int, Callable[[], bool]]] = []
        self._to_close: list[CloseBehind] = []

    def new_fence(self) -> Fence:
        """Record a fence after all submitted work; may fail, so call it before the books change."""
        time = self._tick()
        fence = self._backend.record_fence()
        fence.time = time
        with self._lock:
            self._recorded.append(fence)
        return fence

    def note_submitted(self) -> int:
        """Return a `tick`, with a fence (if one can be recorded) before the next submission."""
        time = self._tick()
        with suppress(DriverError):
            self.new_fence()
        return time

    def fence_since(self, time: int) -> Fence:
        """Return the first fence recorded after `time`, a `Pressure.tick`, or record a new one."""
        with self._lock:
            for fence in self._since_last_passed():
                if fence.time > time:
                    return fence
            return self.new_fence()

    def has_passed(self, time: int) -> bool:
        """Whether the work submitted before `time`, a `Pressure.tick`, is known to be complete."""
        with self._lock:
            known = self._since_last_passed()
            return bool(known) and known[0].time > time and known[0].has_passed()

    def _since_last_passed(self) -> deque[Fence]:
        """Forget fences before the last one known to have passed; return the others. Locked."""
        known = self._recorded
        while len(known) > 1 and known[1].has_passed():
            known.popleft()
        return known

    def retire(self, mappings: Sequence[RetiredMapping], fence: Fence) -> None:
        """Stop using `mappings` now; unmap them once `fence` has passed. Cannot fail."""
        with self._lock:
            count_references([mapping.extent for mapping in mappings], 0, -1, 0)
            at = len(self.batches)
            while at and self.batches[at - 1].fence.time > fence.time:
                at -= 1
            if at and self.batches[at - 1].fence is fence:
                self.batches[at - 1].mappings += mappings
            else:
                self.batches.insert(at, _Batch(fence, list(mappings)))

    def reinstate(self, mapping: RetiredMapping) -> bool:
        """Undo a `retire` if the mapping is not unmapped yet; returns whether it did."""
        with self._lock:
            for batch in self.batches:
                if mapping in batch.mappings:
                    batch.mappings.remove(mapping)
                    count_references([mapping.extent], 0, 1, 0)
                    return True
            return False

    def poll(self) -> int:
        """Unmap mappings whose fences have passed, without blocking; returns the bytes unmapped."""
        return self._reclaim() if self.batches else 0

    def wait(self, until_bytes: int | None = None) -> int:
        """Unmap all retired mappings or the oldest `until_bytes`; holds no lock while it waits."""
        num_bytes = 0
        while self.batches and (until_bytes is None or num_bytes < until_bytes):
            num_bytes += self._wait_for_oldest()
        return num_bytes

    def wait_for(self, ranges: Iterable[tuple[Address, Address]]) -> None:
        """Unmap the mappings retired in the ranges `[start, end)`, and all retired before them."""
        wanted = list(ranges)
        while self.has_retired_in(wanted):
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> int:
        with self._lock:
            if not self.batches:
                return 0
            fence = self.batches[0].fence
        start = time.perf_counter()
        fence.wait()
        self.waited_s += time.perf_counter() - start
        return self._reclaim(fence)

    def _reclaim(self, passed: Fence | None = None) -> int:
        """Unmap the oldest batches, while their fence is `passed` or has passed; return bytes."""
        num_bytes = 0
        with self._lock:
            while self.batches:
                batch = self.batches[0]
                if not (batch.fence is passed if passed else batch.fence.has_passed()):
                    break
                num_bytes += self._unmap(batch)
                self.batches.popleft()
        return num_bytes

    def _unmap(self, batch: _Batch) -> int:
        """Unmap a batch, one driver call per contiguous run; on failure keep the rest of it."""
        mappings = batch.mappings
        if not mappings:  # A failed change has reinstated them.
            return 0
        mappings.sort()
        runs: list[tuple[int, int]] = []  # Index of the first mapping, and bytes.
        end = first = num_bytes = 0
        for at, (address, extent) in enumerate(mappings):
            if address != end and num_bytes:
                runs.append((first, num_bytes))
                first, num_bytes = at, 0
            num_bytes += extent.num_bytes
            end = address + extent.num_bytes
        runs.append((first, num_bytes))
        num_done = 0
        try:
            self._backend.execute([UnmapOp(mappings[at].address, size) for at, size in runs])
            num_done = len(mappings)
        except DriverError as error:
            num_done = runs[error.num_done][0]
            raise
        finally:
            batch.mappings = mappings[num_done:]
            gone = [extent for _, extent in mappings[:num_done]]
            self._recycle(count_references(gone, -1, 0, 0))
        return sum([size for _, size in runs])

    def free_idle_reservations(self) -> None:
        """Free idle reservations that no tensor points into; the rest stay after a DriverError."""
        with self._lock:
            for reservation in tuple(self.idle_reservations):
                address, num_bytes, has_views = reservation
                if not has_views():
                    self._backend.address_free(address, num_bytes)
                    self.idle_reservations.remove(reservation)

    def retired_mappings(self) -> list[RetiredMapping]:
        """List all mappings that wait for a fence."""
        with self._lock:
            return [mapping for batch in self.batches for mapping in batch.mappings]

    def has_retired_in(self, ranges: Iterable[tuple[Address, Address]]) -> bool:
        """Whether a retired mapping overlaps one of the ranges `[start, end)`."""
        if not self.batches:
            return False
        taken = sorted(self.retired_mappings())
        for start, end in ranges:
            # No two overlap, so of those that begin before `end` the last one ends last.
            at = bisect_left(taken, end, key=_ADDRESS) - 1
            if at >= 0 and taken[at].address + taken[at].extent.num_bytes > start:
                return True
        return False

    # ---- dropped objects ------------------------------------------------------------------

    def close_soon(self, *closes: CloseBehind) -> None:
        """Close unused objects; those that the driver refuses are tried again. Cannot fail."""
        with self._lock, suppress(DriverError):
            self._to_close += closes
            self.close_left()
            self.poll()  # On an idle device this unmaps all of it now.
            self.free_idle_reservations()

    def close_left(self) -> None:
        """Close the remaining objects behind a new fence; after a DriverError they all remain."""
        with self._lock:
            if self._to_close:
                fence = self.new_fence()
                while self._to_close:
                    self._to_close[-1](fence)
                    self._to_close.pop()
