"""Append and attention of a step's layers, over the rows of caches.

A step's tokens are packed by kind, because each kind can have a kernel of its own:

  decode     one query per sequence over its row; splits long rows over the device
  beginning  whole prompts, or their first chunks, over their own packed keys (`packed.py`)
  continued  later chunks of a prompt, over their rows

A kernel that `mixes` takes all of them in one launch, unless decoding rows may be long: an unsplit
row occupies one processor for its whole length. A step that only decodes is one launch per layer if
the kernel can append and rows have no left padding, which only such steps may have. A captured step
(`mixed_graphs.py`) has two kinds, decode and tiles, with the graph's sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..attention import (
    AppendingBackend,
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    append,
    select,
)
from ..attention.base import CheckedBackend
from ..attention.packed import Beginnings, PackedAttention, packed_attention
from ..attention.registry import why_not
from ..attention.rotary_cuda import append_rotated, can_rotate
from ..core.cache import KVCache
from ..core.cache.fp8 import Scales
from ..errors import InternalError
from .rotary import turned

#: Longest rows that decode in one launch with prompts, which splits no row: this many tokens take a
#: processor about 0.15 ms. (H200, 8B Llama shape, chat: a step with prompts takes 1.8 % less than
#: with a launch for each kind.)
_LONG_ROW_TOKENS = 16_384

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines `[1, T, D]` of the rotary angles of each token's position."""


@dataclass(frozen=True)
class StepParts:
    """A step as attention sees it; batches are by row capacity, which layer groups differ in."""

    num_decode_tokens: int  # The first tokens of the step.
    num_beginning_tokens: int  # The tokens after those.
    everything: dict[int, AttentionBatch]  # All tokens, for the append.
    decode: dict[int, AttentionBatch] | None = None
    beginnings: Beginnings | None = None
    continued: dict[int, AttentionBatch] | None = None  # Only where there are beginnings too.
    prompts: dict[int, AttentionBatch] | None = None  # Beginnings and continued, over rows.


@dataclass(frozen=True)
class TiledParts:
    """A captured step of fixed sizes as attention sees it; batches are by row capacity."""

    everything: dict[int, AttentionBatch]
    decode: dict[int, AttentionBatch]  # One query per entry; unused entries have no keys.
    tiles: dict[int, AttentionBatch]  # Prompt tokens and padding, over rows.
    is_decode: torch.Tensor  # `[entries of decode, 1, 1] bool`: whether an entry is used.


@dataclass(frozen=True)
class _Kernels:
    """Kernels of one kind of layer; `packed` is for beginnings."""

    rows: AttentionBackend
    packed: PackedAttention | None
    mixes: bool


class _Layer(NamedTuple):
    """A layer's cache and the views of all its rows, `[rows, row_tokens, heads, dim]`."""

    cache: KVCache
    device: torch.device
    keys: torch.Tensor
    values: torch.Tensor
    scales: Scales | None
    window: int | None


class RowAttention:
    """Appends to and attends from the rows of caches, for every layer of a model.

    `caches` has one entry per device; layers are numbered as in the model. Layers use the backend
    `attention_backend`; if None, `preferred` where it can serve, else the choice of `select`, which
    avoids flash3 for its over-read. With many sequences of different lengths flash3 pays (one H200,
    8B Llama shape: a decode step of 64 at 128 to 4,096 tokens takes 8.6 ms, with flash2 9.6).
    """

    def __init__(
        self,
        caches: Sequence[KVCache],
        attention_backend: str | None = None,
        preferred: str | None = None,
    ):
        self._name = attention_backend
        self._preferred = preferred
        self._layers = {
            layer: _Layer(
                cache,
                cache.device,
                cache.keys(layer),
                cache.values(layer),
                cache.scales(layer),
                cache.place(layer)[0].window_tokens,
            )
            for cache in caches
            for layer in cache.layers
        }
        self._kernels: dict[tuple[int, AttentionSpec], _Kernels] = {}
        self._side: torch.cuda.Stream | None = None
        # The next forward pass's step by device; None between steps.
        self.steps: Mapping[torch.device, StepParts | TiledParts] | None = None
        self.called: list[int] = []  # Layers that attended, in order; the caller clears it.

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float,
        sinks: torch.Tensor | None,
        angles: Angles | None = None,
    ) -> torch.Tensor:
        """Append a layer's new keys and values, and attend from its rows: `[1, T, Hq, Dv]`.

        `query` is `[1, Hq, T, D]`, `key` and `value` are `[1, H, T, D]`, packed; they are rotated
        by `angles` if given. A `window` of None means the layer's own; other options as in
        `AttentionBackend.forward`.
        """
        if self.steps is None:
            raise InternalError("attention was asked for outside a step")
        self.called.append(layer)
        cache, device, keys, values, scales, layer_window = self._layers[layer]
        step = self.steps[device]
        window = layer_window if window is None else window
        capacity = keys.shape[1]
        decode_batch = None
        if step.decode is not None:
            decode_batch = step.decode[capacity]
        has_left_pad = decode_batch is not None and decode_batch.left_pad is not None
        kernels = self._kernels_for(
            cache, query, key, value, keys.dtype, window, softcap, sinks, left_pad=has_left_pad
        )
        rows = kernels.rows
        batch = step.everything[capacity]
        is_decode = isinstance(step, StepParts) and step.num_decode_tokens == query.shape[2]
        is_long = decode_batch is not None and decode_batch.max_num_tokens > _LONG_ROW_TOKENS
        options: dict[str, Any] = {
            "scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "scales": scales
        }  # fmt: skip
        q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
        # Attention kernels that append cannot rotate by angles.
        if is_decode and isinstance(rows, AppendingBackend) and angles is None and not has_left_pad:
            return rows.append_and_attend(q, k, v, keys, values, batch, **options)[None]

        def forward(
            queries: torch.Tensor,
            batches: dict[int, AttentionBatch],
            out: torch.Tensor | None = None,
        ) -> torch.Tensor:
            # `out` is no part of the `AttentionBackend` protocol.
            into: dict[str, Any] = {"out": out} if isinstance(rows, CheckedBackend) else {}
            return rows.forward(queries, keys, values, batches[capacity], **options, **into)

        is_whole = is_decode or (kernels.mixes and not is_long)
        packed = None
        if not is_whole and isinstance(step, StepParts) and step.beginnings is not None:
            packed = kernels.packed
        q, k = _append(
            (q, k, v), angles, (keys, values), batch, scales, keep_keys=packed is not None
        )
        if is_whole:
            return forward(q, step.everything)[None]
        if isinstance(step, TiledParts):
            return self._attend_tiled(rows.name, forward, q, step)[None]
        attend_packed = packed and functools.partial(packed, scale=scale, sinks=sinks)
        return self._attend_in_parts(attend_packed, forward, (q, k, v), step)[None]

    @staticmethod
    def _attend_in_parts(
        packed: Callable[..., torch.Tensor] | None,
        forward: Callable[..., torch.Tensor],
        new: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        step: StepParts,
    ) -> torch.Tensor:
        """Attend part by part with new tensors `[T, H, D]`; returns `[T, Hq, Dv]`."""
        query, _, value = new
        begin = step.num_decode_tokens
        end = begin + step.num_beginning_tokens
        # Kernels that can write into `out` do so; `_put` copies the others' results.
        out = query.new_empty((query.shape[0], query.shape[1], value.shape[2]))
        if step.decode is not None:
            _put(forward(query[:begin], step.decode, out[:begin]), out[:begin])
        if packed is None or step.beginnings is None:
            if step.prompts is not None:
                _put(forward(query[begin:], step.prompts, out[begin:]), out[begin:])
            return out
        part = out[begin:end]
        _put(packed([each[begin:end] for each in new], step.beginnings, out=part), part)
        if step.continued is not None:
            _put(forward(query[end:], step.continued, out[end:]), out[end:])
        return out

    def _attend_tiled(
        self,
        name: str,
        forward: Callable[..., torch.Tensor],
        query: torch.Tensor,
        step: TiledParts,
    ) -> torch.Tensor:
        """Attend from `query [T, Hq, Dk]` in tiles, and in parallel for decodes: `[T, Hq, Dv]`."""
        width = step.is_decode.shape[0]
        beside = self._beside(name, query.device)
        with torch.cuda.stream(beside):
            out = forward(query, step.tiles)
        decoded = forward(query[:width], step.decode)
        if beside is not None:
            torch.cuda.current_stream(query.device).wait_stream(beside)
        torch.where(step.is_decode, decoded, out[:width], out=out[:width])
        return out

    def _beside(self, name: str, device: torch.device) -> torch.cuda.Stream | None:
        """Return a stream to run tiles in parallel with decoding; None where that does not help.

        A few prompt tokens leave most of the device idle if the kernel does not split keys (H200,
        flash2, 14 tokens after 2,048, beside 64 that decode: 118 us instead of 183). flash3 splits
        them and would not gain, and a graph with branches holds 7 MiB more.

        Tensors made on that stream need no `record_stream`: their memory is reused only there, and
        the stream first waits for the current one.
        """
        if device.type != "cuda" or name == "flash3":
            return None
        if self._side is None:
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._side.wait_stream(torch.cuda.current_stream(device))
        return self._side

    def _kernels_for(
        self,
        cache: KVCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_dtype: torch.dtype,
        window: int | None,
        softcap: float,
        sinks: torch.Tensor | None,
        *,
        left_pad: bool,
    ) -> _Kernels:
        spec = AttentionSpec.of(
            query,
            key,
            value,
            window=window,
            softcap=softcap,
            has_sinks=sinks is not None,
            left_pad=left_pad,
            kv_dtype=kv_dtype,
            max_tokens=cache.max_tokens,
        )
        kernels = self._kernels.get((id(cache), spec))
        if kernels is None:
            name = self._name
            if name is None and self._preferred and why_not(self._preferred, spec) is None:
                name = self._preferred
            rows = select(spec, name)
            overread_tokens = rows.overread_tokens(spec.k_dim, spec.v_dim, spec.kv_dtype)
            cache.keep_resident(overread_tokens)
            mixes = isinstance(rows, CheckedBackend) and rows.mixes(spec)
            kernels = _Kernels(rows, packed_attention(spec), mixes)
            self._kernels[id(cache), spec] = kernels
        return kernels

    def close(self) -> None:
        """Drop the caches' tensors, which keep addresses reserved. Idempotent."""
        self._layers.clear()
        self.steps = None


def _append(
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    angles: Angles | None,
    rows: tuple[torch.Tensor, torch.Tensor],
    batch: AttentionBatch,
    scales: Scales | None,
    *,
    keep_keys: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append new queries, keys and values `[T, H, D]`, rotated first if there are angles.

    Returns the queries to attend from and, with `keep_keys`, the rotated keys.
    """
    q, k, v = new
    if angles is not None:
        cos, sin = (each[0] for each in angles)
        if can_rotate(q, k, v, cos, sin, *rows):
            q, kept = append_rotated(q, k, v, cos, sin, *rows, batch, scales, keep_keys=keep_keys)
            return q, k if kept is None else kept
        q, k = turned(q, cos, sin), turned(k, cos, sin)
    append(k, v, *rows, batch, scales)
    return q, k


def _put(attended: torch.Tensor, out: torch.Tensor) -> None:
    """Copy `attended` into `out`, unless the kernel wrote it there."""
    if attended.data_ptr() != out.data_ptr():
        out.copy_(attended)


def row_capacities(cache: KVCache) -> set[int]:
    """Return the row capacities of a cache's layer groups, in tokens."""
    return {group.geometry.row_tokens for group in cache.groups}
