"""Forks: what is shared and what is copied, in which order they end, and what is refused.

Writing to what is shared is test_copy_on_write.py's, failing driver calls are
memory/test_every_call_can_fail.py's, histories machines/test_cache_machine.py's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.stamps import append, assert_holds

from vmkv import (
    Backend,
    ClosedError,
    ConfigError,
    ExtentPool,
    HostBackend,
    KVCache,
    OutOfAddressSpaceError,
    OutOfPagesError,
)
from vmkv.backend import Access
from vmkv.cache.cost import CostModel
from vmkv.units import KiB, MiB

PAGE = 4 * KiB
ALIASES = CostModel(map_us=0, unmap_us=0)  # However small an extent, it is mapped again.
COPIES = CostModel(map_us=1e9)
MakeCache = Callable[..., KVCache]


@pytest.fixture
def cache(make_cache: MakeCache) -> KVCache:
    """Four rows, four tokens in a page; everything whole is shared."""
    return make_cache(cost_model=ALIASES)


# ---- what a fork shares -------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 63, 64, 65, 100])
def test_fork_holds_what_its_source_held(cache: KVCache, num_tokens: int) -> None:
    """Wherever the extents end: before, at and behind the fork."""
    source = cache.open()
    append(source, range(100))
    fork = source.fork(num_tokens)
    cache.check()
    assert_holds(fork, range(num_tokens))
    assert_holds(source, range(100))


def test_fork_shares_whole_extents_and_copies_the_tail(cache: KVCache) -> None:
    """100 tokens are extents of 16, 8 and 1 pages; of 98, the last page is not whole."""
    source = cache.open()
    append(source, range(100))
    before = cache.pool.stats().created_bytes
    fork = source.fork(98)
    stats = cache.stats()
    assert before + PAGE == cache.pool.stats().created_bytes
    assert 24 * PAGE == stats.shared_bytes == stats.sharing.aliased_bytes
    assert 2 * KiB == stats.sharing.copied_bytes
    assert 1 == stats.sharing.num_forks
    mine, theirs = (cache.groups[0].table.rows[each.row].mappings for each in (fork, source))
    assert [True, True, False] == [
        my.extent is their.extent for my, their in zip(mine, theirs, strict=True)
    ]


def test_fork_at_the_end_of_an_extent_copies_nothing(cache: KVCache) -> None:
    """Nothing is written twice that can be mapped twice."""
    source = cache.open()
    append(source, range(96))
    before = cache.pool.stats().created_bytes
    fork = source.fork()
    assert (before, 0) == (cache.pool.stats().created_bytes, cache.stats().sharing.copied_bytes)
    append(fork, range(500, 510))
    append(source, range(600, 610))
    assert_holds(fork, [*range(96), *range(500, 510)])
    assert_holds(source, [*range(96), *range(600, 610)])


def test_shared_extents_are_read_only_for_the_fork(cache: KVCache) -> None:
    """In the books; that the hardware agrees is test_copy_on_write.py's."""
    source = cache.open()
    append(source, range(98))
    fork = source.fork()
    accesses = [each.access for each in cache.groups[0].table.rows[fork.row].mappings]
    assert [Access.READ, Access.READ, Access.READ_WRITE] == accesses


def test_fork_is_contiguous_at_addresses_of_its_own(cache: KVCache) -> None:
    """A kernel is told a row and a length, and sees a plain tensor."""
    source = cache.open()
    append(source, range(98))
    addresses = source.keys(0).data_ptr()
    fork = source.fork()
    assert source.keys(0).stride() == fork.keys(0).stride()
    distance = fork.keys(0).data_ptr() - source.keys(0).data_ptr()
    assert (fork.row - source.row) * cache.groups[0].geometry.row_bytes == distance
    assert addresses == source.keys(0).data_ptr()


def test_fork_of_nothing_is_an_empty_sequence(cache: KVCache) -> None:
    """Also of a sequence that holds nothing at all."""
    source = cache.open()
    assert 0 == source.fork().num_tokens
    append(source, range(10))
    fork = source.fork(0)
    append(fork, range(50, 60))
    assert_holds(fork, range(50, 60))
    assert_holds(source, range(10))
    assert 0 == cache.stats().shared_bytes


def test_fork_before_layers_are_known(host: HostBackend) -> None:
    """Tokens may be counted before there is a layer to hold them; each gets memory with it."""
    with KVCache(host, max_tokens=50, max_sequences=2, budget_bytes=1 * MiB) as cache:
        source = cache.open()
        source.append(5)
        fork = source.fork()
        cache.add_layers([0], num_kv_heads=2, head_dim=32, dtype=torch.float32)
        cache.check()
        assert [5, 5] == [source.num_tokens, fork.num_tokens]
        assert 0 == cache.stats().shared_bytes


@pytest.mark.usefixtures("no_underread")
def test_fork_takes_all_groups_along(make_cache: MakeCache) -> None:
    """A window shows what it saw, as far as the next query can see."""
    cache = make_cache(windows=(9, 40), cost_model=ALIASES)
    source = cache.open()
    for start in range(0, 120, 5):
        append(source, range(start, start + 5))
    fork = source.fork()
    cache.check()
    append(fork, range(700, 730))
    append(source, range(800, 830))
    assert_holds(fork, [*range(120), *range(700, 730)])
    assert_holds(source, [*range(120), *range(800, 830)])


def test_fork_keeps_tokens_past_its_length_resident(cache: KVCache) -> None:
    """Kernels that fetch past the length may do so in a fork as well."""
    source = cache.open()
    append(source, range(96))
    cache.keep_resident(20)
    fork = source.fork()
    cache.check()
    assert cache.groups[0].resident_tokens(fork.row) >= 116
    assert fork.writable_tokens >= 96


@pytest.mark.parametrize("protects_shared", [False, True])
def test_fork_runs_on_every_backend(backend: Backend, protects_shared: bool) -> None:
    """Share, go on apart, end in either order, on each kind of memory."""
    budget_bytes = 64 * backend.granularity_bytes
    pool = ExtentPool(
        backend, budget_bytes, close_when_unused=True, protects_shared=protects_shared
    )
    cache = KVCache(pool, max_tokens=64, max_sequences=3, cost_model=ALIASES)
    # Two tokens fill a page, whatever its size.
    head_dim = backend.granularity_bytes // 2 // 2 // 4 // 2
    cache.add_layers([0], num_kv_heads=2, head_dim=head_dim, dtype=torch.float32)
    source = cache.open()
    append(source, range(25))
    fork = source.fork()
    other = fork.fork(7)
    append(fork, range(100, 105))
    append(source, range(200, 205))
    assert_holds(fork, [*range(25), *range(100, 105)])
    assert_holds(source, [*range(25), *range(200, 205)])
    source.close()
    fork.close()
    cache.trim()
    append(other, range(300, 303))
    assert_holds(other, [*range(7), *range(300, 303)])
    cache.check()
    cache.close()


# ---- chains, trees, and their ends --------------------------------------------------------


def test_chain_of_forks_shares_one_extent(make_cache: MakeCache) -> None:
    """Each forks the one before it; the first extents are one memory for all."""
    cache = make_cache(max_sequences=12, cost_model=ALIASES)
    chain = [cache.open()]
    append(chain[0], range(64))
    wanted = [list(range(64))]
    for at in range(1, 12):
        chain.append(chain[-1].fork())
        new = [1000 * at + i for i in range(5)]
        append(chain[-1], new)
        wanted.append(wanted[-1] + new)
    for sequence, stamps in zip(chain, wanted, strict=True):
        assert_holds(sequence, stamps)
    first = {id(cache.groups[0].table.rows[each.row].mappings[0].extent) for each in chain}
    assert 1 == len(first)
    assert 12 == cache.groups[0].table.rows[0].mappings[0].extent.num_live_mappings


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
@pytest.mark.parametrize("protects_shared", [False, True])
def test_tree_may_end_in_any_order(
    host: HostBackend, make_cache: MakeCache, order: tuple[int, ...], protects_shared: bool
) -> None:
    """A root, two children and a grandchild: who is left reads and writes as before."""
    pool = ExtentPool(host, 1000 * PAGE, protects_shared=protects_shared, close_when_unused=True)
    cache = make_cache(pool, cost_model=ALIASES)
    root = cache.open()
    append(root, range(70))
    children = [root.fork(), root.fork(40)]
    tree = [root, *children, children[0].fork(66)]
    wanted = [list(range(n)) for n in (70, 70, 40, 66)]
    for at, gone in enumerate(order):
        tree[gone].close()
        if at % 2:
            cache.trim()
        cache.check()
        for each in order[at + 1 :]:
            new = [10_000 * (each + 1) + 100 * at + i for i in range(7)]
            append(tree[each], new)
            wanted[each] += new
            assert_holds(tree[each], wanted[each])
    cache.trim()
    assert 0 == cache.pool.stats().created_bytes


def test_memory_goes_with_the_last_that_shares_it(cache: KVCache) -> None:
    """Closing the source gives nothing of the fork's back; closing both gives everything."""
    source = cache.open()
    append(source, range(96))
    fork = source.fork()
    source.close()
    assert 0 == cache.trim()
    assert_holds(fork, range(96))
    fork.close()
    assert 24 * PAGE == cache.trim()


def test_row_that_others_started_from_is_adopted_without_harm(cache: KVCache) -> None:
    """Its next sequence writes memory of its own, in the same addresses."""
    source = cache.open()
    append(source, range(98))
    fork = source.fork()
    source.close()
    stranger = cache.open(row=source.row)
    append(stranger, range(900, 998))
    assert_holds(fork, range(98))
    assert_holds(stranger, range(900, 998))


# ---- alias or copy ------------------------------------------------------------------------


def test_cost_model_may_prefer_a_copy(make_cache: MakeCache) -> None:
    """Where mapping costs more than it saves, a fork is a copy; the stats say so."""
    cache = make_cache(cost_model=COPIES)
    source = cache.open()
    append(source, range(98))
    fork = source.fork()
    sharing = cache.stats().sharing
    assert (0, 98 * KiB, 0) == (
        sharing.aliased_bytes,
        sharing.copied_bytes,
        cache.stats().shared_bytes,
    )
    assert_holds(fork, range(98))


def test_small_extents_at_the_end_are_copied_with_the_tail(make_cache: MakeCache) -> None:
    """16 + 8 + 1 pages: only the first is worth a mapping."""
    cost = CostModel(map_us=16 * 4, copy_us_per_mib=0, lasting_us_per_mib=1024)
    cache = make_cache(cost_model=cost)
    source = cache.open()
    append(source, range(100))
    fork = source.fork()
    sharing = cache.stats().sharing
    assert (16 * PAGE, 9 * PAGE) == (sharing.aliased_bytes, sharing.copied_bytes)
    assert_holds(fork, range(100))


def test_an_h200_aliases_what_a_fork_keeps() -> None:
    """At 35 µs a mapping, extents of 4 MiB and more are shared; reordered ones only if large."""
    cost = CostModel()
    assert [False, True, True] == [cost.prefers_alias_in_fork(n * MiB) for n in (2, 4, 64)]
    assert [False, False, True] == [cost.prefers_alias_in_reorder(n * MiB) for n in (2, 16, 64)]


# ---- what is refused ----------------------------------------------------------------------


def test_fork_of_a_closed_sequence_is_refused(cache: KVCache) -> None:
    """Also when its cache is closed, and nothing is taken."""
    sequence = cache.open()
    append(sequence, range(10))
    sequence.close()
    with pytest.raises(ClosedError, match="row 0 is closed"):
        sequence.fork()
    assert 0 == cache.stats().num_sequences
    other = cache.open()
    cache.close()
    with pytest.raises(ClosedError):
        other.fork()


@pytest.mark.parametrize("num_tokens", [-1, 1.0, "3", True])
def test_fork_wants_an_integer_from_zero(cache: KVCache, num_tokens: Any) -> None:
    """A clear error, no sequence."""
    sequence = cache.open()
    append(sequence, range(10))
    with pytest.raises(ConfigError, match=r"num_tokens=.* must be an integer, zero or more"):
        sequence.fork(num_tokens)
    assert 1 == cache.stats().num_sequences


def test_fork_of_more_than_there_is_is_refused(cache: KVCache) -> None:
    """A fork begins with what its source holds, no more."""
    sequence = cache.open()
    append(sequence, range(10))
    with pytest.raises(ConfigError, match="cannot be forked at 11 tokens"):
        sequence.fork(11)
    assert 1 == cache.stats().num_sequences
    assert_holds(sequence, range(10))


@pytest.mark.usefixtures("no_underread")
def test_fork_before_a_window_is_refused(make_cache: MakeCache) -> None:
    """What a fork would see and the window has let go of cannot be had any more."""
    cache = make_cache(windows=(9,), cost_model=ALIASES)
    source = cache.open()
    for start in range(0, 100, 5):
        append(source, range(start, start + 5))
    with pytest.raises(ConfigError, match="sliding-window layer no longer holds"):
        source.fork(40)
    assert_holds(source, range(100))
    assert_holds(source.fork(100), range(100))


def test_fork_without_a_row_left_is_refused(cache: KVCache) -> None:
    """Every row is live: out of addresses, and the source goes on."""
    source = cache.open()
    append(source, range(30))
    for _ in range(3):
        source.fork()
    with pytest.raises(OutOfAddressSpaceError, match="all 4 rows"):
        source.fork()
    append(source, range(30, 40))
    assert_holds(source, range(40))


def test_fork_without_memory_for_its_tail_is_refused(make_cache: MakeCache) -> None:
    """Nothing is taken; after something ended, the same call succeeds."""
    cache = make_cache(budget_bytes=26 * PAGE, cost_model=ALIASES)
    source, other = cache.open(), cache.open()
    append(source, range(98))
    append(other, range(500, 504))
    with pytest.raises(OutOfPagesError) as caught:
        source.fork()
    assert (PAGE, 0) == (caught.value.needed_bytes, caught.value.free_bytes)
    assert 2 == cache.stats().num_sequences
    cache.check()
    assert_holds(source, range(98))
    other.close()
    assert_holds(source.fork(), range(98))


# ---- between two caches over one pool -----------------------------------------------------


@pytest.mark.parametrize("first_to_go", ["source", "fork"])
def test_fork_into_another_cache_of_the_pool(
    host: HostBackend, make_cache: MakeCache, first_to_go: str
) -> None:
    """Caches that lay out tokens alike share; either may be closed first."""
    pool = ExtentPool(host, 1000 * PAGE, close_when_unused=True)
    caches = [make_cache(pool, cost_model=ALIASES, max_tokens=n) for n in (400, 120)]
    source = caches[0].open()
    append(source, range(98))
    fork = caches[1].fork(source, 98)
    assert 26 * PAGE == pool.stats().resident_bytes
    append(fork, range(500, 510))
    append(source, range(600, 610))
    assert_holds(fork, [*range(98), *range(500, 510)])
    if first_to_go == "source":
        caches[0].close()
        caches[1].check()
        assert_holds(fork, [*range(98), *range(500, 510)])
    else:
        caches[1].close()
        caches[0].check()
        assert_holds(source, [*range(98), *range(600, 610)])


def test_fork_into_a_cache_that_cannot_hold_it_is_refused(
    host: HostBackend, make_cache: MakeCache
) -> None:
    """Another layout, shorter rows, another pool: said before anything is mapped."""
    pool = ExtentPool(host, 1000 * PAGE)
    source_cache = make_cache(pool, cost_model=ALIASES)
    source = source_cache.open()
    append(source, range(98))
    cases = [
        (make_cache(pool, windows=(9,)), "lay their layers out differently"),
        (make_cache(pool, max_tokens=97), "98 tokens do not fit: .* max_tokens=97"),
        (make_cache(HostBackend(4 * KiB), budget_bytes=1 * MiB), "over the same pool"),
    ]
    for cache, why in cases:
        with pytest.raises(ConfigError, match=why):
            cache.fork(source, 98)
        assert 0 == cache.stats().num_sequences
        cache.check()
        cache.close()
    assert_holds(source, range(98))
    source_cache.close()
    pool.close()
