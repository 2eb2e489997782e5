"""What layers exchange, as operators that a compiler calls and does not look into.

Operators take tensors and numbers, so they find their group by its name. A sum takes the place of
the part, whose contents nobody wants any more, instead of a copy beside each.

Sums are one kernel's (`one_shot.py`) where devices reach each other, among more than two ranks if
they are small; others, and what is gathered, are NCCL's, or of CPUs gloo's. `norm_of_sum_` is what
compiled layers make of a sum that is added to a residual and then put through a norm
(`step/norms_of_sums.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .one_shot import OneShotSums, has_rows, norm_after_sum

#: Of groups whose ranks add parts in one kernel, by the group's name.
_ONE_SHOT: dict[str, OneShotSums] = {}

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
    """Have parts of a group be added so, or as all others. Whoever had the name is gone."""
    if sums is None:
        _ONE_SHOT.pop(name, None)
    else:
        _ONE_SHOT[name] = sums


def _all_reduce_(part: torch.Tensor, group: str) -> None:
    sums = _ONE_SHOT.get(group)
    if sums is not None and sums.takes(part):
        sums.add(part)
    else:
        dist.all_reduce(part, group=_group(group))


def _norm_of_sum_(
    part: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    group: str,
) -> torch.Tensor:
    residual, weight = residual.contiguous(), weight.contiguous()
    has = has_rows(part) and has_rows(residual) and has_rows(weight)
    sums = _ONE_SHOT.get(group)
    if has and sums is not None and sums.takes_rows(part):
        return sums.add_norm(part, residual, weight, epsilon)
    _all_reduce_(part, group)
    if has:
        return norm_after_sum(part, residual, weight, epsilon)
    # As modules compute it.
    whole = part.add_(residual).to(torch.float32)
    scaled = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * scaled.to(part.dtype)


def _all_gather(part: torch.Tensor, group: str, size: int) -> torch.Tensor:
    out = part.new_empty((size * part.shape[0], *part.shape[1:]))
    # The second name since torch 2.13, which warns of the first.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, part.contiguous(), group=_group(group))
    return out.view(size, *part.shape)


def _shape_of_all_gather(part: torch.Tensor, group: str, size: int) -> torch.Tensor:
    return part.new_empty((size, *part.shape))


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("all_reduce_", _all_reduce_, _key)
    _LIBRARY.impl("norm_of_sum_", _norm_of_sum_, _key)
    _LIBRARY.impl("all_gather", _all_gather, _key)
torch.library.register_fake("vmkv::all_reduce_", lambda part, group: None, lib=_LIBRARY)
torch.library.register_fake(
    "vmkv::norm_of_sum_", lambda part, *_: torch.empty_like(part), lib=_LIBRARY
)
torch.library.register_fake("vmkv::all_gather", _shape_of_all_gather, lib=_LIBRARY)


def all_reduce(part: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of all ranks' parts, the same bits on each; takes the part's place if it can."""
    part = part.contiguous()
    if torch.compiler.is_compiling() and part.numel() == part.shape[-1]:
        # Products of one row are kernels of the compiler's, which would write such a part twice
        # and copy the sum from the one to the other, unless it must lie in memory just so.
        part = part.as_strided(part.shape, part.stride())
    torch.ops.vmkv.all_reduce_(part, group)
    return part


def norm_of_sum(
    part: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    group: str,
) -> torch.Tensor:
    """The norm of all ranks' parts and the residual, whose sum takes the place of `part`.

    Args:
        part: `[…, hidden]`, contiguous.
        residual: Likewise, the same on all ranks.
        weight: `[hidden]`, what the norm multiplies by; all three of one type.
        epsilon: Added to the mean of the squares.
        group: The ranks, by name.
    """
    out: torch.Tensor = torch.ops.vmkv.norm_of_sum_(part, residual, weight, epsilon, group)
    return out


def all_gather(part: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """`[size, …]` of all ranks' parts `[…]`, in the order of the ranks."""
    out: torch.Tensor = torch.ops.vmkv.all_gather(part, group, size)
    return out
