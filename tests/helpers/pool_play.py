"""A device, a pool, a second cache on it and injected faults, around a cache under test.

The operations that all plays share, each with checks after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from helpers.device import Device, IllegalAccessError
from helpers.evictor import Evictor
from helpers.small_cache import small_constants
from helpers.stamped_rows import DTYPE, History, StampedRows
from vmkv import BackendUsage, ExtentPool, KVCache, OutOfPagesError, Sequence
from vmkv.core.backend import MemoryLocation
from vmkv.core.cache.forking import CostModel
from vmkv.errors import ConfigError, DriverError
from vmkv.testing import FaultInjectingBackend
from vmkv.units import KiB

PAGE = 4 * KiB
UNDERREAD_TOKENS = 5
BLOCK_TOKENS = 4
#: Stream of the second cache; new streams get smaller numbers.
_OTHERS_STREAM = 1 << 20


@dataclass(eq=False)
class Guest:
    """A sequence that a play has opened, its history, and its stream."""

    sequence: Sequence
    history: History
    stream: int


class PoolPlay:
    """A pool on a device, and a second cache over it.

    Args:
        budget_pages: Budget of device memory.
        host_pages: Budget of host memory.
        is_late: As of `Device`.
        evicts: Whether another thread evicts meanwhile; see `Evictor`.

    Attributes:
        trace: Log of the operations, for the report of a failure.
        num_faults: Number of driver calls that failed on command.
    """

    def __init__(
        self,
        budget_pages: int,
        host_pages: int = 0,
        *,
        is_late: bool = False,
        evicts: bool = False,
    ):
        self._constants = small_constants(UNDERREAD_TOKENS, BLOCK_TOKENS)
        self._constants.__enter__()
        self._is_abandoned = False
        self.device = Device(PAGE, is_late=is_late)
        self.backend = FaultInjectingBackend(self.device)
        self._evictor = Evictor(
            lambda: ExtentPool(
                self.backend, budget_pages * PAGE, host_budget_bytes=host_pages * PAGE
            ),
            seed=budget_pages + host_pages,
            share=0.1 if evicts else 0.0,
        )
        self.pool = self._evictor.pool
        self.pool.attach()
        self._other: StampedRows | None = None
        self._other_sequences: list[Guest] = []
        self.trace: list[str] = []
        self.num_faults = 0

    # ---- memory ---------------------------------------------------------------------------

    def set_budget(self, num_pages: int) -> None:
        """Change the pool's budget; only live memory may make it refuse."""
        live_pages = self._live_pages()
        with self._doing(f"set_budget({num_pages})"):
            try:
                self.pool.set_budget(num_pages * PAGE)
            except ConfigError:
                assert num_pages < max(1, live_pages), (
                    "refused, though idle memory could be evicted"
                )

    def other_append(self, num_tokens: int, is_new: bool) -> None:
        """Grow a sequence of the second cache."""
        with self._doing(f"other_append({num_tokens}, {is_new})", _OTHERS_STREAM):
            if self._other is not None and self._other.cache.is_closing:
                self._close_other()  # A driver call in its `close` has failed.
            if self._other is None:
                cache = KVCache(self.pool, max_tokens=64, max_sequences=2, cost_model=cost_model(0))
                try:
                    add_layers(cache, 0, 1, 32, None)
                except BaseException:
                    cache.close()
                    raise
                cache.current_stream = self.device.current_stream
                self._other = StampedRows(cache, self.device)
            if is_new and len(self._other_sequences) < 2:
                sequence = self._other.cache.open()
                self._other_sequences.append(Guest(sequence, History(), _OTHERS_STREAM))
            if self._other_sequences:
                guest = self._other_sequences[-1]
                self._append(self._other, guest, [1] * min(num_tokens, 64 - len(guest.history)))

    def other_close(self, is_all: bool) -> None:
        """Close the oldest sequence of the second cache, or the whole cache."""
        with self._doing(f"other_close({is_all})", _OTHERS_STREAM):
            if self._other_sequences:
                self._other_sequences[0].sequence.close()
                self._other_sequences.pop(0)
            if is_all and self._other is not None:
                for guest in self._other_sequences:
                    guest.sequence.close()
                self._other_sequences.clear()
                self._close_other()

    def _close_other(self) -> None:
        assert self._other is not None
        self._other.close()
        self._other = None

    def catch_up(self, num_works: int) -> None:
        """Run some of the device's pending work."""
        with self._doing(f"catch_up({num_works})"), noted():
            self.device.run_some(num_works)

    # ---- failures -------------------------------------------------------------------------

    def fault(self, fail_at: int, *, is_out_of_memory: bool) -> None:
        """Make a driver call of the next operation fail."""
        self._log(f"fault({fail_at}, is_out_of_memory={is_out_of_memory})")
        self.backend.arm(fail_at, is_out_of_memory=is_out_of_memory)

    @contextmanager
    def _doing(self, what: str, stream: int = 0) -> Iterator[None]:
        """Run an operation that may fail only by an injected fault, and check everything after."""
        self._log(what)
        self.device.stream = stream
        try:
            yield
        except DriverError:
            if not self._end_fault():
                raise
        finally:
            self.device.stream = 0
        self._end_fault()
        self._note_available()
        self.check()

    def _end_fault(self) -> bool:
        """Disarm the fault; return whether it struck."""
        struck = self.backend.failed_call is not None
        self.num_faults += struck
        self.backend.arm(0)
        return struck

    def check(self) -> None:
        """Check everything that must hold between two calls."""
        self._evictor.check()
        if self.device.violations:
            raise IllegalAccessError(self.device.violations[0])

    def _note_available(self) -> None:
        """Hook after each operation, which may have changed the memory of other caches."""

    def _caches(self) -> Iterator[KVCache]:
        """Yield every cache over the pool."""
        if self._other is not None:
            yield self._other.cache

    # ---- memory of other sequences --------------------------------------------------------

    def _append(self, rows: StampedRows, guest: Guest, tokens: list[int]) -> bool:
        """Grow a guest and write its new tokens; return False if memory is short."""
        start, row = len(guest.history), guest.sequence.row
        end = start + len(tokens)
        free_pages = self.pool.stats().budget_bytes // PAGE - self._live_pages()
        missing = 0
        for group in rows.cache.groups:
            run = group.table.rows[row]
            needed = group.pages_for(end + rows.cache.overread_tokens)
            # Shared extents may have to be copied.
            missing += max(0, needed - run.end_page) + run.shared_end_page
        try:
            rows.cache.grow([(guest.sequence, end)])
        except OutOfPagesError:
            assert self._end_fault() or missing > free_pages, "idle memory was not evicted"
            return False
        if tokens:
            claim = rows.claim("a guest", row, start, end)
            before = History(guest.history.tokens)
            after = History([*before.tokens, *tokens])
            guest.history = after

            def work() -> None:
                rows.read("a guest", row, before, start, end)
                rows.write("a guest", row, after, start, claim)

            self.device.submit(work)
        return True

    def _live_pages(self) -> int:
        """Device pages of live sequences of all caches, which no other sequence may take."""
        live = {}
        for cache in self._caches():
            for row in cache.live:
                for group in cache.groups:
                    for mapping in group.table.rows[row].mappings:
                        extent = mapping.extent
                        if extent.location is MemoryLocation.DEVICE:
                            live[id(extent)] = extent.num_pages
        return sum(live.values())

    # ---- close ----------------------------------------------------------------------------

    def close(self) -> None:
        """Close everything and check that no memory is left."""
        if self._other is not None:
            self._other.close()
            self._other = None
        for location in MemoryLocation:
            stats = self.pool.stats(location)
            assert (0, 0) == (stats.resident_bytes, stats.retired_bytes)
        self.pool.detach()
        self.pool.close()
        assert BackendUsage() == self.device.usage()
        assert not self.device.violations
        self._constants.__exit__(None, None, None)
        self._is_abandoned = True

    def abandon(self) -> None:
        """Free as much as possible after a failure. Idempotent."""
        if not self._is_abandoned:
            self._is_abandoned = True
            self._constants.__exit__(None, None, None)
            for cache in self._caches():
                cache.is_closed = True  # Suppresses warnings of destructors.
            self.device.close()

    def _log(self, what: str) -> None:
        self.trace.append(what)
        del self.trace[:-2000]


def cost_model(alias_pages: int) -> CostModel:
    """Shares extents of `alias_pages` pages and more, and copies smaller ones."""
    worth = CostModel(map_us=0, unmap_us=0)
    per_mib = worth.copy_us_per_mib + worth.lasting_us_per_mib
    return CostModel(map_us=per_mib * alias_pages * PAGE / (1 << 20), unmap_us=0)


def add_layers(cache: KVCache, first: int, count: int, head_dim: int, window: int | None) -> None:
    cache.add_layers(
        range(first, first + count),
        num_kv_heads=1,
        head_dim=head_dim,
        dtype=DTYPE,
        window_tokens=window,
    )


@contextmanager
def noted() -> Iterator[None]:
    """Suppress violations: `check` finds them in the device's list."""
    try:
        yield
    except IllegalAccessError:
        pass
