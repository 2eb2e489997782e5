"""Staging: addresses under which memory is filled or read before it has a place in a row.

Copies go from address to address, and memory that is to take another's place, or that holds a
sequence which is swapped out, has none of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..backend import Access
from .extent import Extent
from .page_table import PageTable, Placement
from .pool import ExtentPool


@contextmanager
def staged(pool: ExtentPool, extents: Sequence[Extent]) -> Iterator[PageTable]:
    """A table of one row with `extents` mapped from its start on, for the length of a block.

    At its end it waits for what was submitted in it.

    Raises:
        OutOfAddressSpaceError, DriverError: There is no such table; or at the end, it could not
            be closed yet, and the pool does it later.
    """
    pool.reclaimer.free_idle_reservations()
    table = PageTable(pool, 1, sum(extent.num_pages for extent in extents))
    try:
        placement = Placement(0, 0, extents)
        pool.backend.execute(table.ops_to_map(placement, Access.READ_WRITE))
        table.note_mapped(placement, Access.READ_WRITE)
        yield table
    finally:
        try:
            table.close(lambda: False)
        except BaseException:
            pool.closer.close_later(table.close_behind)
            raise
