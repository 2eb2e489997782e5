"""Where memory is short, a sequence without a cached prefix takes over a parked row.

It is the row that would be evicted for it. The tests count driver calls; a page holds four tokens.
"""

from __future__ import annotations

from collections import Counter

import pytest
from helpers.caches import ALIASES, PAGE, MakeCache
from helpers.stamps import append, assert_holds

from vmkv import ExtentPool, HostBackend, KVCache


def _parked(cache: KVCache, *lengths: int) -> None:
    """Fill one row per length and close them; the first row was used longest ago."""
    live = [cache.open(row=row) for row in range(len(lengths))]
    for row, (sequence, num_tokens) in enumerate(zip(live, lengths, strict=True)):
        tokens = range(1000 * row, 1000 * row + num_tokens)
        append(sequence, tokens)
        sequence.record(tokens)
    for sequence in live:
        sequence.close()


def _begun(cache: KVCache, num_tokens: int) -> tuple[int, Counter[str]]:
    """Open a sequence of `num_tokens` new tokens; return its row and its driver calls."""
    before = cache.pool.backend.calls.copy()
    tokens = range(50_000, 50_000 + num_tokens)
    sequence = cache.open(num_tokens + 1, prompt=tokens)
    assert not sequence.num_cached_tokens
    append(sequence, tokens)
    assert_holds(sequence, tokens)
    cache.check()
    return sequence.row, cache.pool.backend.calls - before


def _known(cache: KVCache) -> list[int]:
    return [cache.prefixes.num_recorded(row) for row in range(3)]


def test_shared_extents_are_no_memory_for_an_adopter(make_cache: MakeCache) -> None:
    """A parked row counts only up to the first extent that a live sequence shares."""
    cache = make_cache(cost_model=ALIASES)
    source = cache.open()
    append(source, range(80))
    assert cache.rows.adoptable_tokens(source.row) >= 80
    fork = source.fork()
    source.close()
    assert 0 == cache.rows.adoptable_tokens(source.row)
    fork.close()
    cache.rows.retire_parked(fork.row)
    assert cache.rows.adoptable_tokens(source.row) >= 80


@pytest.mark.parametrize(
    ("pages", "parked", "num_tokens", "row", "known", "calls"),
    [
        (60, [80, 80, 80], 60, 0, [0, 80, 80], set()),
        (128, [80, 80, 80], 60, 3, [80, 80, 80], {"mem_create"}),
        # Fits best, although another row was used longer ago.
        (45, [40, 100, 40], 90, 1, [40, 0, 40], set()),
        # Is evicted from its end instead, and the rest stays usable as a prefix.
        (40, [80, 80], 12, 2, [64, 80, 0], {"mem_unmap"}),
    ],
    ids=["least recently used", "enough memory", "best fit", "more than twice the need"],
)
def test_row_that_would_be_evicted_is_taken_over(
    make_cache: MakeCache,
    pages: int,
    parked: list[int],
    num_tokens: int,
    row: int,
    known: list[int],
    calls: set[str],
) -> None:
    """The takeover needs no driver call and removes only this row's prefix from the index."""
    cache = make_cache(budget_bytes=pages * PAGE)
    _parked(cache, *parked)
    found, made = _begun(cache, num_tokens)
    assert row == found
    assert calls <= {*made} if calls else not made
    assert known[: len(parked)] == _known(cache)[: len(parked)]


def test_row_with_shared_extents_is_not_taken_over(make_cache: MakeCache) -> None:
    """Shared extents would have to be copied before the first write."""
    cache = make_cache(budget_bytes=44 * PAGE, cost_model=ALIASES)
    _parked(cache, 80, 80)
    hit = cache.open(prompt=[*range(70), 9], row=None)
    assert 64 == hit.num_cached_tokens
    row, _ = _begun(cache, 60)
    assert row != 0
    assert_holds(hit, range(64))


def test_caches_that_share_a_pool_evict_the_least_recently_used(
    host: HostBackend, make_cache: MakeCache
) -> None:
    """The other cache has the older row, so it is evicted and no row is taken over."""
    pool = ExtentPool(host, 40 * PAGE, close_when_unused=True)
    older, cache = make_cache(pool), make_cache(pool)
    _parked(older, 80)
    _parked(cache, 80)
    row, calls = _begun(cache, 60)
    assert 1 == row
    assert calls["mem_unmap"]
    assert 80 == _known(cache)[0]
    assert _known(older)[0] < 80
