"""Random prompts, their reference outputs, and helpers for streams of an engine."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import torch

from vmkv.serve.request import RequestHandle, RequestOutput, joined

from .tiny_models import VOCABULARY, tiny_model

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
    out = tiny_model(name).generate(ids, max_new_tokens=num_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def check_said(
    asked: Sequence[Sequence[int]],
    answers: Sequence[RequestHandle | RequestOutput],
    num_tokens: int = 8,
    name: str = "llama",
) -> None:
    """Check that each answer is the reference output of its prompt."""
    for prompt, answer in zip(asked, answers, strict=True):
        output = answer if isinstance(answer, RequestOutput) else answer.output()
        assert reference(prompt, num_tokens, name) == list(output.outputs[0].token_ids)


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    """The joined outputs of a stream."""
    return joined([output async for output in stream])


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine with a time limit and return its result."""
    return asyncio.run(asyncio.wait_for(main, PATIENCE_S))
