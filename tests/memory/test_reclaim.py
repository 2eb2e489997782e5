"""The reclaimer: no mapping is unmapped or reissued before its fence.

The host backend holds fences back, so that submitted work lasts for as long as a test wants.
"""

from __future__ import annotations

import pytest
from helpers.one_row import table_of
from helpers.pools import PAGE, MakePool

from vmkv import ExtentPool, HostBackend
from vmkv.core.memory import Change, PageTable, RetiredMapping, RowChange, check_pool
from vmkv.errors import DriverError
from vmkv.testing import FaultInjectingBackend, read_bytes, write_bytes
from vmkv.units import Address


def _table(pool: ExtentPool, *classes: int) -> PageTable:
    """A table whose only row has these extents mapped; each page holds its number."""
    table = table_of(pool, *classes)
    for page in range(table.rows[0].end_page):
        write_bytes(pool.backend, table.page_address(0, page), bytes([page + 1]) * PAGE)
    return table


def _retire_all(table: PageTable) -> None:
    table.retire_back(0, 0, table.pool.reclaimer.new_fence())


def test_retired_mapping_stays_readable_until_its_fence(
    host: HostBackend, make_pool: MakePool
) -> None:
    """A running kernel reads unchanged bytes, also while the pool is trimmed and acquired from."""
    pool = make_pool(8)
    table = _table(pool, 1, 0)
    host.hold_fences()
    _retire_all(table)
    assert 0 == pool.reclaimer.poll()
    pool.trim()
    pool.disown(pool.acquire([0, 1]))
    pool.reclaimer.poll()
    assert (0, 2) == (host.calls["mem_unmap"], len(pool.reclaimer.retired_mappings()))
    for page in range(3):
        data = read_bytes(host, table.page_address(0, page), PAGE)
        assert bytes([page + 1]) * PAGE == data
    host.pass_fences()
    assert 3 * PAGE == pool.reclaimer.poll()


def test_neighbours_are_unmapped_in_one_call(pool: ExtentPool) -> None:
    """One call per run without holes."""
    table = _table(pool, 0, 1, 0, 0, 0)
    fence = pool.reclaimer.new_fence()
    table.retire_front(0, 3, fence)
    table.retire_back(0, 4, fence)
    before = pool.backend.calls["mem_unmap"]
    pool.reclaimer.poll()
    assert 2 == pool.backend.calls["mem_unmap"] - before
    _retire_all(table)
    pool.reclaimer.poll()
    assert 3 == pool.backend.calls["mem_unmap"] - before


def test_work_submitted_later_is_not_waited_for(host: HostBackend, pool: ExtentPool) -> None:
    """`fence_since` returns the first fence recorded after a time, or a new one."""
    host.hold_fences()
    tick, reclaimer = pool.pressure.tick, pool.reclaimer
    long_ago = tick()
    first = reclaimer.new_fence()
    a_while_ago = tick()
    second = reclaimer.new_fence()
    assert [first, second] == [reclaimer.fence_since(time) for time in (long_ago, a_while_ago)]
    just_now = reclaimer.fence_since(tick())
    assert just_now not in (first, second)
    second.wait()
    reached = reclaimer.fence_since(long_ago)
    assert reached.has_passed()  # It need not be `first`.
    assert not just_now.has_passed()
    assert second is reclaimer.fence_since(a_while_ago)
    host.pass_fences()


def test_note_submitted_records_a_fence_between_steps(host: HostBackend, pool: ExtentPool) -> None:
    """The first step's fence passes before the second step is done."""
    host.hold_fences()
    reclaimer = pool.reclaimer
    first, second = reclaimer.note_submitted(), reclaimer.note_submitted()
    between = reclaimer.fence_since(first)
    assert between is not reclaimer.fence_since(second)
    between.wait()
    assert not reclaimer.fence_since(second).has_passed()
    host.pass_fences()


def test_note_submitted_without_a_fence_waits_for_a_later_one() -> None:
    """The work is submitted although no fence could be recorded after it."""
    backend = FaultInjectingBackend(HostBackend(PAGE))
    pool = ExtentPool(backend, 8 * PAGE)
    backend.arm(1)
    noted = pool.reclaimer.note_submitted()
    assert "record_fence" == backend.failed_call
    later = pool.reclaimer.fence_since(noted)
    assert later.time > noted
    pool.close()


def test_older_fence_does_not_wait_behind_a_newer_one(
    host: HostBackend, make_pool: MakePool
) -> None:
    """In whatever order mappings are retired, those with a passed fence are unmapped."""
    pool = make_pool(8)
    table = _table(pool, 0, 0, 0)
    host.hold_fences()
    older, newer = pool.reclaimer.new_fence(), pool.reclaimer.new_fence()
    table.retire_back(0, 2, newer)
    table.retire_back(0, 1, older)
    older.wait()
    assert PAGE == pool.reclaimer.poll()
    table.retire_back(0, 0, older)
    assert PAGE == pool.reclaimer.poll()
    assert 1 == len(pool.reclaimer.retired_mappings())
    host.pass_fences()


def test_number_of_remembered_fences_is_bounded(host: HostBackend, pool: ExtentPool) -> None:
    """A row idle for long then waits for a later fence than needed, never for an earlier one."""
    host.hold_fences()
    long_ago = pool.pressure.tick()
    fences = [pool.reclaimer.new_fence() for _ in range(100)]
    found = pool.reclaimer.fence_since(long_ago)
    assert found in fences[1:]
    assert len(pool.reclaimer._recorded) < 100
    host.pass_fences()


# ---- waiting ------------------------------------------------------------------------------


def test_wait_for_some_bytes_stops_early(host: HostBackend, make_pool: MakePool) -> None:
    """`wait` waits for no more fences than the bytes need."""
    pool = make_pool(8)
    table = _table(pool, 0, 0, 0, 0)
    host.hold_fences()
    for page in (3, 2, 1, 0):
        table.retire_back(0, page, pool.reclaimer.new_fence())
    assert 2 * PAGE == pool.reclaimer.wait(until_bytes=PAGE + 1)
    assert 2 == len(pool.reclaimer.retired_mappings())
    host.pass_fences()


def test_wait_with_nothing_retired_makes_no_call(pool: ExtentPool) -> None:
    assert (0, 0) == (pool.reclaimer.wait(), pool.reclaimer.poll())
    assert 0 == pool.backend.calls["mem_unmap"]


def test_has_retired_in_finds_any_overlap(host: HostBackend, make_pool: MakePool) -> None:
    """A range may overlap the extent at either end."""
    pool = make_pool(8)
    table = _table(pool, 0, 1)
    host.hold_fences()
    table.retire_back(0, 1, pool.reclaimer.new_fence())
    has_retired_in = pool.reclaimer.has_retired_in
    start = table.page_address(0, 0)
    assert [False, True, True, True, True, False] == [
        has_retired_in([(Address(start + first * PAGE), Address(start + end * PAGE))])
        for first, end in ((0, 1), (0, 2), (1, 2), (2, 3), (2, 4), (3, 5))
    ]
    host.pass_fences()


def test_a_row_that_begins_within_a_retired_extent_waits_for_it(
    host: HostBackend, make_pool: MakePool
) -> None:
    """A fork's sliding window may begin within an extent of the row's last sequence."""
    pool = make_pool(8)
    table = _table(pool, 2)
    host.hold_fences()
    table.retire_back(0, 0, pool.reclaimer.new_fence())
    with Change(pool, [RowChange(table, 0, 2, [1])]) as made:
        made.map(stream=0)
    assert 2 == table.rows[0].first_page
    assert not pool.reclaimer.batches
    host.pass_fences()


# ---- failing unmaps -----------------------------------------------------------------------


@pytest.mark.parametrize("fail_at", [1, 2, 3])
@pytest.mark.parametrize("how", ["poll", "wait"])
@pytest.mark.parametrize("is_one_batch", [True, False])
def test_failed_unmap_keeps_the_books(
    host: HostBackend, make_pool: MakePool, fail_at: int, how: str, is_one_batch: bool
) -> None:
    """Memory unmapped before the failure is free; the rest stays retired until the next attempt."""
    backend = FaultInjectingBackend(host)
    pool = make_pool(16, backend)
    # One page in each row of two: three runs, which take three calls.
    table = PageTable(pool, num_rows=3, row_pages=2)
    for row in range(3):
        extents = pool.acquire([0])
        table.map(row, 0, extents)
        pool.disown(extents)
    fence = pool.reclaimer.new_fence()
    taken = [
        RetiredMapping(table.page_address(row, 0), table.rows[row].mappings.popleft().extent)
        for row in range(3)
    ]
    for batch in [taken] if is_one_batch else [[each] for each in taken]:
        pool.reclaimer.retire(batch, fence)
    backend.arm(fail_at)
    with pytest.raises(DriverError, match="mem_unmap"):
        getattr(pool.reclaimer, how)()
    backend.arm(0)
    assert taken[fail_at - 1 :] == pool.reclaimer.retired_mappings()
    check_pool(pool)
    pool.reclaimer.wait()
    assert [] == pool.reclaimer.retired_mappings()
    assert 3 * PAGE == pool.stats().free_bytes


def test_what_an_unmap_has_not_reached_stays_retired(
    pool: ExtentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no driver refuses it: the process itself has no memory for the call."""
    table = _table(pool, 1, 0)
    _retire_all(table)
    with monkeypatch.context() as patch:
        patch.setattr(pool.backend, "execute", lambda _: [0] * (1 << 62))
        with pytest.raises(MemoryError):
            pool.reclaimer.poll()
    assert 2 == len(pool.reclaimer.retired_mappings())
    assert 3 * PAGE == pool.reclaimer.poll()
    check_pool(pool)
