"""Prefixes shared between processes: import, refusals, write protection, and peers that fail.

Tests marked slow start a second process; failing peers are threads of this process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import warm_python
from helpers.another_user import BECOME_NOBODY, NOBODY, can_become_nobody
from helpers.books import books
from helpers.caches import PAGE, MakeCache
from helpers.faulty_cache import FaultyCache
from helpers.stamps import append, assert_holds

from vmkv import ClosedError, ConfigError, ExtentPool, HostBackend, KVCache
from vmkv.core.backend import Access, BackendUsage
from vmkv.core.cache import process
from vmkv.core.cache.process import PrefixExporter
from vmkv.errors import DriverError
from vmkv.testing import FaultInjectingBackend, Scenario, check_every_call_can_fail
from vmkv.units import KiB

ROOT = Path(__file__).parents[2]
DEVICES = ["host", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.fixture
def make_shareable(make_cache: MakeCache) -> MakeCache:
    """`make_cache` over a shareable pool of its own, as another process would have."""

    def make(**options: Any) -> KVCache:
        pool_options: dict[str, Any] = {"is_shareable": True, "budget_bytes": 4096 * KiB}
        pool_options |= options.pop("pool", {})
        pool = ExtentPool(HostBackend(PAGE), close_when_unused=True, **pool_options)
        return make_cache(pool, **options)

    return make


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Path of the exporter's socket."""
    return str(tmp_path / "s")


def _shared(make: MakeCache, num_tokens: int, **options: Any) -> tuple[Any, KVCache, KVCache]:
    """A sequence, its cache, and a cache with other options that is to import it."""
    source, target = make(), make(**options)
    sequence = source.open()
    append(sequence, range(num_tokens))
    return sequence, source, target


def _imported(exporter: PrefixExporter, cache: KVCache, **options: Any) -> Any:
    """Import from an exporter of this process, which serves the import in a thread."""
    with _serving(exporter) as failures:
        sequence = cache.import_prefix(exporter.socket_path, **options)
    assert [] == failures
    return sequence


@contextmanager
def _serving(exporter: PrefixExporter) -> Iterator[list[BaseException]]:
    """Run `exporter.serve_one` in a thread; its error is in the list when the block has ended."""
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            exporter.serve_one(timeout_s=60)
        except Exception as error:  # noqa: BLE001  # The test looks at it.
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield failures
    finally:
        thread.join(timeout=60)
        assert not thread.is_alive()


# ---- real processes -----------------------------------------------------------------------

_PRELUDE = """
import sys
import torch
from helpers.stamps import append, assert_holds
from vmkv import ExtentPool, KVCache, open_backend

def make_cache(device):
    backend = open_backend(device)
    pool = ExtentPool(
        backend, 64 * max(backend.granularity_bytes, 65536), is_shareable=True,
        page_bytes=max(backend.granularity_bytes, 65536), close_when_unused=True,
    )
    cache = KVCache(pool, max_tokens=400, max_sequences=4, layers_per_group=2)
    # Four tokens fill a page.
    head_dim = pool.page_bytes // 4 // 2 // 2 // 2 // 4
    cache.add_layers([0, 1], num_kv_heads=2, head_dim=head_dim, dtype=torch.float32)
    return cache
"""
_EXPORTER = """
cache = make_cache(sys.argv[1])
sequence = cache.open()
append(sequence, range(100))  # 25 whole pages.
append(sequence, range(100, 103))
sequence.record(range(103))
exporter = sequence.export(sys.argv[2])
exporter.start()
print(exporter.num_tokens, flush=True)
sys.stdin.readline()  # Until it is killed, or told to go on.
append(sequence, range(1000, 1020))
sequence.truncate(50)
append(sequence, range(2000, 2020))
assert_holds(sequence, [*range(50), *range(2000, 2020)])
exporter.close()
cache.check()
print(exporter.num_served, exporter.num_failed, flush=True)
sequence.close()
cache.trim()
sys.stdin.readline()
cache.check()
cache.close()
"""
_WRITER = """
cache = make_cache(sys.argv[1])
sequence = cache.import_prefix(sys.argv[2])
sequence.keys(0)[:] += sequence.keys(1)
print("read and written")
if cache.device.type == "cuda":
    torch.cuda.synchronize()
print("unpunished")
"""
_WRITING_EXPORTER = """
cache = make_cache(sys.argv[1])
sequence = cache.open()
append(sequence, range(100))
append(sequence, range(100, 103))
exporter = sequence.export(sys.argv[2])
sequence.keys(0)[100:] = 1  # The tail is not exported.
if cache.device.type == "cuda":
    torch.cuda.synchronize()
print("the tail is written", flush=True)
sequence.keys(0)[:] = 1
if cache.device.type == "cuda":
    torch.cuda.synchronize()
print("unpunished")
"""


def _start(script: str, *arguments: str) -> warm_python.Child:
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return warm_python.start("-c", _PRELUDE + script, *arguments, env=environment)


@contextmanager
def _exporting(device: str, path: str) -> Iterator[warm_python.Child]:
    """A process that exports 100 of its 103 tokens at `path`."""
    child = _start(_EXPORTER, device, path)
    try:
        first_line = child.stdout.readline()
        if first_line != "100\n":
            pytest.fail(f"the exporter says {first_line!r}: {child.communicate(timeout=60)}")
        yield child
    finally:
        child.kill()
        child.communicate(timeout=60)


def _same_cache(device: str) -> KVCache:
    names: dict[str, Any] = {}
    exec(_PRELUDE, names)
    cache = names["make_cache"](device)
    assert isinstance(cache, KVCache)
    return cache


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_import_reads_another_process_and_outlives_it(device: str, path: str) -> None:
    """The import is read and continued after the exporting process was killed."""
    with _same_cache(device) as cache:
        with _exporting(device, path) as child:
            before = cache.pool.stats().created_bytes
            sequence = cache.import_prefix(path, tenant="a")
            assert (100, 100) == (sequence.num_tokens, sequence.num_cached_tokens)
            assert before == cache.pool.stats().created_bytes, "a copy was made"
            assert_holds(sequence, range(100))
            child.kill()
            assert -signal.SIGKILL == child.wait(timeout=60)
        assert_holds(sequence, range(100))
        append(sequence, range(500, 530))
        wanted = [*range(100), *range(500, 530)]
        assert_holds(sequence, wanted)
        prompt = [*range(96), 7, 7]
        assert 0 == cache.open(prompt=prompt, tenant="b").num_cached_tokens
        found = cache.open(prompt=prompt, tenant="a")
        assert 96 == found.num_cached_tokens
        append(found, range(900, 903))
        sequence.close()
        assert_holds(found, [*range(96), *range(900, 903)])
        cache.check()
        found.close()
        cache.trim()
        assert [] == cache.pool.imported_extents()
        cache.check()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_exporter_goes_on_while_others_read(device: str, path: str) -> None:
    """The exporter truncates, writes, closes and trims; the importers' tokens do not change."""
    with _same_cache(device) as cache, _exporting(device, path) as child:
        sequences = [cache.import_prefix(path) for _ in range(3)]
        child.stdin.write("\n")
        child.stdin.flush()
        assert "3 0\n" == child.stdout.readline()
        for at, sequence in enumerate(sequences):
            append(sequence, range(100 * at, 100 * at + 9))
            assert_holds(sequence, [*range(100), *range(100 * at, 100 * at + 9)])
        cache.check()
        _, errors = child.communicate("\n", timeout=60)
        assert 0 == child.returncode, errors
        assert_holds(sequences[0], [*range(100), *range(9)])


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_importers_write_is_a_fault(device: str, path: str) -> None:
    """The hardware refuses the write, and another importer reads the old numbers."""
    with _same_cache(device) as cache, _exporting(device, path):
        sequence = cache.import_prefix(path)
        child = _start(_WRITER, device, path)
        output, errors = child.communicate(timeout=120)
        assert "unpunished" not in output
        if device == "host":
            assert (-signal.SIGSEGV, "") == (child.returncode, output)
        else:
            assert "illegal memory access" in errors
        assert_holds(sequence, range(100))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_exporters_own_write_is_a_fault(device: str, path: str) -> None:
    """Exported extents are frozen for the exporter as well; its tail is not."""
    child = _start(_WRITING_EXPORTER, device, path)
    output, errors = child.communicate(timeout=120)
    assert "the tail is written\n" == output, errors
    if device == "host":
        assert -signal.SIGSEGV == child.returncode
    else:
        assert "illegal memory access" in errors


# ---- shared extents -----------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [None, 333, 300, 37, 20, 4])
def test_prefix_is_cut_to_whole_extents(
    make_shareable: MakeCache, path: str, num_tokens: int | None
) -> None:
    """The importer gets no more tokens than asked for, without a copy."""
    source, target = make_shareable(), make_shareable()
    sequence = source.open()
    for length in (4, 37, 292):  # Extents of 1; of 8, 2; of 32, 32, 8, 1 pages.
        append(sequence, range(sequence.num_tokens, sequence.num_tokens + length))
    sequence.record(range(50))
    with sequence.export(path, num_tokens) as exporter:
        restored = _imported(exporter, target)
        ends = [4 * each.end_page for each in source.groups[0].table.rows[0].mappings]
        longest = max(end for end in ends if end <= (num_tokens or 333))
        assert longest == exporter.num_tokens == restored.num_tokens
        assert list(range(min(50, restored.num_tokens))) == target.prefixes.token_ids(restored.row)
        source.check()
    assert 0 == target.pool.stats().created_bytes
    assert_holds(restored, range(restored.num_tokens))
    length = restored.num_tokens
    append(restored, range(800, 820))
    assert 20 * KiB == target.pool.stats().created_bytes
    assert_holds(restored, [*range(length), *range(800, 820)])
    append(sequence, range(333, 340))
    assert_holds(sequence, range(340))


def test_import_that_ends_within_a_token_row(path: str) -> None:
    """The last shared extent ends with part of a token row, so the first append copies it."""
    caches = []
    for _ in range(2):
        pool = ExtentPool(HostBackend(PAGE), 4096 * KiB, is_shareable=True, close_when_unused=True)
        caches.append(KVCache(pool, max_tokens=500, max_sequences=2, layers_per_group=2))
        caches[-1].add_layers([0, 1], num_kv_heads=3, head_dim=16, dtype=torch.float32)
    source, target = caches
    sequence = source.open()
    append(sequence, range(415))
    with sequence.export(path) as exporter:
        restored = _imported(exporter, target)
    length = restored.num_tokens
    assert length * 768 % PAGE, "the prefix ends where a page does: this tests nothing"
    append(restored, range(800, 830))
    assert_holds(restored, [*range(length), *range(800, 830)])
    assert_holds(sequence, range(415))
    for cache in caches:
        cache.check()
        cache.close()


def test_export_of_a_fork_freezes_its_parent(make_shareable: MakeCache, path: str) -> None:
    """The parent had kept its write access to the shared extents, and loses it."""
    cache = make_shareable()
    parent = cache.open()
    append(parent, range(300))
    fork = parent.fork()
    assert any(
        mapping.access is Access.READ_WRITE and mapping.extent.is_shared
        for mapping in cache.groups[0].table.rows[parent.row].mappings
    )
    with fork.export(path):
        assert not any(
            mapping.access is Access.READ_WRITE and mapping.extent.is_shared
            for row in (parent.row, fork.row)
            for mapping in cache.groups[0].table.rows[row].mappings
        )
        cache.check()
    parent.truncate(8)
    append(parent, range(500, 510))
    assert_holds(parent, [*range(8), *range(500, 510)])
    assert_holds(fork, range(300))


def test_exported_extents_are_never_recycled(make_shareable: MakeCache, path: str) -> None:
    """A sequence in the parked row gets other memory; the exported extents are released."""
    sequence, source, target = _shared(make_shareable, 128)
    with sequence.export(path) as exporter:
        restored = _imported(exporter, target)
        sequence.close()
        stranger = source.open(128)
        append(stranger, range(900, 1028))
        assert 256 * KiB == source.pool.stats().created_bytes, "the exporter holds it"
    source.pool.reclaimer.wait()
    assert 128 * KiB == source.pool.stats().created_bytes
    source.check()
    assert_holds(restored, range(128))
    assert_holds(stranger, range(900, 1028))


def test_row_of_an_import_serves_another_sequence(make_shareable: MakeCache, path: str) -> None:
    """Another import, after the earlier mappings are unmapped, or a sequence that writes."""
    sequence, _, target = _shared(make_shareable, 128, max_sequences=1)
    with sequence.export(path) as exporter:
        for _ in range(3):
            restored = _imported(exporter, target)
            assert_holds(restored, range(128))
            restored.close()
    assert 1 == len(target.pool.imported_extents())
    stranger = target.open(50)
    append(stranger, range(700, 750))
    assert_holds(stranger, range(700, 750))
    target.pool.reclaimer.wait()
    assert [] == target.pool.imported_extents()


def test_exporter_outlives_sequence_and_cache(make_shareable: MakeCache, path: str) -> None:
    """The exporter keeps the shared extents and their pool until it is closed."""
    sequence, source, target = _shared(make_shareable, 128)
    with sequence.export(path) as exporter:
        source.close()
        restored = _imported(exporter, target)
        assert_holds(restored, range(128))
        assert 128 * KiB == source.pool.stats().created_bytes
    assert 0 == source.pool.backend.usage().num_handles
    with pytest.raises(ClosedError):
        source.pool.acquire([0])


# ---- refused exports ----------------------------------------------------------------------


def test_impossible_exports_are_refused(make_shareable: MakeCache, path: str) -> None:
    """Each error says why, leaves no socket, and freezes no extent."""
    plain = make_shareable(pool={"is_shareable": False}).open()
    append(plain, range(20))
    with pytest.raises(ConfigError, match="is_shareable=True"):
        plain.export(path)
    source = make_shareable(pool={"host_budget_bytes": 1024 * KiB})
    sequence = source.open()
    for num_tokens in (None, 0):
        with pytest.raises(ConfigError, match="cannot export 0 tokens"):
            sequence.export(path, num_tokens)
    append(sequence, range(39))
    with pytest.raises(ConfigError, match="cannot export 40 tokens"):
        sequence.export(path, 40)
    with pytest.raises(ConfigError, match="must be an integer"):
        sequence.export(path, -1)
    with pytest.raises(ConfigError, match="only whole extents"):
        sequence.export(path, 3)
    sequence.swap_out()
    with pytest.raises(ConfigError, match="swapped out"):
        sequence.export(path)
    sequence.swap_in()
    assert not os.path.exists(path)
    assert all(extent.is_recyclable for extent in source.pool.extents())
    append(sequence, range(39, 60))
    sequence.close()
    with pytest.raises(ClosedError):
        sequence.export(path)


def test_import_is_not_exported_again(make_shareable: MakeCache, path: str) -> None:
    """Only the first exporter may pass on its descriptors."""
    sequence, _, target = _shared(make_shareable, 128)
    with sequence.export(path) as exporter:
        restored = _imported(exporter, target)
    with pytest.raises(ConfigError, match="imported"):
        restored.export(path)
    append(restored, range(8))


# ---- the socket ---------------------------------------------------------------------------


@pytest.fixture
def sequence(make_shareable: MakeCache) -> Any:
    """A sequence of 39 tokens, whose nine whole pages are two extents."""
    cache = make_shareable()
    made = cache.open()
    append(made, range(36))
    append(made, range(36, 39))
    made.record(range(39))
    return made


def test_path_in_use_is_left_alone(sequence: Any, tmp_path: Path, path: str) -> None:
    """A file or the socket of a live exporter stays; a stale socket is replaced."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        sequence.export(tmp_path / "file")
    assert "mine" == (tmp_path / "file").read_text()
    with sequence.export(path) as first:
        with pytest.raises(ConfigError, match="exists already"):
            sequence.export(path)
        assert os.path.exists(path)
        with pytest.raises(ConnectionError):  # The second export had tried to connect.
            first.serve_one(timeout_s=60)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(path)
    with sequence.export(path):
        assert os.path.exists(path)
    with pytest.raises(ConfigError, match="too long"):
        sequence.export(str(tmp_path / ("x" * 120)))
    with pytest.raises(FileNotFoundError):
        sequence.export(tmp_path / "missing" / "s")


def test_waiting_for_importers_ends(sequence: Any, path: str) -> None:
    """After `timeout_s`, or when the exporter is closed from another thread."""
    exporter = sequence.export(path)
    with pytest.raises(TimeoutError, match="nobody came"):
        exporter.serve_one(timeout_s=0.01)
    exporter.start()
    for again in (exporter.start, exporter.serve_one):
        with pytest.raises(ConfigError, match="serves already"):
            again()
    exporter.close()
    assert [] == [each for each in threading.enumerate() if path in each.name]


def test_import_without_an_exporter_fails(make_shareable: MakeCache, path: str) -> None:
    """No socket, a socket without a listener, and a listener that never answers."""
    cache = make_shareable()
    before = books(cache)
    with pytest.raises(FileNotFoundError):
        cache.import_prefix(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(path)
        with pytest.raises(ConnectionRefusedError):
            cache.import_prefix(path)
        server.listen()
        with pytest.raises(TimeoutError, match=r"more than 0\.05 s"):
            cache.import_prefix(path, timeout_s=0.05)
    assert before == books(cache)


def test_socket_is_this_users_and_goes_with_the_exporter(sequence: Any, path: str) -> None:
    """The socket's mode admits this user only; closing the exporter removes the socket."""
    with sequence.export(path) as exporter:
        assert 0o600 == stat.S_IMODE(os.lstat(path).st_mode)
        assert path == exporter.socket_path
    assert not os.path.exists(path)
    exporter.close()
    with pytest.raises(ClosedError):
        exporter.serve_one()
    with pytest.raises(ClosedError):
        exporter.start()


_IMPORTER_OF_ANOTHER_USER = f"""
cache = make_cache("host")
{BECOME_NOBODY}
cache.import_prefix(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not can_become_nobody(), reason="only root can be another user")
def test_another_user_is_refused() -> None:
    """Both sides ask the kernel for the peer's user, even where the socket's mode admits it."""
    with tempfile.TemporaryDirectory() as folder, _same_cache("host") as cache:
        os.chmod(folder, 0o755)  # Pytest's folders admit one user only.
        sequence = cache.open()
        append(sequence, range(100))
        with sequence.export(f"{folder}/s") as exporter:
            os.chmod(f"{folder}/s", 0o666)
            child = _start(_IMPORTER_OF_ANOTHER_USER, f"{folder}/s")
            with pytest.raises(ConfigError, match=f"user {NOBODY} is not allowed"):
                exporter.serve_one(timeout_s=120)
            _, errors = child.communicate(timeout=120)
            assert "user 0 is not allowed" in errors
        assert (0, 1) == (exporter.num_served, exporter.num_failed)


# ---- failing peers ------------------------------------------------------------------------


def _offer(sequence: Any, path: str) -> dict[str, Any]:
    with sequence.export(path) as exporter:
        return asdict(exporter._offer)


def _frame(message: object, *, version: int = 2) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack("<4sII", b"vmkv", version, len(data)) + data


@contextmanager
def _fake_exporter(path: str, talk: Callable[[socket.socket], None]) -> Iterator[None]:
    """A server at `path` that has one conversation, and then hangs up."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(path)
        server.listen()

        def run() -> None:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(60)
                talk(connection)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            thread.join(timeout=60)
            os.unlink(path)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("sent", "error", "match"),
    [
        (b"", ConnectionError, "midway"),
        (b"vmkv\1", ConnectionError, "midway"),
        (b"HTTP/1.1 200 OK\r\n\r\n", ConfigError, "another server"),
        (_frame({}, version=1), ConfigError, "version 1 of the protocol"),
        (_frame({})[:-1], ConnectionError, "midway"),
    ],
    ids=str,
)
def test_import_from_another_server_fails(
    make_shareable: MakeCache, path: str, sent: bytes, error: type[Exception], match: str
) -> None:
    """Another protocol version, another program, and a message that ends midway."""
    cache = make_shareable()
    before = books(cache)
    with (
        _fake_exporter(path, lambda connection: connection.sendall(sent)),
        pytest.raises(error, match=match),
    ):
        cache.import_prefix(path)
    assert before == books(cache)


OFFERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "device": (lambda o: o.update(backend="cuda"), "memory of 'cuda'"),
    "pages": (lambda o: o.update(page_bytes=8 * KiB), "pages of 8192 bytes"),
    "heads": (lambda o: o["layout"][0].update(num_k_heads=1), "num_k_heads=1, this cache has 2"),
    "long": (lambda o: o.update(num_tokens=401), "max_tokens=400"),
    "extents": (lambda o: o["groups"][0].update(sizes_bytes=[128 * PAGE]), "up to page 128"),
}


@pytest.mark.parametrize("name", OFFERS)
def test_offer_that_does_not_fit_is_refused(
    sequence: Any, make_shareable: MakeCache, path: str, name: str
) -> None:
    """The import fails before it takes a descriptor."""
    change, match = OFFERS[name]
    offer = _offer(sequence, path)
    change(offer)
    cache = make_shareable()
    before = books(cache)
    with (
        _fake_exporter(path, lambda connection: connection.sendall(_frame(offer))),
        pytest.raises(ConfigError, match=match),
    ):
        cache.import_prefix(path)
    assert before == books(cache)


@pytest.mark.parametrize("num_batches", [0, 1])
def test_import_releases_its_extents_when_the_exporter_ends(
    sequence: Any,
    make_shareable: MakeCache,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    num_batches: int,
) -> None:
    """The exporter ends before the first or the second batch."""
    monkeypatch.setattr(process, "_BATCH", 1)
    offer = _offer(sequence, path)
    assert [8 * PAGE, PAGE] == offer["groups"][0]["sizes_bytes"]
    with closing(HostBackend(PAGE)) as backend:
        handle = backend.mem_create(8 * PAGE, shareable=True)

        def talk(connection: socket.socket) -> None:
            connection.sendall(_frame(offer))
            for _ in range(num_batches):
                assert b"+" == connection.recv(1)
                fd = backend.mem_export(handle)
                socket.send_fds(connection, [b"+"], [fd])
                os.close(fd)
            assert b"+" == connection.recv(1)
            assert num_batches == len(cache.pool.imported_extents())

        cache = make_shareable()
        before = books(cache)
        with _fake_exporter(path, talk), pytest.raises(ConnectionError, match="midway"):
            cache.import_prefix(path)
        assert before == books(cache)
        backend.mem_release(handle)


def _hang_up(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(path)
        client.sendall(b"+")


def test_exporter_serves_on_after_importers_that_end(
    sequence: Any, make_shareable: MakeCache, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Importers that end midway or are too slow are counted, and logged by the thread."""
    with sequence.export(path, timeout_s=0.05) as exporter:
        num_descriptors = len(os.listdir("/proc/self/fd"))
        _hang_up(path)
        with pytest.raises(ConnectionError, match="midway"):
            exporter.serve_one()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(path)
            with pytest.raises(TimeoutError, match=r"more than 0\.05 s"):
                exporter.serve_one()
        assert num_descriptors == len(os.listdir("/proc/self/fd"))
        exporter._timeout_s = 60
        exporter.start()
        _hang_up(path)
        assert_holds(make_shareable().import_prefix(path, timeout_s=60), range(36))
    assert (1, 3) == (exporter.num_served, exporter.num_failed)
    assert 1 == caplog.text.count("midway")


def test_close_ends_a_conversation(
    sequence: Any, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A silent importer does not delay the close, and is not logged."""
    exporter = sequence.export(path, timeout_s=200)
    exporter.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(path)
        assert client.recv(4), "no offer came: no conversation is under way"
        exporter.close()
        while client.recv(1 << 16):
            pass
    assert (0, 1) == (exporter.num_served, exporter.num_failed)
    assert not caplog.text


# ---- many extents, no room, failing drivers -----------------------------------------------


def test_more_extents_than_one_message_carries(make_shareable: MakeCache, path: str) -> None:
    """Descriptors go in batches; the sender has one batch open at a time."""
    source, target = make_shareable(), make_shareable()
    sequence = source.open()
    for step in range(80):
        append(sequence, range(4 * step, 4 * step + 4))
    with sequence.export(path) as exporter:
        assert len(exporter._handles) > process._BATCH
        assert_holds(_imported(exporter, target), range(320))


def test_row_too_short_is_refused(sequence: Any, make_shareable: MakeCache, path: str) -> None:
    """`max_tokens` may differ between the caches if the prefix fits."""
    with sequence.export(path) as exporter:
        exporter.start()
        with pytest.raises(ConfigError, match="max_tokens=35"):
            make_shareable(max_tokens=35).import_prefix(path)
        assert_holds(make_shareable(max_tokens=36).import_prefix(path), range(36))
        assert_holds(make_shareable(max_tokens=9999).import_prefix(path), range(36))


def test_every_driver_call_of_import_can_fail(
    no_underread: None, make_shareable: MakeCache, path: str
) -> None:
    """A failed import leaves no sequence and no extent, and the next attempt succeeds."""
    source = make_shareable(windows=(20,))
    sequence = source.open()
    append(sequence, range(36))
    append(sequence, range(36, 39))

    def scenario(backend: FaultInjectingBackend) -> Scenario:
        cache = FaultyCache(backend, window_tokens=20, budget_pages=64).cache
        cache.keep_resident(8)

        def observe() -> object:
            cache.pool.reclaimer.wait()
            return sorted(cache.live), cache.pool.imported_extents()

        def operation() -> None:
            assert_holds(cache.import_prefix(path, timeout_s=60), range(36))

        return Scenario(operation, observe, cache.check, cache.close)

    with sequence.export(path) as exporter:
        exporter.start()
        struck = check_every_call_can_fail(lambda: HostBackend(PAGE), scenario)
    assert {"mem_import", "mem_create", "mem_map", "mem_set_access"} <= set(struck)


def test_every_driver_call_of_export_can_fail(path: str) -> None:
    """A failed export leaves no exporter, no socket and no frozen extent; the next one succeeds."""

    def scenario(backend: FaultInjectingBackend) -> Scenario:
        pool = ExtentPool(backend, 64 * PAGE, is_shareable=True, close_when_unused=True)
        cache = KVCache(pool, max_tokens=400, max_sequences=2)
        cache.add_layers([0], num_kv_heads=2, head_dim=64, dtype=torch.float32)
        sequence = cache.open()
        append(sequence, range(32))
        append(sequence, range(32, 39))
        fork = sequence.fork()
        made: list[PrefixExporter] = []

        def observe() -> object:
            assert not os.path.exists(path)
            assert_holds(fork, range(39))
            return [extent.is_recyclable for extent in pool.extents()], pool.stats()

        def close() -> None:
            for each in made:
                each.close()
            append(sequence, range(39, 42))
            assert_holds(sequence, range(42))
            cache.close()

        return Scenario(lambda: made.append(sequence.export(path)), observe, cache.check, close)

    struck = check_every_call_can_fail(lambda: HostBackend(PAGE), scenario)
    assert {"record_fence", "mem_set_access"} <= set(struck)


def test_failing_mem_export_ends_one_import_only(
    make_cache: MakeCache, make_shareable: MakeCache, path: str
) -> None:
    """The importer gets a `ConnectionError`; `serve_one` raises the driver's error."""
    backend = FaultInjectingBackend(HostBackend(PAGE))
    pool = ExtentPool(backend, 64 * PAGE, is_shareable=True, close_when_unused=True)
    sequence = make_cache(pool).open()
    append(sequence, range(36))
    append(sequence, range(36, 39))
    target = make_shareable()
    with sequence.export(path) as exporter:
        backend.arm(2)
        with _serving(exporter) as failures, pytest.raises(ConnectionError, match="midway"):
            target.import_prefix(path)
        assert "mem_export" == backend.failed_call
        assert isinstance(failures[0], DriverError)
        backend.arm(0)
        assert_holds(_imported(exporter, target), range(36))


def test_exporter_closes_in_spite_of_a_failing_driver(make_cache: MakeCache, path: str) -> None:
    """A later close releases the handles that the first one could not."""
    backend = FaultInjectingBackend(HostBackend(PAGE))
    pool = ExtentPool(backend, 64 * PAGE, is_shareable=True, close_when_unused=True)
    cache = make_cache(pool)
    sequence = cache.open()
    append(sequence, range(39))
    exporter = sequence.export(path)
    sequence.truncate(0)
    sequence.append(4)
    pool.reclaimer.wait()
    backend.arm(1)
    exporter.close()
    assert "mem_release" == backend.failed_call
    backend.arm(0)
    exporter.close()
    cache.check()
    cache.trim()
    assert 1 == len(pool.extents())


def test_exporter_that_outlives_its_cache_closes_the_pool(make_cache: MakeCache, path: str) -> None:
    """The exporter is the pool's last user; a second close completes one that failed."""
    struck = set()
    for fail_at in range(1, 20):
        host = HostBackend(PAGE)
        backend = FaultInjectingBackend(host)
        pool = ExtentPool(backend, 64 * PAGE, is_shareable=True, close_when_unused=True)
        cache = make_cache(pool)
        append(sequence := cache.open(), range(39))
        exporter = sequence.export(path)
        cache.close()
        backend.arm(fail_at)
        with suppress(DriverError):
            exporter.close()
        struck.add(backend.failed_call)
        backend.arm(0)
        exporter.close()
        assert BackendUsage() == host.usage()
    assert {"mem_release", None} == struck
