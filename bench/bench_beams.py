"""What does beam search pay for its cache: memory after the beams part, and time?

Question. 8 prompts of 4,096 tokens with 4 beams each, 128 new tokens, Llama-3-8B's shape, by
`model.generate`: what memory do keys and values hold once beams share their prompts, and how long
does it take, against DynamicCache?

Prediction. A token is 128 KiB, so 32 beams of 4,096 tokens are 16 GiB in either cache after the
prefill, which transformers runs on the repeated prompts. From the first reordering on the beams of
a prompt map the same extents: 8 * 512 MiB = 4 GiB, and what each of the 32 has written since, 512
MiB at the end: 0.25 to 0.28 of DynamicCache's 16 to 16.5 GiB. Time: prefill computes 2.1 PFLOP,
3.3 s for both. DynamicCache then copies everything twice in a step, once to append (`torch.cat`)
and once to reorder (`index_select`): 4 * 16.5 GiB of traffic, 16 ms at 4.3 TB/s, beside 25 to 30 ms
of an eager step: 45 ms, 5.8 s in all. VMKVCache copies the beams' own tails, at most 512 MiB twice
(0.5 ms), and spends 2 ms of the host on that: 32 ms, 4.1 s. So 7.4 of 9.1 s: 0.81. The first
reordering maps 24 rows of 8 extents again, at 55 us each: 11 ms, once.

Method. Random weights in bfloat16, made on the device; seeded prompts; `num_beams=4`, no sampling,
no end of sequence. Both caches through the same attention implementation, taking turns in one
process (A B B A), after a short run of each. `held` is what keys and values hold, asked at the
first reordering, every 16th and the last; the figure is the largest ratio among them. `step_ms` is
between reorderings, by events on the device. `peak_bytes` is the peak of torch's reserved memory
over the weights, and what vmkv's pool has created.

Rivals. DynamicCache of the installed transformers, in torch's default allocator.

Not measured. Sampling among beams; encoder-decoder models; whether the tokens are good (weights are
random; `same_tokens_share` says how many agree with DynamicCache's).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench_generate import mark, step_times_ms
from harness import Bench, Figure, Row, in_turns, paired_ratio, quartiles, synchronize
from models import (
    SEED,
    created_bytes,
    llama_config,
    make_model,
    random_prompts,
    reserved_bytes,
    reset_memory,
)
from transformers import LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from vmkv import VMKVCache
from vmkv.units import GiB

CACHES = ("VMKVCache", "DynamicCache")


@dataclass(frozen=True)
class Case:
    """Equal prompts, and how to search from them."""

    num_prompts: int
    num_beams: int
    prompt_tokens: int
    new_tokens: int
    attention: str

    @property
    def name(self) -> str:
        """`8 prompts × 4 beams`."""
        return f"{self.num_prompts} prompts × {self.num_beams} beams"


SMOKE = Case(2, 2, 24, 6, "sdpa")


class Watch:
    """Wraps a cache's `reorder_cache`, and measures the cache after every 16th call."""

    def __init__(self, cache: Any):
        self.held_bytes: list[int] = []
        self.marks: list = []
        self._cache = cache
        self._reorder = cache.reorder_cache
        cache.reorder_cache = self

    def __call__(self, beam_idx: torch.Tensor) -> None:
        self._reorder(beam_idx)
        if len(self.marks) % 16 == 0:
            self.look()
        self.marks.append(mark())

    def look(self) -> None:
        """Record the memory of keys and values."""
        if isinstance(self._cache, VMKVCache):
            self.held_bytes.append(self._cache.stats().resident_bytes)
        else:
            layers = self._cache.layers
            self.held_bytes.append(sum(each.keys.nbytes + each.values.nbytes for each in layers))


@torch.inference_mode()
def run(model: LlamaForCausalLM, case: Case, cache_name: str) -> Row:
    """Search once; a row with time and memory."""
    reset_memory()
    reserved_before = reserved_bytes()
    ids = random_prompts(model, case.num_prompts, case.prompt_tokens)
    is_ours = cache_name == "VMKVCache"
    cache = (VMKVCache if is_ours else DynamicCache)(config=model.config)
    watch = Watch(cache)
    options = {"num_beams": case.num_beams, "do_sample": False, "eos_token_id": None}
    options |= {"max_new_tokens": case.new_tokens, "min_new_tokens": case.new_tokens}
    options |= {"pad_token_id": 0, "past_key_values": cache}
    synchronize()
    start = time.perf_counter()
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    synchronize()
    row: Row = {"seconds": time.perf_counter() - start}

    watch.look()
    row |= {"held": watch.held_bytes, "steps_ms": step_times_ms(watch.marks)}
    row |= {"reorderings": len(watch.marks), "tokens": tokens[:, case.prompt_tokens :].cpu()}
    row["peak_bytes"] = reserved_bytes(peak=True) - reserved_before
    if is_ours:
        row["peak_bytes"] += created_bytes(cache)
        sharing = cache.stats().sharing
        row |= {f"{name}_bytes": getattr(sharing, f"{name}_bytes") for name in SHARED}
        cache.check()
        cache.close()
    return row


SHARED = ("aliased", "copied", "copied_on_write")


def measure(model: LlamaForCausalLM, case: Case, rounds: int) -> list[Row]:
    """The caches in turn; one row for each."""
    warmup = Case(case.num_prompts, case.num_beams, 16, 3, case.attention)
    runs: dict[str, list[Row]] = {name: [] for name in CACHES}
    for name, at in in_turns(CACHES, rounds, warmup=1):
        taken = run(model, case if at >= 0 else warmup, name)
        runs[name] += [taken] if at >= 0 else []
    theirs = runs["DynamicCache"]
    rows = []
    for name, taken in runs.items():
        row: Row = {"case": case.name, "prompt_tokens": case.prompt_tokens, "cache": name}
        row |= {"new_tokens": case.new_tokens, "attention": case.attention}
        seconds, others = ([each["seconds"] for each in some] for some in (taken, theirs))
        row |= {**quartiles("seconds", seconds), "seconds_ratio": paired_ratio(seconds, others)}
        row |= quartiles("step_ms", [step for each in taken for step in each["steps_ms"]])
        held, other = taken[0]["held"], theirs[0]["held"]
        row |= {"held_first_bytes": held[0], "held_last_bytes": held[-1]}
        row["held_ratio"] = max(a / b for a, b in zip(held, other, strict=True))
        row["peak_bytes"] = max(each["peak_bytes"] for each in taken)
        row |= {f"{key}_bytes": taken[0].get(f"{key}_bytes") for key in SHARED}
        same = taken[0]["tokens"] == theirs[0]["tokens"]
        row |= {"same_tokens_share": same.float().mean().item()}
        rows.append(row | {"reorderings": taken[0]["reorderings"], "runs": len(taken)})
    return rows


def promised(case: Case, rows: Sequence[Row]) -> list[Figure]:
    """Memory and time of the search, and the peak, which precedes sharing."""
    ours, theirs = rows
    search = f"{case.name}, prompts of {case.prompt_tokens:,}, {case.new_tokens} new tokens"
    memory = f"keys and values from the first reordering on, of DynamicCache's ({search})"
    time_ = f"time of the search, relative to DynamicCache ({ours['seconds']:.3g} s)"
    peak = "peak of everything over the weights; the prefill repeats the prompts in both"
    held = f"DynamicCache: {theirs['held_last_bytes'] / GiB:.3g} GiB at the end"
    taken = f"DynamicCache: {theirs['seconds']:.3g} s"
    most = f"DynamicCache: {theirs['peak_bytes'] / GiB:.3g} GiB"
    return [
        Figure("beams_memory_ratio", memory, ours["held_ratio"], "×", 0.35, rival=held),
        Figure("beams_time_ratio", time_, ours["seconds_ratio"], "×", 0.9, rival=taken),
        Figure("beams_peak_gib", peak, ours["peak_bytes"] / GiB, "GiB", rival=most),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("beams", __doc__, needs_gpu=True)
    bench.option("--attention", default="flash_attention_2", help="for both, on a GPU")
    options = bench.parse(argv)
    case = SMOKE if options.smoke else Case(8, 4, 4096, 128, options.attention)
    model = make_model(llama_config(smoke=options.smoke), options.device)
    model.set_attn_implementation(case.attention)
    rows = measure(model, case, 2 if options.smoke else 3)
    return bench.finish(rows, promised(case, rows), {"seed": SEED})


if __name__ == "__main__":
    sys.exit(main())
