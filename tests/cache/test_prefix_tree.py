"""The prefix index against a model that compares block by block, and the shape of its tree.

The tree stays a radix tree: no two nodes that could be one, and no node without rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from vmkv.core.cache import prefix
from vmkv.core.cache import prefix as prefix_tree
from vmkv.core.cache.prefix import Node, PrefixIndex, Where

BLOCK = 2
TraceFunction = Callable[[FrameType, str, object], object]
ROWS = range(4)
TENANTS = (None, "a")


class _ByBlocks:
    """Model of the index: the tokens of each row, which a search compares one by one."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.tenants: dict[int, str | None] = {}
        self.where: dict[int, Where] = {}
        self.num_lost: dict[int, int] = {}

    def record(self, row: int, tokens: list[int], tenant: str | None) -> None:
        if not tokens:
            return
        if row not in self.tokens:
            self.tokens[row], self.tenants[row] = [], tenant
            self.where[row], self.num_lost[row] = Where.LIVE, 0
        self.tokens[row] += tokens

    def truncate(self, row: int, num_tokens: int) -> None:
        if row in self.tokens and len(self.tokens[row]) > num_tokens:
            del self.tokens[row][num_tokens:]
            self.num_lost[row] = min(self.num_lost[row], num_tokens // BLOCK)
            if not num_tokens:
                del self.tokens[row]

    def lose_short(self, row: int, num_tokens: int) -> None:
        if row in self.tokens:
            lost = min(max(0, num_tokens - 1), len(self.tokens[row])) // BLOCK
            self.num_lost[row] = max(self.num_lost[row], lost)

    def move(self, row: int, where: Where) -> None:
        if row in self.tokens:
            self.where[row] = where

    def copy(self, moves: list[tuple[int, int, str | None]], num_tokens: int) -> None:
        known = {row: tokens[:num_tokens] for row, tokens in self.tokens.items()}
        for _, target, _ in moves:
            self.truncate(target, 0)
        for source, target, tenant in moves:
            self.record(target, known.get(source, []), tenant)

    def matches(
        self, prompt: list[int], tenant: str | None
    ) -> list[tuple[int, set[int], set[int]]]:
        found = []
        for num_blocks in range(len(prompt) // BLOCK, 0, -1):
            end = num_blocks * BLOCK
            rows = [
                row
                for row, tokens in self.tokens.items()
                if self.tenants[row] == tenant
                and tokens[:end] == prompt[:end]
                and num_blocks > self.num_lost[row]
            ]
            places = [
                {row for row in rows if self.where[row] is where}
                for where in (Where.PARKED, Where.LIVE)
            ]
            if any(places):
                found.append((end, *places))
        return found


def _check(index: PrefixIndex) -> None:
    """Assert the structure of the tree that `prefix.py` describes."""
    ends = index._contents
    root = index._tree.root
    nodes: list[Node] = [root]
    listed: dict[int, int] = dict.fromkeys(ends, 0)
    for node in nodes:
        below = [row for child in node.children.values() for rows in child.rows for row in rows]
        here = [row for rows in node.rows for row in rows]
        assert len(here) == len(set(here))
        assert len(below) == len(set(below))
        ending = {row for row, path in ends.items() if path.end is node}
        if node is not root:
            assert set(here) == {*below, *ending}
            assert here, "a node without rows"
            assert node.run
            assert len(node.run) % (BLOCK * 8) == 0
            assert node.above.children[node.key] is node
            assert node.key.endswith(bytes(node.run[: BLOCK * 8]))
            for row in here:
                path = ends[row]
                is_lost = node.end_bytes <= path.lost_bytes
                assert row in node.rows[Where.AWAY if is_lost else path.where]
                listed[row] += len(node.run)
        for child in node.children.values():
            assert child.parent is node
            assert child.start_bytes == node.end_bytes
        nodes += node.children.values()
    assert listed == {row: len(index.token_ids(row)) // BLOCK * BLOCK * 8 for row in ends}


_tokens = st.lists(st.integers(0, 1), max_size=9)
_row = st.sampled_from(ROWS)
_tenant = st.sampled_from(TENANTS)
# A row is the target of one move at most.
_moves = st.lists(st.tuples(_row, _row, _tenant), max_size=4, unique_by=lambda move: move[1])
_steps = st.one_of(
    st.tuples(st.just("record"), _row, _tokens, _tenant),
    st.tuples(st.just("truncate"), _row, st.integers(0, 10)),
    st.tuples(st.just("lose_short"), _row, st.integers(0, 10)),
    st.tuples(st.just("move"), _row, st.sampled_from(Where)),
    st.tuples(st.just("copy"), _moves, st.integers(0, 12)),
)


@settings(max_examples=3 * settings().max_examples)
@given(steps=st.lists(_steps, max_size=14), prompts=st.lists(_tokens, min_size=1, max_size=3))
def test_index_finds_what_the_model_finds(steps: list[tuple], prompts: list[list[int]]) -> None:
    """After random histories, for prompts of any length and every tenant."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix, "BLOCK_TOKENS", BLOCK)
        index, model = PrefixIndex(), _ByBlocks()
        for what, *arguments in steps:
            getattr(index, what)(*arguments)
            getattr(model, what)(*arguments)
            _check(index)
        for prompt in [*prompts, *model.tokens.values()]:
            for tenant in TENANTS:
                found = [
                    (each.num_tokens, {*each.rows(Where.PARKED)}, {*each.rows(Where.LIVE)})
                    for each in index.matches(prompt, tenant)
                ]
                assert model.matches(prompt, tenant) == found
        held = {row: index.token_ids(row) for row in ROWS if index.num_recorded(row)}
        assert model.tokens == held
        assert {row: len(tokens) for row, tokens in held.items()} == {
            row: index.num_recorded(row) for row in held
        }


def _num_nodes(index: PrefixIndex) -> int:
    nodes = [index._tree.root]
    for node in nodes:
        nodes += node.children.values()
    return len(nodes) - 1


def test_common_tokens_are_one_node() -> None:
    """Rows that diverge have a node each; once those rows end, the split nodes are joined again."""
    index = PrefixIndex()
    index.record(0, range(64_000))
    for row in range(1, 9):
        index.record(row, [*range(1_000 * row), -row, *range(100)])
    assert 1 + 2 * 8 == _num_nodes(index)
    index.copy([(0, 9, None)], 64_000)
    assert 1 + 2 * 8 == _num_nodes(index)
    for row in range(1, 9):
        index.truncate(row)
    assert 1 == _num_nodes(index)
    index.truncate(9, 32_000)
    assert 2 == _num_nodes(index)
    index.truncate(9)
    index.truncate(0)
    assert 0 == _num_nodes(index)


def test_matches_follow_changes_of_the_index() -> None:
    """A row that changes while matches are iterated is found by the tokens it then holds."""
    index = PrefixIndex()
    for row, num_tokens in enumerate([64, 48, 48]):
        index.record(row, range(num_tokens))
    found = []
    for match in index.matches(range(64)):
        found.append((match.num_tokens, [*match.rows()]))
        if match.num_tokens == 64:
            index.truncate(0, 16)
            assert [] == [*match.rows()]
        elif match.num_tokens == 48:
            index.lose_short(1, 48)
            index.move(2, Where.AWAY)
    assert [(64, [0]), (48, [2, 1]), (16, [0])] == found


@pytest.mark.parametrize("num_tokens", [0, 20])
def test_empty_row_belongs_to_no_tenant(num_tokens: int) -> None:
    """The tenant of its earlier tokens does not apply to its next ones."""
    index = PrefixIndex()
    index.record(0, range(20), "a")
    index.copy([(0, 1, "a")], num_tokens)
    index.truncate(1)
    index.record(1, range(40), "b")
    assert [32, 16] == [match.num_tokens for match in index.matches(range(40), "b")]
    assert [16] == [match.num_tokens for match in index.matches(range(40), "a")]


def test_num_recorded_is_right_while_nodes_split_and_join() -> None:
    """Threads read it without the lock, so the test reads it before every line of the index."""
    index = PrefixIndex()
    for row, num_blocks in enumerate((9, 9, 6)):
        index.record(row, range(16 * num_blocks))
    held: set[tuple[int, int]] = set()

    def look(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        if frame.f_code.co_filename != prefix_tree.__file__:
            return None
        if event == "line":
            sys.settrace(None)
            held.add((index.num_recorded(0), index.num_recorded(2)))
            sys.settrace(look)
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        index.truncate(1, 16 * 4)
        index.truncate(1, 16 * 2)
        index.truncate(1)
    finally:
        sys.settrace(before)
    assert {(16 * 9, 16 * 6)} == held
