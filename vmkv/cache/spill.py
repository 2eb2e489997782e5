"""Spilling: part of a sequence in host memory, at its own addresses, and read there by kernels.

For a long sequence that is seldom read: its oldest extents give their device memory back, and a
kernel that reads them does so over the bus (55 GB/s on an H200's), without a copy or a change.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..backend import MemoryLocation
from ..memory import Mapping, RowChange, change
from .layer_group import LayerGroup

if TYPE_CHECKING:
    from .layered import LayeredCache

Chosen = Sequence[tuple[LayerGroup, Mapping]]


def oldest(
    groups: Sequence[LayerGroup], row: int, num_tokens: int, num_bytes: int
) -> list[tuple[LayerGroup, Mapping]]:
    """The first extents of a row, in device memory and its own, that make up `num_bytes`.

    Extents that are still written to, beyond the last full page of `num_tokens`, are left out.
    """
    found = sorted(
        (
            (group.token_at(mapping.first_page), at, group, mapping)
            for at, group in enumerate(groups)
            for mapping in group.table.rows[row].mappings
            if mapping.extent.location is MemoryLocation.DEVICE
            and not mapping.extent.is_shared
            and mapping.end_page <= group.geometry.whole_pages_below(num_tokens)
        ),
        key=lambda each: each[:2],
    )
    chosen: list[tuple[LayerGroup, Mapping]] = []
    chosen_bytes = 0
    for _, _, group, mapping in found:
        if chosen_bytes >= num_bytes:
            break
        chosen.append((group, mapping))
        chosen_bytes += mapping.extent.num_bytes
    return chosen


def spilled(groups: Sequence[LayerGroup], row: int) -> list[tuple[LayerGroup, Mapping]]:
    """The extents of a row that are in host memory, and its own."""
    return [
        (group, mapping)
        for group in groups
        for mapping in group.table.rows[row].mappings
        if mapping.extent.location is MemoryLocation.HOST and not mapping.extent.is_shared
    ]


def relocate(
    cache: LayeredCache, row: int, chosen: Chosen, location: MemoryLocation, tenant: object
) -> int:
    """Move mappings of `row` to memory of another location, in place.

    Returns:
        The bytes moved.

    Raises:
        OutOfPagesError: There is no memory left there. Nothing changed.
        OutOfAddressSpaceError, DriverError: Nothing changed.

    Cost: a copy, and a wait for the device; an unmap, a map and an access change per extent.
    """
    if not chosen:
        return 0
    pool, stream = cache.pool, cache.current_stream()
    parts = [
        RowChange(
            group.table,
            row,
            mapping.first_page,
            [mapping.extent.size_class],
            tenant,
            old=[mapping],
            kept_bytes=mapping.extent.num_bytes,
        )
        for group, mapping in chosen
    ]
    acquire = partial(pool.acquire_or_evict, location=location)
    reads = [mapping for _, mapping in chosen]
    with change(pool, parts, reads=reads, acquire=acquire) as made:
        made.map(stream)
    return sum(mapping.extent.num_bytes for mapping in reads)
