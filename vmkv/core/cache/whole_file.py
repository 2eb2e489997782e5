"""A file that is written completely or not at all: it takes its name when it is complete.

Until then it has a temporary name and a lock that its writer holds. The next writer in the folder
removes temporary files without a lock, which writers that were killed left behind.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ...errors import ConfigError

# Independent of the final name, since names end at 255 bytes.
_PREFIX, _SUFFIX = ".vmkv-", ".tmp"


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that takes its name when the block ends well, else is removed.

    Its mode is 0600. Readers that have the replaced file open keep its contents. Raises
    `ConfigError` for a name that is not a regular file's, `OSError` where writing fails; the old
    file stays then.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no regular file, and is not replaced by one; choose another")
    _remove_abandoned(path.parent)
    fd, temporary = _create(path.parent)
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


def _create(folder: Path) -> tuple[int, Path]:
    """Create and lock a new file; returns its descriptor and temporary name."""
    while True:
        path = folder / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # Without locks, abandoned files are not removed either.
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd, path
        os.close(fd)  # Another writer removed it as abandoned before it was locked.


def _remove_abandoned(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError), open(path, "r+b") as file:  # It may have its name by now.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Fails while its writer lives.
            path.unlink()
