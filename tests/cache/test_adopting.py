"""A sequence that begins with nothing takes the row that would have to give way for it, as it is.

Told by the calls that reach the driver. Rows hold four tokens a page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from helpers.stamps import append, assert_holds

from vmkv import ExtentPool, HostBackend, KVCache
from vmkv.core.cache.cost import CostModel
from vmkv.units import KiB

PAGE = 4 * KiB
ALIASES = CostModel(map_us=0, unmap_us=0)
MakeCache = Callable[..., KVCache]


def _parked(cache: KVCache, *lengths: int) -> None:
    """Rows of ended sequences that others can begin with, the first used longest ago."""
    live = [cache.open(row=row) for row in range(len(lengths))]
    for row, (sequence, num_tokens) in enumerate(zip(live, lengths, strict=True)):
        tokens = range(1000 * row, 1000 * row + num_tokens)
        append(sequence, tokens)
        sequence.record(tokens)
    for sequence in live:
        sequence.close()


def _begun(cache: KVCache, num_tokens: int) -> tuple[int, Counter[str]]:
    """The row of a sequence with a prompt of so many new tokens, and the driver calls it took."""
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


def test_where_memory_is_short_the_row_unused_for_longest_is_taken_over(
    make_cache: MakeCache,
) -> None:
    """No driver call; what was known of it is forgotten, and nothing else."""
    cache = make_cache(budget_bytes=60 * PAGE)
    _parked(cache, 80, 80, 80)
    row, calls = _begun(cache, 60)
    assert (0, Counter()) == (row, calls)
    assert [0, 80, 80] == _known(cache)


def test_where_memory_is_left_every_prefix_stays(make_cache: MakeCache) -> None:
    """Also the oldest: the newcomer gets memory of its own."""
    cache = make_cache(budget_bytes=128 * PAGE)
    _parked(cache, 80, 80, 80)
    row, calls = _begun(cache, 60)
    assert 3 == row
    assert calls["mem_create"]
    assert [80, 80, 80] == _known(cache)


def test_of_those_that_would_all_give_way_the_best_fit_is_taken(make_cache: MakeCache) -> None:
    """For 60 tokens both rows of 40 would go, and for 100 all three: then the longest is its."""
    cache = make_cache(budget_bytes=45 * PAGE)
    _parked(cache, 40, 100, 40)
    row, calls = _begun(cache, 90)
    assert (1, Counter()) == (row, calls)
    assert [40, 0, 40] == _known(cache)


def test_far_more_than_it_needs_is_not_kept_from_others(make_cache: MakeCache) -> None:
    """A long row gives way from its end, and still serves with what is left."""
    cache = make_cache(budget_bytes=40 * PAGE)
    _parked(cache, 80, 80)
    row, _ = _begun(cache, 12)
    assert 2 == row
    assert [64, 80] == _known(cache)[:2]


def test_what_others_map_as_well_is_not_taken_over(make_cache: MakeCache) -> None:
    """It would have to be copied before it is written."""
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
    """The other's rows are older: a newcomer here takes their memory, and no row of its own."""
    pool = ExtentPool(host, 40 * PAGE, close_when_unused=True)
    older, cache = make_cache(pool), make_cache(pool)
    _parked(older, 80)
    _parked(cache, 80)
    row, calls = _begun(cache, 60)
    assert 1 == row
    assert calls["mem_unmap"]
    assert 80 == _known(cache)[0]
    assert _known(older)[0] < 80
