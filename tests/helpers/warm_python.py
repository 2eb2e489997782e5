"""Scripts in a process of their own each, without the seconds that importing torch takes.

One process imports torch and transformers, nothing of vmkv, and forks for each script. To a script
all is as in a fresh interpreter, its end included: what it leaves unclosed warns, what is not
mapped ends it.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
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
from pathlib import Path
from typing import Any, NoReturn

_TIMEOUT_S = 240


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
    order = {
        "arguments": arguments,
        "cwd": str(cwd or Path.cwd()),
        "env": dict(os.environ if env is None else env),
        "resource_warnings": resource_warnings,
    }
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        server = _server()
        socket.send_fds(server, [json.dumps(order).encode()], [out.fileno(), err.fileno()])
        status = server.recv(64)
        assert status, "the process that forks has ended"
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, int(status), out.read(), err.read())


@functools.cache
def _server() -> socket.socket:
    """The end that asks; what is at the other ends when this one is closed."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    mine.settimeout(_TIMEOUT_S)
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


def _serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork for each order. In a child: what it is to do; in the end, nothing."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 2)
        if not message:
            return None
        pid = os.fork()
        if not pid:
            channel.close()
            for number, descriptor in enumerate(descriptors, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            order: dict[str, Any] = json.loads(message)
            return order
        for descriptor in descriptors:
            os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        channel.send(str(os.waitstatus_to_exitcode(status)).encode())


def _obey(order: dict[str, Any]) -> None:
    """Become what was ordered, and do it."""
    signal.alarm(_TIMEOUT_S)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
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
