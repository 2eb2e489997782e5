"""Arbitration between engines over one pool: claims, and preemption across engines.

Requests of all engines over a pool are ranked in one order. An engine that can run nothing claims
memory for its first request; the last-ranked running request of the other engines is preempted if
it ranks behind. See Note [Engines over one pool] in DESIGN.md.

An engine is stuck when it can run nothing and no other engine submits a step. After
`PATIENCE_STEPS` such steps in a row it ignores claims and may preempt any request of an idle engine
in its thread; if there is none, its request fails. Each such step waits 20 ms if an engine of
another thread has running requests.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakSet

Rank = tuple[float, int]
PATIENCE_STEPS = 100
_WAIT_S = 0.02


class Arbiter:
    """The engines over one pool. `num_steps` counts the steps that all of them have planned."""

    def __init__(self, lock: threading.RLock):
        self.lock = lock
        self.num_steps = 0
        self.changed = threading.Condition(lock)
        self.num_submitted = self.num_preempted = 0  # Steps and requests of all engines.
        self.borrowers: WeakSet[Borrower] = WeakSet()
        self._numbers = itertools.count()

    def arrival(self) -> Rank:
        """Rank of a request that arrives now, before priorities."""
        return self.num_steps, next(self._numbers)


@dataclass(eq=False)
class Borrower:
    """An engine's handle on the arbiter. The engine's own thread calls all methods.

    `last_rank` returns the rank of the engine's last-ranked running request, or None, and is called
    from any thread. `give_way` preempts that request, between steps, in the engine's thread.
    """

    arbiter: Arbiter
    last_rank: Callable[[], Rank | None]
    give_way: Callable[[], None]
    # The rank of its claim, and the step that the claim was made in.
    _claim: tuple[Rank, int] | None = field(default=None, init=False)
    _is_asked: bool = field(default=False, init=False)
    _is_stepping: bool = field(default=False, init=False)
    _thread_id: int = field(default=0, init=False)  # The thread of the last step.
    _num_stuck: int = field(default=0, init=False)
    _seen: tuple[int, int] = field(default=(0, 0), init=False)  # What the arbiter counted last.

    def __post_init__(self) -> None:
        with self.arbiter.lock:
            self.arbiter.borrowers.add(self)

    def begin_step(self) -> None:
        """Begin a step: preempt a request if another engine has asked for it."""
        with self.arbiter.lock:
            self._thread_id, self._is_stepping = threading.get_ident(), True
            is_asked, self._is_asked = self._is_asked, False
            if is_asked:
                rank, last = self.outranked_by(), self.last_rank()
                if rank is not None and last is not None and last > rank:
                    self._preempt()

    def end_step(self) -> None:
        """End the step and wake engines that wait for it."""
        with self.arbiter.lock:
            self._is_stepping = False
            self.arbiter.changed.notify_all()

    def outranked_by(self) -> Rank | None:
        """The rank of the first claim of another engine; requests behind it take no pages."""
        if self._num_stuck >= PATIENCE_STEPS:
            return None
        with self.arbiter.lock:
            # An engine that is not stepped any more does not renew its claim.
            since = self.arbiter.num_steps - PATIENCE_STEPS
            claims = [claim for each in self._others() if (claim := each._claim) is not None]
            return min((rank for rank, step in claims if step >= since), default=None)

    def note_submitted(self) -> None:
        """Record a submitted step, which drops the claim."""
        with self.arbiter.lock:
            self._claim = None
            self._num_stuck = 0
            self.arbiter.num_submitted += 1

    def note_given_up(self) -> None:
        """Be patient again: a request was failed, so the next one may find memory."""
        self._num_stuck = 0

    def withdraw(self) -> None:
        """Drop the claim, if there is one."""
        self._claim = None

    def claim(self, rank: Rank) -> bool:
        """Claim memory for a request when nothing can run; returns whether to try again."""
        arbiter, here = self.arbiter, threading.get_ident()
        with arbiter.lock:
            self._claim = rank, arbiter.num_steps
            self._is_stepping = False  # Other engines need not wait for this one.
            if self._seen[0] != arbiter.num_submitted:
                self._num_stuck = 0
            is_patient = self._num_stuck < PATIENCE_STEPS
            victim, victim_rank, is_elsewhere = None, rank, False
            for each in self._others():
                last = each.last_rank()
                is_here = each._thread_id == here
                is_elsewhere |= last is not None and not is_here
                is_idle = is_here and not each._is_stepping
                if last is None or not (last > rank if is_patient else is_idle):
                    continue
                if victim is None or last > victim_rank:
                    victim, victim_rank = each, last
            if victim is not None and victim._thread_id == here and not victim._is_stepping:
                victim._preempt()
                return True
            if victim is not None:
                victim._is_asked = True
            seen, self._seen = self._seen, (arbiter.num_submitted, arbiter.num_preempted)
            if seen == self._seen and not any(
                each._is_stepping and each._thread_id != here for each in self._others()
            ):
                self._num_stuck += 1
            if is_elsewhere and is_patient:
                arbiter.changed.wait(_WAIT_S)
            return is_patient

    def _preempt(self) -> None:
        self.give_way()
        self.arbiter.num_preempted += 1

    def _others(self) -> list[Borrower]:
        return [each for each in self.arbiter.borrowers if each is not self]
