"""Helpers for tests of `vmkv.generate`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from helpers.tiny_models import SERVED_LATELY, VOCABULARY

FAMILIES = (
    *("llama", "mistral", "gemma2", "gemma3", "qwen3", "gpt_oss", "mixtral", "phi3"),
    *("deepseek_v3", *SERVED_LATELY),
)


def random_tokens(count: int, seed: int) -> list[int]:
    """A prompt of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]


def alone(model: Any, prompt: list[int], **options: Any) -> list[int]:
    """Tokens of `model.generate` for one prompt."""
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()


#: Of the range of a token's logits: rounding to bfloat16 stays below, a wrong state does not.
_TOLERANCE = 0.05


def assert_likeliest(model: Any, prompts: list[list[int]], texts: list[list[int]]) -> None:
    """Check that each token after a prompt is the likeliest in float32, but for rounding."""
    plain = copy.deepcopy(model).float()
    vars(plain.model).pop("forward", None)
    for prompt, text in zip(prompts, texts, strict=True):
        assert prompt == text[: len(prompt)]
        ids = torch.tensor([text], device=model.device)
        with torch.no_grad():
            said = plain(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = said.gather(1, ids[0, len(prompt) :, None])[:, 0]
        best, worst = said.max(1).values, said.min(1).values
        assert (best - chosen <= _TOLERANCE * (best - worst)).all()


class Collects(BaseStreamer):
    """A streamer that keeps its input."""

    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.num_ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.num_ends
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        self.num_ends += 1
