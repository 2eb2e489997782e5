"""Checks of a model's layers before rows serve them: their keys and values, and their windows.

Two tokens go through the model. A `_Listener` stands in for a packed step: it reports how each
layer calls attention, and attends without a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import VMKVError
from .attention import attending_in_place, vmkv_attention
from .store import LayerKind, Signature
from .unservable import UnservableError


def layer_signatures(
    model: Any, kinds: Sequence[LayerKind], token_ids: torch.Tensor
) -> dict[int, Signature]:
    """Return all layers' key and value signatures, from a packed pass over `[T]` tokens."""
    signatures: dict[int, Signature] = {}

    def hear(asked: _Asked) -> None:
        index = getattr(asked.module, "layer_idx", None)
        if index is None:
            name = type(asked.module).__name__
            raise UnservableError(f"{name} does not say which layer it is")
        index = int(index)
        if index in signatures:
            raise UnservableError(f"its layer {index} attends more than once in a pass")
        if asked.mask is not None and not getattr(asked.mask, "_vmkv_placeholder", False):
            raise UnservableError(f"its layer {index} attends with a mask of the model's own")
        if asked.bias is not None:
            raise UnservableError(f"its layer {index} adds a bias of the model's own to scores")
        signatures[index] = Signature.of(asked.key, asked.value)

    placeholder = torch.empty((1, 1, 1, 1), dtype=torch.bool, device=token_ids.device)
    placeholder._vmkv_placeholder = True  # type: ignore[attr-defined]
    with attending_in_place(model):
        try:
            model(
                input_ids=token_ids[None],
                position_ids=torch.arange(len(token_ids), device=token_ids.device)[None],
                attention_mask=placeholder,
                use_cache=False,
                vmkv_batch=_Listener(hear, is_packed=True),
                return_dict=True,
            )
        except Exception as error:
            raise explained(error, "it does not run on packed tokens") from error
    missing = {kind.index for kind in kinds} - signatures.keys()
    if missing:
        raise UnservableError(
            f"its layers {sorted(missing)} do not attend through transformers' attention interface"
        )
    return signatures


def check_windows(model: Any, kinds: Sequence[LayerKind], token_ids: torch.Tensor) -> None:
    """Refuse a model whose masks have windows of other lengths than its rows."""
    windows: dict[int, tuple[int | None, int | None]] = {}

    def hear(asked: _Asked) -> None:
        recipe = getattr(asked.mask, "_vmkv_recipe", None)
        if recipe is not None:
            windows[int(vars(asked.module)["layer_idx"])] = (asked.window, recipe.window)

    listener = _Listener(hear, is_packed=False)
    with attending_in_place(model):
        try:
            model(input_ids=token_ids[None], use_cache=False, return_dict=True, vmkv_batch=listener)
        except Exception as error:
            raise explained(error, "it does not run on token ids alone") from error
    for kind in kinds:
        given, masked = windows.get(kind.index, (None, kind.window_tokens))
        kept = kind.window_tokens if given is None else given
        if kept != masked:
            raise UnservableError(
                f"its layer {kind.index} is to see {_window(kept)} by its configuration, and "
                f"{_window(masked)} by its mask"
            )


class _Asked(NamedTuple):
    """A layer's call of attention: the module, its new keys and values, and its options."""

    module: torch.nn.Module
    key: torch.Tensor
    value: torch.Tensor
    window: int | None
    mask: torch.Tensor | None
    bias: torch.Tensor | None


class _Listener:
    """Stand-in for a packed step that reports each call of attention and attends without a cache.

    With `is_packed`, the tokens are one causal sequence, whatever the mask.
    """

    def __init__(self, hear: Callable[[_Asked], None], *, is_packed: bool):
        self._hear = hear
        self._is_packed = is_packed

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float,
        sinks: torch.Tensor | None,
        mask: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        self._hear(_Asked(module, key, value, window, mask, bias))
        out, _ = vmkv_attention(
            module,
            query,
            key,
            value,
            None if self._is_packed else mask,
            scale,
            0.0,
            window,
            softcap,
            sinks,
            is_causal=True if self._is_packed else None,
            position_bias=bias,
        )
        return out


def _window(num_tokens: int | None) -> str:
    return "all tokens" if num_tokens is None else f"{num_tokens} tokens"


def explained(error: Exception, what: str) -> Exception:
    """Wrap the error of a failed pass, unless it is vmkv's own or out of memory."""
    if isinstance(error, (VMKVError, torch.OutOfMemoryError)):
        return error
    message = str(error).partition("\n")[0][:200]
    return UnservableError(f"{what} ({type(error).__name__}{': ' if message else ''}{message})")
