"""Host memory: sequences that are swapped out and in at their addresses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.caches import ALIASES, PAGE, MakeCache
from helpers.stamps import append, assert_holds

from vmkv import (
    ConfigError,
    ExtentPool,
    HostBackend,
    KVCache,
    OutOfPagesError,
    Sequence,
)
from vmkv.core.backend import MemoryLocation
from vmkv.core.backend.host import HostFence
from vmkv.core.memory.page_table import PageMapping
from vmkv.errors import DriverError
from vmkv.units import KiB, MiB


@pytest.fixture
def cache(host: HostBackend, make_cache: MakeCache) -> KVCache:
    """A full and a windowed group; 150 pages of device memory and 130 of the host's."""
    pool = ExtentPool(
        host, 150 * PAGE, host_budget_bytes=130 * PAGE, page_bytes=PAGE, close_when_unused=True
    )
    return make_cache(pool, windows=(40,), cost_model=ALIASES)


def _host_bytes(cache: KVCache) -> int:
    return cache.pool.stats(MemoryLocation.HOST).resident_bytes


def _mappings(sequence: Sequence) -> list[PageMapping]:
    groups = sequence.cache.groups
    return [each for group in groups for each in group.table.rows[sequence.row].mappings]


# ---- out and in ---------------------------------------------------------------------------


def test_layers_stay_while_a_sequence_is_swapped_out(cache: KVCache) -> None:
    """Its contents come back by groups; nothing is dropped before an error either."""
    sequence = cache.open()
    append(sequence, range(40))
    sequence.swap_out()
    for change in (lambda: cache.drop_layers([1]), cache.compact):
        with pytest.raises(ConfigError, match=r"swapped out; swap_in\(\) before"):
            change()
    sequence.swap_in()
    with pytest.raises(ConfigError, match="layer 9 was not added"):
        cache.drop_layers([1, 9])
    assert_holds(sequence, range(40))


def test_swapped_in_sequence_has_the_over_read_resident(cache: KVCache) -> None:
    """`keep_resident` may be called while the sequence is swapped out."""
    sequence = cache.open()
    append(sequence, range(40))
    sequence.swap_out()
    cache.keep_resident(64)
    sequence.swap_in()
    cache.check()
    assert_holds(sequence, range(40))


class _FencelessBackend(HostBackend):
    """A host backend that records no fence while `is_out_of_events`."""

    is_out_of_events = False

    def record_fence(self, stream: int | None = None) -> HostFence:
        if self.is_out_of_events:
            raise DriverError("record_fence", -1, "OUT_OF_EVENTS", "no fence can be recorded")
        return super().record_fence(stream)


def test_a_sequence_comes_back_while_no_fence_can_be_recorded(make_cache: MakeCache) -> None:
    """Its host memory is released later, at the latest for the next sequence that leaves."""
    backend = _FencelessBackend(PAGE)
    pool = ExtentPool(backend, 64 * PAGE, host_budget_bytes=16 * PAGE, close_when_unused=True)
    sequence = make_cache(pool).open()
    append(sequence, range(64))
    sequence.swap_out()
    backend.is_out_of_events = True
    sequence.swap_in()
    assert 16 * PAGE == _host_bytes(sequence.cache)
    backend.is_out_of_events = False
    assert_holds(sequence, range(64))
    sequence.swap_out()
    sequence.swap_in()
    assert_holds(sequence, range(64))
    assert 0 == _host_bytes(sequence.cache)


def test_swap_out_leaves_shared_extents(cache: KVCache) -> None:
    """Moving them would free nothing; only the sequence's own extents move."""
    parent = cache.open()
    append(parent, range(64))
    fork = parent.fork()
    append(fork, range(100, 108))
    own_bytes = cache.pool.stats().resident_bytes
    fork.swap_out()
    cache.check()
    assert _host_bytes(cache) < own_bytes / 2
    assert_holds(parent, range(64))
    parent.close()
    fork.swap_in()
    assert_holds(fork, [*range(64), *range(100, 108)])


def test_stats_count_swapped_bytes(cache: KVCache) -> None:
    """Bytes of tokens are counted, in both directions."""
    sequence = cache.open()
    append(sequence, range(16))
    sequence.swap_out()
    assert 0 == cache.stats().used_bytes
    assert cache.stats().host_bytes == _host_bytes(cache)
    sequence.swap_in()
    sharing = cache.stats().sharing
    assert sharing.swapped_out_bytes == sharing.swapped_in_bytes == 2 * 16 * KiB


# ---- fences -------------------------------------------------------------------------------


def test_nothing_is_unmapped_while_the_device_may_read_it(
    host: HostBackend, cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy to the host is device work, so memory is unmapped after its fence."""
    sequence = cache.open()
    append(sequence, range(50))
    host.hold_fences()
    unmapped: list[int] = []
    wait = HostFence.wait

    def waits(fence: HostFence) -> None:
        unmapped.append(host.calls["mem_unmap"])
        wait(fence)

    monkeypatch.setattr(HostFence, "wait", waits)
    sequence.swap_out()
    assert 0 == unmapped[0] < host.calls["mem_unmap"]


# ---- refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda sequence: sequence.append(1),
        lambda sequence: sequence.truncate(1),
        lambda sequence: sequence.fork(),
        lambda sequence: sequence.keys(0),
        lambda sequence: sequence.values(0),
        lambda sequence: sequence.record([1]),
        lambda sequence: sequence.swap_out(),
    ],
)
def test_a_swapped_sequence_cannot_be_used(cache: KVCache, use: Callable[[object], object]) -> None:
    """The error names `swap_in`, and no token is lost."""
    sequence = cache.open()
    append(sequence, range(9))
    sequence.swap_out()
    with pytest.raises(ConfigError, match=r"swapped out; swap_in\(\) first"):
        use(sequence)
    cache.check()
    sequence.swap_in()
    assert_holds(sequence, range(9))


def test_no_host_memory_left(make_cache: MakeCache) -> None:
    """The error names the budget, and the sequence is as it was."""
    cache = make_cache()
    sequence = cache.open()
    append(sequence, range(9))
    with pytest.raises(OutOfPagesError, match="host_budget_bytes"):
        sequence.swap_out()
    assert_holds(sequence, range(9))


def test_close_frees_the_host_memory(cache: KVCache) -> None:
    sequence = cache.open()
    append(sequence, range(80))
    sequence.swap_out()
    sequence.close()
    cache.pool.reclaimer.wait()
    assert 0 == _host_bytes(cache)
    cache.check()
    heir = cache.open()
    append(heir, range(500, 580))
    assert_holds(heir, range(500, 580))


# ---- on a GPU -----------------------------------------------------------------------------


def _gpu_cache() -> KVCache:
    cache = KVCache(
        "cuda:0",
        max_tokens=8192,
        max_sequences=2,
        budget_bytes=512 * MiB,
        host_budget_bytes=512 * MiB,
    )
    cache.add_layers(range(4), num_kv_heads=8, head_dim=128, dtype=torch.float16)
    return cache


@pytest.mark.gpu
def test_a_captured_graph_is_valid_after_swapping() -> None:
    """The addresses that it was captured with hold the same tokens again, in other memory."""
    with _gpu_cache() as cache:
        sequence = cache.open()
        sequence.append(4096)
        keys = sequence.keys(1)
        keys.copy_(torch.randn(keys.shape, device="cuda", dtype=keys.dtype))
        expected = keys.float().sum(0)
        out = torch.empty_like(expected)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            out.copy_(keys.float().sum(0))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out.copy_(keys.float().sum(0))
        for _ in range(2):
            sequence.swap_out()
            other = cache.open()
            other.append(6000)
            other.keys(1).fill_(float("nan"))
            other.close()
            cache.trim()
            sequence.swap_in()
            out.zero_()
            graph.replay()
            assert torch.equal(expected, out)
