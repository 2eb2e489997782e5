"""Backends: the only code that calls a driver. `base.py` is the contract."""

from __future__ import annotations

from ...errors import ConfigError
from .base import PRIMITIVES as PRIMITIVES
from .base import Access as Access
from .base import AccessOp as AccessOp
from .base import Backend as Backend
from .base import BackendUsage as BackendUsage
from .base import CopyOp as CopyOp
from .base import Fence as Fence
from .base import MapOp as MapOp
from .base import MemoryLocation as MemoryLocation
from .base import Op as Op
from .base import UnmapOp as UnmapOp
from .forwarding import ForwardingBackend as ForwardingBackend
from .forwarding import forwarded as forwarded
from .host import HostBackend as HostBackend


def open_backend(device: str) -> Backend:
    """Open the backend of `device`: `"host"` (or `"cpu"`), `"cuda"`, `"cuda:1"` …

    Raises:
        ConfigError: The name is unknown, or the device's driver is missing.
    """
    kind, _, index = device.partition(":")
    if kind in ("host", "cpu"):
        return HostBackend()
    if kind == "cuda" and (not index or index.isdecimal()):
        # Imported here so that a machine without cuda-python can use the host.
        from .cuda import CudaBackend

        return CudaBackend(int(index or 0))
    raise ConfigError(f'unknown backend {device!r}; known are "host", "cuda" and "cuda:N"')
