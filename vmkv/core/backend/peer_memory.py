"""Memory of one GPU that processes on other GPUs of the machine read and write.

CUDA's handles between processes, which take plain allocations. Unlike what a backend creates it is
never mapped anew, so it has no place in a pool's books.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any

from ...errors import ConfigError, CudaDriverError

_HANDLE_BYTES = 64


class PeerMemory:
    """Zeroed memory on the device whose context is current.

    Args:
        num_bytes: How much; as much for all who share.

    Attributes:
        address: Where it lies in this process.
        handle: What other processes open it with; equally long for all.

    Raises:
        ConfigError: There is no cuda-python.
        CudaDriverError: The device has no such memory, or none that others may open.
    """

    def __init__(self, num_bytes: int):
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise ConfigError(f"there is no cuda-python: {error}") from error
        self._driver = driver
        with contextlib.ExitStack() as undo:
            self.address = int(_checked("alloc", driver.cuMemAlloc(num_bytes)))
            undo.callback(driver.cuMemFree, self.address)
            _checked("set", driver.cuMemsetD8(self.address, 0, num_bytes))
            # Nobody is told of it before it is zero.
            _checked("synchronize", driver.cuCtxSynchronize())
            handle = _checked("export", driver.cuIpcGetMemHandle(self.address))
            self.handle = ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)
            self._undo = undo.pop_all()

    def open(self, handles: Sequence[bytes]) -> list[int]:
        """Addresses, in this process, of the memory of all who share.

        Args:
            handles: Theirs; this one's own among them.

        Raises:
            CudaDriverError: There is no way to one of them.
        """
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
        """Give it back, and let go of the others'. Once nobody uses it any more. Idempotent."""
        self._undo.close()


def _checked(call: str, answer: tuple[Any, ...]) -> Any:
    status, *results = answer
    if int(status):
        message = "memory cannot be shared between GPUs"
        raise CudaDriverError(call, int(status), str(status), message)
    return results[0] if results else None
