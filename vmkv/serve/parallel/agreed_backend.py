"""A driver that answers every rank the same, so that all ranks decide the same.

    mem_create     fails on all ranks if it fails on one: all preempt and plan again
    free memory    is the smallest of all ranks'
    has_passed     counts steps whose results were read, not this device's progress
    anything else  that fails on one rank ends all ranks

So the allocators of all ranks are equal, page by page, without exchanging their state. Ranks
communicate when memory is created, which is rare because pools keep their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.backend import Backend, Fence, ForwardingBackend, MemoryLocation, Op, forwarded
from ...errors import DriverError, OutOfAddressSpaceError
from ...units import Handle
from .group import TensorParallel


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


class AgreedBackend(ForwardingBackend):
    """Wraps `upstream`; every rank has one, and makes the same calls on it."""

    def __init__(self, upstream: Backend, group: TensorParallel, clock: StepClock):
        super().__init__(upstream)
        self._group = group
        self._clock = clock

    def forward(self, call: str, *args: Any, **options: Any) -> Any:
        """Call the driver; a failure on one rank ends all ranks."""
        try:
            return super().forward(call, *args, **options)
        except (DriverError, OutOfAddressSpaceError) as error:
            raise self._group.fail(error) from error

    copy_many = forwarded("copy_many")

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
        return _StepFence(super().record_fence(), self._clock)

    def run_until_failure(self, ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        """Run operations; a failure ends all ranks."""
        num_done, error = self.upstream.run_until_failure(ops)
        if error is not None:
            raise self._group.fail(error) from error
        return num_done, None
