"""States of fixed size beside keys and values: begun, forked, swapped and ended in one budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers.stamps import append, assert_holds

from vmkv import ConfigError, ExtentPool, HostBackend, KVCache, OutOfPagesError, Sequence
from vmkv.core.backend import MemoryLocation
from vmkv.core.cache import StateShape
from vmkv.units import KiB, MiB, align_up
from vmkv.viz import page_map

PAGE = 4 * KiB
#: 5,120 and 72 bytes for layer 7, 5,120 for layer 9: three pages, of which one is full in part.
SHAPES = {
    7: [StateShape((4, 16, 20), torch.float32), StateShape((12, 3), torch.bfloat16)],
    9: [StateShape((4, 16, 20), torch.float32)],
}
STATE_BYTES = 3 * PAGE


@pytest.fixture
def cache(host: HostBackend, make_cache: Callable[..., KVCache]) -> Iterator[KVCache]:
    """40 pages of device memory and as many of the host's."""
    pool = ExtentPool(
        host, 40 * PAGE, host_budget_bytes=40 * PAGE, page_bytes=PAGE, close_when_unused=True
    )
    cache = make_cache(pool)
    cache.add_states(SHAPES)
    yield cache
    cache.check()


def _write(sequence: Sequence, value: float) -> None:
    for layer in SHAPES:
        for tensor in sequence.cache.states.tensors(layer):
            tensor[sequence.row] = value


def _assert_state(sequence: Sequence, value: float) -> None:
    for layer in SHAPES:
        for tensor in sequence.cache.states.tensors(layer):
            assert bool((tensor[sequence.row] == value).all())


def _begun(cache: KVCache, num_tokens: int, value: float) -> Sequence:
    sequence = cache.open()
    append(sequence, range(num_tokens))
    _write(sequence, value)
    return sequence


def test_a_state_takes_its_pages_with_the_first_token(cache: KVCache) -> None:
    """And none more with any other; tensors have the model's shapes and types."""
    assert [(4, 4, 16, 20), (4, 12, 3)] == [tuple(e.shape) for e in cache.states.tensors(7)]
    assert [torch.float32, torch.bfloat16] == [e.dtype for e in cache.states.tensors(7)]
    sequence = cache.open()
    assert 0 == cache.stats().resident_bytes
    append(sequence, range(1))
    assert PAGE + STATE_BYTES == cache.stats().resident_bytes
    append(sequence, range(1, 12))
    assert 3 * PAGE + STATE_BYTES == cache.stats().resident_bytes
    assert 12 == sequence.writable_tokens
    assert 12 * KiB + 2 * align_up(5120, 128) + 128 == cache.stats().used_bytes


def test_states_and_rows_share_the_budget(cache: KVCache) -> None:
    """Refused without a page for both; an ended sequence gives way."""
    first = _begun(cache, 100, 1.0)
    with pytest.raises(OutOfPagesError):
        cache.open().append(60)
    first.close()
    second = cache.open()
    second.append(60)
    cache.check()


def test_forks_copy_the_state(cache: KVCache) -> None:
    """Both go on by themselves."""
    sequence = _begun(cache, 10, 3.0)
    fork = sequence.fork()
    _assert_state(fork, 3.0)
    _write(sequence, 4.0)
    _assert_state(fork, 3.0)
    assert_holds(fork, range(10))
    append(fork, range(10, 12))
    sequence.close()
    _assert_state(fork, 3.0)
    fork.close()


def test_a_state_is_of_all_tokens(cache: KVCache) -> None:
    """No fork or truncation at an earlier one, except the beginning."""
    sequence = _begun(cache, 10, 3.0)
    with pytest.raises(ConfigError, match="fork at 9 tokens: layers keep a state of all 10"):
        sequence.fork(9)
    with pytest.raises(ConfigError, match="go back to 9 tokens"):
        sequence.truncate(9)
    sequence.truncate(10)
    _assert_state(sequence, 3.0)
    sequence.truncate(0)
    append(sequence, range(3))


def test_states_are_swapped_with_their_rows(cache: KVCache) -> None:
    """All device memory is free meanwhile, and may be used by others."""
    sequence = _begun(cache, 10, 3.0)
    sequence.swap_out()
    assert 0 == cache.stats().resident_bytes
    assert 3 * PAGE + STATE_BYTES == cache.pool.stats(MemoryLocation.HOST).resident_bytes
    other = _begun(cache, 90, 5.0)
    other.close()
    cache.trim()
    sequence.swap_in()
    _assert_state(sequence, 3.0)
    assert_holds(sequence, range(10))


def test_spilling_moves_keys_and_no_states(cache: KVCache) -> None:
    """Kernels write states in every step."""
    sequence = _begun(cache, 10, 3.0)
    assert 2 * PAGE == sequence.spill(64 * PAGE)
    assert 2 * PAGE == cache.pool.stats(MemoryLocation.HOST).resident_bytes
    _assert_state(sequence, 3.0)
    assert 2 * PAGE == sequence.unspill()


def test_what_moves_tokens_alone_is_refused(cache: KVCache, tmp_path: Path) -> None:
    """Files, other processes and beams, in words."""
    sequence = _begun(cache, 10, 3.0)
    for doing, call in {
        "save": lambda: sequence.save(tmp_path / "file"),
        "export": lambda: sequence.export(tmp_path / "socket"),
        "load": lambda: cache.load(tmp_path / "file"),
        "import": lambda: cache.import_prefix(tmp_path / "socket"),
        "reorder": lambda: cache.reorder([sequence], [0]),
    }.items():
        with pytest.raises(ConfigError, match=f"cannot {doing} sequences of a model whose layers"):
            call()


def test_no_prefix_is_found(cache: KVCache) -> None:
    """Recorded tokens change nothing: there is no state of them alone."""
    sequence = _begun(cache, 40, 3.0)
    sequence.record(range(40))
    assert 0 == cache.open(prompt=list(range(40))).num_tokens
    assert 0 == cache.stats().num_prefix_hits


def test_states_are_added_before_any_sequence(cache: KVCache) -> None:
    with pytest.raises(ConfigError, match="added once, before any sequence"):
        cache.add_states(SHAPES)


def test_surplus_of_states_is_returned(cache: KVCache) -> None:
    """A sequence that has adopted a row with a state, and has no token yet, needs none."""
    _begun(cache, 10, 3.0).close()
    sequence = cache.open(10)
    assert STATE_BYTES < cache.stats().resident_bytes
    cache.trim()
    assert 0 == cache.stats().resident_bytes
    append(sequence, range(4))


def test_the_page_map_draws_states(cache: KVCache) -> None:
    """Beside the rows of layers."""
    _begun(cache, 10, 3.0)
    drawn = page_map(cache)
    assert cache.stats().resident_bytes == drawn.resident_bytes
    assert "states of layers 7, 9" in str(drawn)


def test_a_short_sequence_takes_little_more_than_its_state() -> None:
    """Twelve tokens of Qwen3.5-35B-A3B: 30 layers with states, 10 with keys, pages of 2 MiB."""
    recurrent = StateShape((32, 128, 128), torch.float32)
    convolution = StateShape((8192, 4), torch.bfloat16)
    with KVCache(
        HostBackend(2 * MiB), max_tokens=64, max_sequences=2, layers_per_group=10
    ) as cache:
        cache.add_layers(range(10), num_kv_heads=2, head_dim=256, dtype=torch.bfloat16)
        cache.add_states({10 + at: [recurrent, convolution] for at in range(30)})
        cache.open().append(12)
        own_bytes = 30 * (recurrent.num_bytes + convolution.num_bytes) + 12 * 20 * KiB
        stats = cache.stats()
        assert own_bytes == stats.used_bytes
        assert stats.resident_bytes <= 1.04 * own_bytes
