"""Validation of prompts: at least one token id, all of them in the model's vocabulary.

A token without a row in the embedding is an IndexError on the CPU, and ends the process on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError


def check_tokens(tokens: Sequence[Any], vocab_size: int, name: str = "the prompt") -> None:
    """Raise `ConfigError`, in which the prompt is called `name`, for an invalid prompt."""
    if not tokens:
        raise ConfigError(f"{name} is empty: pass at least one token id")
    # Takes a third of the time of a look at each token, which counts for long prompts.
    if set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < vocab_size:
        return
    wrong = next(each for each in tokens if type(each) is not int or not 0 <= each < vocab_size)
    raise ConfigError(f"{name} holds {wrong!r}, which is no token of a vocabulary of {vocab_size}")
