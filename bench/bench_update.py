"""What does `cache.update()` cost the host in a decode step?

Question. A model calls `update` once per layer. How long does the host take for it, through
VMKVCache and through DynamicCache, with the device out of the way?

Prediction. Both launch two kernels per layer (two copies into slots; two `torch.cat`), at some 4
us each. DynamicCache allocates two tensors besides, and VMKVCache compares shapes and dtypes; its
step's views are made once for all 32 layers, some 40 slices in 60 us: 2 us a layer. So about 10 to
15 us a layer for both, vmkv at most DynamicCache's. On the CPU `cat` copies the past on the host
itself: 2 * 2 MiB a layer for one sequence of 1,024 tokens is 0.5 ms, and vmkv wins by far.

Method. Llama-3-8B's shape, bfloat16. Both caches get the same prompt, then one token a step. The
clock runs over the 32 updates of a step, after a synchronisation and without one inside; the next
one comes after it stops. Steps take turns between the caches. Median and quartiles over steps, per
layer; the mean as well, because mapping pages and asking the device for memory are rare.

Rivals. DynamicCache(config) of the installed transformers, same tensors, same steps.

Not measured. The device's time for it (bench_generate has that: `cat` moves the whole past),
prefill.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from harness import HAS_GPU, Bench, Figure, Row, in_turns, paired_ratio, quartiles
from models import DTYPE, llama_config, reset_memory
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache

from vmkv import VMKVCache


@dataclass(frozen=True)
class Case:
    """A batch with a past, decoding on a device."""

    device: str
    batch: int
    past_tokens: int
    steps: int


GPU_CASES = (
    Case("cuda", 1, 1024, 300),
    Case("cuda", 1, 16384, 300),
    Case("cuda", 16, 1024, 300),
    Case("cuda", 16, 4096, 300),
)
CPU_CASES = (
    Case("cpu", 1, 64, 100),
    Case("cpu", 1, 1024, 30),
    Case("cpu", 16, 64, 30),
    Case("cpu", 16, 256, 10),
)
SMOKE_CASES = (Case("cpu", 2, 8, 3),)


def step_us(cache, keys: torch.Tensor, values: torch.Tensor, num_layers: int) -> float:
    """Host microseconds of one layer's update, over all layers of a step."""
    on_gpu = keys.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for layer in range(num_layers):
        cache.update(keys, values, layer)
    seconds = time.perf_counter() - start
    if on_gpu:
        torch.cuda.synchronize()
    return 1e6 * seconds / num_layers


@torch.no_grad()
def run(config: LlamaConfig, case: Case, warmup_steps: int) -> list[Row]:
    """One row for each cache."""
    num_layers, heads = config.num_hidden_layers, config.num_key_value_heads
    head_dim = config.hidden_size // config.num_attention_heads
    caches = {"DynamicCache": DynamicCache(config=config), "VMKVCache": VMKVCache(config=config)}

    def random(num_tokens: int) -> torch.Tensor:
        shape = (case.batch, heads, num_tokens, head_dim)
        return torch.randn(shape, dtype=DTYPE, device=case.device)

    past, new_keys, new_values = random(case.past_tokens), random(1), random(1)
    samples: dict[str, list[float]] = {name: [] for name in caches}
    for cache in caches.values():
        step_us(cache, past, past, num_layers)
    for name, at in in_turns(list(caches), case.steps, warmup_steps):
        taken = step_us(caches[name], new_keys, new_values, num_layers)
        samples[name] += [taken] if at >= 0 else []
    rows = []
    for name, taken in samples.items():
        row: Row = {"device": case.device, "batch": case.batch, "past_tokens": case.past_tokens}
        row |= {"cache": name, **quartiles("update_us", taken)}
        row |= {"mean_us": statistics.fmean(taken), "longest_us": max(taken)}
        row["ratio"] = paired_ratio(taken, samples["DynamicCache"])
        rows.append(row | {"steps": len(taken)})
    caches["VMKVCache"].close()
    reset_memory()
    return rows


def promised(rows: Sequence[Row]) -> list[Figure]:
    """The worst case on each device."""
    figures = []
    for device in dict.fromkeys(row["device"] for row in rows):
        theirs, ours = (
            [row for row in rows if (row["device"], row["cache"]) == (device, name)]
            for name in ("DynamicCache", "VMKVCache")
        )
        pairs = zip(ours, theirs, strict=True)
        worst, rival = max(pairs, key=lambda pair: pair[0]["ratio"])
        what = f"host time of update() relative to DynamicCache, worst case on {device} "
        what += f"({worst['update_us']:.3g} µs a layer)"
        said = f"{rival['update_us']:.3g} µs a layer"
        name = f"update_ratio_{device}"
        figures.append(Figure(name, what, worst["ratio"], "×", 1.0, rival=said))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("update", __doc__)
    smoke = bench.parse(argv).smoke
    config = llama_config(smoke=smoke, vocab_size=8, max_position_embeddings=32768)
    rows = []
    for case in SMOKE_CASES if smoke else CPU_CASES + (GPU_CASES if HAS_GPU else ()):
        rows += run(config, case, 1 if smoke else min(20, case.steps))
    return bench.finish(rows, promised(rows), {"num_layers": config.num_hidden_layers})


if __name__ == "__main__":
    sys.exit(main())
