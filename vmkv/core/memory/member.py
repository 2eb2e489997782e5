"""A pool's membership in a broker: its budget follows the broker's orders.

    member = PoolMember.join(path, name="llama", device="cuda:0", free_bytes=…)
    member.bind(ExtentPool(backend, member.budget_bytes))

A thread carries orders out: it raises the pool's budget, or evicts parked rows, releases memory and
lowers the budget slice by slice, telling the broker after each. Live rows are their owner's: an
engine is told by `excess_bytes` how much to preempt, and to plan without `withheld_bytes`.

See DESIGN.md, Note [One budget for many processes].
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...errors import ClosedError, ConfigError, DriverError, one_line
from ...units import GiB, MiB, format_bytes
from ..interrupts import interruptible
from .broker import MESSAGE_BYTES_MAX, VERSION
from .shares import HANG_S, Order, Report
from .unix_sockets import peer_of, server_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from .pool import ExtentPool

_LOG = logging.getLogger(__name__)
#: Interval of reports while rows change.
_TICK_S = 0.25
#: Memory that is released between two reports: some 3 ms.
_SLICE_BYTES = 1 * GiB
#: Growth to ask a broker for if no engine asks ahead: a share of the budget, within bounds.
_GROWTH_SHARE, _GROWTH_MAX_BYTES = 16, 256 * MiB


class PoolMember:
    """A member of a broker, which an `ExtentPool` follows once it is bound.

    Attributes:
        budget_bytes: The first budget, for the pool to be made with.
        most_bytes: The most that the budget could ever be.
        withheld_bytes: Part of the budget that is to go back; nothing new should be planned on it.
        excess_bytes: Memory of live rows that is to be given up.
    """

    def __init__(
        self, connection: socket.socket, socket_path: str, order: Order, grow_timeout_s: float
    ):
        self._socket, self._path = connection, socket_path
        self.budget_bytes = order.budget_bytes
        self.most_bytes = order.most_bytes
        self.withheld_bytes = self.excess_bytes = 0
        self._order = order
        self._grow_timeout_s = grow_timeout_s
        self._changed = threading.Condition()  # Guards what is told, and its order.
        self._told = Report()
        self._live_bytes = self._kept_bytes = 0
        # Needs of an engine beyond live rows: in all, of its first request, and of its running
        # requests.
        self._more_bytes = self._first_bytes = self._growth_bytes = 0
        self._is_busy = self._asks_ahead = self._preempts = False
        self._awaited: list[int] = []  # Budgets that threads wait for.
        self._is_left, self._process_id = False, os.getpid()
        self._heard_s = time.monotonic()  # When the last order came, or its lack was logged.
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pool: ExtentPool | None = None

    @classmethod
    def join(
        cls,
        socket_path: str | os.PathLike[str],
        *,
        name: str,
        device: str,
        free_bytes: int,
        floor_bytes: int = 0,
        limit_bytes: int | None = None,
        weight: float = 1.0,
        brought_bytes: int = 0,
        timeout_s: float = 60.0,
    ) -> Self:
        """Join a broker, and wait until it has given the floor.

        Args:
            socket_path: The broker's socket.
            name: For people.
            device: The backend's name; all members of a broker are on one device.
            free_bytes: What the device has free now.
            floor_bytes: Budget below which it is never taken back; at least one page.
            limit_bytes: Budget at most; by default all that the floors of others leave.
            weight: Share relative to the other members, where live rows must be given up.
            brought_bytes: Memory that the caller holds already, and moves into the pool: it adds to
                the budget of all while the pool is a member.
            timeout_s: Time for the floor to be given, and for later growth that is waited for.

        Raises:
            ConfigError: There is no broker, it is another user's, or it refuses.
            TimeoutError: The floor is held by members that cannot give it back.
        """
        where = os.fspath(socket_path)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(timeout_s)
            try:
                interruptible(connection.connect, where)
            except OSError as error:
                raise ConfigError(
                    f"no broker answers at {where} ({one_line(error)}): start `vmkv pool`, or name "
                    "its socket"
                ) from error
            peer_of(connection)
            facts: dict[str, Any] = {"version": VERSION, "name": name, "device": device}
            facts |= {"free_bytes": free_bytes, "floor_bytes": floor_bytes}
            facts |= {"limit_bytes": limit_bytes, "weight": weight, "brought_bytes": brought_bytes}
            connection.send(json.dumps(["join", facts]).encode())
            try:
                data = interruptible(connection.recv, MESSAGE_BYTES_MAX)
            except TimeoutError:
                floor = format_bytes(floor_bytes) if floor_bytes else "a page"
                server, is_stopped = server_of(where, connection)
                why = "other members hold the memory and do not give it back"
                raise TimeoutError(
                    f"the broker at {server} could not give {floor} within {timeout_s:g} s"
                    + ("" if is_stopped else f": {why}")
                ) from None
            kind, *values = json.loads(data) if data else ("refused", f"{where} has closed")
            if kind != "order":
                raise ConfigError(f"the broker refuses: {values[0]}")
            connection.settimeout(None)
            return cls(connection, where, Order(*values), timeout_s)
        except BaseException:
            with suppress(OSError):  # The order may be on its way.
                connection.send(b'["leave"]')
            connection.close()
            raise

    def join_again(self, **figures: Any) -> PoolMember:
        """Join the same broker for another pool; `figures` are those of `join`."""
        return self.join(self._path, **figures)

    def bind(self, pool: ExtentPool) -> None:
        """Have a pool, whose budget is `budget_bytes`, follow orders until it is closed."""
        self._pool, pool.member = pool, self
        threading.Thread(target=self._run, args=(pool,), name="vmkv-member", daemon=True).start()

    def leave(self) -> None:
        """Tell the broker that all memory is released, and end. Idempotent."""
        with self._changed:
            if not self._is_left and self._process_id == os.getpid():  # Not in a forked child.
                self._is_left = True
                if not self._send("leave"):  # Perhaps the broker does not read now.
                    with suppress(OSError):  # It may be closed, or another rank's.
                        other = (self._socket.dup(),)  # This one will be closed.
                        threading.Thread(target=_leave_late, args=other, daemon=True).start()
                self._changed.notify_all()
        if self._pool is None:
            self._close()
        self._poke()

    # ---- for the pool's users -------------------------------------------------------------

    @property
    def may_grow(self) -> bool:
        """Whether the broker may still raise the budget."""
        assert self._pool is not None
        return not self._is_left and self._pool.budget_bytes < self.most_bytes

    @property
    def is_connected(self) -> bool:
        """Whether the broker still gives orders."""
        return not self._is_left

    def ask(
        self,
        more_bytes: int,
        first_bytes: int,
        growth_bytes: int = 0,
        *,
        is_busy: bool,
        preempts: bool = True,
    ) -> None:
        """Tell the broker what an engine's requests will need, before any of them asks for memory.

        `more_bytes` are wanted beyond live rows, `first_bytes` by the first waiting request, and
        `growth_bytes` by running requests. `preempts` is whether the engine can give up live rows.
        Cost: a look at each parked row.
        """
        assert self._pool is not None
        with self._changed:
            self._asks_ahead, self._preempts = True, preempts
            self._more_bytes, self._first_bytes, self._is_busy = more_bytes, first_bytes, is_busy
            self._growth_bytes = growth_bytes
        if not self._is_left:
            self._look(self._pool)
            if self._report() != self._told:
                self._poke()  # The member's thread, which may be waiting, must send it.

    def gave_up(self, num_bytes: int) -> None:
        """Subtract from `excess_bytes` what live rows have given up: it is parked or free now."""
        self.excess_bytes = max(0, self.excess_bytes - num_bytes)
        if not self.excess_bytes:
            self._poke()

    def wait(self, timeout_s: float, budget_bytes: int) -> None:
        """Wait for the next order, unless the budget is no longer `budget_bytes`."""
        with self._changed:
            if self._pool is not None and self._pool.budget_bytes == budget_bytes:
                self._changed.wait(timeout_s)
                server, is_stopped = server_of(self._path, self._socket)
                if is_stopped and time.monotonic() - self._heard_s >= HANG_S:
                    self._heard_s = time.monotonic()
                    _LOG.warning("requests wait for memory of the broker at %s", server)

    def grow(self, num_bytes: int) -> bool:
        """Ask for a budget larger by `num_bytes`; wait until it grows, and return whether it did.

        Must not be called with the pool's lock held. An engine asks ahead, and never waits here.
        """
        pool = self._pool
        if pool is None or self._asks_ahead or not self.may_grow:
            return False
        before_bytes = pool.budget_bytes
        more_bytes = max(num_bytes, min(before_bytes // _GROWTH_SHARE, _GROWTH_MAX_BYTES))
        goal_bytes = before_bytes + more_bytes

        def has_grown() -> bool:
            return self._is_left or pool.budget_bytes > before_bytes

        self._awaited.append(goal_bytes)
        try:
            self._look(pool)
            with self._changed:
                interruptible(self._changed.wait_for, has_grown, self._grow_timeout_s)
        finally:
            self._awaited.remove(goal_bytes)
        if not has_grown():
            _LOG.warning(
                "the broker at %s gave no memory within %g s",
                *(server_of(self._path, self._socket)[0], self._grow_timeout_s),
            )
        return pool.budget_bytes > before_bytes

    def fit(self, free_bytes: int) -> None:
        """Tell the broker what the device has free, which may lower the budget of all."""
        assert self._pool is not None
        created_bytes = self._pool.stats().created_bytes
        with self._changed:
            self._tell(created_bytes)
            self._send("fit", free_bytes)

    # ---- the thread -----------------------------------------------------------------------

    def _run(self, pool: ExtentPool) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._waker, select.POLLIN)
        try:
            while not self._is_left:
                self._come_down(pool)
                self._look(pool)
                is_quiet = self._asks_ahead and self._report() == self._told
                poll.poll(None if is_quiet and not self.withheld_bytes else 1000 * _TICK_S)
                with suppress(BlockingIOError):
                    os.eventfd_read(self._waker)
                for order in self._orders():
                    self._take(pool, order)
        except ClosedError:
            pass  # The pool has been closed, and this member has left.
        except OSError as error:
            if not self._is_left:
                server, _ = server_of(self._path, self._socket)
                _LOG.warning(
                    "the broker at %s is gone; the budget stays what it is: %s", server, error
                )
        finally:
            with self._changed:
                self._is_left, self.most_bytes = True, pool.budget_bytes
                self.withheld_bytes = self.excess_bytes = 0
                self._changed.notify_all()
                self._close()

    def _close(self) -> None:
        self._socket.close()
        if self._waker >= 0:
            os.close(self._waker)
        self._waker = -1

    def _orders(self) -> Iterator[Order]:
        while True:
            try:
                data = self._socket.recv(MESSAGE_BYTES_MAX, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not data:
                raise ConnectionResetError("it has closed the connection")
            _, *values = json.loads(data)
            yield Order(*values)

    def _take(self, pool: ExtentPool, order: Order) -> None:
        if order.budget_bytes > pool.budget_bytes:
            pool.set_budget(order.budget_bytes)
        with self._changed:
            self._order, self.most_bytes = order, order.most_bytes
            self.withheld_bytes = pool.budget_bytes - order.budget_bytes
            self.excess_bytes, self._heard_s = 0, time.monotonic()
            self._changed.notify_all()

    def _come_down(self, pool: ExtentPool) -> None:
        """Lower the budget to the order's, as far as live rows allow."""
        goal_bytes = self._order.budget_bytes
        while self.withheld_bytes > 0:
            before_bytes = pool.budget_bytes
            try:
                self._lower(pool, max(goal_bytes, before_bytes - _SLICE_BYTES))
            except DriverError:
                _LOG.warning("memory could not be given back yet", exc_info=True)
            with self._changed:
                self.withheld_bytes = pool.budget_bytes - goal_bytes
            if pool.budget_bytes == before_bytes:
                break
            self._look(pool)
        self.excess_bytes = self.withheld_bytes if self._order.preempts else 0

    def _lower(self, pool: ExtentPool, budget_bytes: int) -> None:
        pool.lower_budget(budget_bytes)

    def _look(self, pool: ExtentPool) -> None:
        """Measure the memory of live rows, and report."""
        with pool.lock:
            stats = pool.stats()
            parked_bytes = pool.pressure.freeable_bytes(stats.resident_bytes)
        with self._changed:
            before_bytes, live_bytes = self._live_bytes, stats.resident_bytes - parked_bytes
            self._live_bytes = live_bytes
            if not self._asks_ahead:
                self._is_busy = bool(self._awaited) or live_bytes != before_bytes
                self._more_bytes = max([live_bytes, *self._awaited]) - live_bytes
            if not self._preempts or not self._is_busy:
                self._kept_bytes = self._live_bytes
            if self._report(stats.created_bytes) != self._told:
                self._tell(stats.created_bytes)

    def _report(self, created_bytes: int | None = None) -> Report:
        assert self._pool is not None
        created_bytes = self._told.created_bytes if created_bytes is None else created_bytes
        live_bytes, kept_bytes = self._live_bytes, min(self._kept_bytes, self._live_bytes)
        return Report(
            self._order.serial,
            self._pool.budget_bytes,
            created_bytes,
            live_bytes,
            kept_bytes,
            kept_bytes + self._first_bytes if self._asks_ahead else live_bytes + self._more_bytes,
            live_bytes + self._more_bytes,
            live_bytes + self._growth_bytes if self._growth_bytes else 0,
            self._is_busy,
        )

    def _tell(self, created_bytes: int | None = None) -> None:
        report = self._report(created_bytes)
        if self._send("report", *report):  # Else the next look tells it again.
            self._told = report

    def _send(self, *message: Any) -> bool:
        try:
            return self._socket.send(json.dumps(message).encode(), socket.MSG_DONTWAIT) > 0
        except OSError:  # The broker does not read, or is gone, which the member's thread finds.
            return False

    def _poke(self) -> None:
        with self._changed:
            if self._waker >= 0:
                os.eventfd_write(self._waker, 1)


def _leave_late(connection: socket.socket) -> None:
    """Tell a broker that a member has left, as soon as its queue has room."""
    with connection, suppress(OSError):
        connection.send(b'["leave"]')
