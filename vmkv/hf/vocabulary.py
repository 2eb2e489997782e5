"""How many tokens a model knows, where this process may have only a part of the matrices."""

from __future__ import annotations

from typing import Any


def num_embeddings(model: Any) -> int:
    """Tokens that a model can be given."""
    return _stated(model.get_input_embeddings(), "num_embeddings")


def num_logits(model: Any) -> int:
    """Columns of a model's logits."""
    return _stated(model.get_output_embeddings(), "out_features")


def _stated(module: Any, name: str) -> int:
    """What a module says of itself; of those that do not, the rows of the weight."""
    stated = getattr(module, name, None)
    return int(module.weight.shape[0] if stated is None else stated)
