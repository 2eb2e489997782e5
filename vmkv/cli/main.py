"""Entry point of the command: parses arguments, and converts errors to exit statuses."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import TextIO

import vmkv

from ..errors import ConfigError, InternalError, VMKVError, one_line
from . import doctor, plan, pool, serve, top
from .arguments import Parser

#: Exit statuses.
OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of all commands."""
    parser = Parser(
        prog="vmkv",
        description="A KV cache in virtual memory: see what a machine can do, plan, serve, watch.",
    )
    parser.add_argument("--version", action="version", version=f"vmkv {vmkv.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (doctor, plan, pool, serve, top):
        module.add_parser(commands)
    return parser


def main(
    arguments: Sequence[str] | None = None, out: TextIO | None = None, err: TextIO | None = None
) -> int:
    """Run one command, by default that of the process and on its streams; return the exit status.

    A `VMKVError`, an `OSError` or a package that is not installed is an error of users, files,
    servers or machines, and is written to `err` as one line; other exceptions are bugs and
    propagate.
    """
    out = out or sys.stdout or io.StringIO()  # None if the stream was closed.
    err = err or sys.stderr or io.StringIO()
    for stream in (out, err):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # Terminals may not encode all.
    parsed = make_parser().parse_args(arguments)
    try:
        status: int = parsed.run(parsed, out)
        out.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except InternalError:
        raise  # A bug, with its traceback.
    except BrokenPipeError:
        _give_up(out)  # The reader has ended, as in `vmkv plan ... | head`.
        return OK
    except ModuleNotFoundError as error:
        if (error.name or "vmkv").partition(".")[0] == "vmkv":
            raise  # Ours.
        err.write(f"vmkv: the package {error.name} is missing: pip install 'vmkv[serve]'\n")
        return FAILED
    except (VMKVError, OSError, MemoryError) as error:
        err.write(f"vmkv: {one_line(error)}\n")
        _give_up(out)
        return USAGE if isinstance(error, ConfigError) else FAILED
    return status


def _give_up(out: TextIO) -> None:
    """Redirect unwritable output to /dev/null, so that the interpreter's exit does not fail."""
    try:
        out.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, out.fileno())
        os.close(null)
