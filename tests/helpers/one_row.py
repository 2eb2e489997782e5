"""A page table with one row, for tests of mappings."""

from __future__ import annotations

from vmkv import ExtentPool
from vmkv.core.memory import PageTable


def table_of(pool: ExtentPool, *classes: int) -> PageTable:
    """Make a table whose only row maps extents of these classes."""
    table = PageTable(pool, num_rows=1, row_pages=32)
    extents = pool.acquire(classes)
    table.map(0, 0, extents)
    pool.disown(extents)
    return table
