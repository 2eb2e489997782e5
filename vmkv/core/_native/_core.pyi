"""Types and contracts of the compiled core.

Wrong types raise TypeError everywhere and are not listed again. Addresses, handles and function
addresses are integers in ``[0, 2**64)``; anything else raises OverflowError.
"""

from collections.abc import Iterable, Sequence
from typing import TypedDict, TypeVar, final

from typing_extensions import CapsuleType  # a stub may import it; nothing does at run time

class HostFunctions(TypedDict):
    """Addresses of the host's calls, as integers for ``execute`` and ``transfer``."""

    map: int
    set_access: int
    unmap: int
    copy: int
    fill: int

@final
class FreeList:
    """Free extents by size class: one lock-free stack of extent ids for each class.

    Ids are issued once by ``bump`` and then travel between their owners and the stacks. An id is
    in one of three states, never issued, out, or listed; whenever no call is in flight::

        num_issued == ids out + sum(count(c) for c in range(num_classes))

    The class says nothing about what an id stands for, and an id may come back to another class
    than it was taken from.

    Args:
        capacity: How many ids there are, ``0 .. capacity - 1``; 1 to 2**31.
        num_classes: How many stacks there are; 1 to 64.

    Raises:
        ValueError: An argument is outside its interval.
        MemoryError: 5 bytes an id could not be had.

    Cost: 64 bytes a class now; 5 bytes an id, but only as ids are issued (the pages of the
        arrays are untouched until then).
    Ordering: any thread may call any method at any time. What a thread did before ``push(c, id)``
        is visible to the thread whose ``pop(c)`` returns that id.
    """

    def __new__(cls, capacity: int, num_classes: int) -> FreeList: ...
    @property
    def capacity(self) -> int:
        """How many ids there are in all."""

    @property
    def num_classes(self) -> int:
        """How many size classes there are."""

    @property
    def num_issued(self) -> int:
        """How many ids ``bump`` has given out; exact when no call is in flight."""

    def push(self, size_class: int, extent_id: int, /) -> None:
        """Give an extent, which must be out, to a size class.

        Raises:
            ValueError: There is no such class or id, the id was never issued, or it is listed
                already (pushed twice). The list is unchanged.

        Cost: O(1), tens of nanoseconds; does not release the GIL.
        """

    def pop(self, size_class: int, /) -> int | None:
        """Take an extent of this size class: the last one pushed, or None when there is none.

        Threads that race get different ids, in no particular order.

        Raises:
            ValueError: There is no such class.

        Cost: O(1), tens of nanoseconds; does not release the GIL.
        """

    def take(self, size_classes: Sequence[int], /) -> list[int] | None:
        """Pop an extent of each size class, or none at all and None where one has none left.

        One step to threads that the GIL keeps apart; without it, they may miss for a moment what a
        failing call gives back.

        Raises:
            ValueError: There is no such class. The list is unchanged.

        Cost: as of the pops.
        """

    def bump(self) -> int | None:
        """Issue the lowest id never issued before, or None when the capacity is spent.

        Cost: O(1), tens of nanoseconds; does not release the GIL.
        """

    def count(self, size_class: int, /) -> int:
        """How many extents of this class are listed.

        Exact when no call is in flight; never below the number of extents that could be popped.

        Raises:
            ValueError: There is no such class.

        Cost: O(1).
        """

class References:
    """Mappings and owners of one extent, none at first; a base class for what is counted.

    The counts are one atomic word: each read is of one moment. `count_references` changes them.
    """

    @property
    def num_mappings(self) -> int:
        """Places it is mapped at, retired ones included."""

    @property
    def num_live_mappings(self) -> int:
        """Those of them that are not retired."""

    @property
    def num_owners(self) -> int:
        """References that are not mappings."""

    @property
    def num_references(self) -> int:
        """How many need the extent: mappings and owners."""

    @property
    def is_needed_by_several(self) -> bool:
        """Whether live mappings and owners together are more than one."""

_Counted = TypeVar("_Counted", bound=References)

def count_references(
    extents: Iterable[_Counted], mappings: int, live_mappings: int, owners: int, /
) -> list[_Counted]:
    """Add to the counts of each of `extents`, one after the other.

    Returns those that nobody references any more because of this call. Of calls that race for the
    last references of an extent, one returns it.

    Raises:
        ValueError: A count would be negative or above 2**21 - 1, or more mappings live than are.
            Extents before it have been counted.

    Cost: some 10 ns for each; no lock, and does not release the GIL.
    Ordering: who is returned an extent sees all that was done before its other references went.
    """

def pack_token_ids(*token_ids: int) -> bytes:
    """Eight bytes for each integer, in native byte order.

    Raises:
        OverflowError: One is not in ``[-2**63, 2**63)``.

    Cost: 1.5 ns for each of a tuple and 2.3 of a list: 13 and 19 us for 8,192.
    """

@final
class ViewCounter:
    """Counts the views made by ``view_capsule`` that still live.

    The counter may die before its views; they keep what they need.
    """

    def __new__(cls) -> ViewCounter: ...
    @property
    def live(self) -> int:
        """How many views still live, unconsumed capsules included.

        Ordering: who reads a lower number sees all that the dropping threads did through the views
            that are gone.
        """

def execute(
    plan: bytes,
    map_fn: int,
    set_access_fn: int,
    unmap_fn: int,
    location_type: int,
    location_id: int,
    /,
) -> tuple[int, int]:
    """Run mapping calls in order, in one crossing and outside the GIL, up to the first failure.

    A plan is a sequence of records of four native-endian uint64, ``struct`` format ``=4Q``:

    ============== ======= ====== =======================================
    op             address bytes  argument
    ============== ======= ====== =======================================
    0 (map)        yes     yes    handle, mapped from its offset 0
    1 (set_access) yes     yes    0 no access, 1 read, 3 read and write
    2 (unmap)      yes     yes    not looked at
    ============== ======= ====== =======================================

    An empty plan does nothing and succeeds.

    Args:
        plan: The records, back to back.
        map_fn: Address of a function with the signature of ``cuMemMap``.
        set_access_fn: Likewise ``cuMemSetAccess``.
        unmap_fn: Likewise ``cuMemUnmap``. An address that no record needs may be 0.
        location_type: ``CUmemLocationType`` that every set_access names (1 is a device).
        location_id: The device's ordinal.

    Returns:
        ``(num_done, status)``: how many records succeeded, and the status of the one after them
        (0 when all succeeded). Records before a failure stay done; undoing them is the caller's.

    Raises:
        ValueError: The plan is not a whole number of records, or a record has an unknown op, needs
            an address that is 0, or has access flags that do not fit an int. No call was made.

    Cost: that of the calls.
    Ordering: host-synchronous. Threads may run plans at the same time; that their ranges are
        disjoint is theirs to ensure. An address that is not such a function crashes the process.
    """

def transfer(plan: bytes, copy_fn: int, fill_fn: int, stream: int, /) -> tuple[int, int]:
    """Submit copies and fills to a stream in order, outside the GIL, up to the first failure.

    A plan is a sequence of records of four native-endian uint64, ``struct`` format ``=4Q``:

    ======== =========== ====== =======
    op       address     bytes  argument
    ======== =========== ====== =======
    0 (copy) destination yes    source
    1 (fill) yes         yes    byte
    ======== =========== ====== =======

    Args:
        plan: The records, back to back.
        copy_fn: Address of a function with the signature of ``cuMemcpyAsync``.
        fill_fn: Likewise ``cuMemsetD8Async``. An address that no record needs may be 0.
        stream: The stream's raw handle; 0 is the default one.

    Returns:
        ``(num_done, status)``: how many records succeeded, and the status of the one after them
        (0 when all succeeded). Records before a failure stay submitted.

    Raises:
        ValueError: The plan is not a whole number of records, or a record has an unknown op, needs
            an address that is 0, or fills with what is no byte. No call was made.

    Cost: that of the driver's calls.
    Ordering: the functions' own. CUDA's need the device's context current on this thread, and
        return when the work is queued; the host's when it is done.
    """

def host_functions() -> HostFunctions:
    """The functions that ``execute`` and ``transfer`` need, made of mmap, mprotect and memmove.

    They return 0 or an errno. Ranges that are mapped must be whole pages of the operating system.
    ``map`` takes the handle ``fd << 40 | file_offset >> 12`` and maps with no access; ``unmap``
    leaves the addresses reserved; ``copy`` and ``fill`` are done when they return. They all trust
    the address: what was mapped there before is replaced.
    """

def host_reserve(num_bytes: int, alignment: int, /) -> int:
    """Reserve virtual addresses with nothing behind them, and return the first.

    Args:
        num_bytes: A positive multiple of the operating system's page.
        alignment: Of the returned address; a power of two, at least that page.

    Raises:
        ValueError: An argument is not as above.
        OSError: The kernel refused (``errno`` says why). Nothing is reserved.

    Cost: up to three system calls, outside the GIL, whatever the size.
    """

def host_restoring(change: int, /) -> None:
    """Add ``change`` to the number of threads that map again what was mapped before.

    While there are any, ``map`` uses mappings of the process that are held back otherwise.
    """

def host_free(address: int, num_bytes: int, /) -> None:
    """Give virtual addresses back, and drop whatever is mapped there.

    The pair should be one that ``host_reserve`` returned; the kernel would take any.

    Raises:
        OSError: The range is not whole pages of the operating system, or the kernel refused.

    Cost: one system call, outside the GIL; time grows with what is resident.
    """

def view_capsule(
    address: int, num_bytes: int, device_type: int, device_id: int, counter: ViewCounter, /
) -> CapsuleType:
    """Wrap raw addresses as a DLPack capsule: a one-dimensional uint8 tensor.

    The memory is neither owned nor touched: it may be unmapped now and mapped later. Until
    ``counter.live`` has dropped, a tensor may still point there.

    Args:
        address: Where the view starts. May be 0 only when it is empty.
        num_bytes: Its length, below 2**63.
        device_type: DLPack's ``DLDeviceType``: 1 is the CPU, 2 is CUDA.
        device_id: The device's ordinal; 0 for the CPU.
        counter: Counts the view until it is dropped, on whatever thread that happens.

    Returns:
        A capsule for ``from_dlpack`` of any framework, to be consumed at most once.

    Raises:
        ValueError: The address is 0 and the view is not empty, or it is 2**63 bytes or longer.
        MemoryError: The descriptor (about 120 bytes) could not be had.
    """

def launch(
    launch_fn: int, function: int, grid_x: int, block_x: int, stream: int, words: bytes, /
) -> int:
    """Launch a kernel on a stream; one dimension of blocks, one of threads.

    Args:
        launch_fn: Address of a function with the signature of ``cuLaunchKernel``.
        function: The kernel, as the driver names it.
        grid_x: Blocks, 1 to 2**32 - 1.
        block_x: Threads of a block, 1 to 1024.
        stream: The stream's raw handle; 0 is the default one.
        words: The kernel's arguments, each one 64-bit word in native byte order; 32 at most.

    Returns:
        The driver's status; 0 means that the launch was enqueued.

    Raises:
        ValueError: A number is outside its interval. Nothing was launched.

    Cost: the driver call, 2 to 3 us. Holds the interpreter lock, because it only enqueues.
    """
