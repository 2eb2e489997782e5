"""The file that a sequence is saved in: tensors, a description, and checksums of all of it.

    metadata     format, version, sequence (its description, as JSON), blake2b (digests)
    tensors      uint8 and int64, one after the other

Any reader of safetensors opens it. The library itself writes only tensors that are whole in
memory, which may be too little for a sequence; and it reads by mapping the file, so that whoever
cuts it meanwhile ends the process. So both are done here, a part at a time. What is read is read
once: the bytes that were checked are the bytes that are used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from ..errors import ConfigError
from ..interrupts import interruptible
from ..units import MiB
from .portable import Claims

_FORMAT, _VERSION = "vmkv sequence", "1"
_DIGEST_BYTES = 32
_UNKNOWN = "0" * (2 * _DIGEST_BYTES)
_ITEM_BYTES = {"U8": 1, "I64": 8}
#: Far more than the layers of any cache take; what claims more is not read into memory.
_HEADER_BYTES_MAX = 16 * MiB


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file: its name, type (U8 or I64) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """What it takes."""
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
    """What the header says of tensors that follow one another."""
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
    """The checksum of a description."""
    data = text.encode(errors="surrogatepass")  # JSON can say what UTF-8 cannot.
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


# ---- reading ------------------------------------------------------------------------------


class SavedFile:
    """A file that `write` wrote, or that says so.

    Args:
        file: Open for reading.
        where: What it is called, for messages.

    Attributes:
        description: What `write` was given, parsed.

    Raises:
        ConfigError: It is truncated, or of another kind or version, or its description has another
            checksum than when it was written.
    """

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
        """How long a tensor of one dimension is said to be."""
        claims = Claims(self._entries.get(name), self._where)
        return sum(claims.integers("shape", 0, 1 << 31, at_most=1))

    def check(self, tensors: Sequence[StoredTensor]) -> None:
        """Raise `ConfigError` unless the file consists of these, as `write` puts them.

        And unless each has a checksum, with which `read` will compare it.
        """
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
        self._entries = wanted  # As we write numbers: 1.0 and true are equal to 1, and no offsets.
        for tensor in tensors:
            self._digests.text(tensor.name)

    def read(self, name: str, buffer: memoryview) -> Iterator[int]:
        """Bring a tensor into `buffer`, a part at a time; yields how many bytes of it are used.

        For those that `check` has found to be there. Nothing of it is to be believed before the
        iterator has ended.

        Raises:
            ConfigError: It has another checksum than when it was written; or the file has become
                shorter meanwhile.
        """
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        start, end = self._entries[name]["data_offsets"]
        for at in range(start, end, max(1, len(buffer))):
            part = buffer[: end - at]
            self._read(part, self._data_start + at)
            interruptible(digest.update, part)
            yield len(part)
        self._check_digest(name, digest.hexdigest())

    # ---- what both need -------------------------------------------------------------------

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
