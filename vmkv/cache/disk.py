"""Sequences on disk: what a row holds, in a safetensors file that checks itself.

    metadata     format, version, sequence (lengths and geometry, as JSON), blake2b (digests)
    token_ids    int64 [recorded tokens]
    group.<n>    uint8 [tokens, token_bytes]: raw token rows of layer group n, from the first
                 token on that a query can still see

Any reader of safetensors opens it. The library writes only tensors that are whole in memory, and
a sequence can be larger than what is left of that, so writing is done here, through a small
buffer; what is written becomes a file of its name once it is complete. Reading is the library's.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import ClosedError, ConfigError, OutOfPagesError
from ..units import Address, MiB
from .layer_group import LayerGroup
from .portable import (
    Claims,
    check_groups,
    check_length,
    describe_groups,
    first_kept_token,
    first_seen_token,
    note_first_kept_token,
)
from .swap import Swapped

if TYPE_CHECKING:
    from .kv_cache import KVCache
    from .rowed import RowedCache
    from .sequence import Sequence as CacheSequence

_FORMAT, _VERSION = "vmkv sequence", "1"
_TOKEN_IDS = "token_ids"
#: Through a small buffer, because there may be little memory left; hashing is slower by far.
_CHUNK_BYTES = MiB
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class _Range:
    """Where some bytes lie."""

    address: Address
    num_bytes: int


@dataclass
class _Tensor:
    """A tensor of the file, and its digest once that is known."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    digest: str = "0" * (2 * _DIGEST_BYTES)


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

    def read(self, source: _Range) -> Iterator[torch.Tensor]:
        """What a range of the cache's memory holds: uint8 tensors, each valid until the next."""
        cache = self._cache
        for start in range(0, source.num_bytes, _CHUNK_BYTES):
            num_bytes = min(_CHUNK_BYTES, source.num_bytes - start)
            at, stream = Address(source.address + start), cache.current_stream()
            cache.pool.backend.copy(Address(self._far.data_ptr()), at, num_bytes, stream)
            if self._is_cuda:
                self._near[:num_bytes].copy_(self._far[:num_bytes], non_blocking=True)
                torch.cuda.current_stream(cache.device).synchronize()
            yield self._near[:num_bytes]

    def write(self, address: Address, data: torch.Tensor) -> None:
        """Put at most a buffer's bytes at an address of the cache's memory."""
        cache, num_bytes = self._cache, data.numel()
        self._near[:num_bytes] = data
        if self._is_cuda:
            self._far[:num_bytes].copy_(self._near[:num_bytes], non_blocking=True)
        source, stream = Address(self._far.data_ptr()), cache.current_stream()
        cache.pool.backend.copy(address, source, num_bytes, stream)
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
    token_ids = torch.tensor(cache.prefixes.token_ids(row), dtype=torch.int64)
    first_tokens = [first_kept_token(group, row, num_tokens) for group in cache.groups]
    tensors = [_Tensor(_TOKEN_IDS, "I64", (len(token_ids),), 8 * len(token_ids))]
    for at, (group, first_token) in enumerate(zip(cache.groups, first_tokens, strict=True)):
        token_bytes = group.geometry.token_bytes
        shape = (max(0, num_tokens - first_token), token_bytes)
        tensors.append(_Tensor(f"group.{at}", "U8", shape, shape[0] * token_bytes))
    description = {
        "num_tokens": num_tokens,
        "first_tokens": first_tokens,
        "groups": describe_groups(cache),
    }
    cache.note_stream()
    cache.pool.backend.join_streams(cache.current_stream())
    # The file takes its name last: after everything that can fail.
    with cache.pinned_row(row), _replacing(Path(path)) as file:
        buffer = _Buffer(cache)
        contents: list[Iterator[torch.Tensor]] = [_chunks(token_ids)]
        for group, first_token in zip(cache.groups, first_tokens, strict=True):
            ranges = _ranges(group, row, first_token, num_tokens, sequence.swapped)
            contents.append(chunk for each in ranges for chunk in buffer.read(each))
        _write(file, json.dumps(description), tensors, contents)


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    return iter(torch.split(tensor, _CHUNK_BYTES // tensor.element_size()))


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


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which takes the name when the block ends well, and else is gone."""
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # The name, too, outlives a crash.
    finally:
        os.close(folder)


def _write(
    file: IO[bytes],
    description: str,
    tensors: Sequence[_Tensor],
    contents: Sequence[Iterator[torch.Tensor]],
) -> None:
    # Digests come first in the file and are known last; their length never changes.
    file.write(_header(description, tensors))
    for tensor, chunks in zip(tensors, contents, strict=True):
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for chunk in chunks:
            data = _bytes(chunk)
            digest.update(data)
            file.write(data)
        tensor.digest = digest.hexdigest()
    file.seek(0)
    file.write(_header(description, tensors))


def _bytes(tensor: torch.Tensor) -> memoryview:
    array = tensor.reshape(-1).numpy()
    return (array if tensor.dtype is torch.uint8 else array.astype("<i8", copy=False)).data


def _header(description: str, tensors: Sequence[_Tensor]) -> bytes:
    digests = {tensor.name: tensor.digest for tensor in tensors}
    digests["sequence"] = _digest_of_text(description)
    entries: dict[str, Any] = {
        "__metadata__": {
            "format": _FORMAT,
            "version": _VERSION,
            "sequence": description,
            "blake2b": json.dumps(digests),
        }
    }
    start = 0
    for tensor in tensors:
        offsets = [start, start + tensor.num_bytes]
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        start = offsets[1]
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _digest_of_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


# ---- loading ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Content:
    """A file that has been checked from end to end."""

    file: Any
    num_tokens: int
    first_tokens: Sequence[int]
    token_ids: Sequence[int]


def load(cache: KVCache, path: str | os.PathLike[str], tenant: str | None) -> CacheSequence:
    """See `KVCache.load`."""
    cache.check_open()
    where = os.fspath(path)
    try:
        with safe_open(where, framework="pt") as file:
            content = _checked(cache, file, where)
            cache.note_stream()
            sequence = cache.begin(
                content.num_tokens, tenant, lambda row: _fill(cache, row, content, tenant)
            )
    except SafetensorError as error:
        raise ConfigError(
            f"{where} is truncated, or no safetensors file ({error}); save the sequence again"
        ) from error
    sequence.num_cached_tokens = content.num_tokens
    cache.record(sequence, content.token_ids)
    return sequence


def _checked(cache: KVCache, file: Any, where: str) -> _Content:
    """Check everything that the file says, its digests last."""
    metadata = file.metadata() or {}
    if metadata.get("format") != _FORMAT:
        raise ConfigError(f"{where} holds tensors, but no sequence; Sequence.save writes those")
    if metadata.get("version") != _VERSION:
        raise ConfigError(
            f"{where} is of version {metadata.get('version')!r}, and this vmkv reads {_VERSION!r}: "
            "load it with the vmkv that wrote it"
        )
    description = metadata.get("sequence", "")
    digests = Claims(_parsed(metadata.get("blake2b", ""), where), where)
    _check_digest(digests, "sequence", _digest_of_text(description), where)
    claims = Claims(_parsed(description, where), where)
    check_groups(cache, [each.values for each in claims.claims("groups")], where)
    num_tokens = claims.integer("num_tokens", 0, 1 << 31)
    check_length(cache, num_tokens, where)
    num_groups = len(cache.groups)
    first_tokens = claims.integers("first_tokens", 0, num_tokens, at_most=num_groups)
    names = [f"group.{at}" for at in range(num_groups)]
    if set(file.keys()) != {_TOKEN_IDS, *names} or len(first_tokens) != num_groups:
        raise ConfigError(f"{where} has other tensors than its groups; save the sequence again")
    for name, group, first_token in zip(names, cache.groups, first_tokens, strict=True):
        wanted = [num_tokens - first_token, group.geometry.token_bytes]
        _check_tensor(file, name, "U8", wanted, where)
        if first_token > first_seen_token(group, num_tokens):
            raise ConfigError(f"{where}: {name} lacks tokens that a query still sees")
    shape = file.get_slice(_TOKEN_IDS).get_shape()
    num_ids = min(shape[0], num_tokens) if shape else 0
    _check_tensor(file, _TOKEN_IDS, "I64", [num_ids], where)
    for name in (_TOKEN_IDS, *names):
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for chunk in _rows(file, name):
            digest.update(_bytes(chunk))
        _check_digest(digests, name, digest.hexdigest(), where)
    return _Content(file, num_tokens, first_tokens, file.get_tensor(_TOKEN_IDS).tolist())


def _parsed(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}; save the sequence again") from error


def _check_digest(digests: Claims, name: str, actual: str, where: str) -> None:
    if digests.text(name) != actual:
        raise ConfigError(
            f"{where} is corrupt: {name} has another checksum than when it was saved; save the "
            "sequence again, or compute it anew"
        )


def _check_tensor(file: Any, name: str, dtype: str, shape: list[int], where: str) -> None:
    found = file.get_slice(name)
    if found.get_dtype() != dtype or found.get_shape() != shape:
        raise ConfigError(
            f"{where}: {name} is {found.get_dtype()} {found.get_shape()}, not {dtype} {shape}; "
            "save the sequence again"
        )


def _rows(file: Any, name: str, first: int = 0) -> Iterator[torch.Tensor]:
    """The rows of a tensor from `first` on, a buffer's size (or one row) at a time, uncopied."""
    found = file.get_slice(name)
    num_rows, *rest = found.get_shape()
    row_bytes = rest[0] if rest else 8
    step = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(first, num_rows, step):
        yield found[start : min(num_rows, start + step)]


def _fill(cache: KVCache, row: int, content: _Content, tenant: str | None) -> None:
    """Map what the sequence needs and copy it from the file."""
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
        for rows in _rows(content.file, f"group.{at}", first_token - saved_from):
            for chunk in _chunks(rows.flatten()):
                buffer.write(cursor, chunk)
                cursor = Address(cursor + chunk.numel())
        note_first_kept_token(group, row, first_token)
