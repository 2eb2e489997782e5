"""How the layers of one step append and attend: which tokens decode, which begin, which continue.

The tokens of a step are packed in that order, because each kind can have a kernel of its own:

  decode     one query per sequence over its row; splits long rows over the device
  beginning  whole prompts, or their first chunks, over their own packed keys (`packed.py`)
  continued  later chunks of a prompt, over their rows

A kernel that `mixes` takes all of them over their rows in one launch, unless those who decode may
have long rows: what is not split over the device takes one processor that long.

A step that only decodes, and whose kernel can append, is one launch per layer, unless rows begin
with padding, which only such steps may have. A step that is captured (`mixed_graphs.py`) has two
kinds, decode and tiles, whose sizes are the graph's.
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

#: The longest rows that decode in one launch with prompts, which splits none of them: one of so
#: many tokens takes a processor about 0.15 ms. (H200, 8B Llama shape, chat: a step with prompts
#: takes 1.8 % less than with a launch for each kind.)
_LONG_ROW_TOKENS = 16_384

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines `[1, T, D]` of the angles that positions turn queries and keys by."""


@dataclass(frozen=True)
class StepParts:
    """A step as attention sees it; batches are by capacity of a row, which groups differ in.

    Attributes:
        num_decode_tokens: The first tokens of the step.
        num_beginning_tokens: Those after them.
        everything: All tokens, for the append.
        decode: The first part; None where it is empty.
        beginnings: The second; likewise.
        continued: The third, in rows, beside a second; likewise.
        prompts: The second and third in rows, where there is no second or no kernel for it.
    """

    num_decode_tokens: int
    num_beginning_tokens: int
    everything: dict[int, AttentionBatch]
    decode: dict[int, AttentionBatch] | None = None
    beginnings: Beginnings | None = None
    continued: dict[int, AttentionBatch] | None = None
    prompts: dict[int, AttentionBatch] | None = None


@dataclass(frozen=True)
class TiledParts:
    """A step of fixed sizes as attention sees it; batches are by capacity of a row.

    Attributes:
        everything: All tokens, for the append.
        decode: One query each of the first tokens; without keys where nobody decodes.
        tiles: The tokens that do not decode, in pieces, at their rows.
        is_decode: `[entries of decode, 1, 1] bool`, whether one decodes.
    """

    everything: dict[int, AttentionBatch]
    decode: dict[int, AttentionBatch]
    tiles: dict[int, AttentionBatch]
    is_decode: torch.Tensor


@dataclass(frozen=True)
class _Kernels:
    """What serves one kind of layer.

    Attributes:
        rows: The kernel for rows.
        packed: That for beginnings; None where there is none.
        mixes: See `CheckedBackend.mixes`.
    """

    rows: AttentionBackend
    packed: PackedAttention | None
    mixes: bool


class _Layer(NamedTuple):
    """Where a layer lies: its cache, and all rows of it `[rows, row_tokens, heads, dim]`."""

    cache: KVCache
    device: torch.device
    keys: torch.Tensor
    values: torch.Tensor
    scales: Scales | None
    window: int | None


class RowAttention:
    """Appends to and attends from the rows of caches, for every layer of a model.

    Args:
        caches: One for each device of the model. Their layers are the model's, by number.
        attention_backend: The kernel for rows; None for what can serve.
        preferred: The kernel for rows where none is named and this one can serve a layer; else
            what `select` takes. `select` itself leaves flash3 to those who name it, for its
            over-read; among many sequences of different lengths it is worth that (one H200, 8B
            Llama shape: a decode step of 64 at 128 to 4,096 tokens takes 8.6 ms, with flash2 9.6).

    Attributes:
        steps: The step that the next forward pass is, as each device sees it; None between steps.
        called: Layers that have attended, in order, until somebody clears it.
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
        self.steps: Mapping[torch.device, StepParts | TiledParts] | None = None
        self.called: list[int] = []

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

        Args:
            layer: The model's number for it.
            query: `[1, Hq, T, D]`, packed.
            key: `[1, H, T, D]`, the new keys.
            value: `[1, H, T, Dv]`.
            scale: See `AttentionBackend.forward`.
            window: None for the layer's own.
            softcap: See `AttentionBackend.forward`.
            sinks: Likewise.
            angles: What queries and keys are still to be turned by; None if they are.

        Raises:
            InternalError: No step was set.
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
        # With angles the append has more to do than a kernel for attention knows.
        if is_decode and isinstance(rows, AppendingBackend) and angles is None and not has_left_pad:
            return rows.append_and_attend(q, k, v, keys, values, batch, **options)[None]

        def forward(
            queries: torch.Tensor,
            batches: dict[int, AttentionBatch],
            out: torch.Tensor | None = None,
        ) -> torch.Tensor:
            # Other people's kernels know no more than their protocol.
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
        """`[T, Hq, Dv]` of new queries, keys and values `[T, H, D]`, part by part."""
        query, _, value = new
        begin = step.num_decode_tokens
        end = begin + step.num_beginning_tokens
        # Kernels that can write where all are to lie.
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
        """`[T, Hq, Dv]` of `query [T, Hq, Dk]`: tiles, and beside them those who decode."""
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
        """A stream for tiles, to run at the same time as decoding; None where that is of no use.

        A few prompt tokens leave most of the device idle to a kernel that does not split keys
        (H200, flash2, 14 tokens after 2,048, beside 64 that decode: 118 us instead of 183).
        flash3 splits them, and would only pay: a graph with branches holds 7 MiB more.

        What is made on that stream need not be recorded on this one: its memory serves none but
        that stream again, which waits for this one first.
        """
        if device.type != "cuda" or name == "flash3":
            return None
        if self._side is None:
            # torch leaves its constructor untyped.
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
        """Drop the caches' tensors: they keep addresses reserved. Idempotent."""
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
    """Append new queries, keys and values `[T, H, D]`, turned first if there are angles.

    Returns:
        The queries to attend from and, if they are to be kept, the keys.
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
    """Have `out` hold what was attended, unless the kernel wrote it there."""
    if attended.data_ptr() != out.data_ptr():
        out.copy_(attended)


def row_capacities(cache: KVCache) -> set[int]:
    """The capacities of a row, over the layer groups."""
    return {group.geometry.row_tokens for group in cache.groups}
