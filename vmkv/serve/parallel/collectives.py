"""Collectives of the layers, as operators that are opaque to a compiler.

Operators take tensors and numbers, so they look their group up by name. Sums use the one-shot
kernel (`one_shot.py`) where it can serve, other sums and gathers NCCL, or gloo on CPUs. Compiled
layers use `norm_of_sum_` (`step/graph_passes.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .one_shot import OneShotSums, has_rows, norm_after_sum

#: One-shot sums by group name, for groups that have them.
_ONE_SHOT: dict[str, OneShotSums | None] = {}

# torch leaves the library untyped.
_LIBRARY: Any = torch.library.Library("vmkv", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("all_reduce_(Tensor(a!) part, str group) -> ()")
_LIBRARY.define(
    "norm_of_sum_(Tensor(a!) part, Tensor residual, Tensor weight, float epsilon, str group)"
    " -> Tensor"
)
_LIBRARY.define("all_gather(Tensor part, str group, int size) -> Tensor")


def _group(name: str) -> Any:
    c10d: Any = dist.distributed_c10d
    return c10d._resolve_process_group(name)


def register(name: str, sums: OneShotSums | None) -> None:
    """Use `sums` for a group's sums, or NCCL and gloo if None; replaces an earlier registration."""
    _ONE_SHOT[name] = sums


def _all_reduce_(part: torch.Tensor, group: str) -> None:
    sums = _ONE_SHOT.get(group)
    if sums is not None and sums.takes(part):
        sums.add(part)
    else:
        dist.all_reduce(part, group=_group(group))


def _norm_of_sum_(
    part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, group: str
) -> torch.Tensor:
    """Add all ranks' parts and the residual into `part`; return the RMS norm of the sum."""
    residual, weight = residual.contiguous(), weight.contiguous()
    has = has_rows(part) and has_rows(residual) and has_rows(weight)
    sums = _ONE_SHOT.get(group)
    if has and sums is not None and sums.takes(part, is_with_norm=True):
        return sums.add_norm(part, residual, weight, epsilon)
    _all_reduce_(part, group)
    if has:
        return norm_after_sum(part, residual, weight, epsilon)
    # The modules' own arithmetic.
    whole = part.add_(residual).to(torch.float32)
    scaled = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * scaled.to(part.dtype)


def _all_gather(part: torch.Tensor, group: str, size: int) -> torch.Tensor:
    out = part.new_empty((size * part.shape[0], *part.shape[1:]))
    # torch 2.13 deprecates `all_gather_into_tensor` in favour of `all_gather_single`.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, part.contiguous(), group=_group(group))
    return out.view(size, *part.shape)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("all_reduce_", _all_reduce_, _key)
    _LIBRARY.impl("norm_of_sum_", _norm_of_sum_, _key)
    _LIBRARY.impl("all_gather", _all_gather, _key)
torch.library.register_fake("vmkv::all_reduce_", lambda part, group: None, lib=_LIBRARY)
torch.library.register_fake(
    "vmkv::norm_of_sum_", lambda part, *_: torch.empty_like(part), lib=_LIBRARY
)
torch.library.register_fake(
    "vmkv::all_gather", lambda part, _, size: part.new_empty((size, *part.shape)), lib=_LIBRARY
)


def all_reduce(part: torch.Tensor, group: str) -> torch.Tensor:
    """Sum all ranks' parts, bitwise equal on each rank; in place if `part` is contiguous."""
    part = part.contiguous()
    if torch.compiler.is_compiling() and part.numel() == part.shape[-1]:
        # The compiler generates kernels for products of one row, and would write such a part twice
        # and copy the sum between them, unless its strides are fixed.
        part = part.as_strided(part.shape, part.stride())
    torch.ops.vmkv.all_reduce_(part, group)
    return part


def all_gather(part: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Stack all ranks' parts `[…]` to `[size, …]`, in the order of the ranks."""
    out: torch.Tensor = torch.ops.vmkv.all_gather(part, group, size)
    return out
