"""Random engines and random operations on them, for tests and the fuzzer.

Each episode has some operations always and a random selection of others, so that rare histories of
a few kinds of operations happen too.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection
from typing import Any, ClassVar

from helpers.engine_play import MISHAPS, EnginePlay, Shape, wait_for_host
from helpers.model_play import ModelPlay, ModelShape
from helpers.stamp_runner import VOCABULARY
from helpers.tiny_models import SERVED_LATELY, unsupported_because
from vmkv import SamplingParams


def _random_shape(draw: random.Random) -> Shape:
    """A random engine; memory is short in most cases."""
    windows = draw.choice([(None,), (None,), (None, 8), (None, 3), (8,), (20, None), (None, 1)])
    max_num_seqs = draw.choice([1, 2, 2, 3, 5])
    return Shape(
        windows=windows,
        layers_per_group=draw.choice([1, 1, 2]),
        head_dim=draw.choice([32, 32, 24, 16]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw.choice([0, 4, 16, 60]),
        max_num_mixed_tokens=draw.choice([None, None, 2, 7, 30]),
        max_tokens=draw.choice([48, 96, 96]),
        budget_pages=draw.choice([20, 30, 40, 60, 120]) * len(windows),
        host_pages=draw.choice([0, 8, 30, 200]),
        prefix_caching=draw.random() < 0.8,
        deterministic=draw.random() < 0.1,
        swaps=draw.random() < 0.7,
        alias_pages=draw.choice([0, 0, 2, 100]),
        overread_tokens=draw.choice([0, 0, 3, 9]),
        is_late=draw.random() < 0.5,
        watermark_pages=draw.choice([None, None, 0, 10]),
        has_states=draw.random() < 0.4,
        evicts=draw.random() < 0.5,
    )


def _random_prompt(draw: random.Random, play: EnginePlay) -> list[int]:
    """A new prompt, or one with a prefix of earlier prompts and outputs."""
    longest = play.shape.max_tokens - 2
    head: list[int] = []
    if play.said and draw.random() < 0.7:
        said = draw.choice(play.said)
        head = said[: draw.choice([len(said), draw.randint(0, len(said))])]
    most = max(0, longest - len(head))
    tail_tokens = min(most, draw.choice([0, 1, draw.randint(0, 8), draw.randint(0, longest)]))
    tail = [draw.randrange(1, VOCABULARY) for _ in range(tail_tokens)]
    return (head + tail)[:longest] or [1]


def _random_params(draw: random.Random) -> SamplingParams:
    """Random parameters, mostly greedy, so that outputs repeat."""
    max_tokens = draw.choice([1, 2, draw.randint(1, 12), draw.randint(1, 60), None])
    waits = draw.random() < 0.1
    return SamplingParams(
        n=draw.choice([1, 1, 1, 2, 3]),
        temperature=draw.choice([0, 0, 1.0]),
        seed=draw.choice([None, 1, 2]),
        max_tokens=max_tokens,
        min_tokens=draw.choice([0, 0, 1 if max_tokens is None else max_tokens // 2]),
        ignore_eos=draw.random() < 0.6,
        logits_processors=[wait_for_host] if waits else [],
    )


_Operation = Callable[[random.Random, EnginePlay], object]


def _add(draw: random.Random, play: EnginePlay) -> None:
    play.add(_random_prompt(draw, play), _random_params(draw), draw.choice([0, 0, 0, -1, 1]))


def _some_pages(draw: random.Random, play: EnginePlay) -> int:
    return draw.randint(4, play.shape.budget_pages * 3 // 2)


def _guest(draw: random.Random, play: EnginePlay) -> None:
    for _ in range(draw.choice([1, 1, 1, 6])):  # Several in a row leave pending work on the stream.
        _guest_once(draw, play)


def _guest_once(draw: random.Random, play: EnginePlay) -> None:
    pick = draw.randrange(4)
    draw.choice(
        [
            lambda: play.guest_open(_random_prompt(draw, play)),
            lambda: play.guest_append(pick, draw.randint(0, 20)),
            lambda: play.guest_truncate(pick, draw.randint(0, 60)),
            lambda: play.guest_fork(pick, draw.randint(0, 60)),
            lambda: play.guest_swap(pick),
            lambda: play.guest_swap(pick),
            lambda: play.guest_checkpoint(pick),
            lambda: play.guest_checkpoint(pick),
            lambda: play.guest_close(pick),
        ]
    )()


def _trim(draw: random.Random, play: EnginePlay) -> None:
    play.trim(draw.choice([None, draw.randint(0, 20)]))


_OPERATIONS: dict[str, _Operation] = {
    "step": lambda draw, play: play.step(draw.choice([1, 1, 2, 5, 20])),
    "add": _add,
    "cancel": lambda draw, play: play.cancel(draw.randrange(50)),
    "cancel_all": lambda draw, play: play.cancel_all(),
    "drain": lambda draw, play: play.drain(),
    "set_budget": lambda draw, play: play.set_budget(_some_pages(draw, play)),
    "restore_budget": lambda draw, play: play.set_budget(play.shape.budget_pages),
    "trim": _trim,
    "other_append": lambda draw, play: play.other_append(draw.randint(0, 40), draw.random() < 0.4),
    "other_close": lambda draw, play: play.other_close(draw.random() < 0.2),
    "catch_up": lambda draw, play: play.catch_up(draw.randint(1, 20)),
    "guest": _guest,
    "mishap": lambda draw, play: play.mishap(draw.choice(MISHAPS)),
}
#: Weights of operations of every episode, and of those of some episodes.
_ALWAYS = {"step": 30, "add": 14, "drain": 0.5}
_SOMETIMES = {
    "cancel": 2,
    "cancel_all": 0.3,
    "set_budget": 1,
    "restore_budget": 1,
    "trim": 0.7,
    "other_append": 2,
    "other_close": 1.5,
    "catch_up": 2,
    "guest": 3,
    "fault": 1,
    "mishap": 0.4,
}
#: Operations during which no driver call fails on command.
_NO_FAULT = ("fault", "mishap", "drain", "cancel_all", "catch_up")


class RandomPlay:
    """An episode: a play of a random shape, and random operations on it.

    Args:
        draw: Source of all random choices.
        without: Operations to leave out.

    Raises:
        ConfigError, OutOfPagesError: The budget does not hold one token of this shape.
    """

    operations: ClassVar[dict[str, Callable[[random.Random, Any], object]]]
    always: ClassVar[dict[str, float]]  #: Weights of operations of every episode.
    sometimes: ClassVar[dict[str, float]] = {}  #: Weights of optional operations.
    share: ClassVar[float] = 0.5  #: Probability of each optional operation.

    def __init__(self, draw: random.Random, without: Collection[str] = ()):
        self._draw = draw
        self.play = self._make(draw)
        self.shape = self.play.shape
        chosen = {name: much for name, much in self.sometimes.items() if draw.random() < self.share}
        self._weights = {
            name: much for name, much in (self.always | chosen).items() if name not in without
        }

    def _make(self, draw: random.Random) -> Any:
        raise NotImplementedError

    def end(self) -> None:
        """Close everything and check that no memory is left."""
        self.play.close()

    def abandon(self) -> None:
        """Free what is left after a failure."""
        self.play.abandon()

    def operate(self) -> None:
        """Do one random operation."""
        name = self._choose()
        if name == "fault":
            self.play.fault(
                self._draw.choice([1, 2, 3, 5, 8, 13]), is_out_of_memory=self._draw.random() < 0.3
            )
            name = self._choose(_NO_FAULT)
        self.operations[name](self._draw, self.play)

    def _choose(self, without: Collection[str] = ()) -> str:
        weights = {name: much for name, much in self._weights.items() if name not in without}
        return self._draw.choices(list(weights), list(weights.values()))[0]


class RandomEngine(RandomPlay):
    """An episode with one engine over stamped rows."""

    operations, always, sometimes, share = _OPERATIONS, _ALWAYS, _SOMETIMES, 0.35

    def _make(self, draw: random.Random) -> EnginePlay:
        return EnginePlay(_random_shape(draw))


def _add_of_tenant(draw: random.Random, play: EnginePlay) -> None:
    params, priority = _random_params(draw), draw.choice([0, 0, 0, -1, 1])
    play.add(_random_prompt(draw, play), params, priority, draw.choice([None, None, "a", "b"]))


class RandomTiers(RandomEngine):
    """An episode with host memory and files below little device memory."""

    operations = _OPERATIONS | {
        "add": _add_of_tenant,
        "run_files": lambda draw, play: play.run_files(draw.choice([1, 3, 10, 40])),
        "spoil_files": lambda draw, play: play.spoil_files(draw),
        "restart_files": lambda draw, play: play.restart_files(),
        "forget": lambda draw, play: play.forget(),
        "sink": lambda draw, play: play.sink(),
    }
    always = _ALWAYS | {"run_files": 6, "sink": 2}
    sometimes = _SOMETIMES | {"spoil_files": 3, "restart_files": 0.7, "forget": 0.3}

    def _make(self, draw: random.Random) -> EnginePlay:
        shape = dataclasses.replace(
            _random_shape(draw),
            host_pages=draw.choice([12, 30, 60, 200]),
            disk_pages=draw.choice([60, 200, 1000]),
            prefix_caching=True,
            deterministic=False,
        )
        return EnginePlay(shape)


#: Models whose layers keep states.
HYBRIDS = () if unsupported_because("qwen3_next") else ("qwen3_next",)


def _add_scored(draw: random.Random, play: EnginePlay) -> None:
    params = dataclasses.replace(
        _random_params(draw), prompt_logprobs=draw.choice([None, None, None, 0])
    )
    play.add(_random_prompt(draw, play), params, draw.choice([0, 0, 0, -1, 1]))


class RandomModelEngine(RandomEngine):
    """An episode with a real model."""

    operations = _OPERATIONS | {"add": _add_scored}
    names: ClassVar[tuple[str, ...]] = ("llama", "mistral", "gemma3", *SERVED_LATELY, *HYBRIDS)

    def __init__(self, draw: random.Random, without: Collection[str] = ()):
        super().__init__(draw, {*without, "guest", "mishap", "catch_up"})

    def _make(self, draw: random.Random) -> ModelPlay:
        shape = dataclasses.asdict(_random_shape(draw))
        name = draw.choice(self.names)
        # Each layer is a group, with an eighth of the bytes per token of a stamped layer.
        shape |= {"is_late": False, "budget_pages": draw.choice([20, 30, 50, 100]), "name": name}
        shape["runner"] = draw.choice(["eager", "graphs"])
        return ModelPlay(ModelShape(**shape))


class RandomModelTiers(RandomModelEngine):
    """An episode with a real model over host memory and files."""

    operations = RandomTiers.operations | {"add": _add_scored}
    always, sometimes = RandomTiers.always, RandomTiers.sometimes
    names = ("llama", "gemma3", *HYBRIDS)

    def _make(self, draw: random.Random) -> ModelPlay:
        shape = dataclasses.asdict(_random_shape(draw))
        shape |= {"is_late": False, "budget_pages": draw.choice([30, 50, 100])}
        shape |= {"host_pages": draw.choice([30, 200]), "disk_pages": draw.choice([200, 1000])}
        shape |= {"prefix_caching": True, "deterministic": False, "name": draw.choice(self.names)}
        return ModelPlay(ModelShape(**shape))


class RandomHybridEngine(RandomModelEngine):
    """An episode with a real model whose layers keep states."""

    names = HYBRIDS
