"""A kernel that mixes decode steps and prompts, and one that does not, for the host."""

from __future__ import annotations

import torch

from vmkv.attention import AttentionSpec, Call, register
from vmkv.attention.sdpa import SdpaBackend


class Mixing(SdpaBackend):
    """SDPA as a kernel that mixes and that writes to a given output.

    Attributes:
        launches: Numbers of queries and of sequences of each launch.
        written: Number of launches with a given output.
    """

    name = "mixing"

    def __init__(self) -> None:
        self.launches: list[tuple[int, int]] = []
        self.written = 0

    def mixes(self, spec: AttentionSpec) -> bool:
        return True

    def attend(self, call: Call) -> torch.Tensor:
        """Attend as SDPA does, and copy into `call.out`."""
        self.launches.append((call.query.shape[0], call.batch.batch_size))
        out = super().attend(call)
        if call.out is None:
            return out
        self.written += 1
        return call.out.copy_(out)


class Parting(Mixing):
    """The same kernel with a launch for each kind of piece."""

    name = "parting"

    def mixes(self, spec: AttentionSpec) -> bool:
        return False


BACKENDS: dict[str, Mixing] = {each.name: each() for each in (Mixing, Parting)}
for _name, _backend in BACKENDS.items():
    register(_name, lambda backend=_backend: backend)
