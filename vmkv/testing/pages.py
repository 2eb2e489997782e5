"""The set-up that the backend checks share: reserved pages, what is mapped in them, and its bytes.

Bytes are read and written without torch. On CUDA the driver copies on the legacy default stream, by
way of a buffer in device memory: it would copy between CPU memory and mapped host memory with the
CPU, which has no access to the latter unless granted (a segmentation fault on driver 580).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ..core.backend import (
    Access,
    AccessOp,
    Backend,
    BackendUsage,
    MapOp,
    MemoryLocation,
    Op,
    UnmapOp,
)
from ..core.backend.cuda import checked
from ..errors import ConfigError, DriverError
from ..units import Address, Handle

# ---- bytes ---------------------------------------------------------------------------------------

_DLPACK_CPU = 1
_DLPACK_CUDA = 2
_STREAM = 0  # The legacy default stream.
_checked = partial(checked, "the kit's own access")


def read_bytes(backend: Backend, address: int, num_bytes: int) -> bytes:
    """Read a readable range; ConfigError if the kit cannot access this DLPack device type."""
    if backend.dlpack_device[0] == _DLPACK_CPU:
        return ctypes.string_at(address, num_bytes)
    staging = ctypes.create_string_buffer(num_bytes)
    with _cuda_buffer(backend, num_bytes) as (driver, buffer):
        _checked(driver.cuMemcpyAsync(buffer, int(address), num_bytes, _STREAM))
        _checked(driver.cuStreamSynchronize(_STREAM))
        _checked(driver.cuMemcpyDtoH(ctypes.addressof(staging), buffer, num_bytes))
    return staging.raw


def write_bytes(backend: Backend, address: int, data: bytes) -> None:
    """Write `data` at `address`; ConfigError if the kit cannot access this device type."""
    if backend.dlpack_device[0] == _DLPACK_CPU:
        ctypes.memmove(address, data, len(data))
        return
    staging = ctypes.create_string_buffer(data, len(data))
    with _cuda_buffer(backend, len(data)) as (driver, buffer):
        _checked(driver.cuMemcpyHtoD(buffer, ctypes.addressof(staging), len(data)))
        _checked(driver.cuMemcpyAsync(int(address), buffer, len(data), _STREAM))
        _checked(driver.cuStreamSynchronize(_STREAM))


@contextlib.contextmanager
def _cuda_buffer(backend: Backend, num_bytes: int) -> Iterator[tuple[Any, int]]:
    """Allocate device memory in the primary context of the backend's device."""
    device_type, device_index = backend.dlpack_device
    if device_type != _DLPACK_CUDA:
        raise ConfigError(f"cannot reach memory of DLPack device type {device_type} from here")
    from cuda.bindings import driver

    with contextlib.ExitStack() as undo:
        device = _checked(driver.cuDeviceGet(device_index))
        context = _checked(driver.cuDevicePrimaryCtxRetain(device))
        undo.callback(driver.cuDevicePrimaryCtxRelease, device)
        _checked(driver.cuCtxPushCurrent(context))
        undo.callback(driver.cuCtxPopCurrent)
        buffer = _checked(driver.cuMemAlloc(num_bytes))
        undo.callback(driver.cuMemFree, buffer)
        yield driver, int(buffer)


# ---- pages ---------------------------------------------------------------------------------------

RW = Access.READ_WRITE


def expect(wanted: object, got: object, what: str) -> None:
    """Raise unless `wanted == got`."""
    if wanted != got:
        raise AssertionError(f"{what}: wanted {wanted}, got {got}")


class Pages:
    """A reservation of some pages, numbered from 0; it remembers what it has to give back."""

    def __init__(self, backend: Backend, num_pages: int):
        self.backend = backend
        self.page_bytes = backend.granularity_bytes
        self.num_bytes = num_pages * self.page_bytes
        self.address = backend.address_reserve(self.num_bytes)
        self._handles: list[Handle] = []
        self._mappings: dict[Address, int] = {}

    def at(self, page: int, offset: int = 0) -> Address:
        """Address of a byte in a page."""
        return Address(self.address + page * self.page_bytes + offset)

    def run(self, page: int, num_pages: int = 1) -> tuple[Address, int]:
        """Address and size of a run of pages."""
        return self.at(page), num_pages * self.page_bytes

    # ---- memory ---------------------------------------------------------------------------

    def create(
        self,
        num_pages: int = 1,
        location: MemoryLocation = MemoryLocation.DEVICE,
        *,
        shareable: bool = False,
    ) -> Handle:
        """Create memory of `num_pages`."""
        size = num_pages * self.page_bytes
        handle = self.backend.mem_create(size, location, shareable=shareable)
        self._handles.append(handle)
        return handle

    def imported(self, handle: Handle, num_pages: int = 1) -> Handle:
        """Export a handle and import it."""
        fd = self.backend.mem_export(handle)
        try:
            self._handles.append(self.backend.mem_import(fd, num_pages * self.page_bytes))
        finally:
            os.close(fd)
        return self._handles[-1]

    def release(self, *handles: Handle) -> None:
        """Release handles."""
        for handle in handles:
            self.backend.mem_release(handle)
            self._handles.remove(handle)

    # ---- mappings -------------------------------------------------------------------------

    def execute(self, ops: Sequence[Op]) -> None:
        """Execute a batch; unmaps before a failing one have happened."""
        num_done = len(ops)
        try:
            self.backend.execute(ops)
        except DriverError as error:
            num_done = error.num_done if isinstance(ops[0], UnmapOp) else 0
            raise
        finally:
            for op in ops[:num_done]:
                if isinstance(op, MapOp):
                    self._mappings[op.address] = op.num_bytes
                elif isinstance(op, UnmapOp):
                    inside = range(op.address, op.address + op.num_bytes)
                    for address in [each for each in self._mappings if each in inside]:
                        del self._mappings[address]

    def map(self, page: int, handle: Handle, num_pages: int = 1, access: Access = RW) -> None:
        """Map a handle of `num_pages` with `access`."""
        run = self.run(page, num_pages)
        self.execute([MapOp(*run, handle), AccessOp(*run, access)])

    def mapped(
        self, page: int = 0, num_pages: int = 1, location: MemoryLocation = MemoryLocation.DEVICE
    ) -> Handle:
        """Create memory and map it, readable and writable."""
        handle = self.create(num_pages, location)
        self.map(page, handle, num_pages)
        return handle

    def unmap(self, page: int = 0, num_pages: int = 1) -> None:
        """Unmap a run of whole mappings."""
        self.execute([UnmapOp(*self.run(page, num_pages))])

    # ---- contents -------------------------------------------------------------------------

    def filled(self, byte: int, page: int = 0, num_pages: int = 1) -> bytes:
        """Fill a run of pages with a byte; returns the expected bytes."""
        data = bytes([byte]) * (num_pages * self.page_bytes)
        write_bytes(self.backend, self.at(page), data)
        return data

    def holds(self, wanted: bytes, what: str, page: int = 0) -> None:
        """Raise unless memory from `page` on begins with these bytes."""
        starts = range(0, len(wanted), self.page_bytes)  # A read may not span two locations.
        sizes = [min(self.page_bytes, len(wanted) - start) for start in starts]
        parts = [
            read_bytes(self.backend, self.at(page, start), size)
            for start, size in zip(starts, sizes, strict=True)
        ]
        expect(wanted, b"".join(parts), what)

    # ---- books ----------------------------------------------------------------------------

    def counts(self, what: str, **wanted: int) -> None:
        """Raise unless the usage is the reservation and `wanted`; its bytes are given in pages."""
        for field in [each for each in wanted if each.endswith("_bytes")]:
            wanted[field] *= self.page_bytes
        own = {"num_reservations": 1, "reserved_bytes": self.num_bytes}
        expect(BackendUsage(**{**own, **wanted}), self.backend.usage(), f"usage, {what}")

    def refuses(self, call: str, what: str, *args: object, by: str = "") -> DriverError:
        """Raise unless `call`, or the method `by` that makes it, is refused and changes nothing."""
        before = self.backend.usage()
        try:
            getattr(self.backend, by or call)(*args)
        except DriverError as error:
            expect(call, error.call, f"the primitive that the refusal names ({what})")
            expect(before, self.backend.usage(), f"usage after {call} refused {what}")
            return error
        raise AssertionError(f"{call} must refuse {what}")

    def give_back(self) -> None:
        """Unmap, release and free everything."""
        self.execute([UnmapOp(address, size) for address, size in self._mappings.items()])
        self.release(*self._handles)
        self.backend.address_free(self.address, self.num_bytes)
