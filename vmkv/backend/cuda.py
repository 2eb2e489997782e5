"""Virtual memory of one NVIDIA GPU, through `cuda.bindings.driver` (package cuda-python).

One primitive is one driver call. The runs of map, access and unmap calls go through the
native executor, which is given the driver's own function addresses: a Python thread that
returns from every call would wait up to 5 ms for the interpreter lock each time (384
mappings/s beside a busy thread, 28,000 in one native call; measured on an H200).

The calls for physical and virtual memory need no current context; those for events and
copies do, so they push the device's primary context (the one torch uses) and pop it again.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any

from .. import _native
from ..errors import ConfigError, CudaDriverError, DriverError, OutOfAddressSpaceError
from ..units import Address, Handle, format_bytes
from .base import AccessOp, Backend, BackendUsage, Fence, MapOp, Op, UnmapOp, primitive_of

_DLPACK_CUDA = 2
_RECORD = Struct("=QQQQ")
_LOCATION_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_VMM_SINCE_CUDA = 10020  # The version of the entry points asked for.


class CudaFence(Fence):
    """Events on every stream that had work on the cache's memory."""

    def __init__(self, backend: CudaBackend, events: list[Any]):
        self._backend = backend
        self._events = events

    def has_passed(self) -> bool:
        """See `Fence.has_passed`. Cost: one event query, about 1 µs, while it has not passed."""
        while self._events:
            if not self._backend.has_event_passed(self._events[-1]):
                return False
            self._backend.recycle_event(self._events.pop())
        return True

    def wait(self) -> None:
        """See `Fence.wait`."""
        while self._events:
            self._backend.wait_event(self._events[-1])
            self._backend.recycle_event(self._events.pop())


class CudaBackend(Backend):
    """CUDA virtual memory management on one device.

    Args:
        device_index: The device's ordinal, as torch counts.

    Raises:
        ConfigError: cuda-python or the driver is missing, or there is no such device.
    """

    def __init__(self, device_index: int = 0):
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise ConfigError(
                "the CUDA backend needs the package cuda-python (pip install cuda-python); "
                'on a machine without a GPU use backend="host"'
            ) from error
        self._driver = driver
        self._lock = threading.Lock()
        self.calls = Counter()
        try:
            self._call("init", driver.cuInit(0))
            num_devices = self._call("init", driver.cuDeviceGetCount())
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
        self._device = self._call("init", driver.cuDeviceGet(device_index))
        self._context = self._call("init", driver.cuDevicePrimaryCtxRetain(self._device))
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device_index
        self.granularity_bytes = int(
            self._call(
                "init",
                driver.cuMemGetAllocationGranularity(
                    self._properties,
                    driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
                ),
            )
        )
        self._functions = tuple(
            self._function_address(name) for name in (b"cuMemMap", b"cuMemSetAccess", b"cuMemUnmap")
        )
        self._streams: set[int] = set()
        self._events: list[Any] = []
        self._num_events = 0
        self._reservations: dict[int, int] = {}
        self._mappings: dict[int, tuple[int, int]] = {}  # start -> (bytes, handle)
        self._handles: dict[int, list[int]] = {}  # handle -> [bytes, mappings, 1 if released]
        self._is_closed = False

    @property
    def dlpack_device(self) -> tuple[int, int]:
        """The GPU."""
        return (_DLPACK_CUDA, self._device_index)

    # ---- address ranges -------------------------------------------------------------------

    def address_reserve(self, num_bytes: int) -> Address:
        """See `Backend.address_reserve`. Cost: about 6 µs, whatever the size."""
        self.calls["address_reserve"] += 1
        try:
            address = int(
                self._call(
                    "address_reserve", self._driver.cuMemAddressReserve(num_bytes, 0, 0, 0)
                )
            )
        except CudaDriverError as error:
            if not error.is_out_of_memory:
                raise
            raise OutOfAddressSpaceError(
                f"{self.name} has no {format_bytes(num_bytes)} of free addresses; "
                "close other caches, or ask for fewer max_tokens or rows",
                needed_bytes=num_bytes,
            ) from error
        with self._lock:
            self._reservations[address] = num_bytes
        return Address(address)

    def address_free(self, address: Address, num_bytes: int) -> None:
        """See `Backend.address_free`."""
        self.calls["address_free"] += 1
        with self._lock:
            # The driver would accept other ranges in part; nobody may rely on that.
            if self._reservations.get(address) != num_bytes:
                raise CudaDriverError(
                    "address_free", 1, "CUDA_ERROR_INVALID_VALUE", "not one whole reservation"
                )
            if any(address <= start < address + num_bytes for start in self._mappings):
                raise CudaDriverError(
                    "address_free", 1, "CUDA_ERROR_INVALID_VALUE", "something is mapped in it"
                )
            self._call("address_free", self._driver.cuMemAddressFree(address, num_bytes))
            del self._reservations[address]

    # ---- physical memory ------------------------------------------------------------------

    def mem_create(self, num_bytes: int) -> Handle:
        """See `Backend.mem_create`. Cost: 10 µs for 2 MiB, 16 µs for 64 MiB."""
        self.calls["mem_create"] += 1
        handle = Handle(
            int(
                self._call(
                    "mem_create",
                    self._driver.cuMemCreate(num_bytes, self._properties, 0),
                    format_bytes(num_bytes),
                )
            )
        )
        with self._lock:
            self._handles[handle] = [num_bytes, 0, 0]
        return handle

    def mem_release(self, handle: Handle) -> None:
        """See `Backend.mem_release`."""
        self.calls["mem_release"] += 1
        with self._lock:
            books = self._handles.get(handle)
            if books is None or books[2]:
                raise CudaDriverError(
                    "mem_release", 1, "CUDA_ERROR_INVALID_VALUE", f"handle {handle:#x} is not live"
                )
            self._call("mem_release", self._driver.cuMemRelease(handle))
            books[2] = 1
            if not books[1]:
                del self._handles[handle]

    # ---- mappings -------------------------------------------------------------------------

    def _run(self, ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        plan = b"".join(_pack(op) for op in ops)
        with self._lock:
            num_done, status, *_ = _native.execute(
                plan, *self._functions, _LOCATION_DEVICE, self._device_index
            )
            for op in ops[:num_done]:
                self.calls[primitive_of(op)] += 1
                self._book(op)
        if not status:
            return num_done, None
        failed = ops[num_done]
        self.calls[primitive_of(failed)] += 1
        return num_done, self._error(primitive_of(failed), status, f"{failed}")

    def _book(self, op: Op) -> None:
        if isinstance(op, MapOp):
            self._mappings[op.address] = (op.num_bytes, op.handle)
            self._handles[op.handle][1] += 1
        elif isinstance(op, UnmapOp):
            cursor, end = int(op.address), op.address + op.num_bytes
            while cursor < end:
                num_bytes, handle = self._mappings.pop(cursor)
                books = self._handles[handle]
                books[1] -= 1
                if books[2] and not books[1]:
                    del self._handles[handle]
                cursor += num_bytes

    # ---- order and data -------------------------------------------------------------------

    def note_stream(self, stream: int) -> None:
        """See `Backend.note_stream`."""
        if stream not in self._streams:
            with self._lock:
                self._streams.add(stream)

    def record_fence(self) -> Fence:
        """See `Backend.record_fence`. Cost: one event per noted stream, about 2 µs each."""
        self.calls["record_fence"] += 1
        events = []
        with self._in_context():
            for stream in tuple(self._streams):
                event = self._new_event()
                events.append(event)
                self._call("record_fence", self._driver.cuEventRecord(event, stream))
        return CudaFence(self, events)

    def join_streams(self, stream: int) -> None:
        """See `Backend.join_streams`. Nothing where only one stream is in use."""
        others = [other for other in tuple(self._streams) if other != stream]
        if not others:
            return
        with self._in_context():
            for other in others:
                event = self._new_event()
                self._call("record_fence", self._driver.cuEventRecord(event, other))
                self._call("record_fence", self._driver.cuStreamWaitEvent(stream, event, 0))
                # The wait holds what it needs of the event, so it can be used again at once.
                self.recycle_event(event)

    def copy(self, destination: Address, source: Address, num_bytes: int, stream: int) -> None:
        """See `Backend.copy`."""
        self.calls["copy"] += 1
        with self._in_context():
            self._call(
                "copy",
                self._driver.cuMemcpyAsync(int(destination), int(source), num_bytes, stream),
            )

    def has_event_passed(self, event: Any) -> bool:
        """Whether the work before `event` is done."""
        with self._in_context():
            (status,) = self._driver.cuEventQuery(event)
        if status == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._call("record_fence", (status,))
        return True

    def wait_event(self, event: Any) -> None:
        """Block until the work before `event` is done."""
        with self._in_context():
            self._call("record_fence", self._driver.cuEventSynchronize(event))

    def recycle_event(self, event: Any) -> None:
        """Keep `event` for the next fence."""
        with self._lock:
            self._events.append(event)

    def _new_event(self) -> Any:
        with self._lock:
            if self._events:
                return self._events.pop()
            self._num_events += 1
        flags = self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        return self._call("record_fence", self._driver.cuEventCreate(flags))

    @contextlib.contextmanager
    def _in_context(self) -> Iterator[None]:
        self._call("context", self._driver.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            self._driver.cuCtxPopCurrent()

    # ---- books ----------------------------------------------------------------------------

    def usage(self) -> BackendUsage:
        """See `Backend.usage`."""
        with self._lock:
            return BackendUsage(
                num_handles=len(self._handles),
                physical_bytes=sum(num_bytes for num_bytes, _, _ in self._handles.values()),
                num_mappings=len(self._mappings),
                mapped_bytes=sum(num_bytes for num_bytes, _ in self._mappings.values()),
                num_reservations=len(self._reservations),
                reserved_bytes=sum(self._reservations.values()),
            )

    def free_memory_bytes(self) -> int:
        """What the driver says is free on the device now. Cost: about 6 µs."""
        with self._in_context():
            free_bytes, _ = self._call("mem_get_info", self._driver.cuMemGetInfo())
        return int(free_bytes)

    def close(self) -> None:
        """See `Backend.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._in_context():
            for event in self._events:
                self._driver.cuEventDestroy(event)
        self._events.clear()
        self._driver.cuDevicePrimaryCtxRelease(self._device)

    # ---- statuses -------------------------------------------------------------------------

    def _call(self, call: str, answer: tuple[Any, ...], details: str = "") -> Any:
        """The results of a cuda-python call, or the error its status means."""
        status, *results = answer
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise self._error(call, int(status), details)
        if len(results) == 1:
            return results[0]
        return tuple(results)

    def _error(self, call: str, status: int, details: str) -> CudaDriverError:
        result = self._driver.CUresult(status)
        return CudaDriverError(
            call,
            status,
            result.name,
            details,
            is_out_of_memory=result == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY,
        )

    def _function_address(self, name: bytes) -> int:
        address, *_ = self._call(
            "init", self._driver.cuGetProcAddress(name, _VMM_SINCE_CUDA, 0), name.decode()
        )
        return int(address)


def _pack(op: Op) -> bytes:
    if isinstance(op, MapOp):
        return _RECORD.pack(0, op.address, op.num_bytes, op.handle)
    if isinstance(op, AccessOp):
        return _RECORD.pack(1, op.address, op.num_bytes, op.access)
    return _RECORD.pack(2, op.address, op.num_bytes, 0)
