"""Incremental detokenization, and the search for stop texts.

A token's text depends on its neighbours: a character may span several tokens, and many tokenizers
write a space only between words. Each new token is therefore decoded together with the few tokens
before it; incomplete characters are held back.

Bytes that never form a character become U+FFFD. Decoders with a byte fallback replace a whole run
of bytes if one of them is invalid; here, characters of the run that were complete before stay, and
each byte after them becomes one replacement character.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..hf import compat
from .params import SamplingParams

# ---- stop texts ----------------------------------------------------------------------------------

#: State of a text no end of which begins a stop text.
START = 0


class Found(NamedTuple):
    """A stop text found in a text; `end` counts characters from where the search began."""

    end: int
    stop: str


class StopTexts:
    """Automaton (Aho-Corasick) that finds non-empty stop texts; any number of searches share it."""

    def __init__(self, stops: Sequence[str]):
        self._next: list[dict[str, int]] = [{}]
        # Fallback: state of the longest proper end of the text that begins a stop text.
        self._shorter = [START]
        # Longest stop text at the end of the state's text.
        self._stop: list[str | None] = [None]
        # Length of the longest end that begins a stop text without completing it.
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
        """Length in characters of the text's longest end that may become part of a stop text."""
        return self._num_begun[state]

    def advance(self, state: int, text: str) -> tuple[int, Found | None]:
        """Read more `text` from `state`; returns the state after it and the first match, if any.

        Of the stop texts that end in `text`, the match is the one that begins first. The state is
        meaningless after a match.
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
    """Return the automaton of `stops`, shared by the samples of a request."""
    return StopTexts(stops)


# ---- detokenize ----------------------------------------------------------------------------------

#: Tokens decoded again as context: enough for any character or word-boundary rule.
_CONTEXT_TOKENS = 6
#: Window length at which it moves on, at a whole character; at the maximum it moves anyway, in a
#: long run of invalid bytes. Each token costs a decoding of the window.
_WINDOW_TOKENS = 2 * _CONTEXT_TOKENS
_WINDOW_MAX_TOKENS = 96
#: Decoders' replacement for bytes that form no character (yet), once per byte or per run.
_REPLACEMENT = "\ufffd"
#: Most bytes of an incomplete character.
_INCOMPLETE_BYTES = 3


class Detokenizer:
    """Text of one output, token by token; a token costs one decoding of a bounded window.

    `prompt_token_ids` are context for the first tokens. `stop` is the stop text that was found, or
    None.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], params: SamplingParams):
        # Without clean-up of spaces before punctuation, which would change text already returned.
        self._decode_tokens = compat.decoder(tokenizer)
        self._skips_special = params.skip_special_tokens
        self._stops = stop_texts(tuple(params.stop)) if params.stop else None
        self._stop_state = START
        self._min_tokens = params.min_tokens
        self._includes_stop = params.include_stop_str_in_output
        self._window = list(prompt_token_ids[-_WINDOW_MAX_TOKENS:])
        self._window_text = self._decode(self._window)
        # Part of the window's text that is final, without an incomplete character of the prompt.
        self._taken = self._window_text.rstrip(_REPLACEMENT)
        # Number of leading window tokens whose whole text is final.
        self._num_taken = len(self._window) if self._taken == self._window_text else 0
        self._move_window()
        self._new = ""  # Final text that was not taken yet.
        self._held = ""  # Text after it that may begin a stop text.
        self._num_tokens = 0
        self.stop: str | None = None

    def take_text(self) -> str:
        """Return the new text, except for an end that may begin a stop text."""
        text, self._new = self._new, ""
        return text

    def append(self, token_id: int) -> str | None:
        """Add a token; returns the stop text if one ends the output here."""
        self._num_tokens += 1
        self._window.append(token_id)
        before, self._window_text = self._window_text, self._decode(self._window)
        if self._window_text == before != "" and not self._decode([token_id]):
            # A skipped special token: as context it would displace tokens with text.
            self._window.pop()
            return None
        return self._accept(_without_incomplete(self._window_text))

    def finish(self) -> str | None:
        """Flush held-back text and incomplete bytes; returns the stop text if they complete one."""
        if self.stop is None:
            self._accept(self._window_text)
            self._new, self._held = self._new + self._held, ""
        return self.stop

    def extend(self, token_ids: Sequence[int], *, is_last: bool) -> int | None:
        """Add tokens, and flush after the last; returns how many come before a stop text's end.

        None without a stop text.
        """
        for count, token_id in enumerate(token_ids, 1):
            if self.append(token_id) is not None:
                return count
        return len(token_ids) if is_last and self.finish() is not None else None

    def _accept(self, certain: str) -> str | None:
        """Append the new part of the window's text, of which `certain` is final, to the output."""
        if self._num_taken and not certain.startswith(self._taken):
            # An incomplete or invalid byte has replaced final characters of its run.
            is_end = certain == self._window_text
            new = self._window[self._num_taken :]
            text = self._decode(new)
            certain = text if is_end else _without_incomplete(text)
            if not certain:
                return None  # The next bytes may complete a character.
            self._window, self._window_text, self._taken, self._num_taken = new, text, "", 0
        added = certain[len(self._taken) :]
        self._taken = certain
        if certain == self._window_text:
            self._num_taken = len(self._window)
        if len(self._window) >= _WINDOW_TOKENS:
            self._move_window()
        if self._stops is None:
            self._new += added
            return None
        if not added:
            return None
        self._stop_state, found = self._stops.advance(self._stop_state, added)
        text = self._held + added
        if found is None or self._num_tokens < self._min_tokens:
            end = len(text) - self._stops.num_begun(self._stop_state)
            self._new, self._held = self._new + text[:end], text[end:]
            return None
        end, self.stop = len(self._held) + found.end, found.stop
        self._new += text[: end if self._includes_stop else end - len(self.stop)]
        self._held = ""
        return self.stop

    def _decode(self, token_ids: list[int]) -> str:
        return self._decode_tokens(token_ids, self._skips_special)

    def _move_window(self) -> None:
        """Drop the window's first tokens if the text of the others stays the same without them."""
        window = self._window
        for num_kept in range(_CONTEXT_TOKENS, _WINDOW_TOKENS):
            text = self._decode(window[-num_kept:])
            if text and _REPLACEMENT not in text and self._taken.endswith(text):
                self._keep(num_kept, text)
                return
        if len(window) < _WINDOW_MAX_TOKENS:
            return
        # A long run of invalid bytes. Its end must decode the same without the last bytes, or
        # later bytes could turn it into characters.
        ends = [len(window) - num_bytes for num_bytes in range(_INCOMPLETE_BYTES + 1)]
        texts = [self._decode(window[:end]) for end in ends]
        for start in range(len(window) - _CONTEXT_TOKENS, 0, -1):
            parts = (self._decode(window[start:end]) for end in ends)
            if all(map(str.endswith, texts, parts)):
                break
        else:
            start = len(window) - _CONTEXT_TOKENS
        self._keep(len(window) - start, self._decode(window[start:]))

    def _keep(self, num_tokens: int, text: str) -> None:
        num_waiting = len(self._window_text) - len(self._taken)
        self._num_taken = max(0, self._num_taken - len(self._window) + num_tokens)
        self._window, self._window_text = self._window[-num_tokens:], text
        self._taken = text[: max(0, len(text) - num_waiting)]


def _without_incomplete(text: str) -> str:
    """Remove trailing replacement characters that may still become a character."""
    num_replaced = len(text) - len(text.rstrip(_REPLACEMENT))
    return text[: len(text) - min(num_replaced, _INCOMPLETE_BYTES)]
