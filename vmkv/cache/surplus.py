"""What live rows hold beyond their length: nobody's, and the first to go where memory is short.

A sequence that adopts a row takes all that is mapped there, however short it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .kv_cache import KVCache
    from .sequence import Sequence


def retire_surplus(cache: KVCache, wanted: Mapping[Sequence, int] | None = None) -> int:
    """Retire what live rows hold beyond their length, or the one they are `wanted` to have.

    Returns the bytes that are free once their fences have passed.
    """
    pool = cache.pool
    with pool.lock:
        fence = pool.reclaimer.new_fence()
        before_bytes = pool.stats().resident_bytes
        for sequence, num_tokens in _needed(cache, wanted or {}):
            for group in cache.groups:
                group.retire_from(sequence.row, num_tokens, fence)
        return before_bytes - pool.stats().resident_bytes


def surplus_bytes(cache: KVCache) -> int:
    """What `retire_surplus` would give back. Cost: proportional to the live rows."""
    return sum(
        mapping.extent.num_bytes
        for sequence, num_tokens in _needed(cache, {})
        for group in cache.groups
        for mapping in group.behind(sequence.row, num_tokens)
        if not mapping.extent.is_shared
    )


def _needed(cache: KVCache, wanted: Mapping[Sequence, int]) -> Iterator[tuple[Sequence, int]]:
    """How far each live row must stay mapped."""
    for sequence in cache.live_sequences():
        num_tokens = max(sequence.num_tokens, wanted.get(sequence, 0))
        yield sequence, num_tokens + cache.overread_tokens if num_tokens else 0
