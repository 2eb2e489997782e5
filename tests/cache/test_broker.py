"""A cache whose pool has joined a broker with a floor of one page asks for what an operation lacks.

The broker and its other members are tested in tests/memory/test_broker.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers.members import PAGE, pool_of
from helpers.stamps import append, assert_holds
from helpers.waiting import until

from vmkv import ExtentPool, HostBackend, KVCache
from vmkv.core.cache import StateShape
from vmkv.core.memory import Broker


@pytest.fixture
def cache(tmp_path: Path, make_cache: Callable[..., KVCache]) -> Iterator[KVCache]:
    """A cache that has one page, and may have 64."""
    memory = {"host_budget_bytes": 64 * PAGE, "close_when_unused": True}
    with Broker(tmp_path / "pool.sock", 64 * PAGE, page_bytes=PAGE) as broker:
        made = make_cache(pool_of(broker.socket_path, floor_bytes=PAGE, memory=memory))
        yield made
        made.close()
        until(lambda: not broker.members())


def _bytes_follow_the_cache(cache: KVCache) -> bool:
    return cache.pool.budget_bytes == max(PAGE, cache.pool.stats().resident_bytes)


def _grow(cache: KVCache, sequence: Sequence, _: Path) -> None:
    for stamp in range(40, 80):
        append(sequence, [stamp])
    sequence.truncate(40)


def _swap_in(cache: KVCache, sequence: Sequence, _: Path) -> None:
    sequence.swap_out()
    until(lambda: _bytes_follow_the_cache(cache))
    sequence.swap_in()


def _load(cache: KVCache, sequence: Sequence, folder: Path) -> None:
    sequence.save(folder / "sequence")
    sequence.swap_out()
    until(lambda: _bytes_follow_the_cache(cache))
    assert_holds(cache.load(folder / "sequence"), range(40))
    sequence.swap_in()


def _fork(cache: KVCache, sequence: Sequence, _: Path) -> None:
    fork = sequence.fork()
    append(fork, [40])
    assert_holds(fork, range(41))


def _checkpoint(cache: KVCache, sequence: Sequence, _: Path) -> None:
    sequence.checkpoint()
    assert cache.states is not None
    assert [each[:2] for each in cache.states.checkpoints()] == [(sequence.row, 40)]


def _part_beams(cache: KVCache, sequence: Sequence, _: Path) -> None:
    beams = [sequence.fork(), sequence.fork()]
    for at, beam in enumerate(beams):
        append(beam, [100 + at])
    until(lambda: _bytes_follow_the_cache(cache))
    cache.reorder(beams, [1, 1])
    for beam in beams:
        append(beam, [300])
        assert_holds(beam, [*range(40), 101, 300])


def _add_layers(cache: KVCache, sequence: Sequence, _: Path) -> None:
    cache.add_layers(range(3, 9), num_kv_heads=2, head_dim=32, dtype=torch.float32)
    cache.drop_layers(range(3, 9))


def _compact(cache: KVCache, sequence: Sequence, _: Path) -> None:
    cache.drop_layers([1])
    until(lambda: _bytes_follow_the_cache(cache))
    assert cache.compact()


ACTS = {
    "sequences grow": _grow,
    "tokens past the end stay resident": lambda cache, *_: cache.keep_resident(20),
    "a swapped sequence comes back": _swap_in,
    "a saved sequence is loaded": _load,
    "a fork copies the tail": _fork,
    "a checkpoint is kept": _checkpoint,
    "beams part": _part_beams,
    "layers are added to sequences that live": _add_layers,
    "layers are compacted": _compact,
}


@pytest.mark.parametrize("what", ACTS)
def test_operations_ask_the_broker_for_what_they_lack(
    cache: KVCache, tmp_path: Path, what: str
) -> None:
    """The cache has no more than the pages of its sequence before."""
    if what == "a checkpoint is kept":
        cache.add_states({2: [StateShape((16, 64), torch.float32)]})
    sequence = cache.open()
    append(sequence, range(40))
    until(lambda: _bytes_follow_the_cache(cache))
    ACTS[what](cache, sequence, tmp_path)
    cache.check()
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
