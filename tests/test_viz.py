"""The page map agrees with the page tables, and its text and picture show it.

Not covered: whether a picture is beautiful.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_models import tiny_model

import vmkv
from vmkv import ClosedError, ConfigError, HostBackend, KVCache
from vmkv.core.backend import Access, MemoryLocation
from vmkv.core.cache.forking import CostModel
from vmkv.units import KiB, MiB
from vmkv.viz import RowMap, draw, page_map

PAGE_BYTES = 4 * KiB
PAGE_TOKENS = 4  # Of two layers in one group, as below.
ALWAYS_ALIAS = CostModel(map_us=0, unmap_us=0)  # The default would copy pages of this size.
BLUE, GREY, DARK_GREY = (0x00, 0x72, 0xB2), (0xC8, 0xC8, 0xC8), (0x8A, 0x8A, 0x8A)


@pytest.fixture
def cache() -> Iterator[KVCache]:
    """A cache of two layers in one group; a page holds four tokens."""
    with KVCache(
        HostBackend(PAGE_BYTES),
        max_tokens=2048,
        max_sequences=6,
        budget_bytes=4 * MiB,
        host_budget_bytes=1 * MiB,
        layers_per_group=2,
        cost_model=ALWAYS_ALIAS,
    ) as cache:
        cache.add_layers(range(2), num_kv_heads=2, head_dim=64, dtype=torch.float16)
        yield cache


def only_rows(cache: KVCache) -> dict[int, RowMap]:
    """The rows of a cache with one group, by number."""
    (group,) = page_map(cache).groups
    return {row.row: row for row in group.rows}


# ---- data ---------------------------------------------------------------------------------


def test_a_new_cache_has_no_mapped_rows(cache: KVCache) -> None:
    """With and without layers."""
    with KVCache(HostBackend(PAGE_BYTES), max_tokens=8, max_sequences=1) as empty:
        assert page_map(empty).groups == ()
        assert str(page_map(empty)) == "no layers yet"
    (group,) = page_map(cache).groups
    assert group.layers == (0, 1)
    assert (group.page_bytes, group.page_bytes // group.token_bytes) == (PAGE_BYTES, PAGE_TOKENS)
    assert group.rows == ()
    assert page_map(cache).mapped_bytes == 0


def test_a_fork_maps_the_shared_extent_read_only(cache: KVCache) -> None:
    """The shared extent has the same number in both rows; each row has its own tail."""
    source = cache.open()
    source.append(8 * PAGE_TOKENS + 1)
    fork = source.fork()
    rows = only_rows(cache)
    theirs, mine = rows[source.row], rows[fork.row]
    assert [each.num_pages for each in theirs.extents] == [8, 1]
    assert [each.num_pages for each in mine.extents] == [8, 1]
    assert [each.share for each in theirs.extents] == [0, None]
    assert [each.share for each in mine.extents] == [0, None]
    assert [each.access for each in theirs.extents] == [Access.READ_WRITE] * 2
    assert [each.access for each in mine.extents] == [Access.READ, Access.READ_WRITE]
    assert (mine.state, mine.num_tokens, mine.end_page) == ("live", 8 * PAGE_TOKENS + 1, 9)


def test_bytes_agree_with_the_stats(cache: KVCache) -> None:
    """Sums of the map equal `stats()`, with forked, parked and swapped rows."""
    source = cache.open()
    source.append(37 * PAGE_TOKENS)
    fork = source.fork()
    fork.append(9 * PAGE_TOKENS)
    parked = cache.open()
    parked.append(5 * PAGE_TOKENS)
    parked.close()
    for _ in range(2):
        shown, stats = page_map(cache), cache.stats()
        assert shown.resident_bytes == stats.resident_bytes
        assert shown.mapped_bytes - shown.resident_bytes == stats.shared_bytes > 0
        if fork.swapped is None:
            fork.swap_out()


def test_a_parked_row_has_its_recorded_tokens_only(cache: KVCache) -> None:
    sequence = cache.open()
    sequence.append(6 * PAGE_TOKENS)
    sequence.record(range(5 * PAGE_TOKENS))
    sequence.close()
    (row,) = only_rows(cache).values()
    assert (row.state, row.num_tokens) == ("parked", 5 * PAGE_TOKENS)
    assert row.end_page == 6
    cache.trim()
    assert only_rows(cache) == {}


def test_swapped_row_lies_in_host_memory(cache: KVCache) -> None:
    """Its own extents are in host memory without access; shared extents stay."""
    source = cache.open()
    source.append(8 * PAGE_TOKENS)
    fork = source.fork()
    fork.append(3 * PAGE_TOKENS)
    before = only_rows(cache)[fork.row]
    fork.swap_out()
    row = only_rows(cache)[fork.row]
    assert (row.state, row.num_tokens, row.end_page) == ("swapped", 11 * PAGE_TOKENS, 11)
    shared, *moved = row.extents
    assert shared == before.extents[0]
    assert moved[0].first_page == 8
    assert sum(each.num_pages for each in moved) == 3
    assert {(each.location, each.access) for each in moved} == {(MemoryLocation.HOST, Access.NONE)}
    fork.swap_in()
    row = only_rows(cache)[fork.row]
    assert row.state == "live"
    assert {each.location for each in row.extents} == {MemoryLocation.DEVICE}


def test_map_is_a_snapshot(cache: KVCache) -> None:
    """It does not change with the cache, and is usable after `close`."""
    sequence = cache.open()
    sequence.append(3 * PAGE_TOKENS)
    shown = page_map(cache)
    text = str(shown)
    sequence.append(9 * PAGE_TOKENS)
    assert page_map(cache) != shown
    cache.close()
    assert str(shown) == text
    with pytest.raises(ClosedError, match="closed"):
        page_map(cache)


# ---- text ---------------------------------------------------------------------------------


def test_text_shows_the_state_of_each_page(cache: KVCache) -> None:
    """Letters for shared extents, and a symbol for each other kind of page."""
    source = cache.open()
    source.append(10 * PAGE_TOKENS + 1)
    fork = source.fork()
    fork.append(2 * PAGE_TOKENS)
    parked = cache.open()
    parked.append(3 * PAGE_TOKENS)
    parked.close()
    swapped = cache.open(row=3)
    swapped.append(2 * PAGE_TOKENS)
    swapped.swap_out()
    shortened = cache.open(row=4)
    shortened.append(4 * PAGE_TOKENS)
    shortened.truncate(PAGE_TOKENS + 1)
    assert str(page_map(cache)).splitlines()[:6] == [
        "layers 0-1: pages of 4 KiB, 4 tokens each",
        "row   0 live        41 tokens  AAAAAAAABB#..",
        "row   1 live        49 tokens  AAAAAAAABB###",
        "row   2 parked       0 tokens  ===..........",
        "row   3 swapped      8 tokens  ~~...........",
        "row   4 live         5 tokens  ##--.........",
    ]
    assert "sharing saves 40 KiB" in str(page_map(cache))


def test_long_rows_are_drawn_in_coarser_cells(cache: KVCache) -> None:
    """No line is wider than a terminal; a note gives the size of a cell."""
    sequence = cache.open()
    sequence.append(200 * PAGE_TOKENS)
    title, note, row, *_ = str(page_map(cache)).splitlines()
    assert title.startswith("layers 0-1")
    assert note == "(a cell is 4 pages; the first shows)"
    assert row.endswith("tokens  " + "#" * 50)
    assert len(row) <= 100


def test_groups_that_look_alike_are_drawn_once() -> None:
    """With one layer per group; groups with a window look different."""
    with KVCache(
        HostBackend(PAGE_BYTES), max_tokens=512, max_sequences=2, cost_model=ALWAYS_ALIAS
    ) as cache:
        shape = {"num_kv_heads": 2, "head_dim": 64, "dtype": torch.float16}
        cache.add_layers((0, 1, 2, 5), **shape)
        cache.add_layers((3, 4), window_tokens=8, **shape)
        sequence = cache.open()
        for _ in range(320):
            sequence.append(1)
        sequence.fork()
        text = str(page_map(cache))
    assert [line for line in text.splitlines() if line.startswith("layers")] == [
        "layers 0-2, 5, 4 groups alike: pages of 4 KiB, 8 tokens each",
        "layers 3-4, 2 groups alike: pages of 4 KiB, 8 tokens each",
    ]
    assert text.count("row   0") == 2
    assert "tokens  ......." in text, "tokens that left a window are not mapped"


# ---- picture ------------------------------------------------------------------------------


def _pixels(path: Path) -> np.ndarray:
    from matplotlib.image import imread  # Imported late: the import takes half a second.

    return imread(path)[..., :3]


def count(path: Path, colour: tuple[int, int, int]) -> int:
    """Number of pixels of a colour."""
    pixels = _pixels(path)
    return int((np.abs(pixels - np.array(colour) / 255).sum(axis=-1) < 0.02).sum())


def test_picture_shows_shared_extents_in_one_colour(cache: KVCache, tmp_path: Path) -> None:
    """Before the fork there is only grey; after it both rows have an area of one colour."""
    path = tmp_path / "map.png"
    source = cache.open()
    source.append(8 * PAGE_TOKENS)
    draw(cache, path)
    height, width, _ = _pixels(path).shape
    assert (height > 150, width > 1000) == (True, True)
    own = count(path, GREY)
    assert own > 0.05 * width * height
    assert count(path, BLUE) < 500, "nothing is shared; only the legend is blue"

    source.fork().append(8 * PAGE_TOKENS)
    draw(page_map(cache), str(path))
    pixels = _pixels(path)
    is_blue = np.abs(pixels - np.array(BLUE) / 255).sum(axis=-1) < 0.02
    lines = np.flatnonzero(is_blue.sum(axis=1) > width // 4)
    gaps = np.flatnonzero(np.diff(lines) > 1)
    assert len(gaps) == 1, "two rows of blue boxes, with white between them"


def test_picture_shows_parked_and_swapped_rows(cache: KVCache, tmp_path: Path) -> None:
    """Parked rows are hatched, host memory is darker."""
    path = tmp_path / "map.png"
    sequence, other = cache.open(), cache.open()
    sequence.append(8 * PAGE_TOKENS)
    other.append(8 * PAGE_TOKENS)
    draw(cache, path)
    both_live, dark = count(path, GREY), count(path, DARK_GREY)
    other.close()
    draw(cache, path)
    one_parked = count(path, GREY)
    assert 0.5 * both_live < one_parked < 0.98 * both_live
    sequence.swap_out()
    draw(cache, path)
    assert count(path, DARK_GREY) > dark + both_live // 4


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_cache_without_layers_can_be_drawn(ending: str, tmp_path: Path) -> None:
    """In every file format."""
    path = tmp_path / f"map.{ending}"
    with KVCache(HostBackend(PAGE_BYTES), max_tokens=8, max_sequences=1) as cache:
        draw(cache, path)
    assert path.stat().st_size > 500


@pytest.mark.parametrize("kind", [vmkv.VMKVCache, vmkv.RaggedCache])
def test_a_models_cache_can_be_drawn(kind: Any, tmp_path: Path) -> None:
    """Its map has the layers that its `KVCache` has."""
    model = tiny_model("llama", "sdpa")
    with kind(model.config, memory=None, backend=HostBackend(PAGE_BYTES)) as cache:
        assert "no layers yet" == str(page_map(cache))
        if kind is vmkv.RaggedCache:
            vmkv.generate(model, [[5, 6, 7]], cache=cache, max_new_tokens=2)
        else:
            ids = torch.tensor([[5, 6, 7]])
            model.generate(ids, past_key_values=cache, max_new_tokens=2)
        (core,) = cache.kv_caches
        assert str(page_map(core)) == str(page_map(cache)) != "no layers yet"
        draw(cache, tmp_path / "map.png")


@pytest.mark.parametrize("name", ["map", "map.xyz"])
def test_unknown_kinds_of_file_are_refused(name: str, cache: KVCache, tmp_path: Path) -> None:
    """The error lists the formats."""
    with pytest.raises(ConfigError, match="png"):
        draw(cache, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_message_names_the_extra(
    cache: KVCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text needs no matplotlib."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "mapped" in str(page_map(cache))
    with pytest.raises(ConfigError, match=r"\[bench\]"):
        draw(cache, tmp_path / "map.png")


@pytest.mark.slow
def test_importing_viz_does_not_import_matplotlib() -> None:
    script = "import sys, vmkv.viz; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=120).returncode == 0
