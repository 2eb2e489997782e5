"""The cache: sequences over layer groups over one pool. Usable without transformers.

    cache = KVCache("host", max_tokens=4096, max_sequences=8)
    cache.add_layers(range(2), num_kv_heads=2, head_dim=64, dtype=torch.float16)
    sequence = cache.open()
    sequence.append(100)
    sequence.keys(layer=0)[:] = ...      # [100, 2, 64], contiguous in virtual memory

A growth is one transaction over all sequences and groups it names: it plans, acquires every
extent or none, and maps in one driver batch that is undone if any call fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from ..backend import Backend
from ..errors import ClosedError, ConfigError, SequenceFullError
from ..memory import ExtentPool, check_pool
from .compaction import without_gaps
from .device_memory import open_pool
from .geometry import Geometry, LayerShape, check_positive
from .layer_group import LayerGroup, split_layers
from .layer_map import LayerMap
from .rows import Rows
from .sequence import Sequence
from .stats import CacheStats, collect_stats
from .transaction import Target, grow
from .views import stream_getter, torch_device
from .windows import drop_displaced, retire_behind


class KVCache:
    """Keys and values of many sequences on one device.

    Args:
        memory: A device (`"cuda:0"`, `"host"`), a backend, or a pool to share with other caches.
        max_tokens: The longest sequence.
        max_sequences: How many sequences can be open or parked at once.
        budget_bytes: Physical memory at most; by default what is free on the device now. Only
            where `memory` is not a pool, which has its own.
        layers_per_group: How many layers share a token row. By default all on a GPU, where
            decode pays 2 % for it (7 at worst) and saves calls, and one on the host, where small
            pages make calls cheap and interleaving costs 1.8 x in CPU attention.

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
        layers_per_group: int | None = None,
    ):
        check_positive("max_tokens", max_tokens)
        check_positive("max_sequences", max_sequences)
        for name, value in (("budget_bytes", budget_bytes), ("layers_per_group", layers_per_group)):
            if value is not None:
                check_positive(name, value)
        self.pool = open_pool(memory, budget_bytes)
        self.pool.attach()
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        is_host = self.pool.backend.name == "host"
        self._layers_per_group = 1 if layers_per_group is None and is_host else layers_per_group
        self._layers = LayerMap()
        self._rows = Rows(max_sequences)
        self._sequences: dict[int, Sequence] = {}
        #: The raw handle of torch's current stream on the cache's device.
        self.current_stream = stream_getter(self.pool.backend)
        #: Tokens past a sequence's length that are kept resident; see `keep_resident`.
        self.overread_tokens = 0
        #: While true, sliding-window groups keep what has left the window (for rollback).
        self.keeps_past = False
        self.is_closed = False

    @property
    def device(self) -> torch.device:
        """The device whose tensors live here."""
        return torch_device(self.pool.backend)

    @property
    def groups(self) -> list[LayerGroup]:
        """The layer groups, in the order in which they were made."""
        return self._layers.groups

    @property
    def layers(self) -> list[int]:
        """The layers that were added, as the caller numbers them."""
        return self._layers.layers

    # ---- layers ---------------------------------------------------------------------------

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

        Raises:
            ConfigError: A size is impossible, or a layer was added before.
            OutOfPagesError, OutOfAddressSpaceError: Nothing was added.
        """
        self.check_open()
        wanted = list(layers)
        self._layers.check_new(wanted)
        if window_tokens is not None:
            check_positive("window_tokens", window_tokens)
        shape = LayerShape(
            num_k_heads=num_kv_heads,
            k_dim=head_dim,
            num_v_heads=num_kv_heads if num_v_heads is None else num_v_heads,
            v_dim=head_dim if v_head_dim is None else v_head_dim,
            itemsize_bytes=dtype.itemsize,
        )
        made: list[LayerGroup] = []
        members: list[list[int]] = []
        try:
            for part in split_layers(len(wanted), self._layers_per_group):
                geometry = Geometry(
                    len(part), shape, self.pool.page_bytes, self.max_tokens, self.max_sequences
                )
                made.append(LayerGroup(self.pool, geometry, dtype, window_tokens))
                members.append([wanted[at] for at in part])
            targets = [
                Target(sequence.row, sequence.num_tokens, num_past_tokens)
                for sequence in self._sequences.values()
            ]
            self._grow(targets, made)
        except BaseException:
            for group in made:
                group.close()
            raise
        for group, group_layers in zip(made, members, strict=True):
            self._layers.add(group, group_layers)
        return made

    def drop_layers(self, layers: Iterable[int]) -> None:
        """Forget layers that were added but never written.

        Their room in the token row stays empty. A group with none left is closed.
        """
        self.check_open()
        for layer in layers:
            emptied = self._layers.drop(layer)
            if emptied is not None:
                emptied.close()
                self.groups.remove(emptied)

    def compact(self) -> bool:
        """Close the gaps that `drop_layers` left, by moving the groups that have any.

        Tensors made before do not follow: make new ones. Returns whether something moved.

        Raises:
            OutOfPagesError, OutOfAddressSpaceError: Nothing moved; the gaps stay.
        """
        self.check_open()
        moved = False
        for group in tuple(self.groups):
            places = [at for at, _ in self._layers.members(group)]
            if len(places) < group.geometry.num_layers:
                lengths = [(each.row, each.num_tokens) for each in self._sequences.values()]
                self._layers.replace(group, without_gaps(group, places, lengths, self._grow))
                group.close()
                moved = True
        return moved

    def place(self, layer: int) -> tuple[LayerGroup, int]:
        """The group of `layer`, and its index in the group.

        Raises:
            ConfigError: No such layer was added.
        """
        return self._layers.place(layer)

    def keys(self, layer: int) -> torch.Tensor:
        """All rows' keys of `layer`: `[rows, row_tokens, k_heads, k_dim]`, mostly unmapped.

        What kernels take that are told rows and lengths. Only tokens below a live sequence's
        `num_tokens` (and `overread_tokens` more) may be touched.
        """
        self.check_open()
        group, at = self.place(layer)
        return group.views.keys[at].transpose(1, 2)

    def values(self, layer: int) -> torch.Tensor:
        """All rows' values of `layer`: `[rows, row_tokens, v_heads, v_dim]`, as `keys`."""
        self.check_open()
        group, at = self.place(layer)
        return group.views.values[at].transpose(1, 2)

    # ---- sequences ------------------------------------------------------------------------

    def open(self, num_tokens: int = 0, *, row: int | None = None) -> Sequence:
        """Begin an empty sequence.

        Args:
            num_tokens: About how long it will become: helps to choose the parked row to adopt.
            row: Take just this row.

        Raises:
            OutOfAddressSpaceError: Every row holds a live sequence.
            ConfigError: `row` is live, or does not exist.

        Cost: no driver call. What the adopted row holds is reused as it is.
        """
        self.check_open()
        if row is None:
            row = self._rows.choose(num_tokens, self._adoptable_tokens)
        if self._rows.is_parked(row):
            # Another stream may still read what this one will overwrite.
            self.note_stream()
            self.pool.backend.join_streams(self.current_stream())
        self._rows.take(row)
        sequence = self._sequences[row] = Sequence(self, row)
        return sequence

    def grow(self, wanted: Iterable[tuple[Sequence, int]]) -> None:
        """Make each sequence hold the given number of tokens, all of them or none.

        Sequences that are longer already stay as they are. Memory is mapped where it is
        missing; parked rows and free memory give way first where the pool is short.

        Raises:
            OutOfPagesError: The pool cannot supply all pages. No sequence has changed.
            SequenceFullError: A row ends before that. No sequence has changed.
            ClosedError: The cache or a sequence is closed.
        """
        self.check_open()
        targets = list(wanted)
        for sequence, num_tokens in targets:
            sequence.check_open()
            if num_tokens > self.max_tokens:
                raise SequenceFullError(
                    f"the sequence in row {sequence.row} would hold {num_tokens} tokens; rows of "
                    f"this cache end at max_tokens={self.max_tokens}: make it with a larger one",
                    max_tokens=self.max_tokens,
                )
        longest: dict[Sequence, int] = {}  # One may be named twice.
        for sequence, num_tokens in targets:
            longest[sequence] = max(num_tokens, longest.get(sequence, 0))
        self.note_stream()
        wanted_rows = [Target(each.row, to, each.num_tokens) for each, to in longest.items()]
        self._grow(wanted_rows, self.groups)
        if not self.keeps_past:
            self.retire_behind_windows(sequence for sequence, _ in targets)
        for sequence, num_tokens in targets:
            sequence.num_tokens = max(sequence.num_tokens, num_tokens)

    def keep_resident(self, overread_tokens: int) -> None:
        """Have `overread_tokens` past every sequence's length mapped, now and from now on.

        For kernels that fetch past the length they are told. Never less than before.

        Raises:
            OutOfPagesError: They are not to be had. Nothing changed.
        """
        self.check_open()
        before = self.overread_tokens
        if overread_tokens <= before:
            return
        self.overread_tokens = overread_tokens
        try:
            lengths = [(each.row, each.num_tokens) for each in self._sequences.values()]
            self._grow([Target(row, to, to) for row, to in lengths], self.groups)
        except BaseException:
            self.overread_tokens = before
            raise

    def resident_tokens(self, sequence: Sequence) -> int:
        """How long `sequence` can become without another driver call."""
        return min(
            (group.resident_tokens(sequence.row) - self.overread_tokens for group in self.groups),
            default=0,
        )

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """See `Sequence.truncate`."""
        self.check_open()
        sequence.check_open()
        if num_tokens > sequence.num_tokens:
            raise ConfigError(
                f"the sequence in row {sequence.row} holds {sequence.num_tokens} tokens, fewer "
                f"than the {num_tokens} to keep"
            )
        if num_tokens and not all(group.keeps(sequence.row, num_tokens) for group in self.groups):
            raise ConfigError(
                f"cannot go back to {num_tokens} tokens: a sliding-window layer has let go of "
                "what they would see (set keeps_past before appending)"
            )
        if not num_tokens:
            drop_displaced(self.groups, sequence.row, self.pool.reclaimer)
        sequence.num_tokens = num_tokens

    def park(self, sequence: Sequence) -> None:
        """See `Sequence.close`."""
        if not self.is_closed:
            drop_displaced(self.groups, sequence.row, self.pool.reclaimer)
            del self._sequences[sequence.row]
            self._rows.park(sequence.row)
        sequence.is_closed = True

    def note_stream(self) -> None:
        """Say that torch's current stream works on this cache's memory. Cost: about 0.3 µs."""
        self.pool.backend.note_stream(self.current_stream())

    # ---- memory ---------------------------------------------------------------------------

    def trim(self, num_bytes: int | None = None) -> int:
        """Give memory that no live sequence needs back: `num_bytes` at least, or all of it.

        Parked rows go oldest first, then what live rows hold beyond their length, then free
        extents. Waits for the fences of what is unmapped. Returns the bytes given back.
        """
        self.check_open()
        wanted = num_bytes if num_bytes is not None else 1 << 62
        self.pool.reclaimer.poll()
        if self.pool.stats().free_bytes < wanted:
            self._evict_parked(wanted)
            fence = self.pool.reclaimer.new_fence()
            for sequence in self._sequences.values():
                for group in self.groups:
                    keep = sequence.num_tokens + self.overread_tokens if sequence.num_tokens else 0
                    group.retire_from(sequence.row, keep, fence)
            self.pool.reclaimer.wait()
        return self.pool.trim(num_bytes)

    def stats(self) -> CacheStats:
        """The cache now. Cost: proportional to its rows."""
        lengths = {row: sequence.num_tokens for row, sequence in self._sequences.items()}
        return collect_stats(self.pool, self.groups, lengths, list(self._rows.parked()))

    def check(self) -> None:
        """Check every invariant of memory; raises `InternalError` where one is broken."""
        check_pool(self.pool)
        for sequence in self._sequences.values():
            for group in self.groups:
                group.check_row(sequence.row, sequence.num_tokens, self.overread_tokens)

    # ---- growing, and giving way ----------------------------------------------------------

    def _grow(self, targets: list[Target], groups: list[LayerGroup]) -> None:
        if self.keeps_past:
            targets = [target._replace(num_past_tokens=0) for target in targets]
        grow(self.pool, groups, targets, self.overread_tokens, self._make_room)

    def _make_room(self, needed_bytes: int) -> None:
        """Wait for what is retired, then let parked rows go, until `needed_bytes` are free."""
        reclaimer = self.pool.reclaimer
        reclaimer.wait(until_bytes=needed_bytes)
        free_bytes = self.pool.stats().free_bytes
        if free_bytes < needed_bytes:
            self._evict_parked(needed_bytes - free_bytes)
            reclaimer.wait()

    def _evict_parked(self, num_bytes: int) -> None:
        """Retire parked rows, oldest first, until they held `num_bytes`."""
        evicted_bytes = 0
        for row in self._rows.parked():
            if evicted_bytes >= num_bytes:
                break
            evicted_bytes += sum(group.resident_bytes(row) for group in self.groups)
            fence = self.pool.reclaimer.new_fence()
            for group in self.groups:
                group.retire_from(row, 0, fence)
            self._rows.empty(row)

    def retire_behind_windows(self, sequences: Iterable[Sequence] | None = None) -> None:
        """Retire what no later query of these sequences (or all) can see."""
        chosen = tuple(self._sequences.values()) if sequences is None else sequences
        lengths = ((each.row, each.num_tokens) for each in chosen)
        retire_behind(self.groups, lengths, self.pool.reclaimer)

    def _adoptable_tokens(self, row: int) -> int:
        return min((group.adoptable_tokens(row) for group in self.groups), default=0)

    # ---- end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for submitted work, unmap everything, and let the pool go. Idempotent.

        Tensors over the cache must not be used afterwards: their addresses stay reserved, so
        touching one faults rather than reads a stranger's memory.
        """
        if self.is_closed:
            return
        for sequence in self._sequences.values():
            sequence.is_closed = True
        self._sequences.clear()
        self._layers.clear()
        # A failing driver call stops here, and another `close` goes on from it.
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

    def check_open(self) -> None:
        """Raise `ClosedError` if the cache is closed."""
        if self.is_closed:
            raise ClosedError("this KVCache is closed; make a new one")

    def __del__(self) -> None:
        # Only a warning: a destructor runs at any moment, and the device may still be reading.
        if not getattr(self, "is_closed", True):
            warnings.warn("a KVCache was never closed", ResourceWarning, stacklevel=2)

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
