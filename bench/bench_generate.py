"""What does a model pay for its cache: memory over the weights, decode and prefill time?

Question. The same model, prompts and loop through DynamicCache and through VMKVCache: how much
device memory do they take over the weights, how long does a decode step take, and how long the
prefill?

Prediction. Keys and values are 128 KiB a token: 16 * 8,240 tokens are 16.1 GiB, twice that for 32.
DynamicCache's `torch.cat` makes every tensor again at each step, in sizes the allocator cannot
reuse: 3.9 times the KV was measured. VMKVCache maps what the tokens need, 1 % more, and torch adds
the activations of a chunk (batch 32: 16,384 tokens * 14,336 * 2 B = 0.45 GiB for each of a few
tensors): at most 1.15 and 1.10 times the KV. A decode step reads 16 GB of weights and the KV, 11.6
ms at 32 x 8,192, but the eager loop takes the host 25 ms. `cat` reads and writes all KV besides,
16 ms at 32 x 8,192 at least: 39.6 ms were measured, and 28.7 at 16 x 8,192. Without it the host's
25 to 32 ms remain: at most 1.0 and 0.75 times. Prefill computes: the same, at most 1.02 times.

Method. Llama-3-8B's shape in bfloat16, random weights made on the GPU. Prefill in chunks of 512
with `logits_to_keep=1`, then 48 greedy steps by hand, without a synchronisation inside. The caches
take turns, A B A B, in one process, with `empty_cache` and `reset_peak_memory_stats` before each
run, after one short run of each to warm up. `decode_ms` is the time of all steps over 48; the
quartiles beside `step_ms` are those of single steps, between CUDA events. `memory_bytes` is the
peak of torch's reserved memory over what it held for the weights, plus all that vmkv's pool
created; `device_bytes` is what the driver says is gone at the end.

Rivals. DynamicCache(config) of the installed transformers, in torch's default allocator. Run it
again with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True for its best case (the result file gets
a name of its own). With --sdpa, torch's attention as well, and there a StaticCache of exactly the
final length, which cannot be had with flash-attn 2.

Not measured. Ragged or padded batches, `generate`'s own overhead, torch.compile, quality (weights
are random; `same_tokens_share` says how many tokens agree with DynamicCache's).
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness import HAS_GPU, Bench, Figure, Row, in_turns, print_rows, quartiles, synchronize
from models import (
    created_bytes,
    free_device_bytes,
    llama_config,
    make_model,
    random_prompts,
    reserved_bytes,
    reset_memory,
    token_bytes_of,
)
from transformers import LlamaForCausalLM
from transformers.cache_utils import DynamicCache, StaticCache

from vmkv import VMKVCache

ALLOCATOR_SLUG = "other_allocator"  # in names, where PYTORCH_CUDA_ALLOC_CONF is set


@dataclass(frozen=True)
class Case:
    """A batch of equal prompts through one attention implementation."""

    attention: str
    batch: int
    prompt_tokens: int
    caches: tuple[str, ...] = ("DynamicCache", "VMKVCache")
    rounds: int = 2  # A B A B

    @property
    def name(self) -> str:
        """`16x8192`."""
        return f"{self.batch}x{self.prompt_tokens}"


# The smaller case is bound by the host, whose speed wanders by 10 %: it takes more rounds.
CASES = (Case("flash_attention_2", 16, 8192, rounds=6), Case("flash_attention_2", 32, 8192))
SDPA_CASES = (Case("sdpa", 16, 8192, ("DynamicCache", "VMKVCache", "StaticCache")),)
SMOKE_CASES = (Case("sdpa", 2, 24, ("DynamicCache", "VMKVCache", "StaticCache")),)
#: By case: memory over the KV, decode and prefill over DynamicCache, at most.
MUST = {"16x8192": (1.15, 1.0, 1.02), "32x8192": (1.10, 0.75, 1.02)}


def make_cache(name: str, model: LlamaForCausalLM, num_tokens: int) -> Any:
    """One of the caches, empty."""
    if name == "StaticCache":
        return StaticCache(config=model.config, max_cache_len=num_tokens)
    return {"VMKVCache": VMKVCache, "DynamicCache": DynamicCache}[name](config=model.config)


def mark() -> Any:
    """The current time; on a GPU, a CUDA event, which does not synchronise."""
    if not HAS_GPU:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def step_times_ms(at: list) -> list[float]:
    """Milliseconds between neighbouring marks of `mark`; waits for the last."""
    synchronize()
    if HAS_GPU:
        return [start.elapsed_time(end) for start, end in itertools.pairwise(at)]
    return [1e3 * (end - start) for start, end in itertools.pairwise(at)]


@torch.inference_mode()
def run(model: LlamaForCausalLM, case: Case, cache_name: str, chunk: int, steps: int) -> Row:
    """One prefill and `steps` decode steps; a row with times and memory."""
    reset_memory()
    reserved_before, free_before = reserved_bytes(), free_device_bytes()
    ids = random_prompts(model, case.batch, case.prompt_tokens)
    cache = make_cache(cache_name, model, case.prompt_tokens + steps)
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}

    synchronize()
    start = time.perf_counter()
    for at in range(0, case.prompt_tokens, chunk):
        logits = model(ids[:, at : at + chunk], **options).logits
    synchronize()
    prefill_s = time.perf_counter() - start

    token = logits[:, -1:].argmax(-1)
    tokens, marks = [token], [mark()]
    start = time.perf_counter()
    for _ in range(steps):
        token = model(token, **options).logits[:, -1:].argmax(-1)
        tokens.append(token)
        marks.append(mark())
    synchronize()
    decode_ms = 1e3 * (time.perf_counter() - start) / steps

    is_ours = cache_name == "VMKVCache"
    pool_bytes = created_bytes(cache) if is_ours else 0
    torch_bytes = reserved_bytes(peak=True) - reserved_before
    result = {
        "prefill_s": prefill_s,
        "decode_ms": decode_ms,
        "steps_ms": step_times_ms(marks),
        "torch_bytes": torch_bytes,
        "vmkv_bytes": pool_bytes,
        "memory_bytes": torch_bytes + pool_bytes,
        "device_bytes": free_before - free_device_bytes(),
        "tokens": torch.cat(tokens, dim=1).cpu(),
    }
    if is_ours:
        cache.close()
    return result


def run_case(model: LlamaForCausalLM, case: Case, chunk: int, steps: int) -> list[Row]:
    """The caches in turn; one row for each."""
    model.set_attn_implementation(case.attention)
    warmup = Case(case.attention, case.batch, min(case.prompt_tokens, 2 * chunk))
    runs: dict[str, list[Row]] = {name: [] for name in case.caches}
    failures: dict[str, str] = {}
    for name, at in in_turns(case.caches, case.rounds, warmup=1):
        if at < 0:
            run(model, warmup, name, chunk, 2)
            continue
        try:
            runs[name].append(run(model, case, name, chunk, steps))
        except torch.OutOfMemoryError as error:  # possible for DynamicCache at 32 x 8,192
            failures[name] = str(error).partition(".")[0]

    kv_bytes = case.batch * (case.prompt_tokens + steps) * token_bytes_of(model.config)
    what = {"attention": case.attention, "batch": case.batch, "prompt_tokens": case.prompt_tokens}
    rows = []
    for name, taken in runs.items():
        row: Row = {**what, "cache": name, "kv_bytes": kv_bytes}
        if not taken:
            rows.append(row | {"failure": failures[name]})
            continue
        for key in ("torch_bytes", "vmkv_bytes", "memory_bytes", "device_bytes"):
            row[key] = max(each[key] for each in taken)
        row["memory_ratio"] = row["memory_bytes"] / kv_bytes
        for key in ("decode_ms", "prefill_s"):
            row |= quartiles(key, [each[key] for each in taken])
            pairs = zip(taken, runs["DynamicCache"], strict=False)
            ratios = [mine[key] / theirs[key] for mine, theirs in pairs]
            row[f"{key}_ratio"] = statistics.median(ratios) if ratios else None
        row |= quartiles("step_ms", [step for each in taken for step in each["steps_ms"]])
        if runs["DynamicCache"]:
            same = taken[0]["tokens"] == runs["DynamicCache"][0]["tokens"]
            row["same_tokens_share"] = same.float().mean().item()
        rows.append(row | {"runs": len(taken)})
    return rows


def promised(cases: Sequence[Case], rows: Sequence[Row], allocator: str) -> list[Figure]:
    """Memory, decode and prefill of the cases that were run, against DynamicCache."""
    by_key = {
        (row["attention"], row["batch"], row["prompt_tokens"], row["cache"]): row for row in rows
    }
    figures = []
    for case in cases:
        key = (case.attention, case.batch, case.prompt_tokens)
        ours, theirs = (by_key[(*key, name)] for name in ("VMKVCache", "DynamicCache"))
        if "memory_ratio" not in ours:
            continue
        has_promise = case.attention == "flash_attention_2" and case.name in MUST
        memory, decode, prefill = MUST[case.name] if has_promise else (None, None, None)
        suffix = case.name if has_promise else f"{case.attention}_{case.name}"
        where = f"{case.attention}, {case.batch} × {case.prompt_tokens:,}"
        if allocator:
            suffix, where = f"{suffix}_{ALLOCATOR_SLUG}", f"{where}, {allocator}"
        name, what = f"memory_ratio_{suffix}", f"memory over weights, of the KV itself ({where})"
        rival = theirs.get("failure") or f"{theirs['memory_ratio']:.3g} ×"
        got = ours["memory_ratio"]
        figures.append(Figure(name, what, got, "×", memory, rival=f"DynamicCache: {rival}"))
        for key, what, unit, bound in (
            ("decode_ms", "a decode step", "ms", decode),
            ("prefill_s", "prefill", "s", prefill),
        ):
            got = ours[f"{key}_ratio"]
            if got is not None:
                name = f"{key.partition('_')[0]}_ratio_{suffix}"
                what = f"{what}, relative to DynamicCache ({where}; {ours[key]:.3g} {unit})"
                rival = f"DynamicCache: {theirs[key]:.3g} {unit}"
                figures.append(Figure(name, what, got, "×", bound, rival=rival))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    name = f"generate_{ALLOCATOR_SLUG}" if allocator else "generate"
    bench = Bench(name, __doc__, needs_gpu=True)
    bench.option("--sdpa", action="store_true", help="torch's attention as well")
    options = bench.parse(argv)
    cases = SMOKE_CASES if options.smoke else CASES + (SDPA_CASES if options.sdpa else ())
    chunk, steps = (8, 4) if options.smoke else (512, 48)
    model = make_model(llama_config(smoke=options.smoke), options.device)
    rows = []
    for case in cases:
        rows += run_case(model, case, chunk, steps)
        print_rows(rows[-len(case.caches) :])
    figures = promised(cases, rows, allocator)
    constants = {"chunk_tokens": chunk, "decode_steps": steps, "allocator": allocator}
    return bench.finish(rows, figures, constants)


if __name__ == "__main__":
    sys.exit(main())
