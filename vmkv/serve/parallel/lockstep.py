"""An engine on every rank: all ranks plan the same steps, because all get the same input.

Commands change rank 0's scheduler and cache at once, and reach the other ranks before the next
step, in the same order. The ranks agree on what else decides: the capacity, the cost model, the
seeds and the graphs at the start; the driver's answers (`AgreedBackend`); a lack of memory; a
failure of a logits processor. Any other failure on one rank ends all of them.

See DESIGN.md, Note [Ranks plan alike].
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from ...core.backend import (
    Backend,
    Fence,
    ForwardingBackend,
    MemoryLocation,
    Op,
    forwarded,
    open_backend,
)
from ...core.memory import ExtentPool
from ...errors import ConfigError, DriverError, OutOfAddressSpaceError, one_line
from ...step import Piece
from ...step.piece import HeadInParts
from ...units import Address, Handle
from ..runner import LaunchedStep, ModelRunner, PendingTokens, SlotError, StepResult
from ..sampler import is_out_of_memory
from . import TensorParallel

_R = TypeVar("_R")
Command = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A call of an engine's method: its name, and its positional and named arguments."""


# ---- driver --------------------------------------------------------------------------------------


class _StepFence(Fence):
    def __init__(self, upstream: Fence, backend: AgreedBackend):
        self._upstream = upstream
        self._backend = backend
        self._num_steps = backend.num_submitted

    def has_passed(self) -> bool:
        if self._backend.num_completed < self._num_steps:
            return False
        self._upstream.wait()
        return True

    def wait(self) -> None:
        self._upstream.wait()


class AgreedBackend(ForwardingBackend):
    """A driver that answers every rank the same, so that all ranks decide the same.

        mem_create     fails on all ranks if it fails on one: all preempt and plan again
        pin            likewise: no rank keeps the blocks that have no room
        free memory    is the smallest of all ranks'
        has_passed     counts steps whose results were read, not this device's progress
        anything else  that fails on one rank ends all ranks

    `num_submitted` steps were submitted to the device, and the results of `num_completed` read.
    """

    def __init__(self, upstream: Backend, group: TensorParallel):
        super().__init__(upstream)
        self._group = group
        self.num_submitted = self.num_completed = 0

    def forward(self, call: str, *args: Any, **options: Any) -> Any:
        """Call the driver; a failure on one rank ends all ranks."""
        try:
            return super().forward(call, *args, **options)
        except (DriverError, OutOfAddressSpaceError) as error:
            raise self._group.fail(error) from error

    copy_many = forwarded("copy_many")

    def mem_create(self, *args: Any, **options: Any) -> Handle:
        """Create memory, on all ranks or none. Cost: some 100 µs more, for the ranks to agree."""
        handle, error = None, None
        try:
            handle = self.upstream.mem_create(*args, **options)
        except DriverError as caught:
            if not caught.is_out_of_memory:
                raise self._group.fail(caught) from caught
            error = caught
        is_short = self._group.max(int(error is not None))
        if handle is not None and not is_short:
            return handle
        if handle is not None:
            self.upstream.mem_release(handle)
        why = "another rank's device has none left"
        raise error or DriverError("mem_create", -1, "OUT_OF_MEMORY", why, is_out_of_memory=True)

    def pin(self, address: Address, num_bytes: int) -> None:
        """Pin memory of each rank, or of none."""
        error = None
        try:
            self.upstream.pin(address, num_bytes)
        except DriverError as caught:
            error = caught
        if self._group.max(int(error is not None)):
            if error is None:
                self.upstream.unpin(address)
            raise error or DriverError("pin", -1, "REFUSED", "another rank could not pin memory")

    def free_memory_bytes(self) -> int:
        """Return the smallest free memory of all ranks."""
        return self._group.min(self.upstream.free_memory_bytes())

    def free_host_memory_bytes(self) -> int:
        """Return the smallest share of free host memory; ranks of one machine divide it."""
        return self._group.min(self.upstream.free_host_memory_bytes() // self._group.size)

    def record_fence(self, stream: int | None = None) -> Fence:
        """Record a fence that passes when all submitted steps were read."""
        return _StepFence(super().record_fence(stream), self)

    def run_until_failure(self, ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        """Run operations; a failure ends all ranks."""
        num_done, error = self.upstream.run_until_failure(ops)
        if error is not None:
            raise self._group.fail(error) from error
        return num_done, None


# ---- engine --------------------------------------------------------------------------------------


class Lockstep:
    """Synchronises one engine with those of the other ranks; calls may raise `RankError`.

    Attributes:
        num_requests: Unfinished requests after the last step, equal on all ranks.
        is_following: Whether this rank repeats rank 0's calls now.
        head: The model's output head in parts; None if it is whole.
    """

    def __init__(self, group: TensorParallel):
        self.group = group
        self._commands: list[bytes] = []  # Pickled.
        self._checksum = 0
        self._pool: ExtentPool | None = None
        self.num_requests = 0
        self.is_following = False
        self.head: HeadInParts | None = None

    def check(self) -> None:
        """Raise `RankError` if a rank has ended, `ConfigError` where rank 0 takes the calls."""
        self.group.check()
        if self.group.rank and not self.is_following:
            raise ConfigError("this rank follows rank 0: call follow(); requests go to rank 0")

    # ---- startup --------------------------------------------------------------------------

    def backend(self, device: str) -> Backend:
        """Open the memory of this rank's device."""
        self.driver = self.another_backend(device)
        return self.driver

    def another_backend(self, device: str) -> AgreedBackend:
        """Open memory that no step uses."""
        return AgreedBackend(open_backend(device), self.group)

    def level(self, pool: ExtentPool) -> None:
        """Set an empty pool's budgets to the smallest of all ranks'."""
        for location in MemoryLocation:
            budget_bytes = self.group.min(pool.stats(location).budget_bytes)
            if budget_bytes:
                pool.set_budget(budget_bytes, location)

    def begin(self, pool: ExtentPool, *facts: int) -> None:
        """Use this pool, once all ranks have got here, with the same pages, budget and `facts`."""
        self._pool = pool
        books = (pool.page_bytes, pool.stats().budget_bytes, *facts)
        self._checksum = zlib.crc32(repr(books).encode())
        if self.group.min(self._checksum) != self.group.max(self._checksum):
            raise self.group.fail(f"ranks differ in page size, budget or other facts: here {books}")

    # ---- rank 0 ---------------------------------------------------------------------------

    def repeat(self, name: str, *arguments: Any, **options: Any) -> None:
        """Have the other ranks make a call of their engines before the next step.

        `ConfigError` if the call cannot be pickled.
        """
        if self.group.rank or self.group.failure is not None:
            return
        try:
            self._commands.append(pickle.dumps((name, arguments, options)))
        except Exception as error:
            raise ConfigError(f"it cannot be sent to the other ranks: {one_line(error)}") from error

    def repeat_now(self, name: str, *arguments: Any, **options: Any) -> None:
        """Have the other ranks make a call at once, as this one does next."""
        self.repeat(name, *arguments, **options)
        if not self.group.rank and self.group.failure is None:
            self.flush()

    def flush(self, *, is_step: bool = False) -> None:
        """Send the queued commands, and with `is_step` a step, to the other ranks."""
        commands, self._commands = self._commands, []
        self.group.exchange(commands, is_step, self._state())

    # ---- other ranks ----------------------------------------------------------------------

    def receive(self) -> tuple[list[Command], bool]:
        """Wait for rank 0's commands, and whether a step follows; compare the ranks' states."""
        commands, is_step = self.group.exchange([], False, self._state())
        return [pickle.loads(each) for each in commands], is_step

    # ---- all ranks ------------------------------------------------------------------------

    def wrapped(self, runner: ModelRunner) -> Any:
        """Return a runner with the same methods, whose failures are those of all ranks."""
        return LockstepRunner(self, runner)

    def or_end(self, call: Callable[[], _R], agreed: type[Exception] = ConfigError) -> _R:
        """Return the result of a call; an error on one rank ends all ranks.

        An error that all ranks raise is only raised: a `ConfigError`, or one of type `agreed`.
        """
        try:
            return call()
        except (SlotError, ConfigError, agreed):
            raise  # A processor's failure, too.
        except Exception as error:
            raise self.group.fail(error) from error

    def completed(self, number: int, result: StepResult) -> None:
        """Note that a step's result was read."""
        self.driver.num_completed = number
        self._checksum = zlib.crc32(",".join(map(str, result.token_ids)).encode(), self._checksum)

    def _state(self) -> int:
        if self._pool is None:
            return self._checksum
        stats = self._pool.stats()
        books = f"{stats.budget_bytes},{stats.created_bytes},{stats.free_bytes},{self.num_requests}"
        return zlib.crc32(books.encode(), self._checksum)


class LockstepRunner:
    """Wraps a `ModelRunner`: a failure on one rank is a failure on all ranks."""

    def __init__(self, lockstep: Lockstep, runner: ModelRunner):
        self._runner = runner
        self.close, self.sleep = runner.close, runner.sleep
        self._lockstep = lockstep
        # Whether slots were set since the last step, and the first out-of-memory error among them.
        self._has_set = False
        self._shortage: Exception | None = None

    def set_slot(self, *slot: Any) -> None:
        """Set a slot; if a rank lacks memory for it, `submit` fails on all ranks."""
        self._has_set = True
        try:
            self._runner.set_slot(*slot)
        except ConfigError:
            # Every rank refuses the parameters, and the step's slots are set again.
            self._has_set, self._shortage = False, None
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise self._lockstep.group.fail(error) from error
            self._shortage = self._shortage or error

    def submit(self, pieces: Sequence[Piece]) -> _LockstepStep:
        """Launch a step and sample. Cost: as `launch`."""
        return self.sample(self.launch(pieces))

    def launch(self, pieces: Sequence[Piece]) -> LaunchedStep:
        """Launch a step. Cost: some 100 µs more after `set_slot`, for the ranks to agree."""
        self._lockstep.group.check()
        has_set, shortage = self._has_set, self._shortage
        self._has_set, self._shortage = False, None
        if has_set and self._lockstep.group.max(int(shortage is not None)):
            raise shortage or torch.OutOfMemoryError("another rank has no memory left for a slot")
        launched = self._lockstep.or_end(partial(self._runner.launch, pieces))
        # Now: what is retired before the step is sampled waits for it.
        self._lockstep.driver.num_submitted += 1
        return launched

    def sample(self, launched: LaunchedStep, *masks: Any) -> _LockstepStep:
        """Sample the step launched last."""
        driver = self._lockstep.driver
        try:
            pending = self._lockstep.or_end(partial(self._runner.sample, launched, *masks))
        except (SlotError, ConfigError):
            driver.num_submitted -= 1  # No result will be read.
            raise
        return _LockstepStep(pending, driver.num_submitted, self._lockstep)


@dataclass(eq=False)
class _LockstepStep:
    _pending: PendingTokens
    _number: int
    _lockstep: Lockstep

    @property
    def has_ended(self) -> bool:
        return self._pending.has_ended

    def wait(self) -> None:
        self._lockstep.or_end(self._pending.wait)

    def result(self) -> StepResult:
        result = self._lockstep.or_end(self._pending.result)
        self._lockstep.group.check()  # An aborted collective leaves invalid tokens.
        self._lockstep.completed(self._number, result)
        return result
