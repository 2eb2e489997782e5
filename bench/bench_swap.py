"""How fast does a sequence go to host memory and come back, and what do others feel of it?

Question. A sequence of 8,192 tokens of Llama-3-8B, 1 GiB: what share of the machine's own bandwidth
between device and pinned host memory do `swap_out` and `swap_in` reach? And how much longer do the
decode steps of 64 requests of 2,048 tokens take while prefixes are copied to host memory as fast as
the bus takes them?

Prediction. A pinned copy of 1 GiB takes 19.5 ms at 55 GB/s. Around it, outwards: 16 host extents
are mapped to be written (0.6 ms), then they and 16 device extents are unmapped (20 us each, 0.6
ms). Inwards: twice 16 extents are mapped (1.1 ms). So 94 % each way. A sequence that was decoded
from 2,048 tokens on is in 130 extents: 2.6 ms to unmap, 85 %. 64 MiB take 1.2 ms and 0.1 around,
with the fixed costs of a call 80 %. The bad case is the first time: creating pinned memory costs
some 0.6 ms for 2 MiB, 0.3 s for the whole, fifteen times the copy. A decode step reads 35 GB in 9
ms; copies at 53 GB/s take 1.3 % of the device memory's bandwidth: 1.02 times.

Method. `swap_out()` until it returns, which is when the device memory is free again; `swap_in()`
until the device is idle. The rival's copies and ours take turns, and the share is the median of the
ratios of neighbours. Host memory stays in the pool between repeats, as the rival's tensor stays;
the first time is measured by itself, after `trim`. Addresses and contents are compared. Beside
copies: each step submits the copies of 256 MiB of parked rows' blocks, after those of the step
before were forgotten; rounds with and without copies take turns, and the median of the ratios of
neighbours counts.

Rivals. `torch.Tensor.copy_` between a tensor on the device and a pinned one of the same size, one
copy each way, both allocated before.

Not measured. Prompts beside the copies; several sequences at a time; disks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from harness import (
    Bench,
    Figure,
    Row,
    in_turns,
    on_gpu,
    paired_ratio,
    quartiles,
    seconds_of,
    spread,
)
from models import (
    LLAMA_3_8B,
    CacheShape,
    close_cache,
    llama_config,
    make_model,
    open_cache,
    open_pool,
    random_prompts,
)

import vmkv
from vmkv import Engine, KVCache, SamplingParams
from vmkv.core.backend import MemoryLocation
from vmkv.units import GiB, KiB, MiB

WAYS = ("out", "in")


@dataclass(frozen=True)
class Case:
    """A sequence to swap: given as a prompt up to `prompt_tokens`, decoded from there on."""

    name: str
    num_tokens: int
    prompt_tokens: int


def open_sequence(cache: KVCache, case: Case) -> vmkv.Sequence:
    """A new one, with noise in its first and last layer; its memory is as growth leaves it."""
    cache.trim()
    sequence = cache.open()
    sequence.append(case.prompt_tokens)
    for _ in range(case.num_tokens - case.prompt_tokens):
        sequence.append(1)
    for layer in (0, cache.layers[-1]):
        sequence.keys(layer).normal_()
        sequence.values(layer).normal_()
    return sequence


CASES = (
    Case("prompt", 8192, 8192),
    Case("decoded", 8192, 2048),
    Case("small prompt", 512, 512),
)
SMOKE = CacheShape("smoke", 4, 2, 16)
SMOKE_CASES = (Case("prompt", 1024, 1024), Case("decoded", 1024, 256), Case("small prompt", 64, 64))


def contents(sequence: vmkv.Sequence, layer: int) -> tuple[int, torch.Tensor]:
    """The address of a layer's keys, and a copy of its values."""
    return sequence.keys(layer).data_ptr(), sequence.values(layer).clone()


def check(sequence: vmkv.Sequence, expected: Sequence[tuple[int, torch.Tensor]]) -> None:
    """Check that the sequence is unchanged; otherwise the time means nothing."""
    layers = (0, sequence.cache.layers[-1])
    for layer, (address, values) in zip(layers, expected, strict=True):
        if sequence.keys(layer).data_ptr() != address:
            raise AssertionError(f"layer {layer} has moved")
        if not torch.equal(sequence.values(layer), values):
            raise AssertionError(f"layer {layer} holds something else")


def run(cache: KVCache, case: Case, repeats: int, cold_repeats: int) -> list[Row]:
    """Swap a sequence out and in, beside plain copies of the same size; a row for each way."""
    sequence = open_sequence(cache, case)
    num_bytes = cache.stats().used_bytes
    plain = torch.zeros(num_bytes, dtype=torch.uint8, device=cache.device)
    pinned = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=plain.is_cuda)
    copies = {
        "out": lambda: pinned.copy_(plain, non_blocking=True),
        "in": lambda: plain.copy_(pinned, non_blocking=True),
    }
    before = [contents(sequence, layer) for layer in (0, cache.layers[-1])]
    cold: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(cold_repeats):
        cache.pool.trim(location=MemoryLocation.HOST)
        cold["out"].append(seconds_of(sequence.swap_out))
        cache.pool.trim()
        cold["in"].append(seconds_of(sequence.swap_in))
    check(sequence, before)

    ours: dict[str, list[float]] = {way: [] for way in WAYS}
    theirs: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(repeats):
        if case.prompt_tokens < case.num_tokens:  # Once swapped in, it is in few extents.
            sequence.close()
            sequence = open_sequence(cache, case)
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
            row |= quartiles(f"{name}_ms", [1e3 * each for each in seconds])
            row[f"{name}_gb_per_s"] = num_bytes / row[f"{name}_ms"] / 1e6
        pairs = zip(ours[way], theirs[way], strict=True)
        row |= quartiles("bandwidth_share", [copy / swap for swap, copy in pairs])
        rows.append({**row, "cold_ms": 1e3 * spread(cold[way])["median"], "repeats": repeats})
    return rows


def promised(rows: Sequence[Row]) -> list[Figure]:
    """The share of the bandwidth each way, and what is unfavourable."""
    by_key = {(row["sequence"], row["way"]): row for row in rows}
    figures = []
    for case, bound in (("prompt", on_gpu(0.85)), ("decoded", None)):
        for way in WAYS:
            row = by_key[case, way]
            name = f"swap_{way}_share" if case == "prompt" else f"swap_{way}_{case}_share"
            what = f"swapping {row['num_bytes'] / MiB:,.4g} MiB {way}, of the bandwidth of a "
            what += "pinned copy" + ("" if case == "prompt" else " (a sequence in small extents)")
            rival = f"{row['copy_gb_per_s']:.1f} GB/s (copy_, pinned)"
            got = row["bandwidth_share"]
            figures.append(Figure(name, what, got, "%", at_least=bound, rival=rival))
    cold = by_key["prompt", "out"]
    what = f"swapping {cold['num_bytes'] / MiB:,.4g} MiB out where the host memory must be created"
    rival = f"{cold['swap_ms']:.1f} ms (host memory in the pool)"
    figures.append(Figure("swap_out_cold_ms", f"{what} first", cold["cold_ms"], "ms", rival=rival))
    return figures


# ---- decoding beside copies -------------------------------------------------------------------


def beside(device: torch.device, rows: list[Row], *, smoke: bool) -> Figure:
    """Decode with and without copies of parked rows to host memory in every step."""
    count, tokens, parked_tokens, num_new = (4, 32, 64, 8) if smoke else (64, 2048, 8192, 256)
    model = make_model(llama_config(smoke=smoke), device)
    prompts = random_prompts(model, count, tokens).tolist()
    sizes = {"max_num_seqs": count, "max_tokens": 256 if smoke else 16_384}
    sizes |= {"budget_bytes": (4 * MiB if smoke else 40 * GiB)}
    sizes |= {"host_budget_bytes": (4 * MiB if smoke else 16 * GiB)}
    took: dict[str, list[float]] = {"alone": [], "beside copies": []}
    with Engine(model, **sizes) as engine:
        blocks, pool = engine.cache.host_blocks, engine.cache.pool
        last = random_prompts(model, 4, parked_tokens).tolist()
        engine.generate(last, SamplingParams(max_tokens=1))
        with pool.lock:
            parked = [*engine.cache.rows.parked]
            for row in parked:  # Makes the host memory.
                blocks.keep(row)
        params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
        for name, at in in_turns([*took], 1 if smoke else 3, warmup=1):
            requests = [engine.add(each, params) for each in prompts]
            before_bytes, number, start_s = 0, 0, 0.0
            while engine.has_unfinished:
                engine.step()
                if not start_s and all(each.requests[0].output_token_ids for each in requests):
                    before_bytes = engine.cache.sharing.offloaded_bytes
                    start_s = time.perf_counter()
                if name == "beside copies":
                    with pool.lock:
                        blocks.forget()
                        number += 1
                        blocks.keep(parked[number % len(parked)], most_bytes=256 * MiB)
            seconds = time.perf_counter() - start_s
            if at >= 0:
                took[name].append(seconds / (num_new - 1))
                copied_bytes = engine.cache.sharing.offloaded_bytes - before_bytes
                rows.append(
                    {
                        "requests": count,
                        "way": name,
                        "step_ms": 1e3 * took[name][-1],
                        "copied_gb_per_s": copied_bytes / seconds / 1e9,
                    }
                )
    ratio = paired_ratio(took["beside copies"], took["alone"])
    what = f"decode steps of {count} requests while prefixes are copied to host memory"
    return Figure("decode_beside_copies", f"{what}, over those alone", ratio, "×", on_gpu(1.03))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("swap", __doc__)
    options = bench.parse(argv)
    smoke = options.smoke
    shape, cases, budget_bytes, page_bytes, repeats = (
        (SMOKE, SMOKE_CASES, 4 * MiB, 4 * KiB, (3, 1))
        if smoke
        else (LLAMA_3_8B, CASES, 2 * GiB, 2 * MiB, (11, 3))
    )
    rows = []
    for case in cases:
        pool = open_pool(
            budget_bytes, smoke=smoke, host_budget_bytes=budget_bytes, page_bytes=page_bytes
        )
        cache = open_cache(pool, shape, max_tokens=16_384, max_sequences=1)
        rows += run(cache, case, *repeats)
        close_cache(cache)
    figures = promised(rows)
    figures.append(beside(options.device, rows, smoke=smoke))
    return bench.finish(rows, figures, {"token_bytes": shape.token_bytes})


if __name__ == "__main__":
    sys.exit(main())
