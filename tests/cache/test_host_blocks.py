"""Evicted prefixes go to host memory, block by block, and come back with the prompt.

Engines at random are played in tests/machines and tests/serve; here each case is on its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import suppress

import pytest
import torch
from helpers.stamps import append, assert_holds

from vmkv import ConfigError, DriverError, HostBackend, KVCache, OutOfPagesError, Sequence
from vmkv.core.backend import MemoryLocation
from vmkv.core.cache import StateShape
from vmkv.core.cache.forking import find_beginning
from vmkv.testing import FaultInjectingBackend
from vmkv.units import KiB

PAGE = 4 * KiB
MakeCache = Callable[..., KVCache]


def _say(
    cache: KVCache, tokens: Iterable[int], tenant: str | None = None, kept_until_s: float = 0.0
) -> None:
    """A conversation with these tokens, which has ended."""
    wanted = list(tokens)
    sequence = cache.open(prompt=[*wanted, 0], tenant=tenant)
    sequence.kept_until_s = kept_until_s
    append(sequence, wanted[sequence.num_tokens :])
    sequence.record(wanted[sequence.num_recorded :])
    sequence.close()


def _back(cache: KVCache, tokens: Iterable[int], tenant: str | None = None) -> Sequence:
    """Begin with these tokens, and check all that is there already."""
    wanted = list(tokens)
    found = cache.find_prefix([*wanted, 0], tenant)
    sequence = cache.open(prompt=[*wanted, 0], tenant=tenant)
    assert sequence.num_tokens <= found  # Less if memory is short.
    assert_holds(sequence, wanted[: sequence.num_tokens])
    return sequence


def _fill(cache: KVCache) -> None:
    """Evict every parked row."""
    cache.trim()
    assert not cache.stats().parked_bytes


def _num_copied(cache: KVCache) -> int:
    return cache.sharing.offloaded_bytes // (cache.groups[0].bytes_for(16))


def test_an_evicted_prefix_comes_back(make_cache: MakeCache) -> None:
    """Whole blocks of it; they are copied once, and again from the row that they came back to."""
    cache = make_cache(host_budget_bytes=256 * PAGE)
    _say(cache, range(1, 101))
    _fill(cache)
    assert 6 == _num_copied(cache)
    back = _back(cache, range(1, 101))
    assert 96 == back.num_tokens == back.num_cached_tokens == back.num_recorded
    back.close()
    _fill(cache)
    assert 6 == _num_copied(cache)
    assert (1, 96) == (cache.prefixes.num_hits, cache.prefixes.num_hit_tokens)


def test_the_next_turn_adds_its_own_blocks(make_cache: MakeCache) -> None:
    """The row of a conversation's next turn shares the blocks of the turn before."""
    cache = make_cache(host_budget_bytes=256 * PAGE)
    _say(cache, range(1, 65))
    _fill(cache)
    _say(cache, range(1, 129))
    _fill(cache)
    assert 8 == _num_copied(cache)
    assert 128 == _back(cache, range(1, 129)).num_tokens


def test_rows_that_share_a_beginning_share_its_blocks(make_cache: MakeCache) -> None:
    cache = make_cache(host_budget_bytes=256 * PAGE)
    for at in (1000, 2000):
        _say(cache, [*range(1, 65), *range(at, at + 64)])
    _fill(cache)
    assert 4 + 2 * 4 == _num_copied(cache)
    for at in (1000, 2000):
        assert 128 == _back(cache, [*range(1, 65), *range(at, at + 64)]).num_tokens


def test_a_prefix_partly_on_the_device_is_completed(make_cache: MakeCache) -> None:
    """The last extents of the row were evicted; the rest is read where it is."""
    cache = make_cache(budget_bytes=40 * PAGE, host_budget_bytes=256 * PAGE)
    _say(cache, range(1, 125))
    live = cache.open(row=3)
    append(live, range(3000, 3000 + 4 * 16))
    live.close()
    loaded_bytes = cache.sharing.loaded_bytes
    row = cache.prefixes.num_recorded(0)
    assert 0 < row < 124
    assert 112 == _back(cache, range(1, 125)).num_tokens
    assert cache.sharing.loaded_bytes - loaded_bytes < cache.groups[0].bytes_for(112)


def test_an_adopted_rows_tokens_are_kept(make_cache: MakeCache) -> None:
    """A prompt that parts from a row takes the row over, and loses its later tokens."""
    cache = make_cache(max_sequences=1, host_budget_bytes=256 * PAGE)
    _say(cache, range(1, 97))
    _say(cache, [*range(1, 65), *range(500, 532)])
    assert 96 == _back(cache, range(1, 97)).num_tokens


@pytest.mark.parametrize("there", [0, 64])
@pytest.mark.parametrize("windows", [(24,), (24, 200), (2,)])
def test_windows_need_only_what_they_see(
    make_cache: MakeCache, windows: tuple[int, ...], there: int
) -> None:
    """Rows of 300 tokens keep their windows alone, so only their whole length comes back."""
    cache = make_cache(windows=windows, host_budget_bytes=1024 * PAGE)
    if there:
        _say(cache, range(1, there + 1))
    sequence = cache.open(prompt=[*range(1, 305), 0])
    for end in (*range(16, 304, 16), 304):
        if end > sequence.num_tokens:
            append(sequence, range(sequence.num_tokens + 1, end + 1))
    sequence.record(range(sequence.num_recorded + 1, 305))
    sequence.close()
    _fill(cache)
    back = _back(cache, range(1, 305))
    assert 304 == back.num_tokens
    append(back, range(305, 340))
    assert_holds(back, range(1, 340))


def test_tenants_have_blocks_of_their_own(make_cache: MakeCache) -> None:
    cache = make_cache(host_budget_bytes=256 * PAGE)
    _say(cache, range(1, 65), tenant="a")
    _fill(cache)
    assert 0 == _back(cache, range(1, 65), tenant="b").num_tokens
    assert 64 == _back(cache, range(1, 65), tenant="a").num_tokens


def test_the_least_recently_used_blocks_give_way(make_cache: MakeCache) -> None:
    """From the end of a conversation on; what came back was used."""
    cache = make_cache(host_budget_bytes=64 * PAGE)  # 16 blocks.
    said = [range(1000 * at, 1000 * at + 80) for at in range(1, 5)]
    for each in said[:3]:
        _say(cache, each)
        _fill(cache)
    _back(cache, said[0]).close()
    _fill(cache)
    _say(cache, said[3])
    _fill(cache)
    assert [80, 16, 80, 80] == [cache.find_prefix([*each, 0], None) for each in said]


def test_groups_take_memory_from_each_other(make_cache: MakeCache) -> None:
    """A window's blocks fill host memory; then the other group needs as much."""
    cache = make_cache(windows=(48,), host_budget_bytes=64 * PAGE)
    for at in range(1, 9):
        _say(cache, range(1000 * at, 1000 * at + 96))
        _fill(cache)
    assert 96 == _back(cache, range(8000, 8096)).num_tokens


def test_a_swapped_sequence_takes_the_memory_of_blocks(make_cache: MakeCache) -> None:
    cache = make_cache(host_budget_bytes=32 * PAGE)
    _say(cache, range(1, 129))
    _fill(cache)
    assert 32 * PAGE == cache.pool.lent_host_bytes
    live = cache.open()
    append(live, range(2000, 2080))
    live.swap_out()
    live.swap_in()
    assert_holds(live, range(2000, 2080))
    assert cache.find_prefix([*range(1, 129), 0], None) < 128
    append(live, range(2080, 2220))
    with pytest.raises(OutOfPagesError):
        live.swap_out()


def test_without_room_the_rest_is_computed(make_cache: MakeCache) -> None:
    """A sequence that does not fit beside live ones begins with what rows hold."""
    cache = make_cache(budget_bytes=32 * PAGE, host_budget_bytes=256 * PAGE)
    _say(cache, range(1, 129))
    _fill(cache)
    live = cache.open(row=3)
    append(live, range(3000, 3000 + 4 * 20))
    assert 0 == cache.open(prompt=[*range(1, 129), 0]).num_tokens
    live.close()
    assert 128 == _back(cache, range(1, 129)).num_tokens


@pytest.mark.parametrize("fail_at", range(1, 25))
def test_a_failing_call_loses_blocks_at_most(make_cache: MakeCache, fail_at: int) -> None:
    """The eviction goes on, and no block with other contents is ever found."""
    backend = FaultInjectingBackend(HostBackend(PAGE))
    cache = make_cache(backend, budget_bytes=400 * PAGE, host_budget_bytes=64 * PAGE)
    said = [range(1000 * at, 1000 * at + 64) for at in range(1, 4)]
    for each in said:
        _say(cache, each)
    backend.arm(fail_at)
    with suppress(DriverError):  # Giving memory back may fail as ever.
        cache.trim()
    assert backend.failed_call
    backend.arm(0)
    cache.check()
    for each in said:
        _back(cache, each).close()


def test_states_come_back_after_whole_blocks(make_cache: MakeCache) -> None:
    """A checkpoint after 48 tokens is the longest state at the end of a block."""
    cache = make_cache(host_budget_bytes=256 * PAGE)
    states = cache.add_states({9: [StateShape((8,), torch.float32)]})
    sequence = cache.open()
    for end in (48, 70):
        append(sequence, range(sequence.num_tokens + 1, end + 1))
        states.tensors(9)[0][sequence.row] = float(end)
        sequence.checkpoint()
    sequence.record(range(1, 71))
    sequence.close()
    _fill(cache)
    back = _back(cache, range(1, 71))
    assert 48 == back.num_tokens
    assert [48.0] * 8 == states.tensors(9)[0][back.row].tolist()


def test_forgotten_blocks_do_not_come_back(make_cache: MakeCache) -> None:
    cache = make_cache(host_budget_bytes=256 * PAGE)
    _say(cache, range(1, 65))
    _fill(cache)
    with cache.pool.lock:
        cache.host_blocks.forget()
    assert 0 == _back(cache, range(1, 65)).num_tokens


@pytest.mark.parametrize("seed", range(6))
def test_random_conversations_hold_what_was_said(make_cache: MakeCache, seed: int) -> None:
    """Over little device and host memory, with shared beginnings, windows and swaps."""
    draw = random.Random(seed)
    windows = draw.choice([(), (), (24,), (16, 64)])
    cache = make_cache(
        windows=windows,
        max_sequences=5,
        budget_bytes=draw.choice([120, 240]) * PAGE * (1 + len(windows)),
        host_budget_bytes=draw.choice([16, 64, 512]) * PAGE,
    )
    live: list[tuple[Sequence, list[int]]] = []
    num_found = 0
    for _ in range(250):
        what = draw.random()
        if what < 0.4 and len(live) < 3:
            tokens = [draw.randrange(1, 4)] * 16
            for _ in range(draw.randrange(12)):
                tokens += [draw.randrange(1, 4)] * 16
            sequence = _back(cache, tokens)
            num_found += sequence.num_tokens
            live.append((sequence, tokens[: sequence.num_tokens]))
            rest = tokens[sequence.num_tokens :]
            for start in range(0, len(rest), 16):
                try:
                    append(sequence, rest[start : start + 16])
                except OutOfPagesError:
                    break
                live[-1][1].extend(rest[start : start + 16])
        elif what < 0.6 and live:
            sequence, tokens = live.pop(draw.randrange(len(live)))
            assert_holds(sequence, tokens)
            sequence.record(tokens[sequence.num_recorded :])
            sequence.close()
        elif what < 0.7 and live:
            sequence, tokens = draw.choice(live)
            try:
                sequence.swap_out()
                sequence.swap_in()
            except OutOfPagesError:
                live = [each for each in live if each[0] is not sequence]
                sequence.close()
            else:
                assert_holds(sequence, tokens)
        elif what < 0.8:
            cache.trim(draw.choice([None, 8 * PAGE]))
        cache.check()
    assert num_found > 0


@pytest.mark.parametrize("fail_at", range(1, 9))
def test_a_failing_call_leaves_no_sequence_open(make_cache: MakeCache, fail_at: int) -> None:
    """A sequence begins without the blocks, or not at all."""
    backend = FaultInjectingBackend(HostBackend(PAGE))
    cache = make_cache(backend, budget_bytes=400 * PAGE, host_budget_bytes=64 * PAGE)
    _say(cache, range(1, 97))
    _fill(cache)
    backend.arm(fail_at)
    begun = None
    with suppress(DriverError):
        begun = cache.open(prompt=[*range(1, 97), 0])
    backend.arm(0)
    assert len(cache.sequences) == (begun is not None)
    cache.check()
    for sequence in cache.sequences:
        sequence.close()
    assert_holds(back := _back(cache, range(1, 97)), range(1, 1 + back.num_tokens))


def test_a_prefix_is_loaded_beside_other_work(make_cache: MakeCache) -> None:
    """It is in a parked row at once; nothing but the copies has to end before it is used."""
    host = HostBackend(PAGE)
    cache = make_cache(host, budget_bytes=1024 * PAGE, host_budget_bytes=256 * PAGE)
    tokens = [*range(1, 97), 0]
    _say(cache, tokens[:96])
    _fill(cache)
    host.hold_fences()
    cache.host_blocks.begin_beside(tokens, None).close()
    loading = cache.host_blocks.loading(next(iter(cache.rows.parked)))
    assert not cache.host_blocks.has_loaded(loading)
    assert (96, 0) == find_beginning(cache, tokens, None)
    assert len(tokens) <= cache.rows.resident_tokens(loading.row), "the rest is computed next"
    assert 0 == cache.prefixes.num_hit_tokens, "no sequence has begun with it"
    loading.fence.wait()
    assert cache.host_blocks.has_loaded(loading)
    assert 0 == cache.rows.idle_since(loading.row)
    host.pass_fences()
    back = _back(cache, tokens[:96])
    assert (loading.row, 96) == (back.row, back.num_tokens)
    assert 1 == cache.prefixes.num_hits


def test_copies_ahead_of_an_eviction_that_does_not_come_give_way_first(
    make_cache: MakeCache,
) -> None:
    """The row is used again instead, and what host memory alone has stays."""
    cache = make_cache(budget_bytes=200 * PAGE, host_budget_bytes=64 * PAGE)  # 16 blocks.
    _say(cache, range(1, 97))
    _fill(cache)
    live = cache.open(prompt=[*range(2001, 2097), 0])
    append(live, range(2001, 2097))
    live.record(range(2001, 2097))
    live.close()
    with cache.pool.lock:
        for most_bytes in (4 * KiB * 4, 1 << 30, 1 << 30):  # In parts, and with nothing left.
            cache.host_blocks.keep(live.row, most_bytes=most_bytes)
    assert 12 == _num_copied(cache)
    back = _back(cache, range(2001, 2097))
    assert 96 == back.num_tokens
    _say(cache, range(4001, 4097))
    _fill(cache)
    assert 96 == cache.find_prefix([*range(1, 97), 0], None)
    assert 96 == cache.find_prefix([*range(4001, 4097), 0], None)


def test_full_host_memory_loses_no_more_than_the_next_rows_need(make_cache: MakeCache) -> None:
    """Copies ahead of need stop where the rows that are evicted next are here."""
    cache = make_cache(budget_bytes=110 * PAGE, host_budget_bytes=128 * PAGE)  # 32 blocks.
    away = [range(1000 * at, 1000 * at + 96) for at in range(1, 6)]
    for each in away:
        _say(cache, each)
        _fill(cache)
    for at in range(10, 14):
        _say(cache, range(1000 * at, 1000 * at + 96))
    assert cache.pool.available_bytes < cache.pool.budget_bytes // 4
    before = _num_copied(cache)
    for _ in range(20):
        cache.host_blocks.keep_ahead()
    assert 6 == _num_copied(cache) - before
    found = [cache.find_prefix([*each, 0], None) for each in away]
    assert found[1:] == [96] * 4


def test_host_memory_is_made_ready_for_what_rows_hold(make_cache: MakeCache) -> None:
    cache = make_cache(budget_bytes=400 * PAGE, host_budget_bytes=800 * PAGE)
    held = []
    for at in range(3):
        held.append(cache.open())
        append(held[-1], range(1000 * at, 1000 * at + 300))
        cache.host_blocks.keep_ahead()
        used_bytes = cache.pool.budget_bytes - cache.pool.available_bytes
        is_half = used_bytes > cache.pool.budget_bytes // 2
        assert is_half == (cache.host_blocks.num_bytes >= used_bytes)
        assert is_half or not cache.host_blocks.num_bytes
    assert is_half
    assert not _num_copied(cache)


@pytest.mark.parametrize("layers_per_group", [1, 2])
def test_no_tier_holds_what_another_one_holds(make_cache: MakeCache, layers_per_group: int) -> None:
    """Conversations that together fill nine tenths of device and host are found, turn by turn."""
    its = {"budget_bytes": 160 * PAGE, "host_budget_bytes": 320 * PAGE}
    cache = make_cache(max_sequences=12, layers_per_group=layers_per_group, **its)
    said = [range(10_000 * at, 10_000 * at + 4 * 480 * 9 // 100) for at in range(1, 11)]
    for turn in range(4):
        for number, each in enumerate(said):
            so_far = each[: len(each) * (turn + 1) // 4]
            sequence = cache.open(prompt=[*so_far, 0])
            held = len(each) * turn // 4 // 16 * 16
            assert held == sequence.num_tokens, (turn, number)
            assert_holds(sequence, so_far[: sequence.num_tokens])
            append(sequence, so_far[sequence.num_tokens :])
            sequence.record(so_far[sequence.num_recorded :])
            cache.host_blocks.keep_ahead()
            sequence.close()
            cache.host_blocks.keep_ahead()
            cache.check()


def test_blocks_that_rows_hold_give_way_first(make_cache: MakeCache) -> None:
    """Rows and host memory hold different prefixes, and so more than one of them alone."""
    cache = make_cache(host_budget_bytes=64 * PAGE)
    said: list[range] = []
    while not said or 96 == cache.find_prefix([*said[0], 0], None):
        said.append(range(1000 * len(said), 1000 * len(said) + 96))
        _say(cache, said[-1])
        _fill(cache)
    back = _back(cache, said[1])
    assert 96 == back.num_tokens
    _say(cache, range(90_000, 90_096))
    cache.make_room(cache.pool.budget_bytes)
    for whole in said[2:]:
        assert 96 == cache.find_prefix([*whole, 0], None)


def test_a_tenant_that_floods_pushes_no_other_out(make_cache: MakeCache) -> None:
    cache = make_cache(host_budget_bytes=256 * PAGE)
    said = [range(1000 * at, 1000 * at + 96) for at in range(1, 4)]
    for each in said:
        _say(cache, each, "a")
    for at in range(60):
        _say(cache, range(10_000 + 200 * at, 10_000 + 200 * at + 144), "b")
        _fill(cache)
    assert [96] * 3 == [cache.find_prefix([*each, 0], "a") for each in said]
    last = range(10_000 + 200 * 59, 10_000 + 200 * 59 + 144)
    assert 144 == cache.find_prefix([*last, 0], "b")
    cache.check()


@pytest.mark.parametrize("time_passes", [False, True])
def test_blocks_that_are_kept_give_way_last(make_cache: MakeCache, time_passes: bool) -> None:
    """Of their tenant's, until their time."""
    cache = make_cache(host_budget_bytes=256 * PAGE)
    kept, other = range(1000, 1096), range(2000, 2096)
    _say(cache, other)
    _say(cache, kept, kept_until_s=10.0)
    cache.rows.now_s = 10.0 if time_passes else 9.0
    for at in range(60):
        _say(cache, range(10_000 + 200 * at, 10_000 + 200 * at + 144))
        _fill(cache)
    found = [cache.find_prefix([*each, 0], None) for each in (kept, other)]
    assert [0 if time_passes else 96, 0] == found
    cache.check()


def test_without_memory_nothing_is_loaded(make_cache: MakeCache) -> None:
    cache = make_cache(host_budget_bytes=256 * PAGE, budget_bytes=32 * PAGE)
    _say(cache, range(1, 97))
    _fill(cache)
    live = cache.open()
    append(live, range(5000, 5000 + 120))
    assert 0 == cache.host_blocks.begin_beside([*range(1, 97), 0], None).num_tokens
    cache.check()


def test_the_host_budget_takes_memory_from_blocks(make_cache: MakeCache) -> None:
    """As that of the device from parked rows; also all of it."""
    cache = make_cache(host_budget_bytes=64 * PAGE)
    for at in range(1, 4):
        _say(cache, range(1000 * at, 1000 * at + 80))
        _fill(cache)
    for num_pages in (32, 0):
        cache.pool.set_budget(num_pages * PAGE, MemoryLocation.HOST)
        assert cache.host_blocks.num_bytes <= num_pages * PAGE
        cache.check()
    assert 0 == _back(cache, range(3000, 3080)).num_tokens
    with pytest.raises(ConfigError, match="host_budget_bytes=-1"):
        cache.pool.set_budget(-1, MemoryLocation.HOST)
