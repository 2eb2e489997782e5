"""Unix sockets between processes of one user, whom the kernel identifies."""

from __future__ import annotations

import errno
import os
import socket
import struct
from pathlib import Path

from ...errors import ConfigError

_CREDENTIALS = struct.Struct("3i")
_QUEUE = 64


def listen(path: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Listen on a socket at `path`, of mode 0600; an abandoned socket there is replaced.

    Raises `ConfigError` if the path is taken or no path of a socket; `OSError` if it cannot be.
    """
    if _is_abandoned(path, kind):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)  # Before `listen`, so that no connection precedes the mode.
        listener.listen(_QUEUE)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{path} exists already; choose another path") from error
        if error.errno is None:  # Python's own check, before the kernel's.
            raise ConfigError(f"socket_path {path!r} cannot be used: {error}") from error
        raise
    return listener


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
