"""Where sequences begin and end: which row they get, what is there already, what they leave.

What `KVCache` is without growth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as List_
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, cast

from ..backend import Backend, MemoryLocation
from ..errors import CapacityError, ConfigError
from ..memory import ExtentPool, Victim, pinned
from .contents import can_begin, can_extend, keeps, resident_tokens, whole_bytes
from .cost import CostModel
from .forking import fork_row
from .layered import LayeredCache
from .prefix import PrefixIndex
from .rows import Rows
from .sequence import Sequence
from .spill import oldest, relocate, spilled
from .stats import SharingStats
from .swap import Transfer, begin_swap_out, moving_ends, swap_in
from .transaction import Target
from .unshare import unshare
from .victims import ends_of, victim_of

if TYPE_CHECKING:
    from .kv_cache import KVCache

#: Of the rows that hold a prompt's beginning, live and parked, so many are compared: the last ones,
#: which were cut where it ends if any was. To compare all would make hits of many costly.
_HOLDERS_LOOKED_AT = 4


class RowedCache(LayeredCache):
    """Rows that sequences take, share and leave. Args: as of `KVCache`."""

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
        super().__init__(
            memory,
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            budget_bytes=budget_bytes,
            host_budget_bytes=host_budget_bytes,
            layers_per_group=layers_per_group,
        )
        self.cost_model = cost_model or CostModel.of(self.pool.backend)
        self.prefixes = PrefixIndex()
        self.sharing = SharingStats()
        self._rows = Rows(self.max_sequences)
        self._moving: list[Sequence] = []
        self.pool.pressure.add_source(self._victims)

    # ---- beginning ------------------------------------------------------------------------

    def open(
        self,
        num_tokens: int = 0,
        *,
        row: int | None = None,
        prompt: List_[int] | None = None,
        tenant: str | None = None,
    ) -> Sequence:
        """Begin a sequence: empty, or with what the cache still holds of its prompt.

        Args:
            num_tokens: About how long it will become: helps to choose the parked row to adopt.
            row: Take just this row; it starts empty.
            prompt: The tokens it will begin with. The longest beginning that a live or parked row
                holds (see `Sequence.record`), short of the last token, is there already: the
                sequence's `num_tokens` says how much.
            tenant: Whose it is: prefixes of other tenants are not found, and memory is scrubbed
                between tenants where the pool says so.

        Raises:
            OutOfAddressSpaceError: Every row holds a live sequence.
            ConfigError: `row` is live, or does not exist; or the prompt is none.
            DriverError: The tail of a prefix could not be copied. No sequence.

        Cost: no driver call where a parked row is adopted, with its prefix or without. A prefix
            that other rows hold costs what a fork does.
        """
        self.check_open()
        self.note_stream()
        with self.pool.lock:
            if prompt is not None and row is None:
                sequence = self._open_with_prefix(prompt, num_tokens, tenant)
                if sequence is not None:
                    return sequence
            if row is None:
                has_prefix = self.prefixes.num_recorded
                row = self._rows.choose(
                    num_tokens, self._adoptable_tokens, lambda row: has_prefix(row) > 0
                )
            return self._adopt(row, 0, tenant)

    def _open_with_prefix(
        self, prompt: List_[int], num_tokens: int, tenant: str | None
    ) -> Sequence | None:
        """A sequence that begins with the longest prefix found; None if there is none."""
        for match in self.prefixes.matches(prompt[: len(prompt) - 1], tenant):
            parked = self._holders(match.parked, match.num_tokens)
            # Its memory is all there. What else it holds is lost, so it should not be much.
            whole = [
                row
                for row in parked
                if self.prefixes.num_recorded(row) <= 2 * match.num_tokens
                and can_extend(self.groups, row, match.num_tokens)
                and self._can_begin(row, match.num_tokens)
            ]
            if whole:
                row = min(whole, key=self.prefixes.num_recorded)
                sequence = self._adopt(row, match.num_tokens, tenant)
            else:
                holders = parked + self._holders(match.live, match.num_tokens)
                if not holders:
                    continue
                row = max(holders, key=lambda row: whole_bytes(self.groups, row, match.num_tokens))
                try:
                    sequence = self._fork(self, row, match.num_tokens, tenant)
                except CapacityError:
                    # No second row, or no memory for the tail: one row can be had as it is. Looked
                    # for anew: who was parked may have given way to the attempt.
                    parked = self._holders(match.parked, match.num_tokens)
                    parked = [row for row in parked if self._can_begin(row, match.num_tokens)]
                    if not parked:
                        break
                    row = min(parked, key=self.prefixes.num_recorded)
                    sequence = self._adopt(row, match.num_tokens, tenant)
                self._rows.touch(row, self.pool.pressure.tick())
            self.prefixes.note_hit(row, match.num_tokens)
            sequence.num_cached_tokens = match.num_tokens
            return sequence
        self.prefixes.note_miss()
        return None

    def _holders(self, rows: Iterator[int], num_tokens: int) -> list[int]:
        """The first few of `rows` from which a sequence of `num_tokens` tokens can begin.

        Those that turn out to have let go of something are not looked at again.
        """
        found: list[int] = []
        lost: list[int] = []
        for row in rows:
            (found if self._keeps(row, num_tokens) else lost).append(row)
            if len(found) == _HOLDERS_LOOKED_AT:
                break
        for row in lost:
            self.prefixes.lose_short(row, max(each.shortest_kept(row) for each in self.groups))
        return found

    def _adopt(self, row: int, num_tokens: int, tenant: str | None) -> Sequence:
        self._take(row, num_tokens, tenant)
        return self._begun(row, num_tokens, tenant)

    def _take(self, row: int, num_tokens: int, tenant: str | None) -> None:
        """Make an empty or parked row live, with the first `num_tokens` tokens that it holds.

        Every sequence begins here: what the row knows of the one before is forgotten.
        """
        self._rows.check_free(row)
        if self._rows.is_parked(row):
            # Another stream may still read what this one will overwrite.
            self.pool.backend.join_streams(self.current_stream())
        if not num_tokens:
            self._begin_anew(row)
        self.prefixes.truncate(row, num_tokens)  # First: what follows overwrites the rest.
        for group in self.groups:
            group.scrub(row, num_tokens, tenant, self.current_stream())
        self.prefixes.take(row)
        self._rows.take(row)

    def _begin_anew(self, row: int) -> None:
        """`row` will be written from its first token on: it remembers nothing of what was before.

        Retires runs that a window has moved off the row's start: no new beginning can use them.
        """
        displaced = [group for group in self.groups if group.table.rows[row].first_page]
        if displaced:
            fence = self.pool.reclaimer.new_fence()
            for group in displaced:
                group.retire_from(row, 0, fence)
        for group in self.groups:
            group.begin_row(row)

    def fork(self, source: Sequence, num_tokens: int, *, row: int | None = None) -> Sequence:
        """See `Sequence.fork`. `source` may be of another cache of the same pool and layers."""
        self.check_open()
        origin = source.cache
        source.check_open()
        if num_tokens > source.num_tokens:
            raise ConfigError(f"{source} cannot be forked at {num_tokens} tokens: it holds fewer")
        self.note_stream()
        with self.pool.lock:
            if num_tokens and not origin._keeps(source.row, num_tokens):
                raise ConfigError(
                    f"cannot fork at {num_tokens} tokens: a sliding-window layer has let go of "
                    "what they would see"
                )
            return self._fork(origin, source.row, num_tokens, source.tenant, row)

    def _fork(
        self,
        origin: RowedCache,
        source_row: int,
        num_tokens: int,
        tenant: str | None,
        row: int | None = None,
    ) -> Sequence:
        if row is None:
            row = self._rows.choose_unneeded(but=source_row if origin is self else None)

        def fill(row: int) -> None:
            if num_tokens:
                self.pool.backend.join_streams(self.current_stream())
                forks = fork_row(origin, self, (source_row, row), num_tokens, tenant)
                self.sharing.note_fork(forks)

        sequence = self.begin(num_tokens, tenant, fill, row=row)
        if origin is self:
            self.prefixes.copy([(source_row, row, tenant)], num_tokens)
        else:
            known = origin.prefixes.token_ids(source_row)[:num_tokens]
            self.prefixes.record(row, known, tenant)
        return sequence

    def begin(
        self,
        num_tokens: int,
        tenant: str | None,
        fill: Callable[[int], None],
        *,
        row: int | None = None,
    ) -> Sequence:
        """A sequence of `num_tokens` tokens, which `fill` brings into a row without memory.

        Raises:
            OutOfAddressSpaceError: Every row holds a live sequence.
            ConfigError: `row` is live, or does not exist.
            VMKVError: Whatever `fill` raises; what it mapped in the row goes. No sequence.
        """
        with self.pool.lock:
            if row is None:
                row = self._rows.choose_unneeded()
            if self._rows.is_parked(row):
                self._retire_parked(row, 0)
            self._take(row, 0, tenant)
        try:
            fill(row)
        except BaseException:
            with self.pool.lock:
                self._rows.park(row, self.pool.pressure.tick())
                self._retire_parked(row, 0)
            raise
        return self._begun(row, num_tokens, tenant)

    def map_row(self, row: int, num_tokens: int, tenant: str | None) -> None:
        """Map what a row lacks of `num_tokens` tokens, for `begin`; raises what `append` does."""
        self._grow([Target(row, num_tokens, num_tokens, tenant)], self.groups)

    def _begun(self, row: int, num_tokens: int, tenant: str | None) -> Sequence:
        cache = cast("KVCache", self)  # The only class that is ever made of this one.
        sequence = self._sequences[row] = Sequence(cache, row, num_tokens, tenant)
        return sequence

    def record(self, sequence: Sequence, token_ids: List_[int]) -> None:
        """See `Sequence.record`."""
        sequence.check_open()
        with self.pool.lock:
            recorded = self.prefixes.num_recorded(sequence.row)
            if recorded + len(token_ids) > sequence.num_tokens:
                raise ConfigError(
                    f"{sequence} cannot have {len(token_ids)} tokens recorded after {recorded}: "
                    "append first"
                )
            self.prefixes.record(sequence.row, token_ids, sequence.tenant)

    # ---- ending ---------------------------------------------------------------------------

    def park(self, sequence: Sequence) -> None:
        """See `Sequence.close`."""
        if not self.is_closed:
            with self.pool.lock:
                self._drop_swapped(sequence)
                self._drop_spilled(sequence.row)
                if not self.prefixes.num_recorded(sequence.row):
                    self._begin_anew(sequence.row)
                del self._sequences[sequence.row]
                self._rows.park(sequence.row, self.pool.pressure.tick())
                self.prefixes.park(sequence.row)
        sequence.is_closed = True

    # ---- swapping -------------------------------------------------------------------------

    def swap_out(self, sequence: Sequence, wait: bool) -> Transfer | None:
        """See `Sequence.swap_out`."""
        self.note_stream()
        transfer = sequence.transfer = begin_swap_out(self, sequence)
        with self.pool.lock:
            self._moving.append(sequence)
        if wait:
            transfer.finish()
        return sequence.transfer

    def let_go(self, sequence: Sequence) -> None:
        """A moving sequence is swapped out from now on: its device memory is retired.

        Raises:
            DriverError: It is still moving.
        """
        with self.pool.lock:
            transfer = sequence.transfer
            if transfer is not None:
                transfer.swapped.retire(self.pool.reclaimer.new_fence())
                sequence.swapped, sequence.transfer = transfer.swapped, None
                self._moving.remove(sequence)
                self.prefixes.hide(sequence.row)
                self.sharing.swapped_out_bytes += transfer.swapped.num_bytes

    def cancel_transfer(self, sequence: Sequence) -> None:
        """Leave a moving sequence where it is."""
        with self.pool.lock:
            if sequence.transfer is not None:
                sequence.transfer.swapped.drop(self.pool)
                sequence.transfer = None
                self._moving.remove(sequence)

    def swap_in(self, sequence: Sequence) -> None:
        """See `Sequence.swap_in`."""
        self.cancel_transfer(sequence)
        if sequence.swapped is not None:
            self.note_stream()
            swap_in(self, sequence.swapped, sequence.tenant)
            self.sharing.swapped_in_bytes += sequence.swapped.num_bytes
            sequence.swapped = None
            with self.pool.lock:
                self.prefixes.take(sequence.row)

    def spill(self, sequence: Sequence, num_bytes: int) -> int:
        """See `Sequence.spill`."""
        self.note_stream()
        chosen = oldest(self.groups, sequence.row, sequence.num_tokens, num_bytes)
        return relocate(self, sequence.row, chosen, MemoryLocation.HOST, sequence.tenant)

    def unspill(self, sequence: Sequence) -> int:
        """See `Sequence.unspill`."""
        self.note_stream()
        chosen = spilled(self.groups, sequence.row)
        return relocate(self, sequence.row, chosen, MemoryLocation.DEVICE, sequence.tenant)

    def _drop_spilled(self, row: int) -> None:
        """Retire what a row that ends has in host memory, and what comes behind it."""
        tokens = [
            group.token_at(mapping.first_page) for group, mapping in spilled(self.groups, row)
        ]
        if tokens:
            fence = self.pool.reclaimer.new_fence()
            for group in self.groups:
                group.retire_from(row, min(tokens), fence)
            self.prefixes.truncate(row, min(tokens))

    def _drop_swapped(self, sequence: Sequence) -> None:
        """Let go of what a sequence has in host memory, or is sending there."""
        self.cancel_transfer(sequence)
        if sequence.swapped is not None:
            sequence.swapped.drop(self.pool)
            sequence.swapped = None
            self.prefixes.truncate(sequence.row, resident_tokens(self.groups, sequence.row))

    def live_sequences(self) -> list[Sequence]:
        """Those that kernels can read: neither swapped out nor moving."""
        return [each for each in self._sequences.values() if each.is_resident]

    def pinned_row(self, row: int) -> AbstractContextManager[None]:
        """For the length of a block, `row` is read: it stays mapped where it is."""
        its = (mapping for group in self.groups for mapping in group.table.rows[row].mappings)
        return pinned(self.pool, its)

    # ---- what rows share, and give back ---------------------------------------------------

    def _unshare(self, sequence: Sequence) -> None:
        """Make what `sequence` will write its own."""
        for group in self.groups:
            if group.table.rows[sequence.row].shared_end_page:
                self.sharing.copied_on_write_bytes += unshare(
                    group,
                    sequence.row,
                    sequence.num_tokens,
                    tenant=sequence.tenant,
                    stream=self.current_stream(),
                )

    def _victims(self) -> Iterable[Victim]:
        """What sequences that are on their way to the host, and parked rows, could give back."""
        for sequence in tuple(self._moving):
            yield self._moving_victim(sequence)
        for row in self._rows.parked():
            yield victim_of(
                partial(ends_of, self.groups, row),
                partial(self._retire_parked, row),
                last_used=self._rows.last_used(row),
                num_hits=self.prefixes.hits_of(row),
                num_prefix_tokens=self.prefixes.num_recorded(row),
            )

    def _moving_victim(self, sequence: Sequence) -> Victim:
        """First in line: nobody loses anything by it."""
        gives = partial(moving_ends, sequence)
        return victim_of(gives, lambda _: self.let_go(sequence), last_used=0)

    def _retire_parked(self, row: int, num_tokens: int) -> None:
        """Retire what a parked row holds behind its first `num_tokens` tokens."""
        fence = self.pool.reclaimer.new_fence()
        for group in self.groups:
            group.retire_from(row, num_tokens, fence)
        self.prefixes.truncate(row, num_tokens)
        if not num_tokens:
            self._rows.empty(row)

    def _keeps(self, row: int, num_tokens: int) -> bool:
        return keeps(self.groups, row, num_tokens)

    def _can_begin(self, row: int, num_tokens: int) -> bool:
        return can_begin(self.groups, row, num_tokens, self.overread_tokens)

    def _adoptable_tokens(self, row: int) -> int:
        return min((group.adoptable_tokens(row) for group in self.groups), default=0)
