"""Planning prefill passes where prompts begin alike: nothing lost, nothing twice, nobody starves.

Pure: a simulated cache says what prompts find, truthfully or as badly as it likes. What comes of it
with a model is `test_prefix_generate.py`'s; passes without sharing are `test_prefill_passes.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vmkv.core.cache.prefix import BLOCK_TOKENS
from vmkv.hf.prefill import Chunk, LeadersFirst, beginnings, prefill_passes

BOUNDS = st.integers(1, 200)


def _common_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens in the whole blocks with which both begin."""
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same // BLOCK_TOKENS * BLOCK_TOKENS


@st.composite
def prompts_that_branch(draw: st.DrawFn) -> list[list[int]]:
    """Up to ten prompts, most of which begin like one before them."""
    prompts: list[list[int]] = []
    for _ in range(draw(st.integers(1, 10))):
        begin: list[int] = []
        if prompts and draw(st.booleans()):
            source = draw(st.sampled_from(prompts))
            begin = source[: draw(st.integers(0, len(source)))]
        own = draw(st.lists(st.integers(0, 2), min_size=1, max_size=80))
        prompts.append(begin + own)
    return prompts


class _Rows:
    """What a cache would find: prefixes of what was computed, unless a window has passed them.

    Args:
        prompts: The prompts.
        window: How far a row may be past what another takes from it; None for as far as it likes.
    """

    def __init__(self, prompts: list[list[int]], window: int | None = None):
        self.prompts = prompts
        self.window = window
        self.computed: dict[int, int] = {}
        self.cached: dict[int, int] = {}

    def find(self, at: int) -> int:
        """The longest beginning of a prompt, but for its last token, that a row holds."""
        found = 0
        for other, num_tokens in self.computed.items():
            usable = min(
                _common_tokens(self.prompts[at][:-1], self.prompts[other]),
                num_tokens // BLOCK_TOKENS * BLOCK_TOKENS,
            )
            # A shorter beginning is farther behind the window yet.
            if self.window is None or num_tokens - usable <= self.window:
                found = max(found, usable)
        return found

    def begin(self, at: int) -> int:
        assert at not in self.cached, "began twice"
        self.cached[at] = self.computed[at] = self.find(at)
        return self.cached[at]

    def note(self, pieces: list[Chunk]) -> None:
        for piece in pieces:
            assert self.computed[piece.sequence_id] == piece.num_past_tokens, "a gap, or twice"
            self.computed[piece.sequence_id] = piece.num_tokens


def _run(rows: _Rows, most: int, begin: Callable[[int], int], **options: object) -> int:
    """Run all passes and check each; returns how many there were."""
    lengths = [len(prompt) for prompt in rows.prompts]
    choose = LeadersFirst(rows.prompts, **options)  # type: ignore[arg-type]
    num_passes = 0
    for pieces in prefill_passes(lengths, most, begin=begin, choose=choose):
        num_passes += 1
        assert pieces, "an empty pass: nobody went on"
        assert sum(piece.num_new_tokens for piece in pieces) <= most
        assert all(piece.num_new_tokens > 0 for piece in pieces)
        ids = [piece.sequence_id for piece in pieces]
        assert len(set(ids)) == len(ids), "a row twice in a batch"
        rows.note(pieces)
    assert dict(enumerate(lengths)) == rows.computed, "somebody did not finish"
    return num_passes


@given(
    prompts=prompts_that_branch(),
    most=BOUNDS,
    stop=st.booleans(),
    min_saved=st.integers(1, 60),
    data=st.data(),
)
def test_every_token_is_computed_once_or_was_cached_whatever_the_cache_says(
    prompts: list[list[int]], most: int, stop: bool, min_saved: int, data: st.DataObject
) -> None:
    """Evictions and foreign contents: a prompt may find anything, and may expect anything."""
    rows = _Rows(prompts)

    def begin(at: int) -> int:
        rows.begin(at)
        rows.computed[at] = data.draw(st.integers(0, len(prompts[at]) - 1))
        return rows.computed[at]

    def find(at: int) -> int:
        return data.draw(st.integers(0, len(prompts[at]) - 1))

    num_passes = _run(rows, most, begin, find=find, leaders_stop=stop, min_saved_tokens=min_saved)
    assert num_passes <= sum(map(len, prompts))


@given(prompts=prompts_that_branch(), most=BOUNDS)
def test_what_prompts_have_in_common_is_computed_once(prompts: list[list[int]], most: int) -> None:
    """Each begins with the longest beginning of any that began before it."""
    rows = _Rows(prompts)
    _run(rows, most, rows.begin, min_saved_tokens=1)
    begun = list(rows.cached)
    for turn, at in enumerate(begun):
        longest = max(
            (_common_tokens(prompts[at][:-1], prompts[o]) for o in begun[:turn]), default=0
        )
        assert longest == rows.cached[at]


@given(prompts=prompts_that_branch(), most=BOUNDS, window=st.integers(0, 40))
def test_windows_lose_nothing_to_leaders_that_run_ahead(
    prompts: list[list[int]], most: int, window: int
) -> None:
    """Whoever waits finds what it has waited for, however short the window."""
    rows = _Rows(prompts, window)
    choose = LeadersFirst(prompts, leaders_stop=True, min_saved_tokens=1)
    waited: dict[int, int] = {}

    def watch(past: dict[int, int], waiting: list[int]) -> object:
        agenda = choose(past, waiting)
        for at in agenda.later:
            others = [*past, *(each for each in waiting if each not in agenda.later)]
            waited[at] = max(_common_tokens(prompts[at][:-1], prompts[o]) for o in others)
        return agenda

    lengths = [len(prompt) for prompt in prompts]
    for pieces in prefill_passes(lengths, most, begin=rows.begin, choose=watch):
        rows.note(pieces)
    assert dict(enumerate(lengths)) == rows.computed
    assert all(rows.cached[at] >= tokens for at, tokens in waited.items())


@given(prompts=prompts_that_branch(), most=BOUNDS, knows_most=st.booleans())
def test_who_would_save_too_little_costs_no_pass(
    prompts: list[list[int]], most: int, knows_most: bool
) -> None:
    """Passes are full but for the last, as if prompts had nothing in common."""
    rows = _Rows(prompts)

    def begin(at: int) -> int:
        rows.computed[at] = 0
        return 0

    options = {"max_num_batched_tokens": most} if knows_most else {}
    num_passes = _run(rows, most, begin, min_saved_tokens=10**6, **options)
    assert num_passes == -(-sum(map(len, prompts)) // most)


def test_strangers_fill_the_pass_that_followers_leave() -> None:
    """A follower's place goes to the next prompt; the pass stays full."""
    system = list(range(64))
    prompts = [[*system, 1], [*system, 2], [9] * 40, [*system, 3], [8] * 40]
    rows = _Rows(prompts)
    choose = LeadersFirst(prompts, min_saved_tokens=1)
    passes = []
    lengths = list(map(len, prompts))
    for pieces in prefill_passes(lengths, 130, begin=rows.begin, choose=choose):
        rows.note(pieces)
        passes.append([(piece.sequence_id, piece.num_new_tokens) for piece in pieces])
    assert [[(0, 65), (2, 40), (4, 25)], [(4, 15), (1, 1), (3, 1)]] == passes


def test_a_leader_stops_where_its_followers_leave_it() -> None:
    """All followers begin then, though their own tokens have to wait for room."""
    system = list(range(64))
    prompts = [[*system, *[at] * 20] for at in range(4)]
    rows = _Rows(prompts, window=0)
    choose = LeadersFirst(prompts, leaders_stop=True, min_saved_tokens=1)
    passes = []
    for pieces in prefill_passes([84] * 4, 70, begin=rows.begin, choose=choose):
        rows.note(pieces)
        passes.append([(piece.sequence_id, piece.num_new_tokens) for piece in pieces])
    assert [[(0, 64)], [(0, 20), (1, 20), (2, 20), (3, 10)], [(3, 10)]] == passes


@given(prompts=prompts_that_branch())
def test_paths_meet_exactly_where_prompts_do(prompts: list[list[int]]) -> None:
    """Two prompts share as many numbers as whole blocks."""
    paths = beginnings(prompts)
    assert [len(prompt) // BLOCK_TOKENS for prompt in prompts] == list(map(len, paths))
    for (a, path_a), (b, path_b) in pairwise(zip(prompts, paths, strict=True)):
        blocks = _common_tokens(a, b) // BLOCK_TOKENS
        assert path_a[:blocks] == path_b[:blocks]
        assert not set(path_a[blocks:]) & set(path_b[blocks:])
