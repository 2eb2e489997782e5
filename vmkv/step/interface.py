"""How a transformers model is made to attend elsewhere: its registries and its settings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def register_attention(name: str, attention: Any, mask: Any) -> None:
    """Put an attention function and its mask function into transformers' registries.

    Both, because an attention without a mask function silently gets no mask at all.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def attention_settings(
    model: Any, name: str
) -> tuple[str, dict[str, str] | str, dict[str, str] | str]:
    """What the text model attends with, how to set `name`, and how to set it back.

    The latter two are for `set_attn_implementation`. Vision towers and the like are left alone.
    """
    text = getattr(model.config, "text_config", None)
    if text is None:
        before = str(model.config._attn_implementation)
        return before, name, before
    before = str(text._attn_implementation)
    return before, {"text_config": name}, {"text_config": before}


@contextlib.contextmanager
def attending_through(model: Any, name: str) -> Iterator[None]:
    """Have the model attend through an attention implementation, and as before afterwards.

    Args:
        model: The model.
        name: What the implementation is registered as.
    """
    before, wanted, restored = attention_settings(model, name)
    if before == name:
        yield
        return
    model.set_attn_implementation(wanted)
    try:
        yield
    finally:
        model.set_attn_implementation(restored)
