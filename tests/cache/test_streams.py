"""Several streams: copies and overwrites wait for the earlier work of other streams.

The simulated device runs the work of each stream as late as it may, in a random order. A missing
wait shows, with one seed or another, as tokens of another sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.device import Device
from helpers.pool_play import PAGE, add_layers, cost_model
from helpers.stamped_rows import STATES, History, StampedRows
from helpers.stamps import append

from vmkv import ExtentPool, KVCache, Sequence
from vmkv.units import MiB

#: Numbers that no new stream gets.
_FIRST, _SECOND, _THIRD = 101, 201, 301
_ALIASES, _COPIES = 0, 1000  # Extents of at least so many pages are aliased.


class _Play:
    """A cache of one group, with eight tokens in a page, on a late device."""

    def __init__(self, seed: int, alias_pages: int, *, has_states: bool):
        self.device = Device(PAGE, is_late=True, seed=seed)
        pool = ExtentPool(
            self.device, 100 * PAGE, host_budget_bytes=100 * PAGE, close_when_unused=True
        )
        self.cache = KVCache(
            pool, max_tokens=96, max_sequences=3, cost_model=cost_model(alias_pages)
        )
        add_layers(self.cache, 0, 1, 32, None)
        if has_states:
            self.cache.add_states(STATES)
        self.cache.current_stream = self.device.current_stream
        self.rows = StampedRows(self.cache, self.device)
        self.histories: dict[Sequence, History] = {}
        self.kept: list[object] = []

    def on(self, stream: int) -> None:
        """Make `stream` the current stream."""
        self.device.stream = stream

    def open(self, num_tokens: int, first: int = 0) -> Sequence:
        sequence = self.cache.open()
        self.histories[sequence] = History()
        self.write(sequence, num_tokens, first)
        return sequence

    def fork(self, source: Sequence) -> Sequence:
        fork = source.fork()
        self.histories[fork] = self.histories[source]
        return fork

    def forked(self, num_tokens: int) -> tuple[Sequence, Sequence]:
        """Open a sequence on the first stream and fork it on the second; return both."""
        self.on(_FIRST)
        source = self.open(num_tokens)
        self.on(_SECOND)
        return source, self.fork(source)

    def write(self, sequence: Sequence, num_tokens: int, first: int = 0) -> None:
        """Append tokens, and have the current stream write them."""
        start = sequence.num_tokens
        before = self.histories[sequence].tokens[:start]
        known = History([*before, *range(first, first + num_tokens)])
        sequence.append(num_tokens)
        claim = self.rows.claim("a kernel", sequence.row, start, len(known))
        row = sequence.row
        self.device.submit(lambda: self.rows.write("a kernel", row, known, start, claim))
        self.histories[sequence] = known

    def read(self, sequence: Sequence) -> None:
        """Have the current stream compare all tokens of a sequence."""
        row, known = sequence.row, self.histories[sequence]
        self.device.submit(lambda: self.rows.compare("a kernel", row, known, [0]))

    def close(self) -> None:
        self.device.run_some()
        for sequence in self.cache.live_sequences():
            sequence.close()
        self.rows.close()
        self.device.close()


@pytest.fixture(params=range(6))
def make_play(request: pytest.FixtureRequest) -> Iterator[Callable[..., _Play]]:
    """Makes a play whose seed is the parameter."""
    with ExitStack() as stack:

        def make(alias_pages: int, *, has_states: bool = False) -> _Play:
            play = _Play(request.param, alias_pages, has_states=has_states)
            stack.callback(play.close)
            return play

        yield make


@pytest.mark.parametrize("alias_pages", [_ALIASES, _COPIES], ids=["alias", "copy"])
def test_source_waits_for_a_fork_on_another_stream(
    make_play: Callable[..., _Play], alias_pages: int
) -> None:
    """The source overwrites its tokens after the copy.

    A prefix hit forks like this, unknown to its owner.
    """
    play = make_play(alias_pages)
    source, fork = play.forked(30)
    play.on(_FIRST)
    source.truncate(5)
    play.write(source, 25, first=100)
    play.read(source)
    play.on(_SECOND)
    play.read(fork)


def test_source_goes_on_once_a_fork_has_copied_its_state(
    make_play: Callable[..., _Play],
) -> None:
    """Its next step overwrites the state, and no earlier token."""
    play = make_play(_ALIASES, has_states=True)
    play.on(_FIRST)
    source = play.open(9)
    play.on(_SECOND)
    row, known = source.fork().row, play.histories[source]
    play.on(_FIRST)
    play.write(source, 1, first=100)
    play.on(_SECOND)
    play.device.submit(lambda: play.rows.compare_state("a kernel", row, known, 9))


def test_a_load_waits_for_the_readers_of_the_row_that_it_fills(
    make_play: Callable[..., _Play],
) -> None:
    """It runs on a stream of its own, and another one may still read what was in the row."""
    play = make_play(_ALIASES)
    play.on(_FIRST)
    said = play.open(48, first=1)
    tokens = play.histories[said].tokens
    said.record(tokens)
    said.close()
    play.cache.trim()
    ended = play.open(60, first=500)
    play.read(ended)
    ended.close()
    play.on(_SECOND)
    back = play.cache.open(prompt=[*tokens, 0])
    assert (ended.row, 48) == (back.row, back.num_tokens)
    play.histories[back] = History(tokens)
    play.read(back)


def test_source_waits_for_a_fork_that_has_ended(make_play: Callable[..., _Play]) -> None:
    """The ended fork's stream may still read the tokens that the source overwrites."""
    play = make_play(_ALIASES)
    source, fork = play.forked(32)
    play.on(_FIRST)
    source.truncate(5)
    play.on(_SECOND)
    play.read(fork)
    fork.close()
    play.on(_FIRST)
    with play.cache.pool.lock:
        play.cache.rows.retire_parked(fork.row)  # Evicted without a wait.
    play.write(source, 25, first=100)
    play.read(source)


def test_adopted_row_waits_for_the_stream_that_reads_it(make_play: Callable[..., _Play]) -> None:
    play = make_play(_COPIES)
    play.on(_FIRST)
    first = play.open(30)
    play.read(first)
    first.close()
    play.on(_SECOND)
    play.read(play.open(30, first=100))


@pytest.mark.parametrize("alias_pages", [_ALIASES, _COPIES], ids=["alias", "copy"])
def test_reorder_waits_for_streams_that_write_the_beams(
    make_play: Callable[..., _Play], alias_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reorder = sys.modules["vmkv.core.cache.forking"]
    through_buffer = reorder._through_buffer

    def kept(*args: Any) -> Any:
        copies, buffer = through_buffer(*args)
        play.kept.append(buffer)  # Torch keeps a GPU's buffer until the copies are done.
        return copies, buffer

    monkeypatch.setattr(reorder, "_through_buffer", kept)
    play = make_play(alias_pages)
    beams = []
    for stream in (_FIRST, _SECOND):
        play.on(stream)
        beams.append(play.open(30, first=stream))
        play.read(beams[-1])
    play.on(_THIRD)
    play.cache.reorder(beams, [1, 0])
    first, second = beams
    play.histories |= {first: play.histories[second], second: play.histories[first]}
    for beam in beams:
        play.read(beam)


def test_saving_waits_for_every_stream(
    cache: KVCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's bytes are read by the host, which no stream orders."""
    joined: list[int] = []
    monkeypatch.setattr(cache.pool.backend, "join_streams", joined.append)
    sequence = cache.open(10)
    append(sequence, range(10))
    joined.clear()
    sequence.save(tmp_path / "saved")
    assert [cache.current_stream()] == joined


@pytest.mark.gpu
def test_gpu_source_waits_for_a_fork_on_another_stream() -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with KVCache("cuda:0", max_tokens=1024, max_sequences=2, budget_bytes=64 * MiB) as cache:
        cache.add_layers(range(4), num_kv_heads=8, head_dim=128, dtype=torch.float16)
        source = cache.open()
        with torch.cuda.stream(first):
            source.append(100)
            source.keys(1).fill_(1)
        with torch.cuda.stream(second):
            torch.cuda._sleep(200_000_000)  # The copy is late.
            fork = source.fork()
            assert cache.stats().sharing.copied_bytes
        with torch.cuda.stream(first):
            source.truncate(10)
            source.append(90)
            source.keys(1).fill_(2)
        torch.cuda.synchronize()
        assert [1, 2] == [each.keys(1).unique().item() for each in (fork, source)]
