"""What do grammars cost a decode step, and are the answers valid?

Question. 64 requests decode at once, and each must answer with JSON of a schema. By how much does
that lengthen the time per token, against the same requests without one? And with `--validity
FOLDER`, a folder with a real model: of 2,000 guided answers over 40 schemas at temperature 1, which
are not what their schema says, by another library's judgement, and which reach max_tokens?

Prediction. The masks of step k + 1 are made while its forward pass runs, 6 ms with Llama-3-8B's
shape: 64 masks take 0.1 to 2 ms on 8 threads, and 64 matchers advance in 0.3 ms. So the device
waits for none of it, and pays for the upload of 1 MiB (20 us), for logits in float32 instead of the
graph's argmax (60 us of copies) and for the mask (30 us): 1.02 times the time per token, greedy,
and 1.01 times if both draw from the distribution. All answers that stop are valid; under 2 % reach
max_tokens. Measured: 1.69 and 1.81 with copies of one matcher, which share a lock; 1.43 and 1.45
with originals for each thread; 1.09 and 1.16 where tokens up to 4, 8 and 12 characters are found
without a walk, and synthetic tokens are as long as real ones. Most of the masks' time is that of
strings near their greatest length, 1 to 3 ms on one thread, and twice that of a real vocabulary, as
random tokens share no beginnings. So the tokens are those of a real one since.

Method. Llama-3-8B's shape, random weights, bfloat16, captured steps, the first 128,256 tokens of
Tekken, a real vocabulary (of the package mistral-common). Prompts of 128 tokens, 256 tokens for
each request; the schema is an array of 200 objects, longer than that. The host's time is shown by
part: means of a step, prompts included. Time per token: a request's time from its first token to
its last by the number of the others; the median of the requests of a round. Guided and unguided
rounds alternate, and the ratio is the median of three. `--validity` uses the CPU in float32 if
there is no GPU.

Rivals. The same requests without a grammar.

Not measured. Compilation of the schema, once in each process: milliseconds.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import torch
from guided_schemas import SCHEMAS, array, obj, text, whole
from harness import (
    HAS_GPU,
    Bench,
    Figure,
    Row,
    in_turns,
    on_gpu,
    paired_ratio,
    print_rows,
    quartiles,
)
from models import llama_config, make_model, random_prompts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from vmkv import Engine, SamplingParams
from vmkv.serve.guided import Grammars
from vmkv.serve.memory_view import MemoryView
from vmkv.serve.observer import Event, ObservedCache, RequestRecord
from vmkv.serve.params import StructuredOutputs
from vmkv.serve.runner import ModelRunner, PendingTokens
from vmkv.serve.scheduler import Scheduler
from vmkv.serve.step_loop import StepLoop
from vmkv.units import GiB, MiB

NUM_REQUESTS, NUM_TOKENS, ROUNDS = 64, 256, 3
NUM_ANSWERS, ANSWER_TOKENS = 2000, 400
LONG = array(
    obj({"id": whole(0, 99_999), "name": text(24), "is_new": {"type": "boolean"}}), 200, 200
)


class Records:
    """The records of requests that have ended."""

    def __init__(self) -> None:
        self.ended: list[RequestRecord] = []

    def on(self, event: Event, cache: ObservedCache) -> None:
        """Keep the records of ended requests."""
        if isinstance(event, RequestRecord):
            self.ended.append(event)

    def ms_per_token(self) -> float:
        """Median time per token of the requests since the last call."""
        its, self.ended = self.ended, []
        took = [(each.end_s - each.first_token_s) / (each.num_output_tokens - 1) for each in its]
        assert all(each.num_output_tokens == its[0].num_output_tokens for each in its)
        return 1e3 * statistics.median(took)


class Spent:
    """The host's time in some methods, while entered; parts that call others include them."""

    parts = (
        (StepLoop, "step"),
        (Scheduler, "plan"),
        (MemoryView, "grow"),
        (ModelRunner, "launch"),
        (ModelRunner, "submit"),
        (PendingTokens, "wait"),
        (Engine, "_accept"),
        (Grammars, "masks"),
        (ModelRunner, "sample"),
    )

    def __init__(self) -> None:
        self.took_s: dict[str, list[float]] = {}
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Spent:
        for owner, name in self.parts:
            timed = self._timed(getattr(owner, name), f"{owner.__name__}.{name}")
            self._undo.enter_context(mock.patch.object(owner, name, timed))
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def _timed(self, method: Any, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                self.took_s.setdefault(name, []).append(time.perf_counter() - start_s)

        return call

    def row(self) -> Row:
        """Milliseconds of each part in a mean step since the last call, with the longest call."""
        took_s, self.took_s = self.took_s, {}
        num_steps = max(1, len(took_s.get("StepLoop.step", ())))
        return {
            name: f"{1e3 * sum(took) / num_steps:.2f} ({1e3 * max(took):.1f})"
            for owner, method in self.parts
            if (took := took_s.get(name := f"{owner.__name__}.{method}", [0.0]))
        }


def tokenizer_of(texts: Iterable[bytes]) -> PreTrainedTokenizerFast:
    """Byte-level tokenizer of these tokens, after one for the end."""
    printed = bytes_to_unicode()
    tokens = ["</s>", *("".join(map(printed.__getitem__, text)) for text in texts)]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def tekken(size: int) -> Iterator[bytes]:
    """Yield the first tokens of Tekken, a vocabulary of 131,072."""
    spec = importlib.util.find_spec("mistral_common")
    if spec is None:
        raise SystemExit("Tekken's vocabulary is missing: pip install --no-deps mistral-common")
    [folder] = spec.submodule_search_locations or ()
    entries = json.loads(Path(folder, "data", "tekken_240911.json").read_text())["vocab"]
    yield from (base64.b64decode(entry["token_bytes"]) for entry in entries[:size])


def timed(options: Any) -> tuple[list[Row], list[Figure]]:
    """Alternate rounds of guided and unguided requests."""
    smoke = options.smoke
    size = 320 if smoke else 128_256
    texts = [bytes([byte]) for byte in range(256)] if smoke else tekken(size - 1)
    num_requests, num_tokens = (4, 12) if smoke else (NUM_REQUESTS, NUM_TOKENS)
    model = make_model(llama_config(smoke=smoke, vocab_size=size), options.device)
    model.generation_config.eos_token_id = 0
    prompts = random_prompts(model, num_requests, 8 if smoke else 128).tolist()
    records = Records()
    base = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1, detokenize=False)
    form = StructuredOutputs(json=LONG)
    rows, figures = [], []
    spent = Spent()
    with (
        spent,
        Engine(
            model,
            tokenizer=tokenizer_of(texts),
            observer=records,
            max_num_seqs=num_requests,
            max_num_batched_tokens=64 if smoke else 16384,
            max_tokens=128 if smoke else 1024,
            budget_bytes=64 * MiB if smoke else 24 * GiB,
            prefix_caching=False,
        ) as engine,
    ):
        for temperature, bound in ((0.0, 1.05), (1.0, 1.05)):
            plain = replace(base, temperature=temperature)
            subjects = {"unguided": plain, "guided": replace(plain, structured_outputs=form)}
            hosts: dict[str, Row] = {}
            took: dict[str, list[float]] = {name: [] for name in subjects}
            for name, at in in_turns(list(subjects), 1 if smoke else ROUNDS, warmup=1):
                outputs = engine.generate(prompts, subjects[name])
                assert {None} == {each.error for each in outputs}
                ms = records.ms_per_token()
                hosts[name] = spent.row()
                if at >= 0:
                    took[name].append(ms)
            rows += [
                {"temperature": temperature, "requests": num_requests, "what": name}
                | quartiles("ms_per_token", samples)
                for name, samples in took.items()
            ]
            print(f"host, ms per step (longest), temperature {temperature:g}:")
            print_rows(
                [
                    {"part": part} | {name: hosts[name][part] for name in hosts}
                    for part in hosts["guided"]
                ]
            )
            figures.append(
                Figure(
                    f"guided_{'greedy' if temperature == 0 else 'drawn'}",
                    f"time per token of {num_requests} guided requests, temperature "
                    f"{temperature:g}, against unguided ones",
                    paired_ratio(took["guided"], took["unguided"]),
                    "×",
                    at_most=on_gpu(bound),
                    rival=f"unguided {statistics.median(took['unguided']):.3g} ms",
                )
            )
    return rows, figures


def judged(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is JSON of the schema, by `jsonschema`."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def validity(options: Any) -> tuple[list[Row], list[Figure]]:
    """Count valid answers of a real model over all schemas."""
    tokenizer = AutoTokenizer.from_pretrained(options.validity)
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    model = AutoModelForCausalLM.from_pretrained(options.validity, dtype=dtype)
    cases = [(kind, schema) for kind, several in SCHEMAS.items() for schema in several]
    asked = [(*cases[at % len(cases)], at) for at in range(options.answers)]
    counts: Counter[tuple[str, str]] = Counter()
    with Engine(
        model.to(options.device).eval(),
        tokenizer=tokenizer,
        max_num_seqs=32,
        max_tokens=2048,
        budget_bytes=4 * GiB,
    ) as engine:
        for start in range(0, len(asked), 200):
            part = asked[start : start + 200]
            prompts = [prompt_of(tokenizer, schema) for _, schema, _ in part]
            params = [
                SamplingParams(
                    seed=seed,
                    max_tokens=ANSWER_TOKENS,
                    structured_outputs=StructuredOutputs(json=schema),
                )
                for _, schema, seed in part
            ]
            for (kind, schema, _), output in zip(
                part, engine.generate(prompts, params), strict=True
            ):
                answer = output.outputs[0]
                outcome = str(answer.finish_reason)
                if outcome == "stop":
                    outcome = "valid" if judged(answer.text, schema) else "invalid"
                    if outcome == "invalid":
                        print("invalid:", json.dumps(schema), repr(answer.text))
                counts[kind, outcome] += 1
            print(f"{start + len(part)} of {len(asked)} answers", flush=True)
    rows = [
        {"schemas": kind, "number": len(SCHEMAS[kind])}
        | {each: counts[kind, each] for each in ("valid", "invalid", "length", "error")}
        for kind in SCHEMAS
    ]
    wrong = sum(count for (_, outcome), count in counts.items() if outcome in ("invalid", "error"))
    cut = sum(count for (_, outcome), count in counts.items() if outcome == "length")
    what = f"of {len(asked)} guided answers over {len(cases)} schemas"
    return rows, [
        Figure("guided_invalid", f"answers that are not of their schema, {what}", wrong, "", 0),
        Figure("guided_cut", f"answers that reach max_tokens, {what}", cut / len(asked), "%", 0.02),
    ]


def prompt_of(tokenizer: Any, schema: dict[str, Any]) -> list[int]:
    """Ask for an answer, as a chat if the model has a template."""
    asked = f"Make up an example of this JSON schema, in one line: {json.dumps(schema)}"
    if not tokenizer.chat_template:
        return list(tokenizer.encode(asked + "\n"))
    chat = [{"role": "user", "content": asked}]
    whole_text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(whole_text, add_special_tokens=False))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    bench = Bench("guided", __doc__)
    bench.option("--validity", metavar="FOLDER", help="count valid answers of the model there")
    bench.option("--answers", type=int, default=NUM_ANSWERS, help="answers for --validity")
    options = bench.parse(argv)
    if options.validity is not None:
        bench.name = "guided_validity"
        return bench.finish(*validity(options))
    if not HAS_GPU and not options.smoke:
        bench.error("timing needs a GPU; --smoke runs a tiny one anywhere")
    return bench.finish(*timed(options))


if __name__ == "__main__":
    sys.exit(main())
