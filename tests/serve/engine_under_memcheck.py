"""A short run of an engine with every operation on memory, for a memory checker.

    compute-sanitizer --report-api-errors no python tests/serve/engine_under_memcheck.py cuda

Two layers, eager: requests adopt rows, share prefixes, fork, are evicted and swapped. The exit
status is 1 if one of these did not happen.
"""

from __future__ import annotations

import random
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vmkv import Engine, SamplingParams
from vmkv.serve.scheduler import PreemptionCosts


def make_model(device: str) -> LlamaForCausalLM:
    """A token takes 64 KiB on a GPU, 8 KiB a layer on the CPU: pages hold few tokens."""
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 512)
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 32)
    heads["head_dim"] = 256 if device == "cuda" else 32
    config = LlamaConfig(
        num_hidden_layers=2, max_position_embeddings=4096, eos_token_id=None, **sizes, **heads
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval().requires_grad_(requires_grad=False)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)


def main(device: str) -> dict[str, int]:
    """Run the requests; return counts and bytes of each operation."""
    source = random.Random(0)

    def prompt(num_tokens: int) -> list[int]:
        return [source.randrange(3, 512) for _ in range(num_tokens)]

    page_bytes = 2**21 if device == "cuda" else 2**16
    unit = 32 if device == "cuda" else 8  # Tokens of a page; on the CPU each layer has its own.
    with Engine(
        make_model(device),
        max_num_seqs=4,
        max_num_batched_tokens=4 * unit,
        max_tokens=14 * unit,
        budget_bytes=32 * page_bytes * (1 if device == "cuda" else 2),
        host_budget_bytes=64 * page_bytes,
        preemption_costs=PreemptionCosts(flops_per_s=1.0),
        runner="eager",
    ) as engine:
        num_preempted = num_cached = 0
        common = prompt(5 * unit)
        rounds = [
            [common],
            [common + prompt(unit), common + prompt(2 * unit)],
            [prompt(6 * unit) for _ in range(4)],  # Together they outgrow the memory.
            [common + prompt(3)],
            [prompt(3 * unit) for _ in range(3)],
            [common],
        ]
        for at, prompts in enumerate(rounds):
            params = SamplingParams(
                temperature=0,
                max_tokens=5 * unit if at == 2 else 4,
                n=3 if at == 0 else 1,
                ignore_eos=True,
            )
            handles = [engine.add(each, params) for each in prompts]
            while engine.has_unfinished:
                engine.step()
            engine.cache.check()
            for handle in handles:
                output = handle.output()
                assert output.error is None, output.error
                num_cached += output.num_cached_tokens
                num_preempted += sum(each.num_preemptions for each in handle.requests)
        stats = engine.cache.stats()
        engine.cache.trim()
        return {
            "cached prompt tokens": num_cached,
            "prefix hits": stats.num_prefix_hits,
            "forks": stats.sharing.num_forks,
            "aliased bytes": stats.sharing.aliased_bytes,
            "unmapped": stats.driver_calls["mem_unmap"],
            "preempted": num_preempted,
            "swapped out bytes": stats.sharing.swapped_out_bytes,
            "swapped in bytes": stats.sharing.swapped_in_bytes,
        }


if __name__ == "__main__":
    happened = main(sys.argv[1])
    for what, count in happened.items():
        print(f"{what}: {count}")
    sys.exit(0 if all(happened.values()) else f"an operation did not happen: {happened}")
