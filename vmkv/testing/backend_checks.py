"""The backend contract, as a table of checks that every implementation passes.

Each check has a name, one sentence of `vmkv/core/backend/base.py`, which is its function's
docstring, and a reservation of some pages. Faults are not checked, since they kill the process or
the context: access before it was granted, after an unmap, and writes with read access only.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..core.backend import (
    Access,
    AccessOp,
    Backend,
    BackendUsage,
    CopyOp,
    MapOp,
    MemoryLocation,
    UnmapOp,
)
from ..errors import DriverError, OutOfAddressSpaceError, VMKVError
from ..units import Address, is_power_of_two
from .pages import RW, Pages, expect, write_bytes

_DEVICE, _HOST = MemoryLocation.DEVICE, MemoryLocation.HOST
_STREAM = 0  # The default stream.


@dataclass(frozen=True)
class BackendCheck:
    """A rule of the contract.

    Attributes:
        name: The name of the check.
        promise: The rule, as a sentence.
        num_pages: Pages that the check is given.
        run: Raises `AssertionError` if the rule is broken.
    """

    name: str
    promise: str
    num_pages: int
    run: Callable[[Pages], None]

    def __call__(self, backend: Backend) -> None:
        """Check a backend, and give back all that this took."""
        pages = Pages(backend, self.num_pages)
        self.run(pages)
        pages.give_back()


def check_backend(make_backend: Callable[[], Backend]) -> int:
    """Check a backend against the contract; each check gets a fresh one and leaves it empty.

    Args:
        make_backend: Opens the backend under test.

    Returns:
        The number of checks run.

    Raises:
        AssertionError: The first rule that is broken, by number and sentence.
    """
    for number, check in enumerate(BACKEND_CHECKS, 1):
        backend = make_backend()
        try:
            expect(BackendUsage(), backend.usage(), "usage of a fresh backend")
            check(backend)
            expect(BackendUsage(), backend.usage(), "usage after everything was given back")
            backend.close()
            backend.close()
        except (VMKVError, AssertionError) as error:
            raise AssertionError(f"check {number}: {check.promise} But: {error}") from error
    return len(BACKEND_CHECKS)


def _row(num_pages: int) -> Callable[[Callable[[Pages], None]], BackendCheck]:
    """Return a decorator that makes a function a check on `num_pages` pages."""
    return lambda run: BackendCheck(run.__name__, (run.__doc__ or "").strip(), num_pages, run)


# ---- addresses and physical memory ---------------------------------------------------------------


@_row(1)
def identity(pages: Pages) -> None:
    """A backend has a name, a granularity that is a power of two, a DLPack device, free memory."""
    backend = pages.backend
    assert backend.name, "name is empty"
    granularity = backend.granularity_bytes
    assert is_power_of_two(granularity), f"granularity_bytes={granularity} is no power of two"
    expect(["int", "int"], [type(n).__name__ for n in backend.dlpack_device], "DLPack device")
    assert backend.free_memory_bytes() > 0, "no memory is free"
    assert backend.free_host_memory_bytes() > 0, "no memory of the host is free"


@_row(1)
def reservations(pages: Pages) -> None:
    """Reservations are aligned, disjoint, counted, and cost no memory."""
    more = [Pages(pages.backend, num_pages) for num_pages in (3, 2)]
    ordered = sorted([pages, *more], key=lambda each: each.address)
    expect([0, 0, 0], [each.address % each.page_bytes for each in ordered], "misalignment")
    for one, following in itertools.pairwise(ordered):
        assert one.address + one.num_bytes <= following.address, f"{one.address:#x} overlaps"
    pages.counts("three reservations", num_reservations=3, reserved_bytes=6)
    for each in more:
        each.give_back()


@_row(1)
def freeing_is_exact(pages: Pages) -> None:
    """Freeing part of a reservation, more than it, two at once, or one twice is refused."""
    other = Pages(pages.backend, 4)
    for what, page, num_pages in (
        ("its first part", 0, 1),
        ("its last part", 1, 3),
        ("more", 0, 5),
    ):
        pages.refuses("address_free", what, *other.run(page, num_pages))
    other.give_back()
    pages.refuses("address_free", "one twice", *other.run(0, 4))
    more = [Pages(pages.backend, 1) for _ in range(7)]  # Some may be neighbours.
    for one, two in itertools.pairwise(sorted(each.address for each in [pages, *more])):
        span = two + pages.page_bytes - one
        pages.refuses("address_free", "two reservations at once", one, span)
    for each in more:
        each.give_back()


@_row(3)
def mapped_reservations_stay(pages: Pages) -> None:
    """Freeing a reservation with a mapping anywhere in it is refused."""
    for page in range(3):
        pages.mapped(page)
        pages.refuses("address_free", f"one with page {page} mapped", *pages.run(0, 3))
        pages.unmap(page)


@_row(1)
def address_space_ends(pages: Pages) -> None:
    """Reserving too many addresses raises `OutOfAddressSpaceError`, which names the size."""
    num_bytes = 1 << 50  # Processors of today translate 47 to 57 bits; drivers offer 48 or 49.
    try:
        pages.backend.address_reserve(num_bytes)
    except OutOfAddressSpaceError as error:
        expect(num_bytes, error.needed_bytes, "needed_bytes")
        pages.counts("after the refusal")
    else:
        raise AssertionError("a reservation of 1 PiB succeeded")


@_row(2)
def sizes(pages: Pages) -> None:
    """Sizes that are zero or no multiple of the granularity are refused by every primitive."""
    handle, hole = pages.mapped(0), pages.at(1)
    for size in (0, pages.page_bytes // 2, pages.page_bytes + 1):
        for call, args in (
            ("mem_create", [size]),
            ("mem_map", [hole, size, handle]),
            ("mem_set_access", [pages.address, size, RW]),
            ("mem_unmap", [pages.address, size]),
            ("address_reserve", [size]),
        ):
            pages.refuses(call, f"{size} bytes", *args)


@_row(1)
def handles(pages: Pages) -> None:
    """Handles differ, are counted with their size, and can be released once."""
    made = [pages.create(num_pages) for num_pages in (1, 4, 1)]
    expect(3, len(set(made)), "distinct handles")
    pages.counts("with three handles", num_handles=3, physical_bytes=6)
    pages.release(*made)
    pages.refuses("mem_release", "a handle twice", made[0])


@_row(1)
def fresh_memory_is_zero(pages: Pages) -> None:
    """Fresh memory reads as zero, also after other memory was released."""
    for byte in (0xAB, 0xCD):
        handle = pages.mapped()
        pages.holds(bytes(pages.page_bytes), "fresh memory")
        pages.filled(byte)
        pages.unmap()
        pages.release(handle)


# ---- mappings ------------------------------------------------------------------------------------


@_row(4)
def memory_outlives_mapping(pages: Pages) -> None:
    """Memory keeps its bytes while it is mapped nowhere, and appears wherever it is mapped."""
    handle = pages.mapped(0, 2)
    held = {"num_handles": 1, "physical_bytes": 2}
    pages.counts("mapped", num_mappings=1, mapped_bytes=2, **held)
    data = pages.filled(0x3C, 0, 2)
    pages.holds(data, "what was written")
    pages.unmap(0, 2)
    pages.counts("unmapped", **held)
    pages.map(2, handle, 2)
    pages.holds(data, "the memory at its second place", 2)


@_row(2)
def aliases(pages: Pages) -> None:
    """A handle mapped at two addresses is one memory: writes at one are read at the other."""
    pages.map(1, pages.mapped(), access=Access.READ)
    data = pages.filled(0x77)
    pages.holds(data, "the alias", 1)
    pages.counts("aliased", num_handles=1, physical_bytes=1, num_mappings=2, mapped_bytes=2)
    pages.unmap()
    pages.holds(data, "the alias after the other is gone", 1)


@_row(2)
def released_memory_lives_on(pages: Pages) -> None:
    """A released handle's memory lives until its last mapping is gone."""
    handle = pages.mapped()
    pages.map(1, handle)
    data = pages.filled(0x42)
    pages.release(handle)
    held = {"num_handles": 1, "physical_bytes": 1}
    pages.counts("released", num_mappings=2, mapped_bytes=2, **held)
    pages.unmap()
    pages.holds(data, "the released memory", 1)
    pages.counts("mapped once", num_mappings=1, mapped_bytes=1, **held)
    pages.unmap(1)
    pages.counts("in the end")


@_row(4)
def mappings_do_not_overlap(pages: Pages) -> None:
    """Mapping over a mapping, whole or overlapping, is refused and changes nothing."""
    pages.mapped(1, 2)
    data, other = pages.filled(0x11, 1, 2), pages.create(2)
    for page in (0, 1, 2):
        what = f"a mapping at page {page} over one at pages 1 and 2"
        pages.refuses("mem_map", what, *pages.run(page, 2), other)
    pages.holds(data, "the first mapping", 1)


@_row(1)
def mappings_lie_in_reservations(pages: Pages) -> None:
    """Mapping where nothing is reserved, or past a reservation's end, is refused."""
    handle, other = pages.create(2), Pages(pages.backend, 2)
    pages.refuses("mem_map", "a mapping past a reservation's end", *other.run(1, 2), handle)
    other.give_back()
    pages.refuses("mem_map", "a mapping where nothing is reserved", *other.run(0, 2), handle)


@_row(4)
def maps_are_whole(pages: Pages) -> None:
    """Mapping part of a handle, or more than it holds, is refused."""
    handle = pages.create(2)
    for num_pages in (1, 3):
        pages.refuses("mem_map", f"{num_pages} pages of 2", *pages.run(0, num_pages), handle)


@_row(4)
def unmaps_are_whole(pages: Pages) -> None:
    """Unmapping part of a mapping, beyond it, or an unmapped range is refused."""
    pages.mapped(0, 2)
    data = pages.filled(0x99, 0, 2)
    for what, page, num_pages in (
        ("the first half of a mapping", 0, 1),
        ("the second half of a mapping", 1, 1),
        ("a mapping and a hole", 0, 3),
        ("half a mapping and a hole", 1, 2),
        ("what was never mapped", 2, 1),
    ):
        pages.refuses("mem_unmap", what, *pages.run(page, num_pages))
    pages.holds(data, "the mapping")
    pages.unmap(0, 2)
    pages.refuses("mem_unmap", "it twice", *pages.run(0, 2))


@_row(4)
def runs(pages: Pages) -> None:
    """An access or unmap call may cover a run of whole mappings; access may change, bytes stay."""
    parts = ((0, 1), (1, 2), (3, 1))
    pages.execute([MapOp(*pages.run(*part), pages.create(part[1])) for part in parts])
    pages.backend.mem_set_access(*pages.run(0, 4), RW)
    data = pages.filled(0x21, 0, 4)
    pages.backend.mem_set_access(*pages.run(0, 4), Access.READ)
    pages.holds(data, "the run, read-only")
    pages.backend.mem_set_access(*pages.run(0, 4), RW)
    pages.holds(pages.filled(0x22, 0, 4), "the run, writable again")
    pages.unmap(0, 4)
    pages.counts("after one unmap", num_handles=3, physical_bytes=4)


@_row(3)
def access_needs_mapping(pages: Pages) -> None:
    """Granting access where nothing is mapped, or over a hole, is refused."""
    pages.refuses("mem_set_access", "access to nothing", *pages.run(0), RW)
    for page in (0, 2):
        pages.mapped(page)
    pages.refuses("mem_set_access", "access to a run with a hole", *pages.run(0, 3), RW)


# ---- batches -------------------------------------------------------------------------------------


@_row(4)
def maps_are_atomic(pages: Pages) -> None:
    """A batch of maps that fails, wherever it fails, leaves nothing mapped, and can be repeated."""
    made = [pages.create() for _ in range(3)]
    good: list[MapOp | AccessOp] = [MapOp(*pages.run(at), each) for at, each in enumerate(made)]
    good.append(AccessOp(*pages.run(0, 3), RW))
    over_a_mapping, over_a_hole = MapOp(*pages.run(0), made[2]), AccessOp(*pages.run(0, 4), RW)
    for fail_at, bad, call in (
        (1, over_a_mapping, "mem_map"),
        (2, over_a_mapping, "mem_map"),
        (3, over_a_hole, "mem_set_access"),
        (4, over_a_mapping, "mem_map"),
    ):
        batch = [*good[:fail_at], bad, *good[fail_at:]]
        error = pages.refuses(call, f"a wrong operation at {fail_at}", batch, by="execute")
        expect(fail_at, error.num_done, "operations before the failure")
    pages.execute(good)
    pages.holds(pages.filled(0x66, 0, 3), "the batch repeated")


@_row(4)
def unmaps_report(pages: Pages) -> None:
    """A batch of unmaps that fails says in `num_done` how many are gone; the rest stay."""
    for page in (0, 1, 3):
        pages.mapped(page)
    data = pages.filled(0x18, 3)
    try:
        pages.execute([UnmapOp(*pages.run(page)) for page in range(4)])  # Page 2 is a hole.
    except DriverError as error:
        expect(("mem_unmap", 2), (error.call, error.num_done), "the failure")
    else:
        raise AssertionError("unmapping what is not mapped succeeded in a batch")
    expect(1, pages.backend.usage().num_mappings, "mappings left")
    pages.holds(data, "what is left", 3)


# ---- data, order, books --------------------------------------------------------------------------


@_row(4)
def copy(pages: Pages) -> None:
    """A copy moves exactly its bytes, at any offset; copies of a stream keep their order."""
    backend = pages.backend
    for page in range(4):
        pages.mapped(page)
    write_bytes(backend, pages.address, bytes(range(1, 200)))
    backend.copy(pages.at(1, 7), pages.at(0, 3), 100, _STREAM)
    pages.holds(bytes(7) + bytes(range(4, 104)) + bytes(93), "the copy and what is beside it", 1)
    backend.copy(pages.at(1, 500), pages.at(1, 7), 100, _STREAM)
    backend.copy(pages.at(1), pages.at(1, 500), 100, _STREAM)
    pages.holds(bytes(range(4, 104)), "a copy of a copy", 1)
    pages.refuses("copy", "less than nothing", pages.at(1), pages.at(0), -1, _STREAM)
    data = pages.filled(0x61)
    before = backend.calls.copy()
    backend.copy_many([], _STREAM)
    ops = [CopyOp(pages.at(page + 1), pages.at(page), pages.page_bytes) for page in range(3)]
    backend.copy_many(ops, _STREAM)
    expect({"copy": 3}, dict(backend.calls - before), "calls of a batch of copies")
    pages.holds(data * 4, "the page handed on three times by a batch")
    backend.copy(pages.at(2), pages.at(0), 2 * pages.page_bytes, _STREAM)
    pages.holds(data * 4, "a copy over two mappings at once")


@_row(7)
def fill(pages: Pages) -> None:
    """A fill sets exactly its bytes, over mappings of both locations, in the stream's order."""
    backend, whole = pages.backend, 5 * pages.page_bytes
    for page, location in enumerate((_DEVICE, _DEVICE, _HOST, _HOST, _DEVICE)):
        pages.mapped(page, 1, location)
    backend.fill(*pages.run(0, 5), 0x29, _STREAM)
    pages.holds(b"\x29" * whole, "a fill of everything")
    backend.fill(pages.at(0, 3), whole - 5, 0xFF, _STREAM)
    wanted = b"\x29" * 3 + b"\xff" * (whole - 5) + b"\x29" * 2
    pages.holds(wanted, "a fill of all but the ends")
    for start, num_bytes, byte in (
        *((whole - 1, 2, 0x2B), (whole, 1, 0x2B), (whole + pages.page_bytes, 1, 0x2B)),
        *((-1, 2, 0x2B), (0, -1, 0x2B), (0, pages.page_bytes, -1), (0, pages.page_bytes, 256)),
    ):
        what = f"{num_bytes} bytes of {byte} at {start} of {whole} mapped ones"
        pages.refuses("fill", what, pages.at(0, start), num_bytes, byte, _STREAM)
    pages.holds(wanted, "memory after the refusals")
    backend.copy(pages.at(1), pages.at(0), 10, _STREAM)
    backend.fill(*pages.run(0), 0, _STREAM)
    backend.copy(pages.at(0), pages.at(1, 3), 1, _STREAM)
    pages.holds(b"\xff" + bytes(pages.page_bytes - 1), "copies and fills of one stream")


@_row(1)
def pinned_memory(pages: Pages) -> None:
    """Pinned memory of the process is copied both ways, and unpinned once."""
    backend, size = pages.backend, pages.page_bytes
    pages.mapped(0)
    with mmap.mmap(-1, size) as memory:
        view = ctypes.c_char.from_buffer(memory)
        address = Address(ctypes.addressof(view))
        del view
        memory[:] = b"\x3c" * size
        backend.pin(address, size)
        expect(size, backend.usage().pinned_bytes, "pinned bytes")
        backend.copy(pages.at(0), address, size, _STREAM)
        pages.holds(b"\x3c" * size, "a copy of pinned memory")
        memory[:] = bytes(size)
        backend.copy(address, pages.at(0), size, _STREAM)
        backend.note_stream(_STREAM)
        backend.record_fence(_STREAM).wait()
        expect(b"\x3c" * size, memory[:], "a copy to pinned memory")
        backend.unpin(address)
        pages.refuses("unpin", "memory that is not pinned", address)
    expect(0, backend.usage().pinned_bytes, "pinned bytes at the end")


@_row(3)
def streams(pages: Pages) -> None:
    """Streams are made, wait for each other, are covered by fences, and are destroyed once."""
    backend, size = pages.backend, pages.page_bytes
    for page in range(3):
        pages.mapped(page)
    data = pages.filled(0x2E)
    first, second = backend.new_stream(), backend.new_stream()
    expect(3, len({first, second, _STREAM}), "streams that differ")
    expect(2, backend.usage().num_streams, "streams")
    for _ in range(20):
        backend.fill(pages.at(1), size, 0, first)
        backend.copy(pages.at(1), pages.at(0), size, first)
        backend.stream_wait(second, first)
        backend.copy(pages.at(2), pages.at(1), size, second)
        backend.stream_wait(first, second)
    backend.fill(pages.at(0), size, 0x2F, first)
    backend.record_fence().wait()
    pages.holds(b"\x2f" * size + data * 2, "what went from stream to stream")
    for stream in (first, second):
        backend.stream_destroy(stream)
        pages.refuses("stream_destroy", "a stream twice", stream)
    pages.refuses("stream_destroy", "the default stream", _STREAM)
    expect(0, backend.usage().num_streams, "streams after the last was destroyed")
    backend.record_fence().wait()


@_row(1)
def fences(pages: Pages) -> None:
    """A fence that was waited for has passed for good, and so have earlier fences."""
    backend = pages.backend
    backend.note_stream(_STREAM)
    backend.note_stream(_STREAM)
    recorded = [backend.record_fence(stream) for stream in (None, _STREAM, None, _STREAM)]
    recorded[3].wait()
    recorded[2].wait()
    expect([True] * 4, [fence.has_passed() for fence in recorded], "passed")
    for fence in recorded:
        fence.wait()
        assert fence.has_passed(), "a fence that was waited for twice has not passed"
    backend.join_streams(_STREAM)


@_row(1)
def calls_are_counted(pages: Pages) -> None:
    """Each call of a primitive is counted once under its name, failed ones included."""
    backend, before = pages.backend, pages.backend.calls.copy()
    backend.execute([])  # Does nothing, and succeeds.
    other = Pages(backend, 2)
    made = [other.create() for _ in range(2)]
    maps = [MapOp(*other.run(page), handle) for page, handle in enumerate(made)]
    other.execute([*maps, AccessOp(*other.run(0, 2), RW)])
    stream = backend.new_stream()
    backend.copy(other.at(1), other.at(0), other.page_bytes, _STREAM)
    backend.fill(*other.run(0), 0, _STREAM)
    backend.stream_wait(stream, _STREAM)
    backend.stream_destroy(stream)
    backend.record_fence().wait()
    other.execute([UnmapOp(*other.run(page)) for page in (0, 1)])
    other.refuses("mem_unmap", "nothing", *other.run(0))
    other.give_back()
    wanted = dict.fromkeys(("address_reserve", "mem_set_access", "new_stream", "copy", "fill"), 1)
    wanted |= dict.fromkeys(("stream_wait", "stream_destroy", "record_fence", "address_free"), 1)
    wanted |= {"mem_create": 2, "mem_map": 2, "mem_unmap": 3, "mem_release": 2}
    expect(wanted, dict(backend.calls - before), "calls")


@_row(1)
def threads(pages: Pages) -> None:
    """Threads that work on separate ranges do not disturb each other."""

    def work(byte: int) -> None:
        for _ in range(8):
            own = Pages(pages.backend, 2)
            own.mapped(0, 2)
            own.holds(own.filled(byte, 0, 2), f"thread {byte}'s memory")
            own.give_back()

    with ThreadPoolExecutor(4) as workers:
        list(workers.map(work, range(1, 5)))  # Raises the errors of the threads.


# ---- host memory ---------------------------------------------------------------------------------


@_row(5)
def locations(pages: Pages) -> None:
    """Host memory maps next to device memory in one range, and is counted separately."""
    backend, size = pages.backend, pages.page_bytes
    made = [pages.create(1, location) for location in [_DEVICE, _HOST, _HOST, _DEVICE, _HOST]]
    maps = [MapOp(*pages.run(page), handle) for page, handle in enumerate(made)]
    pages.execute([*maps, AccessOp(*pages.run(0, 5), RW)])
    held = {"num_handles": 5, "physical_bytes": 2, "num_mappings": 5, "mapped_bytes": 5}
    pages.counts("in two locations", host_bytes=3, **held)
    pages.holds(bytes(5 * size), "fresh memory")
    data = pages.filled(0x71)
    for page in range(1, 5):  # To the host, within it, back, and there again.
        backend.copy(pages.at(page), pages.at(page - 1), size, _STREAM)
    pages.holds(data * 5, "what was copied")
    half = pages.filled(0x72)[: size // 2]
    write_bytes(backend, pages.at(0, size // 2), data[: size // 2])
    backend.copy(pages.at(3), pages.at(0), 2 * size, _STREAM)
    pages.holds(half + data[: size // 2] + data, "a copy that spans both locations twice", 3)
    backend.mem_set_access(*pages.run(0, 5), Access.READ)
    pages.holds(data * 2, "the bytes, read-only", 1)
    pages.release(*made)
    expect(3 * size, backend.usage().host_bytes, "released memory that is mapped")
    pages.unmap(0, 5)
    pages.counts("in the end")


# ---- memory shared between processes -------------------------------------------------------------


@_row(4)
def import_reads_export(pages: Pages) -> None:
    """An import is a read-only view of the exporter's memory and outlives the exporter."""
    handle = pages.create(2, shareable=True)
    pages.map(0, handle, 2)
    pages.filled(0x51, 0, 2)
    imported, other = (pages.imported(handle, 2) for _ in range(2))
    expect(3, len({handle, imported, other}), "handles that differ")
    held = {"num_handles": 3, "physical_bytes": 2, "imported_bytes": 4}
    pages.counts("imported twice", num_mappings=1, mapped_bytes=2, **held)
    pages.map(2, imported, 2, Access.READ)
    data = pages.filled(0x52, 0, 2)  # Through the mapping from before.
    pages.holds(data, "the imported memory", 2)
    pages.unmap(0, 2)
    pages.release(handle, other, imported)
    pages.holds(data, "what outlives its exporter", 2)
    held = {"num_mappings": 1, "mapped_bytes": 2}
    pages.counts("after its exporter", num_handles=1, imported_bytes=2, **held)


@_row(3)
def shared_memory_is_frozen(pages: Pages) -> None:
    """Exported memory cannot be made writable, neither by exporter nor by importer."""
    exported = pages.create(shareable=True)
    imported = pages.imported(exported)
    for page, handle in enumerate((exported, imported)):
        run = pages.run(page)
        batch = [MapOp(*run, handle), AccessOp(*run, RW)]
        pages.refuses("mem_set_access", "writing what is shared", batch, by="execute")
        pages.map(page, handle, access=Access.READ)
        pages.holds(bytes(pages.page_bytes), "the shared memory", page)
    pages.mapped(2)
    what = "writing a run that holds what is shared"
    pages.refuses("mem_set_access", what, *pages.run(0, 3), RW)


@_row(1)
def export_is_for_shareable(pages: Pages) -> None:
    """Exporting a released, imported or non-shareable handle is refused."""
    plain, shareable = pages.create(), pages.create(shareable=True)
    pages.refuses("mem_export", "what is not shareable", plain)
    pages.refuses("mem_export", "an import", pages.imported(shareable))
    pages.release(shareable)
    pages.refuses("mem_export", "what was released", shareable)


@_row(1)
def import_is_exact(pages: Pages) -> None:
    """Importing a wrong size, or a descriptor of something else, is refused."""
    size = pages.page_bytes
    fd = pages.backend.mem_export(pages.create(2, shareable=True))
    for wrong in (0, size, size // 2, 3 * size):
        pages.refuses("mem_import", f"{wrong} bytes of {2 * size}", fd, wrong)
    os.close(fd)
    strangers = [*os.pipe(), os.open(os.devnull, os.O_RDWR)]
    try:
        for stranger in (-1, *strangers):
            pages.refuses("mem_import", "a descriptor of something else", stranger, 2 * size)
    finally:
        for stranger in strangers:
            os.close(stranger)


#: The contract, in reading order.
BACKEND_CHECKS = tuple(row for row in list(vars().values()) if isinstance(row, BackendCheck))
