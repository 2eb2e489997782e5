"""Groups of layers with keys and values: tensors over the rows.

Full-attention layers keep every token. Sliding-window layers need only the last ones, so they form
a group of their own, whose front pages are retired as the window moves on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import _native
from ..backend import Backend
from ..memory import ExtentPool
from .fp8 import LayerScales, Scales
from .geometry import Geometry
from .layer_group import LayerGroup, bytes_over, torch_device


@dataclass(frozen=True)
class GroupViews:
    """Strided tensors over one layer group: `[layers, rows, heads, row_tokens, dim]`."""

    keys: torch.Tensor
    values: torch.Tensor


def group_views(
    backend: Backend,
    address: int,
    geometry: Geometry,
    dtype: torch.dtype,
    counter: _native.ViewCounter,
    *,
    inference: bool = False,
) -> GroupViews:
    """Make tensors over the reservation at `address`; `counter` counts their storages.

    A cache has two sets. Ordinary tensors work in every mode, but in inference mode each operation
    on one still passes through autograd's dispatch, which costs a decode step of 32 layers 1 ms.
    Inference tensors avoid that, and must not be written outside inference mode.
    """
    with torch.inference_mode(mode=inference), torch.no_grad():
        flat = bytes_over(backend, address, geometry.reserved_bytes, counter).view(dtype)
        item_bytes = geometry.shape.itemsize_bytes

        def strided(num_heads: int, dim: int, offset_bytes: int) -> torch.Tensor:
            steps_bytes = geometry.layer_bytes, geometry.row_bytes, geometry.token_bytes
            layer, row, token = [each // item_bytes for each in steps_bytes]
            return flat.as_strided(
                (geometry.num_layers, geometry.num_rows, num_heads, geometry.row_tokens, dim),
                (layer, row, dim, token, 1),
                offset_bytes // item_bytes,
            )

        shape = geometry.shape
        keys = strided(shape.num_k_heads, shape.k_dim, 0)
        values = strided(shape.num_v_heads, shape.v_dim, geometry.v_offset_bytes)
    return GroupViews(keys, values)


class KVGroup(LayerGroup):
    """The keys and values of one group of layers; `scales`, one per layer, are for eight bits."""

    def __init__(
        self,
        pool: ExtentPool,
        geometry: Geometry,
        dtype: torch.dtype,
        window_tokens: int | None = None,
        scales: Sequence[LayerScales] | None = None,
    ):
        super().__init__(
            pool,
            num_rows=geometry.num_rows,
            row_pages=geometry.row_pages,
            token_bytes=geometry.token_bytes,
            contents=dtype,
            window_tokens=window_tokens,
        )
        self.geometry = geometry
        self.dtype = dtype
        self.scales = None if scales is None else tuple(scales)
        self._scale_tensors: dict[int, Scales] = {}
        self._views: dict[bool, GroupViews] = {}

    @property
    def layout(self) -> dict[str, Any]:
        """Layout as plain values; groups of equal layout can read each other's token rows."""
        shape = self.geometry.shape
        return {
            "num_layers": self.geometry.num_layers,
            "num_k_heads": shape.num_k_heads,
            "k_dim": shape.k_dim,
            "num_v_heads": shape.num_v_heads,
            "v_dim": shape.v_dim,
            "dtype": str(self.dtype).removeprefix("torch."),
            "scales": self.scales and [[[*each.keys], [*each.values]] for each in self.scales],
            "window_tokens": self.window_tokens,
            "token_bytes": self.geometry.token_bytes,
        }

    @property
    def views(self) -> GroupViews:
        """The tensors over the rows, usable in every mode."""
        return self.views_in(inference=False)

    def views_in(self, *, inference: bool) -> GroupViews:
        """Return the tensors over the rows; `group_views` says when to use inference tensors."""
        if inference not in self._views:
            self._views[inference] = group_views(
                self.pool.backend,
                self.table.address,
                self.geometry,
                self.dtype,
                self._view_counter,
                inference=inference,
            )
        return self._views[inference]

    def scales_at(self, place: int) -> Scales | None:
        """Scales of the layer at `place`, copied to the device once; None if unscaled."""
        if self.scales is None:
            return None
        if place not in self._scale_tensors:
            self._scale_tensors[place] = Scales.of(
                self.scales[place], torch_device(self.pool.backend)
            )
        return self._scale_tensors[place]

    def copy_row(
        self, row: int, tokens: slice, source: KVGroup, source_places: Sequence[int]
    ) -> None:
        """Copy `tokens` of `row` from the layers of `source` at `source_places` to this group."""
        self.begin_row(row, max(tokens.start, source.first_written(row)))
        with torch.inference_mode(mode=False), torch.no_grad():
            for mine, theirs in (
                (self.views.keys, source.views.keys),
                (self.views.values, source.views.values),
            ):
                for at, place in enumerate(source_places):
                    mine[at, row, :, tokens] = theirs[place, row, :, tokens]

    def _drop_views(self) -> None:
        self._views.clear()
