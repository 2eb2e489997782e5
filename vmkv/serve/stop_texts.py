"""Stop texts in a text that grows: Aho and Corasick's automaton.

A character costs the same whatever the number and the length of the texts looked for. A state
stands for the longest end of the text that begins one of them: just what must be held back.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

#: The state of a text that begins no stop text.
START = 0


class Found(NamedTuple):
    """A stop text in a text.

    Attributes:
        end: How many characters after the place where the search began it ends.
        stop: The stop text.
    """

    end: int
    stop: str


class StopTexts:
    """Finds stop texts. Holds no place in a text: any number of searches may share one.

    Args:
        stops: The texts, none of them empty.

    Cost: proportional to their characters together, to build and to keep.
    """

    def __init__(self, stops: Sequence[str]):
        self._next: list[dict[str, int]] = [{}]
        # The state of the longest end of this state's text that begins a stop text as well.
        self._shorter = [START]
        # The longest stop text that this state's text ends with.
        self._stop: list[str | None] = [None]
        # How long the longest end is that begins a stop text and does not complete one.
        self._num_begun = [0]
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = START
        for depth, char in enumerate(stop, 1):
            following = self._next[state].get(char)
            if following is None:
                following = self._next[state][char] = len(self._next)
                self._next.append({})
                self._shorter.append(START)
                self._stop.append(None)
                self._num_begun.append(depth)
            state = following
        self._stop[state] = stop

    def _link(self) -> None:
        """What each state falls back to: those nearer the start first."""
        states = deque(self._next[START].values())
        while states:
            state = states.popleft()
            shorter = self._shorter[state]
            if self._stop[state] is None:
                self._stop[state] = self._stop[shorter]
            if not self._next[state]:
                self._num_begun[state] = self._num_begun[shorter]
            for char, following in self._next[state].items():
                self._shorter[following] = self._step(shorter, char) if state else START
                states.append(following)

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(char, START)

    def num_begun(self, state: int) -> int:
        """How many characters at the end of the text may become part of a stop text."""
        return self._num_begun[state]

    def advance(self, state: int, text: str) -> tuple[int, Found | None]:
        """Go through more `text` from `state`.

        Returns:
            The state behind it, and of the stop texts that end in it the one that begins first.
            The state means nothing where one was found.

        Cost: constant per character, in the mean over a text.
        """
        found, first = None, len(text)
        for end, char in enumerate(text, 1):
            state = self._step(state, char)
            stop = self._stop[state]
            if stop is not None and end - len(stop) < first:
                found, first = Found(end, stop), end - len(stop)
        return state, found


@functools.lru_cache(maxsize=16)
def stop_texts(stops: tuple[str, ...]) -> StopTexts:
    """The automaton of `stops`; the samples of one request share it."""
    return StopTexts(stops)
