"""Slabs of pinned memory, within the host budget of a pool."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from unittest import mock

import pytest

from vmkv import DriverError, ExtentPool, HostBackend
from vmkv.core.backend import MemoryLocation
from vmkv.core.memory.host_slabs import HostSlabs
from vmkv.core.memory.invariants import check_pool
from vmkv.testing import FaultInjectingBackend
from vmkv.units import KiB

PAGE = 4 * KiB
SLAB = 4 * PAGE


@pytest.fixture
def backend() -> Iterator[FaultInjectingBackend]:
    made = FaultInjectingBackend(HostBackend(PAGE))
    yield made
    made.close()


@pytest.fixture
def pool(backend: FaultInjectingBackend) -> Iterator[ExtentPool]:
    made = ExtentPool(backend, 16 * PAGE, host_budget_bytes=10 * PAGE)
    yield made
    assert not made.lent_host_bytes
    check_pool(made)
    made.close()


def test_slabs_are_taken_within_the_budget(pool: ExtentPool) -> None:
    slabs = HostSlabs(pool, 8, SLAB)
    first, second = slabs.take(), slabs.take()
    assert first is not None
    assert second is not None
    assert slabs.take() is None, "ten pages hold two slabs of four"
    ctypes.memset(slabs.address(first), 1, SLAB)
    ctypes.memset(slabs.address(second), 2, SLAB)
    assert 1 == ctypes.string_at(slabs.address(first), SLAB)[-1]
    assert 2 * SLAB == slabs.num_bytes == pool.lent_host_bytes
    assert 2 * SLAB == pool.backend.usage().pinned_bytes
    check_pool(pool)
    slabs.give(first)
    assert slabs.take() is not None
    slabs.close()
    assert not pool.backend.usage().pinned_bytes


def test_slabs_made_ahead_are_given_back_first(pool: ExtentPool) -> None:
    slabs = HostSlabs(pool, 8, SLAB)
    assert slabs.take() is not None
    assert 2 * SLAB == slabs.num_bytes, "the next one is made while this one is used"
    assert SLAB == slabs.give_unused() == slabs.num_bytes
    assert not slabs.give_unused()
    extents = pool.acquire([2], MemoryLocation.HOST)
    assert slabs.take() is None
    pool.disown(extents)
    assert slabs.take() is not None, "free extents are released for a slab"
    slabs.close()


def test_slabs_are_made_ready_for_so_many_bytes(backend: FaultInjectingBackend) -> None:
    """Not more at a time than the memory that the kernel says is free covers."""
    pool = ExtentPool(backend, 16 * PAGE, host_budget_bytes=400 * PAGE)
    slabs = HostSlabs(pool, 90, SLAB)
    assert not slabs.num_bytes
    for _ in range(2):
        slabs.make_ready(30 * SLAB - 1)
        assert 30 * SLAB == slabs.num_bytes == pool.lent_host_bytes
    assert not backend.usage().pinned_bytes
    slabs.make_ready(90 * SLAB)
    assert 64 * SLAB == slabs.num_bytes
    assert slabs.take() is not None
    slabs.make_ready(90 * SLAB)
    with mock.patch.object(backend.upstream, "free_host_memory_bytes", return_value=63 * SLAB):
        assert slabs.take() is not None
        slabs.make_ready(90 * SLAB)
    assert 65 * SLAB == slabs.num_bytes
    slabs.close()
    pool.close()


def test_no_slab_is_made_of_the_machines_last_memory(
    pool: ExtentPool, backend: FaultInjectingBackend
) -> None:
    slabs = HostSlabs(pool, 8, SLAB)
    first = slabs.take()
    assert first is not None
    with mock.patch.object(backend.upstream, "free_host_memory_bytes", return_value=8 * SLAB):
        assert slabs.take() is not None, "made before"
        assert slabs.take() is None
        slabs.give(first)
    assert slabs.take() is not None
    slabs.close()


def test_without_pinned_memory_there_is_no_slab(
    pool: ExtentPool, backend: FaultInjectingBackend
) -> None:
    slabs = HostSlabs(pool, 8, SLAB)
    backend.arm(1)
    assert slabs.take() is None
    assert slabs.take() is not None
    backend.arm(1)
    with pytest.raises(DriverError, match="unpin"):
        slabs.close()
    slabs.close()
