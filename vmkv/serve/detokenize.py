"""Incremental detokenization, and the search for stop texts.

A token's text depends on its neighbours, so each is decoded together with the few tokens before
it; incomplete characters are held back.

Bytes that never form a character become U+FFFD. In a run of bytes with an invalid one, characters
that were complete before stay, and each byte after them becomes one replacement character.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..hf import compat
from .params import SamplingParams

# ---- stop texts ----------------------------------------------------------------------------------


def find_stop(text: str, stops: Sequence[str], num_seen: int) -> tuple[int, str] | None:
    """Return the first stop text that ends after `num_seen` characters, and where it begins."""
    found = [(text.find(stop, max(0, num_seen - len(stop) + 1)), stop) for stop in stops]
    return min((each for each in found if each[0] >= 0), default=None)


def num_begun(added: str, stop: str, num_before: int = 0) -> int:
    """Length of the longest end of a text that begins the stop text without completing it.

    `num_before` is that length for the text without `added`. Cost: a step for each added character,
    by the algorithm of Knuth, Morris and Pratt.
    """
    at = 0 if num_before else added.find(stop[0])
    if at < 0:
        return 0
    begun, borders = num_before, _borders(stop)
    for sign in added[at:]:
        while begun and stop[begun] != sign:
            begun = borders[begun - 1]
        begun += stop[begun] == sign
        if begun == len(stop):
            begun = borders[-1]
    return begun


@lru_cache(1024)
def _borders(stop: str) -> list[int]:
    """For each beginning of a text, the length of its longest shorter end that begins it, too."""
    borders = [0]
    for sign in stop[1:]:
        length = borders[-1]
        while length and stop[length] != sign:
            length = borders[length - 1]
        borders.append(length + (stop[length] == sign))
    return borders


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

    `prompt_token_ids` are context for the first tokens. `stop` is the stop text that was found.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], params: SamplingParams):
        # Without clean-up of spaces before punctuation, which would change text already returned.
        self._decode_tokens = compat.decoder(tokenizer)
        self._params = params
        self._window = list(prompt_token_ids[-_WINDOW_MAX_TOKENS:])
        self._window_text = self._decode(self._window)
        # Part of the window's text that is final, without an incomplete character of the prompt.
        self._taken = self._window_text.rstrip(_REPLACEMENT)
        # Number of leading window tokens whose whole text is final.
        self._num_taken = len(self._window) if self._taken == self._window_text else 0
        self._move_window()
        self._new = ""  # Final text that was not taken yet.
        self._held = ""  # Text after it that may begin a stop text.
        self._num_begun = [0] * len(params.stop)  # Its characters that begin each stop text.
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
        """Add tokens, and flush after the last; returns how many come before a stop text's end."""
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
        if not added:
            return None
        text = self._held + added
        stops: Sequence[str] = self._params.stop
        found = find_stop(text, stops, len(self._held))
        if found is None or self._num_tokens < self._params.min_tokens:
            begun = self._num_begun
            self._num_begun = [num_begun(added, *each) for each in zip(stops, begun, strict=True)]
            end = len(text) - max(self._num_begun, default=0)
            self._new, self._held = self._new + text[:end], text[end:]
            return None
        at, self.stop = found
        self._new += text[: at + len(self.stop) if self._params.include_stop_str_in_output else at]
        self._held = ""
        return self.stop

    def _decode(self, token_ids: list[int]) -> str:
        return self._decode_tokens(token_ids, self._params.skip_special_tokens)

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
    num_replaced = len(text) - len(text.rstrip(_REPLACEMENT))
    return text[: len(text) - min(num_replaced, _INCOMPLETE_BYTES)]
