"""Acquire and release of free extents work without the pool's lock, beside any locked operation."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest
from helpers.pools import PAGE, MakePool

from vmkv import ClosedError, ConfigError, ExtentPool, HostBackend, OutOfPagesError
from vmkv.core._native import References, count_references
from vmkv.core.memory import Extent, PageTable, Victim, check_pool

NUM_THREADS = 4


@contextmanager
def _threads(work: Callable[[random.Random], None], count: int = NUM_THREADS) -> Iterator[None]:
    """Run `work` in threads beside the block, each with a random generator; they must end."""
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(random.Random(number))
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(60)
        assert [] == [thread for thread in threads if thread.is_alive()], "a thread is held up"
        assert [] == failures


def _hand_over(pool: ExtentPool, choose: random.Random, owners: dict[int, int]) -> None:
    """Acquire some extents, own and disown them once more, and release them."""
    extents = pool.acquire([choose.randrange(3) for _ in range(choose.randrange(4))])
    mine = threading.get_ident()
    for extent in extents:
        assert mine == owners.setdefault(extent.handle, mine), "one handle for two threads"
    pool.own(extents)
    pool.disown(extents)
    assert [1] * len(extents) == [extent.num_owners for extent in extents]
    for extent in extents:
        del owners[extent.handle]
    pool.disown(extents)


def test_acquire_and_disown_do_not_take_the_lock(pool: ExtentPool) -> None:
    """The threads acquire and release free extents while the main thread holds the lock."""
    free = [size_class for size_class in range(3) for _ in range(3 * NUM_THREADS)]
    pool.set_budget(100 * PAGE)
    pool.disown(pool.acquire(free))
    before, calls = pool.stats(), pool.backend.calls.copy()
    owners: dict[int, int] = {}

    def work(choose: random.Random) -> None:
        for _ in range(300):
            _hand_over(pool, choose, owners)

    with pool.lock, _threads(work):
        pass  # The threads end before the lock is released.
    assert (before, calls) == (pool.stats(), pool.backend.calls)
    check_pool(pool)


class _Parked:
    """Rows without live sequences, which `pressure` may evict."""

    def __init__(self, pool: ExtentPool, num_rows: int):
        self.pool = pool
        self.table = PageTable(pool, num_rows, 8)
        pool.pressure.add_source(self.victims)

    def fill(self, row: int, size_classes: list[int]) -> None:
        """Map new extents in a row that has none, if they can be acquired."""
        try:
            extents = self.pool.acquire_or_evict(size_classes)
        except OutOfPagesError:
            return
        with self.pool.lock:
            row_range = self.table.page_address(row, 0), self.table.page_address(row, 8)
            self.pool.reclaimer.wait_for([row_range])
            if not self.table.rows[row].mappings:
                self.table.map(row, 0, extents)
        self.pool.disown(extents)

    def victims(self) -> Iterable[Victim]:
        for row, pages in enumerate(self.table.rows):
            num_bytes = sum(each.extent.num_bytes for each in pages.mappings)
            yield Victim(0, num_bytes, lambda wanted, row=row: self._evict(row))

    def _evict(self, row: int) -> int:
        evicted_bytes = sum(each.extent.num_bytes for each in self.table.rows[row].mappings)
        self.table.retire_back(row, 0, self.pool.reclaimer.new_fence())
        return evicted_bytes


def test_lock_free_acquisition_beside_locked_operations(make_pool: MakePool) -> None:
    """Eviction, conversion, trim and budget changes lose no extent and give none to two threads."""
    pool = make_pool(40)
    parked = _Parked(pool, 4)
    owners: dict[int, int] = {}
    is_done = threading.Event()
    num_granted = 0

    def work(choose: random.Random) -> None:
        nonlocal num_granted
        while not is_done.is_set():
            try:
                _hand_over(pool, choose, owners)
                num_granted += 1
            except OutOfPagesError:
                pass

    choose = random.Random(7)
    with _threads(work):
        for _ in range(150):
            parked.fill(choose.randrange(4), [choose.randrange(3) for _ in range(2)])
            pool.disown(_acquired(pool, [3] * choose.randrange(3)))  # Converts.
            pool.make_room(choose.randrange(10) * PAGE)
            try:
                pool.set_budget(choose.randrange(10, 40) * PAGE)
            except ConfigError:
                pass
            stats = pool.stats()
            assert stats.created_bytes <= stats.budget_bytes
            assert pool.backend.usage().physical_bytes <= 40 * PAGE
            pool.trim(choose.randrange(3) * PAGE)
        is_done.set()
    assert num_granted
    assert not owners
    check_pool(pool)
    pool.give_back()
    pool.trim()
    assert 0 == pool.stats().created_bytes == pool.backend.usage().physical_bytes


def _acquired(pool: ExtentPool, size_classes: list[int]) -> list[Extent]:
    try:
        return pool.acquire(size_classes)
    except OutOfPagesError:
        return []


def test_acquisition_beside_close_gets_extents_or_an_error(host: HostBackend) -> None:
    """`close` releases no extent that a thread has acquired."""
    pool = ExtentPool(host, 64 * PAGE)
    pool.disown(pool.acquire([0] * 64))
    held: list[Extent] = []
    start = threading.Barrier(NUM_THREADS + 1)

    def work(choose: random.Random) -> None:
        start.wait()
        while True:
            try:
                held.extend(pool.acquire([0]))
            except OutOfPagesError:  # Until it is closed.
                continue
            except ClosedError:
                return

    with _threads(work):
        start.wait()
        pool.close()
    assert len(held) == len({extent.handle for extent in held})
    assert len(held) * PAGE == host.usage().physical_bytes


def test_last_reference_is_found_by_one_thread(pool: ExtentPool) -> None:
    """Threads that disown the same extents at once free each extent once."""
    extents = pool.acquire([0] * 16)
    for _ in range(NUM_THREADS - 1):
        pool.own(extents)
    start = threading.Barrier(NUM_THREADS)

    def work(choose: random.Random) -> None:
        mine = list(extents)
        choose.shuffle(mine)
        start.wait()
        for extent in mine:
            pool.disown([extent])

    with _threads(work):
        pass
    assert 16 == pool.count_free(0)
    check_pool(pool)


def test_counts_stay_within_their_bits() -> None:
    """The largest count fits; one more is refused and leaves the neighbouring counts alone."""
    counted, most = References(), 2**21 - 1
    count_references([counted], most, most, most)
    for one in ((1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 0, 1)):
        with pytest.raises(ValueError, match="cannot have"):
            count_references([counted], *one)
    assert (most, most, most) == (
        counted.num_mappings,
        counted.num_live_mappings,
        counted.num_owners,
    )
    assert [counted] == count_references([counted], -most, -most, -most)
