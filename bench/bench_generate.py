"""What does a model pay for its cache: memory over the weights, decode and prefill time?

Question. The same model, prompts and loop through DynamicCache and through VMKVCache: how much
device memory do they take over the weights, how long does a decode step take, and how long the
prefill?

Prediction. Keys and values are 128 KiB a token: 16 * 8,240 tokens are 16.1 GiB, twice that for 32.
DynamicCache's `torch.cat` makes every tensor anew at each step, in sizes the allocator cannot
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

import gc
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from common import spread, write_result
from report import Figure, Row, bench_parser, make_record, print_figures, print_rows
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache, StaticCache

from vmkv import VMKVCache

CHUNK_TOKENS = 512
DECODE_STEPS = 48
SEED = 0
DTYPE = torch.bfloat16
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


def llama_config(*, smoke: bool) -> LlamaConfig:
    """Llama-3-8B's shape, or a tiny one."""
    if smoke:
        return LlamaConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
        )
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=16384,
    )


def make_model(config: LlamaConfig, device: torch.device) -> LlamaForCausalLM:
    """Random weights, made where they stay and in the dtype they keep."""
    torch.manual_seed(SEED)
    default = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    return model.eval().requires_grad_(requires_grad=False)


def make_cache(name: str, model: LlamaForCausalLM, case: Case, num_tokens: int):
    """One of the caches, empty."""
    if name == "VMKVCache":
        return VMKVCache(config=model.config)
    if name == "StaticCache":
        return StaticCache(config=model.config, max_cache_len=num_tokens)
    return DynamicCache(config=model.config)


class Clock:
    """Marks in time: CUDA events where there is a GPU, which do not stop it."""

    def __init__(self) -> None:
        self._on_gpu = torch.cuda.is_available()
        self._marks: list = []

    def mark(self) -> None:
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        self._marks.append(torch.cuda.Event(enable_timing=True))
        self._marks[-1].record()

    def steps_ms(self) -> list[float]:
        """Milliseconds between neighbouring marks; waits for the last."""
        synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._on_gpu:
            return [start.elapsed_time(end) for start, end in pairs]
        return [1e3 * (end - start) for start, end in pairs]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_device_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def reserved_bytes(*, peak: bool = False) -> int:
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.max_memory_reserved() if peak else torch.cuda.memory_reserved()


@torch.inference_mode()
def run(model: LlamaForCausalLM, case: Case, cache_name: str, chunk: int, steps: int) -> Row:
    """One prefill and `steps` decode steps; what they took."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    synchronize()
    reserved_before, free_before = reserved_bytes(), free_device_bytes()

    generator = torch.Generator().manual_seed(SEED)
    shape = (case.batch, case.prompt_tokens)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator).to(model.device)
    cache = make_cache(cache_name, model, case, case.prompt_tokens + steps)
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}

    synchronize()
    start = time.perf_counter()
    for at in range(0, case.prompt_tokens, chunk):
        logits = model(ids[:, at : at + chunk], **options).logits
    synchronize()
    prefill_s = time.perf_counter() - start

    token = logits[:, -1:].argmax(-1)
    tokens, clock = [token], Clock()
    clock.mark()
    start = time.perf_counter()
    for _ in range(steps):
        token = model(token, **options).logits[:, -1:].argmax(-1)
        tokens.append(token)
        clock.mark()
    synchronize()
    decode_ms = 1e3 * (time.perf_counter() - start) / steps

    pool_bytes = 0
    if cache_name == "VMKVCache":
        stats = cache.stats()
        pool_bytes = stats.resident_bytes + stats.free_bytes + stats.retired_bytes
    torch_bytes = reserved_bytes(peak=True) - reserved_before
    result = {
        "prefill_s": prefill_s,
        "decode_ms": decode_ms,
        "steps_ms": clock.steps_ms(),
        "torch_bytes": torch_bytes,
        "vmkv_bytes": pool_bytes,
        "memory_bytes": torch_bytes + pool_bytes,
        "device_bytes": free_before - free_device_bytes(),
        "tokens": torch.cat(tokens, dim=1).cpu(),
    }
    if cache_name == "VMKVCache":
        cache.close()
    return result


def run_case(model: LlamaForCausalLM, case: Case, chunk: int, steps: int) -> list[Row]:
    """The caches in turn; one row for each."""
    model.set_attn_implementation(case.attention)
    warmup = Case(case.attention, case.batch, min(case.prompt_tokens, 2 * chunk))
    runs: dict[str, list[Row]] = {name: [] for name in case.caches}
    failures: dict[str, str] = {}
    for name in case.caches:
        run(model, warmup, name, chunk, 2)
    for _ in range(case.rounds):
        for name in case.caches:
            try:
                runs[name].append(run(model, case, name, chunk, steps))
            except torch.OutOfMemoryError as error:  # DynamicCache at 32 x 8,192 is near it
                failures[name] = str(error).partition(".")[0]

    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    token_bytes = (
        config.num_hidden_layers * 2 * config.num_key_value_heads * head_dim * DTYPE.itemsize
    )
    kv_bytes = case.batch * (case.prompt_tokens + steps) * token_bytes
    rows = []
    for name, taken in runs.items():
        row: Row = {
            "attention": case.attention,
            "batch": case.batch,
            "prompt_tokens": case.prompt_tokens,
            "cache": name,
            "kv_bytes": kv_bytes,
        }
        if not taken:
            rows.append(row | {"failure": failures[name]})
            continue
        for key in ("torch_bytes", "vmkv_bytes", "memory_bytes", "device_bytes"):
            row[key] = max(each[key] for each in taken)
        row["memory_ratio"] = row["memory_bytes"] / kv_bytes
        for key in ("decode_ms", "prefill_s"):
            values = spread([each[key] for each in taken])
            row |= {key: values["median"], f"{key}_q1": values["q1"], f"{key}_q3": values["q3"]}
            pairs = zip(taken, runs["DynamicCache"], strict=False)
            ratios = [mine[key] / theirs[key] for mine, theirs in pairs]
            row[f"{key}_ratio"] = spread(ratios)["median"] if ratios else None
        values = spread([step for each in taken for step in each["steps_ms"]])
        row |= {"step_ms": values["median"], "step_ms_q1": values["q1"]}
        row["step_ms_q3"] = values["q3"]
        if runs["DynamicCache"]:
            same = taken[0]["tokens"] == runs["DynamicCache"][0]["tokens"]
            row["same_tokens_share"] = same.float().mean().item()
        rows.append(row | {"runs": len(taken)})
    return rows


def promised(cases: Sequence[Case], rows: Sequence[Row], allocator: str) -> list[Figure]:
    """The figures of the issue, for the cases that were run."""
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
        rival = theirs.get("failure")
        figures.append(
            Figure(
                f"memory_ratio_{suffix}",
                f"memory over weights, of the KV itself ({where})",
                ours["memory_ratio"],
                "×",
                at_most=memory,
                rival=f"DynamicCache: {rival or format(theirs['memory_ratio'], '.3g') + ' ×'}",
            )
        )
        for key, what, unit, bound in (
            ("decode_ms", "a decode step", "ms", decode),
            ("prefill_s", "prefill", "s", prefill),
        ):
            if ours[f"{key}_ratio"] is not None:
                figures.append(
                    Figure(
                        f"{key.partition('_')[0]}_ratio_{suffix}",
                        f"{what}, relative to DynamicCache ({where}; {ours[key]:.3g} {unit})",
                        ours[f"{key}_ratio"],
                        "×",
                        at_most=bound,
                        rival=f"DynamicCache: {theirs[key]:.3g} {unit}",
                    )
                )
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    parser = bench_parser(__doc__)
    parser.add_argument("--sdpa", action="store_true", help="torch's attention as well")
    options = parser.parse_args(argv)
    cases = SMOKE_CASES if options.smoke else CASES + (SDPA_CASES if options.sdpa else ())
    if not options.smoke and not torch.cuda.is_available():
        print("bench_generate needs a GPU; --smoke runs a tiny model anywhere", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.smoke else "cuda")
    chunk, steps = (8, 4) if options.smoke else (CHUNK_TOKENS, DECODE_STEPS)
    model = make_model(llama_config(smoke=options.smoke), device)
    rows = []
    for case in cases:
        rows += run_case(model, case, chunk, steps)
        print_rows(rows[-len(case.caches) :])
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    figures = promised(cases, rows, allocator)
    print_figures(figures)
    if options.json is not None or not options.smoke:
        constants = {"chunk_tokens": chunk, "decode_steps": steps, "allocator": allocator}
        if allocator:
            rows = [{**row, "allocator": allocator} for row in rows]
        name = f"generate_{ALLOCATOR_SLUG}" if allocator else "generate"
        record = make_record(__doc__, rows, figures, constants) | {"bench": "generate"}
        print("wrote", write_result(name, record, options.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
