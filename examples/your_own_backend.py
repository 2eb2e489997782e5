"""Write your own backend, and check it with the conformance kit.

`SmallDevice` is a host that pretends to have little memory: a GPU to run out of, on a laptop.
It overrides two primitives; a backend from scratch implements the abstract ones of
`vmkv/core/backend/base.py`. `check_backend` tests either of them.
"""

import torch

from vmkv import DriverError, HostBackend, KVCache, OutOfPagesError
from vmkv.core.backend import MemoryLocation
from vmkv.testing import check_backend
from vmkv.units import Handle, KiB, MiB, align_up

DEVICE = MemoryLocation.DEVICE


class SmallDevice(HostBackend):
    """Host memory of at most `capacity_bytes`."""

    def __init__(self, capacity_bytes: int = 16 * MiB):
        super().__init__(granularity_bytes=64 * KiB)
        self.capacity_bytes = capacity_bytes

    def mem_create(
        self, num_bytes: int, location: MemoryLocation = DEVICE, *, shareable: bool = False
    ) -> Handle:
        """Refuse a size that does not fit, as a driver does: with an error and without a change."""
        if location is DEVICE and num_bytes > self.free_memory_bytes():
            raise DriverError("mem_create", 2, "OUT_OF_MEMORY", is_out_of_memory=True)
        return super().mem_create(num_bytes, location, shareable=shareable)

    def free_memory_bytes(self) -> int:
        return self.capacity_bytes - self.usage().physical_bytes


class HelpfulDevice(SmallDevice):
    """A `SmallDevice` that rounds odd sizes up. A driver refuses them, so this is a bug."""

    def mem_create(self, num_bytes: int, *where: MemoryLocation, **options: bool) -> Handle:
        return super().mem_create(align_up(num_bytes, self.granularity_bytes), *where, **options)


print(f"SmallDevice passes all {check_backend(SmallDevice)} checks of the contract.")
try:
    check_backend(HelpfulDevice)
except AssertionError as error:
    print(f"HelpfulDevice fails {error}\n")

# A backend that passes can hold a cache. This one is soon full, and raises an error that says so.
with KVCache(SmallDevice(), max_tokens=1 << 20, max_sequences=1, budget_bytes=1 << 30) as cache:
    cache.add_layers(range(4), num_kv_heads=4, head_dim=64, dtype=torch.float16)
    sequence = cache.open()
    try:
        while True:
            sequence.append(512)
    except OutOfPagesError as error:
        print(f"{sequence} cannot grow: {error}")
    print(f"It is as it was, and usable: {cache.stats()}")
