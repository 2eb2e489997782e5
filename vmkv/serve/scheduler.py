"""Scheduling policy: pure logic over lengths and pages, without tensors or a clock.

Requests are ordered by a rank that they get on arrival and keep:

    rank = (arrival step + steps of its prompt + priority x aging_steps, number)

Within a priority this is first come, first served, except that a request with fewer steps of prompt
may overtake if mixed steps are bounded. One level of priority overtakes requests that came at most
`aging_steps` steps earlier, give or take the prompts' difference. See Note [Waiting is bounded]. A
preempted request keeps its rank.

A plan serves running requests first, in order: one token for each decoding request, then chunks of
prompts. The rest of the token budget goes to waiting requests, strictly in order: if the first does
not fit, none behind it is admitted. A waiting request is admitted before a begun prompt continues
only if it ranks before it and fits completely. When memory is short, a running request preempts the
one ranked last; the last one itself stalls and keeps its memory. So the request ranked first always
makes progress, and no deadlock is possible while each request fits alone, which `add` checks.

Prompt tokens in a mixed step delay its decoding requests. `max_num_mixed_tokens` therefore bounds
such steps, unless more prompt tokens are left than one full step takes: then the time to the first
token matters more, and steps are as large as possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..core.cache.geometry import check_positive
from ..errors import ConfigError
from .planning import (
    CacheView,
    Capacity,
    PlannedChunk,
    Preemption,
    PreemptionCosts,
    PreemptionMethod,
    RequestQueue,
    StepPlan,
    StepPlanning,
    look_up,
    take,
    untake,
)
from .request import Request, RequestState

#: Steps for which memory is made ready: memory retired in a step is free two steps later.
_STEPS_AHEAD = 3
#: With more running requests than this, surplus pages are counted only every so many steps.
_LOOK_STEPS = 8


class Scheduler:
    """Plans steps.

    Args:
        max_num_seqs: Maximum number of running requests.
        max_num_batched_tokens: Token budget of a step.
        aging_steps: Number of steps by which one level of priority lets a request overtake.
        costs: Cost model of preemption.
        max_num_mixed_tokens: Token budget of a mixed step; see `Engine`. Ignored with fixed chunks.
        fixed_chunks: Cut prompts only at multiples of a fixed length and recompute output one token
            at a time, so that a request's results do not depend on others.

    Raises:
        ConfigError: A bound is not positive, or a step cannot hold a token of every request.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        aging_steps: int = 256,
        costs: PreemptionCosts | None = None,
        max_num_mixed_tokens: int | None = None,
        fixed_chunks: bool = False,
    ):
        self.capacity = Capacity(
            max_num_seqs, max_num_batched_tokens, max_num_mixed_tokens, fixed_chunks
        )
        check_positive("aging_steps", aging_steps)
        self._aging_steps = aging_steps
        self._costs = costs or PreemptionCosts()
        self._queue = RequestQueue(max_num_seqs)
        self._num_steps = 0
        self._looked_up_id: int | None = None  # First waiting request at the last lookup.

    # ---- requests -------------------------------------------------------------------------

    def add(
        self, request: Request, view: CacheView, arrival: tuple[int, int] | None = None
    ) -> None:
        """Add a request, numbered above all earlier ones.

        `arrival` is a step and a number; by default this scheduler's step and the request's number.
        `ConfigError` if the prompt is empty or leaves no room for a token, or the request would not
        fit alone; nothing has changed then.
        """
        num_prompt, most = len(request.prompt_token_ids), request.max_total_tokens
        check_positive("num_prompt_tokens", num_prompt)
        if most <= num_prompt:
            raise ConfigError(
                f"a prompt of {num_prompt} tokens leaves no room for an answer in {most} tokens"
            )
        needed, total = view.peak_pages(most), view.total_pages
        if needed > total:
            raise ConfigError(
                f"a request of {most} tokens (prompt and max_tokens) needs {needed} "
                f"pages and the whole cache has {total}; shorten it, or raise the budget"
            )
        step, number = arrival or (self._num_steps, request.request_id)
        place = step + request.priority * self._aging_steps
        request.rank = (place + self.capacity.mixed_steps(num_prompt), number)
        self._queue.add(request)

    def finish(self, request_id: int) -> None:
        """Remove a finished request and free its slot. Idempotent."""
        self._queue.remove(request_id)

    @property
    def requests(self) -> Mapping[int, Request]:
        """Unfinished requests by number."""
        return self._queue.requests

    @property
    def num_running(self) -> int:
        """Number of requests with a slot."""
        return len(self._queue.running)

    @property
    def num_waiting(self) -> int:
        """Number of requests without a slot, including swapped ones."""
        return len(self._queue.requests) - len(self._queue.running)

    @property
    def has_unfinished(self) -> bool:
        """Whether there is any request."""
        return bool(self._queue.requests)

    @property
    def first(self) -> Request | None:
        """First of the running requests, or else of the waiting ones."""
        return self._queue.running[0] if self._queue.running else self._queue.first_waiting

    @property
    def last_rank(self) -> tuple[int, int] | None:
        """Rank of the running request ranked last; None if none runs. Callable from any thread."""
        last = self._queue.running[-1:]
        return last[0].rank if last else None

    @property
    def last_swapped(self) -> Request | None:
        """Swapped request ranked last."""
        requests = self._queue.requests.values()
        swapped = (each for each in requests if each.state is RequestState.SWAPPED)
        return max(swapped, key=lambda each: each.rank, default=None)

    def fewer_tokens(self, chunks: Sequence[PlannedChunk]) -> int:
        """Token budget smaller than `chunks`; 0 if there is none. A fixed chunk must still fit."""
        num_tokens = sum(chunk.num_new_tokens for chunk in chunks)
        if not self.capacity.fixed_chunks:
            return num_tokens // 2
        largest = max(chunk.num_new_tokens for chunk in chunks)
        return max(num_tokens // 2, largest) if len(chunks) > 1 else 0

    # ---- a step ---------------------------------------------------------------------------

    def plan(
        self,
        view: CacheView,
        *,
        max_num_batched_tokens: int | None = None,
        withheld_pages: int = 0,
        max_begun: int | None = None,
        outranked_by: tuple[int, int] | None = None,
    ) -> StepPlan:
        """Plan a step, assuming that it will be carried out.

        `max_num_batched_tokens` lowers the budget after the device ran out of memory;
        `withheld_pages` are counted by the view but not available; `max_begun` bounds the requests
        to admit or resume. Requests ranked behind `outranked_by`, of another engine, get no pages.
        If the plan fails, `undo` its chunks, `requeue` requests that could not begin, and plan
        again.
        """
        self._num_steps += 1
        num_tokens = max_num_batched_tokens or self.capacity.max_num_batched_tokens
        return StepPlanning(
            self._queue,
            self.capacity,
            self._costs,
            view,
            num_tokens,
            withheld_pages,
            self.capacity.max_num_seqs if max_begun is None else max_begun,
            looks_for_surplus=self.num_running <= _LOOK_STEPS or not self._num_steps % _LOOK_STEPS,
            outranked_by=outranked_by,
        ).plan()

    def preempt_last(self, view: CacheView) -> Preemption:
        """Preempt the running request ranked last, which must exist. Between plans only."""
        victim = self._queue.running[-1]
        preemption = self._costs.preemption(victim, view)
        self._queue.requeue(victim, preemption.method.leaves)
        return preemption

    def upcoming(
        self, chunks: Sequence[PlannedChunk], view: CacheView
    ) -> tuple[list[tuple[int, int]], int, bool]:
        """Predict what the next steps need, given the chunks submitted last.

        Returns the targets `(request_id, num_tokens)` of running requests, the tokens of the
        request that begins or resumes next, and whether that one begins with nothing cached. Costs
        some 0.2 µs per chunk, plus planning while prompts are computed or slots are short.
        """
        queue, requests = self._queue, self._queue.requests
        wanted = [
            (request_id, min(past + new + _STEPS_AHEAD, requests[request_id].max_total_tokens))
            for request_id, _, past, new, _, samples in chunks
            if samples
        ]
        is_cut = len(wanted) < len(chunks)  # A prompt continues: the step was full.
        first = queue.first_waiting
        if not is_cut and first is None:
            return wanted, 0, False
        num_tokens = self.capacity.max_num_batched_tokens
        begun = [request for request in queue.running if request.num_left > 1]
        left = self.capacity.prompt_tokens_beside(len(wanted), num_tokens, begun, queue)
        for request in begun if is_cut else ():
            num_new = self.capacity.chunk_tokens(request, left)
            left -= num_new
            wanted.append((request.request_id, request.num_computed + num_new))
        if first is None or not view.is_ready(first.request_id):
            return wanted, 0, False
        if first.state is RequestState.WAITING and first.request_id != self._looked_up_id:
            look_up(first, view)
            self._looked_up_id = first.request_id
        num_new = self.capacity.chunk_tokens(first, left)
        if num_new and first.state is RequestState.SWAPPED:
            num_new += first.num_computed
        return wanted, num_new, not first.num_computed

    def undo(self, chunks: Sequence[PlannedChunk]) -> None:
        """Undo chunks of the last plan that were not submitted, and nothing else of the plan."""
        for chunk in chunks:
            request = self._queue.requests.get(chunk.request_id)
            if request is not None and request.state is RequestState.RUNNING:
                untake(request, chunk)

    def rebase(self, chunk: PlannedChunk, num_past_tokens: int) -> PlannedChunk:
        """Replan a chunk whose request began with another number of tokens; it never grows."""
        request = self._queue.requests[chunk.request_id]
        untake(request, chunk)
        request.num_computed = num_past_tokens
        return take(request, min(chunk.num_new_tokens, request.num_left), request.num_left)

    def requeue(self, request_id: int, method: PreemptionMethod) -> None:
        """Move a running request back to waiting, after `undo`: preempted, or not admitted."""
        request = self._queue.requests.get(request_id)
        if request is not None and request.state is RequestState.RUNNING:
            self._queue.requeue(request, method.leaves)

    def drop_swapped(self, request_id: int) -> None:
        """Make a swapped request recompute, as its memory is lost."""
        request = self._queue.requests.get(request_id)
        if request is not None and request.state is RequestState.SWAPPED:
            self._queue.wait_as(request, RequestState.WAITING)

    def check(self) -> None:
        """Check the invariants between steps, raising `InternalError`."""
        self._queue.check()
