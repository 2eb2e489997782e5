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
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench_serve import COPY_BYTES_PER_S, KV_BYTES_PER_TOKEN, WEIGHT_BYTES, Steps
from harness import Bench, Figure, Row, paired_ratio, print_rows, quartiles, seconds_of
from models import (
    LLAMA_3_8B,
    CacheShape,
    close_cache,
    llama_config,
    make_model,
    open_cache,
    open_pool,
)

import vmkv
from vmkv import Engine, OutOfPagesError, SamplingParams
from vmkv.attention import AttentionSpec, get
from vmkv.core.cache.fp8 import FP8
from vmkv.serve.request import packed_prompt
from vmkv.units import GiB, KiB, MiB

DTYPES = {"bfloat16": torch.bfloat16, "fp8": FP8}
KV_DTYPES = {"bfloat16": "auto", "fp8": "fp8"}


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        shape: The cache without a model.
        num_sequences: Sequences that decode.
        num_tokens: Tokens of a sequence.
        new_tokens: Decoded tokens.
        repeats: Repeats of an operation.
        budget_bytes: Budget for `fit`, and for moving sequences.
        page_bytes: Page size of the host's backend.
        smoke: Whether it is a small run on the host.
    """

    shape: CacheShape
    num_sequences: int
    num_tokens: int
    new_tokens: int
    repeats: int
    budget_bytes: int
    page_bytes: int = 2 * MiB
    smoke: bool = False


LLAMA = Case(LLAMA_3_8B, 32, 8192, 64, 15, 32 * GiB)
SMOKE = Case(CacheShape("smoke", 2, 2, 16), 3, 40, 4, 2, MiB, 4 * KiB, smoke=True)


def served(model: Any, case: Case, name: str, backend: str | None) -> Row:
    """An engine's times for all prompts."""
    source, top = random.Random(0), model.config.vocab_size - 1
    prompts = [
        [source.randint(5, top) for _ in range(case.num_tokens)] for _ in range(case.num_sequences)
    ]
    steps = Steps()

    def generate(num_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        engine.generate(prompts, params)

    with Engine(
        model,
        kv_dtype=KV_DTYPES[name],
        attention_backend=backend,
        max_num_seqs=case.num_sequences,
        max_num_batched_tokens=max(case.num_tokens, 64),
        max_tokens=2 * case.num_tokens,
        budget_bytes=64 * MiB if case.smoke else None,
        prefix_caching=False,
        observer=steps,
    ) as engine:
        stored = {str(group.dtype) for group in engine.cache.groups}
        overread_tokens = engine.cache.overread_tokens
        prefill, decode = [], []
        for _ in range(2):
            prefill.append(seconds_of(lambda: generate(1)))
            steps.records.clear()
            generate(case.new_tokens)
            decode.append(steps.decode_ms(case.num_sequences))
        print(f"{name}: rows in {sorted(stored)}, over-read {overread_tokens}", flush=True)
    kv_bytes = case.num_sequences * case.num_tokens * KV_BYTES_PER_TOKEN // (1 + (name == "fp8"))
    return {
        "operation": "serve",
        "type": name,
        "prefill_ms": 1e3 * min(prefill),
        "decode_ms": min(filter(None, decode), default=None),
        "floor_ms": 1e3 * (WEIGHT_BYTES + kv_bytes) / COPY_BYTES_PER_S,
        "overread_tokens": overread_tokens,
    }


class Subject:
    """A cache without a model, with one recorded sequence in it."""

    def __init__(self, case: Case, name: str):
        pool = open_pool(
            case.budget_bytes // 2,
            smoke=case.smoke,
            host_budget_bytes=case.budget_bytes // 4,
            page_bytes=case.page_bytes,
        )
        options = {"max_tokens": 2 * case.num_tokens, "max_sequences": 8}
        self.cache = open_cache(pool, case.shape, DTYPES[name], **options)
        self.tokens = list(range(case.num_tokens))
        # Packed in advance, as the engine does when a request is added.
        self.prompt = packed_prompt((*self.tokens, 1), None, case.num_tokens)
        self.source = self.cache.open()
        self.source.append(case.num_tokens)
        self.source.record(self.tokens)

    def fork(self) -> float:
        """Seconds of a fork."""
        return self._opened(self.source.fork)[0]

    def prefix_hit(self) -> float:
        """Seconds to open a sequence whose prefix is in a live row."""
        seconds, num_cached = self._opened(lambda: self.cache.open(prompt=self.prompt))
        if num_cached < len(self.tokens) - 16:
            raise AssertionError(f"{num_cached} tokens were found")
        return seconds

    def _opened(self, work: Callable[[], vmkv.Sequence]) -> tuple[float, int]:
        """Seconds of `work`, and the cached tokens of the sequence that it returns."""
        made: list[vmkv.Sequence] = []
        seconds = seconds_of(lambda: made.append(work()))
        num_cached = made[0].num_cached_tokens
        made[0].close()
        self.cache.trim()
        return seconds, num_cached

    def swap_out(self) -> float:
        """Seconds until the memory is free."""
        return seconds_of(self.source.swap_out)

    def swap_in(self) -> float:
        """Seconds until the sequence is on the device; always after `swap_out`."""
        return seconds_of(self.source.swap_in)


#: Operations of one entry take turns.
OPERATIONS: tuple[dict[str, Callable[[Subject], float]], ...] = (
    {"fork": Subject.fork},
    {"prefix hit": Subject.prefix_hit},
    {"swap out": Subject.swap_out, "swap in": Subject.swap_in},
)


def moved(case: Case) -> list[Row]:
    """A row for each operation and type."""
    subjects = {name: Subject(case, name) for name in DTYPES}
    samples: dict[tuple[str, str], list[float]] = {}
    for together in OPERATIONS:
        for repeat in range(case.repeats + 2):
            for operation, run in together.items():
                for name in list(DTYPES) if repeat % 2 else reversed(DTYPES):
                    taken = run(subjects[name])
                    if repeat > 1:  # Host memory is created at first.
                        samples.setdefault((operation, name), []).append(taken)
    for subject in subjects.values():
        close_cache(subject.cache)
    rows = []
    for operation in itertools.chain(*OPERATIONS):
        for name in DTYPES:
            taken, wide = samples[operation, name], samples[operation, "bfloat16"]
            row: Row = {"operation": operation, "type": name}
            row |= quartiles("ms", [1e3 * each for each in taken])
            rows.append(row | {"ratio": paired_ratio(taken, wide)})
    return rows


def fitting(case: Case) -> list[Row]:
    """How many sequences fit, by type."""
    rows: list[Row] = []
    for name, dtype in DTYPES.items():
        pool = open_pool(case.budget_bytes, smoke=case.smoke, page_bytes=case.page_bytes)
        limit = 8 * case.budget_bytes // (case.num_tokens * case.shape.token_bytes)
        options = {"max_tokens": 2 * case.num_tokens, "max_sequences": limit}
        cache = open_cache(pool, case.shape, dtype, **options)
        if not case.smoke:
            dim = case.shape.head_dim
            spec = AttentionSpec("cuda", torch.bfloat16, 1, 1, dim, dim, kv_dtype=dtype)
            cache.keep_resident(get("flash3").overread_tokens(spec))
        count = 0
        try:
            for count in itertools.count():  # noqa: B007  # counts the sequences that fit
                cache.open().append(case.num_tokens)
        except OutOfPagesError:
            pass
        rows.append({"operation": "fit", "type": name, "sequences": count})
        cache.close()
        pool.close()
    rows[1]["ratio"] = rows[1]["sequences"] / rows[0]["sequences"]
    return rows


def promised(rows: Sequence[Row]) -> list[Figure]:
    """Eight bits relative to bfloat16."""
    by_key = {(row["operation"], row["type"]): row for row in rows}
    figures = []

    def add(name: str, what: str, got: float, rival: str, **bounds: float) -> None:
        figures.append(Figure(f"fp8_{name}", what, got, "×", rival=f"bfloat16 {rival}", **bounds))

    wide, narrow = by_key.get(("serve", "bfloat16")), by_key.get(("serve", "fp8"))
    if wide and narrow and wide["decode_ms"] and narrow["decode_ms"]:
        step_ms, wide_ms = narrow["decode_ms"], wide["decode_ms"]
        what = f"a decode step of 32 sequences of 8,192 tokens in eight bits ({step_ms:.1f} ms), "
        what += "relative to bfloat16"
        add("decode_ratio", what, step_ms / wide_ms, f"{wide_ms:.1f} ms", at_most=0.75)
        what = f"that step, of the memory floor ({narrow['floor_ms']:.1f} ms)"
        rival = f"{wide_ms / wide['floor_ms']:.2f} ×"
        add("decode_over_floor", what, step_ms / narrow["floor_ms"], rival, at_most=1.3)
        prefill_ms, wide_ms = narrow["prefill_ms"], wide["prefill_ms"]
        what = "prefill of 32 prompts of 8,192 tokens in eight bits "
        what += f"({prefill_ms:,.0f} ms), relative to bfloat16"
        add("prefill_ratio", what, prefill_ms / wide_ms, f"{wide_ms:,.0f} ms", at_most=1.03)
    for operation in itertools.chain(*OPERATIONS):
        if (operation, "fp8") in by_key:
            name = f"{operation.replace(' ', '_')}_ratio"
            what = f"{operation} of 8,192 tokens in eight bits, relative to bfloat16"
            rival = f"{by_key[operation, 'bfloat16']['ms']:.2f} ms"
            add(name, what, by_key[operation, "fp8"]["ratio"], rival, at_most=0.6)
    if ("fit", "fp8") in by_key:
        what = "sequences of 8,192 tokens that fit, relative to bfloat16"
        rival = f"{by_key['fit', 'bfloat16']['sequences']}"
        add("fit_ratio", what, by_key["fit", "fp8"]["ratio"], rival, at_least=1.95)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("fp8", __doc__, needs_gpu=True)
    bench.option("--only", choices=("serve", "memory"), help="a part; by default all")
    bench.option("--attention-backend", help="by default what the engine takes")
    options = bench.parse(argv)
    if options.only is not None:
        bench.name = f"fp8_{options.only}"
    case = SMOKE if options.smoke else LLAMA
    rows: list[Row] = []
    if options.only != "serve":
        rows += moved(case) + fitting(case)
        print_rows(rows)
    if options.only != "memory":
        model = make_model(llama_config(smoke=options.smoke), options.device)
        rows += [served(model, case, name, options.attention_backend) for name in KV_DTYPES]
    return bench.finish(rows, promised(rows), {"rounds": 2})


if __name__ == "__main__":
    sys.exit(main())
