"""Reshapes of reshapes in traced layers become one; the values are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.hybrids import HYBRIDS
from helpers.runners import check_compiled

from vmkv.step import graph_passes

Tensor = torch.Tensor


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
    check_compiled(name)
    assert any(counts)
