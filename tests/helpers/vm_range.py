"""A range of virtual memory that is mapped up to one address, and faults beyond it.

Dense tensors cannot show a read past the end of a row, because memory follows. `MappedUpTo` maps
some pages of a reservation, and a test places a row so that its last token ends exactly where the
mapping does.
"""

from __future__ import annotations

import torch

from vmkv.core import _native
from vmkv.core.backend import Access, open_backend

PAGE_BYTES = 2 * 2**20
NUM_MAPPED = 4
NUM_RESERVED = 8


class MappedUpTo:
    """`NUM_MAPPED` mapped pages, then addresses that are reserved only.

    Args:
        device: `"host"` or `"cuda:0"`.
        dtype: Dtype of the tensors over it.
    """

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._backend = open_backend(device)
        self._address = self._backend.address_reserve(NUM_RESERVED * PAGE_BYTES)
        self._handles = []
        for page in range(NUM_MAPPED):
            handle = self._backend.mem_create(PAGE_BYTES)
            self._backend.mem_map(self._address + page * PAGE_BYTES, PAGE_BYTES, handle)
            self._handles.append(handle)
        self._backend.mem_set_access(self._address, NUM_MAPPED * PAGE_BYTES, Access.READ_WRITE)
        self._counter = _native.ViewCounter()
        capsule = _native.view_capsule(
            self._address, NUM_RESERVED * PAGE_BYTES, *self._backend.dlpack_device, self._counter
        )
        self._flat = torch.utils.dlpack.from_dlpack(capsule).view(dtype)
        self._end = NUM_MAPPED * PAGE_BYTES // dtype.itemsize

    def fill(self, generator: torch.Generator) -> None:
        """Fill the mapped pages with unit noise."""
        mapped = self._flat[: self._end]
        mapped.copy_(torch.randn(mapped.shape, generator=generator))

    def rows(
        self, num_rows: int, row_tokens: int, heads: int, dim: int, mapped_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of which the last row has exactly `mapped_tokens` tokens of memory.

        Args:
            num_rows: Number of rows; all but the last are mapped completely.
            row_tokens: Capacity of a row.
            heads: H.
            dim: Dk and Dv.
            mapped_tokens: Tokens of the last row before the mapping ends.

        Returns:
            Two views `[num_rows, row_tokens, heads, dim]`, keys and values of a token side by
            side. The key of token `mapped_tokens` of the last row is not mapped.
        """
        token = 2 * heads * dim
        start = self._end - mapped_tokens * token - (num_rows - 1) * row_tokens * token
        assert start >= 0, "the rows do not fit the mapped pages"
        shape = (num_rows, row_tokens, heads, dim)
        strides = (row_tokens * token, token, dim, 1)
        keys = self._flat.as_strided(shape, strides, start)
        values = self._flat.as_strided(shape, strides, start + heads * dim)
        return keys, values
