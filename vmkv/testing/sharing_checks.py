"""The backend contract, third part: host memory, and memory shared between processes."""

from __future__ import annotations

import ctypes
import os

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
from ..units import Address, Handle
from .access import read_bytes
from .tools import RW, at_page, expect, expect_refusal, filled, mapped, reserve

_STREAM = 0  # The default stream.


def check_locations(backend: Backend) -> None:
    """Host memory maps next to device memory in one range, and is counted separately."""
    granularity = backend.granularity_bytes
    assert backend.free_host_memory_bytes() > 0, "no memory of the host is free"
    address, num_bytes = reserve(backend, 5)
    places = [MemoryLocation.DEVICE, MemoryLocation.HOST, MemoryLocation.HOST]
    places += [MemoryLocation.DEVICE, MemoryLocation.HOST]
    handles = [backend.mem_create(granularity, location) for location in places]
    pages = [at_page(backend, address, page) for page in range(5)]
    maps = [MapOp(at, granularity, handle) for at, handle in zip(pages, handles, strict=True)]
    backend.execute([*maps, AccessOp(address, num_bytes, RW)])
    wanted = BackendUsage(
        num_handles=5,
        physical_bytes=2 * granularity,
        host_bytes=3 * granularity,
        num_mappings=5,
        mapped_bytes=num_bytes,
        num_reservations=1,
        reserved_bytes=num_bytes,
    )
    expect(wanted, backend.usage(), "usage")
    for at in pages:
        expect(bytes(granularity), read_bytes(backend, at, granularity), "fresh memory")
    data = filled(backend, pages[0], 0x71, granularity)
    for page in range(1, 5):  # To the host, within it, back, and there again.
        backend.copy(pages[page], pages[page - 1], granularity, _STREAM)
    for at in pages:
        expect(data, read_bytes(backend, at, granularity), "what was copied")
    filled(backend, pages[0], 0x72, granularity // 2)
    backend.copy(pages[3], pages[0], 2 * granularity, _STREAM)
    wanted_bytes = b"\x72" * (granularity // 2) + data * 2
    got = b"".join(read_bytes(backend, pages[page], granularity) for page in (3, 4))
    expect(wanted_bytes[: 2 * granularity], got, "a copy that spans both locations twice")
    backend.mem_set_access(address, num_bytes, Access.READ)
    for at in pages[1:3]:
        expect(data, read_bytes(backend, at, granularity), "the bytes, read-only")
    for handle in handles:
        backend.mem_release(handle)
    expect(3 * granularity, backend.usage().host_bytes, "released memory that is mapped")
    backend.mem_unmap(address, num_bytes)
    expect(0, backend.usage().host_bytes, "what is left of the host's memory")
    backend.address_free(address, num_bytes)


def check_cpu_access(backend: Backend) -> None:
    """The CPU can be granted access to host memory, and to no other."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 3)
    pages = [at_page(backend, address, page) for page in range(3)]
    for at, location in zip(
        pages, [MemoryLocation.DEVICE] + 2 * [MemoryLocation.HOST], strict=True
    ):
        handle = backend.mem_create(granularity, location)
        backend.execute([MapOp(at, granularity, handle), AccessOp(at, granularity, RW)])
        backend.mem_release(handle)
    for first, num_pages in ((0, 1), (0, 3)):
        what, run = "the device's memory to the CPU", (pages[first], num_pages * granularity)
        expect_refusal(backend, "mem_set_access", what, *run, Access.READ, for_cpu=True)
    if backend.host_location_is_cpu_readable:
        backend.fill(pages[1], granularity, 0x73, _STREAM)
        data = b"\x73" * granularity
        expect(data, read_bytes(backend, pages[1], granularity), "what the device reads")
        backend.mem_set_access(pages[1], granularity, Access.READ, for_cpu=True)
        expect(data, ctypes.string_at(pages[1], granularity), "what the CPU reads")
        backend.fill(pages[1], granularity, 0x74, _STREAM)  # The device may still write.
        data = b"\x74" * granularity
        expect(data, read_bytes(backend, pages[1], granularity), "what the device wrote")
        expect(data, ctypes.string_at(pages[1], granularity), "what the CPU reads afterwards")
        backend.mem_set_access(pages[1], 2 * granularity, RW, for_cpu=True)
        ctypes.memset(pages[2], 0x75, granularity)
        backend.copy(pages[0], pages[2], granularity, _STREAM)
        data = b"\x75" * granularity
        expect(data, read_bytes(backend, pages[0], granularity), "what the CPU wrote")
    backend.mem_unmap(address, num_bytes)
    backend.address_free(address, num_bytes)


def check_fill_spans_locations(backend: Backend) -> None:
    """A fill spans mappings of both locations; it is refused if part is unmapped."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 7)
    places = [MemoryLocation.DEVICE] * 2 + [MemoryLocation.HOST] * 2 + [MemoryLocation.DEVICE]
    pages = [at_page(backend, address, page) for page in range(5)]
    for at, location in zip(pages, places, strict=True):
        handle = backend.mem_create(granularity, location)
        backend.execute([MapOp(at, granularity, handle), AccessOp(at, granularity, RW)])
        backend.mem_release(handle)

    def held() -> bytes:
        return b"".join(read_bytes(backend, at, granularity) for at in pages)

    whole = 5 * granularity
    backend.fill(address, whole, 0x29, _STREAM)
    expect(b"\x29" * whole, held(), "a fill of everything")
    backend.fill(Address(address + 3), whole - 5, 0x2A, _STREAM)
    wanted = b"\x29" * 3 + b"\x2a" * (whole - 5) + b"\x29" * 2
    expect(wanted, held(), "a fill of all but the ends")
    for start, size in (
        (whole - 1, 2),
        (whole, 1),
        (whole + granularity, granularity),
        (-1, 2),
    ):
        expect_refusal(
            backend,
            "fill",
            f"{size} bytes at {start} of {whole} mapped ones",
            Address(address + start),
            size,
            0x2B,
            _STREAM,
        )
    expect(wanted, held(), "memory after the refusals")
    backend.mem_unmap(address, whole)
    backend.address_free(address, num_bytes)


def check_swap_in_place(backend: Backend) -> None:
    """Bytes move to host memory and back, and are read at the same addresses afterwards."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 2)
    staging = at_page(backend, address, 1)
    handle = mapped(backend, address, 1)
    data = filled(backend, address, 0x4B, granularity)
    stream = backend.new_stream()
    for location in (MemoryLocation.HOST, MemoryLocation.DEVICE):
        target = backend.mem_create(granularity, location)
        backend.execute([MapOp(staging, granularity, target), AccessOp(staging, granularity, RW)])
        backend.copy(staging, address, granularity, stream)
        backend.record_fence().wait()
        backend.execute([UnmapOp(address, granularity), UnmapOp(staging, granularity)])
        backend.mem_release(handle)
        backend.execute([MapOp(address, granularity, target), AccessOp(address, granularity, RW)])
        expect(data, read_bytes(backend, address, granularity), f"the bytes in {location}")
        handle = target
    backend.stream_destroy(stream)
    backend.mem_unmap(address, granularity)
    backend.mem_release(handle)
    backend.address_free(address, num_bytes)


def check_import_reads_export(backend: Backend) -> None:
    """An import is a read-only view of the exporter's memory and outlives the exporter."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 4)
    handle = backend.mem_create(2 * granularity, shareable=True)
    backend.execute(
        [MapOp(address, 2 * granularity, handle), AccessOp(address, 2 * granularity, RW)]
    )
    filled(backend, address, 0x51, 2 * granularity)
    imports = [_export_and_import(backend, handle, 2 * granularity) for _ in range(2)]
    imported = imports[0]
    expect(3, len({handle, *imports}), "handles that differ")
    usage = backend.usage()
    sizes = (usage.physical_bytes // granularity, usage.imported_bytes // granularity)
    expect((2, 4), sizes, "pages created and imported")
    view = at_page(backend, address, 2)
    backend.execute(
        [
            MapOp(view, 2 * granularity, imported),
            AccessOp(view, 2 * granularity, Access.READ),
        ]
    )
    data = filled(backend, address, 0x52, 2 * granularity)  # Through the mapping from before.
    expect(data, read_bytes(backend, view, 2 * granularity), "the imported memory")
    backend.mem_unmap(address, 2 * granularity)
    for released in (handle, imports[1], imported):
        backend.mem_release(released)
    expect(data, read_bytes(backend, view, 2 * granularity), "what outlives its exporter")
    usage = backend.usage()
    expect((1, 0), (usage.num_handles, usage.physical_bytes), "handles and created bytes")
    expect(2 * granularity, usage.imported_bytes, "imported bytes")
    backend.mem_unmap(view, 2 * granularity)
    backend.address_free(address, num_bytes)


def check_shared_memory_is_frozen(backend: Backend) -> None:
    """Exported memory cannot be made writable, neither by exporter nor by importer."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 3)
    exported = backend.mem_create(granularity, shareable=True)
    imported = _export_and_import(backend, exported, granularity)
    for handle, page in ((exported, 0), (imported, 1)):
        at = at_page(backend, address, page)
        batch: list[Op] = [MapOp(at, granularity, handle), AccessOp(at, granularity, RW)]
        expect_refusal(backend, "mem_set_access", "writing what is shared", batch, by="execute")
        backend.execute([batch[0], AccessOp(at, granularity, Access.READ)])
        expect(bytes(granularity), read_bytes(backend, at, granularity), "the shared memory")
    last = at_page(backend, address, 2)
    backend.mem_release(mapped(backend, last, 1))
    what = "writing a run that holds what is shared"
    expect_refusal(backend, "mem_set_access", what, address, num_bytes, RW)
    backend.mem_unmap(address, num_bytes)
    for handle in (exported, imported):
        backend.mem_release(handle)
    backend.address_free(address, num_bytes)


def check_export_is_for_shareable(backend: Backend) -> None:
    """Exporting a released, imported or non-shareable handle is refused."""
    granularity = backend.granularity_bytes
    plain = backend.mem_create(granularity)
    shareable = backend.mem_create(granularity, shareable=True)
    imported = _export_and_import(backend, shareable, granularity)
    for handle, what in ((plain, "what is not shareable"), (imported, "an import")):
        expect_refusal(backend, "mem_export", what, handle)
    for handle in (plain, shareable, imported):
        backend.mem_release(handle)
    expect_refusal(backend, "mem_export", "what was released", shareable)


def check_import_is_exact(backend: Backend) -> None:
    """Importing a wrong size, or a descriptor of something else, is refused."""
    granularity = backend.granularity_bytes
    handle = backend.mem_create(2 * granularity, shareable=True)
    fd = backend.mem_export(handle)
    for size in (0, granularity, granularity // 2, 3 * granularity):
        expect_refusal(backend, "mem_import", f"{size} bytes of {2 * granularity}", fd, size)
    os.close(fd)
    strangers = [*os.pipe(), os.open(os.devnull, os.O_RDWR)]
    try:
        for stranger in (fd, -1, *strangers):
            if stranger == fd and fd in strangers:
                continue  # The number was reused.
            expect_refusal(
                backend, "mem_import", "a descriptor of something else", stranger, 2 * granularity
            )
    finally:
        for stranger in strangers:
            os.close(stranger)
    backend.mem_release(handle)


def _export_and_import(backend: Backend, handle: Handle, num_bytes: int) -> Handle:
    fd = backend.mem_export(handle)
    try:
        return backend.mem_import(fd, num_bytes)
    finally:
        os.close(fd)
