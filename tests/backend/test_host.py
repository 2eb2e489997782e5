"""The host backend alone: memory faults, memory returned to the kernel, failing system calls.

Faults end the process, so each happens in a child, whose negative return code names the signal.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from vmkv import BackendUsage, HostBackend
from vmkv.core.backend import Access, AccessOp, MapOp, UnmapOp
from vmkv.errors import DriverError, HostDriverError
from vmkv.testing import write_bytes
from vmkv.units import Address, KiB, MiB

RunPython = Callable[[str], "subprocess.CompletedProcess[str]"]

_SETUP = """
import ctypes, faulthandler
from vmkv.core.backend import Access, HostBackend
faulthandler.disable()
backend = HostBackend({granularity})
size = backend.granularity_bytes
address = backend.address_reserve(3 * size)
handle = backend.mem_create(size)
def read(): return ctypes.string_at(address + size - 1, 1)
def write(): ctypes.memset(address, 1, size)
def map_and_grant(access):
    backend.mem_map(address, size, handle)
    backend.mem_set_access(address, size, access)
"""

_FAULTS = {
    "reading reserved addresses": "read()",
    "reading before access is granted": "backend.mem_map(address, size, handle); read()",
    "writing before access is granted": "backend.mem_map(address, size, handle); write()",
    "writing where reading is granted": "map_and_grant(Access.READ); read(); write()",
    "reading after access is taken": (
        "map_and_grant(Access.READ_WRITE); write();"
        "backend.mem_set_access(address, size, Access.NONE); read()"
    ),
    "reading after unmap": (
        "map_and_grant(Access.READ_WRITE); write(); backend.mem_unmap(address, size); read()"
    ),
    "reading a remapped range before access": (
        "map_and_grant(Access.READ_WRITE); backend.mem_unmap(address, size);"
        "backend.mem_map(address, size, handle); read()"
    ),
    "reading past a mapping": (
        "map_and_grant(Access.READ_WRITE); ctypes.string_at(address + size, 1)"
    ),
}

_NO_FAULTS = {
    "writing where writing is granted": "map_and_grant(Access.READ_WRITE); write(); read()",
    "reading where reading is granted": "map_and_grant(Access.READ); read()",
    "reading a released handle's mapping": (
        "map_and_grant(Access.READ_WRITE); backend.mem_release(handle); write(); read()"
    ),
}


@pytest.mark.parametrize("granularity", [4 * KiB, 2 * MiB])
@pytest.mark.parametrize("what", _FAULTS)
def test_host_faults_where_cuda_would(what: str, granularity: int, run_python: RunPython) -> None:
    """A forbidden access ends the process, as it ends a CUDA context."""
    child = run_python(_SETUP.format(granularity=granularity) + _FAULTS[what])
    assert child.returncode in (-signal.SIGSEGV, -signal.SIGBUS), child.stderr


@pytest.mark.parametrize("what", _NO_FAULTS)
def test_host_allows_accesses_that_cuda_allows(what: str, run_python: RunPython) -> None:
    """The scripts run to their end, so the faults above come from the forbidden accesses."""
    child = run_python(_SETUP.format(granularity=64 * KiB) + _NO_FAULTS[what])
    assert 0 == child.returncode, child.stderr


def _mapped(backend: HostBackend, num_bytes: int) -> Address:
    """Memory that only its mapping keeps alive."""
    address = backend.address_reserve(num_bytes)
    handle = backend.mem_create(num_bytes)
    backend.execute(
        [MapOp(address, num_bytes, handle), AccessOp(address, num_bytes, Access.READ_WRITE)]
    )
    backend.mem_release(handle)
    return address


#: Error of the kernel's count: each processor reports its pages only when it has some.
_SLACK_BYTES = 1 * MiB


def _shared_resident_bytes() -> int:
    """Resident memory of memfds and the like in this process, as counted by the kernel."""
    with open("/proc/self/status") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return int(fields["RssShmem"].split()[0]) * KiB


def test_host_memory_goes_back_to_the_kernel(host: HostBackend) -> None:
    """The file's blocks and the process's resident memory fall when memory is released."""
    num_bytes = 8 * MiB
    resident_bytes = _shared_resident_bytes()
    address = _mapped(host, num_bytes)
    write_bytes(host, address, b"\1" * num_bytes)
    assert num_bytes == host.file_bytes()
    assert resident_bytes + num_bytes <= _shared_resident_bytes() + _SLACK_BYTES
    host.mem_unmap(address, num_bytes)
    assert 0 == host.file_bytes()
    assert _shared_resident_bytes() < resident_bytes + num_bytes // 2
    host.address_free(address, num_bytes)


def test_host_reservation_costs_no_memory(host: HostBackend) -> None:
    before = _shared_resident_bytes()
    address = host.address_reserve(1 << 40)
    assert host.file_bytes() == 0
    assert _shared_resident_bytes() <= before + _SLACK_BYTES
    host.address_free(address, 1 << 40)


def test_host_handles_are_never_reissued(host: HostBackend) -> None:
    """A stale handle names no other memory, because its number is never used again."""
    seen = set()
    for _ in range(20):
        handle = host.mem_create(4 * KiB)
        assert handle not in seen
        seen.add(handle)
        host.mem_release(handle)
    address = host.address_reserve(4 * KiB)
    for stale in seen:
        with pytest.raises(HostDriverError, match="not live"):
            host.mem_map(address, 4 * KiB, stale)
    host.address_free(address, 4 * KiB)


@pytest.mark.parametrize("num_bytes", [-4096, 0, 1, 4095, 4097])
def test_host_refusals_name_call_size_and_reason(host: HostBackend, num_bytes: int) -> None:
    """A refusal is an EINVAL with a reason."""
    with pytest.raises(HostDriverError, match="multiple of the granularity") as caught:
        host.mem_create(num_bytes)
    error = caught.value
    wanted = ("mem_create", errno.EINVAL, "EINVAL", False)
    assert wanted == (error.call, error.status, error.status_name, error.is_out_of_memory)


# ---- failing system calls -----------------------------------------------------------------

_UNMAP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t)
_SET_ACCESS = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t
)


@pytest.fixture
def released(host: HostBackend) -> list[UnmapOp]:
    """The unmaps of three pages side by side, whose handles are released."""
    page = host.granularity_bytes
    address = host.address_reserve(3 * page)
    ops = [UnmapOp(Address(address + at * page), page) for at in range(3)]
    for op in ops:
        handle = host.mem_create(page)
        host.mem_map(op.address, page, handle)
        host.mem_release(handle)
    return ops


def test_host_keeps_its_books_when_the_kernel_refuses_an_unmap(
    host: HostBackend, released: list[UnmapOp]
) -> None:
    """Of three unmaps the second fails: the first is gone, the others are still booked."""
    ops, (address, page) = released, released[0]
    real_calls = host._native_calls
    real_unmap = _UNMAP(real_calls.unmap)
    stubborn = _UNMAP(
        lambda at, size: errno.ENOMEM if at == address + page else real_unmap(at, size)
    )
    host._native_calls = real_calls._replace(unmap=ctypes.cast(stubborn, ctypes.c_void_p).value)
    with pytest.raises(HostDriverError) as caught:
        host.execute(ops)
    host._native_calls = real_calls
    assert (1, True) == (caught.value.num_done, caught.value.is_out_of_memory)
    assert (2, 2 * page) == (host.usage().num_mappings, host.usage().physical_bytes)
    host.execute(ops[1:])
    host.address_free(address, 3 * page)


def test_host_keeps_its_books_when_unmapped_memory_cannot_be_freed(
    host: HostBackend, released: list[UnmapOp], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three mappings are gone; the handles are live and can be released again."""

    def refuse(_: object) -> None:
        raise HostDriverError("mem_release", errno.EIO, "EIO", "")

    address, page = released[0]
    monkeypatch.setattr(host, "_free", refuse)
    with pytest.raises(HostDriverError, match="EIO"):
        host.execute(released)
    monkeypatch.undo()
    assert (0, 3 * page) == (host.usage().num_mappings, host.usage().physical_bytes)
    for handle in list(host._books.allocations):
        host.mem_release(handle)
    host.address_free(address, 3 * page)


def test_host_undoes_a_batch_when_the_kernel_refuses_access(host: HostBackend) -> None:
    """The batch's maps are undone, in the books and in the address space."""
    page = host.granularity_bytes
    address = host.address_reserve(2 * page)
    handles = [host.mem_create(page) for _ in range(2)]
    ops = [MapOp(Address(address + at * page), page, handles[at]) for at in range(2)]
    ops.append(AccessOp(address, 2 * page, Access.READ_WRITE))
    before = host.usage()
    real_calls = host._native_calls
    refusing = _SET_ACCESS(lambda *arguments: errno.EACCES)
    host._native_calls = real_calls._replace(
        set_access=ctypes.cast(refusing, ctypes.c_void_p).value
    )
    with pytest.raises(HostDriverError, match="EACCES") as caught:
        host.execute(ops)
    host._native_calls = real_calls
    assert ("mem_set_access", 2) == (caught.value.call, caught.value.num_done)
    assert before == host.usage()
    host.execute(ops)
    host.execute([UnmapOp(address, 2 * page)])
    for handle in handles:
        host.mem_release(handle)
    host.address_free(address, 2 * page)


# ---- closing and unmapping ----------------------------------------------------------------


def test_host_close_closes_its_files() -> None:
    """Opening and closing many backends leaves no descriptor open."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        backend = HostBackend(4 * KiB)
        backend.close()
        backend.close()
    assert before == len(os.listdir("/proc/self/fd"))


def test_host_mixed_size_run_is_unmapped_in_one_call(host: HostBackend) -> None:
    """The reclaimer unmaps whole runs, whose mappings differ in size."""
    page = host.granularity_bytes
    address = host.address_reserve(7 * page)
    at = 0
    for num_pages in (4, 1, 2):
        handle = host.mem_create(num_pages * page)
        host.mem_map(Address(address + at * page), num_pages * page, handle)
        host.mem_release(handle)
        at += num_pages
    with pytest.raises(DriverError):
        host.mem_unmap(address, 6 * page)  # Cuts the last mapping.
    host.mem_unmap(address, 7 * page)
    host.address_free(address, 7 * page)
    assert BackendUsage() == host.usage()


LIMITED = """
import ctypes
from vmkv.core import _native
from vmkv.core.backend import Access, AccessOp, BackendUsage, HostBackend, MapOp
from vmkv.errors import DriverError

PAGE, NUM = 4096, 400
limit = int(open("/proc/sys/vm/max_map_count").read())
backend = HostBackend(PAGE)
address = backend.address_reserve(NUM * PAGE)
handles = [backend.mem_create(PAGE) for _ in range(NUM)]
# Neighbours have no neighbours in the file, so that the kernel joins no two mappings.
maps = [MapOp(address + at * PAGE, PAGE, handles[-1 - at]) for at in range(NUM)]
backend.execute(maps[:100])
filler, mprotect = _native.host_reserve(2 * limit * PAGE, PAGE), ctypes.CDLL(None).mprotect
mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
at = 1
while mprotect(filler + at * PAGE, PAGE, 1) == 0:
    at += 2
for back in range(at - 82, at, 2):  # About 80 mappings are left.
    mprotect(filler + back * PAGE, PAGE, 0)
for _ in range(3):
    try:
        backend.execute([*maps[100:300], AccessOp(maps[100].address, 200 * PAGE, Access.READ)])
    except DriverError as error:
        assert "vm.max_map_count" in str(error)
        assert "ENOMEM" in str(error)
    else:
        raise AssertionError("the limit was not reached")
    assert backend.usage().num_mappings == 100
with backend.restoring():
    backend.execute(maps[100:300])
for each in maps[1:300:2] + maps[:300:2]:
    backend.mem_unmap(each.address, PAGE)
backend.address_free(address, NUM * PAGE)
for handle in handles:
    backend.mem_release(handle)
assert backend.usage() == BackendUsage()
backend.close()
"""


@pytest.mark.skipif(
    int(Path("/proc/sys/vm/max_map_count").read_text()) > 1 << 17,
    reason="filling the process up to the limit on mappings would take long",
)
def test_host_undoes_a_batch_at_the_limit_on_mappings(run_python: RunPython) -> None:
    """And unmaps, frees, and maps again what it had to unmap: some mappings are held back."""
    ended = run_python(LIMITED)
    assert 0 == ended.returncode, ended.stderr
