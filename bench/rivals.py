"""The allocators that vmkv is compared with, as far as bytes and host work go.

Each is given its best case: a block table with the blocks vLLM uses by default, a padded cache
whose allocator wastes nothing, a static cache that is exactly as long as the longest sequence may
get. None of them touches a GPU; what kernels make of block tables is bench_attention's question.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

BLOCK_TOKENS = 16  # vLLM's default.


def blocks_for(num_tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Blocks that hold `num_tokens`."""
    return -(-num_tokens // block_tokens)


def block_table_bytes(
    lengths: Sequence[int], token_bytes: int, block_tokens: int = BLOCK_TOKENS
) -> int:
    """What sequences of these lengths hold in blocks; all layers of a block together."""
    return sum(blocks_for(length, block_tokens) for length in lengths) * block_tokens * token_bytes


def layer_page_bytes(
    lengths: Sequence[int], token_bytes: int, page_bytes: int, num_parts: int
) -> int:
    """What they hold where every page belongs to one layer's K or V (`num_parts` of them)."""
    part_token_bytes = token_bytes // num_parts
    pages = sum(-(-length * part_token_bytes // page_bytes) for length in lengths)
    return pages * page_bytes * num_parts


def padded_bytes(lengths: Sequence[int], token_bytes: int) -> int:
    """What they hold in one tensor `[batch, longest]`, as DynamicCache keeps a batch."""
    return len(lengths) * max(lengths, default=0) * token_bytes


class BlockTables:
    """Block tables and slot mapping of a decoding batch, kept up as vLLM's v1 runner does.

    The tables live in one pinned array of `[num_seqs, max_blocks]`; a step appends a block id
    only to the rows that cross a block's end, and computes all slots vectorised into a
    preallocated array. Then both, and the lengths, go to the device in one copy each. As in
    vLLM the copy takes whole rows of the table, here no wider than the batch will ever need.

    Args:
        lengths: Tokens that each sequence holds at the beginning.
        max_tokens: The longest that one may become.
        device: Where kernels want the tables.
        block_tokens: Tokens in a block.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        device: torch.device,
        block_tokens: int = BLOCK_TOKENS,
    ):
        num_seqs, max_blocks = len(lengths), blocks_for(max_tokens, block_tokens)
        self.block_tokens = block_tokens
        self.max_blocks = max_blocks
        self.tables, self._tables_cpu, self._tables_gpu = _mirrored((num_seqs, max_blocks), device)
        self.lengths, self._lengths_cpu, self._lengths_gpu = _mirrored((num_seqs,), device)
        self.slots, self._slots_cpu, self._slots_gpu = _mirrored((num_seqs,), device, np.int64)
        self._row_starts = np.arange(num_seqs, dtype=np.int64) * max_blocks
        self._flat_tables = self.tables.reshape(-1)
        self._indices = np.empty(num_seqs, dtype=np.int64)
        self._blocks = np.empty(num_seqs, dtype=np.int32)
        self.lengths[:] = lengths
        num_taken = 0
        for row, length in enumerate(lengths):
            num_blocks = blocks_for(length, block_tokens)
            self.tables[row, :num_blocks] = np.arange(num_taken, num_taken + num_blocks)
            num_taken += num_blocks
        self._free = deque(range(num_taken, num_seqs * max_blocks))

    def prepare_step(self) -> None:
        """Everything that a decode step of one token per sequence needs, on the device."""
        positions = self.lengths
        for row in np.flatnonzero(positions % self.block_tokens == 0):
            self.tables[row, positions[row] // self.block_tokens] = self._free.popleft()
        np.floor_divide(positions, self.block_tokens, out=self._indices, casting="unsafe")
        self._indices += self._row_starts
        np.take(self._flat_tables, self._indices, out=self._blocks, mode="clip")
        np.multiply(self._blocks, self.block_tokens, out=self.slots)
        self.slots += positions % self.block_tokens
        self.lengths += 1
        self._tables_gpu.copy_(self._tables_cpu, non_blocking=True)
        self._slots_gpu.copy_(self._slots_cpu, non_blocking=True)
        self._lengths_gpu.copy_(self._lengths_cpu, non_blocking=True)

    def check(self) -> None:
        """Each slot is where its table says, and no two sequences share a block.

        Raises:
            AssertionError: The rival is wrong, so its time means nothing.
        """
        positions = self.lengths - 1
        rows = np.arange(len(positions))
        blocks = self.tables[rows, positions // self.block_tokens].astype(np.int64)
        expected = blocks * self.block_tokens + positions % self.block_tokens
        assert np.array_equal(self.slots, expected)
        used = [
            self.tables[row, : blocks_for(int(length), self.block_tokens)]
            for row, length in enumerate(self.lengths)
        ]
        ids = np.concatenate(used)
        assert len(np.unique(ids)) == len(ids)


def _mirrored(
    shape: tuple[int, ...], device: torch.device, dtype: type = np.int32
) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """An array on the host (pinned, where there is a GPU) and its twin on the device."""
    torch_dtype = torch.int64 if dtype is np.int64 else torch.int32
    cpu = torch.zeros(shape, dtype=torch_dtype, pin_memory=device.type == "cuda")
    return cpu.numpy(), cpu, torch.zeros(shape, dtype=torch_dtype, device=device)
