"""Ranks as child processes of rank 0: they end with it, and it detects when one of them ends.

    with Ranks(2, "cuda", follow, (path,)) as ranks:   # rank 1 runs follow(group, path)
        model = load(path, ranks.group)

Ranks meet through a file in memory, which ends with rank 0, and communicate over the loopback
device.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ConfigError, RankError, one_line
from ..start import be_child, end_child, start_child, why_ended
from .group import TensorParallel, abort, set_up

#: Time to wait for the reason of a rank that does not answer.
_EXPLAIN_S = 2.0
#: Interval of the check whether a kernel has timed out waiting for a rank.
_WATCH_S = 1.0
#: Message of a rank's process that has started.
_BEGUN = "begun"
#: Environment variables that gloo and NCCL read.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class Ranks:
    """Starts ranks 1 and above, and sets this process up as rank 0.

    Args:
        size: Number of ranks, this one included.
        device_type: "cuda", where rank i takes device i, or "cpu".
        target: Function that the other ranks run, called with their group first; it must be
            picklable. A rank ends when it returns.
        arguments: Further arguments of `target`.
        timeout_s: See `TensorParallel`.

    Attributes:
        group: Rank 0's group.

    Raises:
        ConfigError: There are too few devices, or this process already has ranks.
        RankError: A rank ended before all had connected.
    """

    def __init__(
        self,
        size: int,
        device_type: str,
        target: Callable[..., None],
        arguments: tuple[Any, ...] = (),
        *,
        timeout_s: float = 60.0,
    ):
        _check(size, device_type)
        self._is_closing = False
        self._reason: str | None = None  # Why the first rank has ended.
        self._has_reason = threading.Event()
        self.group: TensorParallel | None = None
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._closing, self._close_watcher = multiprocessing.Pipe(duplex=False)
        with contextlib.ExitStack() as undo:
            # Stays open: torch's store looks for its file by this path even when it is collected.
            file = os.memfd_create("vmkv-ranks")
            join = partial(_join, f"/proc/{os.getpid()}/fd/{file}", size, device_type, timeout_s)
            open_group = partial(TensorParallel, timeout_s=timeout_s)
            undo.callback(self._close_group)
            undo.callback(self._end)
            for rank in range(1, size):
                ours, theirs = multiprocessing.Pipe()
                self._connections.append(ours)
                its = (theirs, rank, size, join, open_group, target, arguments)
                with theirs:
                    process = start_child(_run_rank, its, f"vmkv-rank-{rank}", daemon=True)
                self._processes.append(process)
            undo.enter_context(_environment(0, size))
            try:
                for rank in range(1, size):  # `join` would not notice that one has ended.
                    if (reason := self._hear(rank)) != _BEGUN:
                        raise RankError(reason)
                undo.callback(abort)
                watcher = threading.Thread(target=self._watch, name="vmkv-ranks", daemon=True)
                watcher.start()
                undo.callback(self._stop_watching, watcher)
                join(0)
                self.group = open_group(explain=self._explain)
                if self._reason is not None:
                    raise RankError(self._reason)
            except RankError:
                raise
            except RuntimeError as error:
                raise RankError(f"the ranks cannot meet: {self._explain() or error}") from error
            self._undo = undo.pop_all()

    def close(self) -> None:
        """End the other ranks and leave the group. Idempotent."""
        self._undo.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the other ranks to end by themselves; return whether they have."""
        self._is_closing = True
        deadline_s = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
        return not any(process.is_alive() for process in self._processes)

    def _end(self) -> None:
        self._is_closing = True
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            end_child(process)

    # ---- ranks that end -------------------------------------------------------------------

    def _watch(self) -> None:
        reason = None
        while reason is None:
            ready: list[Any] = wait([self._closing, *self._connections], _WATCH_S)
            if self._is_closing:
                return
            if ready:
                reason = self._hear(1 + self._connections.index(ready[0]))
            elif self.group is not None:
                reason = self.group.stuck()
        self._reason = reason
        self._has_reason.set()
        if self.group is not None and not self._is_closing:
            self.group.lose(reason)

    def _stop_watching(self, watcher: threading.Thread) -> None:
        self._is_closing = True
        self._close_watcher.close()
        watcher.join()
        self._closing.close()

    def _close_group(self) -> None:
        if self.group is not None:
            self.group.close()

    def _explain(self) -> str | None:
        self._has_reason.wait(_EXPLAIN_S)
        return self._reason

    def _hear(self, rank: int) -> str:
        try:
            message = self._connections[rank - 1].recv()
        except (EOFError, OSError):
            message = why_ended(self._processes[rank - 1])
        return message if message == _BEGUN else f"rank {rank} has ended: {message}"

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _check(size: int, device_type: str) -> None:
    if size < 2:
        raise ConfigError(f"{size} ranks are no tensor parallelism; take 2 or more")
    if dist.is_initialized():
        raise ConfigError("this process has ranks already; close those first")
    if device_type == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(f"{size} ranks need {size} GPUs; torch sees {torch.cuda.device_count()}")


@contextlib.contextmanager
def _environment(rank: int, size: int) -> Iterator[None]:
    ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), **_LOOPBACK}
    before = {name: os.environ[name] for name in ours if name in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
        os.environ.update(before)


def _join(path: str, size: int, device_type: str, timeout_s: float, rank: int) -> None:
    distributed: Any = torch.distributed  # Its types lack this.
    store = distributed.FileStore(path, size)
    set_up(device_type, rank, timeout_s, rank=rank, world_size=size, store=store)


def _run_rank(
    connection: Connection,
    rank: int,
    size: int,
    join: Callable[[int], None],
    open_group: Callable[[], TensorParallel],
    target: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    be_child(connection)
    try:
        connection.send(_BEGUN)
        with _environment(rank, size):
            join(rank)
            target(open_group(), *arguments)
            abort()
    except BaseException as error:  # noqa: BLE001  # reported to rank 0
        with contextlib.suppress(OSError):  # Rank 0 may have ended.
            connection.send(one_line(error))
        # Skip exit handlers, which would wait for other ranks.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
