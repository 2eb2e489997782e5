"""Pressure: the order in which victims are evicted, and how much each gives up.

Victims are abstract here; parked rows as victims are tested in cache/test_eviction.py.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Collection, Iterable, Sequence

import pytest
from helpers.pools import PAGE, MakePool

from vmkv import ExtentPool, HostBackend, InternalError, OutOfPagesError
from vmkv.core.backend import Access
from vmkv.core.memory import Extent, PageTable, Pressure, Victim, pinned


class _Source:
    """Victims of given sizes in bytes, with a record of how much was evicted of each."""

    def __init__(self, *sizes: int, first_used: int = 0):
        self.left = list(sizes)
        self.taken: list[tuple[int, int]] = []
        self._first_used = first_used

    def victims(self) -> Iterable[Victim]:
        for at, size in enumerate(self.left):
            yield Victim(
                last_used=self._first_used + 10 * at,
                freeable_bytes=size,
                evict=lambda num_bytes, at=at: self._take(at, num_bytes),
            )

    def _take(self, at: int, num_bytes: int) -> int:
        taken = min(num_bytes, self.left[at])
        self.left[at] -= taken
        self.taken.append((at, taken))
        return taken


def _pressure(*sources: _Source) -> Pressure:
    pressure = Pressure()
    for source in sources:
        pressure.add_source(source.victims)
    return pressure


def test_least_recently_used_victim_is_evicted_first() -> None:
    """The last one is evicted only as far as needed."""
    source = _Source(5, 7, 9)
    assert 10 == _pressure(source).evict(10)
    assert [(0, 5), (1, 5)] == source.taken


@pytest.mark.parametrize(("num_bytes", "evicted"), [(0, 0), (1, 1), (21, 21), (22, 21), (99, 21)])
def test_evict_takes_no_more_than_was_asked_for(num_bytes: int, evicted: int) -> None:
    """`evict` returns the bytes that it evicted."""
    source = _Source(5, 7, 9)
    assert evicted == _pressure(source).evict(num_bytes)
    assert 21 - evicted == sum(source.left)


def test_victims_of_all_sources_are_one_queue() -> None:
    """Victims are ordered by their last use, not by source."""
    first, second = _Source(5, 5), _Source(5, 5, first_used=5)
    assert 12 == _pressure(first, second).evict(12)
    assert ([(0, 5), (1, 2)], [(0, 5)]) == (first.taken, second.taken)


def test_evict_may_be_restricted_to_one_source() -> None:
    """A cache that trims evicts nothing of others."""
    first, second = _Source(5), _Source(5)
    assert 5 == _pressure(first, second).evict(99, only=second.victims)
    assert [5] == first.left


def test_source_that_is_gone_is_not_asked() -> None:
    """A source may be removed or collected as garbage; pressure keeps no unclosed cache alive."""
    first, second, third = _Source(5), _Source(5), _Source(5)
    pressure = _pressure(first, second, third)
    pressure.remove_source(second.victims)
    pressure.remove_source(second.victims)
    del third
    gc.collect()
    assert 5 == pressure.evict(99)
    assert [5] == second.left


def test_victims_that_free_nothing_are_not_evicted() -> None:
    source = _Source(0, 5)
    _pressure(source).evict(3)
    assert [(1, 3)] == source.taken


def test_clock_only_goes_forward() -> None:
    """Each tick is later than the one before."""
    pressure = Pressure()
    times = [pressure.tick() for _ in range(5)]
    assert sorted(set(times)) == times


# ---- extents that victims share -----------------------------------------------------------


class _Sharers:
    """Rows that map some of a pool's extents, given by number, and are evicted from their ends."""

    def __init__(self, pool: ExtentPool, *rows: Sequence[int]):
        numbers = sorted({number for row in rows for number in row})
        self.pool = pool
        self.extents = dict(zip(numbers, pool.acquire([0] * len(numbers)), strict=True))
        self.table = PageTable(pool, len(rows), max(map(len, rows)))
        self.live: set[int] = set()
        for row, its in enumerate(rows):
            self.table.map(row, 0, [self.extents[number] for number in its], Access.READ)
        pool.disown(list(self.extents.values()))
        pool.pressure.add_source(self.victims)

    def victims(self) -> Iterable[Victim]:
        for row, pages in enumerate(self.table.rows):
            if row not in self.live:
                yield self._victim(row, [mapping.extent for mapping in pages.mappings])

    def _victim(self, row: int, extents: Sequence[Extent]) -> Victim:
        own = [at for at, each in enumerate(extents) if each.num_live_mappings == 1]

        def evict(num_bytes: int) -> int:
            going = own[max(0, len(own) - -(-num_bytes // PAGE)) :]
            self._retire(row, going[0])
            return len(going) * PAGE

        def give_up(idle: Collection[Extent]) -> None:
            self._retire(row, min(at for at, each in enumerate(extents) if each in idle))

        return Victim(
            last_used=row,
            freeable_bytes=len(own) * PAGE,
            evict=evict,
            shared=[each for each in extents if each.num_live_mappings > 1],
            give_up=give_up,
        )

    def _retire(self, row: int, page: int) -> None:
        self.table.retire_back(row, page, self.pool.reclaimer.new_fence())

    @property
    def num_pages(self) -> list[int]:
        return [pages.num_pages for pages in self.table.rows]


# ---- making room --------------------------------------------------------------------------


def test_make_room_counts_freed_bytes_not_unmapped_ones(
    host: HostBackend, make_pool: MakePool
) -> None:
    """Retired mappings of extents that live rows map free nothing."""
    pool = make_pool(8)
    rows = _Sharers(pool, [0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7])
    rows.live = {0}
    host.hold_fences()
    rows._retire(1, 0)
    host.pass_fences()
    pool.make_room(2 * PAGE)
    assert 2 * PAGE <= pool.available_bytes
    assert [4, 0, 2] == rows.num_pages


def test_make_room_waits_for_retired_memory_before_it_evicts(
    host: HostBackend, make_pool: MakePool
) -> None:
    pool = make_pool(8)
    rows = _Sharers(pool, [0, 1, 2, 3], [4, 5, 6, 7])
    rows.live = {0}
    host.hold_fences()
    rows._retire(0, 2)
    passed = host.last_passed_fence
    pool.make_room(2 * PAGE)
    assert host.last_passed_fence > passed
    host.pass_fences()
    assert [2, 4] == rows.num_pages


def test_acquire_or_evict_takes_from_victims(make_pool: MakePool) -> None:
    """A call gets all extents or none, and raises an error if they cannot be had."""
    pool = make_pool(8)
    rows = _Sharers(pool, [0, 1, 2, 3], [4, 5, 6, 7])
    rows.live = {0}
    with pytest.raises(OutOfPagesError):
        pool.acquire([1])
    extents = pool.acquire_or_evict([1, 0])
    assert [2, 1] == [extent.num_pages for extent in extents]
    with pytest.raises(OutOfPagesError):
        pool.acquire_or_evict([2])
    assert 4 == rows.num_pages[0]
    pool.disown(extents)


# ---- pinned mappings ----------------------------------------------------------------------


def test_pinned_mappings_are_never_retired(make_pool: MakePool) -> None:
    """An attempt to retire them is an internal error."""
    pool = make_pool(8)
    rows = _Sharers(pool, [0, 1, 2])
    mappings = list(rows.table.rows[0].mappings)
    with pinned(pool, mappings[1:2]):
        rows._retire(0, 2)
        with pytest.raises(InternalError, match="is pinned"):
            rows._retire(0, 1)
        with pytest.raises(InternalError, match="is pinned"):
            rows.table.retire_front(0, 2, pool.reclaimer.new_fence())
        assert mappings[:2] == list(rows.table.rows[0].mappings)
    rows._retire(0, 0)


def test_pins_are_counted_and_end_with_their_block(make_pool: MakePool) -> None:
    """Two blocks may pin the same mapping, and a block that fails unpins it."""
    pool = make_pool(8)
    rows = _Sharers(pool, [0])
    mappings = rows.table.rows[0].mappings
    with pinned(pool, mappings):
        with contextlib.suppress(KeyError), pinned(pool, mappings):
            raise KeyError
        assert 1 == mappings[0].num_pins
    assert 0 == mappings[0].num_pins


@pytest.mark.parametrize("num_pages", [1, 3, 6, 7, 99])
def test_one_make_room_evicts_all_that_can_be_evicted(make_pool: MakePool, num_pages: int) -> None:
    """If all is less than was asked for, a second call evicts nothing."""
    pool = make_pool(12)
    rows = _Sharers(pool, [0, 1, 2, 3], [0, 1, 4], [0, 5], [6, 7])
    rows.live = {3}
    before_bytes = pool.available_bytes
    assert pool.make_room(num_pages * PAGE)
    made_bytes = pool.available_bytes - before_bytes
    assert made_bytes >= min(num_pages, 6) * PAGE
    if made_bytes < num_pages * PAGE:
        assert not pool.make_room(PAGE)
        assert [0, 0, 0, 2] == rows.num_pages


def test_make_room_may_be_restricted_to_one_source(make_pool: MakePool) -> None:
    """Other sources keep their memory."""
    pool = make_pool(12)
    mine, others = _Sharers(pool, [0, 1, 2]), _Sharers(pool, [0, 1, 2])
    assert pool.make_room(99 * PAGE, only=mine.victims)
    assert ([0], [3]) == (mine.num_pages, others.num_pages)
    assert not pool.make_room(PAGE, only=mine.victims)
