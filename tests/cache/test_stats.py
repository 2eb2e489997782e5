"""Statistics: the meaning of every number."""

from __future__ import annotations

import dataclasses
from dataclasses import fields

import pytest
from helpers.caches import PAGE, MakeCache

from vmkv import CacheStats, HostBackend, KVCache
from vmkv.core.cache.stats import SharingStats, add_stats
from vmkv.units import KiB


def test_stats_count_live_parked_and_free(make_cache: MakeCache) -> None:
    """One live sequence of 5 tokens (2 pages), one parked of 40 (10 pages); first, neither."""
    cache = make_cache(budget_bytes=64 * PAGE)
    counts = [_counts(cache)]
    live, ended = cache.open(), cache.open()
    live.append(5)
    ended.append(40)
    ended.close()
    counts.append(_counts(cache))
    assert [(0,) * 6, (1, 5 * KiB, 12 * PAGE, 10 * PAGE, 0, 0)] == counts
    stats = cache.stats()
    assert (4 * 100 * PAGE, 64 * PAGE) == (stats.reserved_bytes, stats.budget_bytes)


def _counts(cache: KVCache) -> tuple[int, ...]:
    names = "num_sequences used_bytes resident_bytes parked_bytes free_bytes retired_bytes"
    return tuple(getattr(cache.stats(), name) for name in names.split())


@pytest.mark.usefixtures("no_underread")
def test_stats_used_is_at_most_resident_after_the_window_moved(make_cache: MakeCache) -> None:
    """The bound also holds right after passed pages are unmapped."""
    cache = make_cache(windows=(5,))
    sequence = cache.open()
    for _ in range(40):
        sequence.append(4)
        sequence.append(0)
        for group in cache.groups:
            used = group.used_bytes(sequence.num_tokens)
            assert group.resident_bytes(sequence.row) >= used


@pytest.mark.usefixtures("no_underread")
def test_stats_retired_waits_for_fences(make_cache: MakeCache, host: HostBackend) -> None:
    """Until their fence has passed, retired bytes are neither resident nor free."""
    cache = make_cache(windows=(8,))
    sequence = cache.open()
    sequence.append(64)
    host.hold_fences()
    sequence.append(1)
    assert 14 * PAGE == cache.stats().retired_bytes
    host.pass_fences()
    cache.pool.reclaimer.poll()
    assert (0, 14 * PAGE) == (cache.stats().retired_bytes, cache.stats().free_bytes)


def test_stats_are_a_snapshot(cache: KVCache) -> None:
    """The object is frozen and does not follow later changes."""
    stats = cache.stats()
    before = dict(stats.driver_calls)
    cache.open().append(40)
    assert before == dict(stats.driver_calls)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.used_bytes = 1


def test_stats_count_driver_calls_by_primitive(cache: KVCache) -> None:
    """A prompt of 10 pages takes extents of 8 and 2 pages, and one access call."""
    cache.open().append(40)
    calls = cache.stats().driver_calls
    assert (2, 2, 1) == (calls["mem_create"], calls["mem_map"], calls["mem_set_access"])


def test_stats_read_as_a_line(cache: KVCache) -> None:
    cache.open().append(5)
    assert str(cache.stats()).startswith("1 sequence: 5 KiB used, 8 KiB resident (0 B parked)")


def test_stats_of_several_devices_add_up() -> None:
    """Bytes and calls add; a sequence that spans devices is one sequence."""
    names = [each.name for each in fields(CacheStats)]
    numbers = names[1:-3]  # Without the number of sequences, `sharing`, `driver_calls`, `below`.
    one = CacheStats(
        num_sequences=2,
        sharing=SharingStats(num_forks=1, copied_bytes=4),
        driver_calls={"mem_map": 2},
        **{name: 100 * at for at, name in enumerate(numbers)},
    )
    two = CacheStats(
        num_sequences=2,
        sharing=SharingStats(aliased_bytes=8, copied_bytes=2),
        driver_calls={"mem_map": 1, "mem_unmap": 4},
        **{name: at for at, name in enumerate(numbers)},
    )
    wanted = CacheStats(
        num_sequences=2,
        sharing=SharingStats(num_forks=1, aliased_bytes=8, copied_bytes=6),
        driver_calls={"mem_map": 3, "mem_unmap": 4},
        **{name: (100 if name.startswith("num_") else 101) * at for at, name in enumerate(numbers)},
    )
    assert wanted == add_stats([one, two])
    assert 0 == add_stats([]).num_sequences
