"""Helpers for tests of `vmkv.generate`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

import vmkv
from helpers.tiny_models import SERVED_LATELY, VOCABULARY
from vmkv.serve.runner import RunnerOptions
from vmkv.units import MiB

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


def check_generate(model: Any, prompts: list[list[int]], num_new: int = 8, **options: Any) -> None:
    """Check `vmkv.generate` in one call: each prompt gets its tokens as alone."""
    greedy = {"max_new_tokens": num_new, "do_sample": False}
    expected = [alone(model, prompt, **greedy) for prompt in prompts]
    assert expected == vmkv.generate(model, prompts, budget_bytes=64 * MiB, **greedy, **options)


def check_padded_engine(
    model: Any, prompts: list[list[int]], num_new: int = 8, *, is_mixed: bool | None = None
) -> None:
    """Check an engine with steps as for graphs: padded decode steps, and steps of tiles.

    With `is_mixed`, check whether steps with prompts are captured beside decode steps.
    """
    expected = [alone(model, prompt, max_new_tokens=num_new, do_sample=False) for prompt in prompts]
    how = RunnerOptions(capture=True, show_progress=False)
    sizes = {"max_num_seqs": 4, "budget_bytes": 64 * MiB}
    with vmkv.Engine(model, runner="graphs", runner_options=how, **sizes) as engine:
        stepper = engine._runner.stepper
        assert stepper.decode_graphs is not None
        assert is_mixed is None or is_mixed == (stepper.mixed_graphs is not None)
        outputs = engine.generate(prompts, vmkv.SamplingParams(temperature=0, max_tokens=num_new))
    said = [[*prompt, *o.outputs[0].token_ids] for prompt, o in zip(prompts, outputs, strict=True)]
    assert expected == said


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
