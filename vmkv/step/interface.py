"""How a model is made to attend elsewhere, and seen to wait for nothing."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch


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
def refusing_waits() -> Iterator[None]:
    """Have torch raise where it would wait for a CUDA device, as it must not while capturing.

    In all threads: make it short.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That this is a prototype.
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


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
