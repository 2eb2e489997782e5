"""The driver contract: virtual memory of one device, as every implementation provides it.

A backend is the only code that calls a driver or the kernel; it has no policy, no pooling and no
torch. Implementations: CUDA (`cuda.py`) and any Linux machine (`host.py`).

Reserved addresses hold nothing. A handle is one physical allocation. A mapping puts a handle behind
addresses; access makes it readable or writable. Since the four are separate, addresses stay while
memory comes and goes.

For every primitive:

* sizes are > 0 and multiples of `granularity_bytes`; addresses are aligned to it;
* failure raises `DriverError` and changes nothing;
* every call that reaches the driver is counted in `calls`, under the primitive's name.

A backend must refuse, because CUDA does (`vmkv.testing.check_backend` checks it):

* freeing part of a reservation, two at once, or one that still has mappings;
* mapping over a mapping, outside a reservation, or part of a handle;
* unmapping part of a mapping, or an unmapped range;
* touching a mapping before `mem_set_access`, or writing with `Access.READ` only (both fault);
* exporting memory that was not created shareable, and making exported memory writable.

A released handle may still be mapped: its memory lives until it is unmapped.
"""

from __future__ import annotations

import abc
import enum
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import DriverError, InternalError
from ...units import Address, Handle


class Access(enum.IntEnum):
    """Access rights of a mapping. The values are the CUDA driver's flags."""

    NONE = 0
    READ = 1
    READ_WRITE = 3


class MemoryLocation(enum.Enum):
    """Location of physical memory. The device can read and write mappings of both."""

    #: The device's own memory.
    DEVICE = "device"
    #: Pinned host memory on the device's NUMA node, at the bandwidth of the bus.
    HOST = "host"


class MapOp(NamedTuple):
    """Map all of `handle`, which holds `num_bytes`, at `address`."""

    address: Address
    num_bytes: int
    handle: Handle


class AccessOp(NamedTuple):
    """Grant `access` to the run of whole mappings that covers `[address, address + num_bytes)`.

    The device gets it, also to mappings of `MemoryLocation.HOST`; the CPU does not.
    """

    address: Address
    num_bytes: int
    access: Access


class UnmapOp(NamedTuple):
    """Remove the whole mappings that together cover `[address, address + num_bytes)`."""

    address: Address
    num_bytes: int


Op = MapOp | AccessOp | UnmapOp

#: The primitive that each operation is counted and reported under.
PRIMITIVES = {MapOp: "mem_map", AccessOp: "mem_set_access", UnmapOp: "mem_unmap"}


class CopyOp(NamedTuple):
    """Copy `num_bytes` from `source` to `destination`; the two do not overlap."""

    destination: Address
    source: Address
    num_bytes: int


@dataclass(frozen=True)
class BackendUsage:
    """Resources that a backend holds; all zero when everything was given back.

    Attributes:
        num_handles: Handles, imported ones and released ones that are still mapped included.
        physical_bytes: Memory created on the device.
        host_bytes: Memory created in `MemoryLocation.HOST`.
        imported_bytes: Memory imported, in any location. It is the exporter's while that lives.
        num_mappings: Mappings.
        mapped_bytes: Addresses that they cover; more than the memory if some is shared.
        num_reservations: Reserved address ranges.
        reserved_bytes: Their total size.
        num_streams: Streams of `new_stream` that were not destroyed.
        pinned_bytes: Memory of this process that is pinned.
    """

    num_handles: int = 0
    physical_bytes: int = 0
    host_bytes: int = 0
    imported_bytes: int = 0
    num_mappings: int = 0
    mapped_bytes: int = 0
    num_reservations: int = 0
    reserved_bytes: int = 0
    num_streams: int = 0
    pinned_bytes: int = 0


class Fence(abc.ABC):
    """A point in the device's work, recorded after what was submitted so far.

    Its user may set `time`, the tick of a clock before it was recorded.
    """

    time: int = 0

    @abc.abstractmethod
    def has_passed(self) -> bool:
        """Whether all work submitted before the fence has finished. Never blocks."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Block the calling thread until the fence has passed."""


class Backend(abc.ABC):
    """Virtual memory of one device. Thread-safe.

    Attributes:
        name: The device: `"cuda:0"`, `"host"`.
        granularity_bytes: Smallest mapping, and the alignment of addresses and sizes.
        calls: Number of calls per primitive since the backend was opened.
    """

    name: str
    granularity_bytes: int
    calls: Counter[str]

    @property
    @abc.abstractmethod
    def dlpack_device(self) -> tuple[int, int]:
        """DLPack's `(device_type, device_id)`, for tensors over this memory."""

    # ---- address ranges -------------------------------------------------------------------

    @abc.abstractmethod
    def address_reserve(self, num_bytes: int) -> Address:
        """Reserve `num_bytes` of addresses with nothing mapped; touching them faults.

        Raises:
            OutOfAddressSpaceError: No range of that size is left.
        """

    @abc.abstractmethod
    def address_free(self, address: Address, num_bytes: int) -> None:
        """Free exactly one reservation of `address_reserve`; nothing in it is mapped."""

    # ---- physical memory ------------------------------------------------------------------

    @abc.abstractmethod
    def mem_create(
        self,
        num_bytes: int,
        location: MemoryLocation = MemoryLocation.DEVICE,
        *,
        shareable: bool = False,
    ) -> Handle:
        """Allocate zeroed physical memory that is mapped nowhere yet.

        Args:
            num_bytes: Its size; the granularity is the same for both locations.
            location: Memory location; one range can map handles of both. Creation in `HOST` is as
                slow as zeroing it: keep such handles for reuse.
            shareable: Whether it can be exported. On the host such a handle costs a file
                descriptor.

        Raises:
            DriverError: With `is_out_of_memory` set if `location` is full.
        """

    @abc.abstractmethod
    def mem_release(self, handle: Handle) -> None:
        """Release the handle. Its memory lives until its last mapping is gone."""

    @abc.abstractmethod
    def mem_export(self, handle: Handle) -> int:
        """Return a file descriptor with which another process can `mem_import` this memory to read.

        The export freezes the memory: `Access.READ_WRITE` is refused from now on, here and at every
        importer. A mapping that is already writable stays so until its access changes. Release the
        handle rather than reuse it, since importers are not tracked. The caller closes the
        descriptor, which keeps the memory alive.

        On the host the kernel enforces this. CUDA lets an importer that bypasses vmkv map the
        memory writable, so give the descriptor only to trusted processes.

        Raises:
            DriverError: The handle was released or not created here as shareable, or no descriptor
                is left.
        """

    @abc.abstractmethod
    def mem_import(self, fd: int, num_bytes: int) -> Handle:
        """Import memory that a process exported as `fd`, which the caller keeps; read-only.

        The memory lives until exporter and importers have released it or ended.

        Raises:
            DriverError: `fd` is no export of a backend of this kind, or not of `num_bytes`.
        """

    @abc.abstractmethod
    def pin(self, address: Address, num_bytes: int) -> None:
        """Let the device copy to and from memory of this process, which exists until `unpin`.

        Cost on an H200: 1.7 ms for 64 MiB that were written before, in pages of 2 MiB. Raises
        `DriverError`.
        """

    @abc.abstractmethod
    def unpin(self, address: Address) -> None:
        """Undo `pin`, once no copy uses the memory; raises `DriverError`."""

    # ---- mappings -------------------------------------------------------------------------

    def execute(self, ops: Sequence[Op]) -> None:
        """Run `ops` in order, in one call that releases the interpreter lock.

        A call holds either maps and accesses, or only unmaps. The former is all or nothing: if an
        operation fails, the call's mappings are unmapped before the error is raised. Unmaps cannot
        be undone: the error's `num_done` says how many operations succeeded.

        Cost on an H200: about 2 µs per map, 31 µs per mapping whose access changes, 20 µs per
        unmap, whatever the size. In `MemoryLocation.HOST` the size counts: for 64 MiB 0.56 ms per
        access and 0.16 ms per unmap.

        Raises:
            DriverError: Naming the primitive that failed.
        """
        if not ops:
            return
        num_done, error = self.run_until_failure(ops)
        if error is None:
            return
        undo = [
            UnmapOp(op.address, op.num_bytes)
            for op in reversed(ops[:num_done])
            if isinstance(op, MapOp)
        ]
        if undo:
            undone, undo_error = self.run_until_failure(undo)
            if undo_error is not None:
                raise InternalError(
                    f"undoing a failed mapping failed too ({undone} of {len(undo)} undone): "
                    f"{undo_error}"
                ) from error
        error.num_done = num_done
        raise error

    def restoring(self) -> AbstractContextManager[None]:
        """Context in which a thread maps again what was mapped before, and so may not run short."""
        return nullcontext()

    @abc.abstractmethod
    def run_until_failure(self, ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        """Run `ops` in order until one fails, undoing nothing; return the number done and error."""

    def mem_map(self, address: Address, num_bytes: int, handle: Handle) -> None:
        """Map all of `handle` at `address`; not readable before `mem_set_access`."""
        self.execute([MapOp(address, num_bytes, handle)])

    def mem_set_access(self, address: Address, num_bytes: int, access: Access) -> None:
        """Grant `access` to the whole mappings that cover `[address, address + num_bytes)`."""
        self.execute([AccessOp(address, num_bytes, access)])

    def mem_unmap(self, address: Address, num_bytes: int) -> None:
        """Remove the whole mappings that cover a range, which submitted work no longer uses."""
        self.execute([UnmapOp(address, num_bytes)])

    # ---- order and data -------------------------------------------------------------------

    @abc.abstractmethod
    def note_stream(self, stream: int) -> None:
        """Include `stream` in all later fences. Cost: a set lookup."""

    @abc.abstractmethod
    def record_fence(self, stream: int | None = None) -> Fence:
        """Record a fence after all work submitted so far to every noted stream, or to one."""

    @abc.abstractmethod
    def join_streams(self, stream: int) -> None:
        """Make later work on `stream` wait for the work submitted to the other noted streams."""

    @abc.abstractmethod
    def new_stream(self, *, is_noted: bool = True) -> int:
        """Create a stream whose work runs concurrently with all others'.

        Without `is_noted` no fence waits for its work.
        """

    @abc.abstractmethod
    def stream_destroy(self, stream: int) -> None:
        """Wait for the work on a stream of `new_stream`, and destroy the stream.

        Raises:
            DriverError: `stream` is none of this backend's, or its work failed; then it lives on.
        """

    @abc.abstractmethod
    def stream_wait(self, stream: int, other: int) -> None:
        """Make later work on `stream` wait for the work submitted to `other`; does not block."""

    @abc.abstractmethod
    def copy(self, destination: Address, source: Address, num_bytes: int, stream: int) -> None:
        """Submit a copy between mapped ranges to `stream`; does not wait for it.

        Both ranges may span mappings and locations and start anywhere. They do not overlap; the
        destination is writable. Memory not mapped by a backend is not allowed: CUDA copies between
        it and `MemoryLocation.HOST` with the CPU, which faults without access.
        """

    def copy_many(self, ops: Sequence[CopyOp], stream: int) -> None:
        """Submit each `copy` of `ops`, in one call that releases the interpreter lock.

        Each counts as a `copy`. After a failure the earlier ones are under way, `num_done` of them.
        """
        for num_done, op in enumerate(ops):
            try:
                self.copy(op.destination, op.source, op.num_bytes, stream)
            except DriverError as error:
                error.num_done = num_done
                raise

    @abc.abstractmethod
    def fill(self, address: Address, num_bytes: int, byte: int, stream: int) -> None:
        """Set every byte of a writable range, in the order of `stream`; does not wait for it.

        The range may span mappings and locations and start anywhere. 0xFF makes every
        floating-point number a NaN. Counted as `fill` per run of mappings in device memory and per
        mapping in host memory. Cost on an H200: 0.33 ms per GiB of device memory.

        Raises:
            DriverError: `byte` is not in 0 .. 255, or the range is not all mapped.
        """

    # ---- books ----------------------------------------------------------------------------

    @abc.abstractmethod
    def usage(self) -> BackendUsage:
        """Count the resources that this backend holds."""

    @abc.abstractmethod
    def free_memory_bytes(self) -> int:
        """Physical memory that the device could still allocate, for all processes together."""

    @abc.abstractmethod
    def free_host_memory_bytes(self) -> int:
        """Estimate of the host memory that could still be pinned."""

    # ---- life -----------------------------------------------------------------------------

    @abc.abstractmethod
    def close(self) -> None:
        """Release the driver, once everything created here was given back. Idempotent."""
