"""Rows grow: plan, then change, for all rows and groups at once; everything or nothing.

Memory that live rows hold beyond their length is surplus and the first to be retired when memory is
short; a sequence that adopts a parked row takes all of its memory. Pages that a sliding window has
passed in a step are retired in the next.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from ...errors import ConfigError, OutOfAddressSpaceError, OutOfPagesError, SequenceFullError
from ..interrupts import uninterrupted
from ..memory import Change, Extent, PageMapping, RowChange, Scrub, asking_broker, size_classes
from .forking import choose_row, unshare
from .layer_group import LayerGroup
from .prefix import BLOCK_TOKENS
from .row_space import RowSpace

if TYPE_CHECKING:
    from .sequence import Sequence


class Target(NamedTuple):
    """A row that must hold `num_tokens`; later queries are at `num_past_tokens` or beyond."""

    row: int
    num_tokens: int
    num_past_tokens: int
    tenant: object = None


def grow(space: RowSpace, wanted: Iterable[tuple[Sequence, int]]) -> None:
    """Make each sequence hold the given number of tokens, all of them or none.

    Longer sequences stay as they are. Missing memory is mapped, and shared extents that will be
    written are copied. Where the pool is short, parked rows, free memory and live rows' memory
    beyond their length are evicted first; then a pool that has joined a broker asks for more.

    Raises:
        OutOfPagesError: The pool cannot supply all pages.
        SequenceFullError: A row ends before that.
        ConfigError: A sequence is swapped out, or of another cache.

    Cost: a comparison for a sequence below its `writable_tokens` (most decode steps).
    """
    if space.is_closed:
        space.check_open()
    targets, max_tokens = list(wanted), space.max_tokens
    for sequence, num_tokens in targets:
        if sequence.is_closed or sequence.transfer or sequence.swapped:
            sequence.check_open()
        if sequence.cache is not space:
            raise ConfigError(f"{sequence} is of another cache")
        if num_tokens > max_tokens:
            raise SequenceFullError(
                f"the sequence in row {sequence.row} would hold {num_tokens} tokens; rows of this "
                f"cache end at max_tokens={max_tokens}: make it with a larger one",
                max_tokens=max_tokens,
            )
    space.note_stream()
    if space.states is not None and space.states.lent:
        rows = {sequence.row for sequence, _ in targets}
        space.states.wait_for_forks(rows, space.current_stream())
    short = lacking_room(space, targets)
    if short:
        asking_broker(space.pool, partial(_map_and_lengthen, space, short, targets))
    else:
        _lengthen(space, targets)


def lacking_room(
    space: RowSpace, targets: abc.Sequence[tuple[Sequence, int]]
) -> list[tuple[Sequence, int]]:
    """Return those of `targets` beyond their sequence's `writable_tokens`."""
    rooms = space.writable_tokens(map(itemgetter(0), targets))
    return [target for target, room in zip(targets, rooms, strict=True) if target[1] > room]


@uninterrupted
def _map_and_lengthen(
    space: RowSpace,
    short: Iterable[tuple[Sequence, int]],
    wanted: abc.Sequence[tuple[Sequence, int]],
) -> None:
    """Unshare and map memory for `short`; surplus beyond `wanted` may be retired for it."""
    longest = _longest(short)
    targets = []
    for sequence, num_tokens in longest.items():
        if num_tokens > sequence.num_tokens:
            _unshare(space, sequence, sequence.num_tokens)
        targets.append(Target(sequence.row, num_tokens, sequence.num_tokens, sequence.tenant))
    try:
        map_rows(space, targets)
    except OutOfPagesError:
        if not retire_surplus(space, _longest(wanted)):
            raise
        map_rows(space, targets)
    finally:  # Also after a failure, which may have left filled memory mapped.
        for sequence in longest:
            if not sequence.num_tokens:
                space.note_used(sequence.row)
    _lengthen(space, wanted)


def _lengthen(space: RowSpace, targets: abc.Sequence[tuple[Sequence, int]]) -> None:
    for group in () if space.keeps_past else space.groups:
        if group.window_tokens is not None:
            retire_behind_windows(space, [sequence for sequence, _ in targets])
            break
    for sequence, num_tokens in targets:
        if num_tokens > sequence.num_tokens:
            sequence.num_tokens = num_tokens


def unshare_all(space: RowSpace, sequences: Iterable[Sequence]) -> None:
    """Give each sequence a copy of what it shares, so that the caller may write to any token.

    Raises `OutOfPagesError` if the pool has no room for the copies. Cost: a look at each sequence
    that shares nothing.
    """
    for sequence in sequences:
        if any([group.table.rows[sequence.row].shared_end_page for group in space.groups]):
            space.note_stream()
            asking_broker(space.pool, partial(_unshare, space, sequence, 0))


@uninterrupted
def _unshare(space: RowSpace, sequence: Sequence, first: int) -> None:
    for group in space.groups:
        if group.table.rows[sequence.row].shared_end_page:
            try:
                copied = unshare(
                    group,
                    sequence.row,
                    sequence.num_tokens,
                    first,
                    tenant=sequence.tenant,
                    stream=space.current_stream(),
                )
            finally:
                space.note_used(sequence.row)
            space.sharing.copied_on_write_bytes += copied


def _longest(targets: Iterable[tuple[Sequence, int]]) -> dict[Sequence, int]:
    longest: dict[Sequence, int] = {}
    for sequence, num_tokens in targets:
        longest[sequence] = max(num_tokens, longest.get(sequence, 0))
    return longest


@uninterrupted
def make_ready(
    space: RowSpace,
    wanted: Iterable[tuple[Sequence, int]],
    num_new_tokens: int = 0,
    *,
    begins_empty: bool = True,
) -> bool:
    """Prepare free memory for a later `KVCache.grow`, which then only maps; returns success.

    Call it while the device works; see `ExtentPool.make_ready`. It covers the resident sequences of
    `wanted`, and `num_new_tokens` of a sequence that will begin: with nothing (`begins_empty`), so
    that it can adopt a parked row, or after tokens that it brings or shares. Never blocks. After a
    `DriverError` parked rows may have lost memory.
    """
    space.check_open()
    changes = _plan(space, _targets(space, wanted))
    classes = [size_class for each in changes for size_class in each.classes]
    if num_new_tokens:
        classes += _lacking_at_first(space, num_new_tokens, begins_empty=begins_empty)
    return space.pool.make_ready(classes)


@uninterrupted
def grow_ahead(space: RowSpace, wanted: Iterable[tuple[Sequence, int]]) -> None:
    """Map memory that a later `KVCache.grow` will need, without blocking.

    Call it while the device works, once `make_ready` has returned true. Skips sequences without
    tokens and any whose memory is not ready, whose addresses are in use, or that need a copy of
    shared extents. After a `DriverError` nothing was mapped.
    """
    changes = _plan(space, _targets(space, [each for each in wanted if each[0].num_tokens]))
    is_in_use = space.pool.reclaimer.has_retired_in
    if is_in_use([each.addresses for each in changes]):
        changes = [each for each in changes if not is_in_use([each.addresses])]
    with suppress(OutOfPagesError):
        _map(space, changes, space.pool.acquire)


def _targets(space: RowSpace, wanted: Iterable[tuple[Sequence, int]]) -> list[Target]:
    """Return targets for the resident sequences of `wanted` that are short of memory."""
    return [
        Target(each.row, min(to, space.max_tokens), each.num_tokens, each.tenant)
        for each, to in lacking_room(space, list(wanted))
        if each.is_resident
    ]


def _lacking_at_first(space: RowSpace, num_tokens: int, *, begins_empty: bool) -> list[int]:
    """Return the size classes that a new sequence will need; see `make_ready`."""
    there_tokens = [0] * len(space.groups)
    if begins_empty:
        try:
            with space.pool.lock:
                row = choose_row(space, num_tokens)
                there_tokens = [group.adoptable_tokens(row) for group in space.groups]
        except OutOfAddressSpaceError:
            return []  # No sequence can begin.
    classes: list[int] = []
    for group, there in zip(space.groups, there_tokens, strict=True):
        end_tokens = min(num_tokens + space.overread_tokens, group.geometry.row_tokens)
        num_pages = group.geometry.pages_for(end_tokens) - group.geometry.pages_for(there)
        if num_pages > 0:
            classes += size_classes(num_pages, group.largest_class)
    return classes


@uninterrupted
def keep_resident(space: RowSpace, overread_tokens: int) -> None:
    """Keep `overread_tokens` past every sequence's length mapped, now and from now on.

    For kernels that fetch past the length they are told. The number never decreases. Raises
    `OutOfPagesError`, and `ConfigError` if the pool poisons memory or a sequence is moving to the
    host.
    """
    space.check_open()
    before = space.overread_tokens
    if overread_tokens <= before:
        return
    if space.pool.scrub is Scrub.POISON:
        raise ConfigError(
            f"a kernel that fetches {overread_tokens} tokens past the length would fetch the NaN "
            'of scrub="poison"; choose another attention backend, or another scrub'
        )
    if space.moving:
        raise ConfigError("a sequence is on its way to the host; finish that, or cancel it, first")
    space.overread_tokens = overread_tokens
    try:
        live = space.live_sequences()
        targets = [Target(each.row, each.num_tokens, each.num_tokens, each.tenant) for each in live]
        asking_broker(space.pool, partial(map_rows, space, targets))
    except BaseException:
        space.overread_tokens = before
        raise


# ---- mapping ------------------------------------------------------------------------------


def map_rows(
    space: RowSpace, targets: abc.Sequence[Target], groups: abc.Sequence[LayerGroup] | None = None
) -> None:
    """Map the missing pages of `targets`, each another row, in `groups` (default: all).

    If the pool is short, parked rows of all its caches are evicted and no growth quantum is added.
    After `OutOfPagesError` or `DriverError` nothing was mapped.
    """
    try:
        changes = _plan(space, targets, groups, exactly=False)
        _map(space, changes, space.pool.acquire)
    except OutOfPagesError:
        changes = _plan(space, targets, groups, exactly=True)
        _map(space, changes, space.pool.acquire_or_evict)


def _map(
    space: RowSpace,
    changes: abc.Sequence[RowChange],
    acquire: Callable[[abc.Sequence[int]], list[Extent]],
) -> None:
    if changes:
        stream = space.current_stream()
        space.pool.reclaimer.poll()
        with Change(space.pool, changes, acquire=acquire) as made:
            made.map(stream)
            made.fill(stream)


def _plan(
    space: RowSpace,
    targets: Iterable[Target],
    groups: abc.Sequence[LayerGroup] | None = None,
    *,
    exactly: bool = False,
) -> list[RowChange]:
    """Plan the row changes: `exactly` the pages needed, or a growth quantum (see `geometry.py`)."""
    changes = []
    for row, num_tokens, num_past_tokens, tenant in targets:
        if not num_tokens:
            continue
        end_tokens = num_tokens + space.overread_tokens
        past_tokens = 0 if space.keeps_past else num_past_tokens
        for group in space.groups if groups is None else groups:
            first_page, num_pages = group.growth(row, past_tokens, end_tokens, exactly=exactly)
            if num_pages:
                classes = size_classes(num_pages, group.largest_class)
                changes.append(RowChange(group.table, row, first_page, classes, tenant))
    return changes


# ---- surplus ------------------------------------------------------------------------------


def retire_surplus(space: RowSpace, wanted: Mapping[Sequence, int] | None = None) -> int:
    """Retire live rows' memory beyond their (`wanted`) length and behind windows; returns bytes."""
    pool = space.pool
    with pool.lock:
        now = pool.reclaimer.new_fence()
        before_bytes = pool.stats().resident_bytes
        for sequence, num_tokens in _needed(space, wanted or {}):
            row, fence = sequence.row, now
            if not sequence.num_tokens:  # It has just begun and not used its memory yet.
                fence = pool.reclaimer.fence_since(space.rows.idle_since(row))
            for group in space.groups:
                group.retire_from(row, num_tokens, fence)
        if not space.keeps_past:
            retire_behind_windows(space)
        return before_bytes - pool.stats().resident_bytes


def surplus_bytes(space: RowSpace) -> int:
    """Bytes that `retire_surplus` would retire. Cost: proportional to the live rows."""
    idle: list[PageMapping] = []
    books = [group.books for group in space.groups if not group.is_fixed]
    for sequence, num_tokens in _needed(space, {}):
        for rows, token_bytes, page_bytes, _ in books:
            needed_bytes = num_tokens * token_bytes
            for mapping in reversed(rows[sequence.row].mappings):
                if mapping.first_page * page_bytes < needed_bytes:
                    break
                idle.append(mapping)
    if not space.keeps_past:
        for group, row, end_page in _behind_windows(space, space.live_sequences()):
            passed = group.table.overlapping(row, 0, end_page)
            idle += [mapping for mapping in passed if mapping.end_page <= end_page]
    return sum(each.extent.num_bytes for each in idle if not each.extent.is_shared)


@uninterrupted
def retire_behind_windows(space: RowSpace, sequences: Iterable[Sequence] | None = None) -> None:
    """Retire memory that no later query of these sequences (or all) can see."""
    concerned = space.live_sequences() if sequences is None else sequences
    for group, row, end_page in _behind_windows(space, concerned):
        group.table.retire_front(row, end_page, space.pool.reclaimer.new_fence())


def _behind_windows(
    space: RowSpace, sequences: Iterable[Sequence]
) -> Iterator[tuple[LayerGroup, int, int]]:
    """Yield `(group, row, first page that a query needs)` where a window has passed an extent."""
    windowed = [group for group in space.groups if group.window_tokens is not None]
    for each in sequences if windowed else ():
        num_tokens = each.num_tokens
        if space.prefixes.num_recorded(each.row):
            # A prefix hit is cut to whole blocks, and needs the window at its end.
            num_tokens = max(0, num_tokens - BLOCK_TOKENS + 1)
        for group in windowed:
            end_page = group.first_needed_page(num_tokens)
            mappings = group.table.rows[each.row].mappings
            if mappings and mappings[0].end_page <= end_page:
                yield group, each.row, end_page


def _needed(space: RowSpace, wanted: Mapping[Sequence, int]) -> list[tuple[Sequence, int]]:
    """Return the length up to which each live row must stay mapped."""
    overread_tokens = space.overread_tokens
    needed = [(each, each.num_tokens) for each in space.live_sequences()]
    if wanted:
        needed = [(each, max(to, wanted.get(each, 0))) for each, to in needed]
    return [(each, to + overread_tokens if to else 0) for each, to in needed]
