"""Prefill passes compute every token once, finish every prompt, and are bounded.

A simulated cache returns prefix lengths, right or arbitrary. `test_prefix_generate.py` runs passes
with a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from vmkv.core.cache.prefix import BLOCK_TOKENS
from vmkv.hf import generation
from vmkv.hf.generation import find_leaders, prefill_passes
from vmkv.step import Piece

BOUNDS = st.integers(1, 200)
Prompts = list[list[int]]


def _common_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of tokens in whole blocks that both begin with."""
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same // BLOCK_TOKENS * BLOCK_TOKENS


@st.composite
def prompts_that_branch(draw: st.DrawFn) -> Prompts:
    """Up to ten prompts; most begin like an earlier one."""
    prompts: Prompts = []
    for _ in range(draw(st.integers(1, 10))):
        begin: list[int] = []
        if prompts and draw(st.booleans()):
            source = draw(st.sampled_from(prompts))
            begin = source[: draw(st.integers(0, len(source)))]
        own = draw(st.lists(st.integers(0, 2), min_size=1, max_size=80))
        prompts.append(begin + own)
    return prompts


class _Rows:
    """A simulated prefix cache; a prefix more than `window` tokens behind its row is lost."""

    def __init__(self, prompts: Prompts, window: int | None = None):
        self.prompts = prompts
        self.window = window
        self.forks_at_ends = window is not None
        self.computed: dict[int, int] = {}
        self.cached: dict[int, int] = {}

    def find(self, prompt: list[int]) -> int:
        found = 0
        for other, num_tokens in self.computed.items():
            usable = min(
                _common_tokens(prompt[:-1], self.prompts[other]),
                num_tokens // BLOCK_TOKENS * BLOCK_TOKENS,
            )
            # A shorter prefix is even farther behind the window.
            if self.window is None or num_tokens - usable <= self.window:
                found = max(found, usable)
        return found

    def begin(self, at: int, num_tokens: int, prompt: list[int] | None) -> int:
        assert at not in self.cached, "a prompt began twice"
        assert len(self.prompts[at]) == num_tokens
        self.cached[at] = self.computed[at] = 0 if prompt is None else self.find(prompt)
        return self.cached[at]

    def row(self, at: int) -> int:
        return at + 100

    def note(self, pieces: list[Piece], most: int) -> None:
        assert 0 < sum(piece.num_new_tokens for piece in pieces) <= most
        assert len({piece.slot for piece in pieces}) == len(pieces), "a row twice in a batch"
        for piece in pieces:
            prompt, start, end = self.prompts[piece.slot], piece.num_past_tokens, piece.num_tokens
            assert piece.row == piece.slot + 100
            assert self.computed[piece.slot] == start < end, "tokens were skipped or computed twice"
            assert list(piece.token_ids or ()) == prompt[start:end]
            assert piece.samples == (end == len(prompt))
            self.computed[piece.slot] = end


def _run(
    rows: Any,
    most: int,
    *,
    finds: bool = True,
    least: int = 1,
    watch: Callable[[list[Piece]], object] = len,
) -> int:
    """Run all passes, check each, and return their number."""
    num_passes = 0
    with mock.patch.object(generation, "_MIN_SAVED_TOKENS", least):
        for pieces in prefill_passes(rows.prompts, most, rows, finds=finds):
            num_passes += 1
            watch(pieces)
            rows.note(pieces, most)
    lengths = [len(prompt) for prompt in rows.prompts]
    assert dict(enumerate(lengths)) == rows.computed, "a prompt was not finished"
    return num_passes


@given(prompts=prompts_that_branch(), most=BOUNDS, finds=st.booleans())
def test_passes_are_full_if_no_prompt_waits_for_a_prefix(
    prompts: Prompts, most: int, finds: bool
) -> None:
    """Prompts run in order, and all passes but the last are full."""
    rows = _Rows(prompts)
    ran: list[int] = []
    with mock.patch.object(rows, "find", return_value=0):
        num_passes = _run(
            rows,
            most,
            finds=finds,
            least=10**6,
            watch=lambda pieces: ran.extend(piece.slot for piece in pieces),
        )
    assert num_passes == -(-sum(map(len, prompts)) // most)
    assert sorted(ran) == ran


@given(prompts=prompts_that_branch(), most=BOUNDS, window=st.booleans(), data=st.data())
def test_every_token_is_computed_once_or_found_in_the_cache(
    prompts: Prompts, most: int, window: bool, data: st.DataObject
) -> None:
    """The cache returns arbitrary lengths, as after evictions."""
    rows = _Rows(prompts, 0 if window else None)
    anything: Callable[[list[int]], int] = lambda prompt: data.draw(  # noqa: E731
        st.integers(0, len(prompt) - 1)
    )
    with mock.patch.object(rows, "find", anything):
        assert _run(rows, most) <= sum(map(len, prompts))


@given(prompts=prompts_that_branch(), most=BOUNDS, window=st.none() | st.integers(0, 40))
def test_common_prefixes_are_computed_once(prompts: Prompts, most: int, window: int | None) -> None:
    """Each prompt finds its longest common prefix with an earlier one, for any window."""
    rows = _Rows(prompts, window)
    _run(rows, most)
    for at, prompt in enumerate(prompts):
        longest = max((_common_tokens(prompt[:-1], other) for other in prompts[:at]), default=0)
        assert longest <= rows.cached[at]


@given(prompts=prompts_that_branch())
def test_a_leader_is_the_first_prompt_with_the_longest_common_prefix(prompts: Prompts) -> None:
    """In whole blocks, without the last token."""
    expected = {}
    for at, prompt in enumerate(prompts):
        shared = [_common_tokens(prompt[:-1], other) for other in prompts[:at]]
        if any(shared):
            expected[at] = shared.index(max(shared)), max(shared)
    assert expected == find_leaders(prompts)


def _sizes(rows: _Rows, most: int) -> list[list[tuple[int, int]]]:
    passes: list[list[tuple[int, int]]] = []
    _run(
        rows,
        most,
        watch=lambda pieces: passes.append([(each.slot, each.num_new_tokens) for each in pieces]),
    )
    return passes


def test_other_prompts_fill_a_pass_while_followers_wait() -> None:
    system = list(range(64))
    rows = _Rows([[*system, 1], [*system, 2], [9] * 40, [*system, 3], [8] * 40])
    assert [[(0, 65), (2, 40), (4, 25)], [(4, 15), (1, 1), (3, 1)]] == _sizes(rows, 130)


def test_a_leader_stops_at_the_end_of_the_common_prefix() -> None:
    """All followers begin in the next pass, though some of their tokens do not fit in it."""
    system = list(range(64))
    rows = _Rows([[*system, *[at] * 20] for at in range(4)], window=0)
    expected = [[(0, 64)], [(0, 20), (1, 20), (2, 20), (3, 10)], [(3, 10)]]
    assert expected == _sizes(rows, 70)
