"""States: memory of fixed size that layers keep of a whole sequence, such as linear attention's.

A group of states has a row for each sequence, as groups of keys and values have, over pages of the
same pool. All layers lie side by side in it, so only the last page is filled in part:

    row r   | layer 0: recurrent, convolution | layer 2: recurrent, convolution | ... | padding |

A row is mapped with the sequence's first token and copied in a fork, because every step overwrites
it. It holds the state after the last token and none before. To go back to an earlier one, or share
it, takes a checkpoint: a copy in a further row, which belongs to the sequence's row until that is
cut before it, starts over or is evicted. A parked row's own state serves as one without a copy.

See DESIGN.md, Note [States beside rows].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import InternalError
from ...units import align_up
from ..backend import Fence
from ..memory import Change, ExtentPool, PageMapping, RowChange, size_classes
from .geometry import check_addresses, check_positive
from .layer_group import LayerGroup, bytes_over

#: Tensors start where kernels load whole vectors.
_ALIGNMENT_BYTES = 128
#: A length that no sequence reaches: rows have no end in tokens.
_NO_END = 2**62
#: Checkpoints of a row: where its prompt parts from others', and the latest one.
_CHECKPOINTS_MAX = 2


class StateShape(NamedTuple):
    """Shape and type of a tensor in a layer's state of one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class StateGroup(LayerGroup):
    """The states of some layers; `shapes` has the tensors of each layer, in any order.

    Its table has further rows behind those of sequences, for checkpoints. Books of states at rest
    are guarded by the pool's lock.
    """

    is_fixed = True

    def __init__(self, pool: ExtentPool, shapes: Mapping[int, Sequence[StateShape]], num_rows: int):
        self.shapes = {layer: tuple(its) for layer, its in shapes.items()}
        self._offsets: list[tuple[int, int, StateShape]] = []  # Layer, bytes from the row's start.
        end = 0
        for layer, its in sorted(self.shapes.items()):
            for each in its:
                self._offsets.append((layer, end, each))
                end = align_up(end + each.num_bytes, _ALIGNMENT_BYTES)
        self.state_bytes = end
        check_positive("state_bytes", end)
        row_bytes = align_up(end, pool.page_bytes)
        num_rows_all = num_rows * (1 + _CHECKPOINTS_MAX)
        check_addresses(num_rows_all, row_bytes)
        super().__init__(
            pool,
            num_rows=num_rows_all,
            row_pages=row_bytes // pool.page_bytes,
            token_bytes=row_bytes,
            contents=torch.float32,
        )
        self._tensors: dict[int, list[torch.Tensor]] = {}
        # One mapped page means the whole state, which suffices for any length.
        self.row_tokens = _NO_END
        self.books = (self.table.rows, 1, _NO_END, _NO_END)
        self._num_rows = num_rows
        self._free = list(range(num_rows, num_rows_all))
        # By row and number of tokens, the table's row with the state after them: a checkpoint's,
        # or the row itself if it is parked.
        self._at_rest: dict[int, dict[int, int]] = {}
        #: Rows whose state a fork may still copy, on another stream than that of their next step.
        self.lent: set[int] = set()

    def tensors(self, layer: int) -> list[torch.Tensor]:
        """Return the tensors of a layer, `[rows, *shape]` each, in the order of its shapes.

        Only rows of live sequences with tokens, and of checkpoints, are mapped.
        """
        if not self._tensors:
            table = self.table
            with torch.inference_mode(mode=False), torch.no_grad():
                its = table.address, table.reserved_bytes, self._view_counter
                rows = bytes_over(self.pool.backend, *its).view(table.num_rows, -1)
                for its_layer, start, each in self._offsets:
                    part = rows[:, start : start + each.num_bytes].view(each.dtype)
                    shaped = part.unflatten(1, each.shape)  # type: ignore[no-untyped-call]
                    self._tensors.setdefault(its_layer, []).append(shaped)
        return self._tensors[layer]

    def _drop_views(self) -> None:
        self._tensors.clear()

    @property
    def layout(self) -> dict[str, Any]:
        """Layout as plain values."""
        names = {
            str(layer): [[list(each.shape), str(each.dtype)] for each in its]
            for layer, its in sorted(self.shapes.items())
        }
        return {"states": names}

    # ---- sizes ----------------------------------------------------------------------------

    def pages_for(self, num_tokens: int) -> int:
        """Pages of the state of a sequence of `num_tokens` tokens."""
        return self.table.row_pages if num_tokens > 0 else 0

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of the state of a sequence of `num_tokens` tokens."""
        return self.state_bytes if num_tokens > 0 else 0

    used_bytes = bytes_for

    def whole_pages_below(self, token: int) -> int:
        """Return 0: to write a token is to write every page."""
        return 0

    def token_at(self, page: int) -> int:
        """Return 0: no token lies wholly before a page."""
        return 0

    def resident_tokens(self, row: int) -> int:
        """Tokens of `row` up to which memory is mapped: any number, or none."""
        return _NO_END if self.table.rows[row].mappings else 0

    def wait_for_forks(self, rows: Collection[int], stream: int) -> None:
        """Make `stream`, whose work overwrites the states of `rows`, wait for forks of them."""
        if not self.lent.isdisjoint(rows):
            self.pool.backend.join_streams(stream)
            self.lent.difference_update(rows)

    # ---- states at rest -------------------------------------------------------------------

    def holds(self, row: int, num_tokens: int, live_tokens: int | None) -> bool:
        """Whether there is a state of `row` after `num_tokens`, or none is needed."""
        return num_tokens in (0, live_tokens) or num_tokens in self._at_rest.get(row, ())

    def why_lost(self, row: int, live_tokens: int | None) -> str:
        """Why `holds` is false for `row`, for an error's message."""
        lengths = " and ".join(map(str, sorted(self.lengths(row, live_tokens))))
        return f"layers keep a state of the sequence after {lengths} tokens only"

    def row_at(self, row: int, num_tokens: int, live_tokens: int | None) -> int:
        """The table's row with the state of `row` after `num_tokens`, which it `holds`."""
        return row if num_tokens in (0, live_tokens) else self._at_rest[row][num_tokens]

    def lengths(self, row: int, live_tokens: int | None) -> set[int]:
        """The numbers of tokens after which there is a state of `row`."""
        return {*self.at_rest(row), *([] if live_tokens is None else [live_tokens])}

    def can_extend(self, row: int, num_tokens: int) -> bool:
        """Whether a parked `row` has the state after `num_tokens` itself, unshared."""
        is_own = self._at_rest.get(row, {}).get(num_tokens) == row
        return is_own and super().can_extend(row, num_tokens)

    def at_rest(self, row: int) -> Mapping[int, int]:
        """Return, by number of tokens, the table's row with the state of `row` after them.

        A copy, because another thread may evict them.
        """
        return dict(self._at_rest.get(row, ()))

    def checkpoints(self) -> Iterator[tuple[int, int, int]]:
        """Yield the row of each checkpoint, its number of tokens, and its own row in the table."""
        for row, its in self._at_rest.items():
            for num_tokens, at in its.items():
                if at != row:
                    yield row, num_tokens, at

    def begin_checkpoint(
        self, row: int, num_tokens: int, tenant: object, stream: int
    ) -> int | None:
        """Map memory for the state of a live `row` after `num_tokens`; returns its table's row.

        It is pinned until `end_checkpoint`; until then the caller writes it, or drops it next. A
        row's third checkpoint takes the place of the longest. None if there is a state of
        `num_tokens` already. Raises `OutOfPagesError` and `DriverError`; then, as ever, other
        checkpoints may have been evicted.
        """
        with self.pool.lock:
            its = self._at_rest.get(row, {})
            if num_tokens in its:
                return None
            if len(its) == _CHECKPOINTS_MAX:
                self.pool.backend.join_streams(stream)  # A fork may still read it.
                at = its[num_tokens] = its.pop(max(its))
                self._pin(at, 1)
                return at
            at = self._free.pop(0)  # Freed longest ago: its old memory is unmapped by now.
        classes = size_classes(self.table.row_pages, self.largest_class)
        try:
            with Change(self.pool, [RowChange(self.table, at, 0, classes, tenant)]) as made:
                made.map(stream)
                made.fill(stream)
        except BaseException:
            self._free.append(at)
            raise
        with self.pool.lock:
            self._at_rest.setdefault(row, {})[num_tokens] = at
            self._pin(at, 1)
        return at

    def end_checkpoint(self, at: int) -> None:
        """Unpin the checkpoint of `begin_checkpoint`: the work that writes it was submitted."""
        with self.pool.lock:
            self._pin(at, -1)

    def _pin(self, at: int, num_pins: int) -> None:
        for mapping in self.table.rows[at].mappings:
            mapping.num_pins += num_pins

    def copy(self, source: int, target: int, stream: int) -> None:
        """Copy the state in a row of the table to another one."""
        to, start = (self.table.page_address(at, 0) for at in (target, source))
        self.pool.backend.copy(to, start, self.state_bytes, stream)

    def go_back(self, row: int, num_tokens: int, stream: int, fence: Callable[[], Fence]) -> None:
        """Set the state of a live or taken row back to `num_tokens`; drop later checkpoints.

        It is at rest, unless `num_tokens` is 0. Locked. After an error nothing has changed.
        """
        its = self.at_rest(row)
        is_later = any(length > num_tokens and at != row for length, at in its.items())
        behind = fence() if is_later else None  # First, because it may fail.
        source = its.get(num_tokens, row)
        if source != row:
            self.copy(source, row, stream)
        for length, at in its.items():
            if at == row:
                self._forget(row, length)  # Its memory stays, and will be overwritten.
        if behind is not None:
            self.drop_after(row, num_tokens, behind)

    def park(self, row: int, num_tokens: int, now: int) -> None:
        """Note that the sequence of `row` ends at tick `now`: its state is at rest. Locked."""
        if self.table.rows[row].mappings:
            if num_tokens in self.at_rest(row):
                self.drop_after(row, num_tokens - 1, self.pool.reclaimer.fence_since(now))
            self._at_rest.setdefault(row, {})[num_tokens] = row

    def drop_after(self, row: int, num_tokens: int, fence: Fence) -> None:
        """Retire states at rest of more than `num_tokens` tokens of `row`. Locked."""
        for length, at in self.at_rest(row).items():
            if length > num_tokens:
                self.table.retire_back(at, 0, fence)
                self._forget(row, length)
                if at != row:
                    self._free.append(at)

    def drop_checkpoints(self, row: int, num_tokens: int) -> None:
        """Retire the checkpoints of a live row after more than `num_tokens` tokens. Locked."""
        if self.at_rest(row):
            self.drop_after(row, num_tokens, self.pool.reclaimer.new_fence())

    def _forget(self, row: int, num_tokens: int) -> None:
        del self._at_rest[row][num_tokens]
        if not self._at_rest[row]:
            del self._at_rest[row]

    def retire_from(self, row: int, num_tokens: int, fence: Fence) -> None:
        """Retire states at rest of more than `num_tokens` tokens of `row`; with 0 all memory."""
        self.drop_after(row, num_tokens, fence)
        if not num_tokens:
            if row in self.at_rest(row).values():
                self._forget(row, 0)
            self.table.retire_back(row, 0, fence)

    def to_give(self, row: int) -> list[tuple[int, PageMapping]]:
        """List the mappings of states at rest, each with the tokens to cut the row to."""
        return [
            (max(0, length - 1), mapping)
            for length, at in self.at_rest(row).items()
            for mapping in self.table.rows[at].mappings
        ]

    def rows_of(self, row: int) -> Collection[int]:
        """Return the table's rows that hold memory of a sequence's `row`: its checkpoints' too."""
        return {row, *self.at_rest(row).values()}

    def check_at_rest(self, live: Mapping[int, int]) -> None:
        """Check the states at rest against the table; `live` has the length of each live row.

        Raises `InternalError` unless each checkpoint, and each parked row's own state, is mapped
        whole and booked once, and none is longer than its live row.
        """
        checkpoints = list(self.checkpoints())
        used = [at for _, _, at in checkpoints]
        num_rows, end_row = self._num_rows, self.table.num_rows
        if sorted(used + self._free) != list(range(num_rows, end_row)):
            raise InternalError(
                f"checkpoints {used} and free rows {self._free} overlap or lack some"
            )
        for at in range(end_row):
            is_mapped, rests = bool(self.table.rows[at].mappings), at in self.at_rest(at).values()
            if self.table.rows[at].num_pages != is_mapped * self.table.row_pages:
                raise InternalError(f"row {at} of states is mapped in part")
            if at >= num_rows and is_mapped != (at in used):
                raise InternalError(f"row {at} of states is mapped: {is_mapped}, not as booked")
            if at < num_rows and rests != (is_mapped and at not in live):
                raise InternalError(f"row {at} has a state at rest: {rests}, mapped: {is_mapped}")
        for row, num_tokens, _ in checkpoints:
            if num_tokens > live.get(row, num_tokens):
                raise InternalError(f"row {row} has a checkpoint after {num_tokens} tokens")
