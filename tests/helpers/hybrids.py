"""Models whose layers keep states, in releases of transformers whose cache has such layers."""

from __future__ import annotations

import functools
from typing import Any

from transformers import cache_utils

from . import families, survey
from .tiny_models import MODELS, tiny_model

_NAMES = ("qwen3_next", "qwen3_5_text", "granitemoehybrid", "lfm2", "falcon_h1", "jamba")
#: Gated DeltaNet, Mamba-2, short convolutions, and a state beside keys and values in one layer;
#: layers that go on from a state with one token only.
HYBRIDS = tuple(
    name
    for name in _NAMES
    if hasattr(cache_utils, "LinearAttentionLayer") and name in families.surveyed()
)


@functools.cache
def hybrid(name: str) -> Any:
    """The tiny model of a family, in float32. It is cached: do not change it."""
    return survey.model_of(name)


def model_named(name: str) -> Any:
    """The tiny model of a family, with or without states. It is cached: do not change it."""
    return tiny_model(name) if name in MODELS and name not in HYBRIDS else hybrid(name)
