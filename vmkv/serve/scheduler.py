"""Who runs in the next step: pure logic over lengths and pages, no tensors, no clock.

Every request has a place in one order, given when it arrives and kept for life:

    rank = (arrival step + priority x aging_steps, number)

So inside a priority it is first come, first served; a more urgent request overtakes those that
came at most `aging_steps` steps earlier per level of priority, and nobody else: see Note [Waiting
is bounded]. A preempted request keeps its rank and comes back before all that arrived after it.

Requests that run come first, in order, one token of each that decodes and then chunks of
prompts; what is left of the step's tokens goes to those that wait, strictly in order: if the
first does not fit, nobody behind it may pass. When memory is short, a running request takes
that of the one ranked last; the one ranked last itself stalls and keeps what it has. So the
best-placed request always goes on, everything ends, and nothing can deadlock as long as each
request fits alone, which `add` makes sure of.

Every prompt token in a step keeps those waiting who decode in it. So where that is wanted mixed
steps are smaller, as long as one whole step could take all prompt tokens that are left; where more
are left, those who wait for their first token have the longer wait, and steps are as large as they
may be.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence

from ..cache.geometry import check_positive
from ..errors import ConfigError, InternalError
from .cache_view import CacheView
from .plan import Job, PlannedChunk, Preemption, PreemptionMethod, StepPlan
from .planning import StepPlanning
from .preemption import PreemptionCosts
from .request import RequestState


class Scheduler:
    """Decides each step.

    Args:
        max_num_seqs: Requests that run at once at most.
        max_num_batched_tokens: Tokens of a step at most.
        aging_steps: By how many steps one level of priority lets a request overtake.
        costs: What decides between swapping and computing again.
        max_num_mixed_tokens: Tokens of a step at most that decodes and computes prompts, unless
            more of the latter are left than `max_num_batched_tokens`. Half of it at least is for
            prompts. None for no such bound; with fixed chunks there is none.
        fixed_chunks: Cut every prompt at multiples of a fixed length and nowhere else, and compute
            again what was generated one token at a time, as it was: what a request computes then
            never depends on the others.

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
        check_positive("max_num_seqs", max_num_seqs)
        check_positive("max_num_batched_tokens", max_num_batched_tokens)
        check_positive("aging_steps", aging_steps)
        if max_num_mixed_tokens is not None:
            check_positive("max_num_mixed_tokens", max_num_mixed_tokens)
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={max_num_batched_tokens} is less than one token for each "
                f"of max_num_seqs={max_num_seqs} requests; raise it, or lower max_num_seqs"
            )
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._aging_steps = aging_steps
        self._costs = costs or PreemptionCosts()
        self._max_num_mixed_tokens = max_num_mixed_tokens
        self._fixed_chunks = fixed_chunks
        # Fits beside a token of everybody else, so nobody waits for a step of his own.
        self._fixed_chunk_tokens = max_num_batched_tokens - max_num_seqs + 1
        self._jobs: dict[int, Job] = {}
        #: Those that run, in order; to be read only.
        self.running: list[Job] = []
        self._waiting: list[tuple[tuple[int, int], int]] = []  # A heap; may hold ended requests.
        self._free_slots = list(range(max_num_seqs))  # A heap: low slots first.
        self._num_steps = 0

    # ---- requests -------------------------------------------------------------------------

    def add(
        self,
        request_id: int,
        num_prompt_tokens: int,
        max_total_tokens: int,
        view: CacheView,
        *,
        priority: int = 0,
        waits_for_host: bool = False,
    ) -> None:
        """A request arrives.

        Args:
            request_id: Its number, above all those before.
            num_prompt_tokens: Tokens of its prompt.
            max_total_tokens: Prompt and output at most.
            view: The cache it must fit.
            priority: Lower is more urgent.
            waits_for_host: See `Job`.

        Raises:
            ConfigError: The prompt is empty or leaves no room for a token, or the request would
                not fit even if it were alone. Nothing changed.
        """
        check_positive("num_prompt_tokens", num_prompt_tokens)
        if max_total_tokens <= num_prompt_tokens:
            raise ConfigError(
                f"a prompt of {num_prompt_tokens} tokens leaves no room for an answer in "
                f"{max_total_tokens} tokens"
            )
        needed, total = view.peak_pages(max_total_tokens), view.total_pages
        if needed > total:
            raise ConfigError(
                f"a request of {max_total_tokens} tokens (prompt and max_tokens) needs {needed} "
                f"pages and the whole cache has {total}; shorten it, or raise the budget"
            )
        rank = (self._num_steps + priority * self._aging_steps, request_id)
        job = Job(
            request_id,
            rank,
            num_prompt_tokens,
            max_total_tokens,
            waits_for_host,
            num_tokens=num_prompt_tokens,
        )
        self._jobs[request_id] = job
        self._enqueue(job)

    def finish(self, request_id: int) -> None:
        """A request has ended, however; its slot is free. Idempotent."""
        job = self._jobs.pop(request_id, None)
        if job is not None and job.state is RequestState.RUNNING:
            self._leave(job)

    def forget_device(self, request_id: int) -> None:
        """The request's last token is not on the device any more; the host gives it."""
        job = self._jobs.get(request_id)
        if job is not None:
            job.is_on_device = False

    def tokens_read(self, request_id: int) -> None:
        """One more token of a request was read from a submitted step."""
        job = self._jobs.get(request_id)
        if job is not None:
            job.num_unread -= 1

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests that have none, swapped ones included."""
        return len(self._jobs) - len(self.running)

    @property
    def has_unfinished(self) -> bool:
        """Whether there is any request."""
        return bool(self._jobs)

    def state(self, request_id: int) -> RequestState:
        """Where a request is."""
        job = self._jobs.get(request_id)
        return RequestState.FINISHED if job is None else job.state

    def best_running(self) -> int | None:
        """The running request that goes first."""
        return self.running[0].request_id if self.running else None

    def best_waiting(self) -> int | None:
        """The waiting request that goes first."""
        job = self._first_waiting()
        return None if job is None else job.request_id

    def last_swapped(self) -> int | None:
        """The request in host memory that comes back last."""
        swapped = (job for job in self._jobs.values() if job.state is RequestState.SWAPPED)
        job = max(swapped, key=lambda each: each.rank, default=None)
        return None if job is None else job.request_id

    def fewer_tokens(self, chunks: Sequence[PlannedChunk]) -> int:
        """Tokens of a smaller step than that of `chunks`; 0 where there is none.

        With fixed chunks, one at least must fit.
        """
        num_tokens = sum(chunk.num_new_tokens for chunk in chunks)
        if not self._fixed_chunks:
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
    ) -> StepPlan:
        """Decide a step, on the assumption that it will be carried out.

        Args:
            view: The cache now.
            max_num_batched_tokens: Fewer tokens than usual, after the device ran out of memory.
            withheld_pages: Pages that the view counts and that turned out not to be there.

        Returns:
            What to do. If it cannot be done after all: `undo` its chunks, `requeue` what could not
            be admitted or resumed, and plan again.
        """
        self._num_steps += 1
        step = StepPlanning(self, view, max_num_batched_tokens, withheld_pages)
        for job in tuple(self.running):
            if job.state is RequestState.RUNNING:  # Nobody ranked before took its place.
                step.run(job)
        while self._free_slots and not step.is_short:
            waiting = self._first_waiting()
            if waiting is None or not step.admit(waiting):
                break
        return StepPlan(
            tuple(step.preempted), tuple(step.resumed), tuple(step.admitted), tuple(step.chunks)
        )

    def undo(self, chunks: Sequence[PlannedChunk]) -> None:
        """Chunks of the last plan were not submitted. Nothing else of it is taken back."""
        for chunk in chunks:
            job = self._jobs.get(chunk.request_id)
            if job is not None and job.state is RequestState.RUNNING:
                self._untake(job, chunk)

    def rebase(self, chunk: PlannedChunk, num_past_tokens: int) -> PlannedChunk:
        """A planned chunk of a request that turned out to begin with another number of tokens.

        Never computes more tokens than `chunk` does.
        """
        job = self._jobs[chunk.request_id]
        self._untake(job, chunk)
        job.num_computed = num_past_tokens
        return self.take(job, min(chunk.num_new_tokens, job.num_left))

    def requeue(self, request_id: int, method: PreemptionMethod) -> None:
        """A running request waits again: it was preempted, or could not be admitted.

        With `SWAP` its memory is, or still is, on the host. Call after `undo`.
        """
        job = self._jobs.get(request_id)
        if job is None or job.state is not RequestState.RUNNING:
            return
        self._leave(job)
        job.is_on_device = False
        if method is PreemptionMethod.SWAP:
            job.state = RequestState.SWAPPED
        else:
            job.state = RequestState.WAITING
            job.num_computed = 0
        self._enqueue(job)

    def drop_swapped(self, request_id: int) -> None:
        """The memory of a swapped request is lost: it is to be computed again."""
        job = self._jobs.get(request_id)
        if job is not None and job.state is RequestState.SWAPPED:
            job.state = RequestState.WAITING
            job.num_computed = 0

    def check(self) -> None:
        """Check what must hold between steps.

        Raises:
            InternalError: It does not.
        """
        slots = sorted([job.slot for job in self.running] + self._free_slots)
        ranks = [job.rank for job in self.running]
        running = {job.request_id for job in self.running}
        queued = {request_id for _, request_id in self._waiting}
        jobs = self._jobs.values()
        claims = {
            "every slot is free or one request's": slots == list(range(self.max_num_seqs)),
            "running requests are in order": ranks == sorted(ranks),
            "who has a slot runs": running
            == {job.request_id for job in jobs if job.state is RequestState.RUNNING},
            "who does not run waits": queued & self._jobs.keys() == self._jobs.keys() - running,
            "nothing is computed before it exists": all(
                0 <= job.num_computed <= job.num_tokens for job in jobs
            ),
        }
        for claim, holds in claims.items():
            if not holds:
                raise InternalError(f"the scheduler's books are wrong; not so: {claim}")

    # ---- for the step being planned -------------------------------------------------------

    def chunk_tokens(self, job: Job, num_tokens_left: int) -> int:
        """How many tokens `job` computes next if `num_tokens_left` may be; 0 for none now."""
        wanted = job.num_left
        if not self._fixed_chunks:
            return min(wanted, num_tokens_left)
        if job.num_computed < job.num_prompt_tokens:
            size = self._fixed_chunk_tokens
            end = min((job.num_computed // size + 1) * size, job.num_prompt_tokens)
            wanted = end - job.num_computed
        else:
            wanted = min(wanted, 1)
        return wanted if wanted <= num_tokens_left else 0

    def take(self, job: Job, num_new: int) -> PlannedChunk:
        """Have `job` compute its next `num_new` tokens."""
        samples = num_new == job.num_left
        from_device = job.is_on_device and not job.waits_for_host
        chunk = PlannedChunk(
            job.request_id, job.slot, job.num_computed, num_new, from_device, samples
        )
        job.num_computed += num_new
        if samples:
            job.num_tokens += 1
            job.num_unread += 1
            job.is_on_device = True
        return chunk

    def _untake(self, job: Job, chunk: PlannedChunk) -> None:
        job.num_computed -= chunk.num_new_tokens
        job.is_on_device = chunk.from_device
        if chunk.samples:
            job.num_tokens -= 1
            job.num_unread -= 1

    def enter(self, job: Job) -> int:
        """Give the first waiting `job` a slot."""
        heapq.heappop(self._waiting)
        job.slot = heapq.heappop(self._free_slots)
        job.state = RequestState.RUNNING
        insort(self.running, job, key=lambda each: each.rank)
        return job.slot

    def preempt(self, job: Job, view: CacheView) -> Preemption:
        """Make `job` wait; says how."""
        pages = view.held_pages(job.request_id)
        method = PreemptionMethod.RECOMPUTE
        if view.can_swap(job.request_id):
            method = self._costs.cheaper(job.num_computed, pages, view.page_bytes)
        self.requeue(job.request_id, method)
        return Preemption(job.request_id, method)

    def num_decodes(self) -> int:
        """How many running requests want just one token."""
        return sum(job.num_left == 1 for job in self.running)

    def prompt_tokens_beside(self, num_decodes: int, num_tokens: int) -> int:
        """Prompt tokens of a step of `num_tokens` at most that decodes for so many as well."""
        left, most = num_tokens - num_decodes, self._max_num_mixed_tokens
        if most is None or not num_decodes or self._fixed_chunks or self._has_backlog():
            return left
        return min(left, max(most - num_decodes, (most + 1) // 2))

    def _has_backlog(self) -> bool:
        """Whether more prompt tokens are left than a step takes."""
        left = self.max_num_batched_tokens - sum(
            job.num_left for job in self.running if job.num_left > 1
        )
        for _, request_id in self._waiting:
            if left < 0:
                break
            if request_id in self._jobs:
                left -= self._jobs[request_id].num_left
        return left < 0

    def _first_waiting(self) -> Job | None:
        while self._waiting:
            job = self._jobs.get(self._waiting[0][1])
            if job is not None and job.rank == self._waiting[0][0]:
                return job
            heapq.heappop(self._waiting)
        return None

    def _enqueue(self, job: Job) -> None:
        heapq.heappush(self._waiting, (job.rank, job.request_id))

    def _leave(self, job: Job) -> None:
        self.running.remove(job)
        heapq.heappush(self._free_slots, job.slot)
        job.slot = -1
