"""Read and write a backend's memory from a test, without torch.

On CUDA the driver copies on the legacy default stream, by way of a buffer in device memory: it
would copy between CPU memory and mapped host memory with the CPU, which has no access to the latter
unless granted (a segmentation fault on driver 580).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

from ..core.backend import Backend
from ..errors import ConfigError

_DLPACK_CPU = 1
_DLPACK_CUDA = 2
_STREAM = 0  # The legacy default stream.


def read_bytes(backend: Backend, address: int, num_bytes: int) -> bytes:
    """Read a readable range; ConfigError if the kit cannot access this DLPack device type."""
    if backend.dlpack_device[0] == _DLPACK_CPU:
        return ctypes.string_at(address, num_bytes)
    staging = ctypes.create_string_buffer(num_bytes)
    with _cuda_buffer(backend, num_bytes) as (driver, buffer):
        _check(driver, driver.cuMemcpyAsync(buffer, int(address), num_bytes, _STREAM))
        _check(driver, driver.cuStreamSynchronize(_STREAM))
        _check(driver, driver.cuMemcpyDtoH(ctypes.addressof(staging), buffer, num_bytes))
    return staging.raw


def write_bytes(backend: Backend, address: int, data: bytes) -> None:
    """Write `data` at `address`; ConfigError if the kit cannot access this device type."""
    if backend.dlpack_device[0] == _DLPACK_CPU:
        ctypes.memmove(address, data, len(data))
        return
    staging = ctypes.create_string_buffer(data, len(data))
    with _cuda_buffer(backend, len(data)) as (driver, buffer):
        _check(driver, driver.cuMemcpyHtoD(buffer, ctypes.addressof(staging), len(data)))
        _check(driver, driver.cuMemcpyAsync(int(address), buffer, len(data), _STREAM))
        _check(driver, driver.cuStreamSynchronize(_STREAM))


@contextlib.contextmanager
def _cuda_buffer(backend: Backend, num_bytes: int) -> Iterator[tuple[Any, int]]:
    """Allocate device memory in the primary context of the backend's device."""
    device_type, device_index = backend.dlpack_device
    if device_type != _DLPACK_CUDA:
        raise ConfigError(f"cannot reach memory of DLPack device type {device_type} from here")
    from cuda.bindings import driver

    with contextlib.ExitStack() as undo:
        device = _check(driver, driver.cuDeviceGet(device_index))
        context = _check(driver, driver.cuDevicePrimaryCtxRetain(device))
        undo.callback(driver.cuDevicePrimaryCtxRelease, device)
        _check(driver, driver.cuCtxPushCurrent(context))
        undo.callback(driver.cuCtxPopCurrent)
        buffer = _check(driver, driver.cuMemAlloc(num_bytes))
        undo.callback(driver.cuMemFree, buffer)
        yield driver, int(buffer)


def _check(driver: Any, answer: Any) -> Any:
    """Return the value of a driver call, if it has one."""
    if answer[0] != driver.CUresult.CUDA_SUCCESS:
        raise AssertionError(f"the kit's own access to device memory failed with {answer[0]!r}")
    return answer[-1]
