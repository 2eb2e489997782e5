"""The cache: sequences over layer groups over one pool. Usable without transformers.

    cache = KVCache("host", max_tokens=4096, max_sequences=8)
    cache.add_layers(range(2), num_kv_heads=2, head_dim=64, dtype=torch.float16)
    sequence = cache.open()
    sequence.append(100)
    sequence.keys(layer=0)[:] = ...      # [100, 2, 64], contiguous in virtual memory

Methods that take several sequences or groups change all of them, or none.
"""

from __future__ import annotations

import os
import warnings
from collections import abc
from contextlib import AbstractContextManager
from functools import partial

import torch

from ...errors import ConfigError
from ..interrupts import uninterrupted
from ..memory import asking_broker, check_pool
from . import forking, growing
from . import layers as layer_changes
from .disk import load
from .forking import begin_with_prefix, choose_row
from .process import import_prefix
from .row_space import RowSpace, check_own_bytes
from .sequence import Sequence
from .stats import collect_stats


class KVCache(RowSpace, AbstractContextManager["KVCache"]):
    """Keys and values of many sequences on one device.

    A method that raises leaves layers and live sequences as they were, unless it says otherwise;
    parked rows may have been evicted. `ClosedError` means that the cache or a sequence is closed,
    `DriverError` that a driver call failed.

    Args:
        memory: A device (`"cuda:0"`, `"host"`), a backend, or a pool to share with other caches.
        max_tokens: The longest sequence.
        max_sequences: How many sequences can be open or parked at once.
        budget_bytes: Limit of physical memory; by default what is free on the device now. Not
            allowed with a pool, which has its own.
        host_budget_bytes: Limit of host memory for swapped sequences; by default none. Not allowed
            with a pool.
        layers_per_group: Layers that share a token row. By default all on a GPU, where decode pays
            2 % for it (8 at worst) and saves calls, and one on the host, where small pages make
            calls cheap and interleaving costs 1.8 x in CPU attention.
        cost_model: Decides between mapping and copying; by default the device's measured costs.

    Raises:
        ConfigError: An argument is impossible, or the device's driver is missing.
    """

    @property
    def sequences(self) -> abc.Sequence[Sequence]:
        """The open sequences, swapped out or not."""
        return list(self.live.values())

    # Each function documents the method that it is here.
    add_layers = layer_changes.add_layers
    add_states = layer_changes.add_states
    drop_layers = layer_changes.drop_layers
    compact = layer_changes.compact
    grow = growing.grow
    unshare_all = growing.unshare_all
    keep_resident = growing.keep_resident
    retire_behind_windows = growing.retire_behind_windows
    reorder = forking.reorder
    pages_to_fork = forking.pages_to_fork
    find_prefix = forking.find_prefix
    stats = collect_stats

    # ---- sequences ------------------------------------------------------------------------

    @uninterrupted
    def open(
        self,
        num_tokens: int = 0,
        *,
        row: int | None = None,
        prompt: abc.Sequence[int] | torch.Tensor | None = None,
        tenant: str | None = None,
    ) -> Sequence:
        """Begin a sequence: empty, or with the tokens of its prompt that the cache still holds.

        Args:
            num_tokens: Its expected length, for the choice of the parked row to adopt.
            row: Take this row; the sequence starts empty.
            prompt: Its first token ids. The longest beginning that a live or parked row holds (see
                `Sequence.record`), short of the last token, is reused; the sequence's `num_tokens`
                is its length. CPU tensors of 64-bit integers are read fastest.
            tenant: Its owner: prefixes of other tenants are not found, and memory is scrubbed
                between tenants where the pool says so.

        Raises:
            OutOfAddressSpaceError: Every row holds a live sequence.
            ConfigError: `row` is not free, or the prompt is not a sequence of token ids.
            DriverError: The tail of a prefix could not be copied.

        Cost: no driver call where a parked row is adopted, with or without its prefix; else a
            fork's.
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
            row = choose_row(self, num_tokens) if row is None else row
            self.take(row, 0, tenant)
            return Sequence(self, row, 0, tenant)

    @uninterrupted
    def fork(self, source: Sequence, num_tokens: int, *, row: int | None = None) -> Sequence:
        """Fork a sequence of this cache, or of another over the same pool with the same layers."""
        row = forking.fork(self, source, num_tokens, row)
        return Sequence(self, row, num_tokens, source.tenant)

    def _restored(
        self, row: int, num_tokens: int, token_ids: abc.Sequence[int], tenant: str | None
    ) -> Sequence:
        sequence = Sequence(self, row, num_tokens, tenant)
        sequence.num_cached_tokens = num_tokens
        try:
            sequence.record(token_ids)
        except ConfigError:  # More ids than tokens, or invalid ids.
            sequence.close()
            raise
        return sequence

    # ---- files and other processes --------------------------------------------------------

    @uninterrupted
    def load(self, path: str | os.PathLike[str], *, tenant: str | None = None) -> Sequence:
        """Restore a sequence from a file of `Sequence.save`, with its recorded tokens.

        Raises:
            ConfigError: The file is truncated, damaged, of another kind or of another version; or
                this cache has other layers or shorter rows.
            OSError: It cannot be read.
            OutOfPagesError, OutOfAddressSpaceError: No memory for it, or no row.

        Cost: what the disk takes, a SHA-256 of the file, and a copy.
        """
        return self._restored(*asking_broker(self.pool, partial(load, self, path, tenant)), tenant)

    @uninterrupted
    def import_prefix(
        self,
        socket_path: str | os.PathLike[str],
        *,
        tenant: str | None = None,
        timeout_s: float = 10.0,
    ) -> Sequence:
        """Begin a sequence with the prefix that another process exports (see `Sequence.export`).

        Its memory is mapped read-only, outside this pool's budget, and outlives the exporting
        process. The sequence can grow, fork and be found as a prefix like any other.

        Args:
            socket_path: The exporter's socket.
            tenant: The sequence's owner in this cache.
            timeout_s: Deadline of the whole exchange.

        Raises:
            ConfigError: The exporter is another user's, speaks another protocol, or offers a layout
                that this cache cannot map.
            TimeoutError, ConnectionError, OSError: It is not there, too slow, or ended midway.
            OutOfPagesError, OutOfAddressSpaceError: No memory behind the prefix, or no row.
            DriverError: A descriptor is not memory of the offered size, or the driver failed.

        Cost: some 100 µs for each extent on a GPU; no copy.
        """
        self.check_stateless("import")
        return self._restored(*import_prefix(self, socket_path, tenant, timeout_s), tenant)

    # ---- memory ---------------------------------------------------------------------------

    @uninterrupted
    def make_room(self, num_bytes: int) -> int:
        """Make `num_bytes` more available for sequences to grow by, if this cache can.

        Evicts its parked rows, least recently used first, then live rows' memory beyond their
        length; other caches over the pool keep theirs. Waits for fences. Returns the bytes gained,
        perhaps fewer.
        """
        self.check_open()
        before_bytes = self.pool.available_bytes
        self.pool.make_room(num_bytes, only=self.victims)
        if self.pool.available_bytes < before_bytes + num_bytes:
            with self.pool.lock:
                growing.retire_surplus(self)
            self.pool.reclaimer.wait()
        return self.pool.available_bytes - before_bytes

    @uninterrupted
    def trim(self, num_bytes: int | None = None) -> int:
        """Give at least `num_bytes` back to the device, or all that no live sequence needs.

        Free memory goes first; `make_room` supplies the rest. Returns the bytes given back, perhaps
        fewer.
        """
        self.check_open()
        self.pool.reclaimer.poll()
        if num_bytes is None:
            if self.away is not None:
                self.away.drop()
            with self.pool.lock:
                for row in list(self.rows.parked):
                    self.retire_parked(row, 0)
                for row in self.live:
                    self.drop_checkpoints(row)
                growing.retire_surplus(self)
            self.pool.reclaimer.wait()
        elif num_bytes > (free_bytes := self.pool.stats().free_bytes):
            self.make_room(num_bytes - free_bytes)
        return self.pool.trim(num_bytes)

    def check(self) -> None:
        """Check every invariant of memory; raises `InternalError` where one is broken."""
        with self.pool.lock:  # The thread of a broker's member may give memory back.
            check_pool(self.pool)
            for group in self.groups:
                for row in range(self.max_sequences):
                    group.table.check_writable(row)
            for row in self.rows.parked:
                check_own_bytes(self.groups, row)
            for sequence in self.live_sequences():
                for group in self.groups:
                    group.check_row(sequence.row, sequence.num_tokens, self.overread_tokens)
            if self.states is not None and self.away is None:
                self.states.check_at_rest({row: its.num_tokens for row, its in self.live.items()})

    # ---- closing --------------------------------------------------------------------------

    @uninterrupted
    def close(self) -> None:
        """Wait for submitted work, unmap everything, and detach from the pool. Idempotent.

        Tensors over the cache must not be used afterwards: their addresses stay reserved, so
        touching one faults rather than reads other memory. After a `DriverError` the cache
        cannot be used, and another `close` frees the rest.
        """
        if self.is_closed:
            return
        self.is_closing = True  # After a failing driver call another `close` continues from there.
        if self.away is not None:
            self.away.drop()
        for sequence in self.sequences:
            sequence.is_closed = True
            sequence.drop_host_copy()
        self.live.clear()
        self.places.clear()
        with self.pool.lock:  # Its rows are not evicted from here on.
            self.pool.pressure.remove_source(self.victims)
        self.end_side_stream()
        while self.groups:
            self.groups[-1].close()
            self.groups.pop()
        self.pool.detach()
        self.is_closed = True

    def has_outside_views(self) -> bool:
        """Whether tensors that the cache gave away still exist; drops the cache's own tensors."""
        return any([group.has_outside_views() for group in self.groups])

    def __del__(self) -> None:
        # Only a warning: a destructor runs at any moment, and the device may still be reading.
        if not getattr(self, "is_closed", True):
            warnings.warn("a KVCache was never closed", ResourceWarning, stacklevel=2)

    def __exit__(self, *exception: object) -> None:
        self.close()
