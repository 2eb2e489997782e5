"""Scheduling policy: pure logic over lengths and pages, without tensors or a clock.

Requests are ordered by a rank that they get on arrival and keep:

    rank = (arrival step + steps of its uncached prompt + priority x AGING_STEPS, number)

See Note [Waiting is bounded]. A preempted request keeps its rank.

A plan serves running requests first, in order: one token for each decoding request, then chunks of
prompts. The rest of the token budget goes to waiting requests, strictly in order: if the first does
not fit, none behind it is admitted. A waiting request is admitted before a begun prompt continues
only if it ranks before it and fits completely. When memory is short, a running request preempts the
one ranked last; the last one itself stalls and keeps its memory. So the request ranked first always
makes progress, and no deadlock is possible while each request fits alone, which the caller checks.

Prompt tokens in a mixed step delay its decoding requests. `max_num_mixed_tokens` therefore bounds
such steps, unless more prompt tokens are left than one full step takes.
"""

from __future__ import annotations

import enum
import heapq
import math
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.cache.geometry import check_positive
from ..core.memory.arbiter import Rank
from ..errors import ConfigError
from ..step.piece import Piece
from ..units import div_ceil
from .request import Request, RequestState

if TYPE_CHECKING:
    from .memory_view import MemoryView

# ---- plan ----------------------------------------------------------------------------------------


class PreemptionMethod(enum.Enum):
    """How the keys and values of a preempted request are restored."""

    SWAP = "swap"  # Moved to host memory and back.
    RECOMPUTE = "recompute"  # Dropped and computed again.


#: A preempted request, and the method.
Preemption = tuple[Request, PreemptionMethod]


class StepPlan(NamedTuple):
    """Plan of one step, in the order in which it is carried out.

    Chunks are in order of rank, and empty if nothing can run; they lack rows and checkpoints.
    Prefixes of `loading` requests are copied from host memory, while the step runs.
    """

    preempted: list[Preemption]
    resumed: list[Request]
    admitted: list[Request]
    loading: list[Request]
    chunks: list[Piece]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(chunk.num_new_tokens for chunk in self.chunks)


# ---- preemption ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreemptionCosts:
    """Cost model for swapping and recomputing; the defaults were measured on one H200.

    Attributes:
        copy_bytes_per_s: Between device and pinned host memory, one way.
        flops_per_s: Of a prefill; 8B parameters x 2 x 8,192 tokens took 220 ms.
        mapping_s: Per page that is unmapped and mapped again; both methods pay for it.
        flops_per_token: Twice the model's active parameters.
    """

    copy_bytes_per_s: float = 55e9
    flops_per_s: float = 6e14
    mapping_s: float = 35e-6
    flops_per_token: float = 16e9

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0 and (name != "mapping_s" or value < 0):
                raise ConfigError(f"{name}={value!r} must be above zero")

    @classmethod
    def of(cls, model: Any) -> PreemptionCosts:
        """Costs of `model` on an H200; counting all parameters overrates mixtures of experts."""
        return cls(flops_per_token=2.0 * max(1, sum(each.numel() for each in model.parameters())))

    def cheaper(self, num_tokens: int, num_pages: int, page_bytes: int) -> PreemptionMethod:
        """Return the cheaper method; the computation's estimate neglects attention."""
        mapping_s = num_pages * self.mapping_s
        swap_s = mapping_s + 2 * num_pages * page_bytes / self.copy_bytes_per_s
        recompute_s = mapping_s + num_tokens * self.flops_per_token / self.flops_per_s
        return PreemptionMethod.SWAP if swap_s < recompute_s else PreemptionMethod.RECOMPUTE


# ---- scheduler -----------------------------------------------------------------------------------

#: A rank behind those of all requests.
_LAST: Rank = (math.inf, 0)
#: Admission keeps one page of this many free, for a few steps of growth of running requests.
_HEADROOM_DIVISOR = 100
#: Tokens of each running request for which a broker is asked ahead.
_TOKENS_AHEAD = 64
#: With more running requests than this, surplus pages are counted only every so many steps.
_LOOK_STEPS = 8
#: Requests whose prefixes are copied from host memory at a time; the bus is no faster for more.
_NUM_LOADS_MAX = 4


class Scheduler:
    """Plans steps of at most `max_num_batched_tokens` tokens of `max_num_seqs` requests.

    `max_num_mixed_tokens` is the token budget of a mixed step; see `Engine`. With `fixed_chunks`,
    prompts are cut only at multiples of a fixed length and output is recomputed one token at a
    time, so that a request's results do not depend on others. `ConfigError` if a bound is not
    positive, or a step cannot hold a token of every request.

    Attributes:
        requests: Unfinished requests by number.
        running: The requests with a slot, in order of rank.
        drafts: Guesses for the next tokens of decoding requests whose tokens were all read; each
            plan verifies those for which tokens and memory are left.
    """

    #: Number of steps by which one level of priority lets a request overtake.
    AGING_STEPS = 256

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        costs: PreemptionCosts | None = None,
        max_num_mixed_tokens: int | None = None,
        fixed_chunks: bool = False,
    ):
        check_positive("max_num_seqs", max_num_seqs)
        check_positive("max_num_batched_tokens", max_num_batched_tokens)
        if max_num_mixed_tokens is not None:
            check_positive("max_num_mixed_tokens", max_num_mixed_tokens)
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={max_num_batched_tokens} is less than one token for each "
                f"of max_num_seqs={max_num_seqs} requests; raise it, or lower max_num_seqs"
            )
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_mixed_tokens = None if fixed_chunks else max_num_mixed_tokens
        self.fixed_chunks = fixed_chunks
        self.costs = costs or PreemptionCosts()
        self.requests: dict[int, Request] = {}
        self.running: list[Request] = []
        self.drafts: Mapping[Request, Sequence[int]] = {}
        self.free_slots = list(range(max_num_seqs))  # A heap: low slots first.
        self._waiting: list[tuple[Rank, int]] = []  # A heap; may hold ended requests.
        self._num_steps = 0

    # ---- requests -------------------------------------------------------------------------

    def add(self, request: Request, view: MemoryView, arrival: Rank | None = None) -> None:
        """Add a request that fits the cache alone; `arrival` is a step and a number."""
        place, number = arrival or (self._num_steps, request.request_id)
        if request.leader is not None:
            place = request.leader.rank[0]
        else:
            place += request.priority * self.AGING_STEPS
            if self.max_num_mixed_tokens is not None:
                num_uncached = len(request.prompt_token_ids) - sum(view.cached_tokens(request))
                place += self.mixed_steps(num_uncached)
        request.rank = (place, number)
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """Queue a request at its rank."""
        self.requests[request.request_id] = request
        heapq.heappush(self._waiting, (request.rank, request.request_id))

    def finish(self, request: Request) -> None:
        """Remove a finished request and free its slot. Idempotent."""
        self.requests.pop(request.request_id, None)
        self._free_slot(request)
        request.state = RequestState.FINISHED

    def _free_slot(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            heapq.heappush(self.free_slots, request.slot)
            request.slot = -1

    @property
    def num_running(self) -> int:
        """Number of requests with a slot."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Number of requests without a slot, including swapped ones."""
        return len(self.requests) - len(self.running)

    @property
    def first_waiting(self) -> Request | None:
        """The waiting request ranked first; None if none waits."""
        while self._waiting:
            request = self.requests.get(self._waiting[0][1])
            if request is not None:
                return request
            heapq.heappop(self._waiting)
        return None

    @property
    def last_rank(self) -> Rank | None:
        """Rank of the running request ranked last, else of the swapped one; from any thread."""
        running = self.running[-1:]
        last = running[0] if running else self.last_swapped
        return last.rank if last else None

    @property
    def last_swapped(self) -> Request | None:
        """Swapped request ranked last."""
        requests = tuple(self.requests.values())  # At once: another thread may add one.
        swapped = [each for each in requests if each.state is RequestState.SWAPPED]
        return max(swapped, key=attrgetter("rank"), default=None)

    # ---- token budgets --------------------------------------------------------------------

    def chunk_tokens(self, request: Request, num_tokens_left: int) -> int:
        """Tokens of a request's next chunk within `num_tokens_left`; 0 for none now."""
        wanted = request.num_left
        if not self.fixed_chunks:
            return min(wanted, num_tokens_left)
        num_prompt = len(request.prompt_token_ids)
        if request.num_computed < num_prompt:
            # Fits with one token of every other request, so no request needs a step of its own.
            size = self.max_num_batched_tokens - self.max_num_seqs + 1
            end = min((request.num_computed // size + 1) * size, num_prompt)
            wanted = end - request.num_computed
        else:
            wanted = min(wanted, 1)
        return wanted if wanted <= num_tokens_left else 0

    def prompt_tokens_beside(
        self, num_decodes: int, num_tokens: int, begun: Sequence[Request]
    ) -> int:
        """Prompt tokens that fit a step of `num_tokens` with `num_decodes` decoding requests.

        `begun` are running requests with more than one token to compute.
        """
        left, most = num_tokens - num_decodes, self.max_num_mixed_tokens
        if most is None or not num_decodes:
            return left
        backlog = self.max_num_batched_tokens - sum([each.num_left for each in begun])
        for _, request_id in self._waiting:
            if backlog < 0:
                return left
            if request_id in self.requests:
                backlog -= self.requests[request_id].num_left
        if backlog < 0:
            return left
        first_waiting = self.first_waiting if self.free_slots else None
        candidates = [each for each in (*begun[:1], first_waiting) if each is not None]
        half = 0
        if candidates:
            # A prompt in many small chunks waits for a decode of all running requests with each of
            # them. With halves of the next prompt, or the rest of it, first tokens come 3 to 7 %
            # sooner at the 99th percentile, in replayed traffic.
            first = min(candidates, key=attrgetter("rank"))
            half = min(first.num_left, div_ceil(first.num_tokens, 2), 2 * most - num_decodes)
        return min(left, max(most - num_decodes, half, div_ceil(most, 2)))

    def mixed_steps(self, num_tokens: int) -> int:
        """Estimate the mixed steps that a prompt takes; 0 if mixed steps have no bound."""
        most = self.max_num_mixed_tokens
        return 0 if most is None else div_ceil(4 * num_tokens, 5 * most)

    def fewer_tokens(self, chunks: Sequence[Piece]) -> int:
        """Token budget smaller than `chunks`; 0 if there is none."""
        sizes = [chunk.num_new_tokens for chunk in chunks]
        if not self.fixed_chunks:
            return sum(sizes) // 2
        return max(sum(sizes) // 2, *sizes) if len(sizes) > 1 else 0

    # ---- a step ---------------------------------------------------------------------------

    def plan(
        self,
        view: MemoryView,
        *,
        max_num_batched_tokens: int | None = None,
        withheld_pages: int = 0,
        max_begun: int | None = None,
        outranked_by: Rank | None = None,
    ) -> StepPlan:
        """Plan a step, assuming that it will be carried out.

        `withheld_pages` are counted by the view but not available; `max_begun` bounds the requests
        to admit or resume; requests behind `outranked_by`, of another engine, get no pages. If the
        plan fails, `undo` its chunks, `requeue` requests that could not begin, and plan again.
        """
        self._num_steps += 1
        return _Planning(
            self,
            view,
            max_num_batched_tokens or self.max_num_batched_tokens,
            withheld_pages,
            self.max_num_seqs if max_begun is None else max_begun,
            len(self.running) <= _LOOK_STEPS or not self._num_steps % _LOOK_STEPS,
            outranked_by or _LAST,
        ).plan()

    def preempt(self, victim: Request, view: MemoryView) -> Preemption:
        """Move a running request back to waiting, by swapping if possible and cheaper."""
        method = PreemptionMethod.RECOMPUTE
        if view.can_swap(victim):
            num_pages = view.held_pages(victim)
            method = self.costs.cheaper(victim.num_computed, num_pages, view.page_bytes)
        self.requeue(victim, method)
        return victim, method

    def pages_ahead(self, view: MemoryView) -> tuple[int, int, int]:
        """Return the pages that all requests, the first alone, and running ones soon take.

        The first and the third number are beyond the pages held, the third is 0 if no request runs.
        """
        running = self.running
        growth = self.growth_ahead(view)
        num_pages = growth or div_ceil(view.total_pages, _HEADROOM_DIVISOR)
        first = heapq.nsmallest(len(self.free_slots), self._waiting)
        waiting = [self.requests[number] for _, number in first if number in self.requests]
        for each in waiting:
            if each.state is RequestState.SWAPPED:
                num_pages += view.pages_to_resume(each)
            else:
                num_pages += view.pages_to_begin(each, _length_ahead(each))
        order = sorted((*running[:1], *waiting[:1]), key=attrgetter("rank"))
        return num_pages, view.peak_pages(_length_ahead(order[0])) if order else 0, growth

    def growth_ahead(self, view: MemoryView) -> int:
        """Return the pages that running requests soon take; 0 if none runs."""
        if not self.running:
            return 0
        wanted = [(each, _length_ahead(each)) for each in self.running]
        num_pages = sum(view.lacking(wanted).values())
        return num_pages + div_ceil(view.total_pages, _HEADROOM_DIVISOR) + len(wanted)

    def pop_first(self) -> Request:
        """Remove the first waiting request, which must exist, from the queue, and return it."""
        return self.requests[heapq.heappop(self._waiting)[1]]

    def run_first(self) -> None:
        """Give a free slot to the first waiting request; both must exist."""
        request = self.pop_first()
        request.slot, request.is_set = heapq.heappop(self.free_slots), False
        request.state = RequestState.RUNNING
        insort(self.running, request, key=attrgetter("rank"))

    def undo(self, chunks: Sequence[Piece]) -> None:
        """Undo chunks of the last plan that were not submitted, and nothing else of the plan."""
        for chunk in chunks:
            if chunk.request.state is RequestState.RUNNING:
                untake(chunk)

    def rebase(self, chunk: Piece, num_past_tokens: int) -> Piece:
        """Replan a chunk whose request began with another number of tokens; it never grows."""
        request = chunk.request
        untake(chunk)
        request.num_computed = num_past_tokens
        return take(request, min(chunk.num_new_tokens, request.num_left))

    def requeue(self, request: Request, method: PreemptionMethod) -> None:
        """Move a running request back to waiting, after `undo`: preempted, or not admitted."""
        if request.state is not RequestState.RUNNING:
            return
        self._free_slot(request)
        request.is_on_device = False
        if method is PreemptionMethod.SWAP:
            request.state = RequestState.SWAPPED
        else:
            request.state, request.num_computed = RequestState.WAITING, 0
        self.enqueue(request)

    def drop_swapped(self, request: Request) -> None:
        """Make a swapped request recompute, as its memory is lost."""
        if request.state is RequestState.SWAPPED:
            request.state, request.num_computed = RequestState.WAITING, 0


# ---- planning ------------------------------------------------------------------------------------


def _length_ahead(request: Request) -> int:
    return min(request.num_tokens + _TOKENS_AHEAD, request.max_total_tokens)


def take(request: Request, num_new_tokens: int) -> Piece:
    """Plan a running request's next chunk of `num_new_tokens`."""
    samples, past = num_new_tokens == request.num_left, request.num_computed
    tokens = None if request.is_on_device else request.tokens(past, past + num_new_tokens)
    request.num_computed += num_new_tokens
    if samples:
        request.num_unread += 1
        request.is_on_device = True
    return Piece(request.slot, -1, past, num_new_tokens, tokens, samples, request=request)


def untake(chunk: Piece) -> None:
    """Undo `take`."""
    request = chunk.request
    request.num_computed -= chunk.num_new_tokens - chunk.num_drafted
    request.is_on_device = chunk.token_ids is None
    request.num_unread -= chunk.samples


def look_up(request: Request, view: MemoryView) -> None:
    """Look up how many tokens of a waiting request are cached."""
    # The last token must be computed, to sample the next one.
    num_there, request.num_to_load = view.cached_tokens(request)
    request.num_computed = min(num_there + request.num_to_load, request.num_tokens - 1)


@dataclass
class _Planning:
    """Plans one step; `looks_for_surplus` gives surplus pages of running requests to others."""

    scheduler: Scheduler
    view: MemoryView
    num_tokens: InitVar[int]
    withheld_pages: int
    max_begun: int
    looks_for_surplus: bool
    outranked_by: Rank

    def __post_init__(self, num_tokens: int) -> None:
        scheduler = self.scheduler
        self._free_pages: int | None = None  # Unknown until a request needs some.
        self._evictable_pages = 0  # Evictable pages counted so far.
        self._has_counted_evictable = self._has_counted_surplus = False  # Completely.
        self._running: list[tuple[Request, int]] = []
        wanted: list[tuple[Request, int]] = []
        begun: list[Request] = []
        for request in scheduler.running:
            # `Request.num_left`, inlined: there are hundreds of requests in each plan.
            num_there = len(request.prompt_token_ids) + len(request.output_token_ids)
            num_there += request.num_unread
            num_left = num_there - request.num_computed
            if num_there >= request.max_total_tokens:
                num_left = 0
            self._running.append((request, num_left))
            if num_left:
                wanted.append((request, request.num_computed + num_left))
                if num_left > 1:
                    begun.append(request)
        # Pages that each request lacks for all its tokens; for a decoding one, in this step.
        self._lacking = self.view.lacking(wanted)
        self._promised_pages = sum(self._lacking.values())  # For requests not planned yet.
        self._decode_tokens = min(num_tokens, len(wanted) - len(begun))
        self._prompt_tokens = scheduler.prompt_tokens_beside(self._decode_tokens, num_tokens, begun)
        self._unready: list[Request] = []  # Requests that wait for their prefix.
        self._plan = StepPlan([], [], [], [], [])

    def plan(self) -> StepPlan:
        try:
            self._plan_all()
        finally:
            for request in self._unready:
                self.scheduler.enqueue(request)
        return self._plan

    def _plan_all(self) -> None:
        running, lacking, chunks = RequestState.RUNNING, self._lacking, self._plan.chunks
        drafts = self.scheduler.drafts
        for request, num_left in self._running:
            if num_left > 1:  # A begun prompt: requests ranked before it come first.
                self._admit_before(request.rank)
            if request.state is not running or not num_left:
                continue  # Preempted by a request ranked before it, or all tokens exist.
            if num_left > 1:
                self._prefill(request)
            elif drafts and self._draft(request):
                continue
            elif self._decode_tokens:
                past = request.num_computed
                needed = lacking.get(request, 0) if lacking else 0
                if not needed or self._make_room(request, needed):
                    self._decode_tokens -= 1
                    # `take`, inlined: there are hundreds in each plan.
                    ids = None if request.is_on_device else request.tokens(past, past + 1)
                    request.num_computed = past + 1
                    request.num_unread += 1
                    request.is_on_device = True
                    chunks.append(Piece(request.slot, -1, past, 1, ids, request=request))
        self._admit_before(_LAST)

    def _draft(self, request: Request) -> bool:
        """Plan a decoding request's token with its guesses, if nobody else's memory is needed."""
        guesses, past = self.scheduler.drafts.get(request, ()), request.num_computed
        num_new = 1 + len(guesses)
        if num_new == 1 or not self._decode_tokens or len(guesses) > self._prompt_tokens:
            return False
        needed = self.view.lacking([(request, past + num_new)]).get(request, 0)
        is_behind = needed and request.rank > self.outranked_by
        if is_behind or not self._take_pages(needed):
            return False
        self._promised_pages -= self._lacking.get(request, 0)
        self._decode_tokens -= 1
        self._prompt_tokens -= len(guesses)
        # Until the step is read, as if it had decoded one token.
        request.num_computed = past + 1
        request.num_unread += 1
        request.is_on_device = False
        ids = [*request.tokens(past, past + 1), *guesses]
        its: dict[str, Any] = {"request": request, "num_drafted": len(guesses)}
        self._plan.chunks.append(Piece(request.slot, -1, past, num_new, ids, **its))
        return True

    def _admit_before(self, rank: Rank) -> None:
        """Admit or resume waiting requests that rank before `rank`, in order."""
        scheduler = self.scheduler
        while self.max_begun:
            waiting = scheduler.first_waiting
            if waiting is None or waiting.rank > min(rank, self.outranked_by):
                break
            if len(scheduler.free_slots) <= len(self._unready):
                break
            if waiting.state is RequestState.WAITING and not self.view.is_ready(waiting):
                if waiting in self.view.loading:  # Its memory is not for others.
                    self._take_pages(self.view.pages_to_begin(waiting, waiting.num_tokens))
                self._unready.append(scheduler.pop_first())
                continue
            # A request that does not fit ends admission: none behind it may pass.
            self.max_begun = self.max_begun - 1 if self._admit(waiting) else 0

    def _prefill(self, request: Request) -> None:
        num_new = self.scheduler.chunk_tokens(request, self._prompt_tokens)
        if not num_new:
            return
        needed = self.view.lacking([(request, request.num_computed + num_new)]).get(request, 0)
        if self._make_room(request, needed):
            self._prompt_tokens -= num_new
            self._plan.chunks.append(take(request, num_new))

    def _admit(self, request: Request) -> bool:
        view, scheduler = self.view, self.scheduler
        is_swapped = request.state is RequestState.SWAPPED
        # A request preempted in this step has a token that is not known yet. Without tokens left, a
        # long prompt is looked up only to load its prefix.
        if request.num_unread or not (self._prompt_tokens or view.can_load):
            return False
        if is_swapped:
            needed = view.pages_to_resume(request)
        else:
            look_up(request, view)
            num_tokens = min(request.num_tokens + 1, request.max_total_tokens)
            needed = view.pages_to_begin(request, num_tokens)
        kept, num_running = self._promised_pages, len(scheduler.running)
        if num_running:
            kept += div_ceil(view.total_pages, _HEADROOM_DIVISOR) + num_running
        num_new = scheduler.chunk_tokens(request, self._prompt_tokens)
        loads = not is_swapped and view.must_load(request)
        if loads and view.num_copied + len(self._plan.loading) >= _NUM_LOADS_MAX:
            return False
        if not (num_new or loads) or not self._take_pages(needed, kept, self.looks_for_surplus):
            return False
        if loads:
            self._plan.loading.append(request)
            self._unready.append(scheduler.pop_first())
            return True
        scheduler.run_first()
        (self._plan.resumed if is_swapped else self._plan.admitted).append(request)
        self._prompt_tokens -= num_new
        self._plan.chunks.append(take(request, num_new))
        return True

    def _make_room(self, request: Request, num_pages: int) -> bool:
        self._promised_pages -= num_pages
        if num_pages and request.rank > self.outranked_by:
            return False
        while not self._take_pages(num_pages):
            self.max_begun = 0  # A request must be preempted, or stall: no other may begin.
            victim = self.scheduler.running[-1]
            if victim is request:
                return False
            held_pages = self.view.held_pages(victim)
            self._plan.preempted.append(self.scheduler.preempt(victim, self.view))
            self._free_pages = (self._free_pages or 0) + held_pages
        return True

    def _take_pages(
        self, num_pages: int, kept_pages: int = 0, looks_for_surplus: bool = True
    ) -> bool:
        wanted, free_pages = num_pages + kept_pages, self._free_pages
        if free_pages is None:
            free_pages = self.view.free_pages() - self.withheld_pages
        missing_pages = wanted - free_pages
        if missing_pages > 0 and not self._has_counted_evictable:
            enough_pages = self._evictable_pages + missing_pages
            found_pages = self.view.evictable_pages(enough_pages)
            free_pages += found_pages - self._evictable_pages
            self._evictable_pages = found_pages
            self._has_counted_evictable = found_pages < enough_pages
        if wanted > free_pages and looks_for_surplus and not self._has_counted_surplus:
            self._has_counted_surplus = True
            free_pages += self.view.surplus_pages()
        has_free = wanted <= free_pages
        self._free_pages = free_pages - num_pages if has_free else free_pages
        return has_free
