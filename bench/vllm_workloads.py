"""The workloads of `bench_serve` through vLLM's own engine: seconds of each, as JSON.

    python bench/vllm_workloads.py SECONDS.json [W0 …] [--kv-cache-dtype fp8] [--shape qwen3-next]
    python bench/bench_serve.py --vllm-json SECONDS.json [--shape qwen3-next]

Run by an interpreter that has vLLM and this checkout. The model is of `--shape`, by default
Llama-3-8B's, with random weights as transformers makes them, which `bench_serve` has: what a
product takes depends on its numbers. vLLM's own dummy weights are at most 0.001, those of norms
among them, so that keys and values in eight bits are all zero; products with zeros need less power,
and a GPU at its limit of power is faster. `--dummy-weights` leaves them. A workload is run as often
as `bench_serve` runs it, and the best time counts: the first may have to compile.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench_serve import BY_NAME, MAX_NUM_SEQS, MAX_TOKENS, WORKLOADS
from harness import VLLM_CONFIG, VLLM_ENVIRONMENT
from models import SHAPES, initialise
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

#: The prompts of W2 alone: what W2 takes longer are 63 decode steps.
FIRST_TOKENS = replace(BY_NAME["W2"], name="W2, first tokens", new_tokens=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", type=Path, help="where the seconds are written")
    parser.add_argument("names", nargs="*", metavar="W0", help="workloads (default: all)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="vLLM's option of that name")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="likewise")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b", help="of the model")
    parser.add_argument("--dummy-weights", action="store_true", help="vLLM's own, of 0.001")
    arguments = parser.parse_args(argv)
    os.environ.update(VLLM_ENVIRONMENT)
    if arguments.tensor_parallel_size == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # A function, to our workers.
    # CUDA is initialised in this process, so workers cannot be forked.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm import LLM, SamplingParams

    config = SHAPES[arguments.shape](smoke=False)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    config.architectures, config.dtype = [name], "bfloat16"
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=MAX_TOKENS,
            max_num_seqs=MAX_NUM_SEQS,
            gpu_memory_utilization=0.85,
            enable_prefix_caching=False,
            kv_cache_dtype=arguments.kv_cache_dtype,
            tensor_parallel_size=arguments.tensor_parallel_size,
            additional_config=VLLM_CONFIG,
        )
        if not arguments.dummy_weights:
            llm.apply_model(initialise)
        for workload in (*WORKLOADS, FIRST_TOKENS):
            if arguments.names and workload.name not in arguments.names:
                continue
            prompts = [{"prompt_token_ids": each} for each in workload.prompts(config.vocab_size)]
            count = workload.new_tokens
            params = SamplingParams(
                max_tokens=count, min_tokens=count, ignore_eos=True, temperature=0, detokenize=False
            )
            times = []
            for _ in range(workload.rounds):
                start = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                times.append(time.perf_counter() - start)
            seconds[workload.name] = min(times)
            print(workload.name, [f"{each:.3f} s" for each in times], flush=True)
            arguments.target.write_text(json.dumps(seconds) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
