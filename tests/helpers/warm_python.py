"""Scripts in a process of their own each, without the seconds that importing torch takes.

One process imports torch and transformers, nothing of vmkv, and forks for each script. To a script
all is as in a fresh interpreter, its end included: what it leaves unclosed warns, what is not
mapped ends it.

`warm_children` does the same for processes that `multiprocessing` starts.

Where there is a GPU a script has an interpreter of its own after all: imports may ask CUDA what
there is, and a fork of who has asked cannot use it.
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
    """Fork what `multiprocessing` is told to spawn from a process that has imported everything."""
    context = multiprocessing.get_context("spawn" if _HAS_GPU else "forkserver")
    preloaded = ["torch", "transformers.modeling_utils", "vmkv.serve.parallel.engine"]
    multiprocessing.forkserver.set_forkserver_preload([*preloaded, "vmkv.serve.process"])
    with mock.patch.object(multiprocessing, "get_context", return_value=context):
        yield


def start(*arguments: str, env: dict[str, str]) -> Child:
    """Start what `python ARGUMENTS` does, with pipes to it and from it."""
    if not _HAS_GPU:
        return Started(*arguments, env=env)
    pipe = subprocess.PIPE
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env)


class Started:
    """A script that runs, with pipes to it and from it; of `subprocess.Popen` what tests use.

    Attributes:
        pid: Its process id.
        stdin, stdout, stderr: Its pipes.
        returncode: What it ended with, once somebody has waited for that.
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
        """End it, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """Until it has ended; its status."""
        if self.returncode is None:
            self._channel.settimeout(timeout)
            self.returncode = int(self._channel.recv(64))
            self._channel.close()
        return self.returncode

    def communicate(self, text: str = "", *, timeout: float) -> tuple[str, str]:
        """Tell it the last words, and hear its own, of which there are few. Idempotent."""
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
    """What `python ARGUMENTS` does: a script, `-c` and a program, or `-m` and a module.

    Args:
        arguments: As on the command line.
        cwd: Where.
        env: The environment; `PYTHONPATH` is where it imports from.
        resource_warnings: Say what was not closed.
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
    """Have a script started; what is returned says its process id, and in the end its status."""
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
    """The end that asks; what is at the other ends when this one is closed."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    # As scripts of this project are run: what reads these has read them when a script begins.
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


# ---- the other side -----------------------------------------------------------------------


def _serve(orders: socket.socket) -> dict[str, Any] | None:
    """Fork for each order. In a child: what it is to do; in the end, nothing."""
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
    """Whether a keeper has ended and is forgotten now."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _keep(order: dict[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
    """Fork once more: a child does as ordered, and this process says what becomes of it."""
    *pipes, channel = descriptors
    pid = os.fork()
    if not pid:
        os.close(channel)
        for number, descriptor in enumerate(pipes):
            os.dup2(descriptor, number)
            os.close(descriptor)
        # Those from before know what kind of file was there.
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
    """Fork what `multiprocessing` is told to spawn from this process as it is now."""
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
    """Become what was ordered, and do it."""
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
    """What it comes to, as the interpreter says it."""
    try:
        _obey(order)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return int(end.code or 0)
    except Exception:  # noqa: BLE001  # Whatever a script does.
        traceback.print_exc()
        return 1
    return 0


def _end(status: int) -> NoReturn:
    """As an interpreter ends, but for the modules of others, which it takes a second to clear."""
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
    gc.freeze()  # What is there already is not theirs to collect.
    order = _serve(socket.socket(fileno=int(sys.argv[1])))
    if order is not None:
        _end(_status_of(order))


if __name__ == "__main__":
    _main()
