"""Memory made ready ahead: growing then maps and does nothing else, and waits for nothing.

Told by the calls that reach the driver. How parked rows give way is test_eviction.py's.
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
    """Rows of ended sequences, the first used longest ago; from row 0 on."""
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


def test_what_is_ready_is_only_mapped(make_cache: MakeCache) -> None:
    """Nothing is created, released, unmapped or waited for when the sequence grows."""
    cache = make_cache(budget_bytes=40 * PAGE)
    _parked(cache, 80, 80)
    live = cache.open(row=2)
    assert make_ready(cache, [(live, 40)])
    calls = _calls_of(cache, lambda: live.append(40))
    assert set(calls) == MAPS
    check_pool(cache.pool)


def test_what_is_not_short_is_created_ahead(make_cache: MakeCache) -> None:
    """And is asked for once: a second call finds it."""
    cache = make_cache()
    live = cache.open()
    calls = _calls_of(cache, lambda: make_ready(cache, [(live, 84)]))
    assert {"mem_create": 3} == calls  # 21 pages are 16 + 4 + 1.
    assert Counter() == _calls_of(cache, lambda: make_ready(cache, [(live, 84)]))
    assert Counter(mem_map=3, mem_set_access=1) == _calls_of(cache, lambda: live.append(84))


def test_rows_to_come_are_counted(make_cache: MakeCache) -> None:
    """A prompt that has no row yet finds memory too."""
    cache = make_cache(budget_bytes=40 * PAGE)
    _parked(cache, 80)
    assert make_ready(cache, [], 60, begins_empty=False)
    row = cache.open(row=1)
    assert MAPS == set(_calls_of(cache, lambda: row.append(60)))


def test_what_kernels_fetch_past_the_end_of_rows_to_come_is_counted(make_cache: MakeCache) -> None:
    """It is mapped with the rest."""
    cache = make_cache(budget_bytes=40 * PAGE)
    _parked(cache, 80)
    cache.keep_resident(20)
    assert make_ready(cache, [], 60, begins_empty=False)
    row = cache.open(row=1)
    assert MAPS == set(_calls_of(cache, lambda: row.append(60)))


def test_extents_of_the_wanted_classes_are_handed_over(make_cache: MakeCache) -> None:
    """Where rows like the wanted one give way nothing is released, and nothing created."""
    cache = make_cache(budget_bytes=3 * 21 * PAGE)
    _parked(cache, 84, 84, 84)
    live = cache.open(row=3)
    calls = _calls_of(cache, lambda: make_ready(cache, [(live, 84)]))
    assert {"record_fence", "mem_unmap"} >= set(calls)
    assert MAPS == set(_calls_of(cache, lambda: live.append(84)))


def test_no_more_gives_way_than_twice_what_is_wanted(make_cache: MakeCache) -> None:
    """However often it is called."""
    cache = make_cache(budget_bytes=60 * PAGE)
    _parked(cache, 80, 80, 80)
    live = cache.open(row=3)
    for _ in range(5):
        assert make_ready(cache, [(live, 4)])
    assert [16, 20, 20, 0] == _pages(cache)  # The least that a row can give up.


def test_the_row_used_longest_ago_gives_way_first(make_cache: MakeCache) -> None:
    """From its end, as in any eviction; a prefix that is left is what it was."""
    cache = make_cache(budget_bytes=40 * PAGE)
    _parked(cache, 80, 80)
    live = cache.open(row=2)
    assert make_ready(cache, [(live, 8)])
    assert [16, 20, 0, 0] == _pages(cache)
    hit = cache.open(prompt=[*range(80), 7])
    assert_holds(hit, range(hit.num_cached_tokens))
    hit.close()


def test_live_rows_keep_what_they_have(make_cache: MakeCache) -> None:
    """Where nobody is parked it says that it is not ready, and nothing has changed."""
    cache = make_cache(budget_bytes=40 * PAGE)
    live = [cache.open(row=row) for row in range(2)]
    for sequence in live:
        append(sequence, range(80))
    before = cache.pool.stats()
    assert not make_ready(cache, [(live[0], 100)])
    assert not make_ready(cache, [(live[0], 100)], wait=True)
    assert before == cache.pool.stats()
    for sequence in live:
        assert_holds(sequence, range(80))


def test_it_never_waits_unless_it_is_told_to(host: HostBackend, make_cache: MakeCache) -> None:
    """What may still be read stays; once its fence has passed, it is ready."""
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


def test_told_to_it_waits(host: HostBackend, make_cache: MakeCache) -> None:
    """And all is ready then."""
    cache = make_cache(budget_bytes=40 * PAGE)
    live = cache.open(row=2)
    host.hold_fences()
    _parked(cache, 80, 80)
    assert make_ready(cache, [(live, 60)], wait=True)
    assert MAPS == set(_calls_of(cache, lambda: live.append(60)))


def test_sequences_that_are_elsewhere_are_passed_over(make_cache: MakeCache) -> None:
    """Who is swapped out does not grow; who fits needs nothing."""
    cache = make_cache(budget_bytes=40 * PAGE, host_budget_bytes=40 * PAGE)
    live, away = cache.open(), cache.open()
    append(live, range(40))
    append(away, range(40))
    away.swap_out()
    assert Counter() == _calls_of(cache, lambda: make_ready(cache, [(away, 80), (live, 40)]))


def test_rows_left_before_the_last_fence_give_way_without_a_wait(
    host: HostBackend, make_cache: MakeCache
) -> None:
    """Work that was submitted after a row was parked does not read it."""
    cache = make_cache(budget_bytes=40 * PAGE)
    live = cache.open(row=2)
    host.hold_fences()
    _parked(cache, 80)
    cache.pool.reclaimer.new_fence()
    reached = cache.pool.reclaimer.new_fence()
    reached.wait()  # So far the device has come; what follows is under way.
    parked_later = cache.open(row=1)
    append(parked_later, range(76))
    parked_later.close()
    passed = host.last_passed_fence
    live.append(40)
    assert passed == host.last_passed_fence
    live.append(40)
    assert passed == host.last_passed_fence
    live.append(40)  # Only now the row that was just left goes, and that waits.
    assert passed < host.last_passed_fence


def _end_idle(cache: KVCache, doing: Callable[[Sequence], object]) -> Sequence:
    """A row that was idle before its end, since when the device has done all but the last work.

    Args:
        cache: A cache of 40 pages.
        doing: What is done with its sequence after that.

    Returns:
        A sequence that holds the other half.
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
def test_who_says_since_when_a_row_is_idle_spares_a_wait(
    host: HostBackend,
    make_cache: MakeCache,
    doing: Callable[[Sequence], object],
    waits: bool,
) -> None:
    """Unless a fork has read it since, which the caller need not know."""
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
def test_what_a_new_sequence_does_not_use_was_idle_before_it(
    host: HostBackend,
    make_cache: MakeCache,
    doing: Callable[[Sequence], object],
    waits: bool,
) -> None:
    """The memory of an adopted row is nobody's, until there are tokens in it."""
    host.hold_fences()
    cache = make_cache(budget_bytes=40 * PAGE)
    live = _end_idle(cache, lambda leaving: None)
    doing(cache.open(row=0))
    passed = host.last_passed_fence
    live.append(16)
    assert waits == (passed < host.last_passed_fence)


@pytest.mark.parametrize("scrub", ["never", "always"])
def test_what_is_scrubbed_for_a_new_sequence_is_not_idle(
    host: HostBackend, make_cache: MakeCache, scrub: str
) -> None:
    """Nothing is unmapped that is still being overwritten."""
    host.hold_fences()
    cache = make_cache(ExtentPool(host, 40 * PAGE, scrub=scrub, close_when_unused=True))
    live = _end_idle(cache, lambda leaving: None)
    cache.open(row=0)
    passed = host.last_passed_fence
    live.append(16)
    assert (scrub == "always") == (passed < host.last_passed_fence)


def test_what_a_growth_that_failed_has_filled_is_not_idle(
    host: HostBackend, make_cache: MakeCache
) -> None:
    """Where it cannot even be retired, because no fence can be recorded either."""
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


def test_what_has_grown_ahead_is_written_without_a_driver_call(make_cache: MakeCache) -> None:
    """Nothing else has changed: the sequence is as long as before, and holds what it did."""
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


def test_growing_ahead_takes_only_what_is_to_be_had(make_cache: MakeCache) -> None:
    """Nobody gives way for it."""
    cache = make_cache(budget_bytes=22 * PAGE)
    _parked(cache, 80)
    live = cache.open(row=1)
    append(live, range(8))
    assert Counter() == _calls_of(cache, lambda: grow_ahead(cache, [(live, 40)]))
    assert [20, 2] == _pages(cache)[:2]


def test_who_has_begun_with_nothing_yet_does_not_grow_ahead(make_cache: MakeCache) -> None:
    """Nor who is swapped out: their next growth is not this one."""
    cache = make_cache(host_budget_bytes=40 * PAGE)
    empty, away = cache.open(), cache.open()
    append(away, range(40))
    away.swap_out()
    wanted = [(empty, 8), (away, 80)]
    assert Counter() == _calls_of(cache, lambda: grow_ahead(cache, wanted))


def test_growing_ahead_waits_for_no_address_that_is_in_use(
    host: HostBackend, make_cache: MakeCache
) -> None:
    """What was given up there may still be read; later it is mapped."""
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
def test_a_driver_that_fails_while_rows_grow_ahead_leaves_them_as_they_were(
    make_cache: MakeCache, fail_at: int
) -> None:
    """And what was to be mapped is free again."""
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


def test_closed_cache_says_so(make_cache: MakeCache) -> None:
    """As every call does."""
    cache = make_cache()
    cache.close()
    with pytest.raises(ClosedError):
        make_ready(cache, [], 4)
