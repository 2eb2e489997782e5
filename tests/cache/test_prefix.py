"""Prefixes: what is found again, by whom, how much of it, and what finding it costs.

Under memory pressure, test_eviction.py; through `generate`, the tests of `hf`.
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
from helpers.stamps import append, assert_holds

from vmkv import ConfigError, HostBackend, KVCache, OutOfAddressSpaceError, Sequence
from vmkv.cache.cost import CostModel
from vmkv.cache.prefix import BLOCK_TOKENS, PrefixIndex
from vmkv.cache.prefix_tree import PrefixTree
from vmkv.units import KiB

PAGE = 4 * KiB
ALIASES = CostModel(map_us=0, unmap_us=0)
MakeCache = Callable[..., KVCache]


@pytest.fixture
def cache(make_cache: MakeCache) -> KVCache:
    """Four rows, four tokens in a page; everything whole is shared."""
    return make_cache(cost_model=ALIASES)


def _say(cache: KVCache, tokens: Any, tenant: str | None = None) -> Sequence:
    """A live sequence that holds these tokens, recorded; stamped by their numbers."""
    wanted = list(tokens)
    sequence = cache.open(prompt=wanted, tenant=tenant)
    append(sequence, wanted[sequence.num_tokens :])
    sequence.record(wanted[sequence.num_cached_tokens :])
    return sequence


# ---- the index by itself ------------------------------------------------------------------

_HASHES = """
import sys, types
for name, path in (("vmkv", {path!r}), ("vmkv.cache", {path!r} + "/cache")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from vmkv.cache.prefix import PrefixIndex
index = PrefixIndex()
for row, tenant in enumerate([None, "a", "b"]):
    index.record(row, [7 * at - 3 for at in range(50)], tenant)
print([each.hex() for row in range(3) for each in index.hashes(row)])
"""


@pytest.mark.parametrize("seed", ["0", "1", "2024"])
def test_hashes_are_the_same_in_every_process(seed: str) -> None:
    """Whatever seed Python hashes with, whatever the machine's byte order."""
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
    hashes = [each.hex() for row in range(3) for each in index.hashes(row)]
    assert 9 == len(set(hashes))
    assert str(hashes) == child.stdout.strip(), child.stderr
    parent = hashlib.blake2b(b"vmkv prefix 1", digest_size=16).digest()
    block = struct.pack("<16q", *(7 * at - 3 for at in range(16)))
    assert hashlib.blake2b(parent + block, digest_size=16).hexdigest() == hashes[0]


def test_index_finds_the_longest_first() -> None:
    """Then every shorter one, with all rows that hold it."""
    index = PrefixIndex()
    index.record(0, range(64))
    index.record(1, [*range(40), 999, *range(30)])
    found = [(match.num_tokens, {*match.rows}) for match in index.matches(range(100))]
    assert [(64, {0}), (48, {0}), (32, {0, 1}), (16, {0, 1})] == found
    assert [] == list(index.matches(range(1, 100)))
    assert [] == list(index.matches(range(15)))


def test_index_does_not_mind_in_which_pieces_tokens_come() -> None:
    """A prompt at once or token by token: the same blocks."""
    at_once, one_by_one = PrefixIndex(), PrefixIndex()
    at_once.record(0, range(100))
    for token in range(100):
        one_by_one.record(0, [token])
    assert at_once.hashes(0) == one_by_one.hashes(0)
    assert list(range(100)) == one_by_one.token_ids(0)


def test_blocks_are_chained() -> None:
    """The same block after another beginning is another block."""
    index = PrefixIndex()
    index.record(0, [*range(16), *range(100, 116)])
    index.record(1, [*range(50, 66), *range(100, 116)])
    assert 4 == len({*index.hashes(0), *index.hashes(1)})


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 31, 32, 99, 100, 101])
def test_index_forgets_what_a_row_no_longer_holds(num_tokens: int) -> None:
    """And only that; recording goes on from there."""
    index = PrefixIndex()
    index.record(0, range(100))
    index.truncate(0, num_tokens)
    kept = min(100, num_tokens)
    longest = max((match.num_tokens for match in index.matches(range(100))), default=0)
    assert (kept, kept // 16 * 16) == (index.num_recorded(0), longest)
    index.record(0, range(kept, 200))
    assert [192] == [match.num_tokens for match in index.matches(range(200))][:1]
    index.truncate(0)
    assert ([], [], 0) == (list(index.matches(range(200))), index.hashes(0), index.hits_of(0))


def test_rows_are_found_by_where_they_are() -> None:
    """Parked ones and live ones each for themselves, the last one first; others not at all."""
    index = PrefixIndex()
    for row in range(5):
        index.record(row, range(40))
    index.park(1)
    index.park(0)
    index.hide(3)
    (match, shorter) = index.matches(range(40))
    assert ([0, 1], [4, 2]) == ([*match.parked], [*match.live])
    assert ([0, 1, 4, 2], 32) == ([*shorter.rows], match.num_tokens)
    index.take(1)
    assert ([0], [1, 4, 2]) == ([*match.parked], [*match.live])
    for row in (0, 1, 2, 4):
        index.hide(row)
    assert [] == list(index.matches(range(40)))
    index.take(3)
    index.truncate(3, 20)
    assert [(16, [3])] == [(each.num_tokens, [*each.rows]) for each in index.matches(range(40))]


def test_match_sees_rows_end_and_join_meanwhile() -> None:
    """Where a run of blocks is split, joined with the next one, or gone and back."""
    index = PrefixIndex()
    index.record(0, range(64))
    index.record(1, range(64))
    match = next(index.matches(range(48)))
    index.truncate(1, 48)
    assert {0, 1} == {*match.live}
    match = next(index.matches(range(48)))
    index.truncate(1)
    index.park(0)
    assert ([0], []) == ([*match.parked], [*match.live])
    match = next(index.matches(range(48)))
    index.truncate(0)
    index.record(2, range(48))
    assert [2] == [*match.rows]


@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17, 32, 33, 48, 49, 64, 65, 100])
@pytest.mark.parametrize("is_away", [False, True])
def test_beginnings_that_are_lost_are_not_found(num_tokens: int, is_away: bool) -> None:
    """Longer ones are, and those of other rows; and nothing is left of a row that goes."""
    index = PrefixIndex()
    index.record(0, range(64))
    index.lose_short(0, num_tokens)
    index.lose_short(0, num_tokens // 2)  # What is lost stays lost.
    if is_away:
        index.hide(0)
        assert [] == list(index.matches(range(64)))
        index.take(0)
    wanted = [each for each in (64, 48, 32, 16) if each >= num_tokens]
    assert wanted == [match.num_tokens for match in index.matches(range(64))]
    index.record(1, range(32))
    longest = next(index.matches(range(64))).num_tokens
    assert max([32, *wanted]) == longest
    index.truncate(0, 24)
    index.record(0, range(24, 64))
    assert 64 == next(index.matches(range(64))).num_tokens
    index.truncate(0)
    index.truncate(1)
    assert [] == list(index.matches(range(64)))
    index.record(0, range(64))
    assert [64, 48, 32, 16] == [match.num_tokens for match in index.matches(range(64))]


def test_copies_are_made_at_once_and_are_their_tenants() -> None:
    """Two rows change places; who is another tenant's is found by that one alone."""
    index = PrefixIndex()
    index.record(0, range(40), "a")
    index.record(1, range(100, 120), "a")
    index.copy([(1, 0, "a"), (0, 1, "b"), (2, 3, None)], 36)
    assert (list(range(100, 120)), list(range(36))) == (index.token_ids(0), index.token_ids(1))
    assert [] == list(index.matches(range(40), "a"))
    assert [32, 16] == [match.num_tokens for match in index.matches(range(40), "b")]
    assert [(16, [0])] == [
        (match.num_tokens, [*match.rows]) for match in index.matches(range(100, 120), "a")
    ]


@pytest.mark.parametrize(
    "tokens",
    [["a"], [1.5], [None], [2**63], "text", [[1]], torch.rand(3), torch.ones(2, 2).long()],
)
def test_index_wants_integers(tokens: Any) -> None:
    """A clear error, and nothing is recorded."""
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
def test_prompts_are_what_users_have(cache: KVCache, made: Callable[[list[int]], Any]) -> None:
    """A tensor is read as the numbers in it, however they lie."""
    ids = [*range(5, 60), 2**30]
    sequence = cache.open()
    sequence.append(len(ids) - 1)
    sequence.record(made(ids[:-1]))
    assert ids[:-1] == cache.prefixes.token_ids(sequence.row)
    assert 48 == cache.open(prompt=made(ids)).num_cached_tokens


def test_bytes_are_tokens_each() -> None:
    """Byte-level models have such ids; they are not read as wider integers."""
    index = PrefixIndex()
    index.record(0, b"abc" * 8)
    assert list(b"abc" * 8) == index.token_ids(0)


# ---- hits ---------------------------------------------------------------------------------


def test_cold_prefix_is_aliased(cache: KVCache) -> None:
    """A live row keeps its own; the new one maps the same memory and copies a tail at most."""
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
    """The row that holds it becomes the new sequence's, as it is."""
    source = _say(cache, range(98))
    source.close()
    before = cache.stats().driver_calls
    hit = cache.open(prompt=[*range(98), 500])
    append(hit, [96, 97, 500])  # Within the last page.
    assert before == cache.stats().driver_calls
    assert (source.row, 96) == (hit.row, hit.num_cached_tokens)
    assert_holds(hit, [*range(98), 500])


def test_parked_row_that_holds_much_more_is_aliased_instead(cache: KVCache) -> None:
    """Adopting it would throw away what it alone holds."""
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
    """Appending to it would have to copy: then it may as well stay."""
    source = _say(cache, range(64))
    fork = source.fork()
    source.close()
    hit = cache.open(prompt=[*range(40), 999])
    append(hit, [999])
    assert_holds(hit, [*range(32), 999])
    assert_holds(fork, range(64))
    cache.check()


@pytest.mark.parametrize("num_turns", [5])
def test_conversation_goes_on_in_its_row(cache: KVCache, num_turns: int) -> None:
    """Turn after turn: all that was said is there, and adopting costs nothing."""
    said: list[int] = []
    rows, cached = [], []
    for turn in range(num_turns):
        prompt = said + [1000 * turn + at for at in range(30)]
        before = cache.stats().driver_calls
        sequence = cache.open(prompt=prompt)
        if turn:
            assert before == cache.stats().driver_calls
        cached.append(sequence.num_cached_tokens)
        rows.append(sequence.row)
        assert_holds(sequence, prompt[: sequence.num_cached_tokens])
        said = prompt + [1000 * turn + 500 + at for at in range(20)]
        append(sequence, said[sequence.num_cached_tokens :])
        sequence.record(said[sequence.num_cached_tokens :])
        sequence.close()
    assert [0, 48, 96, 144, 192] == cached
    assert 1 == len(set(rows))


def test_many_requests_share_a_system_prompt(make_cache: MakeCache) -> None:
    """64 requests: the prompt once, and each its own tail."""
    cache = make_cache(max_sequences=64, budget_bytes=100 * 1024 * KiB, cost_model=ALIASES)
    system = list(range(256))
    requests = [_say(cache, [*system, *range(1000 * at, 1000 * at + 20)]) for at in range(1, 65)]
    for at, request in enumerate(requests, start=1):
        assert_holds(request, [*system, *range(1000 * at, 1000 * at + 20)])
    assert (64 + 64 * 5) * PAGE == cache.stats().resident_bytes
    assert [0] + [256] * 63 == [each.num_cached_tokens for each in requests]


@pytest.mark.parametrize("num_live", [0, 30])
def test_finding_costs_the_same_however_many_hold_it(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch, num_live: int
) -> None:
    """Whether a row can be begun from is asked of a few."""
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
    """They stay known, and what they still hold of longer prompts is found."""
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


def test_swapped_sequences_are_found_when_they_are_back(make_cache: MakeCache) -> None:
    """Not before, and what is recorded of them meanwhile stays."""
    cache = make_cache(host_budget_bytes=64 * PAGE, cost_model=ALIASES)
    source = _say(cache, range(64))
    source.swap_out()
    assert (64, 0) == (source.num_recorded, cache.open(prompt=[*range(64), 7]).num_cached_tokens)
    source.swap_in()
    hit = cache.open(prompt=[*range(64), 7])
    assert_holds(hit, range(64))


def test_last_token_is_never_found(cache: KVCache) -> None:
    """Something must be computed for there to be logits."""
    _say(cache, range(64)).close()
    assert 48 == cache.open(prompt=range(64)).num_cached_tokens


def test_beginning_of_another_prompt_is_found(cache: KVCache) -> None:
    """As far as whole blocks agree."""
    _say(cache, range(98))
    hit = cache.open(prompt=[*range(50), *range(700, 750)])
    assert 48 == hit.num_cached_tokens
    append(hit, [48, 49, *range(700, 750)])
    assert_holds(hit, [*range(50), *range(700, 750)])


def test_fork_is_found_as_its_source_is(cache: KVCache) -> None:
    """It begins with the same tokens, and records its own."""
    source = _say(cache, range(64))
    fork = source.fork(40)
    append(fork, range(500, 540))
    fork.record(range(500, 540))
    source.close()
    cache.trim()
    hit = cache.open(prompt=[*range(40), *range(500, 540), 9])
    assert 80 == hit.num_cached_tokens
    assert_holds(hit, [*range(40), *range(500, 540)])


# ---- misses -------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [[], [5], range(16), range(500, 600)])
def test_miss_begins_empty(cache: KVCache, prompt: Any) -> None:
    """Nothing said before, or not a whole block of it."""
    _say(cache, range(98))
    sequence = cache.open(prompt=prompt)
    assert (0, 0) == (sequence.num_tokens, sequence.num_cached_tokens)


def test_hits_and_misses_are_counted(cache: KVCache) -> None:
    """An open without a prompt is neither."""
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
    """Not by prefix, and not by saying nothing; any string is one, also what UTF-8 cannot say."""
    _say(cache, range(98), tenant=tenant).close()
    others: list[str | None] = ["b", "a", None, "", "\udfff"]
    for stranger in [each for each in others if each != tenant]:
        sequence = cache.open(prompt=[*range(98), 5], tenant=stranger)
        assert 0 == sequence.num_cached_tokens
        sequence.close()
    again = cache.open(prompt=[*range(98), 5], tenant=tenant)
    assert (96, tenant) == (again.num_cached_tokens, again.tenant)


def test_what_is_not_recorded_is_not_found(cache: KVCache) -> None:
    """Appended is not computed: only who recorded it says that it is there."""
    sequence = cache.open(prompt=range(98))
    append(sequence, range(98))
    sequence.record(range(40))
    assert 32 == cache.open(prompt=range(98)).num_cached_tokens


def test_truncated_tokens_are_not_found(cache: KVCache) -> None:
    """Neither before nor after others took their place."""
    sequence = _say(cache, range(98))
    sequence.truncate(40)
    assert 32 == cache.open(prompt=range(98)).num_cached_tokens
    append(sequence, range(600, 650))
    sequence.record(range(600, 650))
    hit = cache.open(prompt=[*range(40), *range(600, 650)])
    assert 80 == hit.num_cached_tokens
    assert_holds(hit, [*range(40), *range(600, 640)])


def test_adopted_row_no_longer_offers_what_it_held(cache: KVCache) -> None:
    """Who begins from nothing in a parked row overwrites it."""
    _say(cache, range(98)).close()
    sequence = cache.open(row=0)
    append(sequence, range(700, 798))
    assert 0 == cache.open(prompt=range(98)).num_cached_tokens


def test_strangers_adopt_rows_without_a_prefix_first(cache: KVCache) -> None:
    """A prefix is worth more than a row that merely is mapped."""
    said = _say(cache, range(98))
    plain = cache.open()
    append(plain, range(98))
    said.close()
    plain.close()
    assert plain.row == cache.open(98).row
    assert 2 == cache.open(98).row  # Empty.
    assert (said.row, 96) == (cache.open(prompt=range(98)).row, 96)


def test_trimmed_prefix_is_gone(cache: KVCache) -> None:
    """A hit on it would read what is not there."""
    _say(cache, range(98)).close()
    cache.trim()
    assert 0 == cache.open(prompt=range(98)).num_cached_tokens
    cache.check()


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
    """Where the window has let go of what a query would see, nothing is found there."""
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


@pytest.mark.usefixtures("no_underread")
def test_prompt_shorter_than_the_window_is_found(make_cache: MakeCache) -> None:
    """As long as nothing has left."""
    cache = make_cache(windows=(60,), cost_model=ALIASES)
    source = _say_by_steps(cache, range(50))
    hit = cache.open(prompt=[*range(40), 700])
    assert 32 == hit.num_cached_tokens
    append(source, range(50, 90))
    append(hit, range(600, 690))
    assert_holds(hit, [*range(32), *range(600, 690)])


# ---- what is refused ----------------------------------------------------------------------


def test_recording_more_than_there_is_is_refused(cache: KVCache) -> None:
    """Append first; nothing is recorded."""
    sequence = cache.open()
    append(sequence, range(20))
    sequence.record(range(15))
    with pytest.raises(ConfigError, match="cannot have 6 tokens recorded after 15"):
        sequence.record(range(6))
    assert 15 == cache.prefixes.num_recorded(sequence.row)


@pytest.mark.parametrize("prompt", [["a", "b"], [1.5, 2], "text"])
def test_prompt_that_is_none_is_refused(cache: KVCache, prompt: Any) -> None:
    """No sequence is opened."""
    with pytest.raises(ConfigError, match="token ids must be integers"):
        cache.open(prompt=prompt)
    assert 0 == cache.stats().num_sequences


def test_no_row_left_is_said(cache: KVCache) -> None:
    """A prefix does not help where every row is live."""
    _say(cache, range(98))
    for _ in range(3):
        cache.open()
    with pytest.raises(OutOfAddressSpaceError, match="all 4 rows"):
        cache.open(prompt=range(98))


def test_last_parked_row_serves_a_prompt_whatever_it_holds(make_cache: MakeCache) -> None:
    """It cannot be aliased, as there is no other row to alias it in; it can be taken over."""
    cache = make_cache(max_sequences=2, cost_model=ALIASES)
    cache.open()
    _say(cache, range(300)).close()
    sequence = cache.open(prompt=[*range(40), 999])
    assert_holds(sequence, range(sequence.num_cached_tokens))


def test_no_memory_for_the_tail_of_a_prefix_is_no_reason_to_fail(
    host: HostBackend, make_cache: MakeCache
) -> None:
    """Only a parked row holds memory: a prompt that begins as it does gets some of it."""
    cache = make_cache(budget_bytes=25 * PAGE, cost_model=CostModel(map_us=1e9))
    _say(cache, range(100)).close()
    sequence = cache.open(prompt=[*range(48), 999])
    append(sequence, range(sequence.num_cached_tokens, 90))
    assert_holds(sequence, range(90))


def test_block_is_as_long_as_documented() -> None:
    """What other tests take for granted."""
    assert 16 == BLOCK_TOKENS


def test_a_hit_has_what_kernels_read_past_its_end(make_cache: MakeCache) -> None:
    """A row parked before a kernel said how far it reads is too short to be adopted as it is."""
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
    """What was recorded goes along, for the same tenant."""
    first = make_cache(cost_model=ALIASES)
    second = make_cache(first.pool, cost_model=ALIASES)
    sequence = first.open(tenant="a")
    sequence.append(64)
    sequence.record(range(64))
    fork = second.fork(sequence, 50)
    fork.close()
    assert 48 == second.open(prompt=list(range(64)), tenant="a").num_cached_tokens
    assert 0 == second.open(prompt=list(range(64)), tenant="b").num_cached_tokens


# ---- who may search it --------------------------------------------------------------------


def test_the_tree_is_searched_and_changed_under_the_lock(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever a sequence does, and whatever its memory pays for."""
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
    # Beginnings are lost by rows whose windows moved on, while one is looked for.
    assert {"lose"} == {name for name in names if callable(vars(PrefixTree)[name])} - asked
