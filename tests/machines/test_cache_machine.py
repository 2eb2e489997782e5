"""Random operations on a cache, checked by contents.

Every token written carries a stamp that is unique to that write, in keys and values of every layer.
After any history of opening, growing, shrinking, closing, adopting, forking, reordering, prefix
hits, swapping, saving, exporting, trimming, held fences and failing driver calls, each
live sequence must read exactly its own stamps. That one comparison finds aliasing, memory reused
too early, pages off by one, and rows adopted while in use. Some caches also hold states, which
carry the stamp of their last token, with checkpoints.

The invariants I1-I9 are checked after every step as well. Not tested here: several threads (one
thread works on a cache), and kernels that read asynchronously (the GPU tests do).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers.naive_models import ModelCache
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from vmkv import (
    BackendUsage,
    ConfigError,
    ExtentPool,
    HostBackend,
    KVCache,
    OutOfAddressSpaceError,
    OutOfPagesError,
    Sequence,
    SequenceFullError,
)
from vmkv.core.backend import MemoryLocation
from vmkv.core.cache import (
    StateShape,
    block_files,
    forking,
    growing,
    host_blocks,
    layer_group,
    prefix,
)
from vmkv.core.cache.forking import CostModel
from vmkv.errors import DriverError
from vmkv.testing import FaultInjectingBackend
from vmkv.units import KiB

PAGE = 4 * KiB
MAX_TOKENS = 60
BUDGET_PAGES = 48
NUM_ROWS = 5
HOST_PAGES = 20
# A token of 2 layers x 1 head x (24 + 8) x 8 B is 512 B; 48 + 16 leave gaps on purpose.
STATE_WIDTH = 700  # Two pages, of which one is filled in part.
SHAPE: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 24, "v_head_dim": 8, "dtype": torch.int64}
lengths = st.one_of(st.integers(0, 5), st.integers(0, MAX_TOKENS + 5))
picks = st.integers(0, 3)  # Of the live sequences, in the order of their opening.
has_sequences = precondition(lambda self: self.by_id)
is_stateless = precondition(lambda self: not self.has_states)


class CacheMachine(RuleBasedStateMachine):
    """One cache of a full and a windowed group, beside a model of its contents."""

    #: Tokens of a windowed layer that a query sees; varied by the initial rule.
    windows: ClassVar[list[int]] = [1, 3, 8, 20]

    @initialize(
        window_tokens=st.sampled_from(windows),
        underread_tokens=st.sampled_from([0, 0, 10]),
        always_aliases=st.booleans(),
        is_shareable=st.booleans(),
        has_states=st.booleans(),
    )
    def make(
        self,
        window_tokens: int,
        underread_tokens: int,
        always_aliases: bool,
        is_shareable: bool,
        has_states: bool,
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(layer_group, "UNDERREAD_TOKENS", underread_tokens)
        for module in (prefix, host_blocks, block_files, forking, growing):
            self.patch.setattr(module, "BLOCK_TOKENS", 4)
        self.host = HostBackend(PAGE)
        self.backend = FaultInjectingBackend(self.host)
        pool = ExtentPool(
            self.backend,
            BUDGET_PAGES * PAGE,
            close_when_unused=True,
            host_budget_bytes=HOST_PAGES * PAGE,
            is_shareable=is_shareable,
        )
        self.cache = KVCache(
            pool,
            max_tokens=MAX_TOKENS,
            max_sequences=NUM_ROWS,
            layers_per_group=2,
            cost_model=CostModel(map_us=0, unmap_us=0) if always_aliases else None,
        )
        self.window_tokens = window_tokens
        self.cache.add_layers([0, 1], **SHAPE)
        self.cache.add_layers([2, 3], **SHAPE, window_tokens=window_tokens)
        if has_states:
            self.cache.add_states({4: [StateShape((STATE_WIDTH,), torch.int64)]})
        self.has_states = has_states
        self.model = ModelCache()
        self.by_id: dict[int, Sequence] = {}
        self.said: dict[int, list[int]] = {}  # Recorded tokens, which prompts may find.
        self.is_shareable = is_shareable
        self._temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self._temporary.name)
        self.num_rows_free = NUM_ROWS
        self.unmaps_at_hold: int | None = None

    # ---- tools ------------------------------------------------------------------------

    def _picked(self, pick: int) -> int:
        keys = sorted(self.by_id)
        return keys[pick % len(keys)]

    def _stamp(self, stamp: int, layer: int, value: int) -> int:
        return stamp * 16 + layer * 2 + value

    def _write(self, key: int, start: int, stamps: list[int]) -> None:
        sequence = self.by_id[key]
        self.cache.check()  # Writing would fault where memory is missing.
        for layer in self.cache.layers:
            for value, tensor in enumerate((sequence.keys(layer), sequence.values(layer))):
                fresh = [self._stamp(stamp, layer, value) for stamp in stamps]
                tensor[start:] = torch.tensor(fresh, dtype=torch.int64)[:, None, None]

        if self.has_states and sequence.num_tokens:
            [states] = self.cache.states.tensors(4)
            states[sequence.row] = self.model.stamps[key][-1]

    def _refuses_if_swapped(self, sequence: Sequence, use: Callable[[], object]) -> bool:
        """Whether `sequence` is swapped out; if so, `use` must be refused and change nothing."""
        if sequence.is_resident:
            return False
        with pytest.raises(ConfigError, match="swapped out"):
            use()
        return True

    def _fault(self, fail_at: int) -> None:
        """Make a driver call of the next operation fail (0: none)."""
        self.backend.arm(fail_at)
        if fail_at:
            self.unmaps_at_hold = None  # Undoing a failed batch unmaps, rightly.

    def _end_fault(self) -> bool:
        """Whether the fault struck."""
        struck = self.backend.failed_call is not None
        self.backend.arm(0)
        return struck

    def _opened(self, key: int, sequence: Sequence) -> None:
        """Add a sequence with the first tokens of `key`, in a row of its own."""
        self.num_rows_free -= 1
        self.by_id[self.model.fork(key, sequence.num_tokens)] = sequence

    def _must_fit(self, key: int, num_tokens: int) -> bool:
        """Whether the pool can supply the growth even if live rows give nothing back."""
        stats = self.cache.stats()
        missing = 0
        for group in self.cache.groups:
            pages = group.table.rows[self.by_id[key].row]
            if pages.shared_end_page:
                return False  # Shared extents may have to be copied.
            missing += max(0, group.pages_for(num_tokens) - pages.end_page)
        live_bytes = stats.resident_bytes - stats.parked_bytes
        return live_bytes + missing * PAGE <= self.cache.pool.stats().budget_bytes

    # ---- sequences --------------------------------------------------------------------

    @rule(hint=lengths)
    def open(self, hint: int) -> None:
        try:
            sequence = self.cache.open(hint)
        except OutOfAddressSpaceError:
            assert 0 == self.num_rows_free
            return
        self.num_rows_free -= 1
        self.by_id[self.model.open()] = sequence
        assert 0 == sequence.num_tokens

    @has_sequences
    @rule(pick=picks, num_tokens=lengths, fail_at=st.sampled_from([0, 0, 0, 1, 2, 3, 5]))
    def append(self, pick: int, num_tokens: int, fail_at: int) -> None:
        key = self._picked(pick)
        sequence = self.by_id[key]
        if self._refuses_if_swapped(sequence, lambda: sequence.append(num_tokens)):
            return
        start = sequence.num_tokens
        must_fit = self._must_fit(key, start + num_tokens)
        self._fault(fail_at)
        try:
            sequence.append(num_tokens)
        except SequenceFullError:
            self._end_fault()
            assert start + num_tokens > MAX_TOKENS
        except OutOfPagesError:
            assert not self._end_fault()
            assert not must_fit
        except DriverError:
            assert self._end_fault()
        else:
            self._end_fault()
            assert start + num_tokens <= MAX_TOKENS
            self._write(key, start, self.model.append(key, num_tokens))
        assert len(self.model.stamps[key]) == sequence.num_tokens

    @has_sequences
    @rule(num_tokens=lengths)
    def append_to_all(self, num_tokens: int) -> None:
        keys = [key for key in sorted(self.by_id) if self.by_id[key].is_resident]
        before = [self.by_id[key].num_tokens for key in keys]
        wanted = [(self.by_id[key], self.by_id[key].num_tokens + num_tokens) for key in keys]
        try:
            self.cache.grow(wanted)
        except (SequenceFullError, OutOfPagesError):
            assert before == [self.by_id[key].num_tokens for key in keys]
            return
        for key, start in zip(keys, before, strict=True):
            self._write(key, start, self.model.append(key, num_tokens))

    @has_sequences
    @rule(pick=picks, share=st.floats(0, 1.1), fail_at=st.sampled_from([0, 0, 1]))
    def truncate(self, pick: int, share: float, fail_at: int) -> None:
        key = self._picked(pick)
        sequence = self.by_id[key]
        if self._refuses_if_swapped(sequence, lambda: sequence.truncate(0)):
            return
        num_tokens = int(sequence.num_tokens * share)
        self._fault(fail_at)
        try:
            sequence.truncate(num_tokens)
        except ConfigError:
            self._end_fault()
            # Too long, or into tokens that the window has unmapped.
            lost = sequence.num_tokens - num_tokens > 0 and num_tokens > 0
            assert num_tokens > sequence.num_tokens or lost
        except DriverError:
            assert self._end_fault()
        else:
            self._end_fault()
            self.model.truncate(key, num_tokens)
        assert len(self.model.stamps[key]) == sequence.num_tokens

    @has_sequences
    @rule(pick=picks, fail_at=st.sampled_from([0, 0, 0, 1]))
    def close(self, pick: int, fail_at: int) -> None:
        key = self._picked(pick)
        self._fault(fail_at)
        try:
            self.by_id[key].close()
        except DriverError:
            assert self._end_fault()
            assert not self.by_id[key].is_closed
            self.by_id[key].close()
        self._end_fault()
        self.model.close(key)
        del self.by_id[key]
        self.num_rows_free += 1

    @has_sequences
    @rule(pick=picks, fail_at=st.sampled_from([0, 0, 0, 1, 2, 3, 4]))
    def checkpoint(self, pick: int, fail_at: int) -> None:
        """Keep the states; an eviction for it may take other checkpoints."""
        sequence = self.by_id[self._picked(pick)]
        if self._refuses_if_swapped(sequence, sequence.checkpoint):
            return
        self._fault(fail_at)
        try:
            sequence.checkpoint()
        except OutOfPagesError:
            assert not self._end_fault()
        except DriverError:
            assert self._end_fault()
        self._end_fault()

    # ---- sharing ----------------------------------------------------------------------

    @has_sequences
    @rule(pick=picks, share=st.floats(0, 1), fail_at=st.sampled_from([0, 0, 0, 1, 2, 3, 4, 6]))
    def fork(self, pick: int, share: float, fail_at: int) -> None:
        key = self._picked(pick)
        source = self.by_id[key]
        if self._refuses_if_swapped(source, source.fork):
            return
        num_tokens = int(source.num_tokens * share)
        self._fault(fail_at)
        try:
            fork = source.fork(num_tokens)
        except OutOfAddressSpaceError:
            assert 0 == self.num_rows_free
        except ConfigError:
            assert 0 < num_tokens < source.num_tokens  # The window has unmapped it.
        except OutOfPagesError:
            assert not self._end_fault()
        except DriverError:
            assert self._end_fault()
        else:
            self._opened(key, fork)
            assert num_tokens == fork.num_tokens
        self._end_fault()

    @has_sequences
    @is_stateless
    @rule(pick=picks, sources=st.lists(picks, min_size=NUM_ROWS, max_size=NUM_ROWS))
    def reorder(self, pick: int, sources: list[int]) -> None:
        """All sequences as long as the picked one go on from each other."""
        length = self.by_id[self._picked(pick)].num_tokens
        keys = [
            key
            for key, each in sorted(self.by_id.items())
            if each.num_tokens == length and each.is_resident
        ]
        chosen = [source % len(keys) for source in sources[: len(keys)]]
        try:
            self.cache.reorder([self.by_id[key] for key in keys], chosen)
        except OutOfPagesError:
            return
        self.unmaps_at_hold = None  # An exchange waits for the device.
        self.model.reorder(keys, chosen)

    @has_sequences
    @rule(pick=picks)
    def record(self, pick: int) -> None:
        """Stamps serve as token ids: equal ids mean equal contents."""
        key = self._picked(pick)
        sequence = self.by_id[key]
        if self._refuses_if_swapped(sequence, lambda: sequence.record([1])):
            return
        known = self.cache.prefixes.num_recorded(sequence.row)
        sequence.record(self.model.stamps[key][known:])
        if key not in self.said:
            self.said[key] = []
        self.said[key] = list(self.model.stamps[key])

    @precondition(lambda self: self.said)
    @rule(pick=st.integers(0, 30), num_new=st.integers(0, 9), share=st.floats(0, 1))
    def open_with_prompt(self, pick: int, num_new: int, share: float) -> None:
        """The prompt begins with tokens recorded by a live or an ended sequence."""
        said = self.said[sorted(self.said)[pick % len(self.said)]]
        prompt = said[: int(len(said) * share)] + [-1 - at for at in range(num_new + 1)]
        before = self.cache.prefixes.num_hits
        try:
            sequence = self.cache.open(prompt=prompt)
        except OutOfAddressSpaceError:
            return
        except OutOfPagesError:
            return
        self.num_rows_free -= 1
        key = self.model.open()
        self.model.stamps[key] = prompt[: sequence.num_tokens]
        assert sequence.num_cached_tokens == sequence.num_tokens < len(prompt)
        assert min(self.model.stamps[key], default=0) >= 0
        assert self.cache.prefixes.num_hits - before == bool(sequence.num_tokens)
        self.by_id[key] = sequence

    # ---- host memory ------------------------------------------------------------------

    @has_sequences
    @rule(pick=picks, fail_at=st.sampled_from([0, 0, 0, 1, 2, 3, 5, 7]))
    def swap_out(self, pick: int, fail_at: int) -> None:
        sequence = self.by_id[self._picked(pick)]
        was_resident = sequence.is_resident
        self._fault(fail_at)
        self.unmaps_at_hold = None  # It waits for the device.
        try:
            sequence.swap_out()
        except ConfigError:
            assert not was_resident
        except OutOfPagesError:
            assert sequence.is_resident
        except DriverError:
            assert self._end_fault()  # It is whole on either side, as `swap_in` shows.
        else:
            assert not sequence.is_resident
        self._end_fault()

    @has_sequences
    @rule(pick=picks, fail_at=st.sampled_from([0, 0, 0, 1, 2, 3, 5, 7, 9]))
    def swap_in(self, pick: int, fail_at: int) -> None:
        key = self._picked(pick)
        sequence = self.by_id[key]
        was_resident = sequence.is_resident
        address = self.cache.keys(0)[sequence.row].data_ptr()
        self._fault(fail_at)
        try:
            sequence.swap_in()
        except OutOfPagesError:
            assert (False, False) == (was_resident, sequence.is_resident)
        except DriverError:
            assert self._end_fault()
            assert was_resident == sequence.is_resident
        else:
            assert sequence.is_resident
            assert address == self.cache.keys(0)[sequence.row].data_ptr()
        self._end_fault()

    # ---- disk, and other processes ----------------------------------------------------

    @has_sequences
    @rule(pick=picks, fail_at=st.sampled_from([0, 0, 0, 2, 5, 9]))
    def save_and_load(self, pick: int, fail_at: int) -> None:
        """A loaded sequence has the contents of the saved one, which may be swapped out."""
        key = self._picked(pick)
        self._fault(fail_at)
        try:
            self.by_id[key].save(self.folder / "sequence")
            loaded = self.cache.load(self.folder / "sequence")
        except OutOfAddressSpaceError:
            assert 0 == self.num_rows_free
        except OutOfPagesError:
            assert not self._end_fault()
        except DriverError:
            assert self._end_fault()
        else:
            self._opened(key, loaded)
        self._end_fault()

    @precondition(lambda self: self.is_shareable)
    @has_sequences
    @is_stateless
    @rule(pick=picks)
    def export(self, pick: int) -> None:
        """Another backend's cache reads the exported extents, which are frozen from then on."""
        key = self._picked(pick)
        sequence = self.by_id[key]
        if self._refuses_if_swapped(sequence, lambda: sequence.export(self.folder / "s")):
            return
        self.unmaps_at_hold = None  # Revoking write access waits for the device.
        try:
            exporter = sequence.export(self.folder / "s")
        except ConfigError:
            return  # It fills no extent, or the window has unmapped its beginning.
        with exporter, self._importer() as other:
            exporter.start()
            imported = other.import_prefix(self.folder / "s")
            assert exporter.num_tokens == imported.num_tokens <= sequence.num_tokens
            self._assert_content(imported, self.model.stamps[key][: imported.num_tokens])
            other.check()
            imported.append(3)
            self._assert_content(imported, self.model.stamps[key][: imported.num_tokens - 3])

    def _importer(self) -> KVCache:
        backend = HostBackend(PAGE)
        pool = ExtentPool(backend, 64 * PAGE, close_when_unused=True)
        cache = KVCache(pool, max_tokens=MAX_TOKENS + 3, max_sequences=1, layers_per_group=2)
        for group in self.cache.groups:
            layers = [layer for layer in self.cache.layers if self.cache.place(layer)[0] is group]
            # A gap of a dropped layer that could not be compacted is needed here as well.
            gaps = range(100, 100 + group.geometry.num_layers - len(layers))
            cache.add_layers([*layers, *gaps], **SHAPE, window_tokens=group.window_tokens)
            cache.drop_layers(gaps)
        return cache

    # ---- memory -----------------------------------------------------------------------

    @rule(num_pages=st.none() | st.integers(0, 20), fail_at=st.sampled_from([0, 0, 1, 2, 4]))
    def trim(self, num_pages: int | None, fail_at: int) -> None:
        self._fault(fail_at)
        try:
            self.cache.trim(None if num_pages is None else num_pages * PAGE)
        except DriverError:
            assert self._end_fault()
        else:
            if num_pages is None:
                stats = self.cache.stats()
                assert (0, 0, 0) == (stats.parked_bytes, stats.free_bytes, stats.retired_bytes)
        self._end_fault()

    # ---- combinations of operations ---------------------------------------------------

    @rule(
        num_tokens=st.integers(8, MAX_TOKENS),
        num_steps=st.integers(1, 4),
        then=st.sampled_from(["stay", "park", "fork and park", "fork and move", "move"]),
    )
    def say(self, num_tokens: int, num_steps: int, then: str) -> None:
        """Open a prompt, append it in chunks and record it, so that later prompts can find it.

        States are kept after each chunk but the last.
        """
        known = set(self.by_id)
        self.open(num_tokens)
        if known == set(self.by_id):
            return
        (key,) = set(self.by_id) - known
        pick = sorted(self.by_id).index(key)
        for step in range(num_steps):
            if step:
                self.checkpoint(pick, 0)
            self.append(pick, num_tokens // num_steps, 0)
        self.record(pick)
        if "fork" in then:
            self.fork(pick, 1.0, 0)
        if "park" in then:
            self.close(pick, 0)
        if "move" in then:
            self.swap_out(pick, 0)

    @has_sequences
    @is_stateless
    @rule(
        pick=picks,
        num_forks=st.integers(1, 3),
        num_tokens=st.integers(0, 6),
        sources=st.lists(picks, min_size=NUM_ROWS, max_size=NUM_ROWS),
    )
    def search_with_beams(
        self, pick: int, num_forks: int, num_tokens: int, sources: list[int]
    ) -> None:
        """Forks of a sequence diverge, are recorded, and go on from each other."""
        for _ in range(num_forks):
            self.fork(pick, 1.0, 0)
        length = self.by_id[self._picked(pick)].num_tokens
        chosen = [at for at, key in enumerate(sorted(self.by_id)) if self._is_beam(key, length)]
        for at in chosen:
            self.append(at, num_tokens, 0)
        for at in chosen:
            self.record(at)
        self.reorder(pick, sources)

    def _is_beam(self, key: int, length: int) -> bool:
        sequence = self.by_id[key]
        return sequence.is_resident and sequence.num_tokens == length

    # ---- when memory is full ----------------------------------------------------------

    @rule(num_pages=st.integers(1, BUDGET_PAGES))
    def lower_budget(self, num_pages: int) -> None:
        """A refused budget is refused again: a second call cannot evict more."""
        self.unmaps_at_hold = None  # Making room waits for the device.
        pool = self.cache.pool
        try:
            pool.set_budget(num_pages * PAGE)
        except ConfigError:
            with pytest.raises(ConfigError, match="in use"):
                pool.set_budget(num_pages * PAGE)
            assert pool.stats().resident_bytes > num_pages * PAGE
        pool.set_budget(BUDGET_PAGES * PAGE)

    @contextmanager
    def _full(self, num_free_pages: int) -> Iterator[None]:
        """Leave only `num_free_pages` of memory for the length of a block."""
        self.unmaps_at_hold = None
        pool = self.cache.pool
        pool.reclaimer.wait()
        pool.trim()
        full_bytes = max(PAGE, pool.stats().created_bytes + num_free_pages * PAGE)
        pool.set_budget(min(full_bytes, BUDGET_PAGES * PAGE))
        try:
            yield
        finally:
            pool.set_budget(BUDGET_PAGES * PAGE)

    @precondition(lambda self: self.said)
    @rule(
        picks=st.lists(st.integers(0, 30), min_size=1, max_size=3),
        num_new=st.integers(0, 9),
        share=st.one_of(st.just(1.0), st.floats(0.5, 1)),
        num_free_pages=st.integers(0, 3),
    )
    def open_with_prompts_when_full(
        self, picks: list[int], num_new: int, share: float, num_free_pages: int
    ) -> None:
        with self._full(num_free_pages):
            for pick in picks:
                self.open_with_prompt(pick, num_new, share)

    @rule(
        # Half of the lengths are whole pages, which forks share completely.
        num_tokens=st.one_of(st.sampled_from([24, 32, 40, 48, 56]), st.integers(20, MAX_TOKENS)),
        num_steps=st.integers(1, 2),
        then=st.sampled_from(["park", "fork and park", "fork and park", "fork and move", "move"]),
        share=st.floats(0.6, 1),
        num_free_pages=st.integers(0, 3),
    )
    def say_and_hear_when_full(
        self, num_tokens: int, num_steps: int, then: str, share: float, num_free_pages: int
    ) -> None:
        """The source of the prefix is also the likeliest victim."""
        known = set(self.said)
        self.say(num_tokens, num_steps, then)
        for key in set(self.said) - known:
            pick = sorted(self.said).index(key)
            self.open_with_prompts_when_full([pick], 0, share, num_free_pages)

    @has_sequences
    @rule(pick=picks, share=st.floats(0, 1), num_free_pages=st.integers(0, 4))
    def fork_when_full(self, pick: int, share: float, num_free_pages: int) -> None:
        key = self._picked(pick)
        source = self.by_id[key]
        num_tokens = int(source.num_tokens * share)
        with self._full(num_free_pages):
            try:
                fork = source.fork(num_tokens)
            except OutOfPagesError:
                with pytest.raises(OutOfPagesError):
                    source.fork(num_tokens)
                return
            except (ConfigError, OutOfAddressSpaceError):
                return
            self._opened(key, fork)

    @has_sequences
    @rule(pick=picks, num_tokens=st.integers(0, 20), num_free_pages=st.integers(0, 4))
    def append_when_full(self, pick: int, num_tokens: int, num_free_pages: int) -> None:
        with self._full(num_free_pages):
            self.append(pick, num_tokens, 0)

    @precondition(lambda self: not self.model.stamps and not self.said)
    @rule()
    def keep_the_past(self) -> None:
        """Only sequences loaded later may lack tokens before the window."""
        self.cache.keeps_past = True

    @rule()
    def hold_fences(self) -> None:
        self.cache.pool.reclaimer.poll()
        self.host.hold_fences()
        # Rows parked before would be evicted behind a fence that has passed already.
        self.cache.pool.reclaimer._recorded.clear()
        self.unmaps_at_hold = self.host.calls["mem_unmap"]
        self.passed_at_hold = self.host.last_passed_fence

    @rule()
    def pass_fences(self) -> None:
        self.host.pass_fences()
        self.unmaps_at_hold = None

    @precondition(lambda self: len(self.cache.groups) == 2 and 3 in self.cache.layers)
    @precondition(lambda self: all(each.is_resident for each in self.by_id.values()))
    @rule()
    def drop_a_layer_and_compact(self) -> None:
        """Layer 2 moves with its contents to its own group; layer 3 returns without a window."""
        self.unmaps_at_hold = None
        try:
            self.cache.drop_layers([3])
            self.cache.compact()
        except OutOfPagesError:
            pass  # The gap stays.
        self.cache.check()
        try:
            self.cache.add_layers([3], **SHAPE)
        except OutOfPagesError:
            return  # Layer 3 is gone for good.
        self._rewrite_layer_3()

    def _rewrite_layer_3(self) -> None:
        for row in range(NUM_ROWS):  # Recorded rows lack layer 3.
            self.cache.prefixes.truncate(row)
        for key, sequence in self.by_id.items():
            stamps = self.model.stamps[key]
            for value, tensor in enumerate((sequence.keys(3), sequence.values(3))):
                fresh = [self._stamp(stamp, 3, value) for stamp in stamps]
                tensor[:] = torch.tensor(fresh, dtype=torch.int64)[:, None, None]

    # ---- always -----------------------------------------------------------------------

    @invariant()
    def invariants_hold(self) -> None:
        self.cache.check()

    @invariant()
    def content_is_the_models(self) -> None:
        for key, sequence in self.by_id.items():
            stamps = self.model.stamps[key]
            assert len(stamps) == sequence.num_tokens
            if not sequence.is_resident:
                continue
            self._assert_content(sequence, stamps)

    @invariant()
    def records_are_the_models(self) -> None:
        """Also after the sequence was moved, swapped or reordered."""
        for key, sequence in self.by_id.items():
            recorded = self.cache.prefixes.token_ids(sequence.row)
            assert len(recorded) == sequence.num_recorded
            assert recorded == self.model.stamps[key][: len(recorded)]

    def _assert_content(self, sequence: Sequence, stamps: list[int]) -> None:
        """Compare all tokens that are mapped, also those before a window's next query."""
        for layer in sequence.cache.layers:
            window = sequence.cache.place(layer)[0].window_tokens
            first = sequence.first_token(layer)
            assert first <= (0 if window is None else max(0, sequence.num_tokens - window + 1))
            for value, tensor in enumerate((sequence.keys(layer), sequence.values(layer))):
                wanted = [self._stamp(stamp, layer, value) for stamp in stamps[first:]]
                assert wanted == tensor[first : len(stamps), 0, 0].tolist()
                assert wanted == tensor[first : len(stamps), 0, -1].tolist()

        if self.has_states and sequence.cache is self.cache and stamps:
            [states] = self.cache.states.tensors(4)
            assert (states[sequence.row] == stamps[-1]).all()

    @invariant()
    def books_are_the_models(self) -> None:
        stats = self.cache.stats()
        assert len(self.by_id) == stats.num_sequences
        assert self.num_rows_free == NUM_ROWS - len(self.cache.live)
        assert stats.resident_bytes >= stats.parked_bytes
        usage = self.host.usage()
        assert usage.physical_bytes == self.host.file_bytes()
        assert usage.host_bytes == self.host.file_bytes(MemoryLocation.HOST)
        assert usage.host_bytes <= HOST_PAGES * PAGE

    @invariant()
    def nothing_is_unmapped_before_its_fence(self) -> None:
        """Unless an operation has waited, which lets the device catch up."""
        if self.unmaps_at_hold is None:
            return
        if self.host.last_passed_fence == self.passed_at_hold:
            assert self.unmaps_at_hold == self.host.calls["mem_unmap"]

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.patch.undo()
        self._temporary.cleanup()
        self.backend.arm(0)
        self.cache.close()
        assert BackendUsage() == self.host.usage()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=3 * settings().max_examples, stateful_step_count=40
)
