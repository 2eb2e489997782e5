"""Every backend keeps the contract, also behind the fault injector, and the kit finds mutants.

Memory faults end the process, so they are tested in test_host.py and test_cuda.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest

from vmkv import Backend, HostBackend
from vmkv.core.backend import Access, AccessOp, BackendUsage, CopyOp, MemoryLocation, Op, UnmapOp
from vmkv.core.backend.booked import Books
from vmkv.errors import DriverError
from vmkv.testing import BACKEND_CHECKS, BackendCheck, FaultInjectingBackend, check_backend
from vmkv.units import Address, Handle, KiB


@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.name)
def test_backend_keeps_the_contract(check: BackendCheck, backend: Backend) -> None:
    """Each check of the kit passes, and leaves the backend empty."""
    check(backend)


@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.name)
def test_fault_injector_without_fault_keeps_the_contract(
    check: BackendCheck, backend: Backend
) -> None:
    """An injector without an armed fault changes nothing."""
    check(FaultInjectingBackend(backend))


def test_check_backend_runs_every_check() -> None:
    """The public entry point runs the whole list."""
    assert len(BACKEND_CHECKS) == check_backend(lambda: HostBackend(4 * KiB))


# ---- the kit can fail: host backends, each with one rule broken ---------------------------


def _with_books(books: type[Books]) -> type[HostBackend]:
    """A host backend that refuses what `books` refuses."""

    class Mutant(HostBackend):
        def __init__(self, granularity_bytes: int):
            super().__init__(granularity_bytes)
            self._books = books(granularity_bytes)

    Mutant.__name__ = books.__name__
    return Mutant


def _permitting(reason: str, op_type: type | None = None) -> type[HostBackend]:
    """A host backend that does not refuse for this reason: any operation, or those of a type."""

    class Permissive(Books):
        def why_not_free(self, address: int, num_bytes: int) -> str | None:
            why = super().why_not_free(address, num_bytes)
            return None if why == reason else why

        def why_not(self, op: Op, leaving: set[int]) -> str | None:
            why = super().why_not(op, leaving)
            return None if why == reason and isinstance(op, op_type or object) else why

    return _with_books(Permissive)


class _FreesInexactly(Books):
    def why_not_free(self, address: int, num_bytes: int) -> str | None:
        return None


class _UnmapsPartOfAMapping(Books):
    def _whole_mappings(self, address: int, num_bytes: int) -> list[int]:
        return [
            start
            for start in self._mapping_starts
            if start < address + num_bytes and address < start + self._mappings[start].num_bytes
        ]


class _ForgetsReleasedMemory(Books):
    def usage(self) -> BackendUsage:
        usage = super().usage()
        released = [each for each in self.allocations.values() if each.is_released]
        return replace(usage, num_handles=usage.num_handles - len(released))


class _RecyclesMemoryDirty(HostBackend):
    def mem_release(self, handle: Handle) -> None:
        super().mem_release(handle)
        self._files[MemoryLocation.DEVICE].end_bytes = 0  # Offsets come back …

    def _forget(self, handle: Handle) -> None:
        del self._books.allocations[handle]  # … and their bytes were never dropped.


class _CopiesInsteadOfAliasing(HostBackend):
    """A second mapping of a handle gets memory of its own."""

    def run_until_failure(self, ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        own = []
        for op in ops:
            allocation = self._books.allocations.get(getattr(op, "handle", None))
            is_alias = allocation is not None and allocation.num_mappings
            if is_alias and op.num_bytes == allocation.num_bytes:
                own.append(op._replace(handle=self.mem_create(op.num_bytes)))
            else:
                own.append(op)
        return super().run_until_failure(own)


class _LeavesHalfABatch(HostBackend):
    def execute(self, ops: Sequence[Op]) -> None:
        num_done, error = self.run_until_failure(ops)
        if error is not None:
            error.num_done = num_done
            raise error


class _MiscountsUnmaps(HostBackend):
    def execute(self, ops: Sequence[Op]) -> None:
        try:
            super().execute(ops)
        except DriverError as error:
            error.num_done = 0
            raise


class _UnmapsInReverse(HostBackend):
    def run_until_failure(self, ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        is_unmap = bool(ops) and isinstance(ops[0], UnmapOp)
        return super().run_until_failure(ops[::-1] if is_unmap else ops)


class _CountsRefusedCallsNot(HostBackend):
    def run_until_failure(self, ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        before = self.calls.copy()
        num_done, error = super().run_until_failure(ops)
        if error is not None:
            self.calls = before
        return num_done, error


class _CopiesOneByteTooMany(HostBackend):
    def copy(self, destination: Address, source: Address, num_bytes: int, stream: int) -> None:
        super().copy(destination, source, num_bytes + 1, stream)


class _FencesNeverPass(HostBackend):
    def record_fence(self, stream: int | None = None) -> object:
        fence = super().record_fence(stream)
        fence.has_passed = lambda: False
        return fence


class _CopiesManyInReverse(HostBackend):
    def copy_many(self, ops: Sequence[CopyOp], stream: int) -> None:
        super().copy_many(ops[::-1], stream)


class _FillsOneByteTooFew(HostBackend):
    def fill(self, address: Address, num_bytes: int, byte: int, stream: int) -> None:
        super().fill(address, num_bytes - 1, byte, stream)


class _KeepsDestroyedStreams(HostBackend):
    def stream_destroy(self, stream: int) -> None:
        super().stream_destroy(stream)
        self._books.streams.add(stream)


class _MixesLocationsUp(HostBackend):
    def mem_create(self, num_bytes: int, *_: object, **options: bool) -> Handle:
        return super().mem_create(num_bytes, **options)


class _GrantsLessThanAsked(HostBackend):
    """Grants read access, without an error, where write access must be refused."""

    def run_until_failure(self, ops: Sequence[Op]) -> tuple[int, DriverError | None]:
        num_done, error = super().run_until_failure(ops)
        if error is None or "can only be read" not in str(error):
            return num_done, error
        less = ops[num_done]._replace(access=Access.READ)
        return super().run_until_failure([less, *ops[num_done + 1 :]])


class _FillsOneLocation(Books):
    """Fills only the first piece of a range that spans both locations."""

    def fill_pieces(self, address: int, num_bytes: int) -> list[tuple[int, int]] | None:
        pieces = super().fill_pieces(address, num_bytes)
        return pieces and pieces[:1]


class _ExportsACopy(HostBackend):
    """Exports a snapshot instead of the handle's memory."""

    def mem_export(self, handle: Handle) -> int:
        own = super().mem_export(handle)
        size = os.fstat(own).st_size
        snapshot = self.mem_create(size, shareable=True)
        os.pwrite(self._books.allocations[snapshot].native_handle >> 40, os.pread(own, size, 0), 0)
        os.close(own)
        try:
            return super().mem_export(snapshot)
        finally:
            self.mem_release(snapshot)


class _ImportsAnySize(HostBackend):
    def mem_import(self, fd: int, num_bytes: int) -> Handle:
        try:
            return super().mem_import(fd, num_bytes)
        except DriverError as error:
            if "bytes, not" not in str(error):
                raise
            return super().mem_import(fd, os.fstat(fd).st_size)


@pytest.mark.parametrize(
    ("mutant", "sentence"),
    [
        (_with_books(_FreesInexactly), "Freeing part"),
        (_permitting("something is mapped in it"), "Freeing a reservation with a mapping"),
        (_RecyclesMemoryDirty, "Fresh memory reads as zero"),
        (_permitting("not the whole of the handle"), "Mapping part of a handle"),
        (_permitting("something is mapped there"), "Mapping over a mapping"),
        (_with_books(_UnmapsPartOfAMapping), "Unmapping part"),
        (_with_books(_ForgetsReleasedMemory), "A released handle's memory lives"),
        (_LeavesHalfABatch, "A batch of maps that fails"),
        (_MiscountsUnmaps, "A batch of"),
        (_CountsRefusedCallsNot, "Each call of a primitive is counted"),
        (_CopiesOneByteTooMany, "A copy moves exactly"),
        (_permitting("not a run of whole mappings", AccessOp), "Granting access"),
        (_UnmapsInReverse, "A batch of unmaps that fails"),
        (_CopiesInsteadOfAliasing, "A handle mapped at two addresses"),
        (_FencesNeverPass, "A fence that was waited for"),
        (_CopiesManyInReverse, "A copy moves exactly"),
        (_FillsOneByteTooFew, "A fill sets exactly"),
        (_KeepsDestroyedStreams, "Streams are made"),
        (_MixesLocationsUp, "Host memory maps"),
        (_GrantsLessThanAsked, "Exported memory cannot be made writable"),
        (_with_books(_FillsOneLocation), "A fill sets exactly"),
        (_ExportsACopy, "An import is a read-only view"),
        (_ImportsAnySize, "Importing a wrong size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_check_backend_names_the_broken_rule(mutant: type[HostBackend], sentence: str) -> None:
    """A backend that breaks one rule fails the check that states it."""
    with pytest.raises(AssertionError, match=rf"check \d+: {sentence}"):
        check_backend(lambda: mutant(4 * KiB))


def test_access_values_are_cudas() -> None:
    """The driver gets the flags as they are: CU_MEM_ACCESS_FLAGS_PROT_*."""
    assert (0, 1, 3) == (Access.NONE, Access.READ, Access.READ_WRITE)
