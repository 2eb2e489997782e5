"""One step of a batch: the tensors that all layers of a group share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..attention import AttentionBatch
from ..attention.append_cuda import append_uniform
from ..cache import LayerGroup
from ..cache.fp8 import FP8, Scales, decode, encode
from ..errors import ConfigError
from .device_rows import DeviceRows


class GroupStep:
    """The tensors of one step, for every layer of a group.

    A step is the tokens `[start, end)` of the first `batch_size` rows. The first layer of a
    step to be updated makes the tensors of all of them: one by one they would cost more than
    `torch.cat` does.

    Attributes:
        key_shape, value_shape: What each layer writes: `[B, H, end - start, D]`.
        keys, values: Per layer, what attention reads: `[B, H, end - first, D]`, as it is stored.
        is_fp8: Whether that is in eight bits.
    """

    def __init__(self, rows: DeviceRows, group: LayerGroup):
        self.rows = rows
        self.group = group
        self.start = self.end = self.batch_size = self.first = -1
        self.key_shape = self.value_shape = torch.Size()
        self.keys: Sequence[torch.Tensor] = ()
        self.values: Sequence[torch.Tensor] = ()
        self._new_keys: Sequence[torch.Tensor] = ()
        self._new_values: Sequence[torch.Tensor] = ()
        self._all_rows: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._batch: tuple[torch.Tensor | None, AttentionBatch] | None = None
        self._uniform: tuple[tuple[int, int], torch.Tensor, torch.Tensor] | None = None
        self._is_cuda = rows.core.device.type == "cuda"
        self.is_fp8 = group.dtype == FP8
        address, geometry = group.table.address, group.geometry
        self._addresses = [
            (address + geometry.k_offset_bytes(at), address + geometry.v_offset_bytes(at))
            for at in range(geometry.num_layers)
        ]

    def advance(self, batch_size: int, first: int, start: int, end: int) -> None:
        """Make the step's tokens resident and its tensors.

        Raises:
            OutOfPagesError, SequenceFullError, ConfigError, ClosedError: Nothing changed.
        """
        self.rows.core.check_open()
        self.rows.core.note_stream()
        self.rows.ensure(batch_size, end)
        # The rows may be ahead of this layer, and their windows with them.
        if self.group.window_tokens is not None and self.group.first_readable_token(0, end) > first:
            raise ConfigError(
                f"tokens from {first} on, which a sliding-window layer is to read or write, have "
                "left its window: a pass that failed has left layers with different numbers of "
                "tokens; call reset() on the cache"
            )
        inference = torch.is_inference_mode_enabled()
        views, shape = self.group.views_in(inference=inference), self.group.geometry.shape
        with torch.no_grad():
            k = views.keys[:, :batch_size]
            v = views.values[:, :batch_size]
            self.keys = k[:, :, :, first:end].unbind(0)
            self.values = v[:, :, :, first:end].unbind(0)
            if not self._is_cuda:
                self._new_keys = k[:, :, :, start:end].unbind(0)
                self._new_values = v[:, :, :, start:end].unbind(0)
        self.key_shape = torch.Size((batch_size, shape.num_k_heads, end - start, shape.k_dim))
        self.value_shape = torch.Size((batch_size, shape.num_v_heads, end - start, shape.v_dim))
        self.batch_size, self.first, self.start, self.end = batch_size, first, start, end
        self._batch = None

    def write(self, place: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put the step's keys and values of the layer at `place` where they belong.

        Args:
            place: The layer, as the group counts.
            keys: `key_shape`, in the model's dtype and on the group's device.
            values: `value_shape`, likewise.
        """
        if self._is_cuda:
            geometry = self.group.geometry
            k_address, v_address = self._addresses[place]
            append_uniform(
                keys,
                values,
                k_address,
                v_address,
                geometry.row_bytes,
                geometry.token_bytes,
                self.start,
                self.rows.core.current_stream(),
                self.group.dtype,
                self.scales(place),
            )
            return
        if self.is_fp8:
            scales = self.scales(place)
            keys = encode(keys, scales and scales.inverse_keys, heads_at=-3)
            values = encode(values, scales and scales.inverse_values, heads_at=-3)
        with torch.no_grad():
            self._new_keys[place].copy_(keys)
            self._new_values[place].copy_(values)

    def scales(self, place: int) -> Scales | None:
        """What the layer at `place` is multiplied by."""
        return self.group.scales_at(place)

    def decoded(self, place: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """`keys` and `values` of the layer at `place`, copied into tensors of `dtype`."""
        scales = self.scales(place)
        with torch.no_grad():
            return (
                decode(self.keys[place], scales and scales.keys, dtype, heads_at=-3),
                decode(self.values[place], scales and scales.values, dtype, heads_at=-3),
            )

    def all_rows(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the layer at `place`: `[rows, row_tokens, heads, dim]`."""
        inference = torch.is_inference_mode_enabled()
        if inference not in self._all_rows:
            views = self.group.views_in(inference=inference)
            with torch.no_grad():
                keys, values = views.keys.transpose(2, 3), views.values.transpose(2, 3)
                pairs = zip(keys.unbind(0), values.unbind(0), strict=True)
                self._all_rows[inference] = list(pairs)
        return self._all_rows[inference][place]

    def attention_batch(self, padding: torch.Tensor | None) -> AttentionBatch | None:
        """This step as a batch of equally long rows; None where `padding` is not left padding."""
        if self._batch is None or self._batch[0] is not padding:
            left_pad = None
            if padding is not None:
                is_left_padding, left_pad = self.rows.left_pad(padding, self.end)
                if not is_left_padding:
                    return None
            num_queries = self.end - self.start
            row_indices, query_starts = self._vectors(self.batch_size, num_queries)
            batch = AttentionBatch(
                row_indices=row_indices,
                num_tokens=torch.full_like(row_indices, self.end),
                query_starts=query_starts,
                max_query_tokens=num_queries,
                max_num_tokens=self.end,
                row_tokens=self.group.geometry.row_tokens,
                left_pad=left_pad,
            )
            self._batch = (padding, batch)
        return self._batch[1]

    def _vectors(self, batch_size: int, num_queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and starts of the queries, which stay the same while a batch decodes."""
        if self._uniform is None or self._uniform[0] != (batch_size, num_queries):
            device = self.rows.core.device
            # Ordinary tensors: a batch may be used in another mode than the one before.
            with torch.inference_mode(mode=False):
                count = torch.arange(batch_size + 1, dtype=torch.int32, device=device)
                self._uniform = ((batch_size, num_queries), count[:-1], count * num_queries)
        return self._uniform[1:]

    def forget(self) -> None:
        """Drop the tensors; the next update makes new ones."""
        self.start = self.end = self.batch_size = self.first = -1
        self.keys = self.values = self._new_keys = self._new_values = ()
        self._all_rows = {}
        self._batch = None


@dataclass
class LayerPlace:
    """Where a layer is: the step tensors of its group, and its index among them."""

    step: GroupStep
    index: int
