"""API keys: where they are read, and whether a request brings one of them.

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
    """

    def __init__(self, keys: Sequence[str]):
        self._digests = [
            # The environment's bytes that are no UTF-8 stand in it as half surrogate pairs.
            _digest(key.encode(errors="surrogateescape"))
            for key in keys
        ]

    def accept(self, authorization: bytes) -> bool:
        """Whether an `Authorization` header's value lets its bearer in."""
        if not self._digests:
            return True
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        # Every key is compared, in constant time: how long it takes tells nothing.
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    # Of equal length whatever the key: comparing tells nothing of that either.
    return hashlib.sha256(key).digest()
