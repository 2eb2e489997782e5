"""Prefill passes: which tokens of which prompts the model computes next.

Prompts are cut into passes of a bounded number of tokens. Of prompts that begin alike, one, the
*leader*, goes first; the others, its *followers*, wait until their common beginning is computed,
and then find it in the cache:

    pass 1   | system prompt, question A |  other prompts ...   |
    pass 2   | question B | question C | question D | ...

Rows of sliding-window layers drop tokens behind the window, so that a follower finds nothing once
its leader is far ahead. There a leader stops where its followers diverge:

    pass 1   | system prompt |  other prompts ...   |
    pass 2   | question A | question B | question C | ...

Nothing here needs memory or a model.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..core.cache.geometry import check_positive
from ..core.cache.prefix import BLOCK_TOKENS

#: Tokens that one more pass must save at least: it costs the time of some hundred tokens.
MIN_SAVED_TOKENS = 256


class Chunk(NamedTuple):
    """The tokens of one sequence in a pass: how many it holds already, and how many are new."""

    sequence_id: int
    num_past_tokens: int
    num_new_tokens: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the sequence holds after the pass."""
        return self.num_past_tokens + self.num_new_tokens


class Agenda(NamedTuple):
    """Constraints on a pass: prompts to defer, and token counts at which others stop."""

    later: Collection[int] = frozenset()
    stops: Mapping[int, int] = {}


#: Chooses the agenda of the next pass from the computed tokens of each prompt that has begun, and
#: the waiting prompts.
Chooser = Callable[[Mapping[int, int], Sequence[int]], Agenda]


def prefill_passes(
    lengths: Sequence[int],
    max_num_batched_tokens: int,
    *,
    begin: Callable[[int], int] = lambda at: 0,
    choose: Chooser = lambda past, waiting: Agenda(),
) -> Iterator[list[Chunk]]:
    """Cut prompts into passes of at most `max_num_batched_tokens`, in order, without gaps.

    Submit each pass before taking the next. `begin` is called once per prompt, when its turn comes,
    and returns how many of its tokens need not be computed; never all of them. `choose` is called
    before each pass, and must not defer the first waiting prompt while none is running.
    """
    check_positive("max_num_batched_tokens", max_num_batched_tokens)
    past: dict[int, int] = {}
    running: list[int] = []
    waiting = list(range(len(lengths)))
    has_waited: set[int] = set()
    while running or waiting:
        agenda = choose(past, waiting)
        chunks = []
        room = max_num_batched_tokens
        for at in [*running, *(each for each in waiting if each not in agenda.later)]:
            if room or at in has_waited:  # Its prefix may be gone later.
                past[at] = begin(at) if at not in past else past[at]
            if room:
                stop = agenda.stops.get(at, 0)
                end = stop if stop > past[at] else lengths[at]
                chunks.append(Chunk(at, past[at], min(room, end - past[at])))
                room -= chunks[-1].num_new_tokens
        yield chunks
        past.update((chunk.sequence_id, chunk.num_tokens) for chunk in chunks)
        has_waited.update(agenda.later)
        waiting = [at for at in waiting if at not in past]
        running = [at for at, num_tokens in past.items() if num_tokens < lengths[at]]


class LeadersFirst:
    """A `Chooser` that defers prompts which begin like a running one, where that saves enough.

    Deferred prompts must save `min_saved_tokens` together, unless the pass is full without them.
    `find` returns how many tokens of a prompt the cache held before any began; with `leaders_stop`,
    leaders stop where their followers diverge. No prompt waits for ever: each waits for one that
    has begun, and not for tokens that are computed.

    Cost: a look-up for each block of 16 tokens; then for each waiting prompt and pass, one for each
    doubling of its blocks.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        find: Callable[[int], int] = lambda at: 0,
        *,
        leaders_stop: bool = False,
        max_num_batched_tokens: int = 8192,
        min_saved_tokens: int = MIN_SAVED_TOKENS,
    ):
        self._lengths = [len(prompt) for prompt in prompts]
        self._paths = beginnings(prompts)
        self._find = functools.cache(find)
        self._leaders_stop = leaders_stop
        self._max_num_batched_tokens = max_num_batched_tokens
        self._min_saved_tokens = min_saved_tokens
        self._computed: set[int] = set()
        self._num_noted: dict[int, int] = {}  # Blocks of each prompt that are in `_computed`.

    def __call__(self, past: Mapping[int, int], waiting: Sequence[int]) -> Agenda:
        """Choose the agenda of the next pass; see `Chooser`."""
        coming: dict[int, int] = {}  # Nodes to be computed, and their prompt.
        for at, num_tokens in past.items():
            path, num_blocks = self._paths[at], num_tokens // BLOCK_TOKENS
            self._computed.update(path[self._num_noted.get(at, 0) : num_blocks])
            self._num_noted[at] = num_blocks
            if num_tokens < self._lengths[at]:
                self._note_coming(at, coming)
        later: dict[int, int] = {}
        stops: dict[int, int] = {}
        for at in waiting:
            shared_tokens = self._shared_tokens(at, coming)
            saved_tokens = shared_tokens - self._known_tokens(at) if shared_tokens else 0
            if saved_tokens <= 0:
                self._note_coming(at, coming)
                continue
            later[at] = saved_tokens
            if self._leaders_stop:
                leader = coming[self._paths[at][shared_tokens // BLOCK_TOKENS - 1]]
                stops[leader] = min(shared_tokens, stops.get(leader, shared_tokens))
        agenda = Agenda(later.keys(), stops)
        num_tokens = sum(
            max(0, agenda.stops.get(at, length) - past.get(at, 0))
            for at, length in enumerate(self._lengths)
            if at not in later
        )
        is_full = num_tokens >= self._max_num_batched_tokens
        return agenda if is_full or sum(later.values()) >= self._min_saved_tokens else Agenda()

    def _note_coming(self, at: int, coming: dict[int, int]) -> None:
        for node in self._paths[at]:
            coming.setdefault(node, at)

    def _shared_tokens(self, at: int, nodes: Container[int]) -> int:
        """Return how many tokens of a prompt, but for its last one, begin like `nodes`."""
        path = self._paths[at][: (self._lengths[at] - 1) // BLOCK_TOKENS]
        # If a path's 20th node is in `nodes`, so is its 19th: this may be bisected.
        return BLOCK_TOKENS * bisect_left(path, True, key=lambda node: node not in nodes)

    def _known_tokens(self, at: int) -> int:
        """Return how many tokens of a prompt the cache holds now."""
        computed_tokens = self._shared_tokens(at, self._computed)
        return max(computed_tokens, self._find(at))


def beginnings(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Number the end of each whole block of 16 tokens of each prompt.

    Numbers are equal only where prompts are equal up to there: nodes of a tree of blocks.
    """
    children: dict[tuple[int, tuple[int, ...]], int] = {}
    paths = []
    for prompt in prompts:
        path, node = [], -1
        for start in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = tuple(prompt[start : start + BLOCK_TOKENS])
            node = children.setdefault((node, block), len(children))
            path.append(node)
        paths.append(path)
    return paths
