"""Shares of one budget between processes: pure logic over reports, without sockets or a clock.

    given = max(budget last reported, budget of the unanswered order)        per member
    sum of given <= budget, which is larger by what members have brought

A member's pool creates at most its budget, which only an order raises. It answers each order once
it has carried it out as far as it can at once, and reports each later decrease. So memory counts as
handed over only after the giver has released it to the driver.

A member that wants more than is free gets, in this order: what other members hold beyond their live
rows, from idle and least recently busy members first; live rows of idle members; and what requests
of busy members give back when they end, down to fair shares. A fair share is the most that all
members can have in proportion to their weights, none below its floor and none above what it wants.
A member with nothing running comes first, and gets the memory for its first request whole. Running
requests keep their memory, unless such a member has waited for `TURN_S`: then live rows of busy
members go too, down to fair shares. So members whose fair shares do not hold a single request take
turns.

See DESIGN.md, Note [One budget for many processes].
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...errors import ConfigError, shown
from ...units import format_bytes

#: A member without work gives all above its floor back after this time.
IDLE_S = 0.5
#: Time for an answer, or for progress towards a lower budget; a member that exceeds it hangs.
HANG_S = 5.0
#: Least and largest weight of a member, so that their sums and quotients stay finite.
WEIGHT_MIN, WEIGHT_MAX = 0.001, 1000
#: A member with nothing running waits so long for running requests of others to end.
TURN_S = 10.0


class Order(NamedTuple):
    """An instruction of the broker to a member.

    Attributes:
        serial: Number of the order, for the answer.
        budget_bytes: Budget for its pool. Above the present one: have it. Below: come down to it,
            as far as live rows allow, and report each decrease.
        preempts: Whether live rows are to be given up for it.
        most_bytes: The most that it could ever have.
    """

    serial: int
    budget_bytes: int
    preempts: bool
    most_bytes: int


class Report(NamedTuple):
    """A report of a member about its memory.

    Attributes:
        serial: The last order that was received.
        budget_bytes: Its pool's budget.
        created_bytes: Memory that its pool has created.
        live_bytes: Memory of live rows.
        kept_bytes: The part of it that it cannot give up.
        needed_bytes: Memory without which it can run nothing: what is kept and its first request.
        wanted_bytes: Memory that its live rows and waiting requests will soon take together.
        running_bytes: Memory that its running requests will soon take; 0 if none runs.
        is_busy: Whether it has work.
    """

    serial: int = 0
    budget_bytes: int = 0
    created_bytes: int = 0
    live_bytes: int = 0
    kept_bytes: int = 0
    needed_bytes: int = 0
    wanted_bytes: int = 0
    running_bytes: int = 0
    is_busy: bool = True


@dataclass(eq=False)
class Member:
    """One pool's share. `weight` counts where live rows must be given up.

    `brought_bytes` is memory that it held before joining, and adds to the budget while it is a
    member: weights, whose memory others may use while the weights are in host memory.
    """

    name: str
    floor_bytes: int
    limit_bytes: int
    weight: float = 1.0
    brought_bytes: int = 0
    has_joined: bool = field(default=False, init=False)  #: Has been given its floor.
    report: Report = field(default=Report(), init=False)
    #: The last order, and whether it waits for an answer.
    order: Order = field(default=Order(0, 0, preempts=False, most_bytes=0), init=False)
    is_asked: bool = field(default=False, init=False)
    goal_bytes: int = field(default=0, init=False)  #: Its budget once orders are carried out.
    preempts: bool = field(default=False, init=False)
    busy_s: float = field(default=0.0, init=False)  #: When it was last known to have work.
    moved_s: float = field(default=0.0, init=False)  #: Time of the last order or progress.
    turn_s: float = field(default=-math.inf, init=False)  #: When its last turn began.
    #: When it last had running requests, or memory for its first request.
    served_s: float = field(default=0.0, init=False)

    @property
    def given_bytes(self) -> int:
        """Memory that it may have created."""
        asked_bytes = self.order.budget_bytes if self.is_asked else 0
        return max(self.report.budget_bytes, asked_bytes)

    def is_hung(self, now_s: float) -> bool:
        """Whether the member owes an answer or memory, and has been silent for too long."""
        owes = self.is_asked or self.goal_bytes < self.given_bytes
        return owes and now_s - self.moved_s > HANG_S

    def is_idle(self, now_s: float) -> bool:
        """Whether the member has had no work for `IDLE_S`."""
        return self.has_joined and not self.report.is_busy and now_s - self.busy_s >= IDLE_S


class Shares:
    """The members of one budget. Times are seconds of the caller's clock.

    `page_bytes` is the unit in which memory is given. `ConfigError` if the budget is below it.
    """

    def __init__(self, budget_bytes: int, page_bytes: int):
        if budget_bytes < page_bytes:
            raise ConfigError(f"a budget of {budget_bytes} bytes does not hold a page; raise it")
        self.page_bytes = page_bytes
        self.budget_bytes = self._pages(budget_bytes)
        self.members: dict[Hashable, Member] = {}

    @property
    def free_bytes(self) -> int:
        """Memory that no member may create; below zero after the budget was lowered."""
        return self.budget_bytes - sum([each.given_bytes for each in self.members.values()])

    @property
    def _floors_bytes(self) -> int:
        """Promised memory; what a member brings is promised to nobody else."""
        return sum([max(each.floor_bytes, each.brought_bytes) for each in self.members.values()])

    # ---- events ---------------------------------------------------------------------------

    def join(self, key: Hashable, member: Member, now_s: float) -> None:
        """Add a member, whose first order comes once its floor is free.

        Raises:
            ConfigError: The floors do not fit the budget together, or a figure is impossible.
        """
        member.floor_bytes = max(self.page_bytes, self._pages_up(member.floor_bytes))
        member.limit_bytes = self._pages(member.limit_bytes)
        member.brought_bytes = self._pages_up(member.brought_bytes)
        left_bytes = self.budget_bytes - self._floors_bytes + member.brought_bytes
        if member.floor_bytes > left_bytes:
            raise ConfigError(
                f"{member.name} wants a floor of {format_bytes(member.floor_bytes)}, and "
                f"{format_bytes(left_bytes)} are not promised to others, of a budget of "
                f"{format_bytes(self.budget_bytes)}: lower the floors, or raise the budget"
            )
        is_weight = WEIGHT_MIN <= member.weight <= WEIGHT_MAX
        if member.limit_bytes < member.floor_bytes or not is_weight:
            raise ConfigError(
                f"{member.name} wants a limit of {format_bytes(member.limit_bytes)} with a floor "
                f"of {format_bytes(member.floor_bytes)}, and a weight of {shown(member.weight)}: "
                "the limit must not be below the floor, and the weight be from "
                f"{WEIGHT_MIN:g} to {WEIGHT_MAX:g}"
            )
        member.busy_s = member.moved_s = member.served_s = now_s
        self.members[key] = member
        self.budget_bytes += member.brought_bytes

    def take(self, key: Hashable, report: Report, now_s: float) -> None:
        """Take a member's report."""
        member = self.members[key]
        answers = member.is_asked and report.serial == member.order.serial
        if answers or report.budget_bytes < member.report.budget_bytes:
            member.moved_s = now_s
        if report.is_busy or member.report.is_busy:
            member.busy_s = now_s
        member.is_asked = member.is_asked and not answers
        member.report = report
        if not member.is_asked:
            # Rows that became live meanwhile stay, unless the member may preempt.
            live_bytes = 0 if member.preempts else report.live_bytes
            member.goal_bytes = min(member.given_bytes, max(member.goal_bytes, live_bytes))

    def leave(self, key: Hashable) -> None:
        """Remove a member that has released everything, or whose process has ended."""
        self.budget_bytes -= self.members.pop(key).brought_bytes

    def fit(self, free_bytes: int) -> None:
        """Lower the budget to what has been created and what the device has left, if it is above.

        Floors stay. Members come down to it by the next orders.
        """
        # Brought memory may still lie outside the pool.
        created_bytes = sum(
            [
                max(each.report.created_bytes, min(each.given_bytes, each.brought_bytes))
                for each in self.members.values()
            ]
        )
        most_bytes = self._pages(created_bytes + free_bytes)
        most_bytes = max(self.page_bytes, self._floors_bytes, most_bytes)
        self.budget_bytes = min(self.budget_bytes, most_bytes)

    @property
    def has_deadlines(self) -> bool:
        """Whether decisions may change without an event: a member may become idle, or hang."""
        return any(
            each.is_asked
            or each.goal_bytes < each.given_bytes
            or each.given_bytes < each.report.wanted_bytes
            or (not each.report.is_busy and each.given_bytes > each.floor_bytes)
            for each in self.members.values()
        )

    # ---- decisions ------------------------------------------------------------------------

    def decide(self, now_s: float) -> list[tuple[Hashable, Order]]:
        """Return the orders to send now; each is booked as sent."""
        fair = self._fair_bytes(now_s)
        its = [each for each in self.members.values() if not each.is_hung(now_s)]
        able = [each for each in its if not each.is_asked]
        for each in able:
            each.preempts = each.preempts and each.goal_bytes < each.report.live_bytes
            if each.goal_bytes < min(fair[each], each.given_bytes):
                each.goal_bytes = min(fair[each], each.given_bytes)
        lacking_bytes = self._give(able, fair)
        coming_bytes = sum([max(0, each.given_bytes - each.goal_bytes) for each in its])
        self._take_back(able, fair, lacking_bytes - coming_bytes, now_s)
        for each in able:
            kept_bytes = max(each.floor_bytes, each.report.live_bytes)
            if each.is_idle(now_s) and each.goal_bytes > kept_bytes:
                each.goal_bytes = min(each.goal_bytes, self._pages_up(kept_bytes))
        return [(key, order) for key, order in self._orders(now_s) if order is not None]

    def _give(self, able: list[Member], fair: dict[Member, int]) -> int:
        """Raise goals from free memory; returns the bytes that members still lack."""
        free_bytes = self.free_bytes
        lacking_bytes = max(0, -free_bytes)
        for each in sorted(self.members.values(), key=lambda each: each.has_joined):
            lacks_bytes = fair[each] - each.given_bytes
            if lacks_bytes <= 0:
                continue
            given_bytes = max(0, min(lacks_bytes, free_bytes))
            if not each.has_joined and given_bytes < lacks_bytes:
                given_bytes = 0  # A floor is given whole; what is free of it waits.
                free_bytes = 0
            if each in able and given_bytes:
                each.goal_bytes = each.given_bytes + given_bytes
                each.has_joined = True
            free_bytes -= given_bytes
            lacking_bytes += lacks_bytes - given_bytes
        return lacking_bytes

    def _take_back(
        self, able: list[Member], fair: dict[Member, int], num_bytes: int, now_s: float
    ) -> None:
        """Lower goals by `num_bytes` together, in the order of the module's docstring."""
        givers = [each for each in able if each.goal_bytes > fair[each]]

        def lower(member: Member, to_bytes: int, num_bytes: int) -> int:
            wanted_bytes = self._pages_up(max(to_bytes, member.goal_bytes - max(0, num_bytes)))
            taken_bytes = max(0, member.goal_bytes - wanted_bytes)
            member.goal_bytes -= taken_bytes
            return num_bytes - taken_bytes

        for each in sorted(givers, key=lambda each: (each.report.is_busy, each.busy_s)):
            num_bytes = lower(each, max(fair[each], each.report.live_bytes), num_bytes)
        idle = [each for each in givers if each.is_idle(now_s)]
        rest = [each for each in givers if each not in idle]
        rest.sort(key=lambda each: (fair[each] - each.goal_bytes) / each.weight)
        for each in (*idle, *rest):
            before_bytes = each.goal_bytes
            num_bytes = lower(each, fair[each], num_bytes)
            each.preempts |= each.goal_bytes < before_bytes

    def _orders(self, now_s: float) -> Iterator[tuple[Hashable, Order | None]]:
        left_bytes = self.budget_bytes - self._floors_bytes
        for key, each in self.members.items():
            most_bytes = left_bytes + max(each.floor_bytes, each.brought_bytes)
            most_bytes = min(each.limit_bytes, most_bytes)
            last = each.order
            wanted = Order(last.serial + 1, each.goal_bytes, each.preempts, most_bytes)
            if each.has_joined and not each.is_asked and wanted[1:] != last[1:]:
                each.order, each.is_asked, each.moved_s = wanted, True, now_s
                yield key, wanted

    def _fair_bytes(self, now_s: float) -> dict[Member, int]:
        """Return the fair share of each member: weighted, between its least and what it wants.

        The least includes running requests, until a member has waited for `TURN_S`, and the first
        request of members with nothing running, if it fits.
        """
        least: dict[Member, int] = {}
        wanted: dict[Member, int] = {}
        waiting = []
        for each in self.members.values():
            if not each.has_joined:
                waiting.append(each)
                continue
            least[each] = max(each.floor_bytes, min(each.report.kept_bytes, each.given_bytes))
            its_bytes = 0 if each.is_idle(now_s) else each.report.wanted_bytes
            wanted[each] = self._pages_up(min(each.limit_bytes, its_bytes))
            if each.is_hung(now_s):
                least[each] = wanted[each] = each.given_bytes
            wanted[each] = max(least[each], wanted[each])
        for each in waiting:  # Other members may hold memory that they cannot give up.
            fits = each.floor_bytes <= self.budget_bytes - sum(least.values())
            least[each] = wanted[each] = each.floor_bytes if fits else 0
        needed, running, unserved = {}, {}, []
        for each in least:
            needed[each] = min(self._pages_up(each.report.needed_bytes), wanted[each])
            its_bytes = min(self._pages_up(each.report.running_bytes), wanted[each])
            if its_bytes or needed[each] <= each.given_bytes:
                its_bytes, each.served_s = its_bytes or needed[each], now_s
            else:
                unserved.append(each)
            running[each] = max(least[each], its_bytes)
        if sum(running.values()) > self.budget_bytes:  # Their growth does not fit.
            for each in least:
                running[each] = max(least[each], min(running[each], each.given_bytes))
        unserved.sort(key=lambda each: each.served_s)
        left_bytes = self.budget_bytes - sum(least.values())
        is_late = any(
            now_s - each.served_s >= TURN_S and needed[each] - least[each] <= left_bytes
            for each in unserved
        )
        if not is_late and sum(running.values()) <= self.budget_bytes:
            least, left_bytes = running, self.budget_bytes - sum(running.values())
        # Members whose turn it is come first, then those that have waited longest.
        turns = [each for each in least if is_late and now_s - each.turn_s < TURN_S]
        for each in dict.fromkeys([*turns, *unserved]):
            more_bytes = max(0, needed[each] - least[each])
            if more_bytes <= left_bytes:
                least[each] += more_bytes
                left_bytes -= more_bytes
                each.turn_s = each.turn_s if each in turns else now_s
        return self._level(least, wanted)

    def _level(self, least: dict[Member, int], wanted: dict[Member, int]) -> dict[Member, int]:
        """Share the budget: all grow with a common level, by weight, between their two bounds."""
        if sum(wanted.values()) <= self.budget_bytes:
            return wanted
        its = list(least)

        def shares(level: float) -> list[float]:
            return [min(wanted[each], max(least[each], level * each.weight)) for each in its]

        def total(level: float) -> int:
            return int(sum(shares(level)))

        bounds = sorted(of[each] / each.weight for of in (least, wanted) for each in its)
        at = bisect_right(bounds, self.budget_bytes, key=total)
        level = bounds[at - 1] if at else 0.0
        growing = [each.weight for each in its if least[each] <= level * each.weight < wanted[each]]
        if growing:
            level += max(0.0, self.budget_bytes - total(level)) / sum(growing)
        return {
            each: max(least[each], self._pages(int(share)))
            for each, share in zip(its, shares(level), strict=True)
        }

    def _pages(self, num_bytes: int) -> int:
        return num_bytes // self.page_bytes * self.page_bytes

    def _pages_up(self, num_bytes: int) -> int:
        return -self._pages(-num_bytes)
