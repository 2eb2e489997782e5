"""Models that packed batches cannot serve: the error, and checks of lengths and layers."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from . import compat
from .store import LayerKind

# ---- unservable ----------------------------------------------------------------------------------


class UnservableError(ConfigError):
    """A packed batch cannot serve the model; `generate` and `Engine` refuse it before it runs.

    The message ends in "cannot be served in a packed batch: {why}; {instead}".
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
        """Return this error with the model's name, and an alternative that serves it."""
        if compat.takes_cache(model):
            return UnservableError(self.why, type(model).__name__)
        return UnservableError(
            self.why, type(model).__name__, "use model.generate without a cache of ours instead"
        )


def check_length(config: Any, max_tokens: int | None) -> None:
    """Refuse sequences that would change the rotary angles of others in their pass."""
    limit = compat.rope_limit_tokens(config)
    if limit is not None and (max_tokens is None or max_tokens > limit):
        raise ConfigError(
            f"beyond {limit} tokens, one sequence changes the rotary embedding of all that it is "
            f"packed with, and these may reach {max_tokens or 'any length'}: let them end at "
            f"{limit} tokens at most, or generate with past_key_values=VMKVCache(config) instead"
        )


# ---- layer kinds ---------------------------------------------------------------------------------


def layer_kinds(config: Any) -> list[LayerKind]:
    """Return the layers of a configuration; refuses layers that vmkv cannot hold."""
    decoder = compat.text_config(config)
    if "chunked_attention" in (getattr(decoder, "layer_types", None) or ()):
        raise UnservableError("it attends in chunks, which no kernel here does")
    layers = compat.default_layers(config)
    if len(layers) != getattr(decoder, "num_hidden_layers", len(layers)):
        raise UnservableError("layers share keys and values, which only a cache can hand on")
    kinds = []
    for index, layer in enumerate(layers):
        is_ours, window = compat.window_of(layer)
        if not is_ours:
            raise UnservableError(
                f"its layer {index} is a {type(layer).__name__}, whose state is not keys and "
                "values of its own"
            )
        kinds.append(LayerKind(index, window))
    return kinds
