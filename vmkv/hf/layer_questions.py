"""Checks of a model's layers before rows serve them: their keys and values, and their windows.

Two tokens go through the model. A listener stands in for a packed step: it reports how each layer
calls attention, and attends without a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import VMKVError
from ..step.row_attention import LayerCall
from .attention import attend_to_tensors, attending_in_place
from .configuration import LayerKind, UnservableError
from .store import Signature


def layer_signatures(
    model: Any, kinds: Sequence[LayerKind], token_ids: torch.Tensor
) -> dict[int, Signature]:
    """Return all layers' key and value signatures, from a packed pass over `[T]` tokens."""
    signatures: dict[int, Signature] = {}

    def hear(module: torch.nn.Module, asked: LayerCall) -> torch.Tensor:
        index: Any = getattr(module, "layer_idx", None)
        if index is None:
            raise UnservableError(f"{type(module).__name__} does not say which layer it is")
        index = int(index)
        if index in signatures:
            raise UnservableError(f"its layer {index} attends more than once in a pass")
        if asked.mask is not None and not getattr(asked.mask, "_vmkv_placeholder", False):
            raise UnservableError(f"its layer {index} attends with a mask of the model's own")
        if asked.bias is not None:
            raise UnservableError(f"its layer {index} adds a bias of the model's own to scores")
        signatures[index] = Signature.of(asked.key, asked.value)
        # Packed tokens are one causal sequence, whatever the mask.
        return attend_to_tensors(asked._replace(mask=None), causal=True)

    placeholder = torch.empty((1, 1, 1, 1), dtype=torch.bool, device=token_ids.device)
    placeholder._vmkv_placeholder = True  # type: ignore[attr-defined]
    with attending_in_place(model):
        try:
            model(
                input_ids=token_ids[None],
                position_ids=torch.arange(len(token_ids), device=token_ids.device)[None],
                attention_mask=placeholder,
                use_cache=False,
                vmkv_batch=hear,
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

    def hear(module: torch.nn.Module, asked: LayerCall) -> torch.Tensor:
        recipe = getattr(asked.mask, "_vmkv_recipe", None)
        if recipe is not None:
            windows[int(vars(module)["layer_idx"])] = (asked.window, recipe.window)
        return attend_to_tensors(asked, causal=getattr(module, "is_causal", True))

    with attending_in_place(model):
        try:
            model(input_ids=token_ids[None], use_cache=False, return_dict=True, vmkv_batch=hear)
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


def _window(num_tokens: int | None) -> str:
    return "all tokens" if num_tokens is None else f"{num_tokens} tokens"


def explained(error: Exception, what: str) -> Exception:
    """Wrap the error of a failed pass, unless it is vmkv's own or out of memory."""
    if isinstance(error, (VMKVError, torch.OutOfMemoryError)):
        return error
    message = str(error).partition("\n")[0][:200]
    return UnservableError(f"{what} ({type(error).__name__}{': ' if message else ''}{message})")
