"""Memory under the blocks of another engine's paged cache, as a member of a broker.

The engine sees one tensor that holds all blocks. Blocks without memory stay outside its free list:
`balance` maps memory under some of them and frees them for the engine, or allocates free blocks
from it and gives their memory back. So kernels only get blocks that have memory, and the engine's
scheduler is unchanged.

See DESIGN.md, Note [Engines of others are members].
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Protocol

import torch

from ..core import _native
from ..core.cache.layer_group import bytes_over, stream_getter
from ..core.interrupts import uninterrupted
from ..core.memory import ExtentPool, PageTable, Victim, size_classes
from ..core.memory.change import Change, RowChange
from ..errors import CapacityError, ConfigError
from ..units import format_bytes

#: Interval of reports to the broker while requests run.
_ASK_S = 0.1


class Blocks(Protocol):
    """The free list of an engine's blocks, by vLLM's names; a block has a `block_id`."""

    def get_num_free_blocks(self) -> int:
        """Count the free blocks, cached ones included."""

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Allocate free blocks, least recently used first; what they cache is forgotten."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Free blocks."""


class BlockMemory:
    """Maps memory under an engine's blocks as a broker allows. For the engine's thread.

    Block 0 always has memory: engines read it where a sequence has no block.

    Args:
        pool: A member's pool, whose budget holds a block. Closed with this object.
        num_blocks: Blocks of the engine, with memory or without.
        block_bytes: Size of a block, in all layers.

    Raises:
        ConfigError: A block does not consist of whole pages.
        CapacityError: There are no addresses for the blocks, or no memory for the first.

    After an error the pool is closed.
    """

    def __init__(self, pool: ExtentPool, num_blocks: int, block_bytes: int):
        assert pool.member is not None
        self.block_bytes = block_bytes
        self._pool, self._member = pool, pool.member
        num_pages = block_bytes // pool.page_bytes
        self._classes = size_classes(num_pages, pool.largest_class)
        self._current_stream = stream_getter(pool.backend)
        self._counter = _native.ViewCounter()
        self._blocks: Blocks | None = None
        self._unmapped: list[Any] = []
        self._num_asked, self._asked_s = 0, 0.0
        pool.attach()
        with ExitStack() as undo:
            undo.callback(pool.detach)
            if block_bytes % pool.page_bytes:
                raise ConfigError(
                    f"a block takes {format_bytes(block_bytes)} in all layers, and memory is "
                    f"mapped in pages of {format_bytes(pool.page_bytes)}: choose a block size "
                    "whose blocks are a multiple of that"
                )
            self._table = PageTable(pool, num_blocks, num_pages)
            undo.callback(self._table.close, lambda: False)
            self._map([0])
            undo.pop_all()
        pool.pressure.add_source(self._victims)

    def tensor(self) -> torch.Tensor:
        """Return the bytes of all blocks, one after the other."""
        table = self._table
        return bytes_over(self._pool.backend, table.address, table.reserved_bytes, self._counter)

    def take_over(self, blocks: Blocks) -> None:
        """Allocate all free blocks of an engine that has no requests yet."""
        self._unmapped = blocks.get_new_blocks(blocks.get_num_free_blocks())
        self._blocks = blocks

    @property
    def num_mapped(self) -> int:
        """Blocks that have memory."""
        return self._table.num_rows - len(self._unmapped)

    @property
    def is_above_floor(self) -> bool:
        """Whether an engine without requests has memory that the broker will want back."""
        is_above = self.num_mapped * self.block_bytes > self._member.budget_bytes
        return is_above and self._member.is_connected

    @uninterrupted
    def balance(self, num_blocks: int, first_blocks: int) -> None:
        """Follow the broker's orders for blocks that requests will hold, and ask it for more.

        `first_blocks` is what the first request takes, if none runs.
        """
        assert self._blocks is not None
        pool, member = self._pool, self._member
        pool.backend.note_stream(self._current_stream())
        num_free = self._blocks.get_num_free_blocks()
        allowed = (pool.budget_bytes - member.withheld_bytes) // self.block_bytes
        lacking = num_blocks + 1 - self.num_mapped  # One more, since block 0 is never free.
        if self.num_mapped > allowed:
            self._unmap(min(num_free, self.num_mapped - allowed))
        elif lacking > 0:
            self._map_and_free(min(lacking, allowed - self.num_mapped, len(self._unmapped)))
        now_s = time.monotonic()
        is_urgent = lacking > 0 and num_blocks > self._num_asked
        if is_urgent or now_s - self._asked_s >= _ASK_S or (self._num_asked and not num_blocks):
            num_live = self.num_mapped - self._blocks.get_num_free_blocks()
            more = max(0, num_blocks + 1 - num_live)
            more_bytes, first_bytes = more * self.block_bytes, first_blocks * self.block_bytes
            member.ask(more_bytes, first_bytes, is_busy=num_blocks > 0, preempts=False)
            self._num_asked, self._asked_s = num_blocks, now_s

    def _unmap(self, num_blocks: int) -> None:
        assert self._blocks is not None
        if not num_blocks:
            return
        with self._pool.lock:
            fence = self._pool.reclaimer.new_fence()  # May fail, before any block is taken.
            its = self._blocks.get_new_blocks(num_blocks)
            for each in its:
                self._table.retire_back(each.block_id, 0, fence)
        self._unmapped += its
        self._member.gave_up(num_blocks * self.block_bytes)

    def _map_and_free(self, num_blocks: int) -> None:
        assert self._blocks is not None
        if num_blocks <= 0:
            return
        its = self._unmapped[-num_blocks:]
        with suppress(CapacityError):  # The broker has just lowered the budget, or torch grew.
            self._map([each.block_id for each in its])
            del self._unmapped[-num_blocks:]
            self._blocks.free_blocks(its)

    def _map(self, block_ids: Sequence[int]) -> None:
        stream = self._current_stream()
        rows = [RowChange(self._table, each, 0, self._classes) for each in block_ids]
        with Change(self._pool, rows) as change:
            change.map(stream)
            change.fill(stream)

    def _victims(self) -> Iterator[Victim]:
        """Name free blocks; only the engine's thread can take them, so that `evict` frees none."""
        if self._blocks is not None:
            freeable_bytes = self._blocks.get_num_free_blocks() * self.block_bytes
            yield Victim(0, freeable_bytes, lambda num_bytes: 0)

    def close(self) -> None:
        """Give all memory back, once the device has finished, and leave the broker. Idempotent."""
        if self._table in self._pool.page_tables:
            self._pool.backend.note_stream(self._current_stream())
            self._pool.pressure.remove_source(self._victims)
            self._table.close(lambda: self._counter.live > 0)
            self._pool.detach()
