"""SIGINT at any bytecode offset of a pool or a backend leaves the books right.

Operations of caches are interrupted in test_every_call_can_fail.py.
"""

from __future__ import annotations

import gc
import itertools
import signal
from collections.abc import Callable, Iterator

import pytest
from helpers.faulty_cache import PAGE, FaultyCache
from helpers.interrupts import interrupted, offsets

from vmkv import BackendUsage, ExtentPool, HostBackend
from vmkv.core.backend import Access, AccessOp, MapOp, Op, UnmapOp
from vmkv.core.backend.booked import Books
from vmkv.core.interrupts import interruptible, uninterrupted
from vmkv.units import Address


def test_a_pool_can_be_interrupted_at_any_offset() -> None:
    """Acquire, disown, convert and trim; extents that the caller did not get are owned."""
    for at in offsets("pool"):
        host = HostBackend(PAGE)
        pool = ExtentPool(host, 16 * PAGE)

        def use(pool: ExtentPool = pool) -> None:
            pool.disown(pool.acquire([0, 1, 2]))
            pool.disown(pool.acquire([3]))  # Converts smaller extents.
            pool.set_budget(8 * PAGE)
            pool.trim()

        is_sent, is_interrupted = interrupted(use, at)
        assert is_sent == is_interrupted
        pool.disown([each for each in pool.extents() if each.num_owners])
        stats = pool.stats()
        assert (0, 0) == (stats.resident_bytes, stats.retired_bytes)
        assert stats.created_bytes == host.usage().physical_bytes == host.file_bytes()
        use()
        pool.close()
        assert BackendUsage() == host.usage()
        if not is_sent:
            break


def test_no_garbage_is_collected_while_offsets_are_counted() -> None:
    """Python drops an exception in `__del__`, so a signal there would reach nobody."""
    is_collecting = []
    interrupted(lambda: is_collecting.append(gc.isenabled()), 0)
    assert [False] == is_collecting
    assert gc.isenabled()


def test_a_backend_can_be_interrupted_at_any_offset() -> None:
    """The backend's books agree with its memory."""
    for at in offsets("backend"):
        host = HostBackend(PAGE)
        address = host.address_reserve(4 * PAGE)
        its = [Address(address + each * PAGE) for each in range(3)]

        def use(host: HostBackend = host, its: list[Address] = its) -> None:
            handles = [host.mem_create(PAGE) for _ in its]
            host.execute(
                [MapOp(at, PAGE, handle) for at, handle in zip(its, handles, strict=True)]
                + [AccessOp(its[0], 3 * PAGE, Access.READ_WRITE)]
            )
            host.execute([UnmapOp(its[0], 3 * PAGE)])
            for handle in handles:
                host.mem_release(handle)

        is_sent, is_interrupted = interrupted(use, at)
        assert is_sent == is_interrupted
        usage = host.usage()
        assert usage.physical_bytes == host.file_bytes()
        if usage.num_mappings:
            host.execute([UnmapOp(its[0], usage.mapped_bytes)])
        for handle in list(host._books.allocations):
            host.mem_release(handle)
        use()
        host.address_free(address, 4 * PAGE)
        assert BackendUsage() == host.usage()
        assert 0 == host.file_bytes()
        if not is_sent:
            break


def test_copies_and_fills_can_be_interrupted_at_any_offset() -> None:
    """The lock of the books is released: a long copy may be interrupted between its parts."""
    host = HostBackend(PAGE)
    at, handle = host.address_reserve(PAGE), host.mem_create(PAGE)
    host.execute([MapOp(at, PAGE, handle), AccessOp(at, PAGE, Access.READ_WRITE)])
    for use in (lambda: host.fill(at, 64, 1, 0), lambda: host.copy(at, Address(at + 64), 64, 0)):
        for offset in itertools.count():
            is_sent, _ = interrupted(use, offset, names={"fill", "copy_many", "_submit"})
            assert not host._lock.locked(), f"after SIGINT at offset {offset}"
            if not is_sent:
                break


def test_an_exception_within_a_batch_leaves_the_books_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mapping is booked that the driver was not given."""
    state = FaultyCache(HostBackend(PAGE), window_tokens=40)  # type: ignore[arg-type]
    sequence = state.begin(98)
    real, num_maps = Books.why_not, itertools.count(1)

    def why_not(books: Books, op: Op, leaving: set[int]) -> str | None:
        if isinstance(op, MapOp) and next(num_maps) == 3:
            raise KeyboardInterrupt
        return real(books, op, leaving)

    monkeypatch.setattr(Books, "why_not", why_not)
    with pytest.raises(KeyboardInterrupt):
        sequence.fork()
    state.cache.check()
    sequence.fork()
    state.cache.check()
    state.close_cache()


# ---- `uninterrupted` and `interruptible` --------------------------------------------------


@pytest.fixture
def default_handler() -> Iterator[None]:
    """Python's handler of SIGINT, which a test runner may have replaced."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _notes(happened: list[str], *, interrupts: bool) -> Callable[[], None]:
    @uninterrupted
    def inner() -> None:
        signal.raise_signal(signal.SIGINT)
        happened.append("inner")

    @uninterrupted
    def outer() -> None:
        inner()
        happened.append("outer")
        if interrupts:
            interruptible(happened.append, "never")

    return outer


@pytest.mark.usefixtures("default_handler")
@pytest.mark.parametrize("interrupts", [False, True])
def test_an_interrupt_waits_for_the_outermost_operation(interrupts: bool) -> None:
    """An `interruptible` call within the operation gets the interrupt earlier."""
    happened: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        _notes(happened, interrupts=interrupts)()
    assert ["inner", "outer"] == happened
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("default_handler")
def test_interruptible_call_may_hold_interrupts_back_again() -> None:
    happened: list[str] = []

    @uninterrupted
    def outermost() -> None:
        try:
            interruptible(_notes(happened, interrupts=False))
        finally:
            signal.raise_signal(signal.SIGINT)
            happened.append("outermost")

    with pytest.raises(KeyboardInterrupt):
        outermost()
    assert ["inner", "outer", "outermost"] == happened
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("default_handler")
def test_a_handler_that_raises_nothing_runs_late() -> None:
    """A server's handler does so: the operation completes, and the handler stays installed."""
    happened: list[str] = []

    def handler(number: int, frame: object) -> None:
        happened.append("handler")

    signal.signal(signal.SIGINT, handler)
    _notes(happened, interrupts=True)()
    assert ["inner", "outer", "handler", "never"] == happened
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.usefixtures("default_handler")
def test_sequence_of_an_interrupted_open_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the handler raises nothing, the caller gets the sequence, which stays open."""
    state = FaultyCache(HostBackend(PAGE))  # type: ignore[arg-type]
    cache = state.cache
    monkeypatch.setattr(cache, "note_stream", lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        cache.open()
    assert not cache.sequences
    signal.signal(signal.SIGINT, lambda number, frame: None)
    assert [cache.open()] == cache.sequences
    cache.close()


@pytest.mark.usefixtures("default_handler")
@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_handlers_of_the_system_stay(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, handler)
    assert uninterrupted(lambda: signal.getsignal(signal.SIGINT))() is handler
