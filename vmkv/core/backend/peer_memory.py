"""Memory of one GPU that processes on other GPUs of the machine read and write, by CUDA IPC."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from functools import partial

from .cuda import checked

_HANDLE_BYTES = 64
_checked = partial(checked, details="memory cannot be shared between GPUs")


class PeerMemory:
    """Zeroed memory on the device whose context is current; `num_bytes` is equal for all sharers.

    `handle` is what other processes `open`. CudaDriverError if the device has no memory that others
    may open.
    """

    def __init__(self, num_bytes: int):
        from cuda.bindings import driver

        self._driver = driver
        with contextlib.ExitStack() as undo:
            self.address = int(_checked("alloc", driver.cuMemAlloc(num_bytes)))
            undo.callback(driver.cuMemFree, self.address)
            _checked("set", driver.cuMemsetD8(self.address, 0, num_bytes))
            # Zero before the handle is published.
            _checked("synchronize", driver.cuCtxSynchronize())
            handle = _checked("export", driver.cuIpcGetMemHandle(self.address))
            self.handle = ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)
            self._undo = undo.pop_all()

    def open(self, handles: Sequence[bytes]) -> list[int]:
        """Map the memory of all sharers, this one included, and return their addresses here."""
        driver, addresses = self._driver, []
        reach = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        for data in handles:
            if data == self.handle:
                addresses.append(self.address)
                continue
            handle = driver.CUipcMemHandle()
            ctypes.memmove(handle.getPtr(), data, _HANDLE_BYTES)
            address = int(_checked("import", driver.cuIpcOpenMemHandle(handle, reach)))
            self._undo.callback(driver.cuIpcCloseMemHandle, address)
            addresses.append(address)
        return addresses

    def close(self) -> None:
        """Free the memory and unmap the others', once no process uses it any more. Idempotent."""
        self._undo.close()
