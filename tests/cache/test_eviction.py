"""Who gives way when memory is short, in which order, and what survives of it.

The order among abstract victims is memory/test_pressure.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List_

import pytest
from helpers.stamps import append, assert_holds

from vmkv import ConfigError, ExtentPool, HostBackend, KVCache, OutOfPagesError, Sequence
from vmkv.cache.cost import CostModel
from vmkv.memory import Victim
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
            if any(cache._keeps(row, match.num_tokens) for row in match.rows)
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


def test_what_is_left_of_an_evicted_prefix_is_what_it_was(make_cache: MakeCache) -> None:
    """Its end went to somebody else; a new sequence begins with the rest."""
    cache = make_cache(budget_bytes=29 * PAGE, cost_model=ALIASES)
    _say(cache, range(100)).close()
    live = cache.open(row=1)
    append(live, range(5000, 5020))
    hit = cache.open(prompt=[*range(100), 7])
    assert 96 == hit.num_cached_tokens  # The page of tokens 96 to 99 went.
    with pytest.raises(OutOfPagesError):
        live.append(1)
    assert_holds(hit, range(96))
    hit.close()
    append(live, range(5200, 5204))
    hit = cache.open(prompt=[*range(100), 7])
    assert 64 == hit.num_cached_tokens
    assert_holds(hit, range(64))


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


def test_what_a_live_sequence_needs_is_never_taken(make_cache: MakeCache) -> None:
    """Not from live rows, and not through parked rows that share with them."""
    cache = make_cache(budget_bytes=40 * PAGE, cost_model=ALIASES)
    source = _say(cache, range(100))
    fork = source.fork()
    source.close()
    other = cache.open()
    with pytest.raises(OutOfPagesError):
        other.append(4 * 20)
    cache.check()
    assert_holds(fork, range(100))
    append(other, range(5000, 5000 + 4 * 15))  # All but the 25 pages of the fork.
    assert_holds(fork, range(100))


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


def test_a_prefix_that_many_shared_goes_at_last(make_cache: MakeCache) -> None:
    """64 requests have ended; their common prompt goes after their own tails, and is freed."""
    cache = make_cache(
        max_sequences=41, max_tokens=1000, budget_bytes=254 * PAGE, cost_model=ALIASES
    )
    system = list(range(256))
    requests = []
    for at in range(1, 41):
        prompt = [*system, *range(1000 * at, 1000 * at + 16)]
        requests.append(cache.open(prompt=prompt))
        append(requests[-1], prompt[requests[-1].num_tokens :])
        requests[-1].record(prompt[requests[-1].num_cached_tokens :])
    assert (64 + 40 * 4) * PAGE == cache.stats().resident_bytes
    for sequence in requests:
        sequence.close()
    live = cache.open(row=40)
    append(live, range(4 * 100))
    assert 256 == _found(cache, [*system, 9])
    append(live, range(4 * 100))
    assert 0 < _found(cache, [*system, 9]) < 256
    hit = cache.open(prompt=[*system, 9])
    assert_holds(hit, range(hit.num_cached_tokens))
    assert_holds(live, [*range(4 * 100), *range(4 * 100)])


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


def test_source_of_a_prefix_is_not_taken_to_make_room_for_its_copy(
    make_cache: MakeCache,
) -> None:
    """A parked row that a prompt begins like, and memory for the copy only from that row."""
    cache = make_cache(budget_bytes=31 * PAGE, cost_model=CostModel(map_us=1e9))
    _say(cache, range(124)).close()  # 16 + 8 + 4 + 2 + 1 pages.
    hit = cache.open(prompt=[*range(60), 999])  # 12 pages to copy; 15 lie behind them.
    assert 48 == hit.num_cached_tokens
    cache.check()
    assert_holds(hit, range(48))
    assert 48 <= _found(cache, range(124))


# ---- a policy of one's own ----------------------------------------------------------------


class _FewestHits:
    """Prefixes that were found often stay; rows of fewer than ten tokens always do."""

    def __init__(self) -> None:
        self.seen: list[List_[Victim]] = []

    def order(self, victims: List_[Victim]) -> Iterable[Victim]:
        self.seen.append(list(victims))
        return sorted((v for v in victims if v.num_tokens >= 10), key=lambda v: v.num_hits)


def test_users_policy_decides(host: HostBackend, make_cache: MakeCache) -> None:
    """Who goes first, and who never does."""
    policy = _FewestHits()
    pool = ExtentPool(host, 64 * PAGE, policy=policy, close_when_unused=True)
    cache = make_cache(pool, max_sequences=6, cost_model=ALIASES)
    popular, lonely = _say(cache, range(100)), _say(cache, range(1000, 1100))
    short = _say(cache, range(2000, 2008))
    for each in (popular, short, lonely):
        each.close()
    cache.open(prompt=[*range(40), 9]).close()
    live = cache.open(row=5)
    append(live, range(5000, 5000 + 4 * 30))
    assert_holds(live, range(5000, 5000 + 4 * 30))
    assert 96 == _found(cache, range(100))
    assert _found(cache, range(1000, 1100)) < 96
    (victims,) = policy.seen[:1]
    facts = sorted((v.num_tokens, v.num_hits, v.freeable_bytes // PAGE) for v in victims)
    # Of the popular one 32 tokens are shared, and one extent of 16 pages holds them.
    assert (8, 0, 2) in facts
    assert (100, 0, 25) in facts
    live.append(4 * 20)
    with pytest.raises(OutOfPagesError):
        live.append(4 * 14)  # All but the two pages of the short one, and the one it lacks.
    assert 2 == cache.groups[0].table.rows[short.row].num_pages
    cache.check()


# ---- budgets while running ----------------------------------------------------------------


def test_lower_budget_evicts_what_is_parked(make_cache: MakeCache) -> None:
    """Down to what live sequences hold, and not below; nothing is lost either way."""
    cache = make_cache(budget_bytes=200 * PAGE, cost_model=ALIASES)
    live = _say(cache, range(100))
    fork = live.fork()
    _say(cache, range(1000, 1100)).close()
    pool = cache.pool
    pool.set_budget(30 * PAGE)
    cache.check()
    assert pool.stats().created_bytes <= 30 * PAGE
    with pytest.raises(ConfigError, match="in use; close or trim sequences first"):
        pool.set_budget(24 * PAGE)
    assert 30 * PAGE == pool.stats().budget_bytes
    assert_holds(live, range(100))
    assert_holds(fork, range(100))
    with pytest.raises(OutOfPagesError):
        live.append(4 * 10)
    pool.set_budget(100 * PAGE)
    append(live, range(5000, 5040))
    assert_holds(live, [*range(100), *range(5000, 5040)])


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
    cache._retire_parked(fork.row, 0)
    cache.pool.set_budget(20 * PAGE)
    host.pass_fences()
    assert_holds(live, range(64))
    assert cache.pool.stats().created_bytes <= 20 * PAGE
