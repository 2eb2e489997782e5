"""A kernel that mixes, on any machine, and one that does not; both can be selected by name."""

from __future__ import annotations

import torch

from vmkv.attention import AttentionSpec, Call, register
from vmkv.attention.sdpa import SdpaBackend


class Mixing(SdpaBackend):
    """Torch's kernel as one that mixes, and that writes where it is told to.

    Attributes:
        launches: How many queries each had, and of how many sequences.
        written: How many were told where to write.
    """

    name = "mixing"

    def __init__(self) -> None:
        self.launches: list[tuple[int, int]] = []
        self.written = 0

    def mixes(self, spec: AttentionSpec) -> bool:
        """Always."""
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
    """The same, with a launch for each kind."""

    name = "parting"

    def mixes(self, spec: AttentionSpec) -> bool:
        """Never."""
        return False


BACKENDS: dict[str, Mixing] = {each.name: each() for each in (Mixing, Parting)}
for _name, _backend in BACKENDS.items():
    register(_name, lambda backend=_backend: backend)
