"""A row space: layer groups over one pool, and the states of their rows.

Forks, reorderings, swaps, files and other processes work on a row space. A row that must give
memory back is presented to the pool as a `Victim`.

See DESIGN.md, Note [How far a row may be written].
"""

from __future__ import annotations

from bisect import insort
from collections import abc
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

import torch

from ...errors import ClosedError, ConfigError, InternalError, OutOfAddressSpaceError
from ..backend import Backend
from ..memory import Extent, ExtentPool, Victim, pinned
from .cost import CostModel
from .device_memory import open_pool
from .fp8 import Scales
from .geometry import check_positive
from .layer_group import LayerGroup, stream_getter, torch_device
from .prefix import PrefixIndex, Where
from .state_group import StateGroup
from .stats import SharingStats

if TYPE_CHECKING:
    from .sequence import Sequence
    from .swap import MovedPrefixes

# ---- rows ----------------------------------------------------------------------------------------


class Rows:
    """The states of `num_rows` rows: empty, live or parked. Guarded by the pool's lock.

    `parked` has the tick at which each parked row was parked, or last forked from; least recent
    first.
    """

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self._empty = list(range(num_rows))  # Sorted: low rows first, so views stay narrow.
        self.parked: dict[int, int] = {}
        # Tick of the last known work on each row; for live rows only the reads by their forks.
        self._idle_since: dict[int, int] = {}

    def idle_since(self, row: int) -> int:
        """The tick of the last work submitted on `row`, parked or just taken; 0 for never."""
        return self._idle_since.get(row, 0)

    def touch(self, row: int, now: int) -> None:
        """Note that work on `row`, live or parked, may have been submitted up to tick `now`."""
        self._idle_since[row] = now
        if row in self.parked:
            del self.parked[row]
            self.parked[row] = now

    def choose(
        self,
        num_tokens: int,
        adoptable_tokens: Callable[[int], int],
        with_prefix: Container[int] = (),
    ) -> int:
        """Choose, without taking it, the row for a sequence of about `num_tokens` new tokens.

        Among parked rows not in `with_prefix` the smallest that is large enough, else the largest;
        without any the first empty row; else the least recently used parked one.
        """
        plain = [row for row in self.parked if row not in with_prefix]
        sizes = {row: adoptable_tokens(row) for row in plain}
        fitting = [row for row in plain if sizes[row] >= max(1, num_tokens)]
        if fitting:
            return min(fitting, key=lambda row: sizes[row])
        if plain:
            return max(plain, key=lambda row: sizes[row])
        return self.choose_unneeded()

    def choose_unneeded(self, but: int | None = None) -> int:
        """Choose an empty row, else the least recently used parked one; never row `but`."""
        if self._empty:
            return self._empty[0]
        for row in self.parked:
            if row != but:
                return row
        raise OutOfAddressSpaceError(
            f"all {self.num_rows} rows hold live sequences; close one, or make the cache with "
            "more rows",
            needed_bytes=0,
        )

    def check_free(self, row: int) -> None:
        """Raise `ConfigError` if there is no such row, or it is live already."""
        if row not in self.parked and row not in self._empty:
            raise ConfigError(f"row {row} of {self.num_rows} is not free")

    def take(self, row: int) -> None:
        """Make a free `row` live."""
        if row in self.parked:
            del self.parked[row]
        else:
            self.check_free(row)
            self._empty.remove(row)

    def park(self, row: int, now: int = 0, idle_since: int | None = None) -> None:
        """Park a live `row` with its memory; the caller's work on it ended at tick `idle_since`."""
        self.parked[row] = now
        since = now if idle_since is None else idle_since
        self._idle_since[row] = max(since, self._idle_since.get(row, since))

    def empty(self, row: int) -> None:
        """Mark a parked `row`, whose memory has been retired, as empty."""
        del self.parked[row]
        insort(self._empty, row)


# ---- victims -------------------------------------------------------------------------------------

#: Evictable extents with their first tokens, in the order of eviction.
Gives = abc.Sequence[tuple[int, Extent]]


def ends_of(groups: abc.Sequence[LayerGroup], row: int) -> Gives:
    """List the extents that a row can give up, last token first, but none up to a pinned one."""
    found = [each for group in groups for each in group.to_give(row)]
    pinned_token = max([first for first, mapping in found if mapping.num_pins], default=-1)
    ends = [(first, mapping.extent) for first, mapping in found if first > pinned_token]
    ends.sort(key=itemgetter(0), reverse=True)
    return ends


def own_bytes(groups: abc.Sequence[LayerGroup], row: int) -> int | None:
    """Bytes of a parked row, pinned extents included, if nothing in it is shared; else None."""
    if any([group.table.rows[row].shared_end_page for group in groups]):
        return None
    return sum([group.resident_bytes(row) for group in groups])


def check_own_bytes(groups: abc.Sequence[LayerGroup], row: int) -> None:
    """Raise `InternalError` if `own_bytes` of a parked row differs from a count of its extents."""
    told = own_bytes(groups, row)
    mapped = [mapping.extent for group in groups for _, mapping in group.to_give(row)]
    counted = sum(extent.num_bytes for extent in mapped if extent.is_freeable)
    if told is not None and told != counted:
        raise InternalError(f"row {row}: own_bytes is {told}, its extents have {counted}")


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


# ---- row space -----------------------------------------------------------------------------------

_BOOKS = attrgetter("books")


class RowSpace:
    """The base of `KVCache`: its memory and rows, without the sequences' interface.

    Attributes:
        states: The group of layers' states, which is one of `groups`; None without such layers.
        live: The sequence of each live row.
        moving: By row on its way to the host, a function that makes its victim.
        away: Parked rows in host memory; until they are back, no sequence may begin.
        overread_tokens: Tokens past a sequence's length that are kept resident; see
            `KVCache.keep_resident`.
        keeps_past: While true, sliding-window groups keep tokens that have left the window (for
            rollback).
        current_stream: Returns the raw handle of torch's current stream on the device.
    """

    def __init__(
        self,
        memory: str | Backend | ExtentPool,
        *,
        max_tokens: int,
        max_sequences: int,
        budget_bytes: int | None = None,
        host_budget_bytes: int | None = None,
        layers_per_group: int | None = None,
        cost_model: CostModel | None = None,
    ):
        check_positive("max_tokens", max_tokens)
        check_positive("max_sequences", max_sequences)
        for name, value in (
            ("budget_bytes", budget_bytes),
            ("host_budget_bytes", host_budget_bytes),
            ("layers_per_group", layers_per_group),
        ):
            if value is not None:
                check_positive(name, value)
        self.pool = open_pool(memory, budget_bytes, host_budget_bytes)
        self.pool.attach()
        backend = self.pool.backend
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        is_host = backend.name == "host"
        self.layers_per_group = 1 if layers_per_group is None and is_host else layers_per_group
        self.groups: list[LayerGroup] = []
        self.states: StateGroup | None = None
        self.places: dict[int, tuple[LayerGroup, int]] = {}
        self.rows = Rows(max_sequences)
        self.live: dict[int, Sequence] = {}
        self.moving: dict[int, Callable[[], Victim]] = {}
        self.prefixes = PrefixIndex()
        self.away: MovedPrefixes | None = None
        self.sharing = SharingStats()
        self.cost_model = cost_model or CostModel.of(backend)
        self.overread_tokens = 0
        self.keeps_past = False
        self.is_closed = self.is_closing = False
        self.current_stream = stream_getter(backend)
        self._side_stream: int | None = None
        with self.pool.lock:
            self.pool.pressure.add_source(self.victims)

    def check_open(self) -> None:
        """Raise `ClosedError` if the cache is closed, or its `close` has failed on the way."""
        if self.is_closing:
            raise ClosedError("this KVCache is closed; make a new one")

    # ---- layers ---------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the cache's tensors."""
        return torch_device(self.pool.backend)

    @property
    def layers(self) -> list[int]:
        """The layers that were added, as the caller numbers them."""
        return sorted(self.places)

    def place(self, layer: int) -> tuple[LayerGroup, int]:
        """Return the group of `layer` and its index there; raise `ConfigError` if there is none."""
        if layer not in self.places:
            raise ConfigError(f"layer {layer} was not added; there are {self.layers}")
        return self.places[layer]

    def members(self, group: LayerGroup) -> list[tuple[int, int]]:
        """Return `(place, layer)` of each layer in `group`, in order, without dropped ones."""
        return sorted((at, layer) for layer, (home, at) in self.places.items() if home is group)

    def keys(self, layer: int) -> torch.Tensor:
        """Return all rows' keys of `layer`: `[rows, row_tokens, k_heads, k_dim]`, mostly unmapped.

        For kernels that are told rows and lengths; values are as stored (see `scales`). Only tokens
        below a live sequence's `num_tokens` (and `overread_tokens` more) may be touched.
        """
        self.check_open()
        group, at = self.place(layer)
        return group.views.keys[at].transpose(1, 2)

    def values(self, layer: int) -> torch.Tensor:
        """Return all rows' values of `layer`: `[rows, row_tokens, v_heads, v_dim]`, as `keys`."""
        self.check_open()
        group, at = self.place(layer)
        return group.views.values[at].transpose(1, 2)

    # ---- streams --------------------------------------------------------------------------

    def scales(self, layer: int) -> Scales | None:
        """Return the scales of stored keys and values of `layer`; None if unscaled."""
        group, at = self.place(layer)
        return group.scales_at(at)

    def note_stream(self) -> None:
        """Note that torch's current stream works on this cache's memory. Cost: about 0.3 µs."""
        self.pool.backend.note_stream(self.current_stream())

    def side_stream(self) -> int:
        """Return the stream on which sequences are swapped, made on first use."""
        if self._side_stream is None:
            self._side_stream = self.pool.backend.new_stream()
        return self._side_stream

    def end_side_stream(self) -> None:
        """Destroy the side stream. Idempotent."""
        if self._side_stream is not None:
            self.pool.backend.stream_destroy(self._side_stream)
            self._side_stream = None

    # ---- contents -------------------------------------------------------------------------

    def state_row(self, row: int, num_tokens: int) -> int | None:
        """The row of `states`, if any, with the state of `row` after `num_tokens` tokens."""
        assert self.states is not None
        if row in self.live and self.live[row].num_tokens == num_tokens:
            return row
        return self.states.at_rest(row).get(num_tokens)

    def keeps(self, row: int, num_tokens: int) -> bool:
        """Whether `row` holds all that a query after `num_tokens` tokens sees."""
        if num_tokens and self.states is not None and self.state_row(row, num_tokens) is None:
            return False
        return all(
            each.keeps(row, num_tokens) and each.reaches(row, num_tokens) for each in self.groups
        )

    def check_keeps(self, row: int, num_tokens: int, doing: str) -> None:
        """Raise `ConfigError`, which names `doing`, unless `keeps` or there are no tokens."""
        if num_tokens and self.states is not None and self.state_row(row, num_tokens) is None:
            lengths = [*sorted(self.states.at_rest(row)), self.live[row].num_tokens]
            raise ConfigError(
                f"cannot {doing} {num_tokens} tokens: layers keep a state of the sequence after "
                f"{' and '.join(map(str, lengths))} tokens only"
            )
        if num_tokens and not self.keeps(row, num_tokens):
            raise ConfigError(
                f"cannot {doing} {num_tokens} tokens: a sliding-window layer no longer holds what "
                "they would see (set keeps_past before appending)"
            )

    def check_stateless(self, doing: str) -> None:
        """Raise `ConfigError`, which names `doing`, if layers keep states."""
        if self.states is not None:
            raise ConfigError(
                f"cannot {doing} sequences of a model whose layers keep states (linear attention); "
                "that works only for models with keys and values alone"
            )

    def can_begin(self, row: int, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` in `row` has all pages mapped, over-read included."""
        end_tokens = num_tokens + self.overread_tokens
        return all(
            group.resident_tokens(row) >= min(end_tokens, group.geometry.row_tokens)
            for group in self.groups
        )

    def resident_tokens(self, row: int) -> int:
        """Tokens of `row` up to which memory is mapped."""
        return min((group.resident_tokens(row) for group in self.groups), default=0)

    def adoptable_tokens(self, row: int) -> int:
        """Tokens that a new sequence in `row` would find mapped and unshared."""
        return min((group.adoptable_tokens(row) for group in self.groups), default=0)

    def writable_tokens(self, sequences: Iterable[Sequence]) -> list[int]:
        """Return `Sequence.writable_tokens` of each; fast: every step asks for its rows."""
        books, overread_tokens = list(map(_BOOKS, self.groups)), self.overread_tokens
        found = []
        for sequence in sequences:
            row, num_tokens, room = sequence.row, sequence.num_tokens, self.max_tokens
            for rows, token_bytes, page_bytes, row_tokens in books:
                pages = rows[row]
                mappings, shared_end_page = pages.mappings, pages.shared_end_page
                if not mappings or (
                    shared_end_page and num_tokens * token_bytes < shared_end_page * page_bytes
                ):
                    room = 0
                    break
                last = mappings[-1]
                end_bytes = (last.first_page + last.extent.num_pages) * page_bytes
                end_tokens = end_bytes // token_bytes
                if end_tokens > row_tokens:
                    end_tokens = row_tokens
                if end_tokens - overread_tokens < room:
                    room = end_tokens - overread_tokens
            if not books or sequence.transfer or sequence.swapped or room < 0:
                room = 0
            found.append(room)
        return found

    def live_sequences(self) -> list[Sequence]:
        """The sequences that kernels can read: neither swapped out nor moving."""
        return [each for each in self.live.values() if each.is_resident]

    def pinned_row(self, row: int) -> AbstractContextManager[None]:
        """Keep the extents of `row` mapped where they are while a block reads them."""
        its = (mapping for group in self.groups for mapping in group.table.rows[row].mappings)
        return pinned(self.pool, its)

    def pinned_state(self, row: int, num_tokens: int) -> AbstractContextManager[None]:
        """Keep the state of `row` after `num_tokens`, if there is one, in a block that reads it."""
        at = None if self.states is None else self.state_row(row, num_tokens)
        rows = self.states.table.rows if self.states is not None else []
        return pinned(self.pool, () if at is None else rows[at].mappings)

    def submitting(
        self, writes: Iterable[tuple[int, int, int]], checkpoints: Iterable[int] = ()
    ) -> AbstractContextManager[None]:
        """Submit a step in this block; with checks on, check what it writes (I10).

        `writes` are `(row, start, end)`, and `checkpoints` rows of `states`.
        """
        if self.pool.submitted is None:
            return nullcontext()
        ranges = [group.write_range(*each) for each in writes for group in self.groups]
        if self.states is not None:
            ranges += [self.states.write_range(at, 0, 1) for at in checkpoints]
        return self.pool.submitted.submitting(ranges)

    # ---- row states -----------------------------------------------------------------------

    def take(self, row: int, num_tokens: int, tenant: str | None) -> None:
        """Make a free row live with its first `num_tokens` tokens, and scrub the rest of it."""
        self.rows.check_free(row)
        if row in self.rows.parked:
            # Another stream may still read memory that this one will overwrite.
            self.pool.backend.join_streams(self.current_stream())
        if not num_tokens:
            self.begin_anew(row, self.rows.idle_since(row))
        self.prefixes.truncate(row, num_tokens)  # First, because scrubbing overwrites the rest.
        stream = self.current_stream()
        is_scrubbed = True  # Also if scrubbing fails half-way.
        try:
            is_scrubbed = any([it.scrub(row, num_tokens, tenant, stream) for it in self.groups])
        finally:
            if is_scrubbed:
                self.note_used(row)
        if self.states is not None:
            fence = partial(self.pool.reclaimer.fence_since, self.rows.idle_since(row))
            self.states.go_back(row, num_tokens, stream, fence)
        self.prefixes.move(row, Where.LIVE)
        self.rows.take(row)

    def note_used(self, row: int) -> None:
        """Note that work on `row` may have been submitted up to now."""
        with self.pool.lock:
            self.rows.touch(row, self.pool.pressure.tick())

    def begin_anew(self, row: int, since: int) -> None:
        """Prepare `row`, unused since a tick, for token 0: retire runs that do not start there."""
        displaced = [group for group in self.groups if group.table.rows[row].first_page]
        if displaced:
            fence = self.pool.reclaimer.fence_since(since)
            for group in displaced:
                group.retire_from(row, 0, fence)
        for group in self.groups:
            group.begin_row(row)

    @contextmanager
    def beginning(self, row: int | None = None) -> Iterator[int]:
        """Take a row without memory for the block to fill; if the block fails, empty it again."""
        with self.pool.lock:
            row = self.rows.choose_unneeded() if row is None else row
            if row in self.rows.parked:
                self.retire_parked(row, 0)
            # A row without memory needs no scrubbing and no wait for readers.
            self.rows.take(row)
            for group in self.groups:
                group.begin_row(row)
        try:
            yield row
        except BaseException:
            with self.pool.lock:
                self.rows.park(row, self.pool.pressure.tick())
                self.retire_parked(row, 0)
            raise

    def park(self, row: int, idle_since: int | None, now: int) -> None:
        """Park the row of a sequence that ends at tick `now`. Locked."""
        if not self.prefixes.num_recorded(row):
            self.begin_anew(row, now)
        if self.states is not None:
            self.states.park(row, self.live[row].num_tokens, now)
        del self.live[row]
        self.rows.park(row, now, idle_since)
        self.prefixes.move(row, Where.PARKED)

    def retire_parked(self, row: int, num_tokens: int) -> None:
        """Retire a parked row's extents after its first `num_tokens` tokens."""
        # Work submitted after `idle_since` does not read the row.
        self.retire_from(row, num_tokens, self.rows.idle_since(row))
        if not num_tokens:
            self.rows.empty(row)

    def retire_from(self, row: int, num_tokens: int, since: int) -> None:
        """Retire what holds none of the first `num_tokens` tokens of `row`, unused since a tick."""
        fence = self.pool.reclaimer.fence_since(since)
        for group in self.groups:
            group.retire_from(row, num_tokens, fence)
        self.prefixes.truncate(row, num_tokens)

    def victims(self) -> Iterable[Victim]:
        """Yield the victims of this cache.

        They are sequences moving to the host, checkpoints of live rows, and parked rows.
        """
        for victim in tuple(self.moving.values()):
            yield victim()
        if self.states is not None:
            for row in {row for row, _, _ in self.states.checkpoints() if row in self.live}:
                yield victim_of(
                    partial(ends_of, [self.states], row),
                    partial(self.drop_checkpoints, row),
                    last_used=self.rows.idle_since(row),
                )
        for row, last_used in tuple(self.rows.parked.items()):
            yield victim_of(
                partial(ends_of, self.groups, row),
                partial(self.retire_parked, row),
                freeable_bytes=own_bytes(self.groups, row),
                last_used=last_used,
            )

    def drop_checkpoints(self, row: int, num_tokens: int = 0) -> None:
        """Retire the checkpoints of a live row after more than `num_tokens` tokens. Locked."""
        if self.states is not None and self.states.at_rest(row):
            self.states.drop_after(row, num_tokens, self.pool.reclaimer.new_fence())
