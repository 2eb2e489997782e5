"""A step's plan: chunks, the request queue, preemption costs, and the planner itself.

`CacheView` is what planning reads of the cache. Nothing here touches tensors, or the cache itself.
"""

from __future__ import annotations

import enum
import heapq
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..core.cache.geometry import check_positive
from ..errors import ConfigError, InternalError
from ..units import div_ceil
from .request import Request, RequestState

# ---- plan ----------------------------------------------------------------------------------------


class PreemptionMethod(enum.Enum):
    """How the keys and values of a preempted request are restored."""

    SWAP = "swap"  # Moved to host memory and back.
    RECOMPUTE = "recompute"  # Dropped and computed again.

    @property
    def leaves(self) -> RequestState:
        """State of the request after the preemption."""
        return RequestState.SWAPPED if self is self.SWAP else RequestState.WAITING


class PlannedChunk(NamedTuple):
    """Scheduled chunk of one request.

    `from_device` is whether its one new token is the last one sampled in its slot; `samples` is
    whether a token is sampled after the chunk.
    """

    request_id: int
    slot: int
    num_past_tokens: int
    num_new_tokens: int
    from_device: bool
    samples: bool

    @property
    def num_tokens(self) -> int:
        """Tokens in the row after the step."""
        return self.num_past_tokens + self.num_new_tokens


class Preemption(NamedTuple):
    """A preempted request and the method."""

    request_id: int
    method: PreemptionMethod


@dataclass(frozen=True)
class StepPlan:
    """Plan of one step, carried out in the order of the attributes.

    Swapped requests are resumed before others are admitted and take rows. Chunks are in order of
    rank, and empty if nothing can run.
    """

    preempted: tuple[Preemption, ...] = ()
    resumed: tuple[int, ...] = ()
    admitted: tuple[int, ...] = ()
    chunks: tuple[PlannedChunk, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(chunk.num_new_tokens for chunk in self.chunks)


# ---- cache view ----------------------------------------------------------------------------------


class CacheView(Protocol):
    """The scheduler's view of the cache. Pages are the pool's, over all layer groups."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""

    @property
    def total_pages(self) -> int:
        """Pages in the cache's budget."""

    def free_pages(self) -> int:
        """Pages available to growth now, without eviction."""

    def evictable_pages(self, enough_pages: int) -> int:
        """Pages that eviction can free. Counting, which is slow, stops at `enough_pages`."""

    def surplus_pages(self) -> int:
        """Pages that open sequences hold beyond their length. Costs a look at each of them."""

    def peak_pages(self, num_tokens: int) -> int:
        """Most pages a sequence holds at once while it grows from empty to `num_tokens`."""

    def lacking(self, wanted: Iterable[tuple[int, int]]) -> Mapping[int, int]:
        """Pages that sequences lack for `(request_id, num_tokens)`, by request, if above 0."""

    def held_pages(self, request_id: int) -> int:
        """Pages that become free when the request's sequence ends."""

    def pages_to_begin(self, request_id: int, num_tokens: int) -> int:
        """Pages that a new sequence of the request takes for `num_tokens`, without shared pages."""

    def is_ready(self, request_id: int) -> bool:
        """Whether the request may begin; false while a prompt that it shares is being computed."""

    def cached_tokens(self, request_id: int) -> int:
        """Leading tokens that a new sequence of the request would find computed."""

    def pages_to_resume(self, request_id: int) -> int:
        """Pages that resuming a swapped request takes."""

    def can_swap(self, request_id: int) -> bool:
        """Whether the request's sequence can move to host memory now."""


# ---- request queue -------------------------------------------------------------------------------


class RequestQueue:
    """Unfinished requests by number, and the running ones (which hold a slot) in order of rank."""

    def __init__(self, max_num_seqs: int):
        self.requests: dict[int, Request] = {}
        self.running: list[Request] = []
        self._max_num_seqs = max_num_seqs
        self._waiting: list[tuple[tuple[int, int], int]] = []  # A heap; may hold ended requests.
        self._free_slots = list(range(max_num_seqs))  # A heap: low slots first.

    @property
    def has_free_slot(self) -> bool:
        """Whether one more request may run."""
        return bool(self._free_slots)

    @property
    def first_waiting(self) -> Request | None:
        """The waiting request ranked first; None if none waits."""
        while self._waiting:
            rank, request_id = self._waiting[0]
            request = self.requests.get(request_id)
            if request is not None and request.rank == rank:
                return request
            heapq.heappop(self._waiting)
        return None

    def waiting(self) -> Iterator[Request]:
        """Waiting requests, in no order."""
        return (self.requests[number] for _, number in self._waiting if number in self.requests)

    def add(self, request: Request) -> None:
        """Add a waiting request."""
        self.requests[request.request_id] = request
        heapq.heappush(self._waiting, (request.rank, request.request_id))

    def remove(self, request_id: int) -> None:
        """Remove a finished request and free its slot. Idempotent."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self._leave(request)
            request.state = RequestState.FINISHED

    def run_first(self) -> None:
        """Give a free slot to the first waiting request; both must exist."""
        request = self.requests[heapq.heappop(self._waiting)[1]]
        request.slot = heapq.heappop(self._free_slots)
        request.state = RequestState.RUNNING
        insort(self.running, request, key=lambda each: each.rank)

    def requeue(self, request: Request, state: RequestState) -> None:
        """Move a running request back to waiting; its memory is on the host (`SWAPPED`) or lost."""
        self._leave(request)
        request.is_on_device = False
        self.wait_as(request, state)
        self.add(request)

    def wait_as(self, request: Request, state: RequestState) -> None:
        """Set the state of a waiting request, `WAITING` or `SWAPPED`."""
        request.state = state
        if state is RequestState.WAITING:
            request.num_computed = 0

    def _leave(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            heapq.heappush(self._free_slots, request.slot)
            request.slot = -1

    def check(self) -> None:
        """Check the invariants between steps, raising `InternalError`."""
        slots = sorted([request.slot for request in self.running] + self._free_slots)
        ranks = [request.rank for request in self.running]
        running = {request.request_id for request in self.running}
        queued = {request_id for _, request_id in self._waiting}
        requests = self.requests.values()
        claims = {
            "every slot is free or one request's": slots == list(range(self._max_num_seqs)),
            "running requests are in order": ranks == sorted(ranks),
            "who has a slot runs": running
            == {each.request_id for each in requests if each.state is RequestState.RUNNING},
            "who does not run waits": queued & self.requests.keys()
            == self.requests.keys() - running,
            "nothing is computed before it exists": all(
                0 <= each.num_computed <= each.num_tokens for each in requests
            ),
        }
        for claim, holds in claims.items():
            if not holds:
                raise InternalError(f"the scheduler's books are wrong; not so: {claim}")


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
        for name in ("copy_bytes_per_s", "flops_per_s", "flops_per_token"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be above zero")
        if self.mapping_s < 0:
            raise ConfigError(f"mapping_s={self.mapping_s!r} must not be negative")

    @classmethod
    def of(cls, model: Any) -> PreemptionCosts:
        """Costs of `model` on an H200; counting all parameters overrates mixtures of experts."""
        return cls(flops_per_token=2.0 * max(1, sum(each.numel() for each in model.parameters())))

    def swap_s(self, num_bytes: int, num_pages: int) -> float:
        """Seconds to move this much memory out and back in."""
        return 2 * num_bytes / self.copy_bytes_per_s + num_pages * self.mapping_s

    def recompute_s(self, num_tokens: int, num_pages: int) -> float:
        """Seconds to compute the tokens again, neglecting attention."""
        return num_tokens * self.flops_per_token / self.flops_per_s + num_pages * self.mapping_s

    def preemption(self, victim: Request, view: CacheView) -> Preemption:
        """Choose the method to preempt `victim`: swapping if possible and cheaper."""
        method, request_id = PreemptionMethod.RECOMPUTE, victim.request_id
        if view.can_swap(request_id):
            pages = view.held_pages(request_id)
            method = self.cheaper(victim.num_computed, pages, view.page_bytes)
        return Preemption(request_id, method)

    def cheaper(self, num_tokens: int, num_pages: int, page_bytes: int) -> PreemptionMethod:
        """Return the cheaper method."""
        swap_s = self.swap_s(num_pages * page_bytes, num_pages)
        if swap_s < self.recompute_s(num_tokens, num_pages):
            return PreemptionMethod.SWAP
        return PreemptionMethod.RECOMPUTE


# ---- planning ------------------------------------------------------------------------------------

#: Admission keeps one page of this many free, for a few steps of growth of running requests.
_HEADROOM_DIVISOR = 100


@dataclass(frozen=True)
class Capacity:
    """Bounds of a step; see `Scheduler` for the fields and errors."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int | None = None
    fixed_chunks: bool = False

    def __post_init__(self) -> None:
        check_positive("max_num_seqs", self.max_num_seqs)
        check_positive("max_num_batched_tokens", self.max_num_batched_tokens)
        if self.max_num_mixed_tokens is not None:
            check_positive("max_num_mixed_tokens", self.max_num_mixed_tokens)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than one token for "
                f"each of max_num_seqs={self.max_num_seqs} requests; raise it, or lower "
                "max_num_seqs"
            )

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
        self, num_decodes: int, num_tokens: int, begun: Sequence[Request], queue: RequestQueue
    ) -> int:
        """Prompt tokens that fit a step of `num_tokens` with `num_decodes` decoding requests.

        `max_num_mixed_tokens` bounds a step that decodes, unless more prompt tokens are left than a
        full step takes. `begun` are running requests with more than one token to compute.
        """
        left, most = num_tokens - num_decodes, self.max_num_mixed_tokens
        if most is None or not num_decodes or self.fixed_chunks:
            return left
        if self._has_backlog(begun, queue):
            return left
        waiting = queue.first_waiting if queue.has_free_slot else None
        next_ones = [each for each in (*begun[:1], waiting) if each is not None]
        first = min(next_ones, key=lambda each: each.rank, default=None)
        half = min(_half_of_prompt(first), 2 * most - num_decodes)
        return min(left, max(most - num_decodes, half, div_ceil(most, 2)))

    def mixed_steps(self, num_tokens: int) -> int:
        """Estimate the mixed steps that a prompt takes; 0 if mixed steps have no bound."""
        most = None if self.fixed_chunks else self.max_num_mixed_tokens
        return 0 if most is None else div_ceil(4 * num_tokens, 5 * most)

    def _has_backlog(self, begun: Iterable[Request], queue: RequestQueue) -> bool:
        left = self.max_num_batched_tokens - sum(request.num_left for request in begun)
        for request in queue.waiting():
            if left < 0:
                break
            left -= request.num_left
        return left < 0


def _half_of_prompt(first: Request | None) -> int:
    """Tokens that compute half of the next prompt, or the rest of it.

    A prompt in many small chunks waits for a decode of all running requests with each of them. With
    halves, first tokens come 3 to 7 % sooner at the 99th percentile, in replayed traffic.
    """
    return 0 if first is None else min(first.num_left, div_ceil(first.num_tokens, 2))


def take(request: Request, num_new_tokens: int, num_left: int) -> PlannedChunk:
    """Plan a running request's next chunk of `num_new_tokens`, of `num_left` to compute."""
    samples = num_new_tokens == num_left
    from_device = request.is_on_device and not request.params.needs_host_tokens
    past = request.num_computed
    # Hundreds per plan: `tuple.__new__` takes a third of the time of the class's call.
    chunk = tuple.__new__(
        PlannedChunk,
        (request.request_id, request.slot, past, num_new_tokens, from_device, samples),
    )
    request.num_computed += num_new_tokens
    if samples:
        request.num_unread += 1
        request.is_on_device = True
    return chunk


def untake(request: Request, chunk: PlannedChunk) -> None:
    """Undo `take`."""
    request.num_computed -= chunk.num_new_tokens
    request.is_on_device = chunk.from_device
    request.num_unread -= chunk.samples


def look_up(request: Request, view: CacheView) -> None:
    """Look up how many tokens of a waiting request are cached; the last one is always computed."""
    # The last token must be computed, to sample the next one.
    request.num_computed = min(view.cached_tokens(request.request_id), request.num_tokens - 1)


class StepPlanning:
    """Plans one step.

    Every decoding request has its token reserved first, so that prompts never delay decoding; pages
    are given out in order of rank. `withheld_pages` are counted by `view` but turned out not to be
    there. At most `max_begun` requests are admitted or resumed. `looks_for_surplus` lets waiting
    requests have the surplus pages of running ones, which are slow to count and mostly needed soon.
    """

    def __init__(
        self,
        queue: RequestQueue,
        capacity: Capacity,
        costs: PreemptionCosts,
        view: CacheView,
        num_tokens: int,
        withheld_pages: int,
        max_begun: int,
        looks_for_surplus: bool,
        outranked_by: tuple[int, int] | None = None,
    ):
        self._queue = queue
        self._capacity = capacity
        self._costs = costs
        self._view = view
        self._free_pages = view.free_pages() - withheld_pages
        self._max_begun = max_begun
        self._evictable_pages = 0  # Evictable pages counted so far.
        self._has_counted_evictable = self._has_counted_surplus = False  # Completely.
        self._looks_for_surplus = looks_for_surplus
        self._outranked_by = outranked_by
        self._running = [(request, request.num_left) for request in queue.running]
        begun = [request for request, num_left in self._running if num_left > 1]
        # Pages that each request lacks for all its tokens; for a decoding one, in this step.
        self._lacking = view.lacking(
            [(each.request_id, each.num_computed + left) for each, left in self._running if left]
        )
        self._promised_pages = sum(self._lacking.values())  # For requests not planned yet.
        num_decodes = sum([num_left == 1 for _, num_left in self._running])
        self._decode_tokens = min(num_tokens, num_decodes)
        self._prompt_tokens = capacity.prompt_tokens_beside(
            self._decode_tokens, num_tokens, begun, queue
        )
        self._is_short = False  # Whether a request must be preempted, or stall.
        self._preempted: list[Preemption] = []
        self._admitted: list[int] = []
        self._resumed: list[int] = []
        self._chunks: list[PlannedChunk] = []

    def plan(self) -> StepPlan:
        """Make the plan."""
        running, lacking, chunks = RequestState.RUNNING, self._lacking, self._chunks
        for request, num_left in self._running:
            if num_left > 1:  # A begun prompt: requests ranked before it come first.
                self._admit_before(request)
            if request.state is not running:
                continue  # Preempted by a request ranked before it.
            if request.num_unread and request.params.needs_host_tokens:
                continue
            if num_left != 1:
                self._prefill(request)
            elif self._decode_tokens:
                needed = lacking.get(request.request_id, 0) if lacking else 0
                if not needed or self._make_room(request, needed):
                    self._decode_tokens -= 1
                    chunks.append(take(request, 1, 1))
        self._admit_before(None)
        return StepPlan(
            tuple(self._preempted),
            tuple(self._resumed),
            tuple(self._admitted),
            tuple(self._chunks),
        )

    def _admit_before(self, request: Request | None) -> None:
        """Admit or resume waiting requests that rank before `request`, in order, or all."""
        while self._max_begun and not self._is_short and self._queue.has_free_slot:
            waiting = self._queue.first_waiting
            if waiting is None or (request is not None and waiting.rank > request.rank):
                break
            if self._outranked_by is not None and waiting.rank > self._outranked_by:
                break
            # A request that does not fit ends admission: none behind it may pass.
            self._max_begun = self._max_begun - 1 if self._admit(waiting) else 0

    def _prefill(self, request: Request) -> None:
        num_new = self._capacity.chunk_tokens(request, self._prompt_tokens)
        if not num_new:
            return
        target = (request.request_id, request.num_computed + num_new)
        needed = self._view.lacking([target]).get(request.request_id, 0)
        if self._make_room(request, needed):
            self._prompt_tokens -= num_new
            self._chunks.append(take(request, num_new, request.num_left))

    def _admit(self, request: Request) -> bool:
        view = self._view
        is_swapped = request.state is RequestState.SWAPPED
        if request.num_unread:
            return False  # Preempted in this step: its last token is not known yet.
        if not self._prompt_tokens:
            return False  # Avoids a lookup of a long prompt in vain.
        if not is_swapped and not view.is_ready(request.request_id):
            return False
        if is_swapped:
            needed = view.pages_to_resume(request.request_id)
        else:
            look_up(request, view)
            needed = view.pages_to_begin(
                request.request_id, min(request.num_tokens + 1, request.max_total_tokens)
            )
        kept, num_running = self._promised_pages, len(self._queue.running)
        if num_running:
            kept += div_ceil(view.total_pages, _HEADROOM_DIVISOR) + num_running
        num_new = self._capacity.chunk_tokens(request, self._prompt_tokens)
        if not num_new:
            return False
        if not self._has_free(needed + kept, looks_for_surplus=self._looks_for_surplus):
            return False
        self._queue.run_first()
        (self._resumed if is_swapped else self._admitted).append(request.request_id)
        self._free_pages -= needed
        self._prompt_tokens -= num_new
        self._chunks.append(take(request, num_new, request.num_left))
        return True

    def _make_room(self, request: Request, num_pages: int) -> bool:
        """Take pages for a request, preempting requests ranked behind it; returns success."""
        self._promised_pages -= num_pages
        if num_pages and self._outranked_by is not None and request.rank > self._outranked_by:
            return False
        while not self._has_free(num_pages):
            self._is_short = True
            victim = self._queue.running[-1]
            if victim is request:
                return False
            self._preempt(victim)
        self._free_pages -= num_pages
        return True

    def _preempt(self, victim: Request) -> None:
        preemption = self._costs.preemption(victim, self._view)
        self._queue.requeue(victim, preemption.method.leaves)
        self._free_pages += self._view.held_pages(victim.request_id)
        self._preempted.append(preemption)

    def _has_free(self, num_pages: int, *, looks_for_surplus: bool = True) -> bool:
        missing_pages = num_pages - self._free_pages
        if missing_pages > 0 and not self._has_counted_evictable:
            enough_pages = self._evictable_pages + missing_pages
            found_pages = self._view.evictable_pages(enough_pages)
            self._free_pages += found_pages - self._evictable_pages
            self._evictable_pages = found_pages
            self._has_counted_evictable = found_pages < enough_pages
        if num_pages > self._free_pages and looks_for_surplus and not self._has_counted_surplus:
            self._has_counted_surplus = True
            self._free_pages += self._view.surplus_pages()
        return num_pages <= self._free_pages
