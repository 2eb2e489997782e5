"""`vmkv pool`: a broker that shares a device's memory between servers and notebooks."""

from __future__ import annotations

import argparse
import signal
from typing import TextIO

from ..core.memory import Broker, default_socket_path
from ..serve.start import SIGNALS, holding_signals
from ..units import format_bytes
from . import arguments as types
from .progress import on_stderr


def add_parser(commands: types.Commands) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "pool",
        help="share a device's memory between processes",
        description="Servers join with --pool, programs with VMKVCache(memory='pool'): memory for "
        "keys and values then goes to those that have work. It ends on SIGTERM; members keep what "
        "they have.",
    )
    text = (
        "memory of all members together; by default 0.9 of what the device has free when they join"
    )
    parser.add_argument("--memory", type=types.positive_gib, metavar="GiB", help=text)
    text = f"socket to listen at (default: {default_socket_path()}, or the variable VMKV_POOL)"
    parser.add_argument("--socket", type=types.name, metavar="PATH", help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Serve members until a signal."""
    path = arguments.socket or default_socket_path()
    log = on_stderr("vmkv.core.memory.broker")
    with holding_signals(), log, Broker(path, arguments.memory) as broker:  # For its thread too.
        what = "the device's memory"
        if broker.budget_bytes is not None:
            what = format_bytes(broker.budget_bytes)
        out.write(f"vmkv pool shares {what} at {broker.socket_path}\n")
        out.flush()
        signal.sigwait(SIGNALS)
    return 0
