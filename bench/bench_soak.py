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
from bench_generate import make_model
from common import write_result
from report import Figure, Row, bench_parser, make_record, print_figures, print_rows
from transformers import LlamaConfig

from vmkv.serve import Engine, SamplingParams
from vmkv.serve.preemption import PreemptionCosts

NUM_REQUESTS = 3000
NUM_SHORT = 400
NUM_DRAWN = 64
NUM_COMMON = 8
IN_FLIGHT = 384
SHARE_COMMON = 0.3
SHARE_SAMPLES = 0.02
SHARE_CANCELLED = 0.1
HOST_BYTES = 16 * 2**30
SHORT_BYTES = 3 * 2**30  # What the requests that run at once want is three times as much.
SMOKE_SHORT_BYTES = 2**20
LONG_ANSWER_TOKENS = 500  # So much that those that have begun outgrow the memory.
ERROR_RULE = 2.0
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
    """What a drawn request was answered, and how likely the engine thought each token."""

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
    """Serve all of it; a row, and what the drawn ones were answered."""
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


def make_config(*, smoke: bool, layers: int | None) -> LlamaConfig:
    """Llama-3-8B's shape, with fewer layers where wanted; or a tiny one."""
    return LlamaConfig(
        vocab_size=512 if smoke else 128256,
        hidden_size=256 if smoke else 4096,
        intermediate_size=96 if smoke else 14336,
        num_attention_heads=4 if smoke else 32,
        num_hidden_layers=layers or (2 if smoke else 32),
        num_key_value_heads=2 if smoke else 8,
        max_position_embeddings=512 if smoke else 8192,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, judge, show, write."""
    parser = bench_parser(__doc__)
    parser.add_argument("--kernels", nargs="+", help="attention backends; by default the fastest")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--requests", type=int, help="fewer requests")
    parser.add_argument("--budget-mib", type=int, help="what keys and values may take")
    parser.add_argument(
        "--short", action="store_true", help="only with so little memory that requests swap"
    )
    parser.add_argument("--eager", action="store_true", help="without graphs: for memory checkers")
    arguments = parser.parse_args(argv)
    smoke = arguments.smoke or not torch.cuda.is_available()
    config = make_config(smoke=smoke, layers=arguments.layers)
    model = make_model(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    num_requests = NUM_SHORT if arguments.short else NUM_REQUESTS
    asked = traffic(
        arguments.requests or (60 if smoke else num_requests),
        config.vocab_size,
        config.max_position_embeddings,
        LONG_ANSWER_TOKENS if arguments.short else 60,
    )
    rows: list[Row] = []
    answers: list[Answer] = []
    kernels = arguments.kernels or [None]
    budget_bytes = arguments.budget_mib << 20 if arguments.budget_mib else None
    if smoke and budget_bytes is None:
        budget_bytes = 2**23
    # Of a quarter of the default budget, requests this short still need no half.
    runs: list[tuple[str | None, str]] = [] if arguments.short else [(each, "") for each in kernels]
    runs += [(kernels[0], SHORT)] if arguments.short or smoke else [(kernels[0], QUARTER)]
    for kernel, suffix in runs:
        name = (kernel or "default") + suffix
        options: dict[str, Any] = {"budget_bytes": budget_bytes}
        if suffix:
            # Computing again would be as cheap for prompts this short: they are to swap.
            options = {
                "budget_bytes": (SMOKE_SHORT_BYTES if smoke else SHORT_BYTES)
                if suffix == SHORT
                else int(rows[0]["budget_gib"] * 2**30) // 4 // 2**21 * 2**21,
                "host_budget_bytes": 2**23 if smoke else HOST_BYTES,
                "preemption_costs": PreemptionCosts(flops_per_s=1.0),
            }
        with Engine(
            model,
            attention_backend=kernel,
            max_num_seqs=16 if smoke else 256,
            max_tokens=config.max_position_embeddings,
            runner="eager" if arguments.eager else "auto",
            **options,
        ) as engine:
            row, found = soak(name, engine, asked)
        rows.append(row)
        answers += found
        print_rows([row])
    verdicts = judge(model, answers)
    print_rows(verdicts)
    figures = []
    for row, verdict in zip(rows, verdicts, strict=True):
        run = row["run"]
        figures += [
            Figure(
                f"soak_failed_{run}",
                f"{row['requests']} requests: failed ({run})",
                row["failed"],
                "",
                at_most=0,
            ),
            Figure(
                f"soak_error_{run}",
                f"error of {verdict['drawn']} requests' log-probabilities, of the plain model's "
                f"own ({run})",
                verdict["engine_rms"] / verdict["plain_rms"],
                "×",
                at_most=ERROR_RULE,
            ),
            Figure(
                f"soak_worst_{run}",
                f"the same, of the worst request ({run})",
                verdict["worst_request_rms"] / verdict["plain_rms"],
                "×",
                at_most=2 * ERROR_RULE,
            ),
            Figure(
                f"soak_left_{run}",
                f"sequences and parked bytes left afterwards ({run})",
                row["left_sequences"] + row["left_parked_bytes"],
                "",
                at_most=0,
            ),
        ]
    print_figures(figures)
    record = make_record(__doc__, [*rows, *verdicts], figures, {"in_flight": IN_FLIGHT})
    if arguments.json or not smoke:
        print(
            "wrote",
            write_result("soak_short" if arguments.short else "soak", record, arguments.json),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
