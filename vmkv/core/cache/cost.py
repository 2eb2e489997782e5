"""The cost of driver calls and copies, which decides between sharing and copying memory.

A mapping costs the same for 2 MiB and for 64; a copy costs by the byte. Sharing also saves memory
for as long as it lasts: a sequence's life for a fork, one step for beams.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...units import MiB
from ..backend import Backend


@dataclass(frozen=True)
class CostModel:
    """Costs in microseconds; the defaults are an H200's (map and set-access 35, unmap 20).

    Attributes:
        map_us: Mapping an extent and granting access.
        unmap_us: Removing a mapping.
        copy_us_per_mib: Copying within the device, read and written.
        lasting_us_per_mib: Value of not holding a MiB twice for a sequence's life.
        passing_us_per_mib: Value of not holding a MiB twice for one step.
    """

    map_us: float = 35.0
    unmap_us: float = 20.0
    copy_us_per_mib: float = 0.5
    lasting_us_per_mib: float = 16.0
    passing_us_per_mib: float = 1.0

    @classmethod
    def of(cls, backend: Backend) -> CostModel:
        """Return the costs on a backend's device."""
        if backend.name == "host":
            # mmap and a fault or two; memcpy at 10 GB/s.
            return cls(map_us=5.0, unmap_us=5.0, copy_us_per_mib=100.0)
        return cls()

    def prefers_alias_in_fork(self, num_bytes: int) -> bool:
        """Whether a new row should map an extent of `num_bytes` again rather than copy it.

        The copy's own mapping is not counted: a tail that is copied needs one anyway.
        """
        worth_us_per_mib = self.copy_us_per_mib + self.lasting_us_per_mib
        return self.map_us <= worth_us_per_mib * num_bytes / MiB

    def prefers_alias_in_reorder(self, num_bytes: int) -> bool:
        """Whether to map an extent in a row rather than copy it there through a buffer."""
        worth_us_per_mib = 2 * self.copy_us_per_mib + self.passing_us_per_mib
        return self.map_us + self.unmap_us <= worth_us_per_mib * num_bytes / MiB
