"""Sequences on disk: safetensors files with a checksum of every part.

    token_ids    int64 [recorded tokens]
    group.<n>    uint8 [tokens, token_bytes]: raw token rows of layer group n, from the first
                 token on that a query can still see

Nothing in a file is trusted before it has been checked. Contents pass through a small buffer, since
memory may be short when a sequence is saved.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from ...errors import ConfigError, OutOfPagesError
from ...interrupts import interruptible
from ...units import Address, MiB
from .device_memory import call_with_room
from .growing import Target, map_rows
from .layer_group import LayerGroup
from .row_space import LiveRow, RowSpace
from .swap import Swapped
from .whole_file import whole_file

# ---- layout --------------------------------------------------------------------------------------

#: The user's options for differences of layout other than in layers.
_REMEDIES = {"dtype": "dtype, or kv_dtype", "scales": "kv_scales"}


def describe_groups(space: RowSpace) -> list[dict[str, Any]]:
    """Describe the layout of each layer group, in order, as plain values."""
    return [
        {"places_and_layers": [list(each) for each in space.members(group)], **group.layout}
        for group in space.groups
    ]


def check_groups(space: RowSpace, theirs: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise `ConfigError`, naming the difference, unless the groups `theirs` match the cache's."""
    mine = describe_groups(space)
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


def check_length(space: RowSpace, num_tokens: int, where: str) -> None:
    """Raise `ConfigError` unless rows of the cache hold `num_tokens` tokens."""
    if num_tokens > space.max_tokens:
        raise ConfigError(
            f"{where} holds {num_tokens} tokens, and rows of this cache end at "
            f"max_tokens={space.max_tokens}: make it with a larger one"
        )


# ---- untrusted values ---------------------------------------------------------------------


class Claims:
    """An untrusted JSON object; each method raises `ConfigError` if a value is not as required."""

    def __init__(self, values: object, where: str):
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: {_shortened(values)} is no description of a sequence")
        self._values: dict[str, object] = values
        self._where = where

    def integer(self, name: str, low: int, high: int) -> int:
        """Return an integer in `[low, high]`."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(name, f"an integer from {low} to {high}")
        return value

    def text(self, name: str) -> str:
        """Return a string."""
        value = self._values.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def integers(self, name: str, low: int, high: int, *, at_most: int) -> list[int]:
        """Return a list of at most `at_most` integers in `[low, high]`."""
        values = self._list(name)
        is_right = all(type(each) is int and low <= each <= high for each in values)
        if len(values) > at_most or not is_right:
            raise self._wrong(name, f"{at_most} integers at most, from {low} to {high}")
        return values

    def claims(self, name: str) -> list[Claims]:
        """Return a list of further objects."""
        return [Claims(each, self._where) for each in self._list(name)]

    @property
    def values(self) -> Mapping[str, object]:
        """The unchecked values."""
        return self._values

    def _list(self, name: str) -> list[Any]:
        values = self._values.get(name)
        if not isinstance(values, list):
            raise self._wrong(name, "a list")
        return values

    def _wrong(self, name: str, what: str) -> ConfigError:
        return ConfigError(
            f"{self._where}: {name}={_shortened(self._values.get(name))} is not {what}"
        )


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---- saved file ----------------------------------------------------------------------------------

_FORMAT, _VERSION = "vmkv sequence", "1"
_DIGEST_BYTES = 32
_UNKNOWN = "0" * (2 * _DIGEST_BYTES)
_ITEM_BYTES = {"U8": 1, "I64": 8}
#: Far more than the layers of any cache take; a larger header is rejected unread.
_HEADER_BYTES_MAX = 16 * MiB


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file: its name, type (U8 or I64) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


# ---- writing ------------------------------------------------------------------------------


def write(
    file: IO[bytes],
    description: str,
    tensors: Sequence[StoredTensor],
    contents: Sequence[Iterable[memoryview]],
) -> None:
    """Write a file of `tensors`, whose bytes come from `contents`, a part at a time."""
    digests = {"sequence": digest_of(description)} | {each.name: _UNKNOWN for each in tensors}
    # Digests come first in the file and are known last; their length never changes.
    file.write(_header(description, tensors, digests))
    for tensor, parts in zip(tensors, contents, strict=True):
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for part in parts:
            interruptible(digest.update, part)
            file.write(part)
        digests[tensor.name] = digest.hexdigest()
    file.seek(0)
    file.write(_header(description, tensors, digests))


def _header(description: str, tensors: Sequence[StoredTensor], digests: Mapping[str, str]) -> bytes:
    metadata = {
        "format": _FORMAT,
        "version": _VERSION,
        "sequence": description,
        "blake2b": json.dumps(digests),
    }
    text = json.dumps({"__metadata__": metadata, **_entries(tensors)}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _entries(tensors: Sequence[StoredTensor]) -> dict[str, Any]:
    entries, end = {}, 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    return entries


def digest_of(text: str) -> str:
    """Return the checksum of a description."""
    data = text.encode(errors="surrogatepass")  # JSON can say what UTF-8 cannot.
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


# ---- reading ------------------------------------------------------------------------------


class SavedFile:
    """A file in the format of `write`; raises `ConfigError` if it is truncated or foreign."""

    def __init__(self, file: IO[bytes], where: str):
        self._file, self._where = file, where
        self._entries = self._read_header()
        metadata = Claims(self._entries.pop("__metadata__", {}), where)
        self._check_kind(metadata.values)
        self._digests = Claims(self._parsed(metadata.text("blake2b")), where)
        text = metadata.text("sequence")
        self._check_digest("sequence", digest_of(text))
        self.description = Claims(self._parsed(text), where)

    def _read_header(self) -> dict[str, Any]:
        prefix = bytearray(8)
        self._read(memoryview(prefix), 0)
        num_bytes = int.from_bytes(prefix, "little")
        self._data_start = 8 + num_bytes
        self._data_bytes = os.fstat(self._file.fileno()).st_size - self._data_start
        if num_bytes > _HEADER_BYTES_MAX or self._data_bytes < 0:
            raise self._truncated()
        header = bytearray(num_bytes)
        self._read(memoryview(header), 8)
        entries = self._parsed(header)
        if not isinstance(entries, dict):
            raise self._truncated()
        return entries

    def _check_kind(self, metadata: Mapping[str, object]) -> None:
        where, version = self._where, metadata.get("version")
        if metadata.get("format") != _FORMAT:
            raise ConfigError(f"{where} holds tensors, but no sequence; Sequence.save writes those")
        if version != _VERSION:
            raise ConfigError(
                f"{where} is of version {version!r}, and this vmkv reads {_VERSION!r}: load it "
                "with the vmkv that wrote it"
            )

    def num_items(self, name: str) -> int:
        """Return the claimed length of a one-dimensional tensor."""
        claims = Claims(self._entries.get(name), self._where)
        return sum(claims.integers("shape", 0, 1 << 31, at_most=1))

    def check(self, tensors: Sequence[StoredTensor]) -> None:
        """Raise `ConfigError` unless the file consists of these tensors, each with a checksum."""
        if self._data_bytes != sum(tensor.num_bytes for tensor in tensors):
            raise self._truncated()
        wanted = _entries(tensors)
        if self._entries != wanted:
            differing = {name for name in wanted if self._entries.get(name) != wanted[name]}
            what = ", ".join(sorted(differing or self._entries.keys() - wanted.keys()))
            raise ConfigError(
                f"{self._where} has other tensors than its description says ({what}); save the "
                "sequence again"
            )
        self._entries = wanted  # Our integers: the file's may be 1.0 or true, which equal 1.
        for tensor in tensors:
            self._digests.text(tensor.name)

    def read(self, name: str, buffer: memoryview) -> Iterator[int]:
        """Read a tensor into `buffer` part by part, yielding the bytes of each part.

        The checksum is compared at the end: nothing is to be used before the iterator has ended.
        """
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        start, end = self._entries[name]["data_offsets"]
        for at in range(start, end, max(1, len(buffer))):
            part = buffer[: end - at]
            self._read(part, self._data_start + at)
            interruptible(digest.update, part)
            yield len(part)
        self._check_digest(name, digest.hexdigest())

    # ---- shared by both -------------------------------------------------------------------

    def _read(self, into: memoryview, start: int) -> None:
        num_bytes = 0
        while num_bytes < len(into):
            new = os.preadv(self._file.fileno(), [into[num_bytes:]], start + num_bytes)
            if not new:
                raise self._truncated()
            num_bytes += new

    def _check_digest(self, name: str, actual: str) -> None:
        if self._digests.text(name) != actual:
            raise ConfigError(
                f"{self._where} is corrupt: {name} has another checksum than when it was saved; "
                "save the sequence again, or compute it anew"
            )

    def _parsed(self, text: str | bytearray) -> object:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self._where}: {error}; save the sequence again") from error

    def _truncated(self) -> ConfigError:
        return ConfigError(
            f"{self._where} is truncated, or no safetensors file; save the sequence again"
        )


# ---- disk ----------------------------------------------------------------------------------------

_TOKEN_IDS = "token_ids"
#: Size of the copy buffer: small, since memory may be short; hashing dominates the time.
_CHUNK_BYTES = MiB


class _Range(NamedTuple):
    address: Address
    num_bytes: int


class _Buffer:
    """A buffer between a cache's memory and the CPU's.

    On a GPU there are two, pinned and device memory: for a copy from swapped extents, which lie in
    host memory, the driver would use the CPU, which has no access to them.
    """

    def __init__(self, space: RowSpace):
        self._space = space
        self._is_cuda = space.device.type == "cuda"
        self._near = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._is_cuda)
        self._far = self._near
        if self._is_cuda:
            self._far = _device_buffer(space)

    @property
    def data(self) -> memoryview:
        return self._near.numpy().data

    def read(self, source: _Range) -> Iterator[memoryview]:
        """Yield the contents of a range in parts, each valid until the next."""
        space = self._space
        for start in range(0, source.num_bytes, _CHUNK_BYTES):
            num_bytes = min(_CHUNK_BYTES, source.num_bytes - start)
            at, stream = Address(source.address + start), space.current_stream()
            space.pool.backend.copy(Address(self._far.data_ptr()), at, num_bytes, stream)
            if self._is_cuda:
                self._near[:num_bytes].copy_(self._far[:num_bytes], non_blocking=True)
                torch.cuda.current_stream(space.device).synchronize()
            yield self.data[:num_bytes]

    def write(self, address: Address, start: int, end: int) -> None:
        """Copy bytes `start` to `end` of `data` to an address of the cache's memory."""
        space = self._space
        if self._is_cuda:
            self._far[start:end].copy_(self._near[start:end], non_blocking=True)
        source, stream = Address(self._far.data_ptr() + start), space.current_stream()
        space.pool.backend.copy(address, source, end - start, stream)
        if self._is_cuda:
            torch.cuda.current_stream(space.device).synchronize()


def _device_buffer(space: RowSpace) -> torch.Tensor:
    try:
        return call_with_room(
            space.pool, lambda: torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device=space.device)
        )
    except torch.OutOfMemoryError as error:
        raise OutOfPagesError(
            f"no {_CHUNK_BYTES} bytes of device memory are left outside the pool to copy through; "
            "close or trim sequences, or lower budget_bytes",
            needed_bytes=_CHUNK_BYTES,
            free_bytes=0,
            retired_bytes=space.pool.stats().retired_bytes,
        ) from error


# ---- saving -------------------------------------------------------------------------------


def save(sequence: LiveRow, swapped: Swapped | None, path: str | os.PathLike[str]) -> None:
    """Implement `Sequence.save`; `swapped` is the sequence's host copy. Its row is pinned."""
    space, row, num_tokens = sequence.cache, sequence.row, sequence.num_tokens
    with space.pool.lock:
        token_ids = space.prefixes.token_ids(row)
    first_tokens = [group.first_kept_token(row, num_tokens) for group in space.groups]
    tensors = _tensors(space, num_tokens, len(token_ids), first_tokens)
    description = {
        "num_tokens": num_tokens,
        "first_tokens": first_tokens,
        "groups": describe_groups(space),
    }
    space.note_stream()
    space.pool.backend.join_streams(space.current_stream())
    # The file takes its name after everything that can fail.
    with whole_file(Path(path)) as file:
        buffer = _Buffer(space)
        ids = struct.pack(f"<{len(token_ids)}q", *token_ids)
        contents: list[Iterable[memoryview]] = [[memoryview(ids)]]
        for group, first_token in zip(space.groups, first_tokens, strict=True):
            ranges = _ranges(group, row, first_token, num_tokens, swapped)
            contents.append(part for each in ranges for part in buffer.read(each))
        write(file, json.dumps(description), tensors, contents)


def _tensors(
    space: RowSpace, num_tokens: int, num_ids: int, first_tokens: Sequence[int]
) -> list[StoredTensor]:
    tensors = [StoredTensor(_TOKEN_IDS, "I64", (num_ids,))]
    for at, (group, first_token) in enumerate(zip(space.groups, first_tokens, strict=True)):
        shape = (max(0, num_tokens - first_token), group.geometry.token_bytes)
        tensors.append(StoredTensor(f"group.{at}", "U8", shape))
    return tensors


def _ranges(
    group: LayerGroup,
    row: int,
    first_token: int,
    num_tokens: int,
    swapped: Swapped | None,
) -> list[_Range]:
    """Locate token rows `first_token` to `num_tokens`: first in the row, then in staging."""
    token_bytes, page_bytes = group.geometry.token_bytes, group.geometry.page_bytes
    start, end = first_token * token_bytes, num_tokens * token_bytes
    moved = end  # Bytes from here on were swapped out.
    moved_address = Address(0)
    if swapped is not None:
        for each in swapped.firsts():
            if each.group is group:
                moved = each.page * page_bytes
                moved_address = swapped.staged(each)
    ranges = []
    row_address = group.table.page_address(row, 0)
    if start < min(end, moved):
        ranges.append(_Range(Address(row_address + start), min(end, moved) - start))
    if max(start, moved) < end:
        skipped = max(start, moved) - moved
        ranges.append(_Range(Address(moved_address + skipped), end - moved - skipped))
    return ranges


# ---- loading ------------------------------------------------------------------------------


class _Content(NamedTuple):
    file: SavedFile
    num_tokens: int
    first_tokens: Sequence[int]
    token_ids: Sequence[int]


def load(
    space: RowSpace, path: str | os.PathLike[str], tenant: str | None
) -> tuple[int, int, Sequence[int]]:
    """Implement `KVCache.load`; returns the row, live now, its token count and its known tokens."""
    space.check_open()
    where = os.fspath(path)
    with open(where, "rb", buffering=0, opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ConfigError(f"{where} is no regular file; Sequence.save writes those")
        content = _checked(space, SavedFile(file, where), where)
        space.note_stream()
        with space.beginning() as row:
            _fill(space, row, content, tenant)
    return row, content.num_tokens, content.token_ids


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # Opening a pipe would wait for a writer.


def _checked(space: RowSpace, file: SavedFile, where: str) -> _Content:
    """Check the file's description and tensors, and read its token ids."""
    claims = file.description
    check_groups(space, [each.values for each in claims.claims("groups")], where)
    num_tokens = claims.integer("num_tokens", 0, 1 << 31)
    check_length(space, num_tokens, where)
    first_tokens = claims.integers("first_tokens", 0, num_tokens, at_most=len(space.groups))
    num_ids = file.num_items(_TOKEN_IDS)
    if num_ids > num_tokens or len(first_tokens) != len(space.groups):
        raise ConfigError(f"{where} has other tensors than its groups; save the sequence again")
    file.check(_tensors(space, num_tokens, num_ids, first_tokens))
    for at, (group, first_token) in enumerate(zip(space.groups, first_tokens, strict=True)):
        if first_token > group.first_seen_token(num_tokens):
            raise ConfigError(f"{where}: group.{at} lacks tokens that a query still sees")
    ids = bytearray(8 * num_ids)
    for _ in file.read(_TOKEN_IDS, memoryview(ids)):
        pass  # `ids` takes them in one part.
    return _Content(file, num_tokens, first_tokens, struct.unpack(f"<{num_ids}q", ids))


def _fill(space: RowSpace, row: int, content: _Content, tenant: str | None) -> None:
    map_rows(space, [Target(row, content.num_tokens, content.num_tokens, tenant)])
    buffer = _Buffer(space)
    stream = space.current_stream()
    for at, (group, saved_from) in enumerate(zip(space.groups, content.first_tokens, strict=True)):
        # With another page size the window's first page differs from the saving cache's.
        first_token = max(saved_from, group.first_mapped_token(row, content.num_tokens))
        cursor = group.table.page_address(row, 0)
        cursor = Address(cursor + first_token * group.geometry.token_bytes)
        # A kernel may fetch unused tokens before that, which must not be NaN.
        pages = group.table.rows[row]
        mapped = group.table.page_address(row, pages.first_page)
        if pages.mappings and mapped < cursor:
            space.pool.backend.fill(mapped, cursor - mapped, 0, stream)
        unwanted_bytes = (first_token - saved_from) * group.geometry.token_bytes
        for num_bytes in content.file.read(f"group.{at}", buffer.data):
            skipped_bytes = min(unwanted_bytes, num_bytes)
            unwanted_bytes -= skipped_bytes
            if skipped_bytes < num_bytes:
                buffer.write(cursor, skipped_bytes, num_bytes)
                cursor = Address(cursor + num_bytes - skipped_bytes)
        group.begin_row(row, first_token)
