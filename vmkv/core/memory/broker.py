"""The broker: a socket at which processes of one user share one device's memory.

    member                                    broker
       | ---- join: name, floor, limit ---------> |
       | <--- order: budget, most --------------- |    once its floor is free, or refused
       | ---- report: budget, live, wanted … ---> |    whenever these change; answers orders
       | <--- order ----------------------------- |    one at a time
       | ---- leave ----------------------------> |    after its memory was released

Messages are JSON in packets of a Unix socket. A process that ends without leaving has given all
back once the kernel reports its end: a closed socket alone does not prove that the driver has taken
the memory back. `Shares` decides; here are its sockets and its clock.

See DESIGN.md, Note [One budget for many processes].
"""

from __future__ import annotations

import itertools
import json
import logging
import operator
import os
import selectors
import signal
import socket
import threading
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ConfigError, one_line, shown
from ...units import MiB, format_bytes
from .shares import Member, Report, Shares
from .unix_sockets import Listener, peer_of, process_fields

_LOG = logging.getLogger(__name__)
VERSION = 3
MESSAGE_BYTES_MAX = 1 << 16
#: Interval of decisions that depend on time alone.
_TICK_S = 0.1
#: Budget of a broker without one, until its first member reports the device's free memory.
_UNKNOWN_BYTES = 1 << 50
#: The largest number that a member may tell.
_BYTES_MAX = 1 << 62
#: Share of a device's free memory for the budget, where none is given.
_FREE_SHARE = 0.9


def default_socket_path() -> str:
    """Return where `vmkv pool` listens: `VMKV_POOL`, or a path of this user."""
    folder = os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/vmkv-{os.geteuid()}"
    return os.environ.get("VMKV_POOL") or f"{folder}/vmkv-pool.sock"


@dataclass(eq=False)
class _Connection:
    """A connection, and the process behind it. `member` is None before it has asked to join."""

    socket: socket.socket
    pid: int
    pidfd: int
    member: Member | None = field(default=None, init=False)


class Broker(AbstractContextManager["Broker"]):
    """Shares one budget of device memory between processes, from a thread of its own.

    Args:
        socket_path: The socket to listen on; its mode is 0600.
        budget_bytes: Memory of all members together; by default 0.9 of what the device has free
            whenever a member joins, but never more than before.
        page_bytes: Unit in which memory is given.
        kills_after_s: Time after which a member that hangs is killed, if it is a child of this
            process; None for never.

    Raises:
        ConfigError: The path or the budget cannot be used.
        OSError: The socket could not be made.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str],
        budget_bytes: int | None = None,
        *,
        page_bytes: int = 2 * MiB,
        kills_after_s: float | None = None,
    ):
        self.socket_path = os.fspath(socket_path)
        self._fits_device = budget_bytes is None
        self._shares = Shares(budget_bytes or _UNKNOWN_BYTES, page_bytes)
        self._kills_after_s = kills_after_s
        self._device: str | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._connections: set[_Connection] = set()
        folder = Path(self.socket_path).parent
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True)
        self._listener = Listener(self.socket_path, socket.SOCK_SEQPACKET)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._ours, self._closing = socket.socketpair()
        self._selector.register(self._closing, selectors.EVENT_READ, lambda: None)
        self._thread = threading.Thread(target=self._run, name="vmkv-broker", daemon=True)
        self._thread.start()

    @property
    def budget_bytes(self) -> int | None:
        """Memory of all members together; None until the first one has told what there is."""
        budget_bytes = self._shares.budget_bytes
        return budget_bytes if budget_bytes < _UNKNOWN_BYTES else None

    def members(self) -> list[Member]:
        """List the members that have their floor, as the books have them now."""
        with self._lock:
            return [each for each in self._shares.members.values() if each.has_joined]

    def close(self) -> None:
        """Stop deciding; members keep what they were given. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ours.close()  # Wakes the thread.
        self._thread.join()

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closed:
                timeout_s = _TICK_S if self._shares.has_deadlines else None
                for key, _ in self._selector.select(timeout_s):
                    with self._lock:
                        key.data()
                with self._lock:
                    self._decide()
        finally:
            for its in tuple(self._connections):
                self._end(its)
            self._selector.close()
            self._listener.close()
            self._closing.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # Too many open files.
            _LOG.warning("no process can join now: %s", error)
            time.sleep(_TICK_S)
            return
        try:
            pid, _ = peer_of(connection)
            its = _Connection(connection, pid, os.pidfd_open(pid))
        except (ConfigError, OSError) as error:  # Another user's, or it has ended already.
            _LOG.warning("a process was refused: %s", error)
            connection.close()
            return
        connection.setblocking(False)
        self._connections.add(its)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(its))
        self._selector.register(its.pidfd, selectors.EVENT_READ, lambda: self._end(its))

    def _hear(self, its: _Connection) -> None:
        try:
            data = its.socket.recv(MESSAGE_BYTES_MAX)
            if data:
                kind, *values = json.loads(data)
                self._take(its, kind, values)
                return
        except ConfigError as error:
            _LOG.warning("%s", error)
            self._send(its, "refused", one_line(error))
        except ConnectionError:  # It has ended with an order unread; what it sent comes after this.
            return
        except Exception as error:  # noqa: BLE001  # of another process, which may send anything
            _LOG.warning("process %d sent an invalid message: %s", its.pid, one_line(error))
        self._hang_up(its)

    def _take(self, its: _Connection, kind: str, values: list[Any]) -> None:
        now_s = time.monotonic()
        if kind == "join" and its.member is None:
            if (version := values[0].pop("version")) != VERSION:
                raise ConfigError(
                    f"{values[0].get('name')} speaks version {version} of the protocol, and the "
                    f"broker at {self.socket_path} {VERSION}: run the same vmkv on both sides"
                )
            self._join(its, **values[0])
        elif kind == "report" and its.member is not None:
            numbers: Any = list(map(operator.index, values))  # Refuses anything else.
            if not all(0 <= each <= _BYTES_MAX for each in numbers):
                raise ConfigError(f"{its.member.name} reports {shown(values)}: no numbers of bytes")
            self._shares.take(its, Report(*numbers), now_s)
        elif kind == "fit" and its.member is not None:
            self._fit(operator.index(*values))
        elif kind == "leave":
            self._end(its)
        else:
            raise ValueError(f"{kind} is not expected now")

    def _join(
        self,
        its: _Connection,
        *,
        name: str,
        device: str,
        free_bytes: int,
        floor_bytes: int,
        limit_bytes: int | None,
        weight: float,
        brought_bytes: int,
    ) -> None:
        if self._device not in (None, device):
            raise ConfigError(
                f"{name} runs on {device}, and the broker at {self.socket_path} shares memory of "
                f"{self._device}: start another `vmkv pool` for it"
            )
        shares = self._shares
        most_bytes = _UNKNOWN_BYTES if limit_bytes is None else limit_bytes
        for size in (free_bytes, floor_bytes, most_bytes, brought_bytes):
            if not isinstance(size, int) or not 0 <= size <= _BYTES_MAX:
                raise ConfigError(f"{name} joins with {shown(size)}, which is no number of bytes")
        name = one_line(name)
        if self._fits_device:
            self._fit(int(_FREE_SHARE * free_bytes))
        taken = {each.name for each in shares.members.values()}
        names = (name if at == 1 else f"{name} ({at})" for at in itertools.count(1))
        name = next(each for each in names if each not in taken)
        its.member = Member(name, floor_bytes, most_bytes, +weight, brought_bytes)
        try:
            shares.join(its, its.member, time.monotonic())
        except BaseException:
            its.member = None
            raise
        self._device = device
        _LOG.info("%s joins: process %d", name, its.pid)

    def _fit(self, free_bytes: int) -> None:
        before_bytes = self._shares.budget_bytes
        self._shares.fit(free_bytes)
        if self._shares.budget_bytes < before_bytes:
            _LOG.info("members share %s now", format_bytes(self._shares.budget_bytes))

    def _decide(self) -> None:
        now_s = time.monotonic()
        for its, order in self._shares.decide(now_s):
            self._send(its, "order", *order)
        for its in self._connections if self._kills_after_s is not None else ():
            member = its.member
            is_hung = member is not None and member.is_hung(now_s - (self._kills_after_s or 0.0))
            if is_hung and process_fields(its.pid)[1:2] == [b"%d" % os.getpid()]:
                _LOG.error("process %d does not carry out an order, and was killed", its.pid)
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(its.pidfd, signal.SIGKILL)

    def _send(self, its: Any, *message: object) -> None:
        with suppress(OSError):  # It is gone, which its descriptors report.
            its.socket.send(json.dumps(message).encode())

    def _hang_up(self, its: _Connection) -> None:
        """Close a connection; a member's memory counts until its process has ended."""
        if its.socket.fileno() >= 0:
            self._selector.unregister(its.socket)
            its.socket.close()
        if its.member is None or not its.member.has_joined:
            self._end(its)

    def _end(self, its: _Connection) -> None:
        """Count the memory of a member that has left, or whose process has ended, as free."""
        if its.pidfd < 0:  # Both its message and its end have come.
            return
        self._connections.discard(its)
        self._selector.unregister(its.pidfd)
        os.close(its.pidfd)
        its.pidfd = -1
        if its.member is not None:
            self._shares.leave(its)
            _LOG.info("%s has ended: process %d", its.member.name, its.pid)
            its.member = None
        if its.socket.fileno() >= 0:
            self._selector.unregister(its.socket)
            its.socket.close()
