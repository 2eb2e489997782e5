"""Who may write: the right is taken from what is shared, and given back to a sole holder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..backend import Access, Op
from .mapping import MappedRows, Mapping
from .page_table import PageTable
from .pool import ExtentPool


def protect(pool: ExtentPool, shared: Iterable[tuple[MappedRows, int, Sequence[Mapping]]]) -> None:
    """Make mappings of some rows, which are about to be shared, read-only.

    Args:
        pool: The pool.
        shared: Tables, rows, and mappings of theirs.

    Raises:
        DriverError: Some may be read-only already, which is harmless.

    Cost: waits for the device, since a kernel still writing what it might would fault; and an
        access change for each mapping. Nothing where all are read-only.
    """
    ops: list[Op] = []
    writable: list[Mapping] = []
    for table, row, mappings in shared:
        pages = table.rows[row]
        for mapping in mappings:
            pages.note_shared(mapping)
        its = [mapping for mapping in mappings if mapping.access is Access.READ_WRITE]
        ops += table.ops_to_set_access(row, its, Access.READ)
        writable += its
    if ops:
        pool.reclaimer.new_fence().wait()
        # In the books first: after a failure, more is said to be read-only than is, which is safe.
        for mapping in writable:
            mapping.access = Access.READ
        pool.backend.execute(ops)


def make_writable(table: PageTable, row: int, mappings: Sequence[Mapping]) -> None:
    """Let a row write what nobody else has any more.

    Raises:
        DriverError: Some may be writable; the books still say that they are not.
    """
    readonly = [mapping for mapping in mappings if mapping.access is Access.READ]
    table.pool.backend.execute(table.ops_to_set_access(row, readonly, Access.READ_WRITE))
    for mapping in readonly:
        mapping.access = Access.READ_WRITE
