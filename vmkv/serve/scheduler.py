"""Who runs in the next step: pure logic over lengths and pages, no tensors, no clock.

Every request has a place in one order, given when it arrives and kept for life:

    rank = (arrival step + steps of its prompt + priority x aging_steps, number)

So inside a priority it is first come, first served, but for long prompts where mixed steps are
bounded (see below): who could be done first, by the steps that its whole prompt would take alone,
overtakes. A more urgent request overtakes those that came at most `aging_steps` steps earlier per
level of priority, more or less by the difference of their prompts. Nobody else does: see Note
[Waiting is bounded]. A preempted request keeps its rank and comes back before all that are ranked
after it.

Requests that run come first, in order, one token of each that decodes and then chunks of
prompts; what is left of the step's tokens goes to those that wait, strictly in order: if the
first does not fit, nobody behind it may pass. Only who is ranked before a prompt that has begun
begins before that goes on, if there is room for all of it. When memory is short, a running request
takes that of the one ranked last; the one ranked last itself stalls and keeps what it has. So the
best-placed request always goes on, everything ends, and nothing can deadlock as long as each
request fits alone, which `add` makes sure of.

Every prompt token in a step keeps those waiting who decode in it. So where that is wanted mixed
steps are smaller, as long as one whole step could take all prompt tokens that are left; where more
are left, those who wait for their first token have the longer wait, and steps are as large as they
may be.
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

#: For so many steps memory is made ready: what is retired while one runs is free two steps later.
_STEPS_AHEAD = 3
#: In one of so many steps, who waits may have what more than as many that run hold in excess.
_LOOK_STEPS = 8


class Scheduler:
    """Decides each step.

    Args:
        max_num_seqs: Requests that run at once at most.
        max_num_batched_tokens: Tokens of a step at most.
        aging_steps: By how many steps one level of priority lets a request overtake.
        costs: What decides between swapping and computing again.
        max_num_mixed_tokens: Tokens of a mixed step at most: see `Engine`. None for no such bound;
            with fixed chunks there is none.
        fixed_chunks: Cut every prompt at multiples of a fixed length and nowhere else, and compute
            again what was generated one token at a time, as it was: what a request computes then
            never depends on the others.

    Attributes:
        capacity: The bounds.

    Raises:
        ConfigError: A bound is not positive, or a step could not hold a token of every request.
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
        self._looked_up_id: int | None = None  # Who waited first when `upcoming` last looked.

    # ---- requests -------------------------------------------------------------------------

    def add(
        self, request: Request, view: CacheView, arrival: tuple[int, int] | None = None
    ) -> None:
        """A request arrives, with a number above all those before.

        Args:
            request: The request.
            view: The cache.
            arrival: Step and number of the arrival where several engines share an order; by default
                this scheduler's own step, and the number of the request.

        Raises:
            ConfigError: The prompt is empty or leaves no room for a token, or the request would
                not fit even if it were alone. Nothing changed.
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
        """A request has ended, however; its slot is free. Idempotent."""
        self._queue.remove(request_id)

    @property
    def requests(self) -> Mapping[int, Request]:
        """All that have not ended, by number."""
        return self._queue.requests

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return len(self._queue.running)

    @property
    def num_waiting(self) -> int:
        """Requests that have none, swapped ones included."""
        return len(self._queue.requests) - len(self._queue.running)

    @property
    def has_unfinished(self) -> bool:
        """Whether there is any request."""
        return bool(self._queue.requests)

    @property
    def first(self) -> Request | None:
        """The request that goes first: of those that run, or else of those that wait."""
        return self._queue.running[0] if self._queue.running else self._queue.first_waiting

    @property
    def last_rank(self) -> tuple[int, int] | None:
        """The rank of the running request ranked last, if one runs. Called from any thread."""
        last = self._queue.running[-1:]
        return last[0].rank if last else None

    @property
    def last_swapped(self) -> Request | None:
        """The request in host memory that comes back last."""
        requests = self._queue.requests.values()
        swapped = (each for each in requests if each.state is RequestState.SWAPPED)
        return max(swapped, key=lambda each: each.rank, default=None)

    def fewer_tokens(self, chunks: Sequence[PlannedChunk]) -> int:
        """Tokens of a smaller step than that of `chunks`; 0 where there is none.

        With fixed chunks, one at least must fit.
        """
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
        """Decide a step, on the assumption that it will be carried out.

        Args:
            view: The cache now.
            max_num_batched_tokens: Fewer tokens than usual, after the device ran out of memory.
            withheld_pages: Pages that the view counts and that turned out not to be there.
            max_begun: How many may begin or come back; by default all that fit.
            outranked_by: The rank of a request of another engine; those ranked behind it get no
                pages.

        Returns:
            What to do. If it cannot be done after all: `undo` its chunks, `requeue` what could not
            be admitted or resumed, and plan again.
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
        """Have the running request ranked last wait again; there must be one. Between plans."""
        victim = self._queue.running[-1]
        preemption = self._costs.preemption(victim, view)
        self._queue.requeue(victim, preemption.method.leaves)
        return preemption

    def upcoming(
        self, chunks: Sequence[PlannedChunk], view: CacheView
    ) -> tuple[list[tuple[int, int]], int, bool]:
        """What the next steps will take, if all goes on as it does.

        Args:
            chunks: Those of the step that was submitted last.
            view: The cache now.

        Returns:
            How many tokens requests that run will hold, how many more the one that begins or comes
            back next, and whether that one begins with nothing.

        Cost: some 0.2 µs for each chunk, however many wait; while prompts are computed or slots are
            waited for, as much again as for planning who runs; a look into the cache for each
            request that comes to wait first.
        """
        queue, requests = self._queue, self._queue.requests
        wanted = [
            (request_id, min(past + new + _STEPS_AHEAD, requests[request_id].max_total_tokens))
            for request_id, _, past, new, _, samples in chunks
            if samples
        ]
        is_cut = len(wanted) < len(chunks)  # A prompt goes on: the step was full.
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
        """Chunks of the last plan were not submitted. Nothing else of it is taken back."""
        for chunk in chunks:
            request = self._queue.requests.get(chunk.request_id)
            if request is not None and request.state is RequestState.RUNNING:
                untake(request, chunk)

    def rebase(self, chunk: PlannedChunk, num_past_tokens: int) -> PlannedChunk:
        """A planned chunk of a request that turned out to begin with another number of tokens.

        Never computes more tokens than `chunk` does.
        """
        request = self._queue.requests[chunk.request_id]
        untake(request, chunk)
        request.num_computed = num_past_tokens
        return take(request, min(chunk.num_new_tokens, request.num_left), request.num_left)

    def requeue(self, request_id: int, method: PreemptionMethod) -> None:
        """A running request waits again: it was preempted, or could not be admitted.

        With `SWAP` its memory is, or still is, on the host. Call after `undo`.
        """
        request = self._queue.requests.get(request_id)
        if request is not None and request.state is RequestState.RUNNING:
            self._queue.requeue(request, method.leaves)

    def drop_swapped(self, request_id: int) -> None:
        """The memory of a swapped request is lost: it is to be computed again."""
        request = self._queue.requests.get(request_id)
        if request is not None and request.state is RequestState.SWAPPED:
            self._queue.wait_as(request, RequestState.WAITING)

    def check(self) -> None:
        """Check what must hold between steps.

        Raises:
            InternalError: It does not.
        """
        self._queue.check()
