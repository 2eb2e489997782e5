"""Ragged batches: sequences of any length, each in a row of its own, in one packed forward pass.

The model is called with all tokens of a step in one batch entry, and a `RaggedStep` travels
beside them to every attention layer as a keyword argument, the way transformers' own continuous
batching hands over its cache. There the step's keys and values are appended to their rows and
attention reads the rows in place. Nothing is padded, gathered or copied.
"""

from __future__ import annotations

from collections.abc import Sequence as List_
from typing import NamedTuple

import torch

from ..attention import AttentionBackend, AttentionBatch, AttentionSpec, SteadyDecode, append
from ..cache import KVCache, Sequence
from ..cache.fp8 import Scales
from ..errors import ConfigError
from .ragged_cache import Piece as Piece
from .ragged_cache import RaggedCache as RaggedCache
from .step import Slot
from .unservable import UnservableError


class _Bound(NamedTuple):
    """Where a layer lies and what serves it; the same in every step of a steady decode."""

    made_for: tuple[object, ...]
    keys: torch.Tensor
    values: torch.Tensor
    batch: AttentionBatch
    backend: AttentionBackend
    window: int | None
    scales: Scales | None


class RaggedStep:
    """One forward pass over a ragged batch; or, if it is steady, one after another.

    Args:
        cache: Where the rows are.
        pieces: What each sequence does, in the order in which their tokens are packed.
        is_steady: Each piece is one new token, and `advance` will be called.

    Raises:
        ConfigError: A steady step has a piece of several tokens.
    """

    def __init__(self, cache: RaggedCache, pieces: List_[Piece], *, is_steady: bool = False):
        if is_steady and any(piece.num_new_tokens != 1 for piece in pieces):
            raise ConfigError("a steady step is one token for every sequence")
        self._cache = cache
        self._pieces = pieces
        self._num_tokens = [piece.num_tokens for piece in pieces]
        self._steady = SteadyDecode(self._num_tokens) if is_steady else None
        self._has_advanced = False
        self._batches: dict[tuple[int, int], AttentionBatch] = {}
        self._rows: dict[int, tuple[KVCache, list[Sequence]]] = {}
        self._bound: dict[int, _Bound] = {}
        self._attended: set[int] = set()

    @property
    def can_advance(self) -> bool:
        """Whether `advance` may be called.

        The step is steady, and since it began nothing else was done with the sequences.
        """
        return self._steady is not None and (
            not self._has_advanced or self._cache.is_steady(self._steady)
        )

    def positions(self, device: torch.device) -> torch.Tensor:
        """`[Tq] int64`: the position of every token of the pass; of a steady step, in place.

        Args:
            device: Where the model wants them.
        """
        if self._steady is not None:
            return self._steady.counts(device).positions
        at = [at for piece in self._pieces for at in range(piece.num_past_tokens, piece.num_tokens)]
        return torch.tensor(at).to(device, non_blocking=True)

    def advance(self) -> None:
        """Go on to the next pass: every sequence has one more token.

        Raises:
            ConfigError: `can_advance` is false.
            OutOfPagesError, SequenceFullError: The step is of no further use; end it with
                `RaggedCache.settle`.

        Cost: one launch per device and two look-ups; see `SteadyDecode`.
        """
        if self._steady is None or not self.can_advance:
            raise ConfigError("this step cannot be repeated; make a new one")
        if not self._has_advanced:
            for core, sequences in self._rows.values():
                self._steady.keep_grown(core, sequences)
            self._cache.begin_steady(self._steady)
            self._has_advanced = True
        self._steady.advance()
        self._attended.clear()

    def check_complete(self) -> None:
        """After the pass: every layer must have attended here.

        Raises:
            ConfigError: Some have not: the model computes attention by itself, and what it
                returned is worthless.
        """
        missing = self._cache.store.kinds.keys() - self._attended
        if missing:
            raise UnservableError(
                f"its layers {sorted(missing)} do not attend through transformers' attention "
                "interface"
            )

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float,
        sinks: torch.Tensor | None,
        mask: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Append the step's keys and values of one layer, and attend.

        Args:
            module: The attention layer; its `layer_idx` says which.
            query: `[1, Hq, Tq, D]`, packed.
            key: `[1, H, Tq, D]`, the new keys.
            value: `[1, H, Tq, Dv]`.
            scale: See `AttentionBackend.forward`, as for the rest.
            window: Likewise.
            softcap: Likewise.
            sinks: Likewise.
            mask: What the layer was given for one: the model's placeholder, or nothing.
            bias: What it would add to scores; nothing.

        Returns:
            `[1, Tq, Hq, Dv]`.

        Raises:
            OutOfPagesError: The pool is full. Nothing was written.
            ConfigError: The layer has attended in this pass already, or attends in a way that
                rows cannot.
        """
        index = self._check(module, mask, bias)
        self._attended.add(index)
        bound = self._bind(index, query, key, value, window, softcap, sinks is not None)
        new_keys, new_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        append(new_keys, new_values, bound.keys, bound.values, bound.batch, bound.scales)
        out = bound.backend.forward(
            query[0].transpose(0, 1),
            bound.keys,
            bound.values,
            bound.batch,
            scale=scale,
            window=bound.window,
            softcap=softcap,
            sinks=sinks,
            scales=bound.scales,
        )
        return out[None]

    def _check(
        self, module: torch.nn.Module, mask: torch.Tensor | None, bias: torch.Tensor | None
    ) -> int:
        """Refuse what rows cannot do; returns which layer it is."""
        index = getattr(module, "layer_idx", None)
        if index is None:
            raise UnservableError(f"{type(module).__name__} does not say which layer it is")
        index = int(index)
        if index in self._attended:
            raise UnservableError(f"its layer {index} attends more than once in a pass")
        if mask is not None and not getattr(mask, "_vmkv_placeholder", False):
            raise UnservableError(f"its layer {index} attends with a mask of the model's own")
        if bias is not None:
            raise UnservableError(f"its layer {index} adds a bias of the model's own to scores")
        return index

    def _bind(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        softcap: float,
        has_sinks: bool,
    ) -> _Bound:
        """The layer at `index`; looked up once for all passes of a steady step."""
        asked = (query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype)
        made_for = (*asked, key.device, window, softcap, has_sinks)
        bound = self._bound.get(index)
        if bound is not None and bound.made_for == made_for:
            return bound
        slot = self._cache.bind(index, key, value)
        if window is None:
            window = self._cache.store.kinds[index].window_tokens
        batch = self._batch(slot)
        keys, values = slot.step.all_rows(slot.place)
        spec = AttentionSpec.of(
            query,
            key,
            value,
            window=window,
            softcap=softcap,
            has_sinks=has_sinks,
            kv_dtype=keys.dtype,
            max_tokens=slot.step.rows.core.max_tokens,
        )
        backend = self._cache.backend(slot.step.rows.core, spec)
        scales = slot.step.group.scales_at(slot.place)
        bound = _Bound(made_for, keys, values, batch, backend, window, scales)
        self._bound[index] = bound
        return bound

    def _batch(self, slot: Slot) -> AttentionBatch:
        """The step as the kernels of one group want it; made once, shared by its layers."""
        rows = slot.step.rows
        core, row_tokens = rows.core, slot.step.group.geometry.row_tokens
        if id(rows) not in self._rows:
            self._rows[id(rows)] = (core, self._cache.rows_for(rows, self._pieces))
        key = (id(rows), row_tokens)
        if key not in self._batches:
            where = [sequence.row for sequence in self._rows[id(rows)][1]]
            if self._steady is not None:
                self._batches[key] = self._steady.batch(
                    where, row_tokens=row_tokens, num_rows=core.max_sequences, device=core.device
                )
            else:
                self._batches[key] = AttentionBatch.build(
                    where,
                    self._num_tokens,
                    [piece.num_new_tokens for piece in self._pieces],
                    row_tokens=row_tokens,
                    num_rows=core.max_sequences,
                    device=core.device,
                )
        return self._batches[key]
