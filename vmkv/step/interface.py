"""The attention implementation of a model: who has set it, and what it was before.

Engines, caches and single steps set it for as long as they last, and end in any order: garbage
collection may end the first of two engines after the second was made. So the users of a model are
counted, and the implementation that the first one found is set again when the last one ends.
"""

from __future__ import annotations

import contextlib
import threading
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


PACKED = "vmkv"
"""The implementation that packed steps attend through where layers are not compiled."""


class _Users:
    """The users of one configuration, and what its attention implementation was before them."""

    def __init__(self) -> None:
        self.chosen = ""
        self.names: dict[object, str] = {}  # What each user has set, in order.


#: By the id of the configuration, while it has users: models may share a configuration.
_USERS: dict[int, _Users] = {}
_LOCK = threading.RLock()


def text_config(model: Any) -> Any:
    """The configuration whose attention implementation the decoder reads."""
    text = getattr(model.config, "text_config", None)
    return model.config if text is None else text


def chosen_attention(model: Any) -> str:
    """The attention implementation that the model has without users of this module."""
    config = text_config(model)
    users = _USERS.get(id(config))
    now = str(config._attn_implementation)
    return users.chosen if users is not None and now == _last(users) else now


def has_users(model: Any) -> bool:
    """Whether the model attends through an implementation that `attending_through` has set."""
    return id(text_config(model)) in _USERS


def _last(users: _Users) -> str | None:
    return next(reversed(users.names.values()), None)


def _set_attention(model: Any, name: str) -> None:
    """Set the implementation of the decoder; vision towers and the like are left alone."""
    config = text_config(model)
    if config._attn_implementation != name:
        model.set_attn_implementation(name if config is model.config else {"text_config": name})


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
    """Have the model attend through an implementation.

    Users may end in any order. The implementation set last, by a user that has not ended, counts;
    after the last one that which the model had before the first. An implementation that somebody
    else sets meanwhile stays.

    Args:
        model: The model.
        name: The implementation's name among transformers' own.
    """
    config, user = text_config(model), object()
    with _LOCK:
        users = _USERS.setdefault(id(config), _Users())
        if config._attn_implementation != _last(users):
            users.chosen = str(config._attn_implementation)
        users.names[user] = name
    try:
        with _LOCK:
            _set_attention(model, name)
        yield
    finally:
        with _LOCK:
            is_untouched = config._attn_implementation == _last(users)
            del users.names[user]
            if not users.names:
                _USERS.pop(id(config), None)
            if is_untouched:
                _set_attention(model, _last(users) or users.chosen)
