"""A cache with some sequences, over a backend that fails on command."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vmkv import ExtentPool, KVCache, Sequence
from vmkv.core.cache.forking import CostModel
from vmkv.testing import FaultInjectingBackend, Scenario
from vmkv.units import KiB

PAGE = 4 * KiB
ALIASES = CostModel(map_us=0, unmap_us=0)  # Extents of any size are aliased.


class FaultyCache:
    """A cache of two layers, or of four in two groups, and its sequences.

    A token of a group is 2 layers x 2 heads x 32 x 4 B x (K and V), 1 KiB: four fill a page.
    """

    folder: Path  # Of its files; set by tests that have some.

    def __init__(
        self,
        backend: FaultInjectingBackend,
        *,
        window_tokens: int | None = None,
        budget_pages: int = 256,
        **options: Any,
    ):
        self.backend = backend
        self.pool = ExtentPool(backend, budget_pages * PAGE, close_when_unused=True, **options)
        self.cache = KVCache(
            self.pool, max_tokens=400, max_sequences=4, layers_per_group=2, cost_model=ALIASES
        )
        self.add_layers(0)
        if window_tokens is not None:
            self.add_layers(2, window_tokens=window_tokens)
        self.sequences: list[Sequence] = []
        self.is_closing = False
        self.defined_tokens = 400  # Content behind it may be lost in a failure.

    def add_layers(self, first: int, window_tokens: int | None = None) -> None:
        self.cache.add_layers(
            range(first, first + 2),
            num_kv_heads=2,
            head_dim=32,
            dtype=torch.float32,
            window_tokens=window_tokens,
        )

    def begin(self, num_tokens: int, step: int = 0) -> Sequence:
        """Open a sequence of `num_tokens` tokens of known content; with `step`, grown in steps."""
        sequence = self.cache.open(num_tokens)
        for length in range(step, num_tokens, step) if step else ():
            self.cache.grow([(sequence, length)])
        self.cache.grow([(sequence, num_tokens)])
        self.cache.check()  # Before writing, which would crash if memory is missing.
        for layer in self.cache.layers:
            _, at = self.cache.place(layer)
            kept = self.kept(sequence, layer)
            for value, tensor in enumerate((sequence.keys(layer), sequence.values(layer))):
                tensor[kept:] = 100 * len(self.sequences) + 10 * at + value
        self.sequences.append(sequence)
        return sequence

    def kept(self, sequence: Sequence, layer: int) -> int:
        """The first token that is certainly still in the cache."""
        group, _ = self.cache.place(layer)
        window = group.window_tokens
        return 0 if window is None else max(0, sequence.num_tokens - window + 1)

    def fork(self, sequence: Sequence, num_tokens: int | None = None) -> Sequence:
        """Fork a sequence."""
        self.sequences.append(sequence.fork(num_tokens))
        return self.sequences[-1]

    def say(self, num_tokens: int) -> Sequence:
        """Open a sequence with the recorded tokens 0, 1, 2 …"""
        sequence = self.begin(num_tokens)
        sequence.record(range(num_tokens))
        return sequence

    def hear(self, num_tokens: int) -> None:
        """Open a sequence with a prompt that `say` has recorded."""
        self.sequences.append(self.cache.open(prompt=range(num_tokens)))
        assert self.sequences[-1].num_cached_tokens

    def observe(self) -> object:
        """Everything that a user sees: layers, live sequences, and checksums of their content."""
        if self.is_closing:
            return None
        cache = self.cache
        live = [each for each in self.sequences if not each.is_closed]
        return (
            sorted(cache.layers),
            cache.stats().num_sequences,
            cache.stats().used_bytes,
            cache.stats().reserved_bytes,
            cache.stats().budget_bytes,
            sorted(cache.live),
            [each.num_tokens for each in live],
            [cache.prefixes.token_ids(each.row) for each in live],
            [
                zlib.crc32(tensor[self.kept(each, layer) : self.defined_tokens].numpy().tobytes())
                for each in live
                for layer in cache.layers
                for tensor in (each.keys(layer), each.values(layer))
            ],
        )

    def close_cache(self) -> None:
        self.is_closing = True
        self.cache.close()

    def scenario(self, operation: Callable[[], object]) -> Scenario:
        return Scenario(operation, self.observe, self.cache.check, self.close_cache)
