"""Does an engine answer with the weights as they are, after each of many updates?

Question. The engine serves the very module that is trained. Are its greedy answers after each of
200 updates those of `model.generate` with the same weights, however the weights change?

Prediction. All are equal: parameters stay where they are, and the engine looks at what has moved.

Method. A tiny Llama in float32; each update fits a batch of random tokens, so that answers go on
changing. Two prompts, one longer than a block of the prefix cache, six greedy tokens each. After
each update the engine answers, and answers again from its prefix cache; a copy of the model has
generated with `model.generate` inside `Engine.paused()`. Ways: AdamW with `fused=True`, with
`foreach=True` and with neither; values written to `parameter.data`, and tensors put in its place; a
LoRA adapter that is trained while attached, and one that is merged after an update, and unmerged in
the next turn. Runners: eager, and captured steps over joined and compiled layers (torch's backend
`aot_eager`, which generates no code; on a CPU steps that would be captured are run padded). Where
an update has layers compiled anew, seconds each, there are a tenth of the updates.

Not measured. Code that inductor generates, and CUDA graphs: `pytest -m gpu tests/serve`.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from harness import Bench, Figure, Row
from models import llama_config, make_model, random_prompts

from vmkv import Engine, SamplingParams
from vmkv.serve.runner import RunnerOptions
from vmkv.units import MiB

NEW_TOKENS = 6
RATE = 0.01
PROMPT_TOKENS = (40, 7)
_COMPILED = RunnerOptions(
    compile_layers=True, compile_backend="aot_eager", capture=True, show_progress=False
)
RUNNERS: dict[str, Row] = {
    "eager": {"runner": "eager"},
    "compiled": {"runner": "graphs", "runner_options": _COMPILED},
}


def by_optimizer(model: Any, **options: Any) -> Iterator[None]:
    """Update by AdamW."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, RATE, **options)
    while True:
        optimizer.step()
        yield


def by_data(model: Any, *, replaces: bool) -> Iterator[None]:
    """Update by hand: gradients of one size, as AdamW's are."""
    while True:
        for each in model.parameters():
            step = RATE * each.grad.sign()
            if replaces:
                each.data = each.data - step
            else:
                each.data.sub_(step)
        yield


def by_adapter(model: Any, *, merges: bool) -> Iterator[None]:
    """Update an adapter, which every second update leaves merged into the weights."""
    import peft

    layers = ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=layers, init_lora_weights=False)
    adapted, is_merged = peft.get_peft_model(model, config), False
    updates = by_optimizer(model)
    yield  # Attached.
    while True:
        if is_merged:
            adapted.unmerge_adapter()
            is_merged = False
            yield
        else:
            next(updates)
            if merges:
                adapted.merge_adapter()
                is_merged = True
            yield


WAYS: dict[str, Callable[[Any], Iterator[None]]] = {
    "AdamW, fused": functools.partial(by_optimizer, fused=True),
    "AdamW, foreach": functools.partial(by_optimizer, foreach=True),
    "AdamW, neither": functools.partial(by_optimizer, foreach=False, fused=False),
    ".data written": functools.partial(by_data, replaces=False),
    ".data replaced": functools.partial(by_data, replaces=True),
    "adapter attached": functools.partial(by_adapter, merges=False),
    "adapter merged, unmerged": functools.partial(by_adapter, merges=True),
}
#: Ways after whose updates layers are compiled anew.
REMAKE = (".data replaced", "adapter merged, unmerged")


def measure(runner: str, way: str, num_updates: int) -> Row:
    """Train in one way; compare answers after each update."""
    if runner == "compiled" and way in REMAKE:
        num_updates = max(2, num_updates // 10)
    model = make_model(
        llama_config(smoke=True, eos_token_id=None), torch.device("cpu"), torch.float32
    )
    model.requires_grad_(requires_grad=True)
    prompts = [random_prompts(model, 1, size)[0].tolist() for size in PROMPT_TOKENS]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
    draw = torch.Generator().manual_seed(1)
    answers = []
    row: Row = {"runner": runner, "way": way, "updates": num_updates}
    row |= {"answers": 0, "unequal": 0, "stale": 0, "runners": 1}
    with Engine(model, budget_bytes=64 * MiB, **RUNNERS[runner]) as engine:
        last = engine.loop.runner
        updates = WAYS[way](model)
        for _ in range(num_updates):
            with engine.paused():
                ids = torch.randint(1, model.config.vocab_size, (2, 16), generator=draw)
                model.train()
                model.zero_grad()
                loss = model(input_ids=ids, labels=ids).loss
                if loss.requires_grad:  # Not that of a merged adapter.
                    loss.backward()
                next(updates)
                plain = copy.deepcopy(model).eval()
                wanted = [generated(plain, prompt) for prompt in prompts]
            for is_again in (False, True):
                outputs = engine.generate(prompts, params)
                got = [list(output.outputs[0].token_ids) for output in outputs]
                row["answers"] += len(got)
                row["unequal"] += sum(a != b for a, b in zip(got, wanted, strict=True))
                if not is_again:
                    row["stale"] += sum(bool(output.num_cached_tokens) for output in outputs)
            row["runners"] += engine.loop.runner is not last
            last = engine.loop.runner
            answers.append(str(wanted))
    row["different"] = len(set(answers))
    return row


def generated(model: Any, prompt: list[int]) -> list[int]:
    """Greedy tokens of transformers."""
    ids = torch.tensor([prompt])
    how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    answer: list[int] = model.generate(ids, max_new_tokens=NEW_TOKENS, **how)[0].tolist()
    return answer[len(prompt) :]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("weights", __doc__)
    bench.option("--updates", type=int, default=200)
    bench.option("--runners", nargs="+", choices=RUNNERS, default=list(RUNNERS))
    options = bench.parse(argv)
    num_updates = 3 if options.smoke else options.updates
    has_peft = importlib.util.find_spec("peft") is not None
    ways = [way for way in WAYS if has_peft or not way.startswith("adapter")]
    rows: list[Row] = []
    for runner in options.runners[: 1 if options.smoke else None]:
        for way in ways:
            rows.append(measure(runner, way, num_updates))
            print(rows[-1], flush=True)
    answers = sum(row["answers"] for row in rows)
    figures = [
        Figure(
            "weights_unequal_answers",
            f"of {answers} greedy answers after updates differ from model.generate",
            sum(row["unequal"] for row in rows),
            "",
            at_most=0,
        ),
        Figure(
            "weights_stale_prefixes",
            "of them begin with a cached prefix of weights before the update",
            sum(row["stale"] for row in rows),
            "",
            at_most=0,
        ),
        Figure(
            "weights_fewest_answers",
            "updates after which answers differ from all before, in the way with the fewest",
            min(row["different"] / row["updates"] for row in rows),
            "%",
        ),
    ]
    return bench.finish(rows, figures)


if __name__ == "__main__":
    sys.exit(main())
