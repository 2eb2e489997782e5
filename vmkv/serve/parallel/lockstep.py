"""An engine on every rank: all ranks plan the same steps, because all get the same input.

Commands change rank 0's scheduler and cache at once, and reach the other ranks before the next
step, in the same order. A step needs no message but a few numbers, since every rank plans it from
lengths and pages alone. The ranks agree on the rest: the capacity, the cost model, the seeds and
the graphs at the start; the driver's answers (`AgreedBackend`); a lack of memory for keys and
values or for a slot, after which all ranks plan a smaller step; a failure of a logits processor,
which ends its request on all ranks. Any other failure on one rank ends all of them.

See DESIGN.md, Note [Ranks plan alike].
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from ...core.backend import Backend, MemoryLocation, open_backend
from ...core.memory import ExtentPool
from ...errors import ConfigError, one_line
from ...step import Piece
from ..params import SamplingParams
from ..runner import ModelRunner, PendingTokens, SlotError, StepResult
from ..sampler import is_out_of_memory
from . import TensorParallel
from .agreed_backend import AgreedBackend, StepClock

Command = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A call of an engine's method: its name, and its positional and named arguments."""


class Lockstep:
    """Synchronises one engine with those of the other ranks; calls may raise `RankError`.

    `num_requests` is the number of unfinished requests after the last step, equal on all ranks.
    """

    def __init__(self, group: TensorParallel):
        self.group = group
        self._clock = StepClock()
        self._commands: list[bytes] = []  # Pickled.
        self._checksum = 0
        self._pool: ExtentPool | None = None
        self.num_requests = 0

    # ---- startup --------------------------------------------------------------------------

    def backend(self, device: str) -> Backend:
        """Open the memory of this rank's device."""
        return AgreedBackend(open_backend(device), self.group, self._clock)

    def level(self, pool: ExtentPool) -> None:
        """Set an empty pool's budgets to the smallest of all ranks'."""
        for location in MemoryLocation:
            budget_bytes = self.group.min(pool.stats(location).budget_bytes)
            if budget_bytes:
                pool.set_budget(budget_bytes, location)

    def begin(self, pool: ExtentPool, **facts: int) -> None:
        """Use this pool, after checking that it and other `facts` are equal on all ranks."""
        self._pool = pool
        budget_bytes = pool.stats().budget_bytes
        self.group.check_same({"page_bytes": pool.page_bytes, "budget": budget_bytes, **facts})

    def runner(self, runner: ModelRunner) -> _LockstepRunner:
        """Wrap a runner so that its failures occur on all ranks."""
        return _LockstepRunner(runner, self)

    # ---- rank 0 ---------------------------------------------------------------------------

    def note(self, command: Command) -> None:
        """Queue a command for the other ranks, which run it before the next step.

        Raises `ConfigError` if it cannot be pickled.
        """
        self.group.check()
        try:
            self._commands.append(pickle.dumps(command))
        except Exception as error:
            raise ConfigError(f"it cannot be sent to the other ranks: {one_line(error)}") from error

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

    def submitted(self) -> int:
        """Count a step submitted to the device; return its number."""
        self._clock.num_submitted += 1
        return self._clock.num_submitted

    def completed(self, number: int, result: StepResult) -> None:
        """Note that a step's result was read."""
        self._clock.num_completed = number
        tokens = ",".join(map(str, result.token_ids))
        self._checksum = zlib.crc32(tokens.encode(), self._checksum)

    def _state(self) -> int:
        """Return a checksum of sampled tokens, pool counters and number of requests."""
        if self._pool is None:
            return self._checksum
        stats = self._pool.stats()
        books = f"{stats.budget_bytes},{stats.created_bytes},{stats.free_bytes},{self.num_requests}"
        return zlib.crc32(books.encode(), self._checksum)


class _LockstepRunner:
    """Wraps a `ModelRunner`: a failure on one rank is a failure on all ranks."""

    def __init__(self, runner: ModelRunner, lockstep: Lockstep):
        self._runner = runner
        self.close = runner.close
        self._lockstep = lockstep
        # Whether slots were set since the last step, and the first out-of-memory error among them.
        self._has_set = False
        self._shortage: Exception | None = None

    def set_slot(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """Set a slot; if a rank lacks memory for it, `submit` fails on all ranks."""
        self._has_set = True
        try:
            self._runner.set_slot(slot, params, prompt_token_ids, output_token_ids)
        except ConfigError:
            # Every rank refuses the parameters, and the step's slots are set again.
            self._has_set, self._shortage = False, None
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise self._lockstep.group.fail(error) from error
            self._shortage = self._shortage or error

    def _agree_on_slots(self) -> None:
        """Raise an out-of-memory error of one rank on all of them."""
        has_set, shortage = self._has_set, self._shortage
        self._has_set, self._shortage = False, None
        if has_set and self._lockstep.group.max(int(shortage is not None)):
            raise shortage or torch.OutOfMemoryError("another rank has no memory left for a slot")

    def submit(self, pieces: Sequence[Piece]) -> _LockstepStep:
        """Submit a step. Cost: some 100 µs more after `set_slot`, for the ranks to agree."""
        self._lockstep.group.check()
        self._agree_on_slots()
        try:
            pending = self._runner.submit(pieces)
        except (SlotError, ConfigError):
            raise  # All ranks raise it, a processor's failure too.
        except Exception as error:
            raise self._lockstep.group.fail(error) from error
        return _LockstepStep(pending, self._lockstep.submitted(), self._lockstep)


class _LockstepStep:
    """Wraps `PendingTokens`: a failure on one rank ends all ranks."""

    def __init__(self, pending: PendingTokens, number: int, lockstep: Lockstep):
        self._pending = pending
        self._number = number
        self._lockstep = lockstep

    @property
    def has_ended(self) -> bool:
        return self._pending.has_ended

    def wait(self) -> None:
        try:
            self._pending.wait()
        except Exception as error:
            raise self._lockstep.group.fail(error) from error

    def result(self) -> StepResult:
        try:
            result = self._pending.result()
        except Exception as error:
            raise self._lockstep.group.fail(error) from error
        self._lockstep.group.check()  # An aborted collective leaves invalid tokens.
        self._lockstep.completed(self._number, result)
        return result
