"""Sliding windows: pages that no later query sees are unmapped, other pages stay."""

from __future__ import annotations

import pytest
import torch
from helpers.caches import PAGE, MakeCache

from vmkv import ConfigError, HostBackend, KVCache, Sequence
from vmkv.core.cache import layer_group

FULL, WINDOWED = 0, 2  # The first layers of the two groups.

pytestmark = pytest.mark.usefixtures("no_underread")


def _decode(cache: KVCache, sequence: Sequence, num_tokens: int, step: int = 1) -> list[int]:
    """Append step by step, writing each position; return the windowed group's resident pages."""
    group, _ = cache.place(WINDOWED)
    pages = []
    for _ in range(num_tokens // step):
        start = sequence.num_tokens
        sequence.append(step)
        values = torch.arange(float(start), float(start + step))[:, None, None]
        for layer in (FULL, WINDOWED):
            sequence.keys(layer)[start:] = values
        cache.check()
        pages.append(group.table.rows[sequence.row].num_pages)
    return pages


@pytest.mark.parametrize("window_tokens", [1, 3, 4, 5, 12, 64, 100])
@pytest.mark.parametrize("step", [1, 4, 7])
def test_resident_pages_of_a_window_stay_flat(
    make_cache: MakeCache, window_tokens: int, step: int
) -> None:
    """Once the window is full, memory no longer grows with the sequence."""
    cache = make_cache(windows=(window_tokens,))
    pages = _decode(cache, cache.open(), 392, step)
    # The window and a partial page, the step, and an extent that the window has partly passed.
    bound = window_tokens / 4 + 1 + step / 4 + 1 + max(1, window_tokens / 4 / 8)
    assert max(pages) <= bound


def test_window_pages_are_used_again(make_cache: MakeCache, host: HostBackend) -> None:
    """Pages that the window has passed serve at the row's end, so decoding creates no more."""
    cache = make_cache(windows=(8,), max_tokens=2000)
    sequence = cache.open()
    sequence.append(300)
    group_full, _ = cache.place(FULL)
    _decode(cache, sequence, 100)
    created = cache.pool.stats().created_bytes
    full = group_full.table.rows[0].num_pages
    _decode(cache, sequence, 400)
    growth = group_full.table.rows[0].num_pages - full
    assert cache.pool.stats().created_bytes - created <= growth * PAGE


def test_window_of_one_token_may_leave_nothing_to_read(make_cache: MakeCache) -> None:
    """The first readable token is then the next one."""
    cache = make_cache(windows=(1,))
    sequence = cache.open()
    _decode(cache, sequence, 8, 4)
    sequence.append(0)
    assert sequence.num_tokens == sequence.first_token(WINDOWED)


# ---- truncation ---------------------------------------------------------------------------


def test_truncate_before_the_window_is_refused(make_cache: MakeCache) -> None:
    """The next query would need tokens that are unmapped; nothing changes."""
    cache = make_cache(windows=(8,))
    sequence = cache.open()
    _decode(cache, sequence, 100)
    with pytest.raises(ConfigError, match=r"cannot go back to 50 tokens.*keeps_past"):
        sequence.truncate(50)
    assert 100 == sequence.num_tokens
    _decode(cache, sequence, 4)


def test_truncate_within_the_window_is_allowed(make_cache: MakeCache) -> None:
    """Rejected draft tokens are few, so the window of the queries before them is still mapped."""
    cache = make_cache(windows=(12,))
    sequence = cache.open()
    _decode(cache, sequence, 100, 4)
    sequence.truncate(98)
    cache.check()
    _decode(cache, sequence, 2)
    first = 100 - 12 + 1
    assert torch.equal(torch.arange(float(first), 100.0), sequence.keys(WINDOWED)[first:, 0, 0])


def test_keeps_past_allows_truncation_before_the_window(make_cache: MakeCache) -> None:
    """No page is unmapped while it is set."""
    cache = make_cache(windows=(8,))
    cache.keeps_past = True
    sequence = cache.open()
    _decode(cache, sequence, 100)
    sequence.truncate(50)
    assert torch.equal(torch.arange(50.0), sequence.keys(WINDOWED)[:, 0, 0])


def test_displaced_row_is_not_adopted(make_cache: MakeCache) -> None:
    """A new sequence cannot use pages that begin in the middle of a row."""
    cache = make_cache(windows=(8,))
    sequence = cache.open()
    _decode(cache, sequence, 100)
    sequence.close()
    sequence = cache.open(100)
    _decode(cache, sequence, 20, 20)
    assert torch.equal(torch.arange(20.0), sequence.keys(WINDOWED)[:, 0, 0])


def test_window_keeps_a_tile_before_it(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels fetch whole tiles, so tokens just before the window stay resident too."""
    monkeypatch.setattr(layer_group, "UNDERREAD_TOKENS", 32)
    cache = make_cache(windows=(8,))
    sequence = cache.open()
    pages = _decode(cache, sequence, 392, 4)
    group, _ = cache.place(WINDOWED)
    assert group.table.rows[0].first_page * 4 <= sequence.num_tokens - 8 + 1 - 32
    assert max(pages) <= (8 + 32) / 4 + 4


# ---- a busy device ------------------------------------------------------------------------


def test_window_pages_wait_for_their_fence(make_cache: MakeCache, host: HostBackend) -> None:
    """Pages that a running step may read are retired, and unmapped after the fence."""
    cache = make_cache(windows=(8,))
    sequence = cache.open()
    sequence.append(64)
    sequence.keys(WINDOWED)[:] = torch.arange(64.0)[:, None, None]
    old = sequence.keys(WINDOWED)
    cache.pool.reclaimer.poll()
    host.hold_fences()
    unmaps = host.calls["mem_unmap"]
    for _ in range(20):
        sequence.append(1)
    assert unmaps == host.calls["mem_unmap"]
    assert torch.equal(torch.arange(64.0), old[:, 0, 0])
    assert cache.stats().retired_bytes > 0
    host.pass_fences()
    sequence.append(1)
    assert host.calls["mem_unmap"] > unmaps


def test_growth_waits_for_retired_mappings_at_its_addresses(
    make_cache: MakeCache, host: HostBackend
) -> None:
    """The device may still read the old pages of a row that was truncated to nothing."""
    cache = make_cache(windows=(8,))
    sequence = cache.open()
    _decode(cache, sequence, 40, 4)
    host.hold_fences()
    sequence.truncate(0)
    before = len(cache.pool.reclaimer.retired_mappings())
    _decode(cache, sequence, 40, 40)
    assert len(cache.pool.reclaimer.retired_mappings()) < before
    assert torch.equal(torch.arange(40.0), sequence.keys(WINDOWED)[:, 0, 0])
    host.pass_fences()


@pytest.mark.parametrize("window_tokens", [0, -1, 2.5])
def test_window_is_a_positive_integer(cache: KVCache, window_tokens: int) -> None:
    with pytest.raises(ConfigError, match="window_tokens="):
        cache.add_layers(
            [7], num_kv_heads=1, head_dim=8, dtype=torch.float16, window_tokens=window_tokens
        )
