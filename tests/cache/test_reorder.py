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
from helpers.caches import ALIASES, PAGE, MakeCache
from helpers.stamps import append, assert_holds

from vmkv import ClosedError, ConfigError, ExtentPool, HostBackend, KVCache, Sequence
from vmkv.core.cache.forking import CostModel
from vmkv.errors import DriverError
from vmkv.testing import FaultInjectingBackend
from vmkv.units import KiB

COPIES = CostModel(map_us=1e9)


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
    for _ in range(12):
        beams.step(9)
        beams.reorder(torch.randint(0, 3, (3,), generator=generator).tolist())


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


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4, 5])
def test_records_stay_until_a_beam_is_overwritten(
    host: HostBackend, make_cache: MakeCache, fail_at: int
) -> None:
    """Before that a failure changes nothing; after it no prefix hit may contain lost tails.

    The first call joins the streams, the next two save rows, and the last two overwrite them.
    Exchanges of extents fail in memory/test_every_call_can_fail.py.
    """
    faulty = FaultInjectingBackend(host)
    pool = ExtentPool(faulty, 400 * PAGE, close_when_unused=True)
    cache = make_cache(pool, cost_model=COPIES)
    beams = _Beams(cache, 2, 64, forked=False)
    for sequence, stamps in zip(beams.sequences, beams.wanted, strict=True):
        sequence.record(stamps)
    faulty.arm(fail_at)
    with pytest.raises(DriverError, match="join_streams" if fail_at == 1 else "copy"):
        cache.reorder(beams.sequences, [1, 0])
    faulty.arm(0)
    cache.check()
    for sequence, stamps in zip(beams.sequences, beams.wanted, strict=True):
        assert fail_at > 3 or stamps == cache.prefixes.token_ids(sequence.row)
        hit = cache.open(prompt=[*stamps, 5])
        assert stamps[: hit.num_tokens] == (hit.keys(0)[:, 0, 0] / 16).tolist()


# ---- refusals -----------------------------------------------------------------------------


REFUSED: dict[str, tuple[Callable[[list[Sequence], Sequence], Any], str]] = {
    "unequal lengths": (lambda beams, other: ([beams[0], other], [1, 0]), r"hold \[6, 10\] tokens"),
    "too many sources": (lambda beams, _: (beams[:1], [0, 0]), "one of 1 beams"),
    "one beam twice": (lambda beams, _: ([*beams, beams[1]], [0, 0, 1]), "twice|once|differ|beam"),
    **{
        f"source {source}": (lambda beams, _, source=source: (beams, [0, source]), "source")
        for source in (3, -1, 1.5, None)
    },
}


@pytest.mark.parametrize("what", REFUSED)
def test_impossible_orders_are_refused(make_cache: MakeCache, what: str) -> None:
    """No beam is changed."""
    cache = make_cache()
    beams, other = _Beams(cache, 2, 10, forked=False), cache.open()
    append(other, range(6))
    make, match = REFUSED[what]
    with pytest.raises(ConfigError, match=match):
        cache.reorder(*make(beams.sequences, other))
    beams.check()
    assert_holds(other, range(6))


def test_closed_beams_are_refused(make_cache: MakeCache) -> None:
    """No other beam is changed."""
    beams = _Beams(make_cache(), 3, 10, forked=False)
    beams.sequences[2].close()
    with pytest.raises(ClosedError):
        beams.cache.reorder(beams.sequences, [1, 0, 0])
    assert_holds(beams.sequences[0], beams.wanted[0])


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
