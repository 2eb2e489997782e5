"""A file that is there whole or not at all: it takes its name when it is complete.

Until then it has none (`O_TMPFILE`), so whoever dies on the way leaves nothing behind. But a name
in use can only be taken over by a file with a name of its own, and some file systems have no
nameless files. A temporary name is therefore locked as long as its writer lives, and the next
writer in the folder that needs one removes those that nobody holds.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..errors import ConfigError

# Short, whatever the file is to be called: names end at 255 bytes.
_PREFIX, _SUFFIX = ".vmkv-", ".tmp"


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which takes the name when the block ends well, and else is gone.

    It is this user's alone. What had the name before stays what it is for those who have it open.

    Raises:
        ConfigError: The name is of something other than a file. Nothing has changed.
        OSError: It cannot be written; what had the name before still has it.
    """
    _check_can_be_replaced(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd, temporary = _create(folder)
        try:
            with os.fdopen(fd, "wb") as file:
                yield file
                file.flush()
                os.fsync(fd)
                if temporary is None and not _is_linked(fd, folder, path.name):
                    _remove_abandoned(folder)
                    temporary = _link_temporarily(fd, folder)
                if temporary is not None:
                    os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            if temporary is not None:
                os.unlink(temporary, dir_fd=folder)
            raise
        os.fsync(folder)  # The name, too, outlives a crash.
    finally:
        os.close(folder)


def _check_can_be_replaced(path: Path) -> None:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # It is not there, or whoever writes it will hear why not.
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path} is no regular file, and is not replaced by one; choose another")


def _create(folder: int) -> tuple[int, str | None]:
    """A new file, locked, and its temporary name if the file system insists on one."""
    try:
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        # What kernels say that have it not at all, or not for this file system.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        _remove_abandoned(folder)
        return _create_with_name(folder)
    _lock(fd)
    return fd, None


def _create_with_name(folder: int) -> tuple[int, str]:
    while True:
        name = _temporary_name()
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=folder)
        _lock(fd)
        if os.fstat(fd).st_nlink:
            return fd, name
        os.close(fd)  # Another writer found it before it was locked, and took it for abandoned.


def _lock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError:
        pass  # Where nothing can be locked, nobody takes a file for abandoned either.


def _is_linked(fd: int, folder: int, name: str) -> bool:
    """Give a nameless file its name, unless that is in use."""
    try:
        _link(fd, folder, name)
    except FileExistsError:
        return False
    return True


def _link_temporarily(fd: int, folder: int) -> str:
    name = _temporary_name()
    _link(fd, folder, name)
    return name


def _link(fd: int, folder: int, name: str) -> None:
    os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=folder, follow_symlinks=True)


def _temporary_name() -> str:
    return f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"


def _remove_abandoned(folder: int) -> None:
    """Remove the files of writers that died between two steps."""
    for name in os.listdir(folder):
        if name.startswith(_PREFIX) and name.endswith(_SUFFIX):
            _remove_if_abandoned(folder, name)


def _remove_if_abandoned(folder: int, name: str) -> None:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=folder)
    except OSError:
        return  # It has its final name by now, or is another user's.
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=folder)
    except OSError:
        pass  # Its writer lives, or another one removed it.
    finally:
        os.close(fd)
