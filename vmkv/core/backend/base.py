"""The driver contract: what vmkv asks of virtual memory, once for every implementation.

A backend is the only code that calls a driver or the kernel. It has no policy, no
pooling and no torch. Everything above it runs unchanged on CUDA (`cuda.py`) and on
any Linux machine (`host.py`).

Terms. *Reserved* addresses belong to us and hold nothing. A *handle* is one physical
allocation. *Mapping* puts a handle behind addresses; *access* makes them readable or
writable. The four are separate, which is the whole trick: addresses can be stable
while memory comes and goes.

For every primitive:

* sizes are > 0 and multiples of `granularity_bytes`; addresses are aligned to it;
* failure raises `DriverError` and changes nothing;
* every call that reaches the driver is counted in `calls`, under the primitive's name.

What a backend must refuse, because CUDA does (the conformance kit
`vmkv.testing.check_backend` holds every implementation to it):

* freeing part of a reservation, two at once, or one that still has mappings;
* mapping over a mapping, outside a reservation, or part of a handle;
* unmapping part of a mapping, or what was never mapped;
* touching a mapping before `mem_set_access` (a fault, not an error);
* writing where only `Access.READ` was granted (a fault, on the GPU as on the host);
* exporting what was not created for it, and making shared memory writable (see `mem_export`).

Releasing a handle that is still mapped is legal: the memory lives until it is unmapped.
"""

from __future__ import annotations

import abc
import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import DriverError, InternalError
from ...units import Address, Handle


class Access(enum.IntEnum):
    """What may be done through a mapping. The values are the CUDA driver's flags."""

    NONE = 0
    READ = 1
    READ_WRITE = 3


class MemoryLocation(enum.Enum):
    """Where physical memory lies; whichever it is, the device reads and writes its mappings."""

    #: The device's own memory.
    DEVICE = "device"
    #: Pinned memory of the machine, near the device: plentiful, and as slow as the bus.
    HOST = "host"


class MapOp(NamedTuple):
    """Put all of `handle`, which holds `num_bytes`, behind `address`."""

    address: Address
    num_bytes: int
    handle: Handle


class AccessOp(NamedTuple):
    """Grant `access` to one run of mappings, which `[address, address + num_bytes)` covers.

    It is the device that gets it; with `for_cpu` the CPU, beside what the device has, and then
    every mapping of the run is of `MemoryLocation.HOST`. Both go with the mapping.
    """

    address: Address
    num_bytes: int
    access: Access
    for_cpu: bool = False


class UnmapOp(NamedTuple):
    """Remove whole mappings that together are `[address, address + num_bytes)`."""

    address: Address
    num_bytes: int


Op = MapOp | AccessOp | UnmapOp


class CopyOp(NamedTuple):
    """Copy `num_bytes` from `source` to `destination`; the two do not overlap."""

    destination: Address
    source: Address
    num_bytes: int


def primitive_of(op: Op) -> str:
    """The primitive that `op` is counted and reported under."""
    if isinstance(op, MapOp):
        return "mem_map"
    return "mem_set_access" if isinstance(op, AccessOp) else "mem_unmap"


@dataclass(frozen=True)
class BackendUsage:
    """What a backend holds at this moment; all zero when everything was given back.

    Attributes:
        num_handles: Physical allocations that exist, released ones that are still mapped and
            imported ones included.
        physical_bytes: The size of those created in the device's memory.
        host_bytes: The size of those created in `MemoryLocation.HOST`.
        imported_bytes: The size of those imported, wherever their exporter put them. Their memory
            is the exporter's while that lives.
        num_mappings: Mappings that exist.
        mapped_bytes: Address bytes they cover; above the sizes' sum where memory is shared.
        num_reservations: Reserved address ranges.
        reserved_bytes: Their size together.
        num_streams: Streams of `new_stream` that were not destroyed.
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


class Fence(abc.ABC):
    """A point in the device's work, recorded after everything submitted so far."""

    @abc.abstractmethod
    def has_passed(self) -> bool:
        """Whether all work submitted before the fence has finished. Never blocks."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Block the calling thread until the fence has passed."""


class Backend(abc.ABC):
    """Virtual memory of one device. Safe to call from several threads.

    Attributes:
        name: The device it serves: `"cuda:0"`, `"host"`.
        granularity_bytes: What it can map at least, and the alignment of everything.
        calls: How often each primitive reached the driver since the backend was opened.
        host_location_is_cpu_readable: Whether the CPU, too, can be granted access to mappings of
            `MemoryLocation.HOST`, at their addresses. What it does there is not ordered with the
            device's work: wait for a fence first.
    """

    name: str
    granularity_bytes: int
    calls: Counter[str]
    host_location_is_cpu_readable: bool

    @property
    @abc.abstractmethod
    def dlpack_device(self) -> tuple[int, int]:
        """`(device_type, device_id)` as DLPack numbers them, for tensors over this memory."""

    # ---- address ranges -------------------------------------------------------------------

    @abc.abstractmethod
    def address_reserve(self, num_bytes: int) -> Address:
        """Reserve `num_bytes` of addresses that hold nothing; touching them faults.

        Raises:
            OutOfAddressSpaceError: No range of that size is left.
        """

    @abc.abstractmethod
    def address_free(self, address: Address, num_bytes: int) -> None:
        """Give back exactly what one `address_reserve` returned; nothing in it is mapped."""

    # ---- physical memory ------------------------------------------------------------------

    @abc.abstractmethod
    def mem_create(
        self,
        num_bytes: int,
        location: MemoryLocation = MemoryLocation.DEVICE,
        *,
        shareable: bool = False,
    ) -> Handle:
        """Allocate physical memory that is mapped nowhere yet. Fresh memory reads as zero.

        Args:
            num_bytes: Its size; the granularity is the same for both locations.
            location: Where it lies. Handles of both locations map beside each other in one range.
                Creating them in `HOST` is as slow as zeroing them: keep them for reuse.
            shareable: Whether `mem_export` may be asked for it later. On the host such a handle
                costs a file descriptor of its own.

        Raises:
            DriverError: With `is_out_of_memory` set where `location` is full.
        """

    @abc.abstractmethod
    def mem_release(self, handle: Handle) -> None:
        """Give the allocation up. Its memory lives on until its last mapping is gone."""

    @abc.abstractmethod
    def mem_export(self, handle: Handle) -> int:
        """A file descriptor through which another process can `mem_import` this memory to read it.

        It freezes the memory: from now on `Access.READ_WRITE` is refused for its mappings, here
        and at every importer, as what was written there would reach readers who expect what they
        were promised. A mapping that is writable already stays so until its access changes. Nobody
        can tell when the last importer is gone: release the handle rather than reuse it.

        On the host the kernel enforces all of that. CUDA lets an importer that does not go through
        vmkv map the memory writable, so give the descriptor only to processes that you trust.

        Args:
            handle: Created here, as shareable, and not released. It may be exported many times.

        Returns:
            A descriptor that the caller closes. It keeps the memory alive, as an importer does.

        Raises:
            DriverError: The handle is not of that kind, or no descriptor is left.
        """

    @abc.abstractmethod
    def mem_import(self, fd: int, num_bytes: int) -> Handle:
        """A handle to the memory that a process exported as `fd`; it can be mapped to be read.

        The memory lives until the exporter and all importers have let go, in whatever order and
        way they end. `fd` stays the caller's and may be closed at once. Release the handle with
        `mem_release`.

        Raises:
            DriverError: `fd` is no export of a backend of this kind, or not of `num_bytes`.
        """

    # ---- mappings -------------------------------------------------------------------------

    def execute(self, ops: Sequence[Op]) -> None:
        """Run `ops` in order, in one call that leaves Python (and its lock) alone meanwhile.

        A call holds either maps and accesses, or unmaps alone. The former is all or nothing:
        when an operation fails, what the call had mapped is unmapped again before the error is
        raised (nothing can have used it yet). Unmaps cannot be taken back: the error's
        `num_done` says how many operations succeeded.

        Cost on an H200: about 2 µs per map, 31 µs per mapping whose access changes, 20 µs
        per unmap, whatever the size. So: few, large mappings. In `MemoryLocation.HOST` the size
        counts: for 64 MiB 0.56 ms per access and 0.16 ms per unmap; where the CPU gets access as
        well, 1.2 ms and 1.0 ms more.

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

    @abc.abstractmethod
    def run_until_failure(self, ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        """Run `ops` in order until one fails: what `execute` is made of.

        Returns how many succeeded, and the failure if there was one. Undoes nothing.
        """

    def mem_map(self, address: Address, num_bytes: int, handle: Handle) -> None:
        """Put all of `handle` behind `address`; not readable before `mem_set_access`."""
        self.execute([MapOp(address, num_bytes, handle)])

    def mem_set_access(
        self, address: Address, num_bytes: int, access: Access, *, for_cpu: bool = False
    ) -> None:
        """Grant `access` to the mappings that together are `[address, address + num_bytes)`."""
        self.execute([AccessOp(address, num_bytes, access, for_cpu)])

    def mem_unmap(self, address: Address, num_bytes: int) -> None:
        """Remove the mappings that together are `[address, address + num_bytes)`.

        Not ordered with the device's work: the caller has waited for a fence.
        """
        self.execute([UnmapOp(address, num_bytes)])

    # ---- order and data -------------------------------------------------------------------

    @abc.abstractmethod
    def note_stream(self, stream: int) -> None:
        """Remember that work on the cache's memory is submitted to `stream`.

        Fences cover every stream noted since the backend was opened. Cost: a set lookup.
        """

    @abc.abstractmethod
    def record_fence(self) -> Fence:
        """A fence after all work submitted so far to every noted stream."""

    @abc.abstractmethod
    def join_streams(self, stream: int) -> None:
        """Make later work on `stream` wait for what the other noted streams hold so far."""

    @abc.abstractmethod
    def new_stream(self) -> int:
        """A stream of its own, whose work runs beside all others'; noted from the beginning."""

    @abc.abstractmethod
    def stream_destroy(self, stream: int) -> None:
        """Wait for the work on a stream of `new_stream`, and give the stream up.

        Raises:
            DriverError: `stream` is not one, or no more. Or its work failed; then it lives on.
        """

    @abc.abstractmethod
    def stream_wait(self, stream: int, other: int) -> None:
        """Make later work on `stream` wait for what `other` holds so far; the caller goes on."""

    @abc.abstractmethod
    def copy(self, destination: Address, source: Address, num_bytes: int, stream: int) -> None:
        """Copy bytes between mapped ranges, in the order of `stream`; does not wait for it.

        Either range may lie in either location, span mappings, of both locations even, and start
        anywhere. They do not overlap; the destination is writable. Memory that no backend mapped is
        not for this call: CUDA copies between it and `MemoryLocation.HOST` with the CPU, which
        faults unless that was granted access.
        """

    def copy_many(self, ops: Sequence[CopyOp], stream: int) -> None:
        """Submit each `copy` of `ops`, in one call that leaves Python (and its lock) alone.

        Each is counted as a `copy`. Copies cannot be taken back: where one fails, those before it
        are under way, and the error's `num_done` says how many they are.
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

        The range may span mappings, of both locations even, and start anywhere. Zero scrubs; 0xFF
        makes every floating-point number a NaN. Counted as `fill` per run of mappings in the
        device's memory and per mapping in the host's. Cost on an H200: 0.33 ms a GiB of the former.

        Raises:
            DriverError: `byte` is not in 0 .. 255, or the range is not all mapped.
        """

    # ---- books ----------------------------------------------------------------------------

    @abc.abstractmethod
    def usage(self) -> BackendUsage:
        """What this backend holds now."""

    @abc.abstractmethod
    def free_memory_bytes(self) -> int:
        """Physical memory that the device could still give out, all processes considered."""

    @abc.abstractmethod
    def free_host_memory_bytes(self) -> int:
        """Likewise for `MemoryLocation.HOST`: an estimate of what could be pinned, no promise."""

    # ---- life -----------------------------------------------------------------------------

    @abc.abstractmethod
    def close(self) -> None:
        """Let the driver go. Everything created through the backend has been given back.

        Idempotent.
        """
