"""Memory shared between two processes, and the kernel's protection of exported memory.

The exporter is a child that is killed; the memory that it shared must live on here.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from helpers.another_user import BECOME_NOBODY, can_become_nobody

from vmkv import Backend, HostBackend, open_backend
from vmkv.core.backend import Access, AccessOp, CopyOp, MapOp, MemoryLocation
from vmkv.errors import DriverError, HostDriverError
from vmkv.testing import read_bytes
from vmkv.units import Address, KiB

RunPython = Callable[[str], "subprocess.CompletedProcess[str]"]

_EXPORTER = """
import os, socket, sys
from vmkv.core.backend import Access, AccessOp, MapOp, MemoryLocation, open_backend
device, location, descriptor = sys.argv[1:]
backend = open_backend(device)
size = 2 * backend.granularity_bytes
address = backend.address_reserve(size)
handle = backend.mem_create(size, MemoryLocation(location), shareable=True)
backend.execute([MapOp(address, size, handle), AccessOp(address, size, Access.READ_WRITE)])
backend.fill(address, size, 0x5E, 0)
backend.record_fence().wait()
fd = backend.mem_export(handle)
with socket.socket(fileno=int(descriptor)) as other:
    backend.note_stream(0)
    other.settimeout(60)
    socket.send_fds(other, [str(size).encode()], [fd])
    other.recv(1)
    backend.fill(address, size, 0x5F, 0)  # Through the mapping from before the export.
    backend.record_fence().wait()
    other.send(b".")
    other.recv(1)  # Until it is killed.
"""


@pytest.fixture(params=["host", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def importer(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A backend of this process, which the test leaves empty."""
    backend = open_backend(request.param)
    yield backend
    usage = backend.usage()
    backend.close()
    assert 0 == usage.num_handles + usage.num_mappings + usage.num_reservations


@pytest.mark.slow
@pytest.mark.parametrize("location", MemoryLocation)
def test_import_reads_another_process_and_outlives_it(
    importer: Backend, location: MemoryLocation
) -> None:
    """The exporter's bytes are read here before and after it is killed."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", _EXPORTER, importer.name, location.value]
    with ours, theirs:
        ours.settimeout(60)
        child = subprocess.Popen(
            [*command, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
        try:
            theirs.close()
            message, (fd,), *_ = socket.recv_fds(ours, 64, 1)
            size = int(message)
            with pytest.raises(DriverError, match="mem_import"):
                importer.mem_import(fd, size // 2)
            handle = importer.mem_import(fd, size)
            os.close(fd)
            address = importer.address_reserve(size)
            importer.mem_map(address, size, handle)
            with pytest.raises(DriverError, match="can only be read"):
                importer.mem_set_access(address, size, Access.READ_WRITE)
            importer.mem_set_access(address, size, Access.READ)
            assert b"\x5e" * size == read_bytes(importer, address, size)
            ours.send(b".")
            assert b"." == ours.recv(1)
            assert b"\x5f" * size == read_bytes(importer, address, size)
        finally:
            child.kill()
            returncode = child.wait(timeout=60)
    assert -signal.SIGKILL == returncode
    assert b"\x5f" * size == read_bytes(importer, address, size)
    importer.mem_unmap(address, size)
    importer.mem_release(handle)
    importer.address_free(address, size)


# ---- protection by the kernel, on the host ------------------------------------------------


@pytest.fixture
def exported(host: HostBackend) -> Iterator[int]:
    """A descriptor of two exported pages."""
    handle = host.mem_create(8 * KiB, shareable=True)
    fd = host.mem_export(handle)
    yield fd
    os.close(fd)
    host.mem_release(handle)


def _refused(attempt: Callable[[], object]) -> int | None:
    try:
        attempt()
    except OSError as error:
        return error.errno
    return None


def test_exported_descriptor_cannot_be_written(exported: int) -> None:
    """The kernel refuses writes to the descriptor, and to the file opened anew for writing."""
    assert errno.EBADF == _refused(lambda: os.write(exported, b"x"))
    assert errno.EACCES == _refused(lambda: mmap.mmap(exported, 4096))
    writable = os.open(f"/proc/self/fd/{exported}", os.O_RDWR)
    try:
        assert errno.EPERM == _refused(lambda: os.write(writable, b"x"))
        assert errno.EPERM == _refused(lambda: mmap.mmap(writable, 4096))
        assert errno.EPERM == _refused(lambda: os.ftruncate(writable, 4096))
        assert errno.EPERM == _refused(lambda: os.ftruncate(writable, 1 << 20))
    finally:
        os.close(writable)
    mmap.mmap(exported, 8 * KiB, prot=mmap.PROT_READ).close()


def test_kernel_refuses_write_access_without_the_books(host: HostBackend) -> None:
    """The test clears the flags of the books, and the kernel still refuses the access."""
    handle = host.mem_create(4 * KiB, shareable=True)
    fd = host.mem_export(handle)
    imported = host.mem_import(fd, 4 * KiB)
    os.close(fd)
    address = host.address_reserve(4 * KiB)
    host._books.allocations[handle].is_exported = False
    host._books.allocations[imported].is_imported = False
    for each in (handle, imported):
        host.mem_map(address, 4 * KiB, each)
        with pytest.raises(HostDriverError, match="EACCES"):
            host.mem_set_access(address, 4 * KiB, Access.READ_WRITE)
        host.mem_unmap(address, 4 * KiB)
        host._books.allocations[each].is_imported = each == imported
        host.mem_release(each)
    host.address_free(address, 4 * KiB)


def test_exported_file_holds_nothing_else(host: HostBackend, exported: int) -> None:
    """Memory of other handles lies in other files."""
    handles = [host.mem_create(4 * KiB, location) for location in MemoryLocation]
    common = {os.fstat(file.fd).st_ino for file in host._files.values()}
    assert 2 == len(common)
    assert os.fstat(exported).st_ino not in common
    assert 8 * KiB == os.fstat(exported).st_size
    for handle in handles:
        host.mem_release(handle)


def test_exported_descriptors_are_not_inherited(exported: int) -> None:
    """A child of the exporter gets only the descriptors that it is passed."""
    assert not os.get_inheritable(exported)


def test_import_refuses_memory_that_could_be_truncated(host: HostBackend) -> None:
    """A file without the seals could shrink under its reader, which ends the process."""
    for seals in (0, 0x02 | 0x04, 0x01 | 0x02 | 0x04):
        fd = os.memfd_create("stranger", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(fd, 8 * KiB)
        if seals:
            fcntl.fcntl(fd, 1033, seals)
        with pytest.raises(HostDriverError, match="no exported memory"):
            host.mem_import(fd, 8 * KiB)
        os.close(fd)
    with pytest.raises(HostDriverError, match="EBADF"):
        host.mem_import(fd, 8 * KiB)


def test_holder_of_a_descriptor_cannot_end_the_sharing(run_python: RunPython) -> None:
    """The holder may change the file's mode, on which neither export nor import depends."""
    if os.geteuid() == 0 and not can_become_nobody():
        pytest.skip("modes do not bind root, and this root cannot become another user")
    child = run_python(
        "import os\n"
        "from vmkv.core.backend import Access, AccessOp, HostBackend, MapOp\n"
        f"{BECOME_NOBODY if os.geteuid() == 0 else ''}"
        "host = HostBackend(4096)\n"
        "handle = host.mem_create(4096, shareable=True)\n"
        "address = host.address_reserve(4096)\n"
        "host.execute([MapOp(address, 4096, handle), AccessOp(address, 4096, Access.READ)])\n"
        "given = [host.mem_export(handle)]\n"
        "os.fchmod(given[0], 0)\n"
        "given.append(host.mem_export(handle))\n"
        "imported = [host.mem_import(fd, 4096) for fd in given]\n"
        "host.mem_unmap(address, 4096)\n"
        "for each in (handle, *imported):\n"
        "    host.execute([MapOp(address, 4096, each), AccessOp(address, 4096, Access.READ)])\n"
        "    host.mem_unmap(address, 4096)\n"
        "    host.mem_release(each)\n"
    )
    assert 0 == child.returncode, child.stderr


def test_import_refuses_memory_that_cannot_be_read(host: HostBackend, exported: int) -> None:
    """Mapping it would fail later."""
    write_only = os.open(f"/proc/self/fd/{exported}", os.O_WRONLY)
    with pytest.raises(HostDriverError, match="no exported memory"):
        host.mem_import(write_only, 8 * KiB)
    os.close(write_only)


def test_import_of_the_wrong_size_names_both_sizes(host: HostBackend, exported: int) -> None:
    with pytest.raises(HostDriverError, match="has 8192 bytes, not 4096"):
        host.mem_import(exported, 4 * KiB)


def test_shared_memory_is_freed_with_its_last_holder(host: HostBackend) -> None:
    """Descriptors are closed as well, so that thousands of exports do not exhaust them."""
    before = len(os.listdir("/proc/self/fd"))
    address = host.address_reserve(4 * KiB)
    numbers = set()
    for _ in range(30):
        handle = host.mem_create(4 * KiB, shareable=True)
        fd = host.mem_export(handle)
        imported = host.mem_import(fd, 4 * KiB)
        os.close(fd)
        numbers |= {handle, imported}
        host.execute([MapOp(address, 4 * KiB, imported), AccessOp(address, 4 * KiB, Access.READ)])
        assert host.usage().physical_bytes == host.file_bytes()
        host.mem_release(handle)
        host.mem_release(imported)
        host.mem_unmap(address, 4 * KiB)
    assert 60 == len(numbers), "a handle's number was used again"
    assert before == len(os.listdir("/proc/self/fd"))
    host.address_free(address, 4 * KiB)


def test_running_out_of_descriptors_says_how_to_get_more(run_python: RunPython) -> None:
    """Each shareable handle is a file, and a process may have 1,024; no descriptor is leaked."""
    child = run_python(
        "import os, resource\n"
        "from vmkv.core.backend import HostBackend\n"
        "from vmkv.errors import DriverError\n"
        "backend = HostBackend(4096)\n"
        "num_open = len(os.listdir('/proc/self/fd'))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "handles = []\n"
        "try:\n"
        "    while len(handles) < 100:\n"
        "        handles.append(backend.mem_create(4096, shareable=True))\n"
        "except DriverError as error:\n"
        "    assert 'EMFILE' in str(error) and 'ulimit -n' in str(error), error\n"
        "    assert not error.is_out_of_memory\n"
        "usage = backend.usage()\n"
        "assert 0 < usage.num_handles == len(handles) < 40\n"
        "try:\n"
        "    backend.mem_export(handles[0])\n"
        "except DriverError as error:\n"
        "    assert error.status_name == 'EMFILE', error\n"
        "backend.mem_release(handles.pop())\n"
        "os.close(backend.mem_export(handles[0]))\n"
        "for handle in handles:\n"
        "    backend.mem_release(handle)\n"
        "assert num_open == len(os.listdir('/proc/self/fd'))\n"
    )
    assert 0 == child.returncode, child.stderr


@pytest.mark.parametrize("location", MemoryLocation)
@pytest.mark.parametrize("shareable", [False, True])
def test_more_than_the_machine_has_is_out_of_memory(
    host: HostBackend, location: MemoryLocation, shareable: bool
) -> None:
    """The error names the location, and no memory or descriptor stays allocated."""
    num_descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(HostDriverError, match=f"8 TiB in {location.value} memory") as caught:
        host.mem_create(8 << 40, location, shareable=shareable)
    assert caught.value.is_out_of_memory
    assert 0 == host.file_bytes(location)
    assert num_descriptors == len(os.listdir("/proc/self/fd"))


_COPY = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64
)


def test_failing_batch_of_copies_reports_the_copies_done(host: HostBackend) -> None:
    """Copies before the failure are submitted, and counted with the one that failed."""
    handle = host.mem_create(4 * KiB)
    address = host.address_reserve(4 * KiB)
    host.execute([MapOp(address, 4 * KiB, handle), AccessOp(address, 4 * KiB, Access.READ_WRITE)])
    host.fill(address, 1, 0x61, 0)
    real_calls = host._native_calls
    real_copy = _COPY(real_calls.copy)
    stubborn = _COPY(
        lambda to, source, size, stream: (
            errno.EIO if to == address + 2 else real_copy(to, source, size, stream)
        )
    )
    host._native_calls = real_calls._replace(copy=ctypes.cast(stubborn, ctypes.c_void_p).value)
    ops = [CopyOp(Address(address + at), address, 1) for at in (1, 2, 3)]
    with pytest.raises(HostDriverError, match="copy failed with EIO") as caught:
        host.copy_many(ops, 0)
    host._native_calls = real_calls
    assert (1, 2) == (caught.value.num_done, host.calls["copy"])
    assert b"aa\0\0" == read_bytes(host, address, 4)
    host.mem_unmap(address, 4 * KiB)
    host.mem_release(handle)
    host.address_free(address, 4 * KiB)
