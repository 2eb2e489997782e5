"""Parked and moving rows as victims: what memory they could give back, extent by extent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import itemgetter

from ..errors import InternalError
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


def own_bytes(groups: Sequence[LayerGroup], row: int) -> int | None:
    """What a parked row holds, if all of it is the row's alone; else None.

    Told without a look at extents, of which there are dozens: a plan asks this of a dozen rows.
    What is pinned is counted as well, and passed over when it is to go.
    """
    num_bytes = 0
    for group in groups:
        pages = group.table.rows[row]
        if pages.shared_end_page:  # A parked row's own memory is the device's: see `drop_spilled`.
            return None
        num_bytes += pages.num_pages * group.geometry.page_bytes
    return num_bytes


def check_own_bytes(groups: Sequence[LayerGroup], row: int) -> None:
    """Hold `own_bytes` of a parked row against its extents; raise `InternalError` if it lies."""
    told = own_bytes(groups, row)
    mapped = [each.extent for group in groups for each in group.table.rows[row].mappings]
    counted = sum(extent.num_bytes for extent in mapped if extent.is_freeable)
    if told is not None and told != counted:
        raise InternalError(f"row {row} tells {told} bytes of its own, its extents {counted}")


def victim_of(
    gives: Callable[[], Gives],
    retire: Callable[[int], None],
    *,
    freeable_bytes: int | None = None,
    last_used: int,
    num_hits: int = 0,
    num_prefix_tokens: int = 0,
) -> Victim:
    """A row as a victim.

    Args:
        gives: Says what it could give up, as things are when it is called.
        retire: Retires what the row holds from so many tokens on.
        freeable_bytes: What of that would become free; None if that is not known at sight.
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

    shared: list[Extent] = []
    if freeable_bytes is None:
        freeable_bytes = 0
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
