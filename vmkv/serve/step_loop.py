"""Step loop: plan a step, make room, submit it, and only then read the previous step.

    plan k+1 -> preempt, begin, grow -> submit k+1 -> wait for the tokens of k -> …

While the device runs step k, the host plans step k + 1 from lengths alone and maps its
pages. A request that turns out to have ended in step k has one superfluous token in k + 1, which is
dropped; its memory is released after k + 1 was submitted.

The next token of some requests depends on the last one through the host: through a grammar's mask
or a logits processor. A step with such requests is submitted in two parts, and the host works
between them:

    … -> launch the forward pass of k+1 -> wait for the tokens of k -> masks -> sample k+1 -> …

See DESIGN.md, Note [The next step is planned while this one runs], and Note [Masks are filled while
the next step runs].
"""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.interrupts import interruptible, uninterrupted
from ..core.memory.arbiter import PATIENCE_STEPS, Borrower
from ..errors import CapacityError, ConfigError, DriverError, OutOfPagesError
from ..step import Piece
from ..units import div_ceil
from .drafts import Drafter
from .memory_view import MemoryView
from .observer import EngineObserver, StepRecord
from .request import FinishReason, Request, RequestState, TokenLogprobs
from .runner import LaunchedStep, ModelRunner, PendingTokens, SlotError, StepResult
from .sampler import is_out_of_memory
from .scheduler import PreemptionMethod, Scheduler, StepPlan

if TYPE_CHECKING:
    import torch

    from ..core.memory import PoolMember

# ---- pace ----------------------------------------------------------------------------------------

#: Shortest step worth waiting in; the host's work takes most of shorter ones.
_LONG_S = 0.004
#: Share of the shortest known time that is relied on: sizes of a group differ by a sixteenth.
_SURE_SHARE = 0.95
#: Safety factor on the host's recent planning time.
_HOST_FACTOR = 1.25
#: Decay per step of the host's longest planning time.
_HOST_DECAY = 0.9
#: Longest wait between checks of whether the step has ended, and shortest that links can time.
_SLICE_S, _SPARE_MIN_S = 0.002, 0.001
#: Number of known times required, at least and at most; its growth after a wrong estimate and its
#: decay after a right one. Twice that number are considered.
_NEEDED_MIN, _NEEDED_MAX, _NEEDED_FACTOR, _NEEDED_DECAY = 2, 32, 2, 0.99


@dataclass(frozen=True)
class SubmittedStep:
    """A step on the device, of `num_tokens` in all chunks."""

    pending: PendingTokens
    chunks: Sequence[Piece]
    num_tokens: int
    submitted_s: float
    num_drafted: int = 0  # Guesses among its tokens.
    was_queued: bool = False  # Whether it was submitted while another one was not read.

    @property
    def kind(self) -> bool:
        """Whether the step computes prompts; such steps are timed separately."""
        return self.num_tokens > len(self.chunks)

    @property
    def size(self) -> int:
        """Token count rounded down by at most a sixteenth, to group similar steps."""
        shift = max(0, self.num_tokens.bit_length() - 5)
        return self.num_tokens >> shift << shift


class Pace:
    """Step times by kind and size, to estimate how long planning may wait for new requests."""

    def __init__(self, clock: Callable[[], float] | None = None):
        self._clock = clock or time.perf_counter
        self._took_s: dict[bool, dict[int, deque[float]]] = {False: {}, True: {}}
        self._needed = {False: float(_NEEDED_MIN), True: float(_NEEDED_MIN)}
        self._host_s = {False: 0.0, True: 0.0}
        # When the device finished the last step waited for. The start of steps that were submitted
        # before `_unsure_s` is unknown.
        self._free_s = self._unsure_s = -math.inf
        # The step during which planning waits, and the end of that wait.
        self._held: SubmittedStep | None = None
        self._due_s = 0.0

    def submitted(
        self, submitted_s: float, before: SubmittedStep | None, start_s: float, *, begins: bool
    ) -> None:
        """Record a submission, planned from `start_s` on; the step `before` should still run.

        With `begins`, requests are admitted, which takes the host three times as long.
        """
        was_held = before is not None and self._held is before
        # A late wake-up counts as the host's time.
        host_s = submitted_s - (min(start_s, self._due_s) if was_held else start_s)
        self._host_s[begins] = max(host_s, _HOST_DECAY * self._host_s[begins])
        if before is None:
            return
        needed, kind = self._needed, before.kind
        if not before.pending.has_ended:
            needed[kind] = max(_NEEDED_MIN, _NEEDED_DECAY * needed[kind])
        elif was_held:
            needed[kind] = min(_NEEDED_MAX, _NEEDED_FACTOR * needed[kind])
            self._took_s[kind].clear()

    def wait(self, step: SubmittedStep) -> None:
        """Wait for a step, in the order of submission; if this raises, call `lost`."""
        began_s = self._began_s(step)
        had_ended = step.pending.has_ended
        step.pending.wait()
        self._held, self._free_s = None, self._clock()
        if had_ended or self._unsure_s == math.inf:
            self._unsure_s = self._free_s
        elif began_s is not None:
            took_s = self._took_s[step.kind].setdefault(step.size, deque(maxlen=2 * _NEEDED_MAX))
            took_s.append(self._free_s - began_s)

    def lost(self) -> None:
        """Forget submitted steps that will not be waited for; the device may be busy with them."""
        self._held, self._unsure_s = None, math.inf  # Until the next step is waited for.

    def spare_s(self, step: SubmittedStep, *, begins: bool) -> float:
        """Seconds that planning may wait while `step` runs, to be asked again; 0 if unknown."""
        sizes, needed = self._took_s[step.kind], math.ceil(self._needed[step.kind])
        known = [each for each in sizes if each <= step.size]
        took_s = list(sizes[max(known)])[-2 * needed :] if known else []
        if len(took_s) < needed or min(took_s) < _LONG_S or step.pending.has_ended:
            return 0.0
        began_s = self._began_s(step)
        end_s = (step.submitted_s if began_s is None else began_s) + _SURE_SHARE * min(took_s)
        host_s = max(self._host_s.values()) if begins else self._host_s[False]
        due_s, now_s = end_s - _HOST_FACTOR * host_s, self._clock()
        if due_s - now_s <= _SPARE_MIN_S:
            return 0.0
        self._held, self._due_s = step, due_s
        return min(_SLICE_S, due_s - now_s)

    def _began_s(self, step: SubmittedStep) -> float | None:
        is_sure = step.submitted_s >= self._unsure_s
        return max(step.submitted_s, self._free_s) if is_sure else None


# ---- step loop -----------------------------------------------------------------------------------

_LOG = logging.getLogger(__name__)
#: Attempts to plan a step, with less memory each time.
_ATTEMPTS_MAX = 12
#: Interval of messages to a broker, and longest wait for one of its orders.
_ASK_S, _ORDER_WAIT_S = 0.1, 0.02


_NO_TOKEN = (
    "no token may come next: allowed_token_ids, bad_words, min_tokens, structured_outputs and "
    "logits_processors together rule out each one; ask for less, or allow more tokens"
)
#: A request with its next token.
Sampled = tuple[Request, int, TokenLogprobs | None]
#: A request with log-probabilities of its prompt, after the first tokens of that number.
Scored = tuple[Request, int, Sequence[TokenLogprobs]]
#: A request that ends, the reason and the error.
Ended = tuple[Request, FinishReason, Exception | None]


class StepLoop:
    """Runs requests step by step, in one thread at a time.

    `accept` takes what a step has sampled, and returns the requests that end. `ended` is called
    when a request has ended and holds no memory. `masks` makes the masks of guided requests, given
    the live request or None for each row to be sampled, and the guess that its token must equal for
    the next row to count, if there are guesses. A `drafter` makes these.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        view: MemoryView,
        runner: ModelRunner,
        *,
        accept: Callable[[Sequence[Sampled], Sequence[Scored]], Iterable[Ended]],
        ended: Callable[[Request, FinishReason, Exception | None], None],
        masks: Callable[[Sequence[Request | None], Sequence[int] | None], torch.Tensor | None],
        drafter: Drafter | None = None,
        observer: EngineObserver | None = None,
    ):
        self._scheduler = scheduler
        self._view = view
        self.runner = runner
        self._accept = accept
        self._ended = ended
        self._masks = masks
        self._drafter = drafter
        self._guessed = [0, 0, 0]  # Drafts, their tokens, and those accepted, of read steps.
        self._observer = observer
        self._requests = scheduler.requests
        # Unread steps, in order: one between steps, more after an interrupt.
        self._pending: deque[SubmittedStep] = deque()
        # Reduced token budget while the device is short of memory, or None.
        self._token_limit: int | None = None
        self._shortage: Exception | None = None
        # Pages counted as free that recently could not be mapped.
        self._withheld_pages = 0
        # When a broker was asked last, for how many requests, and the budget of the last plan.
        self._asked_s, self._num_asked, self._budget_bytes = -math.inf, 0, 0
        self._pace = Pace()
        self._arbiter, self._member = view.cache.pool.arbiter, view.cache.pool.member
        self._borrower = Borrower(self._arbiter, lambda: scheduler.last_rank, self._give_way)
        self.num_failed_steps = 0  #: See `Engine.num_failed_steps`.

    @property
    def has_work(self) -> bool:
        """Whether requests or unread steps are left."""
        return bool(self._requests or self._pending)

    @property
    def spare_s(self) -> float:
        """Seconds that the next step may wait for new requests, to be asked again; 0 for none."""
        if len(self._pending) != 1:
            return 0.0
        return self._pace.spare_s(self._pending[0], begins=self._scheduler.num_waiting > 0)

    # ---- requests -------------------------------------------------------------------------

    def end(
        self,
        request: Request,
        reason: FinishReason,
        error: Exception | None = None,
        *,
        keep: bool = True,
    ) -> None:
        """End a request in any state; `keep` leaves its tokens in the prefix cache. Idempotent."""
        if request.request_id not in self._requests:
            return
        self._borrower.withdraw()  # A claim for another request is renewed later.
        self._view.end(request, keep=keep)
        self._scheduler.finish(request)
        self._ended(request, reason, error)

    def end_all(self, error: Exception) -> None:
        """Fail every request with `error`, and forget the submitted steps."""
        self._pending.clear()
        self._pace.lost()
        self._fail(tuple(self._requests.values()), error)

    # ---- a step ---------------------------------------------------------------------------

    @uninterrupted
    def step(self) -> bool:
        """Submit one step and read the previous one; returns whether work is left.

        An interrupt (SIGINT) arrives while the runner submits, or at the end of the step. A
        `DriverError` that no request caused is raised; call `end_all`, or continue.
        """
        self._borrower.begin_step()
        try:
            return self._step()
        finally:
            self._borrower.end_step()

    def _step(self) -> bool:
        record = StepRecord(time.perf_counter())
        if self._view.ending:
            try:
                self._view.close_ended()  # Before the plan, which counts on their memory.
            except DriverError:
                self.num_failed_steps += 1
                raise
        if self._member is not None:
            self._follow(self._member)
        self._view.note_loaded()
        if self._drafter is not None:
            self._draft(self._drafter, record)
        submitted, plan = self._advance(record)
        has_unread = bool(self._pending)
        if submitted is not None:
            self._pending.append(submitted)
        goes_on = [self._view.load(request) for request in plan.loading]
        if submitted is not None:
            self._view.offload_ahead()
            if self._view.needs_room:
                self._view.make_room_ahead(self._scheduler.growth_ahead(self._view))
        wait_start_s = time.perf_counter()
        if has_unread:
            self._read(num_left=submitted is not None)
        elif self._requests and not plan.chunks and not plan.preempted:
            if self._view.loading:
                self._view.note_loaded(waits=True)
            elif any(goes_on):
                self._view.wait_for_room()
            else:
                self._unblock()
        if not self._requests:
            self._read()  # Only superfluous tokens are left; no later step would read them.
        if self._observer is not None:
            record.wait_s += time.perf_counter() - wait_start_s
            self._report(record, plan, self._observer)
        return bool(self._requests or self._pending)

    def rest(self) -> None:
        """Tell a broker that no request is left; it takes back what is above the floor."""
        self._view.offload_ahead()
        if self._member is not None:
            self._num_asked = 0
            self._member.ask(0, 0, is_busy=False)

    def _follow(self, member: PoolMember) -> None:
        while member.excess_bytes > 0 and self._scheduler.last_rank is not None:
            running = self._scheduler.running
            num_pages = self._view.held_pages(running[-1]) if running else 0
            self._give_way()
            member.gave_up(max(1, num_pages) * self._view.page_bytes)
        self._budget_bytes = self._view.cache.pool.budget_bytes
        now_s, num_requests = time.perf_counter(), len(self._requests)
        if num_requests > self._num_asked or now_s - self._asked_s >= _ASK_S:
            ahead = self._scheduler.pages_ahead(self._view)
            member.ask(*[each * self._view.page_bytes for each in ahead], is_busy=True)
            self._asked_s = now_s
        self._num_asked = num_requests

    def _advance(self, record: StepRecord) -> tuple[SubmittedStep | None, StepPlan]:
        self._withheld_pages //= 2
        was_short, num_begun, max_begun = False, 0, None
        reclaimer = self._view.cache.pool.reclaimer
        for _ in range(_ATTEMPTS_MAX):
            start_s = time.perf_counter()
            self._arbiter.num_steps += 1
            outranked_by = self._borrower.outranked_by()
            plan = self._scheduler.plan(
                self._view,
                max_num_batched_tokens=self._token_limit,
                withheld_pages=self._withheld_pages,
                max_begun=max_begun,
                outranked_by=outranked_by,
            )
            record.plan_s += time.perf_counter() - start_s
            start_s, fence_waited_s = time.perf_counter(), reclaimer.waited_s
            chunks = plan.chunks
            try:
                self._carry_out(plan)
            except CapacityError as error:
                self._shortage = error
                self._give_up(plan)
                lacking_bytes = 1
                if isinstance(error, OutOfPagesError):
                    lacking_bytes = max(1, error.needed_bytes - error.free_bytes)
                if not was_short:
                    self._view.cache.make_room(lacking_bytes)
                was_short, num_begun = True, len(plan.admitted) + len(plan.resumed)
                missing_pages = div_ceil(lacking_bytes, self._view.page_bytes)
                self._withheld_pages = max(2 * self._withheld_pages, missing_pages)
                continue
            except BaseException as error:  # An interrupt, for instance.
                self._give_up(plan)
                if not isinstance(error, DriverError):
                    raise
                self.num_failed_steps += 1
                self._fail([chunk.request for chunk in chunks], error)
                return None, plan
            finally:
                record.map_s += time.perf_counter() - start_s
                record.fence_wait_s += reclaimer.waited_s - fence_waited_s
            if not chunks:
                if self._withheld_pages and (not was_short or num_begun > 1):
                    # The shortage has passed, or too many began at once: admit the first one alone.
                    self._withheld_pages, num_begun, max_begun = 0, 0, 1
                    continue
                return None, plan
            start_s = time.perf_counter()
            submitted = self._submit(plan, record)
            record.submit_s += time.perf_counter() - start_s - record.wait_s
            return submitted, plan
        return None, StepPlan([], [], [], [], [])

    def _carry_out(self, plan: StepPlan) -> None:
        """Preempt, resume, admit and grow as planned; on errors, call `_give_up`."""
        view = self._view
        for request, method in plan.preempted:
            self._preempt(request, method)
        for request in plan.resumed:
            view.swap_in(request)
        for request in plan.admitted:
            num_past = view.begin(request)
            if not request.num_preemptions:
                request.started_s = request.started_s or time.perf_counter()
            for at, chunk in enumerate(plan.chunks):
                if chunk.request is request and num_past != chunk.num_past_tokens:
                    plan.chunks[at] = self._scheduler.rebase(chunk, num_past)
        view.grow(plan.chunks)

    def _preempt(self, request: Request, method: PreemptionMethod) -> None:
        request.num_preemptions += 1
        if method is PreemptionMethod.RECOMPUTE or not self._view.swap_out(request):
            self._drop(request)

    def _drop(self, request: Request) -> None:
        self._scheduler.drop_swapped(request)
        self._view.end(request)

    def _give_way(self) -> None:
        if self._scheduler.running:
            self._preempt(*self._scheduler.preempt(self._scheduler.running[-1], self._view))
        elif (swapped := self._scheduler.last_swapped) is not None:
            self._drop(swapped)

    def _give_up(self, plan: StepPlan) -> None:
        self._scheduler.undo(plan.chunks)
        for request in plan.admitted:
            self._view.end(request)
            self._scheduler.requeue(request, PreemptionMethod.RECOMPUTE)
        for request in plan.resumed:
            if self._view.is_swapped(request):
                self._scheduler.requeue(request, PreemptionMethod.SWAP)

    # ---- guesses --------------------------------------------------------------------------

    def _draft(self, drafter: Drafter, record: StepRecord) -> None:
        """Guess tokens for the next plan where that pays, once the steps before it were read."""
        start_s, scheduler = time.perf_counter(), self._scheduler
        scheduler.drafts = {}
        if any(each.num_drafted for each in self._pending):
            self._read()  # Their requests have an unknown number of tokens.
        if len(scheduler.running) > drafter.most_requests:
            return
        drafter.follow(scheduler.running)
        decoding = self._decoding()
        skipped = int(bool(self._pending))
        if decoding and (not skipped or drafter.numbers(decoding, skipped=skipped)):
            self._read()
            drafter.follow(scheduler.running)
            scheduler.drafts = drafter.drafts(self._decoding())
        record.wait_s += time.perf_counter() - start_s

    def _decoding(self) -> list[Request]:
        """Return the running requests if all of them decode in the next step; else none."""
        scheduler = self._scheduler
        if self._token_limit is not None or (scheduler.free_slots and scheduler.first_waiting):
            return []
        numbers = [(each, each.num_left) for each in scheduler.running]
        return [] if any(n > 1 for _, n in numbers) else [each for each, n in numbers if n]

    # ---- submitting -----------------------------------------------------------------------

    def _submit(self, plan: StepPlan, record: StepRecord) -> SubmittedStep | None:
        chunks = plan.chunks
        writes: list[tuple[int, int, int]] = []
        needs_host = False  # Whether a token depends on the last one through the host.
        try:
            with self._view.begun_checkpoints(chunks) as kept_rows:
                for chunk in chunks:
                    request, past, new = chunk.request, chunk.num_past_tokens, chunk.num_new_tokens
                    if chunk.token_ids is not None and not request.is_set:
                        self._set_slot(request)
                    writes.append((chunk.row, past, past + new))
                    if request.matcher is not None or request.params.logits_processors:
                        needs_host |= chunk.samples
                submit: Callable[[Sequence[Piece]], Any] = self.runner.submit
                with self._view.cache.submitting(writes, kept_rows):
                    pending = interruptible(self.runner.launch if needs_host else submit, chunks)
        except BaseException as error:  # noqa: BLE001  # fails requests, or is raised again
            self._recover(chunks, error)
            return None
        submitted_s = time.perf_counter()
        self._borrower.note_submitted()
        self._view.note_computed(chunks)
        before = self._pending[-1] if self._pending else None
        begins = bool(plan.admitted or plan.resumed)
        self._pace.submitted(submitted_s, before, record.start_s, begins=begins)
        if needs_host:
            try:
                pending = self._sample(pending, chunks, record)
            except BaseException as error:  # noqa: BLE001  # likewise
                self._recover(chunks, error)
                return None
        self._shortage = None
        if self._token_limit is not None:
            # Slowly: each failed attempt costs a step.
            more = self._token_limit + max(1, self._token_limit // 8)
            self._token_limit = more if more < self._scheduler.max_num_batched_tokens else None
        was_queued = before is not None
        num_drafted = sum([chunk.num_drafted for chunk in chunks]) if self._scheduler.drafts else 0
        return SubmittedStep(pending, chunks, plan.num_tokens, submitted_s, num_drafted, was_queued)

    def _sample(
        self, launched: LaunchedStep, chunks: Sequence[Piece], record: StepRecord
    ) -> PendingTokens:
        slots = {chunk.request.slot: chunk.request for chunk in chunks if chunk.samples}
        start_s = time.perf_counter()
        self._read()
        record.wait_s += time.perf_counter() - start_s
        ended = {slot for slot, each in slots.items() if each.state is RequestState.FINISHED}
        its = [None if slot in ended else slots[slot] for slot in launched.slots]
        masks = self._masks(its, launched.guesses)
        return interruptible(self.runner.sample, launched, masks, ended)

    def _set_slot(self, request: Request) -> None:
        prompt, output = request.prompt_token_ids, request.output_token_ids
        try:
            self.runner.set_slot(request.slot, request.params, prompt, output)
        except ConfigError as error:
            raise SlotError(request.slot, error, "its parameters") from error
        request.is_set = True

    def _recover(self, chunks: Sequence[Piece], error: BaseException) -> None:
        """Restore the state before a step that was not submitted; fail the requests at fault."""
        if isinstance(error, Exception):
            _log_and_release(error)
        requests = [chunk.request for chunk in chunks]
        if isinstance(error, SlotError):
            requests = [each for each in requests if each.slot == error.slot]
        self._read()  # The previous step's tokens are valid.
        self._scheduler.undo(chunks)
        for chunk in chunks:
            request, num_past = chunk.request, chunk.num_past_tokens
            request.is_on_device = request.is_set = False
            request.num_submitted = min(request.num_submitted, num_past)
            try:
                if request.sequence is not None and request.sequence.num_tokens > num_past:
                    self._view.go_back(request, num_past)
            except (ConfigError, DriverError):  # For instance, a window has moved on: recompute.
                self._view.end(request, keep=False)
                self._scheduler.requeue(request, PreemptionMethod.RECOMPUTE)
        if not isinstance(error, Exception):
            raise error
        if is_out_of_memory(error):
            self._view.reclaim()
            fewer = self._scheduler.fewer_tokens(chunks)
            if fewer:
                self._shortage, self._token_limit = error, fewer
                return
        elif not isinstance(error, SlotError | ConfigError):  # The caller's: a changed model.
            self.num_failed_steps += 1
        self._fail(requests, error)

    def _fail(self, requests: Iterable[Request], error: Exception) -> None:
        for request in requests:
            self.end(request, FinishReason.ERROR, error, keep=False)

    def _unblock(self) -> None:
        """Make room when nothing runs and nothing can begin; see `vmkv/core/memory/arbiter.py`.

        Measures, one per call: restore the usual step size; wait for a broker that may give more;
        preempt requests of other engines over the pool; drop the last swapped request, which may
        hold shared pages; fail the first request.
        """
        if self._token_limit is not None:
            self._shortage = self._token_limit = None
            return
        if self._member is not None and self._member.may_grow:
            self._member.wait(_ORDER_WAIT_S, self._budget_bytes)
            return
        running = self._scheduler.running
        request = running[0] if running else self._scheduler.first_waiting
        if request is None or self._borrower.claim(request.rank):
            return
        if (swapped := self._scheduler.last_swapped) is not None:
            self._drop(swapped)
            return
        error = self._shortage or OutOfPagesError(
            "the request does not fit: the budget was lowered, or other users of the pool hold its "
            f"memory, and in {PATIENCE_STEPS} steps no engine over the pool gave any up: such a "
            "user is a cache, or an engine that another thread no longer steps; raise the budget, "
            "or close them",
            needed_bytes=0,
            free_bytes=self._view.free_pages() * self._view.page_bytes,
            retired_bytes=0,
        )
        self.end(request, FinishReason.ERROR, error)
        self._borrower.note_given_up()

    # ---- reading --------------------------------------------------------------------------

    def _read(self, num_left: int = 0) -> None:
        while len(self._pending) > num_left:
            step = self._pending[0]
            try:
                self._pace.wait(step)
                result = step.pending.result()
            except Exception as error:  # noqa: BLE001  # fails the step's requests
                self._pending.popleft()
                self._pace.lost()
                self.num_failed_steps += 1
                _log_and_release(error)
                self._fail([chunk.request for chunk in step.chunks], error)
                continue
            self._pending.popleft()
            self.num_failed_steps = 0
            if self._drafter is not None:
                self._note_time(self._drafter, step)
            sampling = [chunk for chunk in step.chunks if chunk.samples]
            for chunk in sampling:
                chunk.request.num_unread -= 1
            if step.num_drafted:
                rounds = self._accept_guesses(sampling, result)
            else:
                requests = [chunk.request for chunk in sampling]
                rounds = [list(zip(requests, result.token_ids, result.logprobs, strict=True))]
            scored = [
                (step.chunks[at].request, step.chunks[at].num_past_tokens, entries)
                for at, entries in result.prompt_logprobs.items()
            ]
            for some in rounds:
                # Others had ended before this token was computed.
                live = [each for each in some if each[0].state is not RequestState.FINISHED]
                self._fail([each[0] for each in live if each[1] < 0], ConfigError(_NO_TOKEN))
                sampled = [each for each in live if each[1] >= 0]
                for request, reason, failure in self._accept(sampled, scored):
                    self.end(request, reason, failure)
                scored = []

    def _note_time(self, drafter: Drafter, step: SubmittedStep) -> None:
        decodes = step.num_tokens - step.num_drafted == len(step.chunks)
        # The host reads, plans and submits between steps with guesses.
        drafts = step.num_drafted > 0
        counts = decodes and step.was_queued != drafts
        drafter.times.note(time.perf_counter(), step.num_tokens, drafts=drafts, counts=counts)

    def _accept_guesses(self, sampling: Sequence[Piece], result: StepResult) -> list[list[Sampled]]:
        """Accept right guesses; return the tokens of a step, as of one step for each place."""
        rounds: list[list[Sampled]] = [[]]
        rows = zip(result.token_ids, result.logprobs, strict=True)
        for chunk in sampling:
            request, count = chunk.request, chunk.num_drafted
            its = [next(rows) for _ in range(count + 1)]
            if request.state is RequestState.FINISHED:
                continue
            guesses, num_right = (chunk.token_ids or ())[-count:] if count else (), 0
            while num_right < count and its[num_right][0] == guesses[num_right]:
                num_right += 1
            is_as_planned = request.num_computed == chunk.num_past_tokens + 1
            if request.state is RequestState.RUNNING and is_as_planned:  # Else recomputed.
                self._view.lengthen(request, num_right)
            for at, (token_id, logprobs) in enumerate(its[: num_right + 1]):
                rounds[at:] = rounds[at:] or [[]]
                rounds[at].append((request, token_id, logprobs))
            counts = (count > 0, count, num_right)
            self._guessed = [a + b for a, b in zip(self._guessed, counts, strict=True)]
        return rounds

    def _report(self, record: StepRecord, plan: StepPlan, observer: EngineObserver) -> None:
        record.num_decode_tokens = sum(
            [chunk.token_ids is None or _num_decoded(chunk) for chunk in plan.chunks]
        )
        record.num_prefill_tokens = plan.num_tokens - record.num_decode_tokens
        record.num_running = self._scheduler.num_running
        record.num_waiting = self._scheduler.num_waiting
        record.num_swapped = sum(each is PreemptionMethod.SWAP for _, each in plan.preempted)
        record.num_recomputed = len(plan.preempted) - record.num_swapped
        record.num_drafts, record.num_draft_tokens, record.num_accepted_tokens = self._guessed
        self._guessed = [0, 0, 0]
        observer.on(record, self._view.cache)


def _num_decoded(chunk: Piece) -> int:
    """Return how many known tokens of a chunk follow the prompt: the last one read, and guesses."""
    num_past, num_new = chunk.num_past_tokens, chunk.num_new_tokens
    decodes = num_new - chunk.num_drafted == 1 and num_past >= len(chunk.request.prompt_token_ids)
    return num_new if decodes else 0


def _log_and_release(error: BaseException) -> None:
    """Log an error, then drop its frames, which hold activations and views of the cache."""
    _LOG.error("a step failed:\n%s", "".join(traceback.format_exception(error)))
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
