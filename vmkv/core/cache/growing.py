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
from typing import TYPE_CHECKING, NamedTuple

from ...errors import ConfigError, OutOfPagesError
from ..interrupts import uninterrupted
from ..memory import Change, Extent, PageMapping, RowChange, Scrub, size_classes
from .forking import unshare
from .layer_group import LayerGroup
from .prefix import BLOCK_TOKENS

if TYPE_CHECKING:
    from .kv_cache import KVCache
    from .sequence import Sequence


class Target(NamedTuple):
    """A row that must hold `num_tokens`; later queries are at `num_past_tokens` or beyond."""

    row: int
    num_tokens: int
    num_past_tokens: int
    tenant: object = None


@uninterrupted
def map_and_lengthen(
    cache: KVCache,
    short: Iterable[tuple[Sequence, int]],
    wanted: abc.Sequence[tuple[Sequence, int]],
) -> None:
    """Unshare and map memory for `short`; surplus beyond `wanted` may be retired for it."""
    longest = _longest(short)
    targets = []
    for sequence, num_tokens in longest.items():
        if num_tokens > sequence.num_tokens:
            unshare_from(cache, sequence, sequence.num_tokens)
        targets.append(Target(sequence.row, num_tokens, sequence.num_tokens, sequence.tenant))
    try:
        map_rows(cache, targets)
    except OutOfPagesError:
        if not retire_surplus(cache, _longest(wanted)):
            raise
        map_rows(cache, targets)
    finally:  # Also after a failure, which may have left filled memory mapped.
        for sequence in longest:
            if not sequence.num_tokens:
                cache.rows.touch(sequence.row)
    cache.lengthen(wanted)


@uninterrupted
def unshare_from(cache: KVCache, sequence: Sequence, first: int) -> None:
    """Give `sequence` a copy of what it shares from token `first` on."""
    for group in cache.groups:
        if group.table.rows[sequence.row].shared_end_page:
            try:
                copied = unshare(
                    group,
                    sequence.row,
                    sequence.num_tokens,
                    first,
                    tenant=sequence.tenant,
                    stream=cache.current_stream(),
                )
            finally:
                cache.rows.touch(sequence.row)
            cache.sharing.copied_on_write_bytes += copied


def _longest(targets: Iterable[tuple[Sequence, int]]) -> dict[Sequence, int]:
    longest: dict[Sequence, int] = {}
    for sequence, num_tokens in targets:
        longest[sequence] = max(num_tokens, longest.get(sequence, 0))
    return longest


def keep_resident(cache: KVCache, overread_tokens: int) -> None:
    """Implement `KVCache.keep_resident`."""
    before = cache.overread_tokens
    if cache.pool.scrub is Scrub.POISON:
        raise ConfigError(
            f"a kernel that fetches {overread_tokens} tokens past the length would fetch the NaN "
            'of scrub="poison"; choose another attention backend, or another scrub'
        )
    cache.overread_tokens = overread_tokens
    try:
        live = cache.live_sequences()
        targets = [Target(each.row, each.num_tokens, each.num_tokens, each.tenant) for each in live]
        cache.pool.asking_broker(partial(map_rows, cache, targets))
    except BaseException:
        cache.overread_tokens = before
        raise


# ---- mapping ------------------------------------------------------------------------------


def map_rows(
    cache: KVCache, targets: abc.Sequence[Target], groups: abc.Sequence[LayerGroup] | None = None
) -> None:
    """Map the missing pages of `targets`, each another row, in `groups` (default: all).

    If the pool is short, parked rows of all its caches are evicted and no growth quantum is added.
    After `OutOfPagesError` or `DriverError` nothing was mapped.
    """
    pool = cache.pool
    pool.check_process()  # Before the lock, which a forked child may wait for in vain.
    changes = _plan(cache, targets, groups, exactly=False)
    if pool.reclaimer.batches:
        pool.reclaimer.poll()
    needed_bytes = sum([pool.page_bytes << size for each in changes for size in each.classes])
    if needed_bytes <= pool.available_bytes:
        with suppress(OutOfPagesError):  # The device may have less than the budget.
            _map(cache, changes, pool.acquire)
            return
    _map(cache, _plan(cache, targets, groups, exactly=True), pool.acquire_or_evict)


def _map(
    cache: KVCache,
    changes: abc.Sequence[RowChange],
    acquire: Callable[[abc.Sequence[int]], list[Extent]],
) -> None:
    if changes:
        stream = cache.current_stream()
        with Change(cache.pool, changes, acquire=acquire) as made:
            made.map(stream)
            made.fill(stream)


def _plan(
    cache: KVCache,
    targets: Iterable[Target],
    groups: abc.Sequence[LayerGroup] | None = None,
    *,
    exactly: bool = False,
) -> list[RowChange]:
    """Plan the row changes: `exactly` the pages needed, or a growth quantum.

    See DESIGN.md, Note [Growth quanta].
    """
    changes = []
    for row, num_tokens, num_past_tokens, tenant in targets:
        if not num_tokens:
            continue
        end_tokens = num_tokens + cache.overread_tokens
        past_tokens = 0 if cache.keeps_past else num_past_tokens
        for group in cache.groups if groups is None else groups:
            first_page, num_pages = group.growth(row, past_tokens, end_tokens, exactly=exactly)
            if num_pages:
                classes = size_classes(num_pages, group.largest_class)
                changes.append(RowChange(group.table, row, first_page, classes, tenant))
    return changes


# ---- surplus ------------------------------------------------------------------------------


def retire_surplus(cache: KVCache, wanted: Mapping[Sequence, int] | None = None) -> int:
    """Retire live rows' memory beyond their (`wanted`) length and behind windows; returns bytes."""
    pool = cache.pool
    with pool.lock:
        now = pool.reclaimer.new_fence()
        before_bytes = pool.stats().resident_bytes
        for sequence, num_tokens in _needed(cache, wanted or {}):
            row, fence = sequence.row, now
            if not sequence.num_tokens:  # It has just begun and not used its memory yet.
                fence = pool.reclaimer.fence_since(cache.rows.idle_since(row))
            for group in cache.groups:
                group.retire_from(row, num_tokens, fence)
        if not cache.keeps_past:
            retire_behind_windows(cache, cache.live_sequences())
        return before_bytes - pool.stats().resident_bytes


def retire_unneeded(cache: KVCache) -> None:
    """Retire all that no live sequence needs, and wait until it is unmapped."""
    with cache.pool.lock:
        for row in cache.rows.in_order():
            cache.rows.retire_parked(row)
        for row in cache.live:
            for group in cache.groups:
                group.drop_checkpoints(row, 0)
        retire_surplus(cache)
    cache.pool.reclaimer.wait()


def surplus_bytes(cache: KVCache) -> int:
    """Bytes that `retire_surplus` would retire. Cost: proportional to the live rows."""
    idle: list[PageMapping] = []
    books = [group.books for group in cache.groups if not group.is_fixed]
    for sequence, num_tokens in _needed(cache, {}):
        for rows, token_bytes, page_bytes, _ in books:
            needed_bytes = num_tokens * token_bytes
            for mapping in reversed(rows[sequence.row].mappings):
                if mapping.first_page * page_bytes < needed_bytes:
                    break
                idle.append(mapping)
    if not cache.keeps_past:
        for group, row, end_page in _behind_windows(cache, cache.live_sequences()):
            passed = group.table.overlapping(row, 0, end_page)
            idle += [mapping for mapping in passed if mapping.end_page <= end_page]
    return sum(each.extent.num_bytes for each in idle if not each.extent.is_shared)


@uninterrupted
def retire_behind_windows(cache: KVCache, sequences: Iterable[Sequence]) -> None:
    """Retire memory that no later query of `sequences` can see."""
    for group, row, end_page in _behind_windows(cache, sequences):
        group.table.retire_front(row, end_page, cache.pool.reclaimer.new_fence())


def _behind_windows(
    cache: KVCache, sequences: Iterable[Sequence]
) -> Iterator[tuple[LayerGroup, int, int]]:
    """Yield `(group, row, first page that a query needs)` where a window has passed an extent."""
    windowed = [group for group in cache.groups if group.window_tokens is not None]
    for each in sequences if windowed else ():
        num_tokens = each.num_tokens
        if cache.prefixes.num_recorded(each.row):
            # A prefix hit is cut to whole blocks, and needs the window at its end.
            num_tokens = max(0, num_tokens - BLOCK_TOKENS + 1)
        for group in windowed:
            if end_page := group.passed_page(each.row, num_tokens):
                yield group, each.row, end_page


def _needed(cache: KVCache, wanted: Mapping[Sequence, int]) -> list[tuple[Sequence, int]]:
    """Return the length up to which each live row must stay mapped."""
    overread_tokens = cache.overread_tokens
    needed = [(each, each.num_tokens) for each in cache.live_sequences()]
    if wanted:
        needed = [(each, max(to, wanted.get(each, 0))) for each, to in needed]
    return [(each, to + overread_tokens if to else 0) for each, to in needed]
