"""Spilling: part of a sequence in host memory, at its own addresses, and read there by kernels.

For a long sequence that is seldom read: its oldest extents give their device memory back, and a
kernel that reads them does so over the bus (55 GB/s on an H200's), without a copy or a change.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..backend import MemoryLocation
from ..memory import Mapping, RowChange, change
from .layer_group import LayerGroup
from .row_space import LiveRow, RowSpace

_Chosen = Sequence[tuple[LayerGroup, Mapping]]


def spill(sequence: LiveRow, num_bytes: int) -> int:
    """See `Sequence.spill`."""
    space, row = sequence.cache, sequence.row
    # Extents that are still written to, beyond the last full page, stay.
    found = [
        (group, mapping)
        for group, mapping in _mapped(space, row, MemoryLocation.DEVICE)
        if mapping.end_page <= group.geometry.whole_pages_below(sequence.num_tokens)
        and not mapping.extent.is_shared
    ]
    found.sort(key=lambda each: each[0].token_at(each[1].first_page))
    chosen: list[tuple[LayerGroup, Mapping]] = []
    chosen_bytes = 0
    for group, mapping in found:
        if chosen_bytes >= num_bytes:
            break
        chosen.append((group, mapping))
        chosen_bytes += mapping.extent.num_bytes
    return _relocate(space, sequence, chosen, MemoryLocation.HOST)


def unspill(sequence: LiveRow) -> int:
    """See `Sequence.unspill`."""
    space = sequence.cache
    spilled = _mapped(space, sequence.row, MemoryLocation.HOST)
    chosen = [each for each in spilled if not each[1].extent.is_shared]
    return _relocate(space, sequence, chosen, MemoryLocation.DEVICE)


def drop_spilled(space: RowSpace, row: int) -> None:
    """Retire what a row that ends has in host memory, and what comes behind it. Locked.

    Also what it shares: a parked row keeps none, so the last live one lets it go.
    """
    spilled = _mapped(space, row, MemoryLocation.HOST)
    if spilled:
        space.retire_from(row, min(group.token_at(each.first_page) for group, each in spilled))


def _mapped(space: RowSpace, row: int, location: MemoryLocation) -> _Chosen:
    """The extents of a row that are in memory of a location."""
    return [
        (group, mapping)
        for group in space.groups
        for mapping in group.table.rows[row].mappings
        if mapping.extent.location is location
    ]


def _relocate(space: RowSpace, sequence: LiveRow, chosen: _Chosen, location: MemoryLocation) -> int:
    """Move mappings of a row to memory of another location, in place; returns the bytes moved."""
    space.note_stream()
    if not chosen:
        return 0
    stream = space.current_stream()
    space.pool.backend.join_streams(stream)
    changes = [
        RowChange(
            group.table,
            sequence.row,
            mapping.first_page,
            [mapping.extent.size_class],
            sequence.tenant,
            old=[mapping],
            kept_bytes=mapping.extent.num_bytes,
        )
        for group, mapping in chosen
    ]
    acquire = partial(space.pool.acquire_or_evict, location=location)
    reads = [mapping for _, mapping in chosen]
    moved_bytes = sum(mapping.extent.num_bytes for mapping in reads)
    with change(space.pool, changes, reads=reads, acquire=acquire) as made:
        made.map(stream)
    return moved_bytes
