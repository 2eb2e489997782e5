"""`vmkv bench`: the checkout's benches by name, and a quick one against a running server."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TextIO

from ..errors import ConfigError
from .arguments import Commands, address, integer, seconds
from .client import Client
from .load import TIMEOUT_S, Load, apply, model_of, summary

#: Where a checkout has them; an installed wheel has none.
_FOLDER = Path(__file__).resolve().parents[2] / "bench"
_SERVING = "serving"


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="run a bench of the checkout, or a quick load against a server",
        description="`vmkv bench serving --url URL` sends a load to a running server. Other names "
        "are the scripts of the checkout's bench folder; what follows NAME goes to the script.",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="(default: list the names)")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="for the bench")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Run the bench; its exit status is the command's."""
    if arguments.name is None:
        out.write("\n".join([f"{_SERVING}  (built in: a load against a server)", *_names()]) + "\n")
        return 0
    if arguments.name == _SERVING:
        return run_serving(arguments.rest, out)
    script = _FOLDER / f"bench_{arguments.name}.py"
    if not _FOLDER.is_dir():
        raise ConfigError(
            f"bench {arguments.name!r} is a script of vmkv's checkout, and this vmkv was installed "
            f"without one: clone the repository, or use `vmkv bench {_SERVING}`"
        )
    if arguments.name not in _names():
        raise ConfigError(
            f"no bench is called {arguments.name!r}; there are {', '.join([_SERVING, *_names()])}"
        )
    out.flush()
    return subprocess.run([sys.executable, str(script), *arguments.rest], check=False).returncode


def _names() -> list[str]:
    return sorted(path.stem.removeprefix("bench_") for path in _FOLDER.glob("bench_*.py"))


def run_serving(rest: list[str], out: TextIO) -> int:
    """Send a load to a server and report how it bore it."""
    parser = argparse.ArgumentParser(prog=f"vmkv bench {_SERVING}")
    add = parser.add_argument
    add("--url", type=address, default="http://localhost:8000", help="(default: %(default)s)")
    add("--requests", type=integer(1, 10**6), default=64, help="(default: 64)")
    add("--clients", type=integer(1, 4096), default=16, help="at once (default: 16)")
    add("--prompt-tokens", type=integer(1, 1 << 20), default=256, help="(default: 256)")
    add("--output-tokens", type=integer(1, 1 << 20), default=64, help="(default: 64)")
    add("--vocabulary", type=integer(3), default=32000, help="of the model (default: 32000)")
    add("--seed", type=int, default=0, help="(default: 0)")
    add("--timeout", type=seconds, default=TIMEOUT_S, help="of an answer, in s (default: 600)")
    add("--json", action="store_true", help="for programs")
    parsed = parser.parse_args(rest)
    api_key = os.environ.get("VMKV_API_KEY")
    client = Client(parsed.url, timeout_s=parsed.timeout)
    try:
        model = model_of(client, api_key)
    finally:
        client.close()
    load = Load(
        parsed.requests,
        min(parsed.clients, parsed.requests),
        parsed.prompt_tokens,
        parsed.output_tokens,
        parsed.vocabulary,
        parsed.seed,
    )
    timed = apply(load, parsed.url, model, api_key, timeout_s=parsed.timeout)
    record = summary(load, *timed)
    if parsed.json:
        out.write(json.dumps({"url": str(parsed.url), "model": model, **record}, indent=2) + "\n")
        return 0
    out.write(
        f"{model} at {parsed.url}: {record['requests']} requests of {load.prompt_tokens} + "
        f"{load.output_tokens} tokens, {load.num_clients} at once, in {record['seconds']:.2f} s\n"
        f"  requests/s          {record['requests_per_s']:.2f}\n"
        f"  output tokens/s     {record['output_tokens_per_s']:.1f}\n"
        f"  all tokens/s        {record['total_tokens_per_s']:.1f}\n"
    )
    for name, key in (("first token", "first_token_s"), ("per token", "per_token_s")):
        spread = record[key]
        if spread is not None:
            out.write(
                f"  {name:<18}  median {spread['median'] * 1e3:.3g} ms, p99 "
                f"{spread['p99'] * 1e3:.3g} ms, max {spread['max'] * 1e3:.3g} ms\n"
            )
    return 0
