"""Random operations on several busy engines over one small pool, with checks of their outputs.

Every request fits the pool alone, so every request that is not cancelled must finish, with the
tokens that it gets from an engine alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from helpers.engine_play import Shape, stamped_engine
from helpers.pool_play import PoolPlay
from helpers.random_engine import RandomPlay
from helpers.scheduler_books import check_scheduler
from helpers.stamp_runner import VOCABULARY, answer
from vmkv import KVCache, SamplingParams
from vmkv.errors import ConfigError
from vmkv.serve.engine import Engine
from vmkv.serve.request import FinishReason, RequestHandle

#: Bound of steps per token of one engine, including waits for other engines.
_STEPS_PER_TOKEN_MAX = 300


@dataclass
class Busy:
    """An engine and its stream."""

    engine: Engine
    stream: int


class EnginesPlay(PoolPlay):
    """Several engines over one pool.

    Args:
        draw: Source of all random choices.
        num_engines: Number of engines.

    Attributes:
        num_finished: Requests that finished with the right tokens.
        num_preemptions: Number of their preemptions.
    """

    def __init__(self, draw: random.Random, num_engines: int):
        self._draw, self.shape = draw, f"{num_engines} engines over one pool"
        super().__init__(
            draw.choice([14, 20, 30]),
            draw.choice([0, 8]),
            is_late=draw.random() < 0.5,
            evicts=draw.random() < 0.5,
        )
        self._engines: list[Busy] = []
        self._asked: list[tuple[Busy, RequestHandle]] = []
        self.num_finished = self.num_preemptions = self.num_steps = 0
        for stream in range(1, num_engines + 1):
            self._engines.append(Busy(self._make_engine(), stream))

    def _make_engine(self) -> Engine:
        draw = self._draw
        swaps, is_alike = draw.random() < 0.5, draw.random() < 0.7
        shape = Shape(
            head_dim=32 if is_alike else 64,
            max_num_seqs=draw.choice([1, 2, 4]),
            max_num_batched_tokens=draw.choice([8, 16, 64]),
            max_num_mixed_tokens=draw.choice([None, 6]),
            prefix_caching=draw.random() < 0.7,
            swaps=swaps,
            has_states=draw.random() < 0.5,
        )
        return stamped_engine(shape, self.pool, self.device)[0]

    # ---- actions --------------------------------------------------------------------------

    def operate(self) -> None:
        """Do one random operation."""
        draw = self._draw
        busy = draw.choice(self._engines)
        name = draw.choices(["step", "add", "cancel", "drain"], [60, 25, 3, 0.3])[0]
        if name == "step":
            self.step(busy, draw.choice([1, 1, 2, 5, 20]))
        elif name == "add":
            self.add(busy)
        elif name == "cancel" and self._asked:
            owner, handle = draw.choice(self._asked)
            with self._doing(f"cancel {handle}", owner.stream):
                handle.cancel()
        elif name == "drain":
            self.drain(busy)

    def add(self, busy: Busy) -> None:
        """Add a request that fits the pool alone."""
        draw = self._draw
        length = draw.choice([draw.randint(1, 8), draw.randint(1, 90)])
        prompt = [draw.randrange(1, VOCABULARY) for _ in range(length)]
        if draw.random() < 0.3:
            prompt = [1] * length  # Shares a prefix with other prompts.
        params = SamplingParams(
            n=draw.choice([1, 1, 1, 2]),
            temperature=0,
            max_tokens=draw.choice([1, draw.randint(1, 20), draw.randint(1, 60)]),
            ignore_eos=draw.random() < 0.7,
        )
        if len(self._asked) >= 12:
            return
        with self._doing(f"add {length} {params.max_tokens}", busy.stream):
            try:
                handle = busy.engine.add(prompt, params, draw.choice([0, 0, 0, -1, 1]))
            except ConfigError:
                return  # It does not fit the pool alone.
            self._asked.append((busy, handle))

    def step(self, busy: Busy, num_steps: int = 1) -> None:
        """Run steps of one engine."""
        for _ in range(num_steps):
            with self._doing(f"step of engine {busy.stream}", busy.stream):
                self.num_steps += busy.engine.has_unfinished
                busy.engine.step()

    def drain(self, busy: Busy) -> None:
        """Run one engine until no work is left, without steps of the others."""
        num_tokens = sum(
            len(each.prompt_token_ids) + (each.params.max_tokens or 0)
            for owner, handle in self._asked
            if owner is busy
            for each in handle.requests
        )
        for _ in range(100 + _STEPS_PER_TOKEN_MAX * num_tokens):
            if not busy.engine.has_unfinished:
                return
            self.step(busy)
        raise AssertionError(f"the engine does not come to an end: {busy.engine!r}")

    def drain_all(self) -> None:
        """Run all engines in turn until no work is left."""
        for _ in range(20_000):
            if not any(each.engine.has_unfinished for each in self._engines):
                return
            for each in self._engines:
                self.step(each, self._draw.choice([1, 1, 3]))
        raise AssertionError(f"the engines do not come to an end: {self._engines}")

    # ---- checks ---------------------------------------------------------------------------

    def check(self) -> None:
        """Check the books and the finished requests."""
        super().check()
        for busy in self._engines:
            check_scheduler(busy.engine._scheduler)
            busy.engine.cache.check()
        for each in [each for each in self._asked if each[1].is_finished]:
            self._asked.remove(each)
            for request in each[1].requests:
                self._check_outcome(request)

    def _check_outcome(self, request: Any) -> None:
        said, params = request.output_token_ids, request.params
        wanted = answer(request.prompt_token_ids, params, params.max_tokens or 0)
        if request.finish_reason is FinishReason.CANCELLED:
            assert wanted[: len(said)] == said
            return
        assert request.finish_reason is not FinishReason.ERROR, f"failed: {request.error}"
        assert wanted == said
        self.num_finished += 1
        self.num_preemptions += request.num_preemptions

    def _caches(self) -> Iterator[KVCache]:
        yield from super()._caches()
        yield from (each.engine.cache for each in getattr(self, "_engines", ()))

    def close(self) -> None:
        """Close everything and check that no memory is left."""
        self.drain_all()
        assert not self._asked
        for busy in self._engines:
            busy.engine.close()
        self._engines.clear()
        super().close()


class RandomEngines(RandomPlay):
    """An episode with two or three engines over one pool."""

    operations: ClassVar = {"operate": lambda draw, play: play.operate()}
    always: ClassVar = {"operate": 1.0}

    def _make(self, draw: random.Random) -> EnginesPlay:
        return EnginesPlay(draw, draw.choice([2, 3]))
