"""Caches for tests, which are checked and closed after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.caches import ALIASES

from vmkv import Backend, ExtentPool, HostBackend, KVCache
from vmkv.core.cache import layer_group
from vmkv.units import KiB


@pytest.fixture
def no_underread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows keep exactly the tokens that their queries see, without a margin for whole tiles."""
    monkeypatch.setattr(layer_group, "UNDERREAD_TOKENS", 0)


@pytest.fixture
def make_cache(host: HostBackend) -> Iterator[Callable[..., KVCache]]:
    """Makes a cache over 4 KiB pages with two layers of 1 KiB a token: four tokens in a page.

    `windows` adds a group of two more layers for each; their numbers go on from 2.
    """
    caches: list[KVCache] = []

    def make(memory: Any = None, *, windows: tuple[int, ...] = (), **options: Any) -> KVCache:
        if memory is None:
            memory = host
            options.setdefault("budget_bytes", 4096 * KiB)
        options = {"max_tokens": 400, "max_sequences": 4, "layers_per_group": 2, **options}
        cache = KVCache(memory, **options)
        caches.append(cache)
        for at, window_tokens in enumerate((None, *windows)):
            cache.add_layers(
                range(2 * at, 2 * at + 2),
                num_kv_heads=2,
                head_dim=32,
                dtype=torch.float32,
                window_tokens=window_tokens,
            )
        return cache

    yield make
    live = [cache for cache in caches if not cache.is_closed]
    try:
        for cache in live:
            cache.check()
    finally:
        for cache in live:
            cache.close()


@pytest.fixture
def cache_of_two_token_pages(backend: Backend) -> Iterator[Callable[..., KVCache]]:
    """Make a cache of one layer on each kind of backend; two tokens fill a page of any size."""
    caches: list[KVCache] = []

    def make(*, pages: int, scrub: str, **options: Any) -> KVCache:
        budget_bytes = pages * backend.granularity_bytes
        its: dict[str, Any] = {"scrub": scrub, "host_budget_bytes": budget_bytes}
        pool = ExtentPool(backend, budget_bytes, close_when_unused=True, **its)
        caches.append(KVCache(pool, max_tokens=64, **options))
        head_dim = backend.granularity_bytes // 2 // 2 // 4 // 2
        caches[-1].add_layers([0], num_kv_heads=2, head_dim=head_dim, dtype=torch.float32)
        return caches[-1]

    yield make
    for cache in caches:
        cache.check()
        cache.close()


@pytest.fixture
def cache(make_cache: Callable[..., KVCache]) -> KVCache:
    """Two layers, four rows of 400 tokens, four tokens in a page; whole extents are aliased."""
    return make_cache(cost_model=ALIASES)
