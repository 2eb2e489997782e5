"""Swapping: memory of sequences moves to the host and back, at the same addresses.

    resident --swap_out--> swapped --swap_in--> resident

The copies run on a stream of their own: outwards after work submitted so far, inwards before the
compute stream's next work. The device memory is retired behind a fence that covers the copies.
Shared extents stay on the device, because others hold them anyway.

See DESIGN.md, Note [Swapping keeps addresses].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..memory import HostCopy, size_classes
from ..memory.host_copy import Part
from .growing import Target, map_rows
from .prefix import Where

if TYPE_CHECKING:
    from .kv_cache import KVCache
    from .sequence import Sequence


def side_stream(cache: KVCache) -> int:
    """Return the stream on which sequences are swapped, made on first use."""
    if cache.side_stream is None:
        cache.side_stream = cache.pool.backend.new_stream()
    return cache.side_stream


def swap_out(sequence: Sequence) -> None:
    """Move a sequence's own memory to the host, and wait until its device memory is free.

    Cost: a mapping and a copy per extent; host memory that the pool has to create takes ten times
        as long as filling it (10 ms for 64 MiB).
    """
    cache, row = sequence.cache, sequence.row
    cache.note_stream()
    reclaimer = cache.pool.reclaimer
    reclaimer.free_idle_reservations()
    parts = [*_to_move(cache, row, sequence.num_tokens)]
    side = side_stream(cache)
    cache.pool.backend.join_streams(side)
    with cache.pool.lock:
        copy = HostCopy(cache.pool, parts, side)
        copy.leave()
        sequence.swapped = copy
        cache.prefixes.move(row, Where.AWAY)
        cache.sharing.swapped_out_bytes += copy.num_bytes
    tables = [group.table for group in cache.groups]
    reclaimer.wait_for([(its.page_address(row, 0), its.page_address(row + 1, 0)) for its in tables])


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
