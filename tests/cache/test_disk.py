"""Sequences on disk: round trips, refused files, and failures."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import struct
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import warm_python
from helpers.books import books
from helpers.caches import MakeCache
from helpers.faulty_cache import FaultyCache
from helpers.members import PAGE
from helpers.stamps import append, assert_holds
from safetensors import safe_open
from safetensors.torch import save_file

from vmkv import ClosedError, ConfigError, ExtentPool, HostBackend, KVCache, Sequence
from vmkv.core.cache.disk import whole_file
from vmkv.testing import FaultInjectingBackend
from vmkv.units import KiB


def _filled(cache: KVCache, num_tokens: int, *, first: int = 0) -> Sequence:
    """A sequence of stamps, recorded as tokens."""
    sequence = cache.open()
    append(sequence, range(first, first + num_tokens))
    sequence.record(range(first, first + num_tokens))
    return sequence


# ---- round trips --------------------------------------------------------------------------


def test_restored_sequence_is_found_as_a_prefix(make_cache: MakeCache, tmp_path: Path) -> None:
    """Prompts of its tenant find it, prompts of other tenants do not."""
    source = make_cache()
    _filled(source, 64).save(tmp_path / "kv")
    cache = make_cache(HostBackend(4 * KiB))
    restored = cache.load(tmp_path / "kv", tenant="a")
    prompt = [*range(64), 7]
    assert 0 == cache.open(prompt=prompt, tenant="b").num_cached_tokens
    found = cache.open(prompt=prompt, tenant="a")
    assert 64 == found.num_cached_tokens
    assert_holds(found, range(64))
    restored.close()


@pytest.mark.parametrize("windows", [(), (20,)])
@pytest.mark.parametrize("page_bytes", [16 * KiB, 4 * KiB])
def test_page_sizes_may_differ(
    no_underread: None,
    make_cache: MakeCache,
    tmp_path: Path,
    windows: tuple[int, ...],
    page_bytes: int,
) -> None:
    """A file holds tokens, not pages.

    The part of a window's first page without tokens is zeroed.
    """
    other_bytes = 20 * KiB - page_bytes
    source = make_cache(HostBackend(page_bytes), windows=windows)
    _filled(source, 107).save(tmp_path / "kv")
    pool = ExtentPool(HostBackend(other_bytes), 400 * KiB, scrub="poison", close_when_unused=True)
    cache = make_cache(pool, windows=windows)
    restored = cache.load(tmp_path / "kv")
    assert_holds(restored, range(107))
    for layer in cache.layers:
        group, _ = cache.place(layer)
        mapped = restored.keys(layer)[group.first_mapped_token(restored.row, 107) :]
        assert not mapped.isnan().any()
    # Truncation fails if the shorter sequence would need tokens before the window.
    with pytest.raises(ConfigError, match="no longer") if windows else nullcontext():
        restored.truncate(100)


_LOADER = """
import sys
import torch
from helpers.stamps import assert_holds
from vmkv import KVCache
with KVCache(sys.argv[1], max_tokens=400, max_sequences=2, budget_bytes=1 << 26) as cache:
    cache.add_layers(range(4), num_kv_heads=2, head_dim=32, dtype=torch.float32)
    sequence = cache.load(sys.argv[2])
    assert_holds(sequence, range(250))
    assert 240 == cache.open(prompt=list(range(241))).num_cached_tokens
    cache.check()
"""


def _run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, Path(__file__).parents[1:3]))
    return warm_python.run("-c", script, *arguments, env=os.environ | {"PYTHONPATH": path})


@pytest.mark.slow
@pytest.mark.parametrize("device", ["host", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_another_process_loads_the_file(device: str, tmp_path: Path) -> None:
    """The file was written while the sequence was swapped out."""
    with KVCache(
        device, max_tokens=400, max_sequences=2, budget_bytes=1 << 26, host_budget_bytes=1 << 26
    ) as cache:
        cache.add_layers(range(4), num_kv_heads=2, head_dim=32, dtype=torch.float32)
        sequence = _filled(cache, 250)
        sequence.swap_out()
        sequence.save(tmp_path / "kv")
        sequence.close()
        cache.check()
    done = _run(_LOADER, device, str(tmp_path / "kv"))
    assert 0 == done.returncode, done.stderr


# ---- the file -----------------------------------------------------------------------------


def test_file_is_an_ordinary_safetensors_file(make_cache: MakeCache, tmp_path: Path) -> None:
    """The tensors are raw token rows and token ids, and only the user may read the file."""
    cache = make_cache()
    sequence = _filled(cache, 21)
    path = tmp_path / "kv.safetensors"
    sequence.save(path)
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    assert ["kv.safetensors"] == os.listdir(tmp_path)
    with safe_open(path, framework="pt") as file:
        assert list(range(21)) == file.get_tensor("token_ids").tolist()
        rows = file.get_tensor("group.0")
        assert [21, 1024] == list(rows.shape)
        first_key = rows[:, : 2 * 32 * 4].contiguous().view(torch.float32).reshape(21, 2, 32)
        assert torch.equal(sequence.keys(0), first_key)
        assert "vmkv sequence" == file.metadata()["format"]


def test_save_replaces_the_file_at_once(make_cache: MakeCache, tmp_path: Path) -> None:
    """The replacement is atomic: a reader of the older file reads it to its end."""
    cache = make_cache()
    _filled(cache, 30).save(tmp_path / "kv")
    with open(tmp_path / "kv", "rb") as old:
        content = (tmp_path / "kv").read_bytes()
        _filled(cache, 31, first=100).save(str(tmp_path / "kv"))
        assert content == old.read()
    assert_holds(cache.load(tmp_path / "kv"), range(100, 131))


def test_save_works_in_a_folder_that_cannot_be_synced(
    make_cache: MakeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems refuse fsync of a directory; the file is saved all the same."""
    fsync = os.fsync

    def refusing(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refusing)
    cache = make_cache()
    _filled(cache, 10).save(tmp_path / "kv")
    assert_holds(cache.load(tmp_path / "kv"), range(10))


def test_longest_file_name_can_be_saved_and_replaced(make_cache: MakeCache, tmp_path: Path) -> None:
    cache = make_cache()
    path = tmp_path / ("n" * 255)
    for first in (0, 100):
        _filled(cache, 7, first=first).save(path)
        assert_holds(cache.load(path), range(first, first + 7))
    assert [path.name] == os.listdir(tmp_path)
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)


_SAVER = """
import os, resource, signal, sys
from pathlib import Path
import torch
from helpers.stamps import append
from vmkv import KVCache

folder = Path(sys.argv[1])
with KVCache("host", max_tokens=400, max_sequences=2, budget_bytes=1 << 26) as cache:
    cache.add_layers(range(4), num_kv_heads=2, head_dim=32, dtype=torch.float32)
    sequence = cache.open()
    append(sequence, range(250))

    def die(*arguments, **options):
        os.kill(os.getpid(), signal.SIGKILL)

    def while_it_is_written():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    def before_it_has_its_name():
        os.rename = die

    for way_to_die in (while_it_is_written, before_it_has_its_name):
        child = os.fork()
        if not child:
            way_to_die()
            sequence.save(folder / "kv")
            os._exit(0)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        assert "older" == (folder / "kv").read_text()
        print(len(os.listdir(folder)) - 1, end=" ")
"""


@pytest.mark.slow
def test_temporary_files_of_killed_savers_are_removed(
    make_cache: MakeCache, tmp_path: Path
) -> None:
    """The older file stays; a save an hour later removes the temporary files."""
    (tmp_path / "kv").write_text("older")
    done = _run(_SAVER, str(tmp_path))
    assert 0 == done.returncode, done.stderr
    assert "1 2 " == done.stdout
    for left in tmp_path.glob(".vmkv-*.tmp"):
        os.utime(left, (left.stat().st_atime, left.stat().st_mtime - 3601))
    (tmp_path / ".vmkv-of-somebody-else").write_text("no temporary file")
    sequence = _filled(make_cache(), 5)
    with whole_file(tmp_path / "other"):  # A temporary file that is being written stays.
        sequence.save(tmp_path / "kv")
    assert [".vmkv-of-somebody-else", "kv", "other"] == sorted(os.listdir(tmp_path))


def test_temporary_file_of_a_running_save_is_kept(make_cache: MakeCache, tmp_path: Path) -> None:
    """Another save into the same folder does not remove it."""
    sequence = _filled(make_cache(), 5)
    with whole_file(tmp_path / "slow") as file:
        file.write(b"half")
        sequence.save(tmp_path / "kv")
        file.write(b" and half")
    assert "half and half" == (tmp_path / "slow").read_text()
    assert ["kv", "slow"] == sorted(os.listdir(tmp_path))


def test_closed_sequence_is_not_saved(make_cache: MakeCache, tmp_path: Path) -> None:
    """A closed sequence or cache can neither save nor load."""
    cache = make_cache()
    closed, live = _filled(cache, 5), _filled(cache, 5)
    live.save(tmp_path / "kv")
    closed.close()
    with pytest.raises(ClosedError):
        closed.save(tmp_path / "other")
    cache.close()
    with pytest.raises(ClosedError):
        live.save(tmp_path / "other")
    with pytest.raises(ClosedError):
        cache.load(tmp_path / "kv")
    assert ["kv"] == os.listdir(tmp_path)


def test_save_where_no_file_can_be_written_fails(make_cache: MakeCache, tmp_path: Path) -> None:
    """A save into a missing folder or onto a folder leaves no temporary file."""
    sequence = _filled(make_cache(), 5)
    with pytest.raises(FileNotFoundError):
        sequence.save(tmp_path / "missing" / "kv")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="no regular file"):
        sequence.save(tmp_path / "folder")
    assert ["folder"] == os.listdir(tmp_path)
    assert_holds(sequence, range(5))


# ---- refused files ------------------------------------------------------------------------


@pytest.fixture
def saved(no_underread: None, make_cache: MakeCache, tmp_path: Path) -> Path:
    """A file with 50 tokens in two layer groups."""
    cache = make_cache(HostBackend(4 * KiB), windows=(20,))
    _filled(cache, 50).save(tmp_path / "kv")
    return tmp_path / "kv"


def _refused(cache: KVCache, path: Path, match: str) -> None:
    """Assert that a load is refused and changes no state."""
    before = books(cache)
    with pytest.raises(ConfigError, match=match):
        cache.load(path)
    assert before == books(cache)


def test_truncated_file_is_refused(saved: Path, make_cache: MakeCache) -> None:
    """A file of any shorter length is refused, and one with a byte too many."""
    cache = make_cache(windows=(20,))
    whole = saved.read_bytes()
    for length in (0, 7, 8, 9, 500, len(whole) // 2, len(whole) - 1):
        saved.write_bytes(whole[:length])
        _refused(cache, saved, "truncated")
    saved.write_bytes(whole + b"\0")
    _refused(cache, saved, "truncated")


def test_damaged_file_is_refused(saved: Path, make_cache: MakeCache) -> None:
    """With a bit that flipped in its header or contents, or another description."""
    cache, whole = make_cache(windows=(20,)), saved.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    for at in (*range(8, 8 + size, 7), *range(8 + size, len(whole), 4999), len(whole) - 1):
        saved.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        _refused(cache, saved, "kv")
    header = json.loads(whole[8 : 8 + size])
    header["__metadata__"]["sequence"] = "{}"
    head = json.dumps(header).encode()
    saved.write_bytes(len(head).to_bytes(8, "little") + head + whole[8 + size :])
    _refused(cache, saved, "damaged")


def _rows(num_rows: int) -> torch.Tensor:
    return torch.zeros(num_rows, 1024, dtype=torch.uint8)


REWRITTEN: dict[str, tuple[dict[str, torch.Tensor], dict[str, str], str]] = {
    "another format": ({}, {"format": "other"}, "no sequence"),
    "another version": ({}, {"version": "2"}, "version '2'"),
    "a row too few": ({"group.0": _rows(49)}, {}, "save the sequence again"),
    "a row too many": ({"group.0": _rows(51)}, {}, "save the sequence again"),
    "another tensor": ({"more": _rows(1)}, {}, ""),
}


@pytest.mark.parametrize("what", REWRITTEN)
def test_files_with_other_contents_are_refused(
    saved: Path, make_cache: MakeCache, what: str
) -> None:
    """An additional tensor is ignored."""
    tensors, metadata, match = REWRITTEN[what]
    _rewrite(saved, tensors, metadata)
    cache = make_cache(windows=(20,))
    if match:
        _refused(cache, saved, match)
    else:
        assert_holds(cache.load(saved), range(50))


@pytest.mark.parametrize("ids", [[7] * 51, [7.5, 8.0]])
def test_wrong_token_ids_are_refused(saved: Path, make_cache: MakeCache, ids: list[float]) -> None:
    _rewrite(saved, {"token_ids": torch.tensor(ids)}, {})
    cache = make_cache(windows=(20,))
    with pytest.raises(ConfigError, match="token"):
        cache.load(saved)
    assert 0 == cache.stats().num_sequences
    cache.check()


def _rewrite(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    with safe_open(path, framework="pt") as file:
        before = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() | metadata
    save_file(before | tensors, path, metadata)
    whole = path.read_bytes()
    path.write_bytes(whole[:-32] + hashlib.sha256(whole[:-32]).digest())


def test_files_of_other_formats_are_refused(make_cache: MakeCache, tmp_path: Path) -> None:
    """Model weights, text, an oversized header, a missing file and a folder."""
    cache = make_cache()
    save_file({"weight": torch.zeros(3)}, tmp_path / "model")
    _refused(cache, tmp_path / "model", "no sequence")
    (tmp_path / "text").write_text("It was a bright cold day in April. " * 9)
    _refused(cache, tmp_path / "text", "no safetensors file")
    (tmp_path / "huge").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    _refused(cache, tmp_path / "huge", "no safetensors file")
    with pytest.raises(FileNotFoundError):
        cache.load(tmp_path / "missing")
    _refused(cache, tmp_path, "no regular file")


def test_pipes_and_devices_are_refused(make_cache: MakeCache, tmp_path: Path) -> None:
    """Load does not block on a pipe without a writer, and save does not replace it."""
    cache = make_cache()
    sequence = _filled(cache, 5)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/null")
    for name in ("pipe", "device"):
        _refused(cache, tmp_path / name, "no regular file")
        with pytest.raises(ConfigError, match="no regular file"):
            sequence.save(tmp_path / name)
    assert ["device", "pipe"] == sorted(os.listdir(tmp_path))
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


GEOMETRIES: list[tuple[dict[str, Any], str]] = [
    ({"num_kv_heads": 1, "head_dim": 64}, "num_k_heads=2, this cache has 1"),
    ({"head_dim": 16}, "k_dim=32, this cache has 16"),
    ({"v_head_dim": 16}, "v_dim=32, this cache has 16"),
    ({"dtype": torch.int32}, "dtype='float32', this cache has 'int32'"),
    ({"window_tokens": 40}, "window_tokens=None, this cache has 40"),
    ({"layers": [0]}, "places_and_layers"),
    ({"layers": [1, 0]}, "places_and_layers"),
    ({"layers": []}, "no layers yet"),
]


@pytest.mark.parametrize(("other", "match"), GEOMETRIES, ids=str)
def test_other_geometry_is_refused(
    cache: KVCache, tmp_path: Path, other: dict[str, Any], match: str
) -> None:
    """The error names the difference."""
    _filled(cache, 9).save(tmp_path / "kv")
    shape: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 32, "dtype": torch.float32, **other}
    layers = shape.pop("layers", [0, 1])
    with KVCache("host", max_tokens=400, max_sequences=2, layers_per_group=2) as mine:
        if layers:
            mine.add_layers(layers, **shape)
        _refused(mine, tmp_path / "kv", match)


# ---- failing driver calls and a full disk -------------------------------------------------


def _world(backend: FaultInjectingBackend) -> tuple[KVCache, Sequence]:
    pages = {"budget_pages": 128, "host_budget_bytes": 128 * PAGE}
    cache = FaultyCache(backend, window_tokens=20, **pages).cache
    return cache, _filled(cache, 90)


def test_save_to_a_full_disk_leaves_the_older_file(
    make_cache: MakeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the file size makes the kernel refuse the write."""
    import resource
    import signal

    sequence = _filled(make_cache(), 300)
    (tmp_path / "kv").write_text("older")
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 * KiB, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            sequence.save(tmp_path / "kv")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert ["kv"] == os.listdir(tmp_path)
    assert "older" == (tmp_path / "kv").read_text()
    sequence.save(tmp_path / "kv")
    assert_holds(sequence, range(300))
