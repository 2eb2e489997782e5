"""Who gets a request: whoever holds most of it, unless that one has too much to do.

Pure logic, without Ray, an engine, or a clock. Not covered: whether what replicas tell is true
(`test_prefixes.py`), and whether Ray does what it is told (`test_replicas.py`).
"""

from __future__ import annotations

import random
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vmkv import ConfigError
from vmkv.serve.replicas.choice import Assignments, Candidate, Routing, ranked

ROUTING = Routing(max_load=20, max_ahead=4)
CANDIDATES = st.lists(
    st.builds(Candidate, st.integers(0, 100), st.integers(0, 30), st.integers(0, 50)),
    min_size=1,
    max_size=6,
)


@given(CANDIDATES)
def test_everybody_has_a_place(candidates: list[Candidate]) -> None:
    """A request is never left without a replica, however much all have to do."""
    assert sorted(ranked(candidates, 100, ROUTING)) == list(range(len(candidates)))


@given(CANDIDATES, st.integers(1, 100))
def test_nobody_who_may_take_it_holds_more(candidates: list[Candidate], num_tokens: int) -> None:
    """The first may take more, where anybody may; nobody else who may holds a longer beginning."""
    first = candidates[ranked(candidates, num_tokens, ROUTING)[0]]
    least = min(each.load for each in candidates)
    free = [each for each in candidates if each.load < 20 and each.load <= least + 4]
    if not free:
        assert first.load == least
        return
    assert first in free
    longest = max(each.held_tokens for each in free)
    if longest >= num_tokens * ROUTING.least_share:
        assert first.held_tokens == longest


def test_a_replica_that_holds_more_is_passed_over_when_it_has_too_much_to_do() -> None:
    """Far above the least loaded, or over the limit; not before."""
    holder, other = Candidate(90, 4, 9), Candidate(0, 0, 0)
    assert ranked([other, holder], 100, ROUTING) == [1, 0]
    assert ranked([other, replace(holder, load=5)], 100, ROUTING) == [0, 1]
    both_busy = [replace(other, load=19), replace(holder, load=20)]
    assert ranked(both_busy, 100, ROUTING) == [0, 1]


def test_equals_share_by_load() -> None:
    """Those who hold as much."""
    equals = [Candidate(64, 2, 1), Candidate(64, 1, 9), Candidate(64, 1, 3)]
    assert ranked(equals, 100, ROUTING) == [2, 1, 0]


def test_what_nobody_holds_goes_where_the_least_is_held() -> None:
    """So that each replica's memory is for other prefixes, and all of them get as many."""
    nobody = [Candidate(0, 0, 900), Candidate(0, 3, 700), Candidate(0, 1, 700)]
    assert ranked(nobody, 100, ROUTING) == [2, 1, 0]


def test_a_beginning_that_all_prompts_share_does_not_decide() -> None:
    """Where it is a small part of the prompt."""
    holder, other = Candidate(16, 1, 0), Candidate(0, 0, 0)
    assert ranked([holder, other], 1000, ROUTING) == [1, 0]
    assert ranked([holder, other], 64, ROUTING) == [0, 1]


def test_nobody_is_nobody() -> None:
    """An empty deployment has no order."""
    assert ranked([], 10, ROUTING) == []


@pytest.mark.parametrize(
    "wrong", [{"max_load": 0}, {"max_ahead": -1}, {"least_share": 2}, {"told_every_s": None}]
)
def test_impossible_routing_is_refused(wrong: dict) -> None:
    """With the name of what is wrong."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Routing(**wrong)


class Clock:
    """Time that passes when it is told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    """A clock."""
    return Clock()


@pytest.fixture
def assignments(clock: Clock) -> Assignments:
    """Of a router that sees two replicas, which tell within three seconds."""
    made = Assignments(settle_s=3, clock=clock)
    made.see(["a", "b"])
    return made


def test_what_was_sent_is_expected_until_it_must_have_been_told(
    assignments: Assignments, clock: Clock
) -> None:
    """From the moment it is sent, for some time after its end; and no longer: that is history."""
    assignments.assign("r1", "a", [b"x", b"y"])
    assert assignments.expects("a", b"y")
    assert not assignments.expects("b", b"y")
    clock.now_s = 100
    assignments.assign("r2", "b", [])
    assert assignments.expects("a", b"y")  # Under way.
    assignments.end("r1")
    clock.now_s = 102
    assignments.assign("r3", "b", [])
    assert assignments.expects("a", b"y")  # It may not have told yet.
    clock.now_s = 104
    assignments.assign("r4", "b", [])
    assert not assignments.expects("a", b"y")


def test_two_requests_expect_what_they_share_as_long_as_one_of_them(
    assignments: Assignments, clock: Clock
) -> None:
    """The end of one is not the end of the other."""
    assignments.assign("r1", "a", [b"x"])
    assignments.assign("r2", "a", [b"x"])
    assignments.end("r1")
    clock.now_s = 10
    assignments.assign("r3", "b", [])
    assert assignments.expects("a", b"x")


def test_a_request_that_is_sent_elsewhere_moves(assignments: Assignments) -> None:
    """Its load, its beginning, and who is counted as having got it."""
    assignments.assign("r1", "a", [b"x"], 50)
    assignments.assign("r1", "b", [b"x"], 40)
    assert (assignments.load("a"), assignments.load("b")) == (0, 1)
    assert (assignments.new_tokens("a"), assignments.new_tokens("b")) == (0, 40)
    assert assignments.expects("b", b"x")
    assert not assignments.expects("a", b"x")
    assert assignments.replica_of("r1") == "b"
    assignments.end("r1")
    assert assignments.replica_of("r1") is None


def test_a_replica_that_is_gone_takes_what_it_held_with_it(assignments: Assignments) -> None:
    """And what ends there later is nobody's."""
    assignments.assign("r1", "a", [b"x"])
    assignments.see(["b", "c"])
    assert not assignments.expects("a", b"x")
    assert assignments.load("a") == 0
    assignments.end("r1")
    assignments.forget("a")
    assert assignments.load("a") == 0


def test_a_new_replica_need_not_catch_up(assignments: Assignments) -> None:
    """It begins as if it had been sent what the one was that got least: it is not flooded."""
    assignments.assign("r1", "a", [], 500)
    assignments.assign("r2", "b", [], 300)
    assignments.see(["a", "b", "c"])
    assert assignments.new_tokens("c") == 300


def test_a_request_whose_end_nobody_tells_is_forgotten(
    assignments: Assignments, clock: Clock
) -> None:
    """It counts as load for ten minutes, not for ever."""
    assignments.assign("r1", "a", [b"x"])
    clock.now_s = 601
    assignments.assign("r2", "b", [])
    assert assignments.load("a") == 0
    assert not assignments.expects("a", b"x")


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_requests_with_few_prefixes_go_where_their_prefix_is(seed: int, num_replicas: int) -> None:
    """200 requests over 20 prefixes, eight at a time: prefixes stay together, replicas get as many.

    What replicas tell is never heard here: what was sent is known to be there.
    """
    rng = random.Random(seed)
    names = "abcd"[:num_replicas]
    assignments = Assignments(settle_s=3, clock=Clock())
    assignments.see(names)
    order = [request % 20 for request in range(200)]
    rng.shuffle(order)
    under_way: list[str] = []
    num_hits, counts = 0, dict.fromkeys(names, 0)
    for at, prefix in enumerate(order):
        name = bytes([prefix])
        held_tokens = {each: 64 * assignments.expects(each, name) for each in names}
        candidates = [
            Candidate(held_tokens[each], assignments.load(each), assignments.new_tokens(each))
            for each in names
        ]
        chosen = names[ranked(candidates, 80, Routing())[0]]
        num_hits += held_tokens[chosen] > 0
        counts[chosen] += 1
        assignments.assign(str(at), chosen, [name], 80 - held_tokens[chosen])
        under_way.append(str(at))
        if len(under_way) == 8:
            assignments.end(under_way.pop(rng.randrange(8)))
    assert num_hits >= 0.9 * 180
    assert max(counts.values()) <= 1.2 * min(counts.values())
