"""`vmkv plan`: capacity from a model's configuration, with paging, sharing and swapping."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import ConfigError
from ..units import DTYPES, KV_DTYPES, GiB, MiB, format_bytes
from . import arguments as types

if TYPE_CHECKING:
    from .capacity import KindBytes, ModelShape

#: Bytes per second at which kernels read host memory on an H200 (PCIe 5); older links are slower.
_SWAP_BYTES_PER_S = 55e9


def add_parser(commands: types.Commands) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="how many users fit, and what paging, sharing and swapping change",
        description="Capacity from a model's configuration alone: no weights, no GPU.",
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("model", metavar="MODEL", type=types.name, help="a folder, a config.json, or a Hub name")
    add("--users", type=types.positive_int, default=1, help="sequences at once")
    add("--context", type=types.positive_int, required=True, help="tokens of each, e.g. 8192 or 8k")
    text = "tokens that a cache without paging must leave room for (default: the model's)"
    add("--longest", type=types.positive_int, help=text)
    add("--device-memory", type=types.positive_gib, metavar="GiB", help="memory of one GPU")
    text = "(default: counted from the configuration)"
    add("--weights", type=types.gib, metavar="GiB", help=text)
    text = "memory for activations, CUDA graphs and the context (default: 4)"
    add("--reserve", type=types.gib, metavar="GiB", default=4 * GiB, help=text)
    flags, text = ("--tensor-parallel", "--tensor-parallel-size"), "GPUs that share the model"
    add(*flags, type=types.positive_int, default=1, help=text)
    text = "tokens common to all users"
    add("--share-prefix", type=types.count, metavar="TOKENS", default=0, help=text)
    add("--swap", type=types.gib, metavar="GiB", default=0, help="host memory for idle sequences")
    add("--dtype", choices=DTYPES, help="dtype of keys and values (default: the configuration's)")
    text = "fp8: keys and values in eight bits (default: auto, as --dtype says)"
    add("--kv-dtype", "--kv-cache-dtype", choices=KV_DTYPES, default="auto", help=text)
    types.add_source(add)
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Plan and report; status 1 if the users do not fit the given memory."""
    from .capacity import fit, kind_bytes, model_shape, need_bytes, sequence_bytes
    from .models import be_quiet, load_config

    be_quiet(with_progress=False)
    num_tokens, shared_tokens = arguments.context, arguments.share_prefix
    if shared_tokens > num_tokens:
        raise ConfigError(
            f"--share-prefix {shared_tokens} is longer than --context {num_tokens}; a prefix is "
            "part of its sequence"
        )
    config = load_config(arguments.model, **types.source_of(arguments))
    num_ranks, dtypes = arguments.tensor_parallel, ("dtype", "kv_dtype")
    its = {name: getattr(arguments, name) for name in dtypes}
    shape = model_shape(config, **its, num_ranks=num_ranks)
    longest = max(arguments.longest or shape.max_context_tokens or num_tokens, num_tokens)
    tokens = {"shared_tokens": shared_tokens, "longest_tokens": longest}
    parts = [kind_bytes(kind, num_tokens, **tokens) for kind in shape.kinds]
    sequence = sequence_bytes(parts, state_bytes=shape.state_bytes)
    budget_bytes = _budget_bytes(arguments, shape)
    # The ranks share the host's memory.
    swap_bytes = arguments.swap // num_ranks
    fits = None if budget_bytes is None else fit(sequence, budget_bytes, swap_bytes)
    is_enough = fits is None or fits["vmkv_swapped"] >= arguments.users
    plan = {  # The output of `--json`; per rank with tensor parallelism.
        "model": shape,
        "tensor_parallel": num_ranks,
        "context_tokens": num_tokens,
        "users": arguments.users,
        "longest_tokens": longest,
        "kinds": parts,
        "sequence": sequence,
        "needed_bytes": need_bytes(sequence, arguments.users),
        "budget_bytes": budget_bytes,
        "swap_bytes": swap_bytes,
        "fits": fits,
        "is_enough": is_enough,
    }
    text = _text(plan, arguments)
    out.write(f"{json.dumps(plan, indent=2, default=asdict) if arguments.json else text}\n")
    return 0 if is_enough else 1


def _budget_bytes(arguments: argparse.Namespace, shape: ModelShape) -> int | None:
    if arguments.device_memory is None:
        return None
    weights_bytes = shape.weights_bytes if arguments.weights is None else arguments.weights
    if weights_bytes is None:
        raise ConfigError(
            "the configuration does not tell the size of this model's weights; pass --weights GiB"
        )
    budget_bytes: int = arguments.device_memory - weights_bytes - arguments.reserve
    if budget_bytes <= 0:
        raise ConfigError(
            f"weights of {format_bytes(weights_bytes)} and a reserve of "
            f"{format_bytes(arguments.reserve)} leave nothing of "
            f"{format_bytes(arguments.device_memory)} for keys and values; use a larger "
            "device, or several with tensor parallelism (then pass --weights for one of them)"
        )
    return budget_bytes


# ---- as text ----------------------------------------------------------------------------------


def _text(plan: dict[str, Any], arguments: argparse.Namespace) -> str:
    shape, num_users, fits = plan["model"], plan["users"], plan["fits"]
    users, s = ("1 user", "s") if num_users == 1 else (f"{num_users:,} users", "")
    once = ", their common prefix once" if plan["sequence"]["shared_bytes"] else ""
    title = f"{shape.name}, {shape.dtype} keys and values, sequences of"
    blocks = [
        f"{title} {plan['context_tokens']:,} tokens",
        _layers(plan["kinds"]),
        "\n".join(_notes(shape)),
        _one_sequence(plan, arguments),
        f"{users} need{s} {format_bytes(plan['needed_bytes'])}{once}.",
    ]
    if fits is not None:
        most = fits["vmkv_swapped"]
        verdict = (
            f"{users} fit{s}, with room for {most - num_users:,} more."
            if plan["is_enough"]
            else f"{users} do not fit, {most:,} do. A shorter --context, a common prefix "
            "(--share-prefix), host memory (--swap) or more devices would help."
        )
        blocks.append(
            f"{format_bytes(arguments.device_memory)} less weights and reserve leave "
            f"{format_bytes(plan['budget_bytes'])} for keys and values: {verdict}"
        )
    if plan["tensor_parallel"] > 1:
        text = f"All of that is on each of {plan['tensor_parallel']} GPUs"
        if shape.weights_bytes is not None:
            text += f", and {format_bytes(shape.weights_bytes)} of weights"
        blocks.append(f"{text}.")
    return "\n\n".join(block for block in blocks if block)


def _notes(shape: ModelShape) -> list[str]:
    notes = []
    if not all(kind.is_paged for kind in shape.kinds):
        notes.append("* in tensors of transformers' own, which vmkv neither pages nor shares.")
    if shape.idle_layers:
        notes.append(f"{shape.idle_layers} layers keep no keys and values.")
    if shape.state_bytes:
        notes.append(f"States of fixed size take {format_bytes(shape.state_bytes)} a sequence.")
    return notes


def _layers(parts: Sequence[KindBytes]) -> str:
    rows = [["layers", "number", "kv heads", "a token", "tokens a page", "tokens kept"]]
    rows[0] += ["used", "mapped", "waste"]
    for part in parts:
        kind, shape, used_bytes = part.kind, part.kind.shape, part.used_bytes
        name = "full" if kind.window_tokens is None else f"window {kind.window_tokens}"
        width = f"{shape.k_dim}" + (f" / {shape.v_dim}" if shape.v_dim != shape.k_dim else "")
        rows.append(
            [
                name if kind.is_paged else f"{name} *",
                f"{kind.num_layers}",
                f"{shape.num_k_heads} × {width}",
                format_bytes(part.token_bytes),
                f"{2 * MiB / part.token_bytes:.4g}" if kind.is_paged else "-",
                f"{part.kept_tokens:,}",
                format_bytes(used_bytes),
                format_bytes(part.vmkv_bytes),
                f"{(part.vmkv_bytes - used_bytes) / used_bytes:,.1%}" if used_bytes else "-",
            ]
        )
    return _table(rows)


def _one_sequence(plan: dict[str, Any], arguments: argparse.Namespace) -> str:
    sequence, fits = plan["sequence"], plan["fits"]
    own_bytes = sequence["vmkv_bytes"] - sequence["shared_bytes"]
    # The name in `fit`, and a label.
    ways = {
        "longest": f"one tensor, room for {plan['longest_tokens']:,} tokens",
        "block_table": "blocks of 16 tokens",
        "vmkv": "vmkv: pages of 2 MiB for all layers",
    }
    if arguments.share_prefix:
        ways["vmkv_shared"] = f"vmkv, a prefix of {arguments.share_prefix:,} tokens shared"
    if arguments.swap:
        ways["vmkv_swapped"] = f"vmkv, {format_bytes(arguments.swap)} of host memory"
    rows = [["memory of a sequence", "bytes", "of used", *(["fit"] if fits else [])]]
    for way, label in ways.items():
        num_bytes = sequence.get(f"{way}_bytes", own_bytes)
        row = [label, format_bytes(num_bytes), f"{num_bytes / sequence['used_bytes']:.3f} ×"]
        rows.append(row + ([f"{fits[way]:,}"] if fits else []))
    text = _table(rows)
    if arguments.swap:
        text += (
            f"\nA sequence comes back from host memory in about "
            f"{own_bytes / _SWAP_BYTES_PER_S * 1e3:.3g} ms, at 55 GB/s."
        )
    return text


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([f"{first:<{widths[0]}}", *map(str.rjust, rest, widths[1:])])
        for first, *rest in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
