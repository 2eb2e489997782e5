"""API keys: reading, checking, and the tenant of a key.

Keys are compared as UTF-8 bytes, because headers are decoded as Latin-1.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigError


def read_api_keys(file: Path | None, variable: str | None) -> list[str]:
    """Collect keys from a file, one per line, and from an environment variable's value.

    Skips empty lines and lines that begin with `#`. Raises `ConfigError` if the file cannot be
    read, or holds no key, which would admit everybody.
    """
    keys = [variable.strip()] if variable and variable.strip() else []
    if file is None:
        return keys
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {file}: {error}") from error
    stripped = [line.strip() for line in lines]
    from_file = [line for line in stripped if line and not line.startswith("#")]
    if not from_file:
        raise ConfigError(f"--api-key-file {file} holds no key; write one per line")
    return keys + from_file


class ApiKeys:
    """The keys that a server accepts; each is a tenant unless prefixes are shared."""

    def __init__(self, keys: Sequence[str], *, share_prefixes: bool = False):
        self._share_prefixes = share_prefixes
        self._digests = [
            # Environment bytes that are not UTF-8 are surrogate escapes.
            _digest(key.encode(errors="surrogateescape"))
            for key in keys
        ]

    def digest_of(self, authorization: bytes) -> bytes | None:
        """Return the digest of a header's key; None for a wrong key, empty with a single tenant."""
        if not self._digests:
            return b""
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        # Compare with every key in constant time, against timing attacks.
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            return None
        return b"" if self._share_prefixes else given


def tenant_of(key_digest: bytes, cache_salt: str | None) -> str | None:
    """Return the tenant of a key and salt, without revealing the key; None if both are missing."""
    if not key_digest and cache_salt is None:
        return None
    salt = (cache_salt or "").encode(errors="surrogatepass")
    return hashlib.blake2b(salt, key=key_digest, digest_size=16).hexdigest()


def _digest(key: bytes) -> bytes:
    # Digests have equal length, so comparing does not reveal a key's length.
    return hashlib.sha256(key).digest()
