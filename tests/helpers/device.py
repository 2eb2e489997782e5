"""A host backend whose work runs late and whose accesses are checked against the mappings.

`HostBackend` carries everything out at once, so no work is pending when memory is unmapped, and an
access to unmapped memory ends the process. `Device` runs work, copies and fills included, as late
as possible: when a caller waits for a fence or for a step's result. Work of one stream runs in
order; the order between streams is random unless one waits for the other. Before each access it
checks the mapping: where a GPU would stop with an illegal access, it raises `IllegalAccessError`,
which a test can report and shrink.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vmkv import HostBackend
from vmkv.core import _native
from vmkv.core.backend import Access, AccessOp, CopyOp, Fence, MapOp, Op
from vmkv.errors import DriverError
from vmkv.units import Address

#: Size of the address range of a device; no address is reserved twice.
_ARENA_BYTES = 1 << 36


class IllegalAccessError(AssertionError):
    """Work accessed memory that is not mapped, or wrote to read-only memory."""


class Place(NamedTuple):
    """A piece of work: the `number`-th of a stream, counted from 1."""

    stream: int
    number: int


class _Stream:
    """The pending work of one stream, and the number of pieces that have run."""

    def __init__(self) -> None:
        self.works: deque[Callable[[], None]] = deque()
        self.num_done = 0

    @property
    def num_submitted(self) -> int:
        return self.num_done + len(self.works)


class QueueFence(Fence):
    """A place in each of a device's streams."""

    def __init__(self, device: Device, ends: list[Place]):
        self._device = device
        self._ends = ends

    def has_passed(self) -> bool:
        return all(map(self._device.has_done, self._ends))

    def wait(self) -> None:
        self._device.run_until(*self._ends)


class Device(HostBackend):
    """A host backend with streams of work.

    Args:
        granularity_bytes: See `HostBackend`.
        is_late: Whether work runs only when a caller waits for it. Otherwise it runs at once.
        seed: Seed of random choices.

    Attributes:
        stream: The current stream of callers; a cache over the device must use it.
        num_done: Number of pieces of work that have run, in all streams.
        violations: Messages of all illegal accesses, also of errors that were caught.
    """

    def __init__(self, granularity_bytes: int, *, is_late: bool, seed: int = 0):
        super().__init__(granularity_bytes)
        self._is_late = is_late
        self._streams: defaultdict[int, _Stream] = defaultdict(_Stream)
        self._noted: set[int] = set()
        self._draw = random.Random(seed)
        # Handle and access rights of each mapped page.
        self._pages: dict[int, tuple[int, Access]] = {}
        self._arena = self._next_address = _native.host_reserve(_ARENA_BYTES, granularity_bytes)
        self.stream = 0
        self.num_done = 0
        self.violations: list[str] = []

    # ---- streams --------------------------------------------------------------------------

    def current_stream(self) -> int:
        return self.stream

    def submit(self, work: Callable[[], None], stream: int | None = None) -> Place:
        """Queue `work` behind all earlier work of a stream (default: the current one)."""
        stream = self.stream if stream is None else stream
        self._streams[stream].works.append(work)
        place = self._end_of(stream)
        if not self._is_late:
            self.run_until(place)
        return place

    def has_done(self, place: Place) -> bool:
        return self._streams[place.stream].num_done >= place.number

    def run_until(self, *places: Place) -> None:
        """Run all work up to these places, and the work that it waits for."""
        for place in self._draw.sample(places, len(places)):
            while not self.has_done(place):
                self._run_next(place.stream)

    def run_some(self, num_works: int | None = None) -> None:
        """Run `num_works` pieces of pending work, or all of it."""
        while num_works is None or num_works > 0:
            busy = [stream for stream, each in self._streams.items() if each.works]
            if not busy:
                break
            self._run_next(self._draw.choice(busy))
            num_works = None if num_works is None else num_works - 1

    def _run_next(self, stream: int) -> None:
        self.num_done += 1  # First, so that failing work counts too.
        its = self._streams[stream]
        work = its.works.popleft()
        its.num_done += 1
        work()

    def _end_of(self, stream: int) -> Place:
        return Place(stream, self._streams[stream].num_submitted)

    def note_stream(self, stream: int) -> None:
        self._noted.add(stream)

    def record_fence(self, stream: int | None = None) -> Fence:
        self.calls["record_fence"] += 1
        streams = sorted(self._noted) if stream is None else [stream]
        return QueueFence(self, [self._end_of(each) for each in streams])

    def join_streams(self, stream: int) -> None:
        for other in sorted(self._noted - {stream}):
            self._wait_for(stream, other)

    def stream_wait(self, stream: int, other: int) -> None:
        super().stream_wait(stream, other)
        self._wait_for(stream, other)

    def _wait_for(self, stream: int, other: int) -> None:
        place = self._end_of(other)
        if not self.has_done(place):
            self.submit(lambda: self.run_until(place), stream)

    def new_stream(self, *, is_noted: bool = True) -> int:
        stream = super().new_stream(is_noted=is_noted)
        if is_noted:
            self.note_stream(stream)
        return stream

    def stream_destroy(self, stream: int) -> None:
        self.run_until(self._end_of(stream))
        super().stream_destroy(stream)
        self._noted.discard(stream)

    # ---- data -----------------------------------------------------------------------------

    def copy(self, destination: Address, source: Address, num_bytes: int, stream: int) -> None:
        self.submit(lambda: self._copy_now(destination, source, num_bytes, stream), stream)

    def copy_many(self, ops: Sequence[CopyOp], stream: int) -> None:
        for op in ops:
            self.copy(op.destination, op.source, op.num_bytes, stream)

    def fill(self, address: Address, num_bytes: int, byte: int, stream: int) -> None:
        self.submit(lambda: self._fill_now(address, num_bytes, byte, stream), stream)

    def _copy_now(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        self.check_access("a copy reads", source, num_bytes, Access.READ)
        self.check_access("a copy writes", destination, num_bytes, Access.READ_WRITE)
        super().copy_many([CopyOp(Address(destination), Address(source), num_bytes)], stream)

    def _fill_now(self, address: int, num_bytes: int, byte: int, stream: int) -> None:
        self.check_access("a fill writes", address, num_bytes, Access.READ_WRITE)
        super().fill(Address(address), num_bytes, byte, stream)

    # ---- mappings -------------------------------------------------------------------------

    def address_reserve(self, num_bytes: int) -> Address:
        """Reserve from the arena, in order, with a gap between ranges.

        So the grouping and order of unmap calls do not depend on addresses that the system chooses.
        """
        self._check_size("address_reserve", num_bytes)
        self.calls["address_reserve"] += 1
        address = self._next_address
        self._next_address += num_bytes + self.granularity_bytes
        assert self._next_address <= self._arena + _ARENA_BYTES
        with self._lock:
            self._books.reserve(address, num_bytes)
        return Address(address)

    def _unreserve(self, address: Address, num_bytes: int) -> None:
        pass  # The arena is freed as a whole.

    def close(self) -> None:
        """Free the arena with its mappings: after a failed test nothing accesses them again."""
        self._streams.clear()
        if self._arena:
            _native.host_free(self._arena, _ARENA_BYTES)
            self._arena = 0
        super().close()

    def run_until_failure(self, ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        num_done, error = super().run_until_failure(ops)
        for op in ops[:num_done]:
            for page in range(op.address, op.address + op.num_bytes, self.granularity_bytes):
                if isinstance(op, MapOp):
                    self._pages[page] = (op.handle, Access.NONE)
                elif isinstance(op, AccessOp):
                    self._pages[page] = (self._pages[page][0], op.access)
                else:
                    del self._pages[page]
        return num_done, error

    def handles(self, address: int, num_bytes: int) -> list[int]:
        """Handle of each page of a range; 0 if it is not mapped."""
        nothing = (0, Access.NONE)
        first = address - address % self.granularity_bytes
        return [
            self._pages.get(page, nothing)[0]
            for page in range(first, address + num_bytes, self.granularity_bytes)
        ]

    def check_access(self, what: str, address: int, num_bytes: int, access: Access) -> None:
        """Check that a range of the device's addresses may be accessed.

        Raises:
            IllegalAccessError: It may not. The message is in `violations` as well.
        """
        if not self._arena <= address < self._arena + _ARENA_BYTES:
            return  # Memory of torch.
        first = address - address % self.granularity_bytes
        for page in range(first, address + num_bytes, self.granularity_bytes):
            held = self._pages.get(page)
            if held is None or held[1] < access:
                state = "not mapped" if held is None else "read-only"
                self.fail(
                    f"{what} memory that is {state}: {page - first} bytes into a range of "
                    f"{num_bytes}"
                )

    def fail(self, what: str) -> None:
        """Record a violation and raise it.

        Raises:
            IllegalAccessError: Always.
        """
        self.violations.append(what)
        raise IllegalAccessError(what)
