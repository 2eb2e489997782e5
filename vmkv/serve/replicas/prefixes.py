"""Summary of a replica's prefix index, small enough to be sent to routers.

A prefix of n blocks is named by the hash of its last block, at eight lengths between n and 2n. The
summary shows the index as it was last scanned, and evicted prefixes that it showed before, as long
as host memory or files hold them; see Note [Replicas tell what they hold].
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from ...core.cache.prefix import BLOCK_TOKENS, block_hashes
from ..observer import Event, Idle, StepRecord

#: Bytes kept of each hash. A collision makes a router expect a prefix that is not there.
_HASH_BYTES = 8
#: Every length up to twice this is named, then so many lengths per doubling.
_STEPS = 8
_KEY = "vmkv_prefixes"


def _marked_lengths(num_blocks: int) -> list[int]:
    lengths, step = [0], 1
    while lengths[-1] + step <= num_blocks:
        lengths.append(lengths[-1] + step)
        if lengths[-1] == 2 * _STEPS * step:
            step *= 2
    return lengths[1:]


#: Lengths, in blocks, at which a prefix has a name; up to the longest possible row.
MARKED_LENGTHS = tuple(_marked_lengths(1 << 20))


def names_of(token_ids: Sequence[int], tenant: str | None = None) -> list[tuple[int, bytes]]:
    """Return a prompt's named prefixes as tokens and name, ascending; 1 µs per block."""
    hashes = list(block_hashes(token_ids, tenant))
    marked = takewhile(lambda each: each <= len(hashes), MARKED_LENGTHS)
    return [(each * BLOCK_TOKENS, hashes[each - 1][:_HASH_BYTES]) for each in marked]


def told_names(stats: Mapping[str, Any]) -> frozenset[bytes]:
    """Return the names in a replica's report; empty before its first report."""
    told: bytes = stats.get(_KEY, b"")
    starts = range(0, len(told), _HASH_BYTES)
    return frozenset(told[start : start + _HASH_BYTES] for start in starts)


class HeldPrefixes:
    """Engine observer that scans the prefix index, every `interval_s` and when idle.

    Reports at most `max_names` names, the shortest; `stats` may be read from any thread.
    """

    def __init__(self, max_names: int = 32_768, interval_s: float = 1.0):
        self._max_names = max_names
        self._interval_s = interval_s
        self._looked_s = float("-inf")
        self._held: dict[bytes, int] = {}  # By the hash of its last block, a prefix's blocks.
        self._told = b""

    @property
    def stats(self) -> dict[str, Any]:
        """The names found by the last scan, for `told_names`."""
        return {_KEY: self._told}

    def on(self, event: Event, cache: Any) -> None:
        """Scan the index of a `KVCache` when idle, and after a step if the last scan is too old.

        Cost: 8 ms for 500 rows of 8,192 tokens, plus 1 µs per new block and evicted name.
        """
        is_old = time.monotonic() - self._looked_s >= self._interval_s
        if not (isinstance(event, Idle) or (isinstance(event, StepRecord) and is_old)):
            return
        with cache.pool.lock:
            held = {each: count for count, each in cache.prefixes.beginnings(MARKED_LENGTHS)}
            evicted = self._held.keys() - held.keys()
            held |= {each: self._held[each] for each in cache.host_blocks.held(evicted)}
        if len(held) > self._max_names:
            told = heapq.nsmallest(self._max_names, held, key=held.__getitem__)
            held = {each: held[each] for each in told}
        self._held = held
        self._told = b"".join(each[:_HASH_BYTES] for each in held)
        self._looked_s = time.monotonic()
