"""The argument by which models take transformers' cache, and its name in their outputs."""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..errors import ConfigError

#: Names that releases and models use. 5.24 renamed the other two to `cache`; `cache_params` was
#: that of layers with states.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def named_cache(code: Any) -> str | None:
    """Return the parameter of a function or class that takes a cache, or None (XLM's dict)."""
    found = {
        name: str(each.annotation) for name, each in inspect.signature(code).parameters.items()
    }
    return next((name for name in CACHE_NAMES if "dict" not in found.get(name, "dict")), None)


#: The name in the installed release.
CACHE_NAME = named_cache(CausalLMOutputWithPast) or CACHE_NAMES[0]


def cache_argument(model: Any) -> str:
    """Return the argument by which `model.forward` takes its cache; may raise `ConfigError`."""
    name = named_cache(model.forward) or named_cache(type(model).forward)
    is_wrapper = "input_ids" not in inspect.signature(type(model).forward).parameters
    if name is None and isinstance(model, transformers.PreTrainedModel) and not is_wrapper:
        raise ConfigError(
            f"{type(model).__name__}.forward takes no cache by a name that vmkv knows "
            f"({', '.join(CACHE_NAMES)})"
        )
    return name or CACHE_NAME
