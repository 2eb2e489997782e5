"""Parked and moving rows as victims: what memory they could give back, extent by extent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import itemgetter

from ..memory import Extent, Victim
from .layer_group import LayerGroup

#: The token that what could go begins at, and its extent; what goes first comes first.
Gives = Sequence[tuple[int, Extent]]


def ends_of(groups: Sequence[LayerGroup], row: int) -> Gives:
    """What a row could give up: it loses its end first, in all groups, and nothing pinned.

    What is left of a prefix so still serves.
    """
    ends: list[tuple[int, Extent]] = []
    pinned_token = -1
    for group in groups:
        page_bytes, token_bytes = group.geometry.page_bytes, group.geometry.token_bytes
        mappings = group.table.rows[row].mappings
        # As `token_at` says; dozens of a row, of dozens of rows for a plan where memory is short.
        ends += [(each.first_page * page_bytes // token_bytes, each.extent) for each in mappings]
        for pin in [each.first_page for each in mappings if each.num_pins]:
            pinned_token = max(pinned_token, pin * page_bytes // token_bytes)
    if pinned_token >= 0:
        ends = [each for each in ends if each[0] > pinned_token]
    ends.sort(key=itemgetter(0), reverse=True)
    return ends


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

    freeable_bytes, shared = 0, []
    for _, extent in gives():
        if extent.is_freeable:
            freeable_bytes += extent.num_bytes
        elif extent.is_of_budget and extent.num_live_mappings > 1:
            shared.append(extent)
    return Victim(
        last_used=last_used,
        freeable_bytes=freeable_bytes,
        num_hits=num_hits,
        num_tokens=num_prefix_tokens,
        evict=evict,
        shared=shared,
        give_up=give_up,
    )


def _freeable(gives: Gives) -> Gives:
    return [each for each in gives if each[1].is_freeable]
