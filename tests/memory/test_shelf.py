"""Shelves: the extents of one memory location, within their budget, converted between classes.

The pool over them is tested in test_pool.py, histories in machines/test_pool_machine.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.pools import PAGE, MakePool

from vmkv import ConfigError, ExtentPool, HostBackend, OutOfPagesError
from vmkv.core.backend import MemoryLocation
from vmkv.core.memory import check_pool
from vmkv.core.memory.shelf import Shelf
from vmkv.errors import DriverError
from vmkv.testing import FaultInjectingBackend
from vmkv.units import MiB

DEVICE, HOST = MemoryLocation.DEVICE, MemoryLocation.HOST
MakeShelf = Callable[..., Shelf]


@pytest.fixture
def make_shelf(host: HostBackend) -> MakeShelf:
    """Makes a shelf over `host` with a budget in pages."""

    def make(
        budget_pages: int,
        location: MemoryLocation = DEVICE,
        *,
        backend: HostBackend | FaultInjectingBackend | None = None,
        on_pressure: Callable[[], None] | None = None,
    ) -> Shelf:
        return Shelf(
            backend or host,
            PAGE,
            3,
            location,
            budget_pages * PAGE,
            on_pressure=on_pressure,
            retired_bytes=lambda _: 0,
        )

    return make


def _empty(shelf: Shelf) -> None:
    shelf.release_free(shelf.free_bytes)
    assert (0, 0) == (shelf.created_bytes, shelf.free_bytes)


@pytest.mark.parametrize("location", MemoryLocation)
def test_memory_is_of_the_shelfs_location(
    host: HostBackend, make_shelf: MakeShelf, location: MemoryLocation
) -> None:
    """Extents and the backend both say so."""
    shelf = make_shelf(8, location)
    extents = shelf.take([1, 0])
    assert [location] * 2 == [extent.location for extent in extents]
    usage = host.usage()
    wanted = (3 * PAGE, 0) if location is DEVICE else (0, 3 * PAGE)
    assert wanted == (usage.physical_bytes, usage.host_bytes)
    shelf.put_back(extents)
    assert [1, 1, 0] == [shelf.count_free(size_class) for size_class in range(3)]
    _empty(shelf)


def test_host_budget_is_named(make_shelf: MakeShelf) -> None:
    """The error of a failed swap-out names the budget that was too small."""
    shelf = make_shelf(2, HOST)
    with pytest.raises(OutOfPagesError, match=r"of a host memory budget.*raise host_budget_bytes"):
        shelf.take([2])


def test_unlisted_release_that_fails_leaves_the_extent_to_its_caller(
    host: HostBackend, make_shelf: MakeShelf
) -> None:
    """An extent that may not be recycled does not get onto a free list."""
    faulty = FaultInjectingBackend(host)
    shelf = make_shelf(8, backend=faulty)
    (extent,) = shelf.take([0])
    faulty.arm(1)
    with pytest.raises(DriverError, match="mem_release"):
        shelf.release_unlisted(extent)
    faulty.arm(0)
    assert (PAGE, 0, 0) == (shelf.created_bytes, shelf.free_bytes, shelf.count_free(0))
    shelf.release_unlisted(extent)
    assert 0 == shelf.created_bytes


# ---- two shelves in one pool --------------------------------------------------------------


def test_locations_do_not_borrow_from_each_other(make_pool: MakePool) -> None:
    """Full device memory is not replaced by host memory, nor the other way round."""
    pool = make_pool(4, host_budget_bytes=2 * PAGE)
    device, host = pool.acquire([2]), pool.acquire([1], HOST)
    for location in MemoryLocation:
        with pytest.raises(OutOfPagesError):
            pool.acquire([0], location)
    check_pool(pool)
    pool.disown(device + host)
    assert (4 * PAGE, 2 * PAGE) == (pool.stats().free_bytes, pool.stats(HOST).free_bytes)
    assert 2 * PAGE == pool.trim(location=HOST)
    assert (4 * PAGE, 0) == (pool.stats().free_bytes, pool.stats(HOST).created_bytes)


def test_without_a_host_budget_there_is_no_host_memory(pool: ExtentPool) -> None:
    """Swapping is off by default."""
    with pytest.raises(OutOfPagesError, match="raise host_budget_bytes"):
        pool.acquire([0], HOST)


def test_host_budget_changes_without_the_devices(make_pool: MakePool) -> None:
    pool = make_pool(4, host_budget_bytes=8 * PAGE)
    pool.disown(pool.acquire([2], HOST))
    pool.set_budget(2 * PAGE, HOST)
    assert (4 * PAGE, 2 * PAGE) == (pool.stats().budget_bytes, pool.stats(HOST).budget_bytes)
    assert 0 == pool.stats(HOST).created_bytes
    check_pool(pool)


@pytest.mark.parametrize("budget_bytes", [-1, 1, PAGE - 1, 1.5 * MiB])
def test_host_budget_must_hold_a_page(host: HostBackend, budget_bytes: float) -> None:
    with pytest.raises(ConfigError, match="host_budget_bytes"):
        ExtentPool(host, 4 * PAGE, host_budget_bytes=budget_bytes)  # type: ignore[arg-type]
