"""Models that packed batches cannot serve: one sentence, and what to use in their stead."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from . import compat


class UnservableError(ConfigError):
    """A packed batch cannot serve the model; `generate` and `Engine` refuse it before it runs.

    Args:
        why: The reason, as the end of "cannot be served in a packed batch: ".
        name: What the model is called.
        instead: What to do in its stead.

    Attributes:
        why: See above.
    """

    def __init__(
        self,
        why: str,
        name: str = "this model",
        instead: str = "generate with past_key_values=VMKVCache(config) instead",
    ):
        super().__init__(f"{name} cannot be served in a packed batch: {why}; {instead}")
        self.why = why

    def of(self, model: Any) -> UnservableError:
        """The same of a model, with what serves that one."""
        if compat.takes_cache(model):
            return UnservableError(self.why, type(model).__name__)
        return UnservableError(
            self.why, type(model).__name__, "use model.generate without a cache of ours instead"
        )


def check_length(config: Any, max_tokens: int | None) -> None:
    """Refuse sequences that would change those that they are packed with.

    Args:
        config: The model's configuration.
        max_tokens: What the longest of them may reach; None if there is no limit.

    Raises:
        ConfigError: The angles of the model's rotary embedding depend on the longest sequence.
    """
    limit = compat.rope_limit_tokens(config)
    if limit is not None and (max_tokens is None or max_tokens > limit):
        raise ConfigError(
            f"beyond {limit} tokens, one sequence changes the rotary embedding of all that it is "
            f"packed with, and these may reach {max_tokens or 'any length'}: let them end at "
            f"{limit} tokens at most, or generate with past_key_values=VMKVCache(config) instead"
        )
