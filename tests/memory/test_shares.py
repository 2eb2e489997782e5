"""Shares of one budget: who gets memory from whom, and a long play of members that come and go."""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from vmkv.core.memory.shares import HANG_S, IDLE_S, TURN_S, Member, Order, Report, Shares
from vmkv.errors import ConfigError

PAGE = 2


@dataclass(eq=False)
class Process:
    """A member's side: a pool with live and parked rows, which follows its orders."""

    name: str
    floor: int
    limit: int
    weight: float
    budget: int = 0
    goal: int = 0
    live: int = 0
    kept: int = 0
    needed: int = 0
    wanted: int = 0
    running: int = 0
    created: int = 0
    most: int = 0
    serial: int = 0
    is_busy: bool = False
    preempts: bool = False
    is_hung: bool = False
    orders: deque[Order] = field(default_factory=deque)
    reports: deque[Report] = field(default_factory=deque)

    def read(self) -> None:
        """Carry out the next order as far as it can be at once, and answer."""
        order = self.orders.popleft()
        self.serial, self.goal, self.preempts, self.most = order
        self.budget = max(self.budget, self.goal)
        self.come_down()
        self.tell()

    def come_down(self) -> None:
        """Evict parked rows, preempt live ones if told to, and lower the budget."""
        if self.preempts:
            self.live = min(self.live, max(self.kept, self.goal))
            self.running = min(self.running, self.live)
        self.budget = max(self.goal, min(self.budget, self.live))
        self.created = min(self.created, self.budget)

    def tell(self) -> None:
        """Send a report."""
        told = (self.live, self.kept, self.needed, self.wanted, self.running, self.is_busy)
        self.reports.append(Report(self.serial, self.budget, self.created, *told))

    def work(self, random_: random.Random) -> None:
        """Have requests begin, grow and end, within the budget."""
        self.is_busy = random_.random() < 0.7
        self.wanted = random_.choice((0, self.floor, random_.randrange(0, 100)))
        self.needed = random_.choice((0, 0, 3 * self.most // 4))
        if self.is_busy:
            self.wanted = max(self.wanted, self.needed)
        room = min(self.budget, max(self.goal, self.live))
        self.live = random_.randint(0, room) if self.is_busy else min(self.live, self.floor)
        self.kept = random_.randint(0, self.live) if random_.random() < 0.3 else 0
        runs = self.live and self.needed <= self.budget
        self.running = random_.choice((0, self.live, self.live + PAGE)) if runs else 0
        self.created = random_.randint(max(self.live, min(self.created, self.budget)), self.budget)
        self.come_down()
        self.tell()


class Play:
    """A broker and its members, whose messages arrive in order and at any time."""

    def __init__(self, seed: int, budget: int = 100):
        self.random = random.Random(seed)
        self.base = budget
        self.most = budget  # Of what exists, until members have come down after a leave.
        self.shares = Shares(budget, PAGE)
        self.processes: dict[int, Process] = {}
        self.dead: list[int] = []
        self.now_s = 0.0
        self.num_joined = self.num_refused = self.num_met = self.num_turns = 0

    @property
    def budget(self) -> int:
        """The budget, with what members have brought."""
        return self.shares.budget_bytes

    def step(self) -> None:
        """Play one event, at random, and check what holds at every moment."""
        kinds = ("read", "deliver", "work", "join", "die", "hang", "leave", "wait")
        (kind,) = self.random.choices(kinds, (30, 30, 20, 4, 1, 1, 1, 10))
        self.now_s += self.random.choice((0.0, 0.01, IDLE_S))
        getattr(self, kind)()
        self.check()

    def some(self, kind: str | None = None) -> Process | None:
        """Return a living process, with unread messages of a kind."""
        its = [
            each
            for key, each in self.processes.items()
            if key not in self.dead and (kind is None or getattr(each, kind))
        ]
        return self.random.choice(its) if its else None

    def decide(self) -> None:
        """Send the orders that the broker wants to send now."""
        for key, order in self.shares.decide(self.now_s):
            self.processes[key].orders.append(order)

    def read(self) -> None:
        """Have a member read an order."""
        process = self.some("orders")
        if process is not None and not process.is_hung:
            process.read()

    def deliver(self) -> None:
        """Have the broker read a report, or learn of a death."""
        if self.dead and self.random.random() < 0.3:
            key = self.dead.pop()
            del self.processes[key]
            self.shares.leave(key)
        elif (process := self.some("reports")) is not None:
            self.shares.take(process.name, process.reports.popleft(), self.now_s)
        self.decide()

    def work(self) -> None:
        """Change what a member holds and wants."""
        process = self.some()
        if process is not None and not process.is_hung and process.budget:
            process.work(self.random)

    def join(self) -> None:
        """Add a member, which is refused if the floors do not fit."""
        self.num_joined += 1
        key = self.num_joined
        floor = self.random.randrange(PAGE, 30, PAGE)
        limit = self.random.randrange(floor, self.budget + PAGE, PAGE)
        process = Process(key, floor, limit, self.random.choice((0.5, 1, 3)))  # type: ignore[arg-type]
        brought = self.random.choice((0, 0, 0, floor, floor + 10 * PAGE))
        before = {
            key: max(0, process.floor - self.shares.members[key].brought_bytes)
            for key, process in self.processes.items()
        }
        try:
            member = Member(str(key), floor, limit, process.weight, brought)
            self.shares.join(key, member, self.now_s)
        except ConfigError:
            assert sum(before.values()) + floor > self.base
            self.num_refused += 1
            return
        self.processes[key] = process
        self.decide()

    def hang(self) -> None:
        """Have a member read no order, or read again."""
        process = self.some()
        if process is not None:
            process.is_hung = not process.is_hung

    def die(self) -> None:
        """Kill a process, of which the broker learns later."""
        process = self.some()
        if process is not None:
            process.created = 0
            self.dead.append(process.name)  # type: ignore[arg-type]

    def leave(self) -> None:
        """End a process in order."""
        process = self.some()
        if process is not None:
            del self.processes[process.name]  # type: ignore[arg-type]
            self.shares.leave(process.name)
            self.decide()

    def wait(self) -> None:
        """Let time pass, in which members may count as hung or idle."""
        self.now_s += self.random.choice((IDLE_S, HANG_S + 1))
        self.decide()

    def check(self) -> None:
        """Check that the books bound what exists, and that floors are kept."""
        if self.shares.free_bytes >= 0:
            self.most = self.budget
        assert self.shares.free_bytes >= self.budget - self.most
        assert sum(each.created for each in self.processes.values()) <= self.most
        for key, process in self.processes.items():
            member = self.shares.members[key]
            assert process.created <= process.budget <= member.given_bytes
            if member.has_joined:
                assert member.floor_bytes == process.floor
                assert process.floor <= member.goal_bytes <= member.given_bytes <= process.limit

    def settle(self) -> None:
        """Have all messages read by all who read; then no need may be left that can be met."""
        for _ in range(12):
            for _ in range(3):
                for key, process in self.processes.items():
                    while process.orders and not process.is_hung and key not in self.dead:
                        process.read()
                    while process.reports:
                        self.shares.take(key, process.reports.popleft(), self.now_s)
                self.decide()
                self.check()
            self.now_s += HANG_S / 3
        awake = {
            each
            for key, each in self.processes.items()
            if not each.is_hung and key not in self.dead and not each.orders
        }
        given = {
            each: self.shares.members[each.name].given_bytes for each in self.processes.values()
        }
        free = self.budget - sum(given.values())
        slack = PAGE * (len(awake) + 1)
        starving = [
            each
            for each in awake
            if each.is_busy and not each.running and given[each] < each.needed
        ]
        for taker in awake:
            wanted = min(taker.limit, max(taker.floor, taker.wanted if taker.is_busy else 0))
            if not given[taker]:  # Its floor is held by who cannot give it up.
                assert free < taker.floor
                continue
            if not taker.is_busy:
                assert given[taker] <= max(taker.floor, taker.live) + PAGE
            if given[taker] > wanted - PAGE:  # Less than a page cannot be moved.
                self.num_met += 1
                continue
            is_waited_for = not all(given.values())  # What is free is kept for a floor.
            assert free < slack or is_waited_for
            if starving:
                continue
            for giver in awake - {taker}:
                # It may have its turn, and its running requests may keep their memory.
                least = max(giver.floor, giver.kept, giver.needed, giver.running)
                fair = max(least, giver.weight * (given[taker] / taker.weight))
                assert given[giver] <= fair + slack * max(1, giver.weight / taker.weight)
        for each in starving:  # Who can have what a request takes has it, by turns.
            rest = [
                max(other.floor, other.kept) if other in awake else given[other]
                for other in given
                if other is not each
            ]
            needed = min(each.needed, each.limit) + PAGE
            if given[each] and needed + sum(rest) <= self.budget:
                self.num_turns += 1
                assert any(given[other] >= other.needed > 0 for other in given if other.is_busy)


@pytest.mark.slow
def test_a_long_play_never_exceeds_the_budget_and_meets_what_can_be_met() -> None:
    """40,000 events; after every 250 all that can be read is read, and needs are compared."""
    num_met = num_refused = num_joined = num_turns = 0
    for seed in range(8):
        play = Play(seed)
        for at in range(5000):
            play.step()
            if at % 250 == 249:
                play.settle()
        num_met += play.num_met
        num_refused += play.num_refused
        num_joined += play.num_joined
        num_turns += play.num_turns
    assert num_met > 200
    assert num_turns > 4
    assert 200 < num_refused < num_joined


# ---- single decisions ----------------------------------------------------------------------------


def brokered(*members: tuple[int, int, float], budget: int = 100) -> Play:
    """Make a play of members with these floors, limits and weights, which have joined."""
    play = Play(0, budget)
    for key, (floor, limit, weight) in enumerate(members):
        play.processes[key] = Process(key, floor, limit, weight)  # type: ignore[arg-type]
        play.shares.join(key, Member(str(key), floor, limit, weight), 0.0)
    exchange(play)
    return play


def exchange(play: Play) -> None:
    """Have every message read until none is left."""
    play.decide()
    while any(each.orders or each.reports for each in play.processes.values()):
        for key, process in play.processes.items():
            while process.orders and not process.is_hung:
                process.read()
            while process.reports:
                play.shares.take(key, process.reports.popleft(), play.now_s)
        play.decide()
        play.check()
        if all(not each.orders or each.is_hung for each in play.processes.values()) and not any(
            each.reports for each in play.processes.values()
        ):
            return


def ask(play: Play, key: int, wanted: int, **values: int) -> None:
    """Have a busy member want so much, and hold what `values` say."""
    process = play.processes[key]
    process.wanted, process.is_busy = wanted, True
    for name, value in values.items():
        setattr(process, name, value)
    process.tell()
    exchange(play)


def budgets(play: Play) -> list[int]:
    """Return the members' budgets."""
    return [each.budget for each in play.processes.values()]


def test_parked_rows_go_first_then_live_rows_by_weight() -> None:
    """The first asker gets what is free, the second what is parked, then its fair share."""
    play = brokered((10, 100, 1), (10, 100, 3))
    assert budgets(play) == [10, 10]
    ask(play, 0, 90)
    assert budgets(play) == [90, 10]
    ask(play, 0, 90, live=40)
    ask(play, 1, 60)
    assert budgets(play) == [40, 60]  # Fifty of the first were parked.
    assert play.processes[0].live == 40
    ask(play, 1, 100)  # Twenty-five and seventy-five are their shares.
    assert budgets(play) == [26, 74]  # In pages.
    assert play.processes[0].live == 26


def test_running_requests_keep_their_memory_while_others_wait() -> None:
    """What they give back when they end goes to the member below its share."""
    play = brokered((10, 100, 1), (10, 100, 1))
    ask(play, 0, 100, live=80, running=84)
    ask(play, 1, 60, needed=30)
    assert budgets(play) == [84, 16]
    assert play.processes[0].live == 80
    ask(play, 0, 100, live=64, running=68)
    assert budgets(play) == [68, 32]
    ask(play, 1, 60, live=30, running=32)
    play.now_s += 2 * TURN_S
    exchange(play)
    assert budgets(play) == [68, 32]
    assert play.processes[0].live == 64


def test_running_requests_give_way_to_a_member_that_has_waited_for_its_first() -> None:
    """For ten seconds since it lacked memory, not since it last had work."""
    play = brokered((10, 100, 1), (10, 100, 1))
    ask(play, 0, 100, live=80, running=84)
    play.now_s += 2 * TURN_S
    ask(play, 1, 60, needed=30)
    play.now_s += 0.9 * TURN_S
    exchange(play)
    assert budgets(play) == [84, 16]
    assert play.shares.has_deadlines
    play.now_s += 0.1 * TURN_S
    exchange(play)
    assert budgets(play) == [50, 50]
    assert play.processes[0].live == 50


def test_rows_that_cannot_be_given_up_stay() -> None:
    """What a member must keep is taken from nobody, whatever the weights are."""
    play = brokered((10, 100, 1), (10, 100, 100))
    ask(play, 0, 60, live=0)
    ask(play, 0, 60, live=60, kept=60)
    ask(play, 1, 100)
    assert budgets(play) == [60, 40]


def test_live_rows_of_idle_members_go_before_those_of_busy_ones() -> None:
    """A member that has stopped working gives its live rows up, of whatever weight it is."""
    play = brokered((2, 100, 50), (2, 100, 1), (2, 100, 1))
    ask(play, 0, 40)
    ask(play, 1, 40)
    ask(play, 0, 40, live=40)
    ask(play, 1, 40, live=40)
    play.processes[0].is_busy = False
    play.processes[0].tell()
    exchange(play)
    play.now_s += 2 * IDLE_S
    ask(play, 2, 50)
    assert budgets(play) == [10, 40, 50]
    assert [each.live for each in play.processes.values()] == [10, 40, 0]


def test_an_idle_member_keeps_its_floor_only() -> None:
    """After half a second without work all else goes back, although nobody asks for it."""
    play = brokered((10, 100, 1))
    ask(play, 0, 80, live=0)
    play.processes[0].is_busy = False
    play.processes[0].tell()
    exchange(play)
    assert budgets(play) == [80]
    play.now_s += IDLE_S
    exchange(play)
    assert budgets(play) == [10]


def test_memory_of_a_hung_member_is_not_handed_out_before_it_is_gone() -> None:
    """Others get what else there is, and its memory once its process has ended."""
    play = brokered((10, 100, 1), (10, 100, 1), (10, 100, 1))
    ask(play, 0, 50)
    ask(play, 1, 40)
    play.processes[0].is_hung = True
    ask(play, 2, 60)
    assert budgets(play)[0] == 50
    play.now_s += HANG_S + 1
    exchange(play)
    assert sum(budgets(play)) == 100
    assert budgets(play) == [50, 26, 24]
    del play.processes[0]
    play.shares.leave(0)
    exchange(play)
    assert budgets(play) == [40, 60]


def test_floors_have_to_fit_together() -> None:
    """A member whose floor is promised to others is refused, and nothing changes."""
    play = brokered((60, 100, 1))
    with pytest.raises(ConfigError, match="lower the floors, or raise the budget"):
        play.shares.join(1, Member("late", 42, 50, 1.0), 0.0)
    with pytest.raises(ConfigError, match="the limit must not be below the floor"):
        play.shares.join(1, Member("odd", 10, 4, 1.0), 0.0)
    with pytest.raises(ConfigError, match="weight"):
        play.shares.join(1, Member("odd", 10, 40, 0.0), 0.0)
    assert list(play.shares.members) == [0]


def test_a_newcomer_gets_its_floor_from_who_is_above_theirs() -> None:
    """Its first order waits until all of its floor has come back."""
    play = brokered((10, 100, 1))
    ask(play, 0, 100)
    ask(play, 0, 100, live=100)
    play.processes[1] = Process(1, 20, 100, 1)  # type: ignore[arg-type]
    play.shares.join(1, Member("new", 20, 100, 1), play.now_s)
    exchange(play)
    assert budgets(play) == [80, 20]


def test_requests_larger_than_a_fair_share_run_by_turns() -> None:
    """Two members with a request of most of the budget each: half of it would serve neither."""
    play = brokered((10, 100, 1), (10, 100, 1))
    ask(play, 0, 80, needed=80)
    assert budgets(play) == [80, 10]
    ask(play, 0, 80, live=80)
    ask(play, 1, 70, needed=70)
    assert budgets(play) == [80, 20]
    play.now_s += TURN_S
    exchange(play)
    assert budgets(play) == [30, 70]
    play.now_s += TURN_S / 2
    ask(play, 1, 70, live=70)
    assert budgets(play) == [30, 70]
    play.now_s += TURN_S / 2
    exchange(play)
    assert budgets(play) == [80, 20]


def test_three_members_take_turns_of_equal_length() -> None:
    """Each keeps its turn while two others are late."""
    play = brokered((10, 100, 1), (10, 100, 1), (10, 100, 1))
    for key in range(3):
        ask(play, key, 70, needed=70)
    turns = []
    for _ in range(80):
        play.now_s += TURN_S / 8
        exchange(play)
        (key,) = (each.name for each in play.processes.values() if each.budget >= 70)
        turns.append(key)
        for each in play.processes.values():  # A request that runs holds its memory.
            each.live = each.running = 70 if each.name == key else 0
            each.tell()
        exchange(play)
    lengths = [len([*its]) for _, its in itertools.groupby(turns)]
    assert {0, 1, 2} == {*turns}
    assert all(8 <= each <= 10 for each in lengths[1:-1]), lengths


def test_a_lower_budget_is_taken_back_from_those_above_their_floors() -> None:
    """The driver had less than the broker was told."""
    play = brokered((10, 100, 1), (10, 100, 1))
    ask(play, 0, 90)
    ask(play, 0, 90, created=50)
    play.shares.fit(10)
    assert play.shares.free_bytes == -40
    play.most = 100  # Until the members have come down.
    for _ in range(3):
        for key, order in play.shares.decide(play.now_s):
            play.processes[key].orders.append(order)
        for key, process in play.processes.items():
            while process.orders:
                process.read()
            while process.reports:
                play.shares.take(key, process.reports.popleft(), play.now_s)
    assert budgets(play) == [50, 10]
    assert play.shares.free_bytes == 0
