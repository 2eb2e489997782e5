"""Eviction when memory is short: its order, the rows it spares, and the prefixes it leaves.

The order among abstract victims is tested in memory/test_pressure.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from helpers.caches import ALIASES, PAGE, MakeCache
from helpers.stamps import append, assert_holds

from vmkv import ExtentPool, HostBackend, KVCache, OutOfPagesError, Sequence
from vmkv.core.cache.forking import longest_beginning


def _say(cache: KVCache, tokens: Iterable[int], tenant: str | None = None) -> Sequence:
    """A live sequence of these tokens, recorded and stamped with their numbers."""
    wanted = list(tokens)
    sequence = cache.open(tenant=tenant)
    append(sequence, wanted)
    sequence.record(wanted)
    return sequence


def _of(at: int) -> str:
    return "quiet" if at in (10, 12) else "floods"


def _found(cache: KVCache, tokens: Iterable[int]) -> int:
    """Number of prompt tokens that some row still holds; opens no sequence."""
    matches = cache.prefixes.matches(list(tokens))
    return next(
        (
            match.num_tokens
            for match in matches
            if any(cache.keeps(row, match.num_tokens) for row in match.rows())
        ),
        0,
    )


# ---- the order ----------------------------------------------------------------------------


def test_least_recently_used_row_is_evicted_first(make_cache: MakeCache) -> None:
    """The row's last extents are evicted first, so the rest stays usable as a prefix."""
    cache = make_cache(budget_bytes=64 * PAGE, cost_model=ALIASES)
    said = [range(1000 * at, 1000 * at + 80) for at in range(3)]
    for tokens in [_say(cache, each) for each in said]:
        tokens.close()
    live = cache.open(row=3)
    append(live, range(5000, 5000 + 4 * 8))
    # Of 16 + 4 pages the 4 were evicted.
    assert [64, 80, 80] == [_found(cache, each) for each in said]
    assert [16, 20, 20] == [cache.groups[0].table.rows[row].num_pages for row in range(3)]
    append(live, range(5100, 5100 + 4 * 16))
    assert [0, 80, 80] == [_found(cache, each) for each in said]
    cache.check()


def test_the_tenant_with_the_most_gives_way_first(make_cache: MakeCache) -> None:
    """Of a tenant that floods the cache its own rows give way; then the other's, too."""
    cache = make_cache(budget_bytes=64 * PAGE, max_sequences=8)
    said = {10 + at: range(1000 * at, 1000 * at + 32) for at in range(6)}
    for at, tokens in said.items():
        _say(cache, tokens, _of(at)).close()
    order = [
        next(at for at, each in said.items() if cache.prefixes.token_ids(row)[0] in each)
        for row in cache.rows.in_order()
    ]
    assert [11, 13, 10, 14, 12, 15] == order
    live = cache.open()
    append(live, range(9000, 9000 + 4 * (64 - 6 * 8 + 16)))
    kept = [at for at, each in said.items() if cache.find_prefix([*each, 0], _of(at))]
    assert [10, 12, 14, 15] == kept
    cache.check()


def test_rows_that_are_kept_give_way_last(make_cache: MakeCache) -> None:
    """Of their tenant's, until their time; the row of the next turn has the time of that turn."""
    cache = make_cache(budget_bytes=64 * PAGE, max_sequences=8)
    said = [range(1000 * at, 1000 * at + 32) for at in range(4)]
    for at, tokens in enumerate(said):
        sequence = _say(cache, tokens)
        sequence.kept_until_s = 100.0 if at < 2 else 0.0
        sequence.close()
    assert [2, 3, 0, 1] == cache.rows.in_order()
    later = cache.open(prompt=[*said[0], 7, 8])
    assert later.row == 0
    later.close()
    assert [2, 3, 0, 1] == cache.rows.in_order(), "row 1 alone is kept now"
    cache.rows.now_s = 100.0
    assert [1, 2, 3, 0] == cache.rows.in_order()
    live = cache.open()
    append(live, range(9000, 9000 + 4 * (64 - 4 * 8 + 8)))
    assert [32, 0, 32, 32] == [cache.find_prefix([*each, 0], None) for each in said]


def test_prefix_hit_counts_as_a_use(make_cache: MakeCache) -> None:
    """The source of a hit is evicted after a row that was parked later."""
    cache = make_cache(budget_bytes=60 * PAGE, cost_model=ALIASES, max_sequences=5)
    old, new = _say(cache, range(100)), _say(cache, range(1000, 1100))
    old.close()
    new.close()
    cache.open(prompt=[*range(40), 9]).close()  # Aliases 32 tokens of the old one.
    live = cache.open(row=4)
    append(live, range(5000, 5000 + 4 * 20))
    assert 96 == _found(cache, range(100))
    assert _found(cache, range(1000, 1100)) < 96


def test_eviction_stops_when_there_is_room(make_cache: MakeCache) -> None:
    """Whole extents are evicted, and no more of them than needed."""
    cache = make_cache(budget_bytes=32 * PAGE, cost_model=ALIASES)
    _say(cache, range(124)).close()  # 16 + 8 + 4 + 2 + 1 pages.
    live = cache.open(row=1)
    append(live, range(5000, 5004))
    assert 31 == cache.groups[0].table.rows[0].num_pages  # One page was never created.
    append(live, range(5004, 5008))
    assert 30 == cache.groups[0].table.rows[0].num_pages
    append(live, range(5008, 5012))
    assert 28 == cache.groups[0].table.rows[0].num_pages


@pytest.mark.usefixtures("no_underread")
def test_eviction_shortens_a_row_in_all_groups(make_cache: MakeCache) -> None:
    """A prefix is usable only as far as all groups hold it."""
    cache = make_cache(budget_bytes=60 * PAGE, windows=(200,), cost_model=ALIASES)
    _say(cache, range(100)).close()
    live = cache.open(row=1)
    append(live, range(5000, 5000 + 4 * 6))
    assert _found(cache, range(100)) in (64, 96)
    ends = {group.table.rows[0].end_page for group in cache.groups}
    assert 1 == len(ends)
    hit = cache.open(prompt=[*range(100), 7])
    assert_holds(hit, range(hit.num_cached_tokens))
    assert hit.num_cached_tokens


# ---- shared extents -----------------------------------------------------------------------


def test_extents_shared_with_a_live_row_are_not_evicted(make_cache: MakeCache) -> None:
    """Evicting shared extents would free nothing: the fork holds the prefix, the row is empty."""
    cache = make_cache(budget_bytes=40 * PAGE, cost_model=ALIASES, max_sequences=6)
    source = _say(cache, range(100))
    fork = source.fork(64)
    source.close()
    other = cache.open(row=2)
    append(other, range(5000, 5000 + 4 * 20))
    assert 64 == _found(cache, range(100))
    assert 0 == cache.groups[0].table.rows[source.row].num_pages
    assert source.row not in cache.rows.parked
    assert_holds(fork, range(64))


def test_extents_shared_by_parked_rows_only_are_evicted(make_cache: MakeCache) -> None:
    """Source and fork have both ended, so no live row needs the extents."""
    cache = make_cache(budget_bytes=40 * PAGE, cost_model=ALIASES)
    source = _say(cache, range(100))
    fork = source.fork()
    source.close()
    fork.close()
    live = cache.open(row=3)
    append(live, range(5000, 5000 + 4 * 20))
    cache.check()
    assert 64 == _found(cache, range(100))  # One row of the two still has the first extent.
    append(live, range(5100, 5100 + 4 * 20))
    assert 0 == _found(cache, range(100))
    assert 40 * PAGE == cache.stats().resident_bytes


@pytest.mark.parametrize("num_pages", [1, 5, 16, 25, 26])
def test_trim_frees_extents_that_parked_rows_share(make_cache: MakeCache, num_pages: int) -> None:
    """Trim frees at least as many bytes as asked for."""
    cache = make_cache(cost_model=ALIASES)
    source = _say(cache, range(100))
    fork = source.fork(98)
    source.close()
    fork.close()
    assert cache.trim(num_pages * PAGE) >= num_pages * PAGE
    cache.check()


# ---- memory that a change in progress reads -----------------------------------------------


@pytest.mark.usefixtures("no_underread")
def test_source_of_a_prefix_keeps_its_windows_while_it_is_copied(make_cache: MakeCache) -> None:
    """Pages before the pinned ones stay too: rows are evicted from an extent to their end."""
    cache = make_cache(windows=(24,), cost_model=ALIASES)
    said = list(range(300))
    first = cache.open(prompt=said)
    for start in range(0, 300, 100):
        append(first, said[start : start + 100])
    first.record(said)
    fork = first.fork()
    first.close()  # Parked, and shared but for the pages before the fork's window.
    cache.pool.trim()
    cache.pool.set_budget(cache.pool.stats().created_bytes)
    hit = cache.open(prompt=[*said[:280], 7, 7])
    cache.check()
    assert_holds(hit, said[: hit.num_tokens])
    assert hit.num_tokens
    assert_holds(fork, said)


# ---- victims that share -------------------------------------------------------------------


def test_emptied_victim_is_not_evicted_again(host: HostBackend) -> None:
    """Two groups share unequally: the first eviction changes what the second one can free."""
    cache = _uneven(ExtentPool(host, 18 * PAGE, close_when_unused=True))
    live = cache.open()
    live.append(8)
    live.append(8)
    short, whole = live.fork(8), live.fork(16)  # The first has a page of its own, the second none.
    short.close()
    whole.close()
    other = cache.open(row=7)
    with pytest.raises(OutOfPagesError):
        other.append(1)  # It needs two pages; one can be freed.
    cache.check()
    cache.close()


def test_extent_shared_by_two_victims_is_freed_in_one_call(host: HostBackend) -> None:
    """The first `set_budget` frees it, not the next one."""
    pool = ExtentPool(host, 64 * PAGE, host_budget_bytes=64 * PAGE, close_when_unused=True)
    cache = _uneven(pool)
    first = cache.open()
    first.append(8)
    second = first.fork()
    second.swap_out()
    second.close()
    first.close()
    pool.set_budget(PAGE)
    assert 0 == pool.stats().resident_bytes
    cache.close()


def _uneven(pool: ExtentPool) -> KVCache:
    """A group with 16 tokens in a page, and one with a single token in a page."""
    cache = KVCache(pool, max_tokens=1024, max_sequences=8, cost_model=ALIASES)
    cache.add_layers([0], num_kv_heads=2, head_dim=16, dtype=torch.float32)
    cache.add_layers([1], num_kv_heads=8, head_dim=64, dtype=torch.float32)
    return cache


# ---- budgets while running ----------------------------------------------------------------


def test_room_is_made_ahead_without_waiting(host: HostBackend, make_cache: MakeCache) -> None:
    """What is retired already counts, so that a second call evicts no more."""
    cache = make_cache(budget_bytes=100 * PAGE)
    said = [range(1000 * at, 1000 * at + 96) for at in range(1, 5)]
    for each in said:
        _say(cache, each).close()
    assert cache.pool.available_bytes < 30 * PAGE
    host.hold_fences()
    assert not cache.pool.make_room_ahead(30 * PAGE)
    left = [_found(cache, each) for each in said]
    assert 0 < sum(left) < 4 * 96
    assert not cache.pool.make_room_ahead(30 * PAGE)
    host.pass_fences()
    assert cache.pool.make_room_ahead(30 * PAGE)
    assert left == [_found(cache, each) for each in said]


def test_the_beginning_of_a_prompt_is_spared(make_cache: MakeCache) -> None:
    """Room that is made for the rest of a prompt does not take its beginning."""
    cache = make_cache(budget_bytes=100 * PAGE)
    said = [range(1000 * at, 1000 * at + 80) for at in range(1, 5)]
    for each in said:
        _say(cache, each).close()
    with cache.pool.lock:
        assert 80 == longest_beginning(cache, [*said[0], 0], None, spares=True)
    assert cache.pool.make_room_ahead(60 * PAGE)
    assert 80 == _found(cache, said[0])
    assert not _found(cache, said[1])


@pytest.mark.parametrize("shared", [False, True])
def test_lower_budget_counts_freed_bytes_not_unmapped_ones(
    host: HostBackend, make_cache: MakeCache, shared: bool
) -> None:
    """Retired mappings of shared extents free nothing, so parked rows are evicted as well."""
    cache = make_cache(budget_bytes=100 * PAGE, cost_model=ALIASES)
    live = _say(cache, range(64))
    fork = live.fork() if shared else cache.open()
    _say(cache, range(1000, 1064)).close()
    host.hold_fences()
    fork.close()
    cache.rows.retire_parked(fork.row)
    cache.pool.set_budget(20 * PAGE)
    host.pass_fences()
    assert_holds(live, range(64))
    assert cache.pool.stats().created_bytes <= 20 * PAGE
