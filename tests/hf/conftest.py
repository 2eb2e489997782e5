"""Fixtures of the transformers tests: no network, and no cache leaves memory behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from helpers.tiny_models import make_cache, parts_of

from vmkv import BackendUsage, ExtentPool, HostBackend
from vmkv.units import KiB, MiB

# Its notes about configurations and missing kernels would bury what a failing test prints.
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)  # Tiny tensors: more threads only wait for each other.


@pytest.fixture
def new_cache() -> Iterator[Callable[..., Any]]:
    """Makes caches in one pool of 4 KiB host pages; closes them and finds all memory returned.

    With `backend` or `budget_bytes` the cache gets memory of its own, which the test answers for.
    """
    # Models of tests before stay: the collection below shall look at this test's objects alone.
    gc.collect()
    gc.freeze()
    backend = HostBackend(4 * KiB)
    pool = ExtentPool(backend, 256 * MiB)
    made = []

    def make(config: Any, **options: Any) -> Any:
        if "backend" not in options and "budget_bytes" not in options:
            options["pool"] = pool
        cache = make_cache(config, **options)
        made.extend(parts_of(cache))
        return cache

    yield make
    gc.collect()  # What the test's own frames held is gone; cycles around it go now.
    for cache in made:
        if not cache.is_closed:
            cache.check()
        cache.close()
    pool.close()
    assert BackendUsage() == backend.usage(), "the test left something behind"


@pytest.fixture
def pool() -> Iterator[ExtentPool]:
    """Host memory in 4 KiB pages; nothing of it may be in use when the test ends."""
    backend = HostBackend(4 * KiB)
    pool = ExtentPool(backend, 64 * MiB)
    yield pool
    assert pool.stats().resident_bytes == pool.stats().retired_bytes == 0
    pool.close()
    assert BackendUsage() == backend.usage(), "the test left something behind"
