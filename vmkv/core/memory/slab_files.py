"""Files of a folder, each a slab with places for blocks of one kind and a table of them in front.

    header    identity of the blocks' kind, size of a place, number of places, and their checksum
    table     for each place an entry: name, owner, checksum and age of its block; zeros for none
    places    the blocks

A block is written before its entry, and its checksum covers its name: so whatever is torn, flipped,
or of another file is found by `read`. The folder is this process's alone while it is open.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import ConfigError
from ...units import Address

_MAGIC = b"vmkv blocks 1\0\0\0"
_HEADER = struct.Struct("<16s32sQQ16s")
_HEADER_BYTES = 4096
_ENTRY = struct.Struct("<16s16s16sQ8x")
#: As `SlabFiles.path` writes it, so that no two names are of one slab.
_NAME = re.compile(r"slab-(0|[1-9][0-9]{0,17})\.vmkv")
TICK_END = 1 << 63
"""No age of a block is beyond; an entry with another one is damaged."""
#: Words of a row, when the words of a block are added by rows and by columns: a page.
_ROW_WORDS = 512


class Entry(NamedTuple):
    """A block in a file: its name and its owner, 16 bytes each, its checksum, and its age."""

    name: bytes
    owner: bytes
    checksum: bytes
    tick: int


class Kind(NamedTuple):
    """Blocks that can be in one file: an identity of 32 bytes, and the size of each."""

    identity: bytes
    block_bytes: int


def checksum(data: memoryview | np.ndarray, salt: bytes = b"") -> bytes:
    """Return 16 bytes that differ wherever data was torn or flipped; not made against forgers.

    A hash of the sums of all rows and columns of 64-bit words. Cost: 0.1 ns per byte, mostly
    without the lock of the interpreter.
    """
    whole = np.frombuffer(data, np.uint8)
    num_rows = len(whole) // (8 * _ROW_WORDS)
    rows = whole[: num_rows * 8 * _ROW_WORDS].view(np.int64).reshape(num_rows, _ROW_WORDS)
    digest = hashlib.blake2b(salt, digest_size=16)
    for part in (rows.sum(0), rows.sum(1), whole[rows.nbytes :]):
        digest.update(part.data)
    return digest.digest()


def memory_at(address: Address, num_bytes: int) -> memoryview:
    """Return the memory of this process at an address."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


class SlabFiles:
    """The files of a folder, made with mode 0700 where there is none.

    Raises `ConfigError` if another process has it open, or others may read it; `OSError` where it
    cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str], slab_bytes: int):
        self.folder, self.slab_bytes = Path(folder), slab_bytes
        self.folder.mkdir(0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(self.folder.stat().st_mode) & 0o077:
            raise ConfigError(
                f"{self.folder} is open to other users, and blocks hold what was said: chmod 700 "
                "it, or name a folder that does not exist yet"
            )
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(
                f"{self.folder} is in use by another engine or server: give each a folder"
            ) from error

    def close(self, *, unlocks: bool = True) -> None:
        """Leave the folder to others; without `unlocks` to other processes that have it open."""
        if unlocks:  # Forked children may have it open still.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)

    def path(self, slab: int) -> Path:
        """The file of a slab."""
        return self.folder / f"slab-{slab}.vmkv"

    def num_places(self, kind: Kind) -> int:
        """Blocks that fit a file."""
        left_bytes = self.slab_bytes - 2 * _HEADER_BYTES  # The table ends at a page.
        return max(0, left_bytes // (kind.block_bytes + _ENTRY.size))

    def found(self) -> Iterator[tuple[int, Kind | None, list[tuple[Any, ...]]]]:
        """Yield the slabs in the folder, newest first, with their entries; None for damaged ones.

        Entries are tuples with the fields of `Entry`; the tick is 0 where there is no block.
        """
        slabs = [_NAME.fullmatch(each.name) for each in self.folder.iterdir()]
        for slab in sorted((int(each[1]) for each in slabs if each), reverse=True):
            kind, entries = None, list[tuple[Any, ...]]()
            with suppress(OSError), open(self.path(slab), "rb", buffering=0, opener=_open) as file:
                told = self.kind_of(file.read(_HEADER.size) or b"")
                if told is not None:
                    num_bytes = self.num_places(told) * _ENTRY.size
                    table = os.pread(file.fileno(), num_bytes, _HEADER_BYTES)
                    if len(table) == num_bytes:
                        kind, entries = told, [*_ENTRY.iter_unpack(table)]
            yield slab, kind, entries

    def kind_of(self, header: bytes) -> Kind | None:
        """Return the kind in the header of a file of this size; None if it is damaged."""
        if len(header) < _HEADER.size:
            return None
        _, identity, block_bytes, _, _ = _HEADER.unpack(header)
        kind = Kind(identity, block_bytes)
        return kind if self.num_places(kind) and header == self._header(kind) else None

    def _header(self, kind: Kind) -> bytes:
        fields = _MAGIC, kind.identity, kind.block_bytes, self.num_places(kind)
        blank = _HEADER.pack(*fields, b"")
        return _HEADER.pack(*fields, checksum(memoryview(blank)))

    def make(self, slab: int, kind: Kind) -> None:
        """Make the file of a slab, whose places are empty."""
        fd = os.open(self.path(slab), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _write(fd, memoryview(self._header(kind)), 0)
            os.ftruncate(fd, _start(self.num_places(kind)))
        finally:
            os.close(fd)

    def remove(self, slab: int) -> None:
        """Remove the file of a slab, if it is there."""
        with suppress(FileNotFoundError):
            self.path(slab).unlink()


class SlabFile:
    """The open file of one slab; `FileNotFoundError` if it has vanished, or is another one."""

    def __init__(self, files: SlabFiles, slab: int, kind: Kind):
        self._block_bytes, self._start = kind.block_bytes, _start(files.num_places(kind))
        self._fd, header = _open(files.path(slab), os.O_RDWR), b""
        with suppress(OSError):  # A pipe has no offsets.
            header = os.pread(self._fd, _HEADER.size, 0)
        if files.kind_of(header) != kind:
            os.close(self._fd)
            raise FileNotFoundError(f"{files.path(slab)} has been replaced")

    def __enter__(self) -> SlabFile:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._fd)

    def write(self, at: int, block: memoryview, name: bytes) -> bytes:
        """Write a block at a place, and return its checksum; it is there once it is entered."""
        _write(self._fd, block, self._start + at * self._block_bytes)
        return checksum(block, name)

    def enter(self, at: int, entry: Entry | None) -> None:
        """Write the entry of a block that was written; None if there is none any more."""
        data = bytes(_ENTRY.size) if entry is None else _ENTRY.pack(*entry)
        _write(self._fd, memoryview(data), _HEADER_BYTES + at * _ENTRY.size)

    def read(self, at: int, block: memoryview, name: bytes) -> bool:
        """Read the block at a place; returns whether it is the one of that name, and is whole."""
        table = os.pread(self._fd, _ENTRY.size, _HEADER_BYTES + at * _ENTRY.size)
        if len(table) < _ENTRY.size:
            return False
        entry = Entry(*_ENTRY.unpack(table))
        done, start = 0, self._start + at * self._block_bytes
        while num_bytes := os.preadv(self._fd, [block[done:]], start + done):
            done += num_bytes
        is_whole = done == len(block) and entry.name == name
        return is_whole and entry.checksum == checksum(block, name)


def _open(path: str | Path, flags: int) -> int:
    """Open a file, or a pipe of its name without waiting for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _start(num_places: int) -> int:
    return -(-(_HEADER_BYTES + num_places * _ENTRY.size) // _HEADER_BYTES) * _HEADER_BYTES


def _write(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
