"""Which recycled memory is overwritten, and with which byte.

Sequences over scrubbed memory are tested in cache/test_scrub.py.
"""

from __future__ import annotations

import struct

import pytest
from helpers.pools import PAGE, MakePool

from vmkv import ConfigError, ExtentPool, HostBackend
from vmkv.core.memory import Extent, PageTable, Scrub
from vmkv.errors import DriverError
from vmkv.testing import FaultInjectingBackend, read_bytes, write_bytes
from vmkv.units import Handle


def _extent(*, is_dirty: bool, tenant: str | None) -> Extent:
    extent = Extent(0, 0, PAGE, Handle(1))
    extent.is_dirty, extent.tenant = is_dirty, tenant
    return extent


@pytest.mark.parametrize(
    ("scrub", "is_dirty", "last", "next_", "concerns"),
    [
        ("never", True, "a", "b", False),
        ("cross-tenant", True, "a", "b", True),
        ("cross-tenant", True, "a", None, True),
        ("cross-tenant", True, None, "a", True),
        ("cross-tenant", True, "a", "a", False),
        ("cross-tenant", True, None, None, False),
        ("cross-tenant", False, None, "a", False),  # Fresh memory reads as zero.
        ("always", True, "a", "a", True),
        ("always", False, None, "a", False),
        ("poison", True, "a", "a", True),
        ("poison", False, None, "a", True),
    ],
)
def test_modes_scrub_the_extents_they_name(
    scrub: str, is_dirty: bool, last: str | None, next_: str | None, concerns: bool
) -> None:
    byte = Scrub(scrub).byte(_extent(is_dirty=is_dirty, tenant=last), next_, None)
    assert concerns == (byte is not None)


def test_scrub_is_named_or_a_member() -> None:
    """An unknown name is refused, and the error lists the names."""
    assert Scrub.ALWAYS is Scrub.named("always") is Scrub.named(Scrub.ALWAYS)
    with pytest.raises(ConfigError, match="scrub='ALWAYS' is unknown; there are 'never'"):
        Scrub.named("ALWAYS")


@pytest.mark.parametrize("code", ["<e", "<f", "<d"])
def test_poison_is_not_a_number(code: str) -> None:
    """The byte makes NaN in half, single and double; bfloat16 is the upper half of single."""
    data = bytes(
        [Scrub.POISON.byte(_extent(is_dirty=False, tenant=None), None, None) or 0]
    ) * struct.calcsize(code)
    (value,) = struct.unpack(code, data)
    assert value != value


def _mapped(pool: ExtentPool) -> tuple[PageTable, list[Extent]]:
    """An extent of one page and one of two, mapped one after the other and owned."""
    table = PageTable(pool, 1, 4)
    extents = pool.acquire([0, 1])
    table.map(0, 0, extents)
    return table, extents


def test_prepare_overwrites_only_extents_of_another_tenant(make_pool: MakePool) -> None:
    pool = make_pool(16, scrub="cross-tenant")
    table, extents = _mapped(pool)
    pool.scrub.prepare(pool.backend, extents, table.address, "a", 0, None)
    write_bytes(pool.backend, table.address, b"x" * 3 * PAGE)
    extents[1].tenant = "b"
    pool.scrub.prepare(pool.backend, extents, table.address, "a", 0, None)
    assert b"x" * PAGE + bytes(2 * PAGE) == read_bytes(pool.backend, table.address, 3 * PAGE)
    assert ["a", "a"] == [extent.tenant for extent in extents]
    assert 1 == pool.backend.calls["fill"]
    pool.disown(extents)


def test_prepare_that_fails_leaves_the_rest_to_be_scrubbed(
    host: HostBackend, make_pool: MakePool
) -> None:
    """An extent gets its new tenant once it has been overwritten, not before."""
    faulty = FaultInjectingBackend(host)
    pool = make_pool(16, faulty, scrub="cross-tenant")
    table, extents = _mapped(pool)
    pool.scrub.prepare(pool.backend, extents, table.address, "a", 0, None)
    write_bytes(pool.backend, table.address, b"x" * 3 * PAGE)
    faulty.arm(2)
    with pytest.raises(DriverError, match="fill"):
        pool.scrub.prepare(pool.backend, extents, table.address, "b", 0, None)
    faulty.arm(0)
    assert ["b", "a"] == [extent.tenant for extent in extents]
    pool.scrub.prepare(pool.backend, extents, table.address, "b", 0, None)
    assert bytes(3 * PAGE) == read_bytes(pool.backend, table.address, 3 * PAGE)
    pool.disown(extents)


def test_extents_remember_their_tenant_while_they_are_free(make_pool: MakePool) -> None:
    """The next tenant is compared with it; newly created extents have none."""
    pool = make_pool(16, scrub="cross-tenant")
    table, extents = _mapped(pool)
    pool.scrub.prepare(pool.backend, extents, table.address, "a", 0, None)
    pool.disown(extents)
    table.retire_back(0, 0, pool.reclaimer.new_fence())
    pool.reclaimer.wait()
    again = pool.acquire([0, 1])
    assert [("a", True)] * 2 == [(extent.tenant, extent.is_dirty) for extent in again]
    pool.disown(again)
    pool.trim()
    fresh = pool.acquire([0])
    assert (None, False) == (fresh[0].tenant, fresh[0].is_dirty)
    pool.disown(fresh)
