"""Rows: a sequence adopts the parked row that fits best, and parked rows give up memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from helpers.caches import PAGE, MakeCache
from hypothesis import given, settings
from hypothesis import strategies as st

from vmkv import ConfigError, ExtentPool, HostBackend, KVCache, OutOfAddressSpaceError
from vmkv.core.cache.rows import Rows


@contextmanager
def _parked(sizes: Sequence[int], num_empty: int = 0) -> Iterator[Rows]:
    """Rows parked in this order with so many tokens, of a page each, and empty ones after them."""
    num_rows = len(sizes) + num_empty
    with KVCache(
        HostBackend(PAGE),
        max_tokens=256,
        max_sequences=num_rows,
        budget_bytes=256 * num_rows * PAGE,
    ) as cache:
        cache.add_layers([0], num_kv_heads=1, head_dim=512, dtype=torch.float32)
        sequences = [cache.open() for _ in sizes]
        for sequence, size in zip(sequences, sizes, strict=True):
            sequence.append(size)
        for sequence in sequences:
            sequence.close()
        yield cache.rows


# ---- the choice ---------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=8), st.integers(1, 200))
def test_choose_takes_the_parked_row_that_fits_best(sizes: list[int], num_tokens: int) -> None:
    """The smallest row that is long enough; the longest one if none is."""
    with _parked(sizes, num_empty=2) as rows:
        held = [rows.adoptable_tokens(row) for row in range(len(sizes))]
        chosen = held[rows.choose(num_tokens)]
        assert chosen == held[rows.choose(num_tokens)], "a choice changes nothing"
    fitting = [size for size in held if size >= num_tokens]
    assert (min(fitting) if fitting else max(held)) == chosen


def test_choose_takes_the_lowest_empty_row_when_nothing_is_parked() -> None:
    """Low rows first, so that views stay narrow."""
    with _parked([], num_empty=3) as rows:
        rows.take(0, 0, None, stream=0)
        assert 1 == rows.choose(10)


def test_no_row_left_is_out_of_address_space() -> None:
    """Live rows cannot be chosen."""
    with _parked([], num_empty=2) as rows:
        for row in range(2):
            rows.take(row, 0, None, stream=0)
        with pytest.raises(OutOfAddressSpaceError, match="all 2 rows"):
            rows.choose(1)


@pytest.mark.parametrize("row", [-1, 2, 0])
def test_taking_a_row_that_is_not_free_is_refused(row: int) -> None:
    """Row 0 is live, the others do not exist."""
    with _parked([], num_empty=2) as rows:
        rows.take(0, 0, None, stream=0)
        with pytest.raises(ConfigError, match=f"row {row} of 2 is not free"):
            rows.take(row, 0, None, stream=0)


# ---- adoption, through the cache ----------------------------------------------------------


def test_adoption_costs_no_driver_call(cache: KVCache) -> None:
    """Each sequence is as long as the one before it."""
    first = cache.open()
    first.append(100)
    first.close()
    before = dict(cache.stats().driver_calls)
    for _ in range(5):
        sequence = cache.open(100)
        sequence.append(60)
        sequence.append(40)
        sequence.keys(1)[:] = 1
        sequence.close()
    assert before == dict(cache.stats().driver_calls)


def test_open_takes_the_row_that_is_named(cache: KVCache) -> None:
    """Live rows and numbers out of range are refused, and the live sequence stays."""
    sequence = cache.open(row=2)
    sequence.append(3)
    assert 2 == sequence.row
    for row in (2, 4, -1):
        with pytest.raises(ConfigError, match=f"row {row} of 4"):
            cache.open(row=row)
    assert (3, 1) == (sequence.num_tokens, cache.stats().num_sequences)


def test_trim_takes_the_oldest_parked_rows_first(cache: KVCache) -> None:
    """Rows lose extents from their ends, until enough bytes are freed."""
    sequences = [cache.open() for _ in range(3)]
    for sequence in sequences:
        sequence.append(40)
    for sequence in sequences:
        sequence.close()
    assert cache.trim(12 * PAGE) >= 12 * PAGE
    assert 18 * PAGE == cache.stats().parked_bytes
    assert [0, 8, 10] == [cache.groups[0].table.rows[row].num_pages for row in range(3)]
    assert 2 == cache.open(40).row


def test_trim_releases_free_extents_first(cache: KVCache) -> None:
    """Parked rows keep their memory while free extents suffice."""
    sequences = [cache.open() for _ in range(2)]
    for sequence in sequences:
        sequence.append(40)
    sequences[0].close()
    cache.trim()
    sequences[1].close()
    cache.pool.disown(cache.pool.acquire([2, 0]))  # Five free pages.
    assert 5 * PAGE == cache.trim(5 * PAGE)
    assert 10 * PAGE == cache.stats().parked_bytes
    assert 12 * PAGE > cache.trim(10 * PAGE) >= 10 * PAGE
    assert 0 == cache.trim(PAGE)


@pytest.mark.parametrize("num_pages", [0, 1, 5, 9, 12, 14, 99])
def test_make_room_adds_to_the_available_memory(make_cache: MakeCache, num_pages: int) -> None:
    """Parked rows give up memory first, then live rows their pages beyond their length."""
    cache = make_cache(budget_bytes=40 * PAGE)
    live, ended = cache.open(), cache.open()
    for sequence in (live, ended):
        sequence.append(36)
    live.append(1)
    live.truncate(20)
    ended.close()
    before_bytes = cache.pool.available_bytes
    assert before_bytes > 20 * PAGE
    made_bytes = cache.make_room(num_pages * PAGE)
    assert made_bytes == cache.pool.available_bytes - before_bytes
    assert made_bytes >= min(num_pages, 9 + 2) * PAGE
    assert (8 if num_pages > 9 else 10) == cache.groups[0].table.rows[live.row].num_pages
    cache.check()
    assert made_bytes + cache.make_room(99 * PAGE) == (9 + 2) * PAGE
    assert 20 == live.num_tokens


def test_make_room_spares_rows_of_other_caches(host: HostBackend, make_cache: MakeCache) -> None:
    pool = ExtentPool(host, 64 * PAGE, close_when_unused=True)
    mine, other = make_cache(pool), make_cache(pool)
    for cache in (mine, other):
        sequence = cache.open()
        sequence.append(40)
        sequence.close()
    assert 10 * PAGE == mine.make_room(99 * PAGE)
    assert 10 * PAGE == other.stats().parked_bytes
