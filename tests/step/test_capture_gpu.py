"""Generation on a GPU: which steps the model's code runs for, and what a capture leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.dense_rows import skip_unless_served
from helpers.tiny_models import kernel_model

import vmkv
from vmkv.attention import AttentionSpec

pytestmark = pytest.mark.gpu

NEW_TOKENS = 20
PROMPTS = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]


@pytest.fixture
def model() -> Any:
    """A model that kernels which can be captured serve."""
    spec = AttentionSpec("cuda", torch.bfloat16, 4, 2, 64, 64)
    skip_unless_served("flash2", spec)
    return kernel_model()


def _generate(model: Any, **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    outputs = vmkv.generate(model, PROMPTS, budget_bytes=1 << 28, **options)
    assert [len(prompt) + NEW_TOKENS for prompt in PROMPTS] == [len(each) for each in outputs]
    return outputs


def _counted(model: Any, count: list[int]) -> None:
    """Note how many tokens the model's code runs for, each time, without a hook."""
    forward = model.model.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        count.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    model.model.forward = counting


def test_decode_steps_are_replayed(model: Any) -> None:
    """The model's code runs for the prompts and three steps; sampling works before and after."""
    expected = _generate(model)  # It has proven itself.
    count: list[int] = []
    _counted(model, count)
    assert expected == _generate(model)
    assert [sum(map(len, PROMPTS)), 4, 4, 4] == count
    torch.manual_seed(1)
    first = _generate(model, do_sample=True)
    torch.manual_seed(1)
    assert first == _generate(model, do_sample=True)
    assert torch.rand(3, device="cuda").shape == (3,)


def test_whoever_hooks_into_the_model_is_called_in_every_step(model: Any) -> None:
    """A replay runs no Python."""
    _generate(model)
    seen: list[int] = []
    model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    _generate(model)  # It proves itself again, since it is another model now.
    seen.clear()
    _generate(model)
    assert NEW_TOKENS == len(seen)


def test_steps_that_wait_for_the_device_run_eagerly(model: Any) -> None:
    """The proof has seen it: no capture is tried, and torch is as it was."""
    mlp = model.model.layers[1].mlp
    forward = mlp.forward

    def waits(hidden: torch.Tensor) -> torch.Tensor:
        hidden.sum().item()
        return forward(hidden)

    mlp.forward = waits
    _generate(model)
    count: list[int] = []
    _counted(model, count)
    _generate(model)
    assert NEW_TOKENS == len(count)
    torch.manual_seed(1)
    _generate(model, do_sample=True)
    assert torch.cuda.get_sync_debug_mode() == 0
