"""A driver that answers every rank the same, so that all ranks decide the same.

    mem_create     fails on all ranks if it fails on one: all preempt and plan again
    free memory    is the smallest of all ranks'
    has_passed     counts steps whose results were read, not this device's progress
    anything else  that fails on one rank ends all ranks

So the allocators of all ranks are equal, page by page, without exchanging their state. Ranks
communicate when memory is created, which is rare because pools keep their memory.
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
    """Counts steps submitted to the device, and steps whose results were read, in order."""

    def __init__(self) -> None:
        self.num_submitted = 0
        self.num_completed = 0


class _StepFence(Fence):
    """Passes when the results of all steps submitted before it were read."""

    def __init__(self, upstream: Fence, clock: StepClock):
        self._upstream = upstream
        self._clock = clock
        self._num_steps = clock.num_submitted

    def has_passed(self) -> bool:
        """Return whether the steps were read; if so, waits for other work, such as copies."""
        if self._clock.num_completed < self._num_steps:
            return False
        self._upstream.wait()
        return True

    def wait(self) -> None:
        self._upstream.wait()


class AgreedBackend(Backend):
    """Wraps `upstream`; every rank has one, and makes the same calls on it."""

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
        """The upstream's device."""
        return self.upstream.dlpack_device

    def mem_create(
        self,
        num_bytes: int,
        location: MemoryLocation = MemoryLocation.DEVICE,
        *,
        shareable: bool = False,
    ) -> Handle:
        """Create memory, on all ranks or none. Cost: some 100 µs more, for the ranks to agree."""
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
        """Return the smallest free memory of all ranks."""
        return self._group.min(self.upstream.free_memory_bytes())

    def free_host_memory_bytes(self) -> int:
        """Return the smallest share of free host memory; ranks of one machine divide it."""
        return self._group.min(self.upstream.free_host_memory_bytes() // self._group.size)

    def record_fence(self) -> Fence:
        """Record a fence that passes when all submitted steps were read."""
        return _StepFence(self._or_end(self.upstream.record_fence), self._clock)

    def run_until_failure(self, ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        """Run operations; a failure ends all ranks."""
        num_done, error = self.upstream.run_until_failure(ops)
        if error is not None:
            raise self._group.fail(error) from error
        return num_done, None

    # ---- forwarded calls --------------------------------------------------------------------

    def address_reserve(self, num_bytes: int) -> Address:
        """Reserve addresses."""
        return self._or_end(self.upstream.address_reserve, num_bytes)

    def address_free(self, address: Address, num_bytes: int) -> None:
        """Free reserved addresses."""
        self._or_end(self.upstream.address_free, address, num_bytes)

    def mem_release(self, handle: Handle) -> None:
        """Release a handle."""
        self._or_end(self.upstream.mem_release, handle)

    def mem_export(self, handle: Handle) -> int:
        """Export a handle as a file descriptor."""
        return self._or_end(self.upstream.mem_export, handle)

    def mem_import(self, fd: int, num_bytes: int) -> Handle:
        """Import a handle from a file descriptor."""
        return self._or_end(self.upstream.mem_import, fd, num_bytes)

    def note_stream(self, stream: int) -> None:
        """Note that work on the memory is submitted to a stream."""
        self.upstream.note_stream(stream)

    def join_streams(self, stream: int) -> None:
        """Make a stream wait for the other noted streams."""
        self._or_end(self.upstream.join_streams, stream)

    def new_stream(self) -> int:
        """Create a stream."""
        return self._or_end(self.upstream.new_stream)

    def stream_destroy(self, stream: int) -> None:
        """Destroy a stream."""
        self._or_end(self.upstream.stream_destroy, stream)

    def stream_wait(self, stream: int, other: int) -> None:
        """Make a stream wait for another."""
        self._or_end(self.upstream.stream_wait, stream, other)

    def copy(self, destination: Address, source: Address, num_bytes: int, stream: int) -> None:
        """Copy bytes on a stream."""
        self._or_end(self.upstream.copy, destination, source, num_bytes, stream)

    def copy_many(self, ops: Sequence[CopyOp], stream: int) -> None:
        """Run several copies on a stream."""
        self._or_end(self.upstream.copy_many, ops, stream)

    def fill(self, address: Address, num_bytes: int, byte: int, stream: int) -> None:
        """Fill bytes on a stream."""
        self._or_end(self.upstream.fill, address, num_bytes, byte, stream)

    def usage(self) -> BackendUsage:
        """Return the upstream's usage."""
        return self.upstream.usage()

    def close(self) -> None:
        """Close the upstream."""
        self.upstream.close()

    def _or_end(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call the driver; a failure on one rank ends all ranks."""
        try:
            return call(*arguments)
        except (DriverError, OutOfAddressSpaceError) as error:
            raise self._group.fail(error) from error
