"""Does the engine serve a plain transformers model as fast as vLLM serves its own?

Question. Five workloads of one shape each (many mixed prompts, many more, long prompts, one
request, much decoding): how long does `vmkv.serve.Engine` take for all of it, against what vLLM
takes on the same GPU? How far is a decode step from the memory floor, and how much of the time is
mapping that the device waits for? And when nothing is left to do: what does an engine cost?

Prediction. A prompt token costs 2 * 7.0e9 operations, at the 0.70 PFLOP/s that matrix products of
these shapes reach: W1's 344k prompt tokens take 6.9 s and, with all that is not a product (8 %),
7.5 s. A decode step reads weights, keys and values once, at about 85 % of the 4.3 TB/s of a copy:
W1's 128 steps over up to 256 sequences take 2.5 s. Together 10 s; vLLM's 11.0 s says the same. The
others follow: W0 2.4 s, W2 7.5 s, W3 0.34 s, W4 10.5 s. A page is mapped while the step before
runs, so mapping costs nothing but in the first step: under 0.1 % of W1. With a quarter of the
memory that W1 needs, a quarter of its sequences decode together: decoding takes more than twice as
long, prompts as long as before, so 0.75 of the throughput. Of 1,000 prompts that share 2,048 tokens
and have 64 of their own, the prefix cache computes 66k tokens instead of 2.1 M: 1.5 s and the
decoding, 3 s, instead of 46 s and the decoding: ten times the throughput. An idle engine waits on a
condition and polls nothing; what CUDA's own threads do is under 0.1 % of a core. After W0, which
fills 11 GiB, 7 GiB go back to the device in 0.1 s, at 15 µs for each 2 MiB.

Method. Llama-3-8B's shape from transformers' own class, random weights, bfloat16, greedy, no end of
sequence; prompts from `random.seed(0)`: a length by `random.choice`, then as many
`random.randint(5, 120000)`. The engine is warmed up (compiled, captured) before, as is vLLM.
Seconds are wall time of `engine.generate` for all requests, the median of its rounds; beside vLLM's
the best of as many rounds of each, since the first may have to compile. A decode step
is the median time between steps that decode all 32 sequences of W2 and nothing else. Mapping is
what the engine spends growing sequences; it was on the critical path where the host did not have to
wait for the step before afterwards, because then the device may have. With a quarter of the memory,
steps map more, and the bound on that share is the same.
The idle engine is an `AsyncEngine` over a warmed-up one, with a watermark of 4 GiB and the prefix
cache on, after W0: from when it says that it is idle, the CPU time of the process (all of its
threads) over 10 s of wall time, in which the main thread sleeps; memory is what the backend's books
say that the device has given. Then W0 comes again, some of its prefixes still there.

Other shapes (`--shape`): the same workloads through Qwen3-Next's layers, where prompts and tokens
should cost what vLLM takes, because both run flash-linear-attention's rules; and half of
Qwen3-30B-A3B's or gpt-oss-20b's layers with transformers' grouped experts, which are predicted to
take up to twice as long as vLLM's own kernels where few tokens choose many experts.

Rivals. vLLM 0.26.0 (FlashAttention-3, compiled, CUDA graphs, prefix cache off), with `--vllm-json`
as `vllm_workloads.py` has just measured it on the same machine, with weights drawn alike. Published
figures, measured on the same kind of machine with the same prompts and not in this run: otherwise
vLLM's, transformers 5.17 `generate_batch` (paged flash-attn 2), and `generate` on the left-padded
batch (flash-attn 2).

Not measured. Arrivals over time and the HTTP server, which `bench_live` has; sampling, several
devices.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from harness import Bench, Figure, Row, print_rows, quartiles, seconds_of, synchronize
from models import SHAPES, make_model

from vmkv import AsyncEngine, Engine, RequestOutput, SamplingParams
from vmkv.serve.observer import Event, Idle, RequestAdded, StepRecord
from vmkv.units import MiB

MIXED = (128, 256, 512, 1024, 2048, 4096)
MAX_TOKENS = 16384
MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 16384
WEIGHT_BYTES = 15.0e9  # What a step reads: the input embedding is not among it.
KV_BYTES_PER_TOKEN = 128 * 1024
COPY_BYTES_PER_S = 4.3e12  # Measured: torch's device-to-device copy, reads and writes counted.
#: Under this the host did not wait: the device had finished before, and may have been idle.
WAIT_MIN_S = 50e-6
QUARTER_BYTES = 12 * 2**30  # W1's keys and values take 48 GiB.
IDLE = "idle"
NUM_KERNELS = 30  # Of a profile.
WATERMARK_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Workload:
    """Requests, and the rivals' seconds for them."""

    name: str
    num_requests: int
    lengths: tuple[int, ...]
    new_tokens: int
    rounds: int = 2
    prefix_tokens: int = 0
    vllm_s: float | None = None
    hf_batch_s: float | None = None
    hf_padded_s: float | None = None

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Seeded prompts, the same for every rival."""
        source = random.Random(0)
        shared = [source.randint(5, vocabulary - 1) for _ in range(self.prefix_tokens)]
        made = []
        for _ in range(self.num_requests):
            length = source.choice(self.lengths)
            own = [source.randint(5, min(120_000, vocabulary - 1)) for _ in range(length)]
            made.append(shared + own)
        return made


WORKLOADS = (
    Workload("W3", 1, (2048,), 64, 5, vllm_s=0.364),
    Workload("W0", 64, MIXED, 64, 3, vllm_s=2.54, hf_batch_s=25.2, hf_padded_s=12.9),
    Workload("W2", 32, (8192,), 64, vllm_s=7.85),
    Workload("W1", 256, MIXED, 128, vllm_s=11.0, hf_batch_s=39.4),
    Workload("W4", 256, (512,), 512, vllm_s=11.1, hf_batch_s=36.2),
)
PREFIX = Workload("prefix of 2,048", 1000, (64,), 32, 1, prefix_tokens=2048)
#: Without the cache every request costs the same, so fewer of them show the throughput.
UNCACHED = replace(PREFIX, num_requests=250)


@dataclass(frozen=True)
class Case:
    """An engine, and what it serves.

    Attributes:
        workloads: The workloads, in order.
        suffix: Suffix of the rows' names.
        budget_bytes: None for all free memory.
        prefix_caching: Off for comparisons with rivals that had it off.
        watermark_bytes: Memory that the engine keeps when it is idle.
    """

    workloads: tuple[Workload, ...]
    suffix: str = ""
    budget_bytes: int | None = None
    prefix_caching: bool = False
    watermark_bytes: int | None = None


QUARTER = ", quarter of the memory"
CACHED = ", prefix cache"
ALONE = {"vllm_s": None, "hf_batch_s": None, "hf_padded_s": None}
BY_NAME = {each.name: each for each in WORKLOADS}
CASES = (
    Case((*WORKLOADS, UNCACHED)),
    Case((replace(BY_NAME["W1"], **ALONE),), QUARTER, QUARTER_BYTES),
    Case((PREFIX,), CACHED, prefix_caching=True),
)
_SMOKE_PREFIX = Workload(PREFIX.name, 6, (5,), 3, 1, prefix_tokens=100)
_SMOKE_WORKLOADS = (Workload("W2", 3, (40,), 4, 1), Workload("W1", 6, (5, 9, 20), 3, 1))
SMOKE_CASES = (
    Case((*_SMOKE_WORKLOADS, _SMOKE_PREFIX), budget_bytes=64 * MiB),
    Case((_SMOKE_PREFIX,), CACHED, 64 * MiB, prefix_caching=True),
)
IDLE_CASE = Case(
    (replace(BY_NAME["W0"], name=IDLE, rounds=1, **ALONE),),
    prefix_caching=True,
    watermark_bytes=WATERMARK_BYTES,
)
SMOKE_IDLE_CASE = Case(
    (Workload(IDLE, 6, (40, 60), 4, 1),), "", 64 * MiB, prefix_caching=True, watermark_bytes=2**17
)


@dataclass
class Steps:
    """Keeps the records of an engine's steps, and the most memory that it had created."""

    records: list[StepRecord] = field(default_factory=list)
    is_idle: threading.Event = field(default_factory=threading.Event)
    peak_bytes: int = 0
    watches_memory: bool = False

    def on(self, event: Event, cache: Any) -> None:
        """Keep the record of a step, and whether the engine is idle."""
        if isinstance(event, StepRecord):
            self.records.append(event)
            if self.watches_memory:
                self.peak_bytes = max(self.peak_bytes, cache.pool.stats().created_bytes)
        elif isinstance(event, RequestAdded):
            self.is_idle.clear()
        elif isinstance(event, Idle):
            self.is_idle.set()

    @property
    def mixed_host_s(self) -> list[float]:
        """Planning and mapping of each step that has prompt tokens and decodes as well."""
        return [
            step.plan_s + step.map_s
            for step in self.records
            if step.num_prefill_tokens and step.num_decode_tokens
        ]

    def decode_ms(self, num_sequences: int) -> float | None:
        """Between steps that decode so many and do nothing else; None where there are too few."""
        at = [
            step.start_s
            for step in self.records
            if step.num_decode_tokens == num_sequences and not step.num_prefill_tokens
        ]
        gaps = [later - earlier for earlier, later in itertools.pairwise(at)]
        return 1e3 * statistics.median(gaps[1:]) if len(gaps) > 3 else None


def serve(
    engine: Engine, steps: Steps, workload: Workload, vocabulary: int
) -> tuple[Row, float | None]:
    """Serve a workload a few times; its row, and a decode step of all its requests in ms."""
    prompts = workload.prompts(vocabulary)
    params = SamplingParams(temperature=0, max_tokens=workload.new_tokens, ignore_eos=True)
    seconds, maps, critical, decode, mixed = [], [], [], [], []
    for _ in range(workload.rounds):
        steps.records.clear()
        outputs: list[RequestOutput] = []
        seconds.append(
            seconds_of(lambda made=outputs: made.extend(engine.generate(prompts, params)))
        )
        for output in outputs:
            said = output.outputs[0]
            if len(said.token_ids) != workload.new_tokens:
                raise RuntimeError(f"{workload.name}: a request ended as {said.finish_reason}")
        # Where the host did not wait, the device may have waited for the mapping.
        waited_s = [step.map_s for step in steps.records if step.wait_s < WAIT_MIN_S]
        maps.append(sum(step.map_s for step in steps.records) / seconds[-1])
        critical.append(sum(waited_s) / seconds[-1])
        decode.append(steps.decode_ms(workload.num_requests))
        mixed += steps.mixed_host_s
    row: Row = {
        "workload": workload.name,
        "requests": workload.num_requests,
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": workload.new_tokens,
        **quartiles("seconds", seconds),
        "seconds_best": min(seconds),
        "vllm_seconds": workload.vllm_s,
        "hf_batch_seconds": workload.hf_batch_s,
        "hf_padded_seconds": workload.hf_padded_s,
        "over_vllm": min(seconds) / workload.vllm_s if workload.vllm_s else None,
        "steps": len(steps.records),
        "mapping_share": statistics.median(maps),
        "critical_mapping_share": max(critical),
        "mixed_plan_map_ms": 1e3 * statistics.median(mixed) if mixed else None,
    }
    return row, min(filter(None, decode), default=None)


def figures_of(rows: dict[str, Row], decode_ms: float | None) -> list[Figure]:
    """Time beside vLLM's, decode over the memory floor, mapping, prefixes, and an idle engine."""
    figures = []

    def add(name: str, what: str, got: float, unit: str, rival: str = "", **bounds: float) -> None:
        figures.append(Figure(f"serve_{name}", what, got, unit, rival=rival, **bounds))

    for name, row in sorted(rows.items()):
        if row.get("vllm_seconds"):
            what = f"{row['requests']} requests, {row['prompt_tokens'] // row['requests']} prompt "
            what += f"tokens each on average, {row['new_tokens']} new; the best of its rounds"
            theirs, rival = row["vllm_seconds"], f"vLLM {row['vllm_seconds']:.3g} s"
            add(f"{name.lower()}_seconds", what, row["seconds_best"], "s", rival, at_most=theirs)
    if decode_ms is not None:
        floor_ms = 1e3 * (WEIGHT_BYTES + 32 * 8192 * KV_BYTES_PER_TOKEN) / COPY_BYTES_PER_S
        what = f"a decode step of 32 sequences of 8,192 tokens ({decode_ms:.1f} ms), of the memory "
        what += f"floor ({floor_ms:.1f} ms)"
        add("decode_over_floor", what, decode_ms / floor_ms, "×", at_most=1.25)
    whole, short = rows.get("W1", {}), rows.get(f"W1{QUARTER}", {})
    if whole.get("vllm_seconds"):
        what, got = "mapping that the device may have waited for, over W1", "critical_mapping_share"
        add(got, what, whole[got], "%", at_most=0.005)
    if whole and short:
        what = "throughput of W1 with a quarter of the memory it needs, of that with all"
        got = whole["seconds"] / short["seconds"]
        add("quarter_throughput", what, got, "×", at_least=0.6)
    if short:
        what = "mapping that the device may have waited for, over W1 with a quarter of the memory"
        got = "critical_mapping_share"
        add(f"quarter_{got}", what, short[got], "%", at_most=0.005)
    if PREFIX.name in rows and PREFIX.name + CACHED in rows:
        row, cached = rows[PREFIX.name], rows[PREFIX.name + CACHED]
        what = f"{cached['requests']} requests that share a prefix: throughput with the prefix "
        what += "cache, of that without"
        got = (cached["requests"] / cached["seconds"]) / (row["requests"] / row["seconds"])
        add("prefix_speedup", what, got, "×", at_least=3)
    if IDLE in rows:
        row = rows[IDLE]
        what = f"idle engine: CPU share of a core, over {row['idle_s']:.3g} s"
        add("idle_cpu", what, row["cpu_share"], "%", at_most=0.01)
        what = "idle engine: memory above the watermark of "
        what += f"{row['watermark_bytes'] / MiB:,.5g} MiB, of {row['peak_bytes'] / MiB:,.5g} MiB "
        got = row["above_watermark_bytes"] / MiB
        add("idle_above_watermark_mib", f"{what}before", got, "MiB", at_most=0)
    return figures


async def serve_at_once(
    engine: AsyncEngine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> tuple[float, int]:
    """Stream all prompts together; seconds, and how many of their tokens were cached."""

    async def last(prompt: Sequence[int]) -> RequestOutput:
        output = [each async for each in engine.stream(prompt, params)][-1]
        if output.error is not None:
            raise RuntimeError("a request ended without its tokens") from output.error
        return output

    start = time.perf_counter()
    outputs = await asyncio.gather(*map(last, prompts))
    return time.perf_counter() - start, sum(each.num_cached_tokens for each in outputs)


async def idle_row(engine: Engine, steps: Steps, case: Case, vocabulary: int, idle_s: float) -> Row:
    """A burst, then nothing for `idle_s`, and the burst again. Closes the engine."""
    workload, watermark_bytes = case.workloads[0], case.watermark_bytes or 0
    prompts = workload.prompts(vocabulary)
    params = SamplingParams(temperature=0, max_tokens=workload.new_tokens, ignore_eos=True)
    served = AsyncEngine(engine)
    try:
        busy_s, _ = await serve_at_once(served, prompts, params)
        start = time.perf_counter()
        if not await asyncio.to_thread(steps.is_idle.wait, 300.0):
            raise RuntimeError("the engine does not fall idle")
        give_back_s = time.perf_counter() - start
        kept_bytes = engine.cache.pool.backend.usage().physical_bytes
        cpu_start, start = time.process_time(), time.perf_counter()
        time.sleep(idle_s)
        cpu_s, wall_s = time.process_time() - cpu_start, time.perf_counter() - start
        again_s, cached_tokens = await serve_at_once(served, prompts, params)
    finally:
        await served.shutdown()
    return {
        "workload": workload.name,
        "requests": workload.num_requests,
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": workload.new_tokens,
        "burst_seconds": busy_s,
        "idle_s": wall_s,
        "cpu_share": cpu_s / wall_s,
        "peak_bytes": steps.peak_bytes,
        "watermark_bytes": watermark_bytes,
        "kept_bytes": kept_bytes,
        "above_watermark_bytes": max(0, kept_bytes - watermark_bytes),
        "give_back_ms": 1e3 * give_back_s,
        "burst_again_seconds": again_s,
        "cached_tokens_again": cached_tokens,
    }


def make_engine(
    model: Any, steps: Steps, case: Case, kv_dtype: str, attention: str | None
) -> Engine:
    """The engine with its defaults, but for what a case sets."""
    return Engine(
        model,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_tokens=MAX_TOKENS if model.device.type == "cuda" else 256,
        budget_bytes=case.budget_bytes,
        prefix_caching=case.prefix_caching,
        watermark_bytes=case.watermark_bytes,
        kv_dtype=kv_dtype,
        attention_backend=attention,
        observer=steps,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("serve", __doc__, needs_gpu=True)
    said = "W0 … W4, quarter, prefix, idle; by default all. The result is then called serve_NAME_…"
    bench.option("--only", nargs="+", metavar="NAME", help=said)
    said = "what vllm_workloads.py has measured on this machine, instead of published figures"
    bench.option("--vllm-json", type=Path, metavar="FILE", help=said)
    said = "of keys and values; the result is then called after it"
    bench.option("--kv-dtype", default="auto", help=said)
    bench.option("--attention-backend", help="likewise; by default what the engine takes")
    said = "of the model; the result of another than the first is called after it"
    bench.option("--shape", choices=SHAPES, default="llama-8b", help=said)
    said = "print the kernels that a decode step of W4 takes most time in"
    bench.option("--profile", action="store_true", help=said)
    options = bench.parse(argv)
    formats, smoke = (options.kv_dtype, options.attention_backend), options.smoke
    vllm_s = json.loads(options.vllm_json.read_text()) if options.vllm_json else {}
    config = SHAPES[options.shape](smoke=smoke)
    model = make_model(config, options.device)
    is_other = options.shape != "llama-8b"
    steps = Steps()
    rows: dict[str, Row] = {}
    decode_ms: float | None = None
    kernels: list[Row] = []
    for case in SMOKE_CASES if smoke else CASES:
        names = {each.name + case.suffix: each for each in case.workloads}
        wanted = {name: each for name, each in names.items() if is_wanted(name, options.only)}
        if not wanted:
            continue
        with make_engine(model, steps, case, *formats) as engine:
            for name, workload in wanted.items():
                if workload.vllm_s is not None and (vllm_s or is_other):
                    workload = replace(workload, **{**ALONE, "vllm_s": vllm_s.get(workload.name)})
                row, step_ms = serve(engine, steps, workload, config.vocab_size)
                rows[name] = row | {"workload": name}
                decode_ms = step_ms if name == "W2" and not smoke else decode_ms
                print_rows([rows[name]])
            if options.profile:
                kernels += step_kernels(engine, config.vocab_size, smoke=smoke)
                print_rows(kernels)
    if is_wanted(IDLE, options.only):
        case, idle_s = (SMOKE_IDLE_CASE, 0.2) if smoke else (IDLE_CASE, 10.0)
        watch = Steps(watches_memory=True)
        engine = make_engine(model, watch, case, *formats)
        rows[IDLE] = asyncio.run(idle_row(engine, watch, case, config.vocab_size, idle_s))
    if not rows:
        bench.error(f"there is no workload called {' or '.join(options.only)}")
    kind = [each for each in formats if each not in ("auto", None)]
    kind += [options.shape.replace("-", "_")] if is_other else []
    # The floor is that of whole keys and values; `bench_fp8` has that of others.
    figures = figures_of(rows, None if kind else decode_ms)
    if kind:
        figures = [replace(each, name="_".join([each.name, *kind])) for each in figures]
    constants = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
    constants |= {"weight_bytes": WEIGHT_BYTES, "vllm_in_this_run": bool(vllm_s)}
    constants |= {"kv_dtype": formats[0], "attention_backend": formats[1] or "auto"}
    constants |= {"shape": options.shape, "step_kernels": kernels}
    # A part of the workloads does not replace the result of all.
    whole = {each.name + case.suffix for case in CASES for each in case.workloads}
    only = () if whole <= rows.keys() else options.only or ()
    bench.name = "_".join(["serve", *kind, *only]).lower()
    return bench.finish(list(rows.values()), figures, constants)


def step_kernels(engine: Engine, vocabulary: int, *, smoke: bool) -> list[Row]:
    """Time of a step, and by kernel, in us, the largest first: prompts, then 256 that decode.

    Prompts have 512 tokens, and each step of prompts as many as it may.
    """
    count, length, num_steps = (3, 9, 4) if smoke else (256, 512, 8)
    prompts = Workload("", count, (length,), 4 * num_steps).prompts(vocabulary)
    params = SamplingParams(temperature=0, max_tokens=4 * num_steps, ignore_eos=True)
    handles = [engine.add(prompt, params) for prompt in prompts]
    engine.step()
    found = _largest(engine, "prompts", 1 if smoke else 3)
    while not all(each.requests[0].output_token_ids for each in handles):
        engine.step()
    found += _largest(engine, "decode", num_steps)
    engine.cancel_all()
    while engine.has_unfinished:
        engine.step()
    return found


def _largest(engine: Engine, what: str, num_steps: int) -> list[Row]:
    synchronize()
    start_s = time.perf_counter()
    for _ in range(num_steps):  # Without a profiler, whose own work would count.
        engine.step()
    synchronize()
    whole_us = 1e6 * (time.perf_counter() - start_s)
    with torch.profiler.profile() as profile:
        for _ in range(num_steps):
            engine.step()
        synchronize()
    is_cuda = engine.cache.device.type == "cuda"
    totals = {
        each.key: each.self_device_time_total if is_cuda else each.self_cpu_time_total
        for each in profile.key_averages()
        if (each.device_type == torch.profiler.DeviceType.CUDA) == is_cuda
    }
    largest = sorted(totals, key=totals.__getitem__, reverse=True)[:NUM_KERNELS]
    totals["the whole step"] = whole_us
    largest.insert(0, "the whole step")
    return [{"step": what, "kernel": name[:80], "us": totals[name] / num_steps} for name in largest]


def is_wanted(name: str, only: Sequence[str] | None) -> bool:
    """Whether a workload was asked for, by a word of its name."""
    return not only or any(word.strip(",") in only for word in name.split())


if __name__ == "__main__":
    sys.exit(main())
