"""The backend contract, second part: batches, data, order, counting, threads."""

from __future__ import annotations

import threading

from ..core.backend import AccessOp, Backend, CopyOp, MapOp, UnmapOp
from ..errors import DriverError, VMKVError
from ..units import Address
from .access import read_bytes, write_bytes
from .tools import RW, at_page, expect, expect_refusal, filled, mapped, reserve

_STREAM = 0  # The default stream.

# ---- batches ------------------------------------------------------------------------------


def check_execute_nothing(backend: Backend) -> None:
    """An empty batch does nothing and succeeds."""
    before = backend.calls.copy()
    backend.execute([])
    expect(before, backend.calls, "calls")


def check_execute_maps_is_atomic(backend: Backend) -> None:
    """A batch of maps that fails, wherever it fails, leaves nothing mapped, and can be repeated."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 4)
    handles = [backend.mem_create(granularity) for _ in range(3)]
    good: list[MapOp | AccessOp | UnmapOp] = [
        MapOp(at_page(backend, address, page), granularity, handle)
        for page, handle in enumerate(handles)
    ]
    good.append(AccessOp(address, 3 * granularity, RW))
    over_a_mapping = MapOp(address, granularity, handles[2])
    over_a_hole = AccessOp(address, num_bytes, RW)
    for fail_at, bad, call in (
        (1, over_a_mapping, "mem_map"),
        (2, over_a_mapping, "mem_map"),
        (3, over_a_hole, "mem_set_access"),
        (4, over_a_mapping, "mem_map"),
    ):
        before = backend.usage()
        try:
            backend.execute([*good[:fail_at], bad, *good[fail_at:]])
        except DriverError as error:
            expect(call, error.call, "the primitive that failed")
            expect(fail_at, error.num_done, "operations before the failure")
        else:
            raise AssertionError(f"a batch with a wrong {call} succeeded")
        expect(before, backend.usage(), f"usage after a batch that failed at {fail_at}")
    backend.execute(good)
    data = filled(backend, address, 0x66, 3 * granularity)
    expect(data, read_bytes(backend, address, 3 * granularity), "the batch repeated")
    backend.mem_unmap(address, 3 * granularity)
    for handle in handles:
        backend.mem_release(handle)
    backend.address_free(address, num_bytes)


def check_execute_unmaps_reports(backend: Backend) -> None:
    """A batch of unmaps that fails says in `num_done` how many are gone; the rest stay."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 4)
    for page in (0, 1, 3):
        backend.mem_release(mapped(backend, at_page(backend, address, page), 1))
    data = filled(backend, at_page(backend, address, 3), 0x18, granularity)
    ops = [UnmapOp(at_page(backend, address, page), granularity) for page in range(4)]
    try:
        backend.execute(ops)  # Nothing is mapped at page 2.
    except DriverError as error:
        expect(("mem_unmap", 2), (error.call, error.num_done), "the failure")
    else:
        raise AssertionError("unmapping what is not mapped succeeded in a batch")
    expect(1, backend.usage().num_mappings, "mappings left")
    expect(data, read_bytes(backend, at_page(backend, address, 3), granularity), "what is left")
    backend.execute(ops[3:])
    backend.address_free(address, num_bytes)


# ---- order, data, books -------------------------------------------------------------------


def check_copy(backend: Backend) -> None:
    """A copy moves exactly its bytes, at any offset; copies of a stream keep their order."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 2)
    backend.mem_release(mapped(backend, address, 2))
    source, target = address, at_page(backend, address, 1)
    write_bytes(backend, source, bytes(range(1, 200)))
    backend.copy(Address(target + 7), Address(source + 3), 100, _STREAM)
    wanted = bytes(7) + bytes(range(4, 104)) + bytes(93)
    expect(wanted, read_bytes(backend, target, 200), "the copy and what is beside it")
    backend.copy(Address(target + 500), Address(target + 7), 100, _STREAM)
    backend.copy(target, Address(target + 500), 100, _STREAM)
    expect(bytes(range(4, 104)), read_bytes(backend, target, 100), "a copy of a copy")
    backend.mem_unmap(address, 2 * granularity)
    backend.address_free(address, num_bytes)


def check_copy_many(backend: Backend) -> None:
    """A batch of copies is submitted in order, and each of them is counted."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 4)
    for page in range(4):
        backend.mem_release(mapped(backend, at_page(backend, address, page), 1))
    data = filled(backend, address, 0x61, granularity)
    before = backend.calls.copy()
    backend.copy_many([], _STREAM)
    ops = [
        CopyOp(at_page(backend, address, page + 1), at_page(backend, address, page), granularity)
        for page in range(3)
    ]
    backend.copy_many(ops, _STREAM)
    expect({"copy": 3}, dict(backend.calls - before), "calls")
    expect(data * 4, read_bytes(backend, address, num_bytes), "the page handed on three times")
    backend.copy(at_page(backend, address, 2), address, 2 * granularity, _STREAM)
    expect(data * 4, read_bytes(backend, address, num_bytes), "a copy over two mappings at once")
    backend.mem_unmap(address, num_bytes)
    backend.address_free(address, num_bytes)


def check_fill(backend: Backend) -> None:
    """A fill sets exactly its bytes, over mappings and at any offset, in the stream's order."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 2)
    for page in (0, 1):
        backend.mem_release(mapped(backend, at_page(backend, address, page), 1))
    filled(backend, address, 0x15, num_bytes)
    backend.fill(Address(address + 3), num_bytes - 5, 0xFF, _STREAM)
    wanted = b"\x15" * 3 + b"\xff" * (num_bytes - 5) + b"\x15" * 2
    expect(wanted, read_bytes(backend, address, num_bytes), "the fill and what is beside it")
    backend.copy(Address(address + 100), address, 10, _STREAM)
    backend.fill(address, granularity, 0, _STREAM)
    backend.copy(address, Address(address + granularity), 1, _STREAM)
    wanted = b"\xff" + bytes(granularity - 1)
    expect(wanted, read_bytes(backend, address, granularity), "copies and fills of one stream")
    for size, byte in ((granularity, -1), (granularity, 256), (-1, 0)):
        expect_refusal(backend, "fill", f"{size} bytes of {byte}", address, size, byte, _STREAM)
    expect_refusal(
        backend, "copy", "less than nothing", Address(address + granularity), address, -1, _STREAM
    )
    backend.mem_unmap(address, num_bytes)
    backend.address_free(address, num_bytes)


def check_streams(backend: Backend) -> None:
    """Streams are made, wait for each other, are covered by fences, and are destroyed once."""
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 3)
    for page in range(3):
        backend.mem_release(mapped(backend, at_page(backend, address, page), 1))
    data = filled(backend, address, 0x2E, granularity)
    first, second = backend.new_stream(), backend.new_stream()
    expect(3, len({first, second, _STREAM}), "streams that differ")
    expect(2, backend.usage().num_streams, "streams")
    pages = [at_page(backend, address, page) for page in range(3)]
    for _ in range(20):
        backend.fill(pages[1], granularity, 0, first)
        backend.copy(pages[1], pages[0], granularity, first)
        backend.stream_wait(second, first)
        backend.copy(pages[2], pages[1], granularity, second)
        backend.stream_wait(first, second)
    backend.fill(pages[0], granularity, 0x2F, first)
    backend.record_fence().wait()
    wanted = b"\x2f" * granularity + data * 2
    expect(wanted, read_bytes(backend, address, num_bytes), "what went from stream to stream")
    for stream in (first, second):
        backend.stream_destroy(stream)
        expect_refusal(backend, "stream_destroy", "a stream twice", stream)
    expect_refusal(backend, "stream_destroy", "the default stream", _STREAM)
    expect(0, backend.usage().num_streams, "streams after the last was destroyed")
    backend.record_fence().wait()
    backend.mem_unmap(address, num_bytes)
    backend.address_free(address, num_bytes)


def check_fences(backend: Backend) -> None:
    """A fence that was waited for has passed for good, and so have earlier fences."""
    backend.note_stream(_STREAM)
    backend.note_stream(_STREAM)
    fences = [backend.record_fence() for _ in range(3)]
    fences[2].wait()
    expect([True] * 3, [fence.has_passed() for fence in fences], "passed")
    for fence in fences:
        fence.wait()
        assert fence.has_passed(), "a fence that was waited for twice has not passed"
    backend.join_streams(_STREAM)


def check_calls_are_counted(backend: Backend) -> None:
    """Each call of a primitive is counted once under its name, failed ones included."""
    before = backend.calls.copy()
    granularity = backend.granularity_bytes
    address, num_bytes = reserve(backend, 2)
    second = at_page(backend, address, 1)
    handles = [backend.mem_create(granularity) for _ in range(2)]
    backend.execute(
        [
            MapOp(address, granularity, handles[0]),
            MapOp(second, granularity, handles[1]),
            AccessOp(address, num_bytes, RW),
        ]
    )
    stream = backend.new_stream()
    backend.copy(second, address, granularity, _STREAM)
    backend.fill(address, granularity, 0, _STREAM)
    backend.stream_wait(stream, _STREAM)
    backend.stream_destroy(stream)
    backend.record_fence().wait()
    backend.execute([UnmapOp(address, granularity), UnmapOp(second, granularity)])
    expect_refusal(backend, "mem_unmap", "nothing", address, granularity)
    for handle in handles:
        backend.mem_release(handle)
    backend.address_free(address, num_bytes)
    wanted = {
        "address_reserve": 1,
        "mem_create": 2,
        "mem_map": 2,
        "mem_set_access": 1,
        "new_stream": 1,
        "copy": 1,
        "fill": 1,
        "stream_wait": 1,
        "stream_destroy": 1,
        "record_fence": 1,
        "mem_unmap": 3,
        "mem_release": 2,
        "address_free": 1,
    }
    expect(wanted, dict(backend.calls - before), "calls")


def check_threads(backend: Backend) -> None:
    """Threads that work on separate ranges do not disturb each other."""
    failures: list[VMKVError | AssertionError] = []

    def work(value: int) -> None:
        try:
            for _ in range(8):
                address, num_bytes = reserve(backend, 2)
                backend.mem_release(mapped(backend, address, 2))
                data = filled(backend, address, value, num_bytes)
                expect(data, read_bytes(backend, address, num_bytes), f"thread {value}'s memory")
                backend.mem_unmap(address, num_bytes)
                backend.address_free(address, num_bytes)
        except (VMKVError, AssertionError) as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
