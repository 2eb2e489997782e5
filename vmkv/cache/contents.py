"""What rows hold in all groups, and so what can begin from them. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from .layer_group import LayerGroup


def keeps(groups: Sequence[LayerGroup], row: int, num_tokens: int) -> bool:
    """Whether `row` has all that a query after `num_tokens` tokens sees."""
    return all(group.keeps(row, num_tokens) and group.reaches(row, num_tokens) for group in groups)


def resident_tokens(groups: Sequence[LayerGroup], row: int) -> int:
    """Tokens of `row` up to which memory is mapped."""
    return min((group.resident_tokens(row) for group in groups), default=0)


def can_begin(groups: Sequence[LayerGroup], row: int, num_tokens: int, overread: int) -> bool:
    """Whether all is mapped that a sequence of `num_tokens` must have, `overread` included."""
    return all(
        group.resident_tokens(row) >= min(num_tokens + overread, group.geometry.row_tokens)
        for group in groups
    )


def can_extend(groups: Sequence[LayerGroup], row: int, num_tokens: int) -> bool:
    """Whether `row` can be written from `num_tokens` on without a copy."""
    return not any(
        mapping.extent.is_shared
        for group in groups
        for mapping in group.table.overlapping(
            row,
            group.geometry.whole_pages_below(num_tokens),
            group.geometry.pages_for(num_tokens),
        )
    )


def whole_bytes(groups: Sequence[LayerGroup], row: int, num_tokens: int) -> int:
    """What a fork of `row` at `num_tokens` need not copy."""
    total_bytes = 0
    for group in groups:
        end_page = group.geometry.whole_pages_below(num_tokens)
        for mapping in group.table.overlapping(row, 0, end_page):
            total_bytes += mapping.extent.num_bytes if mapping.end_page <= end_page else 0
    return total_bytes
