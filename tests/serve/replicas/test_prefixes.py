"""A replica's report has the named prefixes that its index finds, and is bounded.

Not covered: how Ray transports it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vmkv.core.cache.prefix import BLOCK_TOKENS, PrefixIndex, Where, block_hashes
from vmkv.serve.engine import Engine
from vmkv.serve.observer import Idle, Observers, StepRecord
from vmkv.serve.params import SamplingParams
from vmkv.serve.replicas.prefixes import MARKED_LENGTHS, HeldPrefixes, names_of, told_names
from vmkv.units import MiB


def cache_of(index: PrefixIndex) -> Any:
    """The parts of a cache that `HeldPrefixes` reads."""
    pool = SimpleNamespace(lock=contextlib.nullcontext())
    below = SimpleNamespace(held=lambda hashes: ())
    return SimpleNamespace(prefixes=index, pool=pool, host_blocks=below)


def held_tokens(prompt: list[int], told: frozenset[bytes]) -> int:
    """The length of a prompt's longest prefix in a report."""
    return max((tokens for tokens, name in names_of(prompt) if name in told), default=0)


def tell(index: PrefixIndex, **options: int) -> frozenset[bytes]:
    """The names in the report of an index."""
    prefixes = HeldPrefixes(**options)
    prefixes.on(Idle(), cache_of(index))
    return told_names(prefixes.stats)


def test_named_lengths_are_at_most_an_eighth_apart() -> None:
    """Up to 16 blocks, every length has a name."""
    assert MARKED_LENGTHS[:20] == (*range(1, 17), 18, 20, 22, 24)
    assert all(b - a <= max(1, a // 8) for a, b in itertools.pairwise(MARKED_LENGTHS))
    assert len([each for each in MARKED_LENGTHS if each * BLOCK_TOKENS <= 8192]) == 56


@given(num_tokens=st.integers(0, 700))
def test_a_name_identifies_all_tokens_of_a_prefix(num_tokens: int) -> None:
    prompt = list(range(num_tokens))
    names = names_of(prompt)
    assert [tokens // BLOCK_TOKENS for tokens, _ in names] == [
        each for each in MARKED_LENGTHS if each * BLOCK_TOKENS <= num_tokens
    ]
    for tokens, name in names:
        assert names_of(prompt[:tokens])[-1] == (tokens, name)
        other = [*prompt[: tokens - 1], 10_000]
        assert names_of(other)[-1] == (tokens, names_of(other)[-1][1])
        assert names_of(other)[-1][1] != name


def test_names_differ_by_tenant() -> None:
    index, prompt = PrefixIndex(), list(range(64))
    index.record(0, prompt, "a")
    told = tell(index)
    held = {
        tenant: [tokens for tokens, name in names_of(prompt, tenant) if name in told]
        for tenant in ("a", "b", None)
    }
    assert held == {"a": [16, 32, 48, 64], "b": [], None: []}


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("record"), st.integers(0, 3), st.integers(0, 2), st.integers(1, 300)),
            st.tuples(st.just("truncate"), st.integers(0, 3), st.integers(0, 300)),
            st.tuples(st.just("lose_short"), st.integers(0, 3), st.integers(0, 300)),
            st.tuples(st.just("move"), st.integers(0, 3), st.sampled_from(Where)),
        ),
        max_size=12,
    )
)
def test_the_report_has_what_the_index_finds(steps: list[tuple]) -> None:
    """After any changes of the index, at the lengths that have names."""
    index = PrefixIndex()
    for what, row, *arguments in steps:
        if what == "record":
            text, num_tokens = arguments
            first = index.num_recorded(row)
            index.record(row, [text * 1000 + at for at in range(first, first + num_tokens)])
        else:
            getattr(index, what)(row, *arguments)
    told = tell(index)
    for text in range(3):
        prompt = [text * 1000 + at for at in range(1200)]
        found = {match.num_tokens for match in index.matches(prompt)}
        named = {tokens for tokens, name in names_of(prompt) if name in told}
        assert named == {each for each in found if each // BLOCK_TOKENS in MARKED_LENGTHS}


def test_a_full_report_leaves_out_the_longest_prefixes() -> None:
    index = PrefixIndex()
    prompts = [[text * 10_000 + at for at in range(640)] for text in range(8)]
    for row, prompt in enumerate(prompts):
        index.record(row, prompt)
    told = tell(index, max_names=32)
    assert len(told) == 32
    assert {held_tokens(prompt, told) for prompt in prompts} == {4 * BLOCK_TOKENS}
    assert {held_tokens(prompt, tell(index)) for prompt in prompts} == {640}


def test_the_report_is_empty_before_the_first_scan() -> None:
    assert told_names(HeldPrefixes().stats) == told_names({}) == frozenset()


def test_steps_scan_once_per_interval() -> None:
    """An idle engine always scans."""
    index, prefixes = PrefixIndex(), HeldPrefixes(interval_s=3600)
    cache = cache_of(index)
    prefixes.on(StepRecord(0.0), cache)
    index.record(0, range(64))
    prefixes.on(StepRecord(0.0), cache)
    assert not told_names(prefixes.stats)
    prefixes.on(Idle(), cache)
    assert held_tokens(list(range(64)), told_names(prefixes.stats)) == 64


def test_an_engine_reports_the_prefixes_that_requests_hit(
    make_engine: Callable[..., Engine],
) -> None:
    """After an eviction it does not report them."""
    prefixes = HeldPrefixes()
    engine = make_engine(observer=prefixes, watermark_bytes=None)
    prompt = [at % 50 for at in range(70)]
    engine.generate(prompt, SamplingParams(max_tokens=2))
    engine.fall_idle()
    assert held_tokens(prompt, told_names(prefixes.stats)) == 64
    [again] = engine.generate([prompt], SamplingParams(max_tokens=2))
    assert again.num_cached_tokens == 64
    engine.cache.trim()
    engine.generate([[7, 8, 9]], SamplingParams(max_tokens=2))
    engine.fall_idle()
    assert held_tokens(prompt, told_names(prefixes.stats)) == 0


def test_an_engine_reports_evicted_prefixes_in_host_memory(
    make_engine: Callable[..., Engine],
) -> None:
    """Until they are forgotten; a full report leaves out the longest ones of these, too."""
    prefixes, small = HeldPrefixes(), HeldPrefixes(max_names=2)
    observers = Observers([prefixes, small])
    engine = make_engine(observer=observers, watermark_bytes=None, host_budget_bytes=8 * MiB)
    prompt = [at % 50 for at in range(70)]
    engine.generate(prompt, SamplingParams(max_tokens=2))
    for empties in (False, True):
        if empties:
            engine.cache.trim()
            assert not list(engine.cache.prefixes.beginnings(MARKED_LENGTHS))
        engine.fall_idle()
        engine.generate([[7, 8, 9]], SamplingParams(max_tokens=2))
        engine.fall_idle()
        assert held_tokens(prompt, told_names(prefixes.stats)) == 64
        assert held_tokens(prompt, told_names(small.stats)) == 32
    with engine.cache.pool.lock:
        engine.cache.host_blocks.forget()
    engine.generate([[7, 8, 9]], SamplingParams(max_tokens=2))
    engine.fall_idle()
    assert held_tokens(prompt, told_names(prefixes.stats)) == 0


@pytest.mark.parametrize("wrong", [["a"], [None], [1 << 70]])
def test_hashing_invalid_tokens_is_a_value_error(wrong: list) -> None:
    with pytest.raises(ValueError, match="token ids must be integers"):
        list(block_hashes(wrong * BLOCK_TOKENS))
