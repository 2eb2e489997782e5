"""Memory is made ready ahead, so that a growth only maps it and waits for no fence.

The tests count driver calls. Eviction itself is tested in test_eviction.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from unittest import mock

import pytest
from helpers.stamps import append, assert_holds

from vmkv import ClosedError, DriverError, ExtentPool, HostBackend, KVCache, Sequence
from vmkv.core.cache import close_idle, grow_ahead, make_ready
from vmkv.core.memory import check_pool
from vmkv.testing import FaultInjectingBackend
from vmkv.units import KiB

PAGE = 4 * KiB
MAPS = {"mem_map", "mem_set_access"}
MakeCache = Callable[..., KVCache]


def _parked(cache: KVCache, *lengths: int) -> None:
    """Park rows of these lengths from row 0 on; the first was used longest ago."""
    live = [cache.open(row=row) for row in range(len(lengths))]
    for sequence, num_tokens in zip(live, lengths, strict=True):
        append(sequence, range(num_tokens))
        sequence.record(range(num_tokens))
    for sequence in live:
        sequence.close()


def _calls_of(cache: KVCache, call: Callable[[], object]) -> Counter[str]:
    before = cache.pool.backend.calls.copy()
    call()
    return cache.pool.backend.calls - before


def _pages(cache: KVCache) -> list[int]:
    return [pages.num_pages for pages in cache.groups[0].table.rows]


def test_growth_into_ready_memory_only_maps(make_cache: MakeCache) -> None:
    """The growth creates, releases and unmaps nothing, and waits for no fence."""
    cache = make_cache(budget_bytes=40 * PAGE)
    _parked(cache, 80, 80)
    live = cache.open(row=2)
    assert make_ready(cache, [(live, 40)])
    calls = _calls_of(cache, lambda: live.append(40))
    assert set(calls) == MAPS
    check_pool(cache.pool)


def test_make_ready_creates_missing_extents_once(make_cache: MakeCache) -> None:
    """A second call for the same growth finds them."""
    cache = make_cache()
    live = cache.open()
    calls = _calls_of(cache, lambda: make_ready(cache, [(live, 84)]))
    assert {"mem_create": 3} == calls  # 21 pages are 16 + 4 + 1.
    assert Counter() == _calls_of(cache, lambda: make_ready(cache, [(live, 84)]))
    assert Counter(mem_map=3, mem_set_access=1) == _calls_of(cache, lambda: live.append(84))


def test_make_ready_counts_a_prompt_without_a_row(make_cache: MakeCache) -> None:
    cache = make_cache(budget_bytes=40 * PAGE)
    _parked(cache, 80)
    assert make_ready(cache, [], 60, begins_empty=False)
    row = cache.open(row=1)
    assert MAPS == set(_calls_of(cache, lambda: row.append(60)))


def test_make_ready_counts_the_over_read_of_a_new_row(make_cache: MakeCache) -> None:
    cache = make_cache(budget_bytes=40 * PAGE)
    _parked(cache, 80)
    cache.keep_resident(20)
    assert make_ready(cache, [], 60, begins_empty=False)
    row = cache.open(row=1)
    assert MAPS == set(_calls_of(cache, lambda: row.append(60)))


def test_evicted_extents_of_the_wanted_sizes_are_used_again(make_cache: MakeCache) -> None:
    """Where the evicted row has extents of the same sizes, none is released or created."""
    cache = make_cache(budget_bytes=3 * 21 * PAGE)
    _parked(cache, 84, 84, 84)
    live = cache.open(row=3)
    calls = _calls_of(cache, lambda: make_ready(cache, [(live, 84)]))
    assert {"record_fence", "mem_unmap"} >= set(calls)
    assert MAPS == set(_calls_of(cache, lambda: live.append(84)))


def test_make_ready_evicts_at_most_twice_the_request(make_cache: MakeCache) -> None:
    """One extent is evicted if that is more; repeated calls evict nothing further."""
    cache = make_cache(budget_bytes=60 * PAGE)
    _parked(cache, 80, 80, 80)
    live = cache.open(row=3)
    for _ in range(5):
        assert make_ready(cache, [(live, 4)])
    assert [16, 20, 20, 0] == _pages(cache)  # One extent, the least to evict.


def test_make_ready_evicts_the_least_recently_used_row(make_cache: MakeCache) -> None:
    """The row loses its end, and the rest stays usable as a prefix."""
    cache = make_cache(budget_bytes=40 * PAGE)
    _parked(cache, 80, 80)
    live = cache.open(row=2)
    assert make_ready(cache, [(live, 8)])
    assert [16, 20, 0, 0] == _pages(cache)
    hit = cache.open(prompt=[*range(80), 7])
    assert_holds(hit, range(hit.num_cached_tokens))
    hit.close()


def test_make_ready_takes_nothing_from_live_rows(make_cache: MakeCache) -> None:
    """Without parked rows `make_ready` returns False and changes nothing."""
    cache = make_cache(budget_bytes=40 * PAGE)
    live = [cache.open(row=row) for row in range(2)]
    for sequence in live:
        append(sequence, range(80))
    before = cache.pool.stats()
    assert not make_ready(cache, [(live[0], 100)])
    assert before == cache.pool.stats()
    for sequence in live:
        assert_holds(sequence, range(80))


def test_make_ready_does_not_wait(host: HostBackend, make_cache: MakeCache) -> None:
    """`make_ready` returns False until the fences of retired memory have passed."""
    cache = make_cache(budget_bytes=40 * PAGE)
    live = cache.open(row=2)
    host.hold_fences()
    _parked(cache, 80, 80)
    waited_s = cache.pool.reclaimer.waited_s
    for _ in range(3):
        assert not make_ready(cache, [(live, 8)])
    assert waited_s == cache.pool.reclaimer.waited_s
    assert 4 * PAGE == cache.pool.stats().retired_bytes  # Twice two pages, and no more.
    host.pass_fences()
    host.hold_fences()
    assert make_ready(cache, [(live, 8)])
    assert MAPS == set(_calls_of(cache, lambda: live.append(8)))


def test_make_ready_skips_swapped_and_fitting_sequences(make_cache: MakeCache) -> None:
    cache = make_cache(budget_bytes=40 * PAGE, host_budget_bytes=40 * PAGE)
    live, away = cache.open(), cache.open()
    append(live, range(40))
    append(away, range(40))
    away.swap_out()
    assert Counter() == _calls_of(cache, lambda: make_ready(cache, [(away, 80), (live, 40)]))


def test_row_parked_before_a_passed_fence_is_evicted_without_a_wait(
    host: HostBackend, make_cache: MakeCache
) -> None:
    """Work that was submitted after a row was parked does not read it."""
    cache = make_cache(budget_bytes=40 * PAGE)
    live = cache.open(row=2)
    host.hold_fences()
    _parked(cache, 80)
    cache.pool.reclaimer.new_fence()
    reached = cache.pool.reclaimer.new_fence()
    reached.wait()  # The device has come this far; later work is running.
    parked_later = cache.open(row=1)
    append(parked_later, range(76))
    parked_later.close()
    passed = host.last_passed_fence
    live.append(40)
    assert passed == host.last_passed_fence
    live.append(40)
    assert passed == host.last_passed_fence
    live.append(40)  # This evicts the row that was parked later, and waits.
    assert passed < host.last_passed_fence


def _end_idle(cache: KVCache, doing: Callable[[Sequence], object]) -> Sequence:
    """Close a row that the last step did not use, with all earlier work done.

    Args:
        cache: A cache of 40 pages.
        doing: Called with the row's sequence during the last step.

    Returns:
        A live sequence that holds the other half of the pages.
    """
    live, leaving = cache.open(row=2), cache.open(row=0)
    live.append(80)
    leaving.append(80)
    idle_since = cache.pool.reclaimer.note_submitted()
    cache.pool.reclaimer.fence_since(idle_since).wait()
    cache.pool.reclaimer.note_submitted()  # A step without it, which is under way.
    doing(leaving)
    close_idle(leaving, idle_since)
    return live


@pytest.mark.parametrize(
    ("doing", "waits"),
    [
        (lambda leaving: None, False),
        (lambda leaving: leaving.fork(2).close(), True),
        (lambda leaving: leaving.fork(0).close(), False),
    ],
    ids=["nothing", "copied", "not-copied"],
)
def test_close_idle_spares_the_wait_for_the_last_step(
    host: HostBackend, make_cache: MakeCache, doing: Callable[[Sequence], object], waits: bool
) -> None:
    """The wait is needed after all if a fork has copied from the row since."""
    host.hold_fences()
    live = _end_idle(make_cache(budget_bytes=41 * PAGE), doing)
    passed = host.last_passed_fence
    live.append(80)
    assert waits == (passed < host.last_passed_fence)


@pytest.mark.parametrize(
    ("doing", "waits"),
    [
        (lambda begun: None, False),
        (lambda begun: begun.append(0), False),
        (lambda begun: (begun.append(8), begun.truncate(0)), True),
        (lambda begun: begun.append(8), True),
    ],
    ids=["nothing", "no-token", "grown-and-cut", "grown"],
)
def test_adopted_row_stays_idle_until_it_holds_tokens(
    host: HostBackend, make_cache: MakeCache, doing: Callable[[Sequence], object], waits: bool
) -> None:
    """The memory of an adopted row without tokens is evicted without a wait."""
    host.hold_fences()
    cache = make_cache(budget_bytes=40 * PAGE)
    live = _end_idle(cache, lambda leaving: None)
    doing(cache.open(row=0))
    passed = host.last_passed_fence
    live.append(16)
    assert waits == (passed < host.last_passed_fence)


@pytest.mark.parametrize("scrub", ["never", "always"])
def test_adopted_row_that_is_scrubbed_is_not_idle(
    host: HostBackend, make_cache: MakeCache, scrub: str
) -> None:
    """Memory is not unmapped while the device overwrites it."""
    host.hold_fences()
    cache = make_cache(ExtentPool(host, 40 * PAGE, scrub=scrub, close_when_unused=True))
    live = _end_idle(cache, lambda leaving: None)
    cache.open(row=0)
    passed = host.last_passed_fence
    live.append(16)
    assert (scrub == "always") == (passed < host.last_passed_fence)


def test_memory_filled_by_a_failed_growth_is_not_idle(
    host: HostBackend, make_cache: MakeCache
) -> None:
    """The growth could not even retire it, because no fence could be recorded."""
    cache = make_cache(ExtentPool(host, 41 * PAGE, scrub="poison", close_when_unused=True))
    live = cache.open(row=2)
    live.append(80)
    begun = cache.open(row=1)
    cache.pool.reclaimer.new_fence()
    host.hold_fences()
    error = DriverError("fill", -1, "NO_FILL", "of two, the second")
    with (
        mock.patch.object(host, "fill", side_effect=[None, error]),
        mock.patch.object(host, "record_fence", side_effect=error),
        pytest.raises(DriverError),
    ):
        begun.append(80)
    assert [0, 20, 20, 0] == _pages(cache)
    passed = host.last_passed_fence
    live.append(80)
    assert [0, 0, 40, 0] == _pages(cache)
    assert passed < host.last_passed_fence


# ---- growing ahead ------------------------------------------------------------------------


def test_append_after_grow_ahead_makes_no_driver_call(make_cache: MakeCache) -> None:
    """`grow_ahead` changes neither the length nor the contents of a sequence."""
    cache = make_cache()
    live = cache.open()
    append(live, range(8))
    assert make_ready(cache, [(live, 20)])
    assert MAPS == set(_calls_of(cache, lambda: grow_ahead(cache, [(live, 20)])))
    assert Counter() == _calls_of(cache, lambda: grow_ahead(cache, [(live, 20)]))
    assert 8 == live.num_tokens
    assert Counter() == _calls_of(cache, lambda: append(live, range(8, 20)))
    assert_holds(live, range(20))
    cache.check()


def test_grow_ahead_evicts_nothing(make_cache: MakeCache) -> None:
    cache = make_cache(budget_bytes=22 * PAGE)
    _parked(cache, 80)
    live = cache.open(row=1)
    append(live, range(8))
    assert Counter() == _calls_of(cache, lambda: grow_ahead(cache, [(live, 40)]))
    assert [20, 2] == _pages(cache)[:2]


def test_grow_ahead_skips_empty_and_swapped_sequences(make_cache: MakeCache) -> None:
    cache = make_cache(host_budget_bytes=40 * PAGE)
    empty, away = cache.open(), cache.open()
    append(away, range(40))
    away.swap_out()
    wanted = [(empty, 8), (away, 80)]
    assert Counter() == _calls_of(cache, lambda: grow_ahead(cache, wanted))


def test_grow_ahead_does_not_wait_for_retired_addresses(
    host: HostBackend, make_cache: MakeCache
) -> None:
    """`grow_ahead` maps there once the fence of the old mapping has passed."""
    cache = make_cache()
    live = cache.open()
    append(live, range(8))
    append(live, range(8, 64))
    host.hold_fences()
    live.truncate(8)
    cache.groups[0].retire_from(live.row, 8, cache.pool.reclaimer.new_fence())
    assert Counter() == _calls_of(cache, lambda: grow_ahead(cache, [(live, 64)]))
    host.pass_fences()
    cache.pool.reclaimer.poll()
    assert MAPS == set(_calls_of(cache, lambda: grow_ahead(cache, [(live, 64)])))


@pytest.mark.parametrize("fail_at", [1, 2])
def test_failing_driver_call_in_grow_ahead_changes_nothing(
    make_cache: MakeCache, fail_at: int
) -> None:
    """The extents that were to be mapped are free again."""
    backend = FaultInjectingBackend(HostBackend(PAGE))
    cache = make_cache(backend, budget_bytes=100 * PAGE)
    live = cache.open()
    append(live, range(8))
    assert make_ready(cache, [(live, 60)])
    before = cache.pool.stats()
    backend.arm(fail_at)
    with pytest.raises(DriverError):
        grow_ahead(cache, [(live, 60)])
    backend.arm(0)
    assert before == cache.pool.stats()
    assert_holds(live, range(8))
    cache.check()


def test_make_ready_of_a_closed_cache_raises_closed_error(make_cache: MakeCache) -> None:
    cache = make_cache()
    cache.close()
    with pytest.raises(ClosedError):
        make_ready(cache, [], 4)
