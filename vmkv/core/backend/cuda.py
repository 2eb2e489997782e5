"""Virtual memory of one NVIDIA GPU, through `cuda.bindings.driver` (package cuda-python).

Map, access and unmap calls go through the native executor, since a Python thread may wait up to 5
ms for the interpreter lock after each call (384 mappings/s beside a busy thread, 28,000 in one
native call, on an H200). Calls for events and copies push the device's primary context.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from typing import Any

from ...errors import ConfigError, CudaDriverError
from ...units import Address, format_bytes
from ..interrupts import uninterrupted
from .base import Fence, MemoryLocation
from .booked import Allocation, BookedBackend, NativeCalls, describe

_DLPACK_CUDA = 2
_LOCATION_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_LOCATION_HOST_NUMA = 3  # CU_MEM_LOCATION_TYPE_HOST_NUMA
_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
_VMM_SINCE_CUDA = 10020  # The version of the entry points asked for.
#: The driver's functions, in the order of `NativeCalls`.
_CALLS = (b"cuMemMap", b"cuMemSetAccess", b"cuMemUnmap", b"cuMemcpyAsync", b"cuMemsetD8Async")


def checked(call: str, answer: tuple[Any, ...], details: str = "") -> Any:
    """Return the results of a cuda-python call, or raise `CudaDriverError` for its status."""
    status, *results = answer
    if int(status):
        raise _error_of(call, status, details)
    return results[0] if len(results) == 1 else tuple(results)


def _error_of(call: str, status: Any, details: str) -> CudaDriverError:
    is_full = status.name == "CUDA_ERROR_OUT_OF_MEMORY"
    return CudaDriverError(call, int(status), status.name, details, is_out_of_memory=is_full)


class CudaFence(Fence):
    """Events on every stream that had work on the cache's memory."""

    def __init__(self, backend: CudaBackend, events: list[Any]):
        self._backend = backend
        self._events = events

    def has_passed(self) -> bool:
        """Whether all events have passed. Cost: an event query, about 1 µs, until they have."""
        # Copied, since several threads may ask. An event recycled meanwhile by another thread may
        # stand for later work; the answer is then False at worst.
        if not all(map(self._backend.has_event_passed, tuple(self._events))):
            return False
        self._recycle()
        return True

    def wait(self) -> None:
        """Block until all events have passed."""
        for event in tuple(self._events):
            self._backend.wait_event(event)
        self._recycle()

    def _recycle(self) -> None:
        """Return the events, each once: `pop` is atomic for racing threads."""
        with contextlib.suppress(IndexError):
            while True:
                self._backend.recycle_event(self._events.pop())


class CudaBackend(BookedBackend):
    """CUDA virtual memory of one device; ConfigError if package, driver or device is missing."""

    _refused_status = _INVALID_VALUE

    def __init__(self, device_index: int = 0):
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise ConfigError(
                "the CUDA backend needs the package cuda-python (pip install cuda-python); "
                'on a machine without a GPU use backend="host"'
            ) from error
        self._driver = driver
        try:
            checked("init", driver.cuInit(0))
            num_devices = checked("init", driver.cuDeviceGetCount())
        except (RuntimeError, CudaDriverError) as error:
            # cuda-python raises RuntimeError where it cannot load libcuda at all.
            raise ConfigError(
                f"no usable CUDA driver on this machine ({error}); install the NVIDIA driver, "
                'or use backend="host"'
            ) from error
        if not 0 <= device_index < num_devices:
            raise ConfigError(f"there is no device cuda:{device_index}; found {num_devices}")
        self.name = f"cuda:{device_index}"
        self._device_index = device_index
        self._device = checked("init", driver.cuDeviceGet(device_index))
        self._context = checked("init", driver.cuDevicePrimaryCtxRetain(self._device))
        numa_id = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
        numa_node = int(checked("init", driver.cuDeviceGetAttribute(numa_id, self._device)))
        self._locations = {
            MemoryLocation.DEVICE: (_LOCATION_DEVICE, device_index),
            # -1 on a machine without NUMA nodes.
            MemoryLocation.HOST: (_LOCATION_HOST_NUMA, max(0, numa_node)),
        }
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        properties = self._properties(MemoryLocation.DEVICE, False)
        granularity = driver.cuMemGetAllocationGranularity(properties, minimum)
        super().__init__(int(checked("init", granularity)))
        calls = map(self._function_address, _CALLS)
        self._native_calls = NativeCalls._make([*calls, self._locations[MemoryLocation.DEVICE]])
        # A stream must not be destroyed while a fence is recorded on it.
        self._stream_lock = threading.Lock()
        self._streams: set[int] = set()
        self._events: list[Any] = []
        self._is_closed = False

    @property
    def dlpack_device(self) -> tuple[int, int]:
        """DLPack's CUDA device with this index."""
        return (_DLPACK_CUDA, self._device_index)

    # ---- address ranges -------------------------------------------------------------------

    def _reserve(self, num_bytes: int) -> int:
        answer = self._driver.cuMemAddressReserve(num_bytes, 0, 0, 0)
        return int(checked("address_reserve", answer))

    def _unreserve(self, address: Address, num_bytes: int) -> None:
        checked("address_free", self._driver.cuMemAddressFree(address, num_bytes))

    # ---- physical memory ------------------------------------------------------------------

    def _properties(self, location: MemoryLocation, shareable: bool) -> Any:
        driver = self._driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        location_type, location_id = self._locations[location]
        properties.location.type = driver.CUmemLocationType(location_type)
        properties.location.id = location_id
        if shareable:
            properties.requestedHandleTypes = self._descriptor_type()
        return properties

    def _descriptor_type(self) -> Any:
        return self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _create(self, num_bytes: int, location: MemoryLocation, shareable: bool) -> int:
        answer = self._driver.cuMemCreate(num_bytes, self._properties(location, shareable), 0)
        return int(checked("mem_create", answer, describe(num_bytes, location)))

    def _export(self, native_handle: int) -> int:
        kind = self._descriptor_type()
        answer = self._driver.cuMemExportToShareableHandle(native_handle, kind, 0)
        fd = int(checked("mem_export", answer))
        os.set_inheritable(fd, False)
        return fd

    def _import(self, fd: int, num_bytes: int) -> tuple[int, MemoryLocation]:
        try:
            # Checked first, because the driver passes any descriptor to the kernel.
            is_device_file = fd >= 0 and stat.S_ISCHR(os.fstat(fd).st_mode)
        except OSError:
            is_device_file = False
        if not is_device_file:
            raise self._refusal("mem_import", f"descriptor {fd} is no exported memory")
        answer = self._driver.cuMemImportFromShareableHandle(fd, self._descriptor_type())
        native_handle = int(checked("mem_import", answer, f"descriptor {fd}"))
        try:
            location = self._location_of(native_handle)
            self._try_mapping(native_handle, num_bytes)
        except BaseException:
            self._driver.cuMemRelease(native_handle)
            raise
        return native_handle, location

    def _location_of(self, native_handle: int) -> MemoryLocation:
        answer = self._driver.cuMemGetAllocationPropertiesFromHandle(native_handle)
        found = checked("mem_import", answer).location
        if int(found.type) == _LOCATION_HOST_NUMA:
            return MemoryLocation.HOST
        if (int(found.type), int(found.id)) == self._locations[MemoryLocation.DEVICE]:
            return MemoryLocation.DEVICE
        raise self._refusal("mem_import", f"the memory lies elsewhere: {found.type}, {found.id}")

    def _try_mapping(self, native_handle: int, num_bytes: int) -> None:
        """Map the handle and unmap it: the driver reports its size in no other way."""
        driver = self._driver
        address = checked("mem_import", driver.cuMemAddressReserve(num_bytes, 0, 0, 0))
        try:
            mapped = driver.cuMemMap(address, num_bytes, 0, native_handle, 0)
            checked("mem_import", mapped, f"the memory is not of {format_bytes(num_bytes)}")
            checked("mem_import", driver.cuMemUnmap(address, num_bytes))
        finally:
            driver.cuMemAddressFree(address, num_bytes)

    def _free(self, allocation: Allocation) -> None:
        checked("mem_release", self._driver.cuMemRelease(allocation.native_handle))

    # ---- order and data -------------------------------------------------------------------

    def note_stream(self, stream: int) -> None:
        """Include `stream` in all later fences."""
        if stream not in self._streams:
            with self._stream_lock:
                self._streams.add(stream)

    @uninterrupted
    def record_fence(self, stream: int | None = None) -> Fence:
        """Record a fence. Cost: one event per noted stream, about 2 µs each."""
        self.calls["record_fence"] += 1
        events: list[Any] = []
        with self._in_context(), self._stream_lock:
            try:
                for each in self._streams if stream is None else (stream,):
                    events.append(self._new_event())
                    checked("record_fence", self._driver.cuEventRecord(events[-1], each))
            except BaseException:
                for event in events:
                    self.recycle_event(event)
                raise
        return CudaFence(self, events)

    def join_streams(self, stream: int) -> None:
        """Make `stream` wait for all other noted streams; no driver call if there is no other."""
        if not self._streams - {stream}:
            return
        with self._in_context(), self._stream_lock:
            for other in self._streams - {stream}:
                self._wait_for("record_fence", stream, other)

    def stream_wait(self, stream: int, other: int) -> None:
        """Make `stream` wait for `other`. Cost: about 4 µs."""
        self.calls["stream_wait"] += 1
        with self._in_context():
            self._wait_for("stream_wait", stream, other)

    def _wait_for(self, call: str, stream: int, other: int) -> None:
        event = self._new_event()
        try:
            checked(call, self._driver.cuEventRecord(event, other))
            checked(call, self._driver.cuStreamWaitEvent(stream, event, 0))
        finally:
            # The submitted wait no longer needs the event.
            self.recycle_event(event)

    def _pin(self, address: Address, num_bytes: int) -> None:
        with self._in_context():
            flags = self._driver.CU_MEMHOSTREGISTER_PORTABLE
            checked("pin", self._driver.cuMemHostRegister(address, num_bytes, flags))

    def _unpin(self, address: Address) -> None:
        with self._in_context():
            checked("unpin", self._driver.cuMemHostUnregister(address))

    def _new_stream(self) -> int:
        # It does not wait for the legacy default stream either.
        flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        with self._in_context():
            return int(checked("new_stream", self._driver.cuStreamCreate(flags)))

    def _end_stream(self, stream: int) -> None:
        with self._in_context():
            checked("stream_destroy", self._driver.cuStreamSynchronize(stream))
            with self._stream_lock:
                checked("stream_destroy", self._driver.cuStreamDestroy(stream))
                self._streams.discard(stream)

    def has_event_passed(self, event: Any) -> bool:
        """Whether the work before `event` is done."""
        with self._in_context():
            (status,) = self._driver.cuEventQuery(event)
        if status == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        checked("record_fence", (status,))
        return True

    def wait_event(self, event: Any) -> None:
        """Block until the work before `event` is done."""
        with self._in_context():
            checked("record_fence", self._driver.cuEventSynchronize(event))

    def recycle_event(self, event: Any) -> None:
        """Keep `event` for a later fence."""
        with self._lock:
            self._events.append(event)

    def _new_event(self) -> Any:
        with self._lock:
            if self._events:
                return self._events.pop()
        flags = self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        return checked("record_fence", self._driver.cuEventCreate(flags))

    @contextlib.contextmanager
    def _in_context(self) -> Iterator[None]:
        checked("context", self._driver.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            self._driver.cuCtxPopCurrent()

    # ---- books ----------------------------------------------------------------------------

    def free_memory_bytes(self) -> int:
        """Return the free device memory that the driver reports. Cost: about 6 µs."""
        with self._in_context():
            free_bytes, _ = checked("mem_get_info", self._driver.cuMemGetInfo())
        return int(free_bytes)

    def close(self) -> None:
        """Destroy the events and release the primary context. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._in_context():
            for event in self._events:
                self._driver.cuEventDestroy(event)
        self._events.clear()
        self._driver.cuDevicePrimaryCtxRelease(self._device)

    # ---- statuses -------------------------------------------------------------------------

    def _error(self, call: str, status: int, details: str) -> CudaDriverError:
        return _error_of(call, self._driver.CUresult(status), details)

    def _function_address(self, name: bytes) -> int:
        address, *_ = checked(
            "init", self._driver.cuGetProcAddress(name, _VMM_SINCE_CUDA, 0), name.decode()
        )
        return int(address)
