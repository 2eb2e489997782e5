"""Sequences on disk, as plain safetensors files.

    token_ids    int64 [recorded tokens]
    group.<n>    uint8 [tokens, token_bytes]: raw token rows of layer group n, from the first
                 token on that a query can still see; of states, the one after the last token
    sha256       uint8 [32]: digest of all bytes before, the header's too; the end of the file

The metadata says which cache can load them. Contents pass through a small buffer, since memory may
be short when a sequence is saved.

A file takes its name when it is complete. Until then it has a temporary name. The next writer in
the folder removes temporary files that have not changed for an hour, which writers that were killed
left behind.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import tempfile
import time
from collections import abc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from ...errors import ConfigError, OutOfPagesError
from ...units import Address, MiB
from ..interrupts import interruptible
from ..memory import HostCopy
from .device_memory import call_with_room
from .growing import Target, map_rows
from .layer_group import LayerGroup

if TYPE_CHECKING:
    from .kv_cache import KVCache
    from .sequence import Sequence

_FORMAT, _VERSION = "vmkv sequence", "3"
_TOKEN_IDS, _DIGEST = "token_ids", "sha256"
_DIGEST_BYTES = 32
#: Size of the copy buffer: small, since memory may be short.
_CHUNK_BYTES = MiB

# ---- whole files ---------------------------------------------------------------------------------

# Independent of the final name, since names end at 255 bytes.
_PREFIX, _SUFFIX = ".vmkv-", ".tmp"
_ABANDONED_S = 3600


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that takes its name when the block ends well, else is removed.

    Its mode is 0600. Readers that have the replaced file open keep its contents. Raises
    `ConfigError` for a name that is not a regular file's, `OSError` where writing fails; the old
    file stays then.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no regular file, and is not replaced by one; choose another")
    for other in path.parent.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):  # It may have its name by now.
            if other.stat().st_mtime < time.time() - _ABANDONED_S:
                other.unlink()
    fd, temporary = tempfile.mkstemp(_SUFFIX, _PREFIX, path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(fd)
            os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    with suppress(OSError):  # Not every file system can sync a folder.
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # So that the name survives a crash.
        finally:
            os.close(folder)


# ---- layout --------------------------------------------------------------------------------------

#: By field of a layout: the user's option that sets it. Other fields depend on the layers.
_REMEDIES = {"dtype": "dtype, or kv_dtype", "scales": "kv_scales"}


def describe_groups(cache: KVCache) -> list[dict[str, Any]]:
    """Describe the layout of each layer group, in order, as plain values."""
    return [
        {"places_and_layers": [list(each) for each in cache.members(group)], **group.layout}
        for group in cache.groups
    ]


def check_fits(
    cache: KVCache, theirs: abc.Sequence[Mapping[str, Any]], num_tokens: int, where: str
) -> None:
    """Raise `ConfigError`, naming the difference, unless the cache has these groups and length."""
    mine = describe_groups(cache)
    if not mine:
        raise ConfigError(f"this cache has no layers yet; add those of {where} first")
    if len(mine) != len(theirs):
        raise ConfigError(
            f"{where} has {len(theirs)} layer groups and this cache {len(mine)}: make the cache "
            "with the same layers and the same layers_per_group"
        )
    for at, (ours, others) in enumerate(zip(mine, theirs, strict=True)):
        for name, value in ours.items():
            if others.get(name) != value:
                raise ConfigError(
                    f"layer group {at} of {where} has {name}={_shortened(others.get(name))}, this "
                    f"cache has {_shortened(value)}: make the cache with the same "
                    f"{_REMEDIES.get(name, 'layers')}"
                )
    if num_tokens > cache.max_tokens:
        raise ConfigError(
            f"{where} holds {num_tokens} tokens, and rows of this cache end at "
            f"max_tokens={cache.max_tokens}: make it with a larger one"
        )


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---- copying -------------------------------------------------------------------------------------


class _Buffer:
    """A buffer on the device, between a cache's memory and the CPU's.

    For a copy from swapped extents, which lie in host memory, to the CPU's the driver would use the
    CPU, which has no access to them.
    """

    def __init__(self, cache: KVCache):
        self._cache, self._bytes = cache, _device_buffer(cache)

    def read(self, address: int, total_bytes: int) -> Iterator[memoryview]:
        """Yield the contents of a range in parts, each valid until the next."""
        cache = self._cache
        for start in range(0, total_bytes, _CHUNK_BYTES):
            num_bytes = min(_CHUNK_BYTES, total_bytes - start)
            at, stream = Address(address + start), cache.current_stream()
            cache.pool.backend.copy(Address(self._bytes.data_ptr()), at, num_bytes, stream)
            yield self._bytes[:num_bytes].cpu().numpy().data

    def write(self, address: Address, data: torch.Tensor) -> None:
        """Copy CPU bytes, at most a buffer full, to an address of the cache's memory."""
        cache, num_bytes = self._cache, len(data)
        interruptible(self._bytes[:num_bytes].copy_, data)  # Reads the file.
        source, stream = Address(self._bytes.data_ptr()), cache.current_stream()
        cache.pool.backend.copy(address, source, num_bytes, stream)


def _device_buffer(cache: KVCache) -> torch.Tensor:
    try:
        return call_with_room(
            cache.pool, lambda: torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device=cache.device)
        )
    except torch.OutOfMemoryError as error:
        raise OutOfPagesError(
            f"no {_CHUNK_BYTES} bytes of device memory are left outside the pool to copy through; "
            "close or trim sequences, or lower budget_bytes",
            needed_bytes=_CHUNK_BYTES,
            free_bytes=0,
            retired_bytes=cache.pool.stats().retired_bytes,
        ) from error


# ---- saving --------------------------------------------------------------------------------------


def save(sequence: Sequence, swapped: HostCopy | None, path: str | os.PathLike[str]) -> None:
    """Implement `Sequence.save`; `swapped` is the sequence's host copy."""
    cache, row, num_tokens = sequence.cache, sequence.row, sequence.num_tokens
    with cache.pool.lock:
        token_ids = cache.prefixes.token_ids(row)
    first_tokens = [group.first_kept_token(row, num_tokens) for group in cache.groups]
    description = {
        "num_tokens": num_tokens,
        "first_tokens": first_tokens,
        "groups": describe_groups(cache),
    }
    cache.note_stream()
    cache.pool.backend.join_streams(cache.current_stream())
    # The file takes its name after everything that can fail.
    with whole_file(Path(path)) as file:
        buffer, digest = _Buffer(cache), hashlib.sha256()

        def write(data: bytes | memoryview) -> None:
            digest.update(data)
            file.write(data)

        write(_header(description, len(token_ids), _shapes(cache, num_tokens, first_tokens)))
        write(struct.pack(f"<{len(token_ids)}q", *token_ids))
        for group, first_token in zip(cache.groups, first_tokens, strict=True):
            for each in _ranges(group, row, first_token, num_tokens, swapped):
                for part in buffer.read(*each):
                    interruptible(write, part)
        file.write(digest.digest())


def _header(
    description: Mapping[str, Any], num_ids: int, shapes: Mapping[str, abc.Sequence[int]]
) -> bytes:
    """Return the beginning of a file; the library writes only tensors that are whole in memory."""
    metadata = {"format": _FORMAT, "version": _VERSION, "sequence": json.dumps(description)}
    end = 8 * num_ids
    header: dict[str, Any] = {
        "__metadata__": metadata,
        _TOKEN_IDS: {"dtype": "I64", "shape": [num_ids], "data_offsets": [0, end]},
    }
    for name, (num_rows, row_bytes) in shapes.items():
        start, end = end, end + num_rows * row_bytes
        header[name] = {"dtype": "U8", "shape": [num_rows, row_bytes], "data_offsets": [start, end]}
    offsets = [end, end + _DIGEST_BYTES]
    header[_DIGEST] = {"dtype": "U8", "shape": [_DIGEST_BYTES], "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _shapes(
    cache: KVCache, num_tokens: int, first_tokens: abc.Sequence[int]
) -> dict[str, tuple[int, int]]:
    shapes = {}
    for at, (group, first_token) in enumerate(zip(cache.groups, first_tokens, strict=True)):
        start, end = _span(group, first_token, num_tokens)
        row_bytes = group.bytes_for(1)
        shapes[f"group.{at}"] = (end - start) // row_bytes, row_bytes
    return shapes


def _span(group: LayerGroup, first_token: int, num_tokens: int) -> tuple[int, int]:
    """Return where the bytes of tokens, or of the state after them, start and end in a row."""
    end = group.bytes_for(num_tokens)
    return min(end, group.bytes_for(first_token)), end


def _ranges(
    group: LayerGroup, row: int, first_token: int, num_tokens: int, swapped: HostCopy | None
) -> Iterator[tuple[int, int]]:
    """Yield the address and bytes of token rows `first_token` to `num_tokens`.

    The first ones lie in the row, and those that were swapped out in staging.
    """
    page_bytes, (start, end) = group.page_bytes, _span(group, first_token, num_tokens)
    moved, moved_address = end, Address(0)  # Bytes from `moved` on were swapped out.
    for part, address in () if swapped is None else swapped.firsts:
        if part.table is group.table:
            moved, moved_address = part.page * page_bytes, address
    yield group.table.page_address(row, 0) + start, min(end, moved) - start
    skipped = max(start, moved) - moved
    yield moved_address + skipped, end - moved - skipped


# ---- loading -------------------------------------------------------------------------------------


def load(
    cache: KVCache, path: str | os.PathLike[str], tenant: str | None
) -> tuple[int, int, abc.Sequence[int]]:
    """Implement `KVCache.load`; returns the row, live now, its token count and its known tokens."""
    cache.check_open()
    where = os.fspath(path)
    if not stat.S_ISREG(os.stat(where).st_mode):
        raise ConfigError(f"{where} is no regular file; Sequence.save writes those")
    try:
        opened: Any = safe_open(where, framework="pt")  # The library's types are incomplete.
        with opened as file:
            description = _checked(cache, file, where)
            num_tokens, first_tokens = description["num_tokens"], description["first_tokens"]
            token_ids = file.get_tensor(_TOKEN_IDS).tolist()
            cache.note_stream()
            with cache.rows.beginning() as row:
                map_rows(cache, [Target(row, num_tokens, num_tokens, tenant)])
                buffer = _Buffer(cache)
                for at, first_token in enumerate(first_tokens):
                    rows = file.get_slice(f"group.{at}")
                    _fill(cache, cache.groups[at], row, num_tokens, first_token, rows, buffer)
            return row, num_tokens, token_ids
    except SafetensorError as error:
        raise ConfigError(
            f"{where} is truncated, or no safetensors file ({error}); save the sequence again"
        ) from error


def _checked(cache: KVCache, file: Any, where: str) -> dict[str, Any]:
    metadata = file.metadata() or {}
    if metadata.get("format") != _FORMAT:
        raise ConfigError(f"{where} holds tensors, but no sequence; Sequence.save writes those")
    if metadata.get("version") != _VERSION:
        raise ConfigError(
            f"{where} is of version {metadata.get('version')!r}, and this vmkv reads "
            f"{_VERSION!r}: load it with the vmkv that wrote it"
        )
    interruptible(_check_digest, where)
    description: dict[str, Any] = json.loads(metadata["sequence"])
    num_tokens = description["num_tokens"]
    check_fits(cache, description["groups"], num_tokens, where)
    for name, shape in _shapes(cache, num_tokens, description["first_tokens"]).items():
        if file.get_slice(name).get_shape() != list(shape):
            raise ConfigError(
                f"{where}: {name} is not {list(shape)}, as its description says; save the "
                "sequence again"
            )
    return description


def _check_digest(where: str) -> None:
    """Raise `ConfigError` unless the file ends with the digest of its other bytes."""
    digest = hashlib.sha256()
    with open(where, "rb") as file:
        left = os.fstat(file.fileno()).st_size - _DIGEST_BYTES
        while part := file.read(max(0, min(left, _CHUNK_BYTES))):
            digest.update(part)
            left -= len(part)
        if file.read() != digest.digest():
            raise ConfigError(f"{where} is damaged: its digest differs; save the sequence again")


def _fill(
    cache: KVCache,
    group: LayerGroup,
    row: int,
    num_tokens: int,
    saved_from: int,
    rows: Any,
    buffer: _Buffer,
) -> None:
    # With another page size the window's first page differs from the saving cache's.
    first_token = max(saved_from, group.first_mapped_token(row, num_tokens))
    cursor = Address(group.table.page_address(row, 0) + group.bytes_for(first_token))
    # A kernel may fetch unused tokens before that, which must not be NaN.
    pages = group.table.rows[row]
    mapped = group.table.page_address(row, pages.first_page)
    if pages.mappings and mapped < cursor:
        cache.pool.backend.fill(mapped, cursor - mapped, 0, cache.current_stream())
    num_rows, row_bytes = rows.get_shape()
    chunk_rows = max(1, _CHUNK_BYTES // row_bytes)
    for at in range(first_token - saved_from, num_rows, chunk_rows):
        for part in rows[at : at + chunk_rows].flatten().split(_CHUNK_BYTES):
            interruptible(buffer.write, cursor, part)
            cursor = Address(cursor + len(part))
    group.begin_row(row, first_token)
