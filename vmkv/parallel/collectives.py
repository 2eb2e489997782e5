"""What layers exchange, as operators that a compiler calls and does not look into.

Operators take tensors and numbers, so they find their group by its name. A sum takes the place of
the part, whose contents nobody wants any more: a copy beside each would take a fifth of its time.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ConfigError

#: More than that is added by NCCL, which then has more bandwidth.
ONE_SHOT_BYTES = 4 << 20
KINDS = ("nccl", "one-shot")

# torch leaves the library untyped.
_LIBRARY: Any = torch.library.Library("vmkv", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("all_reduce_(Tensor(a!) part, str group) -> ()")
_LIBRARY.define("all_gather(Tensor part, str group, int size) -> Tensor")


class _OneShot:
    """Each rank adds all parts by itself, reading those of the others over NVLink."""

    def __init__(self, name: str):
        # An alpha, without types of its own that hold.
        symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
        self._name = name
        # Which would be set up for nothing: one-shot sums read the others' memory.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._buffer = symmetric.empty(ONE_SHOT_BYTES, dtype=torch.uint8, device="cuda")
        symmetric.rendezvous(self._buffer, name)

    def takes(self, part: torch.Tensor) -> bool:
        """Whether the part is small enough, and of whole 16 bytes."""
        return part.nbytes <= ONE_SHOT_BYTES and not part.nbytes % 16

    def add(self, part: torch.Tensor) -> None:
        """Leave the sum in its place; in the ranks' order, so that all have the same."""
        room = self._buffer[: part.nbytes].view(part.dtype)
        flat = part.view(-1)
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(room, flat, "sum", self._name, flat)


_ONE_SHOT: dict[str, _OneShot] = {}


def register(name: str, kind: str) -> None:
    """Have the group of that name add by `kind`. Of all its ranks at the same time.

    Raises:
        ConfigError: There is no such kind, or not for this device.
    """
    if kind not in KINDS:
        raise ConfigError(f"all_reduce={kind!r} is none of {', '.join(KINDS)}")
    if kind == "one-shot":
        if dist.get_backend() != "nccl":
            raise ConfigError('all_reduce="one-shot" is for CUDA devices')
        _ONE_SHOT[name] = _OneShot(name)


def withdraw(name: str) -> None:
    """Forget the group. Idempotent."""
    _ONE_SHOT.pop(name, None)


def _group(name: str) -> Any:
    c10d: Any = dist.distributed_c10d
    return c10d._resolve_process_group(name)


def _all_reduce_(part: torch.Tensor, group: str) -> None:
    one_shot = _ONE_SHOT.get(group)
    if one_shot is not None and one_shot.takes(part):
        one_shot.add(part)
    else:
        dist.all_reduce(part, group=_group(group))


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
    _LIBRARY.impl("all_gather", _all_gather, _key)
torch.library.register_fake("vmkv::all_reduce_", lambda part, group: None, lib=_LIBRARY)
torch.library.register_fake("vmkv::all_gather", _shape_of_all_gather, lib=_LIBRARY)


def all_reduce(part: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of all ranks' parts, the same bits on each; takes the part's place if it can."""
    part = part.contiguous()
    torch.ops.vmkv.all_reduce_(part, group)
    return part


def all_gather(part: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """`[size, …]` of all ranks' parts `[…]`, in the order of the ranks."""
    out: torch.Tensor = torch.ops.vmkv.all_gather(part, group, size)
    return out
