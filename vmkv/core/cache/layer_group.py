"""Layer groups: layers that share a reservation, a row of memory per sequence, and a lifetime.

A `LayerGroup` is what forks, eviction, swapping and files ask about a row. Here a row holds tokens
one after another, of which a window may see only the last; `KVGroup` adds the tensors of keys and
values. A group of another kind overrides what differs: `StateGroup` keeps a state of fixed size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from ...errors import InternalError
from ...units import div_ceil
from .. import _native
from ..backend import Access, Backend, Fence
from ..memory import ExtentPool, PageMapping, PageTable, WriteRange

# ---- tensors -------------------------------------------------------------------------------------

_DLPACK_CUDA = 2


def torch_device(backend: Backend) -> torch.device:
    """Return the torch device whose tensors live in this backend's memory."""
    device_type, index = backend.dlpack_device
    return torch.device("cuda", index) if device_type == _DLPACK_CUDA else torch.device("cpu")


def stream_getter(backend: Backend) -> Callable[[], int]:
    """Return a function that returns the raw handle of torch's current stream on this device."""
    device_type, index = backend.dlpack_device
    if device_type != _DLPACK_CUDA:
        return int  # It returns 0, the only stream.
    # The private name costs 0.1 µs; torch.cuda.current_stream builds an object for 2 µs.
    return partial(torch._C._cuda_getCurrentRawStream, index)


def bytes_over(
    backend: Backend, address: int, num_bytes: int, counter: _native.ViewCounter
) -> torch.Tensor:
    """Return a tensor of the bytes of a reserved range; `counter` counts its storage."""
    capsule = _native.view_capsule(address, num_bytes, *backend.dlpack_device, counter)
    found: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
    return found


# ---- growth --------------------------------------------------------------------------------------

#: A row grows by the largest class not above 1/64 of it. 1/32 would halve the calls and reach
#: the 2 % of waste that DESIGN.md allows; 1/128 has no measurable benefit.
_QUANTUM_DIVISOR = 64
#: A sliding window keeps at most this many extents more than it needs.
_WINDOW_DIVISOR = 8


def growth_quantum_class(held_pages: int, largest_class: int) -> int:
    """Return the size class of the growth quantum of a row that holds `held_pages`."""
    quantum_pages = max(1, held_pages // _QUANTUM_DIVISOR)
    return min(quantum_pages.bit_length() - 1, largest_class)


def largest_class_for_window(window_pages: int, largest_class: int) -> int:
    """Largest class for a window, since an extent is freed only when the window has passed it."""
    pages = max(1, window_pages // _WINDOW_DIVISOR)
    return min(pages.bit_length() - 1, largest_class)


def pages_to_map(
    row_end_page: int, needed_end_page: int, row_pages: int, quantum_class: int
) -> int:
    """Pages to add up to `needed_end_page`: at least a quantum, never past the row's end."""
    missing = needed_end_page - row_end_page
    if missing <= 0:
        return 0
    return min(max(missing, 1 << quantum_class), row_pages - row_end_page)


# ---- layer group ---------------------------------------------------------------------------------

#: Kernels fetch whole key tiles, so a window's first tile may begin before the window; the
#: widest tile of any kernel here is 256 tokens (FlashAttention-2, head size 64).
UNDERREAD_TOKENS = 256


class LayerGroup(ABC):
    """The rows of one group of layers.

    A row is `row_pages` pages; a token takes `token_bytes` of it. Raises `OutOfAddressSpaceError`
    if addresses cannot be reserved.

    Attributes:
        window_tokens: How many tokens a query sees, itself included; None for all.
        books: The pages of its rows, and bytes of a token, bytes of a page, and tokens of a row.
    """

    is_fixed = False
    """Whether rows have the same size whatever the sequence's length."""

    def __init__(
        self,
        pool: ExtentPool,
        *,
        num_rows: int,
        row_pages: int,
        token_bytes: int,
        contents: object,
        window_tokens: int | None = None,
    ):
        self.pool = pool
        self.page_bytes = pool.page_bytes
        self.token_bytes = token_bytes
        self.row_tokens = row_pages * self.page_bytes // token_bytes
        self.window_tokens = window_tokens
        self.table = PageTable(pool, num_rows, row_pages, contents)
        self.books = (self.table.rows, token_bytes, self.page_bytes, self.row_tokens)
        self.largest_class = pool.largest_class
        if window_tokens is not None:
            window_pages = self.pages_for(window_tokens)
            self.largest_class = largest_class_for_window(window_pages, pool.largest_class)
        self._first_written: dict[int, int] = {}
        self._view_counter = counter = _native.ViewCounter()
        # Without `self`, which would live as long.
        self._has_views: Callable[[], bool] = lambda: counter.live > 0

    @property
    @abstractmethod
    def layout(self) -> dict[str, Any]:
        """Layout as plain values; groups of equal layout can read each other's rows."""

    @abstractmethod
    def _drop_views(self) -> None:
        """Drop the tensors that the group keeps over its rows."""

    # ---- sizes ----------------------------------------------------------------------------

    def pages_for(self, num_tokens: int) -> int:
        """Pages of a row that hold its first `num_tokens` tokens; at most all."""
        num_pages = -(-num_tokens * self.token_bytes // self.page_bytes)
        return min(num_pages, self.table.row_pages)

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of a row that hold its first `num_tokens` tokens."""
        return num_tokens * self.token_bytes

    def whole_pages_below(self, token: int) -> int:
        """Pages of a row that hold nothing but tokens before `token`."""
        return token * self.token_bytes // self.page_bytes

    def token_at(self, page: int) -> int:
        """The token that contains the first byte of `page` of a row."""
        return page * self.page_bytes // self.token_bytes

    def first_token_at(self, page: int) -> int:
        """The first token that starts in `page` of a row, or after it."""
        return div_ceil(page * self.page_bytes, self.token_bytes)

    def used_bytes(self, num_tokens: int) -> int:
        """Bytes that a sequence of `num_tokens` needs here."""
        kept = num_tokens if self.window_tokens is None else min(num_tokens, self.window_tokens - 1)
        return kept * self.token_bytes

    # ---- growth ---------------------------------------------------------------------------

    def growth(
        self, row: int, num_past_tokens: int, end_tokens: int, *, exactly: bool
    ) -> tuple[int, int]:
        """The page at which `row` grows, and the pages to map there to reach `end_tokens`.

        The row's next query is at `num_past_tokens` or later. It grows by a growth quantum at least
        unless `exactly`.
        """
        pages = self.table.rows[row]
        first_page = pages.end_page if pages.mappings else self.first_needed_page(num_past_tokens)
        end_tokens = min(end_tokens, self.row_tokens)
        quantum_class = 0
        if not exactly:
            held_pages = max(0, first_page - self.first_needed_page(end_tokens))
            quantum_class = growth_quantum_class(held_pages, self.largest_class)
        end_page = self.pages_for(end_tokens)
        return first_page, pages_to_map(first_page, end_page, self.table.row_pages, quantum_class)

    def pages_lacking(self, row: int, num_tokens: int, end_tokens: int) -> int:
        """Count the pages, copies of shared ones too, that `row` lacks up to `end_tokens`."""
        pages = self.table.rows[row]
        first_page = self.first_needed_page(num_tokens)
        if pages.mappings:
            first_page = pages.end_page
            written_page = self.whole_pages_below(num_tokens)
            for mapping in self.table.overlapping(row, written_page, pages.shared_end_page):
                if mapping.is_guarded:
                    first_page = mapping.first_page
                    break
        return max(0, self.pages_for(end_tokens) - first_page)

    def write_range(self, row: int, start: int, end: int) -> WriteRange:
        """The pages that a write of the tokens `[start, end)` of `row` touches."""
        return WriteRange(self.table, row, self.whole_pages_below(start), self.pages_for(end))

    # ---- what a row holds -----------------------------------------------------------------

    def reaches(self, row: int, num_tokens: int) -> bool:
        """Whether `row` is mapped up to `num_tokens`."""
        return self.table.rows[row].end_page >= self.pages_for(num_tokens)

    def holds(self, row: int, num_tokens: int, live_tokens: int | None) -> bool:
        """Whether `row` holds all that a query after `num_tokens` tokens sees.

        `live_tokens` is the length of the row's sequence; None if the row is parked.
        """
        if num_tokens < self.shortest_kept(row):
            return False
        if self.reaches(row, num_tokens):
            return True
        return self.first_needed_page(num_tokens) >= self.pages_for(num_tokens)

    def why_lost(self, row: int, live_tokens: int | None) -> str:
        """Why `holds` is false for `row`, for an error's message."""
        return (
            "a sliding-window layer no longer holds what they would see (set keeps_past before "
            "appending)"
        )

    def row_at(self, row: int, num_tokens: int, live_tokens: int | None) -> int:
        """The table's row with the contents of `row` after `num_tokens`, which it `holds`."""
        return row

    def resident_tokens(self, row: int) -> int:
        """Tokens of `row` up to which memory is mapped."""
        end_bytes = self.table.rows[row].end_page * self.page_bytes
        return min(end_bytes // self.token_bytes, self.row_tokens)

    def adoptable_tokens(self, row: int) -> int:
        """Tokens that a new sequence in `row` would find mapped and unshared."""
        pages = self.table.rows[row]
        if pages.first_page:
            return 0
        if pages.shared_end_page:  # Else nothing is shared; a fast path for many rows.
            for mapping in self.table.overlapping(row, 0, pages.shared_end_page):
                if mapping.extent.is_shared:
                    return self.token_at(mapping.first_page)
        return self.resident_tokens(row)

    def can_extend(self, row: int, num_tokens: int) -> bool:
        """Whether a parked `row` can be written from `num_tokens` on without a copy."""
        first_page, end_page = self.whole_pages_below(num_tokens), self.pages_for(num_tokens)
        its = self.table.overlapping(row, first_page, end_page)
        return not any([mapping.extent.is_shared for mapping in its])

    def first_mapped_token(self, row: int, num_tokens: int) -> int:
        """The first of `num_tokens` tokens of `row` that is mapped in full; else `num_tokens`."""
        if not self.table.rows[row].mappings:
            return num_tokens  # A window of one token needs no earlier tokens.
        return self.first_token_at(self.table.rows[row].first_page)

    def whole_mappings(self, row: int, first_page: int, num_tokens: int) -> list[PageMapping]:
        """Mappings of `row` from a page on that hold nothing but tokens before `num_tokens`."""
        end_page = self.whole_pages_below(num_tokens)
        found = self.table.overlapping(row, first_page, end_page)
        return found[:-1] if found and found[-1].end_page > end_page else found

    def checkpoints(self) -> Iterable[tuple[int, int, int]]:
        """Yield the row of each checkpoint, its number of tokens, and its own row in the table."""
        return ()

    def drop_checkpoints(self, row: int, num_tokens: int) -> None:
        """Retire the checkpoints of a live row after more than `num_tokens` tokens. Locked."""

    def rows_of(self, row: int) -> Collection[int]:
        """Return the table's rows that hold memory of a sequence's `row`."""
        return (row,)

    def mappings(self, row: int) -> list[PageMapping]:
        """List all mappings that hold memory of a sequence's `row`."""
        rows = self.table.rows
        return [mapping for at in self.rows_of(row) for mapping in rows[at].mappings]

    def resident_bytes(self, row: int) -> int:
        """Bytes mapped for `row`."""
        pages = self.table.rows
        return sum([pages[at].num_pages for at in self.rows_of(row)]) * self.page_bytes

    # ---- windows --------------------------------------------------------------------------

    def shortest_kept(self, row: int) -> int:
        """The shortest length after which a query finds all in `row` that its window sees."""
        if self.window_tokens is None:
            return 0
        first_page = self.table.rows[row].first_page
        read = self.first_token_at(first_page) + UNDERREAD_TOKENS if first_page else 0
        seen = max(read, self.first_written(row))
        return seen + self.window_tokens - 1 if seen else 0

    def first_needed_page(self, num_tokens: int) -> int:
        """The first page of a row that a query at `num_tokens` or later can make a kernel read."""
        if self.window_tokens is None:
            return 0
        first_read = num_tokens - self.window_tokens + 1 - UNDERREAD_TOKENS
        return self.whole_pages_below(first_read) if first_read > 0 else 0

    def first_kept_token(self, row: int, num_tokens: int) -> int:
        """The first token of `row` that a query at `num_tokens` or later can make a kernel read."""
        first_token = self.first_token_at(self.first_needed_page(num_tokens))
        return max(first_token, self.first_written(row))

    def first_kept_page(self, row: int, num_tokens: int, *, keeps_past: bool) -> int:
        """First page that goes along with `num_tokens` of `row`; all pages with `keeps_past`."""
        pages, needed = self.table.rows[row], self.first_needed_page(num_tokens)
        return min(needed, pages.first_page) if keeps_past and pages.mappings else needed

    def first_common_page(
        self, source: int, target: int, num_tokens: int, *, keeps_past: bool
    ) -> int:
        """The first page that `target` can take over from `source`, both live with `num_tokens`."""
        rows = (source, target)
        return max(self.first_kept_page(row, num_tokens, keeps_past=keeps_past) for row in rows)

    def first_written(self, row: int) -> int:
        """The first token of `row` that was written; pages mapped before it hold foreign data."""
        return self._first_written.get(row, 0)

    def first_readable_token(self, row: int, num_tokens: int) -> int:
        """The first of `num_tokens` tokens of `row` that is mapped and was written."""
        first_token = max(self.first_mapped_token(row, num_tokens), self.first_written(row))
        return min(num_tokens, first_token)

    def passed_page(self, row: int, num_tokens: int) -> int:
        """The first page that a query at `num_tokens` needs, if extents before it can go; or 0."""
        end_page, mappings = self.first_needed_page(num_tokens), self.table.rows[row].mappings
        return end_page if mappings and mappings[0].end_page <= end_page else 0

    # ---- changes --------------------------------------------------------------------------

    def begin_row(self, row: int, first_token: int = 0) -> None:
        """Note that `row` starts over and will be written from `first_token` on."""
        self._first_written[row] = first_token

    def park(self, row: int, num_tokens: int, now: int) -> None:
        """Note that the sequence of `row` ends at tick `now` with `num_tokens`. Locked."""

    def note_taken_over(
        self, moves: Sequence[tuple[int, int]], num_tokens: int, *, keeps_past: bool
    ) -> None:
        """Note the first written token of the target of each `(source, target)` rows."""
        before = dict(self._first_written)
        for source, target in moves:
            first_page = self.first_common_page(source, target, num_tokens, keeps_past=keeps_past)
            first_token = self.first_token_at(first_page)
            self._first_written[target] = max(first_token, before.get(source, 0))

    def go_back(self, row: int, num_tokens: int, stream: int, fence: Callable[[], Fence]) -> None:
        """Let the next step continue `row`, live or taken, from `num_tokens`, which it `holds`.

        Locked. `fence` records when its memory is unused. After an error nothing has changed.
        """

    def scrub(self, row: int, num_tokens: int, tenant: object, stream: int) -> bool:
        """Scrub `row`'s own extents after `num_tokens` tokens; returns whether any needed it."""
        is_scrubbed = False
        first_page, scrub = self.pages_for(num_tokens), self.pool.scrub
        for mapping in self.table.overlapping(row, first_page, self.table.row_pages):
            is_own = mapping.access is Access.READ_WRITE and not mapping.extent.is_shared
            if is_own and mapping.first_page >= first_page:
                its, at = [mapping.extent], self.table.page_address(row, mapping.first_page)
                contents = self.table.contents
                is_scrubbed |= scrub.prepare(self.pool.backend, its, at, tenant, stream, contents)
        return is_scrubbed

    def retire_from(self, row: int, num_tokens: int, fence: Fence) -> None:
        """Retire the extents that hold nothing of the first `num_tokens` tokens of `row`."""
        self.table.retire_back(row, self.pages_for(num_tokens), fence)

    def to_give(self, row: int) -> list[tuple[int, PageMapping]]:
        """List the row's mappings, each with the length left if it is evicted."""
        page_bytes, token_bytes = self.page_bytes, self.token_bytes
        # `token_at`, inlined: a plan under memory pressure looks at dozens of extents of many rows.
        mappings = self.table.rows[row].mappings
        return [(each.first_page * page_bytes // token_bytes, each) for each in mappings]

    # ---- checks and end -------------------------------------------------------------------

    def check_row(self, row: int, num_tokens: int, overread_tokens: int) -> None:
        """Check I6: raise `InternalError` unless every page that a live row needs is mapped."""
        if not num_tokens:
            return
        pages = self.table.rows[row]
        first = self.first_needed_page(num_tokens)
        end = self.pages_for(num_tokens + overread_tokens)
        if first < end and (pages.first_page > first or pages.end_page < end):
            raise InternalError(
                f"I6: row {row} of {num_tokens} tokens needs pages [{first}, {end}), has "
                f"[{pages.first_page}, {pages.end_page})"
            )

    def has_outside_views(self) -> bool:
        """Whether tensors other than this group's own point into the range. Drops its own."""
        self._drop_views()
        return self._has_views()

    def close(self) -> None:
        """Unmap everything after its fence; free the range once no tensor points into it."""
        self._drop_views()
        self.table.close(self._has_views)

    def close_behind(self, fence: Fence) -> None:
        """Close without waiting: submitted work may run until `fence` has passed."""
        self._drop_views()
        self.table.close_behind(fence, self._has_views)
