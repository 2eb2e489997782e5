"""The pool: its budget, all-or-nothing acquisition, conversion of extents, and closing.

Failing driver calls are tested in test_every_call_can_fail.py, histories in
machines/test_pool_machine.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers.pools import PAGE, MakePool

from vmkv import ClosedError, ConfigError, ExtentPool, HostBackend, OutOfPagesError
from vmkv.core.memory import check_pool
from vmkv.testing import FaultInjectingBackend
from vmkv.units import KiB, MiB

# ---- acquiring ----------------------------------------------------------------------------


def test_out_of_pages_is_a_memory_error_that_says_what_to_do(make_pool: MakePool) -> None:
    """Generic code can catch it, and its message names the option to change."""
    pool = make_pool(1)
    with pytest.raises(MemoryError, match=r"needs 8 KiB, 4 KiB left .*raise budget_bytes"):
        pool.acquire([1])


def test_conversion_releases_no_more_than_needed(make_pool: MakePool) -> None:
    """Free extents that fit beside the new one stay."""
    pool = make_pool(8)
    pool.disown(pool.acquire([0] * 8))
    extents = pool.acquire([1])
    assert (6, 2) == (pool.count_free(0), pool.backend.calls["mem_release"])
    pool.disown(extents)


def test_ids_of_released_extents_are_used_again(make_pool: MakePool) -> None:
    """A pool that converts for ever does not run out of ids, of which it has 1,024 at least."""
    pool = make_pool(1)
    for _ in range(1500):
        pool.disown(pool.acquire([0]))
        pool.trim()
    assert [] == pool.extents()


# ---- a full device ------------------------------------------------------------------------


class _SmallDevice(HostBackend):
    """A host backend with `device_pages` of memory and no more, as a GPU has."""

    device_pages = 8

    def mem_create(self, num_bytes: int, *args: Any, **options: Any) -> Any:
        if self.usage().physical_bytes + num_bytes > self.device_pages * PAGE:
            backend = FaultInjectingBackend(self, fail_at=1, is_out_of_memory=True)
            return backend.mem_create(num_bytes)
        return super().mem_create(num_bytes, *args, **options)


def test_full_device_makes_the_pool_release_free_extents() -> None:
    """The budget is larger than the device's memory."""
    pool = ExtentPool(_SmallDevice(PAGE), 100 * PAGE)
    pool.disown(pool.acquire([0] * 8))
    extents = pool.acquire([3])
    check_pool(pool)
    assert 8 * PAGE == pool.stats().resident_bytes
    pool.disown(extents)
    pool.close()


def test_full_device_is_out_of_pages_and_changes_nothing_in_use() -> None:
    """`needed_bytes` is the size of the whole acquisition, whose new extents are released."""
    backend = _SmallDevice(PAGE)
    pool = ExtentPool(backend, 100 * PAGE)
    held = pool.acquire([1])
    with pytest.raises(OutOfPagesError, match="host has no more memory") as caught:
        pool.acquire([2, 1, 0])
    assert 7 * PAGE == caught.value.needed_bytes
    assert 2 * PAGE == pool.stats().resident_bytes
    check_pool(pool)
    pool.disown(held)
    pool.close()


def test_pressure_is_announced_once_before_the_second_attempt() -> None:
    """`on_pressure` lets other allocators free memory, as one does here."""
    backend = _SmallDevice(PAGE)
    strangers = [backend.mem_create(4 * PAGE)]
    announced = []

    def give_way() -> None:
        announced.append(backend.usage().physical_bytes)
        backend.mem_release(strangers.pop())

    pool = ExtentPool(backend, 100 * PAGE, on_pressure=give_way)
    extents = pool.acquire([2, 1])
    assert ([8 * PAGE], [4, 2]) == (announced, [extent.num_pages for extent in extents])
    pool.disown(extents)
    pool.close()


# ---- the budget ---------------------------------------------------------------------------


def test_budget_can_grow_manifold(make_pool: MakePool) -> None:
    """A pool that began small can later hold its whole budget in extents of one page."""
    pool = make_pool(2)
    pool.set_budget(3000 * PAGE)
    held = pool.acquire([0] * 3000)
    assert 0 == pool.available_bytes
    pool.disown(held)
    check_pool(pool)


# ---- bad input ----------------------------------------------------------------------------


@pytest.mark.parametrize("budget_bytes", [0, -1, PAGE - 1, 2.5 * PAGE, "1 MiB", None])
def test_budget_that_is_no_number_of_pages_is_refused(host: HostBackend, budget_bytes: Any) -> None:
    """The message names a number that is too small, and the page."""
    is_small = isinstance(budget_bytes, int)
    match = rf"budget_bytes={budget_bytes} .*{PAGE}" if is_small else "budget_bytes"
    with pytest.raises((ConfigError, TypeError), match=match):
        ExtentPool(host, budget_bytes)


@pytest.mark.parametrize("page_bytes", [0, -PAGE, 1, PAGE + 1, PAGE // 2, 3 * PAGE])
def test_page_that_is_no_multiple_of_the_granularity_is_refused(
    host: HostBackend, page_bytes: int
) -> None:
    """A page must be a power of two, and a multiple of the driver's granularity."""
    with pytest.raises(ConfigError, match=f"page_bytes={page_bytes} "):
        ExtentPool(host, 1 * MiB, page_bytes=page_bytes)


def test_page_may_be_larger_than_the_granularity(host: HostBackend) -> None:
    """`page_bytes` sets it."""
    pool = ExtentPool(host, 64 * PAGE, page_bytes=4 * PAGE)
    extents = pool.acquire([1])
    assert 8 * PAGE == extents[0].num_bytes
    pool.disown(extents)
    pool.close()


def test_largest_extent_is_64_mib_or_32_pages() -> None:
    """Larger ones would save few driver calls and could not be trimmed in part."""
    sizes = {}
    for page_bytes in (4 * KiB, 2 * MiB, 32 * MiB, 128 * MiB):
        backend = HostBackend(page_bytes)
        pool = ExtentPool(backend, 256 * MiB)
        sizes[page_bytes] = page_bytes << pool.largest_class
        pool.close()
    wanted = {4 * KiB: 128 * KiB, 2 * MiB: 64 * MiB, 32 * MiB: 64 * MiB, 128 * MiB: 128 * MiB}
    assert wanted == sizes


# ---- closing ------------------------------------------------------------------------------


def test_closed_pool_raises_closed_error(host: HostBackend) -> None:
    """A second close does nothing; every other call raises `ClosedError`."""
    pool = ExtentPool(host, 4 * PAGE)
    pool.close()
    pool.close()
    for use in (lambda: pool.acquire([0]), pool.trim, lambda: pool.set_budget(PAGE), pool.attach):
        with pytest.raises(ClosedError):
            use()


def test_pool_with_users_cannot_be_closed(host: HostBackend) -> None:
    """Caches over the pool must be closed first."""
    pool = ExtentPool(host, 4 * PAGE)
    pool.attach()
    with pytest.raises(ConfigError, match="this pool is in use"):
        pool.close()
    pool.detach()
    pool.close()


def test_pool_closes_with_its_last_user(host: HostBackend) -> None:
    """`close_when_unused` closes it when the last user detaches."""
    pool = ExtentPool(host, 4 * PAGE, close_when_unused=True)
    pool.attach()
    pool.attach()
    pool.detach()
    pool.disown(pool.acquire([0]))
    pool.detach()
    with pytest.raises(ClosedError):
        pool.acquire([0])
