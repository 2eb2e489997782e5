"""What is a prompt: token ids, one at least, all of them in the model's vocabulary.

A token that the embedding has no row for is an IndexError on the CPU, and on a GPU the end of
the process: so it is looked for before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError


def check_tokens(tokens: Sequence[Any], vocab_size: int, name: str = "the prompt") -> None:
    """Refuse a prompt that is none.

    Args:
        tokens: What should be token ids.
        vocab_size: Rows of the model's embedding.
        name: What errors call the prompt.

    Raises:
        ConfigError: It is empty, or holds what is no token.
    """
    if not tokens:
        raise ConfigError(f"{name} is empty: pass at least one token id")
    # Long prompts come often: a third of the time that a look at each by itself takes.
    if set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < vocab_size:
        return
    wrong = next(each for each in tokens if type(each) is not int or not 0 <= each < vocab_size)
    raise ConfigError(f"{name} holds {wrong!r}, which is no token of a vocabulary of {vocab_size}")
