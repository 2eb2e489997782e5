"""What does the host spend on a step that has prompts in it, captured or launched one by one?

Question. Under arrivals nearly every step decodes some sequences and computes a part of a prompt.
How long does the host take to submit such a step, how long does the device take for it, and what
does it cost to have the graphs: seconds of warm-up, and memory?

Prediction. Launched one by one, 32 layers of Llama-3-8B's shape are some 400 launches, each through
Python: 26 to 31 ms, whatever the size. As a graph the host packs a few hundred integers, copies
them and launches once: 0.6 to 0.8 ms. The device's time is 16 GFLOP a token at 0.7 PFLOP/s, 23 us,
above the 4 ms that reading the weights takes: 13 to 14 ms for 576 tokens. Padding to a bucket costs
an eighth of that at most. 90 graphs take 50 ms each to capture, and less than 1 GiB together.

Verdict. The host's part is better than predicted, and the memory; 123 graphs, 55 of them for
decoding, take 5 to 7 s. The device takes 18 ms, not 14, for 640 tokens, of which attention is 3.
Which sizes have graphs was decided by timing steps of equal tokens, and 640
preferred to 576; since then tokens differ, and a size is dropped if a larger one saves a tenth.

Method. Llama-3-8B's shape, random weights, bfloat16, layers compiled, one runner per kernel; the
decoding sequences hold 1,024 tokens, prompts begin at position 0, but for the last case, whose
sequence holds 4,096. The same step is submitted again and again (it writes the same), greedy. Host:
the median time of `submit`, with the device idle before each. Device: the wall time of 20 steps,
submitted without waiting, by their number. Both ways run in one process, in turns.

Rivals. The same steps launched one by one, which is what larger steps do.

Not measured. Scheduling, mapping, sampling other than greedy, the server; `bench_serve` has those.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from harness import Bench, Figure, Row, quartiles, seconds_of, synchronize
from models import CacheShape, llama_config, make_model
from transformers import LlamaForCausalLM

from vmkv import KVCache, SamplingParams
from vmkv.serve.options import EngineOptions
from vmkv.serve.runner import ModelRunner, RunnerOptions
from vmkv.step import Piece
from vmkv.units import GiB, MiB

REPEATS = 20


class Case(NamedTuple):
    """A step.

    Attributes:
        num_prompt: Tokens of a prompt.
        num_decode: Sequences that decode beside it.
        num_past: Tokens that the prompt's sequence holds already.
    """

    num_prompt: int
    num_decode: int
    num_past: int = 0


CASES = (
    Case(512, 64),
    Case(14, 64),
    Case(512, 0),
    Case(1024, 64),
    Case(1984, 64),
    Case(300, 200),
    Case(512, 64, 4096),
)
SMOKE_CASES = (Case(20, 3), Case(5, 0))


class Steps:
    """A runner with sequences to make steps of.

    Args:
        model: The model.
        backend: The kernel for rows.
        smoke: Whether it is a small run.
    """

    def __init__(self, model: LlamaForCausalLM, backend: str | None, *, smoke: bool):
        config = model.config
        self.decode_tokens = 9 if smoke else 1024
        self.cache = KVCache(
            "host" if smoke else "cuda:0",
            max_tokens=256 if smoke else 16384,
            max_sequences=258,
            budget_bytes=128 * MiB if smoke else 48 * GiB,
        )
        head_dim = config.hidden_size // config.num_attention_heads
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        CacheShape("", layers, heads, head_dim).add_layers(self.cache)
        given = EngineOptions(
            max_num_seqs=8 if smoke else 256,
            max_num_batched_tokens=64 if smoke else 16384,
            attention_backend=backend,
            runner_options=RunnerOptions(capture=True, show_progress=False),
        )
        self.runner = ModelRunner(model, self.cache, given)
        start = time.perf_counter()
        self.runner.warm_up()
        self.warm_up_s = time.perf_counter() - start
        self.mixed_graphs = self.runner.stepper.mixed_graphs

    def measure(self, case: Case) -> list[Row]:
        """A step's host and device time, launched one by one and as a graph."""
        greedy = SamplingParams(temperature=0)
        pieces, sequences = [], []
        for slot in range(case.num_decode + 1):
            decodes = slot < case.num_decode
            past = self.decode_tokens if decodes else case.num_past
            new = 1 if decodes else case.num_prompt
            sequences.append(self.cache.open())
            self.cache.grow([(sequences[-1], past + new)])
            self.runner.set_slot(slot, greedy, [1])
            ids = [7 + (slot + at) % 100 for at in range(new)]
            pieces.append(Piece(slot, sequences[-1].row, past, new, ids, samples=True))
        ways = [self._run(pieces, captured=captured) for captured in (False, True)]
        for sequence in sequences:
            sequence.close()
        tokens = [way.pop("tokens") for way in ways]
        same = sum(a == b for a, b in zip(*tokens, strict=True)) / len(pieces)
        what = {"prompt_tokens": case.num_prompt, "past_tokens": case.num_past}
        what["decoding"] = case.num_decode
        return [{**what, **way, "same_tokens_share": same} for way in ways]

    def _run(self, pieces: list[Piece], *, captured: bool) -> Row:
        # As a step for which there is no bucket.
        self.runner.stepper.mixed_graphs = self.mixed_graphs if captured else None
        tokens = self.runner.submit(pieces).result().token_ids
        submit_ms = []
        for _ in range(REPEATS):
            synchronize()
            start = time.perf_counter()
            pending = self.runner.submit(pieces)
            submit_ms.append(1e3 * (time.perf_counter() - start))
            pending.result()
        step_s = seconds_of(lambda: [self.runner.submit(pieces) for _ in range(REPEATS)])
        bucket = self.mixed_graphs.key(pieces) if captured and self.mixed_graphs else None
        return {
            "way": "graph" if captured else "one by one",
            "bucket": None if bucket is None else f"{bucket.num_tokens}, {bucket.num_decode}",
            **quartiles("submit_ms", submit_ms),
            "step_ms": 1e3 * step_s / REPEATS,
            "tokens": list(tokens),
        }

    def close(self) -> None:
        """Give everything back."""
        self.runner.stepper.mixed_graphs = self.mixed_graphs
        self.runner.close()
        self.cache.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("mixed_step", __doc__, needs_gpu=True)
    bench.option("--backends", nargs="*", default=["flash3", "flash2", "torch"])
    options = bench.parse(argv)
    smoke = options.smoke
    model = make_model(llama_config(smoke=smoke), options.device)
    rows: list[Row] = []
    figures = []
    for backend in [None] if smoke else options.backends:
        steps, name = Steps(model, backend, smoke=smoke), backend or "sdpa"
        found = [row for case in (SMOKE_CASES if smoke else CASES) for row in steps.measure(case)]
        rows += [{"backend": name, **row} for row in found]
        theirs, mine = found[:2]
        what = f"{name}: host time to submit {mine['prompt_tokens']} prompt tokens and "
        what += f"{mine['decoding']} that decode"
        rival, got = f"one by one: {theirs['submit_ms']:.3g} ms", mine["submit_ms"]
        figures.append(Figure(f"mixed_submit_ms_{name}", what, got, "ms", 2.0, rival=rival))
        what = f"{name}: warm-up (kernels after the first find what was compiled)"
        figures.append(Figure(f"mixed_warm_up_s_{name}", what, steps.warm_up_s, "s", 45.0))
        what, got = f"{name}: device memory that graphs hold", steps.runner.graph_bytes / GiB
        figures.append(Figure(f"mixed_graph_bytes_{name}", what, got, "GiB"))
        steps.close()
    return bench.finish(rows, figures)


if __name__ == "__main__":
    sys.exit(main())
