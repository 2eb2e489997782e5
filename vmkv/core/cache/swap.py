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

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...errors import ConfigError
from ..interrupts import uninterrupted
from ..memory import Extent, HostCopy, Victim, size_classes
from ..memory.host_copy import Part
from .growing import Target, map_rows
from .prefix import Where
from .rows import victim_of

if TYPE_CHECKING:
    from .kv_cache import KVCache
    from .sequence import Sequence


class Transfer:
    """A sequence on its way to host memory, which holds its device memory until it leaves.

    It is the sequence's `transfer` until then, and `swapped` is the host memory.
    """

    def __init__(self, sequence: Sequence, swapped: HostCopy):
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
        rows = [(part.table, part.row, part.page) for part, _ in self.swapped.firsts]
        self._cache.pool.reclaimer.wait_for(
            [
                (table.page_address(row, page), table.page_address(row, table.row_pages))
                for table, row, page in rows
            ]
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
                self.swapped.leave()
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
        mappings = [
            mapping
            for (table, row, page, *_), _ in self.swapped.firsts
            for mapping in table.overlapping(row, page, table.row_pages)
        ]
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
    parts = [*_to_move(cache, sequence.row, sequence.num_tokens)]
    side = side_stream(cache)
    cache.pool.backend.join_streams(side)
    return Transfer(sequence, HostCopy(cache.pool, parts, side))


def _to_move(cache: KVCache, row: int, num_tokens: int) -> Iterator[Part]:
    """Yield the parts of a row to swap out, in extents as few as can be."""
    for group in cache.groups:
        end_page = group.pages_for(num_tokens + cache.overread_tokens) if num_tokens else 0
        mappings = group.table.overlapping(row, 0, end_page)
        own = next((each for each in mappings if not each.extent.is_shared), None)
        if own is not None:
            page = own.first_page
            for size_class in size_classes(end_page - page, cache.pool.largest_class):
                left_bytes = group.bytes_for(num_tokens) - page * group.page_bytes
                num_bytes = max(0, min(group.page_bytes << size_class, left_bytes))
                yield Part(group.table, row, page, size_class, num_bytes)
                page += 1 << size_class


def swap_in(sequence: Sequence, swapped: HostCopy) -> None:
    """Map new memory at a sequence's addresses and copy its contents back; all or nothing.

    The current stream waits for the copies, the caller does not.
    """
    cache, row, tenant = sequence.cache, sequence.row, sequence.tenant
    cache.note_stream()
    num_tokens = sequence.num_tokens
    with swapped.coming_back(side_stream(cache), cache.current_stream(), tenant):
        # `overread_tokens` may have grown meanwhile.
        map_rows(cache, [Target(row, num_tokens, num_tokens, tenant)])
    cache.sharing.swapped_in_bytes += swapped.num_bytes
    with cache.pool.lock:
        cache.prefixes.move(row, Where.LIVE)
