"""execute() and the host's mapping functions, on real memory.

Whether an address can be read is tested by passing it to write(2), which answers EFAULT where a
load would end the process.

Not covered: the CUDA driver behind the same signatures.
"""

import ctypes
import errno
import mmap
import os
import struct

import pytest

from vmkv.core import _native as native

MAP, SET_ACCESS, UNMAP = 0, 1, 2
NO_ACCESS, READ, READ_WRITE = 0, 1, 3
PAGE = mmap.PAGESIZE
NUM_PAGES = 8

libc = ctypes.CDLL(None, use_errno=True)
for name in ("read", "write"):
    getattr(libc, name).argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    getattr(libc, name).restype = ctypes.c_ssize_t


@pytest.fixture
def base():
    """Address of a fresh reservation of NUM_PAGES pages."""
    address = native.host_reserve(NUM_PAGES * PAGE, PAGE)
    yield address
    native.host_free(address, NUM_PAGES * PAGE)


@pytest.fixture
def fd():
    """A memfd of NUM_PAGES pages, page i filled with the byte i + 1."""
    descriptor = os.memfd_create("vmkv-test")
    for page in range(NUM_PAGES):
        os.write(descriptor, bytes([page + 1]) * PAGE)
    yield descriptor
    os.close(descriptor)


def run(*records):
    """Execute these records with the host's functions."""
    functions = native.host_functions()
    plan = b"".join(struct.pack("=4Q", *record) for record in records)
    return native.execute(plan, functions["map"], functions["set_access"], functions["unmap"], 0, 0)


def handle(descriptor, file_offset=0):
    """The host's encoding of bytes of a file, written out independently."""
    return descriptor * 2**40 + file_offset // 4096


def can_read(address):
    """True when a load from this address would not fault."""
    reader, writer = os.pipe()
    try:
        return libc.write(writer, address, 1) == 1
    finally:
        os.close(reader)
        os.close(writer)


def test_map_reaches_offsets_beyond_four_gib(base):
    """The handle keeps all bits of the offset."""
    file_offset = 5 * 2**40
    descriptor = os.memfd_create("vmkv-test")
    try:
        os.pwrite(descriptor, b"far", file_offset)
        os.ftruncate(descriptor, file_offset + PAGE)
        run((MAP, base, PAGE, handle(descriptor, file_offset)), (SET_ACCESS, base, PAGE, READ))
        assert ctypes.string_at(base, 3) == b"far"
    finally:
        os.close(descriptor)


def test_a_closed_file_stays_mapped(base):
    """Like a released handle, a closed descriptor lives on until it is unmapped."""
    descriptor = os.memfd_create("vmkv-test")
    os.write(descriptor, bytes([9]) * PAGE)
    run((MAP, base, PAGE, handle(descriptor)), (SET_ACCESS, base, PAGE, READ))
    os.close(descriptor)
    assert bytes([9]) == ctypes.string_at(base, 1)


def test_failure_stops_and_says_where_and_why(base, fd):
    """Records before the failing one are done, those after it are not, and nothing is undone."""
    num_done, status = run(
        (MAP, base, PAGE, handle(fd)),
        (SET_ACCESS, base, PAGE, READ),
        (MAP, base + PAGE + 1, PAGE, handle(fd)),  # not aligned
        (UNMAP, base, PAGE, 0),
    )
    assert (num_done, status) == (2, errno.EINVAL)
    assert can_read(base)


@pytest.mark.parametrize(
    ("op", "num_bytes", "argument"),
    [
        (MAP, 0, 0),
        (MAP, PAGE + 1, 0),
        (SET_ACCESS, 0, READ),
        (SET_ACCESS, PAGE - 1, READ),
        (SET_ACCESS, PAGE, 2),
        (UNMAP, 0, 0),
        (UNMAP, PAGE + 1, 0),
    ],
)
def test_host_functions_refuse_sizes_that_the_kernel_rounds(base, op, num_bytes, argument):
    """Sizes are whole pages and not zero, and the access flags are among the three."""
    assert run((op, base, num_bytes, argument)) == (0, errno.EINVAL)


def test_map_of_a_bad_descriptor_reports_the_errno(base):
    """The kernel's own reason comes back as the status."""
    assert run((MAP, base, PAGE, handle(2**24 - 1))) == (0, errno.EBADF)


def test_an_empty_plan_does_nothing():
    """No records need no functions and succeed."""
    assert native.execute(b"", 0, 0, 0, 0, 0) == (0, 0)


def test_execute_passes_all_arguments_of_the_driver():
    """Every argument of the driver's three signatures arrives, in order and unchanged."""
    calls = []

    class Access(ctypes.Structure):
        _fields_ = [
            ("location_type", ctypes.c_int),
            ("location_id", ctypes.c_int),
            ("flags", ctypes.c_int),
        ]

    u64, size, uint = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_ulonglong

    @ctypes.CFUNCTYPE(ctypes.c_int, u64, size, size, u64, uint)
    def map_fn(*args):
        calls.append(("map", *args))
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, u64, size, ctypes.POINTER(Access), size)
    def set_access_fn(address, num_bytes, accesses, num_accesses):
        first = accesses[0]
        access = (first.location_type, first.location_id, first.flags)
        calls.append(("set_access", address, num_bytes, num_accesses, *access))
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, u64, size)
    def unmap_fn(*args):
        calls.append(("unmap", *args))
        return -7

    big = 2**64 - 1
    plan = struct.pack("=12Q", MAP, 11, 12, big, SET_ACCESS, big, 22, 3, UNMAP, 31, big, 99)
    functions = [ctypes.cast(fn, ctypes.c_void_p).value for fn in (map_fn, set_access_fn, unmap_fn)]
    num_done, status = native.execute(plan, *functions, 1, 6)
    assert (num_done, status) == (2, -7)
    assert [
        ("map", 11, 12, 0, big, 0),
        ("set_access", big, 22, 1, 1, 6, 3),
        ("unmap", 31, big),
    ] == calls


def test_execute_runs_outside_the_gil():
    """The functions run without the GIL.

    PyGILState_Check takes nothing and returns 1 to a thread that holds the GIL, 0 to one that does
    not, so it can stand in for a mapping call and report as its status.
    """
    check = ctypes.cast(ctypes.pythonapi.PyGILState_Check, ctypes.c_void_p).value
    plan = struct.pack("=12Q", MAP, 0, 0, 0, SET_ACCESS, 0, 0, 0, UNMAP, 0, 0, 0)
    assert native.execute(plan, check, check, check, 0, 0) == (3, 0)
    # The stand-in can tell: called while holding the GIL, it answers 1.
    assert ctypes.pythonapi.PyGILState_Check() == 1


@pytest.mark.parametrize("num_bytes", [1, 31, 33, 63])
def test_execute_refuses_part_of_a_record(num_bytes):
    """A plan is a whole number of records."""
    with pytest.raises(ValueError, match=rf"32-byte records, got {num_bytes} bytes"):
        native.execute(bytes(num_bytes), 1, 1, 1, 0, 0)


@pytest.mark.parametrize(
    ("bad_record", "reason"),
    [
        ((3, 0, 0, 0), "record 1 of the plan has the unknown op 3"),
        ((2**64 - 1, 0, 0, 0), "unknown op 18446744073709551615"),
        ((SET_ACCESS, 0, 0, 2**31), "record 1 of the plan has access flags 2147483648"),
    ],
)
def test_execute_checks_the_whole_plan_before_the_first_call(base, fd, bad_record, reason):
    """A bad record anywhere means that no record runs."""
    run((MAP, base, PAGE, handle(fd)), (SET_ACCESS, base, PAGE, READ))
    with pytest.raises(ValueError, match=reason):
        run((UNMAP, base, PAGE, 0), bad_record)
    assert can_read(base)


@pytest.mark.parametrize(
    ("op", "name"), [(MAP, "map_fn"), (SET_ACCESS, "set_access_fn"), (UNMAP, "unmap_fn")]
)
def test_execute_refuses_a_missing_function_that_the_plan_needs(op, name):
    """An address of 0 is fine until a record needs it."""
    functions = [1, 1, 1]
    functions[op] = 0
    with pytest.raises(ValueError, match=f"record 0 of the plan needs {name}, which is 0"):
        native.execute(struct.pack("=4Q", op, 0, 0, 0), *functions, 0, 0)


def test_execute_refuses_wrong_types():
    """The plan is bytes, and the addresses are integers that fit 64 bits."""
    with pytest.raises(TypeError):
        native.execute(bytearray(32), 1, 1, 1, 0, 0)
    with pytest.raises(TypeError):
        native.execute(b"", "1", 1, 1, 0, 0)
    for address in (-1, 2**64):
        with pytest.raises(OverflowError):
            native.execute(b"", address, 1, 1, 0, 0)


@pytest.mark.parametrize("alignment", [PAGE, 2 * PAGE, 2**21, 2**30])
def test_reserve_aligns_and_free_gives_back(alignment):
    """The address is aligned, the bytes asked for are reserved, and freeing returns them."""
    num_bytes = 3 * PAGE
    address = native.host_reserve(num_bytes, alignment)
    assert address % alignment == 0
    assert not can_read(address)
    assert num_bytes == num_bytes_mapped(address, num_bytes)
    native.host_free(address, num_bytes)
    assert num_bytes_mapped(address, num_bytes) == 0


def test_reserve_gives_the_slack_of_alignment_back():
    """64 small reservations aligned to 1 GiB do not hold 64 GiB of addresses."""
    before = address_space_bytes()
    addresses = [native.host_reserve(PAGE, 2**30) for _ in range(64)]
    assert address_space_bytes() - before < 2**30
    for address in addresses:
        native.host_free(address, PAGE)


def address_space_bytes():
    """How many bytes of addresses this process has mapped or reserved."""
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[0]) * PAGE


def num_bytes_mapped(start, num_bytes):
    """How much of [start, start + num_bytes) is in this process's address map, from its start."""
    covered = start
    with open("/proc/self/maps") as lines:
        for line in lines:
            low, high = (int(bound, 16) for bound in line.split()[0].split("-"))
            if low <= covered < high:
                covered = min(high, start + num_bytes)
    return covered - start


@pytest.mark.parametrize(
    ("num_bytes", "alignment", "reason"),
    [
        (0, PAGE, "num_bytes must be a positive multiple of the OS page"),
        (PAGE + 1, PAGE, "num_bytes must be a positive multiple of the OS page"),
        (PAGE, 0, "alignment must be a power of two"),
        (PAGE, PAGE // 2, "alignment must be a power of two"),
        (PAGE, 3 * PAGE, "alignment must be a power of two"),
    ],
)
def test_reserve_refuses_odd_sizes_and_alignments(num_bytes, alignment, reason):
    """Sizes are whole pages and alignments are powers of two, at least a page."""
    with pytest.raises(ValueError, match=reason):
        native.host_reserve(num_bytes, alignment)


@pytest.mark.parametrize(("num_bytes", "alignment"), [(2**62, PAGE), (2**64 - PAGE, 2**63)])
def test_reserve_reports_exhaustion_as_oserror(num_bytes, alignment):
    """More addresses than there are is the kernel's ENOMEM, with no wrap-around on the way."""
    with pytest.raises(OSError, match=os.strerror(errno.ENOMEM)):
        native.host_reserve(num_bytes, alignment)


@pytest.mark.parametrize("num_bytes", [0, PAGE - 1])
def test_free_refuses_part_of_a_page(base, num_bytes):
    """Freeing a size that is not whole pages is EINVAL, and frees nothing."""
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        native.host_free(base, num_bytes)
    assert num_bytes_mapped(base, NUM_PAGES * PAGE) == NUM_PAGES * PAGE
