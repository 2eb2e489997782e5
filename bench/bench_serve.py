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
from bench_generate import llama_config, make_model
from common import spread, write_result
from report import Figure, Row, bench_parser, make_record, on_gpu, print_figures, print_rows

from vmkv.serve import AsyncEngine, Engine, RequestOutput, SamplingParams
from vmkv.serve.observer import EngineObserver, StepRecord

MIXED = (128, 256, 512, 1024, 2048, 4096)
MAX_TOKENS = 16384
MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 16384
WEIGHT_BYTES = 15.0e9  # What a step reads: the input embedding is not among it.
KV_BYTES_PER_TOKEN = 128 * 1024
COPY_BYTES_PER_S = 4.3e12  # Measured: torch's device-to-device copy, reads and writes counted.
#: Under this the host did not wait: the device had finished before, and may have been idle.
WAIT_MIN_S = 50e-6
SMOKE_BUDGET_BYTES = 2**26
QUARTER_BYTES = 12 * 2**30  # W1's keys and values take 48 GiB.
IDLE = "idle"
IDLE_S = 10.0
SMOKE_IDLE_S = 0.2
WATERMARK_BYTES = 4 * 2**30
SMOKE_WATERMARK_BYTES = 2**17
PATIENCE_S = 300.0  # An engine that is not idle by then never will be.


@dataclass(frozen=True)
class Workload:
    """Requests, and what others took for them, in seconds."""

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
        """Seeded, and the same for every rival."""
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
        workloads: In this order.
        suffix: What the rows' names end in.
        budget_bytes: None for what there is.
        prefix_caching: Off for comparisons with rivals that had it off.
        watermark_bytes: What the engine keeps when it is idle.
    """

    workloads: tuple[Workload, ...]
    suffix: str = ""
    budget_bytes: int | None = None
    prefix_caching: bool = False
    watermark_bytes: int | None = None


QUARTER = ", quarter of the memory"
CACHED = ", prefix cache"
CASES = (
    Case((*WORKLOADS, UNCACHED)),
    Case(
        tuple(
            replace(each, vllm_s=None, hf_batch_s=None) for each in WORKLOADS if each.name == "W1"
        ),
        QUARTER,
        QUARTER_BYTES,
    ),
    Case((PREFIX,), CACHED, prefix_caching=True),
)
_SMOKE_PREFIX = Workload(PREFIX.name, 6, (5,), 3, 1, prefix_tokens=100)
SMOKE_CASES = (
    Case(
        (Workload("W2", 3, (40,), 4, 1), Workload("W1", 6, (5, 9, 20), 3, 1), _SMOKE_PREFIX),
        budget_bytes=SMOKE_BUDGET_BYTES,
    ),
    Case((_SMOKE_PREFIX,), CACHED, SMOKE_BUDGET_BYTES, prefix_caching=True),
)
IDLE_CASE = Case(
    tuple(
        replace(each, name=IDLE, rounds=1, vllm_s=None, hf_batch_s=None, hf_padded_s=None)
        for each in WORKLOADS
        if each.name == "W0"
    ),
    prefix_caching=True,
    watermark_bytes=WATERMARK_BYTES,
)
SMOKE_IDLE_CASE = Case(
    (Workload(IDLE, 6, (40, 60), 4, 1),),
    budget_bytes=SMOKE_BUDGET_BYTES,
    prefix_caching=True,
    watermark_bytes=SMOKE_WATERMARK_BYTES,
)


@dataclass
class Steps(EngineObserver):
    """Watches an engine: keeps what every step took, and knows whether it is idle."""

    records: list[StepRecord] = field(default_factory=list)
    is_idle: threading.Event = field(default_factory=threading.Event)

    def step_finished(self, step: StepRecord, cache: Any) -> None:
        """Keep it."""
        self.records.append(step)

    def request_added(self, request_id: int, num_prompt_tokens: int) -> None:
        """It is not idle now."""
        self.is_idle.clear()

    def idle(self, cache: Any) -> None:
        """It is idle now."""
        self.is_idle.set()

    @property
    def map_s(self) -> float:
        """Growing sequences, in all."""
        return sum(step.map_s for step in self.records)

    @property
    def critical_map_s(self) -> float:
        """That of it for which the device may have waited."""
        return sum(step.map_s for step in self.records if step.wait_s < WAIT_MIN_S)

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


@dataclass
class MemorySteps(Steps):
    """Notes as well how much memory there was at most."""

    peak_bytes: int = 0

    def step_finished(self, step: StepRecord, cache: Any) -> None:
        """Look."""
        super().step_finished(step, cache)
        self.peak_bytes = max(self.peak_bytes, cache.pool.stats().created_bytes)


def serve(
    engine: Engine, steps: Steps, workload: Workload, vocabulary: int
) -> tuple[Row, float | None]:
    """Serve a workload a few times; its row, and a decode step of all its requests in ms."""
    prompts = workload.prompts(vocabulary)
    params = SamplingParams(temperature=0, max_tokens=workload.new_tokens, ignore_eos=True)
    seconds, maps, critical, decode, mixed = [], [], [], [], []
    for _ in range(workload.rounds):
        steps.records.clear()
        synchronize()
        start = time.perf_counter()
        outputs = engine.generate(prompts, params)
        synchronize()
        seconds.append(time.perf_counter() - start)
        for output in outputs:
            said = output.outputs[0]
            if len(said.token_ids) != workload.new_tokens:
                raise RuntimeError(f"{workload.name}: a request ended as {said.finish_reason}")
        maps.append(steps.map_s / seconds[-1])
        critical.append(steps.critical_map_s / seconds[-1])
        decode.append(steps.decode_ms(workload.num_requests))
        mixed += steps.mixed_host_s
    times = spread(seconds)
    row: Row = {
        "workload": workload.name,
        "requests": workload.num_requests,
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": workload.new_tokens,
        "seconds": times["median"],
        "seconds_q1": times["q1"],
        "seconds_q3": times["q3"],
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
    known = [each for each in decode if each is not None]
    return row, min(known, default=None)


def figures_of(rows: dict[str, Row], decode_ms: float | None) -> list[Figure]:
    """What was promised."""
    figures = [
        Figure(
            f"serve_{name.lower()}_seconds",
            f"{row['requests']} requests, {row['prompt_tokens'] // row['requests']} prompt tokens "
            f"each on average, {row['new_tokens']} new; the best of its rounds",
            row["seconds_best"],
            "s",
            at_most=row["vllm_seconds"],
            rival=f"vLLM {row['vllm_seconds']:.3g} s",
        )
        for name, row in sorted(rows.items())
        if row.get("vllm_seconds")
    ]
    if decode_ms is not None:
        floor_ms = 1e3 * (WEIGHT_BYTES + 32 * 8192 * KV_BYTES_PER_TOKEN) / COPY_BYTES_PER_S
        figures.append(
            Figure(
                "serve_decode_over_floor",
                f"a decode step of 32 sequences of 8,192 tokens ({decode_ms:.1f} ms), of the "
                f"memory floor ({floor_ms:.1f} ms)",
                decode_ms / floor_ms,
                "×",
                at_most=1.25,
            )
        )
    if rows.get("W1", {}).get("vllm_seconds"):
        figures.append(
            Figure(
                "serve_critical_mapping_share",
                "mapping that the device may have waited for, over W1",
                rows["W1"]["critical_mapping_share"],
                "%",
                at_most=0.005,
            )
        )
    if f"W1{QUARTER}" in rows and "W1" in rows:
        figures.append(
            Figure(
                "serve_quarter_throughput",
                "throughput of W1 with a quarter of the memory it needs, of that with all",
                rows["W1"]["seconds"] / rows[f"W1{QUARTER}"]["seconds"],
                "×",
                at_least=0.6,
            )
        )
    if f"W1{QUARTER}" in rows:
        figures.append(
            Figure(
                "serve_quarter_critical_mapping_share",
                "mapping that the device may have waited for, over W1 with a quarter of the memory",
                rows[f"W1{QUARTER}"]["critical_mapping_share"],
                "%",
                at_most=on_gpu(0.005),
            )
        )
    if PREFIX.name in rows and PREFIX.name + CACHED in rows:
        row, cached = rows[PREFIX.name], rows[PREFIX.name + CACHED]
        figures.append(
            Figure(
                "serve_prefix_speedup",
                f"{cached['requests']} requests that share a prefix: throughput with the prefix "
                "cache, of that without",
                (cached["requests"] / cached["seconds"]) / (row["requests"] / row["seconds"]),
                "×",
                at_least=3 if torch.cuda.is_available() else None,
            )
        )
    if IDLE in rows:
        figures += idle_figures(rows[IDLE])
    return figures


def idle_figures(row: Row) -> list[Figure]:
    """What was promised of an engine without requests."""
    return [
        Figure(
            "serve_idle_cpu",
            f"idle engine: CPU share of a core, over {row['idle_s']:.3g} s",
            row["cpu_share"],
            "%",
            at_most=on_gpu(0.01),
        ),
        Figure(
            "serve_idle_above_watermark_mib",
            f"idle engine: memory above the watermark of {row['watermark_bytes'] / 2**20:,.5g} "
            f"MiB, of {row['peak_bytes'] / 2**20:,.5g} MiB before",
            row["above_watermark_bytes"] / 2**20,
            "MiB",
            at_most=0,
        ),
    ]


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


async def idle_row(
    engine: Engine, steps: MemorySteps, case: Case, vocabulary: int, idle_s: float
) -> Row:
    """A burst, then nothing for `idle_s`, and the burst again. Closes the engine."""
    workload, watermark_bytes = case.workloads[0], case.watermark_bytes or 0
    prompts = workload.prompts(vocabulary)
    params = SamplingParams(temperature=0, max_tokens=workload.new_tokens, ignore_eos=True)
    served = AsyncEngine(engine)
    try:
        busy_s, _ = await serve_at_once(served, prompts, params)
        start = time.perf_counter()
        if not await asyncio.to_thread(steps.is_idle.wait, PATIENCE_S):
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
    """The engine as anybody would make it."""
    return Engine(
        model,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_tokens=MAX_TOKENS if torch.cuda.is_available() else 256,
        budget_bytes=case.budget_bytes,
        prefix_caching=case.prefix_caching,
        watermark_bytes=case.watermark_bytes,
        kv_dtype=kv_dtype,
        attention_backend=attention,
        observer=steps,
    )


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    parser = bench_parser(__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="W0 … W4, quarter, prefix, idle; by default all. The result is then called "
        "serve_NAME_…",
    )
    parser.add_argument(
        "--vllm-json",
        type=Path,
        metavar="FILE",
        help="what vllm_workloads.py has measured on this machine, instead of published figures",
    )
    parser.add_argument(
        "--kv-dtype", default="auto", help="of keys and values; the result is then called after it"
    )
    parser.add_argument("--attention-backend", help="likewise; by default what the engine takes")
    arguments = parser.parse_args(argv)
    formats = (arguments.kv_dtype, arguments.attention_backend)
    smoke = arguments.smoke or not torch.cuda.is_available()
    vllm_s = json.loads(arguments.vllm_json.read_text()) if arguments.vllm_json else {}
    config = llama_config(smoke=smoke)
    model = make_model(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    steps = Steps()
    rows: dict[str, Row] = {}
    decode_ms: float | None = None
    for case in SMOKE_CASES if smoke else CASES:
        wanted = [
            each
            for each in case.workloads
            if is_wanted(f"{each.name}{case.suffix}", arguments.only)
        ]
        if not wanted:
            continue
        with make_engine(model, steps, case, *formats) as engine:
            for workload in wanted:
                if workload.vllm_s is not None and vllm_s:
                    workload = replace(workload, vllm_s=vllm_s.get(workload.name))
                row, step_ms = serve(engine, steps, workload, config.vocab_size)
                name = workload.name + case.suffix
                rows[name] = row | {"workload": name}
                if name == "W2" and not smoke:
                    decode_ms = step_ms
                print_rows([rows[name]])
    if is_wanted(IDLE, arguments.only):
        case = SMOKE_IDLE_CASE if smoke else IDLE_CASE
        watch = MemorySteps()
        engine = make_engine(model, watch, case, *formats)
        idle_s = SMOKE_IDLE_S if smoke else IDLE_S
        rows[IDLE] = asyncio.run(idle_row(engine, watch, case, config.vocab_size, idle_s))
    if not rows:
        parser.error(f"there is no workload called {' or '.join(arguments.only)}")
    kind = [each for each in formats if each not in ("auto", None)]
    # The floor is that of whole keys and values; `bench_fp8` has that of others.
    figures = figures_of(rows, None if kind else decode_ms)
    if kind:
        figures = [replace(each, name="_".join([each.name, *kind])) for each in figures]
    print_rows(list(rows.values()))
    print_figures(figures)
    constants = {
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "weight_bytes": WEIGHT_BYTES,
        "vllm_in_this_run": bool(vllm_s),
        "kv_dtype": arguments.kv_dtype,
        "attention_backend": arguments.attention_backend or "auto",
    }
    record = make_record(__doc__, list(rows.values()), figures, constants)
    if arguments.json or not smoke:
        # A part of the workloads does not replace the result of all.
        whole = {each.name + case.suffix for case in CASES for each in case.workloads}
        only = () if whole <= rows.keys() else arguments.only or ()
        name = "_".join(["serve", *kind, *only]).lower()
        print("wrote", write_result(name, record, arguments.json))
    return 0


def is_wanted(name: str, only: Sequence[str] | None) -> bool:
    """Whether a workload was asked for, by a word of its name."""
    return not only or any(word.strip(",") in only for word in name.split())


if __name__ == "__main__":
    sys.exit(main())
