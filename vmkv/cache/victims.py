"""Parked and moving rows as victims: what memory they could give back, extent by extent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ..memory import Extent, Victim
from .layer_group import LayerGroup

#: The token that what could go begins at, and its extent; what goes first comes first.
Gives = Sequence[tuple[int, Extent]]


def ends_of(groups: Sequence[LayerGroup], row: int) -> Gives:
    """What a row could give up: it loses its end first, in all groups, and nothing pinned.

    What is left of a prefix so still serves.
    """
    held = [
        (group.token_at(mapping.first_page), mapping)
        for group in groups
        for mapping in group.table.rows[row].mappings
    ]
    pinned_token = max((token for token, mapping in held if mapping.num_pins), default=-1)
    ends = [(token, mapping.extent) for token, mapping in held if token > pinned_token]
    return sorted(ends, key=lambda each: each[0], reverse=True)


def victim_of(
    gives: Callable[[], Gives],
    retire: Callable[[int], None],
    *,
    last_used: int,
    num_hits: int = 0,
    num_prefix_tokens: int = 0,
) -> Victim:
    """A row as a victim.

    Args:
        gives: Says what it could give up, as things are when it is called.
        retire: Retires what the row holds from so many tokens on.
        last_used: When it was parked, or last matched.
        num_hits: How often a sequence has started from it.
        num_prefix_tokens: Tokens of it that a new sequence could start from.
    """

    def evict(num_bytes: int) -> int:
        evicted_bytes, keep_tokens = 0, None
        for first_token, extent in _freeable(gives()):
            if evicted_bytes >= num_bytes and first_token != keep_tokens:
                break
            evicted_bytes += extent.num_bytes
            keep_tokens = first_token
        if keep_tokens is not None:
            retire(keep_tokens)
        return evicted_bytes

    def give_up(extents: Collection[Extent]) -> None:
        retire(min(first_token for first_token, extent in gives() if extent in extents))

    now = gives()
    return Victim(
        last_used=last_used,
        freeable_bytes=sum(extent.num_bytes for _, extent in _freeable(now)),
        num_hits=num_hits,
        num_tokens=num_prefix_tokens,
        evict=evict,
        shared=[each for _, each in now if each.num_live_mappings > 1 and each.is_of_budget],
        give_up=give_up,
    )


def _freeable(gives: Gives) -> Gives:
    return [each for each in gives if each[1].is_freeable]
