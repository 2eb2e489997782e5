"""A cache whose pool has joined a broker with a floor of one page asks for what an operation lacks.

The broker and its other members are tested in tests/memory/test_broker.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers.stamps import append, assert_holds
from helpers.waiting import until

from vmkv import ExtentPool, HostBackend, KVCache
from vmkv.core.cache import StateShape
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


def test_a_fork_copies_the_tail(cache: KVCache) -> None:
    """Which takes memory of its own."""
    sequence = cache.open()
    append(sequence, range(4))
    assert _has_its_floor_only(cache)
    fork = sequence.fork()
    append(fork, [4])
    assert_holds(fork, range(5))
    assert_holds(sequence, range(4))


def test_a_checkpoint_is_kept(cache: KVCache) -> None:
    """It is a copy of the layers' states."""
    cache.add_states({2: [StateShape((16, 64), torch.float32)]})
    sequence = cache.open()
    append(sequence, range(4))
    resident_bytes = cache.pool.stats().resident_bytes
    until(lambda: cache.pool.budget_bytes == resident_bytes)
    sequence.checkpoint()
    assert cache.states is not None
    assert [each[:2] for each in cache.states.checkpoints()] == [(sequence.row, 4)]


def test_beams_part(cache: KVCache) -> None:
    """A beam whose memory the other beam shares goes on in memory of its own."""
    first = cache.open()
    append(first, range(40))
    second = first.fork()
    append(first, [100])
    append(second, [200])
    resident_bytes = cache.pool.stats().resident_bytes
    until(lambda: cache.pool.budget_bytes == resident_bytes)
    cache.reorder([first, second], [1, 1])
    for beam in (first, second):
        append(beam, [300])
        assert_holds(beam, [*range(40), 200, 300])


def test_layers_are_added_to_sequences_that_live(cache: KVCache) -> None:
    """Their rows take memory for the tokens that are there."""
    sequence = cache.open()
    append(sequence, range(4))
    assert _has_its_floor_only(cache)
    cache.add_layers(range(2, 8), num_kv_heads=2, head_dim=32, dtype=torch.float32)
    append(sequence, range(4, 40))
    assert sequence.num_tokens == 40
    cache.check()


def test_layers_are_compacted(cache: KVCache) -> None:
    """For the copy, a sequence is mapped twice."""
    sequence = cache.open()
    append(sequence, range(40))
    cache.drop_layers([1])
    resident_bytes = cache.pool.stats().resident_bytes
    until(lambda: cache.pool.budget_bytes == resident_bytes)
    assert cache.compact()
    assert_holds(sequence, range(40))


def test_an_import_keeps_tokens_past_its_end_resident(
    cache: KVCache, make_cache: Callable[..., KVCache], tmp_path: Path
) -> None:
    """Imported memory is outside the budget, and the pages after it are the cache's own."""
    cache.keep_resident(20)
    pool = ExtentPool(HostBackend(PAGE), 64 * PAGE, is_shareable=True, close_when_unused=True)
    sequence = make_cache(pool).open()
    append(sequence, range(40))
    with sequence.export(str(tmp_path / "export")) as exporter, ThreadPoolExecutor(1) as threads:
        served = threads.submit(exporter.serve_one, timeout_s=60)
        imported = cache.import_prefix(exporter.socket_path)
        served.result()
    assert imported.num_tokens == 40
    assert cache.pool.budget_bytes > PAGE
    assert_holds(imported, range(40))
