"""The sequences of requests in a cache, and the scheduler's view of their memory.

All of the engine's calls of `KVCache` are here: opening a sequence (from a cached prefix, or as a
fork of a sibling), growing, swapping, closing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable

from ..core.backend import MemoryLocation
from ..core.cache import KVCache, LayerGroup, Sequence, grow_ahead, make_ready
from ..core.cache.growing import surplus_bytes
from ..core.cache.layer_group import UNDERREAD_TOKENS
from ..errors import CapacityError, ConfigError, DriverError
from .planning import PlannedChunk
from .request import Request

_LOG = logging.getLogger(__name__)


class MemoryView:
    """Sequences of requests in one cache, used by the engine's thread only. Implements `CacheView`.

    A sequence grows by at most `max_chunk_tokens` per step, and swapped sequences leave
    `num_reserved_rows` rows free.
    """

    def __init__(
        self,
        cache: KVCache,
        max_chunk_tokens: int,
        *,
        prefix_caching: bool,
        num_reserved_rows: int,
    ):
        self.cache = cache
        self._max_chunk_tokens = max_chunk_tokens
        self._prefix_caching = prefix_caching
        self._num_reserved_rows = num_reserved_rows
        self._requests: dict[int, Request] = {}
        self._leaders: dict[int, int] = {}
        self._sequences: dict[int, Sequence] = {}
        self._ending: list[tuple[Sequence, int | None]] = []
        # Computed tokens of each sequence; its length grows earlier, before the step is submitted.
        self._computed_tokens: dict[int, int] = {}
        # Writable tokens of each sequence when last asked. A hint, cleared by failed growth: if it
        # is too high, growing makes room.
        self._room_tokens: dict[int, int] = {}
        # Number of the step that each sequence was last grown for, and the last two submissions: a
        # request that ends by length is not in the step that runs when its last token is read.
        self._last_steps: dict[int, int] = {}
        self._num_steps = 0
        self._submitted_at = (0, 0)

    # ---- requests -------------------------------------------------------------------------

    def add(self, request: Request, leader_id: int | None = None) -> None:
        """Register a request; with `leader_id`, a sample that may fork that request's prompt."""
        self._requests[request.request_id] = request
        if leader_id is not None and self._prefix_caching:
            self._leaders[request.request_id] = leader_id

    def begin(self, request_id: int) -> int:
        """Open a sequence and return its number of cached tokens; on errors, open none."""
        self.end(request_id)  # An incomplete preemption may have left a sequence.
        request = self._requests[request_id]
        tokens = request.tokens(0, self._num_known(request))
        leader = self._leader(request_id)
        if leader is not None:
            sequence = leader.fork(len(request.prompt_token_ids) - 1)
        else:
            prompt = tokens if self._prefix_caching else None
            sequence = self.cache.open(len(tokens) + 1, prompt=prompt, tenant=request.tenant)
        if request_id not in self._leaders and not request.num_preemptions:
            request.num_cached_tokens = sequence.num_tokens
        self._sequences[request_id] = sequence
        self._computed_tokens[request_id] = sequence.num_tokens
        return sequence.num_tokens

    def row(self, request_id: int) -> int:
        """Row of a request's sequence."""
        return self._sequences[request_id].row

    def grow(self, wanted: Iterable[tuple[int, int]]) -> None:
        """Grow sequences to `(request_id, num_tokens)` targets, all of them or, on errors, none."""
        targets, sequences = list(wanted), self._sequences
        # First: a failed growth may have submitted copies.
        self._last_steps.update(dict.fromkeys([each for each, _ in targets], self._num_steps + 1))
        try:
            self.cache.grow([(sequences[each], to) for each, to in targets])
        except BaseException:
            self._room_tokens.clear()
            raise

    def make_ready(
        self,
        wanted: Iterable[tuple[int, int]],
        num_new_tokens: int = 0,
        *,
        begins_empty: bool = True,
    ) -> bool:
        """Prepare memory for upcoming growth, without blocking; returns whether all is ready.

        `wanted` is as for `grow`; `num_new_tokens` are of a request that begins or resumes next,
        and `begins_empty` is whether it has no cached tokens. A `DriverError` affects parked rows
        at most.
        """
        short = [(self._sequences[each], to) for each, to in self._short(wanted)]
        if not short and not num_new_tokens:
            return True
        is_ready = is_ready_for_short = make_ready(
            self.cache, short, num_new_tokens, begins_empty=begins_empty
        )
        if not is_ready and short and num_new_tokens:
            # Running requests alone may still fit.
            is_ready_for_short = make_ready(self.cache, short)
        if is_ready_for_short:
            grow_ahead(self.cache, short)
        return is_ready

    def submitting(self, chunks: Iterable[PlannedChunk]) -> contextlib.AbstractContextManager[None]:
        """Context in which a step of grown `chunks` is submitted; see `KVCache.submitting`."""
        return self.cache.submitting(
            (self.row(chunk.request_id), chunk.num_past_tokens, chunk.num_tokens)
            for chunk in chunks
        )

    def note_computed(self, chunks: Iterable[PlannedChunk]) -> None:
        """Record that a step with `chunks` was submitted."""
        submitted_at = self.cache.pool.reclaimer.note_submitted()
        # In this order: if an interrupt comes in between, `_idle_since` waits for this step.
        self._submitted_at = (self._submitted_at[1], submitted_at)
        self._num_steps += 1
        for chunk in chunks:
            request_id, num_tokens = chunk.request_id, chunk.num_tokens
            self._computed_tokens[request_id] = num_tokens
            if num_tokens <= len(self._requests[request_id].prompt_token_ids):
                self._record(request_id)

    def shrink(self, request_id: int, num_tokens: int) -> None:
        """Drop tokens from `num_tokens` on, which were not computed after all."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.num_tokens > num_tokens:
            sequence.truncate(num_tokens)

    def end(self, request_id: int, *, keep: bool = True) -> None:
        """Close a request's sequence; with `keep`, its tokens enter the prefix cache. Idempotent.

        If the driver fails, `close_ended` closes it later. The request may begin again until
        `remove`.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        if keep:
            self._record(request_id)
        elif sequence.num_tokens and sequence.is_resident:
            with self.cache.pool.lock:
                self.cache.prefixes.truncate(sequence.row)
        del self._sequences[request_id], self._computed_tokens[request_id]
        self._room_tokens.pop(request_id, None)
        self._ending.append((sequence, self._idle_since(request_id)))
        try:
            self.close_ended()
        except DriverError:
            _LOG.warning("a sequence could not be closed yet", exc_info=True)

    def close_ended(self) -> None:
        """Close ended sequences that are still open; a `DriverError` leaves the rest for later."""
        while self._ending:
            sequence, idle_since = self._ending[-1]
            sequence.close(idle_since=idle_since)
            self._ending.pop()

    def _idle_since(self, request_id: int) -> int | None:
        """Submission since which no step uses an ending sequence; None if it may be in use."""
        last_step = self._last_steps.pop(request_id, None)
        if last_step is None or last_step > self._num_steps:
            return None  # Work outside a counted step: copies, or a failed step.
        return self._submitted_at[last_step == self._num_steps]

    def remove(self, request_id: int) -> None:
        """Forget a request whose sequence has ended. Idempotent."""
        self._requests.pop(request_id, None)
        self._leaders.pop(request_id, None)

    def make_room(self, num_bytes: int) -> None:
        """Free up to `num_bytes` for growth. Waits for the device."""
        self._room_tokens.clear()
        self.cache.make_room(num_bytes)

    def reclaim(self, num_bytes: int | None = None) -> int:
        """Return at least `num_bytes`, or all, of unused memory to the device; returns the bytes.

        Memory beyond the sequences' lengths is unused, too. Waits for the device.
        """
        self.close_ended()
        self._room_tokens.clear()
        return self.cache.trim(num_bytes)

    def _record(self, request_id: int) -> None:
        sequence, request = self._sequences[request_id], self._requests[request_id]
        if not self._prefix_caching or not sequence.is_resident:
            return
        start = self.cache.prefixes.num_recorded(sequence.row)
        end = min(self._num_known(request), self._computed_tokens[request_id], sequence.num_tokens)
        if end > start:
            sequence.record(request.tokens(start, end))

    @staticmethod
    def _num_known(request: Request) -> int:
        return len(request.prompt_token_ids) + len(request.output_token_ids)

    def _leader(self, request_id: int) -> Sequence | None:
        """Live sequence of the sibling that has computed the whole prompt, for a fork; or None."""
        leader_id = self._leaders.get(request_id, -1)
        leader = self._sequences.get(leader_id)
        if leader is None or not leader.is_resident:
            return None
        num_prompt = len(self._requests[request_id].prompt_token_ids)
        if num_prompt < 2 or self._computed_tokens[leader_id] < num_prompt:
            return None
        if any(group.window_tokens is not None for group in self.cache.groups):
            return None  # The leader's windows may have moved on.
        return leader

    # ---- host memory ----------------------------------------------------------------------

    def can_swap(self, request_id: int) -> bool:
        """Whether the sequence can move to host memory: a row and host budget are free."""
        sequence = self._sequences.get(request_id)
        if sequence is None or not sequence.num_tokens or not sequence.is_resident:
            return False
        num_swapped = sum(not each.is_resident for each in self._sequences.values())
        if num_swapped + 1 + self._num_reserved_rows > self.cache.max_sequences:
            return False
        host = self.cache.pool.stats(MemoryLocation.HOST)
        free_bytes = host.budget_bytes - host.resident_bytes - host.retired_bytes
        return self.held_pages(request_id) * self.page_bytes <= free_bytes

    def is_swapped(self, request_id: int) -> bool:
        """Whether the request's sequence is in host memory."""
        return not self._sequences[request_id].is_resident

    def swap_out(self, request_id: int) -> bool:
        """Move a request's sequence to host memory; false if that failed and nothing moved."""
        self._last_steps.pop(request_id, None)  # The copies belong to no step.
        self._room_tokens.pop(request_id, None)
        try:
            self._sequences[request_id].swap_out()
        except (CapacityError, DriverError):
            return False
        return True

    def swap_in(self, request_id: int) -> None:
        """Move a request's sequence back from host memory; on errors it stays there."""
        self._last_steps.pop(request_id, None)
        self._sequences[request_id].swap_in()

    def pages_to_resume(self, request_id: int) -> int:
        """Pages that swapping a request in takes; its shared pages have stayed mapped."""
        sequence = self._sequences[request_id]
        pages = self.peak_pages(sequence.num_tokens + 1)
        if sequence.swapped is None:
            return pages
        # Shared pages have stayed.
        moved_pages = sequence.swapped.num_pages
        return min(pages, moved_pages + pages - self.peak_pages(sequence.num_tokens))

    # ---- what the scheduler may know ------------------------------------------------------

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.cache.pool.page_bytes

    @property
    def fence_waited_s(self) -> float:
        """Seconds spent waiting for fences so far."""
        return self.cache.pool.reclaimer.waited_s

    @property
    def total_pages(self) -> int:
        """Pages in the pool's budget."""
        return self.cache.pool.budget_bytes // self.page_bytes

    def free_pages(self) -> int:
        """Pages of the budget that are not resident."""
        stats = self.cache.pool.stats()
        return (stats.budget_bytes - stats.resident_bytes) // self.page_bytes

    def evictable_pages(self, enough_pages: int) -> int:
        """Pages that eviction can free; counting stops at `enough_pages`."""
        pool = self.cache.pool
        with pool.lock:
            return pool.pressure.freeable_bytes(enough_pages * self.page_bytes) // self.page_bytes

    def surplus_pages(self) -> int:
        """Pages that open sequences hold beyond their length."""
        with self.cache.pool.lock:
            return surplus_bytes(self.cache) // self.page_bytes

    def peak_pages(self, num_tokens: int) -> int:
        """Most pages a sequence holds at once while it grows from empty to `num_tokens`."""
        return sum(self._peak_pages(group, num_tokens) for group in self.cache.groups)

    def _peak_pages(self, group: LayerGroup, num_tokens: int) -> int:
        geometry, overread = group.geometry, self.cache.overread_tokens
        pages = geometry.pages_for(min(num_tokens + overread, geometry.row_tokens))
        if group.window_tokens is None:
            return pages
        window = group.window_tokens + UNDERREAD_TOKENS + self._max_chunk_tokens + overread
        # Extents are released whole, and both ends of the window may lie within one.
        return min(pages, geometry.pages_for(window) + 1 + (2 << group.largest_class))

    def pages_to_begin(self, request_id: int, num_tokens: int) -> int:
        """Pages that a new sequence takes to hold `num_tokens`, without those shared by a fork."""
        pages = self.peak_pages(num_tokens)
        leader = self._leader(request_id)
        if leader is not None:
            num_shared = len(self._requests[request_id].prompt_token_ids) - 1
            pages -= self.peak_pages(num_shared)
            pages += self.cache.pages_to_fork(leader, num_shared)
        return pages

    def lacking(self, wanted: Iterable[tuple[int, int]]) -> dict[int, int]:
        """Pages that sequences lack for `(request_id, num_tokens)` targets they cannot hold yet."""
        return {each: self._pages_lacking(each, to) for each, to in self._short(wanted)}

    def _short(self, wanted: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        room_tokens, found = self._room_tokens, []
        for each in wanted:
            request_id, num_tokens = each
            if num_tokens > room_tokens.get(request_id, 0):
                room_tokens[request_id] = room = self._sequences[request_id].writable_tokens
                if num_tokens > room:
                    found.append(each)
        return found

    def _pages_lacking(self, request_id: int, num_tokens: int) -> int:
        sequence = self._sequences[request_id]
        num_pages = 0
        for group in self.cache.groups:
            end_tokens = num_tokens + self.cache.overread_tokens
            lacking = group.pages_lacking(sequence.row, sequence.num_tokens, end_tokens)
            if group.window_tokens is not None:
                lacking = min(lacking, self._peak_pages(group, num_tokens))
            num_pages += lacking
        return num_pages

    def held_pages(self, request_id: int) -> int:
        """Pages that only this request's sequence references."""
        row = self._sequences[request_id].row
        return sum(
            mapping.extent.num_bytes // self.page_bytes
            for group in self.cache.groups
            for mapping in group.table.rows[row].mappings
            if mapping.extent.num_references == 1
        )

    def is_ready(self, request_id: int) -> bool:
        """Whether the request may begin; false while its leader computes the shared prompt."""
        leader = self._requests.get(self._leaders.get(request_id, -1))
        if leader is None or leader.output_token_ids:
            return True
        return self._computed_tokens.get(leader.request_id, 0) >= len(leader.prompt_token_ids)

    def cached_tokens(self, request_id: int) -> int:
        """Leading tokens that a new sequence would find computed. Costs about 5 ns per token."""
        request = self._requests[request_id]
        if self._leader(request_id) is not None:
            return len(request.prompt_token_ids) - 1
        if not self._prefix_caching:
            return 0
        tokens = request.tokens(0, self._num_known(request) - 1)
        with self.cache.pool.lock:
            match = next(self.cache.prefixes.matches(tokens, request.tenant), None)
        return 0 if match is None else match.num_tokens

    def fitting_tokens(self) -> int:
        """Length of the longest request that fits the budget alone, at most a row."""
        total_pages = self.total_pages
        low, high = 0, self.cache.max_tokens
        middle = high  # Usually a whole row fits.
        while low < high:
            if self.peak_pages(middle) <= total_pages:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        if not low:
            raise ConfigError(
                f"the budget of {self.total_pages} pages of {self.page_bytes} bytes does not hold "
                "a single token; raise budget_bytes"
            )
        return low
