"""What does generation cost when prompts differ in length: ragged rows or left padding?

Question. 64 prompts of 128 to 4,096 tokens, 64 new tokens each, Llama-3-8B's shape: how long does
`vmkv.generate` take against `model.generate` on the left-padded batch, and what memory do keys and
values take?

Prediction. The prompts hold 81k tokens, the padded batch 262k: 3.2 times the prefill work and
memory. Prefill computes 2 * 8e9 * 81e3 = 1.3 PFLOP, 2 s at the 0.65 PFLOP/s an eager model reaches;
64 eager decode steps take the host's 25 ms each, 1.6 s. So 4 to 5 s against the 12.9 s measured for
transformers with flash-attn 2, whose left-padded decode also copies the past up to three times a
step. With layers compiled (`capture_decoding`) steps are those of the engine, which takes 2.5 s for
such prompts: under 3 s. Keys and values are 128 KiB a token: 10 GiB for the real tokens, 34 GiB
padded.

Method. Seeded prompts (`random.seed(0)`; a length by `random.choice` for each, then its tokens).
Greedy, no end of sequence, flash-attn 2 for both, bfloat16, random weights. After one short warm-up
of each, the ways take turns in one process. Memory: for vmkv what its pool created at most; for
transformers the peak of torch's reserved memory over the weights (activations included, for both
as `torch_bytes`).

Rivals. `model.generate` of the installed transformers on the left-padded batch, DynamicCache.

Not measured. Sampling, serving (arrivals), prefix sharing, quality (weights are random).
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Sequence

import torch
from bench_generate import (
    free_device_bytes,
    llama_config,
    make_model,
    reserved_bytes,
    synchronize,
)
from common import spread, write_result
from report import Figure, Row, bench_parser, make_record, print_figures, print_rows

import vmkv
from vmkv.backend import open_backend

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
NUM_PROMPTS = 64
NEW_TOKENS = 64
ROUNDS = 2
KV_BYTES_PER_TOKEN = 128 * 1024
BUDGET_BYTES = 60 * 2**30


def make_prompts(lengths: Sequence[int], count: int, vocabulary: int) -> list[list[int]]:
    """Seeded prompts: a length by choice for each, then as many tokens."""
    source = random.Random(0)
    prompts = []
    for _ in range(count):
        length = source.choice(lengths)
        prompts.append([source.randint(5, min(120_000, vocabulary - 1)) for _ in range(length)])
    return prompts


def run(model, prompts: list[list[int]], way: str, new_tokens: int) -> Row:
    """Generate once; time and memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    synchronize()
    before, free_before = reserved_bytes(), free_device_bytes()
    options = {
        "max_new_tokens": new_tokens,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    longest = max(map(len, prompts))
    pool_bytes = 0
    if way.startswith("vmkv.generate"):
        device = "cuda:0" if torch.cuda.is_available() else "host"
        pool = vmkv.ExtentPool(open_backend(device), BUDGET_BYTES if device != "host" else 2**28)
        start = time.perf_counter()
        outputs = vmkv.generate(model, prompts, pool=pool, **options)
        synchronize()
        seconds = time.perf_counter() - start
        pool_bytes = pool.stats().created_bytes
        pool.close()
        tokens = torch.tensor([row[-new_tokens:] for row in outputs])
    else:
        ids = [[0] * (longest - len(row)) + row for row in prompts]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in prompts]
        start = time.perf_counter()
        inputs = torch.tensor(ids, device=model.device)
        outputs = model.generate(
            inputs, attention_mask=torch.tensor(mask, device=model.device), **options
        )
        synchronize()
        seconds = time.perf_counter() - start
        tokens = outputs[:, -new_tokens:].cpu()
    return {
        "way": way,
        "seconds": seconds,
        "kv_bytes": pool_bytes or len(prompts) * (longest + new_tokens) * KV_BYTES_PER_TOKEN,
        "torch_bytes": reserved_bytes(peak=True) - before,
        "device_bytes": free_before - free_device_bytes(),
        "tokens": tokens,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    arguments = bench_parser(__doc__).parse_args(argv)
    smoke = arguments.smoke or not torch.cuda.is_available()
    lengths, count, new_tokens = ((3, 7, 20), 4, 3) if smoke else (LENGTHS, NUM_PROMPTS, NEW_TOKENS)
    config = llama_config(smoke=smoke)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model(config, device)
    model.set_attn_implementation("flash_attention_2" if device.type == "cuda" else "sdpa")
    prompts = make_prompts(lengths, count, config.vocab_size)
    real_tokens = sum(len(row) + new_tokens for row in prompts)
    plain, compiled, padded = ways = (
        "vmkv.generate",
        "vmkv.generate, layers compiled",
        "generate, left-padded",
    )
    for way in (plain, padded):
        run(model, prompts[:2], way, 2)
    runs: dict[str, list[Row]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way in (plain, padded):
            runs[way].append(run(model, prompts, way, new_tokens))
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    with vmkv.capture_decoding(model, compile_layers=True, compile_backend=backend):
        run(model, prompts[:2], compiled, new_tokens)
        for _ in range(ROUNDS):
            runs[compiled].append(run(model, prompts, compiled, new_tokens))
    rows: list[Row] = []
    for way in ways:
        row: Row = {"way": way, "prompts": count, "real_tokens": real_tokens}
        seconds = spread(_all(runs[way], "seconds"))
        row |= {"seconds": seconds["median"]}
        row |= {"seconds_q1": seconds["q1"], "seconds_q3": seconds["q3"]}
        row |= {key: max(_all(runs[way], key)) for key in ("kv_bytes", "torch_bytes")}
        same = (runs[way][0]["tokens"] == runs[padded][0]["tokens"]).float().mean().item()
        rows.append(row | {"same_tokens_share": same})
    mine, mine_compiled, theirs = rows
    real_bytes = real_tokens * KV_BYTES_PER_TOKEN
    figures = [
        Figure(
            "ragged_seconds",
            f"{count} prompts of {lengths[0]} to {lengths[-1]} tokens, {new_tokens} new tokens",
            mine["seconds"],
            "s",
            at_most=None if smoke else 6.45,
            rival=f"left-padded: {theirs['seconds']:.3g} s",
        ),
    ]
    figures.append(
        Figure(
            "ragged_compiled_seconds",
            "the same, with layers that were compiled before",
            mine_compiled["seconds"],
            "s",
            at_most=None if smoke else 3.0,
            rival=f"left-padded: {theirs['seconds']:.3g} s",
        )
    )
    if not smoke:
        figures.append(
            Figure(
                "ragged_memory_ratio",
                "memory of keys and values, of what the real tokens need",
                mine["kv_bytes"] / real_bytes,
                "×",
                at_most=1.1,
                rival=f"left-padded: {theirs['kv_bytes'] / real_bytes:.2f} ×",
            )
        )
    print_rows(rows)
    print_figures(figures)
    record = make_record(__doc__, rows, figures)
    path = arguments.json
    if path or not smoke:
        print("wrote", write_result("ragged", record, path))
    return 0


def _all(runs: list[Row], key: str) -> list:
    return [row[key] for row in runs]


if __name__ == "__main__":
    sys.exit(main())
