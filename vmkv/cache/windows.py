"""What sliding windows leave behind, retired as they pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..memory import Reclaimer
from .layer_group import LayerGroup


def retire_behind(
    groups: Sequence[LayerGroup], lengths: Iterable[tuple[int, int]], reclaimer: Reclaimer
) -> None:
    """Retire what no later query of the rows `(row, num_tokens)` can make a kernel read."""
    for row, num_tokens in lengths:
        for group in groups:
            if group.has_front_to_retire(row, num_tokens):
                group.retire_front(row, num_tokens, reclaimer.new_fence())


def begin_anew(groups: Sequence[LayerGroup], row: int, reclaimer: Reclaimer) -> None:
    """`row` will be written from its first token on: it remembers nothing of what was before.

    Retires runs that a window has moved off the row's start: no new beginning can use them.
    """
    displaced = [group for group in groups if group.table.rows[row].first_page]
    if displaced:
        fence = reclaimer.new_fence()
        for group in displaced:
            group.retire_from(row, 0, fence)
    for group in groups:
        group.begin_row(row)
