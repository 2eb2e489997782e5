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
from common import spread, write_result
from report import Figure, Row, bench_parser, make_record, print_figures, print_rows
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache

from vmkv import VMKVCache

WARMUP_STEPS = 20
DTYPE = torch.bfloat16


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


def llama_config(*, smoke: bool) -> LlamaConfig:
    """The parts of Llama-3-8B that a cache looks at."""
    layers, heads, hidden = (2, 2, 32) if smoke else (32, 8, 4096)
    return LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=4 * heads,
        num_key_value_heads=heads,
        hidden_size=hidden,
        max_position_embeddings=32768,
    )


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
    for step in range(warmup_steps + case.steps):
        order = list(caches) if step % 2 else list(reversed(caches))
        for name in order:
            taken = step_us(caches[name], new_keys, new_values, num_layers)
            if step >= warmup_steps:
                samples[name].append(taken)
    rows = []
    for name, taken in samples.items():
        ratios = [
            mine / theirs for mine, theirs in zip(taken, samples["DynamicCache"], strict=True)
        ]
        values = spread(taken)
        rows.append(
            {
                "device": case.device,
                "batch": case.batch,
                "past_tokens": case.past_tokens,
                "cache": name,
                "update_us": values["median"],
                "update_us_q1": values["q1"],
                "update_us_q3": values["q3"],
                "mean_us": statistics.fmean(taken),
                "longest_us": max(taken),
                "ratio": spread(ratios)["median"],
                "steps": len(taken),
            }
        )
    caches["VMKVCache"].close()
    del caches
    if case.device == "cuda":
        torch.cuda.empty_cache()
    return rows


def promised(rows: Sequence[Row]) -> list[Figure]:
    """The worst case on each device."""
    figures = []
    for device in dict.fromkeys(row["device"] for row in rows):
        mine = [row for row in rows if row["device"] == device]
        worst = max((row for row in mine if row["cache"] == "VMKVCache"), key=lambda r: r["ratio"])
        rival = next(
            row
            for row in mine
            if row["cache"] == "DynamicCache"
            and (row["batch"], row["past_tokens"]) == (worst["batch"], worst["past_tokens"])
        )
        figures.append(
            Figure(
                f"update_ratio_{device}",
                f"host time of update() relative to DynamicCache, worst case on {device} "
                f"({worst['update_us']:.3g} µs a layer)",
                worst["ratio"],
                "×",
                at_most=1.0,
                rival=f"{rival['update_us']:.3g} µs a layer",
            )
        )
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    options = bench_parser(__doc__).parse_args(argv)
    cases = CPU_CASES + (GPU_CASES if torch.cuda.is_available() else ())
    config = llama_config(smoke=options.smoke)
    rows = []
    for case in SMOKE_CASES if options.smoke else cases:
        rows += run(config, case, 1 if options.smoke else min(WARMUP_STEPS, case.steps))
    figures = promised(rows)
    print_rows(rows)
    print_figures(figures)
    if options.json is not None or not options.smoke:
        constants = {"num_layers": config.num_hidden_layers, "warmup_steps": WARMUP_STEPS}
        print(
            "wrote",
            write_result("update", make_record(__doc__, rows, figures, constants), options.json),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
