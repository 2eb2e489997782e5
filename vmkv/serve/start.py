"""The start of a server before torch is imported: its socket, SIGTERM, and the engine's process.

Importing torch and transformers takes seconds, in the server's process and in the engine's. So the
engine's process is started first, with everything that it needs to make the engine. It does not
wait for the server's imports and checks, and is ended if one of these fails.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import pickle
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from .. import compile_cache
from ..errors import ConfigError, one_line
from .children import be_child, end_child, start_child

#: 24 days: the system counts milliseconds in an int32.
_UNREAD_TIMEOUT_S_MAX = 2_147_483


def open_socket(host: str, port: int, *, unread_timeout_s: float) -> socket.socket:
    """Bind the server's address; called before the model is loaded, so that errors come early.

    Port 0 is any free one. The system drops connections that leave data unacknowledged for
    `unread_timeout_s`, so that clients that never read do not hold sockets. Raises `ConfigError` if
    the address is not available.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # Not a name, or too long for DNS.
        raise ConfigError(f"cannot listen on {host}: {one_line(error)}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by connections. Linux only, as are the backends.
        unread_timeout_ms = int(min(unread_timeout_s, _UNREAD_TIMEOUT_S_MAX) * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_timeout_ms)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; is another server running? "
            "Choose another --port, or 0 for any free one"
        ) from error
    return listener


class _Terminated(BaseException):
    """SIGTERM was received."""


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Turn SIGTERM into an exception while the server starts, so that child processes are ended.

    Without it, an engine's process would keep loading a model for some seconds; and PID 1 of a
    container would ignore the signal.
    """

    def end(sig: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
        raise SystemExit(128 + signal.SIGTERM) from None  # PID 1 of a container.
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def holding_signals() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the end: modules being imported may lose an exception."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- the engine's process ------------------------------------------------------------------------


class StartedProcess(NamedTuple):
    """A process that makes an engine, and runs it."""

    process: Any
    connection: socket.socket

    def close(self) -> None:
        """End the process. Idempotent."""
        self.connection.close()
        end_child(self.process)


def start_process(make: Any) -> StartedProcess:
    """Start the process of an engine; `make` is pickled, see `EngineProcess`. Needs no torch."""
    # Pickled here, since what reads it may import torch, which the child does once it is ready.
    pickled = pickle.dumps(make)
    ours, theirs = socket.socketpair()
    with theirs:
        return StartedProcess(start_child(_run, (theirs, pickled), "vmkv-engine"), ours)


def _run(connection: socket.socket, pickled: bytes) -> None:
    be_child(connection)
    compile_cache.choose_compiler_folder()
    compile_cache.choose_bytecode_folder()
    with without_collections():
        run_engine = importlib.import_module(".process.host", __package__).run_engine
        importlib.import_module(".engine", __package__)
        if Path("/dev/nvidiactl").exists():  # Layers are compiled on CUDA only.
            importlib.import_module("torch._inductor.compile_fx")
    run_engine(pickle.loads(pickled), connection)


@contextlib.contextmanager
def without_collections(*, freezes: bool = True) -> Iterator[None]:
    """Context without garbage collection, which takes a fifth of the time of imports.

    With `freezes`, objects that live at its end are excluded from later collections.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        if freezes:
            gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
