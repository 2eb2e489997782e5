"""What live rows hold and do not need: nobody's, and the first to go where memory is short.

A sequence that adopts a row takes all that is mapped there, however short it is; and what a window
has passed in a step goes with the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from .prefix import BLOCK_TOKENS

if TYPE_CHECKING:
    from .kv_cache import KVCache
    from .layer_group import LayerGroup
    from .sequence import Sequence


def retire_surplus(cache: KVCache, wanted: Mapping[Sequence, int] | None = None) -> int:
    """Retire what live rows hold beyond their length, or the one they are `wanted` to have.

    With it goes what their windows have passed, unless the cache keeps past.

    Returns the bytes that are free once their fences have passed.
    """
    pool = cache.pool
    with pool.lock:
        fence = pool.reclaimer.new_fence()
        before_bytes = pool.stats().resident_bytes
        for sequence, num_tokens in _needed(cache, wanted or {}):
            for group in cache.groups:
                group.retire_from(sequence.row, num_tokens, fence)
        if not cache.keeps_past:
            cache.retire_behind_windows()
        return before_bytes - pool.stats().resident_bytes


def surplus_bytes(cache: KVCache) -> int:
    """What `retire_surplus` would give back. Cost: proportional to the live rows."""
    idle = [
        mapping
        for sequence, num_tokens in _needed(cache, {})
        for group in cache.groups
        for mapping in group.behind(sequence.row, num_tokens)
    ]
    if not cache.keeps_past:
        for group, row, num_tokens in behind_windows(cache):
            end_page = group.first_needed_page(num_tokens)
            passed = group.table.overlapping(row, 0, end_page)
            idle += [mapping for mapping in passed if mapping.end_page <= end_page]
    return sum(each.extent.num_bytes for each in idle if not each.extent.is_shared)


def behind_windows(
    cache: KVCache, sequences: Iterable[Sequence] | None = None
) -> Iterator[tuple[LayerGroup, int, int]]:
    """The groups and rows of these sequences (or all) whose windows have passed an extent.

    With the number of tokens after which the next query comes.
    """
    windowed = [group for group in cache.groups if group.window_tokens is not None]
    if not windowed:
        return
    for each in cache.live_sequences() if sequences is None else sequences:
        num_tokens = each.num_tokens
        if cache.prefixes.num_recorded(each.row):
            # What is found as a prefix is cut to whole blocks, and must see its own window.
            num_tokens = max(0, num_tokens - BLOCK_TOKENS + 1)
        for group in windowed:
            if group.has_front_to_retire(each.row, num_tokens):
                yield group, each.row, num_tokens


def _needed(cache: KVCache, wanted: Mapping[Sequence, int]) -> Iterator[tuple[Sequence, int]]:
    """How far each live row must stay mapped."""
    for sequence in cache.live_sequences():
        num_tokens = max(sequence.num_tokens, wanted.get(sequence, 0))
        yield sequence, num_tokens + cache.overread_tokens if num_tokens else 0
