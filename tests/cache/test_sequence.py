"""Sequences: append, truncate, grow, close, and refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.caches import PAGE, MakeCache

from vmkv import ClosedError, ConfigError, KVCache, Sequence
from vmkv.units import KiB


def test_append_lengthens_the_views(cache: KVCache) -> None:
    """Views are as long as the sequence, and writable to their end."""
    sequence = cache.open()
    for num_tokens in (1, 3, 0, 60):
        sequence.append(num_tokens)
        sequence.keys(0)[-num_tokens or 0 :] = 1
    assert 64 == sequence.num_tokens
    assert [(64, 2, 32)] * 2 == [tuple(sequence.keys(0).shape), tuple(sequence.values(1).shape)]


def test_append_within_the_last_page_costs_no_call(cache: KVCache) -> None:
    """Most decode steps are of this kind; some append nothing."""
    sequence = cache.open()
    sequence.append(1)
    before = dict(cache.stats().driver_calls)
    for num_tokens in (0, 3):
        sequence.append(num_tokens)
    assert (4, before) == (sequence.num_tokens, dict(cache.stats().driver_calls))


# ---- short memory -------------------------------------------------------------------------


def test_row_grows_by_one_page_when_memory_is_short(make_cache: MakeCache) -> None:
    """The growth quantum is more than is left."""
    cache = make_cache(budget_bytes=130 * PAGE, max_tokens=2000)
    sequence = cache.open()
    sequence.append(129 * 4)
    sequence.append(4)  # The quantum would be two pages; one is left.
    assert 130 * PAGE == cache.stats().resident_bytes


# ---- truncate -----------------------------------------------------------------------------


def test_truncate_keeps_the_front_and_the_memory(cache: KVCache) -> None:
    """Pages of truncated tokens stay mapped for new ones, and kept tokens keep their values."""
    sequence = cache.open()
    sequence.append(50)
    sequence.keys(0)[:] = torch.arange(50.0)[:, None, None]
    before = dict(cache.stats().driver_calls)
    sequence.truncate(20)
    sequence.append(25)
    assert (45, before) == (sequence.num_tokens, dict(cache.stats().driver_calls))
    assert torch.equal(torch.arange(20.0), sequence.keys(0)[:20, 0, 0])


@pytest.mark.parametrize(
    ("call", "num_tokens"),
    [
        *itertools.product(["append", "truncate"], [-1, 1.0, "3", None, True]),
        ("truncate", 6),  # It cannot lengthen.
    ],
)
def test_lengths_are_non_negative_integers(cache: KVCache, call: str, num_tokens: Any) -> None:
    """Other values are refused and leave the sequence as it was."""
    sequence = cache.open()
    sequence.append(5)
    match = r"num_tokens=.* must be an integer, zero or more|holds 5 tokens, fewer than the 6"
    with pytest.raises(ConfigError, match=match):
        getattr(sequence, call)(num_tokens)
    assert 5 == sequence.num_tokens


# ---- growing many at once -----------------------------------------------------------------


def test_grow_leaves_longer_sequences_alone(cache: KVCache) -> None:
    first, second = cache.open(), cache.open()
    cache.grow([(first, 30), (second, 1)])
    cache.grow([(first, 10), (second, 10)])
    assert (30, 10) == (first.num_tokens, second.num_tokens)


def test_grow_refuses_another_caches_sequences(make_cache: MakeCache) -> None:
    """Row numbers of another cache's sequences would make rows of this cache grow."""
    mine, others = make_cache().open(), make_cache().open()
    with pytest.raises(ConfigError, match="another cache"):
        mine.cache.grow([(mine, 5), (others, 9)])
    assert (0, 0) == (mine.num_tokens, others.num_tokens)
    assert 0 == mine.cache.stats().resident_bytes


def test_sequence_named_twice_keeps_the_pages_of_its_larger_target(make_cache: MakeCache) -> None:
    """Memory is short, so pages beyond that target go to the other sequence."""
    cache = make_cache(budget_bytes=44 * 4 * KiB)
    twice, other = cache.open(), cache.open()
    for _ in range(20):
        twice.append(4)  # Extents of one page each, which are taken one by one.
    other.append(80)
    twice.truncate(8)
    cache.grow([(other, 112), (twice, 64), (twice, 10)])
    assert [64, 112] == [twice.num_tokens, other.num_tokens]
    cache.check()


# ---- closed sequences ---------------------------------------------------------------------


@pytest.mark.parametrize("closes", [Sequence.close, lambda sequence: sequence.cache.close()])
def test_closed_sequence_raises_closed_error(
    cache: KVCache, closes: Callable[[Sequence], None]
) -> None:
    """Not a memory fault, also where the cache was closed; a second close does nothing."""
    sequence = cache.open()
    sequence.append(3)
    closes(sequence)
    sequence.close()
    assert sequence.is_closed
    for use in (
        lambda: sequence.append(1),
        lambda: sequence.truncate(1),
        lambda: sequence.keys(0),
        lambda: sequence.values(0),
        sequence.swap_out,
        sequence.swap_in,
    ):
        with pytest.raises(ClosedError, match="closed"):
            use()
    assert "closed" in repr(sequence)
