"""Who gives way when memory is short, in which order, and what survives of it.

The order among abstract victims is memory/test_pressure.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from helpers.stamps import append, assert_holds

from vmkv import ExtentPool, HostBackend, KVCache, OutOfPagesError, Sequence
from vmkv.core.cache.cost import CostModel
from vmkv.units import KiB

PAGE = 4 * KiB
ALIASES = CostModel(map_us=0, unmap_us=0)
MakeCache = Callable[..., KVCache]


def _say(cache: KVCache, tokens: Iterable[int]) -> Sequence:
    """A live sequence that holds these tokens, recorded; stamped by their numbers."""
    wanted = list(tokens)
    sequence = cache.open()
    append(sequence, wanted)
    sequence.record(wanted)
    return sequence


def _found(cache: KVCache, tokens: Iterable[int]) -> int:
    """How much of a prompt a row still holds. Opens nothing."""
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


def test_least_recently_used_goes_first(make_cache: MakeCache) -> None:
    """And from its end, so that what is left of it still serves."""
    cache = make_cache(budget_bytes=64 * PAGE, cost_model=ALIASES)
    said = [range(1000 * at, 1000 * at + 80) for at in range(3)]
    for tokens in [_say(cache, each) for each in said]:
        tokens.close()
    live = cache.open(row=3)
    append(live, range(5000, 5000 + 4 * 8))
    assert [64, 80, 80] == [_found(cache, each) for each in said]  # 16 + 4 pages; the 4 went.
    assert [16, 20, 20] == [cache.groups[0].table.rows[row].num_pages for row in range(3)]
    append(live, range(5100, 5100 + 4 * 16))
    assert [0, 80, 80] == [_found(cache, each) for each in said]
    cache.check()


def test_a_hit_is_a_use(make_cache: MakeCache) -> None:
    """The row that was started from is spared, although it was parked first."""
    cache = make_cache(budget_bytes=60 * PAGE, cost_model=ALIASES, max_sequences=5)
    old, new = _say(cache, range(100)), _say(cache, range(1000, 1100))
    old.close()
    new.close()
    cache.open(prompt=[*range(40), 9]).close()  # Aliases 32 tokens of the old one.
    live = cache.open(row=4)
    append(live, range(5000, 5000 + 4 * 20))
    assert 96 == _found(cache, range(100))
    assert _found(cache, range(1000, 1100)) < 96


def test_no_more_goes_than_must(make_cache: MakeCache) -> None:
    """Whole extents, and only until there is room."""
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
def test_groups_give_way_together(make_cache: MakeCache) -> None:
    """A row's end is an end in all groups: half of a prefix would be of no use."""
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


# ---- what is spared -----------------------------------------------------------------------


def test_shared_extents_free_nothing_and_are_spared(make_cache: MakeCache) -> None:
    """The parked row keeps what a live one holds anyway, and can still be started from."""
    cache = make_cache(budget_bytes=40 * PAGE, cost_model=ALIASES, max_sequences=6)
    source = _say(cache, range(100))
    fork = source.fork(64)
    source.close()
    other = cache.open(row=2)
    append(other, range(5000, 5000 + 4 * 20))
    assert 64 == _found(cache, range(100))
    assert 16 == cache.groups[0].table.rows[source.row].num_pages
    assert_holds(fork, range(64))


def test_what_only_parked_rows_share_can_be_evicted(make_cache: MakeCache) -> None:
    """Source and fork have both ended: nobody needs the memory, though two rows map it."""
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
def test_trim_of_some_bytes_frees_what_parked_rows_share(
    make_cache: MakeCache, num_pages: int
) -> None:
    """As much as was asked for, where there is as much."""
    cache = make_cache(cost_model=ALIASES)
    source = _say(cache, range(100))
    fork = source.fork(98)
    source.close()
    fork.close()
    assert cache.trim(num_pages * PAGE) >= num_pages * PAGE
    cache.check()


# ---- what a change in progress reads ------------------------------------------------------


@pytest.mark.usefixtures("no_underread")
def test_source_of_a_prefix_keeps_its_windows_while_it_is_copied(make_cache: MakeCache) -> None:
    """It gives up nothing before what is read either: that would take all behind it as well."""
    cache = make_cache(windows=(24,), cost_model=ALIASES)
    said = list(range(300))
    first = cache.open(prompt=said)
    for start in range(0, 300, 100):
        append(first, said[start : start + 100])
    first.record(said)
    fork = first.fork()
    first.close()  # Parked, and shared but for what lies before the fork's window.
    cache.pool.trim()
    cache.pool.set_budget(cache.pool.stats().created_bytes)
    hit = cache.open(prompt=[*said[:280], 7, 7])
    cache.check()
    assert_holds(hit, said[: hit.num_tokens])
    assert hit.num_tokens
    assert_holds(fork, said)


def test_moving_sequence_that_a_prompt_begins_like_is_read_where_it_is(
    make_cache: MakeCache,
) -> None:
    """The only one that could give way is the one that is read: the prompt begins from nothing."""
    cache = make_cache(budget_bytes=28 * PAGE, host_budget_bytes=64 * PAGE)
    said = list(range(100))
    first = _say(cache, said)
    first.swap_out(wait=False)
    second = cache.open(prompt=[*said[:50], 7])
    cache.check()
    assert_holds(second, said[: second.num_tokens])
    first.swap_in()
    assert_holds(first, said)


# ---- a refusal is the last word -----------------------------------------------------------


@pytest.mark.parametrize("what", ["budget", "fork"])
def test_spilled_memory_of_a_moving_sequence_is_no_device_memory(
    make_cache: MakeCache, what: str
) -> None:
    """What is in host memory already frees nothing, so parked rows go as well."""
    copies = CostModel(copy_us_per_mib=0, lasting_us_per_mib=0)
    cache = make_cache(
        budget_bytes=64 * PAGE, host_budget_bytes=256 * PAGE, cost_model=copies, max_sequences=8
    )
    moving, live = cache.open(), cache.open()
    for at in range(16):
        append(moving, range(4 * at, 4 * at + 4))
    moving.spill(8 * PAGE)
    append(live, range(64))
    _say(cache, range(1000, 1064)).close()
    moving.swap_out(wait=False)
    if what == "budget":
        cache.pool.set_budget(28 * PAGE)
    else:
        cache.pool.set_budget(40 * PAGE)  # In use, 24 pages of it by those who can give way.
        assert_holds(live.fork(), range(64))
    assert_holds(live, range(64))


def test_victim_that_was_emptied_on_the_way_is_not_asked_again(
    host: HostBackend,
) -> None:
    """Two groups share unlike: what the first round took changes what the second may take."""
    cache = _uneven(ExtentPool(host, 18 * PAGE, close_when_unused=True))
    live = cache.open()
    live.append(8)
    live.append(8)
    short, whole = live.fork(8), live.fork(16)  # A page of its own, and nothing of its own.
    short.close()
    whole.close()
    other = cache.open(row=7)
    with pytest.raises(OutOfPagesError):
        other.append(1)  # Two pages; one can be had.
    cache.check()
    cache.close()


def test_what_two_victims_shared_is_had_once_one_has_let_go(host: HostBackend) -> None:
    """In the call that asks for it, not in the next."""
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


@pytest.mark.usefixtures("no_underread")
def test_moving_sequence_lets_go_of_what_a_parked_row_shares(make_cache: MakeCache) -> None:
    """It has nothing else to give: what is its own is in host memory already."""
    cache = make_cache(host_budget_bytes=64 * PAGE, windows=(8,), cost_model=ALIASES)
    moving = _say(cache, range(100))
    moving.fork().close()  # Shares all of it, but for 16 pages before the window.
    assert 16 * PAGE == moving.spill(16 * PAGE)
    moving.swap_out(wait=False)
    cache.trim(0)
    assert (25 + 9) * PAGE == cache.pool.stats().resident_bytes
    cache.pool.set_budget(25 * PAGE)
    cache.pool.set_budget(64 * PAGE)
    moving.swap_in()
    assert_holds(moving, range(100))


def _uneven(pool: ExtentPool) -> KVCache:
    """A group in which 16 tokens fill a page, and one in which each fills its own."""
    cache = KVCache(pool, max_tokens=1024, max_sequences=8, cost_model=ALIASES)
    cache.add_layers([0], num_kv_heads=2, head_dim=16, dtype=torch.float32)
    cache.add_layers([1], num_kv_heads=8, head_dim=64, dtype=torch.float32)
    return cache


# ---- budgets while running ----------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_lower_budget_counts_what_is_freed_not_what_is_unmapped(
    host: HostBackend, make_cache: MakeCache, shared: bool
) -> None:
    """Retired mappings of memory that others hold free nothing: parked rows must go as well."""
    cache = make_cache(budget_bytes=100 * PAGE, cost_model=ALIASES)
    live = _say(cache, range(64))
    fork = live.fork() if shared else cache.open()
    _say(cache, range(1000, 1064)).close()
    host.hold_fences()
    fork.close()
    cache.retire_parked(fork.row, 0)
    cache.pool.set_budget(20 * PAGE)
    host.pass_fences()
    assert_holds(live, range(64))
    assert cache.pool.stats().created_bytes <= 20 * PAGE
