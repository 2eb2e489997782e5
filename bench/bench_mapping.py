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

from harness import Bench, Figure, Row, in_turns, on_gpu, quartiles, synchronize
from models import LLAMA_3_8B, CacheShape, close_cache, open_cache, open_pool

from vmkv.core.backend import Backend
from vmkv.units import KiB, MiB

REPEATS = 11
DECODE_REPEATS = 5
TIMED = ("execute", "mem_create", "mem_release")
COUNTED = ("mem_create", "mem_map", "mem_set_access", "mem_unmap", "mem_release")


@dataclass(frozen=True)
class Case:
    """How much of a model's cache to use."""

    shape: CacheShape
    prompt_tokens: int
    decode_from_tokens: int
    decode_to_tokens: int
    page_bytes: int = 2 * MiB


LLAMA = Case(LLAMA_3_8B, 8192, 1024, 32768)
SMOKE = Case(CacheShape("smoke", 4, 2, 16), 512, 64, 1024, 4 * KiB)


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

    def __init__(self, case: Case, variant: Variant, budget_bytes: int, *, smoke: bool):
        self.case, self.variant = case, variant
        pool = open_pool(budget_bytes, smoke=smoke, page_bytes=case.page_bytes)
        self.backend = pool.backend
        self.meter = DriverMeter(self.backend)
        if variant.pages_only:
            pool.largest_class = 0
        self.cache = open_cache(
            pool,
            case.shape,
            max_tokens=max(case.prompt_tokens, case.decode_to_tokens),
            max_sequences=2,
            layers_per_group=1 if variant.one_layer_a_page else case.shape.num_layers,
        )

    def measure(self, work: Callable[[], object]) -> Row:
        """Driver and host microseconds of `work`, and its driver calls."""
        synchronize()
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
    """Map a prompt in `row` while the other row, which is parked, holds all memory."""
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
            row |= quartiles(name, [sample[name] for sample in samples])
    counts = {name: samples[-1][name] for name in ("calls", *COUNTED)}
    return {**row, **counts, "repeats": len(samples)}


def measure(case: Case, repeats: int, decode_repeats: int, *, smoke: bool) -> list[Row]:
    """All operations by all variants."""
    samples: dict[tuple[str, Variant], list[Row]] = {}
    prompt_bytes = case.prompt_tokens * case.shape.token_bytes
    decode_bytes = case.decode_to_tokens * case.shape.token_bytes
    roomy_bytes = 2 * max(prompt_bytes, decode_bytes)
    subjects = [Subject(case, variant, roomy_bytes, smoke=smoke) for variant in VARIANTS]
    for subject, at in in_turns(subjects, repeats, warmup=1):
        for operation, sample in prompt_samples(subject).items():
            if at >= 0:
                samples.setdefault((operation, subject.variant), []).append(sample)
    decode: dict[Variant, list[Row]] = {}
    for subject, _ in in_turns(subjects, decode_repeats):
        decode.setdefault(subject.variant, []).append(decode_sample(subject))
    for subject in subjects:
        close_cache(subject.cache)

    subjects = [Subject(case, variant, prompt_bytes, smoke=smoke) for variant in VARIANTS]
    for subject, at in in_turns(subjects, repeats, warmup=2):
        sample = takeover_sample(subject, row=at % 2)
        if at >= 0:
            key = ("taking over a parked row's memory", subject.variant)
            samples.setdefault(key, []).append(sample)
    for subject in subjects:
        close_cache(subject.cache)

    rows = [
        summarise(operation, "operation", variant, samples[operation, variant])
        for operation in dict.fromkeys(operation for operation, _ in samples)
        for variant in VARIANTS
    ]
    return rows + [summarise("decode growth", "token", each, decode[each]) for each in VARIANTS]


def promised(rows: Sequence[Row]) -> list[Figure]:
    """Cold mapping, adoption, growth, and the longest step."""
    by_key = {(row["operation"], row["variant"]): row for row in rows}
    ours, pages, layered = (variant.name for variant in VARIANTS)
    cold, cold_pages = by_key["cold mapping", ours], by_key["cold mapping", pages]
    adopted = by_key["adopting a parked row", ours]
    decode, decode_pages = by_key["decode growth", ours], by_key["decode growth", pages]
    stall = by_key["decode growth", layered]["longest_step_us"]
    found = []

    def add(name: str, what: str, got: float, unit: str, bound: float | None, rival: str) -> None:
        found.append(Figure(name, what, got, unit, bound, rival=rival))

    what = "driver time of mapping an 8,192-token prompt cold"
    rival = f"{cold_pages['driver_us'] / 1e3:.1f} ms (2 MiB pages only)"
    add("cold_mapping_ms", what, cold["driver_us"] / 1e3, "ms", on_gpu(2.0), rival)
    what = "driver calls of a new sequence that adopts a parked row"
    rival = f"{cold['calls']} calls (mapping it cold)"
    add("adoption_calls", what, adopted["calls"], "calls", 0, rival)
    what = "driver time of growth per decoded token, 1k to 32k"
    rival = f"{decode_pages['driver_us']:.2f} µs (2 MiB pages only)"
    add("decode_growth_us", what, decode["driver_us"], "µs", on_gpu(1.0), rival)
    what, rival = "longest driver time in one decode step", f"{stall:.0f} µs (one layer a page)"
    add("decode_stall_us", what, decode["longest_step_us"], "µs", None, rival)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("mapping", __doc__)
    smoke = bench.parse(argv).smoke
    case, repeats = (SMOKE, (2, 1)) if smoke else (LLAMA, (REPEATS, DECODE_REPEATS))
    rows = measure(case, *repeats, smoke=smoke)
    constants = {"prompt_tokens": case.prompt_tokens, "token_bytes": case.shape.token_bytes}
    return bench.finish(rows, promised(rows), constants)


if __name__ == "__main__":
    sys.exit(main())
