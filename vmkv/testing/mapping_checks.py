"""The backend contract, first part: addresses, physical memory, and mappings."""

from __future__ import annotations

import itertools

from ..core.backend import Access, AccessOp, Backend, BackendUsage, MapOp
from ..errors import OutOfAddressSpaceError
from ..units import is_power_of_two
from .access import read_bytes
from .tools import RW, at_page, expect, expect_refusal, filled, mapped, reserve

# ---- addresses ----------------------------------------------------------------------------


def check_identity(backend: Backend) -> None:
    """A backend has a name, a granularity that is a power of two, a DLPack device, free memory."""
    assert backend.name, "name is empty"
    granularity = backend.granularity_bytes
    assert is_power_of_two(granularity), f"granularity_bytes={granularity} is no power of two"
    expect(["int", "int"], [type(n).__name__ for n in backend.dlpack_device], "DLPack device")
    assert backend.free_memory_bytes() > 0, "no memory is free"


def check_reservations(backend: Backend) -> None:
    """Reservations are aligned, disjoint, counted, and cost no memory."""
    granularity = backend.granularity_bytes
    ranges = [reserve(backend, num_pages) for num_pages in (1, 3, 2)]
    expect([0, 0, 0], [address % granularity for address, _ in ranges], "misalignment")
    ordered = sorted(ranges)
    for (address, num_bytes), (following, _) in itertools.pairwise(ordered):
        assert address + num_bytes <= following, f"{address:#x} and {following:#x} overlap"
    wanted = BackendUsage(num_reservations=3, reserved_bytes=6 * granularity)
    expect(wanted, backend.usage(), "usage")
    for address, num_bytes in ranges:
        backend.address_free(address, num_bytes)


def check_free_is_exact(backend: Backend) -> None:
    """Freeing part of a reservation, more than it, an unknown one, or one twice is refused."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 4)
    second = at_page(backend, address, 1)
    for what, start, size in (
        ("its first part", address, granularity),
        ("its last part", second, num_bytes - granularity),
        ("more than it", address, num_bytes + granularity),
    ):
        expect_refusal(backend, "address_free", what, start, size)
    backend.address_free(address, num_bytes)
    expect_refusal(backend, "address_free", "twice", address, num_bytes)


def check_two_reservations_are_two(backend: Backend) -> None:
    """Freeing two reservations in one call is refused, also where they are neighbours."""
    ranges = sorted(reserve(backend, 1) for _ in range(8))
    for (first, num_bytes), (second, _) in itertools.pairwise(ranges):
        span = second + num_bytes - first
        expect_refusal(backend, "address_free", "two reservations at once", first, span)
    for address, num_bytes in ranges:
        backend.address_free(address, num_bytes)


def check_free_with_mapping(backend: Backend) -> None:
    """Freeing a reservation with a mapping anywhere in it is refused."""
    address, num_bytes = reserve(backend, 3)
    for page in range(3):
        at = at_page(backend, address, page)
        backend.mem_release(mapped(backend, at, 1))
        expect_refusal(backend, "address_free", f"one with page {page} mapped", address, num_bytes)
        backend.mem_unmap(at, backend.granularity_bytes)
    backend.address_free(address, num_bytes)


def check_address_space_ends(backend: Backend) -> None:
    """Reserving too many addresses raises `OutOfAddressSpaceError`, which names the size."""
    num_bytes = 1 << 50  # Processors of today translate 47 to 57 bits; drivers offer 48 or 49.
    before = backend.usage()
    try:
        address = backend.address_reserve(num_bytes)
    except OutOfAddressSpaceError as error:
        expect(num_bytes, error.needed_bytes, "needed_bytes")
        expect(before, backend.usage(), "usage after the refusal")
    else:
        backend.address_free(address, num_bytes)
        raise AssertionError("a reservation of 1 PiB succeeded")


# ---- physical memory ----------------------------------------------------------------------


def check_sizes(backend: Backend) -> None:
    """Sizes that are zero or no multiple of the granularity are refused by every primitive."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 2)
    handle = mapped(backend, address, 1)
    for size in (0, granularity // 2, granularity + 1):
        hole = at_page(backend, address, 1)
        for call, args in (
            ("mem_create", [size]),
            ("mem_map", [hole, size, handle]),
            ("mem_set_access", [address, size, RW]),
            ("mem_unmap", [address, size]),
            ("address_reserve", [size]),
        ):
            expect_refusal(backend, call, f"{size} bytes", *args)
    backend.mem_unmap(address, granularity)
    backend.mem_release(handle)
    backend.address_free(address, num_bytes)


def check_handles(backend: Backend) -> None:
    """Handles differ, are counted with their size, and can be released once."""
    granularity = backend.granularity_bytes
    handles = [backend.mem_create(num_pages * granularity) for num_pages in (1, 4, 1)]
    expect(3, len(set(handles)), "distinct handles")
    wanted = BackendUsage(num_handles=3, physical_bytes=6 * granularity)
    expect(wanted, backend.usage(), "usage")
    for handle in handles:
        backend.mem_release(handle)
    expect_refusal(backend, "mem_release", "a handle twice", handles[0])


def check_fresh_memory_is_zero(backend: Backend) -> None:
    """Fresh memory reads as zero, also after other memory was released."""
    num_bytes = backend.granularity_bytes
    address, _ = reserve(backend, 1)
    for value in (0xAB, 0xCD):
        handle = mapped(backend, address, 1)
        expect(bytes(num_bytes), read_bytes(backend, address, num_bytes), "fresh memory")
        filled(backend, address, value, num_bytes)
        backend.mem_unmap(address, num_bytes)
        backend.mem_release(handle)
    backend.address_free(address, num_bytes)


# ---- mapping ------------------------------------------------------------------------------


def check_map_and_unmap(backend: Backend) -> None:
    """Bytes written through a mapping are read through it, and usage follows."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 4)
    handle = mapped(backend, at_page(backend, address, 1), 2)
    wanted = BackendUsage(
        num_handles=1,
        physical_bytes=2 * granularity,
        num_mappings=1,
        mapped_bytes=2 * granularity,
        num_reservations=1,
        reserved_bytes=num_bytes,
    )
    expect(wanted, backend.usage(), "usage")
    at = at_page(backend, address, 1)
    data = filled(backend, at, 0x5A, 2 * granularity)
    expect(data, read_bytes(backend, at, 2 * granularity), "what was written")
    backend.mem_unmap(at, 2 * granularity)
    expect(0, backend.usage().num_mappings, "mappings after unmap")
    backend.mem_release(handle)
    backend.address_free(address, num_bytes)


def check_memory_outlives_mapping(backend: Backend) -> None:
    """Memory keeps its bytes while it is mapped nowhere, and appears wherever it is mapped."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 2)
    handle = mapped(backend, address, 1)
    data = filled(backend, address, 0x3C, granularity)
    backend.mem_unmap(address, granularity)
    second = at_page(backend, address, 1)
    backend.execute([MapOp(second, granularity, handle), AccessOp(second, granularity, RW)])
    expect(data, read_bytes(backend, second, granularity), "the memory at its second place")
    backend.mem_unmap(second, granularity)
    backend.mem_release(handle)
    backend.address_free(address, num_bytes)


def check_aliases(backend: Backend) -> None:
    """A handle mapped at two addresses is one memory: writes at one are read at the other."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 2)
    alias = at_page(backend, address, 1)
    handle = mapped(backend, address, 1)
    backend.mem_map(alias, granularity, handle)
    backend.mem_set_access(alias, granularity, Access.READ)
    data = filled(backend, address, 0x77, granularity)
    expect(data, read_bytes(backend, alias, granularity), "the alias")
    usage = backend.usage()
    expect((1, 2), (usage.num_handles, usage.num_mappings), "handles and mappings")
    backend.mem_unmap(address, granularity)
    expect(data, read_bytes(backend, alias, granularity), "the alias after the other is gone")
    backend.mem_unmap(alias, granularity)
    backend.mem_release(handle)
    backend.address_free(address, num_bytes)


def check_release_while_mapped(backend: Backend) -> None:
    """A released handle's memory lives until its last mapping is gone."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 2)
    alias = at_page(backend, address, 1)
    handle = mapped(backend, address, 1)
    backend.execute([MapOp(alias, granularity, handle), AccessOp(alias, granularity, RW)])
    data = filled(backend, address, 0x42, granularity)
    backend.mem_release(handle)
    for gone, left in ((address, alias), (alias, None)):
        usage = backend.usage()
        expect((1, granularity), (usage.num_handles, usage.physical_bytes), "what is held")
        backend.mem_unmap(gone, granularity)
        if left is not None:
            expect(data, read_bytes(backend, left, granularity), "the released memory")
    usage = backend.usage()
    expect((0, 0), (usage.num_handles, usage.physical_bytes), "what is held in the end")
    backend.address_free(address, num_bytes)


def check_map_over_mapping(backend: Backend) -> None:
    """Mapping over a mapping, whole or overlapping, is refused and changes nothing."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 4)
    middle = at_page(backend, address, 1)
    handle = mapped(backend, middle, 2)
    data = filled(backend, middle, 0x11, 2 * granularity)
    other = backend.mem_create(2 * granularity)
    for page in (0, 1, 2):
        at = at_page(backend, address, page)
        what = f"a mapping at page {page} over one at pages 1 and 2"
        expect_refusal(backend, "mem_map", what, at, 2 * granularity, other)
    expect(data, read_bytes(backend, middle, 2 * granularity), "the first mapping")
    backend.mem_unmap(middle, 2 * granularity)
    for each in (handle, other):
        backend.mem_release(each)
    backend.address_free(address, num_bytes)


def check_map_outside_reservation(backend: Backend) -> None:
    """Mapping where nothing is reserved, or past a reservation's end, is refused."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 2)
    handle = backend.mem_create(2 * granularity)
    last = at_page(backend, address, 1)
    what = "a mapping that starts in a reservation and ends after it"
    expect_refusal(backend, "mem_map", what, last, 2 * granularity, handle)
    backend.address_free(address, num_bytes)
    expect_refusal(backend, "mem_map", "nothing is reserved", address, 2 * granularity, handle)
    backend.mem_release(handle)


def check_map_is_whole(backend: Backend) -> None:
    """Mapping part of a handle, or more than it holds, is refused."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 4)
    handle = backend.mem_create(2 * granularity)
    for num_pages in (1, 3):
        what, size = f"{num_pages} pages of a handle of 2", num_pages * granularity
        expect_refusal(backend, "mem_map", what, address, size, handle)
    backend.mem_release(handle)
    backend.address_free(address, num_bytes)


def check_unmap_is_whole(backend: Backend) -> None:
    """Unmapping part of a mapping, beyond it, or an unmapped range is refused."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 4)
    handle = mapped(backend, address, 2)
    data = filled(backend, address, 0x99, 2 * granularity)
    for what, page, num_pages in (
        ("the first half of a mapping", 0, 1),
        ("the second half of a mapping", 1, 1),
        ("a mapping and a hole", 0, 3),
        ("half a mapping and a hole", 1, 2),
        ("what was never mapped", 2, 1),
    ):
        at = at_page(backend, address, page)
        expect_refusal(backend, "mem_unmap", what, at, num_pages * granularity)
    expect(data, read_bytes(backend, address, 2 * granularity), "the mapping")
    backend.mem_unmap(address, 2 * granularity)
    expect_refusal(backend, "mem_unmap", "it twice", address, 2 * granularity)
    backend.mem_release(handle)
    backend.address_free(address, num_bytes)


def check_runs(backend: Backend) -> None:
    """A single access or unmap call may cover a run of several whole mappings."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 4)
    for page, num_pages in ((0, 1), (1, 2), (3, 1)):
        handle = backend.mem_create(num_pages * granularity)
        backend.mem_map(at_page(backend, address, page), num_pages * granularity, handle)
        backend.mem_release(handle)
    backend.mem_set_access(address, num_bytes, RW)
    data = filled(backend, address, 0x21, num_bytes)
    expect(data, read_bytes(backend, address, num_bytes), "the run")
    backend.mem_unmap(address, num_bytes)
    expect(0, backend.usage().num_mappings, "mappings after one unmap")
    backend.address_free(address, num_bytes)


def check_access_needs_mapping(backend: Backend) -> None:
    """Granting access where nothing is mapped, or over a hole, is refused."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 3)
    expect_refusal(backend, "mem_set_access", "access to nothing", address, granularity, RW)
    for page in (0, 2):
        backend.mem_release(mapped(backend, at_page(backend, address, page), 1))
    expect_refusal(backend, "mem_set_access", "access to a run with a hole", address, num_bytes, RW)
    for page in (0, 2):
        backend.mem_unmap(at_page(backend, address, page), granularity)
    backend.address_free(address, num_bytes)


def check_access_can_change(backend: Backend) -> None:
    """Access can be lowered to reading and raised again; the bytes stay."""
    granularity = backend.granularity_bytes
    address, _ = reserve(backend, 1)
    backend.mem_release(mapped(backend, address, 1))
    data = filled(backend, address, 0x31, granularity)
    backend.mem_set_access(address, granularity, Access.READ)
    expect(data, read_bytes(backend, address, granularity), "the bytes, read-only")
    backend.mem_set_access(address, granularity, RW)
    data = filled(backend, address, 0x32, granularity)
    expect(data, read_bytes(backend, address, granularity), "the bytes, writable again")
    backend.mem_unmap(address, granularity)
    backend.address_free(address, granularity)
