"""Parked rows as victims: what memory they could give back, extent by extent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ..backend import MemoryLocation
from ..memory import Extent, Victim
from .layer_group import LayerGroup


def victim_of(
    groups: Sequence[LayerGroup],
    row: int,
    *,
    last_used: int,
    num_hits: int,
    num_prefix_tokens: int,
    retire: Callable[[int], None],
) -> Victim:
    """The parked `row` as a victim.

    Args:
        groups: The cache's groups.
        row: The row.
        last_used: When it was parked, or last matched.
        num_hits: How often a sequence has started from it.
        num_prefix_tokens: Tokens of it that a new sequence could start from.
        retire: Retires what the row holds from so many tokens on.
    """
    # A prefix loses its end first: what is left of it still serves.
    held = sorted(
        (
            (group.token_at(mapping.first_page), mapping.extent)
            for group in groups
            for mapping in group.table.rows[row].mappings
        ),
        key=lambda each: each[0],
        reverse=True,
    )
    # Retired mappings do not count: they go by themselves.
    own = [
        (first_token, extent.num_bytes)
        for first_token, extent in held
        if extent.num_live_mappings == 1
        and not extent.num_owners
        and extent.location is MemoryLocation.DEVICE
        and extent.id >= 0  # Imported memory is not within the budget.
    ]

    def evict(num_bytes: int) -> int:
        evicted_bytes, keep_tokens = 0, None
        for first_token, extent_bytes in own:
            if evicted_bytes >= num_bytes and first_token != keep_tokens:
                break
            evicted_bytes += extent_bytes
            keep_tokens = first_token
        if keep_tokens is not None:
            retire(keep_tokens)
        return evicted_bytes

    def let_go(extents: Collection[Extent]) -> None:
        retire(min(first_token for first_token, extent in held if extent in extents))

    return Victim(
        last_used=last_used,
        freeable_bytes=sum(extent_bytes for _, extent_bytes in own),
        num_hits=num_hits,
        num_tokens=num_prefix_tokens,
        evict=evict,
        shared=[extent for _, extent in held if extent.num_live_mappings > 1],
        let_go=let_go,
    )
