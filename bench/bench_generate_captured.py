"""How long does a decode step of plain `model.generate` take, captured, and in what memory?

Question. transformers' own loop, one line changed: how long is a decode step with a VMKVCache whose
steps are captured, against StaticCache with the decode that transformers compiles for it, which
takes all memory ahead?

Prediction. A step reads 15 GB of weights: 3.4 ms at what an H200 reads; 8 rows of 2,048 tokens are
2.3 GB more. Eagerly the host needs 20 to 25 ms. A graph leaves the device's own time: some 25 small
kernels a layer at 2 to 3 us beside the products, so about 5.5 ms for one row, and 6 for eight; with
layers compiled, 4.3 and 5. transformers' compiled step fuses the small kernels as well, but repeats
keys and values for each query head and goes over all of its cache: 5 ms and 8. What the loop itself
costs, while it waits for the device once a step, comes to each of them: 0.5 to 1 ms. So: at most
StaticCache's time, with layers compiled for one row, and either way for eight. Memory over the
weights is that of the prompt's activations and the KV, the same with and without captures but for
the graphs' 0.1 GiB, and at most StaticCache's. With the prompt in chunks of 128 tokens
(`prefill_chunk_size`, an option of transformers) activations are a sixteenth of that: 1.1 times
the KV.

Method. Llama-3-8B's shape in bfloat16, random weights made on the GPU, torch's SDPA for prompts and
for rivals. One call of `generate` to warm up (compiling included; `first_call_s`), then one that is
measured, greedy, of the same shape, with a cache of its own: so captured ways capture again within
it. A stopping criterion notes the time of each step on the host, which waits for the device once a
step; `decode_ms` is the time from a quarter of the steps on, over their number, the quartiles are
those of single steps. `call_s` is the whole call, prompt and captures included. `memory_bytes` is
the most that torch's reserved memory over what it held before the way began, the model having run,
and what vmkv's pool had created came to at any time of the measured call: of each phase of it (the
prompt, the first steps, ever longer ones) the peak of the one and the end of the other. Ways that
the host bounds decode fewer tokens.

Rivals. DynamicCache. `cache_implementation="static"`, whose decode transformers compiles by itself
(mode reduce-overhead, CUDA graphs), with exactly as many places as tokens; compiled again for each
batch. VMKVCache without captures.

Not measured. Padding, sampling, beams; attention kernels for prompts; quality (weights are random).
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness import HAS_GPU, Bench, Figure, Row, quartiles, seconds_of
from models import (
    created_bytes,
    llama_config,
    make_model,
    random_prompts,
    reserved_bytes,
    reset_memory,
    token_bytes_of,
)
from transformers import LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

import vmkv
from vmkv import VMKVCache
from vmkv.units import GiB


@dataclass(frozen=True)
class Way:
    """How tokens are generated."""

    name: str
    is_ours: bool
    captures: bool = False
    compiles: bool = False
    is_static: bool = False
    is_eager: bool = False
    chunk_tokens: int | None = None


STATIC = Way("StaticCache, compiled", is_ours=False, is_static=True)
DYNAMIC = Way("DynamicCache", is_ours=False, is_eager=True)
EAGER = Way("VMKVCache", is_ours=True, is_eager=True)
CAPTURED = Way("VMKVCache, captured", is_ours=True, captures=True)
COMPILED = Way("VMKVCache, captured and compiled", is_ours=True, captures=True, compiles=True)
CHUNKED = Way("VMKVCache, captured, prompt in chunks", True, captures=True, chunk_tokens=128)
#: The most important ways first, in case the run is cut short.
WAYS = (CAPTURED, STATIC, CHUNKED, COMPILED, EAGER, DYNAMIC)
MEMORY_RULE = 1.15


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run."""

    batches: tuple[int, ...] = (1, 8)
    prompt_tokens: int = 2048
    new_tokens: int = 257
    new_tokens_eager: int = 49
    compile_backend: str = "inductor"


SMOKE = Sizes((1, 2), 24, 9, 5, "eager")


class Steps(StoppingCriteria):
    """Stopping criterion that records time and peak memory of each token, and never stops.

    Args:
        cache: A cache whose memory is not torch's, or None.

    Attributes:
        at_s: Time at which each token was chosen.
        peak_bytes: Peak of torch's memory and the cache's together.
    """

    def __init__(self, cache: VMKVCache | None) -> None:
        self.at_s: list[float] = []
        self.peak_bytes = 0
        self._cache = cache
        self.look()
        self.peak_bytes = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.at_s.append(time.perf_counter())
        if not len(self.at_s) & (len(self.at_s) - 1):  # After the prompt, captures, now and then.
            self.look()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def look(self) -> None:
        """Record torch's peak since the last call, plus the cache's memory."""
        pool_bytes = 0 if self._cache is None else created_bytes(self._cache)
        self.peak_bytes = max(self.peak_bytes, reserved_bytes(peak=True) + pool_bytes)
        if HAS_GPU:
            torch.cuda.reset_peak_memory_stats()


def clean(model: LlamaForCausalLM) -> None:
    """Drop compiled code and graphs of the previous way.

    The model runs once, because torch's first product takes a workspace that it keeps.
    """
    for name in ("_compiled_call", "_cache"):
        vars(model).pop(name, None)
    torch.compiler.reset()
    with torch.no_grad():
        model(torch.zeros((1, 1), dtype=torch.int64, device=model.device), use_cache=False)
    reset_memory()


def call(model: LlamaForCausalLM, way: Way, ids: torch.Tensor, num_tokens: int) -> Row:
    """One call of `generate`."""
    options: Row = {"cache_implementation": "static"} if way.is_static else {}
    cache = VMKVCache(config=model.config) if way.is_ours else None
    if cache is not None:
        options["past_key_values"] = cache
    if way.chunk_tokens is not None:
        options["prefill_chunk_size"] = min(way.chunk_tokens, ids.shape[1] // 3)
    options |= {"attention_mask": torch.ones_like(ids), "do_sample": False}
    steps = Steps(cache)
    options["stopping_criteria"] = StoppingCriteriaList([steps])
    outputs = []
    call_s = seconds_of(
        lambda: outputs.append(model.generate(ids, max_new_tokens=num_tokens, **options))
    )
    assert outputs[0].shape[1] == ids.shape[1] + num_tokens
    steps.look()
    row = {"call_s": call_s, "at_s": steps.at_s, "peak_bytes": steps.peak_bytes}
    row["vmkv_bytes"] = 0 if cache is None else created_bytes(cache)
    if cache is not None:
        cache.close()
    return row


def run(model: LlamaForCausalLM, way: Way, batch: int, sizes: Sizes) -> Row:
    """One way: warmed up, then measured."""
    clean(model)
    # torch's attention repeats keys and values for each query head where a prompt goes on.
    model.set_attn_implementation("sdpa" if way.chunk_tokens is None else "vmkv")
    before_bytes = reserved_bytes()
    ids = random_prompts(model, batch, sizes.prompt_tokens)
    num_tokens = sizes.new_tokens_eager if way.is_eager else sizes.new_tokens
    capture = None
    if way.captures:
        backend = sizes.compile_backend
        capture = vmkv.capture_decoding(model, compile_layers=way.compiles, compile_backend=backend)
    try:
        first = call(model, way, ids, num_tokens)
        taken = call(model, way, ids, num_tokens)
        captured = capture and capture.num_steps / (2 * (num_tokens - 1))
    finally:
        if capture is not None:
            capture.close()
    kv_bytes = batch * (sizes.prompt_tokens + num_tokens - 1) * token_bytes_of(model.config)
    steady_s = taken["at_s"][len(taken["at_s"]) // 4 :]
    single_ms = [1e3 * (end - start) for start, end in itertools.pairwise(steady_s)]
    memory_bytes = taken["peak_bytes"] - before_bytes
    return {
        "way": way.name,
        "batch": batch,
        "prompt_tokens": sizes.prompt_tokens,
        "new_tokens": num_tokens,
        "decode_ms": 1e3 * (steady_s[-1] - steady_s[0]) / len(single_ms),
        **quartiles("step_ms", single_ms),
        "call_s": taken["call_s"],
        "first_call_s": first["call_s"],
        "captured_share": captured,
        "kv_bytes": kv_bytes,
        "vmkv_bytes": taken["vmkv_bytes"],
        "memory_bytes": memory_bytes,
        "memory_ratio": memory_bytes / kv_bytes,
    }


def promised(rows: Sequence[Row]) -> list[Figure]:
    """Decode time and memory of the captured ways, against the compiled StaticCache."""
    by_key = {(row["batch"], row["way"]): row for row in rows}
    figures = []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        rival = by_key.get((batch, STATIC.name))
        where = f"{batch} × {rows[0]['prompt_tokens']:,}"
        for way, slug in ((CAPTURED, "captured"), (COMPILED, "compiled")):
            ours = by_key.get((batch, way.name))
            if ours is None:
                continue
            how = way.name.partition(", ")[2]
            for key, column, unit, of, what in (
                ("ms", "decode_ms", "ms", 1, "a decode step of `model.generate`"),
                ("memory", "memory_bytes", "GiB", GiB, "memory over weights"),
            ):
                bound = rival and rival[column] / of
                said = f"{STATIC.name}: {bound:.3g} {unit}" if rival else ""
                name, what = f"generate_{slug}_{key}_{batch}", f"{what}, {how} ({where})"
                figures.append(Figure(name, what, ours[column] / of, unit, bound, rival=said))
        chunked = by_key.get((batch, CHUNKED.name))
        if chunked is not None:
            how = f"captured, prompt in chunks of {CHUNKED.chunk_tokens}"
            what = f"memory over weights, {how} ({where}), of the keys and values"
            got = chunked["memory_ratio"]
            figures.append(Figure(f"generate_chunked_memory_{batch}", what, got, "×", MEMORY_RULE))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write; after each way, so that an interrupted run keeps its rows."""
    bench = Bench("generate_captured", __doc__, needs_gpu=True)
    bench.option("--no-compile", action="store_true", help="without layers compiled")
    bench.option("--batches", type=int, nargs="+", help="rows of a batch; all by default")
    options = bench.parse(argv)
    sizes = SMOKE if options.smoke else Sizes()
    model = make_model(llama_config(smoke=options.smoke), options.device)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    rows: list[Row] = []
    for way in WAYS:
        if way is COMPILED and options.no_compile:
            continue
        rows += [run(model, way, batch, sizes) for batch in options.batches or sizes.batches]
        bench.finish(rows, promised(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
