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
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import ConfigError, OutOfPagesError
from ..units import Address, MiB
from .device_memory import call_with_room
from .growing import Target, map_rows
from .layer_group import LayerGroup
from .portable import check_groups, check_length, describe_groups
from .row_space import LiveRow, RowSpace
from .saved_file import SavedFile, StoredTensor, write
from .swap import Swapped
from .whole_file import whole_file

_TOKEN_IDS = "token_ids"
#: Through a small buffer, because there may be little memory left; hashing is slower by far.
_CHUNK_BYTES = MiB


class _Range(NamedTuple):
    """Where some bytes lie."""

    address: Address
    num_bytes: int


class _Buffer:
    """A buffer between a cache's memory and the CPU's.

    On a GPU two: pinned memory, and device memory beside it, because the driver would have the
    CPU copy what a swapped sequence holds, which has no access to it.
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
        """The CPU's side of it, of bytes."""
        return self._near.numpy().data

    def read(self, source: _Range) -> Iterator[memoryview]:
        """What a range of the cache's memory holds, in parts, each valid until the next."""
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
        """Put the bytes from `start` to `end` of `data` at an address of the cache's memory."""
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
    """See `Sequence.save`; `swapped` is what of it is swapped out. Its row is pinned."""
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
    # The file takes its name last: after everything that can fail.
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
    """What a file of so many tokens consists of."""
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
    """Where the token rows from `first_token` to `num_tokens` lie: in the row, then in staging."""
    token_bytes, page_bytes = group.geometry.token_bytes, group.geometry.page_bytes
    start, end = first_token * token_bytes, num_tokens * token_bytes
    moved = end  # From here on it was swapped out.
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
    """A file that has been checked, but for its groups' rows, which are as they are read."""

    file: SavedFile
    num_tokens: int
    first_tokens: Sequence[int]
    token_ids: Sequence[int]


def load(
    space: RowSpace, path: str | os.PathLike[str], tenant: str | None
) -> tuple[int, int, Sequence[int]]:
    """A row with what a file holds; for `KVCache.load`.

    Returns the row, which is live now, how many tokens it holds, and those that are known.
    """
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
    return os.open(path, flags | os.O_NONBLOCK)  # A pipe would wait for somebody to write.


def _checked(space: RowSpace, file: SavedFile, where: str) -> _Content:
    """Check everything that the file says of itself, and read its token ids."""
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
        pass  # All of them are one part.
    return _Content(file, num_tokens, first_tokens, struct.unpack(f"<{num_ids}q", ids))


def _fill(space: RowSpace, row: int, content: _Content, tenant: str | None) -> None:
    """Map what the sequence needs and read it from the file."""
    map_rows(space, [Target(row, content.num_tokens, content.num_tokens, tenant)])
    buffer = _Buffer(space)
    stream = space.current_stream()
    for at, (group, saved_from) in enumerate(zip(space.groups, content.first_tokens, strict=True)):
        # With other pages than where it was saved, the window's first one lies elsewhere.
        first_token = max(saved_from, group.first_mapped_token(row, content.num_tokens))
        cursor = group.table.page_address(row, 0)
        cursor = Address(cursor + first_token * group.geometry.token_bytes)
        # Before that a kernel may fetch what it does not use, which must be a number.
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
