"""Prompts within an answer: their texts, tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..request import TokenLogprobs

#: Bytes before a token's text that no token has: tokenizers drop or add spaces.
_GAP_BYTES = 4
#: Reported for a token that the model cannot choose, as JSON has no infinity; vLLM's number.
_LEAST_LOGPROB = -9999.0


class Places:
    """Finds where each of a text's `num_left` tokens begins.

    Tokens are searched as bytes; one that is not there begins where the next one does.
    """

    def __init__(self, text: str, num_left: int):
        self.text = text
        self.num_left = num_left
        self._bytes = text.encode()
        self._at_byte = self._at_char = 0

    def next(self, token: bytes) -> int:
        """Return the character at which the next token begins."""
        self.num_left -= 1
        found = self._bytes.find(token, self._at_byte, self._at_byte + len(token) + _GAP_BYTES)
        if found < 0:
            return self._at_char
        begin = self._at_char + num_chars(self._bytes[self._at_byte : found])
        self._at_byte = found + len(token)
        self._at_char = begin + num_chars(self._bytes[found : self._at_byte])
        return begin


def num_chars(part: bytes) -> int:
    """Count the characters that begin in a part of a text in UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in part)


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(logprob, _LEAST_LOGPROB)


def told(entry: TokenLogprobs, count: int | None) -> Iterable[tuple[int, float]]:
    """Return the token and the `count` likeliest, each once, with their log-probabilities."""
    pairs = {entry.token_id: entry.logprob} | dict(list(entry.top.items())[:count])
    return [(token_id, finite(logprob)) for token_id, logprob in pairs.items()]


def prompt_entry(
    entry: TokenLogprobs | None, count: int, text_of: Callable[[int], str]
) -> dict[str, Any] | None:
    """Return a token's entry in vLLM's `prompt_logprobs`: the token, then the `count` likeliest."""
    if entry is None:
        return None
    found, ranks = {}, {token_id: rank for rank, token_id in enumerate(entry.top, 1)}
    for token_id, logprob in told(entry, count):
        rank = ranks.get(token_id)  # None beyond the likeliest.
        text = text_of(token_id)
        found[str(token_id)] = {"logprob": logprob, "rank": rank, "decoded_token": text}
    return found
