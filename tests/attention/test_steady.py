"""A steady decode says in every step what a batch built anew for that step would say.

On the host backend, with pages of 4 KiB that hold 16 tokens, so that sequences run out of mapped
memory at different times. What generation makes of it is tests/hf/test_ragged_generate.py's
question, its cost bench/bench_block_table.py's.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vmkv import ConfigError, KVCache, OutOfPagesError, SequenceFullError
from vmkv.attention import AttentionBatch, SteadyDecode
from vmkv.backend import HostBackend
from vmkv.cache import Sequence
from vmkv.memory import ExtentPool
from vmkv.units import KiB, MiB

DEVICE = torch.device("cpu")
PAGE_TOKENS = 16
MAX_TOKENS = 100
OVERREAD_TOKENS = 5


def _cache(
    budget_bytes: int = 16 * MiB, window_tokens: int | None = None, max_tokens: int = MAX_TOKENS
) -> KVCache:
    pool = ExtentPool(HostBackend(4 * KiB), budget_bytes)
    core = KVCache(pool, max_tokens=max_tokens, max_sequences=8)
    core.add_layers([0], num_kv_heads=1, head_dim=128, dtype=torch.uint8)
    if window_tokens is not None:
        shape = {"num_kv_heads": 1, "head_dim": 128, "dtype": torch.uint8}
        core.add_layers([1], window_tokens=window_tokens, **shape)
    core.keep_resident(OVERREAD_TOKENS)
    return core


@pytest.fixture
def core() -> Iterator[KVCache]:
    """A cache of plenty."""
    core = _cache()
    yield core
    _close(core)


def _close(core: KVCache) -> None:
    core.check()
    core.close()
    core.pool.close()


def _open(core: KVCache, lengths: list[int]) -> list[Sequence]:
    sequences = [core.open() for _ in lengths]
    core.grow(zip(sequences, lengths, strict=True))
    return sequences


def _begin(core: KVCache, sequences: list[Sequence]) -> tuple[SteadyDecode, AttentionBatch]:
    steady = SteadyDecode([sequence.num_tokens for sequence in sequences])
    batch = steady.batch(
        [sequence.row for sequence in sequences],
        row_tokens=core.groups[0].geometry.row_tokens,
        num_rows=core.max_sequences,
        device=DEVICE,
    )
    steady.keep_grown(core, sequences)
    return steady, batch


def _run(steady: SteadyDecode, num_steps: int) -> None:
    for _ in range(num_steps):
        steady.advance()


def _assert_mapped(core: KVCache, sequences: list[Sequence], lengths: list[int]) -> None:
    """All that a kernel may read of sequences of these lengths is there."""
    for sequence, length in zip(sequences, lengths, strict=True):
        for group in core.groups:
            group.check_row(sequence.row, length, core.overread_tokens)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    num_steps=st.integers(1, MAX_TOKENS - 60),
    looks_at=st.sets(st.integers(0, MAX_TOKENS)),
)
def test_every_step_is_what_a_new_batch_would_be(
    lengths: list[int], num_steps: int, looks_at: set[int]
) -> None:
    """Lengths, positions, spans, slots and bounds; whether or not earlier ones were looked at."""
    core = _cache()
    sequences = _open(core, lengths)
    steady, batch = _begin(core, sequences)
    positions = steady.counts(DEVICE).positions
    for step in range(num_steps + 1):
        if step:
            steady.advance()
        now = [length + step for length in lengths]
        _assert_mapped(core, sequences, now)
        core.check()
        if step in looks_at or step == num_steps:
            rows = [sequence.row for sequence in sequences]
            expected = AttentionBatch.build(
                rows, now, [1] * len(now), row_tokens=batch.row_tokens, device=DEVICE
            )
            assert batch.spans == expected.spans
            for name in ("num_tokens", "tokens_before", "key_starts", "visible_tokens", "slots"):
                mine, theirs = getattr(batch, name), getattr(expected, name)
                assert mine.dtype == theirs.dtype
                assert torch.equal(mine, theirs), name
            assert batch.max_num_tokens == expected.max_num_tokens
            assert positions.dtype == torch.int64
            assert positions.tolist() == [length - 1 for length in now]
    steady.settle()
    assert [sequence.num_tokens for sequence in sequences] == now
    _close(core)


def test_memory_is_asked_for_only_where_it_runs_out(core: KVCache) -> None:
    """In `PAGE_TOKENS` steps each sequence is grown once, not in every step."""
    grown: list[Sequence] = []
    grow = core.grow

    def noted(wanted: object) -> None:
        targets = list(wanted)  # type: ignore[call-overload]
        grown.extend(sequence for sequence, _ in targets)
        grow(targets)

    sequences = _open(core, [1, 3, 7, 16])
    steady, _ = _begin(core, sequences)
    core.grow = noted  # type: ignore[method-assign]
    _run(steady, PAGE_TOKENS)
    assert sorted(each.row for each in grown) == sorted(each.row for each in sequences)


def test_no_more_is_mapped_than_growing_in_every_step_maps() -> None:
    """Growing later saves calls, not at the price of memory."""
    lengths, resident_bytes = [1, 17, 40], []
    for is_steady in (False, True):
        core = _cache()
        sequences = _open(core, lengths)
        steady, _ = _begin(core, sequences) if is_steady else (None, None)
        resident = []
        for step in range(1, 50):
            if steady is not None:
                steady.advance()
            else:
                core.grow([(each, at + step) for each, at in zip(sequences, lengths, strict=True)])
            resident.append(core.stats().resident_bytes)
        resident_bytes.append(resident)
        _close(core)
    assert resident_bytes[0] == resident_bytes[1]


def test_windows_let_go_of_nothing_that_a_query_sees() -> None:
    """Pages behind a window leave, at the latest when a sequence grows, and never early."""
    core = _cache(window_tokens=9, max_tokens=500)
    sequences = _open(core, [1, 260])
    steady, _ = _begin(core, sequences)
    for step in range(1, 200):
        steady.advance()
        _assert_mapped(core, sequences, [1 + step, 260 + step])
    (_, windowed) = core.groups
    assert windowed.first_mapped_token(sequences[1].row, 400) > 100, "nothing left: no test"
    steady.settle()
    core.check()
    for sequence in sequences:
        core.truncate(sequence, sequence.num_tokens - 1)
    _close(core)


def test_a_row_that_ends_stops_the_decode(core: KVCache) -> None:
    """The last token of a row can be had, the one after it is an error that counts nothing."""
    sequences = _open(core, [MAX_TOKENS - 2, 4])
    steady, batch = _begin(core, sequences)
    steady.advance()
    steady.advance()
    for _ in range(2):
        with pytest.raises(SequenceFullError):
            steady.advance()
        assert batch.num_tokens.tolist() == [MAX_TOKENS, 6]
    steady.settle()
    assert [sequence.num_tokens for sequence in sequences] == [MAX_TOKENS, 6]


def test_a_pool_that_is_empty_stops_the_decode_and_can_be_filled() -> None:
    """Nothing has advanced; after a sequence of the caller's has gone, the same step succeeds."""
    core = _cache(budget_bytes=4 * 4 * KiB)
    other, *sequences = _open(core, [20, 3, 3])
    steady, batch = _begin(core, sequences)
    with pytest.raises(OutOfPagesError):
        _run(steady, MAX_TOKENS)
    stopped_at = batch.num_tokens.tolist()
    assert stopped_at[0] < 2 * PAGE_TOKENS
    other.close()
    steady.advance()
    assert batch.num_tokens.tolist() == [length + 1 for length in stopped_at]
    steady.settle()
    assert [sequence.num_tokens for sequence in sequences] == batch.num_tokens.tolist()
    _close(core)


def test_trimming_takes_nothing_that_the_next_steps_rely_on(core: KVCache) -> None:
    """Whoever makes room sees sequences as long as they are grown."""
    sequences = _open(core, [1, 14])
    steady, _ = _begin(core, sequences)
    for step in range(1, 40):
        steady.advance()
        core.trim()
        _assert_mapped(core, sequences, [1 + step, 14 + step])


def test_a_sequence_that_was_closed_is_left_alone(core: KVCache) -> None:
    """Settling after an end touches only what is open; and may be repeated."""
    ended, going_on = _open(core, [3, 5])
    steady, _ = _begin(core, [ended, going_on])
    steady.advance()
    ended.close()
    adopted = core.open()
    core.grow([(adopted, 2)])
    steady.settle()
    steady.settle()
    assert (adopted.num_tokens, going_on.num_tokens) == (2, 6)


def test_what_is_under_way_cannot_be_added_to(core: KVCache) -> None:
    """A device or cache that joins late would count from the wrong number."""
    sequences = _open(core, [3])
    steady, _ = _begin(core, sequences)
    steady.advance()
    with pytest.raises(ConfigError, match="under way"):
        steady.counts(torch.device("meta"))
    with pytest.raises(ConfigError, match="under way"):
        steady.keep_grown(core, sequences)
    with pytest.raises(ConfigError, match="under way"):
        steady.batch([0], row_tokens=MAX_TOKENS, device=DEVICE)


def test_bad_rows_are_refused() -> None:
    """A steady batch is checked as any other."""
    with pytest.raises(ConfigError, match="more than once"):
        SteadyDecode([3, 3]).batch([1, 1], row_tokens=8, device=DEVICE)
    with pytest.raises(ConfigError, match="do not fit"):
        SteadyDecode([9]).batch([1], row_tokens=8, device=DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 85, 86, 257, 1024])
def test_a_gpu_counts_as_the_host_does(size: int) -> None:
    """Lengths, positions and what derives from them, on a stream of the caller's."""
    device = torch.device("cuda", torch.cuda.current_device())
    lengths = [1 + at * 7 % 90 for at in range(size)]
    steady = SteadyDecode(lengths)
    batch = steady.batch(range(size), row_tokens=100, device=device)
    torch.cuda.synchronize()  # The upload was on another stream.
    with torch.cuda.stream(torch.cuda.Stream()):
        _run(steady, 5)
        torch.cuda.current_stream().synchronize()
    now = [length + 5 for length in lengths]
    assert batch.num_tokens.tolist() == now
    assert steady.counts(device).positions.tolist() == [length - 1 for length in now]
    assert batch.slots.tolist() == [100 * row + length - 1 for row, length in enumerate(now)]


@pytest.mark.gpu
def test_a_captured_graph_counts_when_it_is_replayed() -> None:
    """A decode step captured as a CUDA graph may count inside it."""
    device = torch.device("cuda", torch.cuda.current_device())
    counts = SteadyDecode([3, 9]).counts(device)
    counts.advance()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counts.advance()
    for _ in range(3):
        graph.replay()
    assert counts.num_tokens.tolist() == [7, 13]
    assert counts.positions.tolist() == [6, 12]
