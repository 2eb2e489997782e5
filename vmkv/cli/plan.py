"""`vmkv plan`: capacity from a model's configuration, with paging, sharing and swapping."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TextIO

from ..errors import ConfigError
from ..units import GiB, MiB, format_bytes
from .arguments import DTYPES, KV_DTYPES, Commands, count, gib, name, positive_gib, positive_int

if TYPE_CHECKING:
    from .capacity import Fit, KindBytes, SequenceBytes
    from .models import ModelShape

#: Bytes per second at which kernels read host memory on an H200 (PCIe 5); older links are slower.
_SWAP_BYTES_PER_S = 55e9


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="how many users fit, and what paging, sharing and swapping change",
        description="Capacity from a model's configuration alone: no weights, no GPU.",
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("model", metavar="MODEL", type=name, help="a folder, a config.json, or a Hub name")
    add("--users", type=positive_int, default=1, help="sequences at once")
    add("--context", type=positive_int, required=True, help="tokens of each, e.g. 8192 or 8k")
    add(
        "--longest",
        type=positive_int,
        help="tokens that a cache without paging must leave room for (default: the model's)",
    )
    add("--device-memory", type=positive_gib, metavar="GiB", help="of one GPU")
    add("--weights", type=gib, metavar="GiB", help="(default: counted from the configuration)")
    add(
        "--reserve",
        type=gib,
        metavar="GiB",
        default=4 * GiB,
        help="for activations, CUDA graphs and the context (default: 4)",
    )
    add("--tensor-parallel", type=positive_int, default=1, help="GPUs that share the model")
    add("--share-prefix", type=count, metavar="TOKENS", default=0, help="common to all users")
    add("--swap", type=gib, metavar="GiB", default=0, help="host memory for idle sequences")
    add("--dtype", choices=DTYPES, help="of keys and values (default: the configuration's)")
    add(
        "--kv-dtype",
        choices=KV_DTYPES,
        default="auto",
        help="fp8: keys and values in eight bits (default: auto, as --dtype says)",
    )
    add("--json", action="store_true", help="for programs")


@dataclass(frozen=True)
class _Plan:
    """Output of `--json`; per rank with tensor parallelism."""

    model: ModelShape
    tensor_parallel: int
    replicas_fit: int | None
    context_tokens: int
    users: int
    longest_tokens: int
    kinds: list[KindBytes]
    sequence: SequenceBytes
    needed_bytes: int
    budget_bytes: int | None
    swap_bytes: int
    fits: Fit | None
    is_enough: bool


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Plan and report; status 1 if the users do not fit the given memory."""
    from .capacity import fit, kind_bytes, need_bytes, sequence_bytes
    from .models import be_quiet, load_config, model_shape, rank_shape

    be_quiet(with_progress=False)
    num_tokens, shared_tokens = arguments.context, arguments.share_prefix
    if shared_tokens > num_tokens:
        raise ConfigError(
            f"--share-prefix {shared_tokens} is longer than --context {num_tokens}; a prefix is "
            "part of its sequence"
        )
    config, num_ranks = load_config(arguments.model), arguments.tensor_parallel
    whole = shape = model_shape(config, dtype=arguments.dtype, kv_dtype=arguments.kv_dtype)
    if num_ranks > 1:
        shape = rank_shape(config, whole, num_ranks)
    longest = max(arguments.longest or shape.max_context_tokens or num_tokens, num_tokens)

    def of(shape: ModelShape) -> tuple[list[KindBytes], SequenceBytes]:
        parts = [kind_bytes(kind, num_tokens, shared_tokens=shared_tokens) for kind in shape.kinds]
        return parts, sequence_bytes(parts, num_tokens, longest, state_bytes=shape.state_bytes)

    parts, sequence = of(shape)
    budget_bytes = _budget_bytes(arguments, shape)
    # The ranks share the host's memory.
    swap_bytes = arguments.swap // num_ranks
    fits = replicas_fit = None
    if budget_bytes is not None:
        fits = fit(sequence, budget_bytes, swap_bytes)
        if num_ranks > 1 and arguments.weights is None:
            alone_bytes = max(
                0, budget_bytes + (shape.weights_bytes or 0) - (whole.weights_bytes or 0)
            )
            replicas_fit = num_ranks * fit(of(whole)[1], alone_bytes, swap_bytes).vmkv_swapped
    plan = _Plan(
        shape,
        num_ranks,
        replicas_fit,
        num_tokens,
        arguments.users,
        longest,
        parts,
        sequence,
        need_bytes(sequence, arguments.users),
        budget_bytes,
        swap_bytes,
        fits,
        fits is None or fits.vmkv_swapped >= arguments.users,
    )
    out.write(json.dumps(asdict(plan), indent=2) if arguments.json else _text(plan, arguments))
    out.write("\n")
    return 0 if plan.is_enough else 1


def _budget_bytes(arguments: argparse.Namespace, shape: ModelShape) -> int | None:
    """Return device memory less weights and reserve; None without `--device-memory`."""
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


def _text(plan: _Plan, arguments: argparse.Namespace) -> str:
    shape, sequence = plan.model, plan.sequence
    users = "1 user" if plan.users == 1 else f"{plan.users:,} users"
    blocks = [
        f"{shape.name}, {shape.dtype} keys and values, sequences of {plan.context_tokens:,} tokens",
        _layers(plan),
        "\n".join(_notes(shape)),
        _one_sequence(plan, arguments),
        f"{users} {'needs' if plan.users == 1 else 'need'} {format_bytes(plan.needed_bytes)}"
        + (", their common prefix once." if sequence.shared_bytes else "."),
    ]
    if plan.fits is not None and plan.budget_bytes is not None:
        most = plan.fits.vmkv_swapped
        verdict = (
            f"{users} {'fits' if plan.users == 1 else 'fit'}, with room for "
            f"{most - plan.users:,} more."
            if plan.is_enough
            else f"{users} do not fit, {most:,} do. A shorter --context, a common prefix "
            "(--share-prefix), host memory (--swap) or more devices would help."
        )
        blocks.append(
            f"{format_bytes(arguments.device_memory)} less weights and reserve leave "
            f"{format_bytes(plan.budget_bytes)} for keys and values: {verdict}"
        )
    if plan.tensor_parallel > 1:
        blocks.append(_ranks(plan))
    return "\n\n".join(block for block in blocks if block)


def _ranks(plan: _Plan) -> str:
    count, weights_bytes = plan.tensor_parallel, plan.model.weights_bytes
    weights = "" if weights_bytes is None else f", and {format_bytes(weights_bytes)} of weights"
    text = f"All of that is on each of {count} GPUs{weights}."
    if plan.replicas_fit is None or plan.fits is None:
        return text
    if not plan.replicas_fit:
        return f"{text} A replica on one GPU would hold no such sequence."
    return (
        f"{text} {count} replicas would hold {plan.replicas_fit:,} such sequences, and wait for "
        "nobody between layers: take them, unless that is too few or an answer must come sooner."
    )


def _notes(shape: ModelShape) -> list[str]:
    notes = []
    if not all(kind.is_paged for kind in shape.kinds):
        notes.append("* in tensors of transformers' own, which vmkv neither pages nor shares.")
    if shape.idle_layers:
        notes.append(f"{shape.idle_layers} layers keep no keys and values.")
    if shape.state_bytes:
        notes.append(f"States of fixed size take {format_bytes(shape.state_bytes)} a sequence.")
    return notes


def _layers(plan: _Plan) -> str:
    rows = [["layers", "number", "kv heads", "a token", "tokens a page", "tokens kept"]]
    rows[0] += ["used", "mapped", "waste"]
    for part in plan.kinds:
        shape = part.kind.shape
        waste = (part.mean_bytes - part.used_bytes) / part.used_bytes if part.used_bytes else None
        rows.append(
            [
                part.kind.name,
                str(part.kind.num_layers),
                f"{shape.num_k_heads} × {shape.k_dim}"
                + (f" / {shape.v_dim}" if shape.v_dim != shape.k_dim else ""),
                format_bytes(part.token_bytes),
                f"{2 * MiB / part.token_bytes:.4g}" if part.kind.is_paged else "-",
                f"{part.kept_tokens:,}",
                format_bytes(part.used_bytes),
                format_bytes(part.mean_bytes),
                "-" if waste is None else f"{waste:,.1%}",
            ]
        )
    return _table(rows)


def _one_sequence(plan: _Plan, arguments: argparse.Namespace) -> str:
    sequence = plan.sequence
    own_bytes = sequence.vmkv_bytes - sequence.shared_bytes
    # Label, bytes, and the field of `Fit`.
    ways = [
        (
            f"one tensor, room for {plan.longest_tokens:,} tokens",
            sequence.longest_bytes,
            "longest",
        ),
        (
            "pages of 2 MiB for each layer's keys and values",
            sequence.layer_pages_bytes,
            "layer_pages",
        ),
        ("blocks of 16 tokens", sequence.block_table_bytes, "block_table"),
        ("vmkv: pages of 2 MiB for all layers", sequence.vmkv_bytes, "vmkv"),
    ]
    if arguments.share_prefix:
        label = f"vmkv, a prefix of {arguments.share_prefix:,} tokens shared"
        ways.append((label, own_bytes, "vmkv_shared"))
    if arguments.swap:
        label = f"vmkv, {format_bytes(arguments.swap)} of host memory"
        ways.append((label, own_bytes, "vmkv_swapped"))
    rows = [["memory of a sequence", "bytes", "of used", *(["fit"] if plan.fits else [])]]
    for label, num_bytes, field in ways:
        row = [label, format_bytes(num_bytes), f"{num_bytes / sequence.used_bytes:.3f} ×"]
        rows.append(row + ([f"{getattr(plan.fits, field):,}"] if plan.fits else []))
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
        "  ".join(
            f"{cell:>{width}}" if at else f"{cell:<{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
