"""Fixtures of the transformers tests: no network access, and checks that caches free memory."""

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

# Its notes about configurations and missing kernels would hide the output of a failing test.
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)  # Tiny tensors: more threads only wait for each other.


@pytest.fixture
def new_cache() -> Iterator[Callable[..., Any]]:
    """Make caches in one pool of 4 KiB host pages, close them and check that all memory is free.

    A cache made with `backend` or `budget_bytes` has its own memory, which the test checks.
    """
    # Keeps models of earlier tests out of the collection below.
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
    gc.collect()  # Frees reference cycles of the test's objects.
    for cache in made:
        if not cache.is_closed:
            cache.check()
        cache.close()
    pool.close()
    assert BackendUsage() == backend.usage(), "the test left something behind"


@pytest.fixture
def pool() -> Iterator[ExtentPool]:
    """A host pool with 4 KiB pages; at the end of the test none of its memory may be in use."""
    backend = HostBackend(4 * KiB)
    pool = ExtentPool(backend, 64 * MiB)
    yield pool
    assert pool.stats().resident_bytes == pool.stats().retired_bytes == 0
    pool.close()
    assert BackendUsage() == backend.usage(), "the test left something behind"
