"""From arguments to a command, and from errors to exit statuses."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import TextIO

from ..errors import CapacityError, InternalError, VMKVError
from . import bench, doctor, plan, serve, top

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
    for module in (doctor, plan, bench, serve, top):
        module.add_parser(commands)
    return parser


def main(
    arguments: Sequence[str] | None = None, out: TextIO | None = None, err: TextIO | None = None
) -> int:
    """Run one command; returns the exit status.

    Args:
        arguments: Without the program's name; by default the process's own.
        out: Where results go; by default standard output.
        err: Where complaints go; by default standard error.
    """
    out, err = out or sys.stdout, err or sys.stderr
    parsed = make_parser().parse_args(arguments)
    try:
        status: int = parsed.run(parsed, out)
        out.flush()
    except BrokenPipeError:
        # `vmkv plan ... | head`: nobody reads on. Nor may the interpreter try again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return INTERRUPTED
    except InternalError:
        raise  # A bug of ours, with its traceback.
    except VMKVError as error:
        err.write(f"vmkv: {error}\n")
        return FAILED if isinstance(error, CapacityError) else USAGE
    return status
