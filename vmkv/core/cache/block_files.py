"""Blocks of evicted prefixes in files, below those in host memory.

    host memory --a thread writes what gives way next--> files
                <--threads read what a request needs----

Blocks are written from the memory of their slabs and read into it, without the pool's lock. While
host memory has room, no block pushes another one out of full files. A block is entered in its file
if it still has the same place in host memory after it was written, and in host memory if its
checksum is right. Otherwise it is lost, and no request fails. After an error of writing nothing is
written any more; reading goes on.

See DESIGN.md, Note [Blocks go on to files].
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import ConfigError, DriverError
from ...phases import without_collections
from ...units import KiB, MiB
from ..backend import Fence
from ..memory.slab_files import TICK_END, Entry, Kind, SlabFile, SlabFiles
from .block_places import BlockKey, BlockPlaces, Place, Slab
from .disk import describe_groups
from .layer_group import LayerGroup
from .prefix import BLOCK_TOKENS
from .stats import BelowStats
from .swap import side_stream

if TYPE_CHECKING:
    from .host_blocks import HostBlocks
    from .kv_cache import KVCache

_LOG = logging.getLogger(__name__)
#: Size of a file, and files of a full budget, at least, so that groups find their shares.
_SLAB_BYTES, _NUM_SLABS_MIN = 64 * MiB, 16
#: Blocks that are moved between two holds of the lock, and the threads that move them.
_BATCH_BYTES, _NUM_THREADS = 64 * MiB, 8
#: A prefix is read if that takes at most so many times as long as to compute it, since the device
#: works for others meanwhile. Rates of smaller batches are not typical, and low ones may pass.
_WORTH, _TYPICAL_BYTES, _RATE_GROWTH = 8.0, 8 * MiB, 1.1
#: Longest time in which a cache that is closed writes what is not in files yet.
_SAVE_S = 5.0


class Reading(threading.Event):
    """Blocks that are read for a request; set once host memory holds all that can be had."""

    is_cancelled = False
    """Whether no more is read; what was read stays."""


class _Move(NamedTuple):
    """A block on its way between its place in host memory and its place in the file of `slab`."""

    key: BlockKey
    tenant: bytes
    host: Place
    memory: memoryview
    file: Place
    slab: Slab


class BlockFiles:
    """Blocks of a cache's prefixes in the files of a folder, in at most `budget_bytes`.

    `identity` stands for the model and its weights. Unless it says otherwise, a call needs the
    pool's lock, which guards the books. Raises `ConfigError` and `OSError` as `SlabFiles`.

    Attributes:
        places: The books of the blocks in files.
    """

    def __init__(
        self,
        cache: KVCache,
        host: HostBlocks,
        folder: str | os.PathLike[str],
        budget_bytes: int,
        identity: bytes,
    ):
        self._cache, self._host = cache, host
        self._kinds = _kinds_of(cache, identity)  # Replaced as a whole: threads read it.
        largest_bytes = max(group.bytes_for(BLOCK_TOKENS) for group in cache.groups)
        slab_bytes = min(_SLAB_BYTES, budget_bytes // _NUM_SLABS_MIN)
        slab_bytes = max(slab_bytes, 2 * largest_bytes + 16 * KiB)
        self._files = SlabFiles(folder, slab_bytes)
        self._num_slabs = budget_bytes // slab_bytes
        self.places = BlockPlaces(
            self._make_slab, lambda slab: self._unremoved.append(slab), lambda: cache.rows.now_s
        )
        #: Blocks in host memory that are in no file, with their tenants, first the next to go.
        self._unwritten: dict[BlockKey, bytes] = {}
        #: Slabs without a file yet, and files of slabs that have gone.
        self._unmade: set[int] = set()
        self._unremoved: list[int] = []
        self._next_slab = self._next_tick = 1
        self._num_forgotten = 0
        self._is_saving = self._is_closing = self._has_failed = False
        #: Set while no thread writes.
        self._has_written = threading.Event()
        self._has_written.set()
        self._num_reads = self._read_bytes = 0
        self._read_s = 0.0
        self._bytes_per_s: float | None = None  # Of reading, lately.
        try:
            if not self._num_slabs:
                raise ConfigError(
                    f"disk_budget_bytes={budget_bytes} holds no file of blocks, which take "
                    f"{slab_bytes} bytes; raise it"
                )
            with without_collections(freezes=False):
                self._find()
        except BaseException:
            self._files.close()
            raise
        self._writer = ThreadPoolExecutor(1, "vmkv-files-writer")
        self._reader = ThreadPoolExecutor(1, "vmkv-files-reader")
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "vmkv-files")

    def stats(self) -> BelowStats:
        """Return the size of the files, what was read from them, and whether writing has failed."""
        num_bytes = len(self.places.slabs) * self._files.slab_bytes
        read = self._num_reads, self._read_bytes, self._read_s
        return BelowStats(num_bytes, *read, self._has_failed)

    def _find(self) -> None:
        """Enter the blocks that are in the folder; files of another identity are removed."""
        groups = {kind: group for group, kind in self._kinds.items()}
        found: list[tuple[int, int, int, LayerGroup, bytes, bytes]] = []
        places = self.places
        for slab, kind, entries in self._files.found():
            self._next_slab = max(self._next_slab, slab + 1)
            group = None if kind is None else groups.get(kind)
            if group is None or len(places.slabs) >= self._num_slabs:
                self._files.remove(slab)
                continue
            used = [
                (tick, slab, at, group, name, owner)
                for at, (name, owner, _, tick) in enumerate(entries)
                if 0 < tick < TICK_END
            ]
            places.add_slab(slab, len(entries), group, {each[2] for each in used})
            found += used
        found.sort()
        for tick, slab, at, group, name, owner in found:
            self._next_tick = tick + 1
            if (group, name) in places.blocks:  # A copy that had given way before.
                places.give_back(Place(slab, at))
            else:
                places.add((group, name), Place(slab, at), owner)

    def _make_slab(self, group: LayerGroup) -> tuple[int, int] | None:
        if len(self.places.slabs) >= self._num_slabs:
            return None
        slab, self._next_slab = self._next_slab, self._next_slab + 1
        self._unmade.add(slab)
        return slab, self._files.num_places(self._kinds[group])

    # ---- writing --------------------------------------------------------------------------

    def want(self, key: BlockKey, tenant: bytes) -> None:
        """Have a block of host memory written, if it is in no file; `write` begins it."""
        if key in self.places.blocks:
            self.places.touch(key)
            if until_s := self._host.places.kept_until_s(key):
                self.places.keep(key, until_s)
        elif not self._has_failed:
            self._unwritten[key] = tenant
        else:
            self._unwritten.clear()

    def write(self) -> None:
        """Let a thread write what is wanted, unless it does."""
        if self._has_failed and not self._unremoved:
            return
        if self._has_written.is_set() and not self._is_closing:
            self._has_written.clear()
            _submit(self._writer, self._write)

    def save(self) -> None:
        """Write what rows and host memory hold, as far as there is time. Without the lock."""
        if self._cache.pool.is_forked:  # Without the thread.
            return
        with self._cache.pool.lock:
            self._is_saving = True
            self.write()
        self._has_written.wait(_SAVE_S)
        self._is_saving = False

    def _write(self) -> None:
        try:
            while self._write_some():
                pass
            return
        except DriverError:  # Places that were taken stay taken: the device has failed.
            _LOG.warning("blocks could not be written to files", exc_info=True)
        except OSError as error:
            self._has_failed = True
            folder = self._files.folder
            _LOG.warning("%s gets no more blocks, those there are used: %s", folder, error)
        except BaseException:  # Nobody may wait for a thread that has ended.
            self._has_failed = True
            self._has_written.set()
            raise
        with self._cache.pool.lock:
            self._has_written.set()

    def _write_some(self) -> bool:
        """Write the next blocks; returns whether there were any."""
        with self._cache.pool.lock:
            unremoved, self._unremoved = self._unremoved, []
            moves, fence = self._next_writes()
            if fence is None and not unremoved:
                self._has_written.set()
                return False
        for slab in unremoved:
            self._files.remove(slab)
        if fence is not None:
            fence.wait()
        for slab, kind in {move.file.slab: self._kinds[move.key[0]] for move in moves}.items():
            if slab in self._unmade:
                self._unmade.remove(slab)
                self._files.make(slab, kind)
        try:
            written = self._threads.map(self._write_block, moves)
        except RuntimeError:  # The interpreter ends, and threads take nothing new.
            written = map(self._write_block, moves)
        for _ in written:
            pass
        return True

    def _next_writes(self) -> tuple[list[_Move], Fence | None]:
        """Take places for the blocks that are written next; a fence covers copies to them."""
        if self._has_failed:  # Files of changed weights are removed nevertheless.
            return [], None
        if not self._unwritten and not self._is_closing:
            self._host.keep_next(pushes=self._is_saving)
        num_bytes, host = 0, self._host.places
        moves: list[_Move] = []
        key = next(iter(self._unwritten), None)
        if self._is_closing or key is None or not self._may_write(key):
            return [], None
        fence = self._cache.pool.backend.record_fence(side_stream(self._cache))
        while self._unwritten and num_bytes < _BATCH_BYTES:
            key = next(iter(self._unwritten))
            if not self._may_write(key):
                break
            tenant, its = self._unwritten.pop(key), host.blocks.get(key)
            if its is None or key in self.places.blocks:
                continue
            place = self.places.take(key[0])
            if place is None and moves:  # All others are being written, too.
                self._unwritten[key] = tenant
                break
            if place is not None:
                memory = self._host.memory(key, its)
                moves.append(_Move(key, tenant, its, memory, place, self.places.slabs[place.slab]))
                num_bytes += len(memory)
        return moves, fence

    def _may_write(self, key: BlockKey) -> bool:
        """Whether a file has room for a block, or others give way: host memory has no room left."""
        is_full = len(self.places.slabs) >= self._num_slabs and not self.places.has_free(key[0])
        return not is_full or self._is_saving or not self._host.has_room

    def _write_block(self, move: _Move) -> None:
        lock, places, is_same = self._cache.pool.lock, self.places, False
        owner = hashlib.blake2b(move.tenant, digest_size=16).digest()
        (group, name), (slab, at) = move.key, move.file
        try:
            with SlabFile(self._files, slab, self._kinds[group]) as file:
                checksum = file.write(at, move.memory, name)
                with lock:  # Else it was written in part with what took its place.
                    is_same = self._host.places.blocks.get(move.key) is move.host
                    tick, self._next_tick = self._next_tick, self._next_tick + 1
                if is_same:
                    file.enter(at, Entry(name, owner, checksum, tick))
        except FileNotFoundError:
            with lock:
                self._drop_slab(move)
                self._unwritten[move.key] = move.tenant
        with lock:
            if places.slabs.get(slab) is not move.slab:
                return
            if not is_same or move.key in places.blocks:
                places.give_back(move.file)
                return
            places.add(move.key, move.file, owner)
            self._cache.sharing.written_bytes += len(move.memory)
            if self._host.places.blocks.get(move.key) is move.host:
                self._host.places.note_elsewhere(move.key)
                if (until_s := self._host.places.kept_until_s(move.key)) > 0:
                    places.keep(move.key, until_s)

    # ---- reading --------------------------------------------------------------------------

    def read(self, keys: list[BlockKey], tenant: bytes, compute_s: float) -> Reading | None:
        """Begin to read the blocks that host memory lacks, the first ones first.

        None if it takes much longer than `compute_s`, in which the device computes them. Blocks
        behind the first one for which host memory has no room are not read.
        """
        host, num_bytes = self._host.places, 0
        for key in reversed(keys):  # So that the first ones stay longest.
            if key in host.blocks:
                host.touch(key, is_elsewhere=key in self.places.blocks)
            else:
                num_bytes += key[0].bytes_for(BLOCK_TOKENS)
        if self._bytes_per_s is not None and num_bytes / self._bytes_per_s > _WORTH * compute_s:
            self._bytes_per_s *= _RATE_GROWTH
            return None
        self._num_reads += 1
        reading = Reading()
        _submit(self._reader, self._read, reading, keys, tenant)
        return reading

    def _read(self, reading: Reading, keys: list[BlockKey], tenant: bytes) -> None:
        lock, left, spared = self._cache.pool.lock, iter(keys), frozenset(keys)
        try:
            while not (reading.is_cancelled or self._is_closing):
                with lock:
                    num_forgotten = self._num_forgotten
                    moves, fence = self._next_reads(left, spared, tenant)
                if fence is None:
                    break
                fence.wait()
                start_s = time.perf_counter()
                are_read = [*self._threads.map(self._read_block, moves)]
                took_s = time.perf_counter() - start_s
                with lock:
                    if num_forgotten != self._num_forgotten:
                        are_read = [False] * len(moves)
                    self._enter(moves, are_read, took_s)
        except DriverError:
            _LOG.warning("blocks could not be read from files", exc_info=True)
        finally:
            reading.set()

    def _next_reads(
        self, keys: Iterator[BlockKey], spared: Collection[BlockKey], tenant: bytes
    ) -> tuple[list[_Move], Fence | None]:
        """Take places in host memory for the next `keys` that it lacks; None if there are none.

        The fence covers copies from these places.
        """
        num_bytes, host = 0, self._host.places
        moves: list[_Move] = []
        for key in keys:
            file = self.places.blocks.get(key)
            if file is not None and key not in host.blocks:
                place = host.take(key[0], spared)
                if place is None:
                    for _ in keys:  # The rest is left out.
                        pass
                    break
                memory, slab = self._host.memory(key, place), self.places.slabs[file.slab]
                moves.append(_Move(key, tenant, place, memory, file, slab))
                num_bytes += len(memory)
                if num_bytes >= _BATCH_BYTES:
                    break
        if not moves:
            return [], None
        try:
            return moves, self._cache.pool.backend.record_fence(side_stream(self._cache))
        except DriverError:
            for move in moves:
                host.give_back(move.host)
            raise

    def _read_block(self, move: _Move) -> bool:
        """Read a block; returns whether it is right. The entry of a wrong one is deleted."""
        (group, name), (slab, at) = move.key, move.file
        try:
            with SlabFile(self._files, slab, self._kinds[group]) as file:
                if file.read(at, move.memory, name):
                    return True
                with self._cache.pool.lock:
                    is_there = self.places.blocks.get(move.key) is move.file
                if is_there:
                    file.enter(at, None)
        except FileNotFoundError:
            with self._cache.pool.lock:
                self._drop_slab(move)
                self.write()
        except OSError:
            _LOG.debug("a block could not be read", exc_info=True)
        return False

    def _drop_slab(self, move: _Move) -> None:
        """Forget the slab of a file that has vanished, or that another one has replaced."""
        if self.places.slabs.get(move.file.slab) is move.slab:
            self.places.drop_slab(move.file.slab)
            self._unremoved.append(move.file.slab)

    def _enter(self, moves: list[_Move], are_read: list[bool], took_s: float) -> None:
        host, read_bytes = self._host.places, 0
        for move, is_read in zip(moves, are_read, strict=True):
            is_there = self.places.blocks.get(move.key) is move.file
            if is_read and move.key not in host.blocks:
                host.add(move.key, move.host, move.tenant)
                host.touch(move.key, is_elsewhere=is_there)
                read_bytes += len(move.memory)
            else:
                host.give_back(move.host)
            if is_there and is_read:
                self.places.touch(move.key)
            elif is_there:
                self.places.drop(move.key)
        self._read_bytes += read_bytes
        self._read_s += took_s
        if read_bytes >= _TYPICAL_BYTES:
            rate = read_bytes / took_s
            self._bytes_per_s = (rate + (self._bytes_per_s or rate)) / 2

    # ---- end ------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget all blocks, of weights that have changed; a thread removes the files."""
        self._unremoved += self.places.slabs
        self.places.clear()
        self._unwritten.clear()
        self._kinds = _kinds_of(self._cache, os.urandom(32))
        self._num_forgotten += 1
        self.write()

    def close(self) -> None:
        """Wait for the threads, and leave the folder to others. Without the lock."""
        self._is_closing = True
        for each in (self._writer, self._reader, self._threads):
            each.shutdown()
        self._files.close(unlocks=not self._cache.pool.is_forked)


def _kinds_of(cache: KVCache, identity: bytes) -> dict[LayerGroup, Kind]:
    kinds = {}
    for group, layout in zip(cache.groups, describe_groups(cache), strict=True):
        text = json.dumps([BLOCK_TOKENS, layout], sort_keys=True).encode()
        digest = hashlib.sha256(identity + text).digest()
        kinds[group] = Kind(digest, group.bytes_for(BLOCK_TOKENS))
    return kinds


def _submit(threads: ThreadPoolExecutor, work: Callable[..., None], *args: Any) -> None:
    threads.submit(work, *args).add_done_callback(_report)


def _report(result: Future[None]) -> None:
    if error := result.exception():
        _LOG.error("a thread of the files has failed", exc_info=error)
