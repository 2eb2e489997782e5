"""What a replica's prefix index holds, small enough to be told to whoever routes requests.

A beginning of n blocks is named by the hash of its last block, at lengths that are close together
for short beginnings and further apart for long ones: eight between n and 2n. So a row of 8,192
tokens is told in 56 hashes, and a router knows to an eighth how much of a request a replica has.
What is told is what the index held when it was looked at, never what was once sent there; where it
is more than may be told, it is the longest that are left out.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from typing import Any

from ...core.cache.prefix import BLOCK_TOKENS, PrefixIndex, block_hashes
from ..observer import EngineObserver, ObservedCache, StepRecord

#: Of each hash. Two that are taken for one make a router expect a prefix that is not there.
_HASH_BYTES = 8
#: Every length up to twice this, and then so many until it has doubled.
_STEPS = 8
_KEY = "vmkv_prefixes"


def _marked_lengths(num_blocks: int) -> list[int]:
    lengths, step = [0], 1
    while lengths[-1] + step <= num_blocks:
        lengths.append(lengths[-1] + step)
        if lengths[-1] == 2 * _STEPS * step:
            step *= 2
    return lengths[1:]


#: The lengths, in blocks, at which a beginning has a name; as far as any row goes.
MARKED_LENGTHS = tuple(_marked_lengths(1 << 20))


def names_of(token_ids: Sequence[int], tenant: str | None = None) -> list[tuple[int, bytes]]:
    """The beginnings of a tenant's prompt that have a name: tokens and name, ascending.

    Cost: about 1 µs per block of 16 tokens.
    """
    hashes = list(block_hashes(token_ids, tenant))
    marked = takewhile(lambda each: each <= len(hashes), MARKED_LENGTHS)
    return [(each * BLOCK_TOKENS, hashes[each - 1][:_HASH_BYTES]) for each in marked]


def told_names(stats: Mapping[str, Any]) -> frozenset[bytes]:
    """The names in what a replica tells; empty where it has told nothing yet."""
    told: bytes = stats.get(_KEY, b"")
    starts = range(0, len(told), _HASH_BYTES)
    return frozenset(told[start : start + _HASH_BYTES] for start in starts)


class HeldPrefixes(EngineObserver):
    """An engine's observer that looks at what its prefix index holds.

    The engine's thread looks, once a second at most and whenever it falls idle; anybody may ask.

    Args:
        max_names: How many are told at most, of 8 bytes each.
        interval_s: How long a look is good enough.
    """

    def __init__(self, max_names: int = 32_768, interval_s: float = 1.0):
        self._max_names = max_names
        self._interval_s = interval_s
        self._index: PrefixIndex | None = None
        self._lock: AbstractContextManager[object] = nullcontext()
        self._looked_s = float("-inf")
        self._told = b""

    def bind(self, index: PrefixIndex, lock: AbstractContextManager[object] | None = None) -> None:
        """Say which index, once the cache exists, and the lock of its pool."""
        self._index = index
        if lock is not None:
            self._lock = lock

    @property
    def stats(self) -> dict[str, Any]:
        """What it held when it was last looked at, for `told_names`."""
        return {_KEY: self._told}

    def step_finished(self, step: StepRecord, cache: ObservedCache) -> None:
        """See `EngineObserver`."""
        if time.monotonic() - self._looked_s >= self._interval_s:
            self._look()

    def idle(self, cache: ObservedCache) -> None:
        """See `EngineObserver`."""
        self._look()

    def _look(self) -> None:
        """Cost: some 8 ms where 500 rows hold 8,192 tokens each, and none of them another's.

        And 1 µs for each block of 16 tokens that was computed since the last look.
        """
        if self._index is None:
            return
        with self._lock:
            held = {
                hash_[:_HASH_BYTES]: num_blocks
                for num_blocks, hash_ in self._index.beginnings(MARKED_LENGTHS)
            }
        told: Sequence[bytes] = list(held)
        if len(held) > self._max_names:
            told = heapq.nsmallest(self._max_names, held, key=held.__getitem__)
        self._told = b"".join(told)
        self._looked_s = time.monotonic()
