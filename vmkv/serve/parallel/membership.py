"""Membership of a tensor-parallel engine in a broker: rank 0 joins, for all ranks.

Each rank has a pool of the same budget, and the broker counts one of them. A thread of rank 0
receives the orders; they wait until all ranks carry them out, between the same two steps.

See DESIGN.md, Note [Ranks plan alike].
"""

from __future__ import annotations

import json
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ...core.interrupts import interruptible
from ...core.memory import ExtentPool, PoolMember
from ...core.memory.broker import MESSAGE_BYTES_MAX
from ...core.memory.shares import Order
from ...errors import RankError
from . import TensorParallel

#: Time for memory that is waited for; the other ranks wait for rank 0 meanwhile.
_GROW_TIMEOUT_S = 30.0


class Memberships:
    """The memberships of one engine's pools, in the order of joining, the same on all ranks.

    On rank 0, `orders` are those to be carried out, oldest first: the member's number, and the
    order, or None once the broker has ended. A thread calls `on_order` with each of them.
    """

    def __init__(self, group: TensorParallel):
        self.group = group
        self.orders: deque[tuple[int, Order | None]] = deque()
        self.on_order: Callable[[], None] = lambda: None
        self._members: list[RanksMember] = []
        self._changed = threading.Condition()

    def join(self, socket_path: str, *, free_bytes: int, **figures: Any) -> RanksMember:
        """Join a broker on rank 0, as `PoolMember.join`; all ranks call it."""
        figures["free_bytes"] = self.group.min(free_bytes)
        self._members.append(RanksMember.join_all(self, socket_path, figures))
        return self._members[-1]

    def add(self, member: RanksMember, order: Order | None) -> None:
        """Keep an order of a member."""
        with self._changed:
            self.orders.append((self._members.index(member), order))
            self._changed.notify_all()
        self.on_order()

    def wait(self, timeout_s: float) -> None:
        """Wait for an order, on rank 0."""
        if not self.group.rank:
            with self._changed:
                interruptible(self._changed.wait_for, lambda: self.orders, timeout_s)

    def obey(self, number: int, order: Order | None) -> None:
        """Carry out an order as far as it can be; all ranks call it at the same time."""
        self._members[number].obey(order)

    def come_down(self) -> None:
        """Continue orders that were carried out in part; all ranks call it at the same time."""
        for each in self._members:
            if each.withheld_bytes:
                each.go_on()

    def report(self) -> None:
        """Tell the broker what is in use, once all ranks have got here."""
        if self._members:
            self.group.max(0)
        for each in self._members:
            each.go_on()


class RanksMember(PoolMember):
    """A pool's membership on one rank; only rank 0's is connected to the broker."""

    _all: Memberships

    @classmethod
    def join_all(cls, every: Memberships, socket_path: str, figures: dict[str, Any]) -> RanksMember:
        """Join on rank 0, and make equal memberships on the others."""
        group, timeout_s = every.group, _GROW_TIMEOUT_S
        if group.rank:
            unconnected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            member = cls(unconnected, socket_path, group.share(None), timeout_s)
        else:
            member = cls.join(socket_path, timeout_s=timeout_s, **figures)
            group.share(member._order)
        member._all = every
        return member

    def join_again(self, **figures: Any) -> PoolMember:
        """Join the same broker for another pool; all ranks call it."""
        return self._all.join(self._path, **figures)

    def bind(self, pool: ExtentPool) -> None:
        """Have the pool's budget follow the broker's orders."""
        super().bind(pool)
        self._keep(pool)

    def leave(self) -> None:
        """Leave once all ranks have released their memory. Idempotent."""
        if not self._is_left:
            with suppress(RankError):
                self._all.group.max(0)
        super().leave()

    def grow(self, num_bytes: int) -> bool:
        """Ask for more, as on one device; all ranks call it, and carry out all orders meanwhile."""
        pool, every = self._pool, self._all
        if pool is None or self._asks_ahead or not self.may_grow:
            return False
        before_bytes = pool.budget_bytes
        self._awaited = [before_bytes + num_bytes]
        self._look(pool)
        while pool.budget_bytes <= before_bytes and self.may_grow:
            every.wait(self._grow_timeout_s)
            numbered = every.group.share(every.orders.popleft() if every.orders else None)
            if numbered is None:
                break
            every.obey(*numbered)
        self._awaited = []
        self._keep(pool)
        return pool.budget_bytes > before_bytes

    def wait(self, timeout_s: float, budget_bytes: int) -> None:
        """Wait for the next order, on rank 0."""
        self._all.wait(timeout_s)

    def obey(self, order: Order | None) -> None:
        """Carry out an order as far as it can be; once the broker has ended, stay as it is."""
        assert self._pool is not None
        if order is None:
            its_bytes = self._pool.budget_bytes
            order = Order(self._order.serial, its_bytes, preempts=False, most_bytes=its_bytes)
        self._take(self._pool, order)
        self.go_on()

    def go_on(self) -> None:
        """Lower the budget to the order's, as far as live rows allow, and report."""
        assert self._pool is not None
        self._come_down(self._pool)
        self._look(self._pool)

    def _keep(self, pool: ExtentPool) -> None:
        """Report all memory as in use until `_look`, because no step carries out orders yet."""
        with self._changed:
            self._live_bytes = self._kept_bytes = pool.budget_bytes
            self._more_bytes = 0
            self._tell()

    def _lower(self, pool: ExtentPool, budget_bytes: int) -> None:
        try:
            super()._lower(pool, budget_bytes)
        finally:  # All ranks keep as much as the one that keeps most.
            pool.set_budget(self._all.group.max(pool.budget_bytes))

    def _look(self, pool: ExtentPool) -> None:
        if not self._all.group.rank:
            super()._look(pool)

    def _run(self, pool: ExtentPool) -> None:
        """Receive orders, on rank 0, until the broker or this membership ends."""
        with suppress(OSError):  # The others are not connected.
            while data := self._socket.recv(MESSAGE_BYTES_MAX):
                order = Order(*json.loads(data)[1:])
                if not self._asks_ahead and order.budget_bytes == pool.budget_bytes:
                    with self._changed:  # Nothing is to be done, and the start may take long.
                        self._order = order
                        self._tell()
                self._all.add(self, order)
        if not self._all.group.rank:
            self._all.add(self, None)
        with self._changed:
            self._close()
