"""Left padding, device rows, and the tensors that all layers of a group share in a step.

`LeftPadding` reads and checks masks, `DeviceRows` holds a batch's sequences in one `KVCache`, and
`GroupStep` makes the tensors of a step for every layer of a group at once.
"""

from __future__ import annotations

from collections import abc

import torch

from ..attention import AttentionBatch
from ..attention.append import Place, append_uniform
from ..core.cache import KVCache, KVGroup, Sequence
from ..core.cache.fp8 import FP8, decode, encode
from ..errors import ConfigError

# ---- padding -------------------------------------------------------------------------------------


def read_left_pad(mask: torch.Tensor) -> tuple[bool, bool, torch.Tensor]:
    """Whether `mask [B, T]` is left padding, whether it has any, and how much: `[B] int32`."""
    num_tokens = mask.shape[1]
    left_pad = num_tokens - mask.sum(1, dtype=torch.int32)
    at = torch.arange(num_tokens, device=mask.device)
    is_left = (mask == (at >= left_pad[:, None])).all() & (left_pad < num_tokens).all()
    is_left_padding, has_any = torch.stack([is_left, left_pad.any()]).tolist()
    return is_left_padding, has_any, left_pad


class LeftPadding:
    """The left padding of a batch, `left_pad [B] int32` or None, to compare masks with."""

    def __init__(self, left_pad: torch.Tensor, dtype: torch.dtype, *, has_any: bool):
        device = left_pad.device
        self.left_pad = left_pad if has_any else None
        self._starts = left_pad[:, None]
        self._expected = torch.empty((left_pad.shape[0], 0), dtype=dtype, device=device)

    @classmethod
    def read(cls, mask: torch.Tensor) -> LeftPadding | None:
        """Read `mask [B, T]`; None where it is no left padding. Waits for the device."""
        # No inference tensors: later masks may come in another mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            is_left_padding, has_any, left_pad = read_left_pad(mask)
            return cls(left_pad, mask.dtype, has_any=has_any) if is_left_padding else None

    def differs(self, mask: torch.Tensor) -> torch.Tensor:
        """Return whether a later mask `[B, T]` is another left padding, or none; never waits."""
        num_tokens = mask.shape[1]
        if num_tokens > self._expected.shape[1]:
            with torch.inference_mode(mode=False), torch.no_grad():
                at = torch.arange(2 * num_tokens, device=mask.device)
                self._expected = (at >= self._starts).to(mask.dtype)
        return torch.ne(mask, self._expected[:, :num_tokens]).any()


# ---- device rows ---------------------------------------------------------------------------------


class DeviceRows:
    """The rows of a transformers batch in one `KVCache`."""

    def __init__(self, core: KVCache):
        self.core = core
        self.sequences: list[Sequence] = []
        # Masks of the current step by id, as read; a model has one for each kind of layer.
        self.paddings: dict[int, tuple[torch.Tensor, bool, torch.Tensor | None]] = {}

    def ensure(self, batch_size: int, num_tokens: int) -> None:
        """Make the first `batch_size` rows hold `num_tokens`; grows the cache once per step."""
        num_rows = len(self.sequences)
        if batch_size <= num_rows and num_tokens <= self.sequences[0].num_tokens:
            return
        try:
            if batch_size > self.core.max_sequences:
                raise self._too_large(batch_size)
            for row in range(num_rows, batch_size):
                self.sequences.append(self.core.open(row=row))
            self.core.grow([(sequence, num_tokens) for sequence in self.sequences])
            self.paddings.clear()
        except BaseException:
            self.keep_rows(num_rows)
            raise

    def _too_large(self, batch_size: int) -> ConfigError:
        return ConfigError(
            f"a batch of {batch_size} does not fit the {self.core.max_sequences} rows of this "
            "cache; make it with a larger max_batch_size"
        )

    def left_pad(self, padding: torch.Tensor, num_tokens: int) -> tuple[bool, torch.Tensor | None]:
        """Whether `padding [B, T]` is left padding, and how much: `[B] int32`; read once."""
        if padding.shape != (len(self.sequences), num_tokens):
            return False, None
        known = self.paddings.get(id(padding))
        if known is None:
            is_left_padding, has_any, left_pad = read_left_pad(padding.bool())
            pad = left_pad.to(self.core.device) if has_any else None
            known = self.paddings[id(padding)] = (padding, is_left_padding, pad)
        return known[1:]

    def take_over(self, sources: abc.Sequence[int]) -> None:
        """Make the batch the entries `sources` of the present one; an error changes nothing."""
        before = len(self.sequences)
        if len(sources) > self.core.max_sequences:
            raise self._too_large(len(sources))
        try:
            for row in range(before, len(sources)):
                source = self.sequences[sources[row]]
                self.sequences.append(self.core.fork(source, source.num_tokens, row=row))
            stay = list(range(before))
            stay[: len(sources)] = sources[:before]
            self.core.reorder(self.sequences[:before], stay)
        except BaseException:
            self.keep_rows(before)
            raise
        self.keep_rows(len(sources))

    def keeps(self, num_tokens: int) -> bool:
        """Whether every row can be truncated to `num_tokens`."""
        return not num_tokens or all(
            num_tokens >= each.num_tokens or self.core.keeps(each.row, num_tokens)
            for each in self.sequences
        )

    def set_length(self, num_tokens: int) -> None:
        """Truncate every row to at most `num_tokens`."""
        for sequence in self.sequences:
            if num_tokens < sequence.num_tokens:
                sequence.truncate(num_tokens)

    def keep_rows(self, batch_size: int) -> None:
        """End the rows from `batch_size` on; their memory is parked."""
        while len(self.sequences) > batch_size:
            self.sequences.pop().close()


# ---- group step ----------------------------------------------------------------------------------


class GroupStep:
    """The tensors of one step for every layer of a group: tokens `[start, end)` of the first rows.

    Each layer writes `key_shape`, `value_shape`: `[B, H, end - start, D]`; attention reads `keys`,
    `values`: per layer, `[B, H, end - first, D]` as stored.
    """

    def __init__(self, rows: DeviceRows, group: KVGroup):
        self.rows = rows
        self.group = group
        self.forget()
        self.key_shape = self.value_shape = torch.Size()
        self._uniform: tuple[tuple[int, int], torch.Tensor, torch.Tensor] | None = None
        self._is_cuda = rows.core.device.type == "cuda"
        self.is_fp8 = group.dtype == FP8
        views = group.views
        self._appended = [
            Place.of(keys.transpose(1, 2), values.transpose(1, 2), group.scales_at(at))
            for at, (keys, values) in enumerate(zip(views.keys, views.values, strict=True))
        ]

    def forget(self) -> None:
        """Drop the tensors; the next update makes new ones."""
        self.start = self.end = self.batch_size = self.first = -1
        self.keys: abc.Sequence[torch.Tensor] = ()
        self.values: abc.Sequence[torch.Tensor] = ()
        self._all_rows: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._batch: tuple[torch.Tensor | None, AttentionBatch] | None = None

    def advance(self, batch_size: int, first: int, start: int, end: int) -> None:
        """Map the step's tokens and make its tensors; an error changes nothing."""
        self.rows.core.note_stream()
        self.rows.ensure(batch_size, end)
        # The rows, and so their windows, may be ahead of this layer.
        if self.group.window_tokens is not None and self.group.first_readable_token(0, end) > first:
            raise ConfigError(
                f"tokens from {first} on, which a sliding-window layer is to read or write, have "
                "left its window: a pass that failed has left layers with different numbers of "
                "tokens; call reset() on the cache"
            )
        inference = torch.is_inference_mode_enabled()
        views, shape = self.group.views_in(inference=inference), self.group.geometry.shape
        with torch.no_grad():
            self.keys = views.keys[:, :batch_size, :, first:end].unbind(0)
            self.values = views.values[:, :batch_size, :, first:end].unbind(0)
        self.key_shape = torch.Size((batch_size, shape.num_k_heads, end - start, shape.k_dim))
        self.value_shape = torch.Size((batch_size, shape.num_v_heads, end - start, shape.v_dim))
        self.batch_size, self.first, self.start, self.end = batch_size, first, start, end
        self._batch = None

    def write(self, place: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's keys and values of the layer at index `place` of the group."""
        if self._is_cuda:
            append_uniform(keys, values, self._appended[place], self.start)
            return
        if self.is_fp8:
            scales = self.group.scales_at(place)
            keys = encode(keys, scales and scales.inverse_keys, heads_at=-3)
            values = encode(values, scales and scales.inverse_values, heads_at=-3)
        with torch.no_grad():
            self.keys[place][:, :, self.start - self.first :].copy_(keys)
            self.values[place][:, :, self.start - self.first :].copy_(values)

    def decoded(self, place: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `keys` and `values` of the layer at `place`, decoded into new tensors."""
        scales = self.group.scales_at(place)
        with torch.no_grad():
            return (
                decode(self.keys[place], scales and scales.keys, dtype, heads_at=-3),
                decode(self.values[place], scales and scales.values, dtype, heads_at=-3),
            )

    def all_rows(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the layer at `place`: `[rows, row_tokens, heads, dim]`."""
        inference = torch.is_inference_mode_enabled()
        if inference not in self._all_rows:
            views = self.group.views_in(inference=inference)
            with torch.no_grad():
                keys, values = views.keys.transpose(2, 3), views.values.transpose(2, 3)
                pairs = zip(keys.unbind(0), values.unbind(0), strict=True)
                self._all_rows[inference] = list(pairs)
        return self._all_rows[inference][place]

    def attention_batch(self, padding: torch.Tensor | None) -> AttentionBatch | None:
        """Return this step as a batch of equal rows; None where `padding` is not left padding."""
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
                row_tokens=self.group.row_tokens,
                left_pad=left_pad,
            )
            self._batch = (padding, batch)
        return self._batch[1]

    def _vectors(self, batch_size: int, num_queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._uniform is None or self._uniform[0] != (batch_size, num_queries):
            device = self.rows.core.device
            # No inference tensors: the next batch may run in another mode.
            with torch.inference_mode(mode=False):
                count = torch.arange(batch_size + 1, dtype=torch.int32, device=device)
                self._uniform = ((batch_size, num_queries), count[:-1], count * num_queries)
        return self._uniform[1:]
