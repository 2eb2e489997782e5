"""Memory goes to whom it is needed by: back to torch, and between caches by the budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vmkv import HostBackend, KVCache, call_with_room
from vmkv.units import KiB

PAGE = 4 * KiB
MakeCache = Callable[..., KVCache]


class _Neighbour:
    """Somebody who needs memory of the same device, as torch's allocator would."""

    def __init__(self, host: HostBackend, free_pages: int):
        self._host = host
        self._limit_bytes = host.usage().physical_bytes - free_pages * PAGE
        self.num_calls = 0

    def allocate(self, answer: int, *, scale: int = 1) -> int:
        self.num_calls += 1
        if self._host.usage().physical_bytes > self._limit_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory (played)")
        return answer * scale


def test_out_of_memory_elsewhere_takes_what_is_idle(
    host: HostBackend, make_cache: MakeCache
) -> None:
    """Parked rows go, live ones stay; the call is made once more, with its arguments."""
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


def test_enough_memory_takes_nothing(host: HostBackend, make_cache: MakeCache) -> None:
    """Where nothing fails nothing is given back."""
    cache = make_cache()
    idle = cache.open()
    idle.append(200)
    idle.close()
    neighbour = _Neighbour(host, free_pages=0)
    assert 1 == call_with_room(cache.pool, neighbour.allocate, 1)
    assert 1 == neighbour.num_calls
    assert 50 * PAGE == cache.stats().parked_bytes


def test_too_little_even_so_is_torchs_error(host: HostBackend, make_cache: MakeCache) -> None:
    """A live sequence is nobody's reserve."""
    cache = make_cache()
    live = cache.open()
    live.append(200)
    neighbour = _Neighbour(host, free_pages=1)
    with pytest.raises(torch.OutOfMemoryError):
        call_with_room(cache.pool, neighbour.allocate, 1)
    assert 2 == neighbour.num_calls
    assert 200 == live.num_tokens


def test_give_back_some_takes_the_oldest_of_all_caches(
    host: HostBackend, make_cache: MakeCache
) -> None:
    """Two models on one pool: the one that was idle longest gives first."""
    first = make_cache()
    second = make_cache(first.pool)
    for cache in (second, first):
        sequence = cache.open()
        sequence.append(80)
        sequence.close()
    assert first.pool.give_back(20 * PAGE) >= 20 * PAGE
    assert (20 * PAGE, 0) == (first.stats().parked_bytes, second.stats().parked_bytes)
    first.check()
