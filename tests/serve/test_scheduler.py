"""The scheduler's invariants, over random traces on a simple model of the cache.

The model counts pages and refuses a plan that does not fit, so a plan that promises memory twice
fails. How a real cache carries out plans is tested in test_engine*.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from helpers.scheduler_books import check_scheduler
from hypothesis import given
from hypothesis import strategies as st

from vmkv.errors import ConfigError
from vmkv.serve.params import SamplingParams
from vmkv.serve.request import Request, RequestState
from vmkv.serve.scheduler import (
    PreemptionCosts,
    PreemptionMethod,
    Scheduler,
    StepPlan,
)
from vmkv.step.piece import Piece

SWAPPING = PreemptionCosts(copy_bytes_per_s=1e18, mapping_s=0.0)
RECOMPUTING = PreemptionCosts(flops_per_s=1e30, mapping_s=0.0)


class ModelView:
    """A cache that stores only page counts; a page has `page_tokens` tokens."""

    page_bytes = 4096

    def __init__(self, total_pages: int, page_tokens: int, host_pages: int = 0):
        self.total_pages = total_pages
        self.page_tokens = page_tokens
        self.host_pages = host_pages
        self.resident: dict[int, int] = {}
        self.swapped: dict[int, int] = {}
        self.prefixes: dict[int, int] = {}
        self.offloaded: dict[int, int] = {}
        self.loading: set[Request] = set()

    def pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def free_pages(self) -> int:
        return (self.total_pages - sum(self.resident.values())) // 2

    def evictable_pages(self, enough_pages: int) -> int:
        return (self.total_pages - sum(self.resident.values()) - self.free_pages()) // 2

    def surplus_pages(self) -> int:
        free_pages = self.total_pages - sum(self.resident.values())
        return free_pages - self.free_pages() - self.evictable_pages(free_pages)

    def is_ready(self, request: Request) -> bool:
        if request in self.loading:
            return False
        leader = request.leader
        if leader is None or leader.output_token_ids or leader.state is RequestState.FINISHED:
            return True
        has_prompt = leader.num_submitted >= len(leader.prompt_token_ids)
        return leader.request_id in self.resident and has_prompt

    def peak_pages(self, num_tokens: int) -> int:
        return self.pages(num_tokens)

    def pages_to_begin(self, request: Request, num_tokens: int) -> int:
        return self.pages(num_tokens)

    def lacking(self, wanted: Sequence[tuple[Request, int]]) -> dict[Request, int]:
        found = {each: self.pages(to) - self.resident[each.request_id] for each, to in wanted}
        return {each: pages for each, pages in found.items() if pages > 0}

    def held_pages(self, request: Request) -> int:
        return self.resident[request.request_id]

    def cached_tokens(self, request: Request) -> tuple[int, int]:
        num_to_load = self.offloaded.get(request.request_id, 0)
        return self.prefixes.get(request.request_id, 0), num_to_load

    @property
    def can_load(self) -> bool:
        return bool(self.offloaded)

    @property
    def num_copied(self) -> int:
        return len(self.loading)

    def must_load(self, request: Request) -> bool:
        return request.num_to_load > 0 and request.request_id in self.offloaded

    def pages_to_resume(self, request: Request) -> int:
        return self.swapped[request.request_id]

    def can_swap(self, request: Request) -> bool:
        return sum(self.swapped.values()) + self.resident[request.request_id] <= self.host_pages

    def carry_out(self, plan: StepPlan) -> None:
        for request in self.loading:
            self.prefixes[request.request_id] = self.offloaded.pop(request.request_id)
        self.loading = set(plan.loading)
        for request, method in plan.preempted:
            pages = self.resident.pop(request.request_id)
            if method is PreemptionMethod.SWAP:
                self.swapped[request.request_id] = pages
                assert sum(self.swapped.values()) <= self.host_pages
        for request in plan.admitted:
            self.resident[request.request_id] = 0
        for request in plan.resumed:
            self.resident[request.request_id] = self.swapped.pop(request.request_id)
        for chunk in plan.chunks:
            target = chunk.num_past_tokens + chunk.num_new_tokens
            lacking = self.lacking([(chunk.request, target)])
            self.resident[chunk.request.request_id] += lacking.get(chunk.request, 0)
            chunk.request.num_submitted = target
        assert sum(self.resident.values()) <= self.total_pages, (
            "the plan needs more memory than there is"
        )

    def forget(self, request_id: int) -> None:
        self.resident.pop(request_id, None)
        self.swapped.pop(request_id, None)
        self.loading = {each for each in self.loading if each.request_id != request_id}


def request_of(
    request_id: int,
    num_prompt_tokens: int,
    max_total_tokens: int,
    *,
    priority: int = 0,
    leader: Request | None = None,
) -> Request:
    """A request with this many tokens, all equal."""
    prompt = [0] * num_prompt_tokens
    params = SamplingParams()
    return Request(request_id, prompt, params, priority, max_total_tokens, leader=leader)


@dataclass
class Arrival:
    step: int
    num_prompt_tokens: int
    max_new_tokens: int
    stops_after: int  # Number of output tokens before a stop token.
    priority: int
    cancelled_at: int | None
    num_offloaded_tokens: int = 0


@dataclass
class Life:
    """The progress of one request."""

    arrival: Arrival
    computed: int = 0  # Contiguous tokens computed since its memory was last dropped.
    tokens: int = 0  # Tokens that the host has read, including the prompt.
    first_step: int | None = None
    ended: str = ""
    was_preempted: int = 0
    unread: int = 0


@dataclass
class Trace:
    """Drives a scheduler one step ahead, as the engine does, and checks every plan."""

    scheduler: Scheduler
    view: ModelView
    lives: dict[int, Life] = field(default_factory=dict)
    pending: tuple[Piece, ...] = ()
    num_steps: int = 0

    def add(self, request_id: int, arrival: Arrival, leader: Request | None = None) -> None:
        if leader is not None:
            num_prompt_tokens = len(leader.prompt_token_ids)
            arrival = replace(
                arrival, num_prompt_tokens=num_prompt_tokens, priority=leader.priority
            )
        total = arrival.num_prompt_tokens + arrival.max_new_tokens
        while self.view.peak_pages(total) > self.view.total_pages:
            total -= 1
        if total <= arrival.num_prompt_tokens:
            return  # `Engine.add` refuses it.
        request = request_of(
            request_id,
            arrival.num_prompt_tokens,
            total,
            priority=arrival.priority,
            leader=leader,
        )
        if arrival.num_offloaded_tokens:
            self.view.offloaded[request_id] = arrival.num_offloaded_tokens
        self.scheduler.add(request, self.view)
        self.lives[request_id] = Life(arrival, tokens=arrival.num_prompt_tokens)
        arrival.max_new_tokens = total - arrival.num_prompt_tokens

    def end(self, request_id: int, how: str) -> None:
        self.scheduler.finish(self.scheduler.requests[request_id])
        self.view.forget(request_id)
        self.lives[request_id].ended = how

    def step(self, *, fails: bool = False) -> StepPlan:
        self.num_steps += 1
        most_mixed_tokens = self.most_mixed_tokens()
        plan = self.scheduler.plan(self.view)
        check_scheduler(self.scheduler)
        assert most_mixed_tokens is None or plan.num_tokens <= most_mixed_tokens
        if fails:
            self.give_up(plan)
            plan = StepPlan([], [], [], [], [])
        else:
            self.check(plan)
            self.view.carry_out(plan)
        unread, self.pending = self.pending, plan.chunks
        for chunk in unread:
            self.read(chunk)
        return plan

    def most_mixed_tokens(self) -> int | None:
        """The documented bound on tokens of the next step; None if there is none."""
        capacity, requests = self.scheduler, self.scheduler.requests.values()
        bound = capacity.max_num_mixed_tokens
        running = [each for each in requests if each.state is RequestState.RUNNING]
        num_decodes = sum(each.num_left == 1 for each in running)
        prompts = [each.num_left for each in requests if each not in running or each.num_left > 1]
        if bound is None or capacity.fixed_chunks or not num_decodes:
            return None
        if sum(prompts) > capacity.max_num_batched_tokens:
            return None
        # Half of a longer request may exceed the bound, up to twice the bound.
        is_long = any(
            each.num_tokens > 2 * (bound - num_decodes) for each in requests if each.num_left != 1
        )
        return max((1 + is_long) * bound, num_decodes + (bound + 1) // 2)

    def give_up(self, plan: StepPlan) -> None:
        """Undo a plan as the engine does when a growth fails: preempted requests stay preempted."""
        for request, method in plan.preempted:
            self.note_preempted(request.request_id, method)
        self.view.carry_out(StepPlan(plan.preempted, [], [], [], []))
        self.scheduler.undo(plan.chunks)
        for request in plan.admitted:
            self.scheduler.requeue(request, PreemptionMethod.RECOMPUTE)
        for request in plan.resumed:
            self.scheduler.requeue(request, PreemptionMethod.SWAP)
        check_scheduler(self.scheduler)

    def note_preempted(self, request_id: int, method: PreemptionMethod) -> None:
        life = self.lives[request_id]
        life.was_preempted += 1
        if method is PreemptionMethod.RECOMPUTE:
            life.computed = 0

    def check(self, plan: StepPlan) -> None:
        for request, method in plan.preempted:
            self.note_preempted(request.request_id, method)
        begun = plan.admitted + plan.resumed
        assert not set(begun) & {request for request, _ in plan.preempted}
        for request in plan.admitted:
            life = self.lives[request.request_id]
            life.computed = min(sum(self.view.cached_tokens(request)), life.tokens - 1)
            if life.first_step is None:
                life.first_step = self.num_steps
        assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        ids = [chunk.request.request_id for chunk in plan.chunks]
        assert len(ids) == len(set(ids)) <= self.scheduler.max_num_seqs
        assert len({chunk.request.slot for chunk in plan.chunks}) == len(ids)
        for chunk in plan.chunks:
            self.check_chunk(chunk)

    def check_chunk(self, chunk: Piece) -> None:
        life = self.lives[chunk.request.request_id]
        assert not life.ended
        assert chunk.num_past_tokens == life.computed, "a chunk does not follow the one before"
        assert chunk.num_new_tokens > 0
        life.computed += chunk.num_new_tokens
        known = life.tokens + life.unread
        assert life.computed <= known, "a chunk has tokens that do not exist yet"
        assert chunk.samples == (life.computed == known)
        if chunk.token_ids is None:
            assert chunk.num_new_tokens == 1
        else:
            assert life.computed <= life.tokens, "the host has not read a token of the chunk"
        life.unread += chunk.samples

    def read(self, chunk: Piece) -> None:
        life = self.lives[chunk.request.request_id]
        if life.ended or not chunk.samples:
            return
        request = chunk.request
        request.num_unread -= 1
        request.output_token_ids.append(0)
        life.unread -= 1
        life.tokens += 1
        num_new = life.tokens - life.arrival.num_prompt_tokens
        assert num_new <= life.arrival.max_new_tokens
        if num_new == life.arrival.stops_after:
            self.end(chunk.request.request_id, "stop")
        elif num_new == life.arrival.max_new_tokens:
            self.end(chunk.request.request_id, "length")


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 30),
        num_prompt_tokens=st.integers(1, 40),
        max_new_tokens=st.integers(1, 20),
        stops_after=st.integers(1, 30),
        priority=st.integers(-2, 2),
        cancelled_at=st.none() | st.integers(0, 40),
        num_offloaded_tokens=st.integers(0, 40),
    ),
    min_size=1,
    max_size=12,
)


@st.composite
def schedulers(draw: st.DrawFn) -> tuple[Scheduler, ModelView]:
    max_num_seqs = draw(st.integers(1, 5))
    scheduler = Scheduler(
        max_num_seqs,
        draw(st.integers(max_num_seqs, 24)),
        costs=draw(st.sampled_from([SWAPPING, RECOMPUTING])),
        max_num_mixed_tokens=draw(st.none() | st.integers(1, 12)),
        fixed_chunks=draw(st.booleans()),
    )
    scheduler.AGING_STEPS = draw(st.integers(1, 20))  # type: ignore[misc]
    return (
        scheduler,
        ModelView(
            draw(st.integers(6, 40)), draw(st.integers(1, 8)), draw(st.sampled_from([0, 10, 1000]))
        ),
    )


@given(
    arrivals=ARRIVALS,
    made=schedulers(),
    failing=st.sets(st.integers(1, 60), max_size=10),
    followers=st.sets(st.integers(1, 11)),
)
def test_every_request_ends(
    arrivals: list[Arrival],
    made: tuple[Scheduler, ModelView],
    failing: set[int],
    followers: set[int],
) -> None:
    """Whatever arrives, is cancelled or fails to grow; requests have the tokens that they want.

    `followers` are samples of the prompt of the request before them, if that is there. Each step
    also checks token and page budgets, and the order and contiguity of chunks.
    """
    trace = Trace(*made)
    # A token may cost a step, and a preemption all tokens again; far more steps are a livelock.
    for step in range(20_000):
        for request_id, arrival in enumerate(arrivals):
            if arrival.step == step:
                leader = trace.scheduler.requests.get(request_id - 1)
                leader = leader if request_id in followers else None
                trace.add(request_id, arrival, leader and (leader.leader or leader))
            life = trace.lives.get(request_id)
            if life is not None and not life.ended and arrival.cancelled_at == step:
                trace.end(request_id, "cancelled")
        trace.step(fails=step in failing)
        if step > 40 and not trace.scheduler.requests:
            break
    assert all(life.ended for life in trace.lives.values())
    for life in trace.lives.values():
        if life.ended != "cancelled":
            num_new = life.tokens - life.arrival.num_prompt_tokens
            assert num_new == min(life.arrival.stops_after, life.arrival.max_new_tokens)
    assert {} == trace.view.resident
    assert {} == trace.view.swapped
    assert 0 == trace.scheduler.num_running == trace.scheduler.num_waiting


@given(arrivals=ARRIVALS, made=schedulers())
def test_requests_of_a_priority_begin_in_order(
    arrivals: list[Arrival], made: tuple[Scheduler, ModelView]
) -> None:
    """Requests that arrive together begin in order of the mixed steps that their prompts take.

    Those whose beginning is loaded first may begin later.
    """
    trace = Trace(*made)
    for request_id, arrival in enumerate(arrivals):
        trace.add(request_id, arrival)
    while trace.scheduler.requests:
        trace.step()
    for priority in range(-2, 3):
        its = [life for life in trace.lives.values() if life.arrival.priority == priority]
        lives = [life for life in its if not life.arrival.num_offloaded_tokens]
        capacity = trace.scheduler
        lives.sort(key=lambda life: capacity.mixed_steps(life.arrival.num_prompt_tokens))
        firsts = [life.first_step for life in lives if life.first_step is not None]
        assert firsts == sorted(firsts)


@pytest.mark.parametrize("priority", [0, 1, 3])
def test_requests_of_low_priority_do_not_starve(priority: int) -> None:
    """One slot, and an endless stream of more urgent requests."""
    trace = Trace(Scheduler(1, 64), ModelView(1000, 4))
    aging_steps = trace.scheduler.AGING_STEPS = 10
    urgent = Arrival(0, 8, 2, 2, 0, None)
    trace.add(0, Arrival(0, 8, 2, 2, priority, None))
    for request_id in range(1, 200):
        trace.add(request_id, Arrival(0, 8, 2, 2, **_rest(urgent)))
        trace.step()
        if trace.lives[0].ended:
            break
    assert trace.lives[0].ended
    # Requests that arrive in time to overtake it need two steps each; one arrives per step.
    assert trace.num_steps <= 3 * (aging_steps * priority + 2)


def _prompt_tokens(trace: Trace, prompts: dict[int, int]) -> dict[int, int]:
    """The tokens of `prompts`, given by their lengths, that the next step computes."""
    chunks = trace.step().chunks
    return {
        each.request.request_id: each.num_new_tokens
        for each in chunks
        if each.num_past_tokens < prompts.get(each.request.request_id, 0)
    }


def test_short_prompts_overtake_long_ones() -> None:
    """Also long prompts that have begun, as long as these could not be done yet."""
    trace = Trace(Scheduler(8, 64, max_num_mixed_tokens=10), ModelView(1000, 4))
    trace.add(0, Arrival(0, 4, 40, 99, 0, None))
    trace.step()
    prompts = {1: 40, 2: 3, 3: 6, 4: 12, 5: 3}
    trace.add(1, Arrival(0, 40, 20, 99, 0, None))  # Four steps.
    assert {1: 19} == _prompt_tokens(trace, prompts)
    for request_id in (2, 3, 4):
        trace.add(request_id, Arrival(0, prompts[request_id], 20, 99, 0, None))
    assert {2: 3, 3: 6} == _prompt_tokens(trace, prompts)
    assert {4: 7} == _prompt_tokens(trace, prompts)
    trace.add(5, Arrival(0, 3, 20, 99, 0, None))
    assert {4: 5, 1: 2} == _prompt_tokens(trace, prompts)
    assert {1: 16} == _prompt_tokens(trace, prompts), "a late request overtakes the long prompt"
    assert {1: 3, 5: 3} == _prompt_tokens(trace, prompts)


def test_a_cached_prompt_counts_as_short() -> None:
    """A conversation's next turn overtakes a new prompt as long as the conversation."""
    trace = Trace(Scheduler(8, 64, max_num_mixed_tokens=10), ModelView(1000, 4))
    trace.add(0, Arrival(0, 4, 40, 99, 0, None))
    trace.step()
    trace.add(1, Arrival(0, 40, 20, 99, 0, None))
    trace.view.prefixes[2] = 36
    trace.add(2, Arrival(0, 40, 20, 99, 0, None))
    plan = trace.step()
    assert {0: 1, 2: 4} == {
        each.request.request_id: each.num_new_tokens for each in plan.chunks[:2]
    }


def test_a_long_prompt_is_overtaken_for_a_bounded_time() -> None:
    """By short prompts that arrive at every step, for as many steps as the long one takes."""
    trace = Trace(Scheduler(8, 64, max_num_mixed_tokens=8), ModelView(1000, 4))
    trace.add(0, Arrival(0, 4, 99, 99, 0, None))
    trace.step()
    trace.add(1, Arrival(0, 24, 2, 99, 0, None))  # Three steps.
    for request_id in range(2, 40):
        trace.add(request_id, Arrival(0, 8, 1, 1, 0, None))
        trace.step()
        if trace.lives[1].ended:
            break
    assert trace.lives[1].ended
    # Requests that overtake it arrive in three steps and take at most two each.
    assert trace.num_steps <= 1 + 3 * 2 + 3 + 2


def test_a_request_without_a_slot_does_not_shrink_chunks() -> None:
    """Although it is a short prompt that is next in the order."""
    trace = Trace(Scheduler(2, 64, max_num_mixed_tokens=10), ModelView(1000, 4))
    trace.add(0, Arrival(0, 4, 40, 99, 0, None))
    trace.step()
    prompts = {1: 60, 2: 3}
    trace.add(1, Arrival(0, 60, 5, 99, 0, None))
    assert {1: 19} == _prompt_tokens(trace, prompts)
    trace.add(2, Arrival(0, 3, 5, 99, 0, None))
    assert {1: 19} == _prompt_tokens(trace, prompts)
    assert {1: 19} == _prompt_tokens(trace, prompts)


@pytest.mark.parametrize("priority", [-1, 0])
def test_urgent_requests_overtake_a_prompt_that_has_begun(priority: int) -> None:
    """The prompt gets the remaining tokens of the step."""
    trace = Trace(Scheduler(4, 16), ModelView(1000, 4))
    prompts = {0: 40, 1: 10}
    trace.add(0, Arrival(0, 40, 4, 99, 0, None))
    assert {0: 16} == _prompt_tokens(trace, prompts)
    trace.add(1, Arrival(0, 10, 4, 99, priority, None))
    expected = {1: 10, 0: 6} if priority else {0: 16}
    assert expected == _prompt_tokens(trace, prompts)


def test_overtaking_leaves_the_pages_of_begun_prompts() -> None:
    """No request is preempted."""
    trace = Trace(Scheduler(8, 64, max_num_mixed_tokens=10), ModelView(16, 4))
    trace.add(0, Arrival(0, 4, 8, 99, 0, None))
    trace.step()
    trace.add(1, Arrival(0, 40, 3, 99, 0, None))
    trace.step()
    trace.add(2, Arrival(0, 9, 4, 99, 0, None))
    for _ in range(40):
        trace.step()
    assert all(life.ended for life in trace.lives.values())
    assert not any(life.was_preempted for life in trace.lives.values())


class FourGroups(ModelView):
    """Layers in four groups: tokens of a page take a page in each group."""

    def pages(self, num_tokens: int) -> int:
        return 4 * super().pages(num_tokens)


@pytest.mark.parametrize(("total_pages", "begins"), [(23, False), (26, False), (27, True)])
def test_overtaking_leaves_the_pages_of_decoding_requests(total_pages: int, begins: bool) -> None:
    """In this step a decoding request needs a page of each group."""
    trace = Trace(Scheduler(8, 64, max_num_mixed_tokens=8), FourGroups(total_pages, 4))
    trace.add(0, Arrival(0, 3, 8, 99, 1, None))
    trace.step()
    trace.add(1, Arrival(0, 12, 3, 99, 0, None))
    trace.step()
    trace.add(2, Arrival(0, 2, 4, 99, -1, None))
    chunks = {chunk.request.request_id: chunk for chunk in trace.step().chunks}
    assert {0: 1, 1: 5} == {each: chunks[each].num_new_tokens for each in (0, 1)}
    assert 4 == chunks[0].num_past_tokens, "the fifth token must begin a page"
    assert begins == (2 in chunks)


def _rest(arrival: Arrival) -> dict[str, object]:
    return {
        "priority": arrival.priority,
        "cancelled_at": arrival.cancelled_at,
    }


def test_more_urgent_requests_begin_first() -> None:
    """Of the waiting requests, the one with the lowest priority number begins first."""
    trace = Trace(Scheduler(1, 64), ModelView(1000, 4))
    for request_id, priority in enumerate((1, 0, 2, -1)):
        trace.add(request_id, Arrival(0, 8, 2, 2, priority, None))
    while trace.scheduler.requests:
        trace.step()
    order = sorted(trace.lives, key=lambda each: trace.lives[each].first_step or 0)
    assert [3, 1, 0, 2] == order


def test_decoding_continues_beside_a_long_prompt() -> None:
    """Each step has a chunk of the prompt and a token of the decoding request."""
    trace = Trace(Scheduler(4, 16), ModelView(1000, 4))
    trace.add(0, Arrival(0, 4, 20, 99, 0, None))
    trace.step()
    trace.add(1, Arrival(0, 100, 4, 99, 0, None))
    sizes = []
    while trace.lives[1].computed < 100:
        plan = trace.step()
        by_request = {chunk.request.request_id: chunk for chunk in plan.chunks}
        assert 1 == by_request[0].num_new_tokens
        assert by_request[0].samples
        sizes.append(by_request[1].num_new_tokens)
        assert by_request[1].samples == (sum(sizes) == 100)
    assert [15] * 6 + [10] == sizes


def _decoding(scheduler: Scheduler, num_requests: int, arrival: Arrival) -> Trace:
    """Add that many equal requests and run the step that begins them."""
    trace = Trace(scheduler, ModelView(1000, 4))
    for request_id in range(num_requests):
        trace.add(request_id, arrival)
    trace.step()
    return trace


def test_prompts_continue_beside_many_decoding_requests() -> None:
    """If decoding requests fill the bound of a mixed step, prompts get half of the bound on top."""
    trace = _decoding(Scheduler(8, 64, max_num_mixed_tokens=4), 6, Arrival(0, 4, 40, 99, 0, None))
    trace.add(6, Arrival(0, 8, 4, 99, 0, None))
    sizes = [
        {c.request.request_id: c.num_new_tokens for c in trace.step().chunks} for _ in range(2)
    ]
    assert [2] * 2 == [each[6] for each in sizes]
    assert all(each[request_id] == 1 for each in sizes for request_id in range(6))


def test_decoding_requests_count_in_a_mixed_step() -> None:
    """Beside more decoding requests than the bound, a long prompt gets half of the bound."""
    arrival = Arrival(0, 2, 60, 99, 0, None)
    trace = _decoding(Scheduler(16, 2048, max_num_mixed_tokens=8), 12, arrival)
    trace.add(12, Arrival(0, 297, 4, 99, 0, None))
    sizes = [trace.step().num_tokens for _ in range(10)]
    assert [12 + 4] * 10 == sizes


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([5], [5]),
        ([30], [15, 15]),
        ([30, 30], [15, 15, 15, 15]),
        ([30, 30, 30], [63, 15, 12]),  # 90 tokens exceed a step of 64, the remaining 27 do not.
        ([16], [8, 8]),
        ([20], [10, 10]),
        ([34], [17, 17]),
        ([36], [17, 17, 2]),  # Twice the bound at most, with the one that decodes.
        ([50], [17, 17, 16]),
        ([3, 20], [8, 10, 5]),  # The long one gets the rest of the bound, then half of its prompt.
        ([20, 3], [8, 10, 5]),  # Likewise: the shorter one goes first.
        ([4, 3, 2, 2], [8, 3]),
    ],
)
def test_long_prompts_are_computed_in_halves(prompts: list[int], expected: list[int]) -> None:
    """Short prompts share the bound of a mixed step.

    Steps are whole while no request decodes, or if more tokens are left than fit one whole step.
    """
    trace = Trace(Scheduler(8, 64, max_num_mixed_tokens=9), ModelView(1000, 4))
    trace.add(0, Arrival(0, 60, 40, 99, 0, None))
    assert [60] == [chunk.num_new_tokens for chunk in trace.step().chunks]
    for request_id, num_tokens in enumerate(prompts, 1):
        trace.add(request_id, Arrival(0, num_tokens, 20, 99, 0, None))
    sizes = []
    lengths = [0, *prompts]
    for _ in expected:
        chunks = trace.step().chunks
        parts = [each for each in chunks if each.num_past_tokens < lengths[each.request.request_id]]
        sizes.append(sum(each.num_new_tokens for each in parts))
    assert expected == sizes


@pytest.mark.parametrize(
    ("costs", "host_pages", "method"),
    [
        (SWAPPING, 1000, PreemptionMethod.SWAP),
        (SWAPPING, 0, PreemptionMethod.RECOMPUTE),
        (RECOMPUTING, 1000, PreemptionMethod.RECOMPUTE),
    ],
)
def test_the_last_request_is_preempted_once(
    costs: PreemptionCosts, host_pages: int, method: PreemptionMethod
) -> None:
    """Two requests do not fit together: the later one is preempted, and both end."""
    trace = Trace(Scheduler(2, 64, costs=costs), ModelView(10, 4, host_pages))
    trace.add(0, Arrival(0, 12, 20, 99, 0, None))
    trace.add(1, Arrival(0, 12, 20, 99, 0, None))
    methods = []
    while trace.scheduler.requests:
        plan = trace.step()
        methods += [(request.request_id, how) for request, how in plan.preempted]
        if trace.lives[1].was_preempted and not trace.lives[0].ended:
            waiting = RequestState.WAITING
            state = RequestState.SWAPPED if method is PreemptionMethod.SWAP else waiting
            assert state is trace.scheduler.requests[1].state
    assert [(1, method)] == methods
    assert ["length", "length"] == [life.ended for life in trace.lives.values()]


def test_cached_prefixes_are_not_computed() -> None:
    """A request computes at least its last token."""
    view = ModelView(1000, 4)
    view.prefixes = {0: 8, 1: 12}
    trace = Trace(Scheduler(2, 64), view)
    trace.add(0, Arrival(0, 12, 1, 1, 0, None))
    trace.add(1, Arrival(0, 12, 1, 1, 0, None))
    plan = trace.step()
    assert [(8, 4), (11, 1)] == [
        (each.num_past_tokens, each.num_new_tokens) for each in plan.chunks
    ]


def test_fixed_chunks_do_not_depend_on_other_requests() -> None:
    def cuts(num_others: int) -> list[int]:
        trace = Trace(Scheduler(4, 16, fixed_chunks=True), ModelView(1000, 4))
        for request_id in range(1, num_others + 1):
            trace.add(request_id, Arrival(0, 7 * request_id, 9, 9, 0, None))
        trace.add(0, Arrival(0, 50, 4, 9, 0, None))
        sizes = []
        while not trace.lives[0].ended:
            sizes += [
                each.num_new_tokens for each in trace.step().chunks if not each.request.request_id
            ]
        return sizes

    alone = cuts(0)
    assert [13, 13, 13, 11, 1, 1, 1] == alone
    assert all(alone == cuts(num_others) for num_others in (1, 2, 3))


def test_invalid_bounds_are_refused() -> None:
    """A step must have room for a token of every request."""
    with pytest.raises(ConfigError, match="max_num_seqs=8"):
        Scheduler(8, 7)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        Scheduler(0, 7)


def test_ended_requests_are_replaced_at_once() -> None:
    """With twelve equal requests and three slots, every decoding step is full."""
    trace = Trace(Scheduler(3, 64), ModelView(1000, 4))
    for request_id in range(12):
        trace.add(request_id, Arrival(0, 4, 5, 5, 0, None))
    sizes = Counter()
    while trace.scheduler.requests:
        sizes[len(trace.step().chunks)] += 1
    assert sizes[3] == 12 * 5 // 3


@pytest.mark.parametrize("num_tokens", [1, 100, 8192])
def test_the_cost_model_compares_bandwidth_with_arithmetic(num_tokens: int) -> None:
    """With the measured defaults, an 8B model swaps; a tiny one recomputes."""
    costs = PreemptionCosts()
    pages = -(-num_tokens // 16)
    assert PreemptionMethod.SWAP is costs.cheaper(max(16, num_tokens), pages, 2 << 20)
    tiny = PreemptionCosts(flops_per_token=1e6)
    assert PreemptionMethod.RECOMPUTE is tiny.cheaper(num_tokens, pages, 2 << 20)


def _stepped(scheduler: Scheduler, view: ModelView) -> tuple[Piece, ...]:
    plan = scheduler.plan(view)
    view.carry_out(plan)
    return plan.chunks


@pytest.mark.parametrize(("max_num_seqs", "expected"), [(16, [3, 12]), (4, [1, 4, 4])])
def test_prompts_pass_samples_that_wait_for_theirs(max_num_seqs: int, expected: list[int]) -> None:
    """Three requests of four samples each begin together; no prompt takes a sample's slot."""
    scheduler, view = Scheduler(max_num_seqs, 64), ModelView(1000, 4)
    for first in (0, 4, 8):
        leader = request_of(first, 7, 60)
        scheduler.add(leader, view)
        for request_id in range(first + 1, first + 4):
            scheduler.add(request_of(request_id, 7, 60, leader=leader), view)
    assert expected == [len(_stepped(scheduler, view)) for _ in expected]
    assert [*range(expected[-1])] == [each.request_id for each in scheduler.running]
    assert 12 == scheduler.num_running + scheduler.num_waiting


def test_tokens_of_a_request_are_prompt_and_output() -> None:
    """For any range; a whole prompt that is a tuple is not copied."""
    prompt = (3, 1, 4, 1)
    request = Request(0, prompt, SamplingParams(), output_token_ids=[5, 9, 2])
    for start in range(8):
        for end in range(start, 8):
            assert [3, 1, 4, 1, 5, 9, 2][start:end] == list(request.tokens(start, end))
    assert request.tokens(0, 4) is prompt
