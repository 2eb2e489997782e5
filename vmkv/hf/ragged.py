"""Ragged batches: sequences of any length, each in a row of its own, in one packed forward pass.

The model is called with all tokens of a step in one batch entry, and a `RaggedStep` travels
beside them to every attention layer as a keyword argument, the way transformers' own continuous
batching hands over its cache. There the step's keys and values are appended to their rows and
attention reads the rows in place. Nothing is padded, gathered or copied.
"""

from __future__ import annotations

from collections.abc import Sequence as List_
from dataclasses import dataclass

import torch

from ..attention import AttentionBackend, AttentionBatch, AttentionSpec, append, select
from ..cache import CacheStats, KVCache, Sequence
from ..errors import ConfigError
from . import compat
from .device_rows import DeviceRows
from .step import Slot
from .store import LayerKind, Settings, Store


@dataclass(frozen=True)
class Piece:
    """What one sequence does in a step.

    Attributes:
        sequence_id: Which sequence.
        num_past_tokens: Tokens it holds already.
        num_new_tokens: Tokens of this step.
    """

    sequence_id: int
    num_past_tokens: int
    num_new_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens it holds after the step."""
        return self.num_past_tokens + self.num_new_tokens


class RaggedCache:
    """The rows of many sequences, on every device that the model is spread over.

    Args:
        config: The model's configuration.
        settings: As of a `VMKVCache`.

    Raises:
        ConfigError: The model has layers whose state is not keys and values.
    """

    def __init__(self, config: object, settings: Settings):
        decoder = settings.decoder_config
        if "chunked_attention" in (getattr(decoder, "layer_types", None) or ()):
            raise ConfigError(
                "this model attends in chunks, which no kernel here does in a ragged batch; "
                "generate with past_key_values=VMKVCache(config) instead"
            )
        layers = compat.default_layers(config)
        if len(layers) != getattr(decoder, "num_hidden_layers", len(layers)):
            raise ConfigError(
                "layers of this model share keys and values, which only a cache can hand on; "
                "generate with past_key_values=VMKVCache(config) instead"
            )
        kinds = []
        for index, layer in enumerate(layers):
            is_ours, window = compat.window_of(layer)
            if not is_ours:
                raise ConfigError(
                    f"layer {index} of this model is a {type(layer).__name__}, whose state is not "
                    "keys and values; generate with past_key_values=VMKVCache(config) instead"
                )
            kinds.append(LayerKind(index, window))
        self.store = Store(settings, kinds)
        self._sequences: dict[int, dict[int, Sequence]] = {}
        self._backends: dict[tuple[int, AttentionSpec], AttentionBackend] = {}

    def rows_for(self, rows: DeviceRows, pieces: List_[Piece]) -> list[Sequence]:
        """The sequences of `pieces` on one device, grown for the step; all of them or none.

        Raises:
            OutOfPagesError, OutOfAddressSpaceError, SequenceFullError: None has grown.
        """
        core = rows.core
        mine = self._sequences.setdefault(id(core), {})
        opened = []
        try:
            for piece in pieces:
                if piece.sequence_id not in mine:
                    mine[piece.sequence_id] = core.open(piece.num_tokens)
                    opened.append(piece.sequence_id)
            sequences = [mine[piece.sequence_id] for piece in pieces]
            core.grow(
                (sequence, piece.num_tokens)
                for sequence, piece in zip(sequences, pieces, strict=True)
            )
        except BaseException:
            for sequence_id in opened:
                mine.pop(sequence_id).close()
            raise
        return sequences

    def end(self, sequence_id: int) -> None:
        """A sequence is finished: its rows are parked for the next one, on every device."""
        for mine in self._sequences.values():
            sequence = mine.pop(sequence_id, None)
            if sequence is not None:
                sequence.close()

    def backend(self, core: KVCache, spec: AttentionSpec) -> AttentionBackend:
        """The attention backend for layers of this kind; its over-read is kept resident."""
        key = (id(core), spec)
        if key not in self._backends:
            backend = select(spec, self.store.settings.attention_backend)
            core.keep_resident(backend.overread_tokens(spec.k_dim, spec.v_dim))
            self._backends[key] = backend
        return self._backends[key]

    def stats(self) -> CacheStats:
        """All devices together."""
        return self.store.stats()

    def check(self) -> None:
        """Check the invariants of all memory."""
        for core in self.store.cores:
            core.check()

    def close(self) -> None:
        """Free everything. Idempotent."""
        self._sequences.clear()
        self.store.close()


class RaggedStep:
    """One forward pass over a ragged batch.

    Args:
        cache: Where the rows are.
        pieces: What each sequence does, in the order in which their tokens are packed.
    """

    def __init__(self, cache: RaggedCache, pieces: List_[Piece]):
        self._cache = cache
        self._pieces = pieces
        self._batches: dict[tuple[int, int], AttentionBatch] = {}
        self._rows: dict[int, list[int]] = {}
        self._attended: set[int] = set()

    @property
    def has_attended(self) -> bool:
        """Whether any layer has attended here."""
        return bool(self._attended)

    def check_complete(self) -> None:
        """After the pass: every layer must have attended here.

        Raises:
            ConfigError: Some have not: the model computes attention by itself, and what it
                returned is worthless.
        """
        missing = self._cache.store.kinds.keys() - self._attended
        if missing:
            raise ConfigError(
                f"layers {sorted(missing)} of this model do not attend through transformers' "
                "attention interface, so they cannot be served in a ragged batch; generate with "
                "past_key_values=VMKVCache(config) instead"
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

        Returns:
            `[1, Tq, Hq, Dv]`.

        Raises:
            OutOfPagesError: The pool is full. Nothing was written.
        """
        index = getattr(module, "layer_idx", None)
        if index is None:
            raise ConfigError(f"{type(module).__name__} does not say which layer it is")
        store = self._cache.store
        self._attended.add(int(index))
        slot = store.bind(int(index), key, value)
        if window is None:
            window = store.kinds[int(index)].window_tokens
        core = slot.step.rows.core
        batch = self._batch(slot)
        keys, values = slot.step.all_rows(slot.place)
        spec = AttentionSpec(
            device_type=query.device.type,
            dtype=query.dtype,
            num_query_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            k_dim=key.shape[3],
            v_dim=value.shape[3],
            window=window,
            softcap=softcap,
            has_sinks=sinks is not None,
        )
        backend = self._cache.backend(core, spec)
        packed_query = query[0].transpose(0, 1)
        append(key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values, batch)
        out = backend.forward(
            packed_query,
            keys,
            values,
            batch,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        return out[None]

    def _batch(self, slot: Slot) -> AttentionBatch:
        """The step as the kernels of one group want it; made once, shared by its layers."""
        rows = slot.step.rows
        row_tokens = slot.step.group.geometry.row_tokens
        if id(rows) not in self._rows:
            sequences = self._cache.rows_for(rows, self._pieces)
            self._rows[id(rows)] = [sequence.row for sequence in sequences]
        key = (id(rows), row_tokens)
        if key not in self._batches:
            self._batches[key] = AttentionBatch.build(
                self._rows[id(rows)],
                [piece.num_tokens for piece in self._pieces],
                [piece.num_new_tokens for piece in self._pieces],
                row_tokens=row_tokens,
                num_rows=rows.core.max_sequences,
                device=rows.core.device,
            )
        return self._batches[key]
