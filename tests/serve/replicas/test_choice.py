"""Ranking of replicas by held prefix and load, and what a router remembers of its requests.

Without Ray, an engine, or a clock. Not covered: whether replicas report correctly
(`test_prefixes.py`), and whether Ray follows the ranking (`test_replicas.py`).
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
def test_the_ranking_has_every_replica(candidates: list[Candidate]) -> None:
    assert sorted(ranked(candidates, 100, ROUTING)) == list(range(len(candidates)))


@given(CANDIDATES, st.integers(1, 100))
def test_the_longest_held_prefix_is_first(candidates: list[Candidate], num_tokens: int) -> None:
    """Among replicas below the limits; if there are none, the least loaded replica is first."""
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


HOLDER, OTHER = Candidate(90, 4, 9), Candidate(0, 0, 0)


@pytest.mark.parametrize(
    ("candidates", "num_tokens", "order"),
    [
        ([OTHER, HOLDER], 100, [1, 0]),
        ([OTHER, replace(HOLDER, load=5)], 100, [0, 1]),  # More than `max_ahead` above the least.
        ([replace(OTHER, load=19), replace(HOLDER, load=20)], 100, [0, 1]),  # At `max_load`.
        # Equal prefixes are ranked by load, then by the new tokens that a replica got.
        ([Candidate(64, 2, 1), Candidate(64, 1, 9), Candidate(64, 1, 3)], 100, [2, 1, 0]),
        # An unknown prompt goes to the replica with fewest new tokens.
        ([Candidate(0, 0, 900), Candidate(0, 3, 700), Candidate(0, 1, 700)], 100, [2, 1, 0]),
        # A prefix that is a small share of the prompt is ignored.
        ([Candidate(16, 1, 0), OTHER], 1000, [1, 0]),
        ([Candidate(16, 1, 0), OTHER], 64, [0, 1]),
        ([], 10, []),
    ],
)
def test_the_order_of_replicas(
    candidates: list[Candidate], num_tokens: int, order: list[int]
) -> None:
    assert order == ranked(candidates, num_tokens, ROUTING)


@pytest.mark.parametrize(
    "wrong", [{"max_load": 0}, {"max_ahead": -1}, {"least_share": 2}, {"told_every_s": None}]
)
def test_invalid_routing_options_are_refused(wrong: dict) -> None:
    """The error names the option."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Routing(**wrong)


class Clock:
    """A clock whose time is set by the test."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def assignments(clock: Clock) -> Assignments:
    """A router's assignments to two replicas, which report within three seconds."""
    made = Assignments(settle_s=3, clock=clock)
    made.see(["a", "b"])
    return made


def test_prefixes_of_a_request_are_expected_until_settle_s_after_its_end(
    assignments: Assignments, clock: Clock
) -> None:
    """Afterwards the replica's report decides."""
    assignments.assign("r1", "a", [b"x", b"y"])
    assert assignments.expects("a", b"y")
    assert not assignments.expects("b", b"y")
    clock.now_s = 100
    assignments.assign("r2", "b", [])
    assert assignments.expects("a", b"y")  # It is running.
    assignments.end("r1")
    clock.now_s = 102
    assignments.assign("r3", "b", [])
    assert assignments.expects("a", b"y")  # The replica may not have reported yet.
    clock.now_s = 104
    assignments.assign("r4", "b", [])
    assert not assignments.expects("a", b"y")


def test_a_prefix_of_two_requests_is_expected_until_both_end(
    assignments: Assignments, clock: Clock
) -> None:
    assignments.assign("r1", "a", [b"x"])
    assignments.assign("r2", "a", [b"x"])
    assignments.end("r1")
    clock.now_s = 10
    assignments.assign("r3", "b", [])
    assert assignments.expects("a", b"x")


def test_a_reassigned_request_moves_its_load_and_prefixes(assignments: Assignments) -> None:
    assignments.assign("r1", "a", [b"x"], 50)
    assignments.assign("r1", "b", [b"x"], 40)
    assert (assignments.load("a"), assignments.load("b")) == (0, 1)
    assert (assignments.new_tokens("a"), assignments.new_tokens("b")) == (0, 40)
    assert assignments.expects("b", b"x")
    assert not assignments.expects("a", b"x")
    assert assignments.replica_of("r1") == "b"
    assignments.end("r1")
    assert assignments.replica_of("r1") is None


def test_the_assignments_of_a_removed_replica_are_forgotten(assignments: Assignments) -> None:
    """Later ends of its requests are ignored."""
    assignments.assign("r1", "a", [b"x"])
    assignments.see(["b", "c"])
    assert not assignments.expects("a", b"x")
    assert assignments.load("a") == 0
    assignments.end("r1")
    assignments.forget("a")
    assert assignments.load("a") == 0


def test_a_new_replica_starts_with_the_fewest_new_tokens(assignments: Assignments) -> None:
    """Otherwise it would get all new prompts at once."""
    assignments.assign("r1", "a", [], 500)
    assignments.assign("r2", "b", [], 300)
    assignments.see(["a", "b", "c"])
    assert assignments.new_tokens("c") == 300


def test_a_request_without_an_end_is_forgotten_after_ten_minutes(
    assignments: Assignments, clock: Clock
) -> None:
    assignments.assign("r1", "a", [b"x"])
    clock.now_s = 601
    assignments.assign("r2", "b", [])
    assert assignments.load("a") == 0
    assert not assignments.expects("a", b"x")


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_requests_go_to_the_replica_with_their_prefix(seed: int, num_replicas: int) -> None:
    """90% of repeated prefixes hit, and replicas get similar numbers of requests.

    200 requests with 20 prefixes, eight at a time. Replicas do not report here; the router expects
    the prefixes of the requests that it has sent.
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
