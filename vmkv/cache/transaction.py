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
from ..errors import OutOfPagesError
from ..memory import ExtentPool, Placement, size_classes
from .layer_group import LayerGroup


class Target(NamedTuple):
    """A row that must hold `num_tokens`; no later query is before `num_past_tokens`."""

    row: int
    num_tokens: int
    num_past_tokens: int


@dataclass(frozen=True)
class Step:
    """One row of one group that must grow: extents of these classes, from this page on."""

    group: LayerGroup
    row: int
    first_page: int
    classes: Sequence[int]


def grow(
    pool: ExtentPool,
    groups: Sequence[LayerGroup],
    targets: Sequence[Target],
    overread_tokens: int,
    make_room: Callable[[int], None],
) -> None:
    """Map what `targets` lack in `groups`.

    Args:
        pool: Where extents come from.
        groups: The groups to grow in.
        targets: The rows, each once.
        overread_tokens: Tokens past the end that must be mapped as well.
        make_room: Called with the bytes that are needed when the pool is short, before the
            second and last attempt, which maps only what is needed.

    Raises:
        OutOfPagesError: The pool cannot supply everything. Nothing was mapped.
        DriverError: The driver refused. Nothing was mapped.
    """
    steps = plan(groups, targets, overread_tokens, exactly=False)
    if not steps:
        return
    try:
        _execute(pool, steps)
    except OutOfPagesError:
        steps = plan(groups, targets, overread_tokens, exactly=True)
        make_room(sum(pool.page_bytes << each for step in steps for each in step.classes))
        _execute(pool, steps)


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
    for row, num_tokens, num_past_tokens in targets:
        if not num_tokens:
            continue
        for group in groups:
            resident_until = min(num_tokens + overread_tokens, group.geometry.row_tokens)
            first_page = group.next_page(row, num_past_tokens)
            num_pages = group.pages_to_add(first_page, resident_until, exactly=exactly)
            if num_pages:
                classes = tuple(size_classes(num_pages, group.largest_class))
                steps.append(Step(group, row, first_page, classes))
    return steps


def _execute(pool: ExtentPool, steps: Sequence[Step]) -> None:
    _wait_for_retired_at(pool, steps)
    extents = pool.acquire([size_class for step in steps for size_class in step.classes])
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
    finally:
        # From here on the mappings hold the extents; after a failure nobody does.
        pool.disown(extents)


def _wait_for_retired_at(pool: ExtentPool, steps: Sequence[Step]) -> None:
    """Where pages were retired from the end of a row, they must be gone before new ones come."""
    pool.reclaimer.poll()
    for step in steps:
        table = step.group.table
        start = table.page_address(step.row, step.first_page)
        end = table.page_address(step.row, table.row_pages)
        if pool.reclaimer.has_retired_in(start, end):
            pool.reclaimer.wait()
            return
