"""Blocks of evicted prefixes go on from host memory to files, and come back through it."""

from __future__ import annotations

import logging
import os
import random
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers.stamps import append, assert_holds

from vmkv import ConfigError, HostBackend, KVCache
from vmkv.core.cache import StateShape, block_files, growing
from vmkv.core.cache.forking import longest_beginning
from vmkv.core.cache.prefix import block_hashes
from vmkv.core.memory.slab_files import Kind, SlabFiles
from vmkv.units import KiB, MiB

PAGE = 4 * KiB
MakeCache = Callable[..., KVCache]
LONG = range(1, 97)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on the speed of this machine."""
    monkeypatch.setattr(block_files, "_SAVE_S", 60.0)


@pytest.fixture
def open_cache(make_cache: MakeCache, tmp_path: Path) -> MakeCache:
    """Make caches with files in one folder; the next one after `close` of the last."""

    def make(*, identity: bytes = b"model", num_bytes: int = 4 * MiB, **options: object) -> KVCache:
        its = {"budget_bytes": 4 * MiB, "host_budget_bytes": 256 * PAGE, **options}
        cache = make_cache(HostBackend(PAGE), **its)
        cache.host_blocks.open_files(tmp_path / "files", num_bytes, identity)
        return cache

    return make


def _say(
    cache: KVCache,
    tokens: Iterable[int],
    tenant: str | None = None,
    *,
    saves: bool = True,
    kept_until_s: float = 0.0,
) -> None:
    """A conversation with these tokens, which has ended and, unless not `saves`, is in files."""
    wanted = list(tokens)
    sequence = cache.open(prompt=[*wanted, 0], tenant=tenant)
    append(sequence, wanted[sequence.num_tokens :])
    sequence.record(wanted[sequence.num_recorded :])
    sequence.kept_until_s = kept_until_s
    sequence.close()
    if saves:
        cache.host_blocks.save()


def _found(cache: KVCache, tokens: Iterable[int], tenant: str | None = None) -> int:
    """How many of these tokens some tier holds."""
    with cache.pool.lock:
        return cache.host_blocks.find([*tokens, 0], tenant, 0, with_files=True)


def _back(cache: KVCache, tokens: Iterable[int], tenant: str | None = None) -> int:
    """Begin with these tokens, read from files where they are there; check and count them."""
    wanted = list(tokens)
    with cache.pool.lock:
        there = longest_beginning(cache, [*wanted, 0], tenant)
        reading = cache.host_blocks.read([*wanted, 0], tenant, there, token_s=1.0)
    if reading is not None:
        reading.wait(60.0)
    sequence = cache.open(prompt=[*wanted, 0], tenant=tenant)
    assert_holds(sequence, wanted[: sequence.num_tokens])
    num_tokens = sequence.num_tokens
    sequence.close()
    cache.check()
    return num_tokens


def _forget_above(cache: KVCache) -> None:
    """Leave the blocks in files alone."""
    cache.trim()
    cache.forget_prefixes(with_files=False)


def _slabs(cache: KVCache) -> list[Path]:
    return sorted(cache.host_blocks.files._files.folder.glob("slab-*"))


def _counts(cache: KVCache) -> tuple[int, int]:
    """Blocks that were written, and those that were read."""
    size = cache.groups[0].bytes_for(16)
    stats = cache.stats()
    return stats.sharing.written_bytes // size, stats.below["files"].loaded_bytes // size


# ---- both ways -----------------------------------------------------------------------------------


def test_conversations_are_found_after_a_restart(open_cache: MakeCache) -> None:
    cache = open_cache()
    said = [range(1000 * at, 1000 * at + 96) for at in range(1, 5)]
    for each in said:
        _say(cache, each)
    cache.close()
    again = open_cache()
    assert [96] * 4 == [_found(again, each) for each in said]
    assert [96] * 4 == [_back(again, each) for each in said]
    assert (0, 24) == _counts(again)
    assert 0 == _back(again, range(7000, 7096))


def test_a_closed_cache_writes_what_rows_hold(open_cache: MakeCache) -> None:
    cache = open_cache()
    sequence = cache.open(prompt=[*LONG, 0])
    append(sequence, LONG)
    sequence.record(LONG)
    sequence.close()
    cache.close()
    assert 96 == _back(open_cache(), LONG)


def test_blocks_leave_host_memory_for_files(open_cache: MakeCache) -> None:
    """Each is written once, and more is found than host memory holds."""
    cache = open_cache(host_budget_bytes=64 * PAGE)  # 16 blocks.
    said = [range(1000 * at, 1000 * at + 96) for at in range(1, 9)]
    for each in said:
        _say(cache, each)
        cache.trim()
    assert [96] * 8 == [_back(cache, each) for each in said]
    cache.trim()
    cache.host_blocks.save()
    assert 48 == _counts(cache)[0]


def test_the_next_turn_adds_its_own_blocks(open_cache: MakeCache) -> None:
    cache = open_cache()
    _say(cache, LONG)
    cache.close()
    again = open_cache()
    assert 96 == _back(again, LONG)
    _say(again, range(1, 161))
    again.close()
    last = open_cache()
    assert 160 == _back(last, range(1, 161))
    assert 4 == again.sharing.written_bytes // last.groups[0].bytes_for(16)


def test_a_prefix_is_in_all_tiers(open_cache: MakeCache) -> None:
    """A part in a row, a part in host memory, and the rest in files."""
    cache = open_cache()
    _say(cache, range(1, 145))
    _forget_above(cache)
    assert 96 == _back(cache, LONG)
    cache.trim()
    assert 48 == _back(cache, range(1, 49))
    assert 144 == _back(cache, range(1, 145))
    assert (9, 9) == _counts(cache)


def test_what_does_not_fit_host_memory_is_left_out(open_cache: MakeCache) -> None:
    cache = open_cache()
    _say(cache, range(1, 321))
    cache.close()
    again = open_cache(host_budget_bytes=32 * PAGE)
    assert 320 == _found(again, range(1, 321))
    assert 128 == _back(again, range(1, 321))


@pytest.mark.parametrize("windows", [(24,), (24, 200), (2,)])
def test_windows_need_only_what_they_see(open_cache: MakeCache, windows: tuple[int, ...]) -> None:
    options = {"windows": windows, "host_budget_bytes": 1024 * PAGE, "num_bytes": 32 * MiB}
    cache = open_cache(**options)
    sequence = cache.open(prompt=[*range(1, 305), 0])
    for end in (*range(16, 304, 16), 304):
        append(sequence, range(sequence.num_tokens + 1, end + 1))
    sequence.record(range(1, 305))
    sequence.close()
    cache.close()
    assert 304 == _back(open_cache(**options), range(1, 305))


def test_states_come_back(open_cache: MakeCache, make_cache: MakeCache, tmp_path: Path) -> None:
    def make() -> KVCache:
        its = {"budget_bytes": 4 * MiB, "host_budget_bytes": 256 * PAGE}
        cache = make_cache(HostBackend(PAGE), **its)
        cache.add_states({9: [StateShape((8,), torch.float32)]})
        cache.host_blocks.open_files(tmp_path / "files", 4 * MiB, b"model")
        return cache

    cache = make()
    sequence = cache.open()
    for end in (48, 70):
        append(sequence, range(sequence.num_tokens + 1, end + 1))
        cache.states.tensors(9)[0][sequence.row] = float(end)
        sequence.checkpoint()
    sequence.record(range(1, 71))
    sequence.close()
    cache.close()
    again = make()
    assert 48 == _back(again, range(1, 71))
    back = again.open(prompt=[*range(1, 71), 0])
    assert [48.0] * 8 == again.states.tensors(9)[0][back.row].tolist()


def test_what_takes_longer_than_computing_is_not_read(open_cache: MakeCache) -> None:
    """A low rate is forgotten slowly."""
    cache = open_cache()
    _say(cache, LONG)
    _forget_above(cache)
    cache.host_blocks.files._bytes_per_s = 1.0
    with cache.pool.lock:
        assert cache.host_blocks.read([*LONG, 0], None, 0, token_s=1e-3) is None
        reading = cache.host_blocks.read([*LONG, 0], None, 0, token_s=1e3)
    assert reading is not None
    assert cache.host_blocks.files._bytes_per_s > 1.0


def test_blocks_that_are_read_while_memory_is_mapped_are_left_out(
    open_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequence has memory for the blocks that were there before."""
    cache = open_cache(windows=(2,), num_bytes=8 * MiB)
    _say(cache, LONG)
    _forget_above(cache)
    assert 16 == _back(cache, range(1, 17))
    map_rows = growing.map_rows

    def map_and_read(*args: object) -> None:
        map_rows(*args)
        with cache.pool.lock:
            reading = cache.host_blocks.read([*LONG, 0], None, 0, token_s=1.0)
        reading.wait(60.0)

    cache.trim()
    monkeypatch.setattr(growing, "map_rows", map_and_read)
    sequence = cache.open(prompt=[*LONG, 0])
    assert 16 == sequence.num_tokens
    assert_holds(sequence, range(1, 17))


@pytest.mark.parametrize("seed", range(4))
def test_random_conversations_while_threads_write_and_read(
    open_cache: MakeCache, seed: int
) -> None:
    """Over little memory of each kind; the threads are real ones."""
    draw = random.Random(seed)
    windows = draw.choice([(), (24,)])
    cache = open_cache(
        windows=windows,
        budget_bytes=120 * PAGE * (1 + len(windows)),
        host_budget_bytes=draw.choice([32, 64]) * PAGE * (1 + len(windows)),
        num_bytes=draw.choice([1, 8]) * MiB,
    )
    num_found = 0
    for _ in range(120):
        tokens = [draw.randrange(1, 4)] * 16
        for _ in range(draw.randrange(12)):
            tokens += [draw.randrange(1, 4)] * 16
        num_found += _back(cache, tokens)
        _say(cache, tokens, saves=False)
        if draw.random() < 0.3:
            cache.trim(draw.choice([None, 8 * PAGE]))
        if draw.random() < 0.1:
            _forget_above(cache)
        cache.check()
    assert num_found > 0


# ---- tenants, budgets ----------------------------------------------------------------------------


def test_a_tenant_that_floods_pushes_no_other_out(open_cache: MakeCache) -> None:
    """Neither now nor after a restart."""
    options = {"host_budget_bytes": 64 * PAGE, "num_bytes": 1 * MiB}
    cache = open_cache(**options)
    said = [range(1000 * at, 1000 * at + 96) for at in range(1, 4)]
    for each in said:
        _say(cache, each, "a")
    for at in range(20):
        _say(cache, range(10_000 + 200 * at, 10_000 + 200 * at + 144), "b")
        cache.trim()
    cache.close()
    again = open_cache(**options)
    assert [96] * 3 == [_found(again, each, "a") for each in said]
    assert [0] * 3 == [_found(again, each, "b") for each in said]
    for at in range(40, 60):
        _say(again, range(10_000 + 200 * at, 10_000 + 200 * at + 144), "b")
        again.trim()
    assert [96] * 3 == [_back(again, each, "a") for each in said]


def test_full_files_keep_what_they_have_while_host_memory_has_room(open_cache: MakeCache) -> None:
    """As after a restart, when a conversation that others push out would come back."""
    old = [range(1000 * at, 1000 * at + 96) for at in range(1, 12)]
    cache = open_cache(num_bytes=1 * MiB)
    for each in old:
        _say(cache, each)
    cache.close()
    again = open_cache(num_bytes=1 * MiB, host_budget_bytes=2048 * PAGE)
    held = [each for each in old if _found(again, each) == 96]
    assert 0 < len(held) < len(old)
    for at in range(20, 40):
        _say(again, range(1000 * at, 1000 * at + 96), saves=False)
        again.trim()  # To host memory.
        again.host_blocks.files.write()
        assert again.host_blocks.files._has_written.wait(60.0)
    assert [96] * len(held) == [_back(again, each) for each in held]
    assert [96] * 20 == [_found(again, range(1000 * at, 1000 * at + 96)) for at in range(20, 40)]
    again.close()  # Writes what is in host memory alone, so that others give way.
    third = open_cache(num_bytes=1 * MiB)
    assert 96 == _found(third, range(39_000, 39_096))


def test_files_stay_within_their_budget(open_cache: MakeCache) -> None:
    """Groups take files from each other; a smaller budget finds less."""
    cache = open_cache(windows=(48,), num_bytes=1 * MiB)
    for at in range(1, 20):
        _say(cache, range(1000 * at, 1000 * at + 96))
        cache.trim()
    assert sum(each.stat().st_size for each in _slabs(cache)) <= 1 * MiB
    assert len(_slabs(cache)) == len(cache.host_blocks.files.places.slabs)
    assert 96 == _found(cache, range(19_000, 19_096))
    cache.close()
    again = open_cache(windows=(48,), num_bytes=1 * MiB // 2)
    assert sum(each.stat().st_size for each in _slabs(again)) <= 1 * MiB // 2


# ---- trust ---------------------------------------------------------------------------------------


def _torn(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flipped(at: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 16
        path.write_bytes(data)

    return flip


def _swapped(path: Path) -> None:
    """Two blocks have changed places."""
    data = path.read_bytes()
    size = 16 * KiB
    path.write_bytes(data[: -2 * size] + data[-size:] + data[-2 * size : -size])


def _erased(path: Path) -> None:
    """An entry of the table, as by a sector that reads as ones."""
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xff" * 64 + data[4096 + 64 :])


def _nothing(path: Path) -> None:
    path.write_bytes(b"")


def _another(path: Path) -> None:
    path.write_bytes(b"what somebody else has written" * 1000)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


#: With the number of its six blocks that are left at most, and after a restart.
DAMAGES = {
    "torn": (_torn, 5),
    "flipped block": (_flipped(-1), 5),
    "flipped name": (_flipped(4096), 6),
    "flipped owner": (_flipped(4096 + 17), 6),
    "flipped checksum": (_flipped(4096 + 33), 6),
    "flipped header": (_flipped(20), 0),
    "swapped": (_swapped, 4),
    "erased entry": (_erased, 6),
    "empty": (_nothing, 0),
    "foreign": (_another, 0),
    "vanished": (Path.unlink, 0),
    "a pipe": (_pipe, 0),
}


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_miss(open_cache: MakeCache, damage: str, is_restarted: bool) -> None:
    """Never a wrong token; and what was lost is written again."""
    spoil, most = DAMAGES[damage]
    cache = open_cache()
    _say(cache, LONG)
    _forget_above(cache)
    [path] = _slabs(cache)
    if is_restarted:
        cache.close()
    spoil(path)
    if is_restarted:
        cache = open_cache()
    num_tokens = _back(cache, LONG)
    assert num_tokens <= 16 * most
    _say(cache, LONG)
    cache.close()
    assert 96 == _back(open_cache(), LONG)


def test_files_of_other_weights_or_layers_are_removed(open_cache: MakeCache) -> None:
    cache = open_cache()
    _say(cache, LONG)
    [path] = _slabs(cache)
    cache.close()
    other = open_cache(identity=b"other weights")
    assert not path.exists()
    _say(other, LONG)
    other.close()
    third = open_cache(identity=b"other weights", windows=(400,))
    assert 0 == _found(third, LONG)


def _held(cache: KVCache, *hashes: bytes) -> list[bytes]:
    with cache.pool.lock:
        return [*cache.host_blocks.held(hashes)]


def test_blocks_of_any_tier_are_held(open_cache: MakeCache) -> None:
    """Until they are forgotten; those of windows do not count beside layers that keep all."""
    cache = open_cache(windows=(48,))
    _say(cache, LONG)
    first, *_, last = block_hashes([*LONG])
    cache.trim()
    assert [first, last] == _held(cache, first, last, bytes(16))
    _forget_above(cache)
    with cache.pool.lock:
        cache.host_blocks.files.places.drop((cache.groups[1], first))
    assert [first, last] == _held(cache, first, last, bytes(16))
    cache.forget_prefixes()
    assert [] == _held(cache, first, last)


def test_blocks_of_windows_alone_are_held(host: HostBackend) -> None:
    its = {"budget_bytes": 4 * MiB, "host_budget_bytes": 1 * MiB, "layers_per_group": 1}
    with KVCache(host, max_tokens=400, max_sequences=4, **its) as cache:
        sizes = {"num_kv_heads": 2, "head_dim": 32, "dtype": torch.float32}
        cache.add_layers([0], window_tokens=48, **sizes)
        sequence = cache.open()
        sequence.append(len(LONG))
        sequence.record(LONG)
        sequence.close()
        cache.trim()
        *_, last = block_hashes([*LONG])
        assert [last] == _held(cache, last, bytes(16))


def test_a_pipe_with_a_writer_is_no_file_of_blocks(tmp_path: Path) -> None:
    files = SlabFiles(tmp_path / "files", 2 * MiB)
    os.mkfifo(files.path(3))
    writer = os.open(files.path(3), os.O_RDWR | os.O_NONBLOCK)
    assert [(3, None, [])] == [*files.found()]
    os.close(writer)
    files.close()


@pytest.mark.parametrize("name", ["slab-01.vmkv", "slab-\u0661.vmkv", f"slab-{'9' * 200}.vmkv"])
def test_no_two_names_are_of_one_file(open_cache: MakeCache, name: str) -> None:
    cache = open_cache()
    _say(cache, LONG)
    [path] = _slabs(cache)
    cache.close()
    path.with_name(name).write_bytes(path.read_bytes())
    again = open_cache()
    assert 96 == _back(again, LONG)
    _say(again, range(5000, 5096))
    again.check()


def test_other_files_in_the_folder_stay(open_cache: MakeCache, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir(0o700)
    letter = tmp_path / "files" / "letter.txt"
    letter.write_text("dear reader")
    _say(open_cache(), LONG)
    assert "dear reader" == letter.read_text()


def test_a_folder_has_one_user(open_cache: MakeCache) -> None:
    cache = open_cache()
    with pytest.raises(ConfigError, match="in use by another engine"):
        open_cache()
    cache.close()
    open_cache()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("closes", [False, True])
def test_a_forked_child_leaves_the_folder_to_its_parent(
    open_cache: MakeCache, closes: bool
) -> None:
    """A child may close its parent's cache, and does not keep the folder of a closed one."""
    cache = open_cache()
    _say(cache, LONG)
    cache.host_blocks.save()  # No thread holds the lock then.
    ended, end = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(20)  # Ends a child that waits.
        status = 1
        try:
            os.close(end)
            if closes:
                cache.close()
            else:
                os.read(ended, 1)
            status = 0
        finally:
            os._exit(status)
    if closes:
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with pytest.raises(ConfigError, match="in use"):
            open_cache()
        cache.trim()
        assert len(LONG) == _back(cache, LONG)
    cache.close()
    assert len(LONG) == _found(open_cache(), LONG)
    os.close(end)
    if not closes:
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_modes(open_cache: MakeCache, tmp_path: Path) -> None:
    cache = open_cache()
    _say(cache, LONG)
    folder = tmp_path / "files"
    assert 0o700 == stat.S_IMODE(folder.stat().st_mode)
    assert {0o600} == {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()}
    cache.close()
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        open_cache()


@contextmanager
def _files_end_at(num_bytes: int) -> Iterator[None]:
    """Writes behind it fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("end_bytes", [0, 6000, 40_000])
def test_a_full_disk_ends_writing(
    open_cache: MakeCache, caplog: pytest.LogCaptureFixture, end_bytes: int
) -> None:
    """One line is logged; what is in files is still read."""
    cache = open_cache(num_bytes=1 * MiB)
    _say(cache, LONG)
    caplog.set_level(logging.WARNING)
    for at in range(2, 5):
        _say(cache, range(1000 * at, 1000 * at + 96), saves=False)
    with _files_end_at(end_bytes):
        cache.host_blocks.save()
    _say(cache, range(9000, 9096))
    cache.check()
    assert 1 == len(caplog.records)
    assert "gets no more blocks" in caplog.text
    assert cache.stats().below["files"].has_failed
    _forget_above(cache)
    assert 96 == _back(cache, LONG)
    cache.close()
    assert 96 == _back(open_cache(num_bytes=1 * MiB), LONG)


def test_a_thread_that_fails_unexpectedly_is_not_waited_for(
    open_cache: MakeCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = open_cache()
    monkeypatch.setattr(SlabFiles, "make", lambda *_: 1 / 0)
    _say(cache, LONG)
    assert cache.stats().below["files"].has_failed
    assert 96 == _back(cache, LONG)
    cache.close()  # Once its threads have ended.
    assert "ZeroDivisionError" in caplog.text


def test_changed_weights_remove_files_after_a_failure_too(open_cache: MakeCache) -> None:
    cache = open_cache(num_bytes=1 * MiB)
    _say(cache, LONG)
    _say(cache, range(2000, 2096), saves=False)
    with _files_end_at(6000):
        cache.host_blocks.save()
    assert cache.stats().below["files"].has_failed
    cache.forget_prefixes()
    cache.host_blocks.save()
    assert [] == _slabs(cache)


def test_a_budget_holds_one_file_at_least(open_cache: MakeCache) -> None:
    with pytest.raises(ConfigError, match="disk_budget_bytes=4096 holds no file of blocks"):
        open_cache(num_bytes=4096)
    open_cache()  # The folder is free.


def test_changed_weights_forget_the_files(open_cache: MakeCache) -> None:
    """Blocks of the new weights are of another identity."""
    cache = open_cache()
    _say(cache, LONG)
    before = _slabs(cache)
    cache.forget_prefixes()
    cache.host_blocks.save()
    assert not any(each.exists() for each in before)
    assert 0 == _found(cache, LONG)
    _say(cache, range(1, 33))
    assert 32 == _found(cache, range(1, 33))
    cache.close()
    assert 0 == _found(open_cache(), LONG)


_WRITER = """
import sys, torch
sys.path.insert(0, {tests!r})
from helpers.stamps import append
from vmkv import HostBackend, KVCache
from vmkv.units import KiB, MiB
cache = KVCache(HostBackend(4 * KiB), max_tokens=400, max_sequences=4, layers_per_group=2,
                budget_bytes=4 * MiB, host_budget_bytes=64 * 4 * KiB)
cache.add_layers(range(2), num_kv_heads=2, head_dim=32, dtype=torch.float32)
cache.host_blocks.open_files({folder!r}, 4 * MiB, b"model")
for at in range(1, 10_000):
    sequence = cache.open()
    append(sequence, range(1000 * at, 1000 * at + 96))
    sequence.record(range(1000 * at, 1000 * at + 96))
    sequence.close()
    cache.trim()
    print(cache.sharing.written_bytes, flush=True)
"""


def test_killed_while_it_writes(open_cache: MakeCache, tmp_path: Path) -> None:
    """Most of what was written is found by the next process, and all of it is right."""
    tests = str(Path(__file__).parents[1])
    script = _WRITER.format(tests=tests, folder=str(tmp_path / "files"))
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        num_bytes = 0
        for line in process.stdout:
            num_bytes = int(line)
            if num_bytes > MiB:
                process.send_signal(signal.SIGKILL)
                break
    cache = open_cache(num_bytes=4 * MiB)
    assert len(cache.host_blocks.files.places.blocks) >= MiB // cache.groups[0].bytes_for(16)
    found = [range(1000 * at, 1000 * at + 96) for at in range(1, 10_000)]
    found = [each for each in found if _found(cache, each)][:50]
    assert found
    for each in found:
        assert _found(cache, each) == _back(cache, each)


def test_places_of_a_kind_fit_a_file(tmp_path: Path) -> None:
    for block_bytes in (1, 100, 4096, 65_536, 1 << 20):
        files = SlabFiles(tmp_path / str(block_bytes), 2 * MiB)
        kind = Kind(b"k" * 32, block_bytes)
        assert 0 < files.num_places(kind) * block_bytes < 2 * MiB
        files.close()


@pytest.mark.parametrize("is_written_before", [False, True])
@pytest.mark.parametrize("time_passes", [False, True])
def test_blocks_that_are_kept_leave_files_last(
    open_cache: MakeCache, time_passes: bool, is_written_before: bool
) -> None:
    """Until their time, of their tenant's; also where a later turn asks for it."""
    cache = open_cache(num_bytes=MiB)  # Several times what is written at once.
    other, kept = range(1000, 1096), range(2000, 2096)
    _say(cache, other)
    if is_written_before:
        _say(cache, kept)
        _say(cache, kept, kept_until_s=10.0)
    else:
        _say(cache, kept, kept_until_s=10.0)
        cache.forget_prefixes(with_files=False)
    cache.rows.now_s = 10.0 if time_passes else 9.0
    for at in range(12):
        _say(cache, range(10_000 + 200 * at, 10_000 + 200 * at + 96))
    _forget_above(cache)
    assert [0 if time_passes else 96, 0] == [_found(cache, each) for each in (kept, other)]


def test_a_file_whose_table_cannot_be_read_is_a_miss(
    open_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache()
    _say(cache, LONG)
    [path] = _slabs(cache)
    cache.close()

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(os, "pread", fail)
        again = open_cache()
    assert not path.exists()
    assert 0 == _found(again, LONG)
    _say(again, LONG)
    assert 96 == _back(again, LONG)


def test_a_folder_that_cannot_be_looked_up_is_left_to_others(
    open_cache: MakeCache, tmp_path: Path
) -> None:
    """Its lock is given back, so that it can be mended and used."""
    folder = tmp_path / "files" / "slab-1.vmkv"
    folder.mkdir(0o700, parents=True)
    folder.parent.chmod(0o700)
    with pytest.raises(ConfigError, match="slab-1"):
        open_cache()
    folder.rmdir()
    cache = open_cache()
    _say(cache, LONG)
    assert 96 == _found(cache, LONG)
