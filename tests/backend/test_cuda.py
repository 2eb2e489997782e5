"""CUDA alone: the driver's granularity, hardware protection, host memory, and a busy device.

Each test needs a GPU. A thread that maps beside torch is tested for correctness, not for speed.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vmkv import Backend, BackendUsage, open_backend
from vmkv.core import _native
from vmkv.core.backend import Access, AccessOp, CopyOp, MapOp, MemoryLocation, UnmapOp
from vmkv.errors import CudaDriverError, DriverError
from vmkv.testing import read_bytes, write_bytes
from vmkv.units import Address, GiB, MiB

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda() -> Iterator[Any]:
    """The first GPU, which the test leaves as empty as it found it."""
    backend = open_backend("cuda:0")
    yield backend
    usage = backend.usage()
    backend.close()
    assert BackendUsage() == usage, "the test left something behind"


def _map(backend: Backend, address: int, num_bytes: int) -> None:
    """Map new writable memory, which lives as long as its mapping."""
    handle = backend.mem_create(num_bytes)
    at = Address(address)
    backend.execute([MapOp(at, num_bytes, handle), AccessOp(at, num_bytes, Access.READ_WRITE)])
    backend.mem_release(handle)


def test_cuda_granularity_divides_2_mib(cuda: Any) -> None:
    """Discrete GPUs of today map 2 MiB; others may map less, but a divisor of it."""
    assert 0 == 2 * MiB % cuda.granularity_bytes


def test_cuda_release_while_mapped_returns_memory_after_unmap(cuda: Any) -> None:
    """The device's own count of free memory falls with the mapping and rises without it."""
    num_bytes = 1 * GiB
    address = cuda.address_reserve(num_bytes)
    before = cuda.free_memory_bytes()
    _map(cuda, address, num_bytes)
    assert cuda.free_memory_bytes() <= before - num_bytes + 64 * MiB
    cuda.mem_unmap(address, num_bytes)
    assert cuda.free_memory_bytes() >= before - 64 * MiB
    cuda.address_free(address, num_bytes)


def test_cuda_exhaustion_says_out_of_memory(cuda: Any) -> None:
    """A full device is told apart from a broken one."""
    with pytest.raises(CudaDriverError) as caught:
        cuda.mem_create(64 << 40)
    assert caught.value.is_out_of_memory
    assert BackendUsage() == cuda.usage()


_WRITE_TO_READ_ONLY = """
import sys, torch
from vmkv import open_backend
from vmkv.core import _native
from vmkv.core.backend import Access
backend = open_backend("cuda:0")
size = backend.granularity_bytes
address = backend.address_reserve(size)
backend.mem_map(address, size, backend.mem_create(size))
backend.mem_set_access(address, size, Access.{access})
capsule = _native.view_capsule(address, size, *backend.dlpack_device, _native.ViewCounter())
tensor = torch.utils.dlpack.from_dlpack(capsule)
assert tensor.is_cuda
print("sum", int(tensor.sum()))
try:
    tensor.fill_(1)
    torch.cuda.synchronize()
except Exception as error:
    print("fault", error)
    sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("access", "returncode"), [("READ", 3), ("READ_WRITE", 0)])
def test_cuda_enforces_read_only(access: str, returncode: int) -> None:
    """A kernel may read a read-only mapping; one that writes to it ends its context."""
    child = subprocess.run(
        [sys.executable, "-c", _WRITE_TO_READ_ONLY.format(access=access)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "sum 0" in child.stdout
    assert returncode == child.returncode, child.stdout + child.stderr


def test_cuda_fence_waits_for_submitted_work(cuda: Any) -> None:
    """A fence behind a second of work has passed after a wait, not before."""
    stream = torch.cuda.Stream()
    cuda.note_stream(stream.cuda_stream)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
    fence = cuda.record_fence()
    assert not fence.has_passed()
    fence.wait()
    assert fence.has_passed()
    assert stream.query()


def test_cuda_fence_covers_every_noted_stream(cuda: Any) -> None:
    """Work on the second stream holds the fence back though the first is idle."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    for stream in streams:
        cuda.note_stream(stream.cuda_stream)
    with torch.cuda.stream(streams[1]):
        torch.cuda._sleep(500_000_000)
    fence = cuda.record_fence()
    assert not fence.has_passed()
    fence.wait()


def test_cuda_join_orders_streams(cuda: Any) -> None:
    """After a join, work on one stream sees the earlier work of another stream."""
    size = cuda.granularity_bytes
    address = cuda.address_reserve(2 * size)
    second = Address(address + size)
    _map(cuda, address, 2 * size)
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (producer, consumer):
        cuda.note_stream(stream.cuda_stream)
    write_bytes(cuda, address, b"\7" * size)
    with torch.cuda.stream(producer):
        torch.cuda._sleep(200_000_000)
    cuda.copy(second, address, size, producer.cuda_stream)
    cuda.join_streams(consumer.cuda_stream)
    cuda.copy(address, second, size, consumer.cuda_stream)
    consumer.synchronize()
    assert b"\7" * size == read_bytes(cuda, address, size)
    cuda.mem_unmap(address, 2 * size)
    cuda.address_free(address, 2 * size)


def test_cuda_thread_maps_beside_torch(cuda: Any) -> None:
    """A thread that maps and unmaps fresh ranges disturbs no kernel of the main thread."""
    size = cuda.granularity_bytes
    address = cuda.address_reserve(64 * size)
    done = threading.Event()
    failures: list[DriverError] = []

    def work() -> None:
        try:
            for turn in range(200):
                at = Address(address + turn % 64 * size)
                _map(cuda, at, size)
                cuda.execute([UnmapOp(at, size)])
        except DriverError as error:
            failures.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=work)
    matrix = torch.eye(512, device="cuda")
    value = torch.arange(512 * 512, dtype=torch.float32, device="cuda").view(512, 512)
    thread.start()
    product = value
    while not done.is_set():
        product = product @ matrix
    thread.join()
    assert [] == failures
    assert torch.equal(value, product)
    cuda.address_free(address, 64 * size)


def test_cuda_memory_of_the_host_leaves_the_device_alone(cuda: Any) -> None:
    """A gigabyte in `HOST` costs the device nothing, and is given back."""
    before, host_before = cuda.free_memory_bytes(), cuda.free_host_memory_bytes()
    handle = cuda.mem_create(1 * GiB, MemoryLocation.HOST)
    assert (0, 1 * GiB) == (cuda.usage().physical_bytes, cuda.usage().host_bytes)
    assert cuda.free_memory_bytes() >= before - 64 * MiB
    assert cuda.free_host_memory_bytes() <= host_before - GiB // 2
    cuda.mem_release(handle)
    assert cuda.free_host_memory_bytes() >= host_before - GiB // 2


def test_cuda_kernels_and_cpu_read_memory_of_the_host(cuda: Any) -> None:
    """Torch computes on a view of it, and the CPU reads the same bytes at the same address."""
    size = cuda.granularity_bytes
    address = cuda.address_reserve(2 * size)
    for at, location in enumerate(MemoryLocation):
        handle = cuda.mem_create(size, location)
        cuda.mem_map(Address(address + at * size), size, handle)
        cuda.mem_release(handle)
    cuda.mem_set_access(address, 2 * size, Access.READ_WRITE)
    capsule = _native.view_capsule(address, 2 * size, *cuda.dlpack_device, _native.ViewCounter())
    view = torch.utils.dlpack.from_dlpack(capsule)
    view.copy_(torch.arange(2 * size, device="cuda") % 251)
    wanted = torch.arange(2 * size, device="cuda") % 251
    assert torch.equal(wanted.to(torch.uint8), view)
    cuda.mem_unmap(address, 2 * size)
    cuda.address_free(address, 2 * size)


def test_cuda_copies_do_not_wait(cuda: Any) -> None:
    """Copies to host memory, and fills, are only queued behind their stream's work."""
    size = 64 * MiB
    address = cuda.address_reserve(2 * size)
    second = Address(address + size)
    for at, location in ((address, MemoryLocation.DEVICE), (second, MemoryLocation.HOST)):
        handle = cuda.mem_create(size, location)
        cuda.execute([MapOp(at, size, handle), AccessOp(at, size, Access.READ_WRITE)])
        cuda.mem_release(handle)
    busy = torch.cuda.Stream()
    cuda.note_stream(busy.cuda_stream)
    side = cuda.new_stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(1_000_000_000)
    cuda.stream_wait(side, busy.cuda_stream)
    cuda.fill(address, size, 0x41, side)
    cuda.copy(second, address, size, side)
    cuda.fill(address, size, 0x42, side)
    cuda.copy_many([CopyOp(address, second, size // 2)], side)
    assert not busy.query(), "a call waited for the stream"
    fence = cuda.record_fence()
    assert not fence.has_passed()
    fence.wait()
    wanted = b"\x41" * (size // 2) + b"\x42" * (size // 2)
    assert wanted == read_bytes(cuda, address, size)
    cuda.stream_destroy(side)
    cuda.mem_unmap(address, 2 * size)
    cuda.address_free(address, 2 * size)


def _mapped_and_busy(cuda: Any) -> tuple[Address, int, torch.cuda.Stream]:
    """Map one unit of memory; return its address and size, and a stream that is busy for long."""
    size = cuda.granularity_bytes
    address = cuda.address_reserve(size)
    _map(cuda, address, size)
    busy = torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(500_000_000)
    return address, size, busy


def test_cuda_fences_leave_streams_out_that_are_not_noted(cuda: Any) -> None:
    """Such a stream is destroyed as others are."""
    address, size, busy = _mapped_and_busy(cuda)
    aside = cuda.new_stream(is_noted=False)
    cuda.stream_wait(aside, busy.cuda_stream)
    cuda.fill(address, size, 0x17, aside)
    cuda.record_fence().wait()
    assert not busy.query()
    cuda.stream_destroy(aside)
    assert busy.query()
    cuda.mem_unmap(address, size)
    cuda.address_free(address, size)


def test_cuda_destroying_a_stream_waits_for_its_work(cuda: Any) -> None:
    """The stream's work needs no fence afterwards."""
    address, size, busy = _mapped_and_busy(cuda)
    side = cuda.new_stream()
    cuda.stream_wait(side, busy.cuda_stream)
    cuda.fill(address, size, 0x17, side)
    cuda.stream_destroy(side)
    assert busy.query()
    cuda.mem_unmap(address, size)
    cuda.address_free(address, size)
