"""Sliding windows: what no later query can see leaves; what one may see stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vmkv import ClosedError, ConfigError, HostBackend, KVCache, Sequence
from vmkv.cache import layer_group
from vmkv.cache.cost import CostModel
from vmkv.units import KiB

PAGE = 4 * KiB
ALIASES = CostModel(map_us=0, unmap_us=0)
MakeCache = Callable[..., KVCache]
FULL, WINDOWED = 0, 2  # The first layers of the two groups.

pytestmark = pytest.mark.usefixtures("no_underread")


def _decode(cache: KVCache, sequence: Sequence, num_tokens: int, step: int = 1) -> list[int]:
    """Append step by step, writing each position; the pages resident in the windowed group."""
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
    # The window and what it straddles, the step, and an extent that has not left as a whole.
    bound = window_tokens / 4 + 1 + step / 4 + 1 + max(1, window_tokens / 4 / 8)
    assert max(pages) <= bound


@pytest.mark.parametrize("window_tokens", [1, 4, 9, 64])
def test_window_content_is_what_the_next_query_sees(
    make_cache: MakeCache, window_tokens: int
) -> None:
    """A query at the next position sees itself and the window's rest before it."""
    cache = make_cache(windows=(window_tokens,))
    sequence = cache.open()
    for _ in range(60):
        _decode(cache, sequence, 5, 5)
        first = max(0, sequence.num_tokens - window_tokens + 1)
        wanted = torch.arange(float(first), float(sequence.num_tokens))
        assert torch.equal(wanted, sequence.keys(WINDOWED)[first:, 0, 0])
        assert torch.equal(torch.arange(float(sequence.num_tokens)), sequence.keys(FULL)[:, 0, 0])


def test_prompt_longer_than_the_window_is_whole_until_the_next_append(
    make_cache: MakeCache,
) -> None:
    """The queries of the prompt see all of it; only then may its front leave."""
    cache = make_cache(windows=(8,))
    sequence = cache.open()
    _decode(cache, sequence, 200, 200)
    group, _ = cache.place(WINDOWED)
    assert (0, 50) == (group.table.rows[0].first_page, group.table.rows[0].end_page)
    sequence.append(1)
    assert group.table.rows[0].first_page > 40


def test_appending_nothing_at_a_page_end_keeps_what_is_needed(make_cache: MakeCache) -> None:
    """With a window of one token everything has left then; the next append still works."""
    cache = make_cache(windows=(1,))
    sequence = cache.open()
    for _ in range(20):
        _decode(cache, sequence, 4, 4)
        sequence.append(0)
        cache.check()
    group, _ = cache.place(WINDOWED)
    assert group.table.rows[sequence.row].num_pages <= 3


def test_window_pages_are_used_again(make_cache: MakeCache, host: HostBackend) -> None:
    """What leaves at the front serves at the end: decoding creates nothing in the long run."""
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


def test_what_is_there_is_said_and_can_be_read(make_cache: MakeCache) -> None:
    """Tokens before `first_token` have no memory; all others are what was written."""
    cache = make_cache(windows=(8,), cost_model=ALIASES)
    sequence = cache.open()
    assert [0, 0] == [sequence.first_token(layer) for layer in (FULL, WINDOWED)]
    for _ in range(30):
        _decode(cache, sequence, 3, 3)
        fork = sequence.fork()
        for each in (sequence, fork):
            first = each.first_token(WINDOWED)
            wanted = torch.arange(float(first), float(each.num_tokens))
            assert torch.equal(wanted, each.keys(WINDOWED)[first:, 0, 0])
            assert first <= max(0, each.num_tokens - 8 + 1)
        assert 0 == sequence.first_token(FULL)
        fork.close()
    assert sequence.first_token(WINDOWED) > 70
    with pytest.raises(ConfigError, match="layer 9 was not added"):
        sequence.first_token(9)
    with pytest.raises(ClosedError):
        fork.first_token(WINDOWED)


def test_window_of_one_token_may_leave_nothing_to_read(make_cache: MakeCache) -> None:
    """Then the first token that is there is the next one."""
    cache = make_cache(windows=(1,))
    sequence = cache.open()
    _decode(cache, sequence, 8, 4)
    sequence.append(0)
    assert sequence.num_tokens == sequence.first_token(WINDOWED)


def test_window_of_one_token_can_be_forked_where_a_page_ends(make_cache: MakeCache) -> None:
    """The fork holds nothing in those layers, needs nothing, and can be forked and cut itself."""
    cache = make_cache(windows=(1,), cost_model=ALIASES)
    sequence = cache.open()
    _decode(cache, sequence, 8, 4)
    fork = sequence.fork()
    fork.truncate(8)
    again = fork.fork()
    for each in (fork, again):
        assert torch.equal(torch.arange(8.0), each.keys(FULL)[:, 0, 0])
        _decode(cache, each, 4, 4)
    with pytest.raises(ConfigError, match="cannot go back to 7 tokens"):
        sequence.fork().truncate(7)


# ---- going back ---------------------------------------------------------------------------


def test_truncate_into_a_lost_past_is_refused(make_cache: MakeCache) -> None:
    """What the shorter sequence's next query would see is gone: said, and nothing changed."""
    cache = make_cache(windows=(8,))
    sequence = cache.open()
    _decode(cache, sequence, 100)
    with pytest.raises(ConfigError, match=r"cannot go back to 50 tokens.*keeps_past"):
        sequence.truncate(50)
    assert 100 == sequence.num_tokens
    _decode(cache, sequence, 4)


def test_truncate_within_the_window_is_allowed(make_cache: MakeCache) -> None:
    """Rejected draft tokens are a few: their queries' window is still there."""
    cache = make_cache(windows=(12,))
    sequence = cache.open()
    _decode(cache, sequence, 100, 4)
    sequence.truncate(98)
    cache.check()
    _decode(cache, sequence, 2)
    first = 100 - 12 + 1
    assert torch.equal(torch.arange(float(first), 100.0), sequence.keys(WINDOWED)[first:, 0, 0])


def test_truncate_to_nothing_begins_anew(make_cache: MakeCache) -> None:
    """A row whose front has left starts over at its start."""
    cache = make_cache(windows=(8,))
    sequence = cache.open()
    _decode(cache, sequence, 100)
    sequence.truncate(0)
    _decode(cache, sequence, 40)
    assert torch.equal(torch.arange(40.0), sequence.keys(FULL)[:, 0, 0])


def test_keeping_the_past_keeps_it(make_cache: MakeCache) -> None:
    """`keeps_past` is for rollback: nothing leaves while it is set."""
    cache = make_cache(windows=(8,))
    cache.keeps_past = True
    sequence = cache.open()
    _decode(cache, sequence, 100)
    sequence.truncate(50)
    assert torch.equal(torch.arange(50.0), sequence.keys(WINDOWED)[:, 0, 0])


def test_forks_keep_what_keeping_the_past_keeps(make_cache: MakeCache) -> None:
    """A fork can be rolled back as far as its source, and a fork of a part as well."""
    cache = make_cache(windows=(8,), cost_model=ALIASES)
    cache.keeps_past = True
    sequence = cache.open()
    _decode(cache, sequence, 100)
    for fork in (sequence.fork(), sequence.fork(60)):
        assert torch.equal(torch.arange(float(fork.num_tokens)), fork.keys(WINDOWED)[:, 0, 0])
        fork.truncate(50)
        assert torch.equal(torch.arange(50.0), fork.keys(WINDOWED)[:, 0, 0])
    cache.check()


@pytest.mark.parametrize("cost_model", [ALIASES, None], ids=["alias", "copy"])
def test_beams_keep_what_keeping_the_past_keeps(
    make_cache: MakeCache, cost_model: CostModel | None
) -> None:
    """They take over all of each other, and can be rolled back as far as before."""
    cache = make_cache(windows=(8,), cost_model=cost_model)
    cache.keeps_past = True
    beams = [cache.open(), cache.open()]
    for at, beam in enumerate(beams):
        _decode(cache, beam, 98)
        beam.keys(WINDOWED)[:] += 1000 * at
    cache.reorder(beams, [1, 0])
    for at, beam in enumerate(beams):
        beam.truncate(50)
        wanted = torch.arange(50.0) + 1000 * (1 - at)
        assert torch.equal(wanted, beam.keys(WINDOWED)[:, 0, 0])
    cache.check()


def test_past_that_was_let_go_of_does_not_come_back(make_cache: MakeCache) -> None:
    """Keeping begins when it is asked for: forks and beams have no more than their source."""
    cache = make_cache(windows=(8,), cost_model=ALIASES)
    beams = [cache.open(), cache.open()]
    for beam in beams:
        _decode(cache, beam, 60)
    cache.keeps_past = True
    for beam in beams:
        _decode(cache, beam, 40)
    beams.append(beams[0].fork())
    cache.reorder(beams[:2], [1, 0])
    cache.check()
    for beam in beams:
        with pytest.raises(ConfigError, match="cannot go back to 50 tokens"):
            beam.truncate(50)
        beam.truncate(70)
        cache.check()


@pytest.mark.parametrize("how", ["close", "truncate"])
def test_row_that_begins_anew_forgets_what_was_never_written(
    make_cache: MakeCache, how: str
) -> None:
    """A reordered beam holds what its window sees; who comes after it holds all it writes."""
    cache = make_cache(windows=(8,), max_sequences=3)
    beams = [cache.open(), cache.open()]
    for beam in beams:
        beam.append(100)
    cache.reorder(beams, [1, 0])
    with pytest.raises(ConfigError, match="cannot go back"):
        beams[0].truncate(50)
    if how == "close":
        beams[0].close()
        sequence = cache.open(row=beams[0].row)
    else:
        sequence = beams[0]
        sequence.truncate(0)
    sequence.append(40)
    sequence.record(range(40))
    sequence.fork().close()
    sequence.truncate(39)
    sequence.close()
    assert 32 == cache.open(prompt=range(34)).num_cached_tokens


def test_compacting_does_not_invent_what_beams_never_wrote(make_cache: MakeCache) -> None:
    """The pages move, and with them what is known of them."""
    cache = make_cache(windows=(8,), max_sequences=3)
    beams = [cache.open(), cache.open()]
    for beam in beams:
        beam.append(100)
    cache.reorder(beams, [1, 0])
    cache.drop_layers([WINDOWED + 1])
    cache.compact()
    with pytest.raises(ConfigError, match="cannot go back"):
        beams[0].truncate(50)


def test_displaced_row_is_not_adopted(make_cache: MakeCache) -> None:
    """A run that begins in the middle of its row is of no use to a new sequence."""
    cache = make_cache(windows=(8,))
    sequence = cache.open()
    _decode(cache, sequence, 100)
    sequence.close()
    sequence = cache.open(100)
    _decode(cache, sequence, 20, 20)
    assert torch.equal(torch.arange(20.0), sequence.keys(WINDOWED)[:, 0, 0])


def test_compacting_does_not_bring_the_past_back(make_cache: MakeCache) -> None:
    """What the window had let go of before a move is gone after it as well, and said to be."""
    cache = make_cache(windows=(3,))
    sequence = cache.open()
    _decode(cache, sequence, 9)
    sequence.append(0)
    with pytest.raises(ConfigError, match="cannot go back"):
        sequence.truncate(5)
    cache.drop_layers([WINDOWED + 1])
    cache.compact()
    assert torch.equal(torch.arange(7.0, 9.0), sequence.keys(WINDOWED)[7:, 0, 0])
    with pytest.raises(ConfigError, match="cannot go back"):
        sequence.truncate(5)


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
    """What a running step still reads is retired, not unmapped."""
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


def test_growth_waits_for_what_is_retired_in_its_way(
    make_cache: MakeCache, host: HostBackend
) -> None:
    """A row that begins anew while the device still reads its old pages lets it finish first."""
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
    """A window of nothing sees nothing."""
    with pytest.raises(ConfigError, match="window_tokens="):
        cache.add_layers(
            [7], num_kv_heads=1, head_dim=8, dtype=torch.float16, window_tokens=window_tokens
        )
