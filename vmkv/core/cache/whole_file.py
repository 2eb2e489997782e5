"""A file that is written completely or not at all: it takes its name when it is complete.

Until then it has a temporary name. The next writer in the folder removes temporary files that have
not changed for an hour, which writers that were killed left behind.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ...errors import ConfigError

# Independent of the final name, since names end at 255 bytes.
_PREFIX, _SUFFIX = ".vmkv-", ".tmp"
_ABANDONED_S = 3600


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that takes its name when the block ends well, else is removed.

    Its mode is 0600. Readers that have the replaced file open keep its contents. Raises
    `ConfigError` for a name that is not a regular file's, `OSError` where writing fails; the old
    file stays then.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no regular file, and is not replaced by one; choose another")
    for other in path.parent.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):  # It may have its name by now.
            if other.stat().st_mtime < time.time() - _ABANDONED_S:
                other.unlink()
    fd, temporary = tempfile.mkstemp(_SUFFIX, _PREFIX, path.parent)
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
