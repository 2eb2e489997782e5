"""How fast does a sequence go to host memory and come back?

Question. A sequence of 8,192 tokens of Llama-3-8B, 1 GiB: what share of the machine's own bandwidth
between device and pinned host memory do `swap_out` and `swap_in` reach?

Prediction. A pinned copy of 1 GiB takes 19.5 ms at 55 GB/s. Around it, outwards: 16 host extents
are mapped to be written (0.6 ms), then they and 16 device extents are unmapped (20 us each, 0.6
ms). Inwards: twice 16 extents are mapped (1.1 ms). So 94 % each way. A sequence that was decoded
from 2,048 tokens on is in 130 extents: 2.6 ms to unmap, 85 %. 64 MiB take 1.2 ms and 0.1 around,
with the fixed costs of a call 80 %. The bad case is the first time: creating pinned memory costs
some 0.6 ms for 2 MiB, 0.3 s for the whole, fifteen times the copy.

Method. `swap_out()` until it returns, which is when the device memory is free again; `swap_in()`
until the device is idle. The rival's copies and ours take turns, and the share is the median of the
ratios of neighbours. Host memory stays in the pool between repeats, as the rival's tensor stays;
the first time is measured by itself, after `trim`. Addresses and contents are compared.

Rivals. `torch.Tensor.copy_` between a tensor on the device and a pinned one of the same size, one
copy each way, both allocated before.

Not measured. Compute beside the copies; several sequences at a time; disks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from common import spread, write_result
from report import Figure, Row, bench_parser, make_record, on_gpu, print_figures, print_rows

import vmkv
from vmkv import HostBackend, KVCache, open_backend
from vmkv.backend import MemoryLocation
from vmkv.memory import ExtentPool
from vmkv.units import GiB, KiB, MiB

REPEATS = 11
COLD_REPEATS = 3
DTYPE = torch.bfloat16
WAYS = ("out", "in")


@dataclass(frozen=True)
class Case:
    """A sequence to swap: given as a prompt up to `prompt_tokens`, decoded from there on."""

    name: str
    num_tokens: int
    prompt_tokens: int


@dataclass(frozen=True)
class Shape:
    """A model's cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_bytes: int
    budget_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE.itemsize


LLAMA_3_8B = Shape(32, 8, 128, 2 * MiB, 2 * GiB)
CASES = (
    Case("prompt", 8192, 8192),
    Case("decoded", 8192, 2048),
    Case("small prompt", 512, 512),
)
SMOKE = Shape(4, 2, 16, 4 * KiB, 4 * MiB)
SMOKE_CASES = (Case("prompt", 1024, 1024), Case("decoded", 1024, 256), Case("small prompt", 64, 64))


class Subject:
    """One sequence in a cache with room for it on either side."""

    def __init__(self, shape: Shape, *, smoke: bool):
        self.use_gpu = torch.cuda.is_available() and not smoke
        self.backend = open_backend("cuda:0") if self.use_gpu else HostBackend(shape.page_bytes)
        self.pool = ExtentPool(
            self.backend, shape.budget_bytes, host_budget_bytes=shape.budget_bytes
        )
        self.cache = KVCache(
            self.pool, max_tokens=16_384, max_sequences=1, layers_per_group=shape.num_layers
        )
        self.shape = shape
        self.cache.add_layers(
            range(shape.num_layers),
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=DTYPE,
        )

    def sequence(self, case: Case) -> vmkv.Sequence:
        """A new one, with noise in its first and last layer; its memory is as growth leaves it."""
        self.cache.trim()
        sequence = self.cache.open()
        sequence.append(case.prompt_tokens)
        for _ in range(case.num_tokens - case.prompt_tokens):
            sequence.append(1)
        for layer in (0, self.shape.num_layers - 1):
            sequence.keys(layer).normal_()
            sequence.values(layer).normal_()
        return sequence

    def close(self) -> None:
        self.cache.check()
        self.cache.close()
        self.pool.close()


def seconds_of(work: Callable[[], object]) -> float:
    """Until the device is idle again, from when it was."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def contents(sequence: vmkv.Sequence, layer: int) -> tuple[int, torch.Tensor]:
    """The address of a layer's keys, and a copy of its values."""
    return sequence.keys(layer).data_ptr(), sequence.values(layer).clone()


def check(sequence: vmkv.Sequence, expected: Sequence[tuple[int, torch.Tensor]]) -> None:
    """A time means nothing if the sequence is not what it was."""
    layers = (0, sequence.cache.layers[-1])
    for layer, (address, values) in zip(layers, expected, strict=True):
        if sequence.keys(layer).data_ptr() != address:
            raise AssertionError(f"layer {layer} has moved")
        if not torch.equal(sequence.values(layer), values):
            raise AssertionError(f"layer {layer} holds something else")


def run(subject: Subject, case: Case, repeats: int, cold_repeats: int) -> list[Row]:
    """Swap a sequence out and in, beside plain copies of the same size; a row for each way."""
    num_bytes = case.num_tokens * subject.shape.token_bytes
    device = subject.cache.device
    plain = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    pinned = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=subject.use_gpu)
    copies = {
        "out": lambda: pinned.copy_(plain, non_blocking=True),
        "in": lambda: plain.copy_(pinned, non_blocking=True),
    }
    sequence = subject.sequence(case)
    before = [contents(sequence, layer) for layer in (0, subject.shape.num_layers - 1)]
    cold: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(cold_repeats):
        subject.pool.trim(location=MemoryLocation.HOST)
        cold["out"].append(seconds_of(sequence.swap_out))
        subject.pool.trim()
        cold["in"].append(seconds_of(sequence.swap_in))
    check(sequence, before)

    ours: dict[str, list[float]] = {way: [] for way in WAYS}
    theirs: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(repeats):
        if case.prompt_tokens < case.num_tokens:  # Once swapped in, it is in few extents.
            sequence.close()
            sequence = subject.sequence(case)
        for way, swap in (("out", sequence.swap_out), ("in", sequence.swap_in)):
            turns = [(theirs, copies[way]), (ours, swap)]
            for taken, work in turns if repeat % 2 else reversed(turns):
                taken[way].append(seconds_of(work))
    if case.prompt_tokens == case.num_tokens:
        check(sequence, before)
    sequence.close()

    rows = []
    for way in WAYS:
        row: Row = {"sequence": case.name, "way": way, "num_bytes": num_bytes}
        for name, seconds in (("swap", ours[way]), ("copy", theirs[way])):
            values = spread([1e3 * each for each in seconds])
            row |= {f"{name}_ms": values["median"]}
            row |= {f"{name}_ms_q1": values["q1"], f"{name}_ms_q3": values["q3"]}
            row[f"{name}_gb_per_s"] = num_bytes / values["median"] / 1e6
        pairs = zip(ours[way], theirs[way], strict=True)
        values = spread([copy / swap for swap, copy in pairs])
        row |= {"bandwidth_share": values["median"]}
        row |= {"bandwidth_share_q1": values["q1"], "bandwidth_share_q3": values["q3"]}
        row["cold_ms"] = 1e3 * spread(cold[way])["median"]
        rows.append(row | {"repeats": repeats})
    return rows


def promised(rows: Sequence[Row]) -> list[Figure]:
    """The figure of the issue each way, and what is unfavourable."""
    by_key = {(row["sequence"], row["way"]): row for row in rows}
    figures = []
    for case, bound in (("prompt", 0.85), ("decoded", None)):
        for way in WAYS:
            row = by_key[case, way]
            what = f"swapping {row['num_bytes'] / MiB:,.4g} MiB {way}"
            figures.append(
                Figure(
                    f"swap_{way}_share" if bound else f"swap_{way}_{case}_share",
                    f"{what}, of the bandwidth of a pinned copy"
                    + ("" if bound else " (a sequence in small extents)"),
                    row["bandwidth_share"],
                    "%",
                    at_least=None if bound is None else on_gpu(bound),
                    rival=f"{row['copy_gb_per_s']:.1f} GB/s (copy_, pinned)",
                )
            )
    cold = by_key["prompt", "out"]
    figures.append(
        Figure(
            "swap_out_cold_ms",
            f"swapping {cold['num_bytes'] / MiB:,.4g} MiB out where the host memory must be "
            "created first",
            cold["cold_ms"],
            "ms",
            rival=f"{cold['swap_ms']:.1f} ms (host memory in the pool)",
        )
    )
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    options = bench_parser(__doc__).parse_args(argv)
    shape, cases, repeats, cold_repeats = (
        (SMOKE, SMOKE_CASES, 3, 1) if options.smoke else (LLAMA_3_8B, CASES, REPEATS, COLD_REPEATS)
    )
    rows = []
    for case in cases:
        subject = Subject(shape, smoke=options.smoke)
        rows += run(subject, case, repeats, cold_repeats)
        subject.close()
    figures = promised(rows)
    print_rows(rows)
    print_figures(figures)
    if options.json is not None or not options.smoke:
        constants = {"token_bytes": shape.token_bytes, "smoke": options.smoke}
        record = make_record(__doc__, rows, figures, constants)
        print("wrote", write_result("swap", record, options.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
