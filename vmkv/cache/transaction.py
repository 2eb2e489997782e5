"""Growing rows: plan, acquire, map; everything or nothing.

A transaction covers any number of rows in any number of layer groups. The plan is made first
and costs nothing; the pool grants every extent of it or none; all of it is mapped in one
driver batch that undoes itself if any call fails. So no failure leaves anything half done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..backend import Access, Op
from ..errors import DriverError, OutOfPagesError
from ..memory import Extent, ExtentPool, Placement, size_classes
from .layer_group import LayerGroup


class Target(NamedTuple):
    """A row that must hold `num_tokens`; no later query is before `num_past_tokens`."""

    row: int
    num_tokens: int
    num_past_tokens: int
    tenant: object = None


@dataclass(frozen=True)
class Step:
    """One row of one group that must grow: extents of these classes, from this page on."""

    group: LayerGroup
    row: int
    first_page: int
    classes: Sequence[int]
    tenant: object = None

    @property
    def num_pages(self) -> int:
        """Pages to map."""
        return sum(1 << size_class for size_class in self.classes)


def grow(
    pool: ExtentPool,
    groups: Sequence[LayerGroup],
    targets: Sequence[Target],
    overread_tokens: int,
    stream: int,
) -> None:
    """Map what `targets` lack in `groups`.

    Args:
        pool: Where extents come from.
        groups: The groups to grow in.
        targets: The rows, each once.
        overread_tokens: Tokens past the end that must be mapped as well.
        stream: The stream on which new memory is scrubbed.

    Where the pool is short, parked rows of all its caches give way, and only what is needed is
    mapped.

    Raises:
        OutOfPagesError: The pool cannot supply everything. Nothing was mapped.
        DriverError: The driver refused. Nothing was mapped.
    """
    steps = plan(groups, targets, overread_tokens, exactly=False)
    if not steps:
        return
    try:
        _execute(pool, steps, stream, pool.acquire)
    except OutOfPagesError:
        steps = plan(groups, targets, overread_tokens, exactly=True)
        _execute(pool, steps, stream, pool.acquire_or_evict)


def plan(
    groups: Sequence[LayerGroup],
    targets: Iterable[Target],
    overread_tokens: int,
    *,
    exactly: bool,
) -> list[Step]:
    """What to map where. Changes nothing.

    With `exactly`, only what is needed; else a growth quantum at least (see `growth.py`).
    """
    steps = []
    for row, num_tokens, num_past_tokens, tenant in targets:
        if not num_tokens:
            continue
        for group in groups:
            resident_until = min(num_tokens + overread_tokens, group.geometry.row_tokens)
            first_page = group.next_page(row, num_past_tokens)
            num_pages = group.pages_to_add(first_page, resident_until, exactly=exactly)
            if num_pages:
                classes = tuple(size_classes(num_pages, group.largest_class))
                steps.append(Step(group, row, first_page, classes, tenant))
    return steps


def _execute(
    pool: ExtentPool,
    steps: Sequence[Step],
    stream: int,
    acquire: Callable[[Sequence[int]], list[Extent]],
) -> None:
    _wait_for_retired_at(pool, steps)
    extents = acquire([size_class for step in steps for size_class in step.classes])
    try:
        supply = iter(extents)
        placements = [
            Placement(step.row, step.first_page, [next(supply) for _ in step.classes])
            for step in steps
        ]
        ops: list[Op] = []
        for step, placement in zip(steps, placements, strict=True):
            ops += step.group.table.ops_to_map(placement, Access.READ_WRITE)
        pool.backend.execute(ops)
        for step, placement in zip(steps, placements, strict=True):
            step.group.table.note_mapped(placement, Access.READ_WRITE)
        _scrub(pool, steps, placements, stream)
    finally:
        # From here on the mappings hold the extents; after a failure nobody does.
        pool.disown(extents)


def _scrub(
    pool: ExtentPool, steps: Sequence[Step], placements: Sequence[Placement], stream: int
) -> None:
    """Overwrite what the new extents may still hold of others; note for whom they are now."""
    try:
        for step, placement in zip(steps, placements, strict=True):
            address = step.group.table.page_address(step.row, placement.first_page)
            pool.prepare(placement.extents, address, step.tenant, stream)
    except DriverError:
        # Fills may be under way, so it cannot simply be unmapped.
        fence = pool.reclaimer.new_fence()
        for step in steps:
            step.group.table.retire_back(step.row, step.first_page, fence)
        raise


def _wait_for_retired_at(pool: ExtentPool, steps: Sequence[Step]) -> None:
    """Where pages were retired from the end of a row, they must be gone before new ones come."""
    pool.reclaimer.poll()
    for step in steps:
        table = step.group.table
        start = table.page_address(step.row, step.first_page)
        end = table.page_address(step.row, step.first_page + step.num_pages)
        pool.reclaimer.wait_for_range(start, end)
