"""What do keys and values in eight bits gain: time of a step, of moving sequences, and room?

Question. The same model, served with keys and values in bfloat16 and in float8_e4m3fn: how long do
a decode step of 32 sequences of 8,192 tokens and the prefill of such prompts take, how long a fork,
a prefix hit and a swap of one, and how many fit the same memory?

Prediction. A decode step of Llama-3-8B's shape reads 15.0 GB of weights and 34.4 GB of keys and
values: 11.5 ms at 4.3 TB/s, and 7.5 ms with 17.2 GB. bfloat16 takes 13.3 ms; the kernels for eight
bits reach less of the bandwidth, since they turn values around in shared memory: 9.4 ms, 0.71
times, and 1.25 times its floor. One launch more a layer, for the queries, is 2 us of 290. Prefill
computes: attention is a tenth of it at 8,192 tokens, and not slower: 1.00 times. 8,192 tokens are
512 MiB instead of 1 GiB, so a fork maps 8 extents instead of 16, and a swap copies half: 0.5 to
0.55 times; a prefix hit compares as many tokens, 0.1 ms, beside: 0.6 times. A sequence is 512 MiB
and a key tile of 14 MiB, instead of 1,024 and 22: 1.99 times as many fit.

Method. Random weights in bfloat16; prompts of random tokens, no two alike. Each engine serves all
prompts twice: one token each (`prefill`), then 64 (`decode`: the median time between steps that
decode all). Memory is moved in a cache without a model, through `open`, `fork`, `swap_out` and
`swap_in`, until the device is idle: forks, hits and swaps each by themselves, because the host that
has waited for a copy of 20 ms finds its own caches cold. Both types take turns, and a ratio is the
median of those of neighbours. `fit` opens sequences of 8,192 tokens until there is no memory for
another, with the over-read that the kernel asks for.

Rivals. bfloat16, in the same run.

Not measured. Accuracy (`bench_fp8_accuracy`); models with sliding windows or other head sizes.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench_generate import llama_config, make_model
from bench_serve import COPY_BYTES_PER_S, KV_BYTES_PER_TOKEN, WEIGHT_BYTES, Steps
from common import spread, write_result
from report import Figure, Row, bench_parser, make_record, print_figures, print_rows

import vmkv
from vmkv import Engine, HostBackend, KVCache, OutOfPagesError, SamplingParams, open_backend
from vmkv.attention.flash3 import Flash3Backend
from vmkv.cache.fp8 import FP8
from vmkv.memory import ExtentPool
from vmkv.serve.prompts import packed_prompt
from vmkv.units import GiB, KiB, MiB

DTYPES = {"bfloat16": torch.bfloat16, "fp8": FP8}
KV_DTYPES = {"bfloat16": "auto", "fp8": "fp8"}
ROUNDS = 2
#: Until the device is idle. `torch.cuda.synchronize` asks first which device is meant, and a caller
#: whether there is any: that would be measured as well.
_wait_for_device: Callable[[], None] = (
    torch._C._cuda_synchronize if torch.cuda.is_available() else lambda: None
)


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        num_layers: Of the cache without a model, as its other sizes.
        num_sequences: That decode.
        num_tokens: Of a sequence.
        new_tokens: That are decoded.
        repeats: Of an operation.
        budget_bytes: For `fit`, and for what is moved.
        page_bytes: Of the host's backend.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_sequences: int
    num_tokens: int
    new_tokens: int
    repeats: int
    budget_bytes: int
    page_bytes: int


LLAMA_3_8B = Case(32, 8, 128, 32, 8192, 64, 15, 32 * GiB, 2 * MiB)
SMOKE = Case(2, 2, 16, 3, 40, 4, 2, MiB, 4 * KiB)


# ---- the engine ---------------------------------------------------------------------------


def served(model: Any, case: Case, name: str, backend: str | None) -> Row:
    """An engine's times for all prompts."""
    source = random.Random(0)
    top = model.config.vocab_size - 1
    prompts = [
        [source.randint(5, top) for _ in range(case.num_tokens)] for _ in range(case.num_sequences)
    ]
    steps = Steps()
    with Engine(
        model,
        kv_dtype=KV_DTYPES[name],
        attention_backend=backend,
        max_num_seqs=case.num_sequences,
        max_num_batched_tokens=max(case.num_tokens, 64),
        max_tokens=2 * case.num_tokens,
        budget_bytes=None if torch.cuda.is_available() else 64 * MiB,
        prefix_caching=False,
        observer=steps,
    ) as engine:
        stored = {str(group.dtype) for group in engine.cache.groups}
        overread_tokens = engine.cache.overread_tokens
        prefill, decode = [], []
        for _ in range(ROUNDS):
            prefill.append(seconds_of(lambda: engine.generate(prompts, _params(1))))
            steps.records.clear()
            engine.generate(prompts, _params(case.new_tokens))
            step_ms = steps.decode_ms(case.num_sequences)
            if step_ms is not None:
                decode.append(step_ms)
        print(f"{name}: rows in {sorted(stored)}, over-read {overread_tokens}", flush=True)
    kv_bytes = case.num_sequences * case.num_tokens * KV_BYTES_PER_TOKEN // (1 + (name == "fp8"))
    floor_ms = 1e3 * (WEIGHT_BYTES + kv_bytes) / COPY_BYTES_PER_S
    return {
        "operation": "serve",
        "type": name,
        "prefill_ms": 1e3 * min(prefill),
        "decode_ms": min(decode, default=None),
        "floor_ms": floor_ms,
        "overread_tokens": overread_tokens,
    }


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


# ---- what is moved ------------------------------------------------------------------------


class Subject:
    """A cache without a model, with one recorded sequence in it."""

    def __init__(self, case: Case, name: str, *, use_gpu: bool):
        backend = open_backend("cuda:0") if use_gpu else HostBackend(case.page_bytes)
        self.pool = ExtentPool(
            backend, case.budget_bytes // 2, host_budget_bytes=case.budget_bytes // 4
        )
        self.cache = KVCache(
            self.pool,
            max_tokens=2 * case.num_tokens,
            max_sequences=8,
            layers_per_group=case.num_layers,
        )
        self.cache.add_layers(
            range(case.num_layers),
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            dtype=DTYPES[name],
        )
        self.tokens = list(range(case.num_tokens))
        # As the engine has it when it looks: packed when it was asked.
        self.prompt = packed_prompt((*self.tokens, 1), None, case.num_tokens)
        self.source = self.cache.open()
        self.source.append(case.num_tokens)
        self.source.record(self.tokens)

    def fork(self) -> float:
        """Seconds of a fork."""
        made: list[vmkv.Sequence] = []
        taken = seconds_of(lambda: made.append(self.source.fork()))
        return self._ended(made, taken)

    def prefix_hit(self) -> float:
        """Seconds until a prompt has found its beginning in a live row."""
        made: list[vmkv.Sequence] = []
        taken = seconds_of(lambda: made.append(self.cache.open(prompt=self.prompt)))
        if made[0].num_cached_tokens < len(self.tokens) - 16:
            raise AssertionError(f"{made[0]} found {made[0].num_cached_tokens} tokens")
        return self._ended(made, taken)

    def _ended(self, made: list[vmkv.Sequence], taken: float) -> float:
        made[0].close()
        self.cache.trim()
        return taken

    def swap_out(self) -> float:
        """Seconds until the memory is free."""
        return seconds_of(self.source.swap_out)

    def swap_in(self) -> float:
        """Seconds until it is back; always after `swap_out`."""
        return seconds_of(self.source.swap_in)

    def close(self) -> None:
        self.cache.check()
        self.cache.close()
        self.pool.close()


#: Those of an entry take turns.
OPERATIONS: tuple[dict[str, Callable[[Subject], float]], ...] = (
    {"fork": Subject.fork},
    {"prefix hit": Subject.prefix_hit},
    {"swap out": Subject.swap_out, "swap in": Subject.swap_in},
)


def moved(case: Case, *, use_gpu: bool) -> list[Row]:
    """A row for each operation and type."""
    subjects = {name: Subject(case, name, use_gpu=use_gpu) for name in DTYPES}
    samples: dict[tuple[str, str], list[float]] = {}
    for together in OPERATIONS:
        for repeat in range(case.repeats + 2):
            for operation, run in together.items():
                names = list(DTYPES) if repeat % 2 else list(reversed(DTYPES))
                for name in names:
                    taken = run(subjects[name])
                    if repeat > 1:  # Host memory is created at first.
                        samples.setdefault((operation, name), []).append(taken)
    for subject in subjects.values():
        subject.close()
    rows = []
    for operation in itertools.chain(*OPERATIONS):
        pairs = zip(samples[operation, "fp8"], samples[operation, "bfloat16"], strict=True)
        ratio = statistics.median(fp8 / wide for fp8, wide in pairs)
        for name in DTYPES:
            values = spread([1e3 * each for each in samples[operation, name]])
            rows.append(
                {
                    "operation": operation,
                    "type": name,
                    "ms": values["median"],
                    "ms_q1": values["q1"],
                    "ms_q3": values["q3"],
                    "ratio": ratio if name == "fp8" else 1.0,
                }
            )
    return rows


def fitting(case: Case, *, use_gpu: bool) -> list[Row]:
    """How many sequences fit, by type."""
    rows = []
    for name, dtype in DTYPES.items():
        backend = open_backend("cuda:0") if use_gpu else HostBackend(case.page_bytes)
        pool = ExtentPool(backend, case.budget_bytes)
        limit = 4 * case.budget_bytes // (case.num_tokens * _token_bytes(case))
        cache = KVCache(
            pool,
            max_tokens=2 * case.num_tokens,
            max_sequences=limit,
            layers_per_group=case.num_layers,
        )
        cache.add_layers(
            range(case.num_layers),
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            dtype=dtype,
        )
        if use_gpu:
            cache.keep_resident(Flash3Backend().overread_tokens(case.head_dim, kv_dtype=dtype))
        count = 0
        try:
            for count in itertools.count():  # noqa: B007  # how many there are is what is asked
                cache.open().append(case.num_tokens)
        except OutOfPagesError:
            pass
        rows.append({"operation": "fit", "type": name, "sequences": count})
        cache.close()
        pool.close()
    rows[1]["ratio"] = rows[1]["sequences"] / rows[0]["sequences"]
    return rows


def _token_bytes(case: Case) -> int:
    """In eight bits."""
    return 2 * case.num_layers * case.num_kv_heads * case.head_dim


def seconds_of(work: Callable[[], object]) -> float:
    """Until the device is idle again, from when it was."""
    _wait_for_device()
    start = time.perf_counter()
    work()
    _wait_for_device()
    return time.perf_counter() - start


# ---- the record ---------------------------------------------------------------------------


def promised(rows: Sequence[Row], *, smoke: bool) -> list[Figure]:
    """What was promised."""
    by_key = {(row["operation"], row["type"]): row for row in rows}
    figures = []

    def add(name: str, what: str, got: float, *, rival: str, **bounds: float) -> None:
        figures.append(
            Figure(f"fp8_{name}", what, got, "×", rival=rival, **({} if smoke else bounds))
        )

    wide, narrow = by_key.get(("serve", "bfloat16")), by_key.get(("serve", "fp8"))
    if wide and narrow and wide["decode_ms"] and narrow["decode_ms"]:
        step_ms = narrow["decode_ms"]
        rival = f"bfloat16 {wide['decode_ms']:.1f} ms"
        add(
            "decode_ratio",
            f"a decode step of 32 sequences of 8,192 tokens in eight bits ({step_ms:.1f} ms), "
            "relative to bfloat16",
            step_ms / wide["decode_ms"],
            at_most=0.75,
            rival=rival,
        )
        floor_ms = narrow["floor_ms"]
        add(
            "decode_over_floor",
            f"that step, of the memory floor ({floor_ms:.1f} ms)",
            step_ms / floor_ms,
            at_most=1.3,
            rival=f"bfloat16 {wide['decode_ms'] / wide['floor_ms']:.2f} ×",
        )
        add(
            "prefill_ratio",
            f"prefill of 32 prompts of 8,192 tokens in eight bits ({narrow['prefill_ms']:,.0f} "
            "ms), relative to bfloat16",
            narrow["prefill_ms"] / wide["prefill_ms"],
            at_most=1.03,
            rival=f"bfloat16 {wide['prefill_ms']:,.0f} ms",
        )
    for operation in itertools.chain(*OPERATIONS):
        if (operation, "fp8") in by_key:
            add(
                f"{operation.replace(' ', '_')}_ratio",
                f"{operation} of 8,192 tokens in eight bits, relative to bfloat16",
                by_key[operation, "fp8"]["ratio"],
                at_most=0.6,
                rival=f"bfloat16 {by_key[operation, 'bfloat16']['ms']:.2f} ms",
            )
    if ("fit", "fp8") in by_key:
        add(
            "fit_ratio",
            "sequences of 8,192 tokens that fit, relative to bfloat16",
            by_key["fit", "fp8"]["ratio"],
            at_least=1.95,
            rival=f"bfloat16 {by_key['fit', 'bfloat16']['sequences']}",
        )
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    parser = bench_parser(__doc__)
    parser.add_argument("--only", choices=("serve", "memory"), help="a part; by default all")
    parser.add_argument("--attention-backend", help="by default what the engine takes")
    arguments = parser.parse_args(argv)
    smoke = arguments.smoke or not torch.cuda.is_available()
    case = SMOKE if smoke else LLAMA_3_8B
    rows: list[Row] = []
    if arguments.only != "serve":
        rows += moved(case, use_gpu=not smoke)
        rows += fitting(case, use_gpu=not smoke)
        print_rows(rows)
    if arguments.only != "memory":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = make_model(llama_config(smoke=smoke), device)
        for name in KV_DTYPES:
            rows.append(served(model, case, name, arguments.attention_backend))
            print_rows(rows[-1:])
    figures = promised(rows, smoke=smoke)
    print_rows(rows)
    print_figures(figures)
    if arguments.json is not None or not smoke:
        name = "fp8" if arguments.only is None else f"fp8_{arguments.only}"
        record = make_record(__doc__, rows, figures, {"rounds": ROUNDS})
        print("wrote", write_result(name, record, arguments.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
