"""Multiple choice over HTTP, as lm-eval asks for it, agrees with transformers' own model."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import httpx
import pytest
import torch
from helpers.serving import serving

from vmkv import Engine
from vmkv.serve.async_engine import AsyncEngine
from vmkv.serve.server import ServerOptions, create_app
from vmkv.units import MiB

pytestmark = [pytest.mark.real_weights, pytest.mark.slow]

NUM_QUESTIONS, BATCH = 200, 40
COLOURS = ("red", "green", "blue", "yellow")
THINGS = {
    "Paris": "France",
    "Rome": "Italy",
    "Madrid": "Spain",
    "Berlin": "Germany",
    "Tokyo": "Japan",
    "Cairo": "Egypt",
    "Athens": "Greece",
    "Lima": "Peru",
}


def questions(seed: int) -> list[tuple[str, list[str], int]]:
    """Questions with three continuations each, and which of them is right."""
    draw = random.Random(seed)
    made = []
    for _ in range(NUM_QUESTIONS):
        if draw.random() < 0.5:
            one, other = draw.randint(2, 40), draw.randint(2, 40)
            right = one + other
            choices = [right, *draw.sample([right + off for off in (-10, -2, -1, 1, 3, 10)], 2)]
            context, texts = f"{one} + {other} =", [f" {each}" for each in choices]
        else:
            city = draw.choice(list(THINGS))
            wrong = draw.sample([each for each in THINGS.values() if each != THINGS[city]], 2)
            context = f"{draw.choice(COLOURS)} bus from {city}, in the country of"
            texts = [f" {each}" for each in (THINGS[city], *wrong)]
        order = draw.sample(range(3), 3)
        made.append((context, [texts[at] for at in order], order.index(0)))
    return made


def test_choices_and_log_likelihoods_are_transformers(loaded: Any) -> None:
    """The same accuracy in 200 questions; each log-likelihood within 1e-3, and greedy alike."""
    tokenizer = loaded.tokenizer
    asked = [
        (tokenizer(context)["input_ids"], tokenizer(context + text)["input_ids"])
        for context, texts, _ in questions(7)
        for text in texts
    ]
    starts = [len(context) for context, _ in asked]
    assert all(ids[: len(context)] == context for context, ids in asked)
    by_length = defaultdict(list)
    for at, (_, ids) in enumerate(asked):
        by_length[len(ids)].append(at)
    expected: dict[int, tuple[float, bool]] = {}
    plain = loaded.load()
    for indices in by_length.values():
        for begin in range(0, len(indices), BATCH):
            its = indices[begin : begin + BATCH]
            with torch.no_grad():
                logits = plain(torch.tensor([asked[at][1] for at in its])).logits
            for at, rows in zip(its, logits.float().log_softmax(-1), strict=True):
                ids, start = torch.tensor(asked[at][1]), starts[at]
                told = rows[start - 1 : -1].gather(1, ids[start:, None])
                is_greedy = bool((rows[start - 1 : -1].argmax(-1) == ids[start:]).all())
                expected[at] = float(told.sum()), is_greedy
    found: dict[int, tuple[float, bool]] = {}
    engine = Engine(loaded.model, tokenizer=tokenizer, max_tokens=128, budget_bytes=256 * MiB)
    app = create_app(AsyncEngine(engine), tokenizer, ServerOptions("smollm2", 128))
    with serving(app) as (url, _), httpx.Client(base_url=url, timeout=240) as client:
        for begin in range(0, len(asked), BATCH):
            its = range(begin, min(begin + BATCH, len(asked)))
            body = {"model": "smollm2", "prompt": [asked[at][1] for at in its], "seed": 1234}
            body |= {"temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
            answer = client.post("/v1/completions", json=body)
            assert 200 == answer.status_code, answer.text
            choices = sorted(answer.json()["choices"], key=lambda each: each["index"])
            for at, choice in zip(its, choices, strict=True):
                told = choice["logprobs"]["token_logprobs"][starts[at] : -1]
                top = choice["logprobs"]["top_logprobs"][starts[at] : -1]
                found[at] = sum(told), told == [max(each.values()) for each in top]
    assert max(abs(found[at][0] - expected[at][0]) for at in expected) < 1e-3
    assert [each[1] for _, each in sorted(expected.items())] == [
        each[1] for _, each in sorted(found.items())
    ]
    rights = [
        [
            max(range(3), key=lambda at, question=question: told[3 * question + at][0]) == right
            for question, (_, _, right) in enumerate(questions(7))
        ]
        for told in (expected, found)
    ]
    assert rights[0] == rights[1]
    assert 0.5 < sum(rights[0]) / NUM_QUESTIONS < 1, "the questions tell nothing"
    print(f"accuracy {sum(rights[0]) / NUM_QUESTIONS}")
