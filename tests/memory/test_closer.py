"""The closer: page tables are closed behind their fence, and no call waits for it.

Failing driver calls of whole operations are tested in test_every_call_can_fail.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.one_row import table_of
from helpers.pools import PAGE, MakePool

from vmkv import DriverError, ExtentPool, HostBackend
from vmkv.core.backend import Fence
from vmkv.core.memory import check_pool
from vmkv.testing import FaultInjectingBackend


class _BusyDevice(HostBackend):
    """A device whose fences never pass."""

    def record_fence(self, stream: int | None = None) -> Fence:
        super().record_fence(stream)
        return _Never()


class _Never(Fence):
    def has_passed(self) -> bool:
        return False

    def wait(self) -> None:
        raise AssertionError("a call waits for the device")


def test_no_call_waits_for_a_table_that_is_being_closed() -> None:
    """Neither `close_soon` waits, nor calls that acquire, disown and trim memory meanwhile."""
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


def test_closed_table_is_unmapped_after_its_fence(host: HostBackend, make_pool: MakePool) -> None:
    """Before the fence, the table's memory is retired and its addresses stay reserved."""
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


def test_table_closes_at_once_on_an_idle_device(pool: ExtentPool) -> None:
    """Addresses that a tensor still points into stay reserved."""
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


def test_acquisition_waits_for_a_closed_table(host: HostBackend, make_pool: MakePool) -> None:
    """Memory is short, and the acquisition is not refused."""
    pool = make_pool(4)
    table = table_of(pool, 2)
    host.hold_fences()
    pool.reclaimer.close_soon(table.close_behind)
    passed = host.last_passed_fence
    pool.disown(pool.acquire_or_evict([2]))
    assert host.last_passed_fence > passed


@pytest.mark.parametrize("again", [lambda pool: pool.trim(), lambda pool: pool.make_room(PAGE)])
def test_tables_that_could_not_be_closed_are_closed_later(
    host: HostBackend, make_pool: MakePool, again: Callable[[ExtentPool], object]
) -> None:
    """The next call that frees memory closes them; if the driver fails again, a later one does."""
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
    """The closer goes on where the table's own `close` stopped."""
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
