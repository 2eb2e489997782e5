"""Sequences on disk: what a row holds, in a file that checks itself.

    token_ids    int64 [recorded tokens]
    group.<n>    uint8 [tokens, token_bytes]: raw token rows of layer group n, from the first
                 token on that a query can still see

How such a file is written and read is in `saved_file.py`.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import ClosedError, ConfigError, OutOfPagesError
from ..units import Address, MiB
from .layer_group import LayerGroup
from .portable import (
    check_groups,
    check_length,
    describe_groups,
    first_kept_token,
    first_seen_token,
    note_first_kept_token,
)
from .saved_file import SavedFile, StoredTensor, write
from .swap import Swapped
from .whole_file import whole_file

if TYPE_CHECKING:
    from .kv_cache import KVCache
    from .rowed import RowedCache
    from .sequence import Sequence as CacheSequence

_TOKEN_IDS = "token_ids"
#: Through a small buffer, because there may be little memory left; hashing is slower by far.
_CHUNK_BYTES = MiB


@dataclass(frozen=True)
class _Range:
    """Where some bytes lie."""

    address: Address
    num_bytes: int


class _Buffer:
    """A buffer between a cache's memory and the CPU's.

    On a GPU two: pinned memory, and device memory beside it, because the driver would have the
    CPU copy what a swapped sequence holds, which has no access to it.
    """

    def __init__(self, cache: RowedCache):
        self._cache = cache
        self._is_cuda = cache.device.type == "cuda"
        self._near = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._is_cuda)
        self._far = self._near
        if self._is_cuda:
            self._far = _device_buffer(cache)

    @property
    def data(self) -> memoryview:
        """The CPU's side of it, of bytes."""
        return self._near.numpy().data

    def read(self, source: _Range) -> Iterator[memoryview]:
        """What a range of the cache's memory holds, in parts, each valid until the next."""
        cache = self._cache
        for start in range(0, source.num_bytes, _CHUNK_BYTES):
            num_bytes = min(_CHUNK_BYTES, source.num_bytes - start)
            at, stream = Address(source.address + start), cache.current_stream()
            cache.pool.backend.copy(Address(self._far.data_ptr()), at, num_bytes, stream)
            if self._is_cuda:
                self._near[:num_bytes].copy_(self._far[:num_bytes], non_blocking=True)
                torch.cuda.current_stream(cache.device).synchronize()
            yield self.data[:num_bytes]

    def write(self, address: Address, start: int, end: int) -> None:
        """Put the bytes from `start` to `end` of `data` at an address of the cache's memory."""
        cache = self._cache
        if self._is_cuda:
            self._far[start:end].copy_(self._near[start:end], non_blocking=True)
        source, stream = Address(self._far.data_ptr() + start), cache.current_stream()
        cache.pool.backend.copy(address, source, end - start, stream)
        if self._is_cuda:
            torch.cuda.current_stream(cache.device).synchronize()


def _device_buffer(cache: RowedCache) -> torch.Tensor:
    try:
        return torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device=cache.device)
    except torch.OutOfMemoryError:
        cache.pool.trim()  # What nobody uses may be all that is left.
    try:
        return torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device=cache.device)
    except torch.OutOfMemoryError as error:
        raise OutOfPagesError(
            f"no {_CHUNK_BYTES} bytes of device memory are left outside the pool to copy through; "
            "close or trim sequences, or lower budget_bytes",
            needed_bytes=_CHUNK_BYTES,
            free_bytes=0,
            retired_bytes=cache.pool.stats().retired_bytes,
        ) from error


# ---- saving -------------------------------------------------------------------------------


def save(sequence: CacheSequence, path: str | os.PathLike[str]) -> None:
    """See `Sequence.save`."""
    if sequence.is_closed:
        raise ClosedError(f"the sequence in row {sequence.row} is closed")
    cache, row, num_tokens = sequence.cache, sequence.row, sequence.num_tokens
    token_ids = cache.prefixes.token_ids(row)
    first_tokens = [first_kept_token(group, row, num_tokens) for group in cache.groups]
    tensors = _tensors(cache, num_tokens, len(token_ids), first_tokens)
    description = {
        "num_tokens": num_tokens,
        "first_tokens": first_tokens,
        "groups": describe_groups(cache),
    }
    cache.note_stream()
    cache.pool.backend.join_streams(cache.current_stream())
    # The file takes its name last: after everything that can fail.
    with cache.pinned_row(row), whole_file(Path(path)) as file:
        buffer = _Buffer(cache)
        ids = struct.pack(f"<{len(token_ids)}q", *token_ids)
        contents: list[Iterable[memoryview]] = [[memoryview(ids)]]
        for group, first_token in zip(cache.groups, first_tokens, strict=True):
            ranges = _ranges(group, row, first_token, num_tokens, sequence.swapped)
            contents.append(part for each in ranges for part in buffer.read(each))
        write(file, json.dumps(description), tensors, contents)


def _tensors(
    cache: RowedCache, num_tokens: int, num_ids: int, first_tokens: Sequence[int]
) -> list[StoredTensor]:
    """What a file of so many tokens consists of."""
    tensors = [StoredTensor(_TOKEN_IDS, "I64", (num_ids,))]
    for at, (group, first_token) in enumerate(zip(cache.groups, first_tokens, strict=True)):
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
    """Where the token rows from `first_token` to `num_tokens` lie: in the row, then in staging."""
    token_bytes, page_bytes = group.geometry.token_bytes, group.geometry.page_bytes
    start, end = first_token * token_bytes, num_tokens * token_bytes
    moved = end  # From here on it was swapped out.
    moved_address = Address(0)
    if swapped is not None:
        staging_page = 0
        for part in swapped.parts:
            if part.group is group:
                moved = part.first_page * page_bytes
                moved_address = swapped.staging.page_address(0, staging_page)
            staging_page += part.num_pages
    ranges = []
    row_address = group.table.page_address(row, 0)
    if start < min(end, moved):
        ranges.append(_Range(Address(row_address + start), min(end, moved) - start))
    if max(start, moved) < end:
        skipped = max(start, moved) - moved
        ranges.append(_Range(Address(moved_address + skipped), end - moved - skipped))
    return ranges


# ---- loading ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Content:
    """A file that has been checked, but for its groups' rows, which are as they are read."""

    file: SavedFile
    num_tokens: int
    first_tokens: Sequence[int]
    token_ids: Sequence[int]


def load(cache: KVCache, path: str | os.PathLike[str], tenant: str | None) -> CacheSequence:
    """See `KVCache.load`."""
    cache.check_open()
    where = os.fspath(path)
    with open(where, "rb", buffering=0, opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ConfigError(f"{where} is no regular file; Sequence.save writes those")
        content = _checked(cache, SavedFile(file, where), where)
        cache.note_stream()
        sequence = cache.begin(
            content.num_tokens, tenant, lambda row: _fill(cache, row, content, tenant)
        )
    sequence.num_cached_tokens = content.num_tokens
    cache.record(sequence, content.token_ids)
    return sequence


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # A pipe would wait for somebody to write.


def _checked(cache: KVCache, file: SavedFile, where: str) -> _Content:
    """Check everything that the file says of itself, and read its token ids."""
    claims = file.description
    check_groups(cache, [each.values for each in claims.claims("groups")], where)
    num_tokens = claims.integer("num_tokens", 0, 1 << 31)
    check_length(cache, num_tokens, where)
    first_tokens = claims.integers("first_tokens", 0, num_tokens, at_most=len(cache.groups))
    names = {_TOKEN_IDS, *(f"group.{at}" for at in range(len(cache.groups)))}
    if file.names != names or len(first_tokens) != len(cache.groups):
        raise ConfigError(f"{where} has other tensors than its groups; save the sequence again")
    shape = file.shape(_TOKEN_IDS)
    num_ids = min(shape[0], num_tokens) if shape else 0
    for tensor in _tensors(cache, num_tokens, num_ids, first_tokens):
        file.check(tensor)
    for at, (group, first_token) in enumerate(zip(cache.groups, first_tokens, strict=True)):
        if first_token > first_seen_token(group, num_tokens):
            raise ConfigError(f"{where}: group.{at} lacks tokens that a query still sees")
    ids = bytearray(8 * num_ids)
    for _ in file.read(_TOKEN_IDS, memoryview(ids)):
        pass  # All of them are one part.
    return _Content(file, num_tokens, first_tokens, struct.unpack(f"<{num_ids}q", ids))


def _fill(cache: KVCache, row: int, content: _Content, tenant: str | None) -> None:
    """Map what the sequence needs and read it from the file."""
    cache.map_row(row, content.num_tokens, tenant)
    buffer = _Buffer(cache)
    stream = cache.current_stream()
    for at, (group, saved_from) in enumerate(zip(cache.groups, content.first_tokens, strict=True)):
        # With other pages than where it was saved, the window's first one lies elsewhere.
        first_token = max(saved_from, group.first_mapped_token(row, content.num_tokens))
        cursor = group.table.page_address(row, 0)
        cursor = Address(cursor + first_token * group.geometry.token_bytes)
        # Before that a kernel may fetch what it does not use, which must be a number.
        pages = group.table.rows[row]
        mapped = group.table.page_address(row, pages.first_page)
        if pages.mappings and mapped < cursor:
            cache.pool.backend.fill(mapped, cursor - mapped, 0, stream)
        unwanted_bytes = (first_token - saved_from) * group.geometry.token_bytes
        for num_bytes in content.file.read(f"group.{at}", buffer.data):
            skipped_bytes = min(unwanted_bytes, num_bytes)
            unwanted_bytes -= skipped_bytes
            if skipped_bytes < num_bytes:
                buffer.write(cursor, skipped_bytes, num_bytes)
                cursor = Address(cursor + num_bytes - skipped_bytes)
        note_first_kept_token(group, row, first_token)
