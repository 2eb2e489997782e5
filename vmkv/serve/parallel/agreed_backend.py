"""A driver that answers every rank the same, so that what is decided by its answers is the same.

    mem_create     fails everywhere where it fails on one rank: all give way, and plan again
    free memory    is the smallest of all ranks'
    has_passed     asks how many steps were read, not how far this device has come
    anything else  that fails on one rank is the end of all

So the books of all ranks are equal, page by page, and no number of them has to be sent. Ranks talk
where memory is created, which is seldom: pools keep what they have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ...core.backend import Backend, BackendUsage, CopyOp, Fence, MemoryLocation, Op
from ...errors import DriverError, OutOfAddressSpaceError
from ...units import Address, Handle
from .group import TensorParallel

T = TypeVar("T")


class StepClock:
    """How far the ranks are, in steps.

    Attributes:
        num_submitted: Steps given to the device.
        num_completed: Of those, whose results were read, with all before them.
    """

    def __init__(self) -> None:
        self.num_submitted = 0
        self.num_completed = 0


class _StepFence(Fence):
    """Passes when all steps submitted before it were read."""

    def __init__(self, upstream: Fence, clock: StepClock):
        self._upstream = upstream
        self._clock = clock
        self._num_steps = clock.num_submitted

    def has_passed(self) -> bool:
        """See `Fence.has_passed`; waits for what is not a step's, such as copies."""
        if self._clock.num_completed < self._num_steps:
            return False
        self._upstream.wait()
        return True

    def wait(self) -> None:
        """See `Fence.wait`."""
        self._upstream.wait()


class AgreedBackend(Backend):
    """`upstream`, of which all ranks have one like it and make the same calls.

    Args:
        upstream: The backend that does the work.
        group: The ranks.
        clock: Theirs.
    """

    def __init__(self, upstream: Backend, group: TensorParallel, clock: StepClock):
        self.upstream = upstream
        self.name = upstream.name
        self.granularity_bytes = upstream.granularity_bytes
        self.calls = upstream.calls
        self.host_location_is_cpu_readable = upstream.host_location_is_cpu_readable
        self._group = group
        self._clock = clock

    @property
    def dlpack_device(self) -> tuple[int, int]:
        """The upstream's."""
        return self.upstream.dlpack_device

    def mem_create(
        self,
        num_bytes: int,
        location: MemoryLocation = MemoryLocation.DEVICE,
        *,
        shareable: bool = False,
    ) -> Handle:
        """See `Backend.mem_create`. Cost: some 100 µs more, for all ranks to hear of it."""
        handle, error = None, None
        try:
            handle = self.upstream.mem_create(num_bytes, location, shareable=shareable)
        except DriverError as caught:
            if not caught.is_out_of_memory:
                raise self._group.fail(caught) from caught
            error = caught
        is_short = self._group.max(int(error is not None))
        if handle is not None and not is_short:
            return handle
        if handle is not None:
            self.upstream.mem_release(handle)
        raise error or DriverError(
            "mem_create",
            -1,
            "OUT_OF_MEMORY",
            "another rank's device has none left",
            is_out_of_memory=True,
        )

    def free_memory_bytes(self) -> int:
        """Of the rank that has least."""
        return self._group.min(self.upstream.free_memory_bytes())

    def free_host_memory_bytes(self) -> int:
        """Likewise; ranks of one machine share it."""
        return self._group.min(self.upstream.free_host_memory_bytes() // self._group.size)

    def record_fence(self) -> Fence:
        """See `Backend.record_fence`."""
        return _StepFence(self._or_end(self.upstream.record_fence), self._clock)

    def run_until_failure(self, ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        """See `Backend.run_until_failure`."""
        num_done, error = self.upstream.run_until_failure(ops)
        if error is not None:
            raise self._group.fail(error) from error
        return num_done, None

    # ---- what only has to be passed on ------------------------------------------------------

    def address_reserve(self, num_bytes: int) -> Address:
        """See `Backend.address_reserve`."""
        return self._or_end(self.upstream.address_reserve, num_bytes)

    def address_free(self, address: Address, num_bytes: int) -> None:
        """See `Backend.address_free`."""
        self._or_end(self.upstream.address_free, address, num_bytes)

    def mem_release(self, handle: Handle) -> None:
        """See `Backend.mem_release`."""
        self._or_end(self.upstream.mem_release, handle)

    def mem_export(self, handle: Handle) -> int:
        """See `Backend.mem_export`."""
        return self._or_end(self.upstream.mem_export, handle)

    def mem_import(self, fd: int, num_bytes: int) -> Handle:
        """See `Backend.mem_import`."""
        return self._or_end(self.upstream.mem_import, fd, num_bytes)

    def note_stream(self, stream: int) -> None:
        """See `Backend.note_stream`."""
        self.upstream.note_stream(stream)

    def join_streams(self, stream: int) -> None:
        """See `Backend.join_streams`."""
        self._or_end(self.upstream.join_streams, stream)

    def new_stream(self) -> int:
        """See `Backend.new_stream`."""
        return self._or_end(self.upstream.new_stream)

    def stream_destroy(self, stream: int) -> None:
        """See `Backend.stream_destroy`."""
        self._or_end(self.upstream.stream_destroy, stream)

    def stream_wait(self, stream: int, other: int) -> None:
        """See `Backend.stream_wait`."""
        self._or_end(self.upstream.stream_wait, stream, other)

    def copy(self, destination: Address, source: Address, num_bytes: int, stream: int) -> None:
        """See `Backend.copy`."""
        self._or_end(self.upstream.copy, destination, source, num_bytes, stream)

    def copy_many(self, ops: Sequence[CopyOp], stream: int) -> None:
        """See `Backend.copy_many`."""
        self._or_end(self.upstream.copy_many, ops, stream)

    def fill(self, address: Address, num_bytes: int, byte: int, stream: int) -> None:
        """See `Backend.fill`."""
        self._or_end(self.upstream.fill, address, num_bytes, byte, stream)

    def usage(self) -> BackendUsage:
        """The upstream's."""
        return self.upstream.usage()

    def close(self) -> None:
        """Close the upstream."""
        self.upstream.close()

    def _or_end(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call the driver; a failure of one rank's is the end of all."""
        try:
            return call(*arguments)
        except (DriverError, OutOfAddressSpaceError) as error:
            raise self._group.fail(error) from error
