"""The layers of a model, as far as its configuration tells."""

from __future__ import annotations

from typing import Any

from . import compat
from .store import LayerKind
from .unservable import UnservableError


def layer_kinds(config: Any) -> list[LayerKind]:
    """The layers of a model's configuration, all of which vmkv holds.

    Raises:
        ConfigError: It has others.
    """
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
