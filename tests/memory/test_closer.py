"""The closer: what nobody uses goes behind its fence, and nobody waits for that.

Not covered here: which driver call may fail on the way (`test_every_call_can_fail.py`), and what
caches close like this.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.one_row import table_of

from vmkv import DriverError, ExtentPool, HostBackend
from vmkv.core.backend import Fence
from vmkv.core.memory import check_pool
from vmkv.testing import FaultInjectingBackend
from vmkv.units import KiB

PAGE = 4 * KiB
MakePool = Callable[..., ExtentPool]


class _BusyDevice(HostBackend):
    """A device that is busy for longer than anybody can wait."""

    def record_fence(self) -> Fence:
        super().record_fence()
        return _Never()


class _Never(Fence):
    def has_passed(self) -> bool:
        return False

    def wait(self) -> None:
        raise AssertionError("somebody waits for the device")


def test_nobody_waits_for_the_device_that_still_reads_what_is_closed() -> None:
    """Neither who closes it, nor who comes by memory and gives it back meanwhile."""
    pool = ExtentPool(_BusyDevice(PAGE), 64 * PAGE)
    table = table_of(pool, 2, 1)
    pool.reclaimer.close_soon(table.close_behind)
    for size_class in range(3):
        extents = pool.acquire_or_evict([size_class])
        assert PAGE << size_class == pool.stats().resident_bytes
        pool.disown(extents)
        pool.trim()
    assert pool.make_room(0) is False
    assert 6 * PAGE == pool.stats().retired_bytes
    check_pool(pool)


def test_what_is_closed_goes_behind_its_fence(host: HostBackend, make_pool: MakePool) -> None:
    """Memory is the next one's, and addresses are free, only when the device has passed it."""
    pool = make_pool(8)
    table = table_of(pool, 1, 0)
    host.hold_fences()
    pool.reclaimer.close_soon(table.close_behind)
    check_pool(pool)
    assert (0, 3 * PAGE) == (host.calls["mem_unmap"], pool.stats().retired_bytes)
    pool.trim()
    assert 1 == len(pool.reclaimer.idle_reservations)
    host.pass_fences()
    pool.trim()
    assert 0 == len(pool.reclaimer.idle_reservations)
    assert 0 == pool.stats().created_bytes


def test_on_an_idle_device_it_goes_at_once(pool: ExtentPool) -> None:
    """All but addresses that somebody's tensor still points into."""
    has_views = [True]
    seen, plain = table_of(pool, 1), table_of(pool, 0)
    pool.reclaimer.close_soon(
        lambda fence: seen.close_behind(fence, lambda: has_views[0]), plain.close_behind
    )
    assert 0 == pool.backend.usage().num_mappings
    assert 1 == len(pool.reclaimer.idle_reservations)
    has_views.clear()
    has_views.append(False)
    pool.trim()
    assert 0 == len(pool.reclaimer.idle_reservations)


def test_what_is_closed_makes_room(host: HostBackend, make_pool: MakePool) -> None:
    """Who is short waits for its fence, and is not refused."""
    pool = make_pool(4)
    table = table_of(pool, 2)
    host.hold_fences()
    pool.reclaimer.close_soon(table.close_behind)
    pool.disown(pool.acquire_or_evict([2]))


@pytest.mark.parametrize("again", [lambda pool: pool.trim(), lambda pool: pool.make_room(PAGE)])
def test_what_the_driver_refuses_is_closed_later(
    host: HostBackend, make_pool: MakePool, again: Callable[[ExtentPool], object]
) -> None:
    """By whoever gives memory back or wants some; once, whoever comes first."""
    backend = FaultInjectingBackend(host)
    pool = make_pool(8, backend)
    tables = [table_of(pool, 1), table_of(pool, 2)]
    backend.arm(1)
    pool.reclaimer.close_soon(*(table.close_behind for table in tables))
    assert "record_fence" == backend.failed_call
    assert 6 * PAGE == pool.stats().resident_bytes
    backend.arm(1)
    with pytest.raises(DriverError):
        again(pool)
    backend.arm(0)
    again(pool)
    assert [] == pool.page_tables
    check_pool(pool)
    pool.trim()
    assert 0 == len(pool.reclaimer.idle_reservations)


def test_a_table_that_was_half_closed_is_closed_once(
    host: HostBackend, make_pool: MakePool
) -> None:
    """Wherever its own `close` stopped, the closer goes on there."""
    struck = set()
    for fail_at in range(1, 10):
        backend = FaultInjectingBackend(host)
        pool = ExtentPool(backend, 8 * PAGE)
        table = table_of(pool, 1)
        backend.arm(fail_at)
        try:
            table.close(lambda: False)
        except DriverError:
            struck.add(backend.failed_call)
        is_done = backend.failed_call is None
        backend.arm(0)
        pool.reclaimer.close_soon(table.close_behind)
        assert (0, 0) == (host.usage().num_mappings, len(pool.reclaimer.idle_reservations))
        check_pool(pool)
        pool.trim()
        if is_done:
            break
    assert {"record_fence", "mem_unmap", "address_free"} == struck
