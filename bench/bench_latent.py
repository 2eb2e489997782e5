"""What do models with latent attention take when a token is one latent row?

Question. With DeepSeek-V2-Lite's shape: how long does a layer's attention over latents take beside
reading them once, how long is a decode step of 32 sequences of 8,192 tokens, how long one of plain
`model.generate` over a VMKVCache, and how many tokens fit beside the weights?

Prediction. A latent row has 512 + 64 numbers, 1,152 bytes a layer: 32 x 8,192 of them are 302 MB,
70 us at what an H200 reads, and FlashAttention-3's `q_v` needs 1.3 times that for 16 heads, more
for 20, which take the place of 32. 27 layers are 2.3 ms; six of 64 experts for 32 tokens touch
nearly all of them: 29 GB, 6.7 ms; with the rest 10 ms. `model.generate` with 8 sequences reads 0.6
ms of latents, where DynamicCache expands 8 x 8,192 latents to the keys and values of 16 heads in
each layer and step: 50 ms. Captured, a step takes a fifth of that. Keys and values of all heads
take 10,240 bytes a layer: 8.9 times as many tokens fit.

Method. Random weights in bfloat16. Attention: captured calls over 27 layers of latents, their time
by the number of calls, the least of five replays; the floor is the bytes that are read, by the
bandwidth at which torch adds up 4 GiB. The engine's step: the time between steps that decode 32
sequences and do nothing else, of two rounds the median of the better one. `model.generate`: as in
bench_generate_captured, 8 prompts of 8,192. Tokens that fit: the engine's budget by the bytes of a
token in its rows, against the same by the bytes of expanded keys and values.

Rivals. DynamicCache. vLLM 0.26.0's MLA backend: `python bench/vllm_workloads.py SECONDS.json W2
"W2, first tokens" --shape v2-lite`, whose difference of both workloads, by 63, is a decode step;
`--vllm-json SECONDS.json` reads it. Throughput and latency beside vLLM: `bench_serve.py` and
`bench_live.py` with `--shape v2-lite` or `glm-4.7-flash`.

Not measured. Eight bits, in which these layers keep expanded keys; several GPUs; quality.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_experts import microseconds, read_us_per_byte
from bench_generate_captured import CAPTURED, COMPILED, DYNAMIC, Way, call, clean
from bench_serve import BY_NAME, MAX_NUM_SEQS, MAX_TOKENS, Steps
from harness import Bench, Figure, Row
from models import SHAPES, make_model, random_prompts, reset_memory

import vmkv
from vmkv import Engine, SamplingParams
from vmkv.attention import AttentionBatch, AttentionSpec, Call, select
from vmkv.units import MiB

WIDTHS = (512, 64)
NUM_SEQUENCES, NUM_TOKENS = 32, 8192
NUM_LAYERS = 27
SHAPES_MEASURED = {"v2-lite": 16, "glm-4.7-flash": 20}


# ---- one layer's attention --------------------------------------------------------------------


def attention_row(num_heads: int, device: torch.device, *, smoke: bool) -> Row:
    """Attention of one token of each sequence to its latents."""
    count, tokens = (2, 40) if smoke else (NUM_SEQUENCES, NUM_TOKENS)
    layers, width = 2 if smoke else NUM_LAYERS, sum(WIDTHS)
    rows = torch.randn(count, tokens + 256, layers, width, device=device, dtype=torch.bfloat16)
    batch = AttentionBatch.build(
        range(count), [tokens] * count, [1] * count, row_tokens=rows.shape[1], device=device
    )
    spec = AttentionSpec(device.type, rows.dtype, num_heads, 1, width, WIDTHS[0], is_latent=True)
    backend = select(spec)
    query = torch.randn(count, num_heads, width, device=device, dtype=rows.dtype)
    calls = []
    for layer in range(layers):
        keys = rows[:, :, layer, None]
        asked = Call(query, keys, keys[..., : WIDTHS[0]], batch, scale=192**-0.5)
        calls.append(functools.partial(backend.attend, asked))
    took_us = microseconds(calls)
    floor_us = count * tokens * width * rows.element_size() * read_us_per_byte(device, smoke=smoke)
    return {
        "what": "attention",
        "heads": num_heads,
        "kernel": backend.name,
        "us": took_us,
        "floor_us": floor_us,
        "over_floor": took_us / floor_us,
    }


# ---- the engine -------------------------------------------------------------------------------


def engine_rows(model: Any, *, smoke: bool) -> Iterator[Row]:
    """A decode step of many long sequences, and the tokens that fit."""
    workload, steps = BY_NAME["W2"], Steps()
    prompts = workload.prompts(model.config.vocab_size)
    prompts = [each[:40] for each in prompts[:2]] if smoke else prompts
    sizes: Row = {"max_tokens": 256 if smoke else MAX_TOKENS, "max_num_seqs": MAX_NUM_SEQS}
    sizes |= {"budget_bytes": 64 * MiB, "max_num_seqs": 4} if smoke else {}
    params = SamplingParams(temperature=0, max_tokens=8 if smoke else 64, ignore_eos=True)
    with Engine(model, observer=steps, prefix_caching=False, **sizes) as engine:
        step_ms = []
        for _ in range(2):
            steps.records.clear()
            engine.generate(prompts, params)
            found = steps.decode_ms(len(prompts))
            step_ms += [] if found is None else [found]
        yield {"what": "engine", "sequences": len(prompts), "decode_ms": min(step_ms, default=None)}
        groups = [each for each in engine.cache.groups if not each.is_fixed]
        token_bytes = sum(each.token_bytes for each in groups)
        config, budget_bytes = model.config, engine.cache.pool.budget_bytes
        head_bytes = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        expanded_bytes = 2 * config.num_hidden_layers * config.num_attention_heads * head_bytes
        yield {
            "what": "tokens that fit",
            "token_bytes": token_bytes,
            "expanded_bytes": expanded_bytes,
            "tokens": budget_bytes // token_bytes,
            "over_expanded": expanded_bytes / token_bytes,
        }


# ---- model.generate ---------------------------------------------------------------------------


def generate_row(model: Any, way: Way, *, smoke: bool) -> Row:
    """A decode step of `model.generate`."""
    clean(model)
    model.set_attn_implementation("vmkv" if way.is_ours else "sdpa")
    batch, tokens = (2, 24) if smoke else (8, NUM_TOKENS)
    count = 9 if smoke else 17 if way.is_eager else 65
    ids = random_prompts(model, batch, tokens)
    capture = None
    if way.captures:
        backend = "eager" if smoke else "inductor"
        capture = vmkv.capture_decoding(model, compile_layers=way.compiles, compile_backend=backend)
    try:
        call(model, way, ids, count)
        taken = call(model, way, ids, count)
    finally:
        if capture is not None:
            capture.close()
    steady_s = taken["at_s"][count // 4 :]
    decode_ms = 1e3 * (steady_s[-1] - steady_s[0]) / (len(steady_s) - 1)
    return {"what": "model.generate", "way": way.name, "decode_ms": decode_ms}


# ---- results ----------------------------------------------------------------------------------


def figures_of(rows: Sequence[Row], vllm_ms: float | None) -> list[Figure]:
    """The promised figures."""
    figures = []
    for row in rows:
        if row["what"] == "attention":
            name, heads = f"latent_attention_{row['heads']}", row["heads"]
            what = f"attention of one layer, {heads} heads, over reading the latents once"
            figures.append(Figure(name, what, row["over_floor"], "×", 1.5))
        elif row["what"] == "engine":
            rival = "" if vllm_ms is None else f"vLLM {vllm_ms:.3g} ms"
            what, bound = "decode step of 32 x 8,192 tokens", vllm_ms and 1.05 * vllm_ms
            figures.append(
                Figure("latent_decode", what, row["decode_ms"], "ms", bound, rival=rival)
            )
        elif row["what"] == "tokens that fit":
            what, got = "tokens that fit, over expanded keys and values", row["over_expanded"]
            figures.append(Figure("latent_tokens", what, got, "×", at_least=8.5))
    by_way = {row["way"]: row["decode_ms"] for row in rows if row["what"] == "model.generate"}
    if DYNAMIC.name in by_way:
        for way in (CAPTURED, COMPILED):
            if way.name in by_way:
                got = by_way[way.name] / by_way[DYNAMIC.name]
                what = f"decode step of `model.generate`, {way.name}, over DynamicCache's"
                name = f"latent_generate_{'compiled' if way.compiles else 'captured'}"
                figures.append(Figure(name, what, got, "×", 0.4))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write; after each part, so that an interrupted run keeps its rows."""
    bench = Bench("latent", __doc__, needs_gpu=True)
    bench.option("--shape", choices=SHAPES_MEASURED, default="v2-lite", help="of the model")
    bench.option("--vllm-json", type=Path, help="vLLM's seconds, by vllm_workloads.py")
    bench.option("--no-compile", action="store_true", help="`model.generate` without it")
    options = bench.parse(argv)
    if options.shape != "v2-lite":
        bench.name = f"latent_{options.shape.replace('-', '_').replace('.', '_')}"
    vllm_ms = None
    if options.vllm_json is not None:
        seconds = json.loads(options.vllm_json.read_text())
        vllm_ms = 1e3 * (seconds["W2"] - seconds["W2, first tokens"]) / 63
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        bench.finish(rows, figures_of(rows, vllm_ms))

    for heads in SHAPES_MEASURED.values():
        add(attention_row(heads, options.device, smoke=options.smoke))
        reset_memory()
    model = make_model(SHAPES[options.shape](smoke=options.smoke), options.device)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    for way in (CAPTURED, DYNAMIC, COMPILED):
        if not (way.compiles and (options.no_compile or options.smoke)):
            add(generate_row(model, way, smoke=options.smoke))
    clean(model)
    for row in engine_rows(model, smoke=options.smoke):
        add(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
