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
    device_type, device_index = backend.dlpack_device
    if device_type == _DLPACK_CPU:
        return ctypes.string_at(address, num_bytes)
    staging = ctypes.create_string_buffer(num_bytes)
    with _cuda_buffer(device_type, device_index, num_bytes) as (driver, buffer):
        _check(driver, driver.cuMemcpyAsync(buffer, int(address), num_bytes, _STREAM)[0])
        _check(driver, driver.cuStreamSynchronize(_STREAM)[0])
        _check(driver, driver.cuMemcpyDtoH(ctypes.addressof(staging), buffer, num_bytes)[0])
    return staging.raw


def write_bytes(backend: Backend, address: int, data: bytes) -> None:
    """Write `data` at `address`; ConfigError if the kit cannot access this device type."""
    device_type, device_index = backend.dlpack_device
    if device_type == _DLPACK_CPU:
        ctypes.memmove(address, data, len(data))
        return
    staging = ctypes.create_string_buffer(data, len(data))
    with _cuda_buffer(device_type, device_index, len(data)) as (driver, buffer):
        _check(driver, driver.cuMemcpyHtoD(buffer, ctypes.addressof(staging), len(data))[0])
        _check(driver, driver.cuMemcpyAsync(int(address), buffer, len(data), _STREAM)[0])
        _check(driver, driver.cuStreamSynchronize(_STREAM)[0])


@contextlib.contextmanager
def _cuda_buffer(device_type: int, device_index: int, num_bytes: int) -> Iterator[tuple[Any, int]]:
    with _cuda_context(device_type, device_index) as driver:
        status, buffer = driver.cuMemAlloc(num_bytes)
        _check(driver, status)
        try:
            yield driver, int(buffer)
        finally:
            driver.cuMemFree(buffer)


@contextlib.contextmanager
def _cuda_context(device_type: int, device_index: int) -> Iterator[Any]:
    if device_type != _DLPACK_CUDA:
        raise ConfigError(f"cannot reach memory of DLPack device type {device_type} from here")
    from cuda.bindings import driver

    status, device = driver.cuDeviceGet(device_index)
    _check(driver, status)
    status, context = driver.cuDevicePrimaryCtxRetain(device)
    _check(driver, status)
    _check(driver, driver.cuCtxPushCurrent(context)[0])
    try:
        yield driver
    finally:
        driver.cuCtxPopCurrent()
        driver.cuDevicePrimaryCtxRelease(device)


def _check(driver: Any, status: Any) -> None:
    if status != driver.CUresult.CUDA_SUCCESS:
        raise AssertionError(f"the kit's own access to device memory failed with {status!r}")
