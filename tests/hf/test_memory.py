"""Memory of a cache over time: it follows the tokens, and none is left at the end.

Every test leaves its backend empty (`new_cache`). Figures on a GPU are in `bench/`.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
from accelerate.utils import find_executable_batch_size
from helpers.tiny_models import (
    HEADS,
    VERSION,
    WIDTH,
    append,
    generate,
    make_cache,
    prompt,
    tiny_config,
    tiny_model,
)

from vmkv import BackendUsage, ExtentPool, HostBackend, VMKVCache
from vmkv.units import KiB, MiB

NewCache = Callable[..., Any]
LAYER_TOKEN_BYTES = 2 * HEADS * WIDTH * 4
PAGE_BYTES = 4 * KiB


@pytest.mark.parametrize("layers_per_group", [1, 8])
def test_resident_follows_tokens(layers_per_group: int) -> None:
    """Resident memory exceeds used memory by at most a few pages per row and group."""
    backend = HostBackend(PAGE_BYTES)
    with VMKVCache(
        tiny_config("llama"), backend=backend, layers_per_group=layers_per_group
    ) as cache:
        num_groups = 2 if layers_per_group == 1 else 1
        num_tokens = 0
        resident_bytes = 0
        for step in (1, 1, 40, 1, 300, 1, 1000, 1, 1):
            append(cache, step, batch_size=2)
            num_tokens += step
            stats = cache.stats()
            assert 2 * 2 * num_tokens * LAYER_TOKEN_BYTES == stats.used_bytes
            assert stats.resident_bytes == backend.usage().mapped_bytes
            assert stats.resident_bytes >= max(stats.used_bytes, resident_bytes)
            # Slack: the last page, and the growth quantum of 1/64 of the row, as a power of two.
            spare_bytes = 2 * num_groups * 2 * PAGE_BYTES + stats.used_bytes / 32
            assert stats.resident_bytes <= stats.used_bytes + spare_bytes
            resident_bytes = stats.resident_bytes
        assert backend.file_bytes() <= backend.usage().physical_bytes
    assert BackendUsage() == backend.usage()
    assert backend.usage().physical_bytes == 0


def test_growth_keeps_addresses_and_costs_few_calls(new_cache: NewCache) -> None:
    """In four thousand decode steps nothing moves, and few steps map."""
    cache = new_cache(tiny_config("llama"))
    append(cache, 1, batch_size=1)
    address = cache.layers[1].values.data_ptr()
    for _ in range(4000):
        append(cache, 1, batch_size=1)
    assert address == cache.layers[1].values.data_ptr()
    stats = cache.stats()
    assert stats.driver_calls["mem_map"] < 4000 // 16 * 2
    assert not stats.driver_calls.get("mem_unmap", 0)


def test_addresses_are_reserved_for_long_sequences_without_cost(new_cache: NewCache) -> None:
    """A reservation for a million tokens needs no memory."""
    cache = new_cache(tiny_config("llama"), max_tokens=1 << 20, max_batch_size=8)
    append(cache, 3, batch_size=1)
    stats = cache.stats()
    assert stats.reserved_bytes >= 8 * (1 << 20) * 2 * LAYER_TOKEN_BYTES
    assert stats.resident_bytes <= 2 * 2 * PAGE_BYTES


def test_sliding_layers_are_flat_while_full_layers_grow(new_cache: NewCache) -> None:
    """In a model with both kinds only the full layers need memory per token."""
    cache = new_cache(tiny_config("gemma2"))
    append(cache, 1000, batch_size=1)
    append(
        cache, 1, batch_size=1
    )  # A step frees the tokens that left the windows in the step before.
    before = cache.stats().resident_bytes
    for _ in range(1000):
        append(cache, 1, batch_size=1)
    grown_bytes = cache.stats().resident_bytes - before
    full_bytes = 2 * 1000 * LAYER_TOKEN_BYTES  # Two of four layers.
    assert full_bytes - 4 * PAGE_BYTES <= grown_bytes <= full_bytes * 1.1 + 8 * PAGE_BYTES


@pytest.mark.skipif(VERSION < (5, 0), reason="4.57 cannot record a window's past")
def test_recording_window_returns_memory_at_crop(new_cache: NewCache) -> None:
    """The past recorded for a rollback is freed by `crop`."""
    cache = new_cache(tiny_config("mistral"))
    cache.activate_past_recording()
    append(cache, 100, batch_size=1)
    cache.crop(0)
    resident_bytes = []
    for _ in range(600):
        append(cache, 5, batch_size=1)
        cache.crop(-2)
        resident_bytes.append(cache.stats().resident_bytes)
    assert max(resident_bytes[150:]) <= max(resident_bytes[:150])
    cache.check()


def test_accelerate_reduces_a_batch_that_does_not_fit() -> None:
    """The search of Trainer and lm-eval knows errors for want of memory by type and message."""
    tried, config = [], tiny_config("llama")

    @find_executable_batch_size(starting_batch_size=8)
    def run(batch_size: int) -> None:
        tried.append(batch_size)
        with VMKVCache(config, backend=HostBackend(PAGE_BYTES), budget_bytes=2 * MiB) as cache:
            append(cache, 1500, batch_size=batch_size)

    run()
    assert 8 == tried[0] > tried[-1]


def test_loop_of_unclosed_copies_does_not_accumulate() -> None:
    """Copies of a prompt's cache that are dropped, never closed, give their memory back."""
    model = tiny_model("llama")
    with make_cache(model.config, backend=HostBackend(PAGE_BYTES)) as cache:
        generate(model, prompt("llama"), cache)
        backend, physical_bytes = cache.kv_caches[0].pool.backend, []
        for _ in range(6):
            twin = copy.deepcopy(cache)
            twin.batch_repeat_interleave(4)
            physical_bytes.append(backend.usage().physical_bytes)
            with pytest.warns(ResourceWarning, match="never closed"):
                del twin
        make_cache(model.config).close()  # Frees the memory of the last one.
        assert len(set(physical_bytes)) == 1


def test_loop_of_unclosed_caches_does_not_accumulate() -> None:
    """Calls of `generate` with a new cache each, never closed, use the memory of one cache."""
    model = tiny_model("llama")
    backend = HostBackend(PAGE_BYTES)
    pool = ExtentPool(backend, 16 * MiB)
    physical_bytes = []

    def generate_and_forget() -> None:
        generate(model, prompt("llama"), make_cache(model.config, pool=pool))
        gc.collect()

    for _ in range(6):
        with pytest.warns(ResourceWarning, match="never closed"):
            generate_and_forget()
        physical_bytes.append(backend.usage().physical_bytes)
    assert len(set(physical_bytes)) == 1
    make_cache(model.config).close()  # Frees the memory of the last one.
    pool.close()
    assert BackendUsage() == backend.usage()
