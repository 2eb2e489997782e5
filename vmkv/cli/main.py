"""From arguments to a command, and from errors to exit statuses."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import TextIO

from ..errors import ConfigError, InternalError, VMKVError, one_line
from . import doctor, plan, serve, top

#: What `main` returns: done, not done, used wrongly, interrupted.
OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def make_parser() -> argparse.ArgumentParser:
    """The parser of everything."""
    parser = argparse.ArgumentParser(
        prog="vmkv",
        description="A KV cache in virtual memory: see what a machine can do, plan, serve, watch.",
    )
    parser.add_argument("--version", action="version", version=f"vmkv {metadata.version('vmkv')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (doctor, plan, serve, top):
        module.add_parser(commands)
    return parser


def main(
    arguments: Sequence[str] | None = None, out: TextIO | None = None, err: TextIO | None = None
) -> int:
    """Run one command; returns the exit status.

    Args:
        arguments: Without the program's name; by default the process's own.
        out: Where results go; by default standard output.
        err: Where complaints go; by default standard error. Each is one line: what users, files,
            servers and machines can get wrong is a `VMKVError` or an `OSError` by the time it comes
            here, and only those.
    """
    out = out or sys.stdout or io.StringIO()  # Python has none where they were closed.
    err = err or sys.stderr or io.StringIO()
    for stream in (out, err):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # A terminal may know less than we say.
    parsed = make_parser().parse_args(arguments)
    try:
        status: int = parsed.run(parsed, out)
        out.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except InternalError:
        raise  # A bug of ours, with its traceback; as is whatever is not named here.
    except BrokenPipeError:
        _give_up(out)  # `vmkv plan ... | head`: nobody reads on.
        return OK
    except (VMKVError, OSError, MemoryError) as error:
        err.write(f"vmkv: {one_line(error)}\n")
        _give_up(out)
        return USAGE if isinstance(error, ConfigError) else FAILED
    return status


def _give_up(out: TextIO) -> None:
    """Where what was written cannot be, the interpreter must not try again at its end."""
    try:
        out.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, out.fileno())
        os.close(null)
