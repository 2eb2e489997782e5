"""The page map of a cache: what each row has mapped, as data, text and picture.

    print(page_map(cache))          # for a terminal
    draw(cache, "map.png")          # needs matplotlib: pip install 'vmkv[bench]'

A row is a line, a page a cell. A shared extent has the same letter or colour in every row.
"""

from __future__ import annotations

import itertools
import operator
from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from .core.backend import Access, MemoryLocation
from .core.cache import KVCache, LayerGroup, StateGroup
from .core.memory import Extent
from .errors import ConfigError
from .units import div_ceil, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEXT_CELLS_MAX = 64
_SHARED_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_OWN, _EMPTY, _PARKED, _HOST, _UNMAPPED = "#", "-", "=", "~", "."
_TEXT_LEGEND = (
    f"A a letter: one extent, in every row that maps it   {_OWN} own   {_EMPTY} own, no token yet\n"
    f"{_PARKED} parked   {_HOST} in host memory   {_UNMAPPED} not mapped"
)
#: The colour-blind-safe palette of Okabe and Ito and lighter variants, used cyclically.
_SHARED_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#F0E442"),
    *("#7FB8D8", "#EAAE7F", "#7FCEB9", "#E5BCD3", "#AAD9F4", "#F2CF7F", "#8C6BB1"),
)
_OWN_COLOUR, _HOST_COLOUR, _LINE_COLOUR = "#C8C8C8", "#8A8A8A", "#222222"
_LABELLED_ROWS_MAX = 24

_State = Literal["live", "parked", "swapped"]
#: An extent, the page of a row where it lies, and the access there.
_Place = tuple[Extent, int, Access]


@dataclass(frozen=True)
class MappedExtent:
    """An extent at its place in a row.

    `share` numbers the shared extents of a layer group, in order of appearance; None for others.
    """

    first_page: int
    num_pages: int
    share: int | None
    access: Access
    location: MemoryLocation

    @property
    def end_page(self) -> int:
        """Page after the last."""
        return self.first_page + self.num_pages


@dataclass(frozen=True)
class RowMap:
    """A row that is live, or has something mapped; swapped-out extents are at their old place."""

    row: int
    state: _State
    num_tokens: int
    extents: tuple[MappedExtent, ...]

    @property
    def end_page(self) -> int:
        """Page after the last extent."""
        return self.extents[-1].end_page if self.extents else 0


@dataclass(frozen=True)
class GroupMap:
    """The rows of a layer group, in order; with `is_fixed` they are states, one token each."""

    layers: tuple[int, ...]
    token_bytes: int
    page_bytes: int
    rows: tuple[RowMap, ...]
    is_fixed: bool = False

    @property
    def end_page(self) -> int:
        """End of the longest row: its mappings, or its tokens if they are swapped out."""
        ends = (max(row.end_page, self.pages_for(row.num_tokens)) for row in self.rows)
        return max(ends, default=0)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that the first `num_tokens` tokens of a row reach into."""
        return div_ceil(num_tokens * self.token_bytes, self.page_bytes)


@dataclass(frozen=True)
class PageMap:
    """A snapshot of a cache's mappings, one map per layer group. `str` draws it."""

    groups: tuple[GroupMap, ...]

    @property
    def mapped_bytes(self) -> int:
        """Addresses backed by device memory."""
        return sum(num_bytes for _, num_bytes in self._device_extents())

    @property
    def resident_bytes(self) -> int:
        """Device memory mapped, each extent counted once."""
        return sum(dict(self._device_extents()).values())

    @property
    def summary(self) -> str:
        """Mapped and resident bytes, and their difference, which sharing saves."""
        mapped_bytes, resident_bytes = self.mapped_bytes, self.resident_bytes
        return (
            f"{format_bytes(mapped_bytes)} mapped, {format_bytes(resident_bytes)} of memory behind "
            f"it: sharing saves {format_bytes(mapped_bytes - resident_bytes)}"
        )

    @property
    def alike(self) -> list[list[GroupMap]]:
        """Neighbouring layer groups, together if their drawings are equal."""
        looks = operator.attrgetter("token_bytes", "page_bytes", "rows")
        return [list(alike) for _, alike in itertools.groupby(self.groups, looks)]

    def _device_extents(self) -> Iterator[tuple[object, int]]:
        """Yield each extent's identity and size, as often as it is mapped."""
        for group in self.groups:
            for row in group.rows:
                for each in row.extents:
                    if each.location is MemoryLocation.DEVICE:
                        own = id(each) if each.share is None else None
                        key = (id(group), each.share, own)
                        yield key, each.num_pages * group.page_bytes

    def __str__(self) -> str:
        if not self.groups:
            return "no layers yet"
        parts = []
        for alike in self.alike:
            parts += [_title(alike), *_lines(alike[0])]
        return "\n".join([*parts, self.summary, _TEXT_LEGEND])


class ModelCache(Protocol):
    """A `VMKVCache` or `RaggedCache`."""

    @property
    def kv_caches(self) -> tuple[KVCache, ...]:
        """The `KVCache` of each device."""
        ...


def page_map(cache: KVCache | ModelCache) -> PageMap:
    """Take a snapshot of the mappings of `cache`, on all devices; it keeps no memory alive.

    Raises:
        ClosedError: The cache is closed.

    Cost: proportional to what is mapped; no driver call.
    """
    groups: list[GroupMap] = []
    for each in (cache,) if isinstance(cache, KVCache) else cache.kv_caches:
        each.check_open()
        with each.pool.lock:
            groups += [_group_map(each, group) for group in each.groups]
    return PageMap(tuple(groups))


def _group_map(cache: KVCache, group: LayerGroup) -> GroupMap:
    found: list[tuple[int, _State, int, list[_Place]]] = []
    for sequence in cache.sequences:
        state: _State = "live"
        places = _mapped(group, sequence.row)
        if sequence.swapped is not None:  # Host memory, at the pages that the sequence had.
            moved = zip(sequence.swapped.extents, sequence.swapped.parts, strict=True)
            its = [(extent, part.page) for extent, part in moved if part.table is group.table]
            state, places = "swapped", places + [(*each, Access.NONE) for each in its]
        found.append((sequence.row, state, sequence.num_tokens, places))
    for row in cache.rows.parked:
        if places := _mapped(group, row):
            found.append((row, "parked", cache.prefixes.num_recorded(row), places))
    layers = tuple(layer for layer in cache.layers if cache.place(layer)[0] is group)
    if isinstance(group, StateGroup):
        layers = tuple(group.shapes)
        for _, num_tokens, row in group.checkpoints():
            found.append((row, "parked", num_tokens, _mapped(group, row)))
    shares: dict[int, int] = {}

    def shown(extent: Extent, first_page: int, access: Access) -> MappedExtent:
        share = shares.setdefault(extent.handle, len(shares)) if extent.is_shared else None
        return MappedExtent(first_page, extent.num_pages, share, access, extent.location)

    return GroupMap(
        layers,
        group.token_bytes,
        group.page_bytes,
        tuple(
            RowMap(
                row,
                state,
                min(num_tokens, 1) if group.is_fixed else num_tokens,
                tuple(itertools.starmap(shown, places)),
            )
            for row, state, num_tokens, places in sorted(found, key=operator.itemgetter(0))
        ),
        is_fixed=group.is_fixed,
    )


def _mapped(group: LayerGroup, row: int) -> list[_Place]:
    return [(each.extent, each.first_page, each.access) for each in group.table.rows[row].mappings]


# ---- text -------------------------------------------------------------------------------------


def _title(alike: abc.Sequence[GroupMap]) -> str:
    """`layers 0-31: pages of 2 MiB, 16 tokens each`, for layer groups that are drawn once."""
    group = alike[0]
    each = f", {len(alike)} groups alike" if len(alike) > 1 else ""
    layers = sorted(layer for group in alike for layer in group.layers)
    pages = f"pages of {format_bytes(group.page_bytes)}"
    if group.is_fixed:
        return f"states of layers {_ranges(layers)}{each}: {pages}"
    tokens = f"{group.page_bytes / group.token_bytes:.4g} tokens each"
    return f"layers {_ranges(layers)}{each}: {pages}, {tokens}"


def _ranges(numbers: abc.Sequence[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7."""
    runs = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        runs.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ", ".join(runs)


def _lines(group: GroupMap) -> list[str]:
    pages_per_cell = max(1, div_ceil(group.end_page, _TEXT_CELLS_MAX))
    lines = [] if pages_per_cell == 1 else [f"(a cell is {pages_per_cell} pages; the first shows)"]
    for row in group.rows:
        used_end_page = group.pages_for(row.num_tokens)
        pages = [_UNMAPPED] * group.end_page
        for each in row.extents:
            for page in range(each.first_page, each.end_page):
                pages[page] = _symbol(row, each, is_empty=page >= used_end_page)
        cells = "".join(
            next((page for page in pages[at : at + pages_per_cell] if page != _UNMAPPED), _UNMAPPED)
            for at in range(0, group.end_page, pages_per_cell)
        )
        lines.append(f"row {row.row:>3} {row.state:<7} {row.num_tokens:>6} tokens  {cells}")
    return lines


def _symbol(row: RowMap, each: MappedExtent, *, is_empty: bool) -> str:
    if each.share is not None:
        return _SHARED_LETTERS[each.share % len(_SHARED_LETTERS)]
    if each.location is MemoryLocation.HOST:
        return _HOST
    if row.state == "parked":
        return _PARKED
    return _EMPTY if is_empty else _OWN


# ---- picture ----------------------------------------------------------------------------------


def draw(cache: KVCache | ModelCache | PageMap, path: str | Path) -> None:
    """Draw a page map to a file: a line per row, a box per extent.

    Shared extents have a colour each, the same in every row; unshared extents are grey, darker in
    host memory; parked rows are hatched; unmapped pages are white. Read-only mappings show an `r`.

    Args:
        cache: A `KVCache`, `VMKVCache` or `RaggedCache`, or a map of it.
        path: File to write; its ending gives the format (`.png`, `.svg`, `.pdf`).

    Raises:
        ConfigError: matplotlib is not installed, or does not support the format.
        ClosedError: The cache is closed.
        OSError: The file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "drawing a page map needs matplotlib: pip install 'vmkv[bench]', or print page_map()"
        ) from error
    shown = cache if isinstance(cache, PageMap) else page_map(cache)
    kind, kinds = Path(path).suffix[1:].lower(), FigureCanvasAgg.get_supported_filetypes()
    if kind not in kinds:
        raise ConfigError(f"cannot draw to {path}; its name must end in {', '.join(sorted(kinds))}")
    panels = shown.alike
    heights = [0.9 + 0.26 * max(1, min(len(alike[0].rows), _LABELLED_ROWS_MAX)) for alike in panels]
    figure = Figure(figsize=(11, 1.1 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    if panels:
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for each, alike in zip(axes, panels, strict=True):
            _draw_group(each, alike)
    figure.suptitle(shown.summary, fontsize=11)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=6, fontsize=9)
    figure.savefig(path, dpi=120)


def _draw_group(axes: Axes, alike: abc.Sequence[GroupMap]) -> None:
    from matplotlib.ticker import MaxNLocator

    group = alike[0]
    num_pages = max(1, group.end_page)
    page_points = 700 / num_pages
    for y, row in enumerate(group.rows):
        axes.broken_barh(
            [(each.first_page, each.num_pages) for each in row.extents],
            (y - 0.4, 0.8),
            facecolors=[_colour(each) for each in row.extents],
            edgecolor=_LINE_COLOUR,
            linewidth=0.6 if page_points > 4 else 0.25,
            hatch="////" if row.state == "parked" else None,
        )
        for each in row.extents:
            if each.access is Access.READ and page_points * each.num_pages > 9:
                middle = each.first_page + each.num_pages / 2
                axes.text(middle, y, "r", ha="center", va="center", fontsize=8)
        if row.num_tokens:
            end = row.num_tokens * group.token_bytes / group.page_bytes
            axes.plot([end, end], [y - 0.42, y + 0.42], color="black", linewidth=2)
    step = div_ceil(len(group.rows), _LABELLED_ROWS_MAX)
    labelled = list(enumerate(group.rows))[:: max(1, step)]
    axes.set_yticks(
        [y for y, _ in labelled],
        [f"row {row.row}{'' if row.state == 'live' else f', {row.state}'}" for _, row in labelled],
        fontsize=8,
    )
    axes.set(xlim=(0, num_pages * 1.01), ylim=(max(1, len(group.rows)) - 0.4, -0.6))
    axes.set_title(_title(alike), fontsize=10, loc="left")
    axes.set_xlabel("pages of a row", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)


def _colour(each: MappedExtent) -> str:
    if each.share is not None:
        return _SHARED_COLOURS[each.share % len(_SHARED_COLOURS)]
    return _OWN_COLOUR if each.location is MemoryLocation.DEVICE else _HOST_COLOUR


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def box(label: str, colour: str, hatch: str | None = None) -> Patch:
        return Patch(facecolor=colour, edgecolor=_LINE_COLOUR, hatch=hatch, label=label)

    return [
        box("shared: one colour, one extent", _SHARED_COLOURS[0]),
        box("own", _OWN_COLOUR),
        box("in host memory", _HOST_COLOUR),
        box("parked", "white", "////"),
        Line2D([], [], color="black", linewidth=2, label="tokens end here"),
        Line2D([], [], linestyle="none", marker="$r$", color="black", label="may only be read"),
    ]
