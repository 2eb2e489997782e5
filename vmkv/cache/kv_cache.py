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

import contextlib
import os
import warnings
from collections.abc import Collection, Iterable
from collections.abc import Sequence as List_

from ..errors import ConfigError, OutOfPagesError, SequenceFullError
from ..memory import Scrub, WriteRange, check_pool, size_classes
from .disk import load
from .forking import plan_forks
from .process import import_prefix
from .reorder import check_beams, reorder
from .rowed import RowedCache
from .sequence import Sequence
from .stats import CacheStats, collect_stats
from .surplus import behind_windows, retire_surplus
from .transaction import Target, plan


class KVCache(RowedCache):
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

    # ---- sequences ------------------------------------------------------------------------

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
        """
        self.check_open()
        check_beams(self, sequences, sources)
        moves = [
            (sequences[source].row, sequence.row)
            for sequence, source in zip(sequences, sources, strict=True)
            if sequences[source] is not sequence
        ]
        if not moves or not sequences[0].num_tokens:
            return
        self.note_stream()
        tenants = {each.row: each.tenant for each in sequences}
        reorder(self, moves, sequences[0].num_tokens, tenants, self.sharing)

    def grow(self, wanted: Iterable[tuple[Sequence, int]]) -> None:
        """Make each sequence hold the given number of tokens, all of them or none.

        Sequences that are longer already stay as they are. Memory is mapped where it is missing,
        and what is shared is copied where it will be written; parked rows, free memory and what
        other sequences hold beyond their length give way first where the pool is short.

        Raises:
            OutOfPagesError: The pool cannot supply all pages. No sequence has changed.
            SequenceFullError: A row ends before that. No sequence has changed.
            ClosedError: The cache or a sequence is closed.

        Cost: a comparison for a sequence below its `writable_tokens` (most decode steps).
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
        self.note_stream()
        short: dict[Sequence, int] = {}  # One may be named twice.
        for sequence, num_tokens in targets:
            if num_tokens > self.writable_tokens(sequence):
                short[sequence] = max(num_tokens, short.get(sequence, 0))
        if short:
            self._make_writable(short, dict(targets))
        if not self.keeps_past:
            self.retire_behind_windows(sequence for sequence, _ in targets)
        for sequence, num_tokens in targets:
            sequence.num_tokens = max(sequence.num_tokens, num_tokens)

    def _make_writable(self, short: dict[Sequence, int], wanted: dict[Sequence, int]) -> None:
        """Unshare and map what sequences lack; what live rows hold beyond `wanted` may go."""
        for sequence, num_tokens in short.items():
            if num_tokens > sequence.num_tokens:
                self._unshare(sequence)
        targets = [Target(each.row, to, each.num_tokens, each.tenant) for each, to in short.items()]
        try:
            self._grow(targets, self.groups)
        except OutOfPagesError:
            if not retire_surplus(self, wanted):
                raise
            self._grow(targets, self.groups)

    def pages_to_fork(self, sequence: Sequence, num_tokens: int) -> int:
        """What a fork of `sequence` at `num_tokens` takes from the pool. Changes nothing."""
        plans = plan_forks(self, self, (sequence.row, -1), num_tokens)
        return sum(1 << size_class for plan in plans for size_class in plan.part.classes)

    def submitting(
        self, writes: Iterable[tuple[int, int, int]]
    ) -> contextlib.AbstractContextManager[None]:
        """Submit a step within this; where checks are on, it is held against I10.

        Args:
            writes: The rows that it writes, each from a token to another.

        Raises:
            InternalError: A row may not be written there. Nothing is submitted.

        Cost: nothing where checks are off.
        """
        submitted = self.pool.submitted
        if submitted is None:
            return contextlib.nullcontext()
        return submitted.submitting(
            [
                WriteRange(
                    group.table,
                    row,
                    group.geometry.whole_pages_below(start),
                    group.geometry.pages_for(end),
                )
                for row, start, end in writes
                for group in self.groups
            ]
        )

    def keep_resident(self, overread_tokens: int) -> None:
        """Have `overread_tokens` past every sequence's length mapped, now and from now on.

        For kernels that fetch past the length they are told. Never less than before.

        Raises:
            OutOfPagesError: They are not to be had. Nothing changed.
            ConfigError: The pool poisons memory, which such a kernel would fetch. Likewise.
        """
        self.check_open()
        before = self.overread_tokens
        if overread_tokens <= before:
            return
        if self.pool.scrub is Scrub.POISON:
            raise ConfigError(
                f"a kernel that fetches {overread_tokens} tokens past the length would fetch the "
                'NaN of scrub="poison"; choose another attention backend, or none of the poison'
            )
        self.overread_tokens = overread_tokens
        try:
            live = self.live_sequences()
            lengths = [
                Target(each.row, each.num_tokens, each.num_tokens, each.tenant) for each in live
            ]
            self._grow(lengths, self.groups)
        except BaseException:
            self.overread_tokens = before
            raise

    def writable_tokens(self, sequence: Sequence) -> int:
        """See `Sequence.writable_tokens`."""
        if not sequence.is_resident:
            return 0
        row, num_tokens, overread_tokens = sequence.row, sequence.num_tokens, self.overread_tokens
        end = self.max_tokens
        for group in self.groups:
            end = min(end, group.writable_tokens(row, num_tokens, overread_tokens))
        return end if self.groups else 0

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """See `Sequence.truncate`."""
        self.check_open()
        sequence.check_open()
        if num_tokens > sequence.num_tokens:
            raise ConfigError(
                f"the sequence in row {sequence.row} holds {sequence.num_tokens} tokens, fewer "
                f"than the {num_tokens} to keep"
            )
        if num_tokens and not self._keeps(sequence.row, num_tokens):
            raise ConfigError(
                f"cannot go back to {num_tokens} tokens: a sliding-window layer has let go of "
                "what they would see (set keeps_past before appending)"
            )
        if not num_tokens:
            self._begin_anew(sequence.row)
        with self.pool.lock:
            self.prefixes.truncate(sequence.row, num_tokens)
        sequence.num_tokens = num_tokens

    # ---- from elsewhere -------------------------------------------------------------------

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
        return load(self, path, tenant)

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
        return import_prefix(
            self, socket_path, tenant=tenant, allowed_uids=allowed_uids, timeout_s=timeout_s
        )

    # ---- memory ---------------------------------------------------------------------------

    def make_ready(
        self,
        wanted: Iterable[tuple[Sequence, int]],
        num_new_tokens: int = 0,
        *,
        wait: bool = False,
    ) -> bool:
        """Have memory lie ready for a later `grow`, which then makes no room: it only maps.

        To be called while the device works; see `ExtentPool.make_ready`. Live sequences, and what
        is mapped of them, stay as they are.

        Args:
            wanted: As for `grow`. Sequences that are swapped out or moving are passed over.
            num_new_tokens: Tokens of sequences that will begin meanwhile, all together.
            wait: Wait for fences; without it this never blocks.

        Returns:
            Whether all of it lies ready.
        """
        self.check_open()
        targets = [
            Target(sequence.row, min(num_tokens, self.max_tokens), sequence.num_tokens)
            for sequence, num_tokens in wanted
            if sequence.is_resident and num_tokens > self.writable_tokens(sequence)
        ]
        parts = plan(self.groups, targets, self.overread_tokens, exactly=False)
        classes = [size_class for part in parts for size_class in part.classes]
        for group in self.groups if num_new_tokens else ():
            num_pages = group.geometry.pages_for(num_new_tokens)
            classes += size_classes(num_pages, group.largest_class)
        return self.pool.make_ready(classes, wait=wait)

    def make_room(self, num_bytes: int) -> int:
        """Have `num_bytes` more that sequences could grow by, as far as this cache can.

        Its parked rows give way, the one used longest ago first, then what its live rows hold
        beyond their length; other caches over the pool keep theirs. Waits for the fences of what is
        unmapped. Returns how much more there is: less than asked for where no more can be had.
        """
        self.check_open()
        before_bytes = self.pool.available_bytes
        self.pool.make_room(num_bytes, only=self._victims)
        if self.pool.available_bytes < before_bytes + num_bytes:
            with self.pool.lock:
                retire_surplus(self)
            self.pool.reclaimer.wait()
        return self.pool.available_bytes - before_bytes

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
                for row in self._rows.parked():
                    self._retire_parked(row, 0)
                retire_surplus(self)
            self.pool.reclaimer.wait()
        else:
            missing_bytes = num_bytes - self.pool.stats().free_bytes
            if missing_bytes > 0:
                self.make_room(missing_bytes)
        return self.pool.trim(num_bytes)

    def stats(self) -> CacheStats:
        """The cache now. Cost: proportional to its rows."""
        lengths = {
            row: sequence.num_tokens if sequence.is_resident else 0
            for row, sequence in self._sequences.items()
        }
        parked = list(self._rows.parked())
        return collect_stats(self.pool, self.groups, lengths, parked, self.prefixes, self.sharing)

    def check(self) -> None:
        """Check every invariant of memory; raises `InternalError` where one is broken."""
        check_pool(self.pool)
        for group in self.groups:
            for row in range(self.max_sequences):
                group.table.check_writable(row)
        for sequence in self.live_sequences():
            for group in self.groups:
                group.check_row(sequence.row, sequence.num_tokens, self.overread_tokens)

    def retire_behind_windows(self, sequences: Iterable[Sequence] | None = None) -> None:
        """Retire what no later query of these sequences (or all) can see."""
        for group, row, num_tokens in behind_windows(self, sequences):
            group.retire_front(row, num_tokens, self.pool.reclaimer.new_fence())

    # ---- end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for submitted work, unmap everything, and let the pool go. Idempotent.

        Tensors over the cache must not be used afterwards: their addresses stay reserved, so
        touching one faults rather than reads a stranger's memory.
        """
        if self.is_closed:
            return
        # A failing driver call stops this, and another `close` goes on from there.
        for sequence in self._sequences.values():
            sequence.is_closed = True
            self._drop_swapped(sequence)
        self._sequences.clear()
        self._layers.clear()
        self.pool.pressure.remove_source(self._victims)
        self._end_side_stream()
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
