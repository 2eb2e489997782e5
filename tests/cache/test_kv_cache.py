"""The cache as a whole: its device, layers, options, closing, and shared pools."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.caches import ALIASES, PAGE, MakeCache
from helpers.stamps import append, assert_holds

from vmkv import ClosedError, ConfigError, ExtentPool, HostBackend, KVCache
from vmkv.core.backend import MemoryLocation
from vmkv.errors import InternalError

LAYER: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 32, "dtype": torch.float32}


# ---- construction -------------------------------------------------------------------------


def test_cache_opens_and_closes_its_own_device() -> None:
    """The example in the docstring of `KVCache`."""
    cache = KVCache("host", max_tokens=4096, max_sequences=8)
    cache.add_layers(range(2), num_kv_heads=2, head_dim=64, dtype=torch.float16)
    sequence = cache.open()
    sequence.append(100)
    sequence.keys(layer=0)[:] = 1
    assert 0 < cache.stats().budget_bytes
    cache.close()
    with pytest.raises(ClosedError):
        cache.pool.trim()


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("whose", ["pool", "backend"])
def test_a_forked_child_is_not_held_up_by_a_lock(
    make_cache: MakeCache, whose: str, closes: bool
) -> None:
    """The lock's holder is a thread that the child does not have, so it must not wait for it."""
    sequence = make_cache().open()
    sequence.append(4)
    pool = sequence.cache.pool
    lock = pool.lock if whose == "pool" else pool.backend._lock
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            may_end.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    child = os.fork()
    if not child:
        signal.alarm(20)  # Ends a child that waits.
        try:
            if closes:
                sequence.cache.close()
                os._exit(7)
            sequence.append(300)
        except ConfigError:
            os._exit(7)
        finally:
            os._exit(1)
    may_end.set()
    holder.join()
    assert 7 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_unclosed_cache_warns_and_frees_nothing(host: HostBackend) -> None:
    """A destructor runs at any moment, and the device may still be reading."""
    pool = ExtentPool(host, 64 * PAGE)
    caches = [KVCache(pool, max_tokens=8, max_sequences=1)]
    caches[0].add_layers([0], **LAYER)
    caches[0].open().append(4)
    groups, mappings = caches[0].groups, host.usage().num_mappings
    caches.clear()
    with pytest.warns(ResourceWarning, match="never closed"):
        gc.collect()  # A cache and its sequences refer to each other.
    assert mappings == host.usage().num_mappings
    for group in groups:
        group.close()
    pool.detach()
    pool.close()


def test_cache_whose_constructor_failed_does_not_warn(host: HostBackend) -> None:
    with pytest.raises(ConfigError):
        KVCache(host, max_tokens=0, max_sequences=1)
    gc.collect()


# ---- layers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers_per_group", "num_groups"), [(None, 7), (1, 7), (2, 4), (3, 3), (7, 1), (100, 1)]
)
def test_layers_per_group_sets_the_number_of_groups(
    host: HostBackend, layers_per_group: int | None, num_groups: int
) -> None:
    """The host's default is one layer a group; each layer keeps its own numbers."""
    cache = KVCache(
        host,
        max_tokens=64,
        max_sequences=2,
        budget_bytes=256 * PAGE,
        layers_per_group=layers_per_group,
    )
    assert num_groups == len(cache.add_layers(range(7), **LAYER))
    sequence = cache.open()
    sequence.append(20)
    for layer in range(7):
        sequence.keys(layer)[:] = layer
        sequence.values(layer)[:] = -layer
    for layer in range(7):
        assert {float(layer)} == set(sequence.keys(layer).flatten().tolist())
        assert {-float(layer)} == set(sequence.values(layer).flatten().tolist())
    cache.close()


def test_layers_may_differ_in_shape(cache: KVCache) -> None:
    """A layer of another shape or type gets a group of its own; the caller numbers layers."""
    cache.add_layers([40, 10], num_kv_heads=1, head_dim=128, dtype=torch.float16)
    sequence = cache.open()
    sequence.append(7)
    assert (7, 1, 128) == tuple(sequence.keys(10).shape)
    assert cache.place(40) == (cache.groups[1], 0)


def test_dropped_layers_are_forgotten(make_cache: MakeCache) -> None:
    """A group without layers is removed; the other layers keep their bytes."""
    cache = make_cache(windows=(8,))
    sequence = cache.open()
    sequence.append(6)
    sequence.keys(1)[:] = 4
    cache.drop_layers([0, 2, 3])
    assert 1 == len(cache.groups)
    assert {4.0} == set(sequence.keys(1).flatten().tolist())
    with pytest.raises(ConfigError, match=r"layer 0 was not added; there are \[1\]"):
        sequence.keys(0)


# ---- bad input ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
@pytest.mark.parametrize(
    "name", ["max_tokens", "max_sequences", "budget_bytes", "layers_per_group"]
)
def test_cache_refuses_all_but_positive_integers(
    host: HostBackend, name: str, value: object
) -> None:
    """The message names the argument."""
    options: dict[str, Any] = {"max_tokens": 8, "max_sequences": 1, "budget_bytes": PAGE}
    with pytest.raises(ConfigError, match=f"{name}={value!r} must be a positive integer"):
        KVCache(host, **{**options, name: value})


def test_shared_pool_has_its_own_budget(host: HostBackend) -> None:
    """A second budget would contradict the pool's; the pool stays usable."""
    pool = ExtentPool(host, 8 * PAGE)
    with pytest.raises(ConfigError, match="leave budget_bytes out"):
        KVCache(pool, max_tokens=8, max_sequences=1, budget_bytes=PAGE)
    pool.close()


def test_unknown_device_is_refused() -> None:
    """The error lists the known devices."""
    with pytest.raises(ConfigError, match='known are "host"'):
        KVCache("npu:0", max_tokens=8, max_sequences=1)


def test_more_positions_than_kernels_count_is_refused(host: HostBackend) -> None:
    """Adding layers with 2**31 positions or more fails and leaves nothing reserved."""
    with KVCache(host, max_tokens=1 << 25, max_sequences=64, budget_bytes=PAGE) as cache:
        with pytest.raises(ConfigError, match=r"fewer than 2\*\*31"):
            cache.add_layers([0], num_kv_heads=1, head_dim=8, dtype=torch.float16)
        assert 0 == host.usage().num_reservations


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": 0},
        {"num_kv_heads": -2},
        {"head_dim": 0},
        {"head_dim": 64.0},
        {"v_head_dim": 0},
        {"num_v_heads": -1},
    ],
    ids=str,
)
def test_impossible_shapes_are_refused(cache: KVCache, changes: dict[str, Any]) -> None:
    """No layer is added."""
    with pytest.raises(ConfigError, match="must be a positive integer"):
        cache.add_layers([5], **{**LAYER, **changes})
    assert 1 == len(cache.groups)


@pytest.mark.parametrize("layers", [[], [0], [5, 1], [5, 5]], ids=str)
def test_layers_are_added_once(cache: KVCache, layers: list[int]) -> None:
    """An empty list, a known layer and a duplicate are refused, and no layer is added."""
    with pytest.raises(ConfigError, match="in the cache already, or none is named"):
        cache.add_layers(layers, **LAYER)
    assert 1 == len(cache.groups)
    with pytest.raises(ConfigError, match="layer 5 was not added"):
        cache.keys(5)


def test_missing_driver_is_a_config_error() -> None:
    """On a machine without a GPU the error names the host backend."""
    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match='backend="host"'):
        KVCache("cuda:0", max_tokens=8, max_sequences=1)


# ---- closing ------------------------------------------------------------------------------


def test_closed_cache_raises_closed_error(cache: KVCache) -> None:
    """A second close does nothing; every other call raises `ClosedError`."""
    sequence = cache.open()
    cache.close()
    cache.close()
    for use in (
        cache.open,
        cache.trim,
        lambda: cache.keys(0),
        lambda: cache.values(0),
        lambda: cache.add_layers([5], **LAYER),
        lambda: cache.drop_layers([0]),
        cache.compact,
        lambda: cache.grow([(sequence, 1)]),
        lambda: sequence.append(1),
        lambda: sequence.truncate(0),
    ):
        with pytest.raises(ClosedError, match="closed"):
            use()


# ---- one pool, several caches -------------------------------------------------------------


def test_cache_on_a_shared_pool_leaves_it_open(make_cache: MakeCache, host: HostBackend) -> None:
    """The pool's owner closes it; its memory serves the next cache."""
    pool = ExtentPool(host, 20 * PAGE)
    for _ in range(2):
        cache = make_cache(pool)
        cache.open().append(40)
        cache.close()
    assert 2 == host.calls["mem_create"]
    pool.close()


# ---- every kind of memory -----------------------------------------------------------------


def test_rows_run_on_every_backend(cache_of_two_token_pages: MakeCache, tmp_path: Path) -> None:
    """Forks diverge, beams are reordered, saved bytes come back, and a new tenant reads zeros.

    Resident, moving and swapped out, a sequence is saved as the same bytes.
    """
    options = {"scrub": "cross-tenant", "max_sequences": 4, "cost_model": ALIASES}
    cache = cache_of_two_token_pages(pages=200, **options)
    source = cache.open(tenant="a")
    append(source, range(25))
    fork = source.fork()
    other = fork.fork(7)
    append(fork, range(100, 105))
    append(source, range(200, 205))
    cache.reorder([source, fork], [1, 0])
    cache.check()
    assert_holds(source, [*range(25), *range(100, 105)])
    assert_holds(fork, [*range(25), *range(200, 205)])
    fork.close()
    source.save(tmp_path / "resident")
    source.swap_out()
    source.save(tmp_path / "swapped")
    source.close()
    cache.trim()
    assert 1 == len({path.read_bytes() for path in tmp_path.iterdir()})
    append(other, range(300, 303))
    assert_holds(other, [*range(7), *range(300, 303)])
    restored = cache.load(tmp_path / "swapped", tenant="a")
    append(restored, range(900, 920))
    assert_holds(restored, [*range(25), *range(100, 105), *range(900, 920)])
    restored.close()
    for tenant in ("b", "c"):  # The memory is adopted, and mapped again.
        stranger = cache.open(30, tenant=tenant)
        stranger.append(30)
        for tensor in (stranger.keys(0), stranger.values(0)):
            assert not tensor.any()
            tensor[:] = 7
        stranger.close()
        cache.rows.retire_parked(stranger.row)
        cache.pool.reclaimer.wait()


def test_overread_tokens_are_resident(cache: KVCache) -> None:
    """Kernels that fetch whole tiles may read some tokens past the length, within the row."""
    cache.overread_tokens = 30
    sequence = cache.open()
    for num_tokens in (1, 8, 391):
        sequence.append(num_tokens)
        cache.check()
        group, _ = cache.place(0)
        end = min(sequence.num_tokens + 30, group.geometry.row_tokens)
        cache.keys(0)[sequence.row, :end].sum()
        assert group.resident_tokens(sequence.row) >= end


@pytest.mark.parametrize("what", ["too long", "front gone"])
def test_check_finds_a_sequence_without_its_memory(cache: KVCache, what: str) -> None:
    """The test breaks I6 by hand, at either end of the row."""
    sequence = cache.open()
    sequence.append(40)
    table = cache.groups[0].table
    if what == "too long":
        sequence.num_tokens = 60
    else:
        table.retire_front(sequence.row, 8, cache.pool.reclaimer.new_fence())
    with pytest.raises(InternalError, match="I6"):
        cache.check()
    sequence.num_tokens = 0


def test_check_includes_the_invariants_of_the_pool(cache: KVCache) -> None:
    cache.open().append(4)
    shelf = cache.pool._shelf(MemoryLocation.DEVICE)
    shelf.created_bytes += PAGE
    with pytest.raises(InternalError, match="I1"):
        cache.check()
    shelf.created_bytes -= PAGE
