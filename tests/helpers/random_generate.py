"""Random calls of `vmkv.generate` over one cache: what the fuzzer plays beside the engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

from helpers.generate_play import GeneratePlay, GenerateShape

_MODELS = ("llama", "mistral", "gemma3")


def _random_shape(draw: random.Random) -> GenerateShape:
    return GenerateShape(
        name=draw.choice(_MODELS),
        max_batch_size=draw.choice([1, 2, 3, 6]),
        budget_pages=draw.choice([30, 60, 90, 150, 400]),
        max_num_batched_tokens=draw.choice([7, 64, 400]),
        alias_pages=draw.choice([0, 0, 2]),
        protects_shared=draw.random() < 0.3,
        keep_free_pages=draw.choice([None, None, 0, 4]),
    )


def _random_prompt(draw: random.Random, play: GeneratePlay, longest: int) -> list[int]:
    head: list[int] = []
    if play.said and draw.random() < 0.7:
        said = draw.choice(play.said)
        head = said[: draw.choice([len(said), draw.randint(0, len(said))])]
    length = draw.choice([1, draw.randint(1, 12), draw.randint(1, longest)])
    tail = [draw.randrange(3, 100) for _ in range(length)]
    return [*head, *tail][:longest]


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


class RandomGenerate:
    """An episode. Args and what is raised: as of `RandomEngine`."""

    def __init__(self, draw: random.Random, without: Collection[str] = ()):
        self._draw = draw
        self.shape = _random_shape(draw)
        chosen = {name: much for name, much in _SOMETIMES.items() if draw.random() < 0.5}
        self._weights = {
            name: much for name, much in (_ALWAYS | chosen).items() if name not in without
        }
        self.play = GeneratePlay(self.shape)

    @property
    def num_steps(self) -> int:
        """Passes through the model so far."""
        return self.play.num_steps

    def end(self) -> None:
        """Close everything; nothing may be left."""
        self.play.close()

    def operate(self) -> None:
        """Do one thing."""
        weights = self._weights
        [name] = self._draw.choices(list(weights), list(weights.values()))
        if name == "fault":
            self.play.fault(
                self._draw.choice([1, 2, 3, 5, 8, 13]), is_out_of_memory=self._draw.random() < 0.3
            )
            weights = {name: much for name, much in weights.items() if name != "fault"}
            [name] = self._draw.choices(list(weights), list(weights.values()))
        _OPERATIONS[name](self._draw, self.play)
