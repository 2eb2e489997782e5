"""`EnginePlay` with a real model: rows, runner and kernels are real too.

Reads and writes of steps cannot be checked here; the outputs are compared with transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from helpers.engine_play import EnginePlay, Shape, engine_options
from helpers.generate_play import alone
from helpers.pool_play import cost_model
from helpers.tiny_models import tiny_model
from vmkv import SamplingParams
from vmkv.serve.engine import Engine
from vmkv.serve.runner import RunnerOptions

#: Length of the reference output; requests are limited to it.
_LONGEST_ANSWER = 24


@dataclass(frozen=True)
class ModelShape(Shape):
    """A shape whose layers are a model's.

    Attributes:
        name: Model of `helpers.tiny_models`.
        runner: As of `Engine`; the padded steps of "graphs" run uncaptured.
    """

    name: str = "llama"
    runner: str = "eager"


class ModelPlay(EnginePlay):
    """One engine with a real model. All requests are greedy, and the device is never late."""

    shape: ModelShape

    def _make_engine(self) -> tuple[Engine, Any, Any]:
        shape = self.shape
        model = copy.deepcopy(tiny_model(shape.name))  # The engine changes its attention.
        options = engine_options(shape, self.pool)
        if shape.runner == "graphs":
            options["runner_options"] = RunnerOptions(capture=True, show_progress=False)
        engine = Engine(model, runner=shape.runner, **options)
        engine.cache.cost_model = cost_model(shape.alias_pages)
        runner = SimpleNamespace(num_steps=0, mishap=None)

        def count(*_: object) -> None:
            runner.num_steps += 1

        model.register_forward_pre_hook(count)
        return engine, SimpleNamespace(cache=engine.cache), runner

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        priority: int = 0,
        tenant: str | None = None,
    ) -> None:
        params = SamplingParams(
            n=params.n,
            temperature=0,
            max_tokens=min(params.max_tokens or _LONGEST_ANSWER, _LONGEST_ANSWER),
            logits_processors=params.logits_processors,
            prompt_logprobs=params.prompt_logprobs,
        )
        super().add(prompt, params, priority, tenant)

    def _answer(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        said = alone(self.shape.name, tuple(prompt), _LONGEST_ANSWER)[len(prompt) :]
        return said[: params.max_tokens]

    def _check_recorded(self) -> None:
        """Do nothing: the outputs show whether prefixes are right."""
