"""The engine's view of its memory: the sequences of its requests in the model's cache.

All of the engine's calls of `KVCache` are here: opening a sequence (from a cached prefix, or as a
fork of a sibling), growing, swapping, closing.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import abc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

from ..core.backend import MemoryLocation
from ..core.cache import KVCache, LayerGroup, Sequence, begun_checkpoint, close_idle
from ..core.cache.block_files import Reading
from ..core.cache.forking import find_beginning, longest_beginning, pages_to_fork
from ..core.cache.growing import surplus_bytes
from ..core.cache.host_blocks import Loading
from ..core.cache.layer_group import UNDERREAD_TOKENS
from ..core.cache.prefix import BLOCK_TOKENS
from ..errors import CapacityError, ConfigError, DriverError
from ..step.piece import Piece
from .options import EngineOptions
from .request import Request
from .scheduler import PreemptionCosts

_LOG = logging.getLogger(__name__)
#: Longest wait for a read when there is nothing else to do: then other requests may have come.
_READ_WAIT_S = 0.005
#: Rows are evicted ahead if less than this part of the budget is left for running requests.
_ROOM_DIVISOR = 32


class MemoryView:
    """Sequences of requests in one cache, used by the engine's thread only.

    Swapped sequences leave rows free for all running requests. Unless `deterministic`, samples
    share the prompt that the first computed.
    """

    def __init__(
        self,
        cache: KVCache,
        given: EngineOptions,
        requests: Mapping[int, Request],
        costs: PreemptionCosts,
    ):
        self.cache = cache
        self._token_s = costs.flops_per_token / costs.flops_per_s
        self.page_bytes = cache.pool.page_bytes
        self._max_chunk_tokens = given.max_num_batched_tokens
        self._forks = not given.deterministic
        # Cached values from other chunk sizes are rounded differently.
        self._prefix_caching = given.prefix_caching and not given.deterministic
        self._num_reserved_rows = given.max_num_seqs + 2
        self._requests = requests
        #: Ended sequences that are still open, and since which submission they are idle.
        self.ending: list[tuple[Sequence, int | None]] = []
        self._num_steps = 0
        self._submitted_at = (0, 0)  # The last two submissions.
        self._fitting = (0, 0), 0
        #: Waiting requests whose prefixes are copied from host memory, or read from files before.
        self.loading: set[Request] = set()
        self._padding: list[Sequence] = []  # Without memory, from `sleep` to the next step.
        self._num_padding = 0  # Sequences that padding writes to.
        self._beside: abc.Sequence[KVCache] = ()
        self._pages_beside = 0  # Of padding there.

    def begin_serving(self, beside: abc.Sequence[KVCache]) -> None:
        """Count open sequences as padding, also of draft models in the caches `beside`.

        `ConfigError` if no token fits the remaining budget.
        """
        self._num_padding, self._beside = len(self.cache.live_sequences()), beside
        for cache in beside:
            pages = sum([each.pages_for(1 + cache.overread_tokens) for each in cache.groups])
            self._pages_beside += pages * len(cache.live_sequences())
        self.fitting_tokens()

    # ---- requests -------------------------------------------------------------------------

    def begin(self, request: Request) -> int:
        """Open a sequence and return its number of cached tokens; on errors, open none."""
        self.end(request)  # Left by an incomplete preemption.
        num_shared, num_matched = len(request.prompt_token_ids) - 1, 0
        with ExitStack() as pins:
            with self.cache.pool.lock:
                leader = self._leader(request)
                if leader is not None:
                    pins.enter_context(self.cache.pinned_state(leader.row, num_shared))
            if leader is not None:
                sequence = leader.fork(num_shared)
        if leader is None:
            tokens = request.tokens(0, request.num_known)
            prompt = tokens if self._may_hit(request) else None
            if prompt is not None and self.cache.states is not None:
                with self.cache.pool.lock:
                    num_matched = self.cache.prefixes.num_matched(prompt, request.tenant)
            sequence = self.cache.open(len(tokens) + 1, prompt=prompt, tenant=request.tenant)
        if request.leader is None and not request.num_preemptions:
            request.num_cached_tokens = sequence.num_tokens
        request.sequence, request.last_step, request.loading = sequence, None, None
        request.has_read = False
        request.num_submitted = sequence.num_tokens
        if self.cache.states is not None:
            request.checkpoints = self._checkpoints(request, num_matched)
        return request.num_submitted

    def _checkpoints(self, request: Request, num_matched: int) -> list[int]:
        """Prompt lengths for checkpoints: where other prompts may diverge from this one."""
        num_prompt, past = len(request.prompt_token_ids), request.num_submitted
        wanted = []
        if self._prefix_caching:
            wanted = [num_matched, (num_prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS]
        if self._forks and any([each.leader is request for each in self._requests.values()]):
            wanted = [num_matched, num_prompt - 1]
        found = []
        for each in sorted(wanted):
            least = BLOCK_TOKENS if each < num_prompt - 1 else 1
            if past + least <= each < num_prompt:
                found.append(each)
                past = each
        return found

    @contextmanager
    def begun_checkpoints(self, chunks: Iterable[Piece]) -> Iterator[list[int]]:
        """Take memory for the checkpoints of the step that the block submits, where there is some.

        Sets `Piece.checkpoints`, and yields their rows, pinned in the block. Call it after `grow`.
        """
        begun: dict[int, tuple[Piece, int]] = {}
        with ExitStack() as pins:
            try:
                for chunk in chunks if self.cache.states is not None else ():
                    for num_tokens in chunk.request.checkpoints:
                        if chunk.num_past_tokens < num_tokens <= chunk.num_tokens:
                            checkpoint = begun_checkpoint(chunk.request.sequence, num_tokens)
                            at = pins.enter_context(checkpoint)
                            if at is not None:  # Another's, where a row's third replaces it.
                                begun[at] = chunk, num_tokens
            except (CapacityError, DriverError):
                _LOG.debug("no memory for a checkpoint", exc_info=True)
            for at, (chunk, num_tokens) in begun.items():
                chunk.checkpoints = (*chunk.checkpoints, (num_tokens, at))
            yield [*begun]

    def grow(self, chunks: Iterable[Piece]) -> None:
        """Grow sequences for `chunks`, and padding after `sleep`; all or, on errors, none."""
        wanted = [(each, 1) for each in self._padding if not each.is_closed]
        step, drafting = self._num_steps + 1, []
        for chunk in chunks:
            request, sequence = chunk.request, chunk.request.sequence
            request.last_step = step  # First: a failed growth may have submitted copies.
            chunk.row = sequence.row
            wanted.append((sequence, chunk.num_past_tokens + chunk.num_new_tokens))
            if chunk.num_drafted:
                drafting.append(chunk)
        self.cache.grow(wanted)
        for chunk in drafting:  # Guesses have memory, and no length until they are accepted.
            chunk.request.sequence.num_tokens = chunk.num_tokens - chunk.num_drafted
        self._padding = []

    def go_back(self, request: Request, num_tokens: int) -> None:
        """Truncate a sequence to `num_tokens`, or the last checkpoint before, after a failed step.

        `ConfigError` if it is nothing, or a window has moved on.
        """
        sequence = request.sequence
        with self.cache.pool.lock:
            if self.cache.states is not None and num_tokens:
                at_rest = self.cache.states.at_rest(sequence.row)
                found = [each for each in at_rest if each <= num_tokens]
                num_tokens = max(found, default=num_tokens)
            sequence.truncate(num_tokens)
        request.num_computed = request.num_submitted = num_tokens

    def note_computed(self, chunks: Iterable[Piece]) -> None:
        """Record that a step with `chunks` was submitted."""
        submitted_at = self.cache.pool.reclaimer.note_submitted()
        # In this order: if an interrupt comes in between, `_idle_since` waits for this step.
        self._submitted_at = (self._submitted_at[1], submitted_at)
        self._num_steps += 1
        for chunk in chunks:
            request = chunk.request
            num_tokens = chunk.num_past_tokens + chunk.num_new_tokens - chunk.num_drafted
            request.num_submitted = num_tokens
            if num_tokens <= len(request.prompt_token_ids):
                self._record(request)

    def lengthen(self, request: Request, num_accepted: int) -> None:
        """Add accepted guesses, whose keys and values were computed, to a running request."""
        request.sequence.num_tokens += num_accepted
        request.num_submitted += num_accepted
        request.num_computed += num_accepted

    def end(self, request: Request, *, keep: bool = True) -> None:
        """Close a request's sequence; with `keep`, its tokens enter the prefix cache. Idempotent.

        If the driver fails, `close_ended` closes it later.
        """
        self.loading.discard(request)
        if isinstance(request.loading, Reading):
            request.loading.is_cancelled = True
        sequence = request.sequence
        if sequence is None:
            return
        if keep:
            self._record(request)
        elif sequence.num_tokens and sequence.is_resident:
            with self.cache.pool.lock:
                self.cache.prefixes.truncate(sequence.row)
        request.sequence = None
        idle_since = None  # It may be in use: copies, or a failed step.
        if request.last_step is not None and request.last_step <= self._num_steps:
            idle_since = self._submitted_at[request.last_step == self._num_steps]
        sequence.kept_until_s = self.cache.rows.now_s + request.params.retention_s
        self._close(sequence, idle_since)

    def _close(self, sequence: Sequence, idle_since: int | None) -> None:
        self.ending.append((sequence, idle_since))
        try:
            self.close_ended()
        except DriverError:
            _LOG.warning("a sequence could not be closed yet", exc_info=True)

    def close_ended(self) -> None:
        """Close ended sequences that are still open; a `DriverError` leaves the rest for later."""
        while self.ending:
            sequence, idle_since = self.ending[-1]
            close_idle(sequence, idle_since)
            self.ending.pop()

    def reclaim(self, num_bytes: int | None = None) -> int:
        """Return `num_bytes` or more, or all, of unused memory to the device; returns the bytes."""
        self.close_ended()
        released = 0
        for cache in (*self._beside, self.cache):
            released += cache.trim(None if num_bytes is None else max(0, num_bytes - released))
        return released

    def sleep(self, *, keeps_prefixes: bool) -> None:
        """Return all memory to the device; no request has a sequence. Waits for the device.

        Padding keeps its memory in models with states, which it begins. With `keeps_prefixes` those
        that fit the pool's host memory stay there, as evicted ones do.
        """
        self.close_ended()
        if self.cache.states is None:
            self._padding = self.cache.live_sequences()
            for sequence in self._padding:
                sequence.truncate(0)
        for cache in (*self._beside, self.cache):
            if not keeps_prefixes:
                cache.forget_prefixes(with_files=False)  # The weights stay the same.
            cache.trim()

    def _record(self, request: Request) -> None:
        sequence = request.sequence
        if not self._prefix_caching or not sequence.is_resident:
            return
        start = self.cache.prefixes.num_recorded(sequence.row)
        end = min(request.num_known, request.num_submitted, sequence.num_tokens)
        if end > start:
            sequence.record(request.tokens(start, end))

    def _may_hit(self, request: Request) -> bool:
        return self._prefix_caching and request.params.prompt_logprobs is None

    def _leader(self, request: Request) -> Sequence | None:
        """Live sequence of the sibling that has computed the whole prompt, for a fork; or None."""
        leader, num_prompt = request.leader, len(request.prompt_token_ids)
        if leader is None or not self._forks or leader.sequence is None or self.is_swapped(leader):
            return None
        # Windows of the leader may have moved on.
        has_windows = any(group.window_tokens is not None for group in self.cache.groups)
        if has_windows or not leader.num_submitted >= num_prompt > 1:
            return None
        # The checkpoint may have been evicted.
        return leader.sequence if self.cache.keeps(leader.sequence.row, num_prompt - 1) else None

    # ---- host memory ----------------------------------------------------------------------

    def can_swap(self, request: Request) -> bool:
        """Whether the sequence can move to host memory: a row and host budget are free."""
        sequence = request.sequence
        if sequence is None or not sequence.num_tokens or not sequence.is_resident:
            return False
        num_swapped = sum(self.is_swapped(each) for each in self._requests.values())
        if num_swapped + 1 + self._num_reserved_rows > self.cache.max_sequences:
            return False
        host = self.cache.pool.stats(MemoryLocation.HOST)
        # Blocks of prefixes give way.
        free_bytes = host.budget_bytes - host.resident_bytes - host.retired_bytes
        return self.held_pages(request) * self.page_bytes <= free_bytes

    def is_swapped(self, request: Request) -> bool:
        """Whether the request's sequence is in host memory."""
        return request.sequence is not None and not request.sequence.is_resident

    def swap_out(self, request: Request) -> bool:
        """Move a request's sequence to host memory; false if that failed and nothing moved."""
        request.last_step = None  # The copies belong to no step.
        try:
            request.sequence.swap_out()
        except (CapacityError, DriverError):
            return False
        return True

    def swap_in(self, request: Request) -> None:
        """Move a request's sequence back from host memory; on errors it stays there."""
        request.last_step = None
        request.sequence.swap_in()

    def offload_ahead(self) -> None:
        """Copy what is evicted next to host memory: while memory is short, or for files."""
        self.cache.host_blocks.keep_ahead()

    @property
    def needs_room(self) -> bool:
        """Whether running requests soon need memory that has to be evicted.

        Not under a broker, which may lend them some.
        """
        pool = self.cache.pool
        return pool.member is None and pool.available_bytes < pool.budget_bytes // _ROOM_DIVISOR

    def make_room_ahead(self, num_pages: int) -> None:
        """Evict for `num_pages`, without waiting until the memory is free."""
        with suppress(DriverError):  # The growth tries again.
            self.cache.pool.make_room_ahead(num_pages * self.page_bytes)

    def wait_for_room(self) -> None:
        """Wait until some of the evicted memory is free."""
        self.cache.pool.reclaimer.wait(until_bytes=1)

    @property
    def can_load(self) -> bool:
        """Whether host memory or files hold prefixes."""
        blocks = self.cache.host_blocks
        return blocks.num_bytes > 0 or blocks.files is not None

    @property
    def num_copied(self) -> int:
        """Requests whose prefixes are copied from host memory now."""
        return sum([isinstance(each.loading, Loading) for each in self.loading])

    def must_load(self, request: Request) -> bool:
        """Whether a waiting request that was looked up should `load` before it begins."""
        return request.num_to_load > 0 and request.loading is None

    def load(self, request: Request) -> bool:
        """Begin to read a waiting request's prefix from files, or to copy it to a parked row.

        What was read is copied later, when the request is looked up again. On errors the request
        computes what `begin` does not find. Returns whether the request can go on without memory
        that others hold.
        """
        tokens, blocks = request.tokens(0, request.num_known), self.cache.host_blocks
        request.num_to_load = 0
        if blocks.files is not None and not request.has_read:
            request.has_read = True
            with self.cache.pool.lock:
                num_there, num_here = find_beginning(self.cache, tokens, request.tenant)
                request.loading = blocks.read(tokens, request.tenant, num_there, self._token_s)
            if request.loading is not None:
                self.loading.add(request)
            if request.loading is not None or not num_here:
                return True
        try:
            if not self._make_room(request, tokens):
                return True  # The next step looks it up again.
            sequence = blocks.begin_beside(tokens, request.tenant)
            self._close(sequence, None)
            if sequence.is_closed:
                request.loading = blocks.loading(sequence.row)
                self.loading.add(request)
        except (CapacityError, DriverError):
            _LOG.debug("a prefix could not be copied", exc_info=True)
        return request.loading is not None

    def _make_room(self, request: Request, tokens: abc.Sequence[int]) -> bool:
        """Evict for a prefix; false if the memory will be free once fences have passed."""
        pool, pages = self.cache.pool, self.peak_pages(len(tokens) + 1)
        with pool.lock:
            num_there = longest_beginning(self.cache, tokens, request.tenant, spares=True)
            pages -= self.peak_pages(num_there) if num_there else 0
        return pool.make_room_ahead(pages * self.page_bytes) or not pool.reclaimer.batches

    def note_loaded(self, *, waits: bool = False) -> None:
        """Let requests begin whose prefixes are complete; with `waits`, wait for one."""
        for request in tuple(self.loading):
            loading = request.loading
            if isinstance(loading, Reading):
                if waits:
                    loading.wait(_READ_WAIT_S)
                if loading.is_set():
                    self.loading.remove(request)
                    request.loading = None
            else:
                assert loading is not None
                if waits:
                    loading.fence.wait()
                if self.cache.host_blocks.has_loaded(loading):
                    self.loading.remove(request)
            waits = False

    def pages_to_resume(self, request: Request) -> int:
        """Pages that swapping a request in takes; its shared pages have stayed mapped."""
        sequence = request.sequence
        pages = self.peak_pages(sequence.num_tokens + 1)
        if sequence.swapped is None:
            return pages
        # Shared pages have stayed.
        moved_pages: int = sum(1 << part.size_class for part in sequence.swapped.parts)
        return min(pages, moved_pages + pages - self.peak_pages(sequence.num_tokens))

    # ---- for the scheduler ----------------------------------------------------------------

    @property
    def total_pages(self) -> int:
        """Pages in the pool's budget, at the most that it may become."""
        return self.cache.pool.most_bytes // self.page_bytes

    def free_pages(self) -> int:
        """Pages of the budget that are not resident, without those that a broker wants back."""
        pool = self.cache.pool
        stats = pool.stats()
        left_bytes = stats.budget_bytes - stats.resident_bytes - pool.withheld_bytes
        return left_bytes // self.page_bytes

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
        return sum([self._peak_pages(group, num_tokens) for group in self.cache.groups])

    def _peak_pages(self, group: LayerGroup, num_tokens: int) -> int:
        overread = self.cache.overread_tokens
        pages = group.pages_for(num_tokens + overread)
        if group.window_tokens is None:
            return pages
        window = group.window_tokens + UNDERREAD_TOKENS + self._max_chunk_tokens + overread
        # Extents are released whole, and both ends of the window may lie within one.
        return min(pages, group.pages_for(window) + 1 + (2 << group.largest_class))

    def pages_to_begin(self, request: Request, num_tokens: int) -> int:
        """Pages that a new sequence takes to hold `num_tokens`, without those shared by a fork."""
        pages = self.peak_pages(num_tokens)
        with self.cache.pool.lock:
            leader = self._leader(request)
            if leader is not None:
                num_shared = len(request.prompt_token_ids) - 1
                pages -= self.peak_pages(num_shared)
                pages += pages_to_fork(leader, num_shared)
        return pages

    def lacking(self, wanted: abc.Sequence[tuple[Request, int]]) -> dict[Request, int]:
        """Pages that sequences lack for `(request, num_tokens)` targets they cannot hold yet."""
        short = self.cache.lacking_room([(each.sequence, to) for each, to in wanted])
        if not short:
            return {}
        requests = {each.sequence: each for each, _ in wanted}
        return {requests[sequence]: self._pages_lacking(sequence, to) for sequence, to in short}

    def _pages_lacking(self, sequence: Sequence, num_tokens: int) -> int:
        num_pages = 0
        for group in self.cache.groups:
            end_tokens = num_tokens + self.cache.overread_tokens
            lacking = group.pages_lacking(sequence.row, sequence.num_tokens, end_tokens)
            if group.window_tokens is not None:
                lacking = min(lacking, self._peak_pages(group, num_tokens))
            num_pages += lacking
        return num_pages

    def held_pages(self, request: Request) -> int:
        """Pages that only this request's sequence references."""
        row: int = request.sequence.row
        mappings = [each for group in self.cache.groups for each in group.table.rows[row].mappings]
        its = [each.extent.num_bytes for each in mappings if each.extent.num_references == 1]
        return sum(its) // self.page_bytes

    def is_ready(self, request: Request) -> bool:
        """Whether the request may begin.

        False while its leader computes the shared prompt, and while its prefix is brought to the
        device.
        """
        if request in self.loading:
            return False
        leader = request.leader if self._forks else None
        if leader is None or leader.output_token_ids or leader.finish_reason is not None:
            return True
        has_prompt = leader.num_submitted >= len(leader.prompt_token_ids)
        return leader.sequence is not None and has_prompt

    def cached_tokens(self, request: Request) -> tuple[int, int]:
        """Leading tokens that rows hold computed, and those after them that lie below.

        Costs about 5 ns per token.
        """
        if self._leader(request) is not None:
            return len(request.prompt_token_ids) - 1, 0
        if not self._may_hit(request):
            return 0, 0
        tokens = request.tokens(0, request.num_known)
        with_files = not request.has_read
        return find_beginning(self.cache, tokens, request.tenant, with_files=with_files)

    def fitting_tokens(self) -> int:
        """Length of the longest request that fits the budget alone, at most a row."""
        asked = (self.total_pages, self.cache.overread_tokens)
        if self._fitting[0] != asked:
            lengths = range(1, self.cache.max_tokens + 1)
            padding_pages = self._num_padding * self.peak_pages(1) + self._pages_beside
            left_pages = self.total_pages - padding_pages
            self._fitting = asked, bisect_right(lengths, left_pages, key=self.peak_pages)
        if not self._fitting[1]:
            raise ConfigError(
                f"the budget of {self.total_pages} pages of {self.page_bytes} bytes does not hold "
                "a single token; raise budget_bytes"
            )
        return self._fitting[1]
