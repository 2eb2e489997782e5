"""The cache: sequences over layer groups over one pool. Usable without transformers.

    cache = KVCache("host", max_tokens=4096, max_sequences=8)
    cache.add_layers(range(2), num_kv_heads=2, head_dim=64, dtype=torch.float16)
    sequence = cache.open()
    sequence.append(100)
    sequence.keys(layer=0)[:] = ...      # [100, 2, 64], contiguous in virtual memory

Methods that take several sequences or groups change all of them, or none.

See DESIGN.md, Note [How far a row may be written].
"""

from __future__ import annotations

import os
import warnings
from collections import abc
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch

from ...errors import ClosedError, ConfigError, SequenceFullError
from ..backend import Backend
from ..interrupts import uninterrupted
from ..memory import ExtentPool, Victim, check_pool, pinned
from . import disk, forking, growing, process
from .device_memory import open_pool
from .forking import CostModel
from .fp8 import LayerScales, Scales
from .geometry import LayerShape, check_positive
from .host_blocks import HostBlocks
from .kv_group import KVGroup
from .layer_group import LayerGroup, stream_getter, torch_device
from .layers import add_layers, compact, drop_layers
from .prefix import PrefixIndex
from .rows import Rows
from .sequence import Sequence
from .state_group import StateGroup, StateShape
from .stats import CacheStats, SharingStats, collect_stats

_BOOKS = attrgetter("books")


class KVCache(AbstractContextManager["KVCache"]):
    """Keys and values of many sequences on one device.

    A method that raises leaves layers and live sequences as they were, unless it says otherwise;
    parked rows may have been evicted. `ClosedError` means that the cache or a sequence is closed,
    `DriverError` that a driver call failed.

    Args:
        memory: A device (`"cuda:0"`, `"host"`), a backend, or a pool to share with other caches.
        max_tokens: The longest sequence.
        max_sequences: How many sequences can be open or parked at once.
        budget_bytes: Limit of physical memory; by default what is free now. A pool has its own.
        host_budget_bytes: Likewise, of host memory for swapped sequences and prefixes; or none.
        layers_per_group: Layers that share a token row. By default all on a GPU, where decode pays
            2 % for it (8 at worst) and saves calls, and one on the host, where small pages make
            calls cheap and interleaving costs 1.8 x in CPU attention.
        cost_model: Decides between mapping and copying; by default the device's measured costs.

    Attributes:
        groups: The layer groups.
        host_blocks: Blocks of evicted prefixes in host memory.
        states: The one of them that keeps layers' states; None without such layers.
        live: The sequence of each live row.
        overread_tokens: Tokens past every length that are kept resident; see `keep_resident`.
        keeps_past: Keep tokens that have left a sliding window (for rollback).
        device: The device of the cache's tensors.
        current_stream: Returns the raw handle of torch's current stream on the device.

    Raises:
        ConfigError: An argument is impossible, or the device's driver is missing.
    """

    def __init__(
        self,
        memory: str | Backend | ExtentPool,
        *,
        max_tokens: int,
        max_sequences: int,
        budget_bytes: int | None = None,
        host_budget_bytes: int | None = None,
        layers_per_group: int | None = None,
        cost_model: CostModel | None = None,
    ):
        check_positive("max_tokens", max_tokens)
        check_positive("max_sequences", max_sequences)
        limits = budget_bytes, host_budget_bytes, layers_per_group
        names = "budget_bytes", "host_budget_bytes", "layers_per_group"
        for name, value in zip(names, limits, strict=True):
            if value is not None:
                check_positive(name, value)
        self.pool = open_pool(memory, budget_bytes, host_budget_bytes)
        self.pool.attach()
        backend = self.pool.backend
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        self.layers_per_group = layers_per_group or (1 if backend.name == "host" else None)
        self.groups: list[LayerGroup] = []
        self.states: StateGroup | None = None
        self.places: dict[int, tuple[KVGroup, int]] = {}
        self.live: dict[int, Sequence] = {}
        self.prefixes = PrefixIndex()
        self.device = torch_device(backend)
        self.current_stream = stream_getter(backend)
        self.host_blocks = below = HostBlocks(self)
        self.rows = Rows(max_sequences, self.pool, self.groups, self.prefixes, below.keep)
        self.sharing = SharingStats()
        self.cost_model = cost_model or CostModel.of(backend)
        self.overread_tokens = 0
        self.keeps_past = False
        self.is_closed = self.is_closing = False
        self.side_stream: int | None = None  # On which sequences are swapped.
        with self.pool.lock:
            self.pool.pressure.add_source(self.victims)

    def check_open(self) -> None:
        """Raise `ClosedError` if the cache is closed, or its `close` has failed on the way."""
        if self.is_closing:
            raise ClosedError("this KVCache is closed; make a new one")

    # ---- layers ---------------------------------------------------------------------------

    @property
    def kv_groups(self) -> list[KVGroup]:
        """The groups of keys and values."""
        return [group for group in self.groups if isinstance(group, KVGroup)]

    @property
    def layers(self) -> list[int]:
        """The layers that were added, as the caller numbers them."""
        return sorted(self.places)

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
        scales: abc.Sequence[LayerScales] | None = None,
    ) -> list[KVGroup]:
        """Add layers of one shape; returns the groups made for them.

        Open sequences get memory for the tokens they hold.

        Args:
            layers: The caller's numbers for them.
            num_kv_heads: Key heads, and value heads unless `num_v_heads` is given.
            head_dim: Width of a key head, and of a value head unless `v_head_dim` is given.
            dtype: Element type.
            v_head_dim: Width of a value head.
            num_v_heads: Value heads.
            window_tokens: For sliding-window layers, how many tokens a query sees.
            num_past_tokens: Position of the first query in open sequences: tokens before its window
                are not mapped.
            scales: One per layer, for `float8_e4m3fn`; see `fp8.py`. By default 1.

        Raises:
            ConfigError: A size is impossible, a layer was added before, or scales do not fit.
            OutOfPagesError, OutOfAddressSpaceError: No memory or addresses for them.
        """
        shape = LayerShape(
            num_k_heads=num_kv_heads,
            k_dim=head_dim,
            num_v_heads=num_kv_heads if num_v_heads is None else num_v_heads,
            v_dim=head_dim if v_head_dim is None else v_head_dim,
            itemsize_bytes=dtype.itemsize,
        )
        self.check_open()
        its = list(layers), shape, dtype, window_tokens, num_past_tokens, scales
        return add_layers(self, *its)

    @uninterrupted
    def add_states(self, shapes: abc.Mapping[int, abc.Sequence[StateShape]]) -> StateGroup:
        """Add layers with states of fixed size, before any sequence begins; returns their group.

        `shapes` has for each layer, as the caller numbers them, the tensors of one sequence's
        state.

        Raises:
            ConfigError: There are states already, sequences are open, or a size is impossible.
            OutOfAddressSpaceError: No addresses for them.
        """
        self.check_open()
        if self.states is not None or self.live:
            raise ConfigError("states are added once, before any sequence is opened")
        self.states = group = StateGroup(self.pool, shapes, self.max_sequences)
        self.groups.append(group)
        return group

    @uninterrupted
    def drop_layers(self, layers: Iterable[int]) -> None:
        """Forget layers that were never written; their bytes in the token row stay unused.

        Raises `ConfigError`, and forgets none, for a layer that was not added, and while a sequence
        is swapped out.
        """
        drop_layers(self, layers)

    @uninterrupted
    def compact(self) -> bool:
        """Close the gaps that `drop_layers` left, by copying groups; returns whether any moved.

        Tensors made before keep pointing at the old memory: make new ones. Raises `ConfigError`
        while a sequence is swapped out, `OutOfPagesError` and `OutOfAddressSpaceError` without room
        for the copy.
        """
        return compact(self)

    def place(self, layer: int) -> tuple[KVGroup, int]:
        """Return the group of `layer` and its index there; raise `ConfigError` if there is none."""
        if layer not in self.places:
            raise ConfigError(f"layer {layer} was not added; there are {self.layers}")
        return self.places[layer]

    def members(self, group: LayerGroup) -> list[tuple[int, int]]:
        """Return `(place, layer)` of each layer in `group`, in order, without dropped ones."""
        return sorted((at, layer) for layer, (home, at) in self.places.items() if home is group)

    def keys(self, layer: int) -> torch.Tensor:
        """Return all rows' keys of `layer`: `[rows, row_tokens, k_heads, k_dim]`, mostly unmapped.

        For kernels that are told rows and lengths; values are as stored (see `scales`). Only tokens
        below a live sequence's `num_tokens` (and `overread_tokens` more) may be touched.
        """
        self.check_open()
        group, at = self.place(layer)
        return group.views.keys[at].transpose(1, 2)

    def values(self, layer: int) -> torch.Tensor:
        """Return all rows' values of `layer`: `[rows, row_tokens, v_heads, v_dim]`, as `keys`."""
        self.check_open()
        group, at = self.place(layer)
        return group.views.values[at].transpose(1, 2)

    # ---- streams --------------------------------------------------------------------------

    def scales(self, layer: int) -> Scales | None:
        """Return the scales of stored keys and values of `layer`; None if unscaled."""
        group, at = self.place(layer)
        return group.scales_at(at)

    def note_stream(self) -> None:
        """Note that torch's current stream works on this cache's memory. Cost: about 0.3 µs."""
        self.pool.backend.note_stream(self.current_stream())

    # ---- contents -------------------------------------------------------------------------

    def live_tokens(self, row: int) -> int | None:
        """The length of the sequence in `row`; None if there is none."""
        sequence = self.live.get(row)
        return None if sequence is None else sequence.num_tokens

    def keeps(self, row: int, num_tokens: int) -> bool:
        """Whether `row` holds all that a query after `num_tokens` tokens sees."""
        live_tokens = self.live_tokens(row)
        return all(group.holds(row, num_tokens, live_tokens) for group in self.groups)

    def check_keeps(self, row: int, num_tokens: int, doing: str) -> None:
        """Raise `ConfigError`, which names `doing`, unless `keeps` or there are no tokens."""
        live_tokens = self.live_tokens(row)
        for group in self.groups if num_tokens else ():
            if not group.holds(row, num_tokens, live_tokens):
                why = group.why_lost(row, live_tokens)
                raise ConfigError(f"cannot {doing} {num_tokens} tokens: {why}")

    def check_stateless(self, doing: str) -> None:
        """Raise `ConfigError`, which names `doing`, if layers keep states."""
        if self.states is not None:
            raise ConfigError(
                f"cannot {doing} sequences of a model whose layers keep states (linear attention); "
                "that works only for models with keys and values alone"
            )

    def can_begin(self, row: int, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` in `row` has all pages mapped, over-read included."""
        end_tokens = num_tokens + self.overread_tokens
        return all([group.reaches(row, end_tokens) for group in self.groups])

    def live_sequences(self) -> list[Sequence]:
        """The sequences that kernels can read: those not swapped out."""
        return [each for each in self.live.values() if each.is_resident]

    def pinned_state(self, row: int, num_tokens: int) -> AbstractContextManager[None]:
        """Keep the state of `row` after `num_tokens`, if any, in a block that reads it. Locked."""
        group, its = self.states, (row, num_tokens, self.live_tokens(row))
        if group is None or not group.holds(*its):
            return nullcontext()
        return pinned(self.pool, group.table.rows[group.row_at(*its)].mappings)

    def submitting(
        self, writes: Iterable[tuple[int, int, int]], checkpoints: Iterable[int] = ()
    ) -> AbstractContextManager[None]:
        """Submit a step in this block; with checks on, check what it writes (I10).

        `writes` are `(row, start, end)`, and `checkpoints` rows of `states`.
        """
        if self.pool.submitted is None:
            return nullcontext()
        ranges = [group.write_range(*each) for each in writes for group in self.groups]
        if self.states is not None:
            ranges += [self.states.write_range(at, 0, 1) for at in checkpoints]
        return self.pool.submitted.submitting(ranges)

    # ---- growth ---------------------------------------------------------------------------

    def grow(self, wanted: Iterable[tuple[Sequence, int]]) -> None:
        """Make each sequence hold the given number of tokens, all of them or none.

        Longer sequences stay as they are. Missing memory is mapped, and shared extents that will be
        written are copied. Where the pool is short, parked rows, free memory and live rows' memory
        beyond their length are evicted first; then a pool that has joined a broker asks for more.

        Raises:
            OutOfPagesError: The pool cannot supply all pages.
            SequenceFullError: A row ends before that.
            ConfigError: A sequence is swapped out, or of another cache.

        Cost: a comparison for a sequence below its `writable_tokens` (most decode steps).
        """
        if self.is_closed:
            self.check_open()
        targets, max_tokens = list(wanted), self.max_tokens
        for sequence, num_tokens in targets:
            if sequence.is_closed or sequence.swapped:
                sequence.check_open()
            if sequence.cache is not self:
                raise ConfigError(f"{sequence} is of another cache")
            if num_tokens > max_tokens:
                raise SequenceFullError(
                    f"the sequence in row {sequence.row} would hold {num_tokens} tokens; rows of "
                    f"this cache end at max_tokens={max_tokens}: make it with a larger one",
                    max_tokens=max_tokens,
                )
        self.note_stream()
        if self.states is not None and self.states.lent:
            rows = {sequence.row for sequence, _ in targets}
            self.states.wait_for_forks(rows, self.current_stream())
        short = self.lacking_room(targets)
        if short:
            self.pool.asking_broker(partial(growing.map_and_lengthen, self, short, targets))
        else:
            self.lengthen(targets)

    def lengthen(self, targets: abc.Sequence[tuple[Sequence, int]]) -> None:
        """Set the lengths of sequences that are mapped so far; retire what windows have passed."""
        for group in () if self.keeps_past else self.groups:
            if group.window_tokens is not None:
                growing.retire_behind_windows(self, [sequence for sequence, _ in targets])
                break
        for sequence, num_tokens in targets:
            if num_tokens > sequence.num_tokens:
                sequence.num_tokens = num_tokens

    def lacking_room(
        self, targets: abc.Sequence[tuple[Sequence, int]]
    ) -> list[tuple[Sequence, int]]:
        """Return those of `targets` beyond their sequence's `writable_tokens`."""
        rooms = self.writable_tokens(map(itemgetter(0), targets))
        return [target for target, room in zip(targets, rooms, strict=True) if target[1] > room]

    def writable_tokens(self, sequences: Iterable[Sequence]) -> list[int]:
        """Return `Sequence.writable_tokens` of each; fast: every step asks for its rows."""
        books, overread_tokens = list(map(_BOOKS, self.groups)), self.overread_tokens
        found = []
        for sequence in sequences:
            row, num_tokens, room = sequence.row, sequence.num_tokens, self.max_tokens
            for rows, token_bytes, page_bytes, row_tokens in books:
                pages = rows[row]
                mappings, shared_end_page = pages.mappings, pages.shared_end_page
                if not mappings or (
                    shared_end_page and num_tokens * token_bytes < shared_end_page * page_bytes
                ):
                    room = 0
                    break
                last = mappings[-1]
                end_bytes = (last.first_page + last.extent.num_pages) * page_bytes
                end_tokens = end_bytes // token_bytes
                if end_tokens > row_tokens:
                    end_tokens = row_tokens
                if end_tokens - overread_tokens < room:
                    room = end_tokens - overread_tokens
            if not books or sequence.swapped or room < 0:
                room = 0
            found.append(room)
        return found

    def unshare_all(self, sequences: Iterable[Sequence]) -> None:
        """Give each sequence a copy of what it shares, so that the caller may write to any token.

        Raises `OutOfPagesError` if the pool has no room for the copies. Cost: a look at each
        sequence that shares nothing.
        """
        for sequence in sequences:
            if any([group.table.rows[sequence.row].shared_end_page for group in self.groups]):
                self.note_stream()
                self.pool.asking_broker(partial(growing.unshare_from, self, sequence, 0))

    @uninterrupted
    def keep_resident(self, overread_tokens: int) -> None:
        """Keep `overread_tokens` past every sequence's length mapped, now and from now on.

        For kernels that fetch past the length they are told. The number never decreases. Raises
        `OutOfPagesError`, and `ConfigError` if the pool poisons memory.
        """
        self.check_open()
        if overread_tokens > self.overread_tokens:
            growing.keep_resident(self, overread_tokens)

    def retire_behind_windows(self) -> None:
        """Retire memory that no later query of a live sequence can see."""
        growing.retire_behind_windows(self, self.live_sequences())

    # ---- sequences ------------------------------------------------------------------------

    @property
    def sequences(self) -> abc.Sequence[Sequence]:
        """The open sequences, swapped out or not."""
        return list(self.live.values())

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
            prompt: Its first token ids. The longest beginning that a live or parked row or host
                memory holds (see `Sequence.record`), short of the last token, is reused; the
                sequence's `num_tokens` is its length. CPU tensors of 64-bit integers are read
                fastest.
            tenant: Its owner: prefixes of other tenants are not found, and memory is scrubbed
                between tenants where the pool says so.

        Raises:
            OutOfAddressSpaceError: Every row holds a live sequence.
            ConfigError: `row` is not free, or the prompt is not a sequence of token ids.
            DriverError: The tail of a prefix could not be copied.

        Cost: no driver call where a parked row is adopted, with or without its prefix; else a
            fork's.
        """
        begun = self.begin(num_tokens, row, prompt, tenant)
        if prompt is not None and row is None:
            self.prefixes.count(begun.num_tokens)
        return begun

    def begin(self, num_tokens: int, row: int | None, prompt: Any, tenant: str | None) -> Sequence:
        """`open`, not counted as a hit or a miss of the prefix cache."""
        self.check_open()
        self.note_stream()
        with self.pool.lock:
            found = None
            if prompt is not None and row is None:
                found = forking.begin_with_prefix(self, prompt, tenant)
            if found is not None:
                begun = self._restored(*found, (), tenant)
            else:
                wanted = forking.choose_row(self, num_tokens) if row is None else row
                self.rows.take(wanted, 0, tenant, self.current_stream())
                begun = Sequence(self, wanted, 0, tenant)
        if prompt is not None and row is None:
            self.host_blocks.extend(begun, prompt)
        return begun

    @uninterrupted
    def fork(self, source: Sequence, num_tokens: int, *, row: int | None = None) -> Sequence:
        """Fork a sequence of this cache, or of another over the same pool with the same layers."""
        row = forking.fork(self, source, num_tokens, row)
        return Sequence(self, row, num_tokens, source.tenant)

    @uninterrupted
    def reorder(self, sequences: abc.Sequence[Sequence], sources: abc.Sequence[int]) -> None:
        """Let each sequence continue from another one and its recorded tokens, as in beam search.

        Args:
            sequences: Live sequences of this cache, of equal length, each once.
            sources: For each, the index in `sequences` of the one it continues.

        Raises:
            ConfigError: The arguments are not as described.
            OutOfPagesError: The pool cannot supply the pages.
            DriverError: Nothing changed, unless a copy failed: then the continued sequences have
                undefined tails, and nothing recorded.

        Cost: a copy of what the beams have written since they parted; the first time, extents are
            mapped instead, which waits for the device once.
        Ordering: after all work submitted so far on the current stream and others.
        """
        self.check_open()
        self.check_stateless("reorder")
        forking.check_beams(self, sequences, sources)
        self.pool.asking_broker(partial(forking.reorder, self, sequences, sources))

    def find_prefix(self, prompt: abc.Sequence[int] | torch.Tensor, tenant: str | None) -> int:
        """Return how many tokens of `prompt` a sequence opened now would begin with."""
        return sum(forking.find_beginning(self, prompt, tenant))

    def forget_prefixes(self, *, with_files: bool = True) -> None:
        """Forget all recorded tokens, here and below; the memory stays with its rows."""
        with self.pool.lock:
            for row in tuple(self.prefixes.recorded):
                self.prefixes.truncate(row)
            self.host_blocks.forget(with_files=with_files)

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
        row, num_tokens, token_ids = self.pool.asking_broker(partial(disk.load, self, path, tenant))
        return self._restored(row, num_tokens, token_ids, tenant)

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
        row, num_tokens, token_ids = process.import_prefix(self, socket_path, tenant, timeout_s)
        return self._restored(row, num_tokens, token_ids, tenant)

    # ---- memory ---------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Return the cache's statistics. Cost: proportional to its rows."""
        return collect_stats(self)

    def victims(self) -> Iterable[Victim]:
        """Yield the victims: checkpoints, and parked rows."""
        return self.rows.victims()

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
            growing.retire_unneeded(self)
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
            self.rows.check()
            self.host_blocks.check()
            for sequence in self.live_sequences():
                for group in self.groups:
                    group.check_row(sequence.row, sequence.num_tokens, self.overread_tokens)
            if self.states is not None:
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
        self.host_blocks.save()
        self.is_closing = True  # After a failing driver call another `close` continues from there.
        self.host_blocks.close()
        for sequence in self.sequences:
            sequence.is_closed = True
            sequence.drop_host_copy()
        self.live.clear()
        self.places.clear()
        with self.pool.lock:  # Its rows are not evicted from here on.
            self.pool.pressure.remove_source(self.victims)
        if self.side_stream is not None:
            self.pool.backend.stream_destroy(self.side_stream)
            self.side_stream = None
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
