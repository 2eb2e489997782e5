"""Swapping: memory of sequences moves to the host and back, at the same addresses.

    resident --swap_out--> moving --leave--> swapped --swap_in--> resident
                              '----cancel--> resident

A sequence leaves when its transfer is finished, or earlier when memory is short: its device memory
is retired behind a fence that covers the copies. The copies run on a stream of their own: outwards
after work submitted so far, inwards before the compute stream's next work. Shared extents stay on
the device, because others hold them anyway.

See DESIGN.md, Note [Swapping keeps addresses].
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ...errors import ConfigError
from ...units import Address
from ..interrupts import uninterrupted
from ..memory import (
    Change,
    Extent,
    PageMapping,
    PageTable,
    RowChange,
    Victim,
    size_classes,
)
from ..memory.host_copy import copied_to_host
from .growing import Target, map_rows
from .layer_group import LayerGroup
from .prefix import Where
from .rows import victim_of

if TYPE_CHECKING:
    from .kv_cache import KVCache
    from .sequence import Sequence

# ---- swap ----------------------------------------------------------------------------------------


class SwappedExtent(NamedTuple):
    """A host extent with tokens of `group` from `page` of the row on, mapped at `staging_page`."""

    group: LayerGroup
    page: int
    num_bytes: int
    extent: Extent
    staging_page: int


@dataclass(frozen=True)
class Swapped:
    """The host copy of a row, which `staging` owns.

    It stays mapped for both ways, because granting access takes half as long as copying. Copies go
    extent by extent: mapping the next one costs less than copying this one.
    """

    row: int
    extents: abc.Sequence[SwappedExtent]
    staging: PageTable

    @property
    def num_pages(self) -> int:
        """Pages that `swap_in` maps."""
        return sum(each.extent.num_pages for each in self.extents)

    @property
    def num_bytes(self) -> int:
        """Bytes that hold tokens, copied each way."""
        return sum(each.num_bytes for each in self.extents)

    def address(self, each: SwappedExtent) -> Address:
        """The device address of an extent's contents."""
        return each.group.table.page_address(self.row, each.page)

    def staged(self, each: SwappedExtent) -> Address:
        """The staging address of an extent's contents."""
        return self.staging.page_address(0, each.staging_page)

    def firsts(self) -> list[SwappedExtent]:
        """The first extent of each group."""
        firsts: dict[int, SwappedExtent] = {}
        for each in self.extents:
            firsts.setdefault(id(each.group), each)
        return list(firsts.values())

    def mappings(self) -> list[PageMapping]:
        """Device mappings of the row from the first moved page of each group on."""
        return [
            mapping
            for group, page, *_ in self.firsts()
            for mapping in group.table.overlapping(self.row, page, group.table.row_pages)
        ]

    def drop(self) -> None:
        """Release the host memory once the copies submitted so far are complete. Cannot fail."""
        self.staging.pool.reclaimer.close_soon(self.staging.close_behind)


class Transfer:
    """A sequence on its way to host memory, which holds its device memory until it leaves.

    It is the sequence's `transfer` until then, and `swapped` is the host memory.
    """

    def __init__(self, sequence: Sequence, swapped: Swapped):
        self.swapped = swapped
        self._sequence = sequence
        self._cache = sequence.cache
        with self._cache.pool.lock:
            sequence.transfer = self
            self._cache.moving[sequence.row] = self._victim

    @uninterrupted
    def finish(self) -> None:
        """Wait until the sequence is swapped out and its device memory free. Idempotent."""
        self._leave()
        starts = [(self.swapped.address(each), each.extent) for each in self.swapped.extents]
        self._cache.pool.reclaimer.wait_for(
            [(start, Address(start + extent.num_bytes)) for start, extent in starts]
        )

    @uninterrupted
    def cancel(self) -> None:
        """Keep the sequence on the device and drop its copy.

        Raises `ConfigError` if it has left, by `finish` or because memory was short.
        """
        if not self.stay():
            raise ConfigError(f"{self._sequence} is swapped out already; swap_in() brings it back")

    def stay(self) -> bool:
        """Cancel the transfer if it is still under way; returns whether it was."""
        with self._cache.pool.lock:
            if self._sequence.transfer is not self:
                return False
            self.swapped.drop()
            self._end()
            return True

    def _leave(self) -> None:
        cache, sequence = self._cache, self._sequence
        with cache.pool.lock:
            if sequence.transfer is self:
                fence = cache.pool.reclaimer.new_fence()
                for group, page, *_ in self.swapped.firsts():
                    group.table.retire_back(self.swapped.row, page, fence)
                sequence.swapped = self.swapped  # Before the end: it is not resident in between.
                self._end()
                cache.prefixes.move(sequence.row, Where.AWAY)
                cache.sharing.swapped_out_bytes += self.swapped.num_bytes

    def _end(self) -> None:
        self._sequence.transfer = None
        del self._cache.moving[self._sequence.row]

    def _victim(self) -> Victim:
        """Present this transfer as the first victim in line: its eviction loses nothing."""
        return victim_of(self._gives, lambda _: self._leave(), last_used=0)

    def _gives(self) -> list[tuple[int, Extent]]:
        """List the extents that leaving frees: all of them, or none while any is pinned."""
        if self._sequence.transfer is not self:
            return []
        mappings = self.swapped.mappings()
        is_pinned = any(mapping.num_pins for mapping in mappings)
        return [] if is_pinned else [(0, mapping.extent) for mapping in mappings]


def side_stream(cache: KVCache) -> int:
    """Return the stream on which sequences are swapped, made on first use."""
    if cache.side_stream is None:
        cache.side_stream = cache.pool.backend.new_stream()
    return cache.side_stream


def begin_swap_out(sequence: Sequence) -> Transfer:
    """Start copying a sequence's own memory to the host; after any error nothing has changed.

    Cost: a mapping and an asynchronous copy per extent; host memory that the pool has to create
        takes ten times as long as filling it (10 ms for 64 MiB).
    """
    cache = sequence.cache
    cache.note_stream()
    cache.pool.reclaimer.free_idle_reservations()
    runs = list(_to_move(cache, sequence.row, sequence.num_tokens))
    side = side_stream(cache)
    cache.pool.backend.join_streams(side)
    sources = [
        (size_class, group.table.page_address(sequence.row, page), num_bytes)
        for group, page, num_bytes, size_class in runs
    ]
    staging = copied_to_host(cache.pool, sources, side)
    moved = [
        SwappedExtent(*run[:3], mapping.extent, mapping.first_page)
        for run, mapping in zip(runs, staging.rows[0].mappings, strict=True)
    ]
    return Transfer(sequence, Swapped(sequence.row, moved, staging))


def _to_move(
    cache: KVCache, row: int, num_tokens: int
) -> Iterator[tuple[LayerGroup, int, int, int]]:
    """Yield `(group, page, bytes of tokens, size class)` for each extent to swap out."""
    for group in cache.groups:
        end_page = group.pages_for(num_tokens + cache.overread_tokens) if num_tokens else 0
        mappings = group.table.overlapping(row, 0, end_page)
        own = next((each for each in mappings if not each.extent.is_shared), None)
        if own is not None:
            page = own.first_page
            for size_class in size_classes(end_page - page, cache.pool.largest_class):
                left_bytes = group.bytes_for(num_tokens) - page * group.page_bytes
                num_bytes = max(0, min(group.page_bytes << size_class, left_bytes))
                yield group, page, num_bytes, size_class
                page += 1 << size_class


def swap_in(sequence: Sequence, swapped: Swapped) -> None:
    """Map new memory at a sequence's addresses and copy its contents back; all or nothing.

    The current stream waits for the copies, the caller does not.
    """
    cache, row, tenant = sequence.cache, swapped.row, sequence.tenant
    cache.note_stream()
    backend, num_tokens = cache.pool.backend, sequence.num_tokens
    changes = [
        RowChange(each.group.table, row, each.page, [each.extent.size_class], tenant)
        for each in swapped.extents
    ]
    side, current = side_stream(cache), cache.current_stream()
    with Change(cache.pool, changes) as made:
        for each, _ in zip(swapped.extents, made.one_by_one(side), strict=True):
            if each.num_bytes:
                backend.copy(swapped.address(each), swapped.staged(each), each.num_bytes, side)
        # `overread_tokens` may have grown meanwhile.
        map_rows(cache, [Target(row, num_tokens, num_tokens, tenant)])
        backend.stream_wait(current, side)
        swapped.drop()
    cache.sharing.swapped_in_bytes += swapped.num_bytes
    with cache.pool.lock:
        cache.prefixes.move(row, Where.LIVE)
