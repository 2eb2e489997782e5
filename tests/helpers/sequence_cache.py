"""A transformers cache over one sequence of a `KVCache`, as a user's own adapter."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from vmkv import KVCache, Sequence
from vmkv.core.cache.fp8 import FP8, decode, encode


def add_layers(cache: KVCache, config: Any, kv_dtype: str = "auto") -> KVCache:
    """Add the layers of a float32 model with equal layers."""
    cache.add_layers(
        range(config.num_hidden_layers),
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=FP8 if kv_dtype == "fp8" else torch.float32,
    )
    return cache


class SequenceLayer(DynamicLayer):  # type: ignore[misc]
    """A layer whose keys and values are views of the sequence's row."""

    def __init__(self, sequence: Sequence, layer: int):
        super().__init__()
        self.is_initialized = True
        self._sequence, self._layer = sequence, layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[1, heads, new, dim]` behind the past; return past and new in the same layout."""
        num_new = key_states.shape[-2]
        if self._layer == 0:
            self._sequence.append(num_new)
        views = []
        for view, states in (
            (self._sequence.keys(self._layer), key_states),
            (self._sequence.values(self._layer), value_states),
        ):
            new = states[0].transpose(0, 1)
            view[-num_new:] = encode(new) if view.dtype == FP8 else new
            views.append(decode(view, None, states.dtype).transpose(0, 1)[None])
        return views[0], views[1]

    def get_seq_length(self) -> int:
        """Number of tokens."""
        return self._sequence.num_tokens


def sequence_cache(sequence: Sequence) -> Cache:
    """A cache for `model.generate(past_key_values=…)` of one prompt."""
    return Cache(layers=[SequenceLayer(sequence, layer) for layer in sequence.cache.layers])
