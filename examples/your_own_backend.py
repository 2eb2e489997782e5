"""Write your own backend, and let the conformance kit say whether it is one.

`SmallDevice` is a host that pretends to have little memory: a GPU to run out of, on a laptop.
It overrides two primitives; a backend from scratch implements the abstract ones of
`vmkv/core/backend/base.py`. Either way `check_backend` is the judge.
"""

import torch

from vmkv import DriverError, HostBackend, KVCache, OutOfPagesError
from vmkv.core.backend import MemoryLocation
from vmkv.testing import check_backend
from vmkv.units import Handle, KiB, MiB, align_up

DEVICE = MemoryLocation.DEVICE


class SmallDevice(HostBackend):
    """Memory of the host, `capacity_bytes` of it and no more."""

    def __init__(self, capacity_bytes: int = 16 * MiB):
        super().__init__(granularity_bytes=64 * KiB)
        self.capacity_bytes = capacity_bytes

    def mem_create(
        self, num_bytes: int, location: MemoryLocation = DEVICE, *, shareable: bool = False
    ) -> Handle:
        """Refuse what does not fit, the way a driver does: say so, and change nothing."""
        if location is DEVICE and num_bytes > self.free_memory_bytes():
            raise DriverError("mem_create", 2, "OUT_OF_MEMORY", is_out_of_memory=True)
        return super().mem_create(num_bytes, location, shareable=shareable)

    def free_memory_bytes(self) -> int:
        return self.capacity_bytes - self.usage().physical_bytes


class HelpfulDevice(SmallDevice):
    """The same, but kind to callers whose sizes are odd. A driver is not, so this is a bug."""

    def mem_create(self, num_bytes: int, *where: MemoryLocation, **options: bool) -> Handle:
        return super().mem_create(align_up(num_bytes, self.granularity_bytes), *where, **options)


print(f"SmallDevice passes all {check_backend(SmallDevice)} checks of the contract.")
try:
    check_backend(HelpfulDevice)
except AssertionError as error:
    print(f"HelpfulDevice fails {error}\n")

# Whatever passes can carry a cache. This one is full before long, and says so politely.
with KVCache(SmallDevice(), max_tokens=1 << 20, max_sequences=1, budget_bytes=1 << 30) as cache:
    cache.add_layers(range(4), num_kv_heads=4, head_dim=64, dtype=torch.float16)
    sequence = cache.open()
    try:
        while True:
            sequence.append(512)
    except OutOfPagesError as error:
        print(f"{sequence} cannot grow: {error}")
    print(f"It is as it was, and usable: {cache.stats()}")
