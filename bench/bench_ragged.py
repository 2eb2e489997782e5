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

import sys
import time
from collections.abc import Sequence

import torch
from bench_serve import Workload
from harness import Bench, Figure, Row, in_turns, quartiles, synchronize
from models import (
    free_device_bytes,
    llama_config,
    make_model,
    open_pool,
    reserved_bytes,
    reset_memory,
    token_bytes_of,
)
from transformers import LlamaForCausalLM

import vmkv
from vmkv.units import GiB, MiB

PLAIN, COMPILED = "vmkv.generate", "vmkv.generate, layers compiled"
PADDED = "generate, left-padded"


def run(model: LlamaForCausalLM, prompts: list[list[int]], way: str, new_tokens: int) -> Row:
    """Generate once; time and memory."""
    reset_memory()
    before, free_before = reserved_bytes(), free_device_bytes()
    options = {"max_new_tokens": new_tokens, "do_sample": False}
    options |= {"eos_token_id": None, "pad_token_id": 0}
    if way == PADDED:
        longest = max(map(len, prompts))
        kv_bytes = len(prompts) * (longest + new_tokens) * token_bytes_of(model.config)
        ids = [[0] * (longest - len(row)) + row for row in prompts]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in prompts]
        start = time.perf_counter()
        inputs, mask = (torch.tensor(each, device=model.device) for each in (ids, mask))
        outputs = model.generate(inputs, attention_mask=mask, **options)
        synchronize()
        seconds = time.perf_counter() - start
    else:
        smoke = model.device.type == "cpu"
        pool = open_pool(256 * MiB if smoke else 60 * GiB, smoke=smoke)
        start = time.perf_counter()
        outputs = vmkv.generate(model, prompts, pool=pool, **options)
        synchronize()
        seconds = time.perf_counter() - start
        kv_bytes = pool.stats().created_bytes
        pool.close()
    return {
        "seconds": seconds,
        "kv_bytes": kv_bytes,
        "torch_bytes": reserved_bytes(peak=True) - before,
        "device_bytes": free_before - free_device_bytes(),
        "tokens": torch.tensor([list(row[-new_tokens:]) for row in outputs]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("ragged", __doc__, needs_gpu=True)
    smoke = (options := bench.parse(argv)).smoke
    lengths, count, new_tokens = (
        ((3, 7, 20), 4, 3) if smoke else ((128, 256, 512, 1024, 2048, 4096), 64, 64)
    )
    model = make_model(llama_config(smoke=smoke), options.device)
    model.set_attn_implementation("sdpa" if smoke else "flash_attention_2")
    workload = Workload("ragged", count, lengths, new_tokens)
    prompts = workload.prompts(model.config.vocab_size)
    runs: dict[str, list[Row]] = {way: [] for way in (PLAIN, COMPILED, PADDED)}

    def measure(*ways: str) -> None:
        for way, at in in_turns(ways, 2, warmup=1):
            chosen, tokens = (prompts, new_tokens) if at >= 0 else (prompts[:2], 2)
            taken = run(model, chosen, way, tokens)
            runs[way] += [taken] if at >= 0 else []

    measure(PLAIN, PADDED)
    backend = "aot_eager" if smoke else "inductor"
    with vmkv.capture_decoding(model, compile_layers=True, compile_backend=backend):
        measure(COMPILED)
    real_tokens = sum(len(row) + new_tokens for row in prompts)
    rows: list[Row] = []
    for way, taken in runs.items():
        row: Row = {"way": way, "prompts": count, "real_tokens": real_tokens}
        row |= quartiles("seconds", [each["seconds"] for each in taken])
        row |= {key: max(each[key] for each in taken) for key in ("kv_bytes", "torch_bytes")}
        same = (taken[0]["tokens"] == runs[PADDED][0]["tokens"]).float().mean().item()
        rows.append(row | {"same_tokens_share": same})
    mine, compiled, theirs = rows
    real_bytes = real_tokens * token_bytes_of(model.config)
    rival = f"left-padded: {theirs['seconds']:.3g} s"
    what = f"{count} prompts of {lengths[0]} to {lengths[-1]} tokens, {new_tokens} new tokens"
    figures = [Figure("ragged_seconds", what, mine["seconds"], "s", 6.45, rival=rival)]
    what = "the same, with layers that were compiled before"
    figures += [Figure("ragged_compiled_seconds", what, compiled["seconds"], "s", 3.0, rival=rival)]
    what = "memory of keys and values, of what the real tokens need"
    rival = f"left-padded: {theirs['kv_bytes'] / real_bytes:.2f} ×"
    got = mine["kv_bytes"] / real_bytes
    figures += [Figure("ragged_memory_ratio", what, got, "×", 1.1, rival=rival)]
    return bench.finish(rows, figures)


if __name__ == "__main__":
    sys.exit(main())
