"""Prefixes: hits and misses, tenants, windows, the cost of a search, and the lock.

Memory pressure is tested in test_eviction.py, `generate` in the tests of `hf`.
"""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.caches import ALIASES, MakeCache
from helpers.stamps import append, assert_holds

from vmkv import ConfigError, KVCache, Sequence
from vmkv.core.cache.prefix import BLOCK_TOKENS, PrefixIndex, PrefixTree
from vmkv.units import KiB


def _say(cache: KVCache, tokens: Any, tenant: str | None = None) -> Sequence:
    """A live sequence of these tokens, recorded and stamped with their numbers."""
    wanted = list(tokens)
    sequence = cache.open(prompt=wanted, tenant=tenant)
    append(sequence, wanted[sequence.num_tokens :])
    sequence.record(wanted[sequence.num_cached_tokens :])
    return sequence


# ---- the index by itself ------------------------------------------------------------------

_HASHES = """
import sys, types
core = {path!r} + "/core"
for name, path in (("vmkv", {path!r}), ("vmkv.core", core), ("vmkv.core.cache", core + "/cache")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from vmkv.core.cache.prefix import PrefixIndex
index = PrefixIndex()
for row, tenant in enumerate([None, "a", "b"]):
    index.record(row, [7 * at - 3 for at in range(50)], tenant)
print([each.hex() for _, each in index.beginnings(range(1, 4))])
"""


@pytest.mark.parametrize("seed", ["0", "1", "2024"])
def test_hashes_are_the_same_in_every_process(seed: str) -> None:
    """Hashes depend neither on Python's hash seed nor on the machine's byte order."""
    path = str(Path(__file__).parents[2] / "vmkv")
    child = subprocess.run(
        [sys.executable, "-c", _HASHES.format(path=path)],
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    index = PrefixIndex()
    for row, tenant in enumerate([None, "a", "b"]):
        index.record(row, [7 * at - 3 for at in range(50)], tenant)
    hashes = [each.hex() for _, each in index.beginnings(range(1, 4))]
    assert 9 == len(set(hashes))
    assert str(hashes) == child.stdout.strip(), child.stderr
    parent = hashlib.blake2b(b"vmkv prefix 1", digest_size=16).digest()
    block = struct.pack("<16q", *(7 * at - 3 for at in range(16)))
    assert hashlib.blake2b(parent + block, digest_size=16).hexdigest() == hashes[0]


@pytest.mark.parametrize(
    "tokens",
    [["a"], [1.5], [None], [2**63], "text", [[1]], torch.rand(3), torch.ones(2, 2).long()],
)
def test_index_refuses_tokens_that_are_no_integers(tokens: Any) -> None:
    index = PrefixIndex()
    with pytest.raises(ConfigError, match="token ids must be integers"):
        index.record(0, tokens)
    with pytest.raises(ConfigError, match="token ids must be integers"):
        list(index.matches(tokens))
    assert 0 == index.num_recorded(0)


@pytest.mark.parametrize(
    "made",
    [
        torch.tensor,
        lambda ids: torch.tensor(ids, dtype=torch.int32),
        lambda ids: torch.tensor([[each, 0] for each in ids])[:, 0],
        lambda ids: array("q", ids),
        tuple,
    ],
    ids=["tensor", "32 bits", "strided", "array", "tuple"],
)
def test_prompts_are_any_integer_sequence(cache: KVCache, made: Callable[[list[int]], Any]) -> None:
    """Tensors are read by value, whatever their type and strides."""
    ids = [*range(5, 60), 2**30]
    sequence = cache.open()
    sequence.append(len(ids) - 1)
    sequence.record(made(ids[:-1]))
    assert ids[:-1] == cache.prefixes.token_ids(sequence.row)
    assert 48 == cache.open(prompt=made(ids)).num_cached_tokens


def test_each_byte_is_a_token() -> None:
    """Byte-level models have such ids; they are not read as wider integers."""
    index = PrefixIndex()
    index.record(0, b"abc" * 8)
    assert list(b"abc" * 8) == index.token_ids(0)


# ---- hits ---------------------------------------------------------------------------------


def test_prefix_of_a_live_row_is_aliased(cache: KVCache) -> None:
    """The new row maps the same memory and copies a tail at most."""
    source = _say(cache, range(98))
    before = cache.pool.stats().created_bytes
    hit = cache.open(prompt=[*range(98), 500])
    cache.check()
    assert (96, 96) == (hit.num_tokens, hit.num_cached_tokens)
    assert before == cache.pool.stats().created_bytes
    assert 96 * KiB == cache.stats().shared_bytes
    assert_holds(hit, range(96))
    append(hit, [96, 97, 500])
    append(source, range(600, 620))
    assert_holds(hit, [*range(98), 500])
    assert_holds(source, [*range(98), *range(600, 620)])


def test_parked_prefix_is_adopted_without_a_driver_call(cache: KVCache) -> None:
    source = _say(cache, range(98))
    source.close()
    before = cache.stats().driver_calls
    hit = cache.open(prompt=[*range(98), 500])
    append(hit, [96, 97, 500])  # Within the last page.
    assert before == cache.stats().driver_calls
    assert (source.row, 96) == (hit.row, hit.num_cached_tokens)
    assert_holds(hit, [*range(98), 500])


def test_parked_row_that_holds_much_more_is_aliased_instead(cache: KVCache) -> None:
    """Adoption would lose the tokens that only this row holds."""
    source = _say(cache, range(300))
    source.close()
    hit = cache.open(prompt=[*range(40), 999])
    assert 32 == hit.num_cached_tokens
    assert hit.row != source.row
    again = cache.open(prompt=[*range(300), 999])
    assert (source.row, 288) == (again.row, again.num_cached_tokens)
    assert_holds(again, range(288))
    assert_holds(hit, range(32))


def test_parked_row_whose_boundary_is_shared_is_aliased_instead(cache: KVCache) -> None:
    """After an adoption the first append would have to copy."""
    source = _say(cache, range(64))
    fork, parked = source.fork(), source.row
    source.close()
    hit = cache.open(prompt=[*range(40), 999])
    assert parked != hit.row
    append(hit, [999])
    assert_holds(hit, [*range(32), 999])
    assert_holds(fork, range(64))
    cache.check()


@pytest.mark.parametrize("num_live", [0, 30])
def test_search_asks_few_rows_however_many_match(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch, num_live: int
) -> None:
    """`keeps` is called about as often for 90 matching rows as for 10."""
    cache = make_cache(max_sequences=99, budget_bytes=100 * 1024 * KiB, cost_model=ALIASES)
    asked: list[int] = []
    keeps = cache.keeps
    monkeypatch.setattr(cache, "keeps", lambda row, num: asked.append(row) or keeps(row, num))
    num_asked = []
    for num_holders in (10, 90):
        held = [_say(cache, range(256)) for _ in range(num_holders - cache.stats().num_sequences)]
        for each in held[num_live:]:
            each.close()
        asked.clear()
        hit = cache.open(prompt=[*range(256), 7])
        assert 256 == hit.num_cached_tokens
        num_asked.append(len(asked))
        hit.close()
    assert num_asked[1] <= num_asked[0] + 4 <= 12


@pytest.mark.usefixtures("no_underread")
def test_rows_whose_window_has_passed_are_asked_once(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second search for the short prefix asks no row; longer prompts still find the rows."""
    cache = make_cache(windows=(8,), max_sequences=12, budget_bytes=100 * 1024 * KiB)
    asked: list[int] = []
    keeps = cache.keeps
    monkeypatch.setattr(cache, "keeps", lambda row, num: asked.append(row) or keeps(row, num))
    for at in range(8):
        said = [*range(64), *range(1000 * at, 1000 * at + 200)]
        sequence = _say(cache, said[:64])
        for start in range(64, 264, 20):
            append(sequence, said[start : start + 20])
            sequence.record(said[start : start + 20])
        sequence.close()
    assert 0 == cache.open(prompt=[*range(64), 7]).num_cached_tokens
    assert list(range(8)) == asked
    asked.clear()
    assert 0 == cache.open(prompt=[*range(64), 7]).num_cached_tokens
    assert [] == asked
    hit = cache.open(prompt=[*said, 7])
    assert 256 == hit.num_cached_tokens
    assert_holds(hit, said[:256])


# ---- misses -------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [[], [5], range(16), range(500, 600)])
def test_miss_begins_empty(cache: KVCache, prompt: Any) -> None:
    """No prompt, a prompt of less than a block, and one with other tokens."""
    _say(cache, range(98))
    sequence = cache.open(prompt=prompt)
    assert (0, 0) == (sequence.num_tokens, sequence.num_cached_tokens)


def test_hits_and_misses_are_counted(cache: KVCache) -> None:
    """An open without a prompt counts as neither."""
    _say(cache, range(98)).close()
    cache.open()
    cache.open(prompt=[*range(98), 5])
    cache.open(prompt=range(500, 600))
    stats = cache.stats()
    assert (1, 2, 96) == (
        stats.num_prefix_hits,
        stats.num_prefix_misses,
        stats.num_prefix_hit_tokens,
    )


@pytest.mark.parametrize("tenant", ["a", None, "", "\ud800"])
def test_tenants_do_not_find_each_other(cache: KVCache, tenant: str | None) -> None:
    """None and every string are tenants, even a string that UTF-8 cannot encode."""
    _say(cache, range(98), tenant=tenant).close()
    others: list[str | None] = ["b", "a", None, "", "\udfff"]
    for stranger in [each for each in others if each != tenant]:
        sequence = cache.open(prompt=[*range(98), 5], tenant=stranger)
        assert 0 == sequence.num_cached_tokens
        sequence.close()
    again = cache.open(prompt=[*range(98), 5], tenant=tenant)
    assert (96, tenant) == (again.num_cached_tokens, again.tenant)


def test_unrecorded_tokens_are_not_found(cache: KVCache) -> None:
    """Appended tokens need not be computed yet; `record` says that they are."""
    sequence = cache.open(prompt=range(98))
    append(sequence, range(98))
    sequence.record(range(40))
    assert 32 == cache.open(prompt=range(98)).num_cached_tokens


def test_miss_adopts_a_row_without_a_prefix_first(cache: KVCache) -> None:
    """A prefix is worth more than mapped memory alone."""
    said = _say(cache, range(98))
    plain = cache.open()
    append(plain, range(98))
    said.close()
    plain.close()
    assert plain.row == cache.open(98).row
    assert 2 == cache.open(98).row  # Empty.
    assert (said.row, 96) == (cache.open(prompt=range(98)).row, 96)


# ---- sliding windows ----------------------------------------------------------------------


def _say_by_steps(cache: KVCache, tokens: Any) -> Sequence:
    sequence = cache.open()
    for token in tokens:
        append(sequence, [token])
        sequence.record([token])
    return sequence


@pytest.mark.usefixtures("no_underread")
@pytest.mark.parametrize("ends", [True, False])
def test_window_limits_a_match(make_cache: MakeCache, ends: bool) -> None:
    """A prefix is a miss where the window has unmapped tokens that its next query needs."""
    cache = make_cache(windows=(20,), cost_model=ALIASES)
    source = _say_by_steps(cache, range(98))
    if ends:
        source.close()
    assert 0 == cache.open(prompt=[*range(50), *range(700, 750)]).num_cached_tokens
    hit = cache.open(prompt=[*range(98), 500])
    assert 96 == hit.num_cached_tokens
    append(hit, [96, 97, *range(500, 540)])
    cache.check()
    assert_holds(hit, [*range(98), *range(500, 540)])


# ---- refusals -----------------------------------------------------------------------------


def test_recording_more_than_was_appended_is_refused(cache: KVCache) -> None:
    sequence = cache.open()
    append(sequence, range(20))
    sequence.record(range(15))
    with pytest.raises(ConfigError, match="cannot have 6 tokens recorded after 15"):
        sequence.record(range(6))
    assert 15 == cache.prefixes.num_recorded(sequence.row)


def test_block_is_as_long_as_documented() -> None:
    """Other tests rely on this length."""
    assert 16 == BLOCK_TOKENS


def test_prefix_hit_keeps_the_over_read_resident(make_cache: MakeCache) -> None:
    """A row parked before `keep_resident` is too short to be adopted as it is."""
    cache = make_cache(cost_model=ALIASES)
    first = cache.open()
    first.append(64)
    first.record(range(64))
    first.close()
    cache.keep_resident(30)
    second = cache.open(prompt=[*range(64), 99])
    assert 64 == second.num_cached_tokens
    cache.check()


def test_a_fork_into_another_cache_is_found_there(make_cache: MakeCache) -> None:
    """The fork takes the recorded tokens and the tenant with it."""
    first = make_cache(cost_model=ALIASES)
    second = make_cache(first.pool, cost_model=ALIASES)
    sequence = first.open(tenant="a")
    sequence.append(64)
    sequence.record(range(64))
    fork = second.fork(sequence, 50)
    fork.close()
    assert 48 == second.open(prompt=list(range(64)), tenant="a").num_cached_tokens
    assert 0 == second.open(prompt=list(range(64)), tenant="b").num_cached_tokens


# ---- the lock -----------------------------------------------------------------------------


def test_the_tree_is_searched_and_changed_under_the_lock(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All operations of a sequence call the tree with the pool's lock held."""
    cache = make_cache(cost_model=ALIASES)
    asked: set[str] = set()

    def guarded(name: str) -> Callable[..., Any]:
        plain = getattr(PrefixTree, name)

        def method(*arguments: Any, **options: Any) -> Any:
            asked.add(name)
            assert cache.pool.lock._is_owned(), f"PrefixTree.{name} without the pool's lock"  # type: ignore[attr-defined]
            return plain(*arguments, **options)

        return method

    names = [name for name in vars(PrefixTree) if not name.startswith("_")]
    for name in names:
        if callable(getattr(PrefixTree, name)):
            monkeypatch.setattr(PrefixTree, name, guarded(name))
    first = _say(cache, range(40))
    fork = first.fork()
    append(fork, [90, 91])
    fork.record([90, 91])
    fork.save(tmp_path / "saved")
    fork.truncate(33)
    fork.swap_out()
    fork.swap_in()
    fork.close()
    other = _say(cache, [*range(36), 70, 71, 72, 73])
    assert other.num_cached_tokens
    cache.reorder([first, other], [1, 1])
    first.swap_out()
    first.close()
    other.close()
    again = _say(cache, range(40))
    assert again.num_cached_tokens
    again.close()
    cache.load(tmp_path / "saved").close()
    cache.trim()
    # Only searches that meet a row whose window has passed call `lose`.
    assert {"lose"} == {name for name in names if callable(vars(PrefixTree)[name])} - asked
