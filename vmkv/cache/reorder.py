"""Beams: every row of a batch takes over what another one holds, at its own addresses.

What two rows have in common already costs nothing. Large extents beyond that are mapped again;
the rest, a tail that the beams have written since they parted, is copied through a buffer,
because a row may be read and overwritten at once.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

import torch

from ..backend import Access, CopyOp
from ..errors import ConfigError
from ..memory import Mapping, RowChange, change, make_writable, size_classes
from ..units import Address
from .cost import CostModel
from .layer_group import LayerGroup
from .row_space import LiveRow, RowSpace


def reorder(space: RowSpace, beams: Sequence[LiveRow], sources: Sequence[int]) -> None:
    """See `KVCache.reorder`."""
    space.check_open()
    _check_beams(space, beams, sources)
    rows = [(beams[source].row, beam.row) for source, beam in zip(sources, beams, strict=True)]
    rows = [(source, target) for source, target in rows if source != target]
    if not rows or not beams[0].num_tokens:
        return
    space.note_stream()
    pool, stream, num_tokens = space.pool, space.current_stream(), beams[0].num_tokens
    pool.backend.join_streams(stream)
    tenants = {beam.row: beam.tenant for beam in beams}
    moves = [
        move for group in space.groups for move in _plan(space, group, rows, num_tokens, tenants)
    ]
    changes = [move.change for move in moves if move.change is not None]
    with change(pool, changes, reads=[read for move in moves for read in move.reads]) as made:
        # Torch's allocator keeps the buffer for this stream until the copies are through.
        copies, _buffer = _through_buffer(space, moves, stream)
        for move in moves:
            make_writable(move.group.table, move.target, move.readonly)
        made.map(stream)
        try:
            made.fill(stream, copies)
        except BaseException:
            with pool.lock:  # The targets hold neither what they held nor all of the other.
                for _, target in rows:
                    space.prefixes.truncate(target)
            raise
    with pool.lock:
        records = [(source, target, tenants[target]) for source, target in rows]
        space.prefixes.copy(records, num_tokens)
    for group in space.groups:
        group.note_taken_over(rows, num_tokens, keeps_past=space.keeps_past)
    aliased = [mapping.extent for each in changes for mapping in each.again]
    space.sharing.aliased_bytes += sum(extent.num_bytes for extent in aliased)
    space.sharing.copied_bytes += sum(move.copied_bytes for move in moves)


def _check_beams(space: RowSpace, beams: Sequence[LiveRow], sources: Sequence[int]) -> None:
    for beam in beams:
        if beam.cache is not space:
            raise ConfigError(f"{beam} is of another cache")
        beam.check_open()
    lengths = sorted({beam.num_tokens for beam in beams})
    if len(lengths) > 1:
        raise ConfigError(f"beams are equally long; these hold {lengths} tokens")
    if len({beam.row for beam in beams}) < len(beams):
        raise ConfigError("a beam is named twice; each goes on from one source")
    if len(sources) != len(beams) or not all(
        type(source) is int and 0 <= source < len(beams) for source in sources
    ):
        raise ConfigError(
            f"sources must name one of {len(beams)} beams for each, by its index; got "
            f"{list(sources)}"
        )


# ---- planning -----------------------------------------------------------------------------


class _Move(NamedTuple):
    """What one row takes from another in one group.

    Attributes:
        group: The group.
        source: The row to take from.
        target: The row that takes.
        change: How the target's mappings change; None where they stay.
        readonly: Mappings of the target that stay, and must become writable.
        copy_first_page: From where on contents are copied.
        copied_bytes: How many.
    """

    group: LayerGroup
    source: int
    target: int
    change: RowChange | None
    readonly: Sequence[Mapping]
    copy_first_page: int
    copied_bytes: int

    def address(self, row: int) -> Address:
        """Where the copied bytes start in `row`."""
        return self.group.table.page_address(row, self.copy_first_page)

    @property
    def reads(self) -> list[Mapping]:
        """What is copied from."""
        table = self.group.table
        return table.overlapping(self.source, self.copy_first_page, table.row_pages)


class _Difference(NamedTuple):
    """From which page on two rows differ, and the mappings of each from there on."""

    page: int
    theirs: Sequence[Mapping]
    mine: Sequence[Mapping]


def _plan(
    space: RowSpace,
    group: LayerGroup,
    rows: Sequence[tuple[int, int]],
    num_tokens: int,
    tenants: dict[int, str | None],
) -> list[_Move]:
    """How each target comes to hold what its source does, of `num_tokens` both."""
    differences = [
        _after_common(group, *each, num_tokens, keeps_past=space.keeps_past) for each in rows
    ]
    aliased = [_to_alias(group, each, num_tokens, space.cost_model) for each in differences]
    # What a row gives to another it shares with it afterwards, and may not write either.
    given = {id(mapping.extent) for mappings in aliased for mapping in mappings}
    return [
        _plan_move(group, *each, num_tokens, tenants[each[1]], difference, its, given)
        for each, difference, its in zip(rows, differences, aliased, strict=True)
    ]


def _after_common(
    group: LayerGroup, source: int, target: int, num_tokens: int, *, keeps_past: bool
) -> _Difference:
    theirs = list(group.table.rows[source].mappings)
    mine = list(group.table.rows[target].mappings)
    page = group.first_common_page(source, target, num_tokens, keeps_past=keeps_past)
    at = 0
    for their, my in zip(theirs, mine, strict=False):
        if their.extent is not my.extent or their.first_page != my.first_page:
            break
        at, page = at + 1, max(page, their.end_page)
    return _Difference(page, theirs[at:], mine[at:])


def _to_alias(
    group: LayerGroup, difference: _Difference, num_tokens: int, cost: CostModel
) -> list[Mapping]:
    """The source's mappings, behind what it has in common with the target, to map there too."""
    _, theirs, mine = difference
    aliased: list[Mapping] = []
    # Both rows must have a boundary where the exchange begins.
    if theirs and mine and theirs[0].first_page == mine[0].first_page:
        full_end_page = group.geometry.whole_pages_below(num_tokens)
        for mapping in theirs:
            is_worth = cost.prefers_alias_in_reorder(mapping.extent.num_bytes)
            if mapping.end_page > full_end_page or not is_worth:
                break
            aliased.append(mapping)
    return aliased


def _plan_move(
    group: LayerGroup,
    source: int,
    target: int,
    num_tokens: int,
    tenant: object,
    difference: _Difference,
    aliased: Sequence[Mapping],
    given: Container[int],
) -> _Move:
    table, geometry = group.table, group.geometry
    page, _, mine = difference
    page = aliased[-1].end_page if aliased else page
    behind = [mapping for mapping in mine if mapping.end_page > page]
    # What is copied into must be the target's own.
    shared = [each for each in behind if each.extent.is_shared or id(each.extent) in given]
    exchange = None
    if aliased or shared:
        first_page = aliased[0].first_page if aliased else shared[0].first_page
        old = table.overlapping(target, first_page, shared[-1].end_page if shared else page)
        fresh_page = aliased[-1].end_page if aliased else first_page
        classes = tuple(size_classes(old[-1].end_page - fresh_page, group.largest_class))
        origin = (table, source)
        exchange = RowChange(table, target, first_page, classes, tenant, aliased, origin, old)
        behind = [each for each in behind if each not in old]
        if not aliased:
            page = min(page, max(fresh_page, table.rows[source].first_page))
    return _Move(
        group,
        source,
        target,
        exchange,
        [each for each in behind if each.access is Access.READ],
        page,
        max(0, num_tokens * geometry.token_bytes - page * geometry.page_bytes),
    )


def _through_buffer(
    space: RowSpace, moves: Sequence[_Move], stream: int
) -> tuple[list[CopyOp], torch.Tensor | None]:
    """Save what will be overwritten before it is read.

    Returns the copies to make afterwards, and the buffer, which lives until they are submitted.
    """
    targets = {move.target for move in moves}
    num_bytes = sum(move.copied_bytes for move in moves if move.source in targets)
    buffer = None
    if num_bytes:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=space.device)
    at = Address(buffer.data_ptr() if buffer is not None else 0)
    saves, copies = [], []
    for move in moves:
        if not move.copied_bytes:
            continue
        source = move.address(move.source)
        if move.source in targets:
            saves.append(CopyOp(at, source, move.copied_bytes))
            source = at
            at = Address(at + move.copied_bytes)
        copies.append(CopyOp(move.address(move.target), source, move.copied_bytes))
    space.pool.backend.copy_many(saves, stream)
    return copies, buffer
