"""Random prompts, their reference outputs, and helpers for streams of an engine."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import torch

from vmkv.serve.engine import Engine
from vmkv.serve.request import RequestHandle, RequestOutput, joined

from .hybrids import model_named
from .tiny_models import VOCABULARY

#: Time limit of a coroutine; only failing tests reach it.
PATIENCE_S = 200


def prompts(count: int, *, shortest: int = 2, longest: int = 30, seed: int = 0) -> list[list[int]]:
    """Random prompts of random lengths."""
    draw = random.Random(seed)
    return [
        [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(shortest, longest))]
        for _ in range(count)
    ]


def reference(prompt: Sequence[int], num_tokens: int = 8, name: str = "llama") -> list[int]:
    """Tokens of transformers after `prompt` alone."""
    return list(_reference(name, tuple(prompt), num_tokens))


@functools.cache
def _reference(name: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    out = model_named(name).generate(ids, max_new_tokens=num_tokens, **options)
    return out[0, len(prompt) :].tolist()


def check_said(
    asked: Sequence[Sequence[int]],
    answers: Sequence[RequestHandle | RequestOutput],
    num_tokens: int = 8,
    name: str = "llama",
) -> None:
    """Check that each sample of an answer is the reference output of its prompt."""
    for prompt, answer in zip(asked, answers, strict=True):
        output = answer if isinstance(answer, RequestOutput) else answer.output()
        for sample in output.outputs:
            assert reference(prompt, num_tokens, name) == list(sample.token_ids)


def finish_all(engine: Engine, *, steps_max: int = 5000) -> None:
    """Run until no request is unfinished."""
    for _ in range(steps_max):
        if not engine.has_unfinished:
            return
        engine.step()
    raise AssertionError(f"requests are unfinished after {steps_max} steps")


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    """The joined outputs of a stream."""
    return joined([output async for output in stream])


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine with a time limit and return its result."""
    return asyncio.run(asyncio.wait_for(main, PATIENCE_S))
