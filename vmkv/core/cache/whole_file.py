"""A file that is written completely or not at all: it takes its name when it is complete.

Until then it has a temporary name and a lock that its writer holds. The next writer in the folder
removes temporary files without a lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
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
    _check_can_be_replaced(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _remove_abandoned(folder)
        fd, temporary = _create(folder)
        try:
            with os.fdopen(fd, "wb") as file:
                yield file
                file.flush()
                os.fsync(fd)
                os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(temporary, dir_fd=folder)
            raise
        with suppress(OSError):  # Not every file system supports it.
            os.fsync(folder)  # So that the name survives a crash.
    finally:
        os.close(folder)


def _check_can_be_replaced(path: Path) -> None:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # It does not exist, or writing it will raise the error.
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path} is no regular file, and is not replaced by one; choose another")


def _create(folder: int) -> tuple[int, str]:
    """Create and lock a new file; returns its descriptor and temporary name."""
    while True:
        name = f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=folder)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError:
            pass  # A file system without locks: abandoned files are not removed either.
        if os.fstat(fd).st_nlink:
            return fd, name
        os.close(fd)  # Another writer removed it as abandoned before it was locked.


def _remove_abandoned(folder: int) -> None:
    """Remove the temporary files of writers that died."""
    for name in os.listdir(folder):
        if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX)):
            continue
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=folder)
        except OSError:
            continue  # It has been renamed, or is another user's.
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=folder)
        except OSError:
            pass  # Its writer is alive, or another writer removed it.
        finally:
            os.close(fd)
