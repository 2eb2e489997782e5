"""Find the objects that keep tensors over a cache alive, for the message of a failing test."""

from __future__ import annotations

import gc
import types
from typing import Any

import torch

_DEPTH = 6


def holders_of_views() -> str:
    """Chains of types of objects that refer to large CPU tensors of four or more dimensions.

    Contents are never shown, because their memory may be unmapped.
    """
    lines: list[str] = []
    seen: set[int] = {id(lines)}
    for each in gc.get_objects():
        if type(each) is torch.Tensor and each.ndim >= 4 and each.numel() > 1 << 20:
            lines.append(f"tensor {tuple(each.shape)}")
            _climb(each, 1, seen, lines)
    return "\n".join(lines)


def _climb(held: Any, depth: int, seen: set[int], lines: list[str]) -> None:
    if depth > _DEPTH:
        return
    for holder in gc.get_referrers(held):
        is_ours = isinstance(holder, types.FrameType) and holder.f_code.co_filename == __file__
        if id(holder) in seen or is_ours or isinstance(holder, types.ModuleType):
            continue
        seen.add(id(holder))
        lines.append("  " * depth + _name(holder))
        _climb(holder, depth + 1, seen, lines)


def _name(held: Any) -> str:
    if isinstance(held, types.FrameType):
        return f"frame of {held.f_code.co_name}, {held.f_code.co_filename}:{held.f_lineno}"
    if isinstance(held, dict):
        return f"dict of {', '.join(str(key)[:20] for key in list(held)[:8])}"
    if isinstance(held, BaseException):
        return f"{type(held).__name__}: {str(held)[:100]}"
    return f"{type(held).__module__}.{type(held).__qualname__}"
