"""Does an engine that serves for longer than its caches last still say what the model says?

Question. 3,000 chat-like requests, 30 % of which begin like others, go through one engine with
the default budget and the prefix cache on: does every request end well, are the books afterwards
what they were before, and are the answers those of the model? And once more with a quarter of
that budget, and with so little memory that they swap to the host?

Prediction. Every request ends with its tokens; nothing is left mapped but what the runner keeps.
The log-probabilities of the tokens differ from a float32 pass of the same model, alone and without
any cache, by what bfloat16 costs the plain model itself in the same passes: at most twice that. A
key or value of somebody else's would show as an error of the size of the logits themselves, some
hundred times as much.

Method. Llama-3-8B's shape, random weights, bfloat16. Prompts from `random.seed(0)`: lengths
log-normal around 180 tokens (5 to 2,000); 30 % begin with a part of one of eight common beginnings
of 300 to 1,100 tokens; 2 % ask for three samples. Answers: up to 160 tokens, log-normal around 60,
sampled with seeds. At most 384 requests are in the engine at a time; a tenth of them are cancelled
midway. Where memory is short, 400 requests, with answers of some 500 tokens. 64 requests, drawn
at random, ask for log-probabilities; prompt and answer of each then go through the plain model in
one pass without a cache, once in bfloat16 and once in float32.

Rivals. The plain model in bfloat16 is the rule that the engine is held to.

Not measured. Arrivals over time and latencies: the engine is kept full.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness import Bench, Figure, Row, print_rows
from models import llama_config, make_model

from vmkv import Engine, SamplingParams
from vmkv.serve.scheduler import PreemptionCosts
from vmkv.units import GiB, MiB

NUM_DRAWN = 64
NUM_COMMON = 8
IN_FLIGHT = 384
SHARE_COMMON = 0.3
SHARE_SAMPLES = 0.02
SHARE_CANCELLED = 0.1
LONG_ANSWER_TOKENS = 500  # So many that running requests outgrow the memory.
QUARTER = ", quarter of the budget"
SHORT = ", short of memory, swapping"


@dataclass(frozen=True)
class Asked:
    """One request."""

    prompt: list[int]
    params: SamplingParams
    is_cancelled: bool
    is_drawn: bool


@dataclass(frozen=True)
class Answer:
    """The answer to a drawn request, and the engine's log-probability of each token."""

    run: str
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def traffic(
    num_requests: int, vocabulary: int, max_tokens: int, answer_tokens: int = 60
) -> list[Asked]:
    """Seeded requests, whose answers are of some `answer_tokens`."""
    source = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [source.randrange(5, vocabulary) for _ in range(count)]

    longest = max_tokens // 2
    common = [tokens(min(longest // 2, source.randint(300, 1100))) for _ in range(NUM_COMMON)]
    drawn = set(source.sample(range(num_requests), min(NUM_DRAWN, num_requests // 2)))
    asked = []
    for at in range(num_requests):
        length = min(longest // 2, max(5, int(source.lognormvariate(math.log(180), 0.8))))
        prompt = tokens(length)
        if source.random() < SHARE_COMMON:
            shared = source.choice(common)
            prompt = shared[: source.randint(len(shared) // 2, len(shared))] + prompt
        params = SamplingParams(
            max_tokens=min(
                max_tokens // 4,
                160 * answer_tokens // 60,
                max(2, int(source.lognormvariate(math.log(answer_tokens), 0.6))),
            ),
            n=3 if source.random() < SHARE_SAMPLES else 1,
            ignore_eos=True,
            seed=at,
            logprobs=0 if at in drawn else None,
        )
        is_drawn = at in drawn
        is_cancelled = not is_drawn and source.random() < SHARE_CANCELLED
        asked.append(Asked(prompt, params, is_cancelled, is_drawn))
    return asked


def soak(name: str, engine: Engine, asked: Sequence[Asked]) -> tuple[Row, list[Answer]]:
    """Serve all requests; a row, and the answers to the drawn ones."""
    before = engine.cache.stats().num_sequences
    waiting = list(reversed(asked))
    running: list[tuple[Asked, Any]] = []
    answers: list[Answer] = []
    failed: list[str] = []
    num_steps = num_tokens = num_preempted = num_cached = 0
    source = random.Random(1)
    start = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < IN_FLIGHT:
            each = waiting.pop()
            running.append((each, engine.add(each.prompt, each.params, source.randint(-1, 1))))
        engine.step()
        num_steps += 1
        still = []
        for each, handle in running:
            if not handle.is_finished:
                if each.is_cancelled and source.random() < 0.02:
                    engine.cancel(handle)
                else:
                    still.append((each, handle))
                    continue
            output = handle.output()
            num_tokens += sum(len(its.token_ids) for its in output.outputs)
            num_cached += output.num_cached_tokens
            num_preempted += sum(request.num_preemptions for request in handle.requests)
            if output.error is not None:
                failed.append(repr(output.error))
            if each.is_drawn and output.error is None:
                first = output.outputs[0]
                logprobs = [its.logprob for its in first.logprobs]
                answers.append(Answer(name, each.prompt, list(first.token_ids), logprobs))
        running = still
    seconds = time.perf_counter() - start
    while engine.has_unfinished:
        engine.step()
    engine.cache.check()
    engine.cache.trim()
    engine.cache.check()
    stats = engine.cache.stats()
    row: Row = {
        "run": name,
        "requests": len(asked),
        "steps": num_steps,
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds,
        "cached_prompt_tokens": num_cached,
        "preempted": num_preempted,
        "swapped_out_gib": stats.sharing.swapped_out_bytes / 2**30,
        "forks": stats.sharing.num_forks,
        "copied_on_write_mib": stats.sharing.copied_on_write_bytes / 2**20,
        "budget_gib": stats.budget_bytes / 2**30,
        "failed": len(failed),
        "left_sequences": stats.num_sequences - before,
        "left_parked_bytes": stats.parked_bytes,
    }
    for each in failed[:3]:
        print(f"{name}: {each}", flush=True)
    return row, answers


@torch.inference_mode()
def alone(model: Any, answers: Sequence[Answer]) -> list[torch.Tensor]:
    """Log-probabilities of every answer's tokens by the plain model: one pass, no cache."""
    found = []
    device = model.get_input_embeddings().weight.device
    for each in answers:
        ids = torch.tensor([[*each.prompt, *each.tokens]], device=device)
        num_prompt, num_answered = len(each.prompt), len(each.tokens)
        logits = model(ids, use_cache=False, logits_to_keep=num_answered + 1).logits[0, :-1]
        chosen = ids[0, num_prompt:, None]
        found.append(logits.double().log_softmax(-1).gather(1, chosen)[:, 0].cpu())
    return found


def judge(model: Any, answers: Sequence[Answer]) -> list[Row]:
    """Each run's error against float32, and the plain model's in the same passes."""
    plain = alone(model, answers)
    exact = alone(model.float(), answers)
    rows = []
    for run in dict.fromkeys(each.run for each in answers):
        mine, rule, worst = [], [], 0.0
        for each, low, high in zip(answers, plain, exact, strict=True):
            if each.run == run:
                error = torch.tensor(each.logprobs, dtype=torch.float64) - high
                mine.append(error)
                rule.append(low - high)
                worst = max(worst, float(error.square().mean().sqrt()))
        engine_error, plain_error = torch.cat(mine), torch.cat(rule)
        rows.append(
            {
                "run": run,
                "drawn": len(mine),
                "tokens": len(engine_error),
                "engine_rms": float(engine_error.square().mean().sqrt()),
                "engine_max": float(engine_error.abs().max()),
                "worst_request_rms": worst,
                "plain_rms": float(plain_error.square().mean().sqrt()),
                "plain_max": float(plain_error.abs().max()),
                "spread_of_logprobs": float(torch.cat(exact).std()),
            }
        )
    return rows


def promised(rows: Sequence[Row], verdicts: Sequence[Row]) -> list[Figure]:
    """Failures, errors and leftovers of each run."""
    figures = []
    for row, verdict in zip(rows, verdicts, strict=True):
        run, plain = row["run"], verdict["plain_rms"]
        what = f"{row['requests']} requests: failed ({run})"
        figures.append(Figure(f"soak_failed_{run}", what, row["failed"], "", 0))
        what = f"error of {verdict['drawn']} requests' log-probabilities, of the plain model's own "
        got = verdict["engine_rms"] / plain
        figures.append(Figure(f"soak_error_{run}", f"{what}({run})", got, "×", 2.0))
        what, got = f"the same, of the worst request ({run})", verdict["worst_request_rms"] / plain
        figures.append(Figure(f"soak_worst_{run}", what, got, "×", 4.0))
        what = f"sequences and parked bytes left afterwards ({run})"
        got = row["left_sequences"] + row["left_parked_bytes"]
        figures.append(Figure(f"soak_left_{run}", what, got, "", 0))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, judge, show, write."""
    bench = Bench("soak", __doc__, needs_gpu=True)
    add = bench.option
    add("--kernels", nargs="+", default=[None], help="attention backends; by default the fastest")
    add("--layers", type=int, help="fewer layers than the model has")
    add("--requests", type=int, help="fewer requests")
    add("--budget-mib", type=int, help="what keys and values may take")
    add("--short", action="store_true", help="only with so little memory that requests swap")
    add("--eager", action="store_true", help="without graphs: for memory checkers")
    options = bench.parse(argv)
    smoke, kernels = options.smoke, options.kernels
    bench.name = "soak_short" if options.short else "soak"
    sizes: Row = {"max_position_embeddings": 512 if smoke else 8192}
    sizes |= {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 96} if smoke else {}
    sizes |= {"num_hidden_layers": options.layers} if options.layers else {}
    config = llama_config(smoke=smoke, **sizes)
    model = make_model(config, options.device)
    max_tokens = config.max_position_embeddings
    num_requests = options.requests or (60 if smoke else 400 if options.short else 3000)
    answer_tokens = LONG_ANSWER_TOKENS if options.short else 60
    asked = traffic(num_requests, config.vocab_size, max_tokens, answer_tokens)
    rows: list[Row] = []
    answers: list[Answer] = []
    budget_bytes = options.budget_mib * MiB if options.budget_mib else 8 * MiB if smoke else None
    # Requests this short need less than half of a quarter of the default budget.
    runs: list[tuple[str | None, str]] = [] if options.short else [(each, "") for each in kernels]
    runs += [(kernels[0], SHORT if options.short or smoke else QUARTER)]
    for kernel, suffix in runs:
        memory: Row = {"budget_bytes": budget_bytes}
        if suffix == SHORT:  # Running requests would need three times as much.
            memory["budget_bytes"] = MiB if smoke else 3 * GiB
        elif suffix == QUARTER:
            memory["budget_bytes"] = int(rows[0]["budget_gib"] * GiB) // 4 // (2 * MiB) * 2 * MiB
        if suffix:
            # Recomputing prompts this short would be as cheap; this cost model always swaps.
            memory["preemption_costs"] = PreemptionCosts(flops_per_s=1.0)
            memory["host_budget_bytes"] = 8 * MiB if smoke else 16 * GiB
        with Engine(
            model,
            attention_backend=kernel,
            max_num_seqs=16 if smoke else 256,
            max_tokens=max_tokens,
            runner="eager" if options.eager else "auto",
            **memory,
        ) as engine:
            row, found = soak((kernel or "default") + suffix, engine, asked)
        rows.append(row)
        answers += found
        print_rows([row])
    verdicts = judge(model, answers)
    return bench.finish([*rows, *verdicts], promised(rows, verdicts), {"in_flight": IN_FLIGHT})


if __name__ == "__main__":
    sys.exit(main())
