"""The start of a server before torch is imported: its socket, SIGTERM, and child processes.

Importing torch and transformers takes seconds, in the server's process and in the engine's. So the
engine's process is started first. It does not wait for the server's imports and checks, and is
ended if one of these fails.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from .. import compile_cache
from ..errors import ConfigError, one_line
from ..phases import without_collections

#: 24 days: the system counts milliseconds in an int32.
_UNREAD_TIMEOUT_S_MAX = 2_147_483
#: Time for an orderly end of a process whose parent has ended.
_END_S = 5.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Termination signals, which the parent handles: Ctrl+C reaches the whole process group."""


def open_socket(host: str, port: int, *, unread_timeout_s: float) -> socket.socket:
    """Bind the server's address; port 0 is any free one. Raises `ConfigError` if it cannot.

    The system drops connections that leave data unacknowledged for `unread_timeout_s`.
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
    """Turn SIGTERM into an exception while the server starts, so that child processes are ended."""

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
    """Hold SIGINT and SIGTERM back until the end: modules being imported may lose an exception.

    Threads and processes that are started meanwhile inherit it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- child processes ----------------------------------------------------------------------------


def start_child(
    target: Callable[..., None], arguments: tuple[Any, ...], name: str, *, daemon: bool = False
) -> Any:
    """Start a process, which calls `be_child` first; returns the `multiprocessing.Process`."""
    # Not fork: the child would inherit locks of threads that do not exist in it.
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=target, args=arguments, name=name, daemon=daemon)
    with holding_signals():  # Until the child ignores them.
        process.start()
    return process


def be_child(connection: Any) -> None:
    """Ignore termination signals; end this process some time after the other end has closed.

    `connection` is a socket or a duplex pipe to the parent. The process leads a group of its own.
    """
    os.setpgid(0, 0)
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    poll = select.poll()
    poll.register(connection, 0)  # Reports a hang-up without a mask.

    def end_with_parent() -> None:
        poll.poll()
        time.sleep(_END_S)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def end_child(process: Any, timeout_s: float = 0.0) -> None:
    """Wait for a process to end by itself, then kill it, with children it starts. Idempotent."""
    process.join(timeout_s)
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):  # It leads no group yet.
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def why_ended(process: Any) -> str:
    """Describe the end of a process, and wait for it."""
    process.join()
    code = process.exitcode
    if code < 0:
        return f"it was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"its process has ended with status {code}"


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
