"""What does it cost to put memory behind a prompt, a new sequence, and a token?

Question. How long is the driver busy when a prompt of 8,192 tokens is mapped cold (1 GiB of
Llama-3-8B), when a new sequence adopts a parked row, and per token while a sequence decodes from
1k to 32k tokens? And on the way back: trimming, and taking over memory under pressure?

Prediction. A token is 32 layers * 2 * 8 heads * 128 * 2 B = 128 KiB, so the prompt is 512 pages of
2 MiB or 16 extents of 64 MiB. An extent costs 16 us to create, 3 to map and 33 to grant access to:
16 * 52 = 0.8 ms. Pages alone: 512 * (10 + 2.4 + 31) = 22 ms, 18 of them without creation. Adoption
touches no mapping: 0 calls. From 1k to 32k tokens a row grows from 64 pages to 2,048 in steps of
1/64 of its length, some 64 for each doubling, 320 in all: 320 * 50 us / 31,744 tokens = 0.5 us a
token. Pages alone take 1,984 steps: 3 us. One layer a page maps just as many, but 32 of them in
one step: a stall of 1.4 ms every 512 tokens.

Method. Wall time inside the backend's `execute`, `mem_create` and `mem_release`, with the device
idle; calls are counted by the backend. `host_us` is the wall time of the whole operation, Python
included. Variants take turns within each repeat; every repeat starts from an empty pool.

Rivals. The same code with extents of one page only (what every other VMM-based cache does), and
that with one layer a page, as vAttention lays them out (K and V still side by side: 32 mappings a
step instead of its 64).

Not measured. Mapping beside running kernels, or beside other Python threads (facts: neither side
stalls); several sequences in one transaction (bench_waste counts those); zeroing.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from common import spread, write_result
from report import Figure, Row, bench_parser, make_record, on_gpu, print_figures, print_rows

from vmkv import HostBackend, KVCache, open_backend
from vmkv.backend import Backend
from vmkv.memory import ExtentPool
from vmkv.units import KiB, MiB

REPEATS = 11
DECODE_REPEATS = 5
DTYPE = torch.bfloat16
TIMED = ("execute", "mem_create", "mem_release")
COUNTED = ("mem_create", "mem_map", "mem_set_access", "mem_unmap", "mem_release")


@dataclass(frozen=True)
class Case:
    """A model's cache, and how much of it to use."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    prompt_tokens: int
    decode_from_tokens: int
    decode_to_tokens: int
    host_granularity_bytes: int
    is_for_host: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE.itemsize


LLAMA_3_8B = Case(32, 8, 128, 8192, 1024, 32768, 2 * MiB)
SMOKE = Case(4, 2, 16, 512, 64, 1024, 4 * KiB, is_for_host=True)


@dataclass(frozen=True)
class Variant:
    """A way to lay out and map."""

    name: str
    pages_only: bool = False
    one_layer_a_page: bool = False


VARIANTS = (
    Variant("vmkv"),
    Variant("pages only", pages_only=True),
    Variant("pages only, one layer a page", pages_only=True, one_layer_a_page=True),
)


class DriverMeter:
    """Adds up the wall time that a backend's driver calls take."""

    def __init__(self, backend: Backend):
        self.seconds = 0.0
        for name in TIMED:
            setattr(backend, name, self._timed(getattr(backend, name)))

    def _timed(self, call: Callable) -> Callable:
        def timed(*args: object, **options: object) -> object:
            start = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


class Subject:
    """A cache of one variant, over a pool of its own."""

    def __init__(self, case: Case, variant: Variant, budget_bytes: int):
        use_gpu = torch.cuda.is_available() and not case.is_for_host
        self.case = case
        self.variant = variant
        self.backend = (
            open_backend("cuda:0") if use_gpu else HostBackend(case.host_granularity_bytes)
        )
        self.meter = DriverMeter(self.backend)
        self.pool = ExtentPool(self.backend, budget_bytes)
        if variant.pages_only:
            self.pool.largest_class = 0
        self.cache = KVCache(
            self.pool,
            max_tokens=max(case.prompt_tokens, case.decode_to_tokens),
            max_sequences=2,
            layers_per_group=1 if variant.one_layer_a_page else case.num_layers,
        )
        self.cache.add_layers(
            range(case.num_layers),
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            dtype=DTYPE,
        )

    def measure(self, work: Callable[[], object]) -> Row:
        """What `work` costs: driver and host microseconds, and calls."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        calls = Counter(self.backend.calls)
        driver_seconds = self.meter.seconds
        start = time.perf_counter()
        work()
        host_us = 1e6 * (time.perf_counter() - start)
        driver_us = 1e6 * (self.meter.seconds - driver_seconds)
        made = Counter(self.backend.calls)
        made.subtract(calls)
        counted = {name: made[name] for name in COUNTED}
        return {"driver_us": driver_us, "host_us": host_us, "calls": made.total(), **counted}

    def close(self) -> None:
        self.cache.close()
        self.pool.close()


def prompt_samples(subject: Subject) -> dict[str, Row]:
    """Cold mapping, adoption and trimming of one prompt; leaves the pool empty."""
    num_tokens = subject.case.prompt_tokens
    sequence = subject.cache.open()
    samples = {"cold mapping": subject.measure(lambda: sequence.append(num_tokens))}
    sequence.close()

    adopted = []

    def adopt() -> None:
        adopted.append(subject.cache.open(num_tokens))
        adopted[0].append(num_tokens)

    samples["adopting a parked row"] = subject.measure(adopt)
    adopted[0].close()
    samples["trimming"] = subject.measure(subject.cache.trim)
    return samples


def takeover_sample(subject: Subject, row: int) -> Row:
    """Map a prompt in `row` when the other row's parked one holds all memory there is."""
    sequence = subject.cache.open(row=row)
    sample = subject.measure(lambda: sequence.append(subject.case.prompt_tokens))
    sequence.close()
    return sample


def decode_sample(subject: Subject) -> Row:
    """Grow one sequence token by token; per token, except for calls and the longest step."""
    case, meter = subject.case, subject.meter
    num_steps = case.decode_to_tokens - case.decode_from_tokens
    sequence = subject.cache.open()
    sequence.append(case.decode_from_tokens)
    longest_seconds = 0.0

    def decode() -> None:
        nonlocal longest_seconds
        seconds = meter.seconds
        append = sequence.append
        for _ in range(num_steps):
            append(1)
            if meter.seconds != seconds:
                longest_seconds = max(longest_seconds, meter.seconds - seconds)
                seconds = meter.seconds

    sample = subject.measure(decode)
    for name in ("driver_us", "host_us"):
        sample[name] /= num_steps
    sample["longest_step_us"] = 1e6 * longest_seconds
    sequence.close()
    subject.cache.trim()
    return sample


def summarise(operation: str, per: str, variant: Variant, samples: Sequence[Row]) -> Row:
    """One row of the result, over the repeats."""
    row: Row = {"operation": operation, "per": per, "variant": variant.name}
    for name in ("driver_us", "host_us", "longest_step_us"):
        if name in samples[0]:
            values = spread([sample[name] for sample in samples])
            row |= {name: values["median"], f"{name}_q1": values["q1"], f"{name}_q3": values["q3"]}
    last = samples[-1]
    return row | {name: last[name] for name in ("calls", *COUNTED)} | {"repeats": len(samples)}


def turns(subjects: Sequence[Subject], repeats: int, warmup: int = 1):
    """Subjects in turn, a different one first each time; says whether the repeat counts."""
    for repeat in range(repeats + warmup):
        at = repeat % len(subjects)
        for subject in (*subjects[at:], *subjects[:at]):
            yield subject, repeat, repeat >= warmup


def measure(case: Case, repeats: int, decode_repeats: int) -> list[Row]:
    """All operations by all variants."""
    rows = []
    samples: dict[tuple[str, Variant], list[Row]] = {}

    roomy_bytes = 2 * max(case.prompt_tokens, case.decode_to_tokens) * case.token_bytes
    subjects = [Subject(case, variant, roomy_bytes) for variant in VARIANTS]
    for subject, _, counts in turns(subjects, repeats):
        for operation, sample in prompt_samples(subject).items():
            if counts:
                samples.setdefault((operation, subject.variant), []).append(sample)
    decode: dict[Variant, list[Row]] = {}
    for subject, _, counts in turns(subjects, decode_repeats, warmup=0):
        sample = decode_sample(subject)
        if counts:
            decode.setdefault(subject.variant, []).append(sample)
    for subject in subjects:
        subject.close()

    tight_bytes = case.prompt_tokens * case.token_bytes
    subjects = [Subject(case, variant, tight_bytes) for variant in VARIANTS]
    for subject, repeat, counts in turns(subjects, repeats, warmup=2):
        sample = takeover_sample(subject, row=repeat % 2)
        if counts:
            key = ("taking over a parked row's memory", subject.variant)
            samples.setdefault(key, []).append(sample)
    for subject in subjects:
        subject.close()

    for operation in dict.fromkeys(operation for operation, _ in samples):
        for variant in VARIANTS:
            taken = samples[operation, variant]
            rows.append(summarise(operation, "operation", variant, taken))
    rows += [summarise("decode growth", "token", each, decode[each]) for each in VARIANTS]
    return rows


def promised(rows: Sequence[Row]) -> list[Figure]:
    """The three figures of the issue, and the worst step."""
    by_key = {(row["operation"], row["variant"]): row for row in rows}
    ours, pages, layered = (variant.name for variant in VARIANTS)
    cold, cold_pages = by_key["cold mapping", ours], by_key["cold mapping", pages]
    adopted = by_key["adopting a parked row", ours]
    decode, decode_pages = by_key["decode growth", ours], by_key["decode growth", pages]
    return [
        Figure(
            "cold_mapping_ms",
            "driver time of mapping an 8,192-token prompt cold",
            cold["driver_us"] / 1e3,
            "ms",
            at_most=on_gpu(2.0),
            rival=f"{cold_pages['driver_us'] / 1e3:.1f} ms (2 MiB pages only)",
        ),
        Figure(
            "adoption_calls",
            "driver calls of a new sequence that adopts a parked row",
            adopted["calls"],
            "calls",
            at_most=0,
            rival=f"{cold['calls']} calls (mapping it cold)",
        ),
        Figure(
            "decode_growth_us",
            "driver time of growth per decoded token, 1k to 32k",
            decode["driver_us"],
            "µs",
            at_most=on_gpu(1.0),
            rival=f"{decode_pages['driver_us']:.2f} µs (2 MiB pages only)",
        ),
        Figure(
            "decode_stall_us",
            "longest driver time in one decode step",
            decode["longest_step_us"],
            "µs",
            rival=f"{by_key['decode growth', layered]['longest_step_us']:.0f} µs (one layer a "
            "page)",
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    options = bench_parser(__doc__).parse_args(argv)
    case = SMOKE if options.smoke else LLAMA_3_8B
    rows = measure(case, *((2, 1) if options.smoke else (REPEATS, DECODE_REPEATS)))
    figures = promised(rows)
    print_rows(rows)
    print_figures(figures)
    constants = {"prompt_tokens": case.prompt_tokens, "token_bytes": case.token_bytes}
    if options.json is not None or not options.smoke:
        record = make_record(__doc__, rows, figures, constants | {"smoke": options.smoke})
        print("wrote", write_result("mapping", record, options.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
