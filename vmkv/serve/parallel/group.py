"""The ranks of a model: who they are, how they agree, and what happens when one is lost.

A rank decides nothing by itself. What depends on its device or its driver is agreed on (`min`,
`max`), what comes from outside comes from rank 0 (`share`, `send` and `receive`), and everything
else is the same everywhere because it is computed from the same numbers in the same order.

Ranks talk over gloo, beside whatever their layers talk over, so that nothing of it waits for a
device. A rank that has ended is noticed at once by who talks to it, one that is stuck after a time
limit; both are the end of all of them, since each has a part of every layer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...errors import ConfigError, DriverError, RankError, one_line
from . import collectives
from .one_shot import OneShotSums

_LOG = logging.getLogger(__name__)
#: Key in the store of a rank that has failed.
_FAILED = "vmkv/failed/{}"
#: Time for all ranks that wait for the same rank to fail, and how often to look.
_NOTICE_S, _POLL_S = 1.0, 0.01
#: The source file that gloo's messages begin with.
_GLOO_FILE = re.compile(r"\[(enforce fail at )?\S+:\d+\] ")
#: Time limit of ranks that wait for commands.
_FOREVER = timedelta(days=3650)


class Message(NamedTuple):
    """What rank 0 says before a step.

    Attributes:
        commands: What to do first; None for nothing.
        is_step: Whether a step follows.
    """

    commands: Any
    is_step: bool


class TensorParallel:
    """The ranks that hold the parts of one model. Made by all of them at the same time.

    Args:
        timeout_s: What an answer of another rank may take.
        explain: Asked what is known of a rank that does not answer.

    Attributes:
        rank: This process's number, from 0 on.
        size: How many there are.
        name: What collectives know the group by.
        failure: Why the ranks have ended; None while they have not.
        on_loss: Called by `lose`.

    Raises:
        ConfigError: `torch.distributed` is not set up; `from_environment` does it.
        RankError: Another rank is not there.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 60.0,
        explain: Callable[[], str | None] | None = None,
    ):
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
            # Rank 0 sends, which waits for a rank that is not ready to receive.
            control_limit = _FOREVER if self.rank else limit
            self._control: Any = dist.new_group(backend="gloo", timeout=control_limit)
        except RuntimeError as error:
            raise self.fail(error) from error
        self._sums = self._open_sums(timeout_s) if dist.get_backend() == "nccl" else None
        collectives.register(self.name, self._sums)

    def _open_sums(self, timeout_s: float) -> OneShotSums | None:
        """Sums in one kernel, if all ranks can; what hinders one is no error of the group's."""
        sums = reason = None
        if self.share(socket.gethostname()) != socket.gethostname():
            reason = "the ranks are on several hosts"
        else:
            try:
                sums = OneShotSums(self.rank, self.size, timeout_s)
            except (RuntimeError, ConfigError) as error:  # Whatever a device says.
                reason = one_line(error)
        if self.min(int(sums is not None)) and sums is not None:
            try:
                sums.meet(self._gather(sums.handle))
            except DriverError as error:
                reason = one_line(error)
            if self.min(int(reason is None)):
                return sums
        if sums is not None:
            sums.close()
        _LOG.info("rank %d: all sums are NCCL's: %s", self.rank, reason or "another rank's choice")
        return None

    def _gather(self, data: bytes) -> list[bytes]:
        """All ranks' bytes, as many of each."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        self._call(lambda: dist.all_gather(parts, mine, group=self._agreement))
        return [part.numpy().tobytes() for part in parts]

    @classmethod
    def from_environment(
        cls, device_type: str | None = None, *, timeout_s: float = 60.0
    ) -> TensorParallel:
        """The ranks that torchrun has started, this one among them.

        Args:
            device_type: "cuda" or "cpu"; by default the former where there is one.
            timeout_s: As of the group.

        Raises:
            ConfigError: Nobody says which rank this is.
        """
        if not dist.is_initialized():
            if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
                raise ConfigError(
                    "the environment does not say which rank this is; start it with torchrun"
                )
            if device_type is None:
                device_type = "cuda" if torch.cuda.is_available() else "cpu"
            set_up(device_type, int(os.environ.get("LOCAL_RANK", "0")), timeout_s)
        return cls(timeout_s=timeout_s)

    # ---- agreeing -------------------------------------------------------------------------

    def min(self, value: int) -> int:
        """The smallest of all ranks' values. Each asks at the same point.

        Raises:
            RankError: A rank does not answer.
        """
        return self._reduce(value, dist.ReduceOp.MIN)

    def max(self, value: int) -> int:
        """The largest; as `min`."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def share(self, value: Any) -> Any:
        """Rank 0's value, on all of them; as `min`. It is pickled."""
        data = self._bytes(value) if not self.rank else b""
        size = self.max(len(data))
        buffer = torch.zeros(size, dtype=torch.uint8)
        if not self.rank:
            buffer[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._call(lambda: dist.broadcast(buffer, 0, group=self._agreement))
        return pickle.loads(buffer.numpy().tobytes())

    def check_same(self, facts: dict[str, int]) -> None:
        """See that what must be the same everywhere is.

        Raises:
            RankError: It is not; all ranks raise it.
        """
        different = [
            f"{name} ({low} to {high})"
            for name, value in facts.items()
            if (low := self.min(value)) != (high := self.max(value))
        ]
        if different:
            raise self.fail(f"the ranks differ in {', '.join(different)}")

    def _reduce(self, value: int, operation: Any) -> int:
        tensor = torch.tensor([value], dtype=torch.int64)
        self._call(lambda: dist.all_reduce(tensor, operation, group=self._agreement))
        return int(tensor)

    # ---- what rank 0 says -----------------------------------------------------------------

    def send(self, message: Message, checksum: int) -> None:
        """Tell the other ranks what to do. Rank 0's alone.

        Args:
            message: What to do.
            checksum: Of all that was computed so far; theirs must be the same.

        Cost: some 50 µs, and as much again where there are commands.
        """
        data = b"" if message.commands is None else self._bytes(message.commands)
        head = torch.tensor([len(data), message.is_step, checksum], dtype=torch.int64)
        self._call(lambda: dist.broadcast(head, 0, group=self._control))
        if data:
            body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._call(lambda: dist.broadcast(body, 0, group=self._control))

    def receive(self, checksum: int) -> Message:
        """Wait for what rank 0 says, however long it takes.

        Raises:
            RankError: It has ended, or has computed something else.
        """
        head = torch.zeros(3, dtype=torch.int64)
        self._call(lambda: dist.broadcast(head, 0, group=self._control))
        num_bytes, is_step, theirs = head.tolist()
        if theirs != checksum:
            raise self.fail("its tokens, memory or requests differ from rank 0's")
        if not num_bytes:
            return Message(None, bool(is_step))
        body = torch.zeros(num_bytes, dtype=torch.uint8)
        self._call(lambda: dist.broadcast(body, 0, group=self._control))
        return Message(pickle.loads(body.numpy().tobytes()), bool(is_step))

    def check_sendable(self, value: Any) -> None:
        """See that a value can be sent to other processes.

        Raises:
            ConfigError: It cannot: it holds a function of the caller's, for instance.
        """
        self._bytes(value)

    @staticmethod
    def _bytes(value: Any) -> bytes:
        try:
            return pickle.dumps(value)
        except Exception as error:
            raise ConfigError(f"it cannot be sent to the other ranks: {one_line(error)}") from error

    # ---- the end --------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the `RankError` that the ranks have ended with, if they have."""
        if self.failure is None and (reason := self.stuck()) is not None:
            self.failure = RankError(reason)
        if self.failure is not None:
            raise self.failure

    def stuck(self) -> str | None:
        """The ranks that a kernel has waited for in vain, if one has. From any thread."""
        sums = self._sums
        return self._unanswered() if sums is not None and sums.has_given_up() else None

    def fail(self, reason: str | BaseException) -> RankError:
        """The ranks have ended; returns the error to raise. The first reason stays."""
        if self.failure is None:
            if isinstance(reason, BaseException):
                text = self._explained(reason)
            else:
                text = f"rank {self.rank} of {self.size} has ended: {reason}"
            self.failure = RankError(text)
        return self.failure

    def lose(self, reason: str) -> None:
        """Another rank has ended: from any thread, have whoever waits for it wait no more."""
        if self.failure is None:
            self.failure = RankError(reason)
        if self._sums is not None:
            self._sums.give_up()
        if dist.is_initialized() and dist.get_backend() == "nccl":
            # The kernels that wait for it end, and leave what is worth nothing.
            abort()
        if self.on_loss is not None:
            self.on_loss()

    def close(self) -> None:
        """Give back what sums hold, once no rank adds any more. Idempotent."""
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
        """Let the other ranks know that this one answers: it has failed too."""
        with contextlib.suppress(RuntimeError):  # The store may have ended with a rank.
            self._store.set(_FAILED.format(self.rank), "")

    def _unanswered(self) -> str:
        """The ranks that do not answer: a moment after the time limit they have not failed."""
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
    """Give up what this process has under way with others, and forget them."""
    c10d: Any = dist.distributed_c10d
    try:
        c10d._abort_process_group()
    except RuntimeError as error:
        _LOG.warning("the ranks' connections could not be given up: %s", one_line(error))


def set_up(device_type: str, device_index: int, timeout_s: float, **rendezvous: Any) -> None:
    """Initialise `torch.distributed` for one rank.

    Args:
        device_type: "cuda" or "cpu".
        device_index: This rank's device.
        timeout_s: What a collective may take.
        rendezvous: `rank`, `world_size` and `store`; by default what the environment says.
    """
    # Graphs and eager collectives run one after the other here; it saves NCCL some microseconds.
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    options = dict(rendezvous)
    if device_type == "cuda":
        torch.cuda.set_device(device_index)
        options["device_id"] = torch.device("cuda", device_index)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout_s),
        **options,
    )
