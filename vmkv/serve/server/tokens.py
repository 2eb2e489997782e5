r"""Single tokens as text and as bytes, for log-probabilities.

A token may hold part of a character. Its bytes are exact, so that a client can join them; its text
then is `bytes:\xe2\x80`, in OpenAI's notation, because decoding would give � for all such tokens.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_UNKNOWN = "\ufffd"


class TokenText(NamedTuple):
    """A token's text, and its bytes where the tokenizer reveals them."""

    text: str
    raw: bytes | None


class Tokens:
    """Caches the `TokenText` of each token of a transformers tokenizer."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}

    def __getitem__(self, token_id: int) -> TokenText:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> TokenText:
        text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        if _UNKNOWN not in text:
            return TokenText(text, text.encode())
        raw = _bytes_of(str(self._tokenizer.convert_ids_to_tokens(token_id)))
        if raw is None:
            return TokenText(text, None)
        return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw)


def _bytes_of(token: str) -> bytes | None:
    """Return the bytes of a vocabulary entry: SentencePiece's `<0xE2>` or byte-level BPE."""
    by_name = _BYTE_TOKEN.fullmatch(token)
    if by_name:
        return bytes.fromhex(by_name.group(1))
    table = _byte_level()
    if all(char in table for char in token):
        return bytes(table[char] for char in token)
    return None


@functools.cache
def _byte_level() -> dict[str, int]:
    """Return GPT-2's table from characters to bytes: printable bytes as is, others from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + at): byte for at, byte in enumerate(others)
    }
