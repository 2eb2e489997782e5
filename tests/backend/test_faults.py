"""The fault injector: the calls that it counts, the call that fails, and the caller's error."""

from __future__ import annotations

import pytest

from vmkv import Backend, HostBackend
from vmkv.core.backend import Access, AccessOp, CopyOp, MapOp, UnmapOp
from vmkv.errors import DriverError
from vmkv.testing import FaultInjectingBackend, Scenario, check_every_call_can_fail, read_bytes
from vmkv.units import Address, KiB


def _map_three(backend: Backend) -> list[MapOp | AccessOp]:
    """Operations that map three pages of a new reservation and grant access to them."""
    page = backend.granularity_bytes
    address = backend.address_reserve(3 * page)
    ops: list[MapOp | AccessOp] = [
        MapOp(Address(address + at * page), page, backend.mem_create(page)) for at in range(3)
    ]
    return [*ops, AccessOp(address, 3 * page, Access.READ_WRITE)]


def _clean_up(backend: Backend, ops: list[MapOp | AccessOp]) -> None:
    page = backend.granularity_bytes
    for op in ops:
        if isinstance(op, MapOp):
            backend.mem_release(op.handle)
    backend.address_free(ops[0].address, 3 * page)


def test_fault_injector_counts_each_operation_of_a_batch(host: HostBackend) -> None:
    """A reservation, three handles, three maps, an access: eight calls."""
    backend = FaultInjectingBackend(host)
    ops = _map_three(backend)
    backend.execute(ops)
    assert 8 == backend.num_calls
    backend.mem_unmap(ops[0].address, 3 * backend.granularity_bytes)
    _clean_up(backend, ops)


@pytest.mark.parametrize(
    ("fail_at", "call"), [(1, "mem_map"), (3, "mem_map"), (4, "mem_set_access")]
)
def test_fault_inside_a_batch_undoes_it(host: HostBackend, fail_at: int, call: str) -> None:
    """Mappings that the batch made before the fault are unmapped."""
    backend = FaultInjectingBackend(host)
    ops = _map_three(backend)
    before = backend.usage()
    backend.arm(fail_at)
    with pytest.raises(DriverError, match="INJECTED") as caught:
        backend.execute(ops)
    assert (call, fail_at - 1) == (caught.value.call, caught.value.num_done)
    assert call == backend.failed_call
    assert before == backend.usage()
    _clean_up(backend, ops)


def test_fault_is_not_forwarded(host: HostBackend) -> None:
    """The failing call does not reach the driver."""
    backend = FaultInjectingBackend(host, fail_at=2)
    handle = backend.mem_create(4 * KiB)
    with pytest.raises(DriverError, match="mem_create"):
        backend.mem_create(4 * KiB)
    assert 1 == host.calls["mem_create"]
    backend.mem_release(handle)


def test_fault_can_be_out_of_memory(host: HostBackend) -> None:
    """The pool treats a full device differently, so the kit must simulate one."""
    backend = FaultInjectingBackend(host, fail_at=1, is_out_of_memory=True)
    with pytest.raises(DriverError) as caught:
        backend.mem_create(4 * KiB)
    assert caught.value.is_out_of_memory


def test_unmaps_before_a_fault_stay_done(host: HostBackend) -> None:
    """Unmaps cannot be undone; `num_done` is the number of those that were made."""
    backend = FaultInjectingBackend(host)
    ops = _map_three(backend)
    backend.execute(ops)
    page = backend.granularity_bytes
    unmaps = [UnmapOp(op.address, page) for op in ops[:3]]
    backend.arm(3)
    with pytest.raises(DriverError) as caught:
        backend.execute(unmaps)
    assert 2 == caught.value.num_done
    assert 1 == backend.usage().num_mappings
    backend.execute(unmaps[2:])
    _clean_up(backend, ops)


# ---- check_every_call_can_fail, on a correct and a faulty operation -----------------------


def _two_creates(backend: FaultInjectingBackend, *, cleans_up: bool) -> Scenario:
    handles: list[int] = []

    def operation() -> None:
        first = backend.mem_create(4 * KiB)
        try:
            second = backend.mem_create(4 * KiB)
        except DriverError:
            if cleans_up:
                backend.mem_release(first)
            raise
        handles.extend((first, second))

    def close() -> None:
        for handle in handles:
            backend.mem_release(handle)

    return Scenario(operation, backend.usage, lambda: None, close)


def test_check_every_call_can_fail_lists_the_calls() -> None:
    """A correct operation passes, and the result lists its calls."""
    struck = check_every_call_can_fail(
        lambda: HostBackend(4 * KiB), lambda backend: _two_creates(backend, cleans_up=True)
    )
    assert ["mem_create", "mem_create"] == struck


def test_check_every_call_can_fail_finds_a_leak() -> None:
    """The operation does not release its first handle when the second creation fails."""
    with pytest.raises(AssertionError, match="fault at call 2, mem_create"):
        check_every_call_can_fail(
            lambda: HostBackend(4 * KiB), lambda backend: _two_creates(backend, cleans_up=False)
        )


# ---- batches of copies --------------------------------------------------------------------


def test_fault_in_a_batch_of_copies_reports_the_copies_done(host: HostBackend) -> None:
    """Copies before the fault are submitted, later ones are not."""
    backend = FaultInjectingBackend(host)
    ops = _map_three(backend)
    backend.execute(ops)
    page = backend.granularity_bytes
    source, target = ops[0].address, ops[1].address
    backend.fill(source, page, 0x33, 0)
    backend.arm(2)
    with pytest.raises(DriverError) as caught:
        backend.copy_many([CopyOp(Address(target + at), source, 1) for at in range(3)], 0)
    assert ("copy", 1) == (caught.value.call, caught.value.num_done)
    assert b"\x33\0\0" == read_bytes(backend, target, 3)
    backend.mem_unmap(source, 3 * page)
    _clean_up(backend, ops)
