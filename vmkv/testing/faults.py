"""A driver whose n-th call fails: how "unchanged on failure" is proved rather than promised.

Wrapped around a real backend, so that everything which does not fail is real. Each operation
inside a batch counts as a call of its own, so a fault can strike in the middle of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..backend import Backend, BackendUsage, Fence, MemoryLocation, Op, primitive_of
from ..errors import CapacityError, DriverError
from ..units import Address, Handle


class FaultInjectingBackend(Backend):
    """`upstream`, except that one call of all fails and is not forwarded.

    Args:
        upstream: The backend that does the work.
        fail_at: Which call fails, counted from 1; 0 for none. `arm` sets it anew.
        is_out_of_memory: Whether the fault says that the device is full.

    Attributes:
        upstream: The wrapped backend.
        num_calls: Calls since the last `arm`, the failing one included: a dry count when none
            fails.
        failed_call: The primitive that failed since the last `arm`; None while none has.
    """

    def __init__(self, upstream: Backend, fail_at: int = 0, *, is_out_of_memory: bool = False):
        self.upstream = upstream
        self.name = upstream.name
        self.granularity_bytes = upstream.granularity_bytes
        self.calls = upstream.calls
        self.host_location_is_cpu_readable = upstream.host_location_is_cpu_readable
        self.num_calls = 0
        self.failed_call: str | None = None
        self._fail_at = fail_at
        self._is_out_of_memory = is_out_of_memory

    def arm(self, fail_at: int, *, is_out_of_memory: bool = False) -> None:
        """Let the `fail_at`-th call from now on fail; 0 for none. Resets the counters."""
        self._fail_at = fail_at
        self._is_out_of_memory = is_out_of_memory
        self.num_calls = 0
        self.failed_call = None

    def _fault(self, call: str) -> DriverError | None:
        """Count one call; the error it fails with, if it is its turn."""
        self.num_calls += 1
        if self.num_calls != self._fail_at:
            return None
        self.failed_call = call
        return DriverError(
            call,
            -1,
            "INJECTED_FAULT",
            f"call {self.num_calls} was to fail",
            is_out_of_memory=self._is_out_of_memory,
        )

    def _raise_at_turn(self, call: str) -> None:
        error = self._fault(call)
        if error is not None:
            raise error

    @property
    def dlpack_device(self) -> tuple[int, int]:
        """The upstream's."""
        return self.upstream.dlpack_device

    def address_reserve(self, num_bytes: int) -> Address:
        """See `Backend.address_reserve`."""
        self._raise_at_turn("address_reserve")
        return self.upstream.address_reserve(num_bytes)

    def address_free(self, address: Address, num_bytes: int) -> None:
        """See `Backend.address_free`."""
        self._raise_at_turn("address_free")
        self.upstream.address_free(address, num_bytes)

    def mem_create(
        self,
        num_bytes: int,
        location: MemoryLocation = MemoryLocation.DEVICE,
        *,
        shareable: bool = False,
    ) -> Handle:
        """See `Backend.mem_create`."""
        self._raise_at_turn("mem_create")
        return self.upstream.mem_create(num_bytes, location, shareable=shareable)

    def mem_release(self, handle: Handle) -> None:
        """See `Backend.mem_release`."""
        self._raise_at_turn("mem_release")
        self.upstream.mem_release(handle)

    def mem_export(self, handle: Handle) -> int:
        """See `Backend.mem_export`."""
        self._raise_at_turn("mem_export")
        return self.upstream.mem_export(handle)

    def mem_import(self, fd: int, num_bytes: int) -> Handle:
        """See `Backend.mem_import`."""
        self._raise_at_turn("mem_import")
        return self.upstream.mem_import(fd, num_bytes)

    def run_until_failure(self, ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        """One operation at a time, so that each can fail."""
        for num_done, op in enumerate(ops):
            error = self._fault(primitive_of(op))
            if error is None:
                _, error = self.upstream.run_until_failure([op])
            if error is not None:
                return num_done, error
        return len(ops), None

    def note_stream(self, stream: int) -> None:
        """Only a note: it reaches no driver, so it cannot fail."""
        self.upstream.note_stream(stream)

    def record_fence(self) -> Fence:
        """See `Backend.record_fence`."""
        self._raise_at_turn("record_fence")
        return self.upstream.record_fence()

    def join_streams(self, stream: int) -> None:
        """See `Backend.join_streams`."""
        self._raise_at_turn("join_streams")
        self.upstream.join_streams(stream)

    def new_stream(self) -> int:
        """See `Backend.new_stream`."""
        self._raise_at_turn("new_stream")
        return self.upstream.new_stream()

    def stream_destroy(self, stream: int) -> None:
        """See `Backend.stream_destroy`."""
        self._raise_at_turn("stream_destroy")
        self.upstream.stream_destroy(stream)

    def stream_wait(self, stream: int, other: int) -> None:
        """See `Backend.stream_wait`."""
        self._raise_at_turn("stream_wait")
        self.upstream.stream_wait(stream, other)

    # `copy_many` is inherited: one copy at a time, so that each can fail.

    def copy(self, destination: Address, source: Address, num_bytes: int, stream: int) -> None:
        """See `Backend.copy`."""
        self._raise_at_turn("copy")
        self.upstream.copy(destination, source, num_bytes, stream)

    def fill(self, address: Address, num_bytes: int, byte: int, stream: int) -> None:
        """See `Backend.fill`."""
        self._raise_at_turn("fill")
        self.upstream.fill(address, num_bytes, byte, stream)

    def usage(self) -> BackendUsage:
        """The upstream's."""
        return self.upstream.usage()

    def free_memory_bytes(self) -> int:
        """The upstream's."""
        return self.upstream.free_memory_bytes()

    def free_host_memory_bytes(self) -> int:
        """The upstream's."""
        return self.upstream.free_host_memory_bytes()

    def close(self) -> None:
        """Close the upstream."""
        self.upstream.close()


@dataclass(frozen=True)
class Scenario:
    """One operation, ready to run on a state made for it.

    Attributes:
        operation: What is tried; called again after it failed.
        observe: What the caller of the operation can see of the state. Equal before the
            operation and after its failure.
        check: Raises where the state contradicts itself. Called before and after everything.
        close: Gives everything back.
    """

    operation: Callable[[], object]
    observe: Callable[[], object]
    check: Callable[[], None]
    close: Callable[[], None]


def check_every_call_can_fail(
    make_backend: Callable[[], Backend],
    make_scenario: Callable[[FaultInjectingBackend], Scenario],
    *,
    is_out_of_memory: bool = False,
) -> list[str]:
    """Fail the first driver call of an operation, then the second, and so on to the last.

    Each time on a fresh state: after the failure nothing that can be observed has changed and
    the books balance; the operation then succeeds when repeated; and closing leaves nothing
    behind. An operation may also survive a fault and succeed (a pool answers "out of memory" by
    freeing some), and must then have balanced books as well.

    Args:
        make_backend: Opens the backend to wrap.
        make_scenario: Builds the state and the operation over a backend; no fault strikes here.
        is_out_of_memory: Whether the faults say that the device is full.

    Returns:
        The primitive that failed in each round, in order: what the operation consists of.

    Raises:
        AssertionError: Something changed, leaked, or kept failing.
        InternalError: Raised by the scenario's own check.
    """
    struck: list[str] = []
    while True:
        fail_at = len(struck) + 1
        backend = FaultInjectingBackend(make_backend())
        scenario = make_scenario(backend)
        scenario.check()
        before = scenario.observe()
        backend.arm(fail_at, is_out_of_memory=is_out_of_memory)
        error: Exception | None = None
        try:
            scenario.operation()
        except (DriverError, CapacityError) as caught:
            error = caught
        call = backend.failed_call
        backend.arm(0)
        where = f"after a fault at call {fail_at}, {call}"
        scenario.check()
        if error is not None:
            assert call is not None, f"the operation fails without any fault: {error}"
            after = scenario.observe()
            assert before == after, f"{where}: observed {after}, before it was {before}"
            scenario.operation()
            scenario.check()
        scenario.close()
        usage = backend.upstream.usage()
        assert usage == BackendUsage(), f"{where}: closing left {usage}"
        backend.close()
        if call is None:
            return struck
        struck.append(call)
