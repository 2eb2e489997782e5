"""Generation on a GPU: steps that run the model's code, and the state of torch after a capture."""

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
    """A model whose attention uses kernels that can be captured."""
    spec = AttentionSpec("cuda", torch.bfloat16, 4, 2, 64, 64)
    skip_unless_served("flash2", spec)
    return kernel_model()


def _generate(model: Any, **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    outputs = vmkv.generate(model, PROMPTS, budget_bytes=1 << 28, **options)
    assert [len(prompt) + NEW_TOKENS for prompt in PROMPTS] == [len(each) for each in outputs]
    return outputs


def _counted(model: Any, count: list[int]) -> None:
    """Append the number of tokens to `count` whenever the model's code runs; installs no hook."""
    forward = model.model.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        count.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    model.model.forward = counting


def test_decode_steps_are_replayed(model: Any) -> None:
    """The model's code runs for the prompts and three decode steps; sampling still works."""
    expected = _generate(model)  # Proves the model.
    count: list[int] = []
    _counted(model, count)
    assert expected == _generate(model)
    assert [sum(map(len, PROMPTS)), 4, 4, 4] == count
    torch.manual_seed(1)
    first = _generate(model, do_sample=True)
    torch.manual_seed(1)
    assert first == _generate(model, do_sample=True)
    assert torch.rand(3, device="cuda").shape == (3,)


def test_a_model_with_a_hook_is_not_captured(model: Any) -> None:
    """A replay runs no Python, so the hook would not be called."""
    _generate(model)
    seen: list[int] = []
    model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    _generate(model)  # The hook changes the model, so it is proven again.
    seen.clear()
    _generate(model)
    assert NEW_TOKENS == len(seen)


def test_steps_that_wait_for_the_device_run_eagerly(model: Any) -> None:
    """The proof detects the wait: no capture is tried, and torch's sync debug mode is unchanged."""
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
