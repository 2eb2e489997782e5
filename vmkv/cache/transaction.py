"""Growing rows: plan, then change; everything or nothing.

A growth covers any number of rows in any number of layer groups. The plan is made first and costs
nothing; all of it is one change of mappings, so no failure leaves anything half done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..errors import OutOfPagesError
from ..memory import Extent, ExtentPool, RowChange, change, size_classes
from .layer_group import LayerGroup


class Target(NamedTuple):
    """A row that must hold `num_tokens`; no later query is before `num_past_tokens`."""

    row: int
    num_tokens: int
    num_past_tokens: int
    tenant: object = None


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
    try:
        _map(pool, plan(groups, targets, overread_tokens, exactly=False), stream, pool.acquire)
    except OutOfPagesError:
        parts = plan(groups, targets, overread_tokens, exactly=True)
        _map(pool, parts, stream, pool.acquire_or_evict)


def _map(
    pool: ExtentPool,
    parts: Sequence[RowChange],
    stream: int,
    acquire: Callable[[Sequence[int]], list[Extent]],
) -> None:
    if parts:
        pool.reclaimer.poll()
        with change(pool, parts, acquire=acquire) as made:
            made.map(stream)
            made.fill(stream)


def plan(
    groups: Sequence[LayerGroup],
    targets: Iterable[Target],
    overread_tokens: int,
    *,
    exactly: bool,
) -> list[RowChange]:
    """What to map where. Changes nothing.

    With `exactly`, only what is needed; else a growth quantum at least (see `growth.py`).
    """
    parts = []
    for row, num_tokens, num_past_tokens, tenant in targets:
        if not num_tokens:
            continue
        for group in groups:
            resident_until = min(num_tokens + overread_tokens, group.geometry.row_tokens)
            first_page = group.next_page(row, num_past_tokens)
            num_pages = group.pages_to_add(first_page, resident_until, exactly=exactly)
            if num_pages:
                classes = tuple(size_classes(num_pages, group.largest_class))
                parts.append(RowChange(group.table, row, first_page, classes, tenant))
    return parts
