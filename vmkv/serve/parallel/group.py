"""The ranks of a model: how they agree, and what happens when one is lost.

Values that depend on a rank's device or driver are agreed on (`min`, `max`), external input comes
from rank 0 (`share`, `exchange`), and everything else is computed from the same numbers in the same
order. Agreement uses gloo, so it never waits for a device. A rank that has ended is detected at
once by ranks that communicate with it, a hanging one after a time limit. Either ends all ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ConfigError, DriverError, RankError, one_line
from . import collectives
from .one_shot import OneShotSums

_LOG = logging.getLogger(__name__)
#: Key in the store of a rank that has failed.
_FAILED = "vmkv/failed/{}"
#: Time for all ranks that wait for the same rank to fail, and the polling interval.
_NOTICE_S, _POLL_S = 1.0, 0.01
#: The source file that gloo's messages begin with.
_GLOO_FILE = re.compile(r"\[(enforce fail at )?\S+:\d+\] ")
#: Time limit of ranks that wait for commands.
_FOREVER = timedelta(days=3650)


class TensorParallel:
    """The ranks that hold the parts of one model. All ranks must create it at the same time.

    Args:
        timeout_s: Time limit for an answer of another rank.
        explain: Returns what is known about a rank that does not answer.

    Attributes:
        rank: This process's number, from 0 on.
        size: Number of ranks.
        name: The group's name in `torch.distributed`.
        failure: The error that ended the ranks, or None.
        on_loss: Called by `lose`.

    Raises:
        ConfigError: `torch.distributed` is not initialised; `from_environment` does it.
        RankError: Another rank does not answer.
    """

    def __init__(self, *, timeout_s: float = 60.0, explain: Callable[[], str | None] | None = None):
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "torch.distributed is not initialised: start the ranks with torchrun, and make "
                "the group with TensorParallel.from_environment()"
            )
        world = dist.group.WORLD
        assert world is not None  # It is initialised.
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.name: str = world.group_name
        self.failure: RankError | None = None
        self.on_loss: Callable[[], None] | None = None
        self._sums: OneShotSums | None = None
        self._timeout_s = timeout_s
        c10d: Any = dist.distributed_c10d
        self._store = c10d._get_default_store()
        self._explain = explain
        limit = timedelta(seconds=timeout_s)
        try:
            self._agreement: Any = dist.new_group(backend="gloo", timeout=limit)
            # Rank 0 waits, up to its limit, for ranks that are not ready to receive.
            control_limit = _FOREVER if self.rank else limit
            self._control: Any = dist.new_group(backend="gloo", timeout=control_limit)
        except RuntimeError as error:
            raise self.fail(error) from error
        self._sums = self._open_sums(timeout_s) if dist.get_backend() == "nccl" else None
        collectives.register(self.name, self._sums)

    def _open_sums(self, timeout_s: float) -> OneShotSums | None:
        sums = reason = None
        try:
            if len({*self._gather(socket.gethostname())}) > 1:
                raise ConfigError("the ranks are on several hosts")
            sums = OneShotSums(self.rank, self.size, timeout_s)
        except (RuntimeError, ConfigError) as error:  # Any error of the device.
            reason = one_line(error)
        handles = self._gather(sums and sums.handle)
        if sums is not None and all(handles):
            try:
                sums.meet(handles)
            except DriverError as error:
                reason = one_line(error)
        if self.min(int(reason is None and all(handles))):
            return sums
        if sums is not None:
            sums.close()
        _LOG.info("rank %d: all sums are NCCL's: %s", self.rank, reason or "another rank's choice")
        return None

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        self._call(lambda: dist.all_gather_object(values, value, group=self._agreement))
        return values

    @classmethod
    def from_environment(
        cls, device_type: str | None = None, *, timeout_s: float = 60.0
    ) -> TensorParallel:
        """Connect to the ranks that torchrun has started; `ConfigError` if there are none.

        `device_type` is "cuda" or "cpu", by default "cuda" if available.
        """
        if not dist.is_initialized():
            if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
                raise ConfigError("the environment does not name a rank; start it with torchrun")
            if device_type is None:
                device_type = "cuda" if torch.cuda.is_available() else "cpu"
            set_up(device_type, int(os.environ.get("LOCAL_RANK", "0")), timeout_s)
        return cls(timeout_s=timeout_s)

    # ---- agreement ------------------------------------------------------------------------

    def min(self, value: int) -> int:
        """Return the smallest of all ranks' values. Collective: all ranks call it in order."""
        return self._reduce(value, dist.ReduceOp.MIN)

    def max(self, value: int) -> int:
        """Return the largest of all ranks' values; like `min`, a collective call."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def share(self, value: Any) -> Any:
        """Return rank 0's value, pickled, on all ranks; like `min`, a collective call."""
        values = [value]
        self._call(lambda: dist.broadcast_object_list(values, 0, group=self._agreement))
        return values[0]

    def _reduce(self, value: int, operation: Any) -> int:
        tensor = torch.tensor([value], dtype=torch.int64)
        self._call(lambda: dist.all_reduce(tensor, operation, group=self._agreement))
        return int(tensor)

    # ---- commands of rank 0 ---------------------------------------------------------------

    def exchange(
        self, commands: list[bytes], is_step: bool, checksum: int
    ) -> tuple[list[bytes], bool]:
        """Return rank 0's commands, and whether a step follows, on all ranks.

        Other ranks wait without a limit. `checksum` covers the state before; `RankError` if it is
        not rank 0's. Cost: 50 to 100 µs, more with commands.
        """
        head = torch.tensor([len(commands), is_step, checksum], dtype=torch.int64)
        self._call(lambda: dist.broadcast(head, 0, group=self._control))
        num_commands, follows, expected = head.tolist()
        if checksum != expected:
            raise self.fail("its tokens, memory or requests differ from rank 0's")
        told = [commands]
        if num_commands:
            self._call(lambda: dist.broadcast_object_list(told, 0, group=self._control))
        return told[0], bool(follows)

    # ---- failure and shutdown -------------------------------------------------------------

    def check(self) -> None:
        """Raise the group's `RankError` if the ranks have ended."""
        if self.failure is None and (reason := self.stuck()) is not None:
            self.failure = RankError(reason)
        if self.failure is not None:
            raise self.failure

    def stuck(self) -> str | None:
        """Name the ranks for which a kernel has waited in vain, if any. Thread-safe."""
        sums = self._sums
        return self._unanswered() if sums is not None and sums.has_given_up() else None

    def fail(self, reason: str | BaseException) -> RankError:
        """End the ranks and return the error to raise; the first reason is kept."""
        if self.failure is None:
            if isinstance(reason, BaseException):
                text = self._explained(reason)
            else:
                text = f"rank {self.rank} of {self.size} has ended: {reason}"
            self.failure = RankError(text)
        return self.failure

    def lose(self, reason: str) -> None:
        """End the ranks because one was lost, and abort every wait for it. Thread-safe."""
        self.failure = self.failure or RankError(reason)
        if self._sums is not None:
            self._sums.give_up()
        if dist.is_initialized() and dist.get_backend() == "nccl":
            # Kernels that wait for the lost rank end; their results are invalid.
            abort()
        if self.on_loss is not None:
            self.on_loss()

    def close(self) -> None:
        """Release the memory of one-shot sums, after all ranks have stopped adding. Idempotent."""
        sums, self._sums = self._sums, None
        collectives.register(self.name, None)
        if sums is not None:
            sums.close()

    def _explained(self, error: BaseException) -> str:
        text = one_line(error)
        is_collective = _GLOO_FILE.match(text) is not None
        text = _GLOO_FILE.sub("", text)
        if "timed out" in text.lower():
            return self._unanswered()
        self._note_failure()
        known = None if self._explain is None else self._explain()
        which = "another rank" if is_collective else f"rank {self.rank} of {self.size}"
        return known or f"{which} has ended: {text}"

    def _note_failure(self) -> None:
        with contextlib.suppress(RuntimeError):  # The store may have ended with a rank.
            self._store.set(_FAILED.format(self.rank), "")

    def _unanswered(self) -> str:
        self._note_failure()
        deadline_s = time.monotonic() + _NOTICE_S
        silent = [rank for rank in range(self.size) if rank != self.rank]
        with contextlib.suppress(RuntimeError):
            while silent and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
                silent = [each for each in silent if not self._store.check([_FAILED.format(each)])]
        which = " and ".join(f"rank {each}" for each in silent) or "a rank"
        return f"{which} of {self.size} did not answer within {self._timeout_s:g} s"

    def _call(self, collective: Callable[[], object]) -> None:
        self.check()
        try:
            collective()
        except RuntimeError as error:
            raise self.fail(error) from error
        self.check()


def abort() -> None:
    """Leave the process group, if there is one; without synchronising, as ranks may have ended."""
    c10d: Any = dist.distributed_c10d
    try:
        if dist.is_initialized():
            c10d._abort_process_group()
    except RuntimeError as error:
        _LOG.warning("the ranks' connections could not be given up: %s", one_line(error))


def set_up(device_type: str, device_index: int, timeout_s: float, **options: Any) -> None:
    """Initialise `torch.distributed` for one rank; `options` are those of `init_process_group`."""
    # Graphs and eager collectives never overlap here; this saves NCCL some microseconds.
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    if device_type == "cuda":
        torch.cuda.set_device(device_index)
        options["device_id"] = torch.device("cuda", device_index)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s), **options
    )
