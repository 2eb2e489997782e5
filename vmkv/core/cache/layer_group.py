"""A layer group: layers that share a token row, a reservation, and a lifetime.

Full-attention layers keep every token. Sliding-window layers need only the last ones, so they form
a group of their own, whose front pages are retired as the window moves on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from ...errors import InternalError
from ...units import div_ceil
from .. import _native
from ..backend import Access, Backend, Fence
from ..memory import ExtentPool, PageMapping, PageTable, WriteRange
from .fp8 import LayerScales, Scales
from .geometry import Geometry, growth_quantum_class, largest_class_for_window, pages_to_map

# ---- views ---------------------------------------------------------------------------------------

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


@dataclass(frozen=True)
class GroupViews:
    """Strided tensors over one layer group: `[layers, rows, heads, row_tokens, dim]`."""

    keys: torch.Tensor
    values: torch.Tensor


def group_views(
    backend: Backend,
    address: int,
    geometry: Geometry,
    dtype: torch.dtype,
    counter: _native.ViewCounter,
    *,
    inference: bool = False,
) -> GroupViews:
    """Make tensors over the reservation at `address`; `counter` counts their storages.

    A cache has two sets. Ordinary tensors work in every mode, but in inference mode each operation
    on one still passes through autograd's dispatch, which costs a decode step of 32 layers 1 ms.
    Inference tensors avoid that, and must not be written outside inference mode.
    """
    with torch.inference_mode(mode=inference), torch.no_grad():
        flat = bytes_over(backend, address, geometry.reserved_bytes, counter).view(dtype)
        item_bytes = geometry.shape.itemsize_bytes

        def strided(num_heads: int, dim: int, offset_bytes: int) -> torch.Tensor:
            steps_bytes = geometry.layer_bytes, geometry.row_bytes, geometry.token_bytes
            layer, row, token = (each // item_bytes for each in steps_bytes)
            return flat.as_strided(
                (geometry.num_layers, geometry.num_rows, num_heads, geometry.row_tokens, dim),
                (layer, row, dim, token, 1),
                offset_bytes // item_bytes,
            )

        shape = geometry.shape
        keys = strided(shape.num_k_heads, shape.k_dim, 0)
        values = strided(shape.num_v_heads, shape.v_dim, geometry.v_offset_bytes)
    return GroupViews(keys, values)


# ---- layer group ---------------------------------------------------------------------------------

#: Kernels fetch whole key tiles, so a window's first tile may begin before the window; the
#: widest tile of any kernel here is 256 tokens (FlashAttention-2, head size 64).
UNDERREAD_TOKENS = 256


class LayerGroup:
    """The rows of one group of layers.

    A query sees the last `window_tokens` tokens, itself included; all with None. `scales`, one per
    layer, are for eight bits. Raises `OutOfAddressSpaceError` if addresses cannot be reserved.
    """

    is_fixed = False
    """Whether rows have the same size whatever the sequence's length."""

    def __init__(
        self,
        pool: ExtentPool,
        geometry: Geometry,
        dtype: torch.dtype,
        window_tokens: int | None = None,
        scales: Sequence[LayerScales] | None = None,
    ):
        self.pool = pool
        self.geometry = geometry
        self.dtype = dtype
        self.window_tokens = window_tokens
        self.scales = None if scales is None else tuple(scales)
        self.table = PageTable(pool, geometry.num_rows, geometry.row_pages, dtype)
        self._scale_tensors: dict[int, Scales] = {}
        self._view_counter = counter = _native.ViewCounter()
        # Without `self`, which would live as long.
        self._has_views: Callable[[], bool] = lambda: counter.live > 0
        self._views: dict[bool, GroupViews] = {}
        self._first_written: dict[int, int] = {}
        #: The pages of its rows, and bytes of a token, bytes of a page, and tokens of a row.
        self.books = (
            self.table.rows,
            geometry.token_bytes,
            geometry.page_bytes,
            geometry.row_tokens,
        )
        self.largest_class = pool.largest_class
        if window_tokens is not None:
            window_pages = geometry.pages_for(window_tokens)
            self.largest_class = largest_class_for_window(window_pages, pool.largest_class)

    @property
    def layout(self) -> dict[str, Any]:
        """Layout as plain values; groups of equal layout can read each other's token rows."""
        shape = self.geometry.shape
        return {
            "num_layers": self.geometry.num_layers,
            "num_k_heads": shape.num_k_heads,
            "k_dim": shape.k_dim,
            "num_v_heads": shape.num_v_heads,
            "v_dim": shape.v_dim,
            "dtype": str(self.dtype).removeprefix("torch."),
            "scales": self.scales and [[[*each.keys], [*each.values]] for each in self.scales],
            "window_tokens": self.window_tokens,
            "token_bytes": self.geometry.token_bytes,
        }

    @property
    def views(self) -> GroupViews:
        """The tensors over the rows, usable in every mode."""
        return self.views_in(inference=False)

    def views_in(self, *, inference: bool) -> GroupViews:
        """Return the tensors over the rows; `group_views` says when to use inference tensors."""
        if inference not in self._views:
            self._views[inference] = group_views(
                self.pool.backend,
                self.table.address,
                self.geometry,
                self.dtype,
                self._view_counter,
                inference=inference,
            )
        return self._views[inference]

    def scales_at(self, place: int) -> Scales | None:
        """Scales of the layer at `place`, copied to the device once; None if unscaled."""
        if self.scales is None:
            return None
        if place not in self._scale_tensors:
            self._scale_tensors[place] = Scales.of(
                self.scales[place], torch_device(self.pool.backend)
            )
        return self._scale_tensors[place]

    def pages_lacking(self, row: int, num_tokens: int, end_tokens: int) -> int:
        """Count the pages, copies of shared ones too, that `row` lacks up to `end_tokens`."""
        pages = self.table.rows[row]
        first_page = self.first_needed_page(num_tokens)
        if pages.mappings:
            first_page = pages.end_page
            written_page = self.geometry.whole_pages_below(num_tokens)
            for mapping in self.table.overlapping(row, written_page, pages.shared_end_page):
                if mapping.is_guarded:
                    first_page = mapping.first_page
                    break
        end_tokens = min(end_tokens, self.geometry.row_tokens)
        return max(0, self.geometry.pages_for(end_tokens) - first_page)

    def growth(
        self, row: int, num_past_tokens: int, end_tokens: int, *, exactly: bool
    ) -> tuple[int, int]:
        """The page at which `row` grows, and the pages to map there to reach `end_tokens`.

        The row's next query is at `num_past_tokens` or later. It grows by a growth quantum at least
        unless `exactly`.
        """
        geometry, pages = self.geometry, self.table.rows[row]
        first_page = pages.end_page if pages.mappings else self.first_needed_page(num_past_tokens)
        end_tokens = min(end_tokens, geometry.row_tokens)
        end_page = geometry.pages_for(end_tokens)
        quantum_class = 0
        if not exactly:
            held_pages = max(0, first_page - self.first_needed_page(end_tokens))
            quantum_class = growth_quantum_class(held_pages, self.largest_class)
        return first_page, pages_to_map(first_page, end_page, geometry.row_pages, quantum_class)

    def resident_tokens(self, row: int) -> int:
        """Tokens of `row` up to which memory is mapped."""
        end_bytes = self.table.rows[row].end_page * self.geometry.page_bytes
        return min(end_bytes // self.geometry.token_bytes, self.geometry.row_tokens)

    def first_mapped_token(self, row: int, num_tokens: int) -> int:
        """The first of `num_tokens` tokens of `row` that is mapped in full; else `num_tokens`."""
        if not self.table.rows[row].mappings:
            return num_tokens  # A window of one token needs no earlier tokens.
        return self.first_token_at(self.table.rows[row].first_page)

    def first_readable_token(self, row: int, num_tokens: int) -> int:
        """The first of `num_tokens` tokens of `row` that is mapped and was written."""
        return min(
            num_tokens, max(self.first_mapped_token(row, num_tokens), self.first_written(row))
        )

    def keeps(self, row: int, num_tokens: int) -> bool:
        """Whether the row holds all tokens that a kernel reads for a query at `num_tokens`."""
        return num_tokens >= self.shortest_kept(row)

    def reaches(self, row: int, num_tokens: int) -> bool:
        """Whether `row` is mapped up to `num_tokens`, as far as the next query sees any of it."""
        end_page = self.geometry.pages_for(num_tokens)
        is_mapped = self.table.rows[row].end_page >= end_page
        return is_mapped or self.first_needed_page(num_tokens) >= end_page

    def shortest_kept(self, row: int) -> int:
        """The shortest length for which `keeps` is true."""
        if self.window_tokens is None:
            return 0
        first_page = self.table.rows[row].first_page
        read = self.first_token_at(first_page) + UNDERREAD_TOKENS if first_page else 0
        seen = max(read, self.first_written(row))
        return seen + self.window_tokens - 1 if seen else 0

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

    def whole_mappings(self, row: int, first_page: int, num_tokens: int) -> list[PageMapping]:
        """Mappings of `row` from a page on that hold nothing but tokens before `num_tokens`."""
        end_page = self.geometry.whole_pages_below(num_tokens)
        found = self.table.overlapping(row, first_page, end_page)
        return found[:-1] if found and found[-1].end_page > end_page else found

    def write_range(self, row: int, start: int, end: int) -> WriteRange:
        """The pages that a write of the tokens `[start, end)` of `row` touches."""
        geometry = self.geometry
        return WriteRange(
            self.table, row, geometry.whole_pages_below(start), geometry.pages_for(end)
        )

    def token_at(self, page: int) -> int:
        """The token that contains the first byte of `page` of a row."""
        return self.geometry.whole_tokens_below(page)

    def first_token_at(self, page: int) -> int:
        """The first token that starts in `page` of a row, or after it."""
        return div_ceil(page * self.geometry.page_bytes, self.geometry.token_bytes)

    def to_give(self, row: int) -> list[tuple[int, PageMapping]]:
        """List the mappings of `row`, each with its first token, to which giving it up cuts it."""
        page_bytes, token_bytes = self.geometry.page_bytes, self.geometry.token_bytes
        # `token_at`, inlined: a plan under memory pressure looks at dozens of extents of many rows.
        mappings = self.table.rows[row].mappings
        return [(each.first_page * page_bytes // token_bytes, each) for each in mappings]

    def rows_of(self, row: int) -> Collection[int]:
        """Return the table's rows that hold memory of a sequence's `row`."""
        return (row,)

    def resident_bytes(self, row: int) -> int:
        """Bytes mapped for `row`."""
        pages = self.table.rows
        return sum(pages[at].num_pages for at in self.rows_of(row)) * self.geometry.page_bytes

    def used_bytes(self, num_tokens: int) -> int:
        """Bytes that a sequence of `num_tokens` needs here."""
        kept = num_tokens if self.window_tokens is None else min(num_tokens, self.window_tokens - 1)
        return kept * self.geometry.token_bytes

    def first_needed_page(self, num_tokens: int) -> int:
        """The first page of a row that a query at `num_tokens` or later can make a kernel read."""
        if self.window_tokens is None:
            return 0
        first_read = num_tokens - self.window_tokens + 1 - UNDERREAD_TOKENS
        return self.geometry.whole_pages_below(first_read) if first_read > 0 else 0

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

    def retire_from(self, row: int, num_tokens: int, fence: Fence) -> None:
        """Retire the extents that hold nothing of the first `num_tokens` tokens of `row`."""
        self.table.retire_back(row, self.geometry.pages_for(num_tokens), fence)

    def begin_row(self, row: int, first_token: int = 0) -> None:
        """Note that `row` starts over and will be written from `first_token` on."""
        self._first_written[row] = first_token

    def first_written(self, row: int) -> int:
        """The first token of `row` that was written; pages mapped before it hold foreign data."""
        return self._first_written.get(row, 0)

    def note_taken_over(
        self, moves: Sequence[tuple[int, int]], num_tokens: int, *, keeps_past: bool
    ) -> None:
        """Note the first written token of the target of each `(source, target)` rows."""
        before = dict(self._first_written)
        for source, target in moves:
            first_page = self.first_common_page(source, target, num_tokens, keeps_past=keeps_past)
            first_token = self.first_token_at(first_page)
            self._first_written[target] = max(first_token, before.get(source, 0))

    def scrub(self, row: int, num_tokens: int, tenant: object, stream: int) -> bool:
        """Scrub `row`'s own extents after `num_tokens` tokens; returns whether any needed it."""
        is_scrubbed = False
        first_page = self.geometry.pages_for(num_tokens)
        for mapping in self.table.overlapping(row, first_page, self.table.row_pages):
            is_own = mapping.access is Access.READ_WRITE and not mapping.extent.is_shared
            if is_own and mapping.first_page >= first_page:
                address = self.table.page_address(row, mapping.first_page)
                is_scrubbed |= self.pool.scrub.prepare(
                    self.pool.backend, [mapping.extent], address, tenant, stream, self.dtype
                )
        return is_scrubbed

    def copy_row(
        self, row: int, tokens: slice, source: LayerGroup, source_places: Sequence[int]
    ) -> None:
        """Copy `tokens` of `row` from the layers of `source` at `source_places` to this group."""
        self.begin_row(row, max(tokens.start, source.first_written(row)))
        with torch.inference_mode(mode=False), torch.no_grad():
            for mine, theirs in (
                (self.views.keys, source.views.keys),
                (self.views.values, source.views.values),
            ):
                for at, place in enumerate(source_places):
                    mine[at, row, :, tokens] = theirs[place, row, :, tokens]

    def check_row(self, row: int, num_tokens: int, overread_tokens: int) -> None:
        """Check I6: raise `InternalError` unless every page that a live row needs is mapped."""
        if not num_tokens:
            return
        pages = self.table.rows[row]
        first = self.first_needed_page(num_tokens)
        end = self.geometry.pages_for(min(num_tokens + overread_tokens, self.geometry.row_tokens))
        if first < end and (pages.first_page > first or pages.end_page < end):
            raise InternalError(
                f"I6: row {row} of {num_tokens} tokens needs pages [{first}, {end}), has "
                f"[{pages.first_page}, {pages.end_page})"
            )

    def has_outside_views(self) -> bool:
        """Whether tensors other than this group's own point into the range. Drops its own."""
        self._views.clear()
        return self._has_views()

    def close(self) -> None:
        """Unmap everything after its fence; free the range once no tensor points into it."""
        self._views.clear()
        self.table.close(self._has_views)

    def close_behind(self, fence: Fence) -> None:
        """Close without waiting: submitted work may run until `fence` has passed."""
        self._views.clear()
        self.table.close_behind(fence, self._has_views)


def split_layers(num_layers: int, layers_per_group: int | None) -> list[range]:
    """Divide `num_layers` layers into runs of at most `layers_per_group`, as even as possible."""
    if layers_per_group is None or layers_per_group >= num_layers:
        return [range(num_layers)]
    num_groups = div_ceil(num_layers, layers_per_group)
    bounds = [num_layers * at // num_groups for at in range(num_groups + 1)]
    return [range(start, end) for start, end in pairwise(bounds)]
