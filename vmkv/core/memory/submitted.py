"""I10: check the writes of submitted steps until their fences pass. Off by default.

    I10 w in writes(step), p in pages(w), from the beginning of the step's submission to its fence:
        mapped(p) and access(p) == read-write; and not shared(extent(p)), nor retired(p), until the
        submission ends

`writes(step)` are tokens, states and checkpoints. The extent may become shared or retired later,
because later steps, and the fence of what is retired, are ordered behind the write.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import DriverError, InternalError
from ...units import Address
from ..backend import Access, Fence
from .page_table import Extent, PageTable, RetiredMapping
from .reclaim import Reclaimer


class WriteRange(NamedTuple):
    """The pages `[first_page, end_page)` of `row` of `table`."""

    table: PageTable
    row: int
    first_page: int
    end_page: int


@dataclass(frozen=True)
class _Written:
    """An extent, and the address where a submitted step may still write it."""

    address: Address
    extent: Extent


class SubmittedWrites:
    """The write ranges of steps whose fences have not passed."""

    def __init__(self, reclaimer: Reclaimer, lock: threading.RLock):
        self._reclaimer, self._lock = reclaimer, lock
        self._submitting: list[list[_Written]] = []
        self._steps: list[tuple[Fence, list[_Written]]] = []

    @contextlib.contextmanager
    def submitting(self, ranges: Sequence[WriteRange]) -> Iterator[None]:
        """Guard the submission of a step; InternalError before it if a page may not be written."""
        with self._lock:
            written = [each for it in ranges for each in _writable(it)]
            self._submitting.append(written)
        try:
            yield
        finally:
            # The step is submitted: losing its check must not fail it.
            with self._lock, contextlib.suppress(DriverError):
                self._submitting = [each for each in self._submitting if each is not written]
                self._steps = [step for step in self._steps if not step[0].has_passed()]
                self._steps.append((self._reclaimer.new_fence(), written))

    def check_retired(self, mappings: Iterable[RetiredMapping]) -> None:
        """Raise InternalError if a step that is being submitted writes what is to be retired."""
        written = {each.address for its in self._submitting for each in its}
        for address, extent in mappings:
            if address in written:
                raise InternalError(f"I10: {extent} is retired while a step that writes it begins")

    def check(self, tables: Sequence[PageTable]) -> None:
        """Raise InternalError if I10 does not hold for a step whose fence has not passed."""
        under_way = [step for step in self._steps if not step[0].has_passed()]
        if not under_way:
            return
        retired = {each.address: each.extent for each in self._reclaimer.retired_mappings()}
        live = {
            table.page_address(row, mapping.first_page): mapping
            for table in tables
            for row, pages in enumerate(table.rows)
            for mapping in pages.mappings
        }
        for _, written in under_way:
            for each in written:
                mapping = live.get(each.address)
                if mapping is None or mapping.extent is not each.extent:
                    if retired.get(each.address) is not each.extent:
                        raise InternalError(f"I10: {each} was unmapped under a submitted step")
                elif mapping.access is not Access.READ_WRITE:
                    raise InternalError(f"I10: {each} was protected under a submitted step")


def _writable(it: WriteRange) -> Iterator[_Written]:
    """Yield the extents behind a range; InternalError if its row may not write one of them."""
    end_page = it.first_page
    for mapping in it.table.overlapping(it.row, it.first_page, it.end_page):
        if mapping.first_page > end_page:
            break
        if mapping.is_guarded:
            raise InternalError(
                f"I10: a step would write pages [{it.first_page}, {it.end_page}) of row {it.row}, "
                f"of which {mapping} is not its own to write"
            )
        end_page = mapping.end_page
        yield _Written(it.table.page_address(it.row, mapping.first_page), mapping.extent)
    if end_page < it.end_page:
        raise InternalError(
            f"I10: a step would write pages [{it.first_page}, {it.end_page}) of row {it.row}, "
            f"which is mapped to page {end_page} only"
        )
