"""Exchanges: other extents behind addresses in use, all or none, and never before the fence.

Each extent is filled with its own number, so that what a row reads says what stands behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from vmkv import ExtentPool, HostBackend, InternalError
from vmkv.backend import Access, Op, UnmapOp
from vmkv.errors import DriverError
from vmkv.memory import Exchange, Extent, Mapping, PageTable, Placement, check_pool, exchange
from vmkv.testing import (
    FaultInjectingBackend,
    Scenario,
    check_every_call_can_fail,
    read_bytes,
    write_bytes,
)
from vmkv.units import KiB

PAGE = 4 * KiB
MakePool = Callable[..., ExtentPool]


def _map(table: PageTable, row: int, extents: Sequence[Extent], access: Access) -> None:
    if not extents:
        return
    placement = Placement(row, table.rows[row].end_page, extents)
    table.pool.backend.execute(table.ops_to_map(placement, access))
    table.note_mapped(placement, access)


def _table(pool: ExtentPool, *rows: Sequence[int], row_pages: int = 16) -> PageTable:
    """Rows of fresh extents of these classes; page p of row r is filled with 16 r + p + 1."""
    table = PageTable(pool, len(rows), row_pages)
    for row, classes in enumerate(rows):
        extents = pool.acquire(classes)
        _map(table, row, extents, Access.READ_WRITE)
        pool.disown(extents)
        for page in range(table.rows[row].end_page):
            value = bytes([16 * row + page + 1])
            write_bytes(pool.backend, table.page_address(row, page), value * PAGE)
    return table


def _reads(table: PageTable, row: int) -> list[int]:
    """What each mapped page of a row holds."""
    pages = table.rows[row]
    backend = table.pool.backend
    found = []
    for page in range(pages.first_page, pages.end_page):
        data = read_bytes(backend, table.page_address(row, page), PAGE)
        assert 1 == len(set(data))
        found.append(data[0])
    return found


def _mappings(table: PageTable, row: int, start: int = 0, end: int | None = None) -> list[Mapping]:
    return list(table.rows[row].mappings)[start:end]


def _read_only(mappings: Sequence[Mapping]) -> list[tuple[Extent, Access]]:
    return [(mapping.extent, Access.READ) for mapping in mappings]


def test_exchange_puts_other_extents_behind_the_same_addresses(pool: ExtentPool) -> None:
    """In the middle of a run; its neighbours stay."""
    table = _table(pool, [0, 1, 0], [0, 0, 1])
    old, new = _mappings(table, 0, 1, 2), _mappings(table, 1, 0, 2)
    exchange(pool, [Exchange(table, 0, 1, old, _read_only(new))])
    check_pool(pool)
    assert ([1, 17, 18, 4], [17, 18, 19, 20]) == (_reads(table, 0), _reads(table, 1))
    accesses = [mapping.access for mapping in table.rows[0].mappings]
    assert [Access.READ_WRITE, Access.READ, Access.READ, Access.READ_WRITE] == accesses
    assert 2 * PAGE == pool.stats().free_bytes, "what was replaced is free again"


def test_two_rows_take_over_each_others(pool: ExtentPool) -> None:
    """A swap is one exchange of both: neither is lost on the way."""
    table = _table(pool, [1, 0], [0, 1])
    first, second = _mappings(table, 0), _mappings(table, 1)
    exchange(
        pool,
        [
            Exchange(table, 0, 0, first, _read_only(second)),
            Exchange(table, 1, 0, second, _read_only(first)),
        ],
    )
    check_pool(pool)
    assert ([17, 18, 19], [1, 2, 3]) == (_reads(table, 0), _reads(table, 1))
    assert 0 == pool.stats().free_bytes


def test_exchange_may_shorten_a_run(pool: ExtentPool) -> None:
    """At its end, fewer pages may come back than went."""
    table = _table(pool, [0, 1, 1])
    (fresh,) = pool.acquire([0])
    old = _mappings(table, 0, 1)
    exchange(pool, [Exchange(table, 0, 1, old, [(fresh, Access.READ_WRITE)])])
    pool.disown([fresh])
    check_pool(pool)
    assert 2 == table.rows[0].end_page
    write_bytes(pool.backend, table.page_address(0, 1), b"z" * PAGE)
    assert [1, ord("z")] == _reads(table, 0)


def test_exchange_may_lengthen_a_run(pool: ExtentPool) -> None:
    """Nothing old, and new extents where the run ends; also where pages were retired from."""
    table = _table(pool, [0, 0, 0], [1])
    table.retire_back(0, 1, pool.reclaimer.new_fence())
    new = _read_only(_mappings(table, 1))
    exchange(pool, [Exchange(table, 0, 1, [], new)])
    check_pool(pool)
    assert [1, 17, 18] == _reads(table, 0)


def test_exchange_of_nothing_is_nothing(pool: ExtentPool) -> None:
    """No exchanges, no harm."""
    table = _table(pool, [0, 1])
    exchange(pool, [])
    assert [1, 2, 3] == _reads(table, 0)


def test_one_access_call_for_each_run_of_equal_access(pool: ExtentPool) -> None:
    """Read-only ones come first, then what is the row's own."""
    table = _table(pool, [1, 1], [0, 0])
    fresh = pool.acquire([0, 0])
    new = _read_only(_mappings(table, 1)) + [(each, Access.READ_WRITE) for each in fresh]
    before = pool.backend.calls["mem_set_access"]
    exchange(pool, [Exchange(table, 0, 0, _mappings(table, 0), new)])
    assert 2 == pool.backend.calls["mem_set_access"] - before
    pool.disown(fresh)


def test_nothing_is_unmapped_before_the_device_is_done(
    host: HostBackend, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was submitted may still read the old extents: the fence has passed at each unmap."""
    pool = make_pool(64)
    table = _table(pool, [0, 1], [0, 1])
    old, new = _mappings(table, 0), _mappings(table, 1)
    host.hold_fences()
    passed: list[bool] = []
    run = host.run_until_failure

    def watched(ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        if isinstance(ops[0], UnmapOp):
            passed.append(host.last_passed_fence > last_fence)
        return run(ops)

    last_fence = host.last_passed_fence
    monkeypatch.setattr(host, "run_until_failure", watched)
    exchange(pool, [Exchange(table, 0, 0, old, _read_only(new))])
    host.pass_fences()
    assert passed
    assert all(passed)
    assert [17, 18, 19] == _reads(table, 0)


def test_old_extents_outlive_the_exchange_where_others_need_them(pool: ExtentPool) -> None:
    """A fork that maps what was replaced reads on."""
    table = _table(pool, [1], [1], [])
    shared = _mappings(table, 0)
    _map(table, 2, [mapping.extent for mapping in shared], Access.READ)
    exchange(pool, [Exchange(table, 0, 0, shared, _read_only(_mappings(table, 1)))])
    check_pool(pool)
    assert ([17, 18], [1, 2]) == (_reads(table, 0), _reads(table, 2))


def test_books_that_disagree_are_an_internal_error(pool: ExtentPool) -> None:
    """An exchange of what the row does not hold is our bug, and says so."""
    table = _table(pool, [0, 0], [0])
    with pytest.raises(InternalError, match="row 0 does not hold"):
        table.splice(0, 0, _mappings(table, 1), [])


# ---- failing driver calls -----------------------------------------------------------------


class _State:
    """Three rows that rotate, and one that gets fresh memory, over a backend that fails."""

    def __init__(self, backend: FaultInjectingBackend):
        self.pool = ExtentPool(backend, 64 * PAGE)
        self.table = _table(self.pool, [1, 0], [0, 1], [2], [0, 0])

    def operation(self) -> None:
        pool, table = self.pool, self.table
        rows = [_mappings(table, row) for row in range(4)]
        fresh = pool.acquire([0])
        try:
            exchange(
                pool,
                [
                    Exchange(table, 0, 0, rows[0], _read_only(rows[1])),
                    Exchange(table, 1, 0, rows[1], _read_only(rows[2])),
                    Exchange(table, 2, 0, rows[2], _read_only(rows[0])),
                    Exchange(table, 3, 1, rows[3][1:], [(fresh[0], Access.READ_WRITE)]),
                ],
            )
        finally:
            pool.disown(fresh)

    def observe(self) -> object:
        return [
            (
                _reads(self.table, row),
                [
                    (mapping.first_page, id(mapping.extent), mapping.access)
                    for mapping in self.table.rows[row].mappings
                ],
            )
            for row in range(4)
        ]

    def close(self) -> None:
        self.table.close(lambda: False)
        self.pool.close()


@pytest.mark.parametrize("is_out_of_memory", [False, True], ids=["broken", "full"])
def test_every_call_of_an_exchange_can_fail(is_out_of_memory: bool) -> None:
    """The old comes back where it was, with the access it had: also what was unmapped already."""

    def make_scenario(backend: FaultInjectingBackend) -> Scenario:
        state = _State(backend)
        return Scenario(state.operation, state.observe, lambda: check_pool(state.pool), state.close)

    struck = check_every_call_can_fail(
        lambda: HostBackend(PAGE), make_scenario, is_out_of_memory=is_out_of_memory
    )
    assert {"record_fence", "mem_unmap", "mem_map", "mem_set_access"} <= set(struck)
    assert struck.count("mem_unmap") > 1
    assert struck.count("mem_map") > 3


def test_failure_and_failure_to_undo_it_is_said(
    host: HostBackend, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that goes on failing leaves a row without memory: that is no state to go on in."""
    faulty = FaultInjectingBackend(host)
    pool = make_pool(64, faulty)
    table = _table(pool, [0, 0], [0])
    run = faulty.run_until_failure
    is_broken = True

    def refuse_maps(ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        if is_broken and not isinstance(ops[0], UnmapOp):
            return 0, DriverError("mem_map", -1, "GONE")
        return run(ops)

    monkeypatch.setattr(faulty, "run_until_failure", refuse_maps)
    old = _mappings(table, 0, 1)
    with pytest.raises(InternalError, match="and so did its undoing"):
        exchange(pool, [Exchange(table, 0, 1, old, _read_only(_mappings(table, 1)))])
    # The books are void from here on; what is mapped can still be given back.
    is_broken = False
    table.splice(0, 1, old, [])
    assert [1] == _reads(table, 0)
