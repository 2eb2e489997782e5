"""The workloads of `bench_serve` through vLLM's own engine: seconds of each, as JSON.

    python bench/vllm_workloads.py SECONDS.json [W0 …] [--kv-cache-dtype fp8] [--shape qwen3-next]
    python bench/bench_serve.py --vllm-json SECONDS.json [--shape qwen3-next]
    python bench/vllm_workloads.py SECONDS.json --texts FOLDER
    python bench/bench_speculation.py --model FOLDER --vllm-json SECONDS.json

Run by an interpreter that has vLLM and this checkout. The model is of `--shape`, by default
Llama-3-8B's, with random weights as transformers makes them, which `bench_serve` has: what a
product takes depends on its numbers. vLLM's own dummy weights are at most 0.001, those of norms
among them, so that keys and values in eight bits are all zero; products with zeros need less power,
and a GPU at its limit of power is faster. `--dummy-weights` leaves them. A workload is run as often
as `bench_serve` runs it, and the best time counts: the first may have to compile.

`--texts` names the folder of a real model, whose answers in `bench_speculation` are generated, one
at a time, by vLLM's n-gram speculation as its documentation sets it; the seconds are those of a
token, the median of the answers, without the time of the first token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
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

#: The example of vLLM's documentation.
NGRAMS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
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
    parser.add_argument("--texts", metavar="FOLDER", help="answers of the real model there")
    arguments = parser.parse_args(argv)
    os.environ.update(VLLM_ENVIRONMENT)
    if arguments.tensor_parallel_size == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # A function, to our workers.
    # CUDA is initialised in this process, so workers cannot be forked.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm import LLM, SamplingParams

    if arguments.texts is not None:
        arguments.target.write_text(json.dumps(answers_s(arguments.texts)) + "\n")
        return 0
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


def answers_s(folder: str) -> dict[str, float]:
    """Seconds of a token in the answers of `bench_speculation`, with guesses from n-grams."""
    from bench_speculation import ANSWER_TOKENS, tasks
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        max_model_len=2048,
        max_num_seqs=4,
        gpu_memory_utilization=0.3,
        enable_prefix_caching=False,
        speculative_config=NGRAMS,
    )
    first, whole = (SamplingParams(temperature=0, max_tokens=n) for n in (1, ANSWER_TOKENS))

    def timed(prompt: list[int], params: SamplingParams) -> tuple[float, int]:
        start = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return time.perf_counter() - start, len(output.outputs[0].token_ids)

    seconds = {}
    for kind, prompts in tasks(AutoTokenizer.from_pretrained(folder))[0].items():
        timed(prompts[0], whole)  # A warm-up.
        times = []
        for prompt in prompts[1:]:
            (first_s, _), (whole_s, count) = timed(prompt, first), timed(prompt, whole)
            if count > 1:
                times.append((whole_s - first_s) / (count - 1))
        seconds[kind] = statistics.median(times)
        print(kind, f"{1e3 * seconds[kind]:.3f} ms for a token", flush=True)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
