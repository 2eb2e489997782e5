"""A backend whose n-th call fails, and a check that every failure leaves state unchanged.

Each operation inside a batch counts as a call, so a fault can occur in the middle of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.backend import PRIMITIVES, Backend, BackendUsage, ForwardingBackend, Op
from ..errors import CapacityError, DriverError

#: Calls that reach no driver, or whose failure has nothing to leave unchanged.
_INFALLIBLE = {"note_stream", "usage", "free_memory_bytes", "free_host_memory_bytes", "close"}


class FaultInjectingBackend(ForwardingBackend):
    """Forwards to `upstream`, except that one call fails and is not forwarded.

    Args:
        upstream: The backend that does the work.
        fail_at: Number of the call that fails, counted from 1; 0 for none. `arm` changes it.
        is_out_of_memory: Whether the fault is an out-of-memory error.

    Attributes:
        num_calls: Calls since the last `arm`, the failing one included.
        failed_call: The primitive that failed since the last `arm`, or None.
    """

    def __init__(self, upstream: Backend, fail_at: int = 0, *, is_out_of_memory: bool = False):
        super().__init__(upstream)
        self.arm(fail_at, is_out_of_memory=is_out_of_memory)

    def arm(self, fail_at: int, *, is_out_of_memory: bool = False) -> None:
        """Fail the `fail_at`-th call from now on, 0 for none, and reset the counters."""
        self._fail_at = fail_at
        self._is_out_of_memory = is_out_of_memory
        self.num_calls = 0
        self.failed_call: str | None = None

    def _fault(self, call: str) -> DriverError | None:
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

    def forward(self, call: str, *args: Any, **options: Any) -> Any:
        """Make a call on the upstream, unless it is to fail."""
        error = None if call in _INFALLIBLE else self._fault(call)
        if error is not None:
            raise error
        return super().forward(call, *args, **options)

    def run_until_failure(self, ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        """Run the operations one by one, so that each can fail."""
        for num_done, op in enumerate(ops):
            error = self._fault(PRIMITIVES[type(op)])
            if error is None:
                _, error = self.upstream.run_until_failure([op])
            if error is not None:
                return num_done, error
        return len(ops), None


@dataclass(frozen=True)
class Scenario:
    """An operation to test, on a state made for it.

    Attributes:
        operation: The operation; called again after it failed.
        observe: Returns the state that a caller can see; equal before the operation and after its
            failure.
        check: Raises if the state is inconsistent. Called before and after every operation.
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

    Each round has a fresh state. After the failure the observable state is unchanged and the books
    balance; the repeated operation succeeds; closing leaves nothing behind. An operation may also
    handle the fault and succeed.

    Args:
        make_backend: Opens the backend to wrap.
        make_scenario: Builds the state and the operation over a backend; no call fails here.
        is_out_of_memory: Whether the faults are out-of-memory errors.

    Returns:
        The primitive that failed in each round, in order.

    Raises:
        AssertionError: State changed or leaked, or the operation kept failing.
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
