"""A cache whose pool has joined a broker with a floor of one page asks for what an operation lacks.

The broker and its other members are tested in tests/memory/test_broker.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers.stamps import append, assert_holds
from helpers.waiting import until

from vmkv import ExtentPool, HostBackend, KVCache
from vmkv.core.memory import Broker, PoolMember
from vmkv.units import KiB

PAGE = 4 * KiB


@pytest.fixture
def cache(tmp_path: Path, make_cache: Callable[..., KVCache]) -> Iterator[KVCache]:
    """A cache that has one page, and may have 64."""
    backend = HostBackend(PAGE)
    with Broker(tmp_path / "pool.sock", 64 * PAGE, page_bytes=PAGE) as broker:
        member = PoolMember.join(
            broker.socket_path, name="cache", device=backend.name, free_bytes=0, floor_bytes=PAGE
        )
        pool = ExtentPool(
            backend, member.budget_bytes, host_budget_bytes=64 * PAGE, close_when_unused=True
        )
        member.bind(pool)
        made = make_cache(pool)
        yield made
        made.close()
        until(lambda: not broker.members())


def _has_its_floor_only(cache: KVCache) -> bool:
    return cache.pool.budget_bytes == PAGE


def test_sequences_grow(cache: KVCache) -> None:
    """Each growth that does not fit the budget raises it."""
    sequence = cache.open()
    for stamp in range(40):
        append(sequence, [stamp])
    assert_holds(sequence, range(40))


def test_tokens_past_the_end_stay_resident(cache: KVCache) -> None:
    """As a kernel that fetches whole tiles asks for, when an engine starts."""
    sequence = cache.open()
    append(sequence, range(4))
    assert _has_its_floor_only(cache)
    cache.keep_resident(20)
    assert_holds(sequence, range(4))
    cache.check()


def test_a_swapped_sequence_comes_back(cache: KVCache) -> None:
    """The broker has taken its memory back meanwhile."""
    sequence = cache.open()
    append(sequence, range(40))
    sequence.swap_out()
    until(lambda: _has_its_floor_only(cache))
    sequence.swap_in()
    assert_holds(sequence, range(40))


def test_a_saved_sequence_is_loaded(cache: KVCache, tmp_path: Path) -> None:
    """The broker has taken the memory of the ended sequence back."""
    sequence = cache.open()
    append(sequence, range(40))
    sequence.save(tmp_path / "sequence")
    sequence.close()
    cache.trim()
    until(lambda: _has_its_floor_only(cache))
    assert_holds(cache.load(tmp_path / "sequence"), range(40))


def test_layers_are_added_to_sequences_that_live(cache: KVCache) -> None:
    """Their rows take memory for the tokens that are there."""
    sequence = cache.open()
    append(sequence, range(4))
    assert _has_its_floor_only(cache)
    cache.add_layers(range(2, 8), num_kv_heads=2, head_dim=32, dtype=torch.float32)
    append(sequence, range(4, 40))
    assert sequence.num_tokens == 40
    cache.check()
