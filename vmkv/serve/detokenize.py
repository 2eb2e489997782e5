"""Text from tokens as they come, and where a stop text ends it.

A token's text depends on its neighbours: a character may be spread over several tokens, and
many tokenizers write a space only between words. So each new token is decoded together with the
last few before it, and what that adds is its text; bytes that are no whole character yet wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..hf import compat
from .params import SamplingParams
from .stop_texts import START, stop_texts

#: Tokens decoded again as context for the next: more than a character or a word's rule needs.
_CONTEXT_TOKENS = 6
#: The window is moved on when it has grown so long, at a whole character; and in any case when
#: it has grown so much longer that there can be none. Each token costs a decoding of it.
_WINDOW_TOKENS = 2 * _CONTEXT_TOKENS
_WINDOW_MAX_TOKENS = 96
#: What decoders write for bytes that are no character (yet), once for each or once for several.
_REPLACEMENT = "\ufffd"
#: Bytes of a character that is not complete, at most.
_INCOMPLETE_BYTES = 3


class Detokenizer:
    """The text of one output, token by token.

    Args:
        tokenizer: A transformers tokenizer.
        prompt_token_ids: The prompt: context for the first tokens.
        params: Stop texts and what to leave out.

    Attributes:
        stop: The stop text that was found; None as long as none was.

    Cost: of a token, a decoding of some of them, however many there were before.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], params: SamplingParams):
        # Tidying spaces before punctuation would change text that was given out already.
        self._decode_tokens = compat.decoder(tokenizer)
        self._skips_special = params.skip_special_tokens
        self._stops = stop_texts(tuple(params.stop)) if params.stop else None
        self._stop_state = START
        self._min_tokens = params.min_tokens
        self._includes_stop = params.include_stop_str_in_output
        self._window = list(prompt_token_ids[-_WINDOW_MAX_TOKENS:])
        # The part of the window's text that was taken; half a character of a prompt was not.
        self._taken = self._decode().rstrip(_REPLACEMENT)
        self._move_window()
        self._new = ""  # Certain, and not taken yet.
        self._held = ""  # What comes after that, and may begin a stop text.
        self._num_tokens = 0
        self.stop: str | None = None

    def take_text(self) -> str:
        """What is new of the text that no stop text can still begin in."""
        text, self._new = self._new, ""
        return text

    def append(self, token_id: int) -> str | None:
        """One more token; returns the stop text if that ended the output."""
        self._num_tokens += 1
        self._window.append(token_id)
        certain = self._decode()
        if certain.endswith(_REPLACEMENT):
            num_replaced = len(certain) - len(certain.rstrip(_REPLACEMENT))
            certain = certain[: len(certain) - min(num_replaced, _INCOMPLETE_BYTES)]
        # Some decoders take back characters while the bytes of the next one are incomplete.
        if not certain.startswith(self._taken) and len(self._window) < _WINDOW_MAX_TOKENS:
            return None
        return self._accept(certain)

    def finish(self) -> None:
        """No more tokens: what waited is text after all."""
        if self.stop is None:
            self._new += self._held + self._decode()[len(self._taken) :]
            self._held = ""

    def _accept(self, certain: str) -> str | None:
        """Make what the window's text has beyond what was taken the output's."""
        added = certain[len(self._taken) :]
        self._taken = certain
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

    def _decode(self) -> str:
        return self._decode_tokens(self._window, self._skips_special)

    def _move_window(self) -> None:
        """Drop what is context no more, so that what remains is still the end of what was taken."""
        is_longest = len(self._window) >= _WINDOW_MAX_TOKENS
        window = self._window
        for num_kept in range(_CONTEXT_TOKENS, _WINDOW_TOKENS):
            self._window = window[-num_kept:]
            text = self._decode()
            if _REPLACEMENT not in text and self._taken.endswith(text):
                self._taken = text
                return
        self._window = window[-_CONTEXT_TOKENS:] if is_longest else window
        if is_longest:
            self._taken = self._decode()
