"""Beams: every row of a batch takes over what another one holds, at its own addresses.

What two rows have in common already costs nothing. Large extents beyond that are mapped again;
the rest, a tail that the beams have written since they parted, is copied through a buffer,
because a row may be read and overwritten at once.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from collections.abc import Mapping as Mapping_
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..backend import Access, CopyOp
from ..errors import ConfigError
from ..memory import Mapping, RowChange, change, make_writable, size_classes
from ..units import Address
from .cost import CostModel
from .layer_group import LayerGroup
from .stats import SharingStats

if TYPE_CHECKING:
    from .rowed import RowedCache
    from .sequence import Sequence as Beam


@dataclass(frozen=True)
class Move:
    """What one row takes from another in one group.

    Attributes:
        group: The group.
        source: The row to take from.
        target: The row that takes.
        part: How the target's mappings change; None where they stay.
        readonly: Mappings of the target that stay, and must become writable.
        copy_first_page: From where on contents are copied.
        copied_bytes: How many.
    """

    group: LayerGroup
    source: int
    target: int
    part: RowChange | None
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


def check_beams(cache: RowedCache, beams: Sequence[Beam], sources: Sequence[int]) -> None:
    """Refuse what cannot be reordered.

    Raises:
        ConfigError: Beams of another cache or of different lengths, one twice, or sources that
            are not indices of beams, one for each.
        ClosedError: One has ended.
    """
    for beam in beams:
        if beam.cache is not cache:
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


def plan_moves(
    cache: RowedCache,
    group: LayerGroup,
    moves: Sequence[tuple[int, int]],
    num_tokens: int,
    tenants: Mapping_[int, str | None],
) -> list[Move]:
    """How each target row comes to hold the `num_tokens` tokens of its source.

    Changes nothing.

    Args:
        cache: The cache: says what is mapped again and what is copied, and what is kept.
        group: The group.
        moves: `(source, target)` rows.
        num_tokens: The length of all.
        tenants: For whom each target row is.
    """
    differences = [
        _after_common(group, *move, num_tokens, keeps_past=cache.keeps_past) for move in moves
    ]
    aliased = [_to_alias(group, each, num_tokens, cache.cost_model) for each in differences]
    # What a row gives to another it shares with it afterwards, and may not write either.
    given = {id(mapping.extent) for mappings in aliased for mapping in mappings}
    return [
        _plan_move(group, *move, num_tokens, tenants[move[1]], each, its, given)
        for move, each, its in zip(moves, differences, aliased, strict=True)
    ]


class _Difference(NamedTuple):
    """From which page on two rows differ, and the mappings of each from there on."""

    page: int
    theirs: Sequence[Mapping]
    mine: Sequence[Mapping]


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
) -> Move:
    table, geometry = group.table, group.geometry
    page, _, mine = difference
    page = aliased[-1].end_page if aliased else page
    behind = [mapping for mapping in mine if mapping.end_page > page]
    # What is copied into must be the target's own.
    shared = [each for each in behind if each.extent.is_shared or id(each.extent) in given]
    part = None
    if aliased or shared:
        first_page = aliased[0].first_page if aliased else shared[0].first_page
        old = table.overlapping(target, first_page, shared[-1].end_page if shared else page)
        fresh_page = aliased[-1].end_page if aliased else first_page
        classes = tuple(size_classes(old[-1].end_page - fresh_page, group.largest_class))
        origin = (table, source)
        part = RowChange(table, target, first_page, classes, tenant, aliased, origin, old)
        behind = [each for each in behind if each not in old]
        if not aliased:
            page = min(page, max(fresh_page, table.rows[source].first_page))
    return Move(
        group,
        source,
        target,
        part,
        [each for each in behind if each.access is Access.READ],
        page,
        max(0, num_tokens * geometry.token_bytes - page * geometry.page_bytes),
    )


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


def reorder(
    cache: RowedCache,
    moves: Sequence[tuple[int, int]],
    num_tokens: int,
    tenants: dict[int, str | None],
    sharing: SharingStats,
) -> None:
    """Give each target row what its source row holds now.

    Args:
        cache: The cache.
        moves: `(source, target)` rows, each target once; all live and `num_tokens` long.
        num_tokens: Their length.
        tenants: For whom each target row is.
        sharing: Counts what was aliased and copied.

    Raises:
        OutOfPagesError: Nothing changed.
        DriverError: Nothing changed, unless a copy failed: then the targets' tails are undefined,
            and nothing of them is recorded.

    Cost: copies on the current stream; where extents are exchanged, a wait for the device.
    """
    pool, stream = cache.pool, cache.current_stream()
    plans = [
        plan
        for group in cache.groups
        for plan in plan_moves(cache, group, moves, num_tokens, tenants)
    ]
    parts = [plan.part for plan in plans if plan.part is not None]
    with change(pool, parts, reads=[read for plan in plans for read in plan.reads]) as made:
        copies = _through_buffer(cache, plans, stream)
        for plan in plans:
            make_writable(plan.group.table, plan.target, plan.readonly)
        made.map(stream)
        try:
            made.fill(stream, copies.second_half)
        except BaseException:
            with pool.lock:  # The targets hold neither what they held nor all of the other.
                for _, target in moves:
                    cache.prefixes.truncate(target)
            raise
    with pool.lock:
        records = [(source, target, tenants[target]) for source, target in moves]
        cache.prefixes.copy(records, num_tokens)
    for group in cache.groups:
        group.note_taken_over(moves, num_tokens, keeps_past=cache.keeps_past)
    aliased = [mapping.extent for part in parts for mapping in part.again]
    sharing.aliased_bytes += sum(extent.num_bytes for extent in aliased)
    sharing.copied_bytes += sum(plan.copied_bytes for plan in plans)


@dataclass(frozen=True)
class _Copies:
    second_half: list[CopyOp]
    buffer: torch.Tensor | None  # Lives until the copies are submitted.


def _through_buffer(cache: RowedCache, plans: Sequence[Move], stream: int) -> _Copies:
    """Save what will be overwritten before it is read; returns the copies to make afterwards."""
    targets = {plan.target for plan in plans}
    num_bytes = sum(plan.copied_bytes for plan in plans if plan.source in targets)
    buffer = None
    if num_bytes:
        # Torch's allocator keeps the buffer for this stream until the copies are through.
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=cache.device)
    at = Address(buffer.data_ptr() if buffer is not None else 0)
    saves, copies = [], []
    for plan in plans:
        if not plan.copied_bytes:
            continue
        source = plan.address(plan.source)
        if plan.source in targets:
            saves.append(CopyOp(at, source, plan.copied_bytes))
            source = at
            at = Address(at + plan.copied_bytes)
        copies.append(CopyOp(plan.address(plan.target), source, plan.copied_bytes))
    cache.pool.backend.copy_many(saves, stream)
    return _Copies(copies, buffer)
