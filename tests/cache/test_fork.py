"""Forks: shared and copied extents, chains, refusals, and forks between caches.

Writes to shared memory are tested in test_copy_on_write.py, failing driver calls in
memory/test_every_call_can_fail.py, and histories in machines/test_cache_machine.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.caches import ALIASES, PAGE, MakeCache
from helpers.stamps import append, assert_holds

from vmkv import ConfigError, ExtentPool, HostBackend, KVCache
from vmkv.core.cache.forking import CostModel
from vmkv.units import KiB, MiB

# ---- shared extents -----------------------------------------------------------------------


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


@pytest.mark.parametrize("is_recorded", [False, True])
def test_fork_takes_memory_of_an_ended_row(cache: KVCache, is_recorded: bool) -> None:
    """The pool creates more only if the ended row has a prefix."""
    source, ended = cache.open(), cache.open()
    append(source, range(14))
    append(ended, range(50, 70))
    if is_recorded:
        ended.record(range(50, 70))
    ended.close()
    source.fork(0)
    assert [ended.row] == [*cache.rows.parked]
    before = cache.pool.stats().created_bytes
    fork = source.fork()
    assert before + is_recorded * 4 * PAGE == cache.pool.stats().created_bytes
    assert_holds(fork, range(14))
    assert (20 if is_recorded else 0) == cache.prefixes.num_recorded(ended.row)


def test_fork_before_layers_are_known(host: HostBackend) -> None:
    """Source and fork get memory for their tokens when the first layer is added."""
    with KVCache(host, max_tokens=50, max_sequences=2, budget_bytes=1 * MiB) as cache:
        source = cache.open()
        source.append(5)
        fork = source.fork()
        cache.add_layers([0], num_kv_heads=2, head_dim=32, dtype=torch.float32)
        cache.check()
        assert [5, 5] == [source.num_tokens, fork.num_tokens]
        assert 0 == cache.stats().shared_bytes


def test_fork_keeps_tokens_past_its_length_resident(cache: KVCache) -> None:
    """Kernels may over-read in a fork as well."""
    source = cache.open()
    append(source, range(96))
    cache.keep_resident(20)
    fork = source.fork()
    cache.check()
    assert cache.groups[0].resident_tokens(fork.row) >= 116
    assert fork.writable_tokens >= 96


# ---- alias or copy ------------------------------------------------------------------------


def test_small_extents_at_the_end_are_copied_with_the_tail(make_cache: MakeCache) -> None:
    """Of extents of 16, 8 and 1 pages only the first is worth a mapping."""
    cost = CostModel(map_us=16 * 4, copy_us_per_mib=0, lasting_us_per_mib=1024)
    cache = make_cache(cost_model=cost)
    source = cache.open()
    append(source, range(100))
    fork = source.fork()
    sharing = cache.stats().sharing
    assert (16 * PAGE, 9 * PAGE) == (sharing.aliased_bytes, sharing.copied_bytes)
    assert_holds(fork, range(100))


def test_default_costs_alias_large_extents() -> None:
    """With 35 µs a mapping, forks alias extents from 4 MiB on, reorderings only larger ones."""
    cost = CostModel()
    assert [False, True, True] == [cost.prefers_alias_in_fork(n * MiB) for n in (2, 4, 64)]
    assert [False, False, True] == [cost.prefers_alias_in_reorder(n * MiB) for n in (2, 16, 64)]


# ---- refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [-1, 1.0, "3", True, 11])
def test_fork_needs_a_length_of_its_source(cache: KVCache, num_tokens: Any) -> None:
    sequence = cache.open()
    append(sequence, range(10))
    what = "cannot be forked at 11 tokens|num_tokens=.* must be an integer, zero or more"
    with pytest.raises(ConfigError, match=what):
        sequence.fork(num_tokens)
    assert 1 == cache.stats().num_sequences
    assert_holds(sequence, range(10))


# ---- between two caches over one pool -----------------------------------------------------


@pytest.mark.parametrize("first_to_go", ["source", "fork"])
def test_fork_into_another_cache_of_the_pool(
    host: HostBackend, make_cache: MakeCache, first_to_go: str
) -> None:
    """Caches with equal layouts share extents, and either may be closed first."""
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
    """Another layout, shorter rows and another pool are refused before anything is mapped."""
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
