"""A device, and a host, with less memory than their users may think."""

from __future__ import annotations

from typing import Any

from vmkv.core.backend import ForwardingBackend, MemoryLocation
from vmkv.errors import DriverError
from vmkv.units import Handle

#: More than any test takes.
UNLIMITED_BYTES = 1 << 40


class LimitedDevice(ForwardingBackend):
    """Refuses to create more than `device_bytes` and `host_bytes`; counts what it refused."""

    device_bytes = host_bytes = UNLIMITED_BYTES
    num_refused = 0

    def mem_create(
        self, num_bytes: int, location: MemoryLocation = MemoryLocation.DEVICE, **how: Any
    ) -> Handle:
        """Create memory, unless it is full."""
        usage, is_device = self.usage(), location is MemoryLocation.DEVICE
        held_bytes = usage.physical_bytes if is_device else usage.host_bytes
        if held_bytes + num_bytes > (self.device_bytes if is_device else self.host_bytes):
            self.num_refused += 1
            raise DriverError("mem_create", 2, "FULL", "no memory left", is_out_of_memory=True)
        return self.upstream.mem_create(num_bytes, location, **how)

    def free_memory_bytes(self) -> int:
        """Bytes of the device that are left."""
        return max(0, self.device_bytes - self.usage().physical_bytes)
