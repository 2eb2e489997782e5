"""Run each script in its own process, without the seconds that importing torch takes.

One process imports torch and transformers, but not vmkv, and forks for each script. To a script
everything is as in a fresh interpreter, its end included: unclosed objects warn, and an access to
unmapped memory kills it.

`warm_children` does the same for processes that `multiprocessing` starts.

On a machine with a GPU a script runs in a new interpreter: imports may initialize CUDA, which does
not work in a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

_TIMEOUT_S = 240
_HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))


@contextlib.contextmanager
def warm_children() -> Iterator[None]:
    """Fork the processes that `multiprocessing` should spawn from a process with all imports."""
    context = multiprocessing.get_context("spawn" if _HAS_GPU else "forkserver")
    preloaded = ["torch", "transformers.modeling_utils", "vmkv.serve.parallel.engine"]
    multiprocessing.forkserver.set_forkserver_preload([*preloaded, "vmkv.serve.process"])
    with mock.patch.object(multiprocessing, "get_context", return_value=context):
        yield


def start(*arguments: str, env: dict[str, str]) -> Child:
    """Start `python ARGUMENTS`, with pipes to it and from it."""
    if not _HAS_GPU:
        return Started(*arguments, env=env)
    pipe = subprocess.PIPE
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env)


class Started:
    """A running script with pipes, with the part of the interface of `subprocess.Popen` in use.

    Attributes:
        pid: Its process id.
        stdin, stdout, stderr: Its pipes.
        returncode: Its exit status after `wait`, or None.
    """

    def __init__(self, *arguments: str, env: dict[str, str]):
        (theirs_in, mine_in), (mine_out, theirs_out), (mine_err, theirs_err) = (
            os.pipe() for _ in range(3)
        )
        self.stdin = os.fdopen(mine_in, "w")
        self.stdout, self.stderr = os.fdopen(mine_out), os.fdopen(mine_err)
        self.returncode: int | None = None
        theirs = (theirs_in, theirs_out, theirs_err)
        try:
            self._channel = _order(arguments, Path.cwd(), env, theirs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self.pid = int(self._channel.recv(64))

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """Wait until it has ended and return its status."""
        if self.returncode is None:
            self._channel.settimeout(timeout)
            self.returncode = int(self._channel.recv(64))
            self._channel.close()
        return self.returncode

    def communicate(self, text: str = "", *, timeout: float) -> tuple[str, str]:
        """Write `text`, close its input and return its output, which must be short. Idempotent."""
        if self.stdin.closed:
            return "", ""
        with contextlib.suppress(BrokenPipeError), self.stdin:
            self.stdin.write(text)
        self.wait(timeout)
        with self.stdout, self.stderr:
            return self.stdout.read(), self.stderr.read()


Child = Started | subprocess.Popen[str]


def run(
    *arguments: str,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    resource_warnings: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS`: a script, `-c` and a program, or `-m` and a module.

    Args:
        arguments: As on the command line.
        cwd: Working directory.
        env: The environment; imports use its `PYTHONPATH`.
        resource_warnings: Show warnings about unclosed objects.
    """
    environment = dict(os.environ if env is None else env)
    if _HAS_GPU:
        options = ["-W", "always::ResourceWarning"] if resource_warnings else []
        command = [sys.executable, *options, *arguments]
        return subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
    with (
        open(os.devnull) as nothing,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        theirs = [each.fileno() for each in (nothing, out, err)]
        with _order(
            arguments, cwd or Path.cwd(), environment, theirs, resource_warnings=resource_warnings
        ) as channel:
            channel.recv(64)
            status = int(channel.recv(64))
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, status, out.read(), err.read())


def _order(
    arguments: Sequence[str],
    cwd: Path,
    env: dict[str, str],
    descriptors: Sequence[int],
    *,
    resource_warnings: bool = False,
) -> socket.socket:
    """Start a script; return a socket that sends its process id and, at its end, its status."""
    order = {
        "arguments": arguments,
        "cwd": str(cwd),
        "env": env,
        "resource_warnings": resource_warnings,
    }
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.settimeout(_TIMEOUT_S)
    with theirs:
        sent = [json.dumps(order).encode()]
        socket.send_fds(_server(), sent, [*descriptors, theirs.fileno()])
    return mine


@functools.cache
def _server() -> socket.socket:
    """Start the forking process; return the socket for orders, whose close ends the process."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    # Variables of all scripts here, set now because libraries read them at import.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    command = [sys.executable, __file__, str(theirs.fileno())]
    child = subprocess.Popen(
        command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
    )
    theirs.close()

    def end() -> None:
        mine.close()
        child.wait(60)

    atexit.register(end)
    return mine


# ---- the forking process ------------------------------------------------------------------


def _serve(orders: socket.socket) -> dict[str, Any] | None:
    """Fork for each order. Returns the order in a child, and None when orders end."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, 1 << 20, 4)
        if not message:
            return None
        keeper = os.fork()
        if not keeper:
            orders.close()
            return _keep(json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        while _reaped():
            pass


def _reaped() -> bool:
    """Reap a keeper that has ended; return whether there was one."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _keep(order: dict[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
    """Fork again: the child returns the order, and this process reports the child's status."""
    *pipes, channel = descriptors
    pid = os.fork()
    if not pid:
        os.close(channel)
        for number, descriptor in enumerate(pipes):
            os.dup2(descriptor, number)
            os.close(descriptor)
        # The old objects have cached the kind of the old files.
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
        return order
    for descriptor in pipes:
        os.close(descriptor)
    with socket.socket(fileno=channel) as said, contextlib.suppress(BrokenPipeError):
        said.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        said.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _fork_children_from_here() -> None:
    """Fork the processes that `multiprocessing` should spawn from this process as it is now."""
    server = multiprocessing.forkserver._forkserver
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(b"")  # The kernel chooses an abstract name.
    listener.listen()
    until_closed, server._forkserver_alive_fd = os.pipe()
    server._forkserver_address = listener.getsockname()
    server._forkserver_pid = os.fork()
    if not server._forkserver_pid:
        try:
            os.close(server._forkserver_alive_fd)
            multiprocessing.forkserver.main(listener.detach(), until_closed, [])
        finally:
            os._exit(0)
    listener.close()
    os.close(until_closed)
    context = multiprocessing.get_context("forkserver")
    multiprocessing.get_context = lambda _: context  # type: ignore[assignment]


def _obey(order: dict[str, Any]) -> None:
    """Set up the environment of the order and run its script."""
    signal.alarm(_TIMEOUT_S)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    if "-m" in order["arguments"]:
        _fork_children_from_here()
    if order["resource_warnings"]:
        warnings.simplefilter("always", ResourceWarning)
    first, *rest = order["arguments"]
    is_option = first in ("-c", "-m")
    sys.argv = [first, *rest[1:]] if is_option else [first, *rest]
    beside = "" if is_option else str(Path(first).resolve().parent)
    # In place of this file's folder.
    sys.path[:1] = [beside, *filter(None, order["env"].get("PYTHONPATH", "").split(os.pathsep))]
    if first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first != "-c":
        main.__file__ = first
    text = rest[0] if is_option else Path(first).read_text()
    exec(compile(text, "<string>" if is_option else first, "exec"), main.__dict__)


def _status_of(order: dict[str, Any]) -> int:
    """Run the order and return the exit status of an interpreter."""
    try:
        _obey(order)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return int(end.code or 0)
    except Exception:  # noqa: BLE001  # A script may raise anything.
        traceback.print_exc()
        return 1
    return 0


def _end(status: int) -> NoReturn:
    """End like an interpreter, but without clearing libraries' modules, which takes a second."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    main = vars(sys.modules["__main__"])
    if main is not globals():
        main.clear()
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _main() -> None:
    import torch  # noqa: F401
    import transformers.modeling_utils  # noqa: F401

    gc.collect()
    gc.freeze()  # Keeps existing objects out of the children's collections.
    order = _serve(socket.socket(fileno=int(sys.argv[1])))
    if order is not None:
        _end(_status_of(order))


if __name__ == "__main__":
    _main()
