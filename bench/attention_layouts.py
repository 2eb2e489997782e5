"""The memory layouts that bench_attention compares, each holding the same sequences.

Every layout holds `num_inputs` layers' keys and values, so that a timing loop can go from layer
to layer and never finds its keys in the L2 cache:

  dense           one torch tensor [B, T, H, D] per layer and per K and V
  dense, skewed   the same with rows 17 tokens longer, so that no stride is a power of two
  dense, interleaved   one torch tensor [B, T, layers, 2, H, D]: rows' strides without rows
  vmkv, n layers  rows of a vmkv reservation, n layers side by side, pages scattered
  vmkv, +2 KiB    all layers side by side, and 2 KiB of padding after each token
  block table     [blocks, tokens, H, D] per layer, blocks shuffled, and an int32 table
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from vmkv.core import _native
from vmkv.core.backend import Access, AccessOp, Backend, MapOp, UnmapOp
from vmkv.core.cache.geometry import Geometry, LayerShape
from vmkv.core.cache.kv_group import group_views

PAGE_BYTES = 2 * 2**20
PAD_BYTES = 2048
SKEW_TOKENS = 17


@dataclass(frozen=True)
class ModelShape:
    """One attention layer, and how many of them lie in a token row."""

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    dim: int

    def layer_token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token in one layer, K and V."""
        return 2 * self.kv_heads * self.dim * dtype.itemsize

    def chosen_layers(self, num_inputs: int) -> list[int]:
        """`num_inputs` layers, evenly spread over the model."""
        return [i * self.layers // num_inputs for i in range(num_inputs)]


@dataclass(frozen=True)
class PaddedGeometry(Geometry):
    """Token rows with padding, so that their stride is no power of two."""

    pad_bytes: int = 0

    @cached_property
    def token_bytes(self) -> int:
        """Bytes from one token to the next."""
        return super().token_bytes + self.pad_bytes


@dataclass
class Layout:
    """Keys and values of the chosen layers.

    Attributes:
        name: How results name it.
        inputs: `(keys, values)` of each chosen layer: rows `[rows, tokens, H, D]`, or blocks.
        rows: The row of each sequence; None for block tables.
        block_table: `[B, blocks] int32`, or None.
        owners: What must be closed when the layout is done with.
    """

    name: str
    inputs: list[tuple[torch.Tensor, torch.Tensor]]
    rows: list[int] | None
    block_table: torch.Tensor | None = None
    owners: list[VirtualRows] = field(default_factory=list)

    def close(self) -> None:
        """Give the memory back."""
        self.inputs.clear()
        for owner in self.owners:
            owner.close()


class VirtualRows:
    """One layer group's rows in virtual memory, mapped page by page in a shuffled order.

    Args:
        backend: Allocates the memory.
        geometry: Layers, heads and rows of the group.
        dtype: Element type.
        mapped_tokens: How many tokens of each row to map.
        rng: Shuffles the pages.
    """

    def __init__(
        self,
        backend: Backend,
        geometry: Geometry,
        dtype: torch.dtype,
        mapped_tokens: Sequence[int],
        rng: random.Random,
    ) -> None:
        self._backend, self._geometry = backend, geometry
        self._address = backend.address_reserve(geometry.reserved_bytes)
        runs = [
            (self._address + row * geometry.row_bytes, geometry.pages_for(tokens))
            for row, tokens in enumerate(mapped_tokens)
        ]
        self._handles = [
            backend.mem_create(geometry.page_bytes) for _ in range(sum(n for _, n in runs))
        ]
        # Created in order, mapped in another: neighbours in a row are not neighbours in memory.
        shuffled = rng.sample(self._handles, len(self._handles))
        for address, pages in runs:
            maps = [
                MapOp(address + page * geometry.page_bytes, geometry.page_bytes, shuffled.pop())
                for page in range(pages)
            ]
            access = AccessOp(address, pages * geometry.page_bytes, Access.READ_WRITE)
            backend.execute([*maps, access])
        self._runs = runs
        self._counter = _native.ViewCounter()
        self.views = group_views(backend, self._address, geometry, dtype, self._counter)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the group's layer `index`, `[rows, tokens, H, D]`."""
        return self.views.keys[index].transpose(1, 2), self.views.values[index].transpose(1, 2)

    def close(self) -> None:
        """Unmap and release everything; the device must be done with it."""
        del self.views
        page = self._geometry.page_bytes
        for address, pages in self._runs:
            self._backend.execute([UnmapOp(address + i * page, page) for i in range(pages)])
        for handle in self._handles:
            self._backend.mem_release(handle)
        self._backend.address_free(self._address, self._geometry.reserved_bytes)


def vm_layer_views(
    backend: Backend,
    shape: ModelShape,
    num_tokens: Sequence[int],
    *,
    layers_per_group: int,
    num_inputs: int,
    overread_tokens: int,
    dtype: torch.dtype,
    pad_bytes: int = 0,
    seed: int = 0,
) -> Layout:
    """Vmkv rows for sequences of `num_tokens`, as a cache lays them out.

    Only the groups that hold a chosen layer are made; within a group all layers are.
    """
    rng = random.Random(seed)
    rows = rng.sample(range(len(num_tokens)), len(num_tokens))
    mapped = [0] * len(num_tokens)
    for row, tokens in zip(rows, num_tokens, strict=True):
        mapped[row] = tokens + overread_tokens
    layer_shape = LayerShape(shape.kv_heads, shape.dim, shape.kv_heads, shape.dim, dtype.itemsize)
    geometry = PaddedGeometry(
        num_layers=layers_per_group,
        shape=layer_shape,
        page_bytes=max(PAGE_BYTES, backend.granularity_bytes),
        max_tokens=max(mapped),
        num_rows=len(rows),
        pad_bytes=pad_bytes,
    )
    groups: dict[int, VirtualRows] = {}
    inputs = []
    for layer in shape.chosen_layers(num_inputs):
        group, index = divmod(layer, layers_per_group)
        if group not in groups:
            groups[group] = VirtualRows(backend, geometry, dtype, mapped, rng)
        inputs.append(groups[group].layer(index))
    name = "vmkv, all layers" if layers_per_group == shape.layers else f"vmkv, {layers_per_group}"
    if pad_bytes:
        name = f"vmkv, +{pad_bytes // 1024} KiB"
    layout = Layout(name, inputs, rows, owners=list(groups.values()))
    _fill_rows(layout, num_tokens)
    return layout


def dense_rows(
    shape: ModelShape,
    num_tokens: Sequence[int],
    *,
    skew_tokens: int,
    num_inputs: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Layout:
    """Ordinary tensors, as long as the longest sequence and `skew_tokens` more."""
    size = (len(num_tokens), max(num_tokens) + skew_tokens, shape.kv_heads, shape.dim)
    inputs = [
        tuple(torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
        for _ in range(num_inputs)
    ]
    name = "dense, skewed" if skew_tokens else "dense"
    layout = Layout(name, inputs, list(range(len(num_tokens))))
    _fill_rows(layout, num_tokens)
    return layout


def dense_interleaved(
    shape: ModelShape,
    num_tokens: Sequence[int],
    *,
    num_inputs: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Layout:
    """One ordinary tensor with the layout of vmkv's rows: all layers of a token side by side."""
    size = (len(num_tokens), max(num_tokens), shape.layers, 2, shape.kv_heads, shape.dim)
    whole = torch.empty(size, dtype=dtype, device=device)
    layers = shape.chosen_layers(num_inputs)
    inputs = [(whole[:, :, layer, 0], whole[:, :, layer, 1]) for layer in layers]
    layout = Layout("dense, interleaved", inputs, list(range(len(num_tokens))))
    _fill_rows(layout, num_tokens)
    return layout


def block_tables(
    shape: ModelShape,
    num_tokens: Sequence[int],
    *,
    block_tokens: int,
    num_inputs: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> Layout:
    """Blocks in a shuffled order, as a paged cache that has been in use for a while."""
    blocks = [-(-tokens // block_tokens) for tokens in num_tokens]
    order = random.Random(seed).sample(range(sum(blocks)), sum(blocks))
    table = torch.zeros(len(num_tokens), max(blocks), dtype=torch.int32)
    for sequence, count in enumerate(blocks):
        table[sequence, :count] = torch.tensor([order.pop() for _ in range(count)])
    size = (sum(blocks), block_tokens, shape.kv_heads, shape.dim)
    inputs = [
        tuple(torch.randn(size, dtype=dtype, device=device) for _ in range(2))
        for _ in range(num_inputs)
    ]
    return Layout(f"block table, {block_tokens}", inputs, None, table.to(device))


def _fill_rows(layout: Layout, num_tokens: Sequence[int]) -> None:
    """Unit noise in every live token: power draw, and so clocks, depend on the data."""
    assert layout.rows is not None
    for keys, values in layout.inputs:
        for row, tokens in zip(layout.rows, num_tokens, strict=True):
            keys[row, :tokens].normal_()
            values[row, :tokens].normal_()
