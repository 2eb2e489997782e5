"""Rows that the last step did not use are evicted without a wait for that step."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
from helpers.stamps import append

from vmkv import DriverError, ExtentPool, HostBackend, KVCache, Sequence
from vmkv.core.cache import close_idle
from vmkv.units import KiB

PAGE = 4 * KiB
MakeCache = Callable[..., KVCache]


def _parked(cache: KVCache, *lengths: int) -> None:
    """Park rows of these lengths from row 0 on; the first was used longest ago."""
    live = [cache.open(row=row) for row in range(len(lengths))]
    for sequence, num_tokens in zip(live, lengths, strict=True):
        append(sequence, range(num_tokens))
        sequence.record(range(num_tokens))
    for sequence in live:
        sequence.close()


def _pages(cache: KVCache) -> list[int]:
    return [pages.num_pages for pages in cache.groups[0].table.rows]


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
