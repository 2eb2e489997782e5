"""Child processes: how they start, end with their parent, and tell why they have ended."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

#: Time for an orderly end of a process whose parent has ended.
_END_S = 5.0
#: Termination signals, which the parent handles: Ctrl+C reaches the whole process group.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def start_child(
    target: Callable[..., None], arguments: tuple[Any, ...], name: str, *, daemon: bool = False
) -> Any:
    """Start a process, which calls `be_child` first; returns the `multiprocessing.Process`."""
    # Not fork: the child would inherit locks of threads that do not exist in it.
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=target, args=arguments, name=name, daemon=daemon)
    # Blocked until the child ignores them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def be_child(connection: Any) -> None:
    """Ignore termination signals; end this process some time after the other end has closed.

    `connection` is a socket or a duplex pipe to the parent. The process leads a group of its own,
    in which its children begin.
    """
    os.setpgid(0, 0)
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    poll = select.poll()
    poll.register(connection, 0)  # Reports a hang-up without a mask.

    def end_with_parent() -> None:
        poll.poll()
        time.sleep(_END_S)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def end_child(process: Any, timeout_s: float = 0.0) -> None:
    """Wait for a process to end by itself, then kill it. Idempotent.

    Children that it is starting are killed with it: they would read a part of what it sends them,
    and print a traceback.
    """
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
