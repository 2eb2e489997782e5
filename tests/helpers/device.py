"""A device on the host that can be late, and that knows what its memory management unit permits.

`HostBackend` carries everything out at once, so nothing is ever under way when memory is taken
back, and what touches memory that is not there ends the process. `Device` does what it is told in
the order in which it was told, copies and fills included, but as late as it may: when somebody
waits for a fence, or for a step's result. And it looks before it touches: where a GPU would stop
with an illegal access, it raises `IllegalAccessError`, which a test can report and shrink.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from vmkv import HostBackend, _native
from vmkv.backend import Access, AccessOp, CopyOp, Fence, MapOp, Op
from vmkv.errors import DriverError
from vmkv.units import Address

#: Addresses of one device, which are never given out twice.
_ARENA_BYTES = 1 << 36


class IllegalAccessError(AssertionError):
    """Work touched memory that is not mapped, or wrote where it may only read."""


class QueueFence(Fence):
    """A point in a device's queue."""

    def __init__(self, device: Device, end: int):
        self._device = device
        self._end = end

    def has_passed(self) -> bool:
        return self._device.num_done >= self._end

    def wait(self) -> None:
        self._device.run_until(self._end)


class Device(HostBackend):
    """A host backend with one queue of work.

    Args:
        granularity_bytes: See `HostBackend`.
        is_late: Work waits in the queue until somebody waits for it. Otherwise it runs at once.

    Attributes:
        num_submitted: Pieces of work so far.
        num_done: Those of them that have run.
        violations: What went wrong, in words; whoever caught the error, it is here as well.
    """

    def __init__(self, granularity_bytes: int, *, is_late: bool):
        super().__init__(granularity_bytes)
        self._is_late = is_late
        self._queue: deque[Callable[[], None]] = deque()
        # Of each mapped page, the handle behind it and what may be done there.
        self._pages: dict[int, tuple[int, Access]] = {}
        self._arena = self._next_address = _native.host_reserve(_ARENA_BYTES, granularity_bytes)
        self.num_submitted = 0
        self.num_done = 0
        self.violations: list[str] = []

    # ---- the queue ------------------------------------------------------------------------

    def submit(self, work: Callable[[], None]) -> int:
        """Have `work` done after all that was submitted before; returns its place."""
        self.num_submitted += 1
        self._queue.append(work)
        if not self._is_late:
            self.run_until(self.num_submitted)
        return self.num_submitted

    def run_until(self, place: int) -> None:
        """Do everything up to `place`."""
        while self.num_done < place:
            self.num_done += 1  # First: what fails is over as well.
            self._queue.popleft()()

    def record_fence(self) -> Fence:
        self.calls["record_fence"] += 1
        return QueueFence(self, self.num_submitted)

    def stream_destroy(self, stream: int) -> None:
        self.run_until(self.num_submitted)
        super().stream_destroy(stream)

    def copy(self, destination: Address, source: Address, num_bytes: int, stream: int) -> None:
        self.submit(lambda: self._copy_now(destination, source, num_bytes, stream))

    def copy_many(self, ops: Sequence[CopyOp], stream: int) -> None:
        for op in ops:
            self.copy(op.destination, op.source, op.num_bytes, stream)

    def fill(self, address: Address, num_bytes: int, byte: int, stream: int) -> None:
        self.submit(lambda: self._fill_now(address, num_bytes, byte, stream))

    def _copy_now(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        self.check_access("a copy reads", source, num_bytes, Access.READ)
        self.check_access("a copy writes", destination, num_bytes, Access.READ_WRITE)
        super().copy_many([CopyOp(Address(destination), Address(source), num_bytes)], stream)

    def _fill_now(self, address: int, num_bytes: int, byte: int, stream: int) -> None:
        self.check_access("a fill writes", address, num_bytes, Access.READ_WRITE)
        super().fill(Address(address), num_bytes, byte, stream)

    # ---- what is mapped -------------------------------------------------------------------

    def address_reserve(self, num_bytes: int) -> Address:
        """From the arena, in order and never beside each other.

        So what is unmapped in one call, and in which order, does not depend on where the system
        happens to have room.
        """
        self._check_size("address_reserve", num_bytes)
        self.calls["address_reserve"] += 1
        address = self._next_address
        self._next_address += num_bytes + self.granularity_bytes
        assert self._next_address <= self._arena + _ARENA_BYTES
        with self._lock:
            self._books.reserve(address, num_bytes)
        return Address(address)

    def address_free(self, address: Address, num_bytes: int) -> None:
        self.calls["address_free"] += 1
        with self._lock:
            refusal = self._books.why_not_free(address, num_bytes)
            if refusal is not None:
                raise self._refusal("address_free", refusal)
            self._books.unreserve(address)

    def close(self) -> None:
        """Free the arena, whatever is in it: where a test has failed, nothing touches it again."""
        self._queue.clear()
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
        """What lies behind each page of a range; 0 for nothing."""
        nothing = (0, Access.NONE)
        first = address - address % self.granularity_bytes
        return [
            self._pages.get(page, nothing)[0]
            for page in range(first, address + num_bytes, self.granularity_bytes)
        ]

    def check_access(self, what: str, address: int, num_bytes: int, access: Access) -> None:
        """Raise where the range cannot be accessed so.

        Raises:
            IllegalAccessError: It is in `violations` as well.
        """
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
        """Note a violation, and raise it.

        Raises:
            IllegalAccessError: Always.
        """
        self.violations.append(what)
        raise IllegalAccessError(what)
