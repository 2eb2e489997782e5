"""Random operations on a pool and on a model of it; all numbers and invariants agree at every step.

Extents are acquired, owned, mapped into rows, retired at either end while the device is busy or
idle, and disowned; the budget moves; driver calls fail. Contents are tested in
test_cache_machine.py.
"""

from __future__ import annotations

from collections import deque

import pytest
from helpers.naive_models import ModelPool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vmkv import BackendUsage, ConfigError, ExtentPool, HostBackend, OutOfPagesError
from vmkv.core.memory import Extent, PageTable, check_pool
from vmkv.errors import DriverError
from vmkv.testing import FaultInjectingBackend
from vmkv.units import KiB

PAGE = 4 * KiB
NUM_ROWS, ROW_PAGES = 2, 24
classes = st.lists(st.integers(0, 3), min_size=1, max_size=4)
rows = st.integers(0, NUM_ROWS - 1)
pages = st.integers(0, ROW_PAGES)


class PoolMachine(RuleBasedStateMachine):
    """One pool with one table of two rows, and the model's numbers for them."""

    def __init__(self) -> None:
        super().__init__()
        self.host = HostBackend(PAGE)
        self.backend = FaultInjectingBackend(self.host)
        self.pool = ExtentPool(self.backend, 40 * PAGE)
        self.table = PageTable(self.pool, NUM_ROWS, ROW_PAGES)
        self.model = ModelPool(budget_pages=40)
        self.held: list[list[Extent]] = []
        # Per row, the size classes mapped, in order; and the retired ones, oldest first.
        self.mapped: list[deque[int]] = [deque() for _ in range(NUM_ROWS)]
        self.first_page = [0] * NUM_ROWS
        self.retired: deque[list[int]] = deque()
        self.is_held_back = False

    # ---- owning -----------------------------------------------------------------------

    @rule(wanted=classes)
    def acquire(self, wanted: list[int]) -> None:
        possible = self.model.acquire(wanted)
        if not possible:
            with pytest.raises(OutOfPagesError) as caught:
                self.pool.acquire(wanted)
            available = self.model.budget_pages - self.model.in_use_pages
            wanted_bytes = sum(PAGE << each for each in wanted)
            assert wanted_bytes == caught.value.needed_bytes
            assert available * PAGE == caught.value.free_bytes
            return
        extents = self.pool.acquire(wanted)
        assert wanted == [extent.size_class for extent in extents]
        self.held.append(extents)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def disown(self, data: st.DataObject) -> None:
        extents = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.disown(extents)
        for extent in extents:
            self.model.give_back(extent.size_class)

    @precondition(lambda self: self.held)
    @rule()
    def own_twice_and_let_go_once(self) -> None:
        self.pool.own(self.held[-1])
        self.pool.disown(self.held[-1])

    # ---- mapping ----------------------------------------------------------------------

    @precondition(lambda self: self.held)
    @rule(row=rows)
    def map_held(self, row: int) -> None:
        """Map the extents acquired last at the end of a row, which then holds them."""
        extents = self.held[-1]
        start = self.table.rows[row].end_page
        num_pages = sum(extent.num_pages for extent in extents)
        end = start + num_pages
        here = self.table.page_address(row, start), self.table.page_address(row, ROW_PAGES)
        if end > ROW_PAGES or self.pool.reclaimer.has_retired_in([here]):
            return
        self.table.map(row, start, extents)
        self.pool.disown(self.held.pop())
        if not self.mapped[row]:
            self.first_page[row] = start
        self.mapped[row].extend(extent.size_class for extent in extents)

    @rule(row=rows, page=pages)
    def retire_back(self, row: int, page: int) -> None:
        self.table.retire_back(row, page, self.pool.reclaimer.new_fence())
        taken = []
        ends = self.first_page[row] + sum(1 << each for each in self.mapped[row])
        while self.mapped[row] and ends - (1 << self.mapped[row][-1]) >= page:
            taken.append(self.mapped[row].pop())
            ends -= 1 << taken[-1]
        self._note_retired(taken)

    @rule(row=rows, page=pages)
    def retire_front(self, row: int, page: int) -> None:
        self.table.retire_front(row, page, self.pool.reclaimer.new_fence())
        taken = []
        while self.mapped[row] and self.first_page[row] + (1 << self.mapped[row][0]) <= page:
            taken.append(self.mapped[row].popleft())
            self.first_page[row] += 1 << taken[-1]
        self._note_retired(taken)

    def _note_retired(self, taken: list[int]) -> None:
        if taken:
            self.retired.append(taken)

    # ---- the device catches up --------------------------------------------------------

    @rule()
    def poll(self) -> None:
        bytes_unmapped = self.pool.reclaimer.poll()
        passed = 0 if self.is_held_back else self._reclaim_all()
        if not self.is_held_back:
            assert passed * PAGE == bytes_unmapped

    @precondition(lambda self: not self.is_held_back)
    @rule()
    def hold_fences(self) -> None:
        self.pool.reclaimer.poll()
        self._reclaim_all()
        self.host.hold_fences()
        self.is_held_back = True
        self.unmaps_at_hold = self.host.calls["mem_unmap"]

    @precondition(lambda self: self.is_held_back)
    @rule()
    def pass_fences(self) -> None:
        self.host.pass_fences()
        self.is_held_back = False
        self.poll()

    @rule()
    def wait(self) -> None:
        assert self._reclaim_all() * PAGE == self.pool.reclaimer.wait()
        if self.is_held_back:
            self.unmaps_at_hold = self.host.calls["mem_unmap"]

    def _reclaim_all(self) -> int:
        """Free all retired extents in the model; return their pages."""
        num_pages = 0
        for taken in self.retired:
            for size_class in taken:
                self.model.give_back(size_class)
                num_pages += 1 << size_class
        self.retired.clear()
        return num_pages

    # ---- memory and budget ------------------------------------------------------------

    @rule(num_pages=st.integers(0, 20))
    def trim(self, num_pages: int) -> None:
        self._poll_quietly()
        assert self.model.trim(num_pages) * PAGE == self.pool.trim(num_pages * PAGE)

    @rule(num_pages=st.integers(0, 60))
    def set_budget(self, num_pages: int) -> None:
        if num_pages < self.model.in_use_pages:
            self.wait()  # As the pool does: retired memory is no longer in use.
        possible = self.model.set_budget(num_pages)
        try:
            self.pool.set_budget(num_pages * PAGE)
        except ConfigError:
            assert not possible
        else:
            assert possible

    @rule(wanted=classes, fail_at=st.integers(1, 6), is_full=st.booleans())
    def acquire_with_fault(self, wanted: list[int], fail_at: int, is_full: bool) -> None:
        """A driver call fails: the acquisition takes nothing, or succeeds by other calls."""
        before = self.model.in_use_pages
        self.backend.arm(fail_at, is_out_of_memory=is_full)
        try:
            extents = self.pool.acquire(wanted)
        except (OutOfPagesError, DriverError):
            extents = None
        self.backend.arm(0)
        if extents is not None:
            self.held.append(extents)
        # A failure may release free extents, but does not change those in use.
        self.model.created_pages = self.pool.stats().created_bytes // PAGE
        for size_class in range(self.pool.largest_class + 1):
            self.model.free[size_class] = self.pool.count_free(size_class)
        taken = sum(extent.num_pages for extent in extents or ())
        assert before + taken == self.model.in_use_pages

    def _poll_quietly(self) -> None:
        if not self.is_held_back:
            self._reclaim_all()

    # ---- always -----------------------------------------------------------------------

    @invariant()
    def invariants_hold(self) -> None:
        check_pool(self.pool)

    @invariant()
    def numbers_are_the_models(self) -> None:
        stats = self.pool.stats()
        retired_pages = sum(1 << each for taken in self.retired for each in taken)
        wanted = (
            self.model.budget_pages,
            self.model.created_pages,
            self.model.free_pages,
            retired_pages,
            self.model.in_use_pages - retired_pages,
        )
        got = (
            stats.budget_bytes,
            stats.created_bytes,
            stats.free_bytes,
            stats.retired_bytes,
            stats.resident_bytes,
        )
        assert tuple(pages * PAGE for pages in wanted) == got
        for size_class in range(self.pool.largest_class + 1):
            assert self.model.free[size_class] == self.pool.count_free(size_class)

    @invariant()
    def rows_are_the_models(self) -> None:
        for row in range(NUM_ROWS):
            got = [mapping.extent.size_class for mapping in self.table.rows[row].mappings]
            assert list(self.mapped[row]) == got

    @invariant()
    def nothing_is_unmapped_before_its_fence(self) -> None:
        if self.is_held_back:
            assert self.unmaps_at_hold == self.host.calls["mem_unmap"]

    def teardown(self) -> None:
        for extents in self.held:
            self.pool.disown(extents)
        self.table.close(lambda: False)
        self.pool.close()
        assert BackendUsage() == self.host.usage()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=3 * settings().max_examples, stateful_step_count=40
)
