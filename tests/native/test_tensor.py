"""Views over raw addresses, and the count of live views.

Some tests use no framework: a consumer of a few lines of ctypes reads the DLPack structure and
calls the deleter as a framework would, on any thread and without the GIL.

Not covered: CUDA memory (a device number in the structure is all that differs here).
"""

import ctypes
import gc
import mmap
import resource
import subprocess
import sys
import threading

import pytest

from vmkv.core import _native as native

CPU, CUDA = 1, 2
PAGE = mmap.PAGESIZE

get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
get_pointer.argtypes, get_pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
set_name = ctypes.pythonapi.PyCapsule_SetName
set_name.argtypes, set_name.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_int
USED = b"used_dltensor"  # a module constant: the capsule keeps the pointer, not a copy


class ManagedTensor(ctypes.Structure):
    """DLManagedTensor, flattened, as dlpack.h lays it out."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    ]


def consume(capsule):
    """Take the tensor out of its capsule, as a framework does; the caller must delete it."""
    pointer = get_pointer(capsule, b"dltensor")
    assert set_name(capsule, USED) == 0
    return ManagedTensor.from_address(pointer)


def delete(tensor):
    """Call the tensor's deleter; ctypes releases the GIL meanwhile."""
    tensor.deleter(ctypes.addressof(tensor))


@pytest.fixture
def memory():
    """Address of one page that can be read and written."""
    with mmap.mmap(-1, PAGE) as pages:
        owner = ctypes.c_char.from_buffer(pages)
        yield ctypes.addressof(owner)
        del owner


def test_capsule_describes_the_bytes():
    """Every field of the structure is what DLPack wants for bytes on that device."""
    counter = native.ViewCounter()
    tensor = consume(native.view_capsule(0x7F0000001000, 2**40, CUDA, 3, counter))
    assert (tensor.data, tensor.device_type, tensor.device_id) == (0x7F0000001000, CUDA, 3)
    assert (tensor.ndim, (tensor.code, tensor.bits, tensor.lanes)) == (1, (1, 8, 1))
    assert (tensor.shape[0], tensor.strides[0], tensor.byte_offset) == (2**40, 1, 0)
    delete(tensor)


def test_counter_counts_views_until_they_are_deleted():
    """The count rises with each view and falls with each deletion, in any order."""
    counter = native.ViewCounter()
    assert counter.live == 0
    tensors = []
    for wanted in (1, 2, 3):
        tensors.append(consume(native.view_capsule(PAGE, PAGE, CPU, 0, counter)))
        assert wanted == counter.live
    for wanted, which in ((2, 1), (1, 0), (0, 2)):
        delete(tensors[which])
        assert wanted == counter.live


def test_an_unconsumed_capsule_cleans_up_after_itself():
    """A capsule that is never consumed counts as a view while it lives, and not afterwards."""
    counter = native.ViewCounter()
    capsule = native.view_capsule(PAGE, PAGE, CPU, 0, counter)
    assert counter.live == 1
    del capsule
    assert counter.live == 0


def test_a_consumed_capsule_leaves_the_tensor_alone():
    """When the empty capsule dies the tensor lives on."""
    counter = native.ViewCounter()
    capsule = native.view_capsule(PAGE, PAGE, CPU, 0, counter)
    tensor = consume(capsule)
    del capsule
    assert counter.live == 1
    delete(tensor)
    assert counter.live == 0


def test_views_outlive_their_counter():
    """Deleting a view after its counter has died is safe, from the capsule and from a tensor."""
    counter = native.ViewCounter()
    tensor = consume(native.view_capsule(PAGE, PAGE, CPU, 0, counter))
    capsule = native.view_capsule(PAGE, PAGE, CPU, 0, counter)
    del counter
    del capsule
    delete(tensor)


def test_views_can_be_deleted_on_other_threads():
    """Deleters that run at once on several threads bring the count to zero."""
    counter = native.ViewCounter()
    tensors = [consume(native.view_capsule(PAGE, PAGE, CPU, 0, counter)) for _ in range(400)]
    start = threading.Barrier(4)

    def delete_some(mine):
        start.wait()
        for tensor in mine:
            delete(tensor)

    threads = [threading.Thread(target=delete_some, args=(tensors[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.live == 0


def test_view_capsule_refuses_impossible_views():
    """Lengths fit int64, address 0 is only for empty views, and the counter is a ViewCounter."""
    counter = native.ViewCounter()
    with pytest.raises(ValueError, match=r"below 2\*\*63, got 9223372036854775808"):
        native.view_capsule(PAGE, 2**63, CPU, 0, counter)
    with pytest.raises(ValueError, match="a view of 1 bytes cannot start at address 0"):
        native.view_capsule(0, 1, CPU, 0, counter)
    with pytest.raises(OverflowError):
        native.view_capsule(-1, 1, CPU, 0, counter)
    with pytest.raises(TypeError, match="ViewCounter"):
        native.view_capsule(PAGE, 1, CPU, 0, object())
    with pytest.raises(TypeError):
        native.ViewCounter(1)
    assert counter.live == 0


def test_an_empty_view_may_start_anywhere():
    """Zero bytes are a view like any other, even at address 0."""
    counter = native.ViewCounter()
    tensor = consume(native.view_capsule(0, 0, CPU, 0, counter))
    assert tensor.shape[0] == 0
    delete(tensor)


def test_views_and_counters_do_not_leak():
    """Views, their counters and failed calls leave nothing behind."""

    def churn(num_rounds):
        for _ in range(num_rounds):
            counter = native.ViewCounter()
            native.view_capsule(PAGE, PAGE, CPU, 0, counter)
            with pytest.raises(ValueError, match="address 0"):
                native.view_capsule(0, 1, CPU, 0, counter)

    churn(1000)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    churn(50_000)  # 6 MiB if descriptors leaked, 1.5 MiB if counters did
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 1024


def test_torch_sees_the_memory_both_ways(memory):
    """A write through the tensor is in the memory, and a write to the memory is in the tensor."""
    torch = pytest.importorskip("torch")
    counter = native.ViewCounter()
    tensor = torch.utils.dlpack.from_dlpack(native.view_capsule(memory, PAGE, CPU, 0, counter))
    assert (torch.uint8, (PAGE,), memory) == (tensor.dtype, tuple(tensor.shape), tensor.data_ptr())
    tensor[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    assert ctypes.string_at(memory, 4) == b"\x01\x02\x03\x04"
    ctypes.memmove(memory, b"\x09", 1)
    assert tensor[0].item() == 9


def test_torch_views_keep_the_count_up(memory):
    """The count falls when the tensor and every slice and reinterpretation of it are gone."""
    torch = pytest.importorskip("torch")
    counter = native.ViewCounter()
    tensor = torch.utils.dlpack.from_dlpack(native.view_capsule(memory, PAGE, CPU, 0, counter))
    rows = tensor.view(torch.float32).as_strided((4, 8), (16, 1))
    part = rows[1:]
    assert counter.live == 1
    del tensor, rows
    gc.collect()
    assert counter.live == 1
    del part
    gc.collect()
    assert counter.live == 0


def test_torch_views_terabytes_without_touching_them():
    """A tensor over 4 TiB of reserved addresses is made, sliced and dropped; nothing is read."""
    torch = pytest.importorskip("torch")
    num_bytes = 1 << 42
    address = native.host_reserve(num_bytes, 1 << 21)
    counter = native.ViewCounter()
    tensor = torch.utils.dlpack.from_dlpack(
        native.view_capsule(address, num_bytes, CPU, 0, counter)
    )
    last = tensor.view(torch.bfloat16).view(1 << 20, 1 << 21)[-1]
    assert (num_bytes, address + num_bytes - (1 << 22)) == (tensor.numel(), last.data_ptr())
    del tensor, last
    gc.collect()
    assert counter.live == 0
    native.host_free(address, num_bytes)


SHUTDOWN = """
import sys
from vmkv.core import _native as native
import torch
counter = native.ViewCounter()
address = native.host_reserve(1 << 30, 4096)
sys.kept = torch.utils.dlpack.from_dlpack(native.view_capsule(address, 1 << 30, 1, 0, counter))
"""


@pytest.mark.slow
def test_a_view_may_outlive_the_interpreter():
    """A tensor that is still alive at exit is dropped, or leaked, without a crash."""
    pytest.importorskip("torch")
    result = subprocess.run([sys.executable, "-c", SHUTDOWN], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
