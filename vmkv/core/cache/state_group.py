"""States: memory of fixed size that layers keep of a whole sequence, such as linear attention's.

A group of states has a row for each sequence, as groups of keys and values have, over pages of the
same pool. All layers lie side by side in it, so only the last page is filled in part:

    row r   | layer 0: recurrent, convolution | layer 2: recurrent, convolution | ... | padding |

A row is mapped with the sequence's first token and copied in a fork, because every step overwrites
it. It holds the state after the last token and none before, so a sequence cannot be cut or shared
at an earlier one: `RowSpace.check_keeps`.

See DESIGN.md, Note [States beside rows].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ...units import align_up
from ..memory import ExtentPool
from .geometry import StateGeometry
from .layer_group import LayerGroup, bytes_over

#: Tensors start where kernels load whole vectors.
_ALIGNMENT_BYTES = 128


class StateShape(NamedTuple):
    """Shape and type of a tensor in a layer's state of one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class StateGroup(LayerGroup):
    """The states of some layers; `shapes` has the tensors of each layer, in any order."""

    def __init__(self, pool: ExtentPool, shapes: Mapping[int, Sequence[StateShape]], num_rows: int):
        self.shapes = {layer: tuple(its) for layer, its in shapes.items()}
        self._offsets: list[tuple[int, int, StateShape]] = []  # Layer, bytes from the row's start.
        end = 0
        for layer, its in sorted(self.shapes.items()):
            for each in its:
                self._offsets.append((layer, end, each))
                end = align_up(end + each.num_bytes, _ALIGNMENT_BYTES)
        geometry = StateGeometry.of(end, pool.page_bytes, num_rows)
        super().__init__(pool, geometry, torch.float32)
        self._tensors: dict[int, list[torch.Tensor]] = {}
        # One mapped page means the whole state, which suffices for any length.
        self.books = (self.table.rows, 1, geometry.row_tokens, geometry.row_tokens)

    def tensors(self, layer: int) -> list[torch.Tensor]:
        """Return the tensors of a layer, `[rows, *shape]` each, in the order of its shapes.

        Only rows of live sequences with tokens are mapped.
        """
        if not self._tensors:
            geometry, its = self.geometry, (self.table.address, self.geometry.reserved_bytes)
            with torch.inference_mode(mode=False), torch.no_grad():
                flat = bytes_over(self.pool.backend, *its, self._view_counter)
                rows = flat.view(geometry.num_rows, -1)
                for its_layer, start, each in self._offsets:
                    part = rows[:, start : start + each.num_bytes].view(each.dtype)
                    shaped = part.unflatten(1, each.shape)  # type: ignore[no-untyped-call]
                    self._tensors.setdefault(its_layer, []).append(shaped)
        return self._tensors[layer]

    @property
    def is_fixed(self) -> bool:
        """Whether rows have the same size whatever the sequence's length."""
        return True

    def resident_tokens(self, row: int) -> int:
        """Tokens of `row` up to which memory is mapped: any number, or none."""
        return self.geometry.row_tokens if self.table.rows[row].mappings else 0

    def used_bytes(self, num_tokens: int) -> int:
        """Bytes that a sequence of `num_tokens` needs here."""
        return self.geometry.bytes_for(num_tokens)

    def has_outside_views(self) -> bool:
        """Whether tensors other than this group's own point into the range. Drops its own."""
        self._tensors.clear()
        return super().has_outside_views()

    def close(self) -> None:
        """Unmap everything after its fence; free the range once no tensor points into it."""
        self._tensors.clear()
        super().close()
