"""Random calls of `vmkv.generate` over one cache, for tests and the fuzzer."""

from __future__ import annotations

import random
from collections.abc import Callable

from helpers.generate_play import GeneratePlay, GenerateShape
from helpers.random_engine import HYBRIDS, RandomPlay
from helpers.tiny_models import SERVED_LATELY

_MODELS = ("llama", "mistral", "gemma3", *SERVED_LATELY, *HYBRIDS)


def _random_shape(draw: random.Random) -> GenerateShape:
    return GenerateShape(
        name=draw.choice(_MODELS),
        max_batch_size=draw.choice([1, 2, 3, 6]),
        budget_pages=draw.choice([30, 60, 90, 150, 400]),
        max_num_batched_tokens=draw.choice([7, 64, 400]),
        alias_pages=draw.choice([0, 0, 2]),
    )


def _random_prompt(draw: random.Random, play: GeneratePlay, longest: int) -> list[int]:
    head: list[int] = []
    if play.said and draw.random() < 0.7:
        said = draw.choice(play.said)
        head = said[: draw.choice([len(said), draw.randint(0, len(said))])]
    length = draw.choice([1, draw.randint(1, 12), draw.randint(1, longest)])
    tail = [draw.randrange(3, 100) for _ in range(length)]
    prompt = [*head, *tail][:longest]
    # Answers may have the padding token; a prompt that ends with it would be padded on the right.
    return [*prompt[:-1], prompt[-1] or 3]


def _generate(draw: random.Random, play: GeneratePlay) -> None:
    num_new = draw.choice([1, 2, 5, 20])
    longest = play.shape.max_tokens - num_new
    prompts: list[list[int]] = []
    for _ in range(draw.randint(1, min(4, play.shape.max_batch_size))):
        again = prompts and draw.random() < 0.2
        prompts.append(prompts[-1] if again else _random_prompt(draw, play, longest))
    play.generate(
        prompts,
        num_new,
        prefix_caching=draw.random() < 0.85,
        tenant=draw.choice([None, None, None, "one"]),
    )


_OPERATIONS: dict[str, Callable[[random.Random, GeneratePlay], object]] = {
    "generate": _generate,
    "set_budget": lambda draw, play: play.set_budget(
        draw.randint(4, play.shape.budget_pages * 3 // 2)
    ),
    "restore_budget": lambda draw, play: play.set_budget(play.shape.budget_pages),
    "trim": lambda draw, play: play.trim(draw.choice([None, draw.randint(0, 20)])),
    "other_append": lambda draw, play: play.other_append(draw.randint(0, 40), draw.random() < 0.4),
    "other_close": lambda draw, play: play.other_close(draw.random() < 0.2),
}
_ALWAYS = {"generate": 12.0}
_SOMETIMES = {
    "set_budget": 1,
    "restore_budget": 1,
    "trim": 1,
    "other_append": 3,
    "other_close": 2,
    "fault": 2,
}


class RandomGenerate(RandomPlay):
    """An episode with one `RaggedCache`."""

    operations, always, sometimes = _OPERATIONS, _ALWAYS, _SOMETIMES

    def _make(self, draw: random.Random) -> GeneratePlay:
        return GeneratePlay(_random_shape(draw))
