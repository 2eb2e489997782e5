"""API keys: where they are read, whether a request brings one of them, and its tenant.

Keys are compared as bytes of UTF-8: a header's text would be Latin-1.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigError


def read_api_keys(file: Path | None, variable: str | None) -> list[str]:
    """Keys from a file, one per line, and from an environment variable's value.

    Lines that are empty or begin with `#`, indented or not, are no keys.

    Raises:
        ConfigError: The file cannot be read, or holds no key: then everybody would be let in.
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
    """The keys that a server knows.

    Args:
        keys: The keys; with none everybody is let in.
        share_prefixes: Whether all keys are one tenant.
    """

    def __init__(self, keys: Sequence[str], *, share_prefixes: bool = False):
        self._share_prefixes = share_prefixes
        self._digests = [
            # The environment's bytes that are no UTF-8 stand in it as half surrogate pairs.
            _digest(key.encode(errors="surrogateescape"))
            for key in keys
        ]

    def digest_of(self, authorization: bytes) -> bytes | None:
        """The digest of the key in an `Authorization` header's value; None for a wrong key.

        Empty where there are no keys, or all of them share their prefixes.
        """
        if not self._digests:
            return b""
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        # Every key is compared, in constant time: how long it takes tells nothing.
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            return None
        return b"" if self._share_prefixes else given


def tenant_of(key_digest: bytes, cache_salt: str | None) -> str | None:
    """The tenant of requests with this key and salt; None for those with neither.

    The engine, its replicas and their logs see this name only, never a key.
    """
    if not key_digest and cache_salt is None:
        return None
    salt = (cache_salt or "").encode(errors="surrogatepass")
    return hashlib.blake2b(salt, key=key_digest, digest_size=16).hexdigest()


def _digest(key: bytes) -> bytes:
    # Of equal length whatever the key: comparing tells nothing of that either.
    return hashlib.sha256(key).digest()
