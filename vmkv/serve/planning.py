"""A step's plan in the making: who gets its tokens, and whose pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..units import div_ceil
from .cache_view import CacheView
from .plan import Admission, Job, PlannedChunk, Preemption
from .request import RequestState

if TYPE_CHECKING:
    from .scheduler import Scheduler

#: Free memory that admission leaves alone while something runs: room for a few steps of growth.
_HEADROOM_DIVISOR = 100


class StepPlanning:
    """A plan in the making.

    Every running request that decodes has its token set aside first, so that no prompt holds
    up those that answer; pages are given out in the order of ranks.
    """

    def __init__(
        self, scheduler: Scheduler, view: CacheView, num_tokens: int | None, withheld_pages: int
    ):
        self._scheduler = scheduler
        self._view = view
        self._free_pages = view.free_pages() - withheld_pages
        self._has_asked_evictable = False
        self._promised_pages = 0  # What prompts that have begun will still need.
        num_tokens = num_tokens or scheduler.max_num_batched_tokens
        self._decode_tokens = min(num_tokens, scheduler.num_decodes())
        self._prompt_tokens = scheduler.prompt_tokens_beside(self._decode_tokens, num_tokens)
        self.is_short = False  # Whether somebody has to give way, or to stall.
        self.preempted: list[Preemption] = []
        self.admitted: list[Admission] = []
        self.resumed: list[Admission] = []
        self.chunks: list[PlannedChunk] = []

    def run(self, job: Job) -> None:
        """Go on with a running request, if there is room for it."""
        num_left, num_new = job.num_left, 0
        if not (job.waits_for_host and job.num_unread):
            if num_left == 1:
                num_new = min(1, self._decode_tokens)
            else:
                num_new = self._scheduler.chunk_tokens(job, self._prompt_tokens)
        needed = self._make_room(job, job.num_computed + num_new) if num_new else 0
        if needed is None:
            num_new = needed = 0
        if num_left > 1 and num_left > num_new:
            lacking = self._view.pages_to_grow(job.request_id, job.num_tokens)
            self._promised_pages += lacking - needed
        if num_new:
            if num_left == 1:
                self._decode_tokens -= 1
            else:
                self._prompt_tokens -= num_new
            self.chunks.append(self._scheduler.take(job, num_new))

    def admit(self, job: Job) -> bool:
        """Begin or resume the first waiting request, if there is room for all its tokens."""
        view, scheduler = self._view, self._scheduler
        is_swapped = job.state is RequestState.SWAPPED
        if job.num_unread:
            return False  # It gave way in this very step: its last token is not known yet.
        if not self._prompt_tokens:
            return False  # Before a long prompt is looked up in vain.
        if not is_swapped and not view.is_ready(job.request_id):
            return False
        if is_swapped:
            needed = view.pages_to_resume(job.request_id)
        else:
            # The last token is always computed: somebody must say what comes next.
            cached = view.cached_tokens(job.request_id)
            job.num_computed = min(cached, job.num_tokens - 1)
            needed = view.pages_to_begin(
                job.request_id, min(job.num_tokens + 1, job.max_total_tokens)
            )
        kept = self._promised_pages
        if scheduler.num_running:
            kept += div_ceil(view.total_pages, _HEADROOM_DIVISOR) + scheduler.num_running
        num_new = scheduler.chunk_tokens(job, self._prompt_tokens)
        if not num_new or not self._has_free(needed + kept):
            return False
        slot = scheduler.enter(job)
        (self.resumed if is_swapped else self.admitted).append(Admission(job.request_id, slot))
        self._free_pages -= needed
        self._prompt_tokens -= num_new
        self.chunks.append(scheduler.take(job, num_new))
        return True

    def _make_room(self, job: Job, num_tokens: int) -> int | None:
        """Take the pages that `job` lacks to hold `num_tokens`, from those behind it if need be.

        Returns how many; None if they are not to be had.
        """
        view, scheduler = self._view, self._scheduler
        needed = view.pages_to_grow(job.request_id, num_tokens)
        while not self._has_free(needed):
            self.is_short = True
            victim = scheduler.running[-1]
            if victim is job:
                return None
            self._free_pages += view.held_pages(victim.request_id)
            self.preempted.append(scheduler.preempt(victim, view))
        self._free_pages -= needed
        return needed

    def _has_free(self, num_pages: int) -> bool:
        if num_pages > self._free_pages and not self._has_asked_evictable:
            self._has_asked_evictable = True
            self._free_pages += self._view.evictable_pages()
        return num_pages <= self._free_pages
