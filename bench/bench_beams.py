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
reordering maps 24 rows of 8 extents anew, at 55 us each: 11 ms, once.

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

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench_generate import Clock, llama_config, make_model, reserved_bytes, synchronize
from common import spread, write_result
from report import Figure, Row, bench_parser, make_record, print_figures, print_rows
from transformers import LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from vmkv import VMKVCache
from vmkv.units import GiB

SEED = 0
ROUNDS = 3
CACHES = ("VMKVCache", "DynamicCache")
LOOK_EVERY = 16  # reorderings
MEMORY_RATIO_MUST, TIME_RATIO_MUST = 0.35, 0.9


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
    """Stands before a cache's `reorder_cache`, and looks at the cache after it."""

    def __init__(self, cache: Any):
        self.held_bytes: list[int] = []
        self.clock = Clock()
        self.num_calls = 0
        self._cache = cache
        self._reorder = cache.reorder_cache
        cache.reorder_cache = self

    def __call__(self, beam_idx: torch.Tensor) -> None:
        self._reorder(beam_idx)
        self.clock.mark()
        if self.num_calls % LOOK_EVERY == 0:
            self.look()
        self.num_calls += 1

    def look(self) -> None:
        """Note what keys and values hold now."""
        if isinstance(self._cache, VMKVCache):
            self.held_bytes.append(self._cache.stats().resident_bytes)
        else:
            layers = self._cache.layers
            self.held_bytes.append(sum(each.keys.nbytes + each.values.nbytes for each in layers))


@torch.inference_mode()
def run(model: LlamaForCausalLM, case: Case, cache_name: str) -> Row:
    """Search once; what it took."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    synchronize()
    reserved_before = reserved_bytes()
    generator = torch.Generator().manual_seed(SEED)
    shape = (case.num_prompts, case.prompt_tokens)
    ids = torch.randint(1, model.config.vocab_size, shape, generator=generator).to(model.device)
    is_ours = cache_name == "VMKVCache"
    cache = (VMKVCache if is_ours else DynamicCache)(config=model.config)
    watch = Watch(cache)

    synchronize()
    start = time.perf_counter()
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=case.num_beams,
        do_sample=False,
        max_new_tokens=case.new_tokens,
        min_new_tokens=case.new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        past_key_values=cache,
    )
    synchronize()
    seconds = time.perf_counter() - start

    watch.look()
    peak_bytes = reserved_bytes(peak=True) - reserved_before
    row: Row = {"seconds": seconds, "held": watch.held_bytes, "steps_ms": watch.clock.steps_ms()}
    row |= {"reorderings": watch.num_calls, "tokens": tokens[:, case.prompt_tokens :].cpu()}
    if is_ours:
        stats = cache.stats()
        peak_bytes += stats.resident_bytes + stats.free_bytes + stats.retired_bytes
        row |= {f"{name}_bytes": getattr(stats.sharing, f"{name}_bytes") for name in SHARED}
        cache.check()
        cache.close()
    return row | {"peak_bytes": peak_bytes}


SHARED = ("aliased", "copied", "copied_on_write")


def measure(model: LlamaForCausalLM, case: Case, rounds: int) -> list[Row]:
    """The caches in turn; one row for each."""
    warmup = Case(case.num_prompts, case.num_beams, 16, 3, case.attention)
    runs: dict[str, list[Row]] = {name: [] for name in CACHES}
    for name in CACHES:
        run(model, warmup, name)
    for at in range(rounds):
        for name in CACHES if at % 2 == 0 else reversed(CACHES):
            runs[name].append(run(model, case, name))
    theirs = runs["DynamicCache"]
    rows = []
    for name, taken in runs.items():
        row: Row = {"case": case.name, "prompt_tokens": case.prompt_tokens, "cache": name}
        row |= {"new_tokens": case.new_tokens, "attention": case.attention}
        values = spread([each["seconds"] for each in taken])
        row |= {"seconds": values["median"]}
        row |= {"seconds_q1": values["q1"], "seconds_q3": values["q3"]}
        pairs = zip(taken, theirs, strict=True)
        values = spread([mine["seconds"] / other["seconds"] for mine, other in pairs])
        row["seconds_ratio"] = values["median"]
        steps_ms = [step for each in taken for step in each["steps_ms"]]
        values = spread(steps_ms)
        row |= {"step_ms": values["median"]}
        row |= {"step_ms_q1": values["q1"], "step_ms_q3": values["q3"]}
        held = taken[0]["held"]
        row |= {"held_first_bytes": held[0], "held_last_bytes": held[-1]}
        row["held_ratio"] = max(
            mine / other for mine, other in zip(held, theirs[0]["held"], strict=True)
        )
        row["peak_bytes"] = max(each["peak_bytes"] for each in taken)
        row |= {f"{key}_bytes": taken[0].get(f"{key}_bytes") for key in SHARED}
        same = taken[0]["tokens"] == theirs[0]["tokens"]
        row |= {"same_tokens_share": same.float().mean().item()}
        rows.append(row | {"reorderings": taken[0]["reorderings"], "runs": len(taken)})
    return rows


def promised(case: Case, rows: Sequence[Row], *, smoke: bool) -> list[Figure]:
    """The figures of the issue, and the peak, which sharing comes too late for."""
    ours, theirs = rows
    search = f"{case.name}, prompts of {case.prompt_tokens:,}, {case.new_tokens} new tokens"
    return [
        Figure(
            "beams_memory_ratio",
            f"keys and values from the first reordering on, of DynamicCache's ({search})",
            ours["held_ratio"],
            "×",
            at_most=None if smoke else MEMORY_RATIO_MUST,
            rival=f"DynamicCache: {theirs['held_last_bytes'] / GiB:.3g} GiB at the end",
        ),
        Figure(
            "beams_time_ratio",
            f"time of the search, relative to DynamicCache ({ours['seconds']:.3g} s)",
            ours["seconds_ratio"],
            "×",
            at_most=None if smoke else TIME_RATIO_MUST,
            rival=f"DynamicCache: {theirs['seconds']:.3g} s",
        ),
        Figure(
            "beams_peak_gib",
            "peak of everything over the weights; the prefill repeats the prompts in both",
            ours["peak_bytes"] / GiB,
            "GiB",
            rival=f"DynamicCache: {theirs['peak_bytes'] / GiB:.3g} GiB",
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    parser = bench_parser(__doc__)
    parser.add_argument("--attention", default="flash_attention_2", help="for both, on a GPU")
    options = parser.parse_args(argv)
    smoke = options.smoke
    if not smoke and not torch.cuda.is_available():
        print("bench_beams needs a GPU; --smoke runs a tiny model anywhere", file=sys.stderr)
        return 2
    case = SMOKE if smoke else Case(8, 4, 4096, 128, options.attention)
    model = make_model(llama_config(smoke=smoke), torch.device("cpu" if smoke else "cuda"))
    model.set_attn_implementation(case.attention)
    rows = measure(model, case, 2 if smoke else ROUNDS)
    figures = promised(case, rows, smoke=smoke)
    print_rows(rows)
    print_figures(figures)
    if options.json is not None or not smoke:
        record = make_record(__doc__, rows, figures, {"seed": SEED, "smoke": smoke})
        print("wrote", write_result("beams", record, options.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
