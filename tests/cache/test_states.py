"""States of fixed size beside keys and values: begun, forked, swapped and ended in one budget."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers.caches import PAGE
from helpers.evictor import Evictor
from helpers.stamps import append, assert_holds

from vmkv import (
    ConfigError,
    DriverError,
    ExtentPool,
    HostBackend,
    InternalError,
    KVCache,
    OutOfPagesError,
    Sequence,
)
from vmkv.core.backend import MemoryLocation
from vmkv.core.cache import StateShape, begun_checkpoint
from vmkv.core.cache.forking import longest_beginning, pages_to_fork
from vmkv.testing import FaultInjectingBackend
from vmkv.units import KiB, MiB, align_up
from vmkv.viz import page_map

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
    """And none more with any other; tensors have the model's shapes, and rows for checkpoints."""
    assert [(12, 4, 16, 20), (12, 12, 3)] == [tuple(e.shape) for e in cache.states.tensors(7)]
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
    with pytest.raises(ConfigError, match=r"fork at 9 tokens: .* after 10 tokens only"):
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


def test_what_moves_tokens_alone_is_refused(cache: KVCache, tmp_path: Path) -> None:
    """Other processes and beams, in words."""
    sequence = _begun(cache, 10, 3.0)
    for doing, call in {
        "export": lambda: sequence.export(tmp_path / "socket"),
        "import": lambda: cache.import_prefix(tmp_path / "socket"),
        "reorder": lambda: cache.reorder([sequence], [0]),
    }.items():
        with pytest.raises(ConfigError, match=f"cannot {doing} sequences of a model whose layers"):
            call()


@pytest.mark.parametrize("num_tokens", [0, 1, 10])
@pytest.mark.parametrize("leaves", [lambda _: None, Sequence.swap_out], ids=["here", "swapped"])
def test_files_have_the_state(
    cache: KVCache,
    make_cache: Callable[..., KVCache],
    tmp_path: Path,
    leaves: Callable[[Sequence], object],
    num_tokens: int,
) -> None:
    """Restored here, and where pages have another size; the sequence goes on from it."""
    sequence = _begun(cache, num_tokens, 3.0) if num_tokens else cache.open()
    sequence.record(range(num_tokens))
    leaves(sequence)
    sequence.save(tmp_path / "file")
    other = make_cache(ExtentPool(HostBackend(4 * PAGE), 640 * KiB, close_when_unused=True))
    other.add_states(SHAPES)
    for its in (cache, other):
        restored = its.load(tmp_path / "file")
        assert (num_tokens, num_tokens) == (restored.num_tokens, restored.num_recorded)
        if num_tokens:
            _assert_state(restored, 3.0)
        assert_holds(restored, range(num_tokens))
        append(restored, range(num_tokens, num_tokens + 5))
        _write(restored, 4.0)
        if num_tokens:
            with pytest.raises(ConfigError, match=r"after \d+ tokens only"):
                restored.truncate(num_tokens)
        restored.close()
        its.check()
    other.close()


def test_a_restored_sequence_is_found_with_its_state(cache: KVCache, tmp_path: Path) -> None:
    sequence = _with_checkpoints(cache, 40, end=60)
    sequence.save(tmp_path / "file")
    sequence.close()
    cache.trim()
    cache.load(tmp_path / "file").close()
    found = cache.open(prompt=_tokens(60))
    assert 60 == found.num_cached_tokens
    _assert_state(found, 60)


def test_files_of_other_states_are_refused(
    cache: KVCache, make_cache: Callable[..., KVCache], tmp_path: Path
) -> None:
    """The message names the layer group, and the books are as before."""
    _begun(cache, 10, 3.0).save(tmp_path / "file")
    shapes = {
        "fewer": {7: SHAPES[7]},
        "in another type": {**SHAPES, 9: [StateShape((4, 16, 20), torch.float64)]},
        "none": {},
    }
    for what, its in shapes.items():
        other = make_cache(ExtentPool(HostBackend(PAGE), 160 * KiB, close_when_unused=True))
        if its:
            other.add_states(its)
        wanted = "layer groups" if what == "none" else "has states=.* this cache has"
        with pytest.raises(ConfigError, match=wanted):
            other.load(tmp_path / "file")
        other.check()
        other.close()


# ---- checkpoints ---------------------------------------------------------------------------------


def _with_checkpoints(cache: KVCache, *lengths: int, end: int) -> Sequence:
    """A recorded sequence whose states were its length; checkpoints are at `lengths`."""
    sequence = cache.open()
    for length in (*lengths, end):
        append(sequence, range(sequence.num_tokens, length))
        _write(sequence, length)
        if length < end:
            sequence.checkpoint()
    sequence.record(range(end))
    return sequence


def _tokens(num_tokens: int) -> list[int]:
    return [*range(num_tokens), 999]


def test_sequences_go_back_to_checkpoints(cache: KVCache) -> None:
    """And fork there, as often as wanted; later checkpoints end with their tokens."""
    sequence = _with_checkpoints(cache, 4, 8, end=10)
    assert 3 * PAGE + 3 * STATE_BYTES == cache.stats().resident_bytes
    with pytest.raises(ConfigError, match=r"go back to 9 tokens: .* 4 and 8 and 10 tokens"):
        sequence.truncate(9)
    fork = sequence.fork(4)
    _assert_state(fork, 4)
    assert_holds(fork, range(4))
    fork.close()
    sequence.truncate(8)
    _assert_state(sequence, 8)
    _write(sequence, 99)
    append(sequence, range(8, 12))
    for length in (8, 4):
        sequence.truncate(length)
        _assert_state(sequence, length)
        assert_holds(sequence, range(length))
        append(sequence, range(length, 9))
    with pytest.raises(ConfigError):
        sequence.truncate(8)
    sequence.truncate(0)
    assert not list(cache.states.checkpoints())


def test_a_row_keeps_its_first_checkpoint_and_the_latest(cache: KVCache) -> None:
    """The third takes the memory of the second, without a driver call."""
    sequence = _with_checkpoints(cache, 4, 8, end=10)
    before = cache.pool.backend.calls.copy()
    sequence.checkpoint()
    sequence.checkpoint()
    assert before["mem_map"] == cache.pool.backend.calls["mem_map"]
    append(sequence, range(10, 12))
    _write(sequence, 12)
    with pytest.raises(ConfigError, match="after 4 and 10 and 12 tokens"):
        sequence.truncate(8)
    _assert_state(sequence.fork(10), 10)
    _assert_state(sequence.fork(4), 4)


def test_an_ended_sequence_goes_on_without_a_copy(cache: KVCache) -> None:
    """Its row is adopted with the state that it ended with, at any length."""
    sequence = _with_checkpoints(cache, 16, end=39)
    row = sequence.row
    sequence.close()
    before = cache.pool.backend.calls.copy()
    assert 39 == cache.find_prefix([*range(39), 7, 8], None)
    following = cache.open(prompt=[*range(39), 7, 8])
    assert (row, 39, 39) == (following.row, following.num_tokens, following.num_cached_tokens)
    assert before == cache.pool.backend.calls
    _assert_state(following, 39)
    assert_holds(following, range(39))
    following.truncate(16)
    _assert_state(following, 16)


@pytest.mark.parametrize("is_parked", [False, True])
def test_a_prefix_is_found_at_the_longest_state_within_it(cache: KVCache, is_parked: bool) -> None:
    """A row and a checkpoint: the row keeps its own, and both go on by themselves."""
    sequence = _with_checkpoints(cache, 16, 21, end=39)
    if is_parked:
        sequence.close()
    for prompt, found in {
        (*range(38), 7): 21,
        (*range(21), 999): 21,
        (*range(20), 999, 999): 16,
        (*range(21),): 16,
        (*range(16), 999): 16,
        (*range(16),): 0,
        (*range(15), *range(900, 940)): 0,
    }.items():
        assert found == cache.find_prefix(prompt, None)
        assert 0 == cache.find_prefix(prompt, "other")
        with contextlib.closing(cache.open(prompt=prompt)) as opened:
            assert found == opened.num_tokens == opened.num_cached_tokens
            if found:
                _assert_state(opened, found)
                assert_holds(opened, range(found))
            append(opened, range(found, found + 2))
            _write(opened, 77)
        cache.check()
    assert 39 == cache.find_prefix(_tokens(39), None)
    if not is_parked:
        assert_holds(sequence, range(39))
        _assert_state(sequence, 39)


def test_a_live_sequence_is_found_at_its_end(cache: KVCache) -> None:
    sequence = _with_checkpoints(cache, end=20)
    other = cache.open(prompt=_tokens(20))
    assert 20 == other.num_tokens
    _assert_state(other, 20)
    append(sequence, range(20, 21))
    assert 0 == cache.find_prefix(_tokens(20), None) - 20  # The fork's.
    other.close()


def test_states_beyond_recorded_tokens_are_not_found(cache: KVCache) -> None:
    """An ended sequence may hold a token that nobody has read; its checkpoints serve."""
    sequence = _with_checkpoints(cache, 16, end=20)
    append(sequence, range(20, 21))
    _write(sequence, 21)
    sequence.close()
    assert 16 == cache.find_prefix(_tokens(21), None)


def test_a_checkpoint_at_the_end_of_a_sequence_gives_way_to_its_own_state(cache: KVCache) -> None:
    sequence = _with_checkpoints(cache, 16, end=20)
    sequence.checkpoint()
    sequence.close()
    assert [16] == [length for _, length, _ in cache.states.checkpoints()]
    assert 20 == cache.find_prefix(_tokens(20), None)


def test_memory_is_taken_from_the_longest_state_first(cache: KVCache) -> None:
    """Of a parked row: its own state, then tokens behind a checkpoint, then that."""
    _with_checkpoints(cache, 16, end=40).close()
    assert 10 * PAGE + 2 * STATE_BYTES == cache.stats().parked_bytes
    for kept_pages, found in ((13, 16), (8, 16), (7, 16), (6, 0)):
        cache.trim(cache.stats().parked_bytes - kept_pages * PAGE)
        with cache.pool.lock:
            assert found == longest_beginning(cache, _tokens(39), None)
        cache.check()
    cache.trim()
    assert 0 == cache.stats().resident_bytes


def test_a_row_without_its_own_state_is_forked(cache: KVCache) -> None:
    _with_checkpoints(cache, 16, end=40).close()
    cache.trim(PAGE)
    opened = cache.open(prompt=_tokens(40))
    assert 16 == opened.num_tokens
    _assert_state(opened, 16)
    assert_holds(opened, range(16))


def test_checkpoints_of_live_sequences_give_way(cache: KVCache) -> None:
    """To the growth of others; the sequence keeps its state."""
    sequence = _with_checkpoints(cache, 4, 16, end=40)
    assert 2 * STATE_BYTES == cache.stats().parked_bytes
    other = cache.open()
    other.append(4 * (40 - 10 - 3 - 3 - 3))
    assert [4] == [length for _, length, _ in cache.states.checkpoints()]
    sequence.append(4)
    assert not list(cache.states.checkpoints())
    _assert_state(sequence, 40)
    with pytest.raises(OutOfPagesError):
        sequence.checkpoint()


def test_checkpoints_of_live_sequences_are_trimmed(cache: KVCache) -> None:
    sequence = _with_checkpoints(cache, 4, end=40)
    cache.trim()
    assert 10 * PAGE + STATE_BYTES == cache.stats().resident_bytes
    _assert_state(sequence, 40)


def test_a_checkpoint_stays_until_its_step_is_submitted(cache: KVCache) -> None:
    """Other threads may evict it from then on; the books would find it if they did before (I10)."""
    sequence = _begun(cache, 10, 3.0)
    with begun_checkpoint(sequence, 10) as at:
        assert at is not None
        cache.pool.give_back()
        with cache.submitting([], [at]):
            cache.states.copy(sequence.row, at, 0)
    with pytest.raises(InternalError, match="I10"), cache.submitting([], [at]):
        cache.pool.give_back()
    cache.pool.give_back()
    assert not list(cache.states.checkpoints())


def test_checkpoints_are_evicted_by_another_thread(
    host: HostBackend, make_cache: Callable[..., KVCache]
) -> None:
    """Whenever no thread holds the pool's lock: what is refused leaves the sequence as it was."""
    evictor = Evictor(lambda: ExtentPool(host, 40 * PAGE, close_when_unused=True), share=0.04)
    cache = make_cache(evictor.pool)
    cache.add_states(SHAPES)
    num_done = num_refused = 0
    for _ in range(40):
        sequence = _with_checkpoints(cache, 4, 8, end=10)
        with contextlib.suppress(ConfigError):
            pages_to_fork(sequence, 4)
            sequence.fork(4).close()
        for length in (8, 4):
            try:
                sequence.truncate(length)
            except ConfigError:
                num_refused += 1
            else:
                num_done += 1
            assert_holds(sequence, range(sequence.num_tokens))
            _assert_state(sequence, sequence.num_tokens)
        sequence.close()
        cache.check()
    evictor.check()
    assert min(evictor.num_evictions, num_done, num_refused) > 5


def test_checkpoints_outlive_a_swap(cache: KVCache) -> None:
    """They stay on the device while memory lasts, and are offered with the row."""
    sequence = _with_checkpoints(cache, 16, end=20)
    sequence.swap_out()
    assert STATE_BYTES == cache.stats().resident_bytes
    assert 0 == cache.find_prefix(_tokens(20), None)
    sequence.swap_in()
    assert 20 == cache.find_prefix(_tokens(20), None)
    sequence.truncate(16)
    _assert_state(sequence, 16)


def test_other_sequences_in_a_row_find_no_checkpoint_of_it(cache: KVCache) -> None:
    sequence = _with_checkpoints(cache, 16, end=40)
    sequence.close()
    other = cache.open(row=sequence.row)
    append(other, range(100, 117))
    assert not list(cache.states.checkpoints())
    with pytest.raises(ConfigError):
        other.truncate(16)


def test_a_failing_copy_leaves_everything_as_it_was(
    host: HostBackend, make_cache: Callable[..., KVCache]
) -> None:
    """Of a checkpoint, and back from one; every call of the driver fails once."""
    backend = FaultInjectingBackend(host)
    pool = ExtentPool(backend, 40 * PAGE, page_bytes=PAGE, close_when_unused=True)
    cache = make_cache(pool)
    cache.add_states(SHAPES)
    num_failed = 0
    for at in range(1, 8):
        sequence = _with_checkpoints(cache, 4, end=8)
        goes_back = functools.partial(sequence.truncate, 4)
        for call, length in ((sequence.checkpoint, 8), (goes_back, 4)):
            backend.arm(at)
            try:
                call()
            except DriverError:
                num_failed += 1
                assert 8 == sequence.num_tokens
                _assert_state(sequence, 8)
            else:
                _assert_state(sequence, length)
            backend.arm(0)
            cache.check()
        sequence.truncate(4)
        _assert_state(sequence, 4)
        sequence.close()
        _with_checkpoints(cache, 16, end=18).close()
        for prompt in (_tokens(16), _tokens(18)):
            backend.arm(at)
            with contextlib.suppress(DriverError):
                opened = cache.open(prompt=prompt)
                _assert_state(opened, opened.num_tokens)
                opened.close()
            backend.arm(0)
            cache.check()
        cache.trim()
    assert num_failed > 4


# ---- memory --------------------------------------------------------------------------------------


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
    """Beside the rows of layers, with checkpoints."""
    _with_checkpoints(cache, 4, end=10)
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
