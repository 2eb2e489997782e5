"""Rows: which are empty, live or parked, and what becomes of their memory.

    empty --beginning--> live --park--> parked --retire_parked--> empty
                          '------take------'

A row that must give memory back is presented to the pool as a `Victim`.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter

from ...errors import ConfigError, InternalError, OutOfAddressSpaceError
from ..memory import Extent, ExtentPool, Victim
from .layer_group import LayerGroup
from .prefix import PrefixIndex, Where

# ---- victims -------------------------------------------------------------------------------------

#: Evictable extents with their first tokens, in the order of eviction.
Gives = Sequence[tuple[int, Extent]]


def ends_of(groups: Sequence[LayerGroup], row: int) -> Gives:
    """List the extents that a row can give up, last token first, but none up to a pinned one."""
    found = [each for group in groups for each in group.to_give(row)]
    pinned_token = max([first for first, mapping in found if mapping.num_pins], default=-1)
    ends = [(first, mapping.extent) for first, mapping in found if first > pinned_token]
    ends.sort(key=itemgetter(0), reverse=True)
    return ends


def victim_of(
    gives: Callable[[], Gives],
    retire: Callable[[int], None],
    *,
    freeable_bytes: int | None = None,
    last_used: int,
) -> Victim:
    """Make a victim: `gives` lists a row's evictable extents, `retire` cuts the row at a token."""

    def evict(num_bytes: int) -> int:
        evicted_bytes, keep_tokens = 0, None
        for first_token, extent in gives():
            if evicted_bytes >= num_bytes and first_token != keep_tokens:
                break
            if extent.is_freeable:
                evicted_bytes += extent.num_bytes
                keep_tokens = first_token
        if keep_tokens is not None:
            retire(keep_tokens)
        return evicted_bytes

    def give_up(extents: Collection[Extent]) -> None:
        retire(min(first_token for first_token, extent in gives() if extent in extents))

    shared: list[Extent] = []
    if freeable_bytes is None:
        freeable_bytes = 0
        for _, extent in gives():
            if extent.is_freeable:
                freeable_bytes += extent.num_bytes
            elif extent.is_of_budget and extent.num_live_mappings > 1:
                shared.append(extent)
    return Victim(
        last_used=last_used,
        freeable_bytes=freeable_bytes,
        evict=evict,
        shared=shared,
        give_up=give_up,
    )


# ---- rows ----------------------------------------------------------------------------------------


class Rows:
    """The rows of a cache with `groups`. Guarded by the pool's lock.

    `keep` is called before a parked row loses what is recorded after a number of tokens.

    Attributes:
        parked: The tick at which each parked row was parked, or last forked from; least recent
            first.
        now_s: The present time, set by the cache's user; the times of `park` are compared with it.
    """

    def __init__(
        self,
        num_rows: int,
        pool: ExtentPool,
        groups: Sequence[LayerGroup],
        prefixes: PrefixIndex,
        keep: Callable[[int, int], None],
    ):
        self.num_rows = num_rows
        self.parked: dict[int, int] = {}
        self.now_s = 0.0
        self._kept_until_s: dict[int, float] = {}  # Of parked rows.
        self._pool = pool
        self._groups = groups
        self._prefixes = prefixes
        self._keep = keep
        self._empty = list(range(num_rows))  # Sorted: low rows first, so views stay narrow.
        # Tick of the last known work on each row; for live rows only the reads by their forks.
        self._idle_since: dict[int, int] = {}

    def idle_since(self, row: int) -> int:
        """The tick of the last work submitted on `row`, parked or just taken; 0 for never."""
        return self._idle_since.get(row, 0)

    def touch(self, row: int) -> None:
        """Note that work on `row`, live or parked, may have been submitted up to now."""
        with self._pool.lock:
            now = self._pool.pressure.tick()
            self._idle_since[row] = now
            if row in self.parked:
                self.put_last(row, now)

    def put_last(self, row: int, now: int) -> None:
        """Let a parked row give way last, as one that was parked at tick `now`."""
        del self.parked[row]
        self.parked[row] = now

    def note_read(self, row: int) -> None:
        """Note that reads of a parked `row` were submitted; it was not used, so it ages on."""
        self._idle_since[row] = self._pool.pressure.tick()

    def note_idle(self, row: int, tick: int) -> None:
        """Note that no work is left on `row` if none was noted after `tick`."""
        if self._idle_since.get(row) == tick:
            self._idle_since[row] = 0

    def wait_for(self, row: int, stream: int) -> None:
        """Let `stream` wait for the work on a parked `row`, if some may be left."""
        idle_since = self.idle_since(row)
        if idle_since and not self._pool.reclaimer.has_passed(idle_since):
            self._pool.backend.join_streams(stream)

    # ---- choice ---------------------------------------------------------------------------

    def choose(self, num_tokens: int, with_prefix: Container[int] = ()) -> int:
        """Choose, without taking it, the row for a sequence of about `num_tokens` new tokens.

        Among parked rows not in `with_prefix` the smallest that is large enough, else the largest;
        without any the first empty row; else the parked one that gives way first.
        """
        sizes = {row: self.adoptable_tokens(row) for row in self.parked if row not in with_prefix}
        fitting = [row for row in sizes if sizes[row] >= max(1, num_tokens)]
        if fitting:
            return min(fitting, key=lambda row: sizes[row])
        if sizes:
            return max(sizes, key=lambda row: sizes[row])
        return self.choose_unneeded()

    def choose_unneeded(self, but: int | None = None) -> int:
        """Choose an empty row, else the parked one that gives way first; never row `but`."""
        if self._empty:
            return self._empty[0]
        for row in self.in_order():
            if row != but:
                return row
        raise OutOfAddressSpaceError(
            f"all {self.num_rows} rows hold live sequences; close one, or make the cache with "
            "more rows",
            needed_bytes=0,
        )

    def resident_tokens(self, row: int) -> int:
        """Tokens of `row` up to which memory is mapped."""
        return min([group.resident_tokens(row) for group in self._groups], default=0)

    def adoptable_tokens(self, row: int) -> int:
        """Tokens that a new sequence in `row` would find mapped and unshared."""
        return min([group.adoptable_tokens(row) for group in self._groups], default=0)

    # ---- live rows ------------------------------------------------------------------------

    def take(self, row: int, num_tokens: int, tenant: str | None, stream: int) -> None:
        """Make a free row live with its first `num_tokens` tokens, and scrub the rest of it."""
        is_parked = row in self.parked
        if is_parked:
            self._keep(row, num_tokens)
            self.wait_for(row, stream)
        elif row not in self._empty:
            raise ConfigError(f"row {row} of {self.num_rows} is not free")
        if not num_tokens:
            self.begin_anew(row, self.idle_since(row))
        self._prefixes.truncate(row, num_tokens)  # First, because scrubbing overwrites the rest.
        is_scrubbed = True  # Also if scrubbing fails half-way.
        try:
            is_scrubbed = any([it.scrub(row, num_tokens, tenant, stream) for it in self._groups])
        finally:
            if is_scrubbed:
                self.touch(row)
        fence = partial(self._pool.reclaimer.fence_since, self.idle_since(row))
        for group in self._groups:
            group.go_back(row, num_tokens, stream, fence)
        self._prefixes.move(row, Where.LIVE)
        if is_parked:
            del self.parked[row]
        else:
            self._empty.remove(row)

    def begin_anew(self, row: int, since: int) -> None:
        """Prepare `row`, unused since a tick, for token 0: retire runs that do not start there."""
        fence = None  # First, because it may fail.
        for group in self._groups:
            mappings = group.table.rows[row].mappings
            if fence is None and mappings and mappings[0].first_page:
                fence = self._pool.reclaimer.fence_since(since)
        for group in self._groups:
            if fence is not None and group.table.rows[row].first_page:
                group.retire_from(row, 0, fence)
            group.begin_row(row)

    @contextmanager
    def beginning(self, row: int | None = None) -> Iterator[int]:
        """Take a row without memory for the block to fill; if the block fails, empty it again."""
        with self._pool.lock:
            row = self.choose_unneeded() if row is None else row
            if row in self.parked:
                self.retire_parked(row, 0)
            # A row without memory needs no scrubbing and no wait for readers.
            elif row not in self._empty:
                raise ConfigError(f"row {row} of {self.num_rows} is not free")
            self._empty.remove(row)
            for group in self._groups:
                group.begin_row(row)
        try:
            yield row
        except BaseException:
            with self._pool.lock:
                self.parked[row] = self._idle_since[row] = self._pool.pressure.tick()
                self.retire_parked(row, 0)
            raise

    # ---- parked rows ----------------------------------------------------------------------

    def park(
        self, row: int, num_tokens: int, now: int, idle_since: int | None, kept_until_s: float
    ) -> None:
        """Park the live row of a sequence of `num_tokens` that ends at tick `now`.

        The sequence's work on it ended at tick `idle_since`, or at `now` if that is None. Until
        `kept_until_s` the row gives way after the tenant's others.
        """
        if not self._prefixes.num_recorded(row):
            self.begin_anew(row, now)
        for group in self._groups:
            group.park(row, num_tokens, now)
        self.parked[row] = now
        self._kept_until_s[row] = kept_until_s
        since = now if idle_since is None else idle_since
        self._idle_since[row] = max(since, self._idle_since.get(row, since))
        self._prefixes.move(row, Where.PARKED)

    def retire_parked(self, row: int, num_tokens: int = 0) -> None:
        """Retire a parked row's extents after its first `num_tokens` tokens."""
        self._keep(row, num_tokens)
        # Work submitted after `idle_since` does not read the row.
        fence = self._pool.reclaimer.fence_since(self.idle_since(row))
        for group in self._groups:
            group.retire_from(row, num_tokens, fence)
        self._prefixes.truncate(row, num_tokens)
        if not num_tokens:
            del self.parked[row]
            insort(self._empty, row)

    def _give(self, row: int, num_tokens: int) -> None:
        """Retire a parked row after `num_tokens` tokens.

        Retires all of it if other rows map everything before: it would free nothing any more.
        """
        left = [each for group in self._groups for each in group.to_give(row)]
        if all([its.extent.is_shared and not its.num_pins for at, its in left if at < num_tokens]):
            num_tokens = 0
        self.retire_parked(row, num_tokens)

    def in_order(self) -> list[int]:
        """Parked rows in the order in which they give way.

        With several tenants rows without a prefix come first. Each next row is of the tenant whose
        rows that are left have the most tokens: the least recently used one whose time has passed
        (`kept_until_s`), else the least recently used one. With one tenant, rows without a prefix
        are ordered like the others.
        """
        kept = {row for row in self.parked if self.kept_until_s(row) > self.now_s}
        rows = sorted(self.parked, key=kept.__contains__) if kept else list(self.parked)
        recorded = self._prefixes.recorded
        waiting: defaultdict[bytes, deque[int]] = defaultdict(deque)
        for row in rows:
            if row in recorded:
                waiting[self._prefixes.tenant(row)].append(row)
        if len(waiting) < 2:
            return rows
        order = [row for row in rows if row not in recorded]
        heap = [
            (-sum(map(self._prefixes.num_recorded, its)), self.parked[its[0]], its)
            for its in waiting.values()
        ]
        heapq.heapify(heap)
        while heap:
            missing, _, its = heapq.heappop(heap)
            order.append(row := its.popleft())
            if its:
                missing += self._prefixes.num_recorded(row)
                heapq.heappush(heap, (missing, self.parked[its[0]], its))
        return order

    def kept_until_s(self, row: int) -> float:
        """The time until which a parked row gives way after others of its tenant."""
        return self._kept_until_s.get(row, 0.0)

    def victims(self) -> Iterator[Victim]:
        """Yield the victims: checkpoints of live rows, and parked rows.

        Among the victims of other caches, the n-th row `in_order` counts as old as the n-th least
        recently used one.
        """
        for group in self._groups:
            for row in {each for each, _, _ in group.checkpoints() if each not in self.parked}:
                yield victim_of(
                    partial(ends_of, [group], row),
                    partial(group.drop_checkpoints, row),
                    last_used=self.idle_since(row),
                )
        for row, last_used in zip(self.in_order(), tuple(self.parked.values()), strict=True):
            yield victim_of(
                partial(ends_of, self._groups, row),
                partial(self._give, row),
                freeable_bytes=self._own_bytes(row),
                last_used=last_used,
            )

    def unshared_bytes(self, row: int) -> int:
        """Bytes that are mapped in a row behind the last page that may be shared."""
        num_bytes = 0
        for group in self._groups:
            pages = group.table.rows[row]
            first_page = max(pages.first_page, pages.shared_end_page)
            num_bytes += max(0, pages.end_page - first_page) * group.page_bytes
        return num_bytes

    def _own_bytes(self, row: int) -> int | None:
        """Bytes of a parked row, pinned extents included, if nothing in it is shared; else None."""
        if any([group.table.rows[row].shared_end_page for group in self._groups]):
            return None
        return sum([group.resident_bytes(row) for group in self._groups])

    def check(self) -> None:
        """Raise `InternalError` if the bytes of a parked row are not those of its extents."""
        for row in self.parked:
            told = self._own_bytes(row)
            extents = [each.extent for group in self._groups for each in group.mappings(row)]
            counted = sum(extent.num_bytes for extent in extents if extent.is_freeable)
            if told is not None and told != counted:
                raise InternalError(f"row {row}: own_bytes is {told}, its extents have {counted}")
