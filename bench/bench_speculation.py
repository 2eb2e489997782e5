"""What do guesses save where they are right, and cost where they never are?

Question. With Llama-3-8B's shape and four guesses of which 70 % are right, how long is the time per
token with 1, 4, 16 and 64 running requests, against decoding? And where no guess is ever right, a
chat of 24 requests a second, what do the time per token and the first token lose? With `--model
FOLDER`, a folder with a real model: how long do 40 edits of source files and 40 extractions of JSON
take per token, against decoding, and how long does the last quarter of a rollout take?

Prediction. A step of 5 tokens takes 1.1 times a step of one, and the host's part that is not
hidden 1 ms of 5.6: with 3.8 tokens a step, 0.36 times at 1 request, 0.37 at 4, 0.45 at 16. With 64
requests a step of 320 tokens is bound by its products, 11 ms instead of 6.9: 0.5 times. Where
nothing is right, looking guesses up takes 5 us for each token while the device works: 1.00 times.

Method. Random weights in bfloat16, captured steps, in one engine whose drafter is taken out and put
back in turns; the median of three rounds each. The model's head is made so that each token has a
certain successor, and a drafter that knows it gives each request four guesses a step, 2.8 right
ones in the mean (3 of them in four of five drafts, else 2). Prompts of 128 tokens, 256 new ones.
Time per token: a request's time from its first token to its last by the number of the others; the
median of the requests of a round. For the chat, requests are drawn at temperature 1, so no text
repeats; 240 of them, prompts of 16 to 4,096 tokens (median 512), answers of 8 to 512 (median 150).
`--model` generates answers greedily, one request at a time. A rollout is 8 samples of a prompt, of
512 tokens each, at temperature 0.3, since a model of this size writes no repeated text at 1; its
last quarter is the time from a sample's token 384 to 512, the mean of the samples. Each prompt is
answered once in each way, and never again, since answers are texts to guess from.

Rivals. The same requests without guesses; vLLM's n-gram speculation, with `--vllm-json`.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import Bench, Figure, Row, in_turns, on_gpu, paired_ratio, quartiles
from models import llama_config, make_model, random_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

from vmkv import Engine, SamplingParams
from vmkv.serve.drafts import Drafter
from vmkv.serve.observer import Event, ObservedCache, RequestRecord, StepRecord
from vmkv.serve.request import Request
from vmkv.units import GiB, MiB

NUM_GUESSES, NUM_TOKENS, ROUNDS = 4, 256, 3
#: Running requests, and the promised time per token relative to decoding.
BOUNDS = {1: 0.40, 4: 0.42, 16: 0.55, 64: 0.95}
RATE_PER_S, NUM_CHATS = 24.0, 240
NUM_ANSWERS, ANSWER_TOKENS = 40, 300
NUM_ROLLOUTS, NUM_SAMPLES, SAMPLE_TOKENS = 4, 8, 512


class Records:
    """The records of requests that have ended, and the guesses of all steps."""

    def __init__(self) -> None:
        self.ended: list[RequestRecord] = []
        self.num_guesses = self.num_right = 0

    def on(self, event: Event, cache: ObservedCache) -> None:
        """Keep the records of ended requests, and count guesses."""
        if isinstance(event, RequestRecord):
            self.ended.append(event)
        elif isinstance(event, StepRecord):
            self.num_guesses += event.num_draft_tokens
            self.num_right += event.num_accepted_tokens

    def take(self) -> tuple[float, float, float]:
        """Medians of a request's time per token and first token in ms, and the accepted share."""
        its, self.ended = self.ended, []
        ms = [
            1e3 * (each.end_s - (each.first_token_s or 0.0)) / (each.num_output_tokens - 1)
            for each in its
            if each.num_output_tokens > 1
        ]
        first_ms = [1e3 * ((each.first_token_s or 0.0) - each.arrival_s) for each in its]
        share = self.num_right / max(1, self.num_guesses)
        self.num_guesses = self.num_right = 0
        return statistics.median(ms), statistics.median(first_ms), share


class Knowing(Drafter):
    """A drafter that knows what comes next, and is wrong as often as it should be."""

    def __init__(self, drafter: Drafter, vocab_size: int):
        vars(self).update(vars(drafter))
        self._random, self._size = random.Random(0), vocab_size

    def numbers(self, requests: Sequence[Request], *, skipped: int = 0) -> Mapping[Request, int]:
        """Return four guesses for each request."""
        return dict.fromkeys(requests, NUM_GUESSES)

    def drafts(self, requests: Sequence[Request]) -> Mapping[Request, Sequence[int]]:
        """Return three right guesses, or two, and then wrong ones."""
        found: dict[Request, Sequence[int]] = {}
        for each in requests:
            last, count = each.tokens(each.num_known - 1, each.num_known)[0], self.room(each)
            num_right = 3 if self._random.random() < 0.8 else 2
            right = [(last + at) % self._size for at in range(1, num_right + 1)]
            guesses = [*right, *[last] * (NUM_GUESSES - num_right)][:count]
            if guesses:
                found[each] = guesses
        return found


def certain(model: Any) -> None:
    """Let each token be followed by the next number: little is added to its embedding."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(1e-3)
        embedding = model.get_input_embeddings().weight
        embedding.normal_(0.0, 1.0, generator=torch.Generator(embedding.device).manual_seed(0))
        model.get_output_embeddings().weight.copy_(embedding.roll(1, 0))


def engine_of(model: Any, options: Any, records: Records, max_num_seqs: int) -> Engine:
    """Make the engine of all rounds."""
    smoke = options.smoke
    return Engine(
        model,
        observer=records,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=96 if smoke else 8192,
        max_num_mixed_tokens=None if smoke else 1024,
        max_tokens=128 if smoke else 8192,
        budget_bytes=64 * MiB if smoke else 40 * GiB,
        prefix_caching=False,
        speculative_config={"method": "suffix", "num_speculative_tokens": NUM_GUESSES},
        seed=0,
    )


def rounds_of(engine: Engine, drafter: Drafter | None, options: Any) -> Iterator[tuple[str, int]]:
    """Set the engine's drafter, or none, in turns; yields the name and the round."""
    subjects = {"decoding": None, "guessing": drafter}
    for name, at in in_turns(list(subjects), 1 if options.smoke else ROUNDS, warmup=1):
        engine.loop._drafter = subjects[name]
        engine.loop._scheduler.drafts = {}
        yield name, at


def forced(options: Any, rows: list[Row]) -> Iterator[Figure]:
    """Compare decoding with steps of four guesses of which 2.8 are right."""
    model = make_model(llama_config(smoke=options.smoke), options.device)
    certain(model)
    records = Records()
    numbers = (1, 4) if options.smoke else tuple(BOUNDS)
    num_tokens, num_prompt = (12, 8) if options.smoke else (NUM_TOKENS, 128)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    with engine_of(model, options, records, max(numbers)) as engine:
        assert engine.loop._drafter is not None
        drafter = Knowing(engine.loop._drafter, model.config.vocab_size)
        for count in numbers:
            prompts = random_prompts(model, count, num_prompt).tolist()
            took: dict[str, list[float]] = {"decoding": [], "guessing": []}
            said, share = [], 0.0
            for name, at in rounds_of(engine, drafter, options):
                outputs = engine.generate(prompts, params)
                said.append([each.outputs[0].token_ids for each in outputs])
                ms, _, share = records.take()
                if at >= 0:
                    took[name].append(ms)
            assert all(each == said[0] for each in said)
            for name, samples in took.items():
                row: Row = {"load": "70 % of 4", "requests": count, "what": name}
                rows.append(row | quartiles("ms_per_token", samples))
            yield Figure(
                f"right_{count}",
                f"time per token with {count} requests, 2.8 of 4 guesses right "
                f"(accepted {100 * share:.0f} %), against decoding",
                paired_ratio(took["guessing"], took["decoding"]),
                "×",
                at_most=on_gpu(BOUNDS[count]),
                rival=f"decoding {statistics.median(took['decoding']):.3g} ms",
            )


def chat(options: Any, rows: list[Row]) -> Iterator[Figure]:
    """Compare decoding with an engine that looks for guesses and finds none."""
    model = make_model(llama_config(smoke=options.smoke), options.device)
    records, draw = Records(), random.Random(0)
    count = 6 if options.smoke else NUM_CHATS
    size, longest = model.config.vocab_size, 24 if options.smoke else 4096
    asked: list[tuple[float, list[int], SamplingParams]] = []
    due_s = 0.0
    for number in range(count):
        due_s += draw.expovariate(1e3 if options.smoke else RATE_PER_S)
        length = int(min(max(draw.lognormvariate(6.24, 0.8), 16), longest))
        num_new = int(min(max(draw.lognormvariate(5.0, 0.7), 8), 12 if options.smoke else 512))
        prompt = [draw.randrange(3, size) for _ in range(length)]
        asked.append((due_s, prompt, SamplingParams(max_tokens=num_new, seed=number)))
    took: dict[str, list[tuple[float, float]]] = {"decoding": [], "guessing": []}
    with engine_of(model, options, records, 4 if options.smoke else 128) as engine:
        for name, at in rounds_of(engine, engine.loop._drafter, options):
            arrive(engine, asked)
            ms, first_ms, _ = records.take()
            if at >= 0:
                took[name].append((ms, first_ms))
    for at, (key, what) in enumerate((("ms_per_token", "time per token"), ("ttft", "first token"))):
        its = {name: [each[at] for each in samples] for name, samples in took.items()}
        for name, samples in its.items():
            row: Row = {"load": "chat 24/s", "requests": count, "what": name}
            rows.append(row | quartiles(key, samples))
        yield Figure(
            f"never_right_{key}",
            f"{what} of a chat where no guess is right, against decoding",
            paired_ratio(its["guessing"], its["decoding"]),
            "×",
            at_most=on_gpu(1.02),
            rival=f"decoding {statistics.median(its['decoding']):.3g} ms",
        )


def arrive(engine: Engine, asked: Iterable[tuple[float, list[int], SamplingParams]]) -> None:
    """Add requests when they are due, and run the engine until all have ended."""
    start_s, left = time.perf_counter(), list(asked)[::-1]
    while left or engine.has_unfinished:
        while left and left[-1][0] <= time.perf_counter() - start_s:
            engine.add(*left.pop()[1:])
        if engine.has_unfinished:
            engine.step()
        elif left:
            time.sleep(max(0.0, left[-1][0] - (time.perf_counter() - start_s)))


def tasks(tokenizer: Any) -> tuple[dict[str, list[list[int]]], list[list[int]]]:
    """Return prompts that ask for what stands in them: changed source files, and fields as JSON.

    Those of the latter kind that are for rollouts come by themselves. The first one of each kind is
    for a warm-up.
    """
    draw, count = random.Random(0), NUM_ANSWERS + 1
    files = sorted((Path(__file__).parents[1] / "vmkv").rglob("*.py"))
    edits, extractions = [], []
    for path in draw.sample([each for each in files if each.stat().st_size > 4000], count):
        lines = path.read_text().splitlines()
        start = draw.randrange(max(1, len(lines) - 30))
        code = "\n".join(lines[start : start + 30])
        text = "Repeat this Python code, but rename the variable `self` to `this`.\n\n"
        edits.append(f"{text}```python\n{code}\n```")
    names, towns = ("Ada", "Grace", "Alan", "Edsger"), ("Oslo", "Kyoto", "Lima", "Accra")
    for _ in range(count + NUM_ROLLOUTS + 1):
        people = [
            f"{draw.choice(names)} (order {draw.randrange(10**8)}) lives in {draw.choice(towns)}, "
            f"pays {draw.randrange(10**4)} and writes from {draw.randrange(10**6)}@example.org."
            for _ in range(6)
        ]
        form = '[{"name": …, "order": …, "town": …, "pays": …, "address": …}, …]'
        extractions.append(f"Extract all people as JSON, {form}:\n" + "\n".join(people))

    def encoded(text: str) -> list[int]:
        chat = [{"role": "user", "content": text}]
        whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return list(tokenizer.encode(whole, add_special_tokens=False))

    named = {"edits": edits, "JSON": extractions[:count]}
    answered = {name: [encoded(each) for each in texts] for name, texts in named.items()}
    return answered, [encoded(each) for each in extractions[count:]]


def real(options: Any, rows: list[Row]) -> Iterator[Figure]:
    """Compare decoding with guesses from texts, with a real model."""
    theirs = {} if options.vllm_json is None else json.loads(options.vllm_json.read_text())
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    dtype = torch.bfloat16 if options.device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    records, params = Records(), SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
    with Engine(
        model.to(options.device).eval(),
        tokenizer=tokenizer,
        observer=records,
        max_num_seqs=NUM_SAMPLES,
        max_tokens=2048,
        budget_bytes=2 * GiB,
        speculative_config={"method": "suffix", "num_speculative_tokens": 8},
    ) as engine:
        answered, rolled_out = tasks(tokenizer)
        for kind, prompts in answered.items():
            took: dict[str, list[float]] = {"decoding": [], "guessing": []}
            for name, prompt, counts in each_way(engine, prompts[: options.answers + 1]):
                [output] = engine.generate([prompt], params)
                if counts and len(output.outputs[0].token_ids) > 1:
                    took[name].append(records.take()[0])
                records.ended.clear()
            for name, samples in took.items():
                row: Row = {"load": kind, "requests": 1, "what": name}
                rows.append(row | quartiles("ms_per_token", samples))
            decoding_ms, guessing_ms = map(statistics.median, took.values())
            yield Figure(
                f"real_{kind.lower()}",
                f"time per token of {kind}, against decoding",
                guessing_ms / decoding_ms,
                "×",
                at_most=on_gpu(0.6),
                rival=f"decoding {decoding_ms:.3g} ms",
            )
            if kind in theirs:
                its_ms = 1e3 * theirs[kind]
                yield Figure(
                    f"real_{kind.lower()}_vllm",
                    f"time per token of {kind}, against vLLM's n-gram speculation",
                    guessing_ms / its_ms,
                    "×",
                    at_most=0.9,
                    rival=f"vLLM {its_ms:.3g} ms",
                )
        yield rollouts(engine, rolled_out, rows)


def each_way(engine: Engine, prompts: list[list[int]]) -> Iterator[tuple[str, list[int], bool]]:
    """Set the engine's drafter, or none, for each prompt in turns; the first one is a warm-up.

    Yields the name, the prompt, and whether it counts.
    """
    drafter = engine.loop._drafter
    for at, prompt in enumerate(prompts):
        ways = [("decoding", None), ("guessing", drafter)]
        for name, its in ways if at % 2 else ways[::-1]:
            engine.loop._drafter = its
            engine.loop._scheduler.drafts = {}
            yield name, prompt, at > 0
    engine.loop._drafter = drafter


def rollouts(engine: Engine, prompts: list[list[int]], rows: list[Row]) -> Figure:
    """Compare the last quarters of rollouts, of 8 samples each."""
    its = {"n": NUM_SAMPLES, "max_tokens": SAMPLE_TOKENS, "temperature": 0.3, "seed": 0}
    params = SamplingParams(**its, ignore_eos=True)
    took: dict[str, list[float]] = {"decoding": [], "guessing": []}
    wholes: dict[str, list[float]] = {"decoding": [], "guessing": []}
    for name, prompt, counts in each_way(engine, prompts):
        start_s, handle = time.perf_counter(), engine.add(prompt, params)
        begun_s: dict[int, float] = {}
        ended_s: dict[int, float] = {}
        while engine.has_unfinished:
            engine.step()
            now_s = time.perf_counter()
            for at, each in enumerate(handle.requests):
                if len(each.output_token_ids) >= SAMPLE_TOKENS * 3 // 4:
                    begun_s.setdefault(at, now_s)
                if len(each.output_token_ids) >= SAMPLE_TOKENS:
                    ended_s.setdefault(at, now_s)
        if counts:
            quarters_s = [ended_s[at] - begun_s[at] for at in range(NUM_SAMPLES)]
            took[name].append(1e3 * statistics.mean(quarters_s))
            wholes[name].append(1e3 * (time.perf_counter() - start_s))
    for name, samples in took.items():
        row: Row = {"load": "rollout", "requests": NUM_SAMPLES, "what": name}
        rows.append(row | quartiles("last_ms", samples) | quartiles("whole_ms", wholes[name]))
    decoding_ms, guessing_ms = (sum(samples) / len(samples) for samples in took.values())
    return Figure(
        "real_rollout",
        "last quarters of 8 samples of a prompt, against decoding",
        guessing_ms / decoding_ms,
        "×",
        at_most=on_gpu(0.7),
        rival=f"decoding {decoding_ms:.4g} ms",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("speculation", __doc__)
    bench.option("--model", metavar="FOLDER", help="edits and JSON with the model there")
    bench.option("--answers", type=int, default=NUM_ANSWERS, help="answers of each kind for it")
    bench.option("--vllm-json", type=Path, help="vLLM's seconds, by vllm_workloads.py --texts")
    options = bench.parse(argv)
    rows: list[Row] = []
    if options.model is not None:
        bench.name = "speculation_texts"
        return bench.finish(rows, list(real(options, rows)))
    if options.device.type != "cuda" and not options.smoke:
        bench.error("timing needs a GPU; --smoke runs a tiny one anywhere")
    figures = [*forced(options, rows), *chat(options, rows)]
    return bench.finish(rows, figures)


if __name__ == "__main__":
    sys.exit(main())
