"""Idle memory goes back to torch's allocator, and between caches of one pool."""

from __future__ import annotations

import pytest
import torch
from helpers.caches import PAGE, MakeCache

from vmkv import HostBackend, call_with_room


class _Neighbour:
    """Allocates memory of the same device outside the pool, as torch's allocator does."""

    def __init__(self, host: HostBackend, free_pages: int):
        self._host = host
        self._limit_bytes = host.usage().physical_bytes - free_pages * PAGE
        self.num_calls = 0

    def allocate(self, answer: int, *, scale: int = 1) -> int:
        self.num_calls += 1
        if self._host.usage().physical_bytes > self._limit_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory (played)")
        return answer * scale


def test_call_with_room_frees_parked_rows_and_calls_again(
    host: HostBackend, make_cache: MakeCache
) -> None:
    """Live rows keep their memory, and the second call gets the same arguments."""
    cache = make_cache()
    live, idle = cache.open(), cache.open()
    live.append(40)
    idle.append(200)
    live.keys(0)[:] = 7.0
    idle.close()
    neighbour = _Neighbour(host, free_pages=50)
    assert 42 == call_with_room(cache.pool, neighbour.allocate, 21, scale=2)
    assert 2 == neighbour.num_calls
    assert torch.equal(torch.full((40, 2, 32), 7.0), live.keys(0))
    assert 0 == cache.stats().parked_bytes == cache.stats().free_bytes
    cache.check()


def test_call_with_enough_room_frees_nothing(host: HostBackend, make_cache: MakeCache) -> None:
    cache = make_cache()
    idle = cache.open()
    idle.append(200)
    idle.close()
    neighbour = _Neighbour(host, free_pages=0)
    assert 1 == call_with_room(cache.pool, neighbour.allocate, 1)
    assert 1 == neighbour.num_calls
    assert 50 * PAGE == cache.stats().parked_bytes


def test_second_failure_raises_torchs_error(host: HostBackend, make_cache: MakeCache) -> None:
    """Live sequences keep their memory."""
    cache = make_cache()
    live = cache.open()
    live.append(200)
    neighbour = _Neighbour(host, free_pages=1)
    with pytest.raises(torch.OutOfMemoryError):
        call_with_room(cache.pool, neighbour.allocate, 1)
    assert 2 == neighbour.num_calls
    assert 200 == live.num_tokens


def test_give_back_frees_the_oldest_row_of_all_caches(
    host: HostBackend, make_cache: MakeCache
) -> None:
    """Two caches share a pool; the second one's row was parked first and is freed."""
    first = make_cache()
    second = make_cache(first.pool)
    for cache in (second, first):
        sequence = cache.open()
        sequence.append(80)
        sequence.close()
    assert first.pool.give_back(20 * PAGE) >= 20 * PAGE
    assert (20 * PAGE, 0) == (first.stats().parked_bytes, second.stats().parked_bytes)
    first.check()
