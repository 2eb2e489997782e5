"""The cache: sequences over layer groups over one pool. Usable without transformers.

    cache = KVCache("host", max_tokens=4096, max_sequences=8)
    cache.add_layers(range(2), num_kv_heads=2, head_dim=64, dtype=torch.float16)
    sequence = cache.open()
    sequence.append(100)
    sequence.keys(layer=0)[:] = ...      # [100, 2, 64], contiguous in virtual memory

Whatever takes several sequences or groups is one change to all of them, or to none.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable
from collections.abc import Sequence as List_
from typing import cast

import torch

from ...errors import InternalError
from ...interrupts import uninterrupted
from ..memory import check_pool
from .beginning import begin_with_prefix, choose_row
from .disk import load
from .forking import fork, pages_to_fork, reorder
from .fp8 import LayerScales
from .geometry import LayerShape
from .growing import grow, keep_resident, retire_behind_windows, retire_surplus
from .layer_group import LayerGroup
from .layers import add_layers, compact, drop_layers
from .process import import_prefix
from .row_space import RowSpace, check_own_bytes
from .sequence import Sequence
from .stats import CacheStats, collect_stats


class KVCache(RowSpace):
    """Keys and values of many sequences on one device.

    Args:
        memory: A device (`"cuda:0"`, `"host"`), a backend, or a pool to share with other caches.
        max_tokens: The longest sequence.
        max_sequences: How many sequences can be open or parked at once.
        budget_bytes: Physical memory at most; by default what is free on the device now. Only
            where `memory` is not a pool, which has its own.
        host_budget_bytes: Host memory at most, for sequences that are swapped out; by default
            none. Likewise.
        layers_per_group: How many layers share a token row. By default all on a GPU, where
            decode pays 2 % for it (8 at worst) and saves calls, and one on the host, where small
            pages make calls cheap and interleaving costs 1.8 x in CPU attention.
        cost_model: Decides between mapping and copying; by default the device's measured costs.

    Raises:
        ConfigError: An argument is impossible, or the device's driver is missing.
    """

    @property
    def sequences(self) -> List_[Sequence]:
        """Those that are open, swapped out or not."""
        return cast("list[Sequence]", list(self.live.values()))  # None but they are put there.

    # ---- layers ---------------------------------------------------------------------------

    @uninterrupted
    def add_layers(
        self,
        layers: Iterable[int],
        *,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        v_head_dim: int | None = None,
        num_v_heads: int | None = None,
        window_tokens: int | None = None,
        num_past_tokens: int = 0,
        scales: List_[LayerScales] | None = None,
    ) -> list[LayerGroup]:
        """Add layers of one shape; returns the groups made for them.

        Sequences that are open already get memory for the tokens they hold.

        Args:
            layers: The caller's numbers for them.
            num_kv_heads: Key heads, and value heads unless `num_v_heads` says otherwise.
            head_dim: Width of a key head, and of a value head unless `v_head_dim` does.
            dtype: Element type.
            v_head_dim: See `head_dim`.
            num_v_heads: See `num_kv_heads`.
            window_tokens: For sliding-window layers, how many tokens a query sees.
            num_past_tokens: Where the first query will be, in sequences that are open already:
                what lies before its window is not mapped.
            scales: Of each layer in `float8_e4m3fn`; see `fp8.py`. By default 1.

        Raises:
            ConfigError: A size is impossible, a layer was added before, or scales do not fit.
            OutOfPagesError, OutOfAddressSpaceError: Nothing was added.
        """
        shape = LayerShape(
            num_k_heads=num_kv_heads,
            k_dim=head_dim,
            num_v_heads=num_kv_heads if num_v_heads is None else num_v_heads,
            v_dim=head_dim if v_head_dim is None else v_head_dim,
            itemsize_bytes=dtype.itemsize,
        )
        return add_layers(self, list(layers), shape, dtype, window_tokens, num_past_tokens, scales)

    @uninterrupted
    def drop_layers(self, layers: Iterable[int]) -> None:
        """Forget layers that were added but never written.

        Their room in the token row stays empty. A group with none left is closed.
        """
        drop_layers(self, layers)

    @uninterrupted
    def compact(self) -> bool:
        """Close the gaps that `drop_layers` left, by moving the groups that have any.

        Tensors made before do not follow: make new ones. Returns whether something moved.

        Raises:
            OutOfPagesError, OutOfAddressSpaceError: Nothing moved; the gaps stay.
            ConfigError: A sequence is swapped out. Nothing moved.
        """
        return compact(self)

    # ---- sequences ------------------------------------------------------------------------

    @uninterrupted
    def open(
        self,
        num_tokens: int = 0,
        *,
        row: int | None = None,
        prompt: List_[int] | torch.Tensor | None = None,
        tenant: str | None = None,
    ) -> Sequence:
        """Begin a sequence: empty, or with what the cache still holds of its prompt.

        Args:
            num_tokens: About how long it will become: helps to choose the parked row to adopt.
            row: Take just this row; it starts empty.
            prompt: The tokens it will begin with. The longest beginning that a live or parked row
                holds (see `Sequence.record`), short of the last token, is there already: the
                sequence's `num_tokens` says how much. A tensor of 64-bit integers on the CPU, as
                tokenizers make them, is read at once.
            tenant: Whose it is: prefixes of other tenants are not found, and memory is scrubbed
                between tenants where the pool says so.

        Raises:
            OutOfAddressSpaceError: Every row holds a live sequence.
            ConfigError: `row` is live, or does not exist; or the prompt is none.
            DriverError: The tail of a prefix could not be copied. No sequence.

        Cost: no driver call where a parked row is adopted, with its prefix or without. A prefix
            that other rows hold costs what a fork does.
        """
        self.check_open()
        self.note_stream()
        with self.pool.lock:
            found = None
            if prompt is not None and row is None:
                found = begin_with_prefix(self, prompt, tenant)
            if found is not None:
                row, num_cached_tokens = found
                return self._restored(row, num_cached_tokens, (), tenant)
            if row is None:
                row = choose_row(self, num_tokens)
            self.take(row, 0, tenant)
            return Sequence(self, row, 0, tenant)

    @uninterrupted
    def fork(self, source: Sequence, num_tokens: int, *, row: int | None = None) -> Sequence:
        """See `Sequence.fork`. `source` may be of another cache of the same pool and layers."""
        return Sequence(self, fork(self, source, num_tokens, row), num_tokens, source.tenant)

    def _restored(
        self, row: int, num_tokens: int, token_ids: List_[int], tenant: str | None
    ) -> Sequence:
        """The sequence of a row that began with `num_tokens` tokens, of which some are known."""
        sequence = Sequence(self, row, num_tokens, tenant)
        sequence.num_cached_tokens = num_tokens
        if token_ids:
            sequence.record(token_ids)
        return sequence

    @uninterrupted
    def reorder(self, sequences: List_[Sequence], sources: List_[int]) -> None:
        """Let each sequence go on from another one: the step of a beam search.

        What is recorded of a source is recorded of who goes on from it.

        Args:
            sequences: Live sequences of this cache, of equal length, each once.
            sources: For each, which of `sequences` it continues.

        Raises:
            ConfigError: They are not. Nothing changed.
            OutOfPagesError: Nothing changed.
            DriverError: Nothing changed, unless a copy failed: then the sequences that were to go
                on from another one have undefined tails, and nothing of them is recorded.

        Cost: a copy of what the beams have written since they parted; the first time, extents
            are mapped instead of copied, which waits for the device once.
        Ordering: behind what the current stream and others were given so far.
        """
        reorder(self, sequences, sources)

    def grow(self, wanted: Iterable[tuple[Sequence, int]]) -> None:
        """Make each sequence hold the given number of tokens, all of them or none.

        Sequences that are longer already stay as they are. Memory is mapped where it is missing,
        and what is shared is copied where it will be written; parked rows, free memory and what
        other sequences hold beyond their length give way first where the pool is short.

        Raises:
            OutOfPagesError: The pool cannot supply all pages. No sequence has changed.
            SequenceFullError: A row ends before that. No sequence has changed.
            ConfigError: A sequence is swapped out, or of another cache. Likewise.
            ClosedError: The cache or a sequence is closed.

        Cost: a comparison for a sequence below its `writable_tokens` (most decode steps).
        """
        grow(self, wanted)

    def pages_to_fork(self, sequence: Sequence, num_tokens: int) -> int:
        """What a fork of `sequence` at `num_tokens` takes from the pool. Changes nothing."""
        return pages_to_fork(self, sequence.row, num_tokens)

    @uninterrupted
    def keep_resident(self, overread_tokens: int) -> None:
        """Have `overread_tokens` past every sequence's length mapped, now and from now on.

        For kernels that fetch past the length they are told. Never less than before. Sequences
        that are swapped out have them when they come back.

        Raises:
            OutOfPagesError: They are not to be had. Nothing changed.
            ConfigError: The pool poisons memory, which such a kernel would fetch; or a sequence is
                moving to the host. Likewise.
        """
        keep_resident(self, overread_tokens)

    # ---- from elsewhere -------------------------------------------------------------------

    @uninterrupted
    def load(self, path: str | os.PathLike[str], *, tenant: str | None = None) -> Sequence:
        """A sequence as `Sequence.save` wrote it, with the tokens that were recorded.

        Args:
            path: The file.
            tenant: Whose it is from now on.

        Raises:
            ConfigError: The file is truncated, corrupt, of another kind, or of other layers than
                this cache's, or longer than its rows.
            OSError: It cannot be read.
            OutOfPagesError, OutOfAddressSpaceError: No memory for it, or no row.
            ClosedError, DriverError.
            In every case there is no sequence, and none that lives has changed. Keys and values
            are checked as they are read, so for those parked rows may have given way.

        Cost: about 1 s per GiB, for the checksum; then a copy.
        """
        return self._restored(*load(self, path, tenant), tenant)

    @uninterrupted
    def import_prefix(
        self,
        socket_path: str | os.PathLike[str],
        *,
        tenant: str | None = None,
        allowed_uids: Collection[int] | None = None,
        timeout_s: float = 10.0,
    ) -> Sequence:
        """A sequence that begins with what another process exports (see `Sequence.export`).

        Its memory is that process's, mapped read-only and outside this pool's budget; it lives on
        if that process ends. The sequence goes on, forks and is found as a prefix like any other.

        Args:
            socket_path: Where the exporter listens.
            tenant: Whose it is here.
            allowed_uids: Users that the exporter may run as; by default only the one of this
                process.
            timeout_s: How long all of it may take.

        Raises:
            ConfigError: The exporter is of another user, refuses, does not speak the protocol, or
                offers what this cache cannot map.
            TimeoutError, ConnectionError, OSError: It is not there, too slow, or ended midway.
            OutOfPagesError, OutOfAddressSpaceError: No memory behind the prefix, or no row.
            DriverError: A descriptor is no memory of the size it should have, or the driver failed.
            ClosedError: The cache is closed.
            In every case there is no sequence, and nothing of it is held.

        Cost: some 100 µs for each extent on a GPU; no copy.
        """
        row, num_tokens, token_ids = import_prefix(
            self, socket_path, tenant=tenant, allowed_uids=allowed_uids, timeout_s=timeout_s
        )
        return self._restored(row, num_tokens, token_ids, tenant)

    # ---- memory ---------------------------------------------------------------------------

    @uninterrupted
    def make_room(self, num_bytes: int) -> int:
        """Have `num_bytes` more that sequences could grow by, as far as this cache can.

        Its parked rows give way, the one used longest ago first, then what its live rows hold
        beyond their length; other caches over the pool keep theirs. Waits for the fences of what is
        unmapped. Returns how much more there is: less than asked for where no more can be had.
        """
        self.check_open()
        before_bytes = self.pool.available_bytes
        self.pool.make_room(num_bytes, only=self.victims)
        if self.pool.available_bytes < before_bytes + num_bytes:
            with self.pool.lock:
                retire_surplus(self)
            self.pool.reclaimer.wait()
        return self.pool.available_bytes - before_bytes

    @uninterrupted
    def trim(self, num_bytes: int | None = None) -> int:
        """Give `num_bytes` at least back to the device, or all that no live sequence needs.

        What is free goes first, so there is not always more room afterwards (see `make_room`, which
        is how it gets what is missing). Returns the bytes given back: less than asked for where
        there is no more.
        """
        self.check_open()
        self.pool.reclaimer.poll()
        if num_bytes is None:
            with self.pool.lock:
                for row in self.rows.parked():
                    self.retire_parked(row, 0)
                retire_surplus(self)
            self.pool.reclaimer.wait()
        else:
            missing_bytes = num_bytes - self.pool.stats().free_bytes
            if missing_bytes > 0:
                self.make_room(missing_bytes)
        return self.pool.trim(num_bytes)

    def stats(self) -> CacheStats:
        """The cache now. Cost: proportional to its rows."""
        with self.pool.lock:  # Other caches' threads may have parked rows give way.
            lengths = {
                row: sequence.num_tokens if sequence.is_resident else 0
                for row, sequence in self.live.items()
            }
            rows = lengths, list(self.rows.parked())
            return collect_stats(self.pool, self.groups, *rows, self.prefixes, self.sharing)

    def check(self) -> None:
        """Check every invariant of memory; raises `InternalError` where one is broken."""
        check_pool(self.pool)
        for group in self.groups:
            for row in range(self.max_sequences):
                group.table.check_writable(row)
        for row in self.rows.parked():
            check_own_bytes(self.groups, row)
        for sequence in self.live_sequences():
            for group in self.groups:
                group.check_row(sequence.row, sequence.num_tokens, self.overread_tokens)
            room = max(0, self.writable_tokens(sequence))
            if self.short([(sequence, room)]) or not self.short([(sequence, room + 1)]):
                raise InternalError(f"{sequence} is not short from {room + 1} tokens on")

    def retire_behind_windows(self, sequences: Iterable[Sequence] | None = None) -> None:
        """Retire what no later query of these sequences (or all) can see."""
        retire_behind_windows(self, sequences)

    # ---- end ------------------------------------------------------------------------------

    @uninterrupted
    def close(self) -> None:
        """Wait for submitted work, unmap everything, and let the pool go. Idempotent.

        Tensors over the cache must not be used afterwards: their addresses stay reserved, so
        touching one faults rather than reads a stranger's memory.
        """
        if self.is_closed:
            return
        # A failing driver call stops this, and another `close` goes on from there.
        for sequence in self.sequences:
            sequence.is_closed = True
            sequence.drop_host_copy()
        self.live.clear()
        self.places.clear()
        with self.pool.lock:  # Nobody evicts its rows from here on, nor is about to.
            self.pool.pressure.remove_source(self.victims)
        self.end_side_stream()
        while self.groups:
            self.groups[-1].close()
            self.groups.pop()
        self.pool.detach()
        self.is_closed = True

    def has_outside_views(self) -> bool:
        """Whether tensors that the cache gave away still live.

        For caches about to be closed: the cache drops its own tensors to find out.
        """
        return any([group.has_outside_views() for group in self.groups])

    def __del__(self) -> None:
        # Only a warning: a destructor runs at any moment, and the device may still be reading.
        if not getattr(self, "is_closed", True):
            warnings.warn("a KVCache was never closed", ResourceWarning, stacklevel=2)

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
