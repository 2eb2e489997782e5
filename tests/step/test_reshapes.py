"""Reshapes of reshapes in traced layers become one; the values are the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.hybrids import HYBRIDS
from helpers.tiny_models import tiny_model

from vmkv import Engine, SamplingParams
from vmkv.serve.runner import RunnerOptions
from vmkv.step import graph_passes

Tensor = torch.Tensor
COMPILED = RunnerOptions(compile_layers=True, compile_backend="eager", show_progress=False)
PROMPTS = [[5, 9, 13, 7, 30], [8, 2]]


def _to_other_heads(x: Tensor) -> Tensor:
    return x.reshape(1, x.shape[1], -1, 4).reshape(1, x.shape[1], -1)


def _by_a_name(x: Tensor) -> Tensor:
    heads = x.reshape(1, x.shape[1], -1, 4)
    return heads.reshape(heads.size(0), heads.size(1), -1)


def _twice_used(x: Tensor) -> Tensor:
    heads = x.reshape(1, x.shape[1], -1, 4)
    return heads.reshape(1, x.shape[1], -1) + heads.sum()


def _written_to(x: Tensor) -> Tensor:
    heads = x.reshape(1, x.shape[1], -1, 4)
    heads.mul_(2)
    return heads.reshape(1, x.shape[1], -1)


@pytest.mark.parametrize(
    ("layer", "is_one"),
    [(_to_other_heads, True), (_by_a_name, True), (_twice_used, False), (_written_to, False)],
)
def test_only_reshapes_that_nobody_else_reads(
    layer: Callable[[Tensor], Tensor], *, is_one: bool
) -> None:
    counts: list[int] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        counts.append(graph_passes.skip_reshapes(module))
        return module

    heads = torch.rand(1, 5, 2, 20)[..., :8]  # Values of a joint projection: a reshape copies.
    torch._dynamo.reset()
    found = torch.compile(layer, dynamic=True, backend=backend)(heads.clone())
    assert torch.equal(layer(heads), found)
    assert [int(is_one)] == counts


@pytest.mark.parametrize("name", [each for each in HYBRIDS if each == "qwen3_next"])
def test_values_of_gated_deltanet(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Are reshaped once, and the tokens are the same."""
    counts: list[int] = []
    own = graph_passes.skip_reshapes
    monkeypatch.setattr(graph_passes, "skip_reshapes", lambda module: counts.append(own(module)))
    said = []
    for options in ({"runner": "eager"}, {"runner": "graphs", "runner_options": COMPILED}):
        model = copy.deepcopy(tiny_model(name))
        with Engine(model, max_num_seqs=2, max_num_batched_tokens=16, **options) as engine:
            outputs = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=6))
            said.append([each.outputs[0].token_ids for each in outputs])
    assert said[0] == said[1]
    assert any(counts)
