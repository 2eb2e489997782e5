"""`vmkv plan`: what fits, and what paging, sharing and swapping change, from a configuration."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, TextIO

from ..errors import ConfigError
from ..units import GiB, MiB, format_bytes
from .arguments import DTYPES, KV_DTYPES, Commands, count, gib, name, positive_gib, positive_int
from .tables import table

if TYPE_CHECKING:
    from .capacity import Fit, KindBytes, SequenceBytes
    from .models import ModelShape

#: Bytes per second between host and device memory: kernels read host pages at that speed on an
#: H200 (PCIe 5); older links are slower.
_SWAP_BYTES_PER_S = 55e9


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="how many users fit, and what paging, sharing and swapping change",
        description="Capacity from a model's configuration alone: no weights, no GPU.",
    )
    parser.add_argument(
        "model", metavar="MODEL", type=name, help="a folder, a config.json, or a Hub name"
    )
    parser.add_argument("--users", type=positive_int, default=1, help="sequences at once")
    parser.add_argument(
        "--context", type=positive_int, required=True, help="tokens of each, e.g. 8192 or 8k"
    )
    parser.add_argument(
        "--longest",
        type=positive_int,
        help="tokens that a cache without paging must leave room for (default: the model's)",
    )
    parser.add_argument("--device-memory", type=positive_gib, metavar="GiB", help="of one GPU")
    parser.add_argument(
        "--weights", type=gib, metavar="GiB", help="(default: counted from the configuration)"
    )
    parser.add_argument(
        "--reserve",
        type=gib,
        metavar="GiB",
        default=4.0,
        help="for activations, CUDA graphs and the context (default: 4)",
    )
    parser.add_argument(
        "--share-prefix", type=count, metavar="TOKENS", default=0, help="common to all users"
    )
    parser.add_argument(
        "--swap", type=gib, metavar="GiB", default=0.0, help="host memory for idle sequences"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of keys and values (default: the configuration's)"
    )
    parser.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default="auto",
        help="fp8: keys and values in eight bits (default: auto, as --dtype says)",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Plan and report. Status 1 where the users do not fit the memory that was named."""
    from .capacity import fit, kind_bytes, need_bytes, sequence_bytes
    from .models import be_quiet, load_config, model_shape

    be_quiet(with_progress=False)
    num_tokens, shared_tokens = arguments.context, arguments.share_prefix
    if shared_tokens > num_tokens:
        raise ConfigError(
            f"--share-prefix {shared_tokens} is longer than --context {num_tokens}; a prefix is "
            "part of its sequence"
        )
    shape = model_shape(
        load_config(arguments.model), dtype=arguments.dtype, kv_dtype=arguments.kv_dtype
    )
    parts = [kind_bytes(kind, num_tokens, shared_tokens=shared_tokens) for kind in shape.kinds]
    longest = max(arguments.longest or shape.max_context_tokens or num_tokens, num_tokens)
    sequence = sequence_bytes(parts, num_tokens, longest, state_bytes=shape.state_bytes)
    needed_bytes = need_bytes(sequence, arguments.users)
    budget_bytes = _budget_bytes(arguments, shape)
    swap_bytes = round(arguments.swap * GiB)
    fits = None if budget_bytes is None else fit(sequence, budget_bytes, swap_bytes)
    num_fitting = None if fits is None else fits.vmkv_swapped
    is_enough = num_fitting is None or num_fitting >= arguments.users
    if arguments.json:
        record = {
            "model": asdict(shape),
            "context_tokens": num_tokens,
            "users": arguments.users,
            "longest_tokens": longest,
            "kinds": [asdict(part) for part in parts],
            "sequence": asdict(sequence),
            "needed_bytes": needed_bytes,
            "budget_bytes": budget_bytes,
            "swap_bytes": swap_bytes,
            "fits": None if fits is None else asdict(fits),
            "is_enough": is_enough,
        }
        out.write(json.dumps(record, indent=2) + "\n")
    else:
        report = _Report(arguments, shape, parts, sequence, longest)
        out.write(report.text(budget_bytes, needed_bytes, fits, is_enough))
    return 0 if is_enough else 1


def _budget_bytes(arguments: argparse.Namespace, shape: ModelShape) -> int | None:
    """Device memory less what is not for keys and values; None where no device was named."""
    if arguments.device_memory is None:
        return None
    weights_bytes = shape.weights_bytes
    if arguments.weights is not None:
        weights_bytes = round(arguments.weights * GiB)
    if weights_bytes is None:
        raise ConfigError(
            "the configuration does not tell the size of this model's weights; pass --weights GiB"
        )
    reserve_bytes = round(arguments.reserve * GiB)
    budget_bytes: int = round(arguments.device_memory * GiB) - weights_bytes - reserve_bytes
    if budget_bytes <= 0:
        raise ConfigError(
            f"weights of {format_bytes(weights_bytes)} and a reserve of "
            f"{format_bytes(reserve_bytes)} leave nothing of {arguments.device_memory:g} GiB for "
            "keys and values; use a larger device, or several with tensor parallelism (then pass "
            "--weights for one of them)"
        )
    return budget_bytes


class _Report:
    """The plan as text."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        shape: ModelShape,
        parts: list[KindBytes],
        sequence: SequenceBytes,
        longest_tokens: int,
    ):
        self._arguments = arguments
        self._shape = shape
        self._parts = parts
        self._sequence = sequence
        self._longest_tokens = longest_tokens

    def text(
        self,
        budget_bytes: int | None,
        needed_bytes: int,
        fits: Fit | None,
        is_enough: bool,
    ) -> str:
        """All of it."""
        users, context = self._arguments.users, self._arguments.context
        blocks = [
            (
                f"{self._shape.name}, keys and values in {self._shape.dtype}, sequences of "
                f"{context:,} tokens"
            ),
            self._layers(),
            self._one_sequence(fits),
            f"{_users(users)} {'needs' if users == 1 else 'need'} {format_bytes(needed_bytes)}"
            + ("." if self._sequence.shared_bytes == 0 else ", their common prefix once."),
        ]
        if notes := self._notes():
            blocks.insert(2, "\n".join(notes))
        if fits is not None and budget_bytes is not None:
            blocks.append(self._verdict(budget_bytes, fits, is_enough))
        return "\n\n".join(blocks) + "\n"

    def _notes(self) -> list[str]:
        """What is not pages of vmkv, in words."""
        notes = []
        if not all(kind.is_paged for kind in self._shape.kinds):
            notes.append("* in tensors of transformers' own, which vmkv neither pages nor shares.")
        if self._shape.idle_layers:
            notes.append(f"{self._shape.idle_layers} layers keep no keys and values.")
        if self._shape.state_bytes:
            notes.append(
                f"States of fixed size take {format_bytes(self._shape.state_bytes)} a sequence."
            )
        return notes

    def _layers(self) -> str:
        rows = []
        for part in self._parts:
            shape = part.kind.shape
            heads = f"{shape.num_k_heads} × {shape.k_dim}"
            if shape.v_dim != shape.k_dim:
                heads += f" / {shape.v_dim}"
            rows.append(
                [
                    part.kind.name,
                    str(part.kind.num_layers),
                    heads,
                    format_bytes(part.token_bytes),
                    f"{2 * MiB / part.token_bytes:.4g}" if part.kind.is_paged else "-",
                    f"{part.kept_tokens:,}",
                    format_bytes(part.used_bytes),
                    format_bytes(part.mean_bytes),
                    _share(part.mean_bytes - part.used_bytes, part.used_bytes),
                ]
            )
        header = ["layers", "number", "kv heads", "a token", "tokens a page", "tokens kept"]
        return table([*header, "used", "mapped", "waste"], rows)

    def _one_sequence(self, fits: Fit | None) -> str:
        sequence, swap = self._sequence, self._arguments.swap
        numbers: dict[str, int] = {} if fits is None else asdict(fits)
        ways: list[tuple[str, int, int | None]] = [
            (
                f"one tensor, room for {self._longest_tokens:,} tokens",
                sequence.longest_bytes,
                numbers.get("longest"),
            ),
            (
                "pages of 2 MiB for each layer's keys and values",
                sequence.layer_pages_bytes,
                numbers.get("layer_pages"),
            ),
            ("blocks of 16 tokens", sequence.block_table_bytes, numbers.get("block_table")),
            ("vmkv: pages of 2 MiB for all layers", sequence.vmkv_bytes, numbers.get("vmkv")),
        ]
        own_bytes = sequence.vmkv_bytes - sequence.shared_bytes
        if self._arguments.share_prefix:
            tokens = self._arguments.share_prefix
            name = f"vmkv, a prefix of {tokens:,} tokens shared"
            ways.append((name, own_bytes, numbers.get("vmkv_shared")))
        if swap:
            ways.append(
                (f"vmkv, {swap:g} GiB of host memory", own_bytes, numbers.get("vmkv_swapped"))
            )
        header = ["memory of a sequence", "bytes", "of used", *(["fit"] if fits else [])]
        rows = [
            [name, format_bytes(num_bytes), f"{num_bytes / sequence.used_bytes:.3f} ×"]
            + ([f"{number:,}"] if number is not None else [])
            for name, num_bytes, number in ways
        ]
        text = table(header, rows)
        if swap:
            text += (
                f"\nA sequence comes back from host memory in about "
                f"{own_bytes / _SWAP_BYTES_PER_S * 1e3:.3g} ms, at 55 GB/s."
            )
        return text

    def _verdict(self, budget_bytes: int, fits: Fit, is_enough: bool) -> str:
        users, memory = self._arguments.users, self._arguments.device_memory
        head = (
            f"{memory:g} GiB less weights and reserve leave {format_bytes(budget_bytes)} for keys "
            f"and values: "
        )
        if is_enough:
            spare = fits.vmkv_swapped - users
            verb = "fits" if users == 1 else "fit"
            return head + f"{_users(users)} {verb}, with room for {spare:,} more."
        return (
            head + f"{_users(users)} do not fit, {fits.vmkv_swapped:,} do. A shorter --context, a "
            "common prefix (--share-prefix), host memory (--swap) or more devices would help."
        )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:,.1%}" if whole else "-"


def _users(number: int) -> str:
    return "1 user" if number == 1 else f"{number:,} users"
