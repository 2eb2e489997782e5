"""Unix sockets between processes of one user, whom the kernel identifies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from ...errors import ConfigError

_CREDENTIALS = struct.Struct("3i")
_QUEUE = 64
#: Device and inode of a file that is not there.
_NO_FILE = (0, 0)


class Listener(socket.socket):
    """A listening socket at `path`, of mode 0600; an abandoned socket there is replaced.

    `close` removes its file, unless another file has replaced it.

    Raises `ConfigError` if the path is taken or no path of a socket; `OSError` if it cannot be.
    """

    def __init__(self, path: str, kind: int = socket.SOCK_STREAM):
        super().__init__(socket.AF_UNIX, kind)
        self._path, self._file = path, _NO_FILE
        try:
            with _locked(os.path.dirname(path) or "."):
                if _is_abandoned(path, kind):
                    os.unlink(path)
                self.bind(path)
                self._file = _file_at(path)
                os.chmod(path, 0o600)  # Before `listen`, so that no connection precedes the mode.
                self.listen(_QUEUE)
        except OSError as error:
            self.close()
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"{path} exists already; choose another path") from error
            if error.errno is None:  # Python's own check, before the kernel's.
                raise ConfigError(f"socket_path {path!r} cannot be used: {error}") from error
            raise

    def close(self) -> None:
        """Stop listening, and remove the file. Idempotent."""
        if self._file != _NO_FILE and _file_at(self._path) == self._file:
            os.unlink(self._path)
        self._file = _NO_FILE
        super().close()


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Context of one process at a time: another would remove a socket that is bound meanwhile."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _file_at(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return _NO_FILE
    return found.st_dev, found.st_ino


def _is_abandoned(path: str, kind: int) -> bool:
    """Whether `path` is a socket that nobody listens on."""
    if not Path(path).is_socket():
        return False
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.settimeout(1)
        return probe.connect_ex(path) == errno.ECONNREFUSED


def peer_of(connection: socket.socket) -> tuple[int, str]:
    """Return the process at the other end, and its name for messages.

    Raises `ConfigError` if it is of another user.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    name = f"process {pid} of user {uid}"
    if uid != os.geteuid():
        raise ConfigError(
            f"{name} is not allowed: this process is of user {os.geteuid()}, and memory is shared "
            "between processes of one user"
        )
    return pid, name


def process_fields(pid: int) -> list[bytes]:
    """Return the state and parent of a process, and what `/proc` tells after; none if it ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    return stat.rpartition(b")")[2].split()


def server_of(path: str, connection: socket.socket) -> tuple[str, bool]:
    """Describe for messages who listens at `path`; and return whether that process is stopped."""
    try:
        pid, _ = peer_of(connection)
    except (ConfigError, OSError):  # Another rank's, or closed.
        return path, False
    is_stopped = process_fields(pid)[:1] in ([b"T"], [b"t"])
    hint = f", which is stopped: `kill -CONT {pid}` resumes it" if is_stopped else ""
    return f"{path} (process {pid}{hint})", is_stopped
