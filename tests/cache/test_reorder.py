"""Reordering beams: each beam goes on from another one, and common tokens stay shared.

Failing driver calls are tested in memory/test_every_call_can_fail.py, `generate` with beams in the
tests of `hf`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.stamps import append, assert_holds

from vmkv import Backend, ClosedError, ConfigError, ExtentPool, HostBackend, KVCache, Sequence
from vmkv.core.cache.cost import CostModel
from vmkv.errors import DriverError
from vmkv.testing import FaultInjectingBackend
from vmkv.units import KiB

PAGE = 4 * KiB
ALIASES = CostModel(map_us=0, unmap_us=0)
COPIES = CostModel(map_us=1e9)
MakeCache = Callable[..., KVCache]


class _Beams:
    """Sequences of equal length, and the stamps that each must hold."""

    def __init__(self, cache: KVCache, num_beams: int, prompt_tokens: int, *, forked: bool):
        self.cache = cache
        self.wanted = [[1000 * at + i for i in range(prompt_tokens)] for at in range(num_beams)]
        if forked:
            self.wanted = [list(self.wanted[0]) for _ in range(num_beams)]
        first = cache.open()
        append(first, self.wanted[0])
        self.sequences: list[Sequence] = [first]
        for stamps in self.wanted[1:]:
            if forked:
                self.sequences.append(first.fork())
            else:
                self.sequences.append(cache.open())
                append(self.sequences[-1], stamps)
        self._next = 500_000

    def step(self, num_tokens: int = 1) -> None:
        """Append new tokens to every beam."""
        for sequence, stamps in zip(self.sequences, self.wanted, strict=True):
            new = range(self._next, self._next + num_tokens)
            self._next += num_tokens
            append(sequence, new)
            stamps += new

    def reorder(self, sources: list[int]) -> None:
        self.cache.reorder(self.sequences, sources)
        self.wanted = [list(self.wanted[source]) for source in sources]
        self.check()

    def check(self) -> None:
        self.cache.check()
        for sequence, stamps in zip(self.sequences, self.wanted, strict=True):
            assert_holds(sequence, stamps)


@pytest.mark.parametrize("sources", list(itertools.product(range(3), repeat=3)))
@pytest.mark.parametrize("cost", [ALIASES, COPIES], ids=["alias", "copy"])
def test_every_order_of_three(
    make_cache: MakeCache, cost: CostModel, sources: tuple[int, ...]
) -> None:
    """Permutations, duplicates and cycles, twice, with tokens appended between and after."""
    beams = _Beams(make_cache(cost_model=cost), 3, 70, forked=False)
    beams.reorder(list(sources))
    beams.step(5)
    beams.reorder(list(sources))
    beams.step(90)
    beams.check()


@pytest.mark.usefixtures("no_underread")
@pytest.mark.parametrize("cost", [ALIASES, COPIES], ids=["alias", "copy"])
def test_beams_of_windowed_layers(make_cache: MakeCache, cost: CostModel) -> None:
    """The mapped runs of a row's groups begin at different pages."""
    beams = _Beams(make_cache(windows=(9, 40), cost_model=cost), 3, 30, forked=False)
    generator = torch.Generator().manual_seed(5)
    for _ in range(40):
        beams.step(3)
        beams.reorder(torch.randint(0, 3, (3,), generator=generator).tolist())


def test_reorder_runs_on_every_backend(backend: Backend) -> None:
    """Beams alias, swap and go on, on each kind of memory."""
    budget_bytes = 200 * backend.granularity_bytes
    cache = KVCache(
        backend, max_tokens=64, max_sequences=3, budget_bytes=budget_bytes, cost_model=ALIASES
    )
    head_dim = backend.granularity_bytes // 2 // 2 // 4 // 2  # Two tokens fill a page.
    cache.add_layers([0], num_kv_heads=2, head_dim=head_dim, dtype=torch.float32)
    beams = _Beams(cache, 3, 25, forked=False)
    for sources in ([1, 0, 1], [2, 2, 0], [1, 2, 0]):
        beams.reorder(sources)
        beams.step(3)
    beams.check()
    cache.close()


# ---- costs --------------------------------------------------------------------------------


def test_first_reordering_aliases_and_later_ones_copy(make_cache: MakeCache) -> None:
    """Once the prompt is shared, a reordering copies tails and makes no other driver call."""
    cache = make_cache(cost_model=ALIASES)
    beams = _Beams(cache, 4, 96, forked=False)
    assert 4 * 24 * PAGE == cache.stats().resident_bytes
    beams.reorder([0, 0, 0, 0])
    stats = cache.stats()
    assert (24 * PAGE, 0) == (stats.resident_bytes, stats.sharing.copied_bytes)
    assert 3 * 24 * PAGE == stats.sharing.aliased_bytes
    beams.step()
    before = cache.stats()
    beams.reorder([1, 0, 3, 2])
    after = cache.stats()
    assert 4 * KiB == after.sharing.copied_bytes
    assert before.sharing.aliased_bytes == after.sharing.aliased_bytes
    changed = {
        call
        for call in after.driver_calls
        if after.driver_calls[call] != before.driver_calls.get(call, 0)
    }
    assert {"copy"} == changed


@pytest.mark.parametrize("sources", [[0, 1, 2], []])
def test_reordering_nothing_does_nothing(make_cache: MakeCache, sources: list[int]) -> None:
    """The identity, and a reordering of no beams."""
    cache = make_cache(cost_model=ALIASES)
    beams = _Beams(cache, 3, 70, forked=False)
    before = cache.stats()
    cache.reorder(beams.sequences[: len(sources)], sources)
    assert before == cache.stats()
    beams.check()


# ---- recorded tokens ----------------------------------------------------------------------


@pytest.mark.parametrize("sources", [[1, 0, 2], [1, 1, 0], [2, 0, 1], [0, 0, 0]])
def test_records_move_with_the_beams(make_cache: MakeCache, sources: list[int]) -> None:
    """A beam takes over the recorded tokens of its source, and is found by them."""
    cache = make_cache(cost_model=ALIASES, max_sequences=5)
    beams = _Beams(cache, 3, 64, forked=False)
    num_recorded = [64, 40, 0]
    for sequence, stamps, num_tokens in zip(
        beams.sequences, beams.wanted, num_recorded, strict=True
    ):
        sequence.record(stamps[:num_tokens])
    beams.reorder(sources)
    assert [num_recorded[source] for source in sources] == [
        each.num_recorded for each in beams.sequences
    ]
    beams.step(24)
    for sequence, stamps in zip(beams.sequences, beams.wanted, strict=True):
        sequence.record(stamps[sequence.num_recorded :])
        hit = cache.open(prompt=[*stamps, 5])
        assert 80 == hit.num_cached_tokens
        assert_holds(hit, stamps[:80])
        hit.close()
        cache.trim()


def test_records_of_beams_are_their_tenants(make_cache: MakeCache) -> None:
    """A beam is found by prompts of its own tenant only."""
    cache = make_cache(cost_model=ALIASES, max_sequences=5)
    beams = [cache.open(tenant="a"), cache.open(tenant="b")]
    for at, beam in enumerate(beams):
        append(beam, range(1000 * at, 1000 * at + 64))
    beams[0].record(range(64))
    cache.reorder(beams, [0, 0])
    assert 64 == beams[1].num_recorded
    for beam in beams:
        append(beam, range(5000, 5016))
    beams[1].record(range(5000, 5016))
    said = [*range(64), *range(5000, 5016), 7]
    assert [64, 80, 0] == [
        cache.open(prompt=said, tenant=tenant).num_cached_tokens for tenant in ("a", "b", None)
    ]


@pytest.mark.parametrize("cost", [ALIASES, COPIES], ids=["alias", "copy"])
def test_failed_reorder_keeps_the_records(
    host: HostBackend, make_cache: MakeCache, cost: CostModel
) -> None:
    """A driver call that fails before the first overwriting copy changes nothing."""
    faulty = FaultInjectingBackend(host)
    pool = ExtentPool(faulty, 400 * PAGE, close_when_unused=True)
    cache = make_cache(pool, cost_model=cost)
    beams = _Beams(cache, 2, 64, forked=False)
    for sequence, stamps in zip(beams.sequences, beams.wanted, strict=True):
        sequence.record(stamps)
    struck = []
    for fail_at in range(1, 20):
        faulty.arm(fail_at)
        try:
            cache.reorder(beams.sequences, [1, 0])
        except DriverError:
            struck.append(faulty.failed_call)
        else:
            break
        faulty.arm(0)
        if struck.count("copy") == 3:
            break  # Two copies save tails; the third overwrites one.
        beams.check()
        for sequence, stamps in zip(beams.sequences, beams.wanted, strict=True):
            assert stamps == cache.prefixes.token_ids(sequence.row)
    faulty.arm(0)
    assert "join_streams" == struck.pop(0)
    assert {"mem_unmap", "mem_map"} <= set(struck) if cost is ALIASES else struck == ["copy"] * 3


def test_beams_whose_copy_failed_lose_their_records(
    host: HostBackend, make_cache: MakeCache
) -> None:
    """The beams' tails are undefined, so no prefix hit may contain them."""
    faulty = FaultInjectingBackend(host)
    pool = ExtentPool(faulty, 400 * PAGE, close_when_unused=True)
    cache = make_cache(pool, cost_model=COPIES)
    beams = _Beams(cache, 2, 64, forked=False)
    for sequence, stamps in zip(beams.sequences, beams.wanted, strict=True):
        sequence.record(stamps)
    faulty.arm(4)  # Two rows are saved, the first is overwritten, the second is not.
    with pytest.raises(DriverError, match="copy"):
        cache.reorder(beams.sequences, [1, 0])
    faulty.arm(0)
    cache.check()
    for stamps in beams.wanted:
        hit = cache.open(prompt=[*stamps, 5])
        found = (hit.keys(0)[:, 0, 0] / 16).tolist()
        assert stamps[: hit.num_tokens] == found


# ---- refusals -----------------------------------------------------------------------------


def test_beams_of_unequal_length_are_refused(make_cache: MakeCache) -> None:
    """Another number of sources than of beams is refused as well."""
    cache = make_cache()
    first, second = cache.open(), cache.open()
    append(first, range(5))
    append(second, range(6))
    with pytest.raises(ConfigError, match=r"these hold \[5, 6\] tokens"):
        cache.reorder([first, second], [1, 0])
    with pytest.raises(ConfigError, match="one of 1 beams"):
        cache.reorder([first], [0, 0])
    assert_holds(first, range(5))


def test_closed_beams_are_refused(make_cache: MakeCache) -> None:
    """No other beam is changed."""
    beams = _Beams(make_cache(), 3, 10, forked=False)
    beams.sequences[2].close()
    with pytest.raises(ClosedError):
        beams.cache.reorder(beams.sequences, [1, 0, 0])
    assert_holds(beams.sequences[0], beams.wanted[0])


@pytest.mark.parametrize("sources", [[0, 3], [0, -1], [0, 1.5], [0, None]])
def test_sources_are_among_the_beams(make_cache: MakeCache, sources: Any) -> None:
    """Other sources are refused, and no beam is changed."""
    beams = _Beams(make_cache(), 2, 10, forked=False)
    with pytest.raises(ConfigError, match="source"):
        beams.cache.reorder(beams.sequences, sources)
    beams.check()


def test_one_beam_twice_is_refused(make_cache: MakeCache) -> None:
    """A beam cannot go on from two sources."""
    beams = _Beams(make_cache(), 2, 10, forked=False)
    first, second = beams.sequences
    with pytest.raises(ConfigError):
        beams.cache.reorder([first, second, second], [0, 0, 1])
    beams.check()


def test_beams_of_another_cache_are_refused(host: HostBackend, make_cache: MakeCache) -> None:
    """The row numbers of another cache's beams name other rows here."""
    pool = ExtentPool(host, 200 * PAGE, close_when_unused=True)
    cache, other = make_cache(pool), make_cache(pool)
    beams = _Beams(other, 2, 10, forked=False)
    mine = _Beams(cache, 2, 10, forked=False)
    with pytest.raises(ConfigError):
        cache.reorder(beams.sequences, [1, 0])
    mine.check()
    beams.check()
