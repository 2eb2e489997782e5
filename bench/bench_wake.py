"""How long does a sleeping model take to its first token?

Question. Llama-3-8B's weights, 15 GiB, sleep in pinned host memory. How long after `wake` is the
first token of a prompt of 16 tokens there, and how long does a sleep take? Do ten models of a 1B
shape answer as before, whatever the order in which they sleep and wake?

Prediction. 240 extents of 64 MiB are created (16 us each) and mapped (33 us), 12 ms, before the
copies start; 16.1 GB take 0.32 s at 50 GB/s; the step 10 ms: 0.35 s. A sleep grants access to 240
host extents (0.56 ms each) while it copies, then unmaps both (0.02 and 0.16 ms): 0.4 s. The first
sleep creates host memory, 10 ms for 64 MiB: 2.4 s more. The device gets all but captured steps.

Method. One engine over captured steps; medians of seven sleeps and wakes. The time to the first
token is from the call of `wake` to `step` having read it. What the device has free is the driver's
count. Then as many models in engines of their own, and one request or sleep at random after
another; greedy answers, of one request at a time and without a prefix cache, are compared with
those from before the first sleep.

Rivals. torch's copy of as many bytes from pinned memory to the device: the bus itself.

Not measured. Cached prefixes that sleep as well; several models that wake at once.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from harness import HAS_GPU, Bench, Figure, Row, on_gpu, quartiles, seconds_of
from models import SEED, llama_config, make_model

from vmkv import Engine, SamplingParams
from vmkv.serve.runner import RunnerOptions
from vmkv.units import GiB, MiB

SHORT = SamplingParams(temperature=0, max_tokens=1)
ANSWER = SamplingParams(temperature=0, max_tokens=16)
#: Llama-3.2-1B's shape.
SMALL = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}


def open_engine(options: Any, budget_bytes: int, shape: dict[str, int]) -> Engine:
    """An engine whose model may sleep, with few captured steps."""
    model = make_model(llama_config(smoke=options.smoke, **shape), options.device)
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_tokens": 256}
    how = RunnerOptions(compile_layers=False, max_graph_tokens=64, show_progress=False)
    return Engine(
        model,
        budget_bytes=budget_bytes,
        enable_sleep_mode=True,
        prefix_caching=False,
        runner_options=how,
        **sizes,
    )


def free_bytes() -> int:
    """What the driver has left on the device."""
    return torch.cuda.mem_get_info()[0] if HAS_GPU else 0


def first_token_s(engine: Engine, prompt: Sequence[int]) -> float:
    """Seconds from the call of `wake` to the first token."""
    start_s = time.perf_counter()
    engine.wake()
    engine.generate([list(prompt)], SHORT)
    return time.perf_counter() - start_s


def copied_s(num_bytes: int) -> float:
    """The rival: one copy of pinned memory to the device."""
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=HAS_GPU)
    there = torch.empty(num_bytes, dtype=torch.uint8, device="cuda" if HAS_GPU else "cpu")
    there.copy_(pinned)
    return min(seconds_of(lambda: there.copy_(pinned, non_blocking=True)) for _ in range(3))


def wake_row(options: Any, rounds: int) -> Row:
    """One model that sleeps and wakes."""
    prompt = list(range(3, 19))
    with open_engine(options, (1 * GiB) if HAS_GPU else 4 * MiB, {}) as engine:
        expected = engine.generate([prompt], ANSWER)[0].outputs[0].token_ids
        sleeps_s, wakes_s, given = [], [], []
        for _ in range(rounds + 1):
            before_bytes = free_bytes()
            sleeps_s.append(seconds_of(lambda: engine.sleep(weights=True)))
            given.append(free_bytes() - before_bytes)
            wakes_s.append(first_token_s(engine, prompt))
            assert expected == engine.generate([prompt], ANSWER)[0].outputs[0].token_ids
        weights = engine._weights
        assert weights is not None
        num_bytes = weights.num_bytes
    return {
        "models": 1,
        "weights_gib": num_bytes / GiB,
        "given_back_gib": min(given) / GiB,
        "first_sleep_s": sleeps_s[0],
        **quartiles("sleep_s", sleeps_s[1:]),
        **quartiles("first_token_s", wakes_s[1:]),
        "bus_s": copied_s(num_bytes),
    }


def random_row(options: Any, num_models: int, num_sleeps: int) -> Row:
    """Several models that sleep and wake at random, with requests between."""
    draw = random.Random(SEED)
    shape = {} if options.smoke else SMALL
    engines = [open_engine(options, 64 * MiB, shape) for _ in range(num_models)]
    prompts = [[draw.randrange(3, 120) for _ in range(draw.randint(2, 60))] for _ in range(5)]

    def answer(engine: Engine, at: int) -> Sequence[int]:
        return engine.generate([prompts[at]], ANSWER)[0].outputs[0].token_ids

    expected = [[answer(each, at) for at in range(len(prompts))] for each in engines]
    slept = asked = wrong = 0
    while slept < num_sleeps:
        at = draw.randrange(num_models)
        if draw.random() < 0.5:
            slept += not engines[at].is_sleeping
            engines[at].sleep(weights=True)
        else:
            which = draw.randrange(len(prompts))
            wrong += answer(engines[at], which) != expected[at][which]
            asked += 1
    for each in engines:
        each.close()
    return {"models": num_models, "sleeps": slept, "requests": asked, "wrong_answers": wrong}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one large model, then play with small ones."""
    bench = Bench("wake", __doc__, needs_gpu=True)
    options = bench.parse(argv)
    rows = [wake_row(options, 2 if options.smoke else 7)]
    rows.append(random_row(options, *((3, 12) if options.smoke else (10, 200))))
    one, many = rows
    what = "from the call of wake to the first token of a short prompt, 8B"
    figures = [
        Figure("first_token_s", what, one["first_token_s"], "s", at_most=on_gpu(0.8)),
        Figure("sleep_s", "sleep, after the first", one["sleep_s"], "s"),
        Figure(
            "of_bus",
            "time to the first token, relative to one copy of the weights over the bus",
            one["first_token_s"] / one["bus_s"],
            "×",
            rival=f"torch's pinned copy: {one['bus_s']:.3f} s",
        ),
        Figure("wrong_answers", "answers that changed", many["wrong_answers"], "", at_most=0),
    ]
    return bench.finish(rows, figures)


if __name__ == "__main__":
    sys.exit(main())
