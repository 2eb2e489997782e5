"""Forks, copy-on-write, and the reordering of beams: rows share extents and copy only tails.

    source   | extent | extent | extent | extent with the tail |
                 |        |        |          : copied, as far as it is used
    fork     | extent | extent | extent | fresh ones           |

Whole extents are mapped a second time, read-only; the tail, which both will write, is copied. Both
rows stay contiguous, at addresses of their own, and either may end first. Prefixes of parked rows,
and rows of another cache over the same pool, are shared in the same way.

A new sequence begins with tokens already in the cache: it adopts a parked row that ends near the
known part of its prompt, without a driver call, or is a fork of a row that holds it.

See DESIGN.md, Note [Sharing keeps rows contiguous],
Note [Copy-on-write keeps addresses],
Note [Beams part slowly].
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Container, Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...errors import CapacityError, ConfigError, OutOfPagesError
from ...units import Address, MiB
from ..backend import Access, Backend, CopyOp
from ..memory import Change, PageMapping, RowChange, make_writable, size_classes
from .layer_group import LayerGroup
from .prefix import BLOCK_TOKENS, Where

if TYPE_CHECKING:
    from .kv_cache import KVCache
    from .sequence import Sequence

# ---- cost ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CostModel:
    """Costs of driver calls and copies, which decide between sharing and copying an extent.

    A mapping costs the same for 2 MiB and for 64; a copy costs by the byte. Sharing also saves
    memory for as long as it lasts: a sequence's life for a fork, one step for beams. The costs are
    in microseconds; the defaults are an H200's.

    Attributes:
        map_us: Mapping an extent and granting access.
        unmap_us: Removing a mapping.
        copy_us_per_mib: Copying within the device, read and written.
        lasting_us_per_mib: Value of not holding a MiB twice for a sequence's life.
        passing_us_per_mib: Value of not holding a MiB twice for one step.
    """

    map_us: float = 35.0
    unmap_us: float = 20.0
    copy_us_per_mib: float = 0.5
    lasting_us_per_mib: float = 16.0
    passing_us_per_mib: float = 1.0

    @classmethod
    def of(cls, backend: Backend) -> CostModel:
        """Return the costs on a backend's device."""
        if backend.name == "host":
            # mmap and a fault or two; memcpy at 10 GB/s.
            return cls(map_us=5.0, unmap_us=5.0, copy_us_per_mib=100.0)
        return cls()

    def prefers_alias_in_fork(self, num_bytes: int) -> bool:
        """Whether a new row should map an extent of `num_bytes` again rather than copy it.

        The copy's own mapping is not counted: a tail that is copied needs one anyway.
        """
        worth_us_per_mib = self.copy_us_per_mib + self.lasting_us_per_mib
        return self.map_us <= worth_us_per_mib * num_bytes / MiB

    def prefers_alias_in_reorder(self, num_bytes: int) -> bool:
        """Whether to map an extent in a row rather than copy it there through a buffer."""
        worth_us_per_mib = 2 * self.copy_us_per_mib + self.passing_us_per_mib
        return self.map_us + self.unmap_us <= worth_us_per_mib * num_bytes / MiB


# ---- forking -------------------------------------------------------------------------------------


def fork(cache: KVCache, source: Sequence, num_tokens: int, row: int | None = None) -> int:
    """Implement `Sequence.fork`: take a row of `cache`, or `row`, that begins as `source` does."""
    cache.check_open()
    source.check_open()
    if not 0 <= num_tokens <= source.num_tokens:
        raise ConfigError(f"{source} cannot be forked at {num_tokens} tokens")
    cache.note_stream()

    origin = source.cache

    def take_and_fill() -> int:
        with cache.pool.lock:
            origin.check_keeps(source.row, num_tokens, "fork at")
            return fork_row(origin, cache, source.row, num_tokens, source.tenant, row)

    taken: int = cache.pool.asking_broker(take_and_fill)
    return taken


def fork_row(
    origin: KVCache,
    cache: KVCache,
    source_row: int,
    num_tokens: int,
    tenant: str | None,
    row: int | None = None,
) -> int:
    """Take a row that begins with the first `num_tokens` tokens of another row. Locked.

    `origin` holds the source row, live or parked; both spaces are over one pool and have the same
    groups. By default the row is an empty one, or the least recently used parked one; with an empty
    one, a parked row without a prefix gives up its memory, so that the pool need not create more.
    Returns the row; after any error no row is taken. Cost: a map and access call per extent and a
    copy of the tail on the current stream.
    """
    if num_tokens:
        _check_alike(origin, cache, num_tokens)
    if row is None:
        row = cache.rows.choose_unneeded(but=source_row if origin is cache else None)
        parked = islice(cache.rows.parked, _LOOKED_AT)
        plain = (each for each in parked if each not in cache.prefixes.recorded)
        is_empty = row not in cache.rows.parked
        if num_tokens and is_empty and (unneeded := next(plain, None)) is not None:
            cache.rows.retire_parked(unneeded)
        cache.pool.reclaimer.poll()
    with cache.rows.beginning(row):
        if num_tokens:
            if source_row in origin.rows.parked:
                origin.rows.wait_for(source_row, cache.current_stream())
            else:
                cache.pool.backend.join_streams(cache.current_stream())
            if origin.states is not None:
                origin.states.lent.add(source_row)
            try:
                _fill(origin, cache, (source_row, row), num_tokens, tenant)
            finally:
                # Also a fork that fails may have submitted reads of the source.
                origin.rows.touch(source_row)
    if origin is cache:
        cache.prefixes.copy([(source_row, row, tenant)], num_tokens)
    else:
        cache.prefixes.record(row, origin.prefixes.token_ids(source_row)[:num_tokens], tenant)
    return row


def _fill(
    origin: KVCache, cache: KVCache, rows: tuple[int, int], num_tokens: int, tenant: object
) -> None:
    pool, stream = cache.pool, cache.current_stream()
    plan = plan_fork(origin, cache, rows, num_tokens, tenant)
    # Pins the source's extents: making room must not evict them, even if the source is parked.
    with Change(pool, plan.changes, reads=plan.reads) as made:
        made.map(stream)
        made.fill(stream, plan.copies)
    for theirs, mine in zip(origin.groups, cache.groups, strict=True):
        mine.begin_row(rows[1], theirs.first_written(rows[0]))
    sharing = cache.sharing
    sharing.num_forks += 1
    sharing.aliased_bytes += plan.aliased_bytes
    for copy in plan.copies:
        sharing.copied_bytes += copy.num_bytes


def _check_alike(origin: KVCache, cache: KVCache, num_tokens: int) -> None:
    if origin.pool is not cache.pool:
        raise ConfigError("only caches over the same pool can share memory")
    if origin is not cache and [each.layout for each in origin.groups] != [
        each.layout for each in cache.groups
    ]:
        raise ConfigError("the caches lay their layers out differently: make both alike")
    if num_tokens > cache.max_tokens:
        raise ConfigError(
            f"{num_tokens} tokens do not fit: rows of the fork's cache end at "
            f"max_tokens={cache.max_tokens}"
        )


# ---- planning -----------------------------------------------------------------------------


class _Plan(NamedTuple):
    """The changes of a fork: row changes per group, mappings that copies read, copies of tails."""

    changes: abc.Sequence[RowChange]
    aliased_bytes: int
    reads: abc.Sequence[PageMapping]
    copies: abc.Sequence[CopyOp]


def plan_fork(
    origin: KVCache, cache: KVCache, rows: tuple[int, int], num_tokens: int, tenant: object
) -> _Plan:
    """Plan a fork of row `rows[0]` of `origin` to row `rows[1]` of `cache`. Locked."""
    changes: list[RowChange] = []
    reads: list[PageMapping] = []
    copies: list[CopyOp] = []
    aliased_bytes = 0
    target_row, live_tokens = rows[1], origin.live_tokens(rows[0])
    for source, target in zip(origin.groups, cache.groups, strict=True):
        source_row = source.row_at(rows[0], num_tokens, live_tokens)
        first_needed = source.first_kept_page(source_row, num_tokens, keeps_past=cache.keeps_past)
        aliased = _aliased(cache, source, source_row, first_needed, num_tokens)
        first_page = aliased[0].first_page if aliased else first_needed
        fresh_page = aliased[-1].end_page if aliased else first_needed
        aliased_bytes += (fresh_page - first_page) * source.page_bytes
        num_fresh_pages = target.pages_for(num_tokens + cache.overread_tokens) - fresh_page
        fresh = size_classes(num_fresh_pages, target.largest_class) if num_fresh_pages > 0 else ()
        its_source = source.table, source_row
        changes.append(
            RowChange(target.table, target_row, first_page, fresh, tenant, aliased, its_source)
        )
        copied_bytes = source.bytes_for(num_tokens) - fresh_page * source.page_bytes
        if copied_bytes > 0:
            end_page = source.pages_for(num_tokens)
            reads += source.table.overlapping(source_row, fresh_page, end_page)
            start = source.table.page_address(source_row, fresh_page)
            copies.append(
                CopyOp(target.table.page_address(target_row, fresh_page), start, copied_bytes)
            )
    return _Plan(changes, aliased_bytes, reads, copies)


def pages_to_fork(sequence: Sequence, num_tokens: int) -> int:
    """Pages that a fork of `sequence` at `num_tokens` takes from the pool. Changes nothing.

    Raises `ConfigError` if it cannot be forked there.
    """
    cache, rows = sequence.cache, (sequence.row, -1)
    with cache.pool.lock:
        cache.check_keeps(sequence.row, num_tokens, "fork at")
        changes = plan_fork(cache, cache, rows, num_tokens, None).changes
    return sum(1 << size_class for each in changes for size_class in each.classes)


def _aliased(
    cache: KVCache, source: LayerGroup, row: int, first_page: int, num_tokens: int
) -> list[PageMapping]:
    aliased = source.whole_mappings(row, first_page, num_tokens)
    # Small extents at the end are cheaper to copy, together with the tail.
    while aliased and not cache.cost_model.prefers_alias_in_fork(aliased[-1].extent.num_bytes):
        aliased.pop()
    return aliased


# ---- unshare -------------------------------------------------------------------------------------


def unshare(
    group: LayerGroup, row: int, num_tokens: int, first: int, *, tenant: object, stream: int
) -> int:
    """Make `row`, of `num_tokens` tokens, writable from token `first` on; returns the bytes copied.

    Shared extents wholly after `num_tokens` are given up. A shared extent that holds earlier tokens
    is replaced by a copy at the same addresses. After `OutOfPagesError` or `DriverError` the row
    holds the same tokens. Cost: nothing without shared pages there; a wait for the device for a
    replacement.
    """
    pages = group.table.rows[row]
    first_page = group.whole_pages_below(first)
    if pages.shared_end_page <= first_page:
        return 0
    # An ended sequence that shared an extent may still be read on another stream.
    group.pool.backend.join_streams(stream)
    concerned = group.table.overlapping(row, first_page, pages.end_page)
    shared = next((mapping for mapping in concerned if mapping.extent.is_shared), None)
    copied_bytes = 0
    if shared is not None:
        if shared.first_page < group.pages_for(num_tokens):
            try:
                copied_bytes = _replace(group, row, shared, num_tokens, tenant, stream)
            except OutOfPagesError:
                # No room for a copy. If only victims share the extent, none is needed.
                with group.pool.lock:
                    if not group.pool.pressure.give_up([shared.extent]):
                        raise
                return unshare(group, row, num_tokens, first, tenant=tenant, stream=stream)
        else:
            group.table.retire_back(row, shared.first_page, group.pool.reclaimer.new_fence())
        concerned = group.table.overlapping(row, first_page, pages.end_page)
    make_writable(group.table, row, concerned)
    group.scrub(row, num_tokens, tenant, stream)  # Shared extents cannot be scrubbed.
    pages.shared_end_page = min(pages.shared_end_page, first_page)
    return copied_bytes


def _replace(
    group: LayerGroup, row: int, shared: PageMapping, num_tokens: int, tenant: object, stream: int
) -> int:
    """Replace `shared` by a copy of its tokens up to `num_tokens`; returns the bytes copied."""
    pool, table, first_page = group.pool, group.table, shared.first_page
    copied_bytes = num_tokens * group.token_bytes - first_page * pool.page_bytes
    num_pages = group.pages_for(num_tokens) - first_page
    classes = size_classes(num_pages, group.largest_class)
    old = table.overlapping(row, first_page, table.rows[row].end_page)
    copied = RowChange(table, row, first_page, classes, tenant, old=old, kept_bytes=copied_bytes)
    with Change(pool, [copied], reads=old) as made:
        made.map(stream)
    return copied_bytes


# ---- reorder -------------------------------------------------------------------------------------


def reorder(cache: KVCache, beams: abc.Sequence[Sequence], sources: abc.Sequence[int]) -> None:
    """Implement `KVCache.reorder`, for beams that were checked."""
    rows = [(beams[source].row, beam.row) for source, beam in zip(sources, beams, strict=True)]
    rows = [(source, target) for source, target in rows if source != target]
    if not rows or not beams[0].num_tokens:
        return
    cache.note_stream()
    pool, stream, num_tokens = cache.pool, cache.current_stream(), beams[0].num_tokens
    pool.backend.join_streams(stream)
    tenants = {beam.row: beam.tenant for beam in beams}
    moves = [
        move
        for group in cache.groups
        for move in _reorder_moves(cache, group, rows, num_tokens, tenants)
    ]
    changes = [move.change for move in moves if move.change is not None]
    with Change(pool, changes, reads=[read for move in moves for read in move.reads]) as made:
        # Torch's allocator reuses the buffer in stream order, after the copies.
        copies, _buffer = _through_buffer(cache, moves, stream)
        for move in moves:
            make_writable(move.group.table, move.target, move.readonly)
        made.map(stream)
        try:
            made.fill(stream, copies)
        except BaseException:
            with pool.lock:  # The targets' contents are undefined now.
                for _, target in rows:
                    cache.prefixes.truncate(target)
            raise
    with pool.lock:
        records = [(source, target, tenants[target]) for source, target in rows]
        cache.prefixes.copy(records, num_tokens)
    for group in cache.groups:
        group.note_taken_over(rows, num_tokens, keeps_past=cache.keeps_past)
    aliased = [mapping.extent for each in changes for mapping in each.again]
    cache.sharing.aliased_bytes += sum(extent.num_bytes for extent in aliased)
    cache.sharing.copied_bytes += sum(move.copied_bytes for move in moves)


def check_beams(cache: KVCache, beams: abc.Sequence[Sequence], sources: abc.Sequence[int]) -> None:
    """Raise `ConfigError` unless the arguments of `KVCache.reorder` are as it says."""
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


# ---- planning -----------------------------------------------------------------------------


class _Move(NamedTuple):
    """Transfer between two rows in one group; `change` is None if the target's mappings stay."""

    group: LayerGroup
    source: int
    target: int
    change: RowChange | None
    readonly: abc.Sequence[PageMapping]
    copy_first_page: int
    copied_bytes: int

    def address(self, row: int) -> Address:
        return self.group.table.page_address(row, self.copy_first_page)

    @property
    def reads(self) -> list[PageMapping]:
        table = self.group.table
        return table.overlapping(self.source, self.copy_first_page, table.row_pages)


#: The first page at which a target differs from its source, its mappings from there on, and those
#: of the source, from there on, that the target maps as well.
_Difference = tuple[int, list[PageMapping], list[PageMapping]]


def _reorder_moves(
    cache: KVCache,
    group: LayerGroup,
    rows: abc.Sequence[tuple[int, int]],
    num_tokens: int,
    tenants: dict[int, str | None],
) -> list[_Move]:
    differences = [_compare(cache, group, *each, num_tokens) for each in rows]
    # Extents given to another row are shared afterwards, so their row may not write them.
    given = {id(mapping.extent) for *_, aliased in differences for mapping in aliased}
    return [
        _plan_move(group, *each, num_tokens, tenants[each[1]], difference, given)
        for each, difference in zip(rows, differences, strict=True)
    ]


def _compare(
    cache: KVCache, group: LayerGroup, source: int, target: int, num_tokens: int
) -> _Difference:
    theirs, mine = (list(group.table.rows[row].mappings) for row in (source, target))
    page = group.first_common_page(source, target, num_tokens, keeps_past=cache.keeps_past)
    at = 0
    for their, my in zip(theirs, mine, strict=False):
        if their.extent is not my.extent or their.first_page != my.first_page:
            break
        at, page = at + 1, max(page, their.end_page)
    theirs, mine, aliased = theirs[at:], mine[at:], []
    # Both rows must have an extent boundary where the exchange begins.
    if theirs and mine and theirs[0].first_page == mine[0].first_page:
        full_end_page = group.whole_pages_below(num_tokens)
        for mapping in theirs:
            is_worth = cache.cost_model.prefers_alias_in_reorder(mapping.extent.num_bytes)
            if mapping.end_page > full_end_page or not is_worth:
                break
            aliased.append(mapping)
    return page, mine, aliased


def _plan_move(
    group: LayerGroup,
    source: int,
    target: int,
    num_tokens: int,
    tenant: object,
    difference: _Difference,
    given: Container[int],
) -> _Move:
    table = group.table
    page, mine, aliased = difference
    page = aliased[-1].end_page if aliased else page
    behind = [mapping for mapping in mine if mapping.end_page > page]
    # Only the target's own extents may be copied into.
    shared = [each for each in behind if each.extent.is_shared or id(each.extent) in given]
    exchange = None
    if aliased or shared:
        first_page = aliased[0].first_page if aliased else shared[0].first_page
        old = table.overlapping(target, first_page, shared[-1].end_page if shared else page)
        fresh_page = aliased[-1].end_page if aliased else first_page
        classes = size_classes(old[-1].end_page - fresh_page, group.largest_class)
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
        max(0, num_tokens * group.token_bytes - page * group.page_bytes),
    )


def _through_buffer(
    cache: KVCache, moves: abc.Sequence[_Move], stream: int
) -> tuple[list[CopyOp], torch.Tensor | None]:
    """Save bytes that copies overwrite before reading them; returns the copies and the buffer."""
    targets = {move.target for move in moves}
    num_bytes = sum(move.copied_bytes for move in moves if move.source in targets)
    buffer = None
    if num_bytes:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=cache.device)
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
    cache.pool.backend.copy_many(saves, stream)
    return copies, buffer


# ---- adopting ------------------------------------------------------------------------------------

#: How many of the least recently used parked rows are considered; a look at all of them for each
#: new sequence would cost time proportional to their extents.
_LOOKED_AT = 4
#: Memory is short if less than this part of the budget would be left for running sequences to
#: grow by.
_KEPT_DIVISOR = 64


def choose_row(cache: KVCache, num_tokens: int) -> int:
    """Choose, without taking it, the row for about `num_tokens` new tokens. Locked."""
    wanted = cache.prefixes.recorded - _giving_way(cache, num_tokens)
    return cache.rows.choose(num_tokens, wanted)


def _giving_way(cache: KVCache, num_tokens: int) -> Set[int]:
    """Parked rows that would be evicted first for a sequence; none if caches share the pool."""
    pool = cache.pool
    end_tokens = num_tokens + cache.overread_tokens
    missing_bytes = pool.budget_bytes // _KEPT_DIVISOR - pool.available_bytes
    for group in cache.groups:
        missing_bytes += group.pages_for(end_tokens) * group.page_bytes
    if missing_bytes <= 0 or not pool.pressure.is_of(cache.victims):
        return frozenset()
    found: set[int] = set()
    for row in cache.rows.in_order()[:_LOOKED_AT]:
        num_kept = cache.rows.resident_tokens(row)
        # A row much longer than needed would keep memory from others; shared extents would have to
        # be copied before they are written.
        if 0 < num_kept <= 2 * num_tokens and cache.rows.adoptable_tokens(row) == num_kept:
            found.add(row)
        missing_bytes -= sum(group.resident_bytes(row) for group in cache.groups)
        if missing_bytes <= 0:
            break
    return found


# ---- beginning -----------------------------------------------------------------------------------

#: How many rows that hold a prompt's beginning are compared, latest first, because a row cut at the
#: prompt's end is among these. To compare all would make hits costly.
_HOLDERS_LOOKED_AT = 4


#: A length at which a sequence can begin, and the rows that hold its tokens, by `Where`.
_Beginning = tuple[int, Callable[[Where], Iterator[int]]]


def beginnings(cache: KVCache, prompt: Any, tenant: str | None) -> Iterator[_Beginning]:
    """Yield the beginnings of `prompt`, without its last token, that rows hold; longest first.

    They are whole blocks; where layers keep states, as long as a state at rest, or a live row's.
    """
    max_tokens = max(0, len(prompt) - 1)
    matches = cache.prefixes.matches(prompt, tenant, max_tokens)
    if cache.states is None:
        for match in matches:
            yield match.num_tokens, match.rows
        return
    rows_of: dict[int, dict[int, None]] = {}
    for match in matches:
        matched, end = match.num_tokens, min(match.num_tokens + BLOCK_TOKENS - 1, max_tokens)
        if max(rows_of, default=0) > end:
            break  # Shorter matches end before.
        for row in match.rows():
            for length in cache.states.lengths(row, cache.live_tokens(row)):
                if 0 < length <= matched or (
                    matched < length <= end and cache.prefixes.holds(row, prompt, matched, length)
                ):
                    rows_of.setdefault(length, {})[row] = None
    for length in sorted(rows_of, reverse=True):
        rows = rows_of[length]

        def those(where: Where, rows: Iterable[int] = rows) -> Iterator[int]:
            return (row for row in rows if (row in cache.live) == (where is Where.LIVE))

        yield length, those


def longest_beginning(
    cache: KVCache, prompt: Any, tenant: str | None, *, spares: bool = False
) -> int:
    """Return the length of the longest of the `beginnings`; 0 without one. Locked.

    With `spares` a parked row that holds it becomes the last to be evicted.
    """
    for num_tokens, rows in beginnings(cache, prompt, tenant):
        for where in (Where.PARKED, Where.LIVE):
            row = next((each for each in rows(where) if cache.keeps(each, num_tokens)), None)
            if row is not None:
                if spares and where is Where.PARKED:
                    cache.rows.put_last(row, cache.pool.pressure.tick())
                return num_tokens
    return 0


def find_beginning(
    cache: KVCache, prompt: Any, tenant: str | None, *, with_files: bool = False
) -> tuple[int, int]:
    """Return how many tokens of `prompt` rows hold, and how many after them host memory.

    `with_files` those count that files hold. Changes nothing. Cost: about 5 ns per token, and a
    look at each row that holds a beginning.
    """
    with cache.pool.lock:
        there = longest_beginning(cache, prompt, tenant)
        found = cache.host_blocks.find(prompt, tenant, there, with_files=with_files)
        return there, found - there


def begin_with_prefix(cache: KVCache, prompt: Any, tenant: str | None) -> tuple[int, int] | None:
    """Take a row with the longest known beginning of `prompt`, without its last token. Locked.

    Returns the row, live now, and its token count; None without a match.
    """
    prefixes = cache.prefixes
    for num_tokens, rows in beginnings(cache, prompt, tenant):
        parked = _holders(cache, rows(Where.PARKED), num_tokens)
        # Adopting a row loses its later tokens, so there should be few of them.
        whole = [
            row
            for row in parked
            if prefixes.num_recorded(row) <= 2 * num_tokens
            and all([group.can_extend(row, num_tokens) for group in cache.groups])
            and cache.can_begin(row, num_tokens)
        ]
        if whole:
            row = min(whole, key=prefixes.num_recorded)
            cache.rows.take(row, num_tokens, tenant, cache.current_stream())
        else:
            holders = parked + _holders(cache, rows(Where.LIVE), num_tokens)
            if not holders:
                continue
            holder = holders[0]
            if len(holders) > 1:
                holder = max(holders, key=lambda row: _whole_bytes(cache, row, num_tokens))
            try:
                row = fork_row(cache, cache, holder, num_tokens, tenant)
            except CapacityError:
                # No second row, or no memory for the tail: adopt a row as it is. Look again,
                # because the attempt may have evicted parked rows.
                parked = _holders(cache, rows(Where.PARKED), num_tokens)
                parked = [row for row in parked if cache.can_begin(row, num_tokens)]
                if not parked:
                    break
                row = min(parked, key=prefixes.num_recorded)
                cache.rows.take(row, num_tokens, tenant, cache.current_stream())
        return row, num_tokens
    return None


def _holders(cache: KVCache, rows: Iterator[int], num_tokens: int) -> list[int]:
    """First few of `rows` that hold `num_tokens` tokens; rows that lost some are marked."""
    found: list[int] = []
    lost: list[int] = []
    for row in rows:
        (found if cache.keeps(row, num_tokens) else lost).append(row)
        if len(found) == _HOLDERS_LOOKED_AT:
            break
    for row in lost:
        cache.prefixes.lose_short(row, max(each.shortest_kept(row) for each in cache.groups))
    return found


def _whole_bytes(cache: KVCache, row: int, num_tokens: int) -> int:
    whole = (group.whole_mappings(row, 0, num_tokens) for group in cache.groups)
    return sum(mapping.extent.num_bytes for mappings in whole for mapping in mappings)
