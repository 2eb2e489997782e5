"""Views: torch tensors over addresses of vmkv, without a copy, on the right device."""

from __future__ import annotations

import pytest
import torch
from helpers.caches import PAGE, MakeCache

from vmkv import Backend, ExtentPool, HostBackend, KVCache
from vmkv.core.cache.layer_group import torch_device
from vmkv.testing import read_bytes
from vmkv.units import KiB

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64]


def test_views_are_on_the_device_of_the_memory(backend: Backend) -> None:
    """The capsule states the device; torch does not guess it from a pointer."""
    budget_bytes = 8 * backend.granularity_bytes
    with KVCache(backend, max_tokens=64, max_sequences=1, budget_bytes=budget_bytes) as cache:
        cache.add_layers([0], num_kv_heads=1, head_dim=8, dtype=torch.float32)
        assert torch_device(backend) == cache.keys(0).device == cache.device


def test_views_lie_inside_the_reservation(cache: KVCache) -> None:
    """Each token of each layer lies where the geometry says."""
    group, _ = cache.place(0)
    geometry, base = group.geometry, group.table.address
    for row in range(4):
        sequence = cache.open(row=row)
        sequence.append(9)
        for layer in range(2):
            place = base + row * geometry.row_bytes + 5 * geometry.token_bytes
            place += layer * geometry.layer_bytes
            keys, values = sequence.keys(layer)[5], sequence.values(layer)[5]
            assert place == keys.data_ptr()
            assert place + geometry.v_offset_bytes == values.data_ptr()


def test_views_have_the_documented_strides(cache: KVCache) -> None:
    """The shape is `[rows, tokens, heads, dim]`; tokens are a token row apart."""
    group, _ = cache.place(1)
    geometry = group.geometry
    keys = cache.keys(1)
    assert (4, geometry.row_tokens, 2, 32) == tuple(keys.shape)
    assert (geometry.row_bytes // 4, geometry.token_bytes // 4, 32, 1) == keys.stride()
    assert (geometry.token_bytes // 4, 32, 1) == cache.open().keys(1).stride()


def test_views_share_memory_with_the_range(cache: KVCache) -> None:
    """A write through a view changes the bytes at once, without a copy."""
    sequence = cache.open()
    sequence.append(3)
    sequence.keys(0)[2] = 1.5
    wanted = torch.full((64,), 1.5).numpy().tobytes()
    assert wanted == read_bytes(cache.pool.backend, sequence.keys(0)[2].data_ptr(), 256)
    assert sequence.keys(0).data_ptr() == cache.keys(0)[sequence.row].data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_have_any_dtype(host: HostBackend, dtype: torch.dtype) -> None:
    """bf16 and fp8, which numpy and the CUDA array interface do not know, included."""
    with KVCache(host, max_tokens=64, max_sequences=2, budget_bytes=64 * PAGE) as cache:
        cache.add_layers(range(3), num_kv_heads=2, head_dim=24, dtype=dtype)
        sequence = cache.open()
        sequence.append(33)
        for layer in range(3):
            sequence.keys(layer).copy_(torch.full((33, 2, 24), layer + 1).to(dtype))
            sequence.values(layer).copy_(torch.full((33, 2, 24), 2 * layer + 2).to(dtype))
        for layer in range(3):
            assert dtype == sequence.keys(layer).dtype
            assert {layer + 1.0} == set(sequence.keys(layer).float().flatten().tolist())
            assert {2 * layer + 2.0} == set(sequence.values(layer).float().flatten().tolist())


def test_keys_and_values_may_differ_in_shape(host: HostBackend) -> None:
    """Latent attention has one wide key and narrower values."""
    with KVCache(host, max_tokens=64, max_sequences=2, budget_bytes=64 * PAGE) as cache:
        cache.add_layers(
            range(2),
            num_kv_heads=1,
            head_dim=72,
            v_head_dim=64,
            num_v_heads=3,
            dtype=torch.bfloat16,
        )
        sequence = cache.open()
        sequence.append(10)
        assert (10, 1, 72) == tuple(sequence.keys(0).shape)
        assert (10, 3, 64) == tuple(sequence.values(1).shape)
        for layer in range(2):
            sequence.keys(layer)[:], sequence.values(layer)[:] = layer, layer + 10
        assert {0.0} == set(sequence.keys(0).flatten().tolist())
        assert {11.0} == set(sequence.values(1).flatten().tolist())


def test_views_made_in_inference_mode_can_be_written_outside(host: HostBackend) -> None:
    """A cache outlives the mode of its first use."""
    with KVCache(host, max_tokens=64, max_sequences=1, budget_bytes=64 * PAGE) as cache:
        with torch.inference_mode():
            cache.add_layers([0], num_kv_heads=1, head_dim=8, dtype=torch.float32)
            sequence = cache.open()
            sequence.append(4)
            sequence.keys(0)[:] = 1
        sequence.keys(0)[:] = 2
        assert not sequence.keys(0).requires_grad
        assert not sequence.keys(0).is_inference()


# ---- lifetime -----------------------------------------------------------------------------


def test_view_that_outlives_its_cache_keeps_the_addresses(
    host: HostBackend, make_cache: MakeCache
) -> None:
    """The range stays reserved and empty; when the view is gone, the pool frees it."""
    pool = ExtentPool(host, 64 * PAGE)
    cache = make_cache(pool)
    sequence = cache.open()
    sequence.append(9)
    view = sequence.keys(0)
    assert cache.has_outside_views()
    cache.close()
    assert (1, 0) == (host.usage().num_reservations, host.usage().num_mappings)
    address = view.data_ptr()
    other = make_cache(pool)
    assert not address <= other.place(0)[0].table.address <= address + 400 * KiB
    del view
    pool.trim()
    assert 1 == host.usage().num_reservations  # The other cache's.
    other.close()
    pool.close()


def test_cache_without_outside_views_frees_its_addresses(cache: KVCache) -> None:
    """The cache's own tensors do not count."""
    sequence = cache.open()
    sequence.append(9)
    sequence.keys(0)[:] = 1
    assert not cache.has_outside_views()
    cache.close()
    assert 0 == cache.pool.backend.usage().num_reservations


def test_view_that_outlives_the_pool_frees_its_addresses_later(host: HostBackend) -> None:
    """The cache closes its own pool; the addresses are freed when the view is gone."""
    cache = KVCache(host, max_tokens=64, max_sequences=1, budget_bytes=64 * PAGE)
    cache.add_layers([0], num_kv_heads=1, head_dim=8, dtype=torch.float32)
    view = cache.keys(0)
    cache.close()
    assert 1 == host.usage().num_reservations
    del view
    cache.pool.reclaimer.free_idle_reservations()
    assert 0 == host.usage().num_reservations
